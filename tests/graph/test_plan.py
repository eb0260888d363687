"""Memory plans never let two live tensors overlap; graphs split over devices give the same bits."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ggml_py.backends.cpu import CPUBackend
from ggml_py.graph.graph import Graph, Tensor
from ggml_py.graph.plan import plan_memory
from ggml_py.graph.program import Arenas, Program
from ggml_py.graph.split import split


BACKENDS = {device: CPUBackend(device=device) for device in ("cpu", "other")}


@st.composite
def graphs(draw, norms=False):
    """A random graph of additions and scalings over one input; norms: and of normed sums, whose two results are read or not."""
    g = Graph()
    tensors = [g.input("x", "f32", (draw(st.integers(1, 5)), draw(st.integers(1, 300))))]
    for _ in range(draw(st.integers(1, 30))):
        a, b = draw(st.sampled_from(tensors)), draw(st.sampled_from(tensors))
        g.device = draw(st.sampled_from(["cpu", "other"]))
        if norms and draw(st.booleans()):
            tensors += g.add_rms_norm(a, b, Tensor("w", "f32", a.shape[1:], g.device), eps=1e-5)
        else:
            tensors.append(g.add(a, b) if draw(st.booleans()) else g.scale(a, factor=draw(st.sampled_from([0.5, 3.0]))))
    g.outputs = draw(st.lists(st.sampled_from(tensors[1:]), min_size=1, max_size=3, unique=True))
    return g


@given(graphs(norms=True))
@settings(max_examples=60, deadline=None)
def test_live_tensors_do_not_overlap(g):
    nodes = [node for run in split(g.live(), BACKENDS) for node in (*run.copies, *run.nodes)]
    plan = plan_memory(nodes, g.outputs, lambda t: 4 * int(np.prod(t.shape)))
    placed = list(plan.extents.items())
    assert {t for t, _ in placed} == {t.root for node in nodes for t in node.results}
    for i, (t, a) in enumerate(placed):
        assert a.offset + a.n_bytes <= plan.arena_bytes[t.device]
        for u, b in placed[:i]:
            if t.device == u.device and a.first <= b.last and b.first <= a.last:
                assert a.offset + a.n_bytes <= b.offset or b.offset + b.n_bytes <= a.offset, (t, u)
    for node in nodes:
        for source in node.src:
            assert source.root.device == node.device or node.op == "cpy"


@given(graphs(), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_splits_over_two_devices_compute_what_numpy_does(g, seed):
    arenas = Arenas(BACKENDS)
    x = np.random.default_rng(seed).standard_normal(g.inputs["x"].shape).astype(np.float32)
    order = list(g.live())
    operands = {node: node.src for node in order}
    outputs = g.outputs
    got = Program(g, arenas).run({"x": x})
    values = {g.inputs["x"]: x}
    for node in order:
        a = [values[s] for s in operands[node]]
        values[node.results[0]] = a[0] + a[1] if node.op == "add" else a[0] * np.float32(node.params["factor"])
    for tensor, array in zip(outputs, got):
        assert array.tobytes() == values[tensor].tobytes()


def test_memory_is_reused():
    g = Graph()
    x = g.input("x", "f32", (1, 1000))
    for _ in range(20):
        x = g.scale(x, factor=2.0)
    g.outputs = [x]
    plan = plan_memory(g.live(), g.outputs, lambda t: 4000)
    assert plan.arena_bytes == {"cpu": 2 * 4096}
    assert plan.report(
        ) == "cpu: 20 tensors in an arena of 8,192 bytes (81,920 without reuse); largest scale-0: f32 [1, 1000], 4,096"


def test_second_results_and_scratch_have_memory_of_their_own():
    """The sum lives until its last reader, scratch as long as its node runs."""
    g = Graph()
    x, y = (g.input(name, "f32", (2, 64)) for name in "xy")
    w, gate, up = Tensor("w", "f32", (64,), buffer=()), *(Tensor(name, "F32", (64, 64), buffer=()) for name in ("gate", "up"))
    normed, total = g.add_rms_norm(x, y, w, eps=1e-5, name="normed")
    gated = g.mul_mat_glu(gate, up, normed, act="silu")
    scratch = gated.node.scratch = Tensor("scratch", "f32", gated.shape)
    doubled = g.scale(gated, factor=2.0)
    g.outputs = [g.add(doubled, total)]
    plan = plan_memory(g.live(), g.outputs, lambda t: 512)
    lives = {t.name: (e.first, e.last) for t, e in plan.extents.items()}
    assert (total.name, total.dtype, total.shape) == ("normed-sum", "f32", (2, 64))
    assert lives == {"normed": (0, 1), "normed-sum": (0, 3), "mul_mat_glu-1": (1, 2), "scratch": (1, 1), "scale-2": (2, 3),
                     "add-3": (3, 4)}
    assert plan.arena_bytes == {"cpu": 4 * 512} and plan.extents[scratch].offset == 3 * 512


def test_operands_of_a_node_that_others_run_together_with():
    """`until`: what is read until a later node lies apart from that node's result."""
    g = Graph()
    first = g.scale(g.input("x", "f32", (1, 1000)), factor=2.0)
    second = g.scale(first, factor=2.0)
    third = g.scale(second, factor=2.0)
    g.outputs = [third]
    lies_over = plan_memory(g.live(), g.outputs, lambda t: 4000).extents
    apart = plan_memory(g.live(), g.outputs, lambda t: 4000, until={first: third.node}).extents
    assert lies_over[third].offset == lies_over[first].offset
    assert apart[third].offset == 2 * 4096 and (apart[first].first, apart[first].last) == (0, 2)


def test_wrong_input_shape_is_named():
    g = Graph()
    g.outputs = [g.scale(g.input("x", "f32", (2, 3)), factor=2.0)]
    with pytest.raises(ValueError, match=r"x: f32 \[2, 3\]: got an array of shape \(3, 2\)"):
        Program(g, Arenas({"cpu": CPUBackend()})).run({"x": np.zeros((3, 2), np.float32)})
