"""MMQ in float16: products of quantized weights with many tokens on Hopper, of one matrix or of experts' (docs/numerics.md,
sections 3 and 9; `half_product`).

A launch before widens the activations (`half_limbs`). Then blocks take items of work one after the other, rows of a matrix and
some tokens (`parts`): warpgroups multiply, a warp half a row tile, and one thread has bulk copies bring the chunks, those of the
next item before this one's totals are stored. Slots are filled and taken by barriers of their own (`mbarrier`), those of
activations and weights as soon as their products are there.

The blocks of a cluster take chunks of the same rows and tokens by turns (`exchange`), where there are too few blocks without.
"""
from dataclasses import astuple
from itertools import accumulate
from typing import NamedTuple

from numba import cuda, types

from ...quant.formats import CHUNK, Format, format_of
from ...quant.tile import tile_bytes
from ..call import Call
from . import cluster, mbarrier
from .block import Block
from .dispatch import dispatch_table
from .exchange import Exchange, exchange, exchanger
from .half_limbs import N_THREADS as N_WIDENING, TOKEN_WORDS, half_limbs_kernel, rest_of, unit_words
from .half_product import exponents, half_product
from .launch import F32, HOPPER, I32, Kernel, Launches, N, U32, factory, need
from .mmq import totals_writer
from .operands import Pairs, constants_of, gated_of, matrices_of, pairs_of
from .parts import Part, grouped, item_words, taker
from .ptx import afresh, ballot, device, f32, i32, i64, lds, least, quotient, remainder, syncwarp, u32, wait_for_previous
from .tile_product import STORE, Ending, chunk_words, gate_and_store, table_words
from .wgmma import ATOM_WORDS, fence

# Of one matrix, the last one in clusters
DENSE = Block(4, 1, 16, True, 2), Block(4, 1, 8, True, 3), Block(4, 1, 4, True, 3), Block(4, 1, 8, True, 3, 1, 2)
EXPERTS = Block(8, 1, 4, True, 3), Block(6, 1, 8, True, 3), Block(6, 1, 12, True, 2)  # by their tokens
N_REST = 4  # slots of what follows products


class Shared(NamedTuple):
    """Words of shared memory."""
    rest: int        # slots of `half_limbs.Rest`; before them those of activations, atoms, and of the block's row tiles
    there: int       # barriers of these, [slot]: the chunk is there;
    done: int        # all warps are done with it
    rest_there: int  # of the rest likewise
    rest_done: int
    scratch: int     # [warp][sum of a lane][lane]
    items: int       # [warp], and of the warp that brings: an item, as `parts.grouped` reads it
    exchange: int    # on 16 bytes


def slot_words(fmt: Format, block: Block) -> int:
    return block.tokens * TOKEN_WORDS + block.row_tiles * tile_bytes(fmt) // 4


