"""The op table, graph building and its errors."""
import importlib

import numpy as np
import pytest

from ggml_py.backends.cpu import CPUBackend
from ggml_py.errors import UserError
from ggml_py.graph import Graph, GraphError, Tensor
from ggml_py.ops import MOST_NORMED, OPS
from ggml_py.program import Arenas, Program


def weight(dtype, *shape):
    return Tensor("w", dtype, shape, device="cpu", storage=(None, 0))


VIEWS = {"reshape"}  # nothing to run


def test_every_op_has_a_reference():
    for op in OPS.values():
        if op.name not in {"cpy", *VIEWS}:
            module = importlib.import_module(f"ggml_py.kernels.reference.{op.module}")
            assert callable(getattr(module, op.name)), op.name


def test_every_op_is_bound_by_the_cpu():
    from ggml_py.backends.cpu import BINDERS
    assert set(BINDERS) == set(OPS) - VIEWS


def test_every_op_is_bound_by_cuda():
    """But for copies, which between devices are the program's."""
    from ggml_py.backends.cuda import BINDERS
    assert set(BINDERS) == set(OPS) - {"cpy"} - VIEWS


def test_cuda_refuses_what_it_cannot_do(monkeypatch):
    from ggml_py.backends.cuda import BINDERS, CUDABackend
    g = Graph("cuda:0")
    x, ids = g.input("x", "f32", (3, 64)), g.input("ids", "i32", (3, 2))
    check = lambda node: CUDABackend.check(None, node)
    check(g.mul_mat(weight("F32", 5, 64), x))
    check(g.mul_mat_id(weight("F32", 8, 5, 64), x, ids))
    check(g.sigmoid(x))
    monkeypatch.delitem(BINDERS, "sigmoid")
    with pytest.raises(UserError, match="^gates: cuda: op sigmoid is not implemented yet; --device cpu has it$"):
        check(g.sigmoid(x, name="gates"))
    cache, token = Tensor("cache", "f16", (8, 64), device="cuda:0"), g.input("seq", "i32", (3,))
    present, sinks = g.input("present", "u8", (1, 8)), g.input("sinks", "f32", (2,))
    params = dict(n_head=2, n_head_kv=2, scale=1.0, name="kqv")
    attend = lambda *more, **given: g.flash_attn_ext(x, cache, cache, token, token, present, *more, **params, **given)
    check(attend(sinks, window=4))


def test_a_view_is_the_memory_of_its_operand():
    """It keeps it from being given away, and nothing runs for it."""
    g = Graph()
    x = g.input("x", "f32", (3, 8))
    doubled = g.scale(x, factor=2.0)
    view = g.reshape(doubled, shape=(6, 4))
    assert view.base is doubled
    g.scale(g.scale(g.scale(x, factor=3.0), factor=3.0), factor=3.0)
    others = g.add(g.scale(x, factor=5.0), g.scale(x, factor=7.0))
    g.outputs = [g.add(view, g.reshape(others, shape=(6, 4)))]
    program = Program(g, Arenas({"cpu": CPUBackend()}))
    assert [node.op for node in program.nodes] == ["scale", "scale", "scale", "add", "add"]
    values = np.arange(24, dtype=np.float32).reshape(3, 8)
    assert program.run({"x": values})[0].tolist() == (14 * values).reshape(6, 4).tolist()
    with pytest.raises(GraphError, match="reshape: x must be f32 of 25 values"):
        g.reshape(x, shape=(5, 5))


def test_activations_are_quantized_once():
    g = Graph()
    x = g.input("x", "f32", (3, 64))
    a, b = g.mul_mat(weight("Q8_0", 5, 64), x), g.mul_mat(weight("Q4_1", 7, 64), x)
    g.mul_mat(weight("F16", 7, 64), x)
    assert [n.op for n in g.nodes] == ["quantize", "mul_mat", "mul_mat", "mul_mat"]
    assert a.shape == (3, 5) and b.shape == (3, 7) and a.src[1] is b.src[1]


