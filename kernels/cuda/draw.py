"""A draw of one of the largest values of each row (numerics, section 5).

A warp takes 512 columns and leaves a list of its largest, in falling order: MOST_DRAWN pairs of a rank (`argmax.rank`) and a
column. Further warps merge 32 lists each, a lane has one, until the lists of a row are so few that the warp which draws merges
them; the other threads of its block bring the lists. Places without a value have a rank below that of all values.
"""
from numba import cuda, types

from ..draws import MOST_DRAWN, SETTINGS
from ..exp64 import Operations, exponential
from .argmax import LEAST_RANK, NAN_RANK, NO_COLUMN, check as check, rank
from .launch import F32, F64, I32, Kernel, Launches, N, factory
from .ptx import (add64, as_f64, d2i, device, div64, f2d, f64, i32, i64, ld, ld2, lds, lds2, mul64, redux_max, redux_min, rint64,
                  st, st2, sts, sub64, syncwarp)
from .soft_max import of_order

VALUES = 16             # of a lane
WIDTH = 32 * VALUES     # columns of a warp
LISTS = 32              # of a warp that merges
LIST_WORDS = 2 * MOST_DRAWN
N_WORDS = LISTS * LIST_WORDS
N_LOADERS = 256         # threads that bring the lists
N_OWN = MOST_DRAWN // 32  # values of a lane: j = lane + 32 i
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
def top_k_of(settings, row):
    return d2i(ld(settings, row * N_SETTINGS))


@factory([()])
def draw_first_kernel():
    def kernel(x, settings, lists, n_cols):  # block: columns from blockIdx.x * WIDTH of row blockIdx.y
        ranks, columns = cuda.local.array(VALUES, types.int32), cuda.local.array(VALUES, types.int32)
        row, lane, first = i64(cuda.blockIdx.y), i32(cuda.threadIdx.x), i32(cuda.blockIdx.x * WIDTH)
        for i in range(VALUES):
            column = i32(first + lane + 32 * i)
            ranks[i], columns[i] = NO_VALUE, NO_COLUMN
            if column < n_cols:
                ranks[i], columns[i] = rank(ld(x, row * n_cols + column)), column
        at, k, j = (row * cuda.gridDim.x + cuda.blockIdx.x) * MOST_DRAWN, top_k_of(settings, row), i32(0)
        while j < MOST_DRAWN:
            top, column = NO_VALUE, NO_COLUMN
            if j < k:
                top, column = largest_of(ranks, columns)
            if lane == 0:
                st2(lists, 2 * (at + j), top, column)
            j = i32(j + 1)
    return Kernel(kernel, (F32, F64, I32, N), 32)


@device
def load_lists(lists, first, n, tid, pairs):
    """n lists, from number `first` on, to shared memory, whose rest are lists without a value; by a block."""
    i = i32(2 * tid)
    while i < N_WORDS:
        top, column = NO_VALUE, NO_COLUMN
        if i < n * LIST_WORDS:
            top, column = ld2(lists, first * LIST_WORDS + i)
        sts(pairs, i, top)
        sts(pairs, i + 1, column)
        i = i32(i + 2 * N_LOADERS)
    cuda.syncthreads()  # all are there


@device
def next_of(pairs, lane, at):
    """(rank, column, at) of the largest pair of the warp's lists from place `at` of each lane's on, of equal ones the first
    column, for every lane; it is behind `at` then."""
    r, c = NO_VALUE, NO_COLUMN
    if at < MOST_DRAWN:
        r, c = lds2(pairs, lane * LIST_WORDS + 2 * at)
    top = redux_max(r)
    column = redux_min(c if r == top else NO_COLUMN)
    return top, column, i32(at + 1 if c == column else at)


@factory([()])
def draw_further_kernel():
    def kernel(lists, settings, fewer, n):  # block: lists from blockIdx.x * LISTS of the n of row blockIdx.y
        pairs = cuda.shared.array(N_WORDS, types.int32)
        row, lane, first = i64(cuda.blockIdx.y), i32(cuda.threadIdx.x), i32(cuda.blockIdx.x * LISTS)
        load_lists(lists, row * n + first, i32(n - first), lane, pairs)
        if lane < 32:
            to, k, j, at = (row * cuda.gridDim.x + cuda.blockIdx.x) * MOST_DRAWN, top_k_of(settings, row), i32(0), i32(0)
            while j < MOST_DRAWN:
                top, column = NO_VALUE, NO_COLUMN
                if j < k:
                    top, column, at = next_of(pairs, lane, at)
                if lane == 0:
                    st2(fewer, 2 * (to + j), top, column)
                j = i32(j + 1)
    return Kernel(kernel, (I32, F64, I32, N), N_LOADERS)


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
def running_sums(x, n, lane, own):
    """The sum of n float64 in shared memory, in order, for every lane; own: float64 [N_OWN], written, the sum up to each of a
    lane's."""
    total, j = ZERO, i32(0)
    while j < n:
        total = add64(total, lds(x, j))
        for i in range(N_OWN):
            own[i] = total if j == lane + 32 * i else own[i]
        j = i32(j + 1)
    return total