def shared_layout(fmt: Format, block: Block) -> Shared:
    slots, words, n_warps, n_rest = block.slots, mbarrier.WORDS, block.n_warps, rest_of(block.tokens).n_words
    assert slot_words(fmt, block) % ATOM_WORDS == 0 and not table_words(fmt.name), fmt.name
    n_items = -(-(n_warps + 1) * item_words(block.tokens) // 4) * 4
    return Shared(*accumulate((slots * slot_words(fmt, block), N_REST * n_rest, slots * words, slots * words, N_REST * words,
                               N_REST * words, 32 * n_warps * block.n_sums, n_items)))


def exchange_of(fmt: Format, block: Block) -> Exchange:
    return exchange(block, shared_layout(fmt, block).exchange)


def half_bytes(fmt: Format, block: Block) -> int:
    return 4 * (exchange_of(fmt, block).n_words if block.blocks > 1 else shared_layout(fmt, block).exchange)


class Turns(NamedTuple):
    """Which slots are next, and the parity of the phases for which they are, for device functions: int32."""
    slot: object
    parity: object
    rest: object
    rest_parity: object


def turner(slots: int):
    """(turns) -> those of the next chunk."""
    @device
    def following(turns):
        slot, rest = i32(turns.slot + 1), i32(turns.rest + 1)
        return Turns(i32(0 if slot == slots else slot), i32(turns.parity ^ (1 if slot == slots else 0)),
                     i32(0 if rest == N_REST else rest), i32(turns.rest_parity ^ (1 if rest == N_REST else 0)))
    return following


class Sources(NamedTuple):
    """What chunks are brought from, for device functions."""
    words: object  # uint32, the weight's tiles,
    limbs: object  # and what `half_limbs` made of the activations
    n_rows: object
    n_chunks: object


def chunk_bringer(fmt: Format, block: Block, part: Part):
    """(shared, rank, sources, work, turns) -> turns: all chunks of an item that are the block's, whose activations are the
    work-th ones, by one thread. Row tiles behind the last repeat it; quads behind the last token are left out."""
    (rest_at, there, done, rest_there, rest_done, *_), words_of_slot = shared_layout(fmt, block), slot_words(fmt, block)
    n_act, n_rest, words_of_unit = block.tokens * TOKEN_WORDS, rest_of(block.tokens).n_words, unit_words(block.tokens)
    tile_words, row_tiles, following, n_blocks = tile_bytes(fmt) // 4, block.row_tiles, turner(block.slots), CHUNK // 64
    row_block, matrix, tokens_of, blocks = part.row_block, part.matrix, part.n_tokens, block.blocks

    @device
    def bring_tiles(shared, sources, first, chunk, to, barrier):
        tile, last = i32(0), i32((sources.n_rows - 1) >> 5)
        before = i32(matrix(shared) * i32(last + 1))
        while tile < row_tiles:
            row_tile = i32(before + least(i32(first + tile), last))
            at = chunk_words(row_tile, chunk, sources.n_chunks, tile_words)
            mbarrier.bring(shared, to, sources.words, at, i32(tile_words), barrier)
            tile, to = i32(tile + 1), i32(to + tile_words)

    @device
    def bring(shared, rank, sources, work, turns):
        chunk, first = rank, i32(row_block(shared) * row_tiles)
        at = (i64(work) * sources.n_chunks + rank) * words_of_unit
        own_words = i32(((tokens_of(shared) + 3) >> 2) * ATOM_WORDS)  # of 64 columns
        while chunk < sources.n_chunks:
            barrier, to = i32(there + turns.slot * mbarrier.WORDS), i32(turns.slot * words_of_slot)
            mbarrier.wait(shared, done + turns.slot * mbarrier.WORDS, i32(turns.parity ^ 1))
            mbarrier.expect(shared, barrier, i32(4 * (n_blocks * own_words + row_tiles * tile_words)))
            bring_tiles(shared, sources, first, chunk, i32(to + n_act), barrier)
            for i in range(n_blocks):
                further = i * (n_act // n_blocks)
                mbarrier.bring(shared, to + further, sources.limbs, at + further, own_words, barrier)
            barrier = i32(rest_there + turns.rest * mbarrier.WORDS)
            mbarrier.wait(shared, rest_done + turns.rest * mbarrier.WORDS, i32(turns.rest_parity ^ 1))
            mbarrier.expect(shared, barrier, i32(4 * n_rest))
            mbarrier.bring(shared, rest_at + turns.rest * n_rest, sources.limbs, at + n_act, i32(n_rest), barrier)
            chunk, at, turns = i32(chunk + blocks), at + blocks * words_of_unit, following(turns)
        return turns
    return bring


@device
def leave(lane, shared, barrier):
    """A warp is done with what lies in a slot."""
    syncwarp()  # all lanes have read
    if lane == 0:
        mbarrier.arrive(shared, barrier)


def chunk_multiplier(name: str, block: Block):
    """(tid, rank, shared, n_chunks, total, turns) -> turns: all chunks of an item that are the block's, by the warps that
    multiply. total: f32 [n_own], the lane's own of its sums, as of `half_product.follow`."""
    fmt = format_of(name)
    (rest_at, there, done, rest_there, rest_done, scratch, *_), words_of_slot = shared_layout(fmt, block), slot_words(fmt, block)
    n_sums, n_act, tokens, tile_words = block.n_sums, block.tokens * TOKEN_WORDS, block.tokens, tile_bytes(fmt) // 4
    blocks, alone = block.blocks, block.blocks == 1
    (multiply, multiply_halves, follow), (d_at, large_at, n_rest) = half_product(name, block.quads, alone), rest_of(block.tokens)
    following, (_, _, send, fold, finish) = turner(block.slots), exchanger(block, exchange_of(fmt, block))

    @device
    def any_large(lane, shared, at):
        found = lds(shared, at + least(lane, i32(tokens - 1)))
        if tokens > 32:
            found = u32(found | lds(shared, at + least(i32(32 + lane), i32(tokens - 1))))
        return ballot(found)

    @device
    def multiply_chunks(tid, rank, shared, n_chunks, total, turns):
        s, lane, warp, chunk, turn = cuda.local.array(n_sums, f32), i32(tid & 31), i32(tid >> 5), rank, i32(0)
        upper = exponents(0)
        while chunk < n_chunks:
            now, act = i32(rest_at + turns.rest * n_rest), i32(turns.slot * words_of_slot)
            tile = i32(act + n_act + (warp >> 1) * tile_words)
            mbarrier.wait(shared, rest_there + turns.rest * mbarrier.WORDS, turns.rest_parity)
            large = any_large(lane, shared, i32(now + large_at))
            mbarrier.wait(shared, there + turns.slot * mbarrier.WORDS, turns.parity)
            if large:
                scales = multiply_halves(lane, warp & 1, shared, tile, act, i32(scratch + 32 * n_sums * warp), upper, s)
            else:
                scales = multiply(lane, warp & 1, shared, tile, act, upper, s)
            leave(lane, shared, i32(done + turns.slot * mbarrier.WORDS))
            follow(lane, shared, now, i32(now + d_at), scales, s, total)
            if not alone:
                if turn > 0:
                    fold(tid, i32(0), rank, shared, i32(turn - 1), n_chunks, total)
                send(tid, i32(0), rank, shared, i32(now + d_at), turn, n_chunks, s)
            leave(lane, shared, i32(rest_done + turns.rest * mbarrier.WORDS))
            chunk, turns, turn = i32(chunk + blocks), following(turns), i32(turn + 1)
        if not alone:
            finish(tid, i32(0), rank, shared, turn, n_chunks, total)
        return turns
    return multiply_chunks


def barrier_beginner(fmt: Format, block: Block):
    """(shared), by one thread."""
    (_, there, done, rest_there, rest_done, *_), slots, n_warps = shared_layout(fmt, block), block.slots, block.n_warps

    @device
    def begin_barriers(shared):
        for i in range(slots):
            mbarrier.begin(shared, there + i * mbarrier.WORDS, i32(1))
            mbarrier.begin(shared, done + i * mbarrier.WORDS, i32(n_warps))
        for i in range(N_REST):
            mbarrier.begin(shared, rest_there + i * mbarrier.WORDS, i32(1))
            mbarrier.begin(shared, rest_done + i * mbarrier.WORDS, i32(n_warps))
        fence()
    return begin_barriers


def products(name: str, n_products: int, block: Block, ending: Ending, experts: bool):
    """The body of a kernel for one matrix, or one of each expert, or two of them one after the other: (words, other_words, bias,
    other_bias, limbs, table, out, order, pairs), as of `mmq.grouped_products`; limbs: of `half_limbs`."""
    fmt, n_warps, n_own, rows, blocks = format_of(name), block.n_warps, block.n_own, block.rows, block.blocks
    assert blocks == 1 or (n_products == 1 and not experts), block  # turns are counted from 0
    (*_, scratch, items, _), own_words = shared_layout(fmt, block), item_words(block.tokens)
    begin_exchange, meet = exchanger(block, exchange_of(fmt, block)).begin, cluster.meet if blocks > 1 else cuda.syncthreads
    # Each warp has an item of its own. Where it lies is computed anew each time: no register keeps it while chunks are multiplied
    at = device(lambda: i32(items + (afresh(i32(cuda.threadIdx.x)) >> 5) * own_words))
    part, (count, take) = grouped(block.tokens, at), taker(block.tokens, 32, at, not experts)
    begin_barriers, bring = barrier_beginner(fmt, block), chunk_bringer(fmt, block, part)
    multiply_chunks, store_totals = chunk_multiplier(name, block), totals_writer(block, ending, part)

    @device
    def run(words, other_words, bias, other_bias, limbs, table, out, order, pairs):
        shared, tid = cuda.shared.array(0, types.uint32), i32(cuda.threadIdx.x)
        lane, n_chunks, total = i32(tid & 31), i32((pairs.n_cols + 255) >> 8), cuda.local.array(n_own, f32)
        rank = remainder(i32(cuda.blockIdx.x), blocks)
        if tid == 0:
            begin_barriers(shared)
        if blocks > 1 and tid < 32 * n_warps:
            begin_exchange(tid, i32(0), shared)
        meet()  # they are there
        wait_for_previous()
        n_row_blocks, turns = quotient(i32(pairs.n_rows + (rows - 1)), rows), Turns(i32(0), i32(0), i32(0), i32(0))
        item, end = quotient(i32(cuda.blockIdx.x), blocks), i32(count(table, pairs) * n_row_blocks)
        while item < end:
            work, left = quotient(item, n_row_blocks), i32(n_products)
            take(lane, shared, table, work, i32(item - work * n_row_blocks), order, pairs)
            syncwarp()  # the item is there
            while left > 0:
                left = i32(left - 1)
                if tid == 32 * n_warps:
                    sources = Sources(words if left > 0 else other_words, limbs, pairs.n_rows, n_chunks)
                    turns = bring(shared, rank, sources, afresh(work), turns)  # nor what is computed of `work`
                elif tid < 32 * n_warps:
                    for o in range(n_own):
                        total[o] = f32(0)
                    turns = multiply_chunks(tid, rank, shared, n_chunks, total, turns)
                    store_totals(tid, shared, i32(scratch), total, i32(rank * n_own), out, pairs.n_rows, pairs.n_pairs, left == 0,
                                 bias, other_bias)
            syncwarp()  # all are done with the item
            item = i32(item + cuda.gridDim.x)
        if blocks > 1:
            meet()  # none sends any more
    return run


CASES = [astuple(block) for block in EXPERTS]


@factory([*(("Q4_K", False, *astuple(block)) for block in DENSE), *(("Q4_K", True, *block) for block in CASES)])
def mmq_half_kernel(name, experts, *block):
    block = Block(*block)
    run = products(name, 1, block, STORE, experts)

    def kernel(words, limbs, table, out, order, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows):
        # A block: items from blockIdx.x by gridDim.x, or, of a cluster, item blockIdx.x / blocks
        run(words, words, out, out, limbs, table, out, order, Pairs(n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows))
    return Kernel(kernel, (U32, U32, I32, F32, *[N] * 8), block.n_threads + 32, arch=HOPPER, n_cluster=block.blocks)


@factory([("silu", "Q4_K", False, 0.0, 0.0, *block) for block in CASES])
def mmq_half_glu_kernel(activation, name, biased, alpha, limit, *block):
    block = Block(*block)
    run = products(name, 2, block, gate_and_store(activation, biased, alpha, limit), True)

    def kernel(gate_words, up_words, gate_bias, up_bias, limbs, table, out, order, n_matrices, n_rows, n_cols, n, n_pairs, n_used,
               x_rows):  # as in mmq_half_kernel
        run(gate_words, up_words, gate_bias, up_bias, limbs, table, out, order,
            Pairs(n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows))
    return Kernel(kernel, (U32, U32, F32, F32, U32, I32, F32, *[N] * 8), block.n_threads + 32, arch=HOPPER)


class Halves(NamedTuple):
    """The plan of products in float16."""
    block: Block


class Items(NamedTuple):
    """Of a call: its sizes, and words of call.scratch."""
    sizes: Pairs
    n_items: int
    order: int  # of the table of `dispatch`; a single matrix needs none
    limbs: int  # at which the widened activations begin
    n_words: int


def items_of(call: Call) -> Items:
    """Of a product with one matrix, or with those of experts, whose plan is `Halves`."""
    block = call.plan.block
    if "ids" in call.values:
        sizes = pairs_of(call)
        table = dispatch_table(sizes.n_matrices, sizes.n_pairs, block.tokens)
        n_items, order, limbs = table.n_items, table.order, -(-table.n_words // 4) * 4
    else:
        n = call.x.shape[0]
        sizes, n_items, order, limbs = Pairs(1, *call.w.shape, n, n, 1, 1), -(-n // block.tokens), 0, 0
    return Items(sizes, n_items, order, limbs, limbs + n_items * -(-sizes.n_cols // CHUNK) * unit_words(block.tokens))


def half_scratch(call: Call) -> tuple[str, tuple[int]]:
    """Type and shape of what a call takes."""
    return "i32", (items_of(call).n_words,)


def half_limbs(call: Call):
    """The activations of call.x for weights of the type of call's matrices, to call.scratch."""
    (sizes, n_items, order, limbs, n_words), tokens = items_of(call), call.plan.block.tokens
    n_chunks, scratch, per_block = -(-sizes.n_cols // CHUNK), call.scratch.data, N_WIDENING // 32
    need(n_words < 1 << 31, "words of scratch memory", n_words, f"less than {1 << 31}")
    kernel = half_limbs_kernel(matrices_of(call)[0].dtype, tokens, "ids" in call.values)
    args = call.x.data, scratch, scratch + 4 * limbs, order, sizes.n, n_chunks, n_items, sizes.n_used, sizes.x_rows
    return call.device.launch(kernel, -(-n_items * tokens * n_chunks // per_block), N_WIDENING, args)


def launch_halves(call: Call, kernel: Kernel, *matrices):
    """Blocks that take items of work one after the other, or clusters that have one each. matrices: addresses of them, and of
    biases."""
    (sizes, n_items, order, limbs, _), block, scratch = items_of(call), call.plan.block, call.scratch.data
    n_all_rows, n_blocks = sizes.n_matrices * sizes.n_rows, n_items * -(-sizes.n_rows // block.rows) * block.blocks
    need(n_all_rows < 1 << 31, "n_matrices * n_rows", n_all_rows, f"less than {1 << 31}")
    need(n_blocks < 1 << 31, "blocks", n_blocks, f"less than {1 << 31}")
    args = *matrices, scratch + 4 * limbs, scratch, call.out.data, order, *sizes
    grid = n_blocks if block.blocks > 1 else min(n_blocks, call.device.n_multiprocessors)
    return call.device.launch(kernel, grid, kernel.n_threads, args, half_bytes(format_of(matrices_of(call)[0].dtype), block))


def mmq_of_halves(call: Call):
    """The product with what `half_limbs` left in call.scratch."""
    return launch_halves(call, mmq_half_kernel(call.w.dtype, "ids" in call.values, *astuple(call.plan.block)), call.w.data)


def mmq_half(call: Call):
    """out = w x, as of `mul_mat`, or out = w[ids] x, as of `mul_mat_id`, w of a format that `has_halves`. plan: `Halves`;
    scratch: i32 [`half_scratch`], on 16 bytes, with what `dispatch` writes for the block's tokens where there are experts."""
    return Launches((half_limbs(call), mmq_of_halves(call)))


def mmq_half_glu(call: Call):
    """out = act(gate[ids] x + its bias) * (up[ids] x + its bias), as of `mul_mat_id_glu`, gate and up of one format that
    `has_halves`. plan, scratch: as of `mmq_half`."""
    (name, _), biased, matrices = gated_of(call)
    kernel = mmq_half_glu_kernel(call.act, name, biased, *constants_of(call), *astuple(call.plan.block))
    return Launches((half_limbs(call), launch_halves(call, kernel, *matrices)))
