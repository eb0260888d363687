"""The body of a product of quantized weights with 1 to 16 tokens, whose kernels are in `mmq_few`, `mmq_few_id` and
`add_rms_norm_mul_mat`.

A block takes row tiles one after the other (`TileWalk`); its warps take their chunks by turns. A warp has a ring of slots in
shared memory to itself (`few_slots`): while it multiplies the chunk of one (`tile_product`), the next ones of its chunks, of this
tile or of others, are on their way, and one more as soon as the slot is free again. It leaves the sums of a chunk in a *box*,
words of shared memory, and they are added to the totals in the order of the chunks.

A single token: of each tile a warp takes every n_warps-th chunk. As many chunks as there are boxes, mostly a whole row, are a
round; behind a barrier of the block the owner of a row adds their sums, and rounds write two sides of boxes by turns.

Several tokens: of all chunks of its tiles in a row a warp takes every n_warps-th one, and one more warp, the last one, adds. A
box has two barriers, which say that its sums are there and that they are added; so a warp that multiplies waits for no other one
unless it is ahead by as many chunks as there are boxes. For a single token such a warp takes longer than the barriers that
it saves (docs/kernels-log.md).

Weights are on their way before the kernel waits for the one before it in the stream. So blocks that leave room for those of the
next launch hide its start.
"""
from typing import NamedTuple

from numba import cuda, types

from ...quant.formats import format_of
from . import mbarrier
from .few_slots import (BARRIER, BOX_BARRIERS, ROW_SLOT, bulk_of, choice, chunk_slot, lane_words, layout, quads_of, ring_copier,
                        table_words_of, total_planes)
from .ptx import (architecture, as_f32, as_u32, copies_commit, copies_wait_but, device, f32, fma, i32, kept, lds, lds4, least,
                  nothing, redux_max, stage, sts, sts4, syncwarp, u32, wait_for_previous)
from .tile_form import Slot
from .tile_product import tile_product
from .tile_walk import PICK, TileWalk
from .token_product import token_product
from .wgmma import fence

TOGETHER = 4         # chunks whose sums are added together where there are so many


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
# sums of a chunk have room; a box has f32 [token][row], then the activations' scales f32 [token].

def sum_writer(slots, n_tokens: int):
    """(kind, lane, shared, acc, at, tokens_at, stride, n_valid): a warp leaves the sums of a chunk in the box at word `at`, and
    the scales of n_valid tokens, whose activations begin at tokens_at. kind: which of the formats; slots: their `Slot`s; acc: f32
    [4 quads], in registers."""
    d_places, pick_kind, n_quads, single = tuple(i32(s.d) for s in slots), PICK[len(slots)], quads_of(n_tokens), n_tokens == 1

    @device
    def write_sums(kind, lane, shared, acc, at, tokens_at, stride, n_valid):
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
    return write_sums


class Stages(NamedTuple):
    """What both bodies are made of."""
    kind_of: tuple       # of each matrix, the number of its format
    multiply: object     # (kind, ...) of `multiplier`
    write_sums: object   # of `sum_writer`
    copy_tile: object    # of `ring_copier`
    copy_tokens: object
    write_codebooks: object  # (shared, tid, n_threads)
    has_codebooks: bool


def stages(names: tuple[str, ...], n_tokens: int, walk: TileWalk, made: bool = False) -> Stages:
    """made: a single token whose activations the block makes."""
    kinds = tuple(dict.fromkeys(names))
    tables = [sum(map(table_words_of(n_tokens), kinds[:i])) for i in range(len(kinds))]
    tile_products = [token_product(name, table) if n_tokens == 1 else tile_product(name, quads_of(n_tokens), table)
                     for name, table in zip(kinds, tables)]
    slots = [ROW_SLOT if made else chunk_slot(format_of(name), n_tokens) for name in kinds]
    multiply = choice(list(map(multiplier, tile_products, slots)))
    return Stages(tuple(i32(kinds.index(name)) for name in names), multiply, sum_writer(slots, n_tokens),
                  *ring_copier(names, n_tokens, walk), codebooks(tile_products, tables),
                  any(product.n_entries for product in tile_products))


# A single token

@device
def eight_chunks(shared, at, d):
    """acc and d of eight chunks of a round, whose boxes are 33 words."""
    return (lds(shared, at), lds(shared, at + 33), lds(shared, at + 66), lds(shared, at + 99),
            lds(shared, at + 132), lds(shared, at + 165), lds(shared, at + 198), lds(shared, at + 231),
            lds(shared, d), lds(shared, d + 33), lds(shared, d + 66), lds(shared, d + 99),
            lds(shared, d + 132), lds(shared, d + 165), lds(shared, d + 198), lds(shared, d + 231))


