"""kernels/cpu equals kernels/reference bit for bit, with one thread and with two; all operations but mul_mat alone."""
from itertools import product
from zlib import crc32

import numba
import numpy as np
import pytest
from random_weights import random_weight

from ggml_py.kernels import arith
from ggml_py.kernels.cpu import (add_rms_norm, argmax, elementwise, flash_attn_ext, get_rows, glu, mul_mat_argmax, mul_mat_glu, mul_mat_qkv, quantize, rms_norm,
                                 rms_norm_act, rope, set_rows, swiglu_act)
from ggml_py.kernels.reference import add_rms_norm as reference_add_rms_norm
from ggml_py.kernels.reference import argmax as reference_argmax
from ggml_py.kernels.reference import elementwise as reference_elementwise
from ggml_py.kernels.reference import flash_attn_ext as reference_flash_attn_ext
from ggml_py.kernels.reference import get_rows as reference_get_rows
from ggml_py.kernels.reference import glu as reference_glu
from ggml_py.kernels.reference import mul_mat_argmax as reference_mul_mat_argmax
from ggml_py.kernels.reference import mul_mat_glu as reference_mul_mat_glu
from ggml_py.kernels.reference import mul_mat_qkv as reference_mul_mat_qkv
from ggml_py.kernels.reference import quantize as reference_quantize
from ggml_py.kernels.reference import rms_norm as reference_rms_norm
from ggml_py.kernels.reference import rms_norm_act as reference_rms_norm_act
from ggml_py.kernels.reference import rope as reference_rope
from ggml_py.kernels.reference import set_rows as reference_set_rows
from ggml_py.kernels.reference import swiglu_act as reference_swiglu_act
from ggml_py.quant import tile
from ggml_py.quant.formats import FORMATS
from ggml_py.testing import assert_bitwise_equal

f32 = np.float32
SPECIAL = f32([0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-38, 2.0**-101, 2.0**-100, 3e38, -3e38, 1])
COLUMNS = [1, 31, 32, 127, 128, 129, 255, 256, 257, 576, 1000]
LARGE = (5, 1 << 18)  # enough for two threads
SHAPES = [(n, k) for k in COLUMNS for n in (0, 1, 3)] + [LARGE]
CACHES = ["f32", "f16", "q8_0"]


@pytest.fixture(params=[1, 2])
def n_threads(request):
    if request.param > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("needs two CPUs")
    before = numba.get_num_threads()
    numba.set_num_threads(request.param)
    yield request.param
    numba.set_num_threads(before)


def seeded(name):
    return np.random.default_rng(crc32(name.encode()))


def numbers(shape, rng):
    """float32 of many magnitudes; in every third row one in a hundred is a value of SPECIAL."""
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))).astype(f32)
    chosen = rng.random(shape) < 0.01
    chosen[1::3] = chosen[2::3] = False
    x[chosen] = rng.choice(SPECIAL, np.count_nonzero(chosen))
    return x


def compare(name, reference, kernel, inputs, *outs):
    """outs: (shape, dtype) of each result. All of a result must be written: both sides start from different bytes."""
    expected = [np.full(shape, 1, dtype) for shape, dtype in outs]
    found = [np.full(shape, 2, dtype) for shape, dtype in outs]
    reference(*inputs, *expected)
    kernel(*inputs, *found)
    for i, (a, b) in enumerate(zip(found, expected)):
        assert_bitwise_equal(a, b, name if len(outs) == 1 else f"{name} result {i}")


def ids(cases):
    return ["x".join(map(str, case)) for case in cases]


