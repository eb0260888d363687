"""Mixture of experts: kernels/cpu equals kernels/reference bit for bit, products with experts equal dense ones, and dispatch is a stable permutation."""
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_weights import random_weight
from test_cpu_ops import SPECIAL, attention_case, compare, f32, n_threads, numbers, positions, seeded  # noqa: F401

from ggml_py.backends.cpu import CPUBackend
from ggml_py.graph import Graph, GraphError, Tensor
from ggml_py.kernels.cpu import elementwise, experts, flash_attn_ext, glu, heads, mul_mat, mul_mat_id, mul_mat_id_glu, quantize, routing, soft_max, topk_moe
from ggml_py.kernels.reference import dispatch
from ggml_py.kernels.reference import elementwise as reference_elementwise
from ggml_py.kernels.reference import experts as reference_experts
from ggml_py.kernels.reference import flash_attn_ext as reference_flash_attn_ext
from ggml_py.kernels.reference import glu as reference_glu
from ggml_py.kernels.reference import heads as reference_heads
from ggml_py.kernels.reference import mul_mat_id as reference_mul_mat_id
from ggml_py.kernels.reference import mul_mat_id_glu as reference_mul_mat_id_glu
from ggml_py.kernels.reference import routing as reference_routing
from ggml_py.kernels.reference import soft_max as reference_soft_max
from ggml_py.kernels.reference import topk_moe as reference_topk_moe
from ggml_py.ops import GATINGS
from ggml_py.program import Arenas, Program
from ggml_py.quant import tile
from ggml_py.quant.formats import FORMATS
from ggml_py.quant.quantize import quantize as quantize_weight
from ggml_py.testing import assert_bitwise_equal

WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.planes]
N_EXPERT = [8, 60, 128, 160, 257, 512]


# Routing

def router_rows(n_expert, rng):
    """float32 [n, n_expert]: rows of many values and of few, so that there are ties; of one value; with zeros of both signs, infinities and NaN."""
    x = numbers((12, n_expert), rng)
    x[1], x[2], x[3] = rng.choice(f32([0.25, 0.5]), n_expert), 0.125, rng.choice(f32([-0.0, 0]), n_expert)
    x[4], x[5], x[6] = np.nan, -np.inf, np.inf
    x[7, ::3], x[8, :-1], x[9] = np.nan, np.nan, rng.choice(SPECIAL, n_expert)
    return x


def expected_top_k(x, k):
    """By a stable sort of numpy's."""
    return np.argsort(-np.where(np.isnan(x), -np.inf, x), axis=1, kind="stable")[:, :k].astype(np.int32)


