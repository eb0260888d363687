"""Sorted dispatch: the (token, rank) pairs of a batch in the order of their experts, those of an expert in their own order, and the work that they are for
grouped products (docs/numerics.md, section 9). One block, no atomics: a warp has a run of pairs, and takes 32 of them at a time.

1. A warp counts its pairs of each expert: the first of the lanes that have one expert counts for all of them.
2. A thread for each expert adds up the counts of the warps before each; then sums over the experts before, of pairs and of items of work.
3. A warp places its pairs, each behind those of its expert in warps before, in what it placed before, and in lanes before.
4. An item is an expert and up to `tokens` of its sorted rows.

Pairs whose id is no expert are sorted behind all others and belong to no item: their rows of a result are left as they are. The first of them is left in
`fault`, for whoever reads it together with the results.
"""
from typing import NamedTuple

from numba import cuda, types

from .launch import I32, Kernel, N, check, factory
from .ptx import device, i32, i64, ld, lds, match, popc, shuffle, st, st4, sts, syncwarp

MOST_EXPERTS, MOST_THREADS, STEP = 512, 1024, 128  # threads are a multiple of STEP: four warps
FAULT, ITEMS = 4, 8                                # words of a table at which its fault and its items begin


class Table(NamedTuple):
    """Words, int32, at which the parts of a dispatch table begin. Word 0 is the number of items."""
    fault: int     # [4]: node or 0, pair, its id, unused: for who keeps it nowhere else
    items: int     # [most items][4]: expert, first sorted row, rows, unused
    bounds: int    # [X + 1]: the sorted rows of expert e are bounds[e] .. bounds[e + 1] - 1
    order: int     # [pairs]: the pair of a sorted row
    n_words: int
    n_items: int   # at most


def dispatch_table(n_expert: int, n_pairs: int, tokens: int) -> Table:
    """tokens: rows of an item at most."""
    n_items = n_pairs // tokens + min(n_expert, n_pairs)  # full ones, and one of each expert that is not
    bounds = ITEMS + 4 * n_items
    order = bounds + n_expert + 1
    return Table(FAULT, ITEMS, bounds, order, order + n_pairs, n_items)


@device
def report(fault, node, pair, found):
    """Leaves a pair and its id, which is no expert, of the node with this number, from 1, where no earlier one is left. By one thread of a launch."""
    if ld(fault, 0) == 0:
        st(fault, 1, pair)
        st(fault, 2, found)
        st(fault, 0, node)


@device
def kind_of(ids, pair, end, n_expert):
    """The expert of a pair, n_expert where there is none, -1 from `end` on."""
    found = ld(ids, pair) if pair < end else i32(-1)
    return i32(-1) if pair >= end else i32(found if 0 <= found < n_expert else n_expert)


@device
def sum_before(x, lane):
    """(the sum over the lanes before, the sum over all lanes) of an int32."""
    total, step = i32(x), i32(1)
    while step < 32:
        other = shuffle(total, i32(lane - step) & 31)
        total, step = i32(total + (other if lane >= step else 0)), i32(step + step)
    return i32(total - x), shuffle(total, i32(31))


