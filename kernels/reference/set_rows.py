"""The KV cache (numerics, section 7): set_rows, cpy_rows and cpy_rows_indirect write rows, cached_value reads one value back.

A cache of n_cells rows of k values is float32 [n_cells, k] ("f32"), the bits of halves uint16 [n_cells, k] ("f16"), or
uint8 [n_cells, k / 32 * 34] ("q8_0": blocks of a half d, low byte first, and 32 int8 levels).
"""
from functools import lru_cache, partial

import numpy as np

from ..arith import add, as_f32, div, f2i, f32, i2f, i32, mul
from ..compile import jit
from ..float16 import f16_to_f32, f32_to_f16
from .quantize import INFINITY_BITS, NAN, SMALLEST, amax_bits

BLOCK, BLOCK_BYTES = 32, 2 + 32
Q8_LIMIT = f32(127)


@lru_cache(None)
def set_rows_arrays(type_):
    """kernel(x f32 [n, k], rows i64 [n], cache): cache row rows[i] = x[i]."""
    return {"f32": _set_f32, "f16": _set_f16, "q8_0": _set_q8_0}[type_]


def cpy_rows_arrays(type_, set_rows=set_rows_arrays):
    """function(x f32 [n, k], cell, cache): cache rows cell .. cell + n - 1 = x."""
    kernel = set_rows(type_)

    def write(x, cell, cache):
        kernel(x, np.arange(cell, cell + len(x)), cache)
    return write


def cpy_rows_indirect_arrays(type_, set_rows=set_rows_arrays):
    """function(x f32 [n, k], dst i64 [n], cache): the cache row at address dst[i] = x[i].
    ValueError for an address that is no row's."""
    kernel = set_rows(type_)

    def write(x, dst, cache):
        rows, rest = np.divmod(dst - cache.ctypes.data, cache.strides[0])
        bad = np.flatnonzero((rest != 0) | (rows < 0) | (rows >= len(cache)))
        if bad.size:
            raise ValueError(f"cpy_rows_indirect: row {bad[0]} goes to byte {dst[bad[0]] - cache.ctypes.data} of the cache, "
                             f"allowed: the first byte of one of its {len(cache)} rows of {cache.strides[0]}")
        kernel(x, rows, cache)
    return write


@lru_cache(None)
def cached_value(type_):
    """Device function (cache, cell, i) -> float32, the exact value of what is stored."""
    return {"f32": _value_f32, "f16": _value_f16, "q8_0": _value_q8_0}[type_]


@jit
def _set_f32(x, rows, cache):
    for i in range(x.shape[0]):
        cache[rows[i]] = x[i]


@jit
def _value_f32(cache, cell, i):
    return cache[cell, i]


@jit
def _set_f16(x, rows, cache):
    for i in range(x.shape[0]):
        for column in range(x.shape[1]):
            cache[rows[i], column] = f32_to_f16(x[i, column])


@jit
def _value_f16(cache, cell, i):
    return f16_to_f32(cache[cell, i])


@jit
def round_half_away(x):
    """The nearest integer of a float within int32, ties away from zero, without leaving float32: x + 0.5 may itself round up."""
    i = f2i(x)  # toward zero
    rest = add(x, i2f(i32(-i)))
    return i32(i + (rest >= f32(0.5)) - (rest <= f32(-0.5)))


@jit
def _set_q8_0(x, rows, cache):
    for i in range(x.shape[0]):
        for block in range(x.shape[1] // BLOCK):
            values = x[i, block * BLOCK:(block + 1) * BLOCK]
            stored = cache[rows[i], block * BLOCK_BYTES:(block + 1) * BLOCK_BYTES]
            bits = amax_bits(values)
            d = div(as_f32(bits), Q8_LIMIT) if bits < INFINITY_BITS else NAN
            id_ = div(f32(1), d) if d >= SMALLEST else f32(0)
            half = f32_to_f16(d)
            stored[0], stored[1] = half & 0xff, half >> 8
            for c in range(BLOCK):
                level = round_half_away(mul(values[c], id_)) if bits < INFINITY_BITS else i32(0)
                stored[2 + c] = level & 0xff


@jit
def _value_q8_0(cache, cell, i):
    first = i // BLOCK * BLOCK_BYTES
    d = f16_to_f32(cache[cell, first] | cache[cell, first + 1] << 8)
    return mul(d, i2f(i32(np.int8(cache[cell, first + 2 + i % BLOCK]))))


def set_rows(call, kernel=set_rows_arrays):
    """Row rows[i] of the cache = x[i]. cache: [cells, k]; x: f32 [n, k]; rows: i64 [n]."""
    return partial(kernel(call.cache.dtype), call.x.data, call.rows.data, call.cache.data)


def cpy_rows(call, kernel=cpy_rows_arrays):
    """Rows cell .. cell + n - 1 of the cache = x. cache: [cells, k]; x: f32 [n, k]."""
    return partial(kernel(call.cache.dtype), call.x.data, call.cell, call.cache.data)


def cpy_rows_indirect(call, kernel=cpy_rows_indirect_arrays):
    """The row of the cache at address dst[slot, i] = x[i]. cache: [cells, k]; x: f32 [n, k]; dst: i64 [slots, n]."""
    return partial(kernel(call.cache.dtype), call.x.data, call.dst.data[call.slot], call.cache.data)
