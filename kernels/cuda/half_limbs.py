"""Activations for `mmq_half`: limbs of q widened to float16, or of split formats int8, scales and, where the format's products
want them, sums of q, and which chunks of a token have more than `most_reach`. For each item of work and chunk what one slot of
shared memory holds lies together, as bulk copies bring it: of one matrix items are so many tokens after the other, of experts
those of the table of `dispatch`.
"""
from itertools import accumulate
from typing import NamedTuple

from numba import cuda

from ...quant.formats import CHUNK, Format, format_of
from ...quant.words import ONES, TOPS
from .dispatch import ITEMS
from .half_forms import half_form, most_reach
from .half_product import MINUS_1152, SUM_WORDS, exponents, twice
from .half_scaled import N_GROUPS
from .launch import HOPPER, I32, Kernel, N, U32, factory
from .operands import row_of_pair
from .ptx import (add2, as_u32, device, distances4, dp4a, fma2, greatest, halves, i2f, i32, i64, ld, ld4, least, prmt, quotient,
                  remainder, shuffle, st, st4, stage, u32)
from .quantize import plane_words
from .weights import shared_unpacker
from .wgmma import ATOM_WORDS

N_THREADS = 256             # a warp a chunk of a token
SUMS = SUM_WORDS // 4       # words of its sums of q over 16 columns, float16


class Rest(NamedTuple):
    """Words of what follows products, of so many tokens and a chunk."""
    d: int      # scales of the tokens, [token % 4][quad]; before them, of formats with minima, sums of q, as of `half_product` or
                # `half_scaled`
    large: int  # whether a token has more than `most_reach`, of formats of which chunks may be multiplied in parts
    n_words: int


def rest_of(fmt: Format, tokens: int) -> Rest:
    form = half_form(fmt)
    n_sums = tokens * fmt.has_min * (N_GROUPS if form.scaled else SUMS)
    return Rest(*accumulate((n_sums, tokens, tokens * (form.parts > 1))))


def token_words(fmt: Format) -> int:
    """Of a chunk of a token: rows of atoms, [64 columns][limb], float16, or of split formats int8."""
    return CHUNK // 2 if half_form(fmt).split else CHUNK


def tokens_of_atom(fmt: Format) -> int:
    """Those whose rows of 128 bytes, one of each limb or one of both, fill an atom of `wgmma`."""
    form = half_form(fmt)
    return 8 if form.scaled or form.split else 4


def unit_words(fmt: Format, tokens: int) -> int:
    """Of an item and a chunk: atoms, [64 columns][quad], of scaled formats [64 columns][limb][two quads], of split ones [64
    columns][two quads], then `Rest`."""
    return tokens * token_words(fmt) + rest_of(fmt, tokens).n_words


@device
def widened(w, upper, selector):
    """Two bytes of limbs, plus 128, as float16: 1024 + byte - 1152."""
    return add2(prmt(w ^ TOPS, upper, selector), MINUS_1152)


def piece_widener(times: int):
    """(limbs, at, w, upper, selector): half of 16 columns of limbs, four words w, so many times as much: of every four columns
    the first and the third, or the others."""
    factor = twice(times)

    @device
    def widened_to(w, upper, selector):
        return fma2(widened(w, upper, selector), factor, u32(0)) if times > 1 else widened(w, upper, selector)

    @device
    def widen(limbs, at, w, upper, selector):
        st4(limbs, at, widened_to(w[0], upper, selector), widened_to(w[1], upper, selector), widened_to(w[2], upper, selector),
            widened_to(w[3], upper, selector))
    return widen


@device
def part_of_sum(s, low):
    """a or b of a sum of q, 128 a + b."""
    t = i32((s + 64) >> 7)
    return i2f(i32(s - (t << 7)) if low else t)


def rows_of(tokens: int, experts: bool):
    """(table, order, item, token, n, n_used, x_rows) -> the row of the activations of a token of an item, -1 where there is none.
    Of one matrix the last one is repeated. n_used, x_rows: of `Pairs`."""
    @device
    def row_of(table, order, item, token, n, n_used, x_rows):
        if not experts:
            return least(i32(item * tokens + token), i32(n - 1))
        row = i32(-1)
        if item < ld(table, 0):
            _, first, n_rows, _ = ld4(table, ITEMS + 4 * item)
            if token < n_rows:
                row = row_of_pair(ld(table, order + first + token), n_used, x_rows)
        return row
    return row_of


