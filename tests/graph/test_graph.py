"""Graph building: what ops give, and errors that name node, op and shapes."""
import importlib

import numpy as np
import pytest

from ggml_py.backends.base import KernelBackend
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import UserError
from ggml_py.graph.graph import Graph, GraphError, Tensor
from ggml_py.graph.program import Arenas, Program
from ggml_py.ops.compose import FUSED
from ggml_py.ops.table import OPS


def weight(dtype, *shape):
    return Tensor("w", dtype, shape, buffer=())


def test_every_primitive_op_has_a_definition_and_a_kernel_of_the_cpu():
    for op in OPS.values():
        if not op.template:
            for room in "reference", "cpu":
                assert callable(getattr(importlib.import_module(f"ggml_py.kernels.{room}.{op.module}"), op.name)), op.name


def test_every_op_has_a_kernel_of_cuda():
    pytest.importorskip("numba_cuda")
    cuda = KernelBackend("cuda")
    assert [name for name in OPS if not cuda.has_kernel(name)] == []


def test_fused_ops_have_no_definition_of_their_own():
    reference = KernelBackend("reference")
    assert FUSED and not any(map(reference.has_kernel, FUSED))


def test_a_device_without_a_kernel_says_so(monkeypatch):
    g, backend = Graph(), CPUBackend()
    g.sigmoid(g.input("x", "f32", (3, 64)), name="gates")
    backend.prepare(g.nodes[0])
    monkeypatch.setitem(backend._modules, "sigmoid", None)
    with pytest.raises(UserError, match="^gates: cpu has no kernel for the op sigmoid; the device cpu has one$"):
        backend.prepare(g.nodes[0])


def test_a_view_is_the_memory_of_its_base():
    """It keeps it from being given away, and nothing runs for it."""
    g = Graph()
    x = g.input("x", "f32", (3, 8))
    doubled = g.scale(x, factor=2.0)
    view = doubled.view((6, 4))
    assert view.root is doubled and view.is_view and view.maker is doubled.node and not doubled.is_view
    g.scale(g.scale(g.scale(x, factor=3.0), factor=3.0), factor=3.0)
    others = g.add(g.scale(x, factor=5.0), g.scale(x, factor=7.0))
    g.outputs = [g.add(view, others.view((6, 4)))]
    program = Program(g, Arenas({"cpu": CPUBackend()}))
    assert [node.op for node in program.nodes] == ["scale", "scale", "scale", "add", "add"]
    values = np.arange(24, dtype=np.float32).reshape(3, 8)
    assert program.run({"x": values})[0].tolist() == (14 * values).reshape(6, 4).tolist()


def test_a_view_of_a_part():
    """Rows of a result, and of a part of it."""
    g = Graph()
    part = g.scale(g.input("x", "f32", (4, 8)), factor=2.0).view((2, 8), 2 * 32)
    g.outputs = [g.scale(part, factor=1.0), g.scale(part.view((1, 8), 32), factor=1.0)]
    values = np.arange(32, dtype=np.float32).reshape(4, 8)
    two, one = Program(g, Arenas({"cpu": CPUBackend()})).run({"x": values})
    assert two.tolist() == (2 * values[2:]).tolist() and one.tolist() == (2 * values[3:]).tolist()


@pytest.mark.parametrize("shape, offset, found", [((5, 5), 0, "0 to 100"), ((3, 8), 4, "4 to 100"), ((1, 8), -4, "-4 to 28")])
def test_a_view_lies_within_its_base(shape, offset, found):
    x = Graph().input("x", "f32", (3, 8))
    with pytest.raises(GraphError) as error:
        x.view(shape, offset)
    assert str(error.value) == f"x: f32 [3, 8]: a view {list(shape)} of it would have bytes {found}, allowed: 0 to 96"


def test_activations_have_no_views():
    """Their planes are not those of a part."""
    with pytest.raises(GraphError, match=r"x: act \[4, 512\]: activation blocks have no views"):
        Tensor("x", "act", (4, 512)).view((2, 512))


def test_activations_are_quantized_once():
    g = Graph()
    x = g.input("x", "f32", (3, 64))
    a, b = g.mul_mat(weight("Q8_0", 5, 64), x), g.mul_mat(weight("Q4_1", 7, 64), x)
    g.mul_mat(weight("F16", 7, 64), x)
    assert [n.op for n in g.nodes] == ["quantize", "mul_mat", "mul_mat", "mul_mat"]
    assert a.shape == (3, 5) and b.shape == (3, 7) and a.node.src[1] is b.node.src[1]


