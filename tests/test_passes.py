"""Graph passes: on and off they give the same bits, and what lies just outside their conditions is left alone."""
import numpy as np
import pytest
from fake_model import FakeModel

from ggml_py import cli
from ggml_py.backends.cpu import BINDERS, CPUBackend
from ggml_py.errors import UserError
from ggml_py.graph import Graph, Tensor
from ggml_py.model import Model
from ggml_py.ops import OPS
from ggml_py.passes import PASSES, fuse, switched_off
from ggml_py.program import Arenas, Program
from ggml_py.quant import tile
from ggml_py.quant.quantize import quantize
from ggml_py.testing import assert_bitwise_equal
from tiny_models import write_model

N, K, M = 3, 288, 64
CPU = CPUBackend()


def leaf(name, dtype, array, shape=None):
    return Tensor(name, dtype, shape or array.shape, device="cpu", storage=(CPU.upload(array), 0))


def matrix(name, type_="Q8_0", n_cols=K):
    w = np.random.default_rng(len(name)).standard_normal((M, n_cols)).astype(np.float32)
    raw = w.view(np.uint8) if type_ == "F32" else quantize(w, type_).reshape(M, -1)
    return leaf(name, type_, tile.pack(raw, type_, M, n_cols), (M, n_cols))


def vector(name, n=K):
    return leaf(name, "f32", np.linspace(-2, 2, n, dtype=np.float32))


def start():
    g = Graph()
    return g, g.input("x", "f32", (N, K)), g.input("y", "f32", (N, K))


def norm(g, x):
    return g.rms_norm(x, vector("norm.weight"), eps=1e-5, name="norm")


def normed():
    g, x, _ = start()
    h = norm(g, x)
    g.outputs = [g.mul_mat(matrix("a"), h, name="a"), g.mul_mat(matrix("bb", "Q4_1"), h, name="b")]
    return g


def gated():
    g, x, y = start()
    g.outputs = [g.mul_mat(matrix("down"), g.swiglu(x, y, name="swiglu"), name="down")]
    return g


def both():
    """As in a layer: the gated product of two products of a norm."""
    g, x, y = start()
    h = norm(g, x)
    gate, up = (g.mul_mat(matrix(name), h, name=name) for name in ("gate", "up"))
    g.outputs = [g.mul_mat(matrix("down", n_cols=M), g.swiglu(gate, up, name="swiglu"), name="down"), g.add(x, y)]
    return g


def ops(g):
    return [node.op for node in g.live()]


def run(g, no_fuse=()):
    """The outputs, and the ops that ran, but for copies between devices."""
    rng = np.random.default_rng(5)
    x = {name: rng.standard_normal((N, K)).astype(np.float32) for name in "xy"}
    x["x"][1] *= np.float32(2.0**-120)
    x["x"][2, 7] = np.inf
    arenas = Arenas({"cpu": CPU, "other": CPUBackend(device="other")})
    program = Program(g, arenas, no_fuse)
    return program.run({name: x[name] for name in g.inputs}), [node.op for node in program.nodes if node.op != "cpy"]


@pytest.mark.parametrize("build, fused", [
    (normed, ["rms_norm_act", "mul_mat", "mul_mat"]),
    (gated, ["swiglu_act", "mul_mat"]),
    (both, ["rms_norm_act", "mul_mat", "mul_mat", "swiglu_act", "mul_mat", "add"]),
])
def test_fused_and_unfused_give_the_same_bits(build, fused):
    g, plain = build(), build()
    (results, used), (expected, separate) = run(g), run(plain, "all")
    assert used == fused and not set(PASSES) & set(separate)
    for found, wanted in zip(results, expected, strict=True):
        assert_bitwise_equal(found, wanted, build.__name__)


def test_a_fused_node_remembers_what_it_replaces():
    g = both()
    fuse(g)
    assert {node.name: node.replaces for node in g.live()} == {
        "norm-act": ("norm", "norm-act"), "gate": (), "up": (), "swiglu-act": ("swiglu", "swiglu-act"), "down": (), "add-7": ()}


def also_a_float_product():
    g = normed()
    g.outputs.append(g.mul_mat(matrix("float", "F32"), g.nodes[0]))
    return g


def also_an_output():
    g = gated()
    g.outputs.append(g.nodes[0])
    return g


def norm_is_an_output():
    g = normed()
    g.outputs.append(g.nodes[0])
    return g


def float_weights():
    g, x, y = start()
    g.outputs = [g.mul_mat(matrix("a", "F32"), norm(g, x)), g.mul_mat(matrix("b", "F32"), g.swiglu(x, y))]
    return g


def norm_of_heads():
    """A weight shorter than the row: the fused op takes whole rows."""
    g, x, _ = start()
    g.outputs = [g.mul_mat(matrix("a"), g.rms_norm(x, vector("norm.weight", 32), eps=1e-5))]
    return g


def two_devices():
    g, x, y = start()
    h = g.swiglu(x, y)
    g.device = "other"
    w = matrix("a")
    w.device = "other"
    g.outputs = [g.mul_mat(w, h)]
    return g


