"""MMQ by products of float16, or of int8 for split formats (`half_forms`): quantized weights with many tokens on Hopper, of one
matrix or of experts' (docs/numerics.md, sections 3 and 9; `half_product`, `half_scaled`, `split_product`).

A launch before widens the activations (`half_limbs`). Then blocks take items of work one after the other, rows of a matrix and
some tokens (`parts`): warpgroups multiply, a warp half a row tile, and a thread or two bring the chunks (`half_slots`), those of
the next item before this one's totals are stored.

The teams of a cluster, two of each block, take chunks of the same rows and tokens by turns (`exchange`), where there are too few
blocks without. The blocks of a cluster of wide ones take other rows.
"""
from dataclasses import astuple
from typing import NamedTuple

from numba import cuda, types

from ...quant.formats import CHUNK, Format, format_of
from ...quant.tile import tile_bytes
from ..call import Call
from . import cluster, mbarrier
from .block import Block
from .dispatch import dispatch_table
from .ending import STORE, Ending, gate_and_store
from .exchange import exchanger, held_scales
from .few_product import codebooks
from .half_forms import half_form
from .half_limbs import N_THREADS as N_WIDENING, half_limbs_kernel, rest_of, unit_words
from .half_product import Barriers, exponents, half_product
from .half_scaled import half_scaled
from .half_slots import (LOOP_WORDS, Sources, Turns, barrier_beginner, chunk_bringer, cluster_of, exchange_of,
                         half_bytes, has_crew, is_wide, kept_sums, neighbours, shared_layout, slots_of, turner)
from .launch import F32, HOPPER, I32, Kernel, Launches, N, SHARED_LIMIT, U32, factory, need
from .mmq_stages import totals_writer
from .operands import Pairs, constants_of, gated_of, matrices_of, pairs_of
from .parts import grouped, item_words, taker
from .ptx import (afresh, ballot, blocks_of_grid, device, f32, i32, lds, least, nothing, quotient, remainder, sts, syncwarp, u32,
                  wait_for_previous)
from .split_product import split_product
from .weights import shared_unpacker
from .wgmma import registers

# Of one matrix, the fourth one of teams that share chunks in clusters, the last one wide
DENSE = (Block(4, 1, 16, True, 2), Block(4, 1, 8, True, 3), Block(4, 1, 4, True, 3), Block(4, 1, 8, True, 2, 2, 2, 2),
         Block(4, 1, 32, True, 1))
# Packed formats whose int8 products are faster than such teams; those of which only int8 teams of 64 tokens are
NOT_TEAMS = "IQ2_K", "IQ2_KS", "IQ3_KS", "TQ1_0"
NOT_BESIDE_TEAMS = "Q3_K", "IQ1_M", "IQ1_M_R1", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_S"
NOT_WIDE = "Q2_K",  # packed formats for which lanes of wide blocks have too few registers
NOT_LARGE = "IQ4_KSS",  # formats for which those of the largest blocks of experts have too few
# Of threads that multiply, and of the last warpgroup, which brings chunks, where there are three or five
CREW_REGISTERS = {3: (240, 24), 5: (112, 32)}
EXPERTS = Block(8, 1, 4, True, 3), Block(6, 1, 8, True, 3), Block(6, 1, 12, True, 2)  # by their tokens


def dense_blocks(fmt: Format) -> tuple[Block, ...]:
    """Those of one matrix that pay, and for which lanes have registers (docs/kernels-log.md)."""
    form = half_form(fmt)
    if form.split:
        return DENSE[-1:]
    if form.scaled:
        return DENSE[:-1] if fmt.has_min else DENSE[:2] + DENSE[3:4] * (fmt.group == 16) + DENSE[-1:]
    return (DENSE[:3 if form.width == 4 else 2] + DENSE[3:4] * (fmt.name not in NOT_TEAMS)
            + DENSE[-1:] * (fmt.name not in NOT_WIDE))


