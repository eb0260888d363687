"""The stages of a product with one matrix, of which the bodies of `mmq`'s kernels are made, each by a function of what is known
when the kernel is compiled. Arguments of device functions as in `mmq_slots`, and:
    now           word at which a slot begins that is multiplied
    total, acc    f32 [n_sums], in registers: a lane's totals of docs/numerics.md, section 3, and the acc of a chunk;
                  [n_rows_lane quad + k] is of row l / 4 + 8 k of the tile, or of half of it, and token l % 4 of the quad
"""
from numba import cuda

from ...quant.formats import Format
from ...quant.tile import tile_bytes
from . import mbarrier, wgmma
from .block import Block
from .ending import Ending
from .exchange import Exchange, Exchanger, exchange
from .mmq_slots import barrier_places, chunk_slot, first_slot, is_paced, scratch_words, takes_stored
from .parts import Part
from .ptx import (afresh, as_f32, as_u32, device, f32, fma, i32, i64, lds, lds4, quotient, remainder, stage, sts)
from .tile_form import QUAD_WORDS, table_words


def exchange_of(fmt: Format, block: Block) -> Exchange:
    return exchange(block, first_slot(fmt, block) + block.slots * chunk_slot(fmt, block).n_words)


def warp_placer(block: Block):
    """(warp) -> (tile, half of it, group of tokens) of a warp of the block."""
    warpgroups, row_tiles, several = block.warpgroups, block.row_tiles, block.groups > 1

    @device
    def place_of(warp):
        if warpgroups:
            tile = warp >> 1
            if several:
                return remainder(tile, row_tiles), warp & 1, quotient(tile, row_tiles)
            return tile, warp & 1, i32(0)
        return remainder(warp, row_tiles), i32(0), quotient(warp, row_tiles)
    return place_of


