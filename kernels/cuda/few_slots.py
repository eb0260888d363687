"""How the shared memory of a block of a product with 1 to 16 tokens (`few_product`) is laid out, and how chunks of weights and
activations come into its warps' slots."""
from typing import NamedTuple

from ...quant.formats import CHUNK, Format, format_of
from ...quant.tile import ROWS, tile_bytes
from . import mbarrier
from .ptx import afresh, architecture, before_blackwell, copies4, copy1, copy4, device, i32, kept, lds
from .quantize import planes
from .tile_form import QUAD, QUAD_WORDS, Slot, chunk_words, factors, is_late, slot, swizzle, table_words, takes_sums
from .tile_walk import PICK, TileWalk
from .token_product import token_table_words, zero_words

MOST_TOKENS = 16     # of a block
SLOT_WORDS = 3420    # of several tokens: a warp has two slots of up to so many words, or one
MOST_IN_BULK = QUAD  # tokens of a block whose weights come by bulk copies; of more that gains nothing (docs/kernels-log.md)
BARRIER = 4          # last words of their slots: an mbarrier, on 16 bytes
BOX_BARRIERS = 2 * mbarrier.WORDS  # of a box: its sums are there; they are added
IN_FLIGHT = 33 << 10  # bytes on their way that keep the memory of a multiprocessor busy (docs/kernels-log.md)


