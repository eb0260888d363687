"""kernels/cpu equals kernels/reference bit for bit, with one thread and with two; all operations but mul_mat alone."""
from functools import partial
from itertools import cycle, product

import numpy as np
import pytest
from cpu_comparisons import (FORMS, SPECIAL, attention_case, compare, compare_attention, compute, f32, holes, matrix, numbers,
                             only_array, positions, seeded)
from op_comparisons import draw_rows
from op_runs import define, empty_cache, product_input

from ggml_py.engine.sampling import Sampling, chosen
from ggml_py.kernels import arith, threads
from ggml_py.kernels.compile import jit
from ggml_py.kernels.cpu import amx, vector
from ggml_py.kernels.cpu.flash_attn_ext import flash_attn_ext_arrays
from ggml_py.kernels.cpu.sum_squares import add_squares
from ggml_py.kernels.cpu.vector import available_isas
from ggml_py.quant.formats import FORMATS
from ggml_py.testing import assert_bitwise_equal

COLUMNS = [1, 31, 32, 127, 128, 129, 255, 256, 257, 576, 1000]
LARGE = (5, 1 << 18)  # enough for two threads
SHAPES = [(n, k) for k in COLUMNS for n in (0, 1, 3)] + [LARGE]
CACHES = ["f32", "f16", "q8_0"]


def ids(cases):
    return ["x".join(map(str, case)) for case in cases]


@pytest.mark.parametrize("n, k", SHAPES, ids=ids(SHAPES))
def test_rows_of_floats(n, k, n_threads):
    rng = seeded(f"{n} {k}")
    x, y, w = numbers((n, k), rng), numbers((n, k), rng), numbers((1, k), rng)[0]
    name = f"n={n}, k={k}, threads={n_threads}"
    for op, second in product(("add", "mul"), (y, w)):
        compare(name, op, x, second)
    compare(name, "scale", x, factor=0.3)
    compare(name, "softcap", x, cap=30.0)
    for op in "swiglu", "geglu", "reglu", "swiglu_act":
        compare(name, op, x, y)
    compare(name, "quantize", x)
    compare(name, "gelu", x)
    for operands in (x, w), (x, w, w[::-1].copy()):
        compare(name, "layer_norm", *operands, eps=1e-5)
    for op in "rms_norm", "rms_norm_act":
        compare(name, op, x, w, eps=1e-5)
    for op in "add_rms_norm", "add_rms_norm_act", "add_rms_norm_and_act":
        compare(name, op, x, y, w, eps=1e-5)


def test_relu_sqr(n_threads):
    x = numbers((9, 300), seeded("relu_sqr"))
    compare("relu_sqr", "relu_sqr", x)
    (found,), = define("relu_sqr", np.float32([[3, -2, -0.0, np.nan, -np.inf, 1e20]]))
    assert_bitwise_equal(found, np.float32([[9, 0, 0, np.nan, 0, np.inf]]), "relu_sqr")


@pytest.mark.parametrize("op, activation", [("geglu", arith.gelu), ("reglu", arith.relu)])
def test_gated_linear_units_are_an_activation_and_a_product(op, activation):
    g, u = np.meshgrid(SPECIAL, SPECIAL)
    with np.errstate(all="ignore"):
        expected = np.array([f32(activation(f32(a))) * b for a, b in zip(g.ravel(), u.ravel())], f32)
    assert_bitwise_equal(only_array(define(op, g, u)).ravel(), expected, op)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("types", [("Q8_0", "Q8_0"), ("Q4_1", "Q8_0"), ("Q4_K", "Q6_K"), ("F16", "F32"), ("F32", "F32")],
                         ids="-".join)
