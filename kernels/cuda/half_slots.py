"""How what blocks of `mmq_half` multiply comes to shared memory: the slots, and the threads that have bulk copies fill them.

A chunk's activations and row tiles lie in one slot; what follows products, sums of q and scales, in another one, which is free
later. Slots are filled and taken by barriers of their own (`mbarrier`).

Of a *wide* block, of more than MOST_OF_WHOLE tokens, two chunks of activations have no room. They come in pieces of 64 columns
each, into the places of the chunk before; row tiles come with what follows products, of which there are two slots. And two blocks
of a cluster, which take other rows with the same tokens, bring half of each piece to both. One thread brings activations, another
one the rest, since each has few registers.
"""
from itertools import accumulate
from typing import NamedTuple

from ...quant.formats import Format
from ...quant.tile import tile_bytes
from . import mbarrier
from .block import Block
from .exchange import Exchange, exchange
from .half_forms import half_form
from .half_limbs import rest_of, token_words, tokens_of_atom, unit_words
from .half_product import MOST_TOGETHER
from .launch import SHARED_LIMIT
from .parts import Part, item_words
from .ptx import afresh, device, i32, least, quotient
from .tile_form import QUAD, chunk_words, table_words
from .wgmma import ATOM_WORDS, fence

N_REST = 4  # slots of what follows products
LOOP_WORDS = 2  # of the loop over items
N_REST_WIDE, PIECES = 2, 4
MOST_OF_WHOLE = QUAD * MOST_TOGETHER  # tokens of a block that is not wide


def is_wide(block: Block) -> bool:
    return block.tokens > MOST_OF_WHOLE


def neighbours(block: Block) -> int:
    """Blocks of a cluster that take other rows with the same tokens, and bring their activations together."""
    return 2 if is_wide(block) else 1


def cluster_of(block: Block) -> int:
    """Blocks of a cluster: neighbours, or those that share chunks."""
    assert block.n_teams == 1 or not is_wide(block), block
    return max(block.blocks, neighbours(block))


def has_crew(block: Block) -> bool:
    """Whether a warpgroup brings chunks, and leaves its registers to those that multiply."""
    return is_wide(block) or block.teams > 1


def n_bringing(block: Block) -> int:
    """Warps of which a thread brings chunks."""
    return 2 if is_wide(block) else 1


class Shared(NamedTuple):
    """Words of shared memory. Row tiles of the block lie behind the activations of their chunk or, where these come in pieces,
    behind the rest."""
    slots: int       # of activations, atoms; before them the format's codebooks
    rest: int        # slots of `half_limbs.Rest`
    there: int       # barriers of these, [slot][piece]: a piece of the chunk is there;
    done: int        # all warps that take it are done with it
    rest_there: int  # of the rest likewise, [slot]
    rest_done: int
    scratch: int     # [team][warp], n_kept words for each lane
    items: int       # [team][warp], and of those that bring: an item, as `parts.grouped` reads it, its number, that of the end
    exchange: int    # on 16 bytes


class Slots(NamedTuple):
    """How what a chunk takes comes to shared memory."""
    pieces: int      # of its activations, of as many columns each
    n_act: int       # words of all of them
    n_tiles: int     # words of the block's row tiles
    words: int       # of a slot of activations,
    n_rest: int      # of what follows products
    rest_slots: int
    rest_words: int  # of a slot of it