def expert_blocks(fmt: Format) -> tuple[Block, ...]:
    """Of `EXPERTS` those that have room in shared memory, and for which lanes have registers."""
    return tuple(block for block in EXPERTS
                 if not (block == EXPERTS[-1] and fmt.name in NOT_LARGE) and half_bytes(fmt, block) <= SHARED_LIMIT)


def threads_of(block: Block) -> int:
    """Those that multiply and a warp that brings, or a warpgroup (`crew`)."""
    return block.n_threads + (128 if has_crew(block) else 32)


def leaver(block: Block):
    """(lane, shared, at): as `mbarrier.leave`, of a piece of activations, which neighbours brought together."""
    return mbarrier.leave if neighbours(block) == 1 else cluster.leave


def packed_multiplier(name: str, block: Block):
    """(lane, warp, shared, tile, act, rest, barriers, upper, s, total): a chunk of a packed format, by a warp: s becomes acc of
    docs/numerics.md, section 3, and, where no teams share chunks, total = fma(acc, d of the token, total). rest: word of what
    follows products; upper: `exponents`."""
    fmt, tokens = format_of(name), block.tokens
    scratch, n_kept = shared_layout(fmt, block).scratch, kept_sums(fmt, block)
    (d_at, large_at, _), pieces = rest_of(fmt, tokens), slots_of(fmt, block).pieces
    multiply, multiply_parts, follow = half_product(name, block.quads, n_kept, pieces, block.n_teams == 1, leaver(block))
    in_parts = multiply_parts is not None

    @device
    def any_large(lane, shared, at):
        found = lds(shared, at + least(lane, i32(tokens - 1)))
        for further in range(32, tokens, 32):
            found = u32(found | lds(shared, at + least(i32(further + lane), i32(tokens - 1))))
        return ballot(found)

    @device
    def multiply_chunk(lane, warp, shared, tile, act, rest, barriers, upper, s, total):
        if in_parts and any_large(lane, shared, i32(rest + large_at)):
            own = i32(scratch + 32 * n_kept * warp)
            scales = multiply_parts(lane, warp & 1, shared, tile, act, barriers, own, upper, s)
        else:
            scales = multiply(lane, warp & 1, shared, tile, act, barriers, upper, s)
        follow(lane, shared, rest, i32(rest + d_at), scales, s, total)
    return multiply_chunk


def scaled_multiplier(name: str, block: Block):
    """The same of a scaled format."""
    fmt, alone = format_of(name), block.n_teams == 1
    d_at = rest_of(fmt, block.tokens).d
    multiply, follow = half_scaled(name, block.quads, slots_of(fmt, block).pieces, leaver(block))

    @device
    def multiply_chunk(lane, warp, shared, tile, act, rest, barriers, upper, s, total):
        multiply(lane, warp & 1, shared, tile, act, rest, barriers, upper, s)
        if alone:
            follow(lane, shared, i32(rest + d_at), s, total)
    return multiply_chunk


def split_multiplier(name: str, block: Block):
    """The same of a split format, whose totals lie in the words of the warp, and two functions for before an item and behind it:
    (lane, warp, shared): totals there become 0; (lane, warp, shared, total): total becomes what they are."""
    fmt, n_quads = format_of(name), block.quads
    scratch, n_kept, d_at = shared_layout(fmt, block).scratch, kept_sums(fmt, block), rest_of(fmt, block.tokens).d
    assert block.n_teams == 1, block
    begin, multiply, end = split_product(name, n_quads, slots_of(fmt, block).pieces, leaver(block))

    @device
    def own(lane, warp):
        return i32(scratch + 32 * n_kept * warp + 4 * lane)

    @device
    def begin_item(lane, warp, shared):
        begin(shared, own(lane, warp))

    @device
    def multiply_chunk(lane, warp, shared, tile, act, rest, barriers, upper, s, total):
        multiply(lane, warp & 1, shared, tile, act, i32(rest + d_at), barriers, own(lane, warp))

    @device
    def end_item(lane, warp, shared, total):
        end(shared, own(lane, warp), total)
    return begin_item, multiply_chunk, end_item


