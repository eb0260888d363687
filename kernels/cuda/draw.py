"""A draw of one of the largest values of each row (numerics, section 5).

A warp takes 512 columns and leaves its largest MOST_DRAWN, in falling order, as pairs of a rank (`argmax.rank`) and a column;
further launches take those until one warp has a row, which draws. Places without a value have a rank below that of all values.
"""
from numba import cuda, types

from ..draws import MOST_DRAWN, SETTINGS
from ..exp64 import Operations, exponential
from .argmax import LEAST_RANK, NAN_RANK, NO_COLUMN, rank
from .launch import F32, F64, I32, Kernel, Launches, N, factory, need
from .ptx import (add64, as_f64, d2i, device, div64, f2d, f64, i32, i64, ld, lds, mul64, redux_max, redux_min, rint64, st, sts,
                  sub64, syncwarp)
from .soft_max import of_order

VALUES = 16             # of a lane
WIDTH = 32 * VALUES     # columns, or pairs, of a warp
N_SETTINGS = len(SETTINGS)
NO_VALUE = LEAST_RANK
ZERO, ONE = f64(0), f64(1)

exp = exponential(device, Operations(add64, sub64, mul64, rint64, d2i, device(lambda n: as_f64(i64(i64(n) + 1023) << i64(52)))))


@device
def largest_of(ranks, columns):
    """(rank, column) of the largest of a warp's pairs, of equal ones the first column, for every lane; it is not there any
    more. ranks, columns: i32 [VALUES], a lane's; columns of equal ranks rise."""
    r, c = cuda.local.array(VALUES, types.int32), cuda.local.array(VALUES, types.int32)
    for i in range(VALUES):
        r[i], c[i] = ranks[i], columns[i]
    n = VALUES
    while n > 1:  # of neighbours, so that the first of equal ones stays
        n //= 2
        for i in range(n):
            is_second = r[2 * i + 1] > r[2 * i]
            r[i], c[i] = r[2 * i + 1] if is_second else r[2 * i], c[2 * i + 1] if is_second else c[2 * i]
    top = redux_max(r[0])
    column = redux_min(c[0] if r[0] == top else NO_COLUMN)
    for i in range(VALUES):
        ranks[i] = NO_VALUE if columns[i] == column else ranks[i]
    return top, column


@device
def leave_largest(ranks, columns, lane, k, pairs, first):
    """The k largest pairs, of MOST_DRAWN that begin at pair `first`."""
    j = i32(0)
    while j < MOST_DRAWN:
        top, column = NO_VALUE, NO_COLUMN
        if j < k:
            top, column = largest_of(ranks, columns)
        if lane == 0:
            st(pairs, 2 * (first + j), top)
            st(pairs, 2 * (first + j) + 1, column)
        j = i32(j + 1)


@device
def load_pairs(pairs, first, n, lane, ranks, columns):
    """n pairs of a warp, from pair `first` on."""
    for i in range(VALUES):
        ranks[i], columns[i] = NO_VALUE, NO_COLUMN
        if lane + 32 * i < n:
            ranks[i] = ld(pairs, 2 * (first + lane + 32 * i))
            columns[i] = ld(pairs, 2 * (first + lane + 32 * i) + 1)


@device
def top_k_of(settings, row):
    return d2i(ld(settings, row * N_SETTINGS))


@factory([()])
def draw_first_kernel():
    def kernel(x, settings, pairs, n_cols):  # block: columns from blockIdx.x * WIDTH of row blockIdx.y
        ranks, columns = cuda.local.array(VALUES, types.int32), cuda.local.array(VALUES, types.int32)
        row, lane, first = i64(cuda.blockIdx.y), i32(cuda.threadIdx.x), i32(cuda.blockIdx.x * WIDTH)
        for i in range(VALUES):
            column = i32(first + lane + 32 * i)
            ranks[i], columns[i] = NO_VALUE, NO_COLUMN
            if column < n_cols:
                ranks[i], columns[i] = rank(ld(x, row * n_cols + column)), column
        leave_largest(ranks, columns, lane, top_k_of(settings, row), pairs, (row * cuda.gridDim.x + cuda.blockIdx.x) * MOST_DRAWN)
    return Kernel(kernel, (F32, F64, I32, N), 32)


@factory([()])
def draw_further_kernel():
    def kernel(pairs, settings, fewer, n):  # block: pairs from blockIdx.x * WIDTH of the n of row blockIdx.y
        ranks, columns = cuda.local.array(VALUES, types.int32), cuda.local.array(VALUES, types.int32)
        row, lane, first = i64(cuda.blockIdx.y), i32(cuda.threadIdx.x), i32(cuda.blockIdx.x * WIDTH)
        load_pairs(pairs, row * n + first, i32(n - first), lane, ranks, columns)
        leave_largest(ranks, columns, lane, top_k_of(settings, row), fewer, (row * cuda.gridDim.x + cuda.blockIdx.x) * MOST_DRAWN)
    return Kernel(kernel, (I32, F64, I32, N), 32)


@device
def sum_of(x, n, lane):
    """`reference.draw.tree_sum` of n float64 in shared memory, which are overwritten, for every lane."""
    while n > 1:
        m = i32((n + 1) >> 1)
        i = lane
        while i < n - m:
            sts(x, i, add64(lds(x, i), lds(x, m + i)))
            i = i32(i + 32)
        syncwarp()  # all have added
        n = m
    return lds(x, 0)


