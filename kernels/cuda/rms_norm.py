"""y = mul(mul(x, r), w) with r = 1 / sqrt(mean(x^2) + eps) over the columns of each row (numerics, section 5).

One block a row, four columns a thread and as many rounds as that takes. The columns of a round go through shared memory to
threads 0 to 127, the partials of sum128, so that all of a round is loaded at once while each partial takes its columns in order.
A row of one round stays there to be normed.
"""
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import NamedTuple

from numba import cuda

from ..call import Operand
from .launch import F32, N, SCALAR_F32, Kernel, factory, need
from .ptx import (add, as_f32, as_i32, device, div, f32, fma, i2f, i32, i64, ld, ld4, ldc, lds, mul, nothing, shuffle, sqrt, st,
                  sts)

PARTIALS = 128
COLUMNS = 4          # of a thread in a round
MOST_THREADS = 1024  # of a block
STAGE = COLUMNS * MOST_THREADS


def n_threads(n_cols: int) -> int:
    """Threads of a row's block, a multiple of 128: four columns each, until a block has all it can have."""
    return min(-(-n_cols // (COLUMNS * PARTIALS)) * PARTIALS, MOST_THREADS)


class Source(NamedTuple):
    """Where rows come from. t: a tuple of pointers, of which t[0] holds the rows once they are loaded."""
    load: Callable   # (t, i) -> element i
    keep: Callable   # (t, i, value): writes what `load` gave, where t[0] does not hold it already
    load4: Callable  # (t, i) -> elements i .. i + 3, i a multiple of 4
    keep4: Callable  # (t, i, a, b, c, d)


# t = (x,)
ROWS = Source(device(lambda t, i: ld(t[0], i)), nothing, device(lambda t, i: ld4(t[0], i)), nothing)


@device
def within(i, n):
    """i, or the last index: a load past the end is made there, and its value not used."""
    return i if i < n else i32(n - 1)


@device
def reciprocal(sum_of_squares, n_cols, eps):
    return div(f32(1), sqrt(add(div(sum_of_squares, i2f(n_cols)), eps)))


@device
def halve128(a, b, c, d, lane):
    """The sum of 128 partials in the order of the halves, for every lane of a warp; a lane gives those of lane, lane + 32, lane +
    64, lane + 96. What a lane adds to its own and what the other adds are the same sum."""
    total = add(add(a, c), add(b, d))
    for half in (16, 8, 4, 2, 1):
        total = add(total, as_f32(shuffle(as_i32(total), lane ^ half)))
    return total


@device
def halve_fours(s, lane):
    """The same of a lane's partials 4 lane .. 4 lane + 3."""
    a, b, c, d = s
    for half in (16, 8, 4, 2, 1):
        a, b = add(a, as_f32(shuffle(as_i32(a), lane ^ half))), add(b, as_f32(shuffle(as_i32(b), lane ^ half)))
        c, d = add(c, as_f32(shuffle(as_i32(c), lane ^ half))), add(d, as_f32(shuffle(as_i32(d), lane ^ half)))
    return add(add(a, c), add(b, d))


@device
def with_square(v, total):
    return fma(v, v, total)


@lru_cache(None)
def sum_of_row(source: Source, with_term):
    """with_term: (v, sum) -> the sum with what an element v adds to it."""
    load, keep = source.load, source.keep

    @device
    def of_row(t, stage, row, n_cols):
        """sum128 of the n_cols columns from element `row`, for every thread of the block. stage: shared f32 [STAGE];
        it is left with the last round."""
        partials = cuda.shared.array(PARTIALS, f32)
        v = cuda.local.array(COLUMNS, f32)
        j, n_threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
        total, first = f32(0), i32(0)
        while first < n_cols:
            for k in range(COLUMNS):
                v[k] = load(t, row + within(first + j + k * n_threads, n_cols))
            for k in range(COLUMNS):
                sts(stage, j + k * n_threads, v[k])
                if first + j + k * n_threads < n_cols:
                    keep(t, row + first + j + k * n_threads, v[k])
            cuda.syncthreads()  # the round is in `stage`
            if j < PARTIALS:
                i, end = j, min(i32(COLUMNS * n_threads), i32(n_cols - first))
                while i + 3 * PARTIALS < end:  # four loads at a time
                    a, b, c, d = (lds(stage, i), lds(stage, i + PARTIALS), lds(stage, i + 2 * PARTIALS),
                                  lds(stage, i + 3 * PARTIALS))
                    total = with_term(d, with_term(c, with_term(b, with_term(a, total))))
                    i = i32(i + 4 * PARTIALS)
                while i < end:
                    total = with_term(lds(stage, i), total)
                    i = i32(i + PARTIALS)
            first = i32(first + COLUMNS * n_threads)
            if first < n_cols:
                cuda.syncthreads()  # and may be written over
        if j < PARTIALS:
            sts(partials, j, total)
        half = PARTIALS // 2
        while half > 0:
            cuda.syncthreads()  # both halves are written
            if j < half:
                sts(partials, j, add(lds(partials, j), lds(partials, j + half)))
            half >>= 1
        cuda.syncthreads()
        return lds(partials, 0)
    return of_row


@lru_cache(None)
def reciprocal_rms(source: Source):
    sum_of_squares = sum_of_row(source, with_square)
    return device(lambda t, stage, row, n_cols, eps: reciprocal(sum_of_squares(t, stage, row, n_cols), n_cols, eps))


@device
def four_of_partial(stage, i):
    """Elements of the partial i mod 128 from column i on."""
    return (as_f32(lds(stage, i)), as_f32(lds(stage, i + PARTIALS)), as_f32(lds(stage, i + 2 * PARTIALS)),
            as_f32(lds(stage, i + 3 * PARTIALS)))


@device
def sum_of_partial(stage, i, end):
    """The sum of the squares of the columns i, i + 128, .. below end; whole fours of them."""
    ss, (a, b, c, d) = f32(0), four_of_partial(stage, i)
    i = i32(i + 4 * PARTIALS)
    while i < end:  # the next four are on their way
        e, f, g, h = four_of_partial(stage, i)
        ss = fma(d, d, fma(c, c, fma(b, b, fma(a, a, ss))))
        a, b, c, d = e, f, g, h
        i = i32(i + 4 * PARTIALS)
    return fma(d, d, fma(c, c, fma(b, b, fma(a, a, ss))))


@device
def reciprocal_of_round(stage, n_cols, eps):
    """r of a row whose columns, and zeros behind them, are in `stage`, words [COLUMNS blockDim.x].
    Each warp adds the 128 partials."""
    partials = cuda.shared.array(PARTIALS, f32)
    j = i32(cuda.threadIdx.x)
    cuda.syncthreads()  # the row is in `stage`
    if j < PARTIALS:
        sts(partials, j, sum_of_partial(stage, j, i32(COLUMNS * cuda.blockDim.x)))
    cuda.syncthreads()  # the partials are there
    lane = j & 31
    total = halve128(lds(partials, lane), lds(partials, lane + 32), lds(partials, lane + 64), lds(partials, lane + 96), lane)
    return reciprocal(total, n_cols, eps)


@device
def normed(t, stage, w, row, column, step, n_cols, n_threads, r):
    """y of the columns column, column + step, column + 2 step, column + 3 step; of the last one for those past the end."""
    i, j = within(column, n_cols), within(column + step, n_cols)
    k, m = within(column + 2 * step, n_cols), within(column + 3 * step, n_cols)
    if n_cols <= COLUMNS * n_threads:
        a, b, c, d = lds(stage, i), lds(stage, j), lds(stage, k), lds(stage, m)
    else:
        a, b, c, d = ld(t[0], row + i), ld(t[0], row + j), ld(t[0], row + k), ld(t[0], row + m)
    return mul(mul(a, r), ldc(w, i)), mul(mul(b, r), ldc(w, j)), mul(mul(c, r), ldc(w, k)), mul(mul(d, r), ldc(w, m))


@device
def put(out, row, column, n_cols, y):
    if column < n_cols:
        st(out, row + column, y)


@lru_cache(None)
def row_norm(source: Source):
    reciprocal_of_row = reciprocal_rms(source)

    @device
    def norm_row(t, w, out, n_cols, eps):
        """Row blockIdx.x of out."""
        stage = cuda.shared.array(STAGE, f32)
        row, n_threads = i64(cuda.blockIdx.x) * n_cols, i32(cuda.blockDim.x)
        r = reciprocal_of_row(t, stage, row, n_cols, eps)
        column = i32(cuda.threadIdx.x)
        while column < n_cols:
            a, b, c, d = normed(t, stage, w, row, column, n_threads, n_cols, n_threads, r)
            put(out, row, column, n_cols, a)
            put(out, row, column + n_threads, n_cols, b)
            put(out, row, column + 2 * n_threads, n_cols, c)
            put(out, row, column + 3 * n_threads, n_cols, d)
            column = i32(column + COLUMNS * n_threads)
    return norm_row


@factory([()])
def rms_norm_kernel():
    norm_row = row_norm(ROWS)

    def kernel(x, w, out, n_cols, eps):
        norm_row((x,), w, out, n_cols, eps)
    return Kernel(kernel, (F32, F32, F32, N, SCALAR_F32), MOST_THREADS)


def check_rows(x: Operand, w: Operand) -> None:
    need(x.n_rows >= 1, "n_rows", x.n_rows, "at least 1")
    need(w.n_cols >= 1, "n_cols", w.n_cols, "at least 1")


def check(call):
    check_rows(call.x, call.w)


def rms_norm(call):
    """out = x / sqrt(mean(x^2) + eps) * w, the mean over runs of k columns.

    x, out: f32 [n, a multiple of k], one memory or apart; w: f32 [k]."""
    n_cols = call.w.n_cols
    args = call.x.data, call.w.data, call.out.data, n_cols, call.eps
    return call.device.launch(rms_norm_kernel(), prod(call.x.shape) // n_cols, n_threads(n_cols), args)
