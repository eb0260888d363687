"""Graph passes: on and off they give the same bits, and what lies just outside their conditions is left alone."""
import random
from importlib import import_module
from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest
from fake_model import FakeModel
from hypothesis import given, settings, strategies as st

from ggml_py import cli
from ggml_py.backends.cpu import CPUBackend
from ggml_py.errors import UserError
from ggml_py.graph import Graph, Tensor
from ggml_py.model import Model
from ggml_py.ops import GLU, MOST_NORMED, OPS
from ggml_py.passes import PASSES, Match, fuse, switched_off
from ggml_py.program import Arenas, Program
from ggml_py.quant import tile
from ggml_py.quant.quantize import quantize
from ggml_py.testing import assert_bitwise_equal
from tiny_models import write_model

N, K, M = 3, 288, 64
CPU = CPUBackend()


def leaf(name, dtype, array, shape=None):
    return Tensor(name, dtype, shape or array.shape, device="cpu", storage=(CPU.upload(array), 0))


def matrix(name, type_="Q8_0", n_cols=K, n_rows=M):
    w = np.random.default_rng(len(name)).standard_normal((n_rows, n_cols)).astype(np.float32)
    raw = w.view(np.uint8) if type_ == "F32" else quantize(w, type_).reshape(n_rows, -1)
    return leaf(name, type_, tile.pack(raw, type_, n_rows, n_cols), (n_rows, n_cols))


def vector(name, n=K):
    return leaf(name, "f32", np.linspace(-2, 2, n, dtype=np.float32))


def start(n=N):
    g = Graph()
    return g, g.input("x", "f32", (n, K)), g.input("y", "f32", (n, K))


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
    """Two gated products of a norm, the second one of sums."""
    g, x, y = start()
    h = norm(g, x)
    gate, up = (g.mul_mat(matrix(name), h, name=name) for name in ("gate", "up"))
    g.outputs = [g.mul_mat(matrix("down", n_cols=M), g.swiglu(gate, g.add(up, up), name="swiglu"), name="down"), g.add(x, y)]
    return g


def layer(n=N):
    """As in a model: the second sum is of the first one."""
    g, x, y = start(n)
    x = g.add(x, y, name="inp")
    h = norm(g, x)
    gate, up = (g.mul_mat(matrix(name), h, name=name) for name in ("gate", "up"))
    h = g.mul_mat(matrix("down", n_cols=M, n_rows=K), g.swiglu(gate, up, name="swiglu"), name="down")
    x = g.add(x, h, name="out")
    g.outputs = [g.mul_mat(matrix("head"), norm(g, x), name="head")]
    return g


def residual(*readers):
    """The norm of a sum, read by products with weights of the given types; the sum is read later."""
    g, x, y = start()
    total = g.add(x, y, name="total")
    h = norm(g, total)
    g.outputs = [*(g.mul_mat(matrix(f"w{i}", type_), h) for i, type_ in enumerate(readers)), g.mul(total, x)]
    return g


def residual_of_heads():
    """Runs shorter than the row: only floats are normed so."""
    g, x, y = start()
    h = g.rms_norm(g.add(x, y), vector("norm.weight", 32), eps=1e-5)
    g.outputs = [g.mul_mat(matrix("a"), h)]
    return g


def product_of_later(g, x, name="a"):
    """Of activations that are quantized where the product stands."""
    return g.apply("mul_mat", matrix(name), g.quantize(x))


def norm_read_before_it_is_quantized(*readers):
    """readers: (graph, sum, norm) -> what reads either one before."""
    g, x, y = start()
    total = g.add(x, y, name="total")
    h = norm(g, total)
    g.outputs = [*(read(g, total, h) for read in readers), product_of_later(g, h), product_of_later(g, h, "bb"), g.mul(h, total)]
    return g


def norm_and_sum_are_outputs():
    g = residual("Q8_0")
    g.outputs += g.nodes[:2]
    return g


def norm_of_a_made_weight():
    """Kernels that quantize read the weight before those ahead of them have ended."""
    g, x, y = start()
    w = norm(g, vector("weight"))
    h = g.rms_norm(g.add(x, y), w, eps=1e-5)
    g.outputs = [g.mul_mat(matrix("a", "F32"), h), g.mul_mat(matrix("a"), h)]
    return g


def norm_quantized_on_another_device():
    g, x, y = start()
    h = norm(g, g.add(x, y))
    g.device = "other"
    w = matrix("a")
    w.device = "other"
    g.outputs = [g.mul_mat(w, h), h]
    return g


def sum_is_an_output():
    g = residual("Q8_0")
    g.outputs.insert(0, g.nodes[0])
    return g


def sum_has_two_norms():
    """The second norm reads what the first one gives."""
    g = residual("Q8_0")
    g.outputs.append(g.mul_mat(matrix("a"), norm(g, g.nodes[0])))
    return g


