"""Products of quantized weights with 1 to 16 tokens (docs/numerics.md, section 3): the weights are read once for all of them.

A block takes row tiles one after the other, of one matrix or of several (`TileWalk`); of each, a warp takes every n_warps-th
chunk. A warp has a ring of slots in shared memory to itself: while it multiplies the chunk of one (`tile_product`), the next ones
of its chunks, of this tile or of the next, are on their way, and one more as soon as the slot is free again. So no warp waits for
another but at the end of a round of chunks, where each leaves its chunks' sums; behind the barrier the owner of a (row, token)
adds them to its total in the order of the chunks, and rounds write two places by turns.

Weights are on their way before the kernel waits for the one before it in the stream. So blocks that leave room for those of the
next launch hide its start.
"""
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from numba import cuda, types

from ...quant.formats import CHUNK, FORMATS, Format, format_of
from ...quant.tile import ROWS, tile_bytes
from ..call import Call
from . import mbarrier
from .argmax import LEAST_RANK, best_of_warp, rank
from .launch import F32, I32, Kernel, N, RESERVED, U32, even_bytes, factory, need
from .operands import addresses, gated_of, qkv_of
from .ptx import (add, architecture, as_f32, as_u32, copies4, copies_commit, copies_wait_but, copy1, copy4, device, f32, fma,
                  i32, i64, kept, ldc, lds, least, nothing, redux_max, st, stage, sts, syncwarp, u32, wait_for_previous)
from .quantize import most_rows, planes
from .tile_product import (MOST_FEW, QUAD, QUAD_WORDS, STORE, Ending, Slot, chunk_words, factors, gate_and_store, row_there, slot,
                           swizzle, table_words, takes_sums, tile_product, zero_words)
from .wgmma import fence

MOST_TOKENS = MOST_FEW * QUAD  # of a block
# Warps of a block at most, by its tokens: what registers allow, 128 a thread for 16 warps, 255 for 8
MAX_WARPS = {1: 16, QUAD: 12, 2 * QUAD: 8, MOST_TOKENS: 8}
SUM_WORDS = 2112    # of a round's sums, if it has more chunks than warps: 64 chunks of one token
MOST_SLOTS = 3      # of a warp, for several tokens
MOST_IN_BULK = QUAD  # tokens of a block whose weights come by bulk copies; of more that gains nothing (docs/kernels-log.md)
BARRIER = 4         # last words of their slots: an mbarrier, on 16 bytes
LATENCY = 3           # chunks that a scheduler can issue while one waits
IN_FLIGHT = 33 << 10  # bytes on their way that keep the memory of a multiprocessor busy (docs/kernels-log.md)
SCHEDULERS = 4        # of a multiprocessor: warp w of all belongs to w % 4


