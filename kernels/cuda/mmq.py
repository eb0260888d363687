"""MMQ: products of quantized weights with many tokens on int8 tensor cores (docs/numerics.md, section 3).

A block takes `row_tiles` tiles of 32 rows and `groups` groups of `quads` quads of tokens, a warp for each tile and group (`tile_product`), or on Hopper two
warps for each tile (`group_product`). It goes through the chunks of 256 columns: while one lies in a slot of shared memory and is multiplied, the
weight tiles and activations of the next one are on their way to the other. One barrier a chunk; a warp's totals stay in registers. Two warpgroups
of formats with float scales go each at its own pace instead (`mbarrier`): a chunk is taken when its copies are there, a slot filled when all are done with it.
"""
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import NamedTuple

from numba import cuda, types

from ...quant.formats import CHUNK, FORMATS, Format, format_of
from ...quant.tile import ROWS, tile_bytes
from . import group_product, mbarrier, wgmma
from .dispatch import ITEMS, dispatch_table
from .launch import F32, HOPPER, I32, Kernel, N, U32, check, factory
from .ptx import afresh, as_f32, as_u32, copies4, copies_commit, copies_wait_but, copy1, copy4, device, f32, fma, i32, i64, ld, ld4, lds, lds4, sts, syncwarp
from .quantize import plane_words
from .tile_product import QUAD, QUAD_WORDS, STORE, Ending, Form, Slot, factors, form, gate_and_store, is_late, slot, swizzle, table_words, tile_product


@dataclass(frozen=True)
class Block:
    """A block's row tiles, groups of tokens, and quads of a group: 32 row_tiles rows x 4 groups quads tokens, a warp for each tile and group.
    With warpgroups, for compute capability 9.0 alone: two warps for each tile, quads by fours. slots: chunks in shared memory."""
    row_tiles: int
    groups: int
    quads: int
    warpgroups: bool = False
    slots: int = 2

    @property
    def n_warps(self) -> int:
        return self.row_tiles * (2 if self.warpgroups else self.groups)

    @property
    def prepared_quads(self) -> int:
        """Quads for which a warp prepares scales and minima."""
        return group_product.MOST_QUADS if self.warpgroups else self.quads

    @property
    def rows(self) -> int:
        return ROWS * self.row_tiles

    @property
    def tokens(self) -> int:
        return QUAD * self.groups * self.quads

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens}{' warpgroups' if self.warpgroups else ''}"


N_BARRIERS = 2  # of a slot, its last words: the chunk is there; all are done with it
BLOCKS = Block(4, 2, 16), Block(4, 2, 8), Block(2, 2, 8), Block(2, 1, 8), Block(1, 1, 8)
HOPPER_BLOCKS = tuple(Block(row_tiles, 1, group_product.MOST_QUADS, True, 3) for row_tiles in (4, 2))


def most_quads(fmt: Format) -> int:
    """Quads of a warp at most: a sum of sixteen takes two registers where a float scale follows it, more where integers wait for the end of a chunk."""
    return 16 if form(fmt) == Form(32, False, False, False) and not fmt.has_min else 8


def is_paced(fmt: Format, block: Block) -> bool:
    """Whether two warpgroups go each at its own pace, by barriers of the slots. With integer scales that is no faster, gate and up are slower."""
    return block.warpgroups and block.row_tiles > 2 and not form(fmt).integer


