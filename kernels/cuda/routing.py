"""Which experts a token is sent to, and how much each counts (numerics, section 9). One warp a row, the row in its registers
(warp_row).

Values are ranked as integers, NaN as -infinity, equal ones by the lower column: each round, the warp's largest rank and the least
column that has it.
"""
from functools import lru_cache

from numba import cuda

from ..arith import NAN
from ..reference import routing as reference
from ..reference.routing import MINUS_INFINITY, SMALLEST_SUM
from .argmax import LEAST_RANK, order
from .elementwise import THREADS, by_element, check_grid
from .launch import F32, I32, Kernel, N, factory, need
from .operands import addresses
from .ptx import add, as_f32, as_i32, device, div, f32, i32, i64, ld, lds, redux_max, redux_min, shuffle, st, sts, syncwarp
from .warp_row import MOST_COLUMNS, VALUES, check_rows, load_row, n_values, store_row, whole_row_kernel

TAKEN = LEAST_RANK          # below the rank of every value: of columns that are chosen, and behind the last
NO_COLUMN = i32(MOST_COLUMNS)

rank_value = device(reference.rank_value.py_func)


@lru_cache(None)
def rank_row(n):
    @device
    def ranks_of(v, n_cols, lane, ranks):
        for i in range(n):
            r = order(rank_value(v[i]))
            ranks[i] = r if i32(lane + 32 * i) < n_cols else TAKEN
    return ranks_of


@lru_cache(None)
def next_column(n):
    @device
    def choose(ranks, lane):
        """The first column of the largest rank, for every lane, which is taken then. ranks: of a lane,
        one column at least is not taken."""
        best, column = TAKEN, NO_COLUMN
        for i in range(n):
            if ranks[i] > best:
                best, column = ranks[i], i32(lane + 32 * i)
        column = redux_min(column if best == redux_max(best) else NO_COLUMN)
        for i in range(n):
            ranks[i] = TAKEN if column == i32(lane + 32 * i) else ranks[i]
        return column
    return choose