def test_activations_are_quantized_behind_what_makes_them():
    """Before other readers; but where the first product reads them, if they lie in a cache, which others may write in between, or come from another device."""
    g, w = Graph(), weight("Q8_0", 5, 64)
    x, rows, cache = g.input("x", "f32", (3, 64)), g.input("rows", "i64", (3,)), Tensor("cache", "f32", (3, 64), device="cpu")
    doubled = g.scale(x, factor=2.0, name="doubled")
    g.add(doubled, x)
    view = g.reshape(doubled, shape=(3, 64), name="view")
    written = g.set_rows(cache, x, rows, name="written")
    normed = g.add_rms_norm(x, view, g.input("w", "f32", (64,)), eps=1e-5, name="normed")
    products = [g.mul_mat(w, each) for each in (doubled, view, normed, x, written, *normed.also)]
    assert [n.name if n.op == "quantize" else n.op for n in g.nodes] == [
        "scale", "doubled-act", "add", "reshape", "view-act", "set_rows", "add_rms_norm", "normed-act", "mul_mat", "mul_mat", "mul_mat",
        "x-act", "mul_mat", "written-act", "mul_mat", "normed-sum-act", "mul_mat"]
    assert [each.src[1].src[0] for each in products] == [doubled, view, normed, x, written, *normed.also]
    here = g.add(x, x)
    g.device = "other"
    there = g.mul(here, x)
    g.mul_mat(w, here), g.mul_mat(w, there)
    assert [(n.op, n.device) for n in g.nodes[-6:]] == [
        ("add", "cpu"), ("mul", "other"), ("quantize", "other"), ("quantize", "other"), ("mul_mat", "other"), ("mul_mat", "other")]
    assert [n.src[0] for n in g.nodes[-4:-2]] == [there, here]


