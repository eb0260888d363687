"""Sorted dispatch: the (token, rank) pairs of a batch in the order of their experts, those of an expert in their own order, and
the work that they are for grouped products (docs/numerics.md, section 9). No atomics: a block has a run of pairs, a warp a part
of it, and takes 32 of them at a time.

1. A warp counts its pairs of each expert: the first of the lanes that have one expert counts for all of them.
2. A thread for each expert adds up the counts of the warps before each, and those of the blocks before, which a launch before
   leaves where there are several; then sums over the experts before, of pairs and of items of work.
3. A warp places its pairs, each behind those of its expert in warps before, in what it placed before, and in lanes before.
4. An item is an expert and up to `tokens` of its sorted rows.

Pairs whose id is no expert are sorted behind all others and belong to no item: their rows of a result are left as they are. The
first of them is left in `fault`, for whoever reads it together with the results.
"""
from math import prod
from typing import NamedTuple

from numba import cuda, types

from ..call import Call
from .launch import I32, Kernel, Launches, N, factory, need
from .operands import FAULT, fault_of, matrices_of
from .ptx import device, i32, i64, ld, lds, match, popc, shuffle, st, st4, stage, sts, syncwarp

MOST_EXPERTS, MOST_THREADS, STEP = 512, 1024, 128  # threads are a multiple of STEP: four warps
ALONE, BLOCK_PAIRS, MOST_BLOCKS = 3072, 1024, 32   # pairs that one block sorts; of each of several at least
TOGETHER = 8                                       # counts of blocks whose loads are under way together
ITEMS = 8                                          # word of a table at which its items begin


class Table(NamedTuple):
    """Words, int32, at which the parts of a dispatch table begin. Word 0 is the number of items."""
    fault: int     # [4]: node or 0, pair, its id, unused: for who keeps it nowhere else
    items: int     # [most items][4]: expert, first sorted row, rows, unused
    bounds: int    # [X + 1]: the sorted rows of expert e are bounds[e] .. bounds[e + 1] - 1
    order: int     # [pairs]: the pair of a sorted row
    counts: int    # [block][X + 1]: pairs of each expert, and of none, where there are several blocks
    n_words: int
    n_items: int   # at most


def dispatch_table(n_expert: int, n_pairs: int, tokens: int) -> Table:
    """tokens: rows of an item at most."""
    n_items = n_pairs // tokens + min(n_expert, n_pairs)  # full ones, and one of each expert that is not
    bounds = ITEMS + 4 * n_items
    order = bounds + n_expert + 1
    counts, n_blocks = order + n_pairs, blocks_of(n_pairs)
    return Table(FAULT, ITEMS, bounds, order, counts, counts + (n_blocks * (n_expert + 1) if n_blocks > 1 else 0), n_items)