@pytest.mark.parametrize("n_expert", N_EXPERT)
def test_routing(n_expert, n_threads):
    rng = seeded(f"routing {n_expert}")
    x, bias = router_rows(n_expert, rng), numbers((1, n_expert), rng)
    out = x.shape, f32
    compare(f"soft_max[{n_expert}]", reference_soft_max.soft_max, soft_max.soft_max, (x,), out)
    compare(f"sigmoid[{n_expert}]", reference_elementwise.sigmoid, elementwise.sigmoid, (x,), out)
    for k in sorted({1, 2, 8, min(32, n_expert), n_expert}):
        compare(f"top_k[{n_expert}, k={k}]", reference_routing.top_k, routing.top_k, (x,), ((len(x), k), np.int32))
        ids = np.empty((len(x), k), np.int32)
        routing.top_k(x, ids)
        assert np.array_equal(ids, expected_top_k(x, k))
        compare(f"take_columns[{n_expert}, k={k}]", lambda *a: reference_routing.take_columns(*a, "node"), lambda *a: routing.take_columns(*a, "node"),
                (bias.repeat(len(x), 0), ids), (ids.shape, f32))
        compare(f"normalize[{k}]", reference_routing.normalize, routing.normalize, (np.ascontiguousarray(x[:, :k]),), (ids.shape, f32))
    for n_group in (n for n in (1, 2, 4, 8, n_expert // 2) if n_expert % n == 0):
        for used in sorted({1, (n_group + 1) // 2, n_group}):
            compare(f"mask_groups[{n_expert}, {n_group}, {used}]", reference_routing.mask_groups, routing.mask_groups, (x, n_group, used), out)


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("n_expert", N_EXPERT)
def test_topk_moe(n_expert, gating, n_threads):
    """The ops one after the other, and the CPU's one pass."""
    rng = seeded(f"topk_moe {n_expert}")
    x, bias, nothing = router_rows(n_expert, rng), numbers((1, n_expert), rng)[0], np.empty(0, f32)
    for k, b, groups, norm, factor in (
            (1, nothing, (0, 0), False, 1), (8, bias, (0, 0), True, 2.5), (6, nothing, (2, 1), True, 1), (4, bias, (4, 2), False, 0.3)):
        if groups[0] and n_expert % groups[0]:
            groups = 0, 0
        compare(f"topk_moe[{n_expert}, {gating}, {k}, {groups}, {norm}]", reference_topk_moe.topk_moe(gating), topk_moe.topk_moe(gating),
                (x, b, *groups, norm, f32(factor)), ((len(x), k), f32), ((len(x), k), np.int32))


def test_topk_moe_is_the_ops_one_after_the_other():
    """As graphs have them; an op made alone has its ids beside the weights."""
    x, bias = router_rows(12, seeded("graph")), vector_leaf(numbers((1, 12), seeded("bias"))[0])
    g = Graph()
    logits = g.input("x", "f32", x.shape)
    probs = g.sigmoid(logits)
    ids = g.top_k(g.mask_groups(g.add(probs, bias), n_group=3, n_group_used=2), k=4)
    g.outputs = [g.scale(g.normalize(g.take_columns(probs, ids)), factor=2.5), ids]
    expected = Program(g, Arenas({"cpu": CPUBackend()}), "all").run({"x": x})
    g = Graph()
    weights = g.topk_moe(g.input("x", "f32", x.shape), bias, k=4, gating="sigmoid", norm=True, factor=2.5, n_group=3, n_group_used=2)
    assert weights.also[0].dtype == "i32" and weights.also[0].shape == (12, 4)
    g.outputs = [weights, *weights.also]
    for a, b in zip(Program(g, Arenas({"cpu": CPUBackend()})).run({"x": x}), expected):
        assert_bitwise_equal(a, b, "topk_moe")


def vector_leaf(x):
    return Tensor("bias", "f32", x.shape, device="cpu", storage=(CPUBackend().upload(x), 0))


def test_masked_groups_are_those_of_the_smaller_sums():
    x = f32([[5, 0, 3, 3, 4, 1.5, 9, -9]])
    out = np.empty_like(x)
    routing.mask_groups(x, 4, 2, out)
    assert out.tolist() == [[-np.inf] * 2 + [3, 3] + [4, 1.5] + [-np.inf] * 2]  # sums 5, 6, 5.5, 0
    routing.mask_groups(f32([[1, 2, 2, 1, 0, 3]]), 3, 2, out[:, :6])
    assert out[:, :6].tolist() == [[1, 2, 2, 1, -np.inf, -np.inf]]  # of equal sums the first ones


def test_normalize_does_not_divide_by_less_than_its_clamp():
    x, out = f32([[2.0**-20, 2.0**-20], [0, 0], [3, 1], [np.nan, 1]]), np.empty((4, 2), f32)
    routing.normalize(x, out)
    assert_bitwise_equal(out, f32([[2.0**-6, 2.0**-6], [0, 0], [0.75, 0.25], [np.nan, np.nan]]), "normalize")


# Dispatch

@st.composite
def batches(draw):
    """(ids i32 [n, u], number of experts)."""
    n_expert = draw(st.integers(1, 512))
    n, u = draw(st.integers(0, 40)), draw(st.integers(1, 32))
    some = draw(st.lists(st.integers(0, n_expert - 1), min_size=1, max_size=n_expert, unique=True))  # the others have no row
    return np.random.default_rng(draw(st.integers(0, 2**32))).choice(np.int32(some), (n, u)), n_expert


@settings(deadline=None, max_examples=200)
@given(batches())
def test_dispatch(batch):
    ids, n_expert = batch
    check_dispatch(ids, n_expert)


def check_dispatch(ids, n_expert):
    flat = ids.reshape(-1)
    bounds, order, rows = np.empty(n_expert + 1, np.int64), np.full(flat.size, -1), np.full(flat.size, -1)
    dispatch.sort_by_expert(flat, bounds, order)
    assert np.array_equal(order, np.argsort(flat, kind="stable"))  # a permutation, stable
    assert np.array_equal(np.diff(bounds), np.bincount(flat, minlength=n_expert)) and bounds[0] == 0
    assert all((flat[order[bounds[e]:bounds[e + 1]]] == e).all() for e in range(n_expert))
    dispatch.invert(order, rows)
    assert np.array_equal(order[rows], np.arange(flat.size)) and np.array_equal(rows[order], np.arange(flat.size))


@pytest.mark.parametrize("ids, n_expert", [
    (np.full((8192, 8), 127, np.int32), 128), (np.zeros((1, 1), np.int32), 1), (np.zeros((0, 8), np.int32), 512), (np.full((5, 32), 3, np.int32), 8),
    (np.arange(8192 * 8, dtype=np.int32).reshape(8192, 8) % 509, 512)], ids=["all on one", "one", "none", "repeated within a token", "many"])
def test_dispatch_at_its_extremes(ids, n_expert):
    check_dispatch(ids, n_expert)


@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1, -2**31])
def test_ids_out_of_range_are_errors(bad):
    ids = np.zeros((3, 2), np.int32)
    ids[1, 1] = bad
    with pytest.raises(IndexError, match=rf"^ffn_moe_up-3: token 1 has expert {bad} at rank 1, allowed: 0 to 7$"):
        dispatch.check_ids(ids, 8, "ffn_moe_up-3")
    words, x, out = np.zeros((8, 32 * 256), np.uint32), np.zeros((3, 4), f32), np.empty((6, 32), f32)
    for kernel in reference_mul_mat_id.mul_mat_id("F32"), mul_mat_id.mul_mat_id("F32"):
        with pytest.raises(IndexError, match="^node: token 1 has expert"):
            kernel(words, x, ids, out, "node")
    for kernel in reference_experts.add_id, experts.add_id:
        with pytest.raises(IndexError, match="^node: token 1 has expert"):
            kernel(out, np.zeros((8, 32), f32), ids, out, "node")
    for kernel in reference_experts.scale_id, experts.scale_id:
        with pytest.raises(IndexError, match="^node: token 1 has expert"):
            kernel(out, np.zeros(8, f32), ids, out, "node")
    for kernel in reference_routing.take_columns, routing.take_columns:
        with pytest.raises(IndexError, match="^node: token 1 has expert"):
            kernel(np.zeros((3, 8), f32), ids, np.empty((3, 2), f32), "node")


# Products

def stack(type_, n_expert, m, k, rng):
    """u32 [n_expert, words]: the tiles of n_expert matrices [m, k]."""
    data = random_weight(FORMATS[type_], n_expert * m, k, rng)
    return tile.pack(data, type_, m, k, n_expert).reshape(n_expert, -1).view(np.uint32)


def factor(type_, x):
    """x as a weight of this type takes it."""
    if not FORMATS[type_].is_quantized:
        return (x,)
    n, n_chunks = len(x), -(-x.shape[1] // 256)
    act = np.empty((n, n_chunks * 256), np.int16), np.empty((n, n_chunks), f32), np.empty((n, n_chunks * 16), np.int32)
    quantize.quantize(x, *act)
    return act


def check_mul_mat_id(type_, n_expert, m, k, ids, b, reference=True):
    """Against the reference, and each expert's rows against its dense product with all of x."""
    name = f"mul_mat_id[{type_}, X={n_expert}, m={m}, k={k}, ids={ids.shape}, b={b}]"
    rng = seeded(name)
    n, u = ids.shape
    words, x = stack(type_, n_expert, m, k, rng), factor(type_, numbers((n * b, k), rng))
    found = np.full((n * u, m), 2, f32)
    mul_mat_id.mul_mat_id(type_)(words, *x, ids, found, "node")
    if reference:
        expected = np.empty_like(found)
        reference_mul_mat_id.mul_mat_id(type_)(words, *x, ids, expected, "node")
        assert_bitwise_equal(found, expected, name)
    dense = {int(e): np.empty((n * b, m), f32) for e in np.unique(ids)}
    for e, out in dense.items():
        mul_mat.mul_mat(type_)(words[e], *x, out)
    for t in range(n):
        for j in range(u):
            assert_bitwise_equal(found[t * u + j], dense[int(ids[t, j])][t * b + j % b], f"{name} token {t} rank {j}")


@pytest.mark.parametrize("type_", WEIGHTS)
def test_mul_mat_id_of_every_type(type_):
    fmt, rng = FORMATS[type_], seeded(type_)
    k = 256 + fmt.block_size if fmt.block_size < 256 else 512
    check_mul_mat_id(type_, 5, 33, k, rng.integers(0, 5, (3, 2)).astype(np.int32), 1)


@pytest.mark.parametrize("type_", ["Q4_K", "F32"])
@pytest.mark.parametrize("n_expert, u, b", [(8, 2, 2), (60, 4, 1), (60, 4, 2), (128, 8, 8), (512, 32, 1), (384, 6, 3)])
def test_mul_mat_id_by_experts_and_broadcasting(type_, n_expert, u, b, n_threads):
    for n in 1, 7:
        ids = seeded(f"{n_expert} {n}").integers(0, n_expert, (n, u)).astype(np.int32)
        check_mul_mat_id(type_, n_expert, 33, 256, ids, b)
    check_mul_mat_id(type_, n_expert, 33, 256, np.full((5, u), n_expert - 1, np.int32), b)


@pytest.mark.parametrize("type_", ["Q8_0", "F16"])
def test_mul_mat_id_in_parallel(type_, n_threads):
    """Enough for two threads; experts without rows, all rows on one, and one with more than a unit's columns."""
    rng = seeded("parallel")
    check_mul_mat_id(type_, 16, 96, 512, rng.integers(3, 11, (200, 4)).astype(np.int32), 1, reference=False)
    check_mul_mat_id(type_, 16, 96, 512, np.full((300, 2), 7, np.int32), 2, reference=False)


def test_no_token_no_product():
    for kernel in reference_mul_mat_id.mul_mat_id("F32"), mul_mat_id.mul_mat_id("F32"):
        kernel(np.zeros((8, 32 * 256), np.uint32), np.zeros((0, 4), f32), np.zeros((0, 2), np.int32), np.empty((0, 32), f32), "node")


@pytest.mark.parametrize("type_", ["Q8_0", "F32"])
def test_mul_mat_heads(type_):
    rng = seeded("heads")
    words, x = stack(type_, 3, 40, 64, rng), factor(type_, numbers((15, 64), rng))
    expected, found, one = np.empty((15, 40), f32), np.empty((15, 40), f32), np.empty((5, 40), f32)
    reference_mul_mat_id.mul_mat_heads(type_)(words, *x, expected)
    mul_mat_id.mul_mat_heads(type_)(words, *x, found)
    assert_bitwise_equal(found, expected, "mul_mat_heads")
    for h in range(3):
        mul_mat.mul_mat(type_)(words[h], *(np.ascontiguousarray(part[h::3]) for part in x), one)
        assert_bitwise_equal(found[h::3], one, f"head {h}")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("act", ["silu", "gelu", "relu", "swiglu_oai"])
@pytest.mark.parametrize("types", [("Q8_0", "Q8_0"), ("Q4_K", "Q4_1"), ("F16", "F32")], ids="-".join)
def test_mul_mat_id_glu(types, act, biased, n_threads):
    rng = seeded(f"{types} {act}")
    for n, u, b, n_expert in (1, 4, 1, 8), (7, 3, 3, 60):
        words = [stack(type_, n_expert, 33, 256, rng) for type_ in types]
        x, ids = factor(types[0], numbers((n * b, 256), rng)), rng.integers(0, n_expert, (n, u)).astype(np.int32)
        biases = tuple(numbers((2, n_expert, 33), rng)) if biased else ()
        results = []
        for room in reference_mul_mat_id_glu, mul_mat_id_glu:
            out = np.full((n * u, 33), 2, f32)
            room.mul_mat_id_glu(act, *types)(*words, x, ids, biases, f32(1.702), f32(7), out, np.empty_like(out), "node")
            results.append(out)
        assert_bitwise_equal(*results, f"mul_mat_id_glu[{types}, {act}, n={n}, u={u}, b={b}, X={n_expert}, biased={biased}]")
        ids[-1, -1] = n_expert
        with pytest.raises(IndexError, match=f"^node: token {n - 1} has expert {n_expert} at rank {u - 1}, allowed: 0 to {n_expert - 1}$"):
            room.mul_mat_id_glu(act, *types)(*words, x, ids, biases, f32(1.702), f32(7), out, np.empty_like(out), "node")


# On two devices

PARTS = "router", "gate", "up", "act", "down", "sum"


def layer_of_experts(backends, tensors, places):
    """A graph from a norm to the weighted sum; places: {part of PARTS: device}."""
    g = Graph("cpu")
    upload = lambda name, type_, shape: Tensor(name, type_, shape, device=g.device, storage=(backends[g.device].upload(tensors[name]), 0))
    h = g.rms_norm(g.input("x", "f32", (9, 256)), upload("norm", "f32", (256,)), eps=1e-5)
    g.device = places["router"]
    probs = g.soft_max(g.mul_mat(upload("router", "F32", (6, 256)), h))
    ids = g.top_k(probs, k=3)
    weights = g.normalize(g.take_columns(probs, ids))
    g.device = places["gate"]
    gate = g.mul_mat_id(upload("gate", "Q8_0", (6, 64, 256)), h, ids)
    g.device = places["up"]
    up = g.mul_mat_id(upload("up", "Q8_0", (6, 64, 256)), h, ids)
    g.device = places["act"]
    y = g.swiglu(gate, up)
    g.device = places["down"]
    y = g.mul_mat_id(upload("down", "Q8_0", (6, 256, 64)), y, ids)
    g.device = places["sum"]
    g.outputs = [g.weighted_sum(y, weights)]
    return g


def test_neighbours_on_two_devices():
    """Every part of a layer here or there, fused with what is on its device or unfused: one result."""
    rng, backends = seeded("neighbours"), {device: CPUBackend(device=device) for device in ("cpu", "other")}
    normal = lambda *shape: rng.standard_normal(shape).astype(f32)
    tensors = {"norm": normal(256), "router": tile.pack(normal(6, 256).view(np.uint8), "F32", 6, 256),
               **{name: tile.pack(quantize_weight(normal(6 * m, k), "Q8_0"), "Q8_0", m, k, 6)
                  for name, m, k in (("gate", 64, 256), ("up", 64, 256), ("down", 256, 64))}}
    x, arenas, expected = normal(9, 256), Arenas(backends), None
    for devices in product(("cpu", "other"), repeat=len(PARTS)):
        places = dict(zip(PARTS, devices))
        for no_fuse in "all", ():
            program = Program(layer_of_experts(backends, tensors, places), arenas, no_fuse)
            ops, glu_is_one = {node.op for node in program.nodes}, places["gate"] == places["up"] == places["act"]
            assert {"topk_moe", "mul_mat_id_glu", "swiglu_act"} & ops == (set() if no_fuse else {
                "topk_moe", *["mul_mat_id_glu"] * glu_is_one, *["swiglu_act"] * (not glu_is_one and places["act"] == places["down"])}), places
            found = program.run({"x": x})[0]
            expected = found if expected is None else expected
            assert_bitwise_equal(found, expected, f"{places}, no_fuse={no_fuse!r}")
    assert np.isfinite(expected).all() and expected.std() > 1


# Around them

@pytest.mark.parametrize("n, u, m", [(0, 2, 8), (1, 8, 33), (5, 3, 257), (4, 2, 1 << 16)])
def test_biases_scales_and_weighted_sums(n, u, m, n_threads):
    rng = seeded(f"experts {n} {u} {m}")
    x, ids = numbers((n * u, m), rng), rng.integers(0, 9, (n, u)).astype(np.int32)
    compare("add_id", lambda *a: reference_experts.add_id(*a, "node"), lambda *a: experts.add_id(*a, "node"), (x, numbers((9, m), rng), ids), (x.shape, f32))
    compare("scale_id", lambda *a: reference_experts.scale_id(*a, "node"), lambda *a: experts.scale_id(*a, "node"), (x, numbers(9, rng), ids), (x.shape, f32))
    compare("weighted_sum", reference_experts.weighted_sum, experts.weighted_sum, (x.reshape(n, u, m), numbers((n, u), rng)), ((n, m), f32))


def test_weighted_sum_goes_by_rank():
    x, out = f32([[[2.0**24], [1], [-2.0**24], [1]]]), np.empty((1, 1), f32)
    experts.weighted_sum(x, np.ones((1, 4), f32), out)
    assert out[0, 0] == 1
    experts.weighted_sum(np.ascontiguousarray(x[:, [0, 2, 1, 3]]), np.ones((1, 4), f32), out)
    assert out[0, 0] == 2


@pytest.mark.parametrize("n, k", [(1, 1), (7, 257), (5, 1 << 18)])
def test_swiglu_oai(n, k, n_threads):
    rng = seeded(f"swiglu_oai {n} {k}")
    g, u = numbers((n, k), rng), numbers((n, k), rng)
    compare("swiglu_oai", reference_glu.swiglu_oai, glu.swiglu_oai, (g, u, f32(1.702), f32(7)), ((n, k), f32))


def test_swiglu_oai_is_clamped():
    g, u = np.meshgrid(SPECIAL, SPECIAL)
    g, u, out = np.ascontiguousarray(g), np.ascontiguousarray(u), np.empty(g.shape, f32)
    glu.swiglu_oai(g, u, f32(1.702), f32(7), out)
    a, b = np.minimum(g.astype(np.float64), 7), np.clip(u.astype(np.float64), -7, 7)
    with np.errstate(all="ignore"):
        expected = a / (1 + np.exp(-1.702 * a)) * (b + 1)
    finite = np.isfinite(expected)
    assert np.allclose(out[finite], expected[finite], rtol=1e-5, atol=1e-30) and np.isnan(out[np.isnan(g) | np.isnan(u)]).all()


def test_heads_apart_and_together(n_threads):
    rng = seeded("heads")
    for n in 0, 1, 9:
        x, y = numbers((n, 4, 24), rng), numbers((n, 4, 10), rng)
        compare("slice_heads", reference_heads.slice_heads, heads.slice_heads, (x, 6), ((n, 4, 11), f32))
        for other in y, np.ascontiguousarray(y[:, :1]):
            compare("concat_heads", reference_heads.concat_heads, heads.concat_heads, (x, other), ((n, 4, 34), f32))
            out = np.empty((n, 4, 34), f32)
            heads.concat_heads(x, other, out)
            assert_bitwise_equal(out, np.concatenate([x, np.broadcast_to(other, (n, 4, 10))], 2), "concat_heads")


# Attention with a window, with sinks, and with values that lie in K's cache

@pytest.mark.parametrize("type_", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("window", [1, 16, 127, 128, 129, 500])
def test_windows_and_sinks(type_, window, n_threads):
    rng = seeded(f"window {window}")
    case = attention_case(type_, type_, 6, 2, 64, 64, 320, positions((0, 0, 40), (0, 280, 12), (1, 120, 30)), rng)
    sinks = numbers(6, rng)
    kernels = reference_flash_attn_ext.flash_attn_ext(type_, type_), flash_attn_ext.flash_attn_ext(type_, type_)
    for given in {"window": window}, {"sinks": sinks}, {"window": window, "sinks": sinks}:
        compare(f"flash_attn_ext[{type_}, {given}]", *(lambda *a, kernel=kernel: kernel(*a, **given) for kernel in kernels), case, (case[0].shape, f32))


def test_windows_and_sinks_against_float64():
    rng = seeded("float64")
    q, k, v, _, seq, pos, present, scale = case = attention_case("f32", "f32", 4, 1, 32, 32, 300, positions((0, 0, 300)), rng)
    sinks, out = f32([-2, 0, 1, 30]), np.empty_like(q)
    flash_attn_ext.flash_attn_ext("f32", "f32")(*case, out, window=100, sinks=sinks)
    s = np.einsum("ihc,jc->hij", q.astype(np.float64), k) * scale
    i, j = np.arange(300)[:, None], np.arange(300)
    s = np.where((j <= i) & (i - j < 100), s, -np.inf)
    s = np.concatenate([s, np.broadcast_to(sinks[:, None, None], (4, 300, 1))], 2)
    p = np.exp(s - s.max(2, keepdims=True))
    expected = np.einsum("hij,jc->ihc", (p / p.sum(2, keepdims=True))[..., :-1], v)
    assert np.abs(out - expected).max() < 1e-4


@pytest.mark.parametrize("type_", ["f32", "f16", "q8_0"])
def test_values_in_the_cache_of_keys(type_):
    """Those of a cache of their own."""
    rng = seeded("mla")
    q, k, _, _, *others = attention_case(type_, type_, 4, 1, 96, 64, 200, positions((0, 100, 60)), rng)
    own = {"f32": k[:, :64], "f16": k[:, :64], "q8_0": k[:, :2 * 34]}[type_]
    for kernel in reference_flash_attn_ext.flash_attn_ext(type_, type_), flash_attn_ext.flash_attn_ext(type_, type_):
        together, apart = np.empty((60, 4, 64), f32), np.empty((60, 4, 64), f32)
        kernel(q, k, k, 1, *others, together)
        kernel(q, k, np.ascontiguousarray(own), 1, *others, apart)
        assert_bitwise_equal(together, apart, f"flash_attn_ext[{type_}, values in K]")


# Shapes that cannot be

def weight(dtype, *shape):
    return Tensor("w", dtype, shape, device="cpu", storage=(None, 0))


@pytest.mark.parametrize("build, message", [
    (lambda g: g.mul_mat_id(weight("F32", 8, 5, 64), g.input("x", "f32", (6, 64)), g.input("ids", "i32", (4, 2)), name="up"),
     "up: mul_mat_id: x has 6 rows, allowed for ids of 4 tokens with 2 experts: a divisor of 2 for each token; operands: "
     "w: F32 [8, 5, 64]; x: f32 [6, 64]; ids: i32 [4, 2]"),
    (lambda g: g.mul_mat_id(weight("F32", 8, 5, 64), g.input("x", "f32", (1, 64)), g.input("ids", "i32", (120, 1)), name="up"),
     "up: mul_mat_id: x has 1 rows, allowed for ids of 120 tokens with 1 experts: a divisor of 1 for each token; operands: "
     "w: F32 [8, 5, 64]; x: f32 [1, 64]; ids: i32 [120, 1]"),
    (lambda g: g.mul_mat_id(weight("F32", 5, 64), g.input("x", "f32", (1, 64)), g.input("ids", "i32", (1, 1)), name="up"),
     "up: mul_mat_id: w must be weight matrices [X, m, k]; operands: w: F32 [5, 64]; x: f32 [1, 64]; ids: i32 [1, 1]"),
    (lambda g: g.mul_mat_id(weight("F32", 8, 5, 60), g.input("x", "f32", (1, 64)), g.input("ids", "i32", (1, 1)), name="up"),
     "up: mul_mat_id: w has 60 columns, x 64; operands: w: F32 [8, 5, 60]; x: f32 [1, 64]; ids: i32 [1, 1]"),
    (lambda g: g.weighted_sum(g.input("x", "f32", (6, 64)), g.input("w", "f32", (2, 4)), name="sum"),
     "sum: weighted_sum: x must have 8 rows, for 2 tokens with 4 experts; operands: x: f32 [6, 64]; w: f32 [2, 4]"),
    (lambda g: g.top_k(g.input("x", "f32", (6, 8)), k=9, name="ids"), "ids: top_k: k is 9, of 8 columns; operands: x: f32 [6, 8]"),
    (lambda g: g.mask_groups(g.input("x", "f32", (6, 8)), n_group=3, n_group_used=1, name="groups"),
     "groups: mask_groups: 8 columns are not 3 groups of two or more; operands: x: f32 [6, 8]"),
    (lambda g: g.add_id(g.input("x", "f32", (6, 8)), g.input("b", "f32", (4, 8)), g.input("ids", "i32", (2, 2)), name="biased"),
     "biased: add_id: x must be [4, 8]; operands: x: f32 [6, 8]; b: f32 [4, 8]; ids: i32 [2, 2]"),
    (lambda g: g.scale_id(g.input("x", "f32", (6, 8)), g.input("s", "f32", (4,)), g.input("ids", "i32", (2, 2)), name="scaled"),
     "scaled: scale_id: x must have 4 rows, for 2 tokens with 2 experts; operands: x: f32 [6, 8]; s: f32 [4]; ids: i32 [2, 2]"),
])
def test_errors_name_the_node(build, message):
    with pytest.raises(GraphError) as error:
        build(Graph())
    assert str(error.value) == message