def quads_of(n_tokens: int) -> int:
    return -(-n_tokens // QUAD)


# Of a chunk of a single token whose activations the block makes itself: they lie in a row of such slots, not in the ring.
ROW_SLOT = Slot(0, 2 * CHUNK // 4, 2 * CHUNK // 4 + 4, CHUNK)


def chunk_slot(fmt: Format, n_tokens: int) -> Slot:
    """Of one token: its two rows, its scale and, where they are wanted, the sums of q in the place of limbs."""
    if n_tokens > 1:
        return slot(fmt, 1, quads_of(n_tokens), False)
    act = tile_bytes(fmt) // 4
    d = act + 2 * CHUNK // 4
    return Slot(act, d, d + 4, d + 4 + 16 * takes_sums(fmt))


class Layout(NamedTuple):
    """Words of shared memory: codebooks, the warps' own, totals [token][row], one or two rounds of sums."""
    zeros: int       # of a single token: where zeros lie, up to the warps' own words
    warps: int       # where the warps' own words begin
    n_own: int       # of a warp: factors, then slots
    slot: int        # where its slots begin
    slot_words: int
    n_slots: int     # chunks on their way, or one that is multiplied and the others on their way


def layout(names: tuple[str, ...], n_tokens: int, made: bool = False, most_slots: int = MOST_SLOTS) -> Layout:
    """names: formats of the matrices. made: a single token whose activations the block makes. most_slots: of several tokens."""
    fmts = [format_of(name) for name in names]
    words = max(chunk_slot(fmt, n_tokens).act if made else chunk_slot(fmt, n_tokens).n_words for fmt in fmts)
    if n_tokens > 1:
        first, n_slots = max(factors(fmt, quads_of(n_tokens)).n_words for fmt in fmts), most_slots if words <= 3072 else 2
    else:  # so many that eight warps keep the memory busy
        first, n_slots = 0, min(4, 1 - -IN_FLIGHT // (8 * max(map(tile_bytes, fmts))))
    zeros, words = sum(map(table_words, dict.fromkeys(names))), words + BARRIER * (n_tokens <= MOST_IN_BULK)
    return Layout(zeros, zeros + max(map(zero_words, names)) * (n_tokens == 1), first + n_slots * words, first, words, n_slots)


def sum_words(n: int) -> int:
    """Words that a chunk of n tokens leaves: sums [token][row] and the activations' scales."""
    return n * (ROWS + 1)


def total_planes(names: tuple[str, ...]) -> int:
    """Of two matrices each has its own: the second one's owners may want what they have of the first."""
    return 2 if len(names) == 2 else 1


def shared_words(names: tuple[str, ...], n_tokens: int, n_warps: int, per_round: int, n: int, n_sides: int = 2,
                 row_words: int = 0, most_slots: int = MOST_SLOTS) -> int:
    """n_sides: 1 where a block has a single round. row_words: of the row whose activations it makes, last, on 16 bytes.
    most_slots: as of `layout`."""
    at = layout(names, n_tokens, row_words > 0, most_slots)
    words = at.warps + n_warps * at.n_own + total_planes(names) * n * ROWS + n_sides * per_round * sum_words(n)
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
    act_at, d_at, sums_at, rest, tile_copies = at.act, at.d, at.limbs, n_pieces % 32, copies4(n_pieces // 32)
    n_quads = quads_of(n_tokens)

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
        at = i32(row_of(shared, first, 0) * n_chunks + chunk)
        copy4(shared, i32(to + act_at + there), act, i32(source + at * 64))
        if lane == 0:
            copy1(shared, i32(to + d_at), act, i32(scales + at))
        if sums_too and lane < 4:
            copy4(shared, i32(to + sums_at + lane * 4), act, i32(sums + at * 16 + lane * 4))

    @device
    def copy_tokens(lane, own, shared, to, act, chunk, first, n_valid, n, n_chunks):
        _, scales, _, _ = planes(n, n_chunks)
        there, source = own
        source, row_words = i32(source + chunk * 64), i32(n_chunks * 64)
        for quad in range(n_quads):
            for t in range(QUAD):  # its row of a limb is 2 t + limb
                token = i32(4 * quad + t)
                if token < n_valid:
                    copy4(shared, i32(to + (act_at + quad * QUAD_WORDS + t * 128) + (there ^ (swizzle(2 * t) << 2))), act,
                          i32(source + row_of(shared, first, token) * row_words))
        if lane < n_valid:
            copy1(shared, i32(to + d_at + lane), act, i32(scales + row_of(shared, first, lane) * n_chunks + chunk))
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


# By the length of a tuple: (values, i) -> values[i]
PICK = {1: device(lambda values, i: values[0]),
        2: device(lambda values, i: values[1] if i else values[0]),
        3: device(lambda values, i: values[0] if i == 0 else values[1] if i == 1 else values[2])}


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


class TileWalk(NamedTuple):
    """The device functions by which a block goes from one row tile of a matrix to the next. operands: the kernel's own; place:
    (tile, matrix, group)."""
    first: object      # (operands, shared) -> the block's first place
    following: object  # (operands, place) -> the next one
    inside: object     # (operands, shared, place) -> whether there is such a place
    weight: object     # (operands, shared, place) -> words, row tile of them
    tokens: object     # (operands, shared, place, n) -> first and number of the rows of activations, as for `copier`
    leave: object      # (operands, shared, place, token, row of the tile, total, at): what becomes of a total; word `at` has the
                       # first matrix's
    prepare: object = None  # (operands, shared, tid, n_threads): of the block, before the first place
    early: bool = True      # whether all that `prepare` and `weight` read of the operands is there before the wait
    report: object = None   # (operands, shared, tid, n_threads): behind the wait, what `prepare` has found wrong


@device
def tiles_of(n_rows):
    return i32((n_rows + 31) >> 5)


def block_tokens(n_tokens):
    """`TileWalk.tokens` of a grid whose second dimension goes over tokens."""
    @device
    def tokens(operands, shared, place, n):
        first = i32(cuda.blockIdx.y * n_tokens)
        return first, i32(1) if n_tokens == 1 else least(i32(n_tokens), i32(n - first))
    return tokens


def by_turns(n_matrices: int, n_tokens: int, ending: Ending) -> TileWalk:
    """Of matrices of the same sizes a tile each. operands: (their words, biases, out, n_rows)."""
    pick, last_matrix, several, finish = PICK[n_matrices], n_matrices - 1, n_matrices > 1, ending.finish

    @device
    def following(operands, place):
        tile, matrix, group = place
        if several:
            matrix = i32(matrix + 1)
            if matrix <= last_matrix:
                return tile, matrix, group
        return i32(tile + cuda.gridDim.x), i32(0), group

    @device
    def leave(operands, shared, place, token, r, total, at):
        _, biases, out, n_rows = operands
        row = i32(place[0] * 32 + r)
        if row < n_rows and place[1] == last_matrix:
            i = i64(i32(cuda.blockIdx.y * n_tokens + token)) * n_rows + row
            finish(out, i, i32(0), row, n_rows, total, as_f32(lds(shared, at)), True, biases[0], biases[1])
    return TileWalk(first=device(lambda operands, shared: (i32(cuda.blockIdx.x), i32(0), i32(0))),
                    following=following,
                    inside=device(lambda operands, shared, place: place[0] < tiles_of(operands[3])),
                    weight=device(lambda operands, shared, place: (pick(operands[0], place[1]), place[0])),
                    tokens=block_tokens(n_tokens),
                    leave=leave)


def in_a_row(n_matrices: int, n_tokens: int, biased: bool) -> TileWalk:
    """The tiles of one matrix behind those of another. operands: (their words, outs, n_rows, biases)."""
    pick = PICK[n_matrices]

    @device
    def within(operands, tile, matrix):
        """The place of a tile that is counted from the matrix's first one, in the matrix that has it."""
        n = tiles_of(pick(operands[2], matrix))
        while matrix < n_matrices and tile >= n:
            tile, matrix = i32(tile - n), i32(matrix + 1)
            n = tiles_of(pick(operands[2], matrix))
        return tile, matrix, i32(0)

    @device
    def leave(operands, shared, place, token, r, total, at):
        n_rows, row = pick(operands[2], place[1]), i32(place[0] * 32 + r)
        if row < n_rows:
            if biased:
                total = add(total, ldc(pick(operands[3], place[1]), row_there(row, n_rows)))
            st(pick(operands[1], place[1]), i64(i32(cuda.blockIdx.y * n_tokens + token)) * n_rows + row, total)
    return TileWalk(first=device(lambda operands, shared: within(operands, i32(cuda.blockIdx.x), i32(0))),
                    following=device(lambda operands, place: within(operands, i32(place[0] + cuda.gridDim.x), place[1])),
                    inside=device(lambda operands, shared, place: place[1] < n_matrices),
                    weight=device(lambda operands, shared, place: (pick(operands[0], place[1]), place[0])),
                    tokens=block_tokens(n_tokens),
                    leave=leave)


def best_of_tiles(n_tokens: int) -> TileWalk:
    """Of one matrix, whose totals are not stored: the owners of a tile's rows with one token are the lanes of a warp, and leave
    the largest rank and the first row that has it. operands: (its words, the same, pairs of int32 [token][row tile], n_rows)."""
    @device
    def leave(operands, shared, place, token, r, total, at):
        parts, n_rows = operands[2], operands[3]
        row = i32(place[0] * 32 + r)
        best, first = best_of_warp(rank(total) if row < n_rows else LEAST_RANK, row)
        if r == 0:
            at = (i64(i32(cuda.blockIdx.y * n_tokens + token)) * tiles_of(n_rows) + place[0]) * 2
            st(parts, at, best)
            st(parts, at + 1, first)
    return by_turns(1, n_tokens, STORE)._replace(leave=leave)


def codebooks(products, tables):
    """(shared, tid, n_threads): a block writes the codebooks of `tile_product`s, or of `weights.Tables`, to where they begin."""
    def behind(before, n, entry, first):
        @device
        def write(shared, tid, n_threads):
            before(shared, tid, n_threads)
            p = tid
            while p < n:
                sts(shared, first + p, entry(p))
                p = i32(p + n_threads)
        return write
    write = nothing
    for product, first in zip(products, tables):
        if product.n_entries:
            write = behind(write, product.n_entries, product.entry, first)
    return write


def multiplier(product, at: Slot):
    """`TileProduct.multiply` of a chunk in a slot: (lane, shared, slot, that of its activations, scratch, acc)."""
    multiply, act_at, limbs_at = product.multiply, at.act, at.limbs

    @device
    def multiply_slot(lane, shared, now, tokens, scratch, acc):
        multiply(lane, shared, now, tokens + act_at, tokens + limbs_at, scratch, acc)
    return multiply_slot


# The stages of a product. shared: uint32, the block's dynamic shared memory, laid out as `Layout`. stride: tokens for which the
# sums of a chunk have places; those of chunk w of a round begin at word w * stride * 33 of the round's: f32 [token][row], then
# the activations' scales f32 [token].

def ring_copier(names: tuple[str, ...], n_tokens: int, walk: TileWalk):
    """(copy_tile, copy_tokens, following): what a warp asks for of a place and a chunk, into the slot at word `to`, and (place,
    chunk) of its next one. It waits for the copies itself, by groups, in bulk at the slot's barrier; no other warp touches its
    slots."""
    kinds, pick = tuple(dict.fromkeys(names)), PICK[len(names)]
    kind_of = tuple(i32(kinds.index(name)) for name in names)
    following_place, weight, tokens, known = walk.following, walk.weight, walk.tokens, walk.prepare is None
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

    @device
    def following(operands, place, chunk, warp, n_warps, n_chunks):
        chunk = i32(chunk + n_warps)
        if chunk >= n_chunks:
            chunk, place = warp, following_place(operands, place)
        return place, chunk
    return copy_tile, copy_tokens, following


def chunk_multiplier(multipliers, slots, n_tokens: int):
    """(kind, lane, shared, now, tokens_at, scratch, acc, sums, side, w, stride, n_valid): a warp multiplies the chunk in the slot
    at word `now`, its activations at tokens_at, and leaves its sums and the scales of n_valid tokens as chunk w of the round
    whose sums begin at word sums + side; its owners read them behind the round's barrier. kind: which of the formats;
    multipliers, slots: their `multiplier`s' functions and the `Slot`s of their activations; acc: f32 [4 quads], in registers."""
    multiply, d_places, pick_kind = choice(multipliers), tuple(i32(s.d) for s in slots), PICK[len(slots)]
    n_quads, single = quads_of(n_tokens), n_tokens == 1

    @stage
    def multiply_chunk(kind, lane, shared, now, tokens_at, scratch, acc, sums, side, w, stride, n_valid):
        multiply(kind, lane, shared, now, tokens_at, scratch, acc)
        at = i32(sums + side + w * stride * 33)
        if single:
            sts(shared, at + (lane >> 2) + ((lane & 3) << 3), as_u32(acc[0]))
        else:
            for quad in range(n_quads):
                token = i32(quad * 4 + (lane & 3))
                if token < n_valid:
                    for k in range(4):
                        sts(shared, at + token * 32 + 8 * k + (lane >> 2), as_u32(acc[4 * quad + k]))
        if lane < n_valid:
            sts(shared, at + stride * 32 + lane, lds(shared, tokens_at + pick_kind(d_places, kind) + lane))
    return multiply_chunk


@device
def eight_chunks(shared, at, d, stride):
    """acc and d of eight chunks of a round, whose sums are 33 words a token apart."""
    return (lds(shared, at), lds(shared, at + stride * 33), lds(shared, at + stride * 66), lds(shared, at + stride * 99),
            lds(shared, at + stride * 132), lds(shared, at + stride * 165), lds(shared, at + stride * 198),
            lds(shared, at + stride * 231),
            lds(shared, d), lds(shared, d + stride * 33), lds(shared, d + stride * 66), lds(shared, d + stride * 99),
            lds(shared, d + stride * 132), lds(shared, d + stride * 165), lds(shared, d + stride * 198),
            lds(shared, d + stride * 231))


@device
def add_eight(v, total):
    for i in range(8):
        total = fma(as_f32(v[i]), as_f32(v[i + 8]), total)
    return total


@device
def fold_chunks(shared, totals, sums, side, p, stride, before, n_chunks):
    """The total of (token, row) number p, f32: total = fma(acc, d, total) over the n_chunks chunks of a round in order, from
    that of the `before` chunks of earlier rounds, which its owner has in `totals` f32 [token][row], from +0 without any.
    sums + side: word at which the round's begin."""
    total, w = f32(0), i32(0)
    if before > 0:
        total = as_f32(lds(shared, totals + p))
    at = i32(sums + side + p)
    d = i32(sums + side + stride * 32 + (p >> 5))
    if n_chunks >= 8:  # the loads of eight chunks are under way together, while eight others are added
        here = eight_chunks(shared, at, d, stride)
        at, d, w = i32(at + stride * 264), i32(d + stride * 264), i32(8)
        while w + 8 <= n_chunks:
            behind = eight_chunks(shared, at, d, stride)
            total, here = add_eight(here, total), behind
            at, d, w = i32(at + stride * 264), i32(d + stride * 264), i32(w + 8)
        total = add_eight(here, total)
    while w < n_chunks:
        total = fma(as_f32(lds(shared, at)), as_f32(lds(shared, d)), total)
        at, d, w = i32(at + stride * 33), i32(d + stride * 33), i32(w + 1)
    sts(shared, totals + p, as_u32(total))
    return total


def products(names: tuple[str, ...], n_tokens: int, walk: TileWalk, make=None,  # noqa: PLR0915 (a kernel: its steps in order)
             most_slots: int = MOST_SLOTS):
    """The body of a kernel for matrices of the formats `names`: (operands, act, n_cols, n, per_round). operands: as the walk
    takes them; n: rows of activations. make: the function by which a block waits for the kernel before and makes the activations
    of its single token, for all its places: (act, shared, tid, n_threads, n_cols); act is then the tuple that it takes, the last
    of them the word of shared memory where it leaves them (`ROW_SLOT`). most_slots: as of `layout`."""
    kinds, pick, early, made = tuple(dict.fromkeys(names)), PICK[len(names)], walk.early, make is not None
    known = walk.prepare is None  # of the tokens of every place
    kind_of = tuple(i32(kinds.index(name)) for name in names)
    tables = [sum(map(table_words, kinds[:i])) for i in range(len(kinds))]
    tile_products = [tile_product(name, quads_of(n_tokens), table, n_tokens == 1) for name, table in zip(kinds, tables)]
    slots_of_kinds = [ROW_SLOT if made else chunk_slot(format_of(name), n_tokens) for name in kinds]
    copy_tile, copy_tokens, following = ring_copier(names, n_tokens, walk)
    multiply_chunk = chunk_multiplier(list(map(multiplier, tile_products, slots_of_kinds)), slots_of_kinds, n_tokens)
    first_place, following_place, inside, tokens, leave = walk.first, walk.following, walk.inside, walk.tokens, walk.leave
    write_codebooks, has_codebooks = codebooks(tile_products, tables), any(product.n_entries for product in tile_products)
    zeros, first_warp, own_words, first_slot, slot_words, slots = layout(names, n_tokens, made, most_slots)
    n_sums, n_zeros, wait, n_totals = 4 * quads_of(n_tokens), first_warp - zeros, copies_wait_but(slots - 1), total_planes(names)
    prepare, report, make = walk.prepare or nothing, walk.report or nothing, make or nothing
    in_bulk, barrier_at = bulk_of(n_tokens), slot_words - BARRIER

    @device
    def run(operands, act, n_cols, n, per_round):  # noqa: PLR0915 (a kernel: its steps in order)
        shared = cuda.shared.array(0, types.uint32)
        acc = cuda.local.array(n_sums, f32)
        tid, n_threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
        lane, warp, n_warps = kept(i32(tid & 31), tid), redux_max(i32(tid >> 5)), i32(n_threads >> 5)
        n_chunks = i32((n_cols + 255) >> 8)
        lane_own = lane_words(lane, n, n_chunks)
        own = i32(first_warp + warp * own_words)
        ring, scratch = i32(own + first_slot), i32(zeros if n_zeros else own)
        # Tokens for which a chunk's sums have places
        stride = tokens(operands, shared, first_place(operands, shared), n)[1] if known else i32(n_tokens)
        side_words = i32(per_round * stride * 33)
        totals = i32(first_warp + n_warps * own_words)
        sums = i32(totals + stride * (32 * n_totals))
        if in_bulk():
            if lane < slots:
                mbarrier.begin(shared, ring + lane * slot_words + barrier_at, i32(1))
            fence()
            syncwarp()  # the barriers are there
        # The copies run ahead by as many chunks as there are slots; those of weights begin before the kernel that makes the
        # activations has ended.
        if early:
            prepare(operands, shared, tid, n_threads)
            ahead, ahead_chunk, to = first_place(operands, shared), warp, ring
            for _ in range(slots):
                if inside(operands, shared, ahead):
                    copy_tile(operands, ahead, lane, shared, to, i32(to + barrier_at), ahead_chunk, n_chunks)
                if made:
                    copies_commit()
                ahead, ahead_chunk = following(operands, ahead, ahead_chunk, warp, n_warps, n_chunks)
                to = i32(to + slot_words)
        write_codebooks(shared, tid, n_threads)
        if n_zeros:
            p = tid
            while p < n_zeros:
                sts(shared, zeros + p, u32(0))
                p = i32(p + n_threads)
        if made:
            make(act, shared, tid, n_threads, n_cols)
        else:
            wait_for_previous()
            if not early:
                prepare(operands, shared, tid, n_threads)
            report(operands, shared, tid, n_threads)
            ahead, ahead_chunk, to = first_place(operands, shared), warp, ring
            for _ in range(slots):
                if inside(operands, shared, ahead):
                    if not early:
                        copy_tile(operands, ahead, lane, shared, to, i32(to + barrier_at), ahead_chunk, n_chunks)
                    copy_tokens(operands, ahead, lane, lane_own, shared, to, act, ahead_chunk, n, n_chunks)
                copies_commit()
                ahead, ahead_chunk = following(operands, ahead, ahead_chunk, warp, n_warps, n_chunks)
                to = i32(to + slot_words)
        if has_codebooks or n_zeros or made:
            cuda.syncthreads()  # they are there
        now, side, place, phase = ring, i32(0), first_place(operands, shared), i32(0)
        while inside(operands, shared, place):
            kind, n_valid = pick(kind_of, place[1]), tokens(operands, shared, place, n)[1]
            own_totals = i32(totals + place[1] * stride * 32) if n_totals > 1 else totals
            before = i32(0)  # chunks of earlier rounds
            while before < n_chunks:
                in_round = least(per_round, i32(n_chunks - before))
                w = warp
                while w < in_round:
                    if in_bulk():
                        mbarrier.wait(shared, now + barrier_at, phase)
                    wait()
                    syncwarp()  # the chunk is there, for all lanes
                    tokens_at = i32(act[-1] + ((before + w) << 8)) if made else now
                    multiply_chunk(kind, lane, shared, now, tokens_at, scratch, acc, sums, side, w, stride, n_valid)
                    syncwarp()  # all are done with the slot, which is filled anew
                    if inside(operands, shared, ahead):
                        copy_tile(operands, ahead, lane, shared, now, i32(now + barrier_at), ahead_chunk, n_chunks)
                        if not made:
                            copy_tokens(operands, ahead, lane, lane_own, shared, now, act, ahead_chunk, n, n_chunks)
                    copies_commit()
                    ahead, ahead_chunk = following(operands, ahead, ahead_chunk, warp, n_warps, n_chunks)
                    now = i32(now + slot_words)
                    if now == i32(ring + slots * slot_words):
                        now, phase = ring, i32(phase ^ 1)
                    w = i32(w + n_warps)
                cuda.syncthreads()  # the sums of the round are there; owners are done with the round before, whose place is next
                p = tid
                while p < i32(n_valid * 32):
                    total = fold_chunks(shared, own_totals, sums, side, p, stride, before, in_round)
                    if i32(before + in_round) == n_chunks:
                        leave(operands, shared, place, i32(p >> 5), i32(p & 31), total, i32(totals + p))
                    p = i32(p + n_threads)
                before, side = i32(before + in_round), i32(side_words - side)
            place = following_place(operands, place)
    return run


@factory([(fmt.name, n_tokens) for fmt in FORMATS.values() if fmt.is_quantized for n_tokens in MAX_WARPS])
def mmq_few_kernel(name, n_tokens):
    run = products((name,), n_tokens, by_turns(1, n_tokens, STORE))

    def kernel(words, act, out, n_rows, n_cols, n, per_round):
        # A block: row tiles from blockIdx.x by gridDim.x, tokens from blockIdx.y * n_tokens
        run(((words,), (out, out), out, n_rows), act, n_cols, n, per_round)
    return Kernel(kernel, (U32, U32, F32, N, N, N, N), 32 * MAX_WARPS[n_tokens])


@factory([("Q8_0", 1), ("Q4_K", 4), ("IQ2_S", 8), ("Q6_K", 16)])
def mmq_few_bias_kernel(name, n_tokens):
    run = products((name,), n_tokens, in_a_row(1, n_tokens, True))

    def kernel(words, act, bias, out, n_rows, n_cols, n, per_round):  # blocks as in mmq_few_kernel
        run(((words,), (out,), (n_rows,), (bias,)), act, n_cols, n, per_round)
    return Kernel(kernel, (U32, U32, F32, F32, N, N, N, N), 32 * MAX_WARPS[n_tokens])


@factory([("Q4_K", 1), ("Q8_0", 1), ("Q6_K", 1), ("Q4_1", 4), ("IQ2_S", 8), ("Q6_K", 16)])
def mmq_few_argmax_kernel(name, n_tokens):
    run = products((name,), n_tokens, best_of_tiles(n_tokens))

    def kernel(words, act, parts, n_rows, n_cols, n, per_round):  # blocks as in mmq_few_kernel
        run(((words,), (words,), parts, n_rows), act, n_cols, n, per_round)
    return Kernel(kernel, (U32, U32, I32, N, N, N, N), 32 * MAX_WARPS[n_tokens])


@factory([("silu", "Q4_K", "Q4_K", False, 1), ("gelu", "IQ2_S", "IQ3_S", True, 8), ("relu", "Q8_0", "Q6_K", True, 16)])
def mmq_few_glu_kernel(activation, gate, up, biased, n_tokens):
    run = products((gate, up), n_tokens, by_turns(2, n_tokens, gate_and_store(activation, biased)))

    def kernel(gate_words, up_words, gate_bias, up_bias, act, out, n_rows, n_cols, n, per_round):  # blocks as in mmq_few_kernel
        run(((gate_words, up_words), (gate_bias, up_bias), out, n_rows), act, n_cols, n, per_round)
    return Kernel(kernel, (U32, U32, F32, F32, U32, F32, N, N, N, N), 32 * MAX_WARPS[n_tokens])


@factory([("Q4_K", "Q4_K", "Q4_K", False, 1), ("Q4_K", "Q4_K", "Q6_K", True, 1), ("Q8_0", "Q8_0", "Q8_0", False, 8),
          ("IQ2_S", "IQ3_S", "Q4_K", True, 16)])
def mmq_few_qkv_kernel(q, k, v, biased, n_tokens):
    run = products((q, k, v), n_tokens, in_a_row(3, n_tokens, biased))

    def kernel(q_words, k_words, v_words, act, q_bias, k_bias, v_bias, q_out, k_out, v_out, q_rows, k_rows, v_rows, n_cols, n,
               per_round):
        # blocks as in mmq_few_kernel
        run(((q_words, k_words, v_words), (q_out, k_out, v_out), (q_rows, k_rows, v_rows), (q_bias, k_bias, v_bias)), act,
            n_cols, n, per_round)
    return Kernel(kernel, (U32,) * 4 + (F32,) * 6 + (N,) * 6, 32 * MAX_WARPS[n_tokens])


@dataclass(frozen=True)
class FewShape:
    """Launch of mmq_few: tokens of a block, its warps, the chunks of a round, blocks over row tiles and tokens, bytes of shared
    memory. A round is all chunks of a row or whole turns of the warps."""
    n_tokens: int
    n_warps: int
    per_round: int
    grid: tuple[int, int]
    n_bytes: int


def work(n_warps: int, n_blocks: int, n_chunks: int) -> int:
    """How long n_blocks of n_warps on a multiprocessor take for n_chunks each: turns of the warps, each as long as the busiest
    scheduler has warps, or as a warp waits for its own loads and sums, which is about as long as LATENCY chunks are issued
    (docs/kernels-log.md)."""
    return -(-n_chunks // n_warps) * max(LATENCY, -(-n_blocks * n_warps // SCHEDULERS))


def chunks_of_round(n_chunks: int, n_warps: int, n: int) -> int:
    """A whole row where the sums of n tokens are small, else whole turns of the warps."""
    if n_chunks * sum_words(n) <= SUM_WORDS:
        return n_chunks
    return n_warps * min(-(-n_chunks // n_warps), max(1, SUM_WORDS // (n_warps * sum_words(n))))


def shape_of(names: tuple[str, ...], n_rows: int, n_cols: int, n: int, n_tokens: int, n_warps: int, n_blocks: int,
             row_words: int = 0) -> FewShape:
    """The shape with so many warps a block. names: formats of the matrices; n_blocks: of the grid over row tiles at most;
    row_words: as of `shared_words`."""
    n_tiles, n_chunks, n_valid = -(-n_rows // ROWS), -(-n_cols // CHUNK), min(n, n_tokens)
    per_round = chunks_of_round(n_chunks, n_warps, n_valid)
    n_sides = 1 if per_round >= n_chunks and n_tiles <= n_blocks and len(names) == 1 else 2
    n_bytes = 4 * shared_words(names, n_tokens, n_warps, per_round, n_valid, n_sides, row_words)
    return FewShape(n_tokens, n_warps, per_round, (min(n_tiles, n_blocks), -(-n // n_tokens)), n_bytes)


@lru_cache(None)
def few_shape(names: tuple[str, ...], n_rows: int, n_cols: int, n: int, n_multiprocessors: int, shared_limit: int,
              row_words: int = 0) -> FewShape:
    """As many tokens as a block can take, as many warps as registers and shared memory hold, of those numbers the one that `work`
    finds the fastest. One block a multiprocessor for one token, else two where there are more row tiles than those. names:
    formats of the matrices; row_words: as of `shared_words`."""
    n_tokens = next((t for t in MAX_WARPS if t >= n), MOST_TOKENS)
    n_tiles, n_chunks, groups = -(-n_rows // ROWS), -(-n_cols // CHUNK), -(-n // n_tokens)
    resident = 1 if n_tokens == 1 or n_tiles * groups <= n_multiprocessors else 2
    shapes = [shape_of(names, n_rows, n_cols, n, n_tokens, n_warps, resident * n_multiprocessors, row_words)
              for n_warps in range(1, min(MAX_WARPS[n_tokens] // resident, n_chunks) + 1)]
    fitting = [shape for shape in shapes if resident * (shape.n_bytes + RESERVED) <= shared_limit + RESERVED] or shapes[:1]
    best = min(fitting, key=lambda shape: work(shape.n_warps, resident, n_chunks))
    if n_tokens == 1 and 2 * n_tiles > n_multiprocessors:
        best = evenly(best, n_multiprocessors, shared_limit)
    return best


def evenly(shape: FewShape, n_multiprocessors: int, shared_limit: int) -> FewShape:
    return replace(shape, n_bytes=even_bytes(shape.n_bytes, shape.grid[0] * shape.grid[1], n_multiprocessors, shared_limit))


def few_launch(call: Call, kernel: Kernel, args: tuple):
    """In the shape of the plan. args: of the kernel, in front of the chunks of a round."""
    shape, (n, n_cols) = call.plan, call.x.shape
    need(n <= most_rows(n_cols), "n", n, f"1..{most_rows(n_cols)}")
    return call.device.launch(kernel, shape.grid, 32 * shape.n_warps, (*args, shape.per_round), shape.n_bytes)


def mmq_few(call: Call):
    """out = w x, as of `mul_mat`, w quantized. plan: `FewShape`."""
    args = *addresses(call.w, call.x, call.out), *call.w.shape, call.x.shape[0]
    return few_launch(call, mmq_few_kernel(call.w.dtype, call.plan.n_tokens), args)


def mmq_few_bias(call: Call):
    """out = w x + bias, as of `mul_mat_bias`, w quantized. plan: `FewShape`."""
    args = *addresses(call.w, call.x, call.bias, call.out), *call.w.shape, call.x.shape[0]
    return few_launch(call, mmq_few_bias_kernel(call.w.dtype, call.plan.n_tokens), args)


def mmq_few_argmax(call: Call):
    """What `argmax_of_parts` takes of the products w x, w quantized. scratch: int32 [n, n_tiles, 2], n_tiles those of w. plan:
    `FewShape`."""
    args = *addresses(call.w, call.x, call.scratch), *call.w.shape, call.x.shape[0]
    return few_launch(call, mmq_few_argmax_kernel(call.w.dtype, call.plan.n_tokens), args)


def mmq_few_glu(call: Call):
    """out = act(gate x + its bias) * (up x + its bias), as of `mul_mat_glu`, gate and up quantized. plan: `FewShape`."""
    names, biased, matrices = gated_of(call)
    args = *matrices, *addresses(call.x, call.out), *call.gate.shape, call.x.shape[0]
    return few_launch(call, mmq_few_glu_kernel(call.act, *names, biased, call.plan.n_tokens), args)


def mmq_few_qkv(call: Call):
    """q_out, k_out, v_out = q x, k x, v x, and their biases, as of `mul_mat_qkv`, all quantized. plan: `FewShape`."""
    names, n_rows, biased, words, biases, outs = qkv_of(call)
    n, n_cols = call.x.shape
    return few_launch(call, mmq_few_qkv_kernel(*names, biased, call.plan.n_tokens),
                      (*words, call.x.data, *biases, *outs, *n_rows, n_cols, n))


def qkv_shape(names: tuple[str, ...], n_rows: tuple[int, ...], n_cols: int, n: int, n_multiprocessors: int, shared_limit: int,
              row_words: int = 0) -> FewShape:
    """`few_shape` of matrices of so many rows each, whose tiles are taken in a row."""
    all_rows = ROWS * sum(-(-rows // ROWS) for rows in n_rows)
    return few_shape(names, all_rows, n_cols, n, n_multiprocessors, shared_limit, row_words)