def test_mul_mat_glu(types, act, biased, n_threads):
    rng = seeded(f"{types} {act}")
    # 520 x 1010: enough for two threads
    shapes = ((3, 33, 5), (520, 1010, 3)) if types == ("F32", "F32") else ((1, 33, 256), (5, 70, 512))
    for n, m, k in shapes:
        weights, x = [matrix(type_, m, k, rng) for type_ in types], product_input(types[0], numbers((n, k), rng))
        compare(f"{types}, n={n}, m={m}, k={k}, biased={biased}, threads={n_threads}", "mul_mat_glu", *weights, x,
                *(numbers((2, m), rng) if biased else ()), act=act)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("types", [("Q4_K", "Q8_0", "Q6_K"), ("F16", "F32", "BF16")], ids="-".join)
def test_mul_mat_qkv(types, biased, n_threads):
    rng, n, k, n_rows = seeded(f"{types}"), 5, 512, (70, 33, 1)
    weights, x = [matrix(type_, m, k, rng) for type_, m in zip(types, n_rows)], product_input(types[0], numbers((n, k), rng))
    biases = [numbers((1, m), rng)[0] for m in n_rows if biased]
    compare(f"{types}, biased={biased}, threads={n_threads}", "mul_mat_qkv", *weights, x, *biases)


def argmax_by_numpy(x):
    return [-1 if np.isnan(row).any() else int(row.argmax()) for row in x]


@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0", "F16"])
def test_mul_mat_argmax(type_, n_threads):
    rng, n, m, k = seeded(type_), 5, 70, 512
    weight, x = matrix(type_, m, k, rng), numbers((n, k), rng)
    x[1], x[2, 7] = 0, np.nan
    x = product_input(type_, x)
    found = only_array(compare(f"{type_}, threads={n_threads}", "mul_mat_argmax", weight, x))
    assert found.tolist() == argmax_by_numpy(only_array(compute("mul_mat", weight, x))) and found[1:3].tolist() == [0, -1]


def test_quantize_special_blocks(n_threads):
    """Each special value as the largest of its chunk, and beside larger ones."""
    x = np.zeros((2 * len(SPECIAL), 300), f32)
    x[:len(SPECIAL), 7] = x[:len(SPECIAL), 299] = SPECIAL
    x[len(SPECIAL):] = seeded("special").standard_normal((len(SPECIAL), 300)).astype(f32) * f32(2.0**-100)
    x[len(SPECIAL):, 11] = SPECIAL
    compare("special", "quantize", x)