def test_activations_are_quantized_behind_what_makes_them():
    """Before other readers; but where the first product reads them, if they lie in a cache, which others may write in between,
    or come from another device."""
    g, w = Graph(), weight("Q8_0", 5, 64)
    x, rows, cache = g.input("x", "f32", (3, 64)), g.input("rows", "i64", (3,)), Tensor("cache", "f32", (3, 64), buffer=())
    doubled = g.scale(x, factor=2.0, name="doubled")
    g.add(doubled, x)
    view = doubled.view((3, 64), name="view")
    written = g.set_rows(cache, x, rows, name="written")
    normed, total = g.add_rms_norm(x, view, g.input("w", "f32", (64,)), eps=1e-5, name="normed")
    products = [g.mul_mat(w, each) for each in (doubled, view, normed, x, written, total)]
    assert [n.name if n.op == "quantize" else n.op for n in g.nodes] == [
        "scale", "view-act", "doubled-act", "add", "set_rows", "add_rms_norm", "normed-sum-act", "normed-act", "mul_mat",
        "mul_mat", "mul_mat",
        "x-act", "mul_mat", "written-act", "mul_mat", "mul_mat"]
    assert [each.node.src[1].node.src[0] for each in products] == [doubled, view, normed, x, written, total]
    here = g.add(x, x)
    g.device = "other"
    there = g.mul(here, x)
    g.mul_mat(w, here), g.mul_mat(w, there)
    assert [(n.op, n.device) for n in g.nodes[-6:]] == [
        ("add", "cpu"), ("mul", "other"), ("quantize", "other"), ("quantize", "other"), ("mul_mat", "other"),
        ("mul_mat", "other")]
    assert [n.src[0] for n in g.nodes[-4:-2]] == [there, here]


@pytest.mark.parametrize("build, message", [
    (lambda g: g.mul_mat(weight("F32", 5, 60), g.input("x", "f32", (3, 64)), name="blk.0.ffn_up"),
     "blk.0.ffn_up: mul_mat: w has 60 columns, x 64; operands: w: F32 [5, 60]; x: f32 [3, 64]"),
    (lambda g: g.add(g.input("x", "f32", (3, 64)), g.input("y", "f32", (3, 32)), name="sum"),
     "sum: add: the second operand must have the first one's shape or be one row of it; operands: x: f32 [3, 64]; y: f32 "
     "[3, 32]"),
    (lambda g: g.rms_norm(g.input("x", "f32", (3, 64)), g.input("w", "f32", (48,)), eps=1e-5, name="norm"),
     "norm: rms_norm: rows of 64 are not whole runs of 48; operands: x: f32 [3, 64]; w: f32 [48]"),
    (lambda g: g.rms_norm(g.input("x", "f32", (3, 64)), name="norm"),
     "norm: rms_norm(x, w, eps) got 1 operands and no parameters"),
    (lambda g: g.rms_norm_act(g.input("x", "f32", (3, 64)), g.scale(g.input("y", "f32", (64,)), factor=2.0, name="w"), eps=1e-5,
                              name="norm"),
     "norm: rms_norm_act: w must be a weight: kernels read it before those ahead of them have ended; operands: x: f32 [3, 64]; "
     "w: f32 [64]"),
    (lambda g: g.add_rms_norm(g.input("x", "f32", (3, 64)), g.input("y", "f32", (64,)), g.input("w", "f32", (64,)), eps=1e-5,
                              name="norm"),
     "norm: add_rms_norm: y must have x's shape; operands: x: f32 [3, 64]; y: f32 [64]; w: f32 [64]"),
    (lambda g: g.mul_mat_glu(weight("F32", 5, 64), weight("F32", 5, 64), g.input("x", "f32", (3, 64)), g.input("b", "f32", (5,)),
                             act="silu", name="glu"),
     "glu: mul_mat_glu(gate, up, x, gate_bias, up_bias, act) got 4 operands and act parameters"),
    (lambda g: g.mul_mat_glu(weight("F32", 5, 64), weight("F32", 5, 64), g.input("x", "f32", (3, 64)), act="tanh", name="glu"),
     "glu: mul_mat_glu: act must be one of silu, gelu, relu, not 'tanh'; operands: w: F32 [5, 64]; w: F32 [5, 64]; x: f32 "
     "[3, 64]"),
    (lambda g: g.mul_mat_glu(weight("F32", 5, 64), weight("F32", 6, 64), g.input("x", "f32", (3, 64)), act="silu", name="glu"),
     "glu: mul_mat_glu: swiglu: gate and up must be f32 of one shape; operands: w: F32 [5, 64]; w: F32 [6, 64]; x: f32 [3, 64]"),
    (lambda g: g.mul_mat_qkv(*(weight(type_, 5, 64) for type_ in ("F16", "Q8_0", "F32")), g.input("x", "f32", (3, 64)),
                             name="qkv"),
     "qkv: mul_mat_qkv: mul_mat: x must be act for a Q8_0 weight; operands: w: F16 [5, 64]; w: Q8_0 [5, 64]; w: F32 [5, 64]; x: "
     "f32 [3, 64]"),
    (lambda g: g.mul_mat_glu(weight("F16", 5, 64), weight("Q8_0", 5, 64), g.input("x", "f32", (3, 64)), act="silu", name="glu"),
     "glu: mul_mat_glu: mul_mat: x must be act for a Q8_0 weight; operands: w: F16 [5, 64]; w: Q8_0 [5, 64]; x: f32 [3, 64]"),
    (lambda g: g.mul_mat_glu(weight("F32", 5, 64), weight("F32", 5, 64), g.input("x", "f32", (3, 64)),
                             *(g.input("b", "f32", (3, 5)),) * 2, act="silu",
                             name="glu"),
     "glu: mul_mat_glu: biases must be f32 [m]; operands: w: F32 [5, 64]; w: F32 [5, 64]; x: f32 [3, 64]; b: f32 [3, 5]; b: f32 "
     "[3, 5]"),
])
def test_errors_name_node_op_and_shapes(build, message):
    with pytest.raises(GraphError) as error:
        build(Graph())
    assert str(error.value) == message