@device
def add_eight(v, total):
    for i in range(8):
        total = fma(as_f32(v[i]), as_f32(v[i + 8]), total)
    return total


@device
def add_round(shared, totals, at, row, before, n_chunks):
    """The total of a row, f32: total = fma(acc, d, total) over the n_chunks chunks of a round in order, from that of the `before`
    chunks of earlier rounds, which its owner has in `totals` f32 [row], from +0 without any. at: word at which the round's boxes
    begin."""
    total, w = f32(0), i32(0)
    if before > 0:
        total = as_f32(lds(shared, totals + row))
    at, d = i32(at + row), i32(at + 32)
    if n_chunks >= 8:  # the loads of eight chunks are under way together, while eight others are added
        here = eight_chunks(shared, at, d)
        at, d, w = i32(at + 264), i32(d + 264), i32(8)
        while w + 8 <= n_chunks:
            behind = eight_chunks(shared, at, d)
            total, here = add_eight(here, total), behind
            at, d, w = i32(at + 264), i32(d + 264), i32(w + 8)
        total = add_eight(here, total)
    while w < n_chunks:
        total = fma(as_f32(lds(shared, at)), as_f32(lds(shared, d)), total)
        at, d, w = i32(at + 33), i32(d + 33), i32(w + 1)
    sts(shared, totals + row, as_u32(total))
    return total


def token_multiplier(own: Stages):
    """(kind, lane, shared, now, tokens_at, scratch, acc, at): a warp multiplies the chunk in the slot at word `now`, its
    activations at tokens_at, and leaves its sums in the box at word `at`. acc: f32 [4], in registers."""
    multiply, write_sums = own.multiply, own.write_sums

    @stage
    def multiply_chunk(kind, lane, shared, now, tokens_at, scratch, acc, at):
        multiply(kind, lane, shared, now, tokens_at, scratch, acc)
        write_sums(kind, lane, shared, acc, at, tokens_at, i32(1), i32(1))
    return multiply_chunk


def product_of_token(names: tuple[str, ...], walk: TileWalk, make=None):  # noqa: PLR0915 (a kernel: its steps in order)
    """The body of a kernel for a single token: (operands, act, n_cols, n, n_boxes), n_boxes the chunks of a round, as of
    `products`. make: the function by which a block waits for the kernel before and makes the activations, once for all its tiles:
    (act, shared, tid, n_threads, n_cols); act is then the tuple that it takes, the last of them the word of shared memory where
    it leaves them (`ROW_SLOT`)."""
    pick, early, made = PICK[len(names)], walk.early, make is not None
    own_stages = stages(names, 1, walk, made)
    kind_of, _, _, copy_tile, copy_tokens, write_codebooks, has_codebooks = own_stages
    first_place, following_place, inside, leave = walk.first, walk.following, walk.inside, walk.leave
    zeros, first_warp, own_words, first_slot, slot_words, slots = layout(names, 1, made)
    multiply_chunk, n_zeros, n_totals = token_multiplier(own_stages), first_warp - zeros, total_planes(names)
    in_bulk, barrier_at, wait = bulk_of(1), slot_words - BARRIER, copies_wait_but(slots - 1)
    prepare, report, make = walk.prepare or nothing, walk.report or nothing, make or nothing

    @device
    def following(operands, place, chunk, warp, n_warps, n_chunks):
        chunk = i32(chunk + n_warps)
        if chunk >= n_chunks:
            chunk, place = warp, following_place(operands, place)
        return place, chunk

    @device
    def run(operands, act, n_cols, n, n_boxes):  # noqa: PLR0915 (a kernel: its steps in order)
        shared = cuda.shared.array(0, types.uint32)
        acc = cuda.local.array(4, f32)
        tid, n_threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
        lane, warp, n_warps = kept(i32(tid & 31), tid), redux_max(i32(tid >> 5)), i32(n_threads >> 5)
        n_chunks = i32((n_cols + 255) >> 8)
        lane_own = lane_words(lane, n, n_chunks)
        own = i32(first_warp + warp * own_words)
        ring, scratch = i32(own + first_slot), i32(zeros if n_zeros else own)
        side_words, totals = i32(n_boxes * 33), i32(first_warp + n_warps * own_words)
        sums = i32(totals + 32 * n_totals)
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
            kind, own_totals = pick(kind_of, place[1]), i32(totals + place[1] * 32) if n_totals > 1 else totals
            before = i32(0)  # chunks of earlier rounds
            while before < n_chunks:
                in_round = least(n_boxes, i32(n_chunks - before))
                w = warp
                while w < in_round:
                    if in_bulk():
                        mbarrier.wait(shared, now + barrier_at, phase)
                    wait()
                    syncwarp()  # the chunk is there, for all lanes
                    tokens_at = i32(act[-1] + ((before + w) << 8)) if made else now
                    multiply_chunk(kind, lane, shared, now, tokens_at, scratch, acc, i32(sums + side + w * 33))
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
                cuda.syncthreads()  # the sums of the round are there; owners are done with the round before, whose side is next
                if tid < 32:
                    total = add_round(shared, own_totals, i32(sums + side), tid, before, in_round)
                    if i32(before + in_round) == n_chunks:
                        leave(operands, shared, place, i32(0), tid, total, i32(totals + tid))
                before, side = i32(before + in_round), i32(side_words - side)
            place = following_place(operands, place)
    return run


