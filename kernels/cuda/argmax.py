"""The column of the largest value of each row (numerics, section 5), in two launches: of parts of a row, a block each, then of the parts.

Floats are compared as integers of the same order, so that a NaN comes out above all and equal values, zeros of both signs among them, meet as equal.
"""
from numba import cuda, types

from .launch import F32, I32, N, Kernel, Launches, check, factory
from .ptx import as_i32, device, i32, i64, ld, lds, st, sts

THREADS, PARTS = 256, 64
NAN_RANK, LEAST_RANK, MAGNITUDE = i32(0x7fffffff), i32(-0x80000000), i32(0x7fffffff)


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


def best_of(n_threads):
    """Cooperative function (t, rank, column) -> those of the largest rank of a block's n_threads, a power of two; of equal ones the first column."""
    @device
    def best(t, r, column):
        ranks = cuda.shared.array(n_threads, types.int32)
        columns = cuda.shared.array(n_threads, types.int32)
        sts(ranks, t, r)
        sts(columns, t, column)
        half = n_threads // 2
        while half > 0:
            cuda.syncthreads()  # both halves are written
            if t < half:
                a, b = lds(ranks, t), lds(ranks, t + half)
                if b > a or b == a and lds(columns, t + half) < lds(columns, t):
                    sts(ranks, t, b)
                    sts(columns, t, lds(columns, t + half))
            half >>= 1
        cuda.syncthreads()
        return lds(ranks, 0), lds(columns, 0)
    return best


@factory([()])
def argmax_parts_kernel():
    best = best_of(THREADS)

    def kernel(x, parts, n_cols):
        """parts: of each row PARTS pairs of a rank and a column."""
        part, row, t = i32(cuda.blockIdx.x), i64(cuda.blockIdx.y), i32(cuda.threadIdx.x)
        per = (n_cols + PARTS - 1) // PARTS
        column, end = i32(part * per + t), min(i32((part + 1) * per), i32(n_cols))
        r, at = LEAST_RANK, i32(n_cols)
        while column < end:
            other = rank(ld(x, row * n_cols + column))
            if other > r:
                r, at = other, column
            column = i32(column + THREADS)
        r, at = best(t, r, at)
        if t == 0:
            st(parts, (row * PARTS + part) * 2, r)
            st(parts, (row * PARTS + part) * 2 + 1, at)
    return Kernel(kernel, (F32, I32, N), THREADS)


@factory([()])
def argmax_of_parts_kernel():
    best = best_of(PARTS)

    def kernel(parts, out):
        row, t = i64(cuda.blockIdx.x), i32(cuda.threadIdx.x)
        at = (row * PARTS + t) * 2
        r, column = best(t, ld(parts, at), ld(parts, at + 1))
        if t == 0:
            st(out, row, i32(-1) if r == NAN_RANK else column)
    return Kernel(kernel, (I32, I32), PARTS)


def argmax(target, x, out, n, k, scratch):
    """out[i] = the first column of the largest value of x[i], or -1. x: address of f32 [n, k]; out: of i32 [n]; scratch: of i32 [n, 2 * PARTS]."""
    check("argmax", 1 <= n <= 65535, "n", n, "1..65535")
    check("argmax", k >= 1, "k", k, "at least 1")
    return Launches((target.launch(argmax_parts_kernel(), (PARTS, n), THREADS, (x, scratch, k)),
                     target.launch(argmax_of_parts_kernel(), n, PARTS, (scratch, out))))
