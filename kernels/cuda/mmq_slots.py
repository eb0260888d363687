"""The slots of shared memory of `mmq`: what a chunk takes of one, how its weights and activations are copied there, and the
barriers by which those who multiply know that it is there, and those who copy that the slot is free."""
from typing import NamedTuple

from ...quant.formats import Format
from ...quant.tile import tile_bytes
from . import group_product, mbarrier, wgmma
from .block import Block
from .parts import Part
from .ptx import afresh, copies4, copies_commit, copy1, copy4, device, i32, i64, kept, least, quotient, remainder
from .quantize import planes
from .tile_form import QUAD, QUAD_WORDS, Slot, chunk_words, factors, form, is_late, slot, swizzle, table_words
from .weights import unpacker

N_BARRIERS = 2  # of a slot, its last words: the chunk is there; all are done with it


def prepares_scales(fmt: Format) -> bool:
    """Whether it has integer scales that a warp prepares in shared memory."""
    return form(fmt).integer and group_product.needs_factors(fmt, unpacker(fmt.name))


def takes_turns(fmt: Format, block: Block) -> bool:
    """Whether two warpgroups multiply by turns (`group_product.Turn`): with integer scales that are prepared in shared memory.
    Minima by integers are products of tensor cores, too."""
    return block.n_teams == 1 and block.warpgroups and block.row_tiles > 2 and prepares_scales(fmt) and not fmt.has_min


def is_paced(fmt: Format, block: Block) -> bool:
    """Whether two warpgroups go each at its own pace, by barriers of the slots. With integer scales that is no faster without
    turns. Teams always do, and blocks with copiers."""
    two = block.warpgroups and block.row_tiles > 2
    return block.n_teams > 1 or block.copiers > 0 or (two and not form(fmt).integer) or takes_turns(fmt, block)


def takes_stored(fmt: Format, block: Block) -> bool:
    """Whether levels go from shared memory to the tensor cores."""
    return block.copiers > 0 and group_product.is_stored(fmt)


