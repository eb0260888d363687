"""The KV cache: set_rows, cpy_rows and cpy_rows_indirect write rows, cached_row reads a part of one back. Layouts:
kernels/reference/set_rows.py."""
from functools import partial

import numpy as np

from ..arith import as_f32, div, f2i, f32, i2f, i32, mul, sub
from ..compile import jit
from ..float16 import f16_to_f32, f32_to_f16
from ..reference import set_rows as reference
from ..reference.quantize import INFINITY_BITS, NAN, SMALLEST, amax_bits
from ..reference.set_rows import BLOCK, BLOCK_BYTES, Q8_LIMIT
from .parallel import over_rows


def set_rows_arrays(type_):
    """kernel(x f32 [n, k], rows i64 [n], cache): cache row rows[i] = x[i]."""
    return _SET[type_]


def cpy_rows_arrays(type_):
    """function(x f32 [n, k], cell, cache): cache rows cell .. cell + n - 1 = x."""
    return reference.cpy_rows_arrays(type_, set_rows_arrays)


def cpy_rows_indirect_arrays(type_):
    """function(x f32 [n, k], dst i64 [n], cache): the cache row at address dst[i] = x[i]. ValueError for an address that is no
    row's."""
    return reference.cpy_rows_indirect_arrays(type_, set_rows_arrays)


def cached_row(type_):
    """Device function (cache, cell, first, values) that fills f32 [n] with the values from column `first` of a cell on."""
    return _CACHED[type_]


@jit
def set_rows_f32(first, last, x, rows, cache):
    for i in range(first, last):
        a, row = x[i], cache[rows[i]]
        for column in range(a.shape[0]):
            row[column] = a[column]


@jit
def cached_f32(cache, cell, first, values):
    row = cache[cell, first:first + values.shape[0]]
    for i in range(values.shape[0]):
        values[i] = row[i]


@jit
def set_rows_f16(first, last, x, rows, cache):
    for i in range(first, last):
        a, row = x[i], cache[rows[i]]
        for column in range(a.shape[0]):
            row[column] = f32_to_f16(a[column])


@jit
def cached_f16(cache, cell, first, values):
    row = cache[cell, first:first + values.shape[0]]
    for i in range(values.shape[0]):
        values[i] = f16_to_f32(row[i])


@jit
def round_half_away(x):
    whole = f2i(x)  # toward zero
    rest = sub(x, i2f(whole))
    return i32(whole + (i32(1) if rest >= f32(0.5) else i32(0)) - (i32(1) if rest <= f32(-0.5) else i32(0)))


@jit
def set_rows_q8_0(first, last, x, rows, cache):
    for i in range(first, last):
        for block in range(x.shape[1] // BLOCK):
            a = x[i, block * BLOCK:(block + 1) * BLOCK]
            stored = cache[rows[i], block * BLOCK_BYTES:(block + 1) * BLOCK_BYTES]
            bits = amax_bits(a)
            finite = bits < INFINITY_BITS
            d = div(as_f32(bits), Q8_LIMIT) if finite else NAN
            half = f32_to_f16(d)
            stored[0], stored[1] = half & 0xff, half >> 8
            levels = stored[2:]
            if finite and d >= SMALLEST:
                id_ = div(f32(1), d)
                for c in range(BLOCK):
                    levels[c] = round_half_away(mul(a[c], id_)) & 0xff
            else:
                levels[:] = 0


@jit
def cached_q8_0(cache, cell, first, values):
    row = cache[cell]
    n, done = values.shape[0], 0
    while done < n:  # a block, or the part of one that is asked for, at a time
        block, start = (first + done) // BLOCK, (first + done) % BLOCK
        stored = row[block * BLOCK_BYTES:(block + 1) * BLOCK_BYTES]
        d = f16_to_f32(stored[0] | stored[1] << 8)
        count = min(BLOCK - start, n - done)
        part, levels = values[done:done + count], stored[2 + start:]
        for c in range(count):
            part[c] = mul(d, i2f(i32(np.int8(levels[c]))))
        done += count


_SET = {"f32": over_rows(set_rows_f32), "f16": over_rows(set_rows_f16), "q8_0": over_rows(set_rows_q8_0)}
_CACHED = {"f32": cached_f32, "f16": cached_f16, "q8_0": cached_q8_0}

set_rows = partial(reference.set_rows, kernel=set_rows_arrays)
cpy_rows = partial(reference.cpy_rows, kernel=cpy_rows_arrays)
cpy_rows_indirect = partial(reference.cpy_rows_indirect, kernel=cpy_rows_indirect_arrays)