def reach_finder(signed: bool):
    """(lane, hi, lo) -> the larger reach of both limbs of a chunk (`half_product`), of weights of both signs or of one. Every
    second lane has another piece of it; even lanes take hi, the others lo."""
    @device
    def reach_of(lane, hi, lo):
        total, magnitudes = i32(0), i32(0)
        for i in range(4):
            w = u32(lo[i] if lane & 1 else hi[i])
            total = dp4a(i32(w), i32(ONES), total)
            magnitudes = dp4a(i32(distances4(w ^ TOPS, TOPS)), i32(ONES), magnitudes)
        # Twice the sum of positive ones, and of negative ones in the upper half: less than 2^16 each
        both = u32(u32(magnitudes + total) | u32(magnitudes - total) << u32(16))
        both = u32(both + u32(shuffle(i32(both), lane ^ 2)))
        both = u32(both + u32(shuffle(i32(both), lane ^ 4)))
        both = u32(both + u32(shuffle(i32(both), lane ^ 8)))
        both = u32(both + u32(shuffle(i32(both), lane ^ 16)))
        positive, negative = i32(both & u32(0xffff)), i32(both >> u32(16))
        reach = i32(positive + negative) if signed else greatest(positive, negative)
        return i32(greatest(reach, shuffle(reach, lane ^ 1)) >> 1)
    return reach_of


@device
def half_of_block(words, at, h):
    """Of eight words from `at` on those of even numbers, or, if h, the others."""
    a, b = ld4(words, at), ld4(words, at + 4)
    return (a[1], a[3], b[1], b[3]) if h else (a[0], a[2], b[0], b[2])


@device
def row_of_token(t):
    """Of an atom of eight tokens: a lane then has those of two quads side by side."""
    return i32(2 * (t & 3) + ((t >> 2) & 1))


def chunk_widener(fmt: Format, tokens: int):
    """(lane, act, limbs, source, lo_at, to, t): both limbs of chunk `source` of the activations, to the rows of token t of an
    item whose atoms begin at word `to`; returns their reach where there may be parts. Lane l widens a piece of 16 bytes of both
    limbs, of columns 16 (l / 2) .. of the chunk, or, where products have pairs of words (`half_product`), of half of the words of
    columns 32 (l / 4) .."""
    form, quads = half_form(fmt), tokens // 4
    scaled, has_parts, reach_of = form.scaled, form.parts > 1, reach_finder(form.signed)
    unit, limb_words, pairs = 2 if form.halved else 1, quads // 2 * ATOM_WORDS, shared_unpacker(fmt.name).unpacker.pairs
    widen_high, widen_low = piece_widener(128 * unit if scaled else 1), piece_widener(unit)

    @device
    def row_at(lane, r):
        """Of an atom."""
        return r * 32 + (((lane & 7) ^ r) << 2)

    @stage
    def widen_chunk(lane, act, limbs, source, lo_at, to, t):
        selector, upper, at = u32(0x4240 + 0x101 * (lane & 1)), exponents(0), to + (lane >> 3) * (quads * ATOM_WORDS)
        if pairs:
            piece, h = source * 64 + (lane >> 2) * 8, (lane >> 1) & 1
            hi, lo = half_of_block(act, piece, h), half_of_block(act, lo_at + piece, h)
        else:
            piece = source * 64 + (lane >> 1) * 4
            hi, lo = ld4(act, piece), ld4(act, lo_at + piece)
        if scaled:
            high = at + (t >> 3) * ATOM_WORDS + row_at(lane, row_of_token(t))
            low = high + limb_words
        else:
            high = at + (t >> 2) * ATOM_WORDS + row_at(lane, i32(2 * (t & 3)))
            low = at + (t >> 2) * ATOM_WORDS + row_at(lane, i32(2 * (t & 3) + 1))
        widen_high(limbs, high, hi, upper, selector)
        widen_low(limbs, low, lo, upper, selector)
        return reach_of(lane, hi, lo) if has_parts else i32(0)
    return widen_chunk


def chunk_placer(fmt: Format, tokens: int):
    """The same of split formats: lane l has 16 bytes of hi, or of lo, if l >= 16, which it doubles."""
    n_atoms, pairs = tokens // 8, shared_unpacker(fmt.name).unpacker.pairs

    @stage
    def place_chunk(lane, act, limbs, source, lo_at, to, t):
        piece, low = lane & 15, lane >> 4
        at = source * 64 + (lo_at if low else i64(0))
        if pairs:
            w = half_of_block(act, at + (piece >> 1) * 8, piece & 1)
        else:
            w = ld4(act, at + piece * 4)
        r, shift = row_of_token(t), u32(low)
        mask = u32(0xfefefefe) if low else u32(0xffffffff)
        st4(limbs, to + i32((piece >> 2) * n_atoms + (t >> 3)) * ATOM_WORDS + r * 32 + (((low * 4 + (piece & 3)) ^ r) << 2),
            u32(u32(w[0] << shift) & mask), u32(u32(w[1] << shift) & mask), u32(u32(w[2] << shift) & mask),
            u32(u32(w[3] << shift) & mask))
        return i32(0)
    return place_chunk


