"""A weight tile's chunk (32 rows x 256 columns) times a few tokens on int8 tensor cores, by one warp (docs/numerics.md, section
3).

The tile lies in shared memory as it lies in the file's bits; a lane unpacks what a tensor core's fragment of rows wants of it
straight into registers: lane l has words l % 4 of rows l / 4, l / 4 + 8, + 16 and + 24. Integer sums have no order, so any
assignment of columns to words will do as long as the activations follow it (`Unpacker.quarter`).

Tokens go in fours, a *quad*: eight columns of a product, the limbs hi and lo of each token side by side. So lane l gets both sums
of token l % 4 of the quad for its four rows, S = 128 hi + lo. In shared memory a quad is 8 rows (token, limb) of 16 pieces of 16
bytes; piece p of row r lies at place p ^ `swizzle(r)`, so that the accesses of both orders of columns touch every bank once.

A single token stands in all four places of a quad, of which shared memory then holds one. Either the four lanes of a row have the
same sums of its four rows, and each goes on with one, l / 4 + 8 (l % 4), whose scales it keeps in registers; or each place takes
other sub-blocks (`in_columns`).

A zero point (level = code - zero) is a product of the same activations with a constant matrix, passed on as the addend; so is the
sum of q under a minimum, and the minima of a chunk are a product with imin. What follows depends on the format alone (`Form`).
"""
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numba import cuda

from ...quant.activation import LIMIT
from ...quant.formats import CHUNK, Format, format_of
from ...quant.tile import tile_bytes
from ...quant.words import EVEN, ONES, SUMMED, TOPS, FiveBits, Looked, Paired, Summed
from .glu import gated_unit
from .ptx import (add, afresh, apart, as_f32, as_u32, before_blackwell, constant, device, f32, fma, i2f, i32, i64, l2f, ld, ldc,
                  ldmatrix4, lds, lds2, lds4, mad64, mma16, mma32, mma32u, nothing, prmt, shuffle, st, sts, sts4, syncwarp, u32)
from .quantize import four_bytes
from .weights import five_bit_terms, pairs_of_codes, shared_unpacker, terms, unpacker

QUAD = 4                  # tokens
QUAD_WORDS = 2 * QUAD * CHUNK // 4
ZEROS = CHUNK // 4        # words, for a single token
MOST_FEW = 4              # quads for which products are cheaper than work on a tile's words


class Form(NamedTuple):
    """How the sums of a format are formed."""
    step: int       # columns of a sum that a scale follows: 16 or 32
    integer: bool   # that scale is an integer: S adds isc * sum
    wide: bool      # S needs more than 32 bits: the sums over hi and over lo are kept apart
    carried: bool   # there is no scale before the group's: the tensor core adds on


def form(fmt: Format) -> Form:
    integer = fmt.max_isc > 1
    step = fmt.sub if integer else min(fmt.group, 32)
    return Form(step, integer, fmt.group * fmt.max_level * fmt.max_isc * LIMIT >= 2**31, not integer and fmt.group > step)


class Slot(NamedTuple):
    """Words of a chunk in shared memory: row tiles, then the tokens' quads, their scales d [token], the limbs of their sums
    [token][3][4]."""
    act: int
    d: int
    limbs: int
    n_words: int
    tiles: int = 0


def slot(fmt: Format, row_tiles: int, n_quads: int, limbs_too: bool) -> Slot:
    act = row_tiles * tile_bytes(fmt) // 4
    d = act + n_quads * QUAD_WORDS
    limbs = d + n_quads * QUAD
    return Slot(act, d, limbs, limbs + (12 * QUAD * n_quads if limbs_too else 0))


class Factors(NamedTuple):
    """What a warp prepares of a tile's scales, planes of 32 words: row r at place 4 (r & 7) + r // 8, so that a lane's four rows
    are four words. Planes from 0: d of the groups or, integer, isc of the sub-blocks."""
    d: int         # plane of d
    m: int         # first plane of the minima, negated
    imin: int      # planes of imin in all four bytes; late: [row][16 bytes], imin of every 16 columns
    n_words: int


def factors(fmt: Format, n_quads: int) -> Factors:
    if not form(fmt).integer:
        n = CHUNK // fmt.group
        return Factors(0, n, 0, 32 * (n + n * fmt.has_min))
    n = CHUNK // fmt.sub
    return Factors(n, n + 1, n + 2, 32 * (n + 1 + (1 + (4 if is_late(fmt, n_quads) else n)) * fmt.has_min))


def is_split(fmt: Format, n_quads: int) -> bool:
    """Whether levels are multiplied by their integer scales while unpacking and split in limbs, which for many tokens takes less
    than to multiply sums of 16."""
    return n_quads > MOST_FEW and form(fmt).integer and form(fmt).step == 16


def is_late(fmt: Format, n_quads: int) -> bool:
    """Whether the minima of a chunk are multiplied at its end with limbs of the sums of q, which takes less for many tokens."""
    return n_quads > MOST_FEW and fmt.has_min and fmt.group == CHUNK


def takes_sums(fmt: Format) -> bool:
    """Whether a single token's minima, or what its levels are shifted by, are multiplied with the sums of q, wanted in shared
    memory."""
    return (fmt.has_min and fmt.group == CHUNK) or shift_of(fmt, unpacker(fmt.name)) is not None


@device
def chunk_words(row_tile, chunk, n_chunks, n_words):
    """The word at which the chunk of a row tile begins, int64. n_words: of each. A weight has fewer than 2^32 chunks of row
    tiles."""
    return i64(u32(row_tile * n_chunks + chunk)) * n_words


@device
def swizzle(r):
    return ((r << 1) & 7) | (r >> 2)


def shift_of(fmt: Format, unpack):
    """(t, i) -> int32: how much the levels of sub-block i are more than the sums of what a product of a single token takes of
    them; None for nothing."""
    source, shift = unpack.source, unpack.shift
    more = i32(-SUMMED if isinstance(source, Summed) else terms(source.levels).constant if isinstance(source, Looked)
               else -fmt.zero if form(fmt).integer else 0)
    if shift and more:
        return device(lambda t, i: i32(shift(t, i) + more))
    return device(lambda t, i: more) if more else shift


class TileProduct(NamedTuple):
    """The device functions of a format and a number of quads."""
    multiply: object  # (lane, shared, tile, act, limbs, scratch, acc): acc[4 quad + k] = acc of section 3, of row l / 4 + 8 k and
                      # token l % 4; of a single token acc[0], of row l / 4 + 8 (l % 4); limbs are then the sums of q, and scratch
                      # is where `zero_words` zeros lie
    n_entries: int    # of codebooks
    entry: object     # (i) -> one of them


def level_words(fmt: Format, quarter, subtracted: bool):
    """(t, j, q) -> the two words of a quarter; subtracted: as levels, codes less the zero point (as in quant.words.unpacker),
    else as codes."""
    less = TOPS - u32(fmt.zero) * ONES

    @device
    def words(t, j, q):
        a, b = quarter(t, j, q)
        if subtracted:
            return i32(u32((u32(a) + less) ^ TOPS)), i32(u32((u32(b) + less) ^ TOPS))
        return a, b
    return words


# Integer scales and minima

