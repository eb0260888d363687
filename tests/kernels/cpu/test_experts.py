"""Mixture of experts: kernels/cpu equals kernels/reference bit for bit, products with experts equal dense ones,
and dispatch is a stable permutation."""
from itertools import product

import numpy as np
import pytest
from cpu_comparisons import (N_EXPERT, SPECIAL, attention_case, compare, compare_attention, compute, f32, matrix_of, numbers,
                             only_array, positions, router_rows, seeded, stack)
from guarded_cpu import two_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from op_runs import product_input

from ggml_py.backends.cpu import CPUBackend
from ggml_py.check.evaluate import Value
from ggml_py.graph.graph import Graph, GraphError, Tensor
from ggml_py.graph.program import Arenas, Program
from ggml_py.kernels.reference import dispatch
from ggml_py.ops.compose import GATINGS, GLU
from ggml_py.quant import tile
from ggml_py.quant.formats import FORMATS
from ggml_py.quant.quantize import quantize
from ggml_py.testing import assert_bitwise_equal

ROOMS = "reference", "cpu"
WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.planes]


# Routing

def expected_top_k(x, k):
    """By a stable sort of numpy's."""
    return np.argsort(-np.where(np.isnan(x), -np.inf, x), axis=1, kind="stable")[:, :k].astype(np.int32)


@pytest.mark.parametrize("n_expert", N_EXPERT)
def test_routing(n_expert, n_threads):
    rng = seeded(f"routing {n_expert}")
    x, bias = router_rows(n_expert, rng), numbers((1, n_expert), rng)
    for op in "soft_max", "sigmoid":
        compare(f"{n_expert}", op, x)
    for k in sorted({1, 2, 8, min(32, n_expert), n_expert}):
        ids = only_array(compare(f"{n_expert}", "top_k", x, k=k))
        assert np.array_equal(ids, expected_top_k(x, k))
        compare(f"{n_expert}, k={k}", "take_columns", bias.repeat(len(x), 0), ids)
        compare(f"{k}", "normalize", x[:, :k])
    for n_group in (n for n in (1, 2, 4, 8, n_expert // 2) if n_expert % n == 0 and n < n_expert):
        for used in sorted({1, (n_group + 1) // 2, n_group}):
            compare(f"{n_expert}, {n_group}, {used}", "mask_groups", x, n_group=n_group, n_group_used=used)


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("n_expert", N_EXPERT)
def test_topk_moe(n_expert, gating, n_threads):
    """The ops one after the other, and the CPU's one pass."""
    rng = seeded(f"topk_moe {n_expert}")
    x, bias = router_rows(n_expert, rng), numbers((1, n_expert), rng)[0]
    for k, biases, groups, norm, factor in (
            (1, [], (0, 0), False, 1), (8, [bias], (0, 0), True, 2.5), (6, [], (2, 1), True, 1), (4, [bias], (4, 2), False, 0.3)):
        if groups[0] and n_expert % groups[0]:
            groups = 0, 0
        compare(f"{n_expert}, {gating}, {k}, {groups}, {norm}", "topk_moe", x, *biases, k=k, gating=gating, norm=norm,
                factor=factor, n_group=groups[0], n_group_used=groups[1])


def test_topk_moe_is_the_ops_one_after_the_other():
    """As graphs have them; an op made alone has its ids beside the weights."""
    x, bias = router_rows(12, seeded("graph")), numbers((1, 12), seeded("bias"))[0]
    backends = {"cpu": CPUBackend()}
    leaf = Tensor("bias", "f32", bias.shape, buffer=backends["cpu"].upload(bias))
    g = Graph()
    logits = g.input("x", "f32", x.shape)
    probs = g.sigmoid(logits)
    ids = g.top_k(g.mask_groups(g.add(probs, leaf), n_group=3, n_group_used=2), k=4)
    g.outputs = [g.scale(g.normalize(g.take_columns(probs, ids)), factor=2.5), ids]
    expected = Program(g, Arenas(backends), "all").run({"x": x})
    g = Graph()
    logits = g.input("x", "f32", x.shape)
    weights, ids = g.topk_moe(logits, leaf, k=4, gating="sigmoid", norm=True, factor=2.5, n_group=3, n_group_used=2)
    assert ids.dtype == "i32" and ids.shape == (12, 4)
    g.outputs = [weights, ids]
    program = Program(g, Arenas(backends))
    assert [node.op for node in program.nodes] == ["topk_moe"]
    for a, b in zip(program.run({"x": x}), expected, strict=True):
        assert_bitwise_equal(a, b, "topk_moe")


def test_masked_groups_are_those_of_the_smaller_sums():
    out = only_array(compute("mask_groups", f32([[5, 0, 3, 3, 4, 1.5, 9, -9]]), n_group=4, n_group_used=2))
    assert out.tolist() == [[-np.inf] * 2 + [3, 3] + [4, 1.5] + [-np.inf] * 2]  # sums 5, 6, 5.5, 0
    out = only_array(compute("mask_groups", f32([[1, 2, 2, 1, 0, 3]]), n_group=3, n_group_used=2))
    assert out.tolist() == [[1, 2, 2, 1, -np.inf, -np.inf]]  # of equal sums the first ones


def test_normalize_does_not_divide_by_less_than_its_clamp():
    out = only_array(compute("normalize", f32([[2.0**-20, 2.0**-20], [0, 0], [3, 1], [np.nan, 1]])))
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
    (np.full((8192, 8), 127, np.int32), 128), (np.zeros((1, 1), np.int32), 1), (np.zeros((0, 8), np.int32), 512),
    (np.full((5, 32), 3, np.int32), 8),
    (np.arange(8192 * 8, dtype=np.int32).reshape(8192, 8) % 509, 512)],
                         ids=["all on one", "one", "none", "repeated within a token", "many"])
def test_dispatch_at_its_extremes(ids, n_expert):
    check_dispatch(ids, n_expert)


@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1, -2**31])
def test_ids_out_of_range_are_errors(bad):
    ids = np.zeros((3, 2), np.int32)
    ids[1, 1] = bad
    with pytest.raises(IndexError, match=rf"^ffn_moe_up-3: token 1 has expert {bad} at rank 1, allowed: 0 to 7$"):
        dispatch.check_ids(ids, 8, "ffn_moe_up-3")
    x, rows = np.zeros((3, 8), f32), np.zeros((6, 32), f32)
    w = Value("w", "F32", (8, 32, 8), (np.zeros(8 * 32 * 256, np.uint32),))
    bias, scale = np.zeros((8, 32), f32), np.zeros(8, f32)
    calls = ("mul_mat_id", w, x), ("add_id", rows, bias), ("scale_id", rows, scale), ("take_columns", x)
    for room, (op, *operands) in product(ROOMS, calls):
        with pytest.raises(IndexError, match="^node: token 1 has expert"):
            compute(op, *operands, ids, room=room, name="node")