# Several tokens

@device
def box_of(boxes, sums, n_boxes, stride, index):
    """Where the block's chunk number `index` leaves its sums: the word of the box's two barriers, the word at which the box
    begins, and the parity of its turn. boxes, sums: words at which the barriers and the boxes begin. n_boxes: a power of two. It
    is no less than the warps: one that leaves chunk i left i - n_warps before, and so has seen that chunk i - n_warps - n_boxes
    and all before it are added, since they are let go in their order; so a barrier is never two turns behind. And no less than
    TOGETHER, which are let go together."""
    i = i32(index & (n_boxes - 1))
    return (i32(boxes + i * BOX_BARRIERS), i32(sums + i * i32(stride * 32 + ((stride + 3) & -4))),
            i32(1 if index & n_boxes else 0))


@device
def wait_at(shared, barrier, parity):
    """`mbarrier.wait` on any architecture."""
    if architecture() >= 900:
        mbarrier.wait(shared, barrier, parity)
    else:
        mbarrier.wait_by_tests(shared, barrier, parity)


def tokens_multiplier(own: Stages):
    """(kind, lane, shared, now, scratch, acc, barrier, at, parity, stride, n_valid): a warp multiplies the chunk in the slot at
    word `now`, waits until its box is free and leaves its sums there. barrier, at, parity: as of `box_of`; acc: f32
    [4 quads], in registers."""
    multiply, write_sums = own.multiply, own.write_sums

    @stage
    def multiply_chunk(kind, lane, shared, now, scratch, acc, barrier, at, parity, stride, n_valid):
        multiply(kind, lane, shared, now, now, scratch, acc)
        wait_at(shared, barrier + mbarrier.WORDS, i32(parity ^ 1))
        write_sums(kind, lane, shared, acc, at, now, stride, n_valid)
        mbarrier.leave(lane, shared, barrier)
    return multiply_chunk


# The totals of a row tile in registers of a warp: lane l has rows 4 (l % 8) .. + 3 of tokens l / 8, + 4, ..; so four values are
# loaded at once.

@device
def token_of(lane, quad):
    return i32(4 * quad + (lane >> 3))


def quad_loader(n_quads: int):
    """(lane, shared, at, stride, n_valid) -> of each quad acc of the lane's totals and d of their token, from the box at word
    `at`; for a token that is not there those of the last one."""
    @device
    def load_quad(lane, shared, at, stride, n_valid):
        token = least(token_of(lane, n_quads - 1), i32(n_valid - 1))
        return (*lds4(shared, at + token * 32 + ((lane & 7) << 2)), lds(shared, at + stride * 32 + token))
    if n_quads == 1:
        return load_quad
    before = quad_loader(n_quads - 1)
    return device(lambda lane, shared, at, stride, n_valid: before(lane, shared, at, stride, n_valid)
                  + load_quad(lane, shared, at, stride, n_valid))