def preparer(fmt: Format, unpack, n_quads: int):
    """(lane, shared, tile, scratch): a lane for each row writes its scales and minima as `factors`."""
    sub, group, integer, has_min, late = unpack.sub, unpack.group, form(fmt).integer, fmt.has_min, is_late(fmt, n_quads)
    d_plane, m_plane, imin_plane, _ = factors(fmt, n_quads)
    n_scales, ones = CHUNK // (fmt.sub if integer else fmt.group), i32(0x01010101)
    sixteenths = 16 // n_scales if late else 1

    @device
    def sixteen(imin, i):
        """imin of the sixteenths i .. i + 3 of the chunk."""
        return four_bytes(imin[i // sixteenths], imin[(i + 1) // sixteenths],
                          imin[(i + 2) // sixteenths], imin[(i + 3) // sixteenths])

    @device
    def prepare(lane, shared, tile, scratch):
        t = (shared, tile, lane)
        isc, imin, place = cuda.local.array(16, i32), cuda.local.array(16, i32), i32(scratch + ((lane & 7) << 2) + (lane >> 3))
        if integer:
            for i in range(n_scales):
                isc[i], imin[i] = sub(t, i)
            d, m = group(t, 0)
            for i in range(n_scales):
                sts(shared, place + 32 * i, isc[i])
                if has_min and not late:
                    sts(shared, place + 32 * (imin_plane + i), imin[i] * ones)
            if late:
                sts4(shared, scratch + 32 * imin_plane + 4 * lane,
                     sixteen(imin, 0), sixteen(imin, 4), sixteen(imin, 8), sixteen(imin, 12))
            sts(shared, place + 32 * d_plane, as_u32(d))
            if has_min:
                sts(shared, place + 32 * m_plane, as_u32(-m))
        else:
            for i in range(n_scales):
                d, m = group(t, i)
                isc[i], imin[i] = i32(as_u32(d)), i32(as_u32(-m))
            for i in range(n_scales):
                sts(shared, place + 32 * i, isc[i])
                if has_min:
                    sts(shared, place + 32 * (m_plane + i), imin[i])
    return prepare


def splitter(fmt: Format, signed: bool = False):
    """(w, f0, f1, f2, f3) -> v = isc * level of the words of a fragment of 16 rows as limbs, fragments h, of int8, then l, of
    uint8: v = 256 h + l. f: isc of each word. The products of two levels are one multiplication: 16-bit lanes hold v + 2^15,
    whose bytes are h + 128 and l, so |v| < 2^15. Then |h| <= 128, l <= 255, and with limbs of q up to 127 and 64 no sum of
    `split_sum` reaches 2^31: 128 * 256 * 255 * 127 + 256 * 255 * 64 + 256 * 256 * 128 * 64 < 1.61e9. signed: l is int8, too, and
    |h| <= 127 where |v| < 2^15 - 128."""
    offset = 0 if fmt.has_min else fmt.zero or 128  # of levels, which are then no less than 0
    assert not (fmt.has_min and fmt.zero) and fmt.max_level * fmt.max_isc < 2**15 - 128 * signed, fmt.name
    offsets, middle, tops_of_low = i64(offset * 0x00010001), i64(0x80808080 if signed else 0x80008000), TOPS if signed else u32(0)
    loaded = constant(np.array([TOPS & EVEN], np.uint32))  # loaded as in weights.lookup_nibbles

    @device
    def limbs_of(w, f):
        w, f = u32(w), i64(f)
        addend = i64(middle - f * offsets) if offset else middle
        first, second = u32(w & EVEN), u32((w >> u32(8)) & EVEN)
        if offset == 128:  # one operation with the mask
            tops = loaded(0)
            first, second = u32(first ^ tops), u32(second ^ tops)
        even, odd = u32(i64(first) * f + addend), u32(i64(second) * f + addend)
        return i32(u32(prmt(even, odd, u32(0x7351))) ^ TOPS), i32(u32(prmt(even, odd, u32(0x6240))) ^ tops_of_low)

    @device
    def four_limbs(w, f0, f1, f2, f3):
        h0, l0 = limbs_of(w[0], f0)
        h1, l1 = limbs_of(w[1], f1)
        h2, l2 = limbs_of(w[2], f2)
        h3, l3 = limbs_of(w[3], f3)
        return h0, h1, h2, h3, l0, l1, l2, l3
    return four_limbs


power = constant(np.array([0x4b000000], np.uint32))  # 2^23, a float whose last bits count ones


@device
def split_sum(h_high, h_low, l_high, l_low):
    """RN(S) of the sums of h and l times the limbs of q, S = 256 (128 h_high + h_low) + 128 l_high + l_low: both parts of 2^15 a
    + b are exact in float32, and so is 2^15 a, so that the sum is rounded once. b becomes a float without a conversion, on
    another pipe."""
    b = i32(i32((l_high << 7) + l_low) + (h_low << 8))
    return fma(i2f(i32(h_high + (b >> 15))), f32(32768), add(as_f32(i32(u32(b & 32767) | power(0))), f32(-8388608)))


@device
def limb_product(i0, i1, first, rest):
    """The sums over the chunk of i * q of two rows. i: bytes for every 16 columns; first, rest: limb a, limbs b and c of the sums
    of q."""
    z = i32(0)
    c = mma16(i0, i1, first, z, z, z, z)
    c = mma16(i0, i1, rest, c[0] << 7, z, c[2] << 7, z)
    return i32((c[0] << 7) + c[1]), i32((c[2] << 7) + c[3])


@device
def token_limbs(lane, shared, limbs, quad):
    """(first, rest) of a quad."""
    odd, place = (lane >> 2) & 1, limbs + (4 * quad + (lane >> 3)) * 12 + (lane & 3)
    return i32(0 if odd else lds(shared, place)), i32(lds(shared, place + 4 + 4 * odd))


def table_words(name: str) -> int:
    """Words of the codebooks, up to the next 16 bytes."""
    return -(-shared_unpacker(name).n_entries // 4) * 4


class Constants(NamedTuple):
    """What a product is compiled for, and what follows from it: all stages know it when they are compiled."""
    fmt: Format
    unpack: object    # `quant.words.Unpacker`, its codebooks in shared memory,
    n_entries: int    # and their words
    n_quads: int      # of tokens
    single: bool      # one token, of which shared memory holds two rows, hi and lo
    form: Form
    planes: Factors
    many: bool        # so many quads that work on a tile's words is cheaper than more products
    split: bool       # as of `is_split`
    late: bool        # as of `is_late`
    zero: int         # the zero point, where a product subtracts it, not the unpacking

    @property
    def n_sums(self) -> int:
        """Of a lane: four rows, one token of each quad."""
        return 4 * self.n_quads

    @property
    def steps(self) -> int:
        """Sums of 32 columns that are scaled one by one."""
        return 32 // self.form.step

    @property
    def whole(self) -> bool:
        """Whether a chunk is a single group."""
        return self.fmt.group == CHUNK

    @property
    def minus_zero(self):
        """int32, four times -zero, the constant matrix."""
        return np.full(4, -self.zero, np.int8).view(np.int32)[0]


def constants(name: str, unpack, n_entries: int, n_quads: int, single: bool) -> Constants:
    fmt, many = format_of(name), n_quads > MOST_FEW
    _, integer, wide, carried = form(fmt)
    assert not single or (not (carried and (fmt.has_min or wide)) and fmt.has_min <= (integer or fmt.group != CHUNK)), name
    assert not (fmt.has_min and (unpack.pairs or fmt.zero)), name
    return Constants(fmt, unpack, n_entries, n_quads, single, form(fmt), factors(fmt, n_quads), many, is_split(fmt, n_quads),
                     is_late(fmt, n_quads), 0 if many else fmt.zero)


# The stages of a product, by one warp; each is made by a function of the constants. Arguments of device functions:
#     lane        4 g + q: rows g, g + 8, g + 16, g + 24 of the tile and, of a block of 32 columns, word q of their first and of
#                 their last 16
#     shared      uint32, the block's dynamic shared memory; tile, act, limbs, scratch: words at which the tile, the quads, the
#                 limbs of their sums (of a single token: these sums) and the tile's `Factors` begin. The caller's barrier
#                 protects all but scratch, which is the warp's own
#     j           of columns 32 j .. 32 j + 31 of the chunk, a block
#     w, v        words of A, int32, of the tile's rows 0 .. 15 and 16 .. 31: four, or with split levels eight, h then l
#     b0, b1      words of B, int32, of a block and a quad: of its first and of its last 16 columns

class Sums(NamedTuple):
    """Of a lane, arrays in registers, [4 n_quads]: o = 4 quad + k is row g + 8 k and token q of the quad, q = lane % 4."""
    acc: object     # float32: acc of docs/numerics.md, section 3
    high: object    # int32: the group's sum over hi limbs so far; of split levels of h and hi
    low: object     # over lo limbs, or 128 hi + lo; of split levels of h and lo
    m_high: object  # of imin and hi; of split levels of l and hi
    m_low: object   # of imin and lo; of split levels of l and lo


# Loads

def token_loader(const: Constants):
    """(lane, shared, act, j, quad) -> four words of B, of two of its columns: of blocks j and j + 1 for one quad, else of block j
    for quads `quad` and the next."""
    pairs, two_quads, last_row = const.unpack.pairs, const.n_quads > 1, 1 if const.single else 7

    @device
    def load_tokens(lane, shared, act, j, quad):
        if pairs:
            g, q = (lane >> 2) & last_row, lane & 3
            r, first = act + g * 64, swizzle(g)
            piece, word = 2 * j + (q >> 1), (q & 1) << 1
            if two_quads:
                a, b = lds2(shared, r + quad * QUAD_WORDS + ((piece ^ first) << 2) + word)
                c, d = lds2(shared, r + (quad + 1) * QUAD_WORDS + ((piece ^ first) << 2) + word)
            else:
                a, b = lds2(shared, r + ((piece ^ first) << 2) + word)
                c, d = lds2(shared, r + (((piece + 2) ^ first) << 2) + word)
            return i32(a), i32(b), i32(c), i32(d)
        r, matrix = lane & last_row, lane >> 3
        if two_quads:
            return ldmatrix4(shared, act + (quad + (matrix >> 1)) * QUAD_WORDS + r * 64
                             + (((2 * j + (matrix & 1)) ^ swizzle(r)) << 2))
        return ldmatrix4(shared, act + r * 64 + (((2 * j + matrix) ^ swizzle(r)) << 2))
    return load_tokens


def row_unpacker(const: Constants):
    """(lane, shared, tile, j) -> the four words of A of the tile's rows 0 .. 15, then the four of rows 16 .. 31: int8 levels,
    of a single token before the shift, or codes."""
    quarter = const.unpack.unshifted if const.single else const.unpack.quarter
    row_words = level_words(const.fmt, quarter, const.many and not const.split and const.fmt.zero > 0)

    @device
    def unpack_rows(lane, shared, tile, j):
        g, q = lane >> 2, lane & 3
        w0, w2 = row_words((shared, tile, g), j, q)
        w1, w3 = row_words((shared, tile, g + 8), j, q)
        v0, v2 = row_words((shared, tile, g + 16), j, q)
        v1, v3 = row_words((shared, tile, g + 24), j, q)
        return w0, w1, w2, w3, v0, v1, v2, v3
    return unpack_rows


@device
def load_factors(shared, scratch, plane, g):
    """Four words of a plane of `Factors`: those of rows g, g + 8, g + 16, g + 24."""
    a, b, c, d = lds4(shared, scratch + 32 * plane + 4 * g)
    return i32(a), i32(b), i32(c), i32(d)


# Products of a block with a quad

def step_multiplier(const: Constants):
    """(w, b0, b1, s, q, c0, c1, c2, c3) -> C + the products of the s-th `step` columns of a block, int32: (hi, lo) of two
    rows."""
    step, pairs, z = const.form.step, const.unpack.pairs, i32(0)

    @device
    def multiply_sixteen(w, b0, b1, s, q, c0, c1, c2, c3):
        if pairs:  # they are with two of the four lanes of a row
            mine = (q >> 1) == s
            return mma32(w[0], w[1], w[2], w[3], b0 if mine else z, b1 if mine else z, c0, c1, c2, c3)
        if s == 0:
            return mma16(w[0], w[1], b0, c0, c1, c2, c3)
        return mma16(w[2], w[3], b1, c0, c1, c2, c3)

    @device
    def multiply_step(w, b0, b1, s, q, c0, c1, c2, c3):
        if step == 16:
            return multiply_sixteen(w, b0, b1, s, q, c0, c1, c2, c3)
        return mma32(w[0], w[1], w[2], w[3], b0, b1, c0, c1, c2, c3)
    return multiply_step


def scale_follower(const: Constants):
    """(c, f0, f1, o, sums): adds the sums c, (hi, lo) of two rows, times their scales f to sums o and o + 1. An integer scale:
    low += isc (128 hi + lo), or, of a wide S, high += isc hi and low += isc lo. A float one, as bits: acc = fma(RN(128 hi + lo),
    d, acc)."""
    integer, wide = const.form.integer, const.form.wide

    @device
    def follow(c, f0, f1, o, sums):
        acc, high, low = sums.acc, sums.high, sums.low
        if integer:
            if wide:
                high[o], low[o] = i32(high[o] + f0 * c[0]), i32(low[o] + f0 * c[1])
                high[o + 1], low[o + 1] = i32(high[o + 1] + f1 * c[2]), i32(low[o + 1] + f1 * c[3])
            else:
                low[o] = i32(low[o] + f0 * i32((c[0] << 7) + c[1]))
                low[o + 1] = i32(low[o + 1] + f1 * i32((c[2] << 7) + c[3]))
        else:
            acc[o] = fma(i2f(i32((c[0] << 7) + c[1])), as_f32(f0), acc[o])
            acc[o + 1] = fma(i2f(i32((c[2] << 7) + c[3])), as_f32(f1), acc[o + 1])
    return follow


def carrier(const: Constants):
    """(w, b0, b1, o, high, low): adds the products of a block to the sums o and o + 1 of two rows: the tensor core adds on."""
    zero, minus_zero = const.zero, const.minus_zero

    @device
    def carry(w, b0, b1, o, high, low):
        h0, l0, h1, l1 = high[o], low[o], high[o + 1], low[o + 1]
        if zero:
            h0, l0, h1, l1 = mma32(minus_zero, minus_zero, minus_zero, minus_zero, b0, b1, h0, l0, h1, l1)
        high[o], low[o], high[o + 1], low[o + 1] = mma32(w[0], w[1], w[2], w[3], b0, b1, h0, l0, h1, l1)
    return carry


@device
def add_minima(i0, i1, i2, i3, b0, b1, o, high, low):
    """Adds the products of imin, in all four bytes of a word, with a block to the sums of two rows: i0 and i1 those of its first
    16 columns."""
    c = mma16(i0, i1, b0, high[o], low[o], high[o + 1], low[o + 1])
    high[o], low[o], high[o + 1], low[o + 1] = mma16(i2, i3, b1, c[0], c[1], c[2], c[3])


@device
def multiply_split(w, b0, b1, o, sums):
    """Adds the products of split levels of 16 rows with one quad. w: their words h, then l."""
    _, high, low, l_high, l_low = sums
    high[o], low[o], high[o + 1], low[o + 1] = mma32(w[0], w[1], w[2], w[3], b0, b1, high[o], low[o], high[o + 1], low[o + 1])
    l_high[o], l_low[o], l_high[o + 1], l_low[o + 1] = mma32u(w[4], w[5], w[6], w[7], b0, b1,
                                                              l_high[o], l_low[o], l_high[o + 1], l_low[o + 1])


def quad_multiplier(const: Constants):
    """(w, v, i, f, b0, b1, quad, q, sums): adds the products of a block with one quad, without split levels. i, f: minima and
    scales of the four rows, for the first and for the last 16 columns. Minima of a chunk: m += imin q, by products; of smaller
    groups at once: acc = fma(-m, RN(sum of q), acc)."""
    fmt, zero, minus_zero, steps, late, whole = const.fmt, const.zero, const.minus_zero, const.steps, const.late, const.whole
    carried, has_min, z, ones = const.form.carried, fmt.has_min, i32(0), i32(0x01010101)
    multiply_step, follow, carry = step_multiplier(const), scale_follower(const), carrier(const)

    @device
    def multiply_quad(w, v, i, f, b0, b1, quad, q, sums):
        o = 4 * quad
        if carried:
            carry(w, b0, b1, o, sums.high, sums.low)
            carry(v, b0, b1, o + 2, sums.high, sums.low)
        else:
            for s in range(steps):
                c = z, z, z, z
                if zero:
                    c = multiply_step((minus_zero, minus_zero, minus_zero, minus_zero), b0, b1, s, q, z, z, z, z)
                follow(multiply_step(w, b0, b1, s, q, c[0], c[1], c[2], c[3]), f[4 * s], f[4 * s + 1], o, sums)
                follow(multiply_step(v, b0, b1, s, q, c[0], c[1], c[2], c[3]), f[4 * s + 2], f[4 * s + 3], o + 2, sums)
        if has_min and not late:
            if whole:
                add_minima(i[0], i[1], i[4], i[5], b0, b1, o, sums.m_high, sums.m_low)
                add_minima(i[2], i[3], i[6], i[7], b0, b1, o + 2, sums.m_high, sums.m_low)
            else:
                c = mma32(ones, ones, ones, ones, b0, b1, z, z, z, z)
                q_sum = i2f(i32((c[0] << 7) + c[1]))
                for k in range(4):
                    sums.acc[o + k] = fma(as_f32(i[k]), q_sum, sums.acc[o + k])
    return multiply_quad


def block_multiplier(const: Constants):
    """(multiply_block, multiply_blocks): adds the products of block j with all quads, or of blocks j and j + 1. multiply_block:
    (lane, shared, tile, act, scratch, j, b0, b1, sums), b0, b1 of a single quad; of more they are loaded. multiply_blocks: the
    same without."""
    n_quads, steps, many, split, late, whole = const.n_quads, const.steps, const.many, const.split, const.late, const.whole
    has_min, carried, pairs, two_quads, z = const.fmt.has_min, const.form.carried, const.unpack.pairs, const.n_quads > 1, i32(0)
    m_plane, imin_plane = const.planes.m, const.planes.imin
    load_tokens, unpack_rows, multiply_quad = token_loader(const), row_unpacker(const), quad_multiplier(const)
    four_limbs = splitter(const.fmt) if split else None

    @device
    def multiply_block(lane, shared, tile, act, scratch, j, b0, b1, sums):
        g, q = lane >> 2, lane & 3
        w0, w1, w2, w3, v0, v1, v2, v3 = unpack_rows(lane, shared, tile, j)
        if split:
            first = steps * j + ((q >> 1) if pairs and steps == 2 else 0)  # the sub-blocks of a lane's two words
            last = first if pairs else steps * j + steps - 1
            f, e = load_factors(shared, scratch, first, g), load_factors(shared, scratch, last, g)
            w = four_limbs((w0, w1, w2, w3), f[0], f[1], e[0], e[1])
            v = four_limbs((v0, v1, v2, v3), f[2], f[3], e[2], e[3])
            for pair in range(n_quads // 2):
                b = load_tokens(lane, shared, act, j, 2 * pair)
                multiply_split(w, b[0], b[1], 8 * pair, sums)
                multiply_split(v, b[0], b[1], 8 * pair + 2, sums)
                multiply_split(w, b[2], b[3], 8 * pair + 4, sums)
                multiply_split(v, b[2], b[3], 8 * pair + 6, sums)
        else:
            w, v = (w0, w1, w2, w3), (v0, v1, v2, v3)
            f = i = w + v
            if not carried:
                f = load_factors(shared, scratch, steps * j, g) + load_factors(shared, scratch, steps * j + steps - 1, g)
            if has_min and not late:
                if whole:
                    i = (load_factors(shared, scratch, imin_plane + steps * j, g)
                         + load_factors(shared, scratch, imin_plane + steps * j + steps - 1, g))
                else:
                    i = load_factors(shared, scratch, m_plane + j, g) + w
            if two_quads:
                for pair in range(n_quads // 2):
                    if many:
                        apart()
                    b = load_tokens(lane, shared, act, j, 2 * pair)
                    multiply_quad(w, v, i, f, b[0], b[1], 2 * pair, q, sums)
                    if many:
                        apart()
                    multiply_quad(w, v, i, f, b[2], b[3], 2 * pair + 1, q, sums)
            else:
                multiply_quad(w, v, i, f, b0, b1, 0, q, sums)

    @device
    def multiply_blocks(lane, shared, tile, act, scratch, j, sums):
        b = z, z, z, z
        if not two_quads:
            b = load_tokens(lane, shared, act, j, 0)
        multiply_block(lane, shared, tile, act, scratch, j, b[0], b[1], sums)
        multiply_block(lane, shared, tile, act, scratch, j + 1, b[2], b[3], sums)
    return multiply_block, multiply_blocks


# The end of a group, and the whole chunk

def group_folder(const: Constants):
    """(lane, shared, limbs, scratch, plane, sums): acc = fma(RN(S), d, acc), then acc = fma(-m, RN(M), acc), of a group whose
    sums are integers; they begin at 0 again. plane: that of its d. S = 128 high + low, or of split levels 256 (128 high + low) +
    128 m_high + m_low; M = 128 m_high + m_low, or, late, a product of imin with the limbs of the sums of q."""
    n_quads, split, late, has_min = const.n_quads, const.split, const.late, const.fmt.has_min
    integer, wide, z = const.form.integer, const.form.wide, i32(0)
    m_plane, imin_plane = const.planes.m, const.planes.imin

    @device
    def fold(lane, shared, limbs, scratch, plane, sums):
        acc, high, low, m_high, m_low = sums
        g = lane >> 2
        d = load_factors(shared, scratch, plane, g)
        m = i = d
        if has_min:
            m = load_factors(shared, scratch, m_plane, g)
        if late:
            i = ldmatrix4(shared, scratch + 32 * imin_plane + 4 * lane)
        for quad in range(n_quads):
            for k in range(4):
                o = 4 * quad + k
                if split:
                    s = split_sum(high[o], low[o], m_high[o], m_low[o])
                else:
                    s = (l2f(mad64(high[o], i32(128), i64(low[o]))) if wide else i2f(low[o]) if integer
                         else i2f(i32((high[o] << 7) + low[o])))
                acc[o] = fma(s, as_f32(d[k]), acc[o])
                if has_min and not late:
                    acc[o] = fma(as_f32(m[k]), i2f(i32((m_high[o] << 7) + m_low[o])), acc[o])
                high[o], low[o] = z, z
            if late:
                o = 4 * quad
                first, rest = token_limbs(lane, shared, limbs, quad)
                m0, m1 = limb_product(i[0], i[1], first, rest)
                m2, m3 = limb_product(i[2], i[3], first, rest)
                acc[o], acc[o + 1] = fma(as_f32(m[0]), i2f(m0), acc[o]), fma(as_f32(m[1]), i2f(m1), acc[o + 1])
                acc[o + 2], acc[o + 3] = fma(as_f32(m[2]), i2f(m2), acc[o + 2]), fma(as_f32(m[3]), i2f(m3), acc[o + 3])
    return fold


def chunk_multiplier(const: Constants):
    """`TileProduct.multiply` of several tokens: the warp prepares the tile's factors, multiplies its eight blocks and folds its
    groups."""
    n_quads, n_sums, n_group, whole, d_plane = const.n_quads, const.n_sums, const.fmt.group, const.whole, const.planes.d
    prepare, fold = preparer(const.fmt, const.unpack, n_quads), group_folder(const)
    (multiply_block, multiply_blocks), z = block_multiplier(const), i32(0)

    @device
    def multiply(lane, shared, tile, act, limbs, scratch, acc):
        sums = Sums(acc, cuda.local.array(n_sums, i32), cuda.local.array(n_sums, i32),
                    cuda.local.array(n_sums, i32), cuda.local.array(n_sums, i32))
        for o in range(n_sums):
            acc[o], sums.high[o], sums.low[o], sums.m_high[o], sums.m_low[o] = f32(0), z, z, z, z
        prepare(lane, shared, tile, scratch)
        syncwarp()  # the factors are there
        # A loop, so that the compiler keeps fewer blocks under way, and registers are for sums
        if n_quads > 2 or not before_blackwell():
            j, end, step = i32(0), afresh(8), i32(2 if n_quads <= 2 or (n_quads < 16 and before_blackwell()) else 1)
            while j < end:
                if n_quads <= 2:
                    multiply_blocks(lane, shared, tile, act, scratch, j, sums)
                else:
                    multiply_block(lane, shared, tile, act, scratch, j, z, z, sums)
                    if step == 2:
                        multiply_block(lane, shared, tile, act, scratch, j + 1, z, z, sums)
                if n_group == 128 and i32(j + step) & 3 == 0:
                    fold(lane, shared, limbs, scratch, j >> 2, sums)
                j = i32(j + step)
        else:
            multiply_blocks(lane, shared, tile, act, scratch, 0, sums)
            multiply_blocks(lane, shared, tile, act, scratch, 2, sums)
            if n_group == 128:
                fold(lane, shared, limbs, scratch, 0, sums)
            multiply_blocks(lane, shared, tile, act, scratch, 4, sums)
            multiply_blocks(lane, shared, tile, act, scratch, 6, sums)
            if n_group == 128:
                fold(lane, shared, limbs, scratch, 1, sums)
        if whole:
            fold(lane, shared, limbs, scratch, d_plane, sums)
    return multiply


# A single token

@device
def own_row(lane, a, b, c, d):
    """Of the values of rows l / 4, + 8, + 16, + 24 that of the lane's own."""
    first, last = b if lane & 1 else a, d if lane & 1 else c
    return i32(last if lane & 2 else first)


class StepProduct(NamedTuple):
    """How a single token's sums are made of what the format states: words of levels; or terms, which the tensor core adds, of one
    or two words for four levels, or of a word for each level. The words of B follow."""
    unpack_rows: object  # (lane, shared, tile, j) -> words of A, as a tuple, of the tile's rows 0 .. 15 and of its rows 16 .. 31
    tokens: object       # (b0, b1) -> words of B, as a tuple
    multiply: object     # (w, b, c) -> c + the products: (hi, lo) of two rows


def level_product(const: Constants) -> StepProduct:
    """A word for four levels."""
    rows = row_unpacker(const)

    @device
    def unpack_rows(lane, shared, tile, j):
        w = rows(lane, shared, tile, j)
        return w[:4], w[4:]

    @device
    def multiply(w, b, c):
        return mma32(w[0], w[1], w[2], w[3], b[0], b[1], c[0], c[1], c[2], c[3])
    return StepProduct(unpack_rows, device(lambda b0, b1: (b0, b1)), multiply)


@device
def by_turns_of_bytes(b0, b1):
    """The bytes of two words by turns."""
    a, b = u32(b0), u32(b1)
    return i32(prmt(a, b, u32(0x5140))), i32(prmt(a, b, u32(0x7362)))


def looked_product(const: Constants) -> StepProduct:
    """The nibbles of a word as they lie are columns of the first and of the last 16 by turns, and so are the words of B."""
    word = const.unpack.source.word
    n_terms, _, of_nibbles = terms(const.unpack.source.levels)

    @device
    def two_rows(shared, tile, row, j, q):
        x, y = of_nibbles(word((shared, tile, row), j, q)), of_nibbles(word((shared, tile, row + 8), j, q))
        if n_terms == 1:
            return x[0], y[0], x[1], y[1]
        return x[0], y[0], x[1], y[1], x[2], y[2], x[3], y[3]

    @device
    def unpack_rows(lane, shared, tile, j):
        g, q = lane >> 2, lane & 3
        return two_rows(shared, tile, g, j, q), two_rows(shared, tile, g + 16, j, q)

    @device
    def multiply(w, b, c):
        c = mma32(w[0], w[1], w[2], w[3], b[0], b[1], c[0], c[1], c[2], c[3])
        if n_terms == 2:
            c = mma32(w[4], w[5], w[6], w[7], b[0], b[1], c[0], c[1], c[2], c[3])
        return c
    return StepProduct(unpack_rows, by_turns_of_bytes, multiply)


def summed_product(const: Constants) -> StepProduct:
    """A word's bytes are multiplied with the same q, which stands in all four bytes of a word of B."""
    words = const.unpack.source.words
    assert const.unpack.pairs

    @device
    def unpack_rows(lane, shared, tile, j):
        g, q = lane >> 2, lane & 3
        return (words((shared, tile, g), j, q) + words((shared, tile, g + 8), j, q),
                words((shared, tile, g + 16), j, q) + words((shared, tile, g + 24), j, q))

    @device
    def four_times(b):
        b, z = u32(b), u32(0)
        return (i32(prmt(b, z, u32(0x0000))), i32(prmt(b, z, u32(0x1111))),
                i32(prmt(b, z, u32(0x2222))), i32(prmt(b, z, u32(0x3333))))

    @device
    def multiply(w, b, c):
        for k in range(4):
            c = mma32(w[k], w[8 + k], w[4 + k], w[12 + k], b[k], b[4 + k], c[0], c[1], c[2], c[3])
        return c
    return StepProduct(unpack_rows, device(lambda b0, b1: four_times(b0) + four_times(b1)), multiply)


def step_product(const: Constants) -> StepProduct:
    source = const.unpack.source
    return (looked_product(const) if isinstance(source, Looked) else summed_product(const) if isinstance(source, Summed)
            else level_product(const))


# A single token and integer scales, in columns: of the four pairs of columns of a product, hi and lo, each takes another
# sub-block. The words of B of the others are zeros there. So four sub-blocks are multiplied before their sums are looked at, lane
# 4 g + n has those of the n-th for all its four rows, and what each makes of them is added over the lanes once a chunk.

class Turn(NamedTuple):
    """Two blocks whose words of B are loaded together: j and j + 1, or j and j + 2 (`in_blocks`)."""
    begin: object      # (lane, act, zeros) -> what `load` takes as `at`, once a chunk; zeros: word at which ZEROS zeros lie
    load: object       # (shared, at, k, j) -> words of B, four; the turn is the k-th of four blocks
    multiply: object   # (lane, shared, tile, j, b, x, y) -> x, y and the products of the tile's rows 0 .. 15 and 16 .. 31
    sub_block: object  # (lane, j) -> the sub-block whose sums the lane has behind a turn (16 columns) or two (32)


def in_columns(const: Constants) -> bool:
    """Whether the columns of a product take sub-blocks: for sums of 32 columns that one or two products make it is not less work
    (docs/kernels-log.md)."""
    source = const.unpack.source
    return const.form.integer and (const.form.step == 16 or const.fmt.zero > 0 or in_blocks(const)
                                   or isinstance(source, Summed | Paired | FiveBits))


@lru_cache(None)
def zero_words(name: str) -> int:
    """Words of zeros that the product of a single token reads in shared memory."""
    unpack, n_entries, _ = shared_unpacker(name)
    return ZEROS * in_columns(constants(name, unpack, n_entries, 1, True))


def in_blocks(const: Constants) -> bool:
    """Whether words have the codes of blocks j and j + 2."""
    return isinstance(const.unpack.source, Looked) and const.unpack.source.blocks is not None


def token_columns(const: Constants):
    """(lane, act, zeros) -> the words at which the lane's pieces of B begin, of as many zeros where they are none of its
    sub-blocks'; and `Turn.load`, which takes them as `at`. Those of other blocks are a constant away."""
    far, pairs, sixteens = in_blocks(const), const.unpack.pairs, const.form.step == 16

    @device
    def at_pairs(lane, act, zeros):
        n, q, limb = i32(lane >> 3), i32(lane & 3), i32((lane >> 2) & 1)
        piece = i32((q >> 1) ^ (limb << 1))
        first = i32(act + limb * 64 + (piece << 2) + ((q & 1) << 1))
        last = i32(act + limb * 64 + ((piece ^ 2) << 2) + ((q & 1) << 1))
        if sixteens:
            a, b = afresh(first if n == i32(q >> 1) else zeros), afresh(last if n == i32(2 + (q >> 1)) else zeros)
            return a, b, a, b
        return (afresh(first if n == i32(0) else zeros), afresh(last if n == i32(1) else zeros),
                afresh(first if n == i32(2) else zeros), afresh(last if n == i32(3) else zeros))

    @device
    def load_pairs(shared, at, k, j):
        first, last = (at[2], at[3]) if k else (at[0], at[1])
        a, b = lds2(shared, first + 8 * j)
        c, d = lds2(shared, last + 8 * j)
        return i32(a), i32(b), i32(c), i32(d)

    @device
    def at_pieces(lane, act, zeros):
        n, limb, matrix = i32((lane >> 1) & 3), i32(lane & 1), i32(lane >> 3)
        first = i32(act + limb * 64)
        if far:  # pieces 2j, 2j + 4, 2j + 1, 2j + 5 of blocks j and j + 2
            piece = i32((4 * (matrix & 1) + (matrix >> 1)) ^ (limb << 1))
            a, b = i32(first + (piece << 2)), i32(first + ((piece ^ 2) << 2))
            if sixteens:
                return afresh(a if n == matrix else zeros), afresh(b if n == matrix else zeros)
            return afresh(a if n == i32(2 * (matrix & 1)) else zeros), afresh(b if n == i32(2 * (matrix & 1) + 1) else zeros)
        a = i32(first + ((matrix ^ (limb << 1)) << 2))
        if sixteens:
            a = afresh(a if n == matrix else zeros)
            return a, a
        return afresh(a if n == i32(matrix >> 1) else zeros), afresh(a if n == i32(2 + (matrix >> 1)) else zeros)

    @device
    def load_pieces(shared, at, k, j):
        return ldmatrix4(shared, (at[1] if k else at[0]) + 8 * ((j & 4) if far else j))
    return (at_pairs, load_pairs) if pairs else (at_pieces, load_pieces)


def paired_multiplier(const: Constants):
    """`Turn.multiply` of codes of pairs, of both blocks by turns, and so are the halves of the words of B."""
    _, _, nibbles, fifths = const.unpack.source
    of_codes = pairs_of_codes(const.unpack.source.levels)
    assert const.unpack.pairs and const.form.step == 32

    @device
    def rows(shared, tile, row, j, q, b, c):
        t, s = (shared, tile, row), (shared, tile, row + 8)
        w, v = of_codes(nibbles(t, j, q), fifths(t, j, q)), of_codes(nibbles(s, j, q), fifths(s, j, q))
        c = mma32(w[0], v[0], w[1], v[1], b[0], b[1], c[0], c[1], c[2], c[3])
        return mma32(w[2], v[2], w[3], v[3], b[2], b[3], c[0], c[1], c[2], c[3])

    @device
    def multiply(lane, shared, tile, j, b, x, y):
        g, q, b0, b1, b2, b3 = lane >> 2, lane & 3, u32(b[0]), u32(b[1]), u32(b[2]), u32(b[3])
        halves = (i32(prmt(b0, b2, u32(0x5410))), i32(prmt(b0, b2, u32(0x7632))),
                  i32(prmt(b1, b3, u32(0x5410))), i32(prmt(b1, b3, u32(0x7632))))
        return rows(shared, tile, g, j, q, halves, x), rows(shared, tile, g + 16, j, q, halves, y)
    return multiply


def five_bit_multiplier(const: Constants):
    """`Turn.multiply` of codes of five bits, of both blocks by turns, and so are the words of B."""
    _, _, nibbles, fifths = const.unpack.source
    of_codes = five_bit_terms(const.unpack.source.levels)

    @device
    def rows(shared, tile, row, j, h, q, b, c):
        t, s = (shared, tile, row), (shared, tile, row + 8)
        (w, x), (v, y) = of_codes(nibbles(t, j, h, q), fifths(t, j, h, q)), of_codes(nibbles(s, j, h, q), fifths(s, j, h, q))
        c = mma32(w[0], v[0], x[0], y[0], b[0], b[1], c[0], c[1], c[2], c[3])
        c = mma32(w[1], v[1], x[1], y[1], b[0], b[1], c[0], c[1], c[2], c[3])
        c = mma32(w[2], v[2], x[2], y[2], b[0], b[1], c[0], c[1], c[2], c[3])
        return mma32(w[3], v[3], x[3], y[3], b[0], b[1], c[0], c[1], c[2], c[3])

    @device
    def multiply(lane, shared, tile, j, b, x, y):
        g, q, c, d = lane >> 2, lane & 3, by_turns_of_bytes(b[0], b[2]), by_turns_of_bytes(b[1], b[3])
        x, y = rows(shared, tile, g, j, 0, q, c, x), rows(shared, tile, g + 16, j, 0, q, c, y)
        return rows(shared, tile, g, j, 1, q, d, x), rows(shared, tile, g + 16, j, 1, q, d, y)
    return multiply


def near_multiplier(const: Constants):
    """`Turn.multiply` of blocks j and j + 1."""
    unpack_rows, tokens, multiply_step = step_product(const)

    @device
    def multiply(lane, shared, tile, j, b, x, y):
        w, v = unpack_rows(lane, shared, tile, j)
        c = tokens(b[0], b[1])
        x, y = multiply_step(w, c, x), multiply_step(v, c, y)
        w, v = unpack_rows(lane, shared, tile, j + 1)
        c = tokens(b[2], b[3])
        return multiply_step(w, c, x), multiply_step(v, c, y)
    return multiply


def far_multiplier(const: Constants):
    """`Turn.multiply` of words that have the codes of blocks j and j + 2, by turns, and so are the words of B."""
    multiply_step, blocks = step_product(const).multiply, const.unpack.source.blocks
    n_terms, _, of_nibbles = terms(const.unpack.source.levels)
    assert n_terms == 1

    @device
    def two_rows(shared, tile, row, j, h, q):
        v, w = of_nibbles(blocks((shared, tile, row), j, h, q)), of_nibbles(blocks((shared, tile, row + 8), j, h, q))
        return v[0], w[0], v[1], w[1]

    @device
    def multiply(lane, shared, tile, j, b, x, y):
        g, q = lane >> 2, lane & 3
        for h in range(2):
            c = by_turns_of_bytes(b[2 * h], b[2 * h + 1])
            x = multiply_step(two_rows(shared, tile, g, j, h, q), c, x)
            y = multiply_step(two_rows(shared, tile, g + 16, j, h, q), c, y)
        return x, y
    return multiply


def turn(const: Constants) -> Turn:
    far, sixteens = in_blocks(const), const.form.step == 16
    source = const.unpack.source
    multiplier = (paired_multiplier if isinstance(source, Paired) else five_bit_multiplier if isinstance(source, FiveBits)
                  else far_multiplier if far else near_multiplier)

    @device
    def sub_block(lane, j):
        p = lane & 3
        if sixteens:
            return i32(2 * (j + 2 * (p & 1)) + (p >> 1) if far else 2 * j + p)
        return i32((j & 4) + p)
    return Turn(*token_columns(const), multiplier(const), sub_block)


class ColumnSums(NamedTuple):
    """Of a lane, arrays in registers, int32 [4], of its four rows: S of its sub-blocks so far, 128 high + low where it is wide,
    else low; and M."""
    high: object
    low: object
    minima: object


def scale_taker(const: Constants):
    """(load, take). load: (t, i) -> what `take` takes of a row, i the lane's first sub-block. take: (words, t, i, n) -> isc, imin
    and the shift of sub-block i, the lane's n-th."""
    sub, shift, scales, z = const.unpack.sub, shift_of(const.fmt, const.unpack) or nothing, const.unpack.scales, i32(0)
    shifted, rest = shift is not nothing, 0
    if not scales:
        @device
        def take_one(words, t, i, n):
            isc, imin = sub(t, i)
            return isc, imin, shift(t, i) if shifted else z
        return device(lambda t, i: z), take_one
    load, take = scales
    rest = i32(terms(const.unpack.source.levels).constant if isinstance(const.unpack.source, Looked) else 0)
    assert not const.fmt.has_min and not const.fmt.zero

    @device
    def take_of_words(words, t, i, n):
        isc, more = take(words, n)
        return isc, z, i32(more + rest) if rest else more
    return load, take_of_words


def sub_block_follower(const: Constants):
    """(words, shared, tile, g, sums_at, i, n, x, y, sums): adds what the sums x, y of rows 0 .. 15 and 16 .. 31 of sub-block i,
    the lane's n-th, (hi, lo) of two rows each, and its minimum contribute. words: what `scale_taker` loaded of the lane's four
    rows. sums_at: word at which the sums of q of each 16 columns begin."""
    wide, has_min, n_sixteenths, z = const.form.wide, const.fmt.has_min, const.form.step // 16, i32(0)
    shifted, (_, take) = shift_of(const.fmt, const.unpack) is not None, scale_taker(const)

    @device
    def follow_row(words, t, i, n, k, hi, lo, q_sum, sums):
        isc, imin, more = take(words, t, i, n)
        if wide:
            if shifted:
                hi, lo = i32(hi + more * (q_sum >> 7)), i32(lo + more * (q_sum & 127))
            sums.high[k], sums.low[k] = i32(sums.high[k] + isc * hi), i32(sums.low[k] + isc * lo)
        else:
            both = i32((hi << 7) + lo)
            if shifted:
                both = i32(both + more * q_sum)
            sums.low[k] = i32(sums.low[k] + isc * both)
        if has_min:
            sums.minima[k] = i32(sums.minima[k] + imin * q_sum)

    @device
    def follow(words, shared, tile, g, sums_at, i, n, x, y, sums):
        q_sum = z
        if shifted or has_min:
            q_sum = i32(lds(shared, sums_at + i * n_sixteenths))
            if n_sixteenths == 2:
                q_sum = i32(q_sum + i32(lds(shared, sums_at + i * n_sixteenths + 1)))
        follow_row(words[0], (shared, tile, g), i, n, 0, x[0], x[1], q_sum, sums)
        follow_row(words[1], (shared, tile, i32(g + 8)), i, n, 1, x[2], x[3], q_sum, sums)
        follow_row(words[2], (shared, tile, i32(g + 16)), i, n, 2, y[0], y[1], q_sum, sums)
        follow_row(words[3], (shared, tile, i32(g + 24)), i, n, 3, y[2], y[3], q_sum, sums)
    return follow


@device
def over_lanes(lane, values):
    """Of values[k], of row l / 4 + 8 k, the sum over the four lanes of a row, for the lane's own row."""
    odd, upper = lane & 1, lane & 2
    a, b = (values[1], values[3]) if odd else (values[0], values[2])
    c, d = (values[0], values[2]) if odd else (values[1], values[3])
    a, b = i32(a + shuffle(c, lane ^ 1)), i32(b + shuffle(d, lane ^ 1))
    kept, other = (b, a) if upper else (a, b)
    return i32(kept + shuffle(other, lane ^ 2))


def column_token_multiplier(const: Constants):
    """`TileProduct.multiply` of a single token and integer scales."""
    (columns, load, multiply, sub_block), follow, group = turn(const), sub_block_follower(const), const.unpack.group
    wide, has_min, sixteens, z = const.form.wide, const.fmt.has_min, const.form.step == 16, i32(0)
    load_scales, _ = scale_taker(const)
    second = 1 if in_blocks(const) else 2  # block of the second turn
    begin = syncwarp if isinstance(const.unpack.source, Summed) else apart  # a word a level: registers for one turn
    assert const.whole

    @device
    def multiply_turn(lane, shared, tile, at, k, j, x, y):
        begin()
        return multiply(lane, shared, tile, j, load(shared, at, k, j), x, y)

    @device
    def multiply_half(lane, shared, tile, at, limbs, words, half, sums):
        none, g, j = (z, z, z, z), i32(lane >> 2), 4 * half
        x, y = multiply_turn(lane, shared, tile, at, 0, j, none, none)
        if sixteens:
            follow(words, shared, tile, g, limbs, sub_block(lane, j), 2 * half, x, y, sums)
            x, y = none, none
        x, y = multiply_turn(lane, shared, tile, at, 1, j + second, x, y)
        follow(words, shared, tile, g, limbs, sub_block(lane, j + second), 2 * half + 1 if sixteens else half, x, y, sums)

    @device
    def multiply_token(lane, shared, tile, act, limbs, scratch, acc):
        sums = ColumnSums(cuda.local.array(4, i32), cuda.local.array(4, i32), cuda.local.array(4, i32))
        for k in range(4):
            sums.high[k], sums.low[k], sums.minima[k] = z, z, z
        at, g, i = columns(lane, act, scratch), i32(lane >> 2), sub_block(lane, 0)
        words = (load_scales((shared, tile, g), i), load_scales((shared, tile, i32(g + 8)), i),
                 load_scales((shared, tile, i32(g + 16)), i), load_scales((shared, tile, i32(g + 24)), i))
        multiply_half(lane, shared, tile, at, limbs, words, 0, sums)
        multiply_half(lane, shared, tile, at, limbs, words, 1, sums)
        low = over_lanes(lane, sums.low)
        d, m = group((shared, tile, i32((lane >> 2) + ((lane & 3) << 3))), 0)
        acc[0] = fma(l2f(mad64(over_lanes(lane, sums.high), i32(128), i64(low))) if wide else i2f(low), d, f32(0))
        if has_min:
            acc[0] = fma(-m, i2f(over_lanes(lane, sums.minima)), acc[0])
    return multiply_token


# A single token, where that is more work or scales are floats: a lane has one row of the tile, l / 4 + 8 (l % 4), whose scales
# and minima it unpacks for itself

class TokenSums(NamedTuple):
    """Of a lane, arrays in registers."""
    isc: object    # int32 [16]: integer scales of the row's sub-blocks
    acc: object    # float32 [1]: acc of docs/numerics.md, section 3
    total: object  # [1], int32, or int64 where S is wide: the S of the group so far
    high: object   # int32 [4], of the four rows that the tensor core adds on: sums over hi limbs
    low: object    # and over lo limbs


def scale_unpacker(const: Constants):
    """(t, shared, sums_at, isc) -> M = the sum of imin * q, int32; fills isc. t: (shared, tile, row) of `Unpacker`; sums_at: word
    at which the sums of q of each 16 columns begin."""
    sub, has_min, z = const.unpack.sub, const.fmt.has_min, i32(0)
    n_scales, n_sixteenths = CHUNK // const.fmt.sub, const.fmt.sub // 16

    @device
    def unpack_scales(t, shared, sums_at, isc):
        minimum = z
        for i in range(n_scales):
            isc[i], imin = sub(t, i)
            if has_min:
                q_sum = i32(lds(shared, sums_at + i * n_sixteenths))
                if n_sixteenths == 2:
                    q_sum = i32(q_sum + i32(lds(shared, sums_at + i * n_sixteenths + 1)))
                minimum = i32(minimum + imin * q_sum)
        return minimum
    return unpack_scales


def token_steps(const: Constants):
    """(b0, b1) -> the words of B of each sum of a block: of a sum of 16 columns the others' bytes are zeros."""
    tokens, z = step_product(const).tokens, i32(0)
    if const.form.step == 32:
        return device(lambda b0, b1: (tokens(b0, b1),))
    return device(lambda b0, b1: (tokens(b0, z), tokens(z, b1)))


def token_block_multiplier(const: Constants):
    """(lane, shared, tile, act, j, t, sums_at, sums): adds the products of blocks j and j + 1 with the token. An integer scale:
    total += isc S; a float one: acc = fma(RN(S), d, acc), and of minima of less than a chunk acc = fma(-m, RN(sum of q), acc). t,
    sums_at: as of `scale_unpacker`."""
    steps, zero, minus_zero, whole, n_group = const.steps, const.zero, const.minus_zero, const.whole, const.fmt.group
    integer, carried, has_min, group = const.form.integer, const.form.carried, const.fmt.has_min, const.unpack.group
    ones, z, wide = i32(0x01010101), i32(0), const.form.wide
    load_tokens, carry, (unpack_rows, _, multiply_step) = token_loader(const), carrier(const), step_product(const)
    tokens, shift = token_steps(const), shift_of(const.fmt, const.unpack)
    shifted, shift = shift is not None, shift or nothing
    assert not (zero and (integer or steps == 2))

    @device
    def multiply_block(lane, shared, tile, j, b0, b1, t, sums_at, sums):
        isc, acc, total, high, low = sums
        w, v = unpack_rows(lane, shared, tile, j)
        b = tokens(b0, b1)
        if carried:
            carry(w, b0, b1, 0, high, low)
            carry(v, b0, b1, 2, high, low)
        else:
            for s in range(steps):
                c = z, z, z, z
                if zero:
                    c = mma32(minus_zero, minus_zero, minus_zero, minus_zero, b0, b1, z, z, z, z)
                x, y = multiply_step(w, b[s], c), multiply_step(v, b[s], c)
                both = own_row(lane, (x[0] << 7) + x[1], (x[2] << 7) + x[3], (y[0] << 7) + y[1], (y[2] << 7) + y[3])
                if shifted:
                    more = shift(t, steps * j + s)
                    both = i32(both + more * i32(lds(shared, sums_at + 2 * j + s)))
                    if steps == 1:
                        both = i32(both + more * i32(lds(shared, sums_at + 2 * j + 1)))
                if wide and before_blackwell():
                    total[0] = mad64(isc[steps * j + s], both, total[0])
                elif wide:
                    total[0] = i64(total[0] + i64(isc[steps * j + s]) * i64(both))
                elif integer:
                    total[0] = i32(total[0] + isc[steps * j + s] * both)
                else:
                    d, m = group(t, (32 * j + 16 * s) // n_group)
                    acc[0] = fma(i2f(both), d, acc[0])
        if has_min and not whole:
            c = mma32(ones, ones, ones, ones, b0, b1, z, z, z, z)
            d, m = group(t, 32 * j // n_group)
            acc[0] = fma(-m, i2f(i32((c[0] << 7) + c[1])), acc[0])

    @device
    def multiply_blocks(lane, shared, tile, act, j, t, sums_at, sums):
        apart()
        b = load_tokens(lane, shared, act, j, 0)
        multiply_block(lane, shared, tile, j, b[0], b[1], t, sums_at, sums)
        apart()
        multiply_block(lane, shared, tile, j + 1, b[2], b[3], t, sums_at, sums)
    return multiply_blocks


def token_folder(const: Constants):
    """(lane, t, i, minimum, sums): acc = fma(RN(S), d, acc), then acc = fma(-m, RN(minimum), acc), of group i, whose sums are
    integers."""
    group, carried, wide, has_min, z = const.unpack.group, const.form.carried, const.form.wide, const.fmt.has_min, i32(0)

    @device
    def fold(lane, t, i, minimum, sums):
        _, acc, total, high, low = sums
        d, m = group(t, i)
        s = total[0]
        if carried:
            s = i32((own_row(lane, high[0], high[1], high[2], high[3]) << 7) + own_row(lane, low[0], low[1], low[2], low[3]))
            for k in range(4):
                high[k], low[k] = z, z
        acc[0] = fma(l2f(s) if wide else i2f(s), d, acc[0])
        if has_min:
            acc[0] = fma(-m, i2f(minimum), acc[0])
    return fold


def row_token_multiplier(const: Constants):
    """`TileProduct.multiply` of a single token: a lane unpacks its row's scales, the warp multiplies its eight blocks, the lane
    folds its row's groups."""
    n_group, whole, has_min = const.fmt.group, const.whole, const.fmt.has_min
    step, integer, wide, _ = const.form
    total_type, n_entries, z = i64 if wide else i32, const.n_entries, i32(0)
    unpack_scales, multiply_blocks, fold = scale_unpacker(const), token_block_multiplier(const), token_folder(const)

    @device
    def multiply_token(lane, shared, tile, act, limbs, scratch, acc):
        sums = TokenSums(cuda.local.array(16, i32), acc, cuda.local.array(1, total_type),
                         cuda.local.array(4, i32), cuda.local.array(4, i32))
        t, acc[0] = (shared, tile, i32((lane >> 2) + ((lane & 3) << 3))), f32(0)
        sums.total[0] = total_type(0)
        for k in range(4):
            sums.high[k], sums.low[k] = z, z
        minimum = z
        if integer:
            minimum = unpack_scales(t, shared, limbs, sums.isc)
        multiply_blocks(lane, shared, tile, act, 0, t, limbs, sums)
        multiply_blocks(lane, shared, tile, act, 2, t, limbs, sums)
        if n_group == 128:
            fold(lane, t, 0, minimum, sums)
        if n_entries or (not wide and (step == 16 or (has_min and not whole))):
            syncwarp()  # what is loaded for the other half is loaded behind it: registers
        multiply_blocks(lane, shared, tile, act, 4, t, limbs, sums)
        multiply_blocks(lane, shared, tile, act, 6, t, limbs, sums)
        if n_group == 128:
            fold(lane, t, 1, minimum, sums)
        if whole:
            fold(lane, t, 0, minimum, sums)
    return multiply_token


def token_multiplier(const: Constants):
    return column_token_multiplier(const) if in_columns(const) else row_token_multiplier(const)


def tile_product(name: str, n_quads: int, first_table: int = 0, single: bool = False) -> TileProduct:
    """first_table: word of shared memory at which the codebooks begin. single: one token, `act` holds its two rows only."""
    unpack, n_entries, entry = shared_unpacker(name, first_table)
    const = constants(name, unpack, n_entries, n_quads, single)
    return TileProduct(token_multiplier(const) if single else chunk_multiplier(const), n_entries, entry)


# What becomes of a total

@device
def row_there(row, n_rows):
    """A row that there is, for `ldc`, which may be moved before the test that there is one: the compiler does not see that it is
    the row itself."""
    return i32(min(afresh(row), n_rows - 1))


class Ending(NamedTuple):
    """Of the totals of a matrix, or of two, gate and up, one after the other. i: a total's place in `out`; row: of n_rows of the
    matrix, whose biases begin at `first`; last: of the last matrix; waiting: the first one's total."""
    waiting: object  # (out, i, last) -> it, where `finish` left it in `out`
    finish: object   # (out, i, first, row, n_rows, total, waiting, last, *biases)


STORE = Ending(waiting=device(lambda out, i, last: f32(0)),
               finish=device(lambda out, i, first, row, n_rows, total, waiting, last, bias, other_bias: st(out, i, total)))


def gate_and_store(activation, biased, alpha=0.0, limit=0.0) -> Ending:
    """out = activation(gate) * up, or swiglu_oai with its constants. The gate's total may wait in `out`, where the thread that
    put it there finds it."""
    glu = gated_unit(activation, alpha, limit)

    @device
    def waiting(out, i, last):
        return ld(out, i) if last else f32(0)

    @device
    def finish(out, i, first, row, n_rows, total, waiting, last, gate_bias, up_bias):
        if last:
            g, u = waiting, total
            if biased:
                at = i32(first + row_there(row, n_rows))
                g, u = add(g, ldc(gate_bias, at)), add(u, ldc(up_bias, at))
            st(out, i, glu(g, u))
        else:
            st(out, i, total)
    return Ending(waiting, finish)