ROPES = [(0, 2, 64, 64), (1, 1, 2, 2), (5, 3, 64, 64), (5, 3, 80, 64), (3, 2, 128, 128), (3, 1, 96, 30), (1200, 9, 64, 64)]


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("n, heads, dim, rotated", ROPES, ids=ids(ROPES))
def test_rope(n, heads, dim, rotated, neox, n_threads):
    rng = seeded(f"rope {n} {heads} {dim} {rotated}")
    table = rng.uniform(-1.2, 1.2, (40, rotated // 2, 2)).astype(f32)
    x, pos = numbers((n, heads, dim), rng).reshape(n, heads * dim), rng.integers(0, 40, n).astype(np.int32)
    compare(f"n={n}, heads={heads}, dim={dim}, rotated={rotated}, neox={neox}", "rope", x, pos, table, n_head=heads, neox=neox)


@pytest.mark.parametrize("format_name", list(FORMS.values()))
def test_get_rows(format_name):
    fmt = FORMATS[format_name]
    rng = seeded(f"get_rows {format_name}")
    for k in sorted({fmt.block_size, 256, 512 + fmt.block_size, 256 * 9}):
        weight = matrix(format_name, 70, k, rng)
        for n in (0, 1, 40):
            compare(f"{format_name}, n={n}, k={k}", "get_rows", weight, rng.integers(-1, 70, n).astype(np.int32))  # -1: the first


def test_take_rows():
    rng = seeded("take_rows")
    for k, n in product((1, 257), (0, 1, 9)):
        compare(f"n={n}, k={k}", "take_rows", numbers((5, k), rng), rng.integers(0, 5, n).astype(np.int32))


@pytest.mark.parametrize("k", [1, 2, 257, 128256])
def test_argmax(k):
    rng = seeded(f"argmax {k}")
    x = numbers((6, k), rng)
    x[1], x[2], x[3] = rng.choice(f32([-0.0, 0]), k), -np.inf, rng.choice(SPECIAL, k)
    x[4, k // 2] = x[4, -1] = 1e30
    x[5, rng.integers(k)] = np.nan
    found = only_array(compare(f"k={k}", "argmax", x))
    assert found.tolist() == argmax_by_numpy(x)


@pytest.mark.parametrize("k", [1, 40, 300, 4097, 128256])
def test_draw(k, n_threads):
    """The host's own choice, which numpy makes."""
    x, settings = draw_rows(k, seeded(f"draw {k}"))
    found = only_array(compare(f"k={k}, threads={n_threads}", "draw", x, settings))
    for row, (top_k, temperature, top_p, min_p, u), token in zip(x, settings, found.tolist()):
        if np.isnan(row).any():
            assert token == -1
        else:
            assert token == chosen(row, Sampling(temperature, int(top_k), top_p, min_p), u)


@pytest.mark.parametrize("k, n_ids", [(2, 1), (130, 131), (128256, 1)])
def test_log_soft_max(k, n_ids, n_threads):
    rng = seeded(f"log_soft_max {k}")
    x = numbers((9, k), rng)
    x[0], x[1], x[2], x[3] = rng.choice(f32([-0.0, 0]), k), -np.inf, rng.choice(SPECIAL, k), -300
    x[3, -1], x[4, 0], x[5, 1] = -0.0, np.inf, np.nan  # in row 3 all others vanish
    ids = rng.integers(0, k, (9, n_ids)).astype(np.int32)
    ids[3, 0], ids[6, 0], ids[7, 0] = k - 1, -1, k  # two are no columns
    found = only_array(compare(f"k={k}, threads={n_threads}", "log_soft_max", x, ids))
    assert np.isnan(found[[1, 4, 5]]).all() and np.isnan(found[[6, 7], 0]).all() and found[3, 0] == 0
    row = x[8].astype(np.float64)
    exact = row - (row.max() + np.log(np.exp(row - row.max()).sum()))
    np.testing.assert_allclose(found[8], exact[ids[8]], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("type_", CACHES)
def test_set_rows(type_, n_threads):
    rng = seeded(f"set_rows {type_}")
    for n, k in ((0, 64), (1, 32), (7, 96), (40, 576), (8, 1 << 17)):
        x = numbers((n, k), rng)
        x[1::4] = np.tile(f32([127, 0.5, -0.5, 1.5, -1.5, 126.5, -126.5, 0.49999997] * 4), k // 32)  # halves, with d = 1
        x[2::4] *= f32(2.0**-90)
        x[2::8] *= f32(2.0**-40)
        cells = rng.permutation(n + 3)[:n]
        compare(f"{type_}, n={n}, k={k}", "set_rows", empty_cache("cache", type_, n + 3, k, byte=1), x, cells)


@pytest.mark.parametrize("room", ["reference", "cpu"])
@pytest.mark.parametrize("type_", CACHES)
def test_cpy_rows(type_, room):
    """Cells by their addresses, and side by side; addresses elsewhere are refused."""
    x, cells = numbers((3, 96), seeded(f"cpy_rows {type_}")), np.array([4, 0, 5])
    empty = empty_cache("cache", type_, 6, 96, byte=1)
    n_bytes = empty.arrays[0].strides[0]
    side_by_side = compute("cpy_rows", empty, x, room=room, cell=2)
    by_address = compute("cpy_rows_indirect", empty, x, np.stack([cells, cells * n_bytes]), room=room, slot=1)
    for found, rows in (side_by_side, np.arange(2, 5)), (by_address, cells):
        assert only_array(found).tobytes() == only_array(define("set_rows", empty, x, rows)).tobytes()
    for offset in -n_bytes, 1, 6 * n_bytes:
        with pytest.raises(ValueError,
                           match=rf"cpy_rows_indirect: row 1 goes to byte {offset} of the cache, allowed: the first byte of one "
                                 r"of its 6 rows"):
            compute("cpy_rows_indirect", empty, x[:2], np.array([[0, offset]]), room=room, slot=0)


# Attention

# Each K with two V and the reverse: the parts are independent.
PAIRS = [(t, t) for t in CACHES] + [("f16", "q8_0"), ("q8_0", "f32"), ("f32", "f16")]


@pytest.mark.parametrize("type_k, type_v", PAIRS)
def test_flash_attn_ext(type_k, type_v, n_threads):
    rng = seeded(f"flash_attn_ext {type_k} {type_v}")
    for n_keys in (1, 2, 127, 128, 129, 257):  # the last token sees n_keys keys
        tokens = positions((0, max(0, n_keys - 5), min(5, n_keys)))
        compare_attention(f"n_keys={n_keys}", attention_case(type_k, type_v, 4, 2, 64, 64, 288, tokens, rng))
    tokens = positions((0, 300, 9), (1, 0, 70), (2, 120, 30), (1, 70, 1), (0, 0, 4))
    case = attention_case(type_k, type_v, 6, 2, 64, 96, 320, tokens, rng, holes(3, 320))
    compare_attention("several sequences, with holes", case)
    tokens = positions((0, 100, 100), (1, 0, 20))
    compare_attention("special values", attention_case(type_k, type_v, 3, 1, 96, 64, 256, tokens, rng, special=True))
    compare_attention("no token", attention_case(type_k, type_v, 2, 1, 64, 64, 128, [], rng))


SHAPES_OF_HEADS = [(1, 1, 64, 64), (9, 3, 64, 64), (8, 1, 80, 80), (2, 2, 128, 128), (4, 1, 576, 512), (2, 1, 192, 128),
                   (5, 1, 65, 33),
                   (2, 2, 1, 1)]


@pytest.mark.parametrize("type_", ["f16", "f32"])
@pytest.mark.parametrize("n_head, n_head_kv, dim, dv", SHAPES_OF_HEADS, ids=ids(SHAPES_OF_HEADS))
def test_flash_attn_ext_heads(type_, n_head, n_head_kv, dim, dv, n_threads):
    rng = seeded(f"heads {n_head} {n_head_kv} {dim} {dv}")
    case = attention_case(type_, type_, n_head, n_head_kv, dim, dv, 140, positions((0, 120, 12), (1, 0, 3)), rng)
    compare_attention(f"heads={n_head}/{n_head_kv}, dim={dim}, dv={dv}", case)


def test_flash_attn_ext_prompt(n_threads):
    """Enough work for two threads, and more query rows than a unit holds."""
    tokens = positions((1, 0, 250), (0, 30, 50))
    compare_attention("prompt", attention_case("f16", "f16", 6, 2, 64, 64, 256, tokens, seeded("prompt")))


@pytest.mark.parametrize("type_", ["f16", "f32", "q8_0"])
def test_flash_attn_ext_in_spans(type_, monkeypatch):
    """With more threads than runs of tokens and KV heads, pieces are computed apart and joined."""
    monkeypatch.setattr(threads, "MOST", 16)
    rng, sinks = seeded(f"spans {type_}"), np.float32([0.5, -2, 7, 0.1])
    with threads.using(16):
        for tokens in positions((0, 700, 1)), positions((0, 128, 2)), positions((0, 660, 1), (2, 300, 1), (1, 0, 1)):
            case = attention_case(type_, type_, 4, 2, 128, 96, 768, tokens, rng, holes(3, 768)[:1 + max(s for s, _ in tokens)])
            compare_attention("in spans", case)
            compare_attention("in spans, a window", case, window=200)
            operands, params = case
            compare_attention("in spans, with sinks", ((*operands, sinks), params), softcap=5.0)


@pytest.mark.parametrize("type_", ["f16", "f32"])
def test_flash_attn_ext_capped(type_, n_threads):
    case = attention_case(type_, type_, 6, 2, 64, 48, 256, positions((0, 20, 9), (1, 130, 20)), seeded("capped"))
    compare_attention("softcap", case, softcap=2.5)


def test_flash_attn_ext_capped_against_float64():
    (q, k, v, *others), params = attention_case("f32", "f32", 4, 1, 32, 32, 200, positions((0, 0, 200)), seeded("cap"))
    out = only_array(compute("flash_attn_ext", q, k, v, *others, softcap=3.0, **params)).reshape(200, 4, 32)
    s = np.einsum("ihc,jc->hij", q.reshape(200, 4, 32).astype(np.float64), k.arrays[0][:200]) * params["scale"]
    p = np.where(np.arange(200) <= np.arange(200)[:, None], np.exp(3 * np.tanh(s / 3)), 0)
    expected = np.einsum("hij,jc->ihc", p / p.sum(2, keepdims=True), v.arrays[0][:200])
    assert np.abs(s).max() > 6 and np.abs(out - expected).max() < 1e-4


def test_flash_attn_ext_without_vector_instructions():
    case = attention_case("f16", "f32", 3, 1, 80, 40, 256, positions((0, 0, 70), (1, 120, 20)), seeded("plain"))
    compare_attention("isa=plain", case, kernel=partial(flash_attn_ext_arrays, isa="plain"))


# Heads of 65 channels are two blocks, the second of one; of the last shape a run has 32 rows and a part of 32.
TILE_SHAPES = [(9, 3, 64, 64), (4, 4, 80, 80), (8, 2, 128, 128), (8, 1, 256, 256), (5, 1, 65, 33), (3, 3, 192, 128)]
TILE_TYPES = [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f16")]


@pytest.fixture(params=["tiles", "emulated"])
def by_tiles(request):
    """(types) -> the kernel's factory: by tiles of the CPU, or by the loops that stand for them, each pair of types with another
    instruction set."""
    if request.param == "tiles":
        if not amx.available():
            pytest.skip("this CPU has no tiles for int8")
        return lambda types: partial(flash_attn_ext_arrays, tiles=amx.tiles)
    isas = dict(zip(TILE_TYPES, cycle(available_isas()[::-1])))
    return lambda types: partial(flash_attn_ext_arrays, tiles=amx.emulated, isa=isas[types])


@pytest.mark.parametrize("types", TILE_TYPES, ids="-".join)
def test_flash_attn_ext_by_tiles(types, by_tiles, n_threads):
    """Runs of as many rows as a tile has, of fewer, and of more; pieces that are whole, end early, or have holes."""
    rng, kernel = seeded(f"tiles {types}"), by_tiles(types)
    for n_head, n_head_kv, dim, dv in TILE_SHAPES:
        if "q8_0" in types:  # of blocks of 32 channels
            dim, dv = (dim + 31) // 32 * 32, (dv + 31) // 32 * 32
        case = partial(attention_case, *types, n_head, n_head_kv, dim, dv)
        name = f"heads={n_head}/{n_head_kv}, dim={dim}, dv={dv}, threads={n_threads}"
        compare_attention(name, case(160, positions((0, 0, 33), (0, 120, 16), (1, 127, 2), (1, 9, 1)), rng), kernel=kernel)
        operands, params = case(320, positions((1, 30, 40), (0, 280, 13), (2, 100, 30)), rng, holes(3, 320))
        with_sinks = *operands, numbers(n_head, rng)
        compare_attention(f"{name}, holes", (operands, params), kernel=kernel)
        compare_attention(f"{name}, a window", (operands, params), kernel=kernel, window=70)
        compare_attention(f"{name}, sinks, a cap", (with_sinks, params), kernel=kernel, window=150, softcap=3.0)
        compare_attention(f"{name}, special", case(256, positions((0, 100, 100), (1, 0, 20)), rng, special=True), kernel=kernel)


def test_flash_attn_ext_by_tiles_in_spans(by_tiles, monkeypatch):
    monkeypatch.setattr(threads, "MOST", 16)
    rng, sinks, kernel = seeded("tiles in spans"), np.float32([0.5, -2, 7, 0.1]), by_tiles(("f16", "f16"))
    with threads.using(16):
        for tokens in positions((0, 690, 10)), positions((0, 125, 9), (1, 600, 20)):
            operands, params = attention_case("f16", "f16", 4, 2, 128, 96, 768, tokens, rng,
                                              holes(2, 768)[:1 + max(s for s, _ in tokens)])
            compare_attention("in spans", (operands, params), kernel=kernel)
            compare_attention("in spans, with sinks", ((*operands, sinks), params), kernel=kernel, window=200)


def test_flash_attn_ext_by_tiles_of_the_largest_levels(by_tiles):
    """Levels of 16256 and of limbs -64, whose sums are the largest."""
    (q, k, v, *others), params = attention_case("f16", "f16", 3, 1, 64, 64, 128, positions((0, 100, 28)), seeded("largest"))
    x = np.resize(f32([1, -1, (64 - 16256) / 16256, 1]), 64)
    q[:], k.arrays[0][:] = np.tile(x, 3), x.astype(np.float16).view(np.uint16)
    v.arrays[0][:] = np.tile(x[:, None], (2, 64)).astype(np.float16).view(np.uint16)
    compare_attention("largest levels", ((q, k, v, *others), params), kernel=by_tiles(("f16", "f16")))


@pytest.mark.parametrize("isa", available_isas())
def test_exp_of_vectors(isa):
    """That of all operations, at its bounds and at every 4099th float."""
    n_rows, _, _, rows, *_ = vector.instructions(isa, 1)
    step, bounds = 4099, f32([arith.EXP_MIN, arith.EXP_MAX])
    x = np.concatenate([np.arange(0, 2**32, step, dtype=np.uint32).view(f32), SPECIAL,
                        *(np.nextafter(bounds, f32(to)) for to in (-np.inf, np.inf)), bounds,
                        np.uint32([0x7f800001, 0xffffffff, 0x7fc00123]).view(f32)])
    x = np.concatenate([x, np.zeros(-len(x) % n_rows, f32)])

    @jit(key=isa)
    def run(x, by_vectors, one_by_one):
        p, out = vector.pointer(x), vector.pointer(by_vectors)
        for i in range(0, x.shape[0], n_rows):
            vector.store(out, i, 0, vector.exp(rows(p, i)))
        for i in range(x.shape[0]):
            one_by_one[i] = arith.exp(x[i])
    found, expected = np.empty_like(x), np.empty_like(x)
    run(x, found, expected)
    assert_bitwise_equal(found, expected, f"exp[isa={isa}]")


def test_a_token_does_not_depend_on_the_others():
    rng, tokens = seeded("batch"), positions((0, 130, 20), (1, 250, 7))
    (q, k, v, seq, pos, present), params = attention_case("f16", "f16", 6, 2, 64, 64, 300, tokens, rng)
    together, alone = only_array(compute("flash_attn_ext", q, k, v, seq, pos, present, **params)), np.empty((27, 6 * 64), f32)
    for i in rng.permutation(27):
        one = slice(i, i + 1)
        alone[one] = only_array(compute("flash_attn_ext", q[one], k, v, seq[one], pos[one], present, **params))
    assert_bitwise_equal(alone, together, "flash_attn_ext[one token at a time]")


@pytest.mark.parametrize("n, n_cols, n_matrices", [(1, 1, 1), (7, 65, 2), (40, 2049, 3), (33, 14336, 1), (5, 4096, 9)])
def test_sums_of_squares(n, n_cols, n_matrices):
    """In the order of the rows, whichever threads have which columns."""
    rng = np.random.default_rng(n_cols)
    rows, to = rng.standard_normal((n, n_cols)).astype(np.float32), rng.integers(0, n_matrices, n)
    before = rng.random((n_matrices, n_cols))
    expected = before.copy()
    for row, i in zip(rows, to):
        expected[i] = expected[i] + row.astype(np.float64) ** 2
    for n_threads in 1, 2:
        sums = before.copy()
        with threads.using(n_threads):
            add_squares(sums, rows, to)
        assert sums.tobytes() == expected.tobytes()