@pytest.mark.parametrize("n, k", SHAPES, ids=ids(SHAPES))
def test_rows_of_floats(n, k, n_threads):
    rng = seeded(f"{n} {k}")
    x, y, w = numbers((n, k), rng), numbers((n, k), rng), numbers((1, k), rng)
    out = (n, k), f32
    name = f"[n={n}, k={k}, threads={n_threads}]"
    for op in ("add", "mul"):
        for second in (y, w):
            compare(f"{op}{name}", getattr(reference_elementwise, op), getattr(elementwise, op), (x, second), out)
    compare(f"scale{name}", reference_elementwise.scale, elementwise.scale, (x, f32(0.3)), out)
    compare(f"swiglu{name}", reference_elementwise.swiglu, elementwise.swiglu, (x, y), out)
    for op in ("geglu", "reglu"):
        compare(f"{op}{name}", getattr(reference_glu, op), getattr(glu, op), (x, y), out)
    compare(f"rms_norm{name}", reference_rms_norm.rms_norm, rms_norm.rms_norm, (x, w[0], f32(1e-5)), out)
    n_chunks = -(-k // 256)
    act = ((n, n_chunks * 256), np.int16), ((n, n_chunks), f32), ((n, n_chunks * 16), np.int32)
    compare(f"quantize{name}", reference_quantize.quantize, quantize.quantize, (x,), *act)
    compare(f"rms_norm_act{name}", reference_rms_norm_act.rms_norm_act, rms_norm_act.rms_norm_act, (x, w[0], f32(1e-5)), *act)
    compare(f"swiglu_act{name}", reference_swiglu_act.swiglu_act, swiglu_act.swiglu_act, (x, y), *act)
    normed = x, y, w[0], f32(1e-5)
    compare(f"add_rms_norm{name}", reference_add_rms_norm.add_rms_norm, add_rms_norm.add_rms_norm, normed, out, out)
    compare(f"add_rms_norm_act{name}", reference_add_rms_norm.add_rms_norm_act, add_rms_norm.add_rms_norm_act, normed, *act, out)
    compare(f"add_rms_norm_and_act{name}", reference_add_rms_norm.add_rms_norm_and_act, add_rms_norm.add_rms_norm_and_act, normed, *act, out, out)


@pytest.mark.parametrize("op, activation", [("geglu", arith.gelu), ("reglu", arith.relu)])
def test_gated_linear_units_are_an_activation_and_a_product(op, activation):
    g, u = np.meshgrid(SPECIAL, SPECIAL)
    out = np.empty_like(g)
    getattr(reference_glu, op)(g, u, out)
    with np.errstate(all="ignore"):
        expected = np.array([f32(activation(f32(a))) * b for a, b in zip(g.ravel(), u.ravel())], f32)
    assert_bitwise_equal(out.ravel(), expected, op)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("types", [("Q8_0", "Q8_0"), ("Q4_1", "Q8_0"), ("Q4_K", "Q6_K"), ("F16", "F32"), ("F32", "F32")], ids="-".join)
def test_mul_mat_glu(types, act, biased, n_threads):
    rng = seeded(f"{types} {act}")
    shapes = ((3, 33, 5), (520, 1010, 3)) if types == ("F32", "F32") else ((1, 33, 256), (5, 70, 512))  # 520 x 1010: enough for two threads
    for n, m, k in shapes:
        words = [tile.pack(random_weight(FORMATS[t], m, k, rng), t, m, k).reshape(-1).view(np.uint32) for t in types]
        x = numbers((n, k), rng)
        if FORMATS[types[0]].is_quantized:
            q = np.empty((n, k), np.int16), np.empty((n, k // 256), f32), np.empty((n, k // 16), np.int32)
            reference_quantize.quantize(x, *q)
        operands = *words, q if FORMATS[types[0]].is_quantized else (x,), tuple(numbers((2, m), rng)) if biased else ()
        reference, kernel = reference_mul_mat_glu.mul_mat_glu(act, *types), mul_mat_glu.mul_mat_glu(act, *types)
        scratch = np.empty((n, m), f32)
        compare(f"mul_mat_glu[{act}, {types}, n={n}, m={m}, k={k}, biased={biased}, threads={n_threads}]", lambda *args: reference(*args, scratch),
                lambda *args: kernel(*args, scratch), operands, ((n, m), f32))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("types", [("Q4_K", "Q8_0", "Q6_K"), ("F16", "F32", "BF16")], ids="-".join)
def test_mul_mat_qkv(types, biased, n_threads):
    rng, n, k, n_rows = seeded(f"{types}"), 5, 512, (70, 33, 1)
    words = [tile.pack(random_weight(FORMATS[t], m, k, rng), t, m, k).reshape(-1).view(np.uint32) for t, m in zip(types, n_rows)]
    x = numbers((n, k), rng)
    q = np.empty((n, k), np.int16), np.empty((n, k // 256), f32), np.empty((n, k // 16), np.int32)
    reference_quantize.quantize(x, *q)
    operands = words, q if FORMATS[types[0]].is_quantized else (x,), tuple(numbers((1, m), rng)[0] for m in n_rows) if biased else ()
    reference, kernel = reference_mul_mat_qkv.mul_mat_qkv(*types), mul_mat_qkv.mul_mat_qkv(*types)
    compare(f"mul_mat_qkv[{types}, biased={biased}, threads={n_threads}]", lambda *args: reference(*args[:3], args[3:]), lambda *args: kernel(*args[:3], args[3:]),
            operands, *(((n, m), f32) for m in n_rows))


@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0", "F16"])
def test_mul_mat_argmax(type_, n_threads):
    rng, n, m, k = seeded(type_), 5, 70, 512
    words = tile.pack(random_weight(FORMATS[type_], m, k, rng), type_, m, k).reshape(-1).view(np.uint32)
    x = numbers((n, k), rng)
    x[1], x[2, 7] = 0, np.nan
    q = np.empty((n, k), np.int16), np.empty((n, k // 256), f32), np.empty((n, k // 16), np.int32)
    reference_quantize.quantize(x, *q)
    reference, kernel, scratch = reference_mul_mat_argmax.mul_mat_argmax(type_), mul_mat_argmax.mul_mat_argmax(type_), np.empty((n, m), f32)
    compare(f"mul_mat_argmax[{type_}, threads={n_threads}]", lambda *args: reference(*args, scratch), lambda *args: kernel(*args, scratch),
            (words, q if FORMATS[type_].is_quantized else (x,)), ((n,), np.int32))
    found = np.empty(n, np.int32)
    kernel(words, q if FORMATS[type_].is_quantized else (x,), found, scratch)
    assert found.tolist() == [-1 if np.isnan(row).any() else int(row.argmax()) for row in scratch] and found[1:3].tolist() == [0, -1]


def test_quantize_special_blocks(n_threads):
    """Each special value as the largest of its chunk, and beside larger ones."""
    x = np.zeros((2 * len(SPECIAL), 300), f32)
    x[:len(SPECIAL), 7] = x[:len(SPECIAL), 299] = SPECIAL
    x[len(SPECIAL):] = seeded("special").standard_normal((len(SPECIAL), 300)).astype(f32) * f32(2.0**-100)
    x[len(SPECIAL):, 11] = SPECIAL
    n = len(x)
    compare("quantize[special]", reference_quantize.quantize, quantize.quantize, (x,),
            ((n, 512), np.int16), ((n, 2), f32), ((n, 32), np.int32))


ROPES = [(0, 2, 64, 64), (1, 1, 2, 2), (5, 3, 64, 64), (5, 3, 80, 64), (3, 2, 128, 128), (3, 1, 96, 30), (1200, 9, 64, 64)]


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("n, heads, dim, rotated", ROPES, ids=ids(ROPES))
def test_rope(n, heads, dim, rotated, neox, n_threads):
    rng = seeded(f"rope {n} {heads} {dim} {rotated}")
    table = rng.uniform(-1.2, 1.2, (40, rotated // 2, 2)).astype(f32)
    compare(f"rope[n={n}, heads={heads}, dim={dim}, rotated={rotated}, neox={neox}]", reference_rope.rope, rope.rope,
            (numbers((n, heads, dim), rng), rng.integers(0, 40, n).astype(np.int32), table, neox), ((n, heads, dim), f32))


# One type of each form.
FORMS = {(fmt.is_quantized or fmt.name, fmt.sub, fmt.group, fmt.has_min): fmt.name for fmt in FORMATS.values() if fmt.planes}


@pytest.mark.parametrize("format_name", list(FORMS.values()))
def test_get_rows(format_name):
    fmt = FORMATS[format_name]
    rng = seeded(f"get_rows {format_name}")
    for k in sorted({fmt.block_size, 256, 512 + fmt.block_size, 256 * 9}):
        words = tile.pack(random_weight(fmt, 70, k, rng), fmt, 70, k).reshape(-1).view(np.uint32)
        for n in (0, 1, 40):
            rows = rng.integers(-1, 70, n).astype(np.int32)  # -1: the first
            compare(f"get_rows[{format_name}, n={n}, k={k}]", reference_get_rows.get_rows(format_name), get_rows.get_rows(format_name),
                    (words, rows), ((n, k), f32))


def test_take_rows():
    rng = seeded("take_rows")
    for k, n in product((1, 257), (0, 1, 9)):
        compare(f"take_rows[n={n}, k={k}]", reference_get_rows.take_rows, get_rows.take_rows,
                (numbers((5, k), rng), rng.integers(0, 5, n).astype(np.int32)), ((n, k), f32))


@pytest.mark.parametrize("k", [1, 2, 257, 128256])
def test_argmax(k):
    rng = seeded(f"argmax {k}")
    x = numbers((6, k), rng)
    x[1], x[2], x[3] = rng.choice(f32([-0.0, 0]), k), -np.inf, rng.choice(SPECIAL, k)
    x[4, k // 2] = x[4, -1] = 1e30
    x[5, rng.integers(k)] = np.nan
    found, expected = np.empty(len(x), np.int32), [-1 if np.isnan(row).any() else int(row.argmax()) for row in x]
    for kernel in reference_argmax.argmax, argmax.argmax:
        kernel(x, found)
        assert found.tolist() == expected, kernel


def cache_layout(type_, n_cells, k):
    """(shape, dtype) of a cache of n_cells rows of k values."""
    return {"f32": ((n_cells, k), np.float32), "f16": ((n_cells, k), np.uint16), "q8_0": ((n_cells, k // 32 * 34), np.uint8)}[type_]


@pytest.mark.parametrize("type_", CACHES)
def test_set_rows(type_, n_threads):
    rng = seeded(f"set_rows {type_}")
    for n, k in ((0, 64), (1, 32), (7, 96), (40, 576), (8, 1 << 17)):
        x = numbers((n, k), rng)
        x[1::4] = np.tile(f32([127, 0.5, -0.5, 1.5, -1.5, 126.5, -126.5, 0.49999997] * 4), k // 32)  # halves, with d = 1
        x[2::4] *= f32(2.0**-90)
        x[2::8] *= f32(2.0**-40)
        cells = rng.permutation(n + 3)[:n].astype(np.int64)
        shape, dtype = cache_layout(type_, n + 3, k)
        a, b = np.full(shape, 1, dtype), np.full(shape, 1, dtype)
        reference_set_rows.set_rows(type_)(x, cells, a)
        set_rows.set_rows(type_)(x, cells, b)
        if type_ == "f16":
            a, b = a.view(np.float16), b.view(np.float16)
        assert_bitwise_equal(b, a, f"set_rows[{type_}, n={n}, k={k}]")


@pytest.mark.parametrize("room", [reference_set_rows, set_rows], ids=["reference", "cpu"])
@pytest.mark.parametrize("type_", CACHES)
def test_cpy_rows(type_, room):
    """Cells by their addresses, and side by side; addresses elsewhere are refused."""
    x, cells = numbers((3, 96), seeded(f"cpy_rows {type_}")), np.array([4, 0, 5])
    shape, dtype = cache_layout(type_, 6, 96)
    for write, where, rows in ((room.cpy_rows, 2, np.arange(2, 5)), (room.cpy_rows_indirect, cells, cells)):
        a, b = np.full(shape, 1, dtype), np.full(shape, 1, dtype)
        reference_set_rows.set_rows(type_)(x, rows, a)
        write(type_)(x, b.ctypes.data + cells * b.strides[0] if where is cells else where, b)
        assert b.tobytes() == a.tobytes()
    for offset in -b.strides[0], 1, 6 * b.strides[0]:
        with pytest.raises(ValueError, match=rf"cpy_rows_indirect: row 1 goes to byte {offset} of the cache, allowed: the first byte of one of its 6 rows"):
            room.cpy_rows_indirect(type_)(x[:2], b.ctypes.data + np.array([0, offset]), b)


# Attention

def attention_case(type_k, type_v, n_head, n_head_kv, dim, dv, n_ctx, tokens, rng, present=None, special=False):
    """tokens: (sequence, position) of each. Cells that are not present hold NaN, and must not matter."""
    n_seq = 1 + max((s for s, _ in tokens), default=0)
    present = np.ones((n_seq, n_ctx), np.uint8) if present is None else present
    caches = []
    for type_, width in ((type_k, dim), (type_v, dv)):
        x = rng.standard_normal((n_seq * n_ctx, n_head_kv * width)).astype(f32) * f32(3)
        if special:
            rows = rng.choice(len(x), 40, replace=False)
            x[rows, rng.integers(0, x.shape[1], 40)] = np.resize(SPECIAL, 40)
            x[rows[:3]] = 0
        x[present.ravel() == 0] = np.nan
        shape, dtype = cache_layout(type_, n_seq * n_ctx, n_head_kv * width)
        cache = np.zeros(shape, dtype)
        reference_set_rows.set_rows(type_)(x, np.arange(len(x)), cache)
        caches.append(cache)
    q = rng.standard_normal((len(tokens), n_head, dim)).astype(f32) * f32(2)
    if special and len(q) > 4:
        q[0], q[1, 0, 0], q[2, 0, 1], q[3] = 0, np.nan, np.inf, 2.0**-120
    seq, pos = np.array([s for s, _ in tokens], np.int32), np.array([p for _, p in tokens], np.int32)
    return q, *caches, n_head_kv, seq, pos, present, f32(dim**-0.5)


def compare_attention(name, type_k, type_v, case, dv, isa=None):
    reference, kernel = reference_flash_attn_ext.flash_attn_ext(type_k, type_v), flash_attn_ext.flash_attn_ext(type_k, type_v, isa)
    compare(f"flash_attn_ext[{type_k}, {type_v}, {name}]", reference, kernel, case, ((*case[0].shape[:2], dv), f32))


def positions(*runs):
    """(sequence, position) tokens of runs (sequence, first position, count)."""
    return [(s, p) for s, first, count in runs for p in range(first, first + count)]


def holes(n_seq, n_ctx):
    """Sequence 0 lost its cells 100..299 (a whole piece and parts of two), the last one every third."""
    present = np.ones((n_seq, n_ctx), np.uint8)
    present[0, 100:300] = 0
    present[-1, 1::3] = 0
    return present


# Each K with two V and the reverse: the parts are independent.
PAIRS = [(t, t) for t in CACHES] + [("f16", "q8_0"), ("q8_0", "f32"), ("f32", "f16")]


@pytest.mark.parametrize("type_k, type_v", PAIRS)
def test_flash_attn_ext(type_k, type_v, n_threads):
    rng = seeded(f"flash_attn_ext {type_k} {type_v}")
    for n_keys in (1, 2, 127, 128, 129, 257):  # the last token sees n_keys keys
        case = attention_case(type_k, type_v, 4, 2, 64, 64, 288, positions((0, max(0, n_keys - 5), min(5, n_keys))), rng)
        compare_attention(f"n_keys={n_keys}", type_k, type_v, case, 64)
    tokens = positions((0, 300, 9), (1, 0, 70), (2, 120, 30), (1, 70, 1), (0, 0, 4))
    case = attention_case(type_k, type_v, 6, 2, 64, 96, 320, tokens, rng, holes(3, 320))
    compare_attention("several sequences, with holes", type_k, type_v, case, 96)
    case = attention_case(type_k, type_v, 3, 1, 96, 64, 256, positions((0, 100, 100), (1, 0, 20)), rng, special=True)
    compare_attention("special values", type_k, type_v, case, 64)
    compare_attention("no token", type_k, type_v, attention_case(type_k, type_v, 2, 1, 64, 64, 128, [], rng), 64)


SHAPES_OF_HEADS = [(1, 1, 64, 64), (9, 3, 64, 64), (8, 1, 80, 80), (2, 2, 128, 128), (4, 1, 576, 512), (2, 1, 192, 128), (5, 1, 65, 33),
                   (2, 2, 1, 1)]


@pytest.mark.parametrize("type_", ["f16", "f32"])
@pytest.mark.parametrize("n_head, n_head_kv, dim, dv", SHAPES_OF_HEADS, ids=ids(SHAPES_OF_HEADS))
def test_flash_attn_ext_heads(type_, n_head, n_head_kv, dim, dv, n_threads):
    rng = seeded(f"heads {n_head} {n_head_kv} {dim} {dv}")
    case = attention_case(type_, type_, n_head, n_head_kv, dim, dv, 140, positions((0, 120, 12), (1, 0, 3)), rng)
    compare_attention(f"heads={n_head}/{n_head_kv}, dim={dim}, dv={dv}", type_, type_, case, dv)


def test_flash_attn_ext_prompt(n_threads):
    """Enough work for two threads, and more query rows than a unit holds."""
    rng = seeded("prompt")
    case = attention_case("f16", "f16", 6, 2, 64, 64, 256, positions((1, 0, 250), (0, 30, 50)), rng)
    compare_attention("prompt", "f16", "f16", case, 64)


def test_flash_attn_ext_without_vector_instructions():
    rng = seeded("plain")
    case = attention_case("f16", "f32", 3, 1, 80, 40, 256, positions((0, 0, 70), (1, 120, 20)), rng)
    compare_attention("isa=plain", "f16", "f32", case, 40, "plain")


def test_a_token_does_not_depend_on_the_others():
    rng = seeded("batch")
    case = attention_case("f16", "f16", 6, 2, 64, 64, 300, positions((0, 130, 20), (1, 250, 7)), rng)
    q, k, v, n_head_kv, seq, pos, present, scale = case
    kernel = flash_attn_ext.flash_attn_ext("f16", "f16")
    together, alone = np.empty((27, 6, 64), f32), np.empty((27, 6, 64), f32)
    kernel(*case, together)
    for i in rng.permutation(27):
        one = slice(i, i + 1)
        kernel(q[one], k, v, n_head_kv, seq[one], pos[one], present, scale, alone[one])
    assert_bitwise_equal(alone, together, "flash_attn_ext[one token at a time]")