def tile_adder(n_tokens: int, walk: TileWalk):
    """(operands, shared, place, lane, n_valid, boxes, sums, n_boxes, stride, index, n_chunks, own_totals, totals): a warp adds
    the sums of a row tile's chunks: total = fma(acc, d, total) from +0, in the order of the chunks. index: chunks of the block
    before; own_totals, totals: words at which those of the matrix and of the first one lie, f32 [token][row]."""
    n_quads, leave = quads_of(n_tokens), walk.leave
    n_each, load = 4 * n_quads, quad_loader(n_quads)

    @device
    def come(lane, shared, boxes, sums, n_boxes, stride, index, n_valid):
        """The values of a chunk, when they are there."""
        barrier, at, parity = box_of(boxes, sums, n_boxes, stride, index)
        wait_at(shared, barrier, parity)
        return load(lane, shared, at, stride, n_valid)

    @device
    def add_values(v, total):
        for i in range(n_each):
            total[i] = fma(as_f32(v[5 * (i // 4) + i % 4]), as_f32(v[5 * (i // 4) + 4]), total[i])

    def leaver(n):
        """(lane, shared, boxes, n_boxes, index): the boxes of n chunks are free, as whoever waits sees them in their order."""
        @device
        def let_go(lane, shared, boxes, n_boxes, index):
            syncwarp()  # all lanes have read
            if lane == 0:
                for i in range(n):
                    mbarrier.arrive(shared, boxes + i32((index + i) & (n_boxes - 1)) * BOX_BARRIERS + mbarrier.WORDS)
        return let_go
    let_one_go, let_all_go = leaver(1), leaver(TOGETHER)

    @device
    def write_totals(lane, shared, own_totals, total, n_valid):
        for quad in range(n_quads):
            token = token_of(lane, quad)
            if token < n_valid:
                sts4(shared, own_totals + token * 32 + ((lane & 7) << 2), as_u32(total[4 * quad]), as_u32(total[4 * quad + 1]),
                     as_u32(total[4 * quad + 2]), as_u32(total[4 * quad + 3]))
        syncwarp()  # they are there

    @stage
    def add_tile(operands, shared, place, lane, n_valid, boxes, sums, n_boxes, stride, index, n_chunks, own_totals, totals):
        total = cuda.local.array(n_each, f32)
        for i in range(n_each):
            total[i] = f32(0)
        end = i32(index + n_chunks)
        while index + TOGETHER <= end:  # their loads are under way together
            a = come(lane, shared, boxes, sums, n_boxes, stride, index, n_valid)
            b = come(lane, shared, boxes, sums, n_boxes, stride, i32(index + 1), n_valid)
            c = come(lane, shared, boxes, sums, n_boxes, stride, i32(index + 2), n_valid)
            d = come(lane, shared, boxes, sums, n_boxes, stride, i32(index + 3), n_valid)
            add_values(a, total)  # no loop, which would choose among them
            add_values(b, total)
            add_values(c, total)
            add_values(d, total)
            let_all_go(lane, shared, boxes, n_boxes, index)
            index = i32(index + TOGETHER)
        while index < end:
            add_values(come(lane, shared, boxes, sums, n_boxes, stride, index, n_valid), total)
            let_one_go(lane, shared, boxes, n_boxes, index)
            index = i32(index + 1)
        write_totals(lane, shared, own_totals, total, n_valid)
        token = i32(0)
        while token < n_valid:
            i = i32(token * 32 + lane)
            leave(operands, shared, place, token, lane, as_f32(lds(shared, own_totals + i)), i32(totals + i))
            token = i32(token + 1)
    return add_tile


def product_of_tokens(names: tuple[str, ...], n_tokens: int, walk: TileWalk):  # noqa: PLR0915 (a kernel: its steps in order)
    """The body of a kernel for several tokens: (operands, act, n_cols, n, n_boxes), as of `products`."""
    pick, early, known = PICK[len(names)], walk.early, walk.prepare is None  # known: the tokens of every place
    own_stages = stages(names, n_tokens, walk)
    kind_of, _, _, copy_tile, copy_tokens, write_codebooks, _ = own_stages
    first_place, following_place, inside, tokens = walk.first, walk.following, walk.inside, walk.tokens
    multiply_chunk, add_tile = tokens_multiplier(own_stages), tile_adder(n_tokens, walk)
    _, first_warp, own_words, first_slot, slot_words, slots = layout(names, n_tokens)
    n_sums, wait, n_totals = 4 * quads_of(n_tokens), copies_wait_but(slots - 1), total_planes(names)
    prepare, report = walk.prepare or nothing, walk.report or nothing
    in_bulk, barrier_at = bulk_of(n_tokens), slot_words - BARRIER

    @device
    def further(operands, place, chunk, n, n_chunks):
        """The n-th chunk behind that one."""
        chunk = i32(chunk + n)
        while chunk >= n_chunks:
            chunk, place = i32(chunk - n_chunks), following_place(operands, place)
        return place, chunk

    @device
    def run(operands, act, n_cols, n, n_boxes):  # noqa: PLR0915 (a kernel: its steps in order)
        shared = cuda.shared.array(0, types.uint32)
        acc = cuda.local.array(n_sums, f32)
        tid, n_threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
        lane, warp, n_warps = kept(i32(tid & 31), tid), redux_max(i32(tid >> 5)), i32((n_threads >> 5) - 1)
        n_chunks, multiplies, first = i32((n_cols + 255) >> 8), warp < n_warps, first_place(operands, shared)
        lane_own = lane_words(lane, n, n_chunks)
        scratch = i32(first_warp + warp * own_words)
        ring = i32(scratch + first_slot)
        stride = tokens(operands, shared, first, n)[1] if known else i32(n_tokens)
        boxes = i32(first_warp + n_warps * own_words)
        totals = i32(boxes + n_boxes * BOX_BARRIERS)
        sums = i32(totals + stride * (32 * n_totals))
        if tid < n_boxes:
            mbarrier.begin(shared, boxes + tid * BOX_BARRIERS, i32(1))
            mbarrier.begin(shared, boxes + tid * BOX_BARRIERS + mbarrier.WORDS, i32(1))
        if in_bulk():
            if multiplies and lane < slots:
                mbarrier.begin(shared, ring + lane * slot_words + barrier_at, i32(1))
            fence()
            syncwarp()  # the barriers are there
        # The copies run ahead by as many chunks as there are slots; those of weights begin before the kernel that makes the
        # activations has ended.
        if early:
            prepare(operands, shared, tid, n_threads)
            (ahead, ahead_chunk), to = further(operands, first, i32(0), warp, n_chunks), ring
            for _ in range(slots):
                if multiplies and inside(operands, shared, ahead):
                    copy_tile(operands, ahead, lane, shared, to, i32(to + barrier_at), ahead_chunk, n_chunks)
                ahead, ahead_chunk = further(operands, ahead, ahead_chunk, n_warps, n_chunks)
                to = i32(to + slot_words)
        write_codebooks(shared, tid, n_threads)
        wait_for_previous()
        if not early:
            prepare(operands, shared, tid, n_threads)
        report(operands, shared, tid, n_threads)
        (ahead, ahead_chunk), to = further(operands, first, i32(0), warp, n_chunks), ring
        for _ in range(slots):
            if multiplies and inside(operands, shared, ahead):
                if not early:
                    copy_tile(operands, ahead, lane, shared, to, i32(to + barrier_at), ahead_chunk, n_chunks)
                copy_tokens(operands, ahead, lane, lane_own, shared, to, act, ahead_chunk, n, n_chunks)
            copies_commit()
            ahead, ahead_chunk = further(operands, ahead, ahead_chunk, n_warps, n_chunks)
            to = i32(to + slot_words)
        cuda.syncthreads()  # codebooks are there, and the boxes' barriers
        if multiplies:
            (place, chunk), index = further(operands, first, i32(0), warp, n_chunks), warp
            now, phase = ring, i32(0)
            while inside(operands, shared, place):
                if in_bulk():
                    mbarrier.wait(shared, now + barrier_at, phase)
                wait()
                syncwarp()  # the chunk is there, for all lanes
                barrier, at, parity = box_of(boxes, sums, n_boxes, stride, index)
                multiply_chunk(pick(kind_of, place[1]), lane, shared, now, scratch, acc, barrier, at, parity, stride,
                               tokens(operands, shared, place, n)[1])
                if inside(operands, shared, ahead):  # all lanes are done with the slot
                    copy_tile(operands, ahead, lane, shared, now, i32(now + barrier_at), ahead_chunk, n_chunks)
                    copy_tokens(operands, ahead, lane, lane_own, shared, now, act, ahead_chunk, n, n_chunks)
                copies_commit()
                ahead, ahead_chunk = further(operands, ahead, ahead_chunk, n_warps, n_chunks)
                place, chunk = further(operands, place, chunk, n_warps, n_chunks)
                now, index = i32(now + slot_words), i32(index + n_warps)
                if now == i32(ring + slots * slot_words):
                    now, phase = ring, i32(phase ^ 1)
        else:
            place, index = first, i32(0)
            while inside(operands, shared, place):
                own_totals = i32(totals + place[1] * stride * 32) if n_totals > 1 else totals
                add_tile(operands, shared, place, lane, tokens(operands, shared, place, n)[1], boxes, sums, n_boxes, stride,
                         index, n_chunks, own_totals, totals)
                place, index = following_place(operands, place), i32(index + n_chunks)
    return run


def products(names: tuple[str, ...], n_tokens: int, walk: TileWalk):
    """The body of a kernel for matrices of the formats `names`: (operands, act, n_cols, n, n_boxes). operands: as the walk takes
    them; n: rows of activations; n_boxes: as of `mmq_few.FewShape`."""
    return product_of_token(names, walk) if n_tokens == 1 else product_of_tokens(names, n_tokens, walk)