@device
def first_place(lane, n, holds):
    """The first of n places of which something holds, n if there is none. holds: i32 [N_OWN], of a lane's."""
    found = n
    for i in range(N_OWN):
        j = i32(lane + 32 * i)
        found = j if holds[i] and j < found else found
    return redux_min(found)


@factory([()])
def draw_last_kernel():
    def kernel(lists, settings, out, n):  # block: the n lists of row blockIdx.x, LISTS at most
        pairs = cuda.shared.array(N_WORDS, types.int32)
        ranks, columns = cuda.shared.array(MOST_DRAWN, types.int32), cuda.shared.array(MOST_DRAWN, types.int32)
        x = cuda.shared.array(MOST_DRAWN, types.float64)
        d, p, own = (cuda.local.array(N_OWN, types.float64), cuda.local.array(N_OWN, types.float64),
                     cuda.local.array(N_OWN, types.float64))
        holds = cuda.local.array(N_OWN, types.int32)
        row, lane = i64(cuda.blockIdx.x), i32(cuda.threadIdx.x)
        load_lists(lists, row * n, n, lane, pairs)
        if lane < 32:
            k, j, at = top_k_of(settings, row), i32(0), i32(0)
            while j < k:
                top, column, at = next_of(pairs, lane, at)
                if lane == 0:
                    sts(ranks, j, top)
                    sts(columns, j, column)
                j = i32(j + 1)
            syncwarp()  # all are there
            top, setting = lds(ranks, 0), row * N_SETTINGS
            temperature, found = ld(settings, setting + 1), i32(0)
            if temperature > ZERO and top != NAN_RANK:
                top_p, min_p, u = ld(settings, setting + 2), ld(settings, setting + 3), ld(settings, setting + 4)
                for i in range(N_OWN):
                    j, d[i], p[i], own[i] = i32(lane + 32 * i), ZERO, ZERO, ZERO
                    if j < k:
                        other = lds(ranks, j)
                        d[i] = ZERO if other == top else sub64(f2d(of_order(other)), f2d(of_order(top)))
                        p[i] = exp(d[i])
                        sts(x, j, p[i])
                syncwarp()  # all are there
                total = sum_of(x, k, lane)
                syncwarp()  # all have it
                for i in range(N_OWN):
                    p[i] = div64(p[i], total)
                    if lane + 32 * i < k:
                        sts(x, lane + 32 * i, p[i])
                syncwarp()  # all are there
                left, least = k, mul64(min_p, lds(x, 0))
                if top_p < ONE:
                    running_sums(x, k, lane, own)
                    for i in range(N_OWN):
                        holds[i] = own[i] >= top_p
                    left = i32(min(first_place(lane, k, holds) + 1, k))
                for i in range(N_OWN):
                    holds[i] = p[i] < least
                left = first_place(lane, left, holds)
                for i in range(N_OWN):
                    if lane + 32 * i < left:
                        sts(x, lane + 32 * i, exp(div64(d[i], temperature)))
                syncwarp()  # all are there
                bound = mul64(u, running_sums(x, left, lane, own))
                for i in range(N_OWN):
                    holds[i] = own[i] > bound
                found = i32(min(first_place(lane, left, holds), left - 1))
            if lane == 0:
                st(out, row, i32(-1) if top == NAN_RANK else lds(columns, found))
    return Kernel(kernel, (I32, F64, I32, N), N_LOADERS)


def levels(n_cols: int) -> list[int]:
    """How many lists of a row each launch but the last one leaves."""
    found = [-(-n_cols // WIDTH)]
    while found[-1] > LISTS:
        found.append(-(-found[-1] // LISTS))
    return found


def scratch(call):
    return "i32", (call.x.n_rows * LIST_WORDS * sum(levels(call.x.n_cols)),)


def draw(call):
    """out[i] = a column of the top_k largest values of x[i], drawn by settings[i] (`SETTINGS`), -1 where a value is NaN.
    x: f32 [n, k]; settings: f64 [n, 5], top_k 1..MOST_DRAWN and no more than k; out: i32 [n]."""
    (n, k), settings, device, lists = call.x.shape, call.settings.data, call.device, call.scratch.data
    left, *others = levels(k)
    launches = [device.launch(draw_first_kernel(), (left, n), 32, (call.x.data, settings, lists, k))]
    for fewer in others:
        behind = lists + 4 * LIST_WORDS * n * left
        launches.append(device.launch(draw_further_kernel(), (fewer, n), N_LOADERS, (lists, settings, behind, left)))
        lists, left = behind, fewer
    launches.append(device.launch(draw_last_kernel(), n, N_LOADERS, (lists, settings, call.out.data, left)))
    return Launches(tuple(launches))
