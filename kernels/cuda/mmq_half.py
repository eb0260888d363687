"""MMQ in float16: products of quantized weights with many tokens on Hopper (docs/numerics.md, section 3; `half_product`).

A launch before (`half_limbs`) widens the limbs of the activations to float16, as products take them, once for all rows. Then a
block takes 128 rows and 64 tokens: two warpgroups multiply, a warp half a row tile, and one thread has bulk copies bring the
chunks. Slots are filled and taken by barriers of their own (`mbarrier`), those of activations and weights as soon as their
products are there.
"""
from itertools import accumulate
from typing import NamedTuple

from numba import cuda, types

from ...quant.formats import CHUNK, Format, format_of
from ...quant.tile import tile_bytes
from ...quant.words import TOPS
from ..call import Call
from . import mbarrier
from .half_product import BLOCK_WORDS, QUADS, SUM_WORDS, exponents, half_product, most_squares, twice
from .launch import F32, HOPPER, Kernel, Launches, N, U32, factory
from .mmq import Block, Part, dense, launch_grid, totals_writer
from .operands import addresses
from .ptx import (add2, ballot, device, dp4a, f32, halves, i2f, i32, i64, ld, ld4, lds4, prmt, shuffle, st, st4, sts4,
                  syncwarp, u32, wait_for_previous)
from .quantize import plane_words
from .tile_product import STORE, Ending, table_words
from .wgmma import ATOM_WORDS, fence

BLOCK = Block(4, 1, QUADS, True, 2)  # rows and tokens of a block, and the warpgroups that multiply
N_THREADS = 32 * BLOCK.n_warps + 32  # and the warp of the thread that brings
N_REST = 4                           # slots of what follows products
N_CONVERTERS = 256                   # threads of a block that widens
BLOCKS = CHUNK // 64                 # of 64 columns, an atom of a quad each
N_WARPS = N_CONVERTERS // 32
TURNS = QUADS // N_WARPS             # quads of a warp
N_PIECE_WORDS = 4 * TURNS * BLOCKS


class Limbs(NamedTuple):
    """Words of 64 tokens and a chunk: of the activations for products, then of the rest."""
    sums: int   # of q over 16 columns, float16, as of `half_product`; before them atoms of float16, [block of 64 columns][quad]
    d: int      # scales of the tokens, [token % 4][quad]
    large: int  # [warp that widened] whether a token has more than `most_squares`
    n_words: int

    @property
    def n_rest(self) -> int:
        return self.n_words - self.sums


LIMBS = Limbs(*accumulate((BLOCKS * BLOCK_WORDS, QUADS * SUM_WORDS, BLOCK.tokens, 16)))


