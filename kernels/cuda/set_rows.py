"""The KV cache (numerics, section 7): set_rows writes rows as float32, float16 or q8_0; `cached` reads values back.

A cache holds n_cells rows of k values, one after the other; q8_0 in blocks of 32 values (k is a multiple of 32): a half d and 32
int8 levels. Blocks of the grid: x = row, y = 128 threads; a thread writes one value, a warp a block of q8_0.

Where row i goes is data or part of the launch: set_rows reads the number of its cell, cpy_rows_indirect its address; cpy_rows
puts the rows side by side from one address on, an argument of the launch. All write the same bytes.
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import cuda

from .launch import F32, I64, N, U16, U32, Kernel, factory, need
from .ptx import (as_f32, as_i32, device, div, f2i, f16_to_f32, f32, f32_to_f16, i2f, i32, i64, ld, ldc, ldc4, mul, pointer_at,
                  redux_max, shuffle, st, sub, u32)

THREADS = 128
BLOCK = 32                 # values of q8_0 with one scale
BLOCK_HALVES = 1 + 32 // 2  # 16-bit words of a block: d, levels
Q8_LIMIT, ONE, ZERO, HALF = f32(127), f32(1), f32(0), f32(0.5)
SMALLEST = f32(2.0**-100)
INFINITY_BITS, MAGNITUDE = i32(0x7f800000), i32(0x7fffffff)
NAN = f32(np.nan)
TYPES = "f32", "f16", "q8_0"


@device
def round_half_away(x):
    """The nearest int32 of a float, ties away from zero. f2i takes ties to the even neighbour, so half of them have to move."""
    i = f2i(x)
    rest = sub(x, i2f(i))  # exact
    return i32(i + (1 if rest == HALF and x > ZERO else -1 if rest == -HALF and x < ZERO else 0))


@device
def larger(amax, x):
    """amax, the bit pattern of a magnitude, or that of x if it is larger; NaN is above infinity."""
    bits = i32(as_i32(x) & MAGNITUDE)
    return bits if bits > amax else amax


# Where a row goes: (cache, dst, row, n) -> a pointer of the cache's type, and the place of the row's first of n elements behind
# it: values, or blocks of q8_0.

@device
def in_cell(cache, rows, row, n):
    return cache, ld(rows, row) * n


@device
def at_address(cache, dst, row, n):
    return pointer_at(cache, ld(dst, row)), i64(0)


@device
def side_by_side(cache, _, row, n):
    return cache, i64(row) * n


POINTERS = {"f32": F32, "f16": U16, "q8_0": U16}  # by type of a cache
PUTS = {"f32": st, "f16": device(lambda p, i, x: st(p, i, f32_to_f16(x)))}  # (cache, i, value)
PLACES = {"set_rows": in_cell, "cpy_rows_indirect": at_address, "cpy_rows": side_by_side}  # by op


@device
def put_q8_0(cache, i, x, lane):
    """Block i of q8_0 of the 32 values x of a warp's lanes. cache: u16."""
    amax = redux_max(i32(as_i32(x) & MAGNITUDE))
    d = div(as_f32(amax), Q8_LIMIT) if amax < INFINITY_BITS else NAN
    id_ = div(ONE, d) if d >= SMALLEST else ZERO  # also for NaN: then mul gives 0 or NaN, and f2i 0
    level, at = round_half_away(mul(x, id_)), i64(i) * BLOCK_HALVES
    other = shuffle(level, lane ^ 1)
    if lane & 1 == 0:
        st(cache, at + 1 + (lane >> 1), (level & 0xff) | (other & 0xff) << 8)
    if lane == 0:
        st(cache, at, f32_to_f16(d))