@factory([()])
def dispatch_kernel():
    def kernel(ids, table, fault, node, n_pairs, n_expert, tokens, bounds, order):
        shared = cuda.shared.array(0, types.int32)
        tid, n_threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
        lane, warp, n_warps = i32(tid & 31), i32(tid >> 5), i32(n_threads >> 5)
        n_kinds, before = i32(n_expert + 1), i32((i64(1) << lane) - 1)  # experts, and none; the lanes before
        row_sums = i32(n_warps * n_kinds)   # behind the warps' counts: sorted rows of the kinds before each kind,
        item_sums = i32(row_sums + n_kinds)  # items of them,
        warp_sums = i32(item_sums + n_kinds)  # and both of a warp's kinds
        groups = i32((n_pairs + 31) >> 5)
        per_warp = i32(32 * i32((groups + n_warps - 1) // n_warps))
        first, own = i32(warp * per_warp), i32(warp * n_kinds)
        end = i32(min(first + per_warp, n_pairs))
        p = tid
        while p < row_sums:
            sts(shared, p, i32(0))
            p = i32(p + n_threads)
        cuda.syncthreads()

        # 1. counts
        base, kind = first, kind_of(ids, i32(first + lane), end, n_expert)
        while base < end:
            following = kind_of(ids, i32(base + 32 + lane), end, n_expert)  # is on its way meanwhile
            same = match(kind)
            if kind >= 0 and same & before == 0:
                sts(shared, own + kind, i32(lds(shared, own + kind) + popc(same)))
            syncwarp()
            base, kind = i32(base + 32), following
        cuda.syncthreads()

        # 2. sums over warps, then over kinds
        total, w, place = i32(0), i32(0), tid
        if tid < n_kinds:
            while w < n_warps:  # four loads are under way together
                a, b, c, d = lds(shared, place), lds(shared, place + n_kinds), lds(shared, place + 2 * n_kinds), lds(shared, place + 3 * n_kinds)
                sts(shared, place, total)
                sts(shared, place + n_kinds, i32(total + a))
                sts(shared, place + 2 * n_kinds, i32(total + a + b))
                sts(shared, place + 3 * n_kinds, i32(total + a + b + c))
                total, w, place = i32(total + a + b + c + d), i32(w + 4), i32(place + 4 * n_kinds)
        n_items = i32((total + tokens - 1) // tokens) if tid < n_expert else i32(0)
        rows_before, rows_of_warp = sum_before(total, lane)
        items_before, items_of_warp = sum_before(n_items, lane)
        if lane == 0:
            sts(shared, warp_sums + 2 * warp, rows_of_warp)
            sts(shared, warp_sums + 2 * warp + 1, items_of_warp)
        cuda.syncthreads()
        w = i32(0)
        while w < warp:
            rows_before, items_before = i32(rows_before + lds(shared, warp_sums + 2 * w)), i32(items_before + lds(shared, warp_sums + 2 * w + 1))
            w = i32(w + 1)
        if tid < n_kinds:
            sts(shared, row_sums + tid, rows_before)
            sts(shared, item_sums + tid, items_before)
            st(table, bounds + tid, rows_before)
        cuda.syncthreads()

        # 3. places
        base, kind = first, kind_of(ids, i32(first + lane), end, n_expert)
        while base < end:
            following, pair = kind_of(ids, i32(base + 32 + lane), end, n_expert), i32(base + lane)
            same = match(kind)
            if kind >= 0:
                row = i32(lds(shared, row_sums + kind) + lds(shared, own + kind) + popc(same & before))
                st(table, order + row, pair)
                if kind == n_expert and row == lds(shared, row_sums + n_expert):
                    report(fault, node, pair, ld(ids, pair))
            syncwarp()  # all have read what is counted on
            if kind >= 0 and same & before == 0:
                sts(shared, own + kind, i32(lds(shared, own + kind) + popc(same)))
            syncwarp()
            base, kind = i32(base + 32), following

        # 4. items: expert e has those from item_sums[e] on
        i, all_items = tid, lds(shared, item_sums + n_expert)
        while i < all_items:
            e, last = i32(0), n_expert
            while last - e > 1:
                middle = i32((e + last) >> 1)
                if lds(shared, item_sums + middle) <= i:
                    e = middle
                else:
                    last = middle
            row = i32(lds(shared, row_sums + e) + (i - lds(shared, item_sums + e)) * tokens)
            st4(table, ITEMS + 4 * i, e, row, i32(min(tokens, lds(shared, row_sums + e + 1) - row)), 0)
            i = i32(i + n_threads)
        if tid == 0:
            st(table, 0, all_items)
    return Kernel(kernel, (I32, I32, I32, *[N] * 6), MOST_THREADS)


def dispatch(target, ids, table, n_expert, n_pairs, tokens, fault, node):
    """ids: address of int32 [n_pairs]; table: of int32 [`dispatch_table`'s n_words], on 16 bytes; tokens: rows of an item at most; fault: address of int32 [4],
    node: a number from 1 that is left there with the first pair whose id is no expert, if nothing has been left there."""
    check("dispatch", 1 <= n_expert <= MOST_EXPERTS, "n_expert", n_expert, f"1..{MOST_EXPERTS}")
    check("dispatch", 1 <= n_pairs < 1 << 28, "n_pairs", n_pairs, f"1..{(1 << 28) - 1}")
    check("dispatch", tokens >= 1, "tokens", tokens, "at least 1")
    at = dispatch_table(n_expert, n_pairs, tokens)
    n_threads = min(MOST_THREADS, STEP * -(-max(n_expert + 1, n_pairs) // STEP))
    n_words = (n_threads // 32 + 2) * (n_expert + 1) + n_threads // 16
    args = ids, table, fault, node, n_pairs, n_expert, tokens, at.bounds, at.order
    return target.launch(dispatch_kernel(), 1, n_threads, args, 4 * n_words)