def limb_words(n: int, n_cols: int) -> int:
    """Words of the activations of n tokens: [64 tokens][chunk], `Limbs`."""
    return -(-n // BLOCK.tokens) * -(-n_cols // CHUNK) * LIMBS.n_words


# Widening

MINUS_1152 = twice(-1152)


@device
def widened(w, upper, selector):
    """Two bytes of limbs, plus 128, as float16: 1024 + byte - 1152."""
    return add2(prmt(w, upper, u32(selector)), MINUS_1152)


@device
def widen(w, i, shared, to, r, piece):
    """16 columns of limbs, four words of w from i on, to row r of an atom: of every four columns the first and the third, then
    the others; returns the sum of their squares."""
    upper, w0, w1, w2, w3 = exponents(0), w[i], w[i + 1], w[i + 2], w[i + 3]
    squares = dp4a(w0, w0, dp4a(w1, w1, dp4a(w2, w2, dp4a(w3, w3, i32(0)))))
    w0, w1, w2, w3 = u32(w0 ^ TOPS), u32(w1 ^ TOPS), u32(w2 ^ TOPS), u32(w3 ^ TOPS)
    sts4(shared, to + ((2 * piece ^ r) << 2), widened(w0, upper, 0x4240), widened(w1, upper, 0x4240),
         widened(w2, upper, 0x4240), widened(w3, upper, 0x4240))
    sts4(shared, to + (((2 * piece + 1) ^ r) << 2), widened(w0, upper, 0x4341), widened(w1, upper, 0x4341),
         widened(w2, upper, 0x4341), widened(w3, upper, 0x4341))
    return squares


@device
def widen_sums(act, source, limbs, to, token, upper):
    """128 a + b of eight sums of a token, its last ones if upper."""
    a, b, x, y = cuda.local.array(8, f32), cuda.local.array(8, f32), ld4(act, source), ld4(act, source + 4)
    for k in range(8):
        s = i32(x[k] if k < 4 else y[k - 4])
        t = i32((s + 64) >> 7)
        a[k], b[k] = i2f(t), i2f(i32(s - (t << 7)))
    to = to + (token >> 2) * SUM_WORDS + (token & 3) * 16 + upper
    for k in range(4):
        st(limbs, to + 2 * k, halves(a[2 * k], a[2 * k + 1]))
        st(limbs, to + 8 + 2 * k, halves(b[2 * k], b[2 * k + 1]))


@factory([("Q4_K",)])
def half_limbs_kernel(name):
    """limbs: [64 tokens][chunk] as of `Limbs`; tokens behind the last repeat it. A block: one chunk of them. Lane l has piece
    l % 4 of each block of 64 columns, of limb l / 4 % 2 of token l / 8 of a quad: eight lanes store to all banks."""
    most, (sums_at, d_at, large_at, n_words) = most_squares(format_of(name)), LIMBS

    def kernel(act, limbs, n, n_chunks):
        shared, words = cuda.shared.array(0, types.uint32), cuda.local.array(N_PIECE_WORDS, u32)
        tid, chunk, first, last = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y * 64), i32(n - 1)
        lane, warp, large = i32(tid & 31), i32(tid >> 5), i32(0)
        lo, d, sums, _ = plane_words(n, n_chunks)
        at = (i64(cuda.blockIdx.y) * n_chunks + chunk) * n_words
        plane, r = (lo if lane & 4 else i64(0)) + chunk * 64 + (lane & 3) * 4, i32(2 * (lane >> 3) + ((lane >> 2) & 1))
        for i in range(TURNS):  # all loads are on their way together
            source = plane + i64(min(first + 4 * (warp + N_WARPS * i) + (lane >> 3), last)) * n_chunks * 64
            for block in range(BLOCKS):
                x = ld4(act, source + block * 16)
                for k in range(4):
                    words[(BLOCKS * i + block) * 4 + k] = x[k]
        if tid < 128:
            source = (sums + (i64(min(first + (tid >> 1), last)) * n_chunks + chunk) * 16) + 8 * (tid & 1)
            widen_sums(act, source, limbs, at + sums_at, i32(tid >> 1), i32(tid & 1))
        elif tid < 192:
            token = i32(tid & 63)
            scale = ld(act, d + i64(min(first + token, last)) * n_chunks + chunk)
            st(limbs, at + d_at + (token & 3) * QUADS + (token >> 2), scale)
        for i in range(TURNS):
            quad, squares = i32(warp + N_WARPS * i), i32(0)
            for block in range(BLOCKS):
                squares = i32(squares + widen(words, 4 * (BLOCKS * i + block), shared,
                                              i32(block * BLOCK_WORDS + quad * ATOM_WORDS + r * 32), r, lane & 3))
            squares = i32(squares + shuffle(squares, lane ^ 1))
            squares = i32(squares + shuffle(squares, lane ^ 2))
            large = i32(1 if squares > most and lane & 4 == 0 else large)
        any_large = ballot(large)
        if lane == 0:
            st(limbs, at + large_at + warp, any_large)
        cuda.syncthreads()  # all is there
        i = i32(4 * tid)
        while i < sums_at:
            x = lds4(shared, i)
            st4(limbs, at + i, x[0], x[1], x[2], x[3])
            i = i32(i + 4 * N_CONVERTERS)
    return Kernel(kernel, (U32, U32, N, N), N_CONVERTERS, arch=HOPPER)


# Products

class Shared(NamedTuple):
    """Words of shared memory."""
    rest: int        # slots of the rest of `Limbs`; before them those of activations, behind which lie the block's row tiles
    there: int       # barriers of these, [slot]: the chunk is there;
    done: int        # all warps are done with it
    rest_there: int  # of the rest likewise
    rest_done: int
    scratch: int     # [warp][1024]
    n_words: int


def slot_words(fmt: Format) -> int:
    return LIMBS.sums + BLOCK.row_tiles * tile_bytes(fmt) // 4


def shared_layout(fmt: Format) -> Shared:
    slots, words = BLOCK.slots, mbarrier.WORDS
    assert slot_words(fmt) % ATOM_WORDS == 0 and not table_words(fmt.name), fmt.name
    return Shared(*accumulate((slots * slot_words(fmt), N_REST * LIMBS.n_rest, slots * words, slots * words, N_REST * words,
                               N_REST * words, BLOCK.n_warps * 1024)))