def row_of(type_):
    """(n, put). n: values of an element. put: (cache, first, column, x) puts x into a column of the row that begins with element
    `first`. Where n is 32, all lanes of a warp do so together, lane l with column 32 i + l."""
    if type_ == "q8_0":
        return BLOCK, device(lambda p, first, column, x: put_q8_0(p, first + column // BLOCK, x, i32(column & (BLOCK - 1))))
    put = PUTS[type_]
    return 1, device(lambda p, first, column, x: put(p, first + column, x))


@factory([(type_, op) for type_ in TYPES for op in PLACES])
def set_rows_kernel(type_, op):
    place, (n_values, put) = PLACES[op], row_of(type_)

    def kernel(x, dst, cache, k):
        row, column = cuda.blockIdx.x, i32(cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
        if column < k:
            to, first = place(cache, dst, row, k // n_values)
            put(to, first, column, ld(x, i64(row) * k + column))
    return Kernel(kernel, (F32, I64, POINTERS[type_], N), n_threads=THREADS)


def row_bytes(type_: str, k: int) -> int:
    """Of a cache's row of k values."""
    return {"f32": 4 * k, "f16": 2 * k, "q8_0": k // BLOCK * 2 * BLOCK_HALVES}[type_]


def check(call):
    type_, (n, k) = call.cache.dtype, call.x.shape
    need(type_ in TYPES, "type", type_, ", ".join(TYPES))
    need(n >= 1, "n", n, "at least 1")
    need(k >= 1, "k", k, "at least 1")
    need(type_ != "q8_0" or k % BLOCK == 0, "k", k, f"a multiple of {BLOCK} for q8_0")


def _launch(call, dst, cache):
    """dst: address of what names the rows; cache: of the first row."""
    type_, (n, k) = call.cache.dtype, call.x.shape
    return call.device.launch(set_rows_kernel(type_, call.op), (n, -(-k // THREADS)), THREADS, (call.x.data, dst, cache, k))


def set_rows(call):
    """cache[rows[i]] = x[i], stored as the cache's type.

    x: f32 [n, k]; rows: i64 [n], no two equal; cache: f32, f16 or q8_0 [cells, k]."""
    return _launch(call, call.rows.data, call.cache.data)


def cpy_rows_indirect(call):
    """The same bytes in the rows of the cache that begin at the addresses dst[slot]: i64 [slots, n], no two equal."""
    return _launch(call, call.dst.data + 8 * call.x.n_rows * call.slot, call.cache.data)


def cpy_rows(call):
    """The same bytes in the rows cell .. cell + n - 1 of the cache."""
    first = call.cache.data + row_bytes(call.cache.dtype, call.x.n_cols) * call.cell
    return _launch(call, call.x.data, first)  # no destinations are read


class Cached(NamedTuple):
    """How kernels read a cache that is not written while they run. i: index of a value, counted through all rows."""
    pointer: object    # type of the kernel's parameter
    octet: Callable    # (pointer, i, n) -> values i..i+7 as eight float32, those from i + n on zero and not read


@device
def _f32_octet(p, i, n):
    a, b, c, d = ldc4(p, i)
    e, f, g, h = ldc4(p, i + 4)
    return a, b, c, d, e, f, g, h


@device
def _f16_octet(p, i, n):
    """p points to words of two values."""
    a, b, c, d = ldc4(p, i >> 1)
    return (f16_to_f32(a), f16_to_f32(u32(a) >> u32(16)), f16_to_f32(b), f16_to_f32(u32(b) >> u32(16)),
            f16_to_f32(c), f16_to_f32(u32(c) >> u32(16)), f16_to_f32(d), f16_to_f32(u32(d) >> u32(16)))


@device
def _low(pair):
    return i2f(i32(i32(pair << 24) >> 24))


@device
def _high(pair):
    return i2f(i32(i32(pair << 16) >> 24))


@device
def _q8_0_octet(p, i, n):
    block = (i >> 5) * BLOCK_HALVES
    first = block + 1 + ((i & 31) >> 1)
    scale = f16_to_f32(ldc(p, block))
    a, b, c, d = ldc(p, first), ldc(p, first + 1), ldc(p, first + 2), ldc(p, first + 3)
    return (mul(scale, _low(a)), mul(scale, _high(a)), mul(scale, _low(b)), mul(scale, _high(b)),
            mul(scale, _low(c)), mul(scale, _high(c)), mul(scale, _low(d)), mul(scale, _high(d)))


@device
def _f16_value(p, i):
    return f16_to_f32(ldc(p, i))


@device
def _q8_0_value(p, i):
    block = (i >> 5) * BLOCK_HALVES
    pair = ldc(p, block + 1 + ((i & 31) >> 1))
    return mul(f16_to_f32(ldc(p, block)), _high(pair) if i & 1 else _low(pair))


def _by_value(value):
    @device
    def octet(p, i, n):
        return (value(p, i), value(p, i + 1) if n > 1 else ZERO,
                value(p, i + 2) if n > 2 else ZERO, value(p, i + 3) if n > 3 else ZERO,
                value(p, i + 4) if n > 4 else ZERO, value(p, i + 5) if n > 5 else ZERO,
                value(p, i + 6) if n > 6 else ZERO, value(p, i + 7) if n > 7 else ZERO)
    return octet


WIDE = {"f32": Cached(F32, _f32_octet), "f16": Cached(U32, _f16_octet), "q8_0": Cached(U16, _q8_0_octet)}  # i is a multiple of 8
NARROW = {"f32": Cached(F32, _by_value(ldc)), "f16": Cached(U16, _by_value(_f16_value)),
          "q8_0": Cached(U16, _by_value(_q8_0_value))}


def cached(type_, dim) -> Cached:
    """Reads of a cache of heads of `dim` values each: by wide loads where every head begins on a multiple of 8."""
    return (NARROW if dim % 8 else WIDE)[type_]