def chunk_multiplier(name: str, block: Block):
    """(tid, team, rank, shared, n_chunks, total, turns) -> turns: all chunks of an item that are the team's, by its warps. tid:
    in the team; total: f32 [n_own], the lane's own of its sums, as of `half_product.follow`."""
    fmt, n_sums, n_warps, blocks, teams = format_of(name), block.n_sums, block.n_warps, block.blocks, block.teams
    n_teams, alone, n_held = block.n_teams, block.n_teams == 1, held_scales(block)
    # A slot is always the same team's: of another one's chunk before, it would not know that the slot was filled and left
    assert block.slots % teams == slots_of(fmt, block).rest_slots % teams == 0, block
    (slots_at, rest_at, there, done, rest_there, rest_done, *_), slots = shared_layout(fmt, block), slots_of(fmt, block)
    pieces, n_act, _, slot_words, n_rest, rest_slots, rest_words = slots
    begin_item = end_item = nothing
    if half_form(fmt).split:
        begin_item, multiply_chunk, end_item = split_multiplier(name, block)
    else:
        multiply_chunk = (scaled_multiplier if half_form(fmt).scaled else packed_multiplier)(name, block)
    following, (_, _, hold, send, fold, finish) = turner(block.slots, rest_slots), exchanger(block, exchange_of(fmt, block))
    tile_words, d_at = tile_bytes(fmt) // 4, rest_of(fmt, block.tokens).d

    @device
    def multiply_chunks(tid, team, rank, shared, n_chunks, total, turns):
        s, lane, of_team, turn = cuda.local.array(n_sums, f32), i32(tid & 31), i32(tid >> 5), i32(0)
        held = cuda.local.array(n_held, u32)
        upper, chunk, warp = exponents(0), i32(team * blocks + rank), i32(team * n_warps + of_team)
        begin_item(lane, warp, shared)
        for before in range(1, teams):  # those of the block take its slots one after the other
            turns = following(turns) if team >= before else turns
        while chunk < n_chunks:
            now, act = i32(rest_at + turns.rest * rest_words), i32(slots_at + turns.slot * slot_words)
            tile = i32((act + n_act if pieces == 1 else now + n_rest) + (of_team >> 1) * tile_words)
            place = i32(turns.slot * (pieces * mbarrier.WORDS))
            barriers = Barriers(i32(there + place), i32(done + place), turns.parity)
            mbarrier.wait(shared, rest_there + turns.rest * mbarrier.WORDS, turns.rest_parity)
            multiply_chunk(lane, warp, shared, tile, act, now, barriers, upper, s, total)
            if not alone:
                hold(lane, shared, i32(now + d_at), held)
            mbarrier.leave(lane, shared, i32(rest_done + turns.rest * mbarrier.WORDS))
            if not alone:
                if turn > 0:
                    fold(tid, team, rank, shared, i32(turn - 1), n_chunks, total)
                send(tid, team, rank, shared, held, turn, n_chunks, s)
            chunk, turn = i32(chunk + n_teams), i32(turn + 1)
            for _ in range(teams):
                turns = following(turns)
        if not alone:
            finish(tid, team, rank, shared, turn, n_chunks, total)
        end_item(lane, warp, shared, total)
        return turns
    return multiply_chunks