def bringers(fmt: Format, part: Part):
    """(bring_tiles, bring_act, bring_rest), by one thread. bring_tiles: (shared, words, n_rows, n_chunks, chunk, slot): expects
    all of a chunk in the slot, and starts the copies of its row tiles; those behind the last repeat it. bring_act, bring_rest:
    (shared, limbs, at, slot): of what lies at word `at` of limbs."""
    tile_words, row_tiles, row_block, matrix = tile_bytes(fmt) // 4, BLOCK.row_tiles, part.row_block, part.matrix
    (rest_at, there, _, rest_there, *_), words_of_slot = shared_layout(fmt), slot_words(fmt)
    n_act, n_rest = LIMBS.sums, LIMBS.n_rest

    @device
    def bring_tiles(shared, words, n_rows, n_chunks, chunk, slot):
        barrier = i32(there + slot * mbarrier.WORDS)
        mbarrier.expect(shared, barrier, i32(4 * words_of_slot))
        for tile in range(row_tiles):
            row_tile = (i64(min(row_block(shared) * row_tiles + tile, (n_rows - 1) >> 5))
                        + matrix(shared) * ((n_rows + 31) >> 5))
            mbarrier.bring(shared, slot * words_of_slot + n_act + tile * tile_words, words,
                           (row_tile * n_chunks + chunk) * tile_words, i32(tile_words), barrier)

    @device
    def bring_act(shared, limbs, at, slot):
        mbarrier.bring(shared, slot * words_of_slot, limbs, at, i32(n_act), i32(there + slot * mbarrier.WORDS))

    @device
    def bring_rest(shared, limbs, at, slot):
        barrier = i32(rest_there + slot * mbarrier.WORDS)
        mbarrier.expect(shared, barrier, i32(4 * n_rest))
        mbarrier.bring(shared, rest_at + slot * n_rest, limbs, at + n_act, i32(n_rest), barrier)
    return bring_tiles, bring_act, bring_rest


def filler(fmt: Format, part: Part):
    """(shared, words, limbs, first, n_rows, n_chunks): all chunks, by one thread. first: word of limbs at which those of the
    tokens begin."""
    bring_tiles, bring_act, bring_rest = bringers(fmt, part)
    slots, (_, _, done, _, rest_done, *_), n_words = BLOCK.slots, shared_layout(fmt), LIMBS.n_words

    @device
    def fill(shared, words, limbs, first, n_rows, n_chunks):
        for slot in range(slots):
            if slot < n_chunks:
                bring_tiles(shared, words, n_rows, n_chunks, i32(slot), i32(slot))
        wait_for_previous()
        chunk, slot, turn, rest, rest_turn, at = i32(0), i32(0), i32(1), i32(0), i32(1), first
        while chunk < n_chunks:
            mbarrier.wait(shared, done + slot * mbarrier.WORDS, turn)
            if chunk >= slots:
                bring_tiles(shared, words, n_rows, n_chunks, chunk, slot)
            bring_act(shared, limbs, at, slot)
            mbarrier.wait(shared, rest_done + rest * mbarrier.WORDS, rest_turn)
            bring_rest(shared, limbs, at, rest)
            chunk, slot, rest, at = i32(chunk + 1), i32(slot + 1), i32(rest + 1), at + n_words
            if slot == slots:
                slot, turn = i32(0), i32(turn ^ 1)
            if rest == N_REST:
                rest, rest_turn = i32(0), i32(rest_turn ^ 1)
    return fill


@device
def leave(lane, shared, barrier):
    """A warp is done with what lies in a slot."""
    syncwarp()  # all lanes have read
    if lane == 0:
        mbarrier.arrive(shared, barrier)


def chunk_multiplier(name: str):
    """(tid, shared, n_chunks, total): all chunks, by the warps that multiply. total: f32 [32] of a lane, as of
    `half_product.follow`."""
    fmt = format_of(name)
    (rest_at, there, done, rest_there, rest_done, scratch, _), words_of_slot = shared_layout(fmt), slot_words(fmt)
    slots, n_sums, n_act, n_rest, tile_words = BLOCK.slots, BLOCK.n_sums, LIMBS.sums, LIMBS.n_rest, tile_bytes(fmt) // 4
    (multiply, multiply_halves, follow), d_at, large_at = half_product(name), LIMBS.d - LIMBS.sums, LIMBS.large - LIMBS.sums

    @device
    def any_large(shared, at):
        a, b = lds4(shared, at), lds4(shared, at + 4)
        return a[0] | a[1] | a[2] | a[3] | b[0] | b[1] | b[2] | b[3]

    @device
    def multiply_chunks(tid, shared, n_chunks, total):
        s, lane, warp = cuda.local.array(n_sums, f32), i32(tid & 31), i32(tid >> 5)
        chunk, slot, turn, rest, rest_turn = i32(0), i32(0), i32(0), i32(0), i32(0)
        while chunk < n_chunks:
            now, act = i32(rest_at + rest * n_rest), i32(slot * words_of_slot)
            tile = i32(act + n_act + (warp >> 1) * tile_words)
            mbarrier.wait(shared, rest_there + rest * mbarrier.WORDS, rest_turn)
            large = any_large(shared, i32(now + large_at))
            mbarrier.wait(shared, there + slot * mbarrier.WORDS, turn)
            if large:
                scales = multiply_halves(lane, warp & 1, shared, tile, act, i32(scratch + 1024 * warp), s)
            else:
                scales = multiply(lane, warp & 1, shared, tile, act, s)
            leave(lane, shared, i32(done + slot * mbarrier.WORDS))
            follow(lane, shared, now, i32(now + d_at), scales, s, total)
            leave(lane, shared, i32(rest_done + rest * mbarrier.WORDS))
            chunk, slot, rest = i32(chunk + 1), i32(slot + 1), i32(rest + 1)
            if slot == slots:
                slot, turn = i32(0), i32(turn ^ 1)
            if rest == N_REST:
                rest, rest_turn = i32(0), i32(rest_turn ^ 1)
    return multiply_chunks