# Products

def check_mul_mat_id(type_, n_expert, m, k, ids, b, reference=True):
    """Against the reference, and each expert's rows against its dense product with all of x."""
    name = f"{type_}, X={n_expert}, m={m}, k={k}, ids={ids.shape}, b={b}"
    rng = seeded(name)
    n, u = ids.shape
    w, x = stack(type_, n_expert, m, k, rng), product_input(type_, numbers((n * b, k), rng))
    found = only_array(compare(name, "mul_mat_id", w, x, ids) if reference else compute("mul_mat_id", w, x, ids))
    dense = {int(e): only_array(compute("mul_mat", matrix_of(w, e), x)) for e in np.unique(ids)}
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


@pytest.mark.parametrize("type_", ["F32", "Q8_0"])
def test_no_token_no_product(type_):
    w, x, ids = stack(type_, 8, 32, 32, seeded("none")), product_input(type_, np.zeros((0, 32), f32)), np.zeros((0, 2), np.int32)
    assert only_array(compare("no token", "mul_mat_id", w, x, ids)).shape == (0, 32)


@pytest.mark.parametrize("type_", ["Q8_0", "F32"])
def test_mul_mat_heads(type_):
    rng = seeded("heads")
    w, rows = stack(type_, 3, 40, 64, rng), numbers((15, 64), rng)
    found = only_array(compare(type_, "mul_mat_heads", w, product_input(type_, rows)))
    for h in range(3):
        dense = compute("mul_mat", matrix_of(w, h), product_input(type_, rows[h::3]))
        assert_bitwise_equal(found[h::3], only_array(dense), f"head {h}")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("act", [*GLU, "swiglu_oai"])
@pytest.mark.parametrize("types", [("Q8_0", "Q8_0"), ("Q4_K", "Q4_1"), ("F16", "F32")], ids="-".join)
def test_mul_mat_id_glu(types, act, biased, n_threads):
    rng = seeded(f"{types} {act}")
    for n, u, b, n_expert in (1, 4, 1, 8), (7, 3, 3, 60):
        weights = [stack(type_, n_expert, 33, 256, rng) for type_ in types]
        x, ids = product_input(types[0], numbers((n * b, 256), rng)), rng.integers(0, n_expert, (n, u)).astype(np.int32)
        biases, params = numbers((2, n_expert, 33), rng) if biased else (), {"act": act, "alpha": 1.702, "limit": 7}
        name = f"{types}, {act}, n={n}, u={u}, b={b}, X={n_expert}, biased={biased}"
        compare(name, "mul_mat_id_glu", *weights, x, ids, *biases, **params)
        ids[-1, -1] = n_expert
        with pytest.raises(IndexError,
                           match=f"^node: token {n - 1} has expert {n_expert} at rank {u - 1}, allowed: 0 to {n_expert - 1}$"):
            compute("mul_mat_id_glu", *weights, x, ids, *biases, name="node", **params)