def slots_of(fmt: Format, block: Block) -> Slots:
    n_act, n_tiles = block.tokens * token_words(fmt), block.row_tiles * tile_bytes(fmt) // 4
    n_rest = rest_of(fmt, block.tokens).n_words
    if is_wide(block):
        return Slots(PIECES, n_act, n_tiles, n_act, n_rest, N_REST_WIDE, n_rest + n_tiles)
    return Slots(1, n_act, n_tiles, -(-(n_act + n_tiles) // ATOM_WORDS) * ATOM_WORDS, n_rest, N_REST, n_rest)


def layout_of(fmt: Format, block: Block, n_kept: int) -> Shared:
    """n_kept: as of `kept_sums`."""
    slots, n_warps = slots_of(fmt, block), block.n_warps * block.teams
    barriers, rest_barriers = mbarrier.WORDS * block.slots * slots.pieces, mbarrier.WORDS * slots.rest_slots
    n_table = -(-table_words(fmt.name) // ATOM_WORDS) * ATOM_WORDS
    n_items = -(-(n_warps + n_bringing(block)) * (item_words(block.tokens) + LOOP_WORDS) // 4) * 4
    return Shared(*accumulate((n_table, block.slots * slots.words, slots.rest_slots * slots.rest_words, barriers, barriers,
                               rest_barriers, rest_barriers, 32 * n_warps * n_kept, n_items)))


def bytes_of(layout: Shared, block: Block) -> int:
    return 4 * (exchange(block, layout.exchange).n_words if block.n_teams > 1 else layout.exchange)


def kept_sums(fmt: Format, block: Block) -> int:
    """Sums of a lane that lie in shared memory together, in the words of its warp: parts of a chunk, and many totals, want room
    for more. Of parts half as many where there is no room. Of split formats all totals."""
    if half_form(fmt).split:
        return block.n_sums
    whole = half_form(fmt).parts == 1
    most = min(block.n_sums, MOST_TOGETHER if whole and not is_wide(block) else 2 * MOST_TOGETHER)
    return most if whole or bytes_of(layout_of(fmt, block, most), block) <= SHARED_LIMIT else most // 2


def shared_layout(fmt: Format, block: Block) -> Shared:
    return layout_of(fmt, block, kept_sums(fmt, block))


def exchange_of(fmt: Format, block: Block) -> Exchange:
    return exchange(block, shared_layout(fmt, block).exchange)


def half_bytes(fmt: Format, block: Block) -> int:
    return bytes_of(shared_layout(fmt, block), block)


class Turns(NamedTuple):
    """Which slots are next, and the parity of the phases for which they are, for device functions: int32."""
    slot: object
    parity: object
    rest: object
    rest_parity: object


def turner(slots: int, rest_slots: int):
    """(turns) -> those of the next chunk."""
    @device
    def following_of_one(turns):
        """The slot of the rest, of two, is always the parity of the only slot of activations."""
        parity = i32(turns.parity ^ 1)
        return Turns(i32(0), parity, parity, i32(turns.rest_parity ^ (1 ^ parity)))

    @device
    def following(turns):
        slot, rest = i32(turns.slot + 1), i32(turns.rest + 1)
        return Turns(i32(0 if slot == slots else slot), i32(turns.parity ^ (1 if slot == slots else 0)),
                     i32(0 if rest == rest_slots else rest), i32(turns.rest_parity ^ (1 if rest == rest_slots else 0)))
    return following_of_one if (slots, rest_slots) == (1, N_REST_WIDE) else following


class Sources(NamedTuple):
    """What chunks are brought from, for device functions."""
    words: object  # uint32, the weight's tiles,
    limbs: object  # and what `half_limbs` made of the activations
    n_rows: object
    n_chunks: object


def chunk_bringer(fmt: Format, block: Block, part: Part):
    """One or two (shared, rank, side, sources, work, turns) -> turns: all chunks of an item that are the block's, whose
    activations are the work-th ones, by one thread. Of wide blocks one thread brings activations and another one the rest: each
    so has registers for its part. Row tiles behind the last repeat it; quads behind the last token are left out."""
    slots_at, rest_at, there, done, rest_there, rest_done, *_ = shared_layout(fmt, block)
    words_of_unit = unit_words(fmt, block.tokens)
    pieces, n_act, n_tiles, slot_words, n_rest, rest_slots, rest_words = slots_of(fmt, block)
    tile_words, row_tiles, following = tile_bytes(fmt) // 4, block.row_tiles, turner(block.slots, rest_slots)
    row_block, matrix, tokens_of, blocks = part.row_block, part.matrix, part.n_tokens, block.blocks
    per_atom = tokens_of_atom(fmt)
    n_all = token_words(fmt) * per_atom // ATOM_WORDS  # strips, of 64 columns of both limbs or of one
    n_strips, words_of_strip = n_all // pieces, n_act // n_all
    tiles_of_pieces, tiles_of_rest = (n_tiles, 0) if pieces == 1 else (0, n_tiles)
    n_neighbours = neighbours(block)
    # With a crew the end of a loop is not known to the compiler, which so has registers for one step
    looped = afresh if has_crew(block) else i32

    @device
    def bring_tiles(shared, sources, first, chunk, to, barrier):
        last, end = i32(i32(sources.n_rows - 1) >> 5), i32(first + row_tiles)
        before = i32(matrix(shared) * i32(last + 1))
        while first < end:
            row_tile = i32(before + least(first, last))
            at = chunk_words(row_tile, chunk, sources.n_chunks, tile_words)
            mbarrier.bring(shared, to, sources.words, at, i32(tile_words), barrier)
            first, to = looped(i32(first + 1)), i32(to + tile_words)

    @device
    def bring_rest(shared, sources, first, chunk, at, turns):
        barrier, to = i32(rest_there + turns.rest * mbarrier.WORDS), i32(rest_at + turns.rest * rest_words)
        mbarrier.wait(shared, rest_done + turns.rest * mbarrier.WORDS, i32(turns.rest_parity ^ 1))
        mbarrier.expect(shared, barrier, i32(4 * (n_rest + tiles_of_rest)))
        if tiles_of_rest:
            bring_tiles(shared, sources, first, chunk, i32(to + n_rest), barrier)
        mbarrier.bring(shared, to, sources.limbs, i32(at + n_act), i32(n_rest), barrier)

    @device
    def bring_strips(shared, side, sources, at, to, own_words, piece, barrier):
        for i in range(n_strips):
            further = i32(i32(piece * n_strips + i) * words_of_strip)
            if n_neighbours == 1:
                mbarrier.bring(shared, to + further, sources.limbs, i32(at + further), own_words, barrier)
            else:  # each of both a half
                half = i32(own_words >> 1)
                further = i32(further + (half if side else i32(0)))
                mbarrier.bring_to_both(shared, to + further, sources.limbs, i32(at + further), half, barrier)

    @device
    def bring_piece(shared, side, sources, first, chunk, at, own_words, turns, piece):
        to, place = i32(slots_at + turns.slot * slot_words), i32((turns.slot * pieces + piece) * mbarrier.WORDS)
        barrier = i32(there + place)
        mbarrier.wait(shared, done + place, i32(turns.parity ^ 1))
        mbarrier.expect(shared, barrier, i32(4 * (n_strips * own_words + tiles_of_pieces)))
        if tiles_of_pieces:
            bring_tiles(shared, sources, first, chunk, i32(to + n_act), barrier)
        bring_strips(shared, side, sources, at, to, own_words, piece, barrier)

    def bringer(brings_pieces: bool, brings_rest: bool):
        @device
        def bring(shared, rank, side, sources, work, turns):
            chunk, first = rank, i32(row_block(shared) * row_tiles)
            at = i32(i32(i32(work * sources.n_chunks) + rank) * words_of_unit)  # as int32, as `half_limbs` sees to
            own_words = i32(quotient(i32(tokens_of(shared) + (per_atom - 1)), per_atom) * ATOM_WORDS)  # of a strip
            while chunk < sources.n_chunks:
                piece, end = i32(0), looped(pieces)
                while brings_pieces and piece < end:
                    bring_piece(shared, side, sources, first, chunk, at, own_words, turns, piece)
                    piece = looped(i32(piece + 1))
                if brings_rest:
                    bring_rest(shared, sources, first, chunk, at, turns)
                chunk, at, turns = i32(chunk + blocks), i32(at + blocks * words_of_unit), following(turns)
            return turns
        return bring
    return (bringer(True, False), bringer(False, True)) if is_wide(block) else (bringer(True, True),)


def barrier_beginner(fmt: Format, block: Block):
    """(shared), by one thread."""
    (_, _, there, done, rest_there, rest_done, *_), slots = shared_layout(fmt, block), slots_of(fmt, block)
    n_warps = block.n_warps
    n_pieces, rest_slots, n_leaving = block.slots * slots.pieces, slots.rest_slots, n_warps * neighbours(block)

    @device
    def begin_barriers(shared):
        for i in range(n_pieces):
            mbarrier.begin(shared, there + i * mbarrier.WORDS, i32(1))
            mbarrier.begin(shared, done + i * mbarrier.WORDS, i32(n_leaving))
        for i in range(rest_slots):
            mbarrier.begin(shared, rest_there + i * mbarrier.WORDS, i32(1))
            mbarrier.begin(shared, rest_done + i * mbarrier.WORDS, i32(n_warps))
        fence()
    return begin_barriers