@device
def fewest(p, n, top_p):
    """How many of the first p, float64 in shared memory, sum to at least top_p; n if all do not."""
    total, j = ZERO, i32(0)
    while j < n:
        total = add64(total, lds(p, j))
        j = i32(j + 1)
        if total >= top_p:
            n = j
    return n


@device
def before_small(p, n, least):
    """How many of the first p come before one that is less than `least`."""
    j = i32(0)
    while j < n:
        n = j if lds(p, j) < least else n
        j = i32(j + 1)
    return n


@device
def first_above(w, n, u):
    """The first of n whose cumulative sum exceeds u times that of all; the last one if none does."""
    total, j = ZERO, i32(0)
    while j < n:
        total = add64(total, lds(w, j))
        j = i32(j + 1)
    bound, total, j, found = mul64(u, total), ZERO, i32(0), i32(n - 1)
    while j < n:
        total = add64(total, lds(w, j))
        if total > bound:
            found, n = j, j
        j = i32(j + 1)
    return found


@factory([()])
def draw_last_kernel():
    n_own = MOST_DRAWN // 32

    def kernel(pairs, settings, out, n):  # block: the n pairs of row blockIdx.x, WIDTH at most
        ranks, columns = cuda.local.array(VALUES, types.int32), cuda.local.array(VALUES, types.int32)
        top_ranks, top_columns = cuda.shared.array(MOST_DRAWN, types.int32), cuda.shared.array(MOST_DRAWN, types.int32)
        p, w = cuda.shared.array(MOST_DRAWN, types.float64), cuda.shared.array(MOST_DRAWN, types.float64)
        d = cuda.local.array(n_own, types.float64)
        row, lane = i64(cuda.blockIdx.x), i32(cuda.threadIdx.x)
        load_pairs(pairs, row * n, n, lane, ranks, columns)
        k, j = top_k_of(settings, row), i32(0)
        while j < k:
            top, column = largest_of(ranks, columns)
            if lane == 0:
                sts(top_ranks, j, top)
                sts(top_columns, j, column)
            j = i32(j + 1)
        syncwarp()  # all are there
        top = lds(top_ranks, 0)
        at = row * N_SETTINGS
        temperature, found = ld(settings, at + 1), i32(0)
        if temperature > ZERO and top != NAN_RANK:
            for i in range(n_own):
                j, d[i] = i32(lane + 32 * i), ZERO
                if j < k:
                    other = lds(top_ranks, j)
                    d[i] = ZERO if other == top else sub64(f2d(of_order(other)), f2d(of_order(top)))
                    sts(w, j, exp(d[i]))
                    sts(p, j, lds(w, j))
            syncwarp()  # all are there
            total, n_left = sum_of(w, k, lane), k
            for i in range(n_own):
                j = i32(lane + 32 * i)
                if j < k:
                    sts(p, j, div64(lds(p, j), total))
            syncwarp()  # all are there
            top_p = ld(settings, at + 2)
            if top_p < ONE:
                n_left = fewest(p, k, top_p)
            n_left = before_small(p, n_left, mul64(ld(settings, at + 3), lds(p, 0)))
            for i in range(n_own):
                j = i32(lane + 32 * i)
                if j < n_left:
                    sts(w, j, exp(div64(d[i], temperature)))
            syncwarp()  # all are there
            found = first_above(w, n_left, ld(settings, at + 4))
        if lane == 0:
            st(out, row, i32(-1) if top == NAN_RANK else lds(top_columns, found))
    return Kernel(kernel, (I32, F64, I32, N), 32)


def levels(n_cols: int) -> list[int]:
    """How many warps take a row in each launch but the last; they leave MOST_DRAWN pairs each."""
    found = [-(-n_cols // WIDTH)]
    while found[-1] * MOST_DRAWN > WIDTH:
        found.append(-(-found[-1] * MOST_DRAWN // WIDTH))
    return found


def check(call):
    need(1 <= call.x.n_rows <= 65535, "n", call.x.n_rows, "1..65535")
    need(call.x.n_cols >= 1, "k", call.x.n_cols, "at least 1")


def scratch(call):
    return "i32", (call.x.n_rows * 2 * MOST_DRAWN * sum(levels(call.x.n_cols)),)


def draw(call):
    """out[i] = a column of the top_k largest values of x[i], drawn by settings[i] (`SETTINGS`), -1 where a value is NaN.
    x: f32 [n, k]; settings: f64 [n, 5], top_k 1..MOST_DRAWN and no more than k; out: i32 [n]."""
    (n, k), settings, device, pairs = call.x.shape, call.settings.data, call.device, call.scratch.data
    first, *others = levels(k)
    launches, left = [device.launch(draw_first_kernel(), (first, n), 32, (call.x.data, settings, pairs, k))], first * MOST_DRAWN
    for warps in others:
        fewer = pairs + 8 * n * left
        launches.append(device.launch(draw_further_kernel(), (warps, n), 32, (pairs, settings, fewer, left)))
        pairs, left = fewer, warps * MOST_DRAWN
    launches.append(device.launch(draw_last_kernel(), n, 32, (pairs, settings, call.out.data, left)))
    return Launches(tuple(launches))