# On two devices

PARTS = "router", "gate", "up", "act", "down", "sum"


def layer_of_experts(backends, tensors, places):
    """A graph from a norm to the weighted sum; places: {part of PARTS: device}."""
    g = Graph("cpu")
    upload = lambda name, type_, shape: Tensor(name, type_, shape, g.device, buffer=backends[g.device].upload(tensors[name]))
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
    rng, backends = seeded("neighbours"), {backend.device: backend for backend in two_devices()}
    normal = lambda *shape: rng.standard_normal(shape).astype(f32)
    tensors = {"norm": normal(256), "router": tile.pack(normal(6, 256).view(np.uint8), "F32", 6, 256),
               **{name: tile.pack(quantize(normal(6 * m, k), "Q8_0"), "Q8_0", m, k, 6)
                  for name, m, k in (("gate", 64, 256), ("up", 64, 256), ("down", 256, 64))}}
    x, arenas, expected = normal(9, 256), Arenas(backends), None
    for devices in product(("cpu", "cpu:1"), repeat=len(PARTS)):
        places = dict(zip(PARTS, devices))
        for no_fuse in "all", ():
            program = Program(layer_of_experts(backends, tensors, places), arenas, no_fuse, lambda node: node.device)
            ops, glu_is_one = {node.op for node in program.nodes}, places["gate"] == places["up"] == places["act"]
            assert {"topk_moe", "mul_mat_id_glu", "swiglu_act"} & ops == (set() if no_fuse else {
                "topk_moe", *["mul_mat_id_glu"] * glu_is_one,
                *["swiglu_act"] * (not glu_is_one and places["act"] == places["down"])}), places
            found = program.run({"x": x})[0]
            expected = found if expected is None else expected
            assert_bitwise_equal(found, expected, f"{places}, no_fuse={no_fuse!r}")
    assert np.isfinite(expected).all() and expected.std() > 1


# Around them

@pytest.mark.parametrize("n, u, m", [(0, 2, 8), (1, 8, 33), (5, 3, 257), (4, 2, 1 << 16)])
def test_biases_scales_and_weighted_sums(n, u, m, n_threads):
    rng = seeded(f"experts {n} {u} {m}")
    x, ids = numbers((n * u, m), rng), rng.integers(0, 9, (n, u)).astype(np.int32)
    bias, factor = numbers((9, m), rng), numbers(9, rng)
    with np.errstate(all="ignore"):
        assert_bitwise_equal(only_array(compare("", "add_id", x, bias, ids)), x + bias[ids.ravel()], "add_id")
        assert_bitwise_equal(only_array(compare("", "scale_id", x, factor, ids)), x * factor[ids.ravel(), None], "scale_id")
    compare("", "weighted_sum", x, numbers((n, u), rng))


def test_weighted_sum_goes_by_rank():
    x, ones = f32([[2.0**24], [1], [-2.0**24], [1]]), np.ones((1, 4), f32)
    assert only_array(compute("weighted_sum", x, ones))[0, 0] == 1
    assert only_array(compute("weighted_sum", x[[0, 2, 1, 3]], ones))[0, 0] == 2


@pytest.mark.parametrize("n, k", [(1, 1), (7, 257), (5, 1 << 18)])
def test_swiglu_oai(n, k, n_threads):
    rng = seeded(f"swiglu_oai {n} {k}")
    compare(f"n={n}, k={k}", "swiglu_oai", numbers((n, k), rng), numbers((n, k), rng), alpha=1.702, limit=7)


def test_swiglu_oai_is_clamped():
    g, u = np.meshgrid(SPECIAL, SPECIAL)
    out = only_array(compute("swiglu_oai", g, u, alpha=1.702, limit=7))
    a, b = np.minimum(g.astype(np.float64), 7), np.clip(u.astype(np.float64), -7, 7)
    with np.errstate(all="ignore"):
        expected = a / (1 + np.exp(-1.702 * a)) * (b + 1)
    finite = np.isfinite(expected)
    assert np.allclose(out[finite], expected[finite], rtol=1e-5, atol=1e-30) and np.isnan(out[np.isnan(g) | np.isnan(u)]).all()