def operand_written_between():
    """The cache that the norm read is written before the norm is quantized; where it is written first, fusing is right."""
    g, x, y = start()
    cache = leaf("cache", "f32", np.ones((N, K), np.float32))
    rows = leaf("rows", "i64", np.arange(N))
    h = norm(g, cache)
    written = g.set_rows(cache, x, rows, name="written")
    g.outputs = [g.mul_mat(matrix("a"), h), g.add(written, y)]
    return g


@pytest.mark.parametrize("build", [also_a_float_product, also_an_output, norm_is_an_output, float_weights, norm_of_heads, two_devices, operand_written_between])
def test_left_alone(build):
    g, plain = build(), build()
    before = ops(g)
    (results, used), (expected, _) = run(g), run(plain, "all")
    assert used == before
    for found, wanted in zip(results, expected, strict=True):
        assert_bitwise_equal(found, wanted, build.__name__)


def test_a_write_before_or_elsewhere_does_not_matter():
    g, x, y = start()
    rows = leaf("rows", "i64", np.arange(N))
    cache, other = (leaf(name, "f32", np.ones((N, K), np.float32)) for name in ("cache", "other"))
    h = norm(g, g.set_rows(cache, x, rows))
    g.set_rows(other, y, rows)
    g.outputs = [g.mul_mat(matrix("a"), h)]
    fuse(g)
    assert ops(g) == ["set_rows", "set_rows", "rms_norm_act", "mul_mat"]


def test_dead_readers_do_not_matter():
    g = normed()
    g.add(g.nodes[0], g.nodes[0])
    fuse(g)
    assert ops(g)[0] == "rms_norm_act"


def test_passes_are_of_the_op_table():
    for each in PASSES.values():
        assert {each.name, each.producer, each.consumer} <= set(OPS) & set(BINDERS)
        assert OPS[each.name].operands == OPS[each.producer].operands and OPS[each.name].params == OPS[each.producer].params


# Switched off by name

def test_each_pass_is_switched_off_alone():
    assert switched_off(()) == frozenset() and switched_off("all") == switched_off(["all"]) == frozenset(PASSES)
    for name in PASSES:
        g = both()
        fuse(g, (name,))
        assert set(ops(g)) & set(PASSES) == set(PASSES) - {name}


@pytest.mark.parametrize("arch, types", [("llama", ("Q8_0",)), ("qwen3", ("Q4_1", "Q8_0", "F16", "Q5_0")), ("qwen2", ("Q8_0", "Q5_1", "Q4_0"))])
def test_models(arch, types, tmp_path):
    """Prompts and single tokens, with and without logits, whatever is fused."""
    tokens = np.random.default_rng(1).integers(0, 70, 40).astype(np.int32)
    with Model.load(write_model(tmp_path / "m.gguf", arch, types), device="cpu") as model:
        def logits(no_fuse):
            with model.new_context(n_ctx=64, no_fuse=no_fuse) as context:
                first = context.decode(tokens[:30], logits="all")
                context.decode(tokens[30:39], logits="none")
                result = np.concatenate([first, context.decode(tokens[39:])])
                return result, {node.op for program in context.programs.values() for node in program.nodes}
        expected, plain = logits("all")
        assert not plain & set(PASSES)
        for no_fuse in [(), *PASSES]:
            found, used = logits(no_fuse)
            assert_bitwise_equal(found, expected, f"{arch} without {no_fuse or 'nothing'}")
            assert used & set(PASSES) == set(PASSES) - switched_off(no_fuse)


def test_unknown_passes_are_named(tmp_path, capsys):
    with Model.load(write_model(tmp_path / "m.gguf"), device="cpu") as model:
        with pytest.raises(UserError) as error:
            model.new_context(no_fuse=["swiglu_act", "swigl"])
    assert str(error.value) == "no_fuse: 'swigl' is no graph pass; allowed: rms_norm_act, swiglu_act, all"
    assert cli.execute(["run", "-m", "x", "-p", "x", "--no-fuse", "rms_norm_act,swigl"]) == 2
    assert "argument --no-fuse: 'swigl' is no graph pass; allowed: rms_norm_act, swiglu_act, all" in capsys.readouterr().err


@pytest.mark.parametrize("option, no_fuse", [([], ()), (["--no-fuse", "all"], ("all",)), (["--no-fuse", "swiglu_act,rms_norm_act"], ("swiglu_act", "rms_norm_act"))])
def test_commands_hand_the_option_on(option, no_fuse, tmp_path):
    model, asked = FakeModel(), []
    new_context = model.new_context
    model.new_context = lambda **settings: asked.append(settings["no_fuse"]) or new_context(**settings)
    path = write_model(tmp_path / "m.gguf")
    (tmp_path / "text").write_text("a text of a few words")
    np.save(tmp_path / "tokens.npy", np.arange(4))
    for command in (["perplexity", "-f", tmp_path / "text", "-c", 8], ["logits", "--tokens", tmp_path / "tokens.npy", "-o", tmp_path / "out.npy"],
                    ["run", "-p", "x", "-n", 1]):
        assert cli.execute([*map(str, command), "-m", str(path), *option], lambda path, device: model) == 0
    assert asked == [no_fuse] * 3