@pytest.mark.parametrize("build, message", [
    (lambda g: g.mul_mat(weight("F32", 5, 60), g.input("x", "f32", (3, 64)), name="blk.0.ffn_up"),
     "blk.0.ffn_up: mul_mat: w has 60 columns, x 64; operands: w: F32 [5, 60]; x: f32 [3, 64]"),
    (lambda g: g.add(g.input("x", "f32", (3, 64)), g.input("y", "f32", (3, 32)), name="sum"),
     "sum: add: the second operand must have the first one's shape or be one row of it; operands: x: f32 [3, 64]; y: f32 [3, 32]"),
    (lambda g: g.rms_norm(g.input("x", "f32", (3, 64)), g.input("w", "f32", (48,)), eps=1e-5, name="norm"),
     "norm: rms_norm: rows of 64 are not whole runs of 48; operands: x: f32 [3, 64]; w: f32 [48]"),
    (lambda g: g.rms_norm(g.input("x", "f32", (3, 64)), name="norm"), "norm: rms_norm(x, w, eps) got 1 operands and no parameters"),
    (lambda g: g.rms_norm_act(g.input("x", "f32", (3, 64)), g.scale(g.input("y", "f32", (64,)), factor=2.0, name="w"), eps=1e-5, name="norm"),
     "norm: rms_norm_act: w must be a weight: kernels read it before those ahead of them have ended; operands: x: f32 [3, 64]; w: f32 [64]"),
    (lambda g: g.add_rms_norm(g.input("x", "f32", (3, 64)), g.input("y", "f32", (64,)), g.input("w", "f32", (64,)), eps=1e-5, name="norm"),
     "norm: add_rms_norm: y must be f32 of x's shape; operands: x: f32 [3, 64]; y: f32 [64]; w: f32 [64]"),
    (lambda g: g.mul_mat_glu(weight("F32", 5, 64), weight("F32", 5, 64), g.input("x", "f32", (3, 64)), g.input("b", "f32", (5,)), act="silu", name="glu"),
     "glu: mul_mat_glu(gate, up, x, gate_bias, up_bias, act) got 4 operands and act parameters"),
    (lambda g: g.mul_mat_glu(weight("F32", 5, 64), weight("F32", 5, 64), g.input("x", "f32", (3, 64)), act="tanh", name="glu"),
     "glu: mul_mat_glu: act must be one of silu, gelu, relu, not 'tanh'; operands: w: F32 [5, 64]; w: F32 [5, 64]; x: f32 [3, 64]"),
    (lambda g: g.mul_mat_glu(weight("F32", 5, 64), weight("F32", 6, 64), g.input("x", "f32", (3, 64)), act="silu", name="glu"),
     "glu: mul_mat_glu: gate and up must have one shape; operands: w: F32 [5, 64]; w: F32 [6, 64]; x: f32 [3, 64]"),
    (lambda g: g.mul_mat_qkv(*(weight(type_, 5, 64) for type_ in ("F16", "Q8_0", "F32")), g.input("x", "f32", (3, 64)), name="qkv"),
     "qkv: mul_mat_qkv: x must be act for a Q8_0 weight; operands: w: F16 [5, 64]; w: Q8_0 [5, 64]; w: F32 [5, 64]; x: f32 [3, 64]"),
    *((lambda g, n=n, k=k: g.add_rms_norm_mul_mat_glu(*(g.input(name, "f32", (n, k)) for name in "xy"), weight("f32", k), *(weight("Q8_0", 5, k),) * 2, act="silu",
                                                      eps=1e-5, name="glu"),
       f"glu: add_rms_norm_mul_mat_glu: {found}; operands: x: f32 [{n}, {k}]; y: f32 [{n}, {k}]; w: f32 [{k}]; w: Q8_0 [5, {k}]; w: Q8_0 [5, {k}]")
      for n, k, found in ((2, 64, "x must be one row"), (1, MOST_NORMED + 32, f"x has {MOST_NORMED + 32} columns, allowed: a multiple of 4 up to {MOST_NORMED}"))),
    (lambda g: g.mul_mat_glu(weight("F16", 5, 64), weight("Q8_0", 5, 64), g.input("x", "f32", (3, 64)), act="silu", name="glu"),
     "glu: mul_mat_glu: x must be act for a Q8_0 weight; operands: w: F16 [5, 64]; w: Q8_0 [5, 64]; x: f32 [3, 64]"),
    (lambda g: g.mul_mat_glu(weight("F32", 5, 64), weight("F32", 5, 64), g.input("x", "f32", (3, 64)), *(g.input("b", "f32", (3, 5)),) * 2, act="silu",
                             name="glu"),
     "glu: mul_mat_glu: biases must be f32 [m]; operands: w: F32 [5, 64]; w: F32 [5, 64]; x: f32 [3, 64]; b: f32 [3, 5]; b: f32 [3, 5]"),
])
def test_errors_name_node_op_and_shapes(build, message):
    with pytest.raises(GraphError) as error:
        build(Graph())
    assert str(error.value) == message


def test_unknown_op():
    with pytest.raises(AttributeError, match="no op convolve; ops: get_rows, "):
        Graph().convolve()


def test_only_what_outputs_and_caches_need_is_live():
    g = Graph()
    x, rows = g.input("x", "f32", (2, 32)), g.input("rows", "i64", (2,))
    cache = Tensor("cache", "f16", (8, 32), device="cpu")
    written = g.set_rows(cache, g.scale(x, factor=2.0), rows)
    unused = g.add(x, x)
    wanted = g.mul(x, x)
    g.outputs = [wanted]
    assert written.base is cache
    assert unused not in g.live() and [n.op for n in g.live()] == ["scale", "set_rows", "mul"]


def test_a_node_is_live_if_any_of_its_results_is():
    g = Graph()
    x, y, w = g.input("x", "f32", (2, 32)), g.input("y", "f32", (2, 32)), g.input("w", "f32", (32,))
    normed = g.add_rms_norm(x, g.scale(y, factor=2.0), w, eps=1e-5)
    total, = normed.also
    assert total.op is None and total.base is total and normed.written == (normed, total)
    g.outputs = [g.mul(total, x)]
    assert [n.op for n in g.live()] == ["scale", "add_rms_norm", "mul"]
    g.outputs = [x]
    assert g.live() == []