def products(g, x, types=("Q8_0", "Q4_1"), biased=(False, False)):
    """Of one x, with a weight of each type."""
    made = [g.mul_mat(matrix(f"{'ab'[i]}{type_}", type_), x, name="gu"[i]) for i, type_ in enumerate(types)]
    return [g.add(y, vector(f"{y.name} bias", M)) if bias else y for y, bias in zip(made, biased)]


def glu(op="swiglu", types=("Q8_0", "Q4_1"), biased=(False, False)):
    g, x, _ = start()
    g.outputs = [g.apply(op, *products(g, x, types, biased), name="glu")]
    return g


def sum_read_before_the_products():
    """Behind the norm, but before the last of the products that it would be made with."""
    g, x, y = start(1)
    total = g.add(x, y)
    h = norm(g, total)
    gate = g.mul_mat(matrix("gate"), h)
    doubled = g.scale(total, factor=2.0)
    g.outputs = [g.geglu(gate, g.mul_mat(matrix("up"), h)), g.add(doubled, doubled)]
    return g


def product_with_itself():
    g, x, _ = start()
    gate, _ = products(g, x, ("F32", "F32"))
    g.outputs = [g.swiglu(gate, gate, name="square")]
    return g


CELLS = np.array([0, 3, 5])


def q_as_it_is(g, x, y):
    return x, *(g.mul_mat(matrix(name, "F32", n_rows=96), y, name=name) for name in "kv")


