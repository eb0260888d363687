"""The matrix kernels of a machine (simulator or GPU) against kernels/reference, bit for bit. A guard of NaN stands behind every output."""
from zlib import crc32

import numpy as np

from ggml_py.kernels.cuda import dequantize as cuda_dequantize
from ggml_py.kernels.cuda import get_rows as cuda_get_rows
from ggml_py.kernels.cuda import mmq_few as cuda_mmq_few
from ggml_py.kernels.cuda import mul_mat as cuda_mul_mat
from ggml_py.kernels.cuda import quantize as cuda_quantize
from ggml_py.kernels.reference import get_rows as reference_get_rows
from ggml_py.kernels.reference import mul_mat as reference_mul_mat
from ggml_py.kernels.reference.quantize import quantize as reference_quantize
from ggml_py.quant import tile
from ggml_py.quant.activation import split_limbs, split_sums
from ggml_py.quant.formats import CHUNK, format_of
from ggml_py.testing import assert_bitwise_equal
from random_weights import random_weight

GUARD = 16                                     # elements behind an output that must stay as they are
SPECIAL = np.float32([0, -0.0, 1e-45, 1e-38, 2.0**-101, 2.0**-100, 3e38, np.inf, -np.inf, np.nan, 65504, 1])


def seeded(name: str) -> np.random.Generator:
    return np.random.default_rng(crc32(name.encode()))


def activations(n: int, k: int, rng) -> np.ndarray:
    """float32 [n, k] of many magnitudes."""
    return (rng.standard_normal((n, k)) * np.exp2(rng.integers(-6, 6, (n, k)))).astype(np.float32)