def test_unknown_op():
    with pytest.raises(AttributeError, match="no op convolve; ops: get_rows, "):
        Graph().convolve()


def test_only_what_outputs_and_states_need_is_live():
    g = Graph()
    x, rows = g.input("x", "f32", (2, 32)), g.input("rows", "i64", (2,))
    cache = Tensor("cache", "f16", (8, 32), buffer=())
    written = g.set_rows(cache, g.scale(x, factor=2.0), rows)
    unused = g.add(x, x)
    g.outputs = [g.mul(x, x)]
    assert written.root is cache and written.is_state and written.node.written == (cache,)
    assert unused.node not in g.live() and [n.op for n in g.live()] == ["scale", "set_rows", "mul"]


def test_a_node_is_live_if_any_of_its_results_is():
    g = Graph()
    x, y, w = g.input("x", "f32", (2, 32)), g.input("y", "f32", (2, 32)), g.input("w", "f32", (32,))
    normed, total = g.add_rms_norm(x, g.scale(y, factor=2.0), w, eps=1e-5)
    assert total.node is normed.node and normed.node.results == (normed, total) and not normed.node.written
    g.outputs = [g.mul(total, x)]
    assert [n.op for n in g.live()] == ["scale", "add_rms_norm", "mul"]
    g.outputs = [x]
    assert g.live() == []


def test_a_fused_op_is_its_parts():
    """Shapes and names come from the parts, which stand for it where a device has no kernel."""
    g = Graph()
    x, y, w = g.input("x", "f32", (2, 32)), g.input("y", "f32", (2, 32)), g.input("w", "f32", (32,))
    act, out, total = g.add_rms_norm_and_act(x, y, w, eps=1e-5, name="normed")
    node = act.node
    assert [(t.name, t.dtype, t.shape) for t in (act, out, total)] == [
        ("normed", "act", (2, 32)), ("normed-out", "f32", (2, 32)), ("normed-sum", "f32", (2, 32))]
    assert [part.op for part in node.parts] == [part.op for part in node.primitives()] == ["add", "rms_norm", "quantize"]
    assert node.take_back() == node.parts and [t.node.op for t in (act, out, total)] == ["quantize", "rms_norm", "add"]