def attention(types=("f16", "f16"), neox=(True, True), rows_of_v="rows", v_first=False, norms=(None, None), indirect=False,
              between=lambda g, q, k, cache: [], qkv=q_as_it_is, cells=CELLS):
    """Nine heads of Q and three of K and V, put into some of eight cells. norms: eps of those of Q and K. between: (graph, rotated Q and K, cache of K) -> outputs, made after K is written
    and before V is. qkv: (graph, x, y) -> Q, K, V."""
    g, x, y = start(len(cells))
    x, k, v = qkv(g, x, y)
    pos, seq = leaf("pos", "i32", cells.astype(np.int32)), leaf("seq", "i32", np.zeros(len(cells), np.int32))
    rows = {name: leaf(name, "i64", cells) for name in ("rows", "other rows")}
    present = np.isin(np.arange(8), cells).astype(np.uint8)[None]
    table = leaf("table", "f32", np.random.default_rng(2).uniform(-1, 1, (8, 12, 2)).astype(np.float32))
    cache_k, cache_v = (leaf(f"cache {type_}", type_, np.zeros((8, {"f32": 384, "f16": 192, "q8_0": 102}[type_]), np.uint8), (8, 96)) for type_ in types)
    x, k = (h if eps is None else g.rms_norm(h, vector(f"{name}_norm", 32), eps=eps, name=f"{name}_normed") for name, h, eps in zip("qk", (x, k), norms))
    q = g.rope(x, pos, table, n_head=9, neox=neox[0], name="q")
    rotated = g.rope(k, pos, table, n_head=3, neox=neox[1], name="rotated k")
    if indirect:
        dst = leaf("dst", "i64", np.array([[CPU.address(cache) + cell * cache.storage[0].nbytes // 8 for cell in cells] for cache in (cache_v, cache_k)]))
    write_v = lambda: (g.cpy_rows_indirect(cache_v, v, dst, slot=0, name="cached v") if indirect else
                       g.set_rows(cache_v, v, rows[rows_of_v], name="cached v"))
    if v_first:
        cached_v = write_v()
    cached_k = (g.cpy_rows_indirect(cache_k, rotated, dst, slot=1, name="cached k") if indirect else
                g.set_rows(cache_k, rotated, rows["rows"], name="cached k"))
    others = between(g, q, rotated, cache_k)
    if not v_first:
        cached_v = write_v()
    a = g.flash_attn_ext(q, cached_k, cached_v, seq, pos, leaf("present", "u8", present), n_head=9, n_head_kv=3, scale=0.2, name="attention")
    g.outputs = [a, *others]
    return g


def three_products(weights=("Q8_0", "Q4_1", "Q5_0"), biased=(False, False, False)):
    """Q, K and V as an attention begins with them, by weights of the given types."""
    def qkv(g, x, y):
        sizes = {"q": K, "kk": 96, "vvv": 96}
        made = [g.mul_mat(matrix(name, type_, n_rows=n), y, name=f"{name} product") for type_, (name, n) in zip(weights, sizes.items())]
        return [g.add(z, vector(f"{name} bias", n), name=f"{name} sum") if bias else z for z, (name, n), bias in zip(made, sizes.items(), biased)]
    return qkv


def all_of_k_is_read():
    """K's product may have other readers, behind V's."""
    def qkv(g, x, y):
        q, k, v = three_products()(g, x, y)
        return q, k, g.add(v, k)
    return attention(qkv=qkv)


def attention_of_a_norm(norms=norm, read=lambda g, total: g.scale(total, factor=2.0), cells=CELLS[:1], **given):
    """Q, K and V of the norm of a sum, of one token; the sum is read later. norms: (graph, sum) -> norm."""
    def qkv(g, x, y):
        return three_products(**given)(g, x, norms(g, g.add(x, y, name="total")))
    g = attention(qkv=qkv, cells=cells)
    g.outputs.append(read(g, g.nodes[0]))
    return g


def one_gate(n_cols=K, types=("Q8_0", "Q4_1"), biased=(False, False)):
    """A gated product of the norm of a sum, of one token."""
    g = Graph()
    total = g.add(*(g.input(name, "f32", (1, n_cols)) for name in "xy"), name="total")
    h = g.rms_norm(total, vector("norm.weight", n_cols), eps=1e-5, name="norm")
    gate, up = (g.mul_mat(matrix(f"{name}{n_cols}", type_, n_cols), h, name=name) for name, type_ in zip(("gate", "up"), types))
    gate, up = (g.add(each, vector(f"{each.name} bias", M)) if bias else each for each, bias in zip((gate, up), biased))
    g.outputs = [g.geglu(gate, up, name="glu"), g.scale(total, factor=2.0)]
    return g


def q_is_read_after():
    g = attention()
    g.outputs.append(g.scale(g.nodes[2], factor=2.0))
    return g


def q_is_read_before_v_is_written():
    return attention(between=lambda g, q, k, cache: [g.scale(q, factor=2.0)])


def normed_heads():
    return attention(norms=(1e-5, 1e-5))


def only_q_is_normed():
    return attention(norms=(1e-5, None))


def norms_differ():
    return attention(norms=(1e-5, 1e-6))


def rotated_k_is_read():
    return attention(between=lambda g, q, k, cache: [g.scale(k, factor=2.0)])


def the_cache_is_read_between():
    return attention(("f32", "f16"), between=lambda g, q, k, cache: [g.scale(cache, factor=2.0)])


def attention_and_product(**given):
    g = attention(**given)
    g.outputs = [g.mul_mat(matrix("output"), g.outputs[0], name="output")]
    return g


def attention_is_read_elsewhere():
    g = attention_and_product(rows_of_v="other rows")
    g.outputs.append(g.scale(g.outputs[0].src[1].src[0], factor=2.0))
    return g


def the_cache_is_written_before_attention_is_quantized():
    g = attention(rows_of_v="other rows")
    a, = g.outputs
    g.set_rows(a.src[1].base, g.nodes[0], leaf("rows again", "i64", CELLS), name="written")
    g.outputs = [product_of_later(g, a)]
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
    return program.run({name: np.resize(x[name], tensor.shape) for name, tensor in g.inputs.items()}), [node.op for node in program.nodes if node.op != "cpy"]


@pytest.mark.parametrize("build, fused", [
    (normed, ["rms_norm_act", "mul_mat", "mul_mat"]),
    (gated, ["swiglu_act", "mul_mat"]),
    (both, ["rms_norm_act", "mul_mat", "mul_mat", "add", "swiglu_act", "mul_mat", "add"]),
    (layer, ["add_rms_norm_act", "mul_mat_glu", "quantize", "mul_mat", "add_rms_norm_act", "mul_mat"]),
    (lambda: residual("Q8_0", "Q4_1"), ["add_rms_norm_act", "mul_mat", "mul_mat", "mul"]),
    (lambda: residual("F32"), ["add_rms_norm", "mul_mat", "mul"]),
    (lambda: residual("F32", "Q8_0"), ["add_rms_norm_and_act", "mul_mat", "mul_mat", "mul"]),
    (lambda: residual("Q8_0", "F16", "Q4_1"), ["add_rms_norm_and_act", "mul_mat", "mul_mat", "mul_mat", "mul"]),
    (norm_and_sum_are_outputs, ["add_rms_norm_and_act", "mul_mat", "mul"]),
    (norm_read_before_it_is_quantized, ["add_rms_norm_and_act", "mul_mat", "quantize", "mul_mat", "mul"]),  # twice: the second is of what the first gives
    (lambda: norm_read_before_it_is_quantized(lambda g, total, h: g.scale(h, factor=2.0)),
     ["add_rms_norm", "scale", "quantize", "mul_mat", "quantize", "mul_mat", "mul"]),
    (lambda: norm_read_before_it_is_quantized(lambda g, total, h: g.scale(total, factor=2.0)),
     ["add_rms_norm", "scale", "quantize", "mul_mat", "quantize", "mul_mat", "mul"]),
    (norm_of_a_made_weight, ["rms_norm", "add_rms_norm", "quantize", "mul_mat", "mul_mat"]),
    (norm_quantized_on_another_device, ["add_rms_norm", "quantize", "mul_mat"]),
    (residual_of_heads, ["add_rms_norm", "quantize", "mul_mat"]),
    (sum_is_an_output, ["add_rms_norm_act", "mul_mat", "mul"]),
    (sum_has_two_norms, ["add_rms_norm_act", "mul_mat", "mul", "rms_norm_act", "mul_mat"]),
    *((lambda op=op: glu(op), ["quantize", "mul_mat_glu"]) for op in GLU),
    (lambda: glu(types=("F32", "F16")), ["mul_mat_glu"]),
    (product_with_itself, ["mul_mat_glu"]),
    (lambda: glu(biased=(True, True)), ["quantize", "mul_mat_glu"]),
    (lambda: glu("geglu", ("BF16", "BF16"), (True, True)), ["mul_mat_glu"]),
    *((lambda types=types: attention(types, (types[0] == "f16",) * 2), ["mul_mat", "mul_mat", "rope_set_rows", "flash_attn_ext"])
      for types in (("f16", "f16"), ("f32", "f16"), ("f32", "f32"))),
    (q_is_read_after, ["mul_mat", "mul_mat", "rope_set_rows", "flash_attn_ext", "scale"]),
    (lambda: attention(("f16", "f32"), indirect=True), ["mul_mat", "mul_mat", "rope_set_rows", "flash_attn_ext"]),
    (attention_and_product, ["mul_mat", "mul_mat", "rope_set_rows", "flash_attn_ext_act", "mul_mat"]),
    (lambda: attention_and_product(types=("f32", "f32"), rows_of_v="other rows"),
     ["mul_mat", "mul_mat", "rope", "rope", "set_rows", "set_rows", "flash_attn_ext_act", "mul_mat"]),
    (normed_heads, ["mul_mat", "mul_mat", "rope_set_rows", "flash_attn_ext"]),
    (only_q_is_normed, ["mul_mat", "mul_mat", "rms_norm", "rope_set_rows", "flash_attn_ext"]),
    (norms_differ, ["mul_mat", "mul_mat", "rms_norm", "rms_norm", "rope_set_rows", "flash_attn_ext"]),
    (lambda: attention(qkv=three_products()), ["quantize", "mul_mat_qkv", "rope_set_rows", "flash_attn_ext"]),
    (lambda: attention(qkv=three_products(("F32", "BF16", "F16")), norms=(1e-5, 1e-5)), ["mul_mat_qkv", "rope_set_rows", "flash_attn_ext"]),
    (lambda: attention(("q8_0", "f32"), qkv=three_products(("Q8_0",) * 3)),
     ["quantize", "mul_mat_qkv", "rope", "rope", "set_rows", "set_rows", "flash_attn_ext"]),
    (lambda: attention(qkv=three_products(biased=(True, False, True)), indirect=True), ["quantize", "mul_mat_qkv", "add", "add", "rope_set_rows", "flash_attn_ext"]),
    (lambda: attention(qkv=three_products(biased=(True,) * 3)), ["quantize", "mul_mat_qkv", "rope_set_rows", "flash_attn_ext"]),
    (lambda: attention(qkv=three_products(("F16", "F32", "F32"), (True,) * 3)), ["mul_mat_qkv", "rope_set_rows", "flash_attn_ext"]),
    (all_of_k_is_read, ["quantize", "mul_mat_qkv", "add", "rope_set_rows", "flash_attn_ext"]),
    (attention_of_a_norm, ["add_rms_norm_mul_mat_qkv", "rope_set_rows", "flash_attn_ext", "scale"]),
    (lambda: attention_of_a_norm(biased=(True,) * 3), ["add_rms_norm_mul_mat_qkv", "rope_set_rows", "flash_attn_ext", "scale"]),
    (lambda: attention_of_a_norm(cells=CELLS[:2]), ["add_rms_norm_act", "mul_mat_qkv", "rope_set_rows", "flash_attn_ext", "scale"]),
    (lambda: attention_of_a_norm(weights=("F32",) * 3), ["add_rms_norm", "mul_mat_qkv", "rope_set_rows", "flash_attn_ext", "scale"]),
    (lambda: attention_of_a_norm(lambda g, total: norm(g, g.scale(total, factor=3.0))),
     ["add", "scale", "rms_norm_act", "mul_mat_qkv", "rope_set_rows", "flash_attn_ext", "scale"]),
    (lambda: attention_of_a_norm(read=lambda g, total: g.mul_mat(matrix("a"), g.nodes[2].src[0])),  # the norm's activations are read elsewhere
     ["add_rms_norm_act", "mul_mat_qkv", "rope_set_rows", "flash_attn_ext", "mul_mat"]),
    (lambda: attention_of_a_norm(read=lambda g, total: total), ["add_rms_norm_mul_mat_qkv", "rope_set_rows", "flash_attn_ext"]),
    (sum_read_before_the_products, ["add_rms_norm_act", "scale", "mul_mat_glu", "add"]),
    (lambda: layer(1), ["add_rms_norm_mul_mat_glu", "quantize", "mul_mat", "add_rms_norm_act", "mul_mat"]),
    (one_gate, ["add_rms_norm_mul_mat_glu", "scale"]),
    (lambda: one_gate(biased=(True, True)), ["add_rms_norm_mul_mat_glu", "scale"]),
    (lambda: one_gate(MOST_NORMED), ["add_rms_norm_mul_mat_glu", "scale"]),
    (lambda: one_gate(MOST_NORMED + 32), ["add_rms_norm_act", "mul_mat_glu", "scale"]),
    (lambda: one_gate(258, ("F16", "F16")), ["add_rms_norm", "mul_mat_glu", "scale"]),
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
        "norm-act": ("norm", "norm-act"), "gate": (), "up": (), "add-4": (), "swiglu-act": ("swiglu", "swiglu-act"), "down": (), "add-8": ()}
    g = layer()
    fuse(g)
    assert [node.replaces for node in g.live()] == [("inp", "norm", "norm-act"), ("gate", "up", "swiglu"), (), (), ("out", "norm", "norm-act"), ()]
    square = product_with_itself()
    fuse(square)
    assert square.live()[0].replaces == ("g", "square")
    assert [[tensor.name for tensor in node.also] for node in g.live()] == [["inp"], [], [], [], ["out"], []]
    g = attention_of_a_norm()
    fuse(g)
    node = g.live()[0]
    assert node.replaces == ("total", "norm", "norm-act", "q product", "kk product", "vvv product")
    assert [tensor.name for tensor in node.written] == ["vvv product", "total", "q product", "kk product"]
    g = residual("F32", "Q8_0")
    fuse(g)
    node = g.live()[0]
    assert node.replaces == ("total", "norm", "norm-act") and [tensor.name for tensor in node.written] == ["norm-act", "norm", "total"]


def test_what_a_fused_node_writes_into_caches_is_theirs():
    """It lives for its writes alone, gives rotated Q memory of its own, and the caches as they are."""
    g = attention()
    fuse(g)
    node, = (each for each in g.live() if each.op == "rope_set_rows")
    q, k = node.also
    assert (node.name, q.name, k.name) == ("cached v", "q", "cached k") and node.replaces == ("q", "rotated k", "cached k", "cached v")
    assert node.base is node.src[0] and k.base is node.src[1] and q.base is q
    g.outputs = []
    assert [each.op for each in g.live()] == ["mul_mat", "mul_mat", "rope_set_rows"]
    built = Graph()
    x, y, _ = (built.input(name, "f32", (N, n)) for name, n in (("x", K), ("y", 96), ("z", 96)))
    made = built.rope_set_rows(*node.src[:2], y, y, x, *node.src[5:], n_head=9, n_head_kv=3, neox=True, eps=0.0, slots=None, name="made")
    assert made.base is node.src[0] and [(t.name, t.shape, t.base) for t in made.also] == [("made-q", (N, K), made.also[0]), ("made-k", (8, 96), node.src[1])]


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
    g.outputs = [product_of_later(g, h), g.add(written, y)]
    return g


def sum_read_before_its_norm():
    """What reads the sum runs before the node that would make it."""
    g, x, y = start()
    total = g.add(x, y)
    doubled = g.add(total, total)
    g.outputs = [g.mul_mat(matrix("a", "F32"), norm(g, total)), doubled]
    return g


def sum_with_one_row():
    g, x, _ = start()
    g.outputs = [g.mul_mat(matrix("a", "F32"), norm(g, g.add(x, vector("bias"))))]
    return g


def sum_on_another_device():
    g, x, y = start()
    total = g.add(x, y)
    g.device = "other"
    w = vector("norm.weight")
    w.device = "other"
    g.outputs = [g.rms_norm(total, w, eps=1e-5)]
    return g


def term_written_between():
    """The cache that the sum read is written before the sum is normed."""
    g, x, y = start()
    cache, rows = leaf("cache", "f32", np.ones((N, K), np.float32)), leaf("rows", "i64", np.arange(N))
    total = g.add(cache, y)
    g.set_rows(cache, x, rows)
    g.outputs = [norm(g, total)]
    return g


def a_bias_in_one_product():
    return glu(biased=(False, True))


def a_bias_of_rows():
    """What is added to the products is no row: the fused op adds rows only."""
    g, x, y = start()
    gate, up = products(g, x)
    other = g.mul_mat(matrix("other"), y)
    g.outputs = [g.swiglu(g.add(gate, other), g.add(up, other))]
    return g


def float_and_quantized_products():
    return glu(types=("F32", "Q8_0"))


def products_of_two_inputs():
    g, x, y = start()
    g.outputs = [g.swiglu(g.mul_mat(matrix("a"), x), g.mul_mat(matrix("b"), y))]
    return g


def a_product_is_read_elsewhere():
    g = glu()
    g.outputs.append(g.scale(g.nodes[2], factor=2.0))
    return g


def a_product_is_an_output():
    g = glu()
    g.outputs.append(g.nodes[1])
    return g


def a_product_is_read_without_its_bias():
    g = glu(biased=(True, True))
    g.outputs.append(g.scale(g.nodes[1], factor=2.0))
    return g


def a_product_is_scaled():
    g, x, _ = start()
    gate, up = products(g, x)
    g.outputs = [g.swiglu(gate, g.scale(up, factor=0.5))]
    return g


def one_side_is_no_product():
    g = Graph()
    x, y = g.input("x", "f32", (N, K)), g.input("y", "f32", (N, K))
    g.outputs = [g.swiglu(g.mul_mat(matrix("square", "F32", n_rows=K), x), y)]
    return g


def products_on_two_devices():
    g, x, _ = start()
    gate = g.mul_mat(matrix("a", "F32"), x)
    g.device = "other"
    w = matrix("b", "F32")
    w.device = "other"
    g.outputs = [g.swiglu(gate, g.mul_mat(w, x))]
    return g


def product_operand_written_between():
    g, x, _ = start()
    cache, rows = leaf("cache", "f32", np.ones((N, K), np.float32)), leaf("rows", "i64", np.arange(N))
    gate, up = products(g, cache, ("F32", "F32"))
    g.set_rows(cache, x, rows)
    g.outputs = [g.swiglu(gate, up)]
    return g


def q_is_biased_before_k_is_made():
    """The bias is not in the op, and what it reads is made too late."""
    def qkv(g, x, y):
        q = g.add(g.mul_mat(matrix("q", n_rows=K), y), vector("bias"))
        return q, *(g.mul_mat(matrix(name, n_rows=96), y) for name in ("kk", "vvv"))
    return attention(("q8_0", "q8_0"), qkv=qkv)


def float_and_quantized_q():
    return attention(("q8_0", "q8_0"), qkv=three_products(("F32", "Q8_0", "Q8_0")))


def v_of_another_input():
    def qkv(g, x, y):
        return *three_products(("F32",) * 2)(g, x, y), g.mul_mat(matrix("vvv", "F32", n_rows=96), x)
    return attention(("q8_0", "q8_0"), qkv=qkv)


def k_and_v_are_one_product():
    def qkv(g, x, y):
        q, k = three_products(("F32",) * 2)(g, x, y)
        return q, k, k
    return attention(("q8_0", "q8_0"), qkv=qkv)


def v_is_made_first():
    def qkv(g, x, y):
        v = g.mul_mat(matrix("vvv", "F32", n_rows=96), y)
        return *three_products(("F32",) * 2)(g, x, y), v
    return attention(("q8_0", "q8_0"), qkv=qkv)


def v_on_another_device():
    def qkv(g, x, y):
        w = matrix("vvv", "F32", n_rows=96)
        q, k = three_products(("F32",) * 2)(g, x, y)
        g.device = w.device = "other"
        v = g.mul_mat(w, y)
        g.device = "cpu"
        return q, k, v
    return attention(("q8_0", "q8_0"), qkv=qkv)


@pytest.mark.parametrize("build", [
    q_is_biased_before_k_is_made, float_and_quantized_q, v_of_another_input, k_and_v_are_one_product, v_is_made_first, v_on_another_device,
    also_a_float_product, also_an_output, norm_is_an_output, float_weights, norm_of_heads, two_devices, operand_written_between,
    sum_read_before_its_norm, sum_with_one_row, sum_on_another_device, term_written_between,
    a_bias_in_one_product, a_bias_of_rows, float_and_quantized_products, products_of_two_inputs, a_product_is_read_elsewhere, a_product_is_an_output,
    a_product_is_read_without_its_bias, a_product_is_scaled, one_side_is_no_product, products_on_two_devices, product_operand_written_between,
    lambda: attention(("q8_0", "f16")), lambda: attention(("f16", "q8_0")), lambda: attention(neox=(True, False)), lambda: attention(rows_of_v="other rows"),
    lambda: attention(v_first=True), q_is_read_before_v_is_written, rotated_k_is_read, the_cache_is_read_between,
    attention_is_read_elsewhere, the_cache_is_written_before_attention_is_quantized])
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
    g.outputs = [product_of_later(g, h)]
    fuse(g)
    assert ops(g) == ["set_rows", "set_rows", "rms_norm_act", "mul_mat"]


def test_dead_readers_do_not_matter():
    g = normed()
    g.add(g.nodes[0], g.nodes[0])
    fuse(g)
    assert ops(g)[0] == "rms_norm_act"


def random_graph(seed):
    """Of what passes look at, in any order: sums are read before and after they are normed, products by one and by many."""
    rng = random.Random(seed)
    g = Graph()
    n = rng.choice((1, N))
    tensors = [g.input(name, "f32", (n, K)) for name in "xy"]
    weights = [matrix(name, type_, n_rows=K) for name, type_ in (("q", "Q8_0"), ("qq", "Q4_1"), ("f", "F16"))]
    for _ in range(rng.randrange(3, 16)):
        g.device = "cpu" if rng.random() < 0.9 else "other"
        op, (x, y) = rng.choice(["add", "rms_norm", "mul_mat", "products", "swiglu"]), rng.choices(tensors[-3:], (1, 1, 4)[-len(tensors):], k=2)
        if op == "rms_norm":
            tensors.append(norm(g, x))
        elif op == "mul_mat":
            tensors.append(g.mul_mat(rng.choice(weights), x))
        elif op == "products":
            made = [g.mul_mat(rng.choice(weights), x) for _ in range(2)]
            tensors.append(g.swiglu(*([g.add(each, vector("bias")) for each in made] if rng.random() < 0.5 else made)))
        else:
            tensors.append(g.apply(op, x, y))
    g.outputs = rng.sample(tensors[2:], min(3, len(tensors) - 2))
    return g


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_any_graph_fused_and_unfused_gives_the_same_bits(seed):
    for found, wanted in zip(run(random_graph(seed))[0], run(random_graph(seed), "all")[0], strict=True):
        assert_bitwise_equal(found, wanted, f"random_graph({seed})")


def test_passes_make_ops():
    assert set(PASSES) <= set(OPS)


@pytest.mark.parametrize("build, op, expected", [
    (lambda: residual("F32"), "add_rms_norm", dict(x="x", y="y", w="norm.weight", out="norm", total="total", n_rows=N, n_cols=K, eps=1e-5)),
    (lambda: residual("Q8_0"), "add_rms_norm_act", dict(x="x", y="y", w="norm.weight", act="norm-act", total="total", n=N, k=K, eps=1e-5)),
    (lambda: residual("F32", "Q8_0"), "add_rms_norm_and_act",
     dict(x="x", y="y", w="norm.weight", act="norm-act", norm="norm", total="total", n=N, k=K, eps=1e-5)),
    (glu, "mul_mat_glu", dict(act="silu", gate_type="Q8_0", up_type="Q4_1", gate_words="aQ8_0", up_words="bQ4_1", x="x-act", gate_bias=None, up_bias=None,
                              out="glu", n_rows=M, n_cols=K, n=N, scratch="scratch")),
    (lambda: glu("reglu", ("F32", "F16"), (True, True)), "mul_mat_glu",
     dict(act="relu", gate_type="F32", up_type="F16", gate_words="aF32", up_words="bF16", x="x", gate_bias="g bias", up_bias="u bias", out="glu",
          n_rows=M, n_cols=K, n=N, scratch="scratch")),
    (lambda: attention(qkv=three_products()), "mul_mat_qkv",
     dict(types=("Q8_0", "Q4_1", "Q5_0"), words=("q", "kk", "vvv"), x="y-act", outs=("q product", "kk product", "vvv product"), n_rows=(K, 96, 96), n_cols=K, n=N, biases=[])),
    (lambda: attention(qkv=three_products(biased=(True,) * 3)), "mul_mat_qkv",
     dict(types=("Q8_0", "Q4_1", "Q5_0"), words=("q", "kk", "vvv"), x="y-act", outs=("q sum", "kk sum", "vvv sum"), n_rows=(K, 96, 96), n_cols=K, n=N,
          biases=["q bias", "kk bias", "vvv bias"])),
    (lambda: attention_of_a_norm(biased=(True,) * 3), "add_rms_norm_mul_mat_qkv",
     dict(x="x", y="y", w="norm.weight", eps=1e-5, total="total", types=("Q8_0", "Q4_1", "Q5_0"), words=("q", "kk", "vvv"),
          outs=("q sum", "kk sum", "vvv sum"), n_rows=(K, 96, 96), n_cols=K, biases=["q bias", "kk bias", "vvv bias"])),
    (lambda: one_gate(biased=(True, True)), "add_rms_norm_mul_mat_glu",
     dict(x="x", y="y", w="norm.weight", eps=1e-5, total="total", act="gelu", gate_type="Q8_0", up_type="Q4_1", gate_words=f"gate{K}", up_words=f"up{K}",
          gate_bias="gate bias", up_bias="up bias", out="glu", n_rows=M, n_cols=K))])
def test_what_cuda_launches(build, op, expected):
    """Names stand for addresses: each must come to the parameter of the launch function that it is meant for."""
    pytest.importorskip("numba_cuda")
    from ggml_py.backends.cuda import BINDERS, CUDABackend
    launch = getattr(import_module(f"ggml_py.kernels.cuda.{OPS[op].module}"), op)
    g = build()
    fuse(g)
    node = next(node for node in g.live() if node.op == op)
    names = [source.name for source in (*node.src, *node.written)]
    if CUDABackend.scratch(None, node):
        names.append("scratch")

    def called(*args, **kwargs):
        return dict(signature(launch).bind(*args, **kwargs).arguments)
    assert BINDERS[op](called, None, node, *names) == {"target": None, **expected}


# Declined by a device

def test_what_a_device_declines_stays_and_is_fused_otherwise():
    asked = []

    def declines(device, op, match):
        asked.append((device, op, len(match.src)))
        return op == "mul_mat_glu"
    g = layer()
    fuse(g, declines=declines)
    assert ops(g) == ["add_rms_norm_act", "mul_mat", "mul_mat", "swiglu_act", "mul_mat", "add_rms_norm_act", "mul_mat"]
    assert ("cpu", "mul_mat_glu", 3) in asked and not any(op == "mul_mat_qkv" for _, op, _ in asked)  # only what could be fused


@pytest.mark.parametrize("types, n, biased, act, warpgroups, declined", [
    (("Q4_K", "Q4_K"), 512, False, "silu", True, True), (("Q8_0", "Q4_K"), 33, False, "silu", True, True),
    (("Q4_K", "Q4_K"), 32, False, "silu", True, False), (("Q4_K", "Q4_K"), 512, False, "silu", False, False),  # few tokens; without warpgroups
    (("Q4_K", "Q5_1"), 512, False, "silu", True, False), (("F16", "F16"), 512, False, "silu", True, False),     # formats that they do not multiply
    (("Q4_K", "Q4_K"), 512, True, "silu", True, False), (("Q4_K", "Q4_K"), 512, False, "gelu", True, False)])  # swiglu_act could not follow
def test_products_that_a_gpu_computes_apart(types, n, biased, act, warpgroups, declined):
    pytest.importorskip("numba_cuda")
    from ggml_py.backends.cuda import CUDABackend
    gate, up = (Tensor(name, type_, (14336, 4096)) for name, type_ in zip(("gate", "up"), types))
    biases = [Tensor(name, "f32", (14336,)) for name in ("gate_bias", "up_bias")] if biased else []
    match = Match((gate, up, Tensor("x", "act", (n, 4096)), *biases), {"act": act}, [])
    backend = SimpleNamespace(target=SimpleNamespace(n_multiprocessors=132, shared_limit=227 << 10, warpgroups=warpgroups))
    assert CUDABackend.declines(backend, "mul_mat_glu", match) is declined
    assert not CUDABackend.declines(backend, "mul_mat_id_glu", match)


# Switched off by name

def test_each_pass_is_switched_off_alone():
    assert switched_off(()) == frozenset() and switched_off("all") == switched_off(["all"]) == frozenset(PASSES)
    for build in both, layer, lambda: residual("F32"), lambda: residual("F32", "Q8_0"):
        for name in PASSES:
            g = build()
            fuse(g, [each for each in PASSES if each != name])
            alone = set(ops(g)) & set(PASSES)
            g = build()
            fuse(g, (name,))
            assert alone <= {name} and name not in ops(g)


@pytest.mark.parametrize("arch, types, never", [
    ("llama", ("Q8_0",), set()), ("qwen2", ("Q8_0", "Q5_1", "Q4_0"), set()),
    ("qwen3", ("Q4_1", "Q8_0", "F16", "Q5_0"), {"mul_mat_glu", "mul_mat_qkv", "add_rms_norm_mul_mat_qkv", "add_rms_norm_mul_mat_glu"})])  # some are float and others quantized
def test_models(arch, types, never, tmp_path):
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
        made = set()
        for no_fuse in [(), *PASSES, ("rms_norm_act", "add_rms_norm_and_act")]:
            found, used = logits(no_fuse)
            assert_bitwise_equal(found, expected, f"{arch} without {no_fuse or 'nothing'}")
            assert not used & switched_off(no_fuse)
            made |= used
        assert made & set(PASSES) == set(PASSES) - never - {"topk_moe", "mul_mat_id_glu"}  # tests/test_moe_models.py


def test_unknown_passes_are_named(tmp_path, capsys):
    with Model.load(write_model(tmp_path / "m.gguf"), device="cpu") as model:
        with pytest.raises(UserError) as error:
            model.new_context(no_fuse=["swiglu_act", "swigl"])
    allowed = ("'swigl' is no graph pass; allowed: rms_norm_act, add_rms_norm_act, add_rms_norm, add_rms_norm_and_act, mul_mat_glu, mul_mat_id_glu, "
               "swiglu_act, mul_mat_qkv, rope_set_rows, flash_attn_ext_act, topk_moe, add_rms_norm_mul_mat_qkv, add_rms_norm_mul_mat_glu, all")
    assert str(error.value) == f"no_fuse: {allowed}"
    assert cli.execute(["run", "-m", "x", "-p", "x", "--no-fuse", "rms_norm_act,swigl"]) == 2
    assert f"argument --no-fuse: {allowed}" in capsys.readouterr().err


def test_help_says_that_nothing_is_left_out_by_default(capsys):
    with pytest.raises(SystemExit):
        cli.execute(["run", "--help"])
    help = " ".join(capsys.readouterr().out.split())
    assert "graph passes left out, none by default; changes the speed, never a bit --no-graphs" in help and "(default: 0.0)" in help


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