def barrier_beginner(fmt: Format):
    """(shared), by one thread."""
    (_, there, done, rest_there, rest_done, *_), slots, n_warps = shared_layout(fmt), BLOCK.slots, BLOCK.n_warps

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


def products(name: str, ending: Ending, part: Part):
    """The body of a kernel, the products with one matrix: (words, bias, other_bias, limbs, out, last, n_rows, n_cols, n_out), as
    of `mmq.products`."""
    fmt, n_warps, n_sums, n_words = format_of(name), BLOCK.n_warps, BLOCK.n_sums, LIMBS.n_words
    begin_barriers, fill, multiply_chunks = barrier_beginner(fmt), filler(fmt, part), chunk_multiplier(name)
    store_totals = totals_writer(BLOCK, ending, part)

    @device
    def run(words, bias, other_bias, limbs, out, last, n_rows, n_cols, n_out):
        shared, tid, n_chunks = cuda.shared.array(0, types.uint32), i32(cuda.threadIdx.x), i32((n_cols + 255) >> 8)
        if tid == 0:
            begin_barriers(shared)
        cuda.syncthreads()  # they are there
        total = cuda.local.array(n_sums, f32)
        for o in range(n_sums):
            total[o] = f32(0)
        if tid == 32 * n_warps:
            fill(shared, words, limbs, i64(cuda.blockIdx.y) * n_chunks * n_words, n_rows, n_chunks)
        else:
            wait_for_previous()
            if tid < 32 * n_warps:
                multiply_chunks(tid, shared, n_chunks, total)
        cuda.syncthreads()  # all slots are free
        if tid < 32 * n_warps:
            store_totals(tid, shared, i32(0), total, i32(0), out, n_rows, n_out, last, bias, other_bias)
    return run


@factory([("Q4_K",)])
def mmq_half_kernel(name):
    run = products(name, STORE, dense(BLOCK))

    def kernel(words, limbs, out, n_rows, n_cols, n):  # block: rows from blockIdx.x * rows, tokens from blockIdx.y * tokens
        run(words, out, out, limbs, out, True, n_rows, n_cols, n)
    return Kernel(kernel, (U32, U32, F32, N, N, N), N_THREADS, arch=HOPPER)


class Halves(NamedTuple):
    """The plan of `mmq_half`."""


def half_limbs(call: Call):
    """The activations of call.x as `Limbs`, for a weight of the type of call.w, to call.scratch."""
    n, n_cols = call.x.shape
    kernel, grid = half_limbs_kernel(call.w.dtype), (-(-n_cols // CHUNK), -(-n // BLOCK.tokens))
    return call.device.launch(kernel, grid, N_CONVERTERS, (call.x.data, call.scratch.data, n, grid[0]), 4 * LIMBS.sums)


def mmq_of_halves(call: Call):
    """The product with what `half_limbs` left in call.scratch."""
    name, sizes = call.w.dtype, (*call.w.shape, call.x.shape[0])
    kernel, args = mmq_half_kernel(name), (*addresses(call.w, call.scratch, call.out), *sizes)
    return call.device.launch(kernel, launch_grid(BLOCK, *sizes), N_THREADS, args, 4 * shared_layout(format_of(name)).n_words)


def mmq_half(call: Call):
    """out = w x, as of `mul_mat`, w of a format that `has_halves`. plan: `Halves`; scratch: i32 [`limb_words`], on 16 bytes, left
    with anything in it."""
    return Launches((half_limbs(call), mmq_of_halves(call)))
