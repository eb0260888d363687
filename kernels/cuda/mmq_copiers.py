"""The body of `mmq`'s kernels for blocks with copiers (`Block.copiers`): a warpgroup that only copies chunks, beside those that
multiply.

Copiers fill the slots one after the other, in the order of the chunks, which teams take in turn. They wait for nothing but that
all are done with what a slot held, at each fill. All of them arrive when a chunk is there, each in the order of the chunks; so
nobody is a phase behind at a slot's barriers. Since the chunks of a turn are filled before those of the next one, teams that wait
for each other's sums wait for chunks that are on their way.

Where more than one warpgroup multiplies, copiers leave registers to them, and find with each chunk where pieces of activations
begin.
"""
from numba import cuda, types

from ...quant.formats import Format, format_of
from . import cluster, group_product, mbarrier, wgmma
from .block import Block
from .ending import Ending
from .exchange import exchanger, held_scales
from .few_product import codebooks
from .mmq_slots import (Found, Operands, barrier_places, chunk_slot, first_slot, slot_barriers, slot_filler, sources,
                        takes_stored, takes_turns, turn_barriers)
from .mmq_stages import chunk_folder, chunk_taker, exchange_of, totals_writer
from .parts import Part
from .ptx import device, f32, i32, nothing, quotient, remainder, shuffle, wait_for_previous
from .tile_form import is_late
from .weights import shared_unpacker

# Of threads that multiply, and of copiers, by the warpgroups of a block. Of two warpgroups each has enough
REGISTERS = {3: (216, 72), 4: (144, 80), 5: (104, 64)}
LATE_REGISTERS = 208, 88  # of three, of many rows: copiers bring the limbs of sums, too


def chunk_copier(fmt: Format, block: Block, part: Part):
    """(tid, rank, shared, operands): all chunks of the block, by copiers. Weights of the first ones are on their way before the
    kernel before has ended."""
    find, fill, fill_tile, fill_tokens = slot_filler(fmt, block, part)
    first, slot_words, slots = first_slot(fmt, block), chunk_slot(fmt, block).n_words, block.slots
    blocks, last_slot = block.blocks, first + (slots - 1) * slot_words
    n_offsets, n_scales, n_limbs, n_places = sources(fmt, block)
    n_found = n_scales + n_limbs

    def first_chunks(start):
        """(tid, rank, shared, operands, found) -> the chunk behind them: starts a part of their copies, all slots full."""
        @device
        def start_first(tid, rank, shared, operands, found):
            chunk, to = rank, i32(first)
            while to <= last_slot:
                start(tid, shared, to, chunk, operands, found)
                chunk, to = i32(chunk + blocks), i32(to + slot_words)
            return chunk
        return start_first
    start_tiles, start_tokens = first_chunks(fill_tile), first_chunks(fill_tokens)

    @device
    def copy_chunks(tid, rank, shared, operands):
        found = Found(cuda.local.array(n_places, i32), cuda.local.array(n_offsets, i32), cuda.local.array(n_found, i32))
        find(tid, shared, operands.n_chunks, operands.n, found)
        start_tiles(tid, rank, shared, operands, found)
        wait_for_previous()
        chunk, to, turn = start_tokens(tid, rank, shared, operands, found), i32(first), i32(1)
        while chunk < operands.n_chunks:
            fill(tid, shared, to, turn, chunk, operands, found)
            if to == last_slot:
                turn = i32(turn ^ 1)
            chunk, to = i32(chunk + blocks), i32(to + slot_words if to < last_slot else first)
    return copy_chunks