def sums_widener(fmt: Format, tokens: int):
    """(lane, act, limbs, sums, rest, t): what products want of the 16 sums of q of a token's chunk, from word `sums` of the
    activations on, to an item's `Rest` at word `rest`."""
    quads = tokens // 4

    @stage
    def widen_parts(lane, act, limbs, sums, rest, t):
        """a and b of them, by 16 lanes."""
        i, to = i32(lane & 7), rest + (t >> 2) * SUM_WORDS + (t & 3) * 8
        s, other = i32(ld(act, sums + 2 * i)), i32(ld(act, sums + 2 * i + 1))
        if lane < SUMS:
            place = i32(((i >> 2) << 5) + ((lane & 8) >> 1) + (i & 3))
            st(limbs, to + place, halves(part_of_sum(s, lane & 8), part_of_sum(other, lane & 8)))

    @stage
    def add_sums(lane, act, limbs, sums, rest, t):
        """Those over 32 columns, float32, by 8 lanes."""
        if lane < N_GROUPS:
            both = i32(i32(ld(act, sums + 2 * lane)) + i32(ld(act, sums + 2 * lane + 1)))
            st(limbs, rest + (4 * lane + (t & 3)) * quads + (t >> 2), as_u32(i2f(both)))
    return add_sums if half_form(fmt).scaled else widen_parts


TESTED = [(name, tokens, experts) for name in ("Q4_K", "Q5_K")
          for experts, of_blocks in ((False, (128, 64, 32, 16)), (True, (16, 32, 48))) for tokens in of_blocks]
TESTED += [("Q2_K", 64, False), ("Q3_K", 128, False), ("Q3_K", 48, True), ("MXFP4", 128, False), ("MXFP4", 48, True),
           ("Q4_1", 64, False), ("Q5_0", 32, False), ("IQ2_XS", 64, False), ("IQ1_M", 48, True), ("IQ4_XS", 128, False),
           ("IQ3_XXS", 48, True)]


@factory(TESTED)
def half_limbs_kernel(name, tokens, experts):
    """A warp a chunk of a token of an item."""
    fmt = format_of(name)
    has_parts, has_sums, quads = half_form(fmt).parts > 1, fmt.has_min, tokens // 4
    most, row_of, n_words = most_reach(fmt) if has_parts else 0, rows_of(tokens, experts), unit_words(fmt, tokens)
    n_act, (d_at, large_at, _), widen_sums = tokens * token_words(fmt), rest_of(fmt, tokens), sums_widener(fmt, tokens)
    widen_chunk = (chunk_placer if half_form(fmt).split else chunk_widener)(fmt, tokens)

    def kernel(act, table, limbs, order, n, n_chunks, n_items, n_used, x_rows):
        lane, place = i32(cuda.threadIdx.x & 31), i32(cuda.blockIdx.x * (N_THREADS // 32) + (cuda.threadIdx.x >> 5))
        token = quotient(place, n_chunks)
        item, chunk, t = quotient(token, tokens), i32(place - token * n_chunks), remainder(token, tokens)
        if item < n_items:
            lo_at, scales, sums, _ = plane_words(n, n_chunks)
            row, at = row_of(table, order, item, t, n, n_used, x_rows), (i64(item) * n_chunks + chunk) * n_words
            rest, reach, source = at + n_act, i32(0), i64(row) * n_chunks + chunk
            if row >= 0:
                reach = widen_chunk(lane, act, limbs, source, lo_at, at, t)
                if has_sums:
                    widen_sums(lane, act, limbs, sums + source * 16, rest, t)
                if lane == 0:
                    st(limbs, rest + d_at + (t & 3) * quads + (t >> 2), ld(act, scales + i64(chunk) * n + row))
            # What is multiplied in the place of tokens that are not there may be anything, but not large
            if lane == 0 and has_parts:
                st(limbs, rest + large_at + t, u32(1 if reach > most else 0))
    return Kernel(kernel, (U32, I32, U32, *[N] * 6), N_THREADS, arch=HOPPER)