def crew(block: Block, worker, bringers):
    """(shared, tid, rank, ..): what `worker` of `products` makes, by the threads that are to do it. Where a block `has_crew`, its
    last warpgroup leaves registers to the others, and a thread or two of it bring chunks."""
    n_multiplying = block.n_threads
    if not has_crew(block):
        return worker(True, *bringers)
    n_groups = threads_of(block) // 128
    more, fewer = registers(n_groups, *CREW_REGISTERS[n_groups])
    brings = [worker(False, bring, n_multiplying + 32 * i) for i, bring in enumerate(bringers)]
    multiply, (bring_first, bring_second) = worker(True), (*brings, nothing)[:2]

    @device
    def work(shared, tid, rank, words, other_words, bias, other_bias, limbs, table, out, order, pairs):
        if tid < n_multiplying:
            more()
            multiply(shared, tid, rank, words, other_words, bias, other_bias, limbs, table, out, order, pairs)
        else:
            fewer()
            if tid < n_multiplying + 32:
                bring_first(shared, tid, rank, words, other_words, bias, other_bias, limbs, table, out, order, pairs)
            elif tid < n_multiplying + 64:
                bring_second(shared, tid, rank, words, other_words, bias, other_bias, limbs, table, out, order, pairs)
    return work


def products(name: str, n_products: int, block: Block, ending: Ending, experts: bool):
    """The body of a kernel for one matrix, or one of each expert, or two of them one after the other: (words, other_words, bias,
    other_bias, limbs, table, out, order, pairs), as of `mmq.grouped_products`; limbs: of `half_limbs`."""
    fmt, n_warps, n_own, rows, blocks = format_of(name), block.n_warps, block.n_own, block.rows, block.blocks
    shares, several, n_multiplying, team_threads = block.n_teams > 1, block.teams > 1, block.n_threads, 32 * n_warps
    assert not (shares or is_wide(block)) or (n_products == 1 and not experts), block  # where teams share chunks turns begin at 0
    (*_, scratch, items, _), loop_at, n_kept = shared_layout(fmt, block), item_words(block.tokens), kept_sums(fmt, block)
    words_of_item = loop_at + LOOP_WORDS
    n_cluster, n_neighbours, keeps = cluster_of(block), neighbours(block), is_wide(block) or half_form(fmt).split
    begin_exchange, meet = exchanger(block, exchange_of(fmt, block)).begin, cluster.meet if n_cluster > 1 else cuda.syncthreads
    # Each warp has an item of its own. Where it lies is computed anew each time: no register keeps it while chunks are multiplied
    at = device(lambda: i32(items + (afresh(i32(cuda.threadIdx.x)) >> 5) * words_of_item))
    part = grouped(block.tokens, at)
    team_of = device(lambda tid: quotient(tid, team_threads) if several else i32(0))
    begin_barriers, bringers = barrier_beginner(fmt, block), chunk_bringer(fmt, block, part)
    write_codebooks, n_threads = codebooks([shared_unpacker(name)], [0]), threads_of(block)
    multiply_chunks, store_totals = chunk_multiplier(name, block), totals_writer(block, ending, part, n_kept)

    def worker(multiplies: bool, bring=None, first=n_multiplying):
        """(shared, tid, rank, words, ..): all items of the block, by the warps that multiply, by a thread that brings, the first
        one of its warp, or by both."""
        count, take = taker(block.tokens, 32, at, not experts, multiplies)

        @device
        def work(shared, tid, rank, words, other_words, bias, other_bias, limbs, table, out, order, pairs):
            lane, n_chunks, total = i32(tid & 31), i32(i32(pairs.n_cols + 255) >> 8), cuda.local.array(n_own, f32)
            turns, side = Turns(i32(0), i32(0), i32(0), i32(0)), remainder(i32(cuda.blockIdx.x), n_neighbours)
            n_places = quotient(i32(pairs.n_rows + (rows * n_neighbours - 1)), rows * n_neighbours)
            item, end = quotient(i32(cuda.blockIdx.x), n_cluster), i32(count(table, pairs) * n_places)
            while item < end:
                which, left = quotient(item, n_places), i32(n_products)
                row_block = i32(i32(item - which * n_places) * n_neighbours + side)
                take(lane, shared, table, which, row_block, order, pairs)
                if keeps and lane == 0:  # no registers keep them while chunks are multiplied
                    sts(shared, at() + loop_at, item)
                    sts(shared, at() + (loop_at + 1), end)
                syncwarp()  # the item is there
                while left > 0:
                    left = i32(left - 1)
                    if bring is not None and tid == first:
                        sources = Sources(words if left > 0 else other_words, limbs, pairs.n_rows, n_chunks)
                        turns = bring(shared, rank, side, sources, afresh(which), turns)  # nor what is computed of `which`
                    elif multiplies and tid < n_multiplying:
                        for o in range(n_own):
                            total[o] = f32(0)
                        team = team_of(tid)
                        of_team = i32(tid - team * team_threads)
                        turns = multiply_chunks(of_team, team, rank, shared, n_chunks, total, turns)
                        store_totals(of_team, shared, i32(scratch + team * (team_threads * n_kept)), total,
                                     i32((team * blocks + rank) * n_own), out, pairs.n_rows, pairs.n_pairs, left == 0, bias,
                                     other_bias)
                if keeps:
                    item, end = i32(lds(shared, at() + loop_at)), i32(lds(shared, at() + (loop_at + 1)))
                syncwarp()  # all are done with the item
                item = i32(item + quotient(blocks_of_grid(), n_neighbours))
        return work
    work_together = crew(block, worker, bringers)

    @device
    def run(words, other_words, bias, other_bias, limbs, table, out, order, pairs):
        shared, tid = cuda.shared.array(0, types.uint32), i32(cuda.threadIdx.x)
        rank = remainder(i32(cuda.blockIdx.x), blocks)
        if tid == 0:
            begin_barriers(shared)
        if shares and tid < team_threads:
            begin_exchange(tid, i32(0), shared)
        write_codebooks(shared, tid, n_threads)
        meet()  # they are there
        wait_for_previous()
        work_together(shared, tid, rank, words, other_words, bias, other_bias, limbs, table, out, order, pairs)
        if n_cluster > 1:
            meet()  # none sends any more
    return run