def extreme_weight(fmt, n_rows: int, n_cols: int, fill: int, scales: int) -> np.ndarray:
    """Blocks of one byte throughout, but for float16 scales of 1 and integer scales of bytes `scales`: the largest sums."""
    blocks = np.full((n_rows, n_cols // fmt.block_size, fmt.type_size), fill, np.uint8)
    first = 0
    for field, size in fmt.fields:
        if field in ("d", "dmin", "m") and size == 2:
            blocks[..., first:first + 2] = np.float16([1]).view(np.uint8)
        elif field.startswith("scales"):
            blocks[..., first:first + size] = scales
        first += size
    return blocks.reshape(n_rows, -1)


def run(machine, launch_function, operands, n_out, *sizes, dtype=np.float32):
    """dtype [n_out] written by launch_function(target, *addresses of operands, address of out, *sizes)."""
    out = machine.upload(np.full(n_out + GUARD, np.nan, dtype))
    machine.run(launch_function(machine.target, *operands, out, *sizes))
    result = machine.download(out, dtype, n_out + GUARD)
    assert np.isnan(result[n_out:]).all(), "written behind the end of the output"
    return result[:n_out]


def reference_activations(x):
    n, k = x.shape
    n_chunks = -(-k // CHUNK)
    q, d, sums = np.zeros((n, n_chunks * CHUNK), np.int16), np.zeros((n, n_chunks), np.float32), np.zeros((n, n_chunks * 16), np.int32)
    reference_quantize(x, q, d, sums)
    return q, d, sums


def chunk_limbs(sums) -> np.ndarray:
    return split_sums(sums.reshape(len(sums), -1, 16))


def activation_buffer(q, d, sums, n, k) -> np.ndarray:
    """The planes as kernels/cuda/quantize lays them out."""
    planes = cuda_quantize.activation_planes(n, k)
    buffer = np.zeros(planes.n_bytes, np.uint8)
    for first, plane in zip(planes, (*split_limbs(q), d, sums, chunk_limbs(sums))):
        buffer[first:first + plane.nbytes] = np.ascontiguousarray(plane).reshape(-1).view(np.uint8)
    return buffer


def check_quantize(machine, x, name) -> None:
    n, k = x.shape
    n_bytes = cuda_quantize.activation_bytes(n, k)
    act = machine.upload(np.zeros(n_bytes + GUARD, np.uint8))
    machine.run(cuda_quantize.quantize(machine.target, machine.upload(x), act, n, k))
    found = machine.download(act, np.uint8, n_bytes + GUARD)
    assert not found[n_bytes:].any(), f"{name}: written behind the end of the buffer"
    planes, reference = cuda_quantize.activation_planes(n, k), reference_activations(x)
    for plane, first, expected in zip(planes._fields, planes, (*split_limbs(reference[0]), *reference[1:], chunk_limbs(reference[2]))):
        assert_bitwise_equal(found[first:first + expected.nbytes].view(expected.dtype).reshape(expected.shape), expected, f"{name} {plane}")


def check_mul_mat(machine, type_, n_rows, n_cols, n, launch_function=cuda_mul_mat.mul_mat, x=None, weight=None) -> None:
    name = f"mul_mat[{type_}, n_rows={n_rows}, n_cols={n_cols}, n={n}]"
    rng = seeded(name)
    fmt = format_of(type_)
    weight = random_weight(fmt, n_rows, n_cols, rng) if weight is None else weight
    words = tile.pack(weight, fmt, n_rows, n_cols).reshape(-1).view(np.uint32)
    x = activations(n, n_cols, rng) if x is None else x
    expected = np.empty((n, n_rows), np.float32)
    if fmt.is_quantized:
        operands = reference_activations(x)
        reference_mul_mat.mul_mat(type_)(words, *operands, expected)
        x = activation_buffer(*operands, n, n_cols)
    else:
        reference_mul_mat.mul_mat(type_)(words, x, expected)
    found = run(machine, lambda target, *args: launch_function(target, type_, *args), (machine.upload(words), machine.upload(x)),
                n * n_rows, n_rows, n_cols, n)
    assert_bitwise_equal(found.reshape(n, n_rows), expected, name)
    machine.free()


def check_qkv(machine, types, n_rows, n_cols, n, shape=None) -> None:
    """types, n_rows: of three matrices."""
    name = f"mmq_few_qkv[{types}, n_rows={n_rows}, n_cols={n_cols}, n={n}]"
    rng = seeded(name)
    operands = reference_activations(activations(n, n_cols, rng))
    words = [tile.pack(random_weight(format_of(t), m, n_cols, rng), t, m, n_cols).reshape(-1).view(np.uint32) for t, m in zip(types, n_rows)]
    outs = [machine.upload(np.full(n * m + GUARD, np.nan, np.float32)) for m in n_rows]
    addresses = tuple(map(machine.upload, words)), machine.upload(activation_buffer(*operands, n, n_cols)), tuple(outs)
    machine.run(cuda_mmq_few.mmq_few_qkv(machine.target, types, *addresses, n_rows, n_cols, n, shape))
    for type_, m, w, out in zip(types, n_rows, words, outs):
        expected, found = np.empty((n, m), np.float32), machine.download(out, np.float32, n * m + GUARD)
        reference_mul_mat.mul_mat(type_)(w, *operands, expected)
        assert_bitwise_equal(found[:n * m].reshape(n, m), expected, f"{name} {type_}")
        assert np.isnan(found[n * m:]).all(), f"{name} {type_}: written behind the end of the output"
    machine.free()


def check_extremes(machine, type_, fill, scales, n=1, launch_function=cuda_mul_mat.mul_mat) -> None:
    """Sums at the bounds of the format table."""
    fmt = format_of(type_)
    check_mul_mat(machine, type_, 1, CHUNK, n, launch_function, np.full((n, CHUNK), 3, np.float32), extreme_weight(fmt, 1, CHUNK, fill, scales))


def check_get_rows(machine, type_, n_rows, n_cols, ids) -> None:
    name = f"get_rows[{type_}, n_rows={n_rows}, n_cols={n_cols}, ids={list(ids)[:8]}]"
    fmt, ids = format_of(type_), np.asarray(ids, np.int32)
    words = tile.pack(random_weight(fmt, n_rows, n_cols, seeded(name)), fmt, n_rows, n_cols).reshape(-1).view(np.uint32)
    expected = np.empty((len(ids), n_cols), np.float32)
    reference_get_rows.get_rows(type_)(words, ids, expected)
    found = run(machine, lambda target, *args: cuda_get_rows.get_rows(target, type_, *args), (machine.upload(words), machine.upload(ids)),
                expected.size, len(ids), n_cols)
    assert_bitwise_equal(found.reshape(expected.shape), expected, name)
    machine.free()


def check_dequantize(machine, type_, n_rows, n_cols, dtype, weight=None) -> None:
    name = f"dequantize[{type_}, n_rows={n_rows}, n_cols={n_cols}, {dtype}]"
    fmt = format_of(type_)
    weight = random_weight(fmt, n_rows, n_cols, seeded(name)) if weight is None else weight
    words = tile.pack(weight, fmt, n_rows, n_cols).reshape(-1).view(np.uint32)
    expected = np.empty((n_rows, n_cols), np.float32)
    reference_get_rows.get_rows(type_)(words, np.arange(n_rows, dtype=np.int32), expected)
    if dtype == "f16":
        with np.errstate(over="ignore"):  # to infinity
            expected = expected.astype(np.float16)
    found = run(machine, lambda target, *args: cuda_dequantize.dequantize(target, type_, *args), (machine.upload(words),),
                expected.size, n_rows, n_cols, dtype, dtype=expected.dtype)
    assert_bitwise_equal(found.reshape(expected.shape), expected, name)
    machine.free()


def float16_edges(n_cols: int) -> np.ndarray:
    """float32 weights [4, n_cols], around which the rounding to float16 changes: ties, the largest value, subnormals, zeros, NaN; and between them."""
    edges = np.float32([0, 2.0**-25, 1.5 * 2.0**-25, 2.0**-24, 1.5 * 2.0**-24, 2.0**-14, 1, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65504, 65519.996, 65520, 3e38, np.inf])
    around = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.float32([np.nan])])
    return np.resize(np.concatenate([around, -around]), (4, n_cols))


def check_take_rows(machine, n_rows, n_cols, ids) -> None:
    name = f"take_rows[n_rows={n_rows}, n_cols={n_cols}, n={len(ids)}]"
    x, ids = activations(n_rows, n_cols, seeded(name)), np.asarray(ids, np.int32)
    found = run(machine, cuda_get_rows.take_rows, (machine.upload(x), machine.upload(ids)), len(ids) * n_cols, len(ids), n_cols)
    assert_bitwise_equal(found.reshape(len(ids), n_cols), x[ids], name)
    machine.free()