def blocks_of(n_pairs: int) -> int:
    return 1 if n_pairs <= ALONE else min(MOST_BLOCKS, -(-n_pairs // BLOCK_PAIRS))


@device
def report(fault, node, pair, found):
    """Leaves a pair and its id, which is no expert, of the node with this number, from 1, where no earlier one is left. By one
    thread of a launch."""
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


class Places(NamedTuple):
    """What lies where in shared memory, int32, for device functions: words, int32."""
    counts: object     # [warp][kind]: 0, from which the warps' counts begin; the kinds are the experts, and none
    starts: object     # [kind]: the sorted row of the block's first pair of each
    row_sums: object   # [kind]: sorted rows of the kinds before each,
    item_sums: object  # and items of them
    warp_sums: object  # [warp][2]: rows and items of a warp's kinds


class Run(NamedTuple):
    """A warp's run of pairs, as one of its lanes sees it, for device functions: int32."""
    first: object   # the pairs first .. end - 1
    end: object
    counts: object  # word of shared memory at which the warp's counts begin
    lane: object
    before: object  # the lanes before it, as bits


# The stages. A barrier of the block follows each, but for the last two, which write the table.

@stage
def count_pairs(ids, n_expert, run, shared):
    """1. counts[warp][kind] = the warp's pairs of each kind, by the first of the lanes that have one kind."""
    base, kind = run.first, kind_of(ids, i32(run.first + run.lane), run.end, n_expert)
    while base < run.end:
        following = kind_of(ids, i32(base + 32 + run.lane), run.end, n_expert)  # is on its way meanwhile
        same = match(kind)
        if kind >= 0 and same & run.before == 0:
            sts(shared, run.counts + kind, i32(lds(shared, run.counts + kind) + popc(same)))
        syncwarp()
        base, kind = i32(base + 32), following


@stage
def sum_warps(n_kinds, n_warps, tid, shared):
    """2. counts[warp][tid] = those of the warps before; returns the sum of all, a thread for each kind."""
    total, w, place = i32(0), i32(0), tid
    if tid < n_kinds:
        while w < n_warps:  # four loads are under way together
            a, b = lds(shared, place), lds(shared, place + n_kinds)
            c, d = lds(shared, place + 2 * n_kinds), lds(shared, place + 3 * n_kinds)
            sts(shared, place, total)
            sts(shared, place + n_kinds, i32(total + a))
            sts(shared, place + 2 * n_kinds, i32(total + a + b))
            sts(shared, place + 3 * n_kinds, i32(total + a + b + c))
            total, w, place = i32(total + a + b + c + d), i32(w + 4), i32(place + 4 * n_kinds)
    return total


@stage
def sum_blocks(table, counts, block, n_blocks, n_kinds, kind):
    """2. (pairs of a kind in the blocks before, in all blocks)."""
    before, total, i, found = i32(0), i32(0), i32(0), cuda.local.array(TOGETHER, i32)
    while i < n_blocks:
        for k in range(TOGETHER):
            found[k] = ld(table, counts + i32(min(i32(i + k), n_blocks - 1)) * n_kinds + kind)
        for k in range(TOGETHER):
            before = i32(before + (found[k] if i + k < block else 0))
            total = i32(total + (found[k] if i + k < n_blocks else 0))
        i = i32(i + TOGETHER)
    return before, total


@stage
def sum_kinds(table, bounds, before, total, n_items, n_kinds, places, tid, lane, warp, shared):
    """2. starts, row_sums and item_sums of a thread's kind, of which there are `total` rows, `before` of them in blocks before,
    and n_items items; the table's bounds."""
    rows_before, rows_of_warp = sum_before(total, lane)
    items_before, items_of_warp = sum_before(n_items, lane)
    if lane == 0:
        sts(shared, places.warp_sums + 2 * warp, rows_of_warp)
        sts(shared, places.warp_sums + 2 * warp + 1, items_of_warp)
    cuda.syncthreads()
    w = i32(0)
    while w < warp:
        rows_before = i32(rows_before + lds(shared, places.warp_sums + 2 * w))
        items_before = i32(items_before + lds(shared, places.warp_sums + 2 * w + 1))
        w = i32(w + 1)
    if tid < n_kinds:
        sts(shared, places.starts + tid, i32(rows_before + before))
        sts(shared, places.row_sums + tid, rows_before)
        sts(shared, places.item_sums + tid, items_before)
        st(table, bounds + tid, rows_before)


@stage
def place_pairs(ids, table, order, fault, node, n_expert, run, places, shared):
    """3. The table's order, and the first pair whose id is no expert."""
    base, kind = run.first, kind_of(ids, i32(run.first + run.lane), run.end, n_expert)
    while base < run.end:
        following, pair = kind_of(ids, i32(base + 32 + run.lane), run.end, n_expert), i32(base + run.lane)
        same = match(kind)
        if kind >= 0:
            row = i32(lds(shared, places.starts + kind) + lds(shared, run.counts + kind) + popc(same & run.before))
            st(table, order + row, pair)
            if kind == n_expert and row == lds(shared, places.row_sums + n_expert):
                report(fault, node, pair, ld(ids, pair))
        syncwarp()  # all have read what is counted on
        if kind >= 0 and same & run.before == 0:
            sts(shared, run.counts + kind, i32(lds(shared, run.counts + kind) + popc(same)))
        syncwarp()
        base, kind = i32(base + 32), following


@stage
def write_items(table, n_expert, tokens, places, first, step, shared):
    """4. The table's items first, first + step, ..: expert e has those from item_sums[e] on."""
    i, all_items = first, lds(shared, places.item_sums + n_expert)
    while i < all_items:
        e, last = i32(0), n_expert
        while last - e > 1:
            middle = i32((e + last) >> 1)
            if lds(shared, places.item_sums + middle) <= i:
                e = middle
            else:
                last = middle
        row = i32(lds(shared, places.row_sums + e) + (i - lds(shared, places.item_sums + e)) * tokens)
        st4(table, ITEMS + 4 * i, e, row, i32(min(tokens, lds(shared, places.row_sums + e + 1) - row)), 0)
        i = i32(i + step)
    if first == 0:
        st(table, 0, all_items)


@stage
def count_block(ids, share, n_pairs, n_expert, shared):
    """1. and 2. (the warp's `Run`, pairs of the block of a thread's kind): counts[warp][kind] = those of the warps before."""
    tid, n_threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
    lane, warp, n_warps, n_kinds = i32(tid & 31), i32(tid >> 5), i32(n_threads >> 5), i32(n_expert + 1)
    begin = i32(cuda.blockIdx.x * share)
    groups, end = i32((share + 31) >> 5), i32(min(begin + share, n_pairs))
    per_warp = i32(32 * i32((groups + n_warps - 1) // n_warps))
    first = i32(begin + warp * per_warp)
    run = Run(first, i32(min(first + per_warp, end)), i32(warp * n_kinds), lane, i32((i64(1) << lane) - 1))
    p = tid
    while p < n_warps * n_kinds:
        sts(shared, p, i32(0))
        p = i32(p + n_threads)
    cuda.syncthreads()
    count_pairs(ids, n_expert, run, shared)
    cuda.syncthreads()
    return run, sum_warps(n_kinds, n_warps, tid, shared)


@factory([()])
def dispatch_counts_kernel():
    def kernel(ids, table, n_pairs, n_expert, share, counts):  # block: the pairs from blockIdx.x * share on
        shared, tid = cuda.shared.array(0, types.int32), i32(cuda.threadIdx.x)
        _, total = count_block(ids, share, n_pairs, n_expert, shared)
        if tid <= n_expert:
            st(table, counts + i32(cuda.blockIdx.x) * (n_expert + 1) + tid, total)
    return Kernel(kernel, (I32, I32, *[N] * 4), MOST_THREADS)


@factory([()])
def dispatch_kernel():
    def kernel(ids, table, fault, node, n_pairs, n_expert, tokens, bounds, order, share, counts):
        # Blocks as in dispatch_counts_kernel
        shared = cuda.shared.array(0, types.int32)
        tid, n_threads, block, n_blocks = (i32(cuda.threadIdx.x), i32(cuda.blockDim.x), i32(cuda.blockIdx.x), i32(cuda.gridDim.x))
        n_kinds, n_warps = i32(n_expert + 1), i32(n_threads >> 5)
        starts = i32(n_warps * n_kinds)
        places = Places(i32(0), starts, i32(starts + n_kinds), i32(starts + 2 * n_kinds), i32(starts + 3 * n_kinds))
        run, total = count_block(ids, share, n_pairs, n_expert, shared)
        before = i32(0)
        if n_blocks > 1 and tid < n_kinds:
            before, total = sum_blocks(table, counts, block, n_blocks, n_kinds, tid)
        n_items = i32((total + tokens - 1) // tokens) if tid < n_expert else i32(0)
        sum_kinds(table, bounds, before, total, n_items, n_kinds, places, tid, i32(tid & 31), i32(tid >> 5), shared)
        cuda.syncthreads()
        place_pairs(ids, table, order, fault, node, n_expert, run, places, shared)
        write_items(table, n_expert, tokens, places, i32(block * n_threads + tid), i32(n_blocks * n_threads), shared)
    return Kernel(kernel, (I32, I32, I32, *[N] * 8), MOST_THREADS)


def dispatch(call: Call, tokens: int):
    """Sorts the pairs of call.ids into the table at call.scratch, with items of at most `tokens` rows. ids: int32 [n, n_used];
    scratch: int32 [`dispatch_table`'s n_words], on 16 bytes. The first pair whose id is not an expert is left at `fault_of`, if
    nothing is there yet."""
    n_expert, n_pairs = matrices_of(call)[0].shape[0], prod(call.ids.shape)
    need(1 <= n_expert <= MOST_EXPERTS, "n_expert", n_expert, f"1..{MOST_EXPERTS}")
    need(1 <= n_pairs < 1 << 28, "n_pairs", n_pairs, f"1..{(1 << 28) - 1}")
    need(tokens >= 1, "tokens", tokens, "at least 1")
    at, n_blocks = dispatch_table(n_expert, n_pairs, tokens), blocks_of(n_pairs)
    share = -(-n_pairs // n_blocks)
    n_threads = min(MOST_THREADS, STEP * -(-max(n_expert + 1, share) // STEP))
    n_words = (n_threads // 32 + 3) * (n_expert + 1) + n_threads // 16
    ids, table = call.ids.data, call.scratch.data
    args = ids, table, *fault_of(call), n_pairs, n_expert, tokens, at.bounds, at.order, share, at.counts
    last = call.device.launch(dispatch_kernel(), n_blocks, n_threads, args, 4 * n_words)
    if n_blocks == 1:
        return last
    counted = ids, table, n_pairs, n_expert, share, at.counts
    return Launches((call.device.launch(dispatch_counts_kernel(), n_blocks, n_threads, counted, 4 * n_words), last))