TESTED = [(name, experts, *astuple(block)) for name in ("Q4_K", "Q5_K", "Q3_K", "Q2_K")
          for experts, blocks in ((False, dense_blocks(format_of(name))), (True, EXPERTS)) for block in blocks]
TESTED += [(name, False, *astuple(DENSE[3])) for name in (
    "Q4_1", "Q5_1", "NVFP4", "IQ1_S", "IQ1_M", "IQ1_M_R1", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_S")]
TESTED += [(name, experts, *astuple(block)) for name, experts, block in (
    ("MXFP4", False, DENSE[0]), ("MXFP4", False, DENSE[-1]), ("NVFP4", False, DENSE[0]), ("NVFP4", False, DENSE[-1]),
    ("NVFP4", True, EXPERTS[1]), ("IQ2_K", False, DENSE[0]), ("IQ2_XS", False, DENSE[-1]), ("IQ3_KS", False, DENSE[0]),
    ("IQ3_S", False, DENSE[1]), ("IQ2_S", False, DENSE[-1]), ("IQ1_M", True, EXPERTS[1]),
    ("IQ2_XXS", True, EXPERTS[2]),
    ("Q5_0", False, DENSE[1]), ("Q6_0", False, DENSE[-1]),
    ("IQ4_XS", False, DENSE[-1]), ("Q6_K", False, DENSE[-1]), ("IQ5_K", False, DENSE[-1]), ("IQ4_KT", False, DENSE[-1]),
    ("IQ4_XS", True, EXPERTS[0]), ("Q6_K", True, EXPERTS[1]), ("IQ2_KT", True, EXPERTS[2]),
    ("Q4_1", False, DENSE[2]), ("Q5_1", False, DENSE[0]), ("MXFP4", True, EXPERTS[1]), ("MXFP4", True, EXPERTS[2]),
    ("Q4_1", True, EXPERTS[0]))]


@factory(TESTED)
def mmq_half_kernel(name, experts, *block):
    block = Block(*block)
    run = products(name, 1, block, STORE, experts)

    def kernel(words, limbs, table, out, order, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows):
        # A block, or a cluster: items from its number on by how many there are; of clusters that share chunks one
        run(words, words, out, out, limbs, table, out, order, Pairs(n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows))
    return Kernel(kernel, (U32, U32, I32, F32, *[N] * 8), threads_of(block), arch=HOPPER, n_cluster=cluster_of(block))


@factory([("silu", name, False, 0.0, 0.0, *astuple(block)) for name in ("Q4_K", "Q5_K", "Q3_K", "Q2_K") for block in EXPERTS]
         + [("silu", name, False, 0.0, 0.0, *astuple(block)) for name, block in (
             ("IQ2_S", EXPERTS[1]), ("IQ4_K", EXPERTS[2]), ("IQ4_KT", EXPERTS[0]))]
         + [("swiglu_oai", "MXFP4", True, 1.702, 7.0, *astuple(block)) for block in EXPERTS[1:]])
def mmq_half_glu_kernel(activation, name, biased, alpha, limit, *block):
    block = Block(*block)
    run = products(name, 2, block, gate_and_store(activation, biased, alpha, limit), True)

    def kernel(gate_words, up_words, gate_bias, up_bias, limbs, table, out, order, n_matrices, n_rows, n_cols, n, n_pairs, n_used,
               x_rows):  # as in mmq_half_kernel
        run(gate_words, up_words, gate_bias, up_bias, limbs, table, out, order,
            Pairs(n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows))
    return Kernel(kernel, (U32, U32, F32, F32, U32, I32, F32, *[N] * 8), block.n_threads + 32, arch=HOPPER)


class Halves(NamedTuple):
    """The plan of `mmq_half`."""
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
    words = unit_words(format_of(matrices_of(call)[0].dtype), block.tokens)
    return Items(sizes, n_items, order, limbs, limbs + n_items * -(-sizes.n_cols // CHUNK) * words)


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
    """Blocks, or clusters of wide ones, that take items of work one after the other, or clusters that have one each. matrices:
    addresses of them, and of biases."""
    (sizes, n_items, order, limbs, _), block, scratch = items_of(call), call.plan.block, call.scratch.data
    n_cluster, rows = cluster_of(block), block.rows * neighbours(block)
    n_all_rows, n_blocks = sizes.n_matrices * sizes.n_rows, n_items * -(-sizes.n_rows // rows) * n_cluster
    need(n_all_rows < 1 << 31, "n_matrices * n_rows", n_all_rows, f"less than {1 << 31}")
    need(n_blocks < 1 << 31, "blocks", n_blocks, f"less than {1 << 31}")
    args = *matrices, scratch + 4 * limbs, scratch, call.out.data, order, *sizes
    resident = call.device.n_multiprocessors // n_cluster * n_cluster
    grid = n_blocks if block.n_teams > 1 else min(n_blocks, max(n_cluster, resident))
    return call.device.launch(kernel, grid, kernel.n_threads, args, half_bytes(format_of(matrices_of(call)[0].dtype), block))


def mmq_of_halves(call: Call):
    """The product with what `half_limbs` left in call.scratch."""
    return launch_halves(call, mmq_half_kernel(call.w.dtype, "ids" in call.values, *astuple(call.plan.block)), call.w.data)


def mmq_half(call: Call):
    """out = w x, as of `mul_mat`, or out = w[ids] x, as of `mul_mat_id`, w of a format that has a `half_form`. plan: `Halves`;
    scratch: i32 [`half_scratch`], on 16 bytes, with what `dispatch` writes for the block's tokens where there are experts."""
    return Launches((half_limbs(call), mmq_of_halves(call)))


def mmq_half_glu(call: Call):
    """out = act(gate[ids] x + its bias) * (up[ids] x + its bias), as of `mul_mat_id_glu`, gate and up of one format that has
    a `half_form`. plan, scratch: as of `mmq_half`."""
    (name, _), biased, matrices = gated_of(call)
    kernel = mmq_half_glu_kernel(call.act, name, biased, *constants_of(call), *astuple(call.plan.block))
    return Launches((half_limbs(call), launch_halves(call, kernel, *matrices)))