def quads_of(n_tokens: int) -> int:
    return -(-n_tokens // QUAD)


# Of a chunk of a single token whose activations the block makes itself: they lie in a row of such slots, not in the ring.
ROW_SLOT = Slot(0, 2 * CHUNK // 4, 2 * CHUNK // 4 + 4, CHUNK)


def chunk_slot(fmt: Format, n_tokens: int) -> Slot:
    """Of several tokens as `slot` has it, with limbs of sums where minima are late. Of one token: its two rows, its scale and,
    where they are wanted, the sums of q in the place of limbs."""
    if n_tokens > 1:
        return slot(fmt, 1, quads_of(n_tokens), is_late(fmt, quads_of(n_tokens)))
    act = tile_bytes(fmt) // 4
    d = act + 2 * CHUNK // 4
    return Slot(act, d, d + 4, d + 4 + 16 * takes_sums(fmt))


def table_words_of(n_tokens: int):
    """(name) -> words of the codebooks that a product with so many tokens reads."""
    return token_table_words if n_tokens == 1 else table_words


class Layout(NamedTuple):
    """Words of shared memory. A single token: codebooks, zeros, the warps' own, totals [row], one side of boxes or two. Several:
    codebooks, the warps' own, the boxes' barriers, totals [token][row], boxes."""
    zeros: int       # of a single token: where zeros lie, up to the warps' own words
    warps: int       # where the warps' own words begin
    n_own: int       # of a warp: factors, then slots
    slot: int        # where its slots begin
    slot_words: int
    n_slots: int     # chunks on their way, or one that is multiplied and the others on their way


def layout(names: tuple[str, ...], n_tokens: int, made: bool = False) -> Layout:
    """names: formats of the matrices. made: a single token whose activations the block makes."""
    fmts = [format_of(name) for name in names]
    words = max(chunk_slot(fmt, n_tokens).act if made else chunk_slot(fmt, n_tokens).n_words for fmt in fmts)
    if n_tokens > 1:
        first, n_slots = max(factors(fmt, quads_of(n_tokens)).n_words for fmt in fmts), 2 if words <= SLOT_WORDS else 1
    else:  # so many that eight warps keep the memory busy
        first, n_slots = 0, min(4, 1 - -IN_FLIGHT // (8 * max(map(tile_bytes, fmts))))
    zeros, words = sum(map(table_words_of(n_tokens), dict.fromkeys(names))), words + BARRIER * (n_tokens <= MOST_IN_BULK)
    return Layout(zeros, zeros + max(map(zero_words, names)) * (n_tokens == 1), first + n_slots * words, first, words, n_slots)


def box_words(n_tokens: int, n: int) -> int:
    """Of n tokens that are there: sums [token][row] and the activations' scales; in blocks of several on 16 bytes."""
    return n * ROWS + (n if n_tokens == 1 else n + 3 & -4)


def total_planes(names: tuple[str, ...]) -> int:
    """Of two matrices each has its own: the second one's owners may want what they have of the first."""
    return 2 if len(names) == 2 else 1


def shared_words(names: tuple[str, ...], n_tokens: int, n_warps: int, n_boxes: int, n: int, n_sides: int = 2,
                 row_words: int = 0) -> int:
    """n_warps: that multiply. n: tokens that are there. n_sides: of a single token, 1 where a block has a single round.
    row_words: of the row whose activations it makes, last, on 16 bytes."""
    at = layout(names, n_tokens, row_words > 0)
    boxes = n_boxes * (n_sides if n_tokens == 1 else 1) * (box_words(n_tokens, n) + BOX_BARRIERS * (n_tokens > 1))
    words = at.warps + n_warps * at.n_own + total_planes(names) * n * ROWS + boxes
    return (words + 3 & -4) + row_words


@device
def lane_words(lane, n, n_chunks):
    """(of a slot's activations, of all activations): the words at which the lane's 16 bytes of each chunk of a row lie."""
    limb, piece = i32(lane >> 4), i32(lane & 15)
    return (kept(i32(limb * 64 + ((piece ^ (limb << 1)) << 2)), lane),
            kept(i32(limb * planes(n, n_chunks)[0] + piece * 4), lane))


def copier(fmt: Format, n_tokens: int, listed: bool):
    """A warp starts the copies of a chunk: (lane, shared, to, words, row_tile, chunk, n_chunks) of the weight's, (lane, own,
    shared, to, act, chunk, first, n_valid, n, n_chunks) of the activations'. Their rows are the n_valid from `first` or, listed,
    those in the words of shared memory from there. own: `lane_words`."""
    at, n_pieces, sums_too = chunk_slot(fmt, n_tokens), tile_bytes(fmt) // 16, n_tokens == 1 and takes_sums(fmt)
    act_at, d_at, limbs_at, rest, tile_copies = at.act, at.d, at.limbs, n_pieces % 32, copies4(n_pieces // 32)
    n_quads = quads_of(n_tokens)
    n_limbs = -(-4 * n_tokens // 32) if is_late(fmt, n_quads) else 0  # pieces of limbs that a lane copies

    @device
    def copy_tile(lane, shared, to, words, row_tile, chunk, n_chunks):
        tile = chunk_words(row_tile, chunk, n_chunks, 4 * n_pieces) + lane * 4
        tile_copies(shared, to + lane * 4, words, tile)
        if rest and lane < rest:
            copy4(shared, to + lane * 4 + (n_pieces - rest) * 4, words, tile + (n_pieces - rest) * 4)

    @device
    def row_of(shared, first, token):
        return i32(lds(shared, first + token)) if listed else i32(first + token)

    @device
    def copy_token(lane, own, shared, to, act, chunk, first, n_valid, n, n_chunks):
        _, scales, sums, _ = planes(n, n_chunks)
        there, source = own
        row = row_of(shared, first, 0)
        at = i32(row * n_chunks + chunk)
        copy4(shared, i32(to + act_at + there), act, i32(source + at * 64))
        if lane == 0:
            copy1(shared, i32(to + d_at), act, i32(scales + chunk * n + row))
        if sums_too and lane < 4:
            copy4(shared, i32(to + limbs_at + lane * 4), act, i32(sums + at * 16 + lane * 4))

    @device
    def copy_tokens(lane, own, shared, to, act, chunk, first, n_valid, n, n_chunks):
        if not before_blackwell():
            n = afresh(n)  # else it has a register of its own, and others are spilled
        _, scales, _, limbs = planes(n, n_chunks)
        there, source = own
        source, row_words = i32(source + chunk * 64), i32(n_chunks * 64)
        for quad in range(n_quads):
            for t in range(QUAD):  # its row of a limb is 2 t + limb
                token = i32(4 * quad + t)
                if token < n_valid:
                    copy4(shared, i32(to + (act_at + quad * QUAD_WORDS + t * 128) + (there ^ (swizzle(2 * t) << 2))), act,
                          i32(source + row_of(shared, first, token) * row_words))
        if lane < n_valid:
            copy1(shared, i32(to + d_at + lane), act, i32(scales + chunk * n + row_of(shared, first, lane)))
        for i in range(n_limbs):
            p = i32(afresh(lane) + 32 * i)  # else it keeps registers, as n above
            if p < 4 * n_valid:  # of each token four pieces
                beside = i32(limbs + chunk * n * 16 + (p & 3) * 4)
                copy4(shared, i32(to + limbs_at + p * 4), act, i32(beside + row_of(shared, first, i32(p >> 2)) * 16))
    return copy_tile, copy_token if n_tokens == 1 else copy_tokens


def bulk_of(n_tokens: int):
    """(): whether a chunk's weights come by one bulk copy. Else, as before 9.0, lanes copy 16 bytes each, which all go through
    the queue of loads and stores."""
    few = n_tokens <= MOST_IN_BULK

    @device
    def in_bulk():
        return few and architecture() >= 900
    return in_bulk


def bringer(fmt: Format, n_tokens: int):
    """(lane, shared, to, barrier, words, row_tile, chunk, n_chunks): a warp starts the copy of a chunk of the weight. In bulk the
    phase under way at word `barrier` ends with it."""
    n_pieces, in_bulk = tile_bytes(fmt) // 16, bulk_of(n_tokens)
    copy_pieces, _ = copier(fmt, n_tokens, False)

    @device
    def bring(lane, shared, to, barrier, words, row_tile, chunk, n_chunks):
        if in_bulk():
            if lane == 0:
                mbarrier.expect(shared, barrier, i32(16 * n_pieces))
                at = chunk_words(row_tile, chunk, n_chunks, 4 * n_pieces)
                mbarrier.bring(shared, to, words, at, i32(4 * n_pieces), barrier)
        else:
            copy_pieces(lane, shared, to, words, row_tile, chunk, n_chunks)
    return bring


def choice(functions):
    """(i, ...): function i of the arguments behind i."""
    first, others = functions[0], choice(functions[1:]) if functions[1:] else functions[0]

    @device
    def one(i, *args):
        first(*args)

    @device
    def some(i, *args):
        if i == 0:
            first(*args)
        else:
            others(i - 1, *args)
    return some if functions[1:] else one


def ring_copier(names: tuple[str, ...], n_tokens: int, walk: TileWalk):
    """(copy_tile, copy_tokens): what a warp asks for of a place of the walk and a chunk, into the slot at word `to`. It waits for
    the copies itself, by groups, in bulk at the slot's barrier; no other warp touches its slots."""
    kinds, pick = tuple(dict.fromkeys(names)), PICK[len(names)]
    kind_of = tuple(i32(kinds.index(name)) for name in names)
    weight, tokens, known = walk.weight, walk.tokens, walk.prepare is None
    copy_weights = choice([bringer(format_of(name), n_tokens) for name in kinds])
    copy_activations = choice([copier(format_of(name), n_tokens, not known)[1] for name in kinds])

    @device
    def copy_tile(operands, place, lane, shared, to, barrier, chunk, n_chunks):
        words, row_tile = weight(operands, shared, place)
        copy_weights(pick(kind_of, place[1]), lane, shared, to, barrier, words, row_tile, chunk, n_chunks)

    @device
    def copy_tokens(operands, place, lane, own, shared, to, act, chunk, n, n_chunks):
        first, n_valid = tokens(operands, shared, place, n)
        copy_activations(pick(kind_of, place[1]), lane, own, shared, to, act, chunk, first, n_valid, n, n_chunks)
    return copy_tile, copy_tokens