def team_multiplier(name: str, block: Block):
    """(begin, multiply_chunks). begin: (tid, shared): makes what barriers there are beside those of slots. multiply_chunks: (tid,
    rank, shared, n_chunks, total) -> (tid in the team, team, its number in the cluster): all chunks of a team, by its warps."""
    fmt = format_of(name)
    exchanging, by_turns = exchanger(block, exchange_of(fmt, block)), takes_turns(fmt, block)
    multiply = (group_product.stored_product(name, block.quads, block.groups * block.quads) if takes_stored(fmt, block) else
                group_product.group_product(name, block.quads, by_turns).multiply)
    fold_chunk = chunk_folder(fmt, block, multiply)
    take_chunk, begin_exchange, finish = chunk_taker(fmt, block, fold_chunk, exchanging), exchanging.begin, exchanging.finish
    begin_turns, _, turn_at = turn_barriers(block, exchange_of(fmt, block).sums)
    there, first, slot_words = barrier_places(fmt, block)[0], first_slot(fmt, block), chunk_slot(fmt, block).n_words
    n_sums, n_own, n_products, n_held = block.n_sums, block.n_own, 4 * block.quads, held_scales(block)
    teams, blocks, n_teams, team_threads = block.teams, block.blocks, block.n_teams, 32 * block.n_warps
    step, last_step = teams * slot_words, first + (block.slots - teams) * slot_words
    ring_words = block.slots * slot_words

    @device
    def begin(tid, shared):
        if n_teams > 1 and tid < team_threads:
            begin_exchange(tid, i32(0), shared)
        if by_turns:
            begin_turns(tid, shared)

    @device
    def multiply_chunks(tid, rank, shared, n_chunks, total):
        acc, held = cuda.local.array(n_sums, f32), cuda.local.array(n_held, types.uint32)
        d, e = cuda.local.array(n_products, i32), cuda.local.array(n_products, i32)
        for o in range(n_products):
            d[o], e[o] = i32(0), i32(0)
        for o in range(n_own):
            total[o] = f32(0)
        team = i32(0)
        if teams > 1:
            team = shuffle(quotient(tid, team_threads), i32(0))  # known to be the same for all lanes
            tid = i32(tid - team * team_threads)
        number, turn_of, turn = i32(team * blocks + rank), i32(0), i32(0)
        chunk, now = number, i32(first + team * slot_words)
        while chunk < n_chunks:
            mbarrier.wait(shared, now + there, turn)
            wgmma.fence()
            turn_of = take_chunk(tid, team, rank, shared, now, n_chunks, turn_of, total, acc, held, d, e,
                                 turn_at(i32(tid >> 5), chunk))
            if now >= last_step:
                turn = i32(turn ^ 1)
            chunk, now = i32(chunk + n_teams), i32(now + step if now < last_step else now + (step - ring_words))
        if n_teams > 1:
            finish(tid, team, rank, shared, turn_of, n_chunks, total)
        return tid, team, number
    return begin, multiply_chunks


def copied_products(name: str, block: Block, ending: Ending, part: Part):
    """The body of a kernel, the products with one matrix, as of `mmq.products`."""
    fmt, (begin, multiply_chunks) = format_of(name), team_multiplier(name, block)
    write_codebooks = codebooks([shared_unpacker(name)], [0])
    store_totals, copy_chunks = totals_writer(block, ending, part, block.n_sums), chunk_copier(fmt, block, part)
    (begin_barriers, _), first, blocks, n_own = slot_barriers(fmt, block), first_slot(fmt, block), block.blocks, block.n_own
    n_threads, n_multiplying, kept_words = block.n_threads, block.n_multiplying, 32 * block.n_warps * block.n_sums
    meet, n_groups = cluster.meet if blocks > 1 else cuda.syncthreads, n_threads // 128
    late = block.row_tiles > 2 and is_late(fmt, block.prepared_quads)
    more, fewer = (wgmma.registers(n_groups, *LATE_REGISTERS if late else REGISTERS[n_groups]) if n_groups > 2 else
                   (nothing, nothing))
    assert block.slots >= block.teams and block.teams * kept_words <= block.slots * chunk_slot(fmt, block).n_words, block

    @device
    def run(words, bias, other_bias, act, out, last, n_rows, n_cols, n, n_out):
        shared, tid, n_chunks = cuda.shared.array(0, types.uint32), i32(cuda.threadIdx.x), i32((n_cols + 255) >> 8)
        rank = remainder(i32(cuda.blockIdx.x), blocks)
        write_codebooks(shared, tid, n_threads)
        begin_barriers(tid, shared, first)
        begin(tid, shared)
        meet()  # they are there
        if tid >= n_multiplying:
            fewer()
            copy_chunks(i32(tid - n_multiplying), rank, shared, Operands(words, act, n_rows, n_chunks, n))
            cuda.syncthreads()
        else:
            more()
            wait_for_previous()
            total = cuda.local.array(n_own, f32)
            tid, team, number = multiply_chunks(tid, rank, shared, n_chunks, total)
            cuda.syncthreads()  # all are done with the slots
            store_totals(tid, shared, i32(first + team * kept_words), total, number * n_own, out, n_rows, n_out, last, bias,
                         other_bias)
        if blocks > 1:
            meet()  # none sends any more
    return run