def test_heads_apart_and_together(n_threads):
    rng = seeded("heads")
    for n in 0, 1, 9:
        x, y = numbers((n, 4, 24), rng), numbers((n, 4, 10), rng)
        found = only_array(compare(f"n={n}", "slice_heads", x.reshape(n, 96), n_head=4, first=6, n=11))
        assert_bitwise_equal(found, x[:, :, 6:17].reshape(n, 44), "slice_heads")
        for other in y, y[:, :1]:
            rows, heads = [x.reshape(n, 96), other.reshape(n, other.shape[1] * 10)], {"n_head": 4, "n_head_y": other.shape[1]}
            expected = np.concatenate([x, np.broadcast_to(other, (n, 4, 10))], 2).reshape(n, 4 * 34)
            assert_bitwise_equal(only_array(compare(f"n={n}", "concat_heads", *rows, **heads)), expected, "concat_heads")


# Attention with a window, with sinks, and with values that lie in K's cache

@pytest.mark.parametrize("type_", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("window", [1, 16, 127, 128, 129, 500])
def test_windows_and_sinks(type_, window, n_threads):
    rng = seeded(f"window {window}")
    operands, params = attention_case(type_, type_, 6, 2, 64, 64, 320, positions((0, 0, 40), (0, 280, 12), (1, 120, 30)), rng)
    with_sinks = (*operands, numbers(6, rng)), params
    compare_attention(f"window={window}", (operands, params), window=window)
    compare_attention("sinks", with_sinks)
    compare_attention(f"window={window}, sinks", with_sinks, window=window)


def test_windows_and_sinks_against_float64():
    operands, params = attention_case("f32", "f32", 4, 1, 32, 32, 300, positions((0, 0, 300)), seeded("float64"))
    (q, k, v, seq, pos, present), sinks = operands, f32([-2, 0, 1, 30])
    out = only_array(compute("flash_attn_ext", q, k, v, seq, pos, present, sinks, window=100, **params)).reshape(300, 4, 32)
    s = np.einsum("ihc,jc->hij", q.reshape(300, 4, 32).astype(np.float64), k.arrays[0]) * params["scale"]
    i, j = np.arange(300)[:, None], np.arange(300)
    s = np.where((j <= i) & (i - j < 100), s, -np.inf)
    s = np.concatenate([s, np.broadcast_to(sinks[:, None, None], (4, 300, 1))], 2)
    p = np.exp(s - s.max(2, keepdims=True))
    expected = np.einsum("hij,jc->ihc", (p / p.sum(2, keepdims=True))[..., :-1], v.arrays[0])
    assert np.abs(out - expected).max() < 1e-4


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("type_", ["f32", "f16", "q8_0"])
def test_values_in_the_cache_of_keys(type_, room):
    """Those of a cache of their own."""
    (q, k, _, *others), params = attention_case(type_, type_, 4, 1, 96, 64, 200, positions((0, 100, 60)), seeded("mla"))
    own = Value("v", type_, (k.shape[0], 64), (k.arrays[0][:, :{"f32": 64, "f16": 64, "q8_0": 2 * 34}[type_]],))
    together = only_array(compute("flash_attn_ext", q, k, k, *others, n_embd_head_v=64, room=room, **params))
    apart = only_array(compute("flash_attn_ext", q, k, own, *others, room=room, **params))
    assert_bitwise_equal(together, apart, f"flash_attn_ext[{type_}, values in K]")


# Shapes that cannot be

def weight(dtype, *shape):
    return Tensor("w", dtype, shape)


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
    (lambda g: g.top_k(g.input("x", "f32", (6, 8)), k=9, name="ids"),
     "ids: top_k: k is 9, of 8 columns; operands: x: f32 [6, 8]"),
    (lambda g: g.mask_groups(g.input("x", "f32", (6, 8)), n_group=3, n_group_used=1, name="groups"),
     "groups: mask_groups: 8 columns are not 3 groups of two or more; operands: x: f32 [6, 8]"),
    (lambda g: g.mask_groups(g.input("x", "f32", (6, 8)), n_group=8, n_group_used=1, name="groups"),
     "groups: mask_groups: 8 columns are not 8 groups of two or more; operands: x: f32 [6, 8]"),
    (lambda g: g.add_id(g.input("x", "f32", (6, 8)), g.input("b", "f32", (4, 8)), g.input("ids", "i32", (2, 2)), name="biased"),
     "biased: add_id: x must be [4, 8]; operands: x: f32 [6, 8]; b: f32 [4, 8]; ids: i32 [2, 2]"),
    (lambda g: g.scale_id(g.input("x", "f32", (6, 8)), g.input("s", "f32", (4,)), g.input("ids", "i32", (2, 2)), name="scaled"),
     "scaled: scale_id: x must have 4 rows, for 2 tokens with 2 experts; operands: x: f32 [6, 8]; s: f32 [4]; ids: i32 [2, 2]"),
])
def test_errors_name_the_node(build, message):
    with pytest.raises(GraphError) as error:
        build(Graph())
    assert str(error.value) == message