def chunk_folder(fmt: Format, block: Block, multiply):
    """(lane, warp, team, shared, now, total, acc, d, e, turn): multiplies a warp's rows and tokens in the slot and adds them up:
    total = fma(acc, d of the token, total). Teams leave that to `exchanger`. multiply: of `TileProduct`, or of stored levels; d,
    e: int32 arrays in registers, of a warpgroup's products, and its `group_product.Turn`."""
    act_at, d_at, limbs_at, _, tiles_at = chunk_slot(fmt, block)
    warpgroups, quads, n_rows_lane, place_of = block.warpgroups, block.quads, block.n_rows_lane, warp_placer(block)
    tile_words, own_words, first_warp = tile_bytes(fmt) // 4, scratch_words(fmt, block), table_words(fmt.name)
    alone, n_warps, n_all_quads, stored = block.n_teams == 1, block.n_warps, block.groups * quads, takes_stored(fmt, block)
    assert not (warpgroups and block.groups > 1) or (stored and alone), block

    @stage
    def fold_chunk(lane, warp, team, shared, now, total, acc, d, e, turn):
        tile, half, group = place_of(warp)
        first_quad, scratch = i32(group * quads), i32(first_warp + (team * n_warps + warp) * own_words)
        tile_at, q_at, sums_at = i32(now + tiles_at + tile * tile_words), i32(now + act_at), i32(now + limbs_at + first_quad * 64)
        if warpgroups:
            if stored:
                pair = i32(tile_at - (tile & 1) * tile_words)
                multiply(lane, warp, shared, pair, i32(q_at + first_quad * wgmma.ATOM_WORDS), acc, d)
            else:
                multiply(lane, half, shared, tile_at, q_at, sums_at, scratch, acc, d, e, turn)
            for i in range(quads // 4 if alone else 0):
                d0, d1, d2, d3 = lds4(shared, now + d_at + (lane & 3) * n_all_quads + first_quad + 4 * i)
                for k in range(n_rows_lane):
                    o = 4 * n_rows_lane * i + k
                    total[o], total[o + 2] = fma(acc[o], as_f32(d0), total[o]), fma(acc[o + 2], as_f32(d1), total[o + 2])
                    total[o + 4], total[o + 6] = (fma(acc[o + 4], as_f32(d2), total[o + 4]),
                                                  fma(acc[o + 6], as_f32(d3), total[o + 6]))
        else:
            multiply(lane, shared, tile_at, i32(q_at + first_quad * QUAD_WORDS), sums_at, scratch, acc)
            place = i32(now + d_at + first_quad * 4 + (lane & 3))
            for quad in range(quads):
                scale = as_f32(lds(shared, place + 4 * quad))
                for k in range(n_rows_lane):
                    o = n_rows_lane * quad + k
                    total[o] = fma(acc[o], scale, total[o])
    return fold_chunk


def chunk_taker(fmt: Format, block: Block, fold_chunk, exchange: Exchanger):
    """(tid, team, rank, shared, now, n_chunks, turn_of, total, acc, held, d, e, turn) -> the number of the team's next turn: its
    chunk of turn turn_of, by one of its warps, who then leaves the slot, and gives sums to the other teams. fold_chunk: of
    `chunk_folder`; held: of `Exchanger.hold`."""
    shares, behind, paced = block.n_teams > 1, block.sides > 1, is_paced(fmt, block)  # behind: sums of a turn are added later
    (_, _, hold, send, fold, _), done, d_at = exchange, barrier_places(fmt, block)[1], chunk_slot(fmt, block).d

    @device
    def take_chunk(tid, team, rank, shared, now, n_chunks, turn_of, total, acc, held, d, e, turn):
        if shares and not behind and turn_of > 0:
            fold(tid, team, rank, shared, turn_of - 1, n_chunks, total)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        fold_chunk(lane, warp, team, shared, now, total, acc, d, e, turn)
        if shares:
            hold(lane, shared, i32(now + d_at), held)
        if paced:
            mbarrier.leave(lane, shared, now + done)
        if behind and turn_of > 0:
            fold(tid, team, rank, shared, turn_of - 1, n_chunks, total)
        if shares:
            send(tid, team, rank, shared, held, turn_of, n_chunks, acc)
        return i32(turn_of + 1)
    return take_chunk


TURN = 8  # sums of a lane that are finished together, so that the loads of what waits for them are under way together


def totals_writer(block: Block, ending: Ending, part: Part, n_kept: int):
    """(tid, shared, now, total, first_sum, out, n_rows, n_out, last, bias, other_bias): what becomes of a lane's totals, by
    `ending`: out f32 [n_out, n_rows]; first_sum: which of all the sums of a lane the first of them is. They go through words that
    are free, from `now` on, n_kept of a lane at a time, each warp through its own, 32 for each sum: so what becomes of them is a
    loop, with registers for few."""
    def writer_from(begin):
        store_some, is_last = some_writer(block, ending, part, n_kept, begin), begin + n_kept >= block.n_own
        store_further = None if is_last else writer_from(begin + n_kept)

        @stage
        def store_totals(tid, shared, now, total, first_sum, out, n_rows, n_out, last, bias, other_bias):
            store_some(tid, shared, now, total, first_sum, out, n_rows, n_out, last, bias, other_bias)
            if not is_last:
                store_further(tid, shared, now, total, first_sum, out, n_rows, n_out, last, bias, other_bias)
        return store_totals
    return writer_from(0)


def some_writer(block: Block, ending: Ending, part: Part, n_kept: int, begin: int):
    """`totals_writer` of the totals from total[begin] on, n_kept at most."""
    (waiting_at, finish), place_of, rows, quads = ending, warp_placer(block), block.rows, block.quads
    row_block, matrix, targets_from, target_of = part.row_block, part.matrix, part.targets, part.target
    n_rows_lane, n_sums, n_all = block.n_rows_lane, min(n_kept, block.n_own - begin), block.n_sums
    log_rows, together = n_rows_lane.bit_length() - 1, min(TURN, n_sums)

    @device
    def target_at(shared, o, first_row, first_token):
        """(row, token) of sum o of a lane."""
        return i32(first_row + 8 * (o & (n_rows_lane - 1))), target_of(shared, i32(first_token + (o >> log_rows) * 4))

    @stage
    def store_some(tid, shared, now, total, first_sum, out, n_rows, n_out, last, bias, other_bias):
        lane, warp = i32(tid & 31), i32(tid >> 5)
        tile, half, group = place_of(warp)
        kept = i32(now + warp * n_kept * 32 + lane)
        for o in range(n_sums):
            sts(shared, kept + 32 * o, as_u32(total[begin + o]))
        first_row = i32(row_block(shared) * rows + tile * 32 + half * 16 + (lane >> 2))
        first_token = i32(targets_from(shared) + group * quads * 4 + (lane & 3))
        o, end, waiting = i32(0), afresh(n_sums), cuda.local.array(together, f32)
        first_sum = i32(first_sum + begin)
        while o < end:
            for j in range(together):
                row, token = target_at(shared, i32(first_sum + o + j), first_row, first_token)
                waiting[j] = f32(0)
                if row < n_rows and token < n_out and o + j < n_sums and first_sum + o + j < n_all:
                    waiting[j] = waiting_at(out, i64(token) * n_rows + row, last)
            for j in range(together):
                row, token = target_at(shared, i32(first_sum + o + j), first_row, first_token)
                if row < n_rows and token < n_out and o + j < n_sums and first_sum + o + j < n_all:
                    total_of = as_f32(lds(shared, kept + 32 * (o + j)))
                    finish(out, i64(token) * n_rows + row, i32(matrix(shared) * n_rows), row, n_rows, total_of, waiting[j], last,
                           bias, other_bias)
            o = i32(o + together)
    return store_some
