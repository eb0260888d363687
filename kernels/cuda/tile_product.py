"""A weight tile's chunk (32 rows x 256 columns) times a few tokens on int8 tensor cores, by one warp (docs/numerics.md, section
3).

The tile lies in shared memory as it lies in the file's bits; a lane unpacks what a tensor core's fragment of rows wants of it
straight into registers: lane l has words l % 4 of rows l / 4, l / 4 + 8, + 16 and + 24. Integer sums have no order, so any
assignment of columns to words will do as long as the activations follow it (`Unpacker.quarter`).

Of few quads a zero point (level = code - zero) is a product of the same activations with a constant matrix, passed on as the
addend; so is the sum of q under a minimum, and the minima of a chunk are a product with imin. What takes the place of that for
more quads, and from how many on, says `tile_form`.
"""
from typing import NamedTuple

from numba import cuda

from ...quant.formats import CHUNK, Format
from ...quant.words import ONES, TOPS
from .ptx import (afresh, apart, as_f32, as_u32, before_blackwell, device, f32, fma, i2f, i32, i64, l2f, ldmatrix4, lds2,
                  lds4, mad64, mma16, mma32, mma32u, sts, sts4, syncwarp, u32)
from .quantize import four_bytes
from .split_levels import limb_summer, split_of, splitter
from .tile_form import QUAD_WORDS, Constants, TileProduct, constants, factors, form, is_late, swizzle
from .weights import shared_unpacker


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
    assert not late or 4 * fmt.max_imin <= 255, fmt.name  # `minima_product`

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


@device
def minima_product(i0, i1, c, b):
    """The sums over the chunk of imin * q of two rows. i0, i1: bytes for every 16 columns; c, b: limbs of the sums of q
    (`quantize`)."""
    z = i32(0)
    u0, r0, u1, r1 = mma32u(i0, i1, i0 << 2, i1 << 2, c, b, z, z, z, z)
    return i32((u0 << 10) + r0), i32((u1 << 10) + r1)


@device
def token_limbs(lane, shared, limbs, quad):
    """(c, b) of a quad."""
    c, b = lds2(shared, limbs + (4 * quad + (lane >> 3)) * 16 + ((lane & 4) << 1) + ((lane & 3) << 1))
    return i32(c), i32(b)


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
    row_words = level_words(const.fmt, quarter, not const.split and const.zero < const.fmt.zero)

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


def split_multiplier(const: Constants):
    """(w, b0, b1, o, sums): adds the products of split levels of 16 rows with one quad. w: their words h, then l."""
    split = split_of(const.fmt)
    two, multiply_h = split.n_limbs == 2, mma32u if split.unsigned else mma32
    multiply_l = mma32u if split.l_unsigned else mma32

    @device
    def multiply_split(w, b0, b1, o, sums):
        _, high, low, l_high, l_low = sums
        high[o], low[o], high[o + 1], low[o + 1] = multiply_h(w[0], w[1], w[2], w[3], b0, b1,
                                                              high[o], low[o], high[o + 1], low[o + 1])
        if two:
            l_high[o], l_low[o], l_high[o + 1], l_low[o + 1] = multiply_l(w[4], w[5], w[6], w[7], b0, b1,
                                                                          l_high[o], l_low[o], l_high[o + 1], l_low[o + 1])
    return multiply_split


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
    n_quads, steps, parted, split, late, whole = const.n_quads, const.steps, const.apart, const.split, const.late, const.whole
    has_min, carried, pairs, two_quads, z = const.fmt.has_min, const.form.carried, const.unpack.pairs, const.n_quads > 1, i32(0)
    m_plane, imin_plane = const.planes.m, const.planes.imin
    load_tokens, unpack_rows, multiply_quad = token_loader(const), row_unpacker(const), quad_multiplier(const)
    four_limbs, multiply_split = (splitter(const.fmt), split_multiplier(const)) if split else (None, None)

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
                    if parted:
                        apart()
                    b = load_tokens(lane, shared, act, j, 2 * pair)
                    multiply_quad(w, v, i, f, b[0], b[1], 2 * pair, q, sums)
                    if parted:
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
    sums are integers; they begin at 0 again. plane: that of its d. S = 128 high + low, or of split levels that of
    `limb_summer`; M = 128 m_high + m_low, or, late, a product of imin with the limbs of the sums of q."""
    n_quads, split, late, has_min = const.n_quads, const.split, const.late, const.fmt.has_min
    integer, wide, z = const.form.integer, const.form.wide, i32(0)
    m_plane, imin_plane, limb_sum = const.planes.m, const.planes.imin, limb_summer(const.fmt) if split else None

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
                    s = limb_sum(high[o], low[o], m_high[o], m_low[o])
                else:
                    s = (l2f(mad64(high[o], i32(128), i64(low[o]))) if wide else i2f(low[o]) if integer
                         else i2f(i32((high[o] << 7) + low[o])))
                acc[o] = fma(s, as_f32(d[k]), acc[o])
                if has_min and not late:
                    acc[o] = fma(as_f32(m[k]), i2f(i32((m_high[o] << 7) + m_low[o])), acc[o])
                high[o], low[o] = z, z
            if late:
                o = 4 * quad
                c, b = token_limbs(lane, shared, limbs, quad)
                m0, m1 = minima_product(i[0], i[1], c, b)
                m2, m3 = minima_product(i[2], i[3], c, b)
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


def tile_product(name: str, n_quads: int, first_table: int = 0) -> TileProduct:
    """Of several tokens. first_table: word of shared memory at which the codebooks begin."""
    unpack, n_entries, entry = shared_unpacker(name, first_table)
    return TileProduct(chunk_multiplier(constants(name, unpack, n_entries, n_quads, False)), n_entries, entry)