def chunk_slot(fmt: Format, block: Block) -> Slot:
    at = slot(fmt, block.row_tiles, block.groups * block.quads, is_late(fmt, block.prepared_quads))
    if not block.warpgroups:
        return at
    n_act, n_words = at.d - at.act, at.n_words + N_BARRIERS * mbarrier.WORDS * is_paced(fmt, block)  # first, so that atoms are aligned
    return Slot(0, at.d, at.limbs, -(-n_words // wgmma.ATOM_WORDS) * wgmma.ATOM_WORDS, n_act)


def scratch_words(fmt: Format, block: Block) -> int:
    return factors(fmt, block.prepared_quads).n_words


def first_slot(fmt: Format, block: Block) -> int:
    """Word of shared memory at which the slots begin, behind codebooks and the factors of each warp."""
    words = table_words(fmt.name) + block.n_warps * scratch_words(fmt, block)
    return -(-words // wgmma.ATOM_WORDS) * wgmma.ATOM_WORDS if block.warpgroups else words


def shared_bytes(names: tuple[str, ...], block: Block) -> int:
    """Of one matrix after the other."""
    fmts = [format_of(name) for name in names]
    return 4 * max(first_slot(fmt, block) + block.slots * chunk_slot(fmt, block).n_words for fmt in fmts)


@lru_cache(None)
def block_shape(names: tuple[str, ...], shared_limit: int) -> Block:
    """The largest block without warpgroups that registers and shared memory hold. names: formats of the matrices."""
    quads = min(most_quads(format_of(name)) for name in names)
    return next(block for block in BLOCKS if block.quads <= quads and shared_bytes(names, block) <= shared_limit)


def warpgroups_pay(fmt: Format) -> bool:
    """Not where a float minimum or a scale for each 16 columns follows the sums: these take as long as the products (docs/kernels-log.md)."""
    return form(fmt).integer or not fmt.has_min and form(fmt).step == 32


@lru_cache(None)
def hopper_blocks(names: tuple[str, ...], shared_limit: int) -> tuple[Block, ...]:
    """The blocks of warpgroups that shared memory holds, if they pay for all the formats."""
    fitting = tuple(block for block in HOPPER_BLOCKS if shared_bytes(names, block) <= shared_limit)
    return fitting if all(warpgroups_pay(format_of(name)) for name in names) else ()


class Sources(NamedTuple):
    """How many words of the activation buffer a thread remembers: where its pieces of quads begin, scales, limbs, and the places of the first in a slot."""
    quads: int
    scales: int
    limbs: int
    places: int = 4


def sources(fmt: Format, block: Block) -> Sources:
    n_threads = 32 * block.n_warps
    return Sources(block.tokens // block.n_warps, -(-block.tokens // n_threads), -(-3 * block.tokens // n_threads) if is_late(fmt, block.prepared_quads) else 0)


class Part(NamedTuple):
    """Device functions that tell which part of a product a block computes. Its tokens are named by numbers that count up from `sources` and `targets`."""
    row_block: object  # (shared) -> which of the blocks of rows
    matrix: object     # (shared) -> which of the matrices behind each other in memory
    sources: object    # (shared) -> where the tokens' numbers begin
    source: object     # (shared, number, last) -> row of the activations, whose last one is `last`; beyond the last token that of the last
    targets: object    # (shared) -> where the numbers of what is stored begin
    target: object     # (shared, number) -> row of the result, beyond the last token no less than their number
    n_tokens: object = None  # (shared) -> how many tokens there are; without it activations are copied for as many as a block takes


def dense(block: Block) -> Part:
    """Rows from blockIdx.x * rows and tokens from blockIdx.y * tokens of one matrix."""
    tokens = block.tokens

    @device
    def row_block(shared):
        return cuda.blockIdx.x

    @device
    def matrix(shared):
        return i32(0)

    @device
    def first(shared):
        return i32(cuda.blockIdx.y * tokens)

    @device
    def source(shared, number, last):
        return i32(min(number, last))

    @device
    def target(shared, number):
        return number
    return Part(row_block, matrix, first, source, first, target)


def grouped(block: Block, at: int) -> Part:
    """Of an item of work (`taker`), which lies in shared memory from word `at` on: row block, matrix, tokens, then their sources, then their targets."""
    first_source, first_target = at + 3, at + 3 + block.tokens

    @device
    def row_block(shared):
        return i32(lds(shared, at))

    @device
    def matrix(shared):
        return i32(lds(shared, at + 1))

    @device
    def sources_from(shared):
        return i32(first_source)

    @device
    def source(shared, number, last):
        return i32(lds(shared, min(number, first_target - 1)))  # a block may have more threads than tokens

    @device
    def targets_from(shared):
        return i32(first_target)

    @device
    def target(shared, number):
        return i32(lds(shared, number))

    @device
    def n_tokens(shared):
        return i32(lds(shared, at + 2))
    return Part(row_block, matrix, sources_from, source, targets_from, target, n_tokens)


def item_words(block: Block) -> int:
    return 3 + 2 * block.tokens


def taker(block: Block, at: int, heads: bool):
    """(count, take) of items of work: an expert and some of its rows, by the table of `dispatch`, or a head and some tokens.

    count: (table, n_matrices, n_pairs). take: (tid, shared, table, item, row_block, order, n_matrices, n_pairs, n_used, x_rows) writes one as `grouped`
    reads it. x_rows: rows of the activations for each token, of which rank j takes row j % x_rows."""
    tokens, n_threads = block.tokens, 32 * block.n_warps

    @device
    def count(table, n_matrices, n_pairs):
        return i32((n_pairs // n_matrices + tokens - 1) // tokens * n_matrices) if heads else ld(table, 0)

    @device
    def take(tid, shared, table, item, row_block, order, n_matrices, n_pairs, n_used, x_rows):
        if heads:
            matrix, first = i32(item % n_matrices), i32(item // n_matrices * tokens)
            n = i32(min(tokens, n_pairs // n_matrices - first))
        else:
            matrix, first, n, _ = ld4(table, ITEMS + 4 * item)
        if tid == 0:
            sts(shared, at, row_block)
            sts(shared, at + 1, matrix)
            sts(shared, at + 2, n)
        i = tid
        while i < tokens:
            row = i32(first + min(i, n - 1))
            if heads:
                pair = i32(row * n_matrices + matrix)
                source = pair
            else:
                pair = ld(table, order + row)
                token = i32(pair // n_used)
                source = i32(token * x_rows + i32(pair - token * n_used) % x_rows)
            sts(shared, at + 3 + i, source)
            sts(shared, at + 3 + tokens + i, pair if i < n else n_pairs)
            i = i32(i + n_threads)
    return count, take


def copier(fmt: Format, block: Block, part: Part):
    """(find, copy) of the copies of a chunk, of which each warp starts a part of its tile and some tokens. Rows and tokens beyond the last repeat it.

    find: (tid, shared, n_rows, n_chunks, n, places, offsets, own): what does not change with the chunk. copy: (tid, shared, to, words, act, chunk, n_rows,
    n_chunks, places, offsets, own)."""
    row_block, matrix, sources_from, source_of, _, _, tokens_of = part
    partial = tokens_of is not None
    row_tiles, n_warps, tokens, warpgroups = block.row_tiles, block.n_warps, block.tokens, block.warpgroups
    groups, n_quads, n_threads = n_warps // row_tiles, tokens // QUAD, 32 * n_warps
    at, n_pieces, tile_words = chunk_slot(fmt, block), tile_bytes(fmt) // 16, tile_bytes(fmt) // 4
    tiles_at, act_at, d_at, limbs_at = at.tiles, at.act, at.d, at.limbs
    wholes, rest = n_pieces // 32, n_pieces % 32
    half = -(-wholes // groups)
    first_copies, other_copies, quads_of_warp, limbs_of_thread = copies4(half), copies4(wholes - half), n_quads // n_warps, sources(fmt, block).limbs
    scales_of_thread = sources(fmt, block).scales
    quad_words, half_words = (wgmma.ATOM_WORDS, n_quads * wgmma.ATOM_WORDS) if warpgroups else (QUAD_WORDS, 0)
    assert groups in (1, 2) and n_quads % n_warps == 0, block

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
    def find(tid, shared, n_rows, n_chunks, n, places, offsets, own):
        lane, warp = i32(tid & 31), i32(tid >> 5)
        lo, scales, _, limbs = plane_words(n, n_chunks)
        first, last, row_words = sources_from(shared), i32(n - 1), i32(n_chunks * 64)
        limb, piece = lane >> 4, lane & 15
        plane = i32((lo if limb else i64(0)) + piece * 4)
        for c in range(4):
            places[c] = i32(act_at + warp * quad_words + in_quad(2 * c + limb, piece))
            for i in range(quads_of_warp):
                offsets[c * quads_of_warp + i] = i32(plane + source_of(shared, i32(first + 4 * (warp + i * n_warps) + c), last) * row_words)
        for i in range(scales_of_thread):
            own[i] = i32(scales + source_of(shared, i32(first + tid + i * n_threads), last) * n_chunks)
        for i in range(limbs_of_thread):
            p = i32(tid + i * n_threads)
            token = i32(p // 3)
            own[scales_of_thread + i] = i32(limbs + source_of(shared, i32(first + token), last) * n_chunks * 12 + (p - 3 * token) * 4)

    @device
    def copy(tid, shared, to, words, act, chunk, n_rows, n_chunks, places, offsets, own):
        lane, warp = i32(tid & 31), i32(tid >> 5)
        tile, group = i32(warp % row_tiles), i32(warp // row_tiles)
        row_tile = i64(min(row_block(shared) * row_tiles + tile, (n_rows - 1) >> 5)) + matrix(shared) * ((n_rows + 31) >> 5)
        source = (row_tile * n_chunks + chunk) * tile_words + lane * 4
        place = to + tiles_at + tile * tile_words + lane * 4
        if group == 0:
            first_copies(shared, place, words, source)
        elif wholes > half:
            other_copies(shared, place + half * 128, words, source + half * 128)
        if rest:
            if group == groups - 1 and lane < rest:
                copy4(shared, place + wholes * 128, words, source + wholes * 128)
        end = i32(tokens)
        if partial:
            end = tokens_of(shared)
        for c in range(4):
            for i in range(quads_of_warp):
                if partial:  # what is multiplied in the places of other tokens is not looked at
                    if i32(4 * (warp + i * n_warps) + c) >= end:
                        continue
                copy4(shared, to + places[c] + i * n_warps * quad_words, act, i64(i32(offsets[c * quads_of_warp + i] + chunk * 64)))
        for i in range(scales_of_thread):
            token = i32(tid + i * n_threads)
            if token < tokens:
                copy1(shared, to + d_at + scale_at(token), act, i64(i32(own[i] + chunk)))
        for i in range(limbs_of_thread):
            if tid + i * n_threads < 3 * tokens:
                copy4(shared, to + limbs_at + (tid + i * n_threads) * 4, act, i64(i32(own[scales_of_thread + i] + chunk * 12)))
    return find, copy


TURN = 8  # sums of a lane that are finished together, so that the loads of what waits for them are under way together


def products(name: str, block: Block, ending: Ending, part: Part):
    """The body of a kernel: the products with one matrix."""
    waiting_at, finish = ending
    fmt, warpgroups = format_of(name), block.warpgroups
    multiply, n_entries, entry = (group_product.group_product if warpgroups else tile_product)(name, block.quads)
    (find, start_copies), (n_offsets, n_scales, n_limbs, n_places) = copier(fmt, block, part), sources(fmt, block)
    n_own = n_scales + n_limbs
    at, tile_words, own_words, first_warp, first = chunk_slot(fmt, block), tile_bytes(fmt) // 4, scratch_words(fmt, block), table_words(name), first_slot(fmt, block)
    act_at, d_at, limbs_at, slot_words, tiles_at = at
    row_tiles, quads, n_threads, n_warps, rows = block.row_tiles, block.quads, 32 * block.n_warps, block.n_warps, block.rows
    slots, last_slot, wait = block.slots, first + (block.slots - 1) * slot_words, copies_wait_but(block.slots - 2)
    n_rows_lane = 2 if warpgroups else 4  # of a lane, eight rows apart
    row_block, matrix, _, _, targets_from, target_of, _ = part
    paced = is_paced(fmt, block)
    there, done = (slot_words - mbarrier.WORDS * i for i in range(N_BARRIERS, 0, -1))  # barriers of a slot
    log_rows, n_sums, n_products = n_rows_lane.bit_length() - 1, n_rows_lane * quads, 4 * quads

    @device
    def place_of(warp):
        """(tile, half of it, group of tokens) of a warp."""
        return (warp >> 1, warp & 1, i32(0)) if warpgroups else (i32(warp % row_tiles), i32(0), i32(warp // row_tiles))

    @device
    def target_at(shared, o, first_row, first_token):
        """(row, token) of sum o of a lane."""
        return i32(first_row + 8 * (o & (n_rows_lane - 1))), target_of(shared, i32(first_token + (o >> log_rows) * 4))

    @device
    def copy(tid, shared, to, words, act, chunk, n_rows, n_chunks, n, places, offsets, own):
        if not warpgroups:  # there are no registers to remember it
            tid = afresh(tid)
            find(tid, shared, afresh(n_rows), afresh(n_chunks), afresh(n), places, offsets, own)
        start_copies(tid, shared, to, words, act, chunk, n_rows, n_chunks, places, offsets, own)

    @device
    def fill(tid, shared, to, turn, words, act, chunk, n_rows, n_chunks, n, places, offsets, own):
        """Copies a chunk, if there is one, to a slot that is filled for the turn-th time, by its parity."""
        if paced:
            mbarrier.wait(shared, to + done, turn ^ 1)
        if chunk < n_chunks:
            copy(tid, shared, to, words, act, chunk, n_rows, n_chunks, n, places, offsets, own)
            if paced:
                mbarrier.arrive_behind_copies(shared, to + there)
        if not paced:
            copies_commit()

    @device
    def begin_barriers(tid, shared):
        slot = i32(first + tid * slot_words)
        if tid < slots:
            mbarrier.begin(shared, slot + there, n_threads)
            mbarrier.begin(shared, slot + done, n_warps)

    @device
    def end_barriers(tid, shared):
        slot = i32(first + tid * slot_words)
        if tid < slots:
            mbarrier.end(shared, slot + there)
            mbarrier.end(shared, slot + done)

    @device
    def run(words, bias, other_bias, act, out, last, n_rows, n_cols, n, n_out):
        shared = cuda.shared.array(0, types.uint32)
        total, acc = cuda.local.array(n_sums, f32), cuda.local.array(n_sums, f32)
        tid, n_chunks = i32(cuda.threadIdx.x), i32((n_cols + 255) >> 8)
        if n_entries:
            p = tid
            while p < n_entries:
                sts(shared, p, entry(p))
                p = i32(p + n_threads)
        for o in range(n_sums):
            total[o] = f32(0)
        d, e = cuda.local.array(n_products, i32), cuda.local.array(n_products, i32)
        if warpgroups:
            for o in range(n_products):
                d[o], e[o] = i32(0), i32(0)
        places, offsets, own = cuda.local.array(n_places, i32), cuda.local.array(n_offsets, i32), cuda.local.array(n_own, i32)
        if warpgroups:
            find(tid, shared, n_rows, n_chunks, n, places, offsets, own)
        chunk, copied, now, free, turn, free_turn = i32(0), i32(0), i32(first), i32(first), i32(0), i32(0)
        if paced:
            begin_barriers(tid, shared)
            cuda.syncthreads()
        while copied < slots - 1:  # the copies run ahead by so many chunks
            fill(tid, shared, free, free_turn, words, act, copied, n_rows, n_chunks, n, places, offsets, own)
            copied, free = i32(copied + 1), i32(free + slot_words)
        later = warpgroups and tid >= 128  # fills slots behind its products, so that two warps of a scheduler are not at the same work
        while chunk < n_chunks:
            if paced:
                mbarrier.wait(shared, now + there, turn)
            else:
                wait()
            if warpgroups:
                wgmma.fence()
            if not paced:
                cuda.syncthreads()  # the chunk is there; all are done with the one before, whose slot is filled anew
            if not later:
                fill(tid, shared, free, free_turn, words, act, copied, n_rows, n_chunks, n, places, offsets, own)
            if not warpgroups:
                tid = afresh(tid)
            lane, warp = i32(tid & 31), i32(tid >> 5)
            tile, half, group = place_of(warp)
            first_quad, scratch = i32(group * quads), i32(first_warp + warp * own_words)
            tile_at, q_at, sums_at = i32(now + tiles_at + tile * tile_words), i32(now + act_at), i32(now + limbs_at + first_quad * 48)
            if warpgroups:
                multiply(lane, half, shared, tile_at, q_at, sums_at, scratch, acc, d, e)
                for i in range(quads // 4):
                    d0, d1, d2, d3 = lds4(shared, now + d_at + (lane & 3) * quads + 4 * i)
                    for k in range(n_rows_lane):
                        o = 4 * n_rows_lane * i + k
                        total[o], total[o + 2] = fma(acc[o], as_f32(d0), total[o]), fma(acc[o + 2], as_f32(d1), total[o + 2])
                        total[o + 4], total[o + 6] = fma(acc[o + 4], as_f32(d2), total[o + 4]), fma(acc[o + 6], as_f32(d3), total[o + 6])
            else:
                multiply(lane, shared, tile_at, i32(q_at + first_quad * QUAD_WORDS), sums_at, scratch, acc)
                place = i32(now + d_at + first_quad * 4 + (lane & 3))
                for quad in range(quads):
                    scale = as_f32(lds(shared, place + 4 * quad))
                    for k in range(n_rows_lane):
                        o = n_rows_lane * quad + k
                        total[o] = fma(acc[o], scale, total[o])
            if paced:
                syncwarp()
                if lane == 0:
                    mbarrier.arrive(shared, now + done)
            if later:
                fill(tid, shared, free, free_turn, words, act, copied, n_rows, n_chunks, n, places, offsets, own)
            if free == last_slot:
                free_turn = i32(free_turn ^ 1)
            if now == last_slot:
                turn = i32(turn ^ 1)
            copied, free = i32(copied + 1), i32(free + slot_words if free < last_slot else first)
            chunk, now = i32(chunk + 1), i32(now + slot_words if now < last_slot else first)
        # The totals go through a slot that is free, so that what becomes of them is a loop, with registers for few.
        lane, warp = i32(tid & 31), i32(tid >> 5)
        tile, half, group = place_of(warp)
        kept = i32(now + warp * n_sums * 32 + lane)
        for o in range(n_sums):
            sts(shared, kept + 32 * o, as_u32(total[o]))
        first_row = i32(row_block(shared) * rows + tile * 32 + half * 16 + (lane >> 2))
        first_token = i32(targets_from(shared) + group * quads * 4 + (lane & 3))
        o, end, waiting = i32(0), afresh(n_sums), cuda.local.array(TURN, f32)
        while o < end:
            for j in range(TURN):
                row, token = target_at(shared, i32(o + j), first_row, first_token)
                waiting[j] = f32(0)
                if row < n_rows and token < n_out:
                    waiting[j] = waiting_at(out, i64(token) * n_rows + row, last)
            for j in range(TURN):
                row, token = target_at(shared, i32(o + j), first_row, first_token)
                if row < n_rows and token < n_out:
                    total_of = as_f32(lds(shared, kept + 32 * (o + j)))
                    finish(out, i64(token) * n_rows + row, i32(matrix(shared) * n_rows), row, n_rows, total_of, waiting[j], last, bias, other_bias)
            o = i32(o + TURN)
        if paced:
            cuda.syncthreads()  # none waits any more
            end_barriers(tid, shared)
    return run


def both_products(names: tuple[str, ...], block: Block, ending: Ending, part: Part):
    """The body of a kernel for one matrix, or for two one after the other: (words, other words, biases, act, out, n_rows, n_cols, n, n_out)."""
    first, last, n_products = products(names[0], block, ending, part), products(names[-1], block, ending, part), len(names)
    looped = len(set(names)) == 1 and (n_products == 1 or not form(format_of(names[0])).integer)

    @device
    def run(words, other_words, bias, other_bias, act, out, n_rows, n_cols, n, n_out):
        if looped:  # the same code for both: in a second copy for float scales ptxas would let no product of a warpgroup run beside other work
            left = i32(n_products)
            while left > 0:
                left = i32(left - 1)
                last(words if left > 0 else other_words, bias, other_bias, act, out, left == 0, n_rows, n_cols, n, n_out)
                if left > 0:
                    cuda.syncthreads()  # all are done with the last chunk
        else:
            first(words, bias, other_bias, act, out, False, n_rows, n_cols, n, n_out)
            cuda.syncthreads()
            last(other_words, bias, other_bias, act, out, True, n_rows, n_cols, n, n_out)
    return run


SMALL_TESTED = [(name, *astuple(block)) for name, block in zip(("Q4_0", "Q5_1", "Q4_K"), BLOCKS[2:])]  # blocks that every GPU can hold, first and last
QUANTIZED = [fmt for fmt in FORMATS.values() if fmt.is_quantized]


@factory(SMALL_TESTED[:1] + [(fmt.name, *astuple(block)) for fmt in QUANTIZED for block in (Block(4, 2, most_quads(fmt)), HOPPER_BLOCKS[0])] + SMALL_TESTED[1:])
def mmq_kernel(name, *block):
    block = Block(*block)
    run = products(name, block, STORE, dense(block))

    def kernel(words, act, out, n_rows, n_cols, n):  # block: rows from blockIdx.x * rows, tokens from blockIdx.y * tokens
        run(words, out, out, act, out, True, n_rows, n_cols, n, n)
    return Kernel(kernel, (U32, U32, F32, N, N, N), 32 * block.n_warps, arch=HOPPER if block.warpgroups else None)


@factory([("relu", "IQ4_XS", "Q5_0", False, *astuple(BLOCKS[2])), ("silu", "Q8_0", "Q8_0", False, *astuple(BLOCKS[0])), ("gelu", "Q6_K", "Q4_K", True, *astuple(BLOCKS[1])),
          ("silu", "Q8_0", "Q6_K", True, *astuple(HOPPER_BLOCKS[0])), ("silu", "Q4_K", "Q4_K", False, *astuple(HOPPER_BLOCKS[1])), ("silu", "Q8_0", "Q8_0", False, *astuple(HOPPER_BLOCKS[0])),
          ("silu", "Q4_1", "Q4_1", True, *astuple(BLOCKS[3]))])
def mmq_glu_kernel(activation, gate, up, biased, *block):
    block = Block(*block)
    run = both_products((gate, up), block, gate_and_store(activation, biased), dense(block))

    def kernel(gate_words, up_words, gate_bias, up_bias, act, out, n_rows, n_cols, n):  # blocks as in mmq_kernel
        run(gate_words, up_words, gate_bias, up_bias, act, out, n_rows, n_cols, n, n)
    return Kernel(kernel, (U32, U32, F32, F32, U32, F32, N, N, N), 32 * block.n_warps, arch=HOPPER if block.warpgroups else None)


# Matrices of experts, or of heads: blocks take items of work one after the other

def resident(block: Block) -> int:
    """Blocks of a multiprocessor whose registers it holds: 255 a thread, less for few tokens of warpgroups."""
    return {4: 4, 8: 3}.get(block.quads, 2) * 4 // block.n_warps if block.warpgroups else max(1, 8 // block.n_warps)


def grouped_bytes(names: tuple[str, ...], block: Block) -> int:
    """Bytes of shared memory: an item lies behind all else."""
    return shared_bytes(names, block) + 4 * item_words(block)


def grouped_products(names: tuple[str, ...], block: Block, ending: Ending, heads: bool):
    """The body of a kernel, whose out is [pairs, rows]."""
    at, n_threads, rows = shared_bytes(names, block) // 4, 32 * block.n_warps, block.rows
    part, (count, take) = grouped(block, at), taker(block, at, heads)
    multiply = both_products(names, block, ending, part)

    @device
    def run(words, other_words, bias, other_bias, act, table, out, order, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows):
        shared = cuda.shared.array(0, types.uint32)
        n_row_blocks = i32((n_rows + (rows - 1)) // rows)
        item, end = i32(cuda.blockIdx.x), i32(count(table, n_matrices, n_pairs) * n_row_blocks)
        while item < end:
            work = i32(item // n_row_blocks)
            take(i32(cuda.threadIdx.x), shared, table, work, i32(item - work * n_row_blocks), order, n_matrices, n_pairs, n_used, x_rows)
            cuda.syncthreads()  # the item is there
            multiply(words, other_words, bias, other_bias, act, out, n_rows, n_cols, n, n_pairs)
            cuda.syncthreads()  # all are done with the item
            item = i32(item + cuda.gridDim.x)
    return run


GROUPED_TESTED = [(name, heads, *astuple(block)) for name, heads, block in (
    ("Q4_0", False, Block(4, 1, 4)), *((fmt.name, False, Block(2, 1, 4, True, 3) if warpgroups_pay(fmt) else Block(4, 1, 8)) for fmt in QUANTIZED),
    ("Q4_K", False, Block(2, 1, 8, True, 3)), ("Q8_0", False, Block(2, 1, 12, True)), ("Q6_K", False, Block(2, 1, 16, True)),
    ("Q4_K", True, Block(2, 1, 4, True)), ("Q4_1", True, Block(2, 1, 4)), ("Q6_K", False, Block(4, 2, 8)))]
GROUPED_GLU_TESTED = [(*case, *astuple(block)) for *case, block in (
    ("silu", "Q4_K", "Q4_K", False, 0.0, 0.0, Block(4, 1, 4)), ("silu", "Q4_K", "Q4_K", False, 0.0, 0.0, Block(2, 1, 12, True)),
    ("gelu", "Q8_0", "Q6_K", True, 0.0, 0.0, Block(2, 1, 4, True, 3)), ("swiglu_oai", "MXFP4", "MXFP4", True, 1.702, 7.0, Block(2, 1, 8, True)),
    ("swiglu_oai", "MXFP4", "MXFP4", True, 1.702, 7.0, Block(2, 1, 4)))]


@factory(GROUPED_TESTED)
def mmq_id_kernel(name, heads, *block):
    block = Block(*block)
    run = grouped_products((name,), block, STORE, heads)

    def kernel(words, act, table, out, order, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows):  # items from blockIdx.x by gridDim.x
        run(words, words, out, out, act, table, out, order, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows)
    return Kernel(kernel, (U32, U32, I32, F32, *[N] * 8), 32 * block.n_warps, resident(block), HOPPER if block.warpgroups else None)


@factory(GROUPED_GLU_TESTED)
def mmq_id_glu_kernel(activation, gate, up, biased, alpha, limit, *block):
    block = Block(*block)
    run = grouped_products((gate, up), block, gate_and_store(activation, biased, alpha, limit), False)

    def kernel(gate_words, up_words, gate_bias, up_bias, act, table, out, order, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows):  # as in mmq_id_kernel
        run(gate_words, up_words, gate_bias, up_bias, act, table, out, order, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows)
    return Kernel(kernel, (U32, U32, F32, F32, U32, I32, F32, *[N] * 8), 32 * block.n_warps, resident(block), HOPPER if block.warpgroups else None)


def largest_block(target, names) -> Block:
    blocks = hopper_blocks(names, target.shared_limit) if target.warpgroups else ()
    return blocks[0] if blocks else block_shape(names, target.shared_limit)


def launch_grid(op, names, block, n_rows, n_cols, n):
    for what, found in (("n_rows", n_rows), ("n_cols", n_cols), ("n", n)):
        check(op, found >= 1, what, found, "at least 1")
    for name in names:
        check(op, format_of(name, op).is_quantized, "type", name, "quantized types")
    grid = -(-n_rows // block.rows), -(-n // block.tokens)
    most = min(65535 * block.tokens, (1 << 31) // (160 * -(-n_cols // CHUNK)))  # blocks of a grid; words of activations
    check(op, n <= most, "n", n, f"1..{most}")
    return grid


def mmq(target, format_name, words, act, out, n_rows, n_cols, n, block=None):
    """words: address of the weight's tiles [n_rows, n_cols], act: of the activation buffer of `quantize`, both on 16 bytes; out: of float32
    [n, n_rows]. block: the largest where it is not given."""
    names = (format_name,)
    block = block or largest_block(target, names)
    grid, args = launch_grid("mmq", names, block, n_rows, n_cols, n), (words, act, out, n_rows, n_cols, n)
    return target.launch(mmq_kernel(format_name, *astuple(block)), grid, 32 * block.n_warps, args, shared_bytes(names, block))


def mmq_glu(target, activation, names, gate_words, up_words, act, gate_bias, up_bias, out, n_rows, n_cols, n, block=None):
    """out = activation(gate x + its bias) * (up x + its bias). names: formats of gate and up; biases: addresses of float32 [n_rows], or both None;
    the rest as for `mmq`."""
    block = block or largest_block(target, names)
    grid, biased = launch_grid("mmq_glu", names, block, n_rows, n_cols, n), gate_bias is not None
    args = gate_words, up_words, *((gate_bias, up_bias) if biased else (out, out)), act, out, n_rows, n_cols, n
    return target.launch(mmq_glu_kernel(activation, *names, biased, *astuple(block)), grid, 32 * block.n_warps, args, shared_bytes(names, block))


@dataclass(frozen=True)
class GroupedShape:
    """Launch of mmq_id: its block, and how many of them a multiprocessor holds."""
    block: Block
    n_resident: int


def launch_items(op, names, n_matrices, n_rows, n_cols, n, n_pairs, shape, n_items, n_multiprocessors):
    """(grid, threads, bytes of shared memory) of blocks that take items of work one after the other."""
    launch_grid(op, names, shape.block, n_rows, n_cols, n)
    check(op, n_matrices * n_rows < 1 << 31, "n_matrices * n_rows", n_matrices * n_rows, f"less than {1 << 31}")
    n_blocks = n_items * -(-n_rows // shape.block.rows)
    check(op, n_blocks < 1 << 31 and n_pairs < 1 << 28, "n_pairs", n_pairs, f"less than {1 << 28}, and of blocks less than {1 << 31}")
    return min(n_blocks, shape.n_resident * n_multiprocessors), 32 * shape.block.n_warps, grouped_bytes(names, shape.block)


def mmq_id(target, format_name, words, act, table, out, n_expert, n_rows, n_cols, n_tokens, n_used, x_rows, shape):
    """words: address of the tiles of n_expert matrices [n_rows, n_cols], act: of the activation buffer of `quantize` of n_tokens * x_rows rows, table: of
    what `dispatch` writes for the tokens of shape.block, all on 16 bytes; out: of float32 [n_tokens * n_used, n_rows]."""
    names, n_pairs = (format_name,), n_tokens * n_used
    at = dispatch_table(n_expert, n_pairs, shape.block.tokens)
    launched = launch_items("mmq_id", names, n_expert, n_rows, n_cols, n_tokens * x_rows, n_pairs, shape, at.n_items, target.n_multiprocessors)
    return _launch(target, mmq_id_kernel(format_name, False, *astuple(shape.block)), launched,
                   (words, act, table, out, at.order, n_expert, n_rows, n_cols, n_tokens * x_rows, n_pairs, n_used, x_rows))


def mmq_heads(target, format_name, words, act, out, n_head, n_rows, n_cols, n, shape):
    """Row i of out with matrix i % n_head. words, act: as of `mmq_id`, act of n rows; out: address of float32 [n, n_rows]."""
    names, n_items = (format_name,), n_head * -(-n // n_head // shape.block.tokens)
    launched = launch_items("mmq_heads", names, n_head, n_rows, n_cols, n, n, shape, n_items, target.n_multiprocessors)
    return _launch(target, mmq_id_kernel(format_name, True, *astuple(shape.block)), launched, (words, act, out, out, 0, n_head, n_rows, n_cols, n, n, 1, 1))


def mmq_id_glu(target, activation, names, gate_words, up_words, act, table, gate_bias, up_bias, constants, out, n_expert, n_rows, n_cols, n_tokens, n_used,
               x_rows, shape):
    """out = activation(gate x + its bias) * (up x + its bias), or swiglu_oai of them; constants: (alpha, limit). names: formats of gate and up; biases:
    addresses of float32 [n_expert, n_rows], or both None; the rest as for `mmq_id`."""
    n_pairs, biased = n_tokens * n_used, gate_bias is not None
    at = dispatch_table(n_expert, n_pairs, shape.block.tokens)
    launched = launch_items("mmq_id_glu", names, n_expert, n_rows, n_cols, n_tokens * x_rows, n_pairs, shape, at.n_items, target.n_multiprocessors)
    return _launch(target, mmq_id_glu_kernel(activation, *names, biased, *constants, *astuple(shape.block)), launched,
                   (gate_words, up_words, *((gate_bias, up_bias) if biased else (out, out)), act, table, out, at.order, n_expert, n_rows, n_cols,
                    n_tokens * x_rows, n_pairs, n_used, x_rows))


def _launch(target, kernel, launched, args):
    grid, n_threads, n_bytes = launched
    return target.launch(kernel, grid, n_threads, args, n_bytes)
