"""The column of the largest value of each row (numerics, section 5), in two launches: of parts of a row, a block each, then of
the parts.

Floats are compared as integers of the same order, so that a NaN comes out above all and equal values, zeros of both signs among
them, meet as equal.
"""
from numba import cuda, types

from .launch import F32, I32, N, Kernel, Launches, factory, need
from .ptx import as_i32, device, i32, i64, ld, lds, redux_max, redux_min, st, sts

THREADS, PARTS = 256, 64
MOST_THREADS = 1024  # of a block over parts
NAN_RANK, LEAST_RANK, MAGNITUDE = i32(0x7fffffff), i32(-0x80000000), i32(0x7fffffff)
NO_COLUMN = i32(0x7fffffff)


@device
def order(x):
    """An integer in the order of floats, of those that are no NaN; above LEAST_RANK."""
    bits = as_i32(x)
    r = bits if bits >= 0 else i32(bits ^ MAGNITUDE)
    return i32(0) if bits == LEAST_RANK else r


@device
def rank(x):
    """The same, a NaN above all."""
    r = order(x)
    return NAN_RANK if x != x else r


@device
def best_of_warp(r, column):
    """(rank, column) of the largest rank of a warp's lanes, for every lane; of equal ones the first column."""
    best = redux_max(r)
    return best, redux_min(column if r == best else NO_COLUMN)


@device
def best_of_block(t, r, column):
    """The same of a block of whole warps, for every thread, once in a kernel."""
    ranks = cuda.shared.array(32, types.int32)
    columns = cuda.shared.array(32, types.int32)
    r, column = best_of_warp(r, column)
    lane, warp = i32(t & 31), i32(t >> 5)
    if lane == 0:
        sts(ranks, warp, r)
        sts(columns, warp, column)
    cuda.syncthreads()
    r, column = LEAST_RANK, NO_COLUMN
    if lane < i32(cuda.blockDim.x >> 5):
        r, column = lds(ranks, lane), lds(columns, lane)
    return best_of_warp(r, column)


@factory([()])
def argmax_parts_kernel():
    def kernel(x, parts, n_cols):
        """parts: of each row PARTS pairs of a rank and a column."""
        part, row, t = i32(cuda.blockIdx.x), i64(cuda.blockIdx.y), i32(cuda.threadIdx.x)
        per = (n_cols + PARTS - 1) // PARTS
        column, end = i32(part * per + t), min(i32((part + 1) * per), i32(n_cols))
        r, at = LEAST_RANK, NO_COLUMN
        while column < end:
            other = rank(ld(x, row * n_cols + column))
            if other > r:
                r, at = other, column
            column = i32(column + THREADS)
        r, at = best_of_block(t, r, at)
        if t == 0:
            st(parts, (row * PARTS + part) * 2, r)
            st(parts, (row * PARTS + part) * 2 + 1, at)
    return Kernel(kernel, (F32, I32, N), THREADS)


@factory([()])
def argmax_of_parts_kernel():
    def kernel(parts, out, n_parts):
        """parts: of each row n_parts pairs of a rank and a column, in the order of columns."""
        row, t = i64(cuda.blockIdx.x), i32(cuda.threadIdx.x)
        r, column, part = LEAST_RANK, NO_COLUMN, t
        while part < n_parts:
            at = (row * n_parts + part) * 2
            other, first = ld(parts, at), ld(parts, at + 1)
            if other > r:
                r, column = other, first
            part = i32(part + cuda.blockDim.x)
        r, column = best_of_block(t, r, column)
        if t == 0:
            st(out, row, i32(-1) if r == NAN_RANK else column)
    return Kernel(kernel, (I32, I32, N), MOST_THREADS)


def argmax_of_parts(target, parts, out, n, n_parts):
    """out[i] = the first column of the largest rank of row i, or -1 where it is a NaN's. parts: address of i32 [n, n_parts, 2],
    of each part of a row the largest rank, LEAST_RANK where it has no columns, and the first column that has it, in the order of
    columns; out: of i32 [n]."""
    n_threads = min(MOST_THREADS, -(-n_parts // 32) * 32)
    return target.launch(argmax_of_parts_kernel(), n, n_threads, (parts, out, n_parts))


def scratch_words(n: int) -> int:
    """int32 of `argmax` of n rows."""
    return n * PARTS * 2


def check(call):
    need(1 <= call.x.n_rows <= 65535, "n", call.x.n_rows, "1..65535")
    need(call.x.n_cols >= 1, "k", call.x.n_cols, "at least 1")


def scratch(call):
    return "i32", (scratch_words(call.x.n_rows),)


def argmax(call):
    """out[i] = the first column of the largest value of x[i], -1 where one is NaN. x: f32 [n, k]; out: i32 [n]."""
    n, k = call.x.shape
    parts = call.device.launch(argmax_parts_kernel(), (PARTS, n), THREADS, (call.x.data, call.scratch.data, k))
    return Launches((parts, argmax_of_parts(call.device, call.scratch.data, call.out.data, n, PARTS)))