@lru_cache(None)
def mask_row(n):
    n_shared, n_scores = 32 * n, max(1, n // 2)  # groups are of two columns at least
    rank_scores, choose = rank_row(n_scores), next_column(n_scores)

    @device
    def mask(v, n_cols, n_group, n_group_used, lane):
        """Values of a row outside the chosen groups become -infinity. A lane scores groups lane, lane + 32, ...,
        from a column of its own on."""
        row = cuda.shared.array(n_shared, f32)
        scores, ranks = cuda.local.array(n_scores, f32), cuda.local.array(n_scores, i32)
        size = i32(n_cols // n_group)
        for i in range(n):
            sts(row, lane + 32 * i, v[i])
        syncwarp()  # the row is there
        for i in range(n_scores):
            scores[i] = MINUS_INFINITY
            if i32(lane + 32 * i) < n_group:
                first, second = MINUS_INFINITY, MINUS_INFINITY
                start, j, at = i32((lane + 32 * i) * size), i32(0), i32(lane % size)
                while j < size:
                    value = rank_value(lds(row, start + at))
                    second = first if value > first else value if value > second else second
                    first = value if value > first else first
                    at = i32(at + 1) if at + 1 < size else i32(0)
                    j = i32(j + 1)
                scores[i] = add(first, second)
        rank_scores(scores, n_group, lane, ranks)
        kept, j = i32(0), i32(0)  # kept: a bit for each of the lane's columns
        while j < n_group_used:
            start = i32(choose(ranks, lane) * size)
            for i in range(n):
                kept = i32(kept | 1 << i) if start <= i32(lane + 32 * i) < i32(start + size) else kept
            j = i32(j + 1)
        for i in range(n):
            v[i] = v[i] if kept >> i & 1 else MINUS_INFINITY
    return mask


@lru_cache(None)
def normalize_row(n):
    @device
    def normalize(v, n_cols, lane):
        """Values of a row are divided by their sum, in the order of columns, or by 2^-14 where that is less."""
        total = f32(0)
        for i in range(n):
            j, end = i32(0), min(i32(32), i32(n_cols - 32 * i))
            while j < end:
                total = add(total, as_f32(shuffle(as_i32(v[i]), j)))
                j = i32(j + 1)
        total = SMALLEST_SUM if total < SMALLEST_SUM else total
        for i in range(n):
            v[i] = div(v[i], total)
    return normalize


@factory([(n,) for n in VALUES])
def top_k_kernel(n):
    load, ranks_of, choose = load_row(n), rank_row(n), next_column(n)

    def kernel(x, ids, n_cols, k):
        v, ranks = cuda.local.array(n, f32), cuda.local.array(n, i32)
        lane = i32(cuda.threadIdx.x)
        load(x, i64(cuda.blockIdx.x) * n_cols, n_cols, lane, v)
        ranks_of(v, n_cols, lane, ranks)
        j = i32(0)
        while j < k:
            column = choose(ranks, lane)
            if lane == 0:
                st(ids, i64(cuda.blockIdx.x) * k + j, column)
            j = i32(j + 1)
    return Kernel(kernel, (F32, I32, N, N), 32)


@factory([(n,) for n in VALUES])
def mask_groups_kernel(n):
    load, mask, store = load_row(n), mask_row(n), store_row(n)

    def kernel(x, out, n_cols, n_group, n_group_used):
        v = cuda.local.array(n, f32)
        row, lane = i64(cuda.blockIdx.x) * n_cols, i32(cuda.threadIdx.x)
        load(x, row, n_cols, lane, v)
        mask(v, n_cols, n_group, n_group_used, lane)
        store(out, row, n_cols, lane, v)
    return Kernel(kernel, (F32, F32, N, N, N), 32)


@factory([(n,) for n in VALUES])
def normalize_kernel(n):
    return whole_row_kernel(n, normalize_row(n))


@factory([()])
def take_columns_kernel():
    def kernel(x, ids, out, n_cols, k):  # blocks as in elementwise
        j = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if j < k:
            i = i64(cuda.blockIdx.x) * k + j
            column = ld(ids, i)
            value = NAN
            if 0 <= column < n_cols:
                value = ld(x, i64(cuda.blockIdx.x) * n_cols + column)
            st(out, i, value)
    return Kernel(kernel, (F32, I32, F32, N, N), THREADS)


def check_groups(n_cols: int, n_group: int, n_group_used: int) -> None:
    divided = n_group >= 1 and n_cols % n_group == 0 and n_cols > n_group
    need(divided, "n_group", n_group, f"groups of two or more equal ones of {n_cols} columns")
    need(1 <= n_group_used <= n_group, "n_group_used", n_group_used, f"1..{n_group}")


def check(call):
    n_cols = call.x.n_cols
    if call.op == "take_columns":
        need(n_cols >= 1, "n_cols", n_cols, "at least 1")
        check_grid(call.out)
    else:
        check_rows(call.x)
    if call.op == "top_k":
        need(1 <= call.k <= n_cols, "k", call.k, f"1..{n_cols}")
    elif call.op == "mask_groups":
        check_groups(n_cols, call.n_group, call.n_group_used)


def top_k(call):
    """ids = the columns of the k largest values of each row, in order. x: f32 [n, up to 512]; ids: i32 [n, k]."""
    n, n_cols = call.x.shape
    return call.device.launch(top_k_kernel(n_values(n_cols)), n, 32, (call.x.data, call.ids.data, n_cols, call.k))


def mask_groups(call):
    """out = x in the n_group_used groups of the largest scores, -infinity elsewhere.

    x, out: f32 [n, k], one memory or apart, k up to 512."""
    n, k = call.x.shape
    args = call.x.data, call.out.data, k, call.n_group, call.n_group_used
    return call.device.launch(mask_groups_kernel(n_values(k)), n, 32, args)


def take_columns(call):
    """out[i, j] = x[i, ids[i, j]], NaN where there is no such column. x: f32 [n, k]; ids: i32 [n, u]; out: f32 [n, u]."""
    return by_element(call, take_columns_kernel(), *addresses(call.x, call.ids, call.out), call.x.n_cols, call.out.n_cols)


def normalize(call):
    """out = x / max(sum(x), 2^-14) of each row. x, out: f32 [n, k], one memory or apart, k up to 512."""
    n, k = call.x.shape
    return call.device.launch(normalize_kernel(n_values(k)), n, 32, (call.x.data, call.out.data, k))