def chunk_slot(fmt: Format, block: Block) -> Slot:
    at = slot(fmt, block.row_tiles, block.groups * block.quads, is_late(fmt, block.prepared_quads))
    if not block.warpgroups:
        return at
    # The activations come first, so that their atoms are aligned
    n_act, n_words = at.d - at.act, at.n_words + N_BARRIERS * mbarrier.WORDS * is_paced(fmt, block)
    return Slot(0, at.d, at.limbs, -(-n_words // wgmma.ATOM_WORDS) * wgmma.ATOM_WORDS, n_act)


def scratch_words(fmt: Format, block: Block) -> int:
    wanted = not block.warpgroups or group_product.needs_factors(fmt, unpacker(fmt.name))
    return factors(fmt, block.prepared_quads).n_words if wanted else 0


def first_slot(fmt: Format, block: Block) -> int:
    """Word of shared memory at which the slots begin, behind codebooks and the factors of each warp."""
    words = table_words(fmt.name) + block.teams * block.n_warps * scratch_words(fmt, block)
    return -(-words // wgmma.ATOM_WORDS) * wgmma.ATOM_WORDS if block.warpgroups else words


def remembers(block: Block) -> bool:
    """Whether a thread remembers where each of its pieces begins. Of 512, in warpgroups, none does: 32 tokens leave no registers
    for that, and of 16 it makes no difference (docs/kernels-log.md). Nor do copiers that leave registers to others."""
    return block.n_threads < 512 and not (block.copiers and block.n_multiplying > 128)


class Sources(NamedTuple):
    """How many words of the activation buffer a thread remembers: where its pieces of quads begin, scales, limbs, and the places
    of the first in a slot; of pieces and places one each where it does not remember all of them."""
    quads: int
    scales: int
    limbs: int
    places: int


def sources(fmt: Format, block: Block) -> Sources:
    n_threads = 32 * block.copying_warps
    limbs = -(-4 * block.tokens // n_threads) if is_late(fmt, block.prepared_quads) else 0
    n_pieces, n_places = (block.tokens // block.copying_warps, 4) if remembers(block) else (1, 1)
    return Sources(n_pieces, -(-block.tokens // n_threads), limbs, n_places)


# Device functions, each made of what is known when the kernel is compiled. Their arguments:
#     shared        uint32, the block's dynamic shared memory; to: word at which a slot begins that is filled
#     operands      `Operands`; found: `Found`

class Operands(NamedTuple):
    """What a product reads, for device functions."""
    words: object     # uint32, the weight's tiles
    act: object       # uint32, the activation buffer
    n_rows: object    # int32: of the matrix,
    n_chunks: object  # of a row,
    n: object         # rows of the activations


class Found(NamedTuple):
    """What a thread has found for its copies, which does not change with the chunk, for device functions: int32 arrays in
    registers."""
    places: object   # [4]: of the first pieces in a slot; only [0] of a thread that does not remember each piece
    offsets: object  # [c * quads_of_warp + i]: words of the activation buffer at which the pieces of quads begin; else [0]: at
                     # which a piece of row 0 would
    own: object      # of scales, then of limbs of sums


def tile_copier(fmt: Format, block: Block, part: Part):
    """(lane, warp, shared, to, operands, chunk): a warp starts the copies of its tile's chunk, or of its part of it. Row tiles
    behind the last repeat it."""
    row_block, matrix, row_tiles, groups = part.row_block, part.matrix, block.row_tiles, block.copying_warps // block.row_tiles
    n_pieces, tile_words, tiles_at = tile_bytes(fmt) // 16, tile_bytes(fmt) // 4, chunk_slot(fmt, block).tiles
    wholes, rest = n_pieces // 32, n_pieces % 32
    half = -(-wholes // groups)
    stored = takes_stored(fmt, block)
    # Of stored levels the pieces of two tiles lie side by side
    stride = 2 * 128 if stored else 128
    first_copies, other_copies = copies4(half, stride=stride), copies4(wholes - half, stride=stride)
    assert groups in (1, 2) and not (stored and (rest or row_tiles % 2)), block

    @device
    def copy_tile(lane, warp, shared, to, operands, chunk):
        tile, group = remainder(warp, row_tiles), quotient(warp, row_tiles)
        row_tile = i32(least(i32(row_block(shared) * row_tiles + tile), i32((operands.n_rows - 1) >> 5))
                       + matrix(shared) * ((operands.n_rows + 31) >> 5))
        source = chunk_words(row_tile, chunk, operands.n_chunks, tile_words) + lane * 4
        place = i32(to + tiles_at + tile * tile_words + lane * 4)
        if stored:
            place = i32(place - (tile & 1) * (tile_words - 128))
        if group == 0:
            first_copies(shared, place, operands.words, source)
        elif wholes > half:
            other_copies(shared, place + half * stride, operands.words, source + half * 128)
        if rest and group == groups - 1 and lane < rest:
            copy4(shared, place + wholes * 128, operands.words, source + wholes * 128)
    return copy_tile


def token_copier(fmt: Format, block: Block, part: Part):
    """(find, copy_tokens). find: (tid, shared, n_chunks, n, found) fills found, of n rows of activations. copy_tokens: (tid,
    warp, shared, to, operands, chunk, found): a thread starts the copies of its pieces of the chunk's limbs, scales and, where
    minima are late, limbs of sums. Tokens behind the last repeat it, or, where their number is known (`Part.n_tokens`), are
    left out."""
    sources_from, source_of, tokens_of = part.sources, part.source, part.n_tokens
    partial, n_warps, tokens, warpgroups = tokens_of is not None, block.copying_warps, block.tokens, block.warpgroups
    at, n_quads, n_threads = chunk_slot(fmt, block), tokens // QUAD, 32 * n_warps
    act_at, d_at, limbs_at = at.act, at.d, at.limbs
    quads_of_warp, (n_pieces, scales_of_thread, limbs_of_thread, n_places) = n_quads // n_warps, sources(fmt, block)
    remembered = remembers(block)
    quad_words, half_words = (wgmma.ATOM_WORDS, n_quads * wgmma.ATOM_WORDS) if warpgroups else (QUAD_WORDS, 0)
    keep = kept if remembered and block.teams > 1 else device(lambda x, lane: x)
    assert n_quads % n_warps == 0 and (remembered or warpgroups), block

    @device
    def in_quad(r, piece):
        """Word of a quad at which piece of row r lies."""
        if warpgroups:
            return (piece >> 3) * half_words + r * 32 + (((piece & 7) ^ r) << 2)
        return r * 64 + ((piece ^ swizzle(r)) << 2)

    @device
    def scale_at(token):
        """Where among the scales that of a token lies: for warpgroups those of a lane's tokens follow each other."""
        return i32((token & 3) * n_quads + (token >> 2)) if warpgroups else token

    @device
    def row_of(shared, first, last, warp, p):
        """Of the activations, of piece p of a lane."""
        return source_of(shared, i32(first + 4 * (warp + p % quads_of_warp * n_warps) + p // quads_of_warp), last)

    @device
    def find(tid, shared, n_chunks, n, found):
        lane, warp = i32(tid & 31), i32(tid >> 5)
        lo, scales, _, limbs = planes(n, n_chunks)
        first, last, row_words = sources_from(shared), i32(n - 1), i32(n_chunks * 64)
        limb, piece = i32(lane >> 4), i32(lane & 15)
        plane = i32(limb * lo + piece * 4)
        for c in range(n_places):
            found.places[c] = keep(i32(act_at + warp * quad_words + in_quad(2 * c + limb, piece)), lane)
        for p in range(n_pieces):
            found.offsets[p] = (keep(i32(plane + row_of(shared, first, last, warp, p) * row_words), lane) if remembered
                                else plane)
        for i in range(scales_of_thread):
            found.own[i] = i32(scales + source_of(shared, i32(first + tid + i * n_threads), last))
        for i in range(limbs_of_thread):
            p = i32(tid + i * n_threads)
            source = source_of(shared, i32(first + (p >> 2)), last)
            found.own[scales_of_thread + i] = i32(limbs + source * 16 + (p & 3) * 4)

    @device
    def copy_tokens(tid, warp, shared, to, operands, chunk, found):
        act, n, end, first = operands.act, operands.n, i32(tokens), sources_from(shared)
        if partial:
            end = tokens_of(shared)
        for c in range(4):
            for i in range(quads_of_warp):
                if partial and i32(4 * (warp + i * n_warps) + c) >= end:
                    continue  # what is multiplied in the places of other tokens is not looked at
                p = c * quads_of_warp + i
                if remembered:
                    place, offset = found.places[c], found.offsets[p]
                else:  # `in_quad` of row 2 c + limb comes from that of row `limb`, since atoms begin on 256 words
                    place = i32((found.places[0] ^ (8 * c)) + 64 * c)
                    row = row_of(shared, first, i32(n - 1), warp, p)
                    offset = i32(found.offsets[0] + row * i32(operands.n_chunks * 64))
                copy4(shared, to + place + i * n_warps * quad_words, act, i64(i32(offset + chunk * 64)))
        for i in range(scales_of_thread):
            token = i32(tid + i * n_threads)
            if token < tokens:
                copy1(shared, to + d_at + scale_at(token), act, i64(i32(found.own[i] + chunk * n)))
        for i in range(limbs_of_thread):
            if tid + i * n_threads < 4 * tokens:
                copy4(shared, to + limbs_at + (tid + i * n_threads) * 4, act,
                      i64(i32(found.own[scales_of_thread + i] + chunk * n * 16)))
    return find, copy_tokens


def barrier_places(fmt: Format, block: Block) -> tuple[int, int]:
    """Words of a slot at which its two barriers lie: the chunk is there; all are done with it."""
    return tuple(chunk_slot(fmt, block).n_words - mbarrier.WORDS * i for i in range(N_BARRIERS, 0, -1))


def slot_barriers(fmt: Format, block: Block):
    """(begin_barriers, end_barriers), (tid, shared, first): a thread for each slot from word `first` on makes its barriers, or
    ends them. A barrier of the block goes between."""
    (there, done), slot_words = barrier_places(fmt, block), chunk_slot(fmt, block).n_words
    slots, n_threads, n_warps = block.slots, 32 * block.copying_warps, block.n_warps

    @device
    def begin_barriers(tid, shared, first):
        slot = i32(first + tid * slot_words)
        if tid < slots:
            mbarrier.begin(shared, slot + there, n_threads)
            mbarrier.begin(shared, slot + done, n_warps)

    @device
    def end_barriers(tid, shared, first):
        slot = i32(first + tid * slot_words)
        if tid < slots:
            mbarrier.end(shared, slot + there)
            mbarrier.end(shared, slot + done)
    return begin_barriers, end_barriers


def turn_barriers(block: Block, at: int):
    """(begin_turns, end_turns), (tid, shared): as of `slot_barriers`, of the two barriers for turns, from word `at` on. turn_at:
    (warp, chunk) -> `group_product.Turn` of a warpgroup: the second one's turn begins behind that of the first, and the first
    one's behind that of the second in the chunk before."""
    words, n_warps = mbarrier.WORDS, block.n_warps // 2

    @device
    def begin_turns(tid, shared):
        if tid < 2:
            mbarrier.begin(shared, at + tid * words, n_warps)

    @device
    def end_turns(tid, shared):
        if tid < 2:
            mbarrier.end(shared, at + tid * words)

    @device
    def turn_at(warp, chunk):
        second = warp >> 2
        return group_product.Turn(i32(at + second * words), i32(at + (1 - second) * words), i32((chunk ^ second ^ 1) & 1))
    return begin_turns, end_turns, turn_at


def slot_filler(fmt: Format, block: Block, part: Part):
    """(find, fill, fill_tile, fill_tokens). fill: (tid, shared, to, turn, chunk, operands, found): the block starts the copies of
    a chunk, if there is one, to a slot that it fills for the turn-th time, by its parity. At its own pace a warpgroup waits here
    until all are done with what the slot held; else a barrier of the block came before. fill_tile, fill_tokens: (tid, shared, to,
    chunk, operands, found), of warpgroups: first the weights, later the rest of a slot that nothing was in. find: as of
    `token_copier`.

    By parity nobody can wait for a phase but one: all must be done with what the slot held two fills ago. Where that was a chunk
    of the same team, its warps are, since they have filled the slot that is multiplied now. With one side `Exchanger.send` waits
    for all teams. With two the warps in one place may be so far ahead of those in another one, in other teams; so they first wait
    until the slot was filled for the turn before, by who had waited until all were done with what it held then. What it held
    before that was multiplied in a turn whose sums the warp has added, so this wait is not for a phase but one. Copiers fill each
    slot and wait for each phase (`mmq_copiers`)."""
    (find, copy_tokens), copy_tile = token_copier(fmt, block, part), tile_copier(fmt, block, part)
    warpgroups, paced, (there, done) = block.warpgroups, is_paced(fmt, block), barrier_places(fmt, block)
    far_ahead = not block.copiers and block.sides > 1 and 2 * block.slots % block.teams > 0

    @device
    def copy_chunk(tid, shared, to, chunk, operands, found):
        if not warpgroups:  # there are no registers to remember it
            tid = afresh(tid)
            afresh(operands.n_rows)
            find(tid, shared, afresh(operands.n_chunks), afresh(operands.n), found)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        copy_tile(lane, warp, shared, to, operands, chunk)
        copy_tokens(tid, warp, shared, to, operands, chunk, found)

    @device
    def fill(tid, shared, to, turn, chunk, operands, found):
        if far_ahead:
            mbarrier.wait(shared, to + there, turn ^ 1)
        if paced:
            mbarrier.wait(shared, to + done, turn ^ 1)
        if chunk < operands.n_chunks:
            copy_chunk(tid, shared, to, chunk, operands, found)
            if paced:
                mbarrier.arrive_behind_copies(shared, to + there)
        if not paced:
            copies_commit()

    @device
    def fill_tile(tid, shared, to, chunk, operands, found):
        if chunk < operands.n_chunks:
            copy_tile(i32(tid & 31), i32(tid >> 5), shared, to, operands, chunk)

    @device
    def fill_tokens(tid, shared, to, chunk, operands, found):
        if chunk < operands.n_chunks:
            copy_tokens(tid, i32(tid >> 5), shared, to, operands, chunk, found)
            if paced:
                mbarrier.arrive_behind_copies(shared, to + there)
        if not paced:
            copies_commit()
    return find, fill, fill_tile, fill_tokens
