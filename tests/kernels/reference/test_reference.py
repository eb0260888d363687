"""kernels/reference against float64 numpy within derived bounds, or against an independent definition where one gives the same
bits."""
from itertools import product

import numba
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from cpu_comparisons import FORMS, only_array
from op_runs import cache, define, empty_cache, product_input, weight
from random_weights import random_weight

from ggml_py.kernels.reference.rms_norm import sum128
from ggml_py.kernels.reference.set_rows import cached_value
from ggml_py.quant import tile
from ggml_py.quant.activation import quantize_activations
from ggml_py.quant.dequantize import CPU, dequantize
from ggml_py.quant.formats import FORMATS
from ggml_py.testing import assert_bitwise_equal

f32, f64 = np.float32, np.float64
ULP = 2.0**-24  # the largest relative error of one rounding
SPECIAL = f32([0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 2.0**-101, 2.0**-100, 3e38, 1])


def numbers(shape, seed):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))).astype(f32)


def defined(op, *operands, **params):
    """The definition's only array."""
    return only_array(define(op, *operands, **params))


@pytest.mark.parametrize("k", [1, 127, 255, 256, 257, 576])
def test_quantize_equals_the_definition_of_activation_blocks(k):
    x = numbers((len(SPECIAL) + 3, k), k)
    x[:len(SPECIAL), k // 2] = SPECIAL
    x[-1] *= f32(2.0**-97)
    for name, a, b in zip(("q", "d", "sums"), *define("quantize", x), quantize_activations(x)):
        assert_bitwise_equal(a, b, f"quantize[k={k}] {name}")


def weight_parts(fmt, words, m, k):
    """float64 [m, k]: scale * level and the minimum of each weight of a quantized format, exact products of what is stored."""
    levels, sub, group = fmt.unpack(CPU, *tile.loads(fmt, CPU.jit))[:3]
    n_sub, n_group, tile_words = fmt.sub, fmt.group, tile.tile_bytes(fmt) // 4

    @numba.njit(error_model="numpy")
    def fill(words, products, minima):
        n_chunks = (k + 255) // 256
        for row in range(m):
            for column in range(k):
                t, c = (words, (row // 32 * n_chunks + column // 256) * tile_words, row % 32), column % 256
                level = np.int8(levels(t, c // 32)[c % 32 // 4] >> (c % 4 * 8))
                isc, imin = sub(t, c // n_sub)
                d, minimum = group(t, c // n_group)
                products[row, column], minima[row, column] = np.float64(d) * isc * level, np.float64(minimum) * imin
    products, minima = np.empty((m, k)), np.empty((m, k))
    fill(words, products, minima)
    return products, minima


@pytest.mark.parametrize("format_name", list(FORMS.values()))
def test_mul_mat(format_name):
    """Against exact sums of what is stored. Every rounding is relative to a partial sum, which is at most the sum of the terms'
    magnitudes; there are 2 a group (4 with minima) in a chunk's chain and one a chunk; for floats one a column of a chunk and one
    a chunk."""
    fmt, n, m = FORMATS[format_name], 3, 33
    for k in sorted({fmt.block_size, 256, 512 + fmt.block_size}):
        raw = random_weight(fmt, m, k, np.random.default_rng(k))
        w, x, n_chunks = weight("w", format_name, raw, k), product_input(format_name, numbers((n, k), 7)), -(-k // 256)
        out = defined("mul_mat", w, x)
        if fmt.is_quantized:
            q, d, _ = x.arrays
            x = (q * np.repeat(d.astype(f64), 256, axis=1))[:, :k]
            products, minima = weight_parts(fmt, w.arrays[0], m, k)
            exact, magnitude = x @ (products - minima).T, np.abs(x) @ (np.abs(products) + np.abs(minima)).T
            roundings = (4 if fmt.has_min else 2) * 256 // fmt.group + n_chunks
        else:
            x, values = x.arrays[0], dequantize(raw, fmt, (m, k)).astype(f64)
            exact, magnitude = x @ values.T, np.abs(x).astype(f64) @ np.abs(values).T
            roundings = 256 + n_chunks
        bound = roundings * ULP * (1 + 1e-4) * magnitude
        error = np.abs(out - exact)
        assert (error <= bound).all(), f"mul_mat[{format_name}, k={k}]: {(error / bound).max()} of the bound"


def test_mul_mat_of_activations_that_are_not_finite():
    x = np.zeros((4, 256), f32)
    x[0, 3], x[1, 3], x[2, 3], x[3, 3] = np.nan, np.inf, 2.0**-101, 2.0**-100
    w = weight("w", "Q8_0", random_weight(FORMATS["Q8_0"], 2, 256, np.random.default_rng(0)), 256)
    out = defined("mul_mat", w, product_input("Q8_0", x))
    assert np.isnan(out[:2]).all() and (out[2] == 0).all() and (out[3] != 0).all()


@pytest.mark.parametrize("format_name", list(FORMS.values()))
def test_get_rows_equals_dequantize(format_name):
    fmt = FORMATS[format_name]
    k = 256 + fmt.block_size
    raw = random_weight(fmt, 40, k, np.random.default_rng(1))
    ids = np.array([39, 0, -1, 32, 31], np.int32)
    out = defined("get_rows", weight("w", format_name, raw, k), ids)
    assert_bitwise_equal(out, dequantize(raw, fmt, (40, k))[np.maximum(ids, 0)], f"get_rows[{format_name}]")


def test_take_rows():
    x, ids = numbers((5, 3), 0), np.array([4, 0, 4], np.int32)
    assert_bitwise_equal(defined("take_rows", x, ids), x[ids], "take_rows")


def test_sum128_is_the_tree_of_the_page():
    """Partial i mod 128 in order, then halves: as numpy float32 operations in that order."""
    for k in (1, 127, 128, 129, 1000):
        x = numbers(k, k)
        partial = np.zeros(128, f32)
        for start in range(0, k, 128):
            row = x[start:start + 128]
            partial[:len(row)] += row
        while len(partial) > 1:
            partial = partial[:len(partial) // 2] + partial[len(partial) // 2:]
        assert_bitwise_equal(f32(sum128(x)), partial[0], f"sum128[k={k}]")


@pytest.mark.parametrize("k", [1, 127, 128, 129, 576, 4096])
def test_rms_norm(k):
    """The sum goes through k / 128 + 8 roundings of positive terms, mean and eps 2; the root halves that and adds 1; div 1,
    mul 2."""
    x, w, eps = numbers((3, k), k), numbers(k, 1), f32(1e-5)
    out = defined("rms_norm", x, w, eps=1e-5)
    exact = x / np.sqrt((x.astype(f64) ** 2).mean(axis=1, keepdims=True) + f64(eps)) * w
    roundings = (k / 128 + 10) / 2 + 4
    assert (np.abs(out - exact) <= roundings * ULP * 1.001 * np.abs(exact) + 2.0**-149).all()
    x[0, 0], x[1, 0] = np.nan, np.inf
    out = defined("rms_norm", x, w, eps=1e-5)
    assert np.isnan(out[0]).all() and np.isnan(out[1, 0]) and (out[1, 1:] == 0).all()


def test_elementwise():
    """add, mul and scale are one rounding; swiglu is silu (4.2 ulp, below 2^-21 of it) and a product."""
    x, y = numbers((4, 33), 1), numbers((4, 33), 2)
    for op, exact in (("add", np.add), ("mul", np.multiply)):
        for second in (y, y[0]):
            assert_bitwise_equal(defined(op, x, second), exact(x, second), op)
    assert_bitwise_equal(defined("scale", x, factor=0.3), x * f32(0.3), "scale")
    out = defined("swiglu", x, y)
    exact = x / (1 + np.exp(-x.astype(f64))) * y
    inner = x > -87
    assert (np.abs(out - exact) <= 2.0**-20 * np.abs(exact))[inner].all() and (np.abs(out) < 1e-30)[~inner].all()


@pytest.mark.parametrize("neox", [True, False])
def test_rope(neox):
    """A rotation of complex numbers. Two products and their sum are rounded: at most 2 ULP of |a c| + |b s| (to first order)."""
    n, heads, dim, rotated = 5, 3, 80, 64
    rng = np.random.default_rng(3)
    angle = rng.uniform(0, 6, (9, rotated // 2))
    table = np.stack([np.cos(angle), np.sin(angle)], axis=2).astype(f32)
    x, pos = numbers((n, heads, dim), 3), np.array([8, 0, 3, 3, 1], np.int32)
    out = defined("rope", x.reshape(n, -1), pos, table, n_head=heads, neox=neox).reshape(x.shape)
    turn = (table[pos, :, 0].astype(f64) + 1j * table[pos, :, 1])[:, None]

    def pairs(v):
        first, second = ((v[..., :rotated // 2], v[..., rotated // 2:rotated]) if neox
                         else (v[..., 0:rotated:2], v[..., 1:rotated:2]))
        return first + 1j * second.astype(f64)
    exact, found = pairs(x) * turn, pairs(out)
    magnitude = np.abs(pairs(x).real) * np.abs(turn.real) + np.abs(pairs(x).imag) * np.abs(turn.imag)
    crossed = np.abs(pairs(x).real) * np.abs(turn.imag) + np.abs(pairs(x).imag) * np.abs(turn.real)
    assert (np.abs(found.real - exact.real) <= 2.001 * ULP * magnitude).all()
    assert (np.abs(found.imag - exact.imag) <= 2.001 * ULP * crossed).all()
    assert_bitwise_equal(out[..., rotated:], x[..., rotated:], "rope: channels that are not rotated")


# The KV cache

def cached_values(type_, cells):
    """float64 of what a cache holds, not by the code under test."""
    if type_ == "q8_0":
        return quants.dequantize(cells, GGMLQuantizationType.Q8_0).astype(f64)
    return cells.view(np.float16 if type_ == "f16" else f32).astype(f64)


def test_set_rows():
    x, rows = numbers((4, 96), 5), np.array([6, 0, 3, 1])
    stored = {"f32": x, "f16": x.astype(np.float16).view(np.uint16), "q8_0": quants.quantize(x, GGMLQuantizationType.Q8_0)}
    for type_, expected in stored.items():
        cells = defined("set_rows", empty_cache("cache", type_, 7, 96, byte=1), x, rows)
        assert_bitwise_equal(cells[rows], expected, f"set_rows[{type_}]")
        assert (cells[[2, 4, 5]].view(np.uint8) == 1).all(), "rows that were not named"
        value = cached_value(type_)
        found = np.array([[value(cells, row, i) for i in range(96)] for row in rows], f32)
        assert_bitwise_equal(found, cached_values(type_, cells[rows]).astype(f32), f"cached_value[{type_}]")


def test_set_rows_q8_0_ties_and_limits():
    x = np.zeros((6, 32), f32)
    x[0, :8] = [127, 0.5, -0.5, 1.5, -1.5, 126.5, -126.5, 0.49999997]  # d = 1: halves go away from zero
    x[1, :2], x[2, :2], x[3, :2] = [np.nan, 1], [np.inf, 1], [-np.inf, 1]
    x[4, :2], x[5, :2] = [1e-39, -1e-39], [2.0**-92, -2.0**-92]
    cells, = cache("cache", "q8_0", x).arrays
    levels, d = cells[:, 2:].view(np.int8), cells[:, :2].copy().view(np.float16)[:, 0]
    assert levels[0, :8].tolist() == [127, 1, -1, 2, -2, 127, -127, 0] and d[0] == 1
    assert np.isnan(d[1:4]).all() and (levels[1:5] == 0).all() and (d[4:] == 0).all()
    assert levels[5, :3].tolist() == [127, -127, 0]


def test_q8_0_blocks_use_all_levels():
    """Kernels of CUDA take it that the amax of a block is 127 d (`fixed_point.octets_of`)."""
    x = np.random.default_rng(0).integers(0, 2**32, (20000, 32), np.uint32).view(f32)
    x[::2] = np.ldexp(f32(1) + x[::2].view(np.uint32) % 2**23 / f32(2**23), np.arange(10000)[:, None] % 277 - 149).astype(f32)
    cells, = cache("cache", "q8_0", x).arrays
    most, d = np.abs(cells[:, 2:].view(np.int8).astype(int)).max(axis=1), cells[:, :2].copy().view(np.float16)[:, 0]
    used = np.isfinite(d) & (d != 0)
    assert used.any() and (most[used] == 127).all() and ((most == 127) | (most == 0)).all()


def test_levels_of_the_largest_q8_0_block():
    """As `flash_attn_ext_rows` takes them for all d: scales (d / 128, div(16256, 127 d)), and 128 times a level."""
    d = np.arange(1, 0x7c00, dtype=np.uint16).view(np.float16).astype(f32)
    amax, levels = d * f32(127), np.arange(-127, 128, dtype=f32)
    assert (amax / f32(16256) == d / f32(128)).all()
    inv = f32(16256) / amax
    for some in np.array_split(np.arange(len(d)), 16):
        scaled = (d[some, None] * levels) * inv[some, None]
        assert scaled.dtype == f32 and (np.rint(scaled) == 128 * levels).all()


# Attention

def attention_by_numpy(q, k, v, n_head_kv, seq, pos, present, scale, fixed_k, fixed_v):
    """The output in float64 and a bound of what float32 (and, where fixed, 15-bit levels) may differ by.
    k, v: float64 [n_seq, n_ctx, n_head_kv, channels].

    Scores: a level is off by at most half a step, amax / 32512, so a block of channels by e_q |k| + e_k |q| + 64 e_q e_k; float32
    adds D + 4 roundings of sum |q k|. A score off by e changes its weight by the factor exp(2e) at most, since the maximum is off
    as well; exp and the rescaling of pieces add 20 roundings each way. Values: steps of v, and of the probabilities of a piece
    times the scales of v; the sums, over up to 128 keys and the pieces, 300 roundings of sum |p v|."""
    n, n_head, dim = q.shape
    out, bound = np.empty((n, n_head, v.shape[3])), np.empty((n, n_head, v.shape[3]))

    def half_step(x, axis):
        return np.abs(x).max(axis=axis, initial=0) / 32512 * 1.001

    for i, h in product(range(n), range(n_head)):
        here = np.flatnonzero(present[seq[i], :pos[i] + 1])
        keys, values = k[seq[i], here, h // (n_head // n_head_kv)], v[seq[i], here, h // (n_head // n_head_kv)]
        x = q[i, h].astype(f64)
        s, e = keys @ x * scale, (dim + 4) * ULP * (np.abs(keys) @ np.abs(x))
        for first in range(0, dim if fixed_k else 0, 64):
            a, b = x[first:first + 64], keys[:, first:first + 64]
            e += (half_step(a, 0) * np.abs(b).sum(axis=1) + half_step(b, 1) * np.abs(a).sum()
                  + 64 * half_step(a, 0) * half_step(b, 1))
        p = np.exp(s - s.max())
        factor = np.expm1(2 * e.max() * scale + 40 * ULP + 4 * ULP * np.abs(s).max())
        out[i, h] = p @ values / p.sum()
        error = (2 * factor + 300 * ULP) * (p @ np.abs(values))
        if fixed_v:
            d_v = np.abs(values).max(axis=1) / 16256
            error += (p * half_step(values, 1)).sum()
            for piece in range(0, pos[i] + 1, 128):
                inside = (here >= piece) & (here < piece + 128)
                # of probabilities times scales, relative to the largest score of all
                step = half_step(p[inside] * d_v[inside], 0)
                error += step * (np.abs(values[inside]) / np.maximum(d_v[inside, None], 1e-300)).sum(axis=0)
        bound[i, h] = error * (1 + 4 * factor) / p.sum()
    return out, bound


CASES = [(1, 1, 64, 64), (4, 2, 64, 96), (3, 1, 128, 64), (2, 1, 192, 128), (2, 2, 32, 32)]


@pytest.mark.parametrize("type_k, type_v", list(product(("f32", "f16", "q8_0"), repeat=2)))
def test_flash_attn_ext(type_k, type_v):
    rng = np.random.default_rng(11)
    n_ctx, n_seq = 290, 3
    present = np.ones((n_seq, n_ctx), np.uint8)
    present[1, 100:270], present[2, 1::2] = 0, 0
    seq = np.array([0, 0, 0, 0, 0, 1, 1, 2, 2, 0], np.int32)
    pos = np.array([0, 1, 127, 128, 129, 60, 280, 256, 0, 289], np.int32)
    for n_head, n_head_kv, dim, dv in CASES:
        q = rng.standard_normal((len(seq), n_head, dim)).astype(f32)
        caches = [cache(name, type_, rng.standard_normal((n_seq * n_ctx, n_head_kv * width)).astype(f32))
                  for name, type_, width in (("k", type_k, dim), ("v", type_v, dv))]
        scale = f32(dim**-0.5)
        out = defined("flash_attn_ext", q.reshape(len(seq), -1), *caches, seq, pos, present,
                      n_head=n_head, n_head_kv=n_head_kv, scale=scale)
        out = out.reshape(len(seq), n_head, dv)
        k, v = (cached_values(each.dtype, *each.arrays).reshape(n_seq, n_ctx, n_head_kv, -1) for each in caches)
        exact, bound = attention_by_numpy(q, k, v, n_head_kv, seq, pos, present, f64(scale), type_k != "f32", type_v != "f32")
        error = np.abs(out - exact)
        name = f"flash_attn_ext[{type_k}, {type_v}, {n_head}/{n_head_kv}, {dim}, {dv}]"
        assert (error <= bound).all(), f"{name}: {(error / bound).max()} of the bound"
        # The bound itself says something; and it takes all errors to be largest and of one sign, where 32 or more independent
        # ones add up.
        assert bound.max() < 1e-2 * np.abs(v).max(), name
        assert (error**2).mean() < (bound**2).mean() / 64, name


def test_flash_attn_ext_of_few_keys_is_exact():
    """One visible key: the weight is 1, whatever the score, so the output is the value; zero queries: the mean."""
    v = np.arange(1, 65, dtype=f32)[None] * np.ones((4, 1), f32)
    q, k, seq, pos = numbers((1, 64), 0), numbers((4, 64), 1), np.zeros(1, np.int32), np.array([3], np.int32)
    one_head = {"n_head": 1, "n_head_kv": 1, "scale": 0.125}
    out = defined("flash_attn_ext", q, k, v, seq, pos, np.array([[0, 0, 1, 0]], np.uint8), **one_head)
    assert_bitwise_equal(out[0], v[2], "one key")
    v = v * f32([[1], [2], [3], [4]])
    out = defined("flash_attn_ext", np.zeros_like(q), k, v, seq, pos, np.ones((1, 4), np.uint8), **one_head)
    assert_bitwise_equal(out[0], v.mean(axis=0), "equal weights")


def test_flash_attn_ext_of_no_key_is_nan():
    q, cells, seq, pos = np.ones((1, 4), f32), np.ones((2, 4), f32), np.zeros(1, np.int32), np.ones(1, np.int32)
    out = defined("flash_attn_ext", q, cells, cells, seq, pos, np.zeros((1, 2), np.uint8), n_head=1, n_head_kv=1, scale=1)
    assert np.isnan(out).all()
