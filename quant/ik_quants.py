"""The types of ik_llama.cpp: codes through tables that are not uniform, each with a shifted twin that a bit of the sub-block
selects; and levels that a multiplication generates from an index (trellis types). Facts: ik_llama.cpp's `ggml-common.h` and
`iqk_quantize.cpp`.

Types with a header have one float scale a row (`Format.header`); a tile has it in each chunk, as a field in front of the block's.
"""
import numpy as np

from .k_quants import two_bits_word
from .legacy import IQ4_LEVELS
from .words import NIBBLES, ONES, TOPS, TWOS, ZERO, Parts, f32, halves, i32, u32, u64, unit_scales

# Levels by code; where a sub-block's bit is set, so much is added to each
TWO_BIT_LEVELS, TWO_BIT_SHIFT = (-31, -13, 1, 17), 5
THREE_BIT_LEVELS, THREE_BIT_SHIFT = (-63, -40, -23, -10, 1, 13, 28, 47), 4
FOUR_BIT_SHIFT = 4  # of IQ4_LEVELS
FIVE_BIT_LEVELS, FIVE_BIT_SHIFT = (-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
                                   -1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121), 2
SIX_BIT_LEVELS, SIX_BIT_SHIFT = (-127, -121, -115, -109, -104, -98, -93, -88, -84, -79, -74, -70, -66, -62, -58, -54,
                                 -51, -47, -44, -40, -37, -34, -31, -28, -25, -22, -19, -16, -13, -11, -8, -5,
                                 -2, 0, 3, 6, 9, 12, 14, 17, 20, 23, 27, 30, 33, 36, 40, 44,
                                 47, 51, 55, 59, 63, 68, 72, 77, 82, 87, 92, 98, 103, 109, 115, 121), 1
PAIR_LEVELS = ((-63, -23), (-63, 13), (-40, -63), (-40, -10), (-40, 13), (-40, 47), (-23, -40), (-23, -23),
               (-23, 1), (-23, 13), (-23, 28), (-10, -63), (-10, 1), (-10, 13), (-10, 47), (1, -23),
               (1, -10), (1, 1), (1, 13), (1, 28), (13, -40), (13, -23), (13, -10), (13, 1),
               (13, 13), (28, -63), (28, -23), (28, 1), (28, 28), (28, 47), (47, -23), (47, 13))
MULTIPLIER = 0xCBAC1FED  # of the trellis


def q6_0(p, ldw, ld4, ld2):
    """Blocks of 32: nibbles as in the legacy formats; in qh the upper two bits, byte c % 8 those of columns c % 8 + 0, 16, 8, 24
    from the lowest on."""
    shr, half, f16 = p.shr, p.half, p.f16

    @p.jit
    def word(t, j, h, q):
        upper = shr(ldw(t, 8 + (j >> 1), 2 * (j & 1) + (q & 1)), 4 * (q >> 1) + 2 * h) & TWOS
        return u32(shr(ldw(t, j, q), 4 * h) & NIBBLES | upper << u32(4))

    @p.jit
    def group(t, g):
        return f16(half(ldw(t, 12, g >> 1), g & 1)), ZERO

    return Parts(halves(p, word), unit_scales(p), group)


# Levels

def shifted(p, shift):
    """(w, bit) -> int32 word of the int8 levels of w, `shift` more where the bit is 1. No level leaves int8."""
    shifts = u32(shift) * ONES

    @p.jit
    def level(w, bit):
        return i32(u32(((u32(w) ^ TOPS) + bit * shifts) ^ TOPS))  # bytes of level + 128 have no carry
    return level


def chosen(p, levels):
    """(a, b, upper_a, upper_b) -> int32 words of the levels of the codes of two words. a, b: the codes' low nibbles. upper: the
    bits above them, in the lowest places of each byte."""
    tables = [p.lookup16(levels[first:first + 16]) for first in range(0, len(levels), 16)]

    @p.jit
    def select(bits, x, y):
        return i32(u32(u32(x) ^ (u32((bits & ONES) * u32(255)) & (u32(x) ^ u32(y)))))

    if len(tables) == 2:
        low, high = tables

        @p.jit
        def lookup(a, b, upper_a, upper_b):
            w = u32(a | b << u32(4))
            x0, y0 = low(w)
            x1, y1 = high(w)
            return select(upper_a, x0, x1), select(upper_b, y0, y1)
    else:
        first, second, third, fourth = tables

        @p.jit
        def lookup(a, b, upper_a, upper_b):
            w = u32(a | b << u32(4))
            (x0, y0), (x1, y1), (x2, y2), (x3, y3) = first(w), second(w), third(w), fourth(w)
            top_a, top_b = u32(u32(upper_a) >> u32(1)), u32(u32(upper_b) >> u32(1))
            return (select(top_a, select(upper_a, x0, x1), select(upper_a, x2, x3)),
                    select(top_b, select(upper_b, y0, y1), select(upper_b, y2, y3)))
    return lookup


def two_bit_codes(p, ldw, selected):
    """`quarter` of 64 bytes of 2-bit fields in pieces 0..3. selected: (t, j, h) -> the bit of columns 32j + 16h.."""
    table = (*TWO_BIT_LEVELS, *(level + TWO_BIT_SHIFT for level in TWO_BIT_LEVELS), *[0] * 8)
    lookup, word = p.lookup16(table), two_bits_word(p, ldw)

    @p.jit
    def quarter(t, j, q):
        a = u32(word(t, j, 0, q) | u32(selected(t, j, 0) * u32(4)) * ONES)
        b = u32(word(t, j, 1, q) | u32(selected(t, j, 1) * u32(4)) * ONES)
        return lookup(u32(a | b << u32(4)))
    return quarter


def three_bit_codes(p, ldw, selected):
    """`quarter`: 2-bit fields as before, their third bits in pieces 4 and 5: bit j of byte c % 32."""
    table = (*THREE_BIT_LEVELS, *(level + THREE_BIT_SHIFT for level in THREE_BIT_LEVELS))
    lookup, word, shr = p.lookup16(table), two_bits_word(p, ldw), p.shr

    @p.jit
    def code(t, j, h, q):
        third = u32(shr(ldw(t, 4 + h, q), j) & ONES)
        return u32(word(t, j, h, q) | third << u32(2) | u32(selected(t, j, h) * u32(8)) * ONES)

    @p.jit
    def quarter(t, j, q):
        return lookup(u32(code(t, j, 0, q) | code(t, j, 1, q) << u32(4)))
    return quarter


def four_bit_codes(p, word, selected):
    """`quarter`: word(t, j, q) has the nibbles of columns 4q.. of 32j.., and in the high ones those of 16 + 4q.."""
    lookup, level = p.lookup16(IQ4_LEVELS), shifted(p, FOUR_BIT_SHIFT)

    @p.jit
    def quarter(t, j, q):
        a, b = lookup(word(t, j, q))
        return level(a, selected(t, j, 0)), level(b, selected(t, j, 1))
    return quarter


def upper_codes(p, ldw, upper, levels, shift, selected):
    """`quarter` of nibbles as Q5_K has them, in pieces 0..7. upper: (t, j, h, q) -> the bits above them."""
    lookup, level, shr = chosen(p, levels), shifted(p, shift), p.shr

    @p.jit
    def word(t, j, h, q):
        return u32(shr(ldw(t, 2 * (j >> 1) + h, q), 4 * (j & 1)) & NIBBLES)

    @p.jit
    def quarter(t, j, q):
        a, b = lookup(word(t, j, 0, q), word(t, j, 1, q), upper(t, j, 0, q), upper(t, j, 1, q))
        return level(a, selected(t, j, 0)), level(b, selected(t, j, 1))
    return quarter


def fifth_bits(p, ldw):
    """`upper` of bits in pieces 8 and 9: bit j of byte c % 32."""
    shr = p.shr

    @p.jit
    def upper(t, j, h, q):
        return u32(shr(ldw(t, 8 + h, q), j) & ONES)
    return upper


# Sub-blocks of 16 columns, a float16 scale d a block; x has a bit for each sub-block

def of_sixteen(p, x):
    """`selected` by the bits of x(t), the first of the sub-block of columns 0..15."""
    shr = p.shr

    @p.jit
    def selected(t, j, h):
        return u32(shr(x(t), 2 * j + h) & u32(1))
    return selected


def scale_and_bits(p, word):
    """(group, x) of a word(t) whose low half is d, the high one x."""
    f16 = p.f16

    @p.jit
    def group(t, g):
        return f16(u32(word(t)) & u32(0xffff)), ZERO

    @p.jit
    def x(t):
        return u32(u32(word(t)) >> u32(16))
    return group, x


def iq2_k(p, ldw, ld4, ld2):
    """Words: sc, two of nibbles; d and x."""
    shr = p.shr
    group, x = scale_and_bits(p, p.jit(lambda t: ld4(t, 2)))

    @p.jit
    def sub(t, i):
        return i32(i32(shr(ld4(t, i >> 3), 4 * (i & 7)) & u32(15)) - i32(8)), i32(0)

    return Parts(two_bit_codes(p, ldw, of_sixteen(p, x)), sub, group)


def iq3_k(p, ldw, ld4, ld2):
    """Words: sl, two of nibbles; d and x. Half: sh, the scales' signs."""
    shr = p.shr
    group, x = scale_and_bits(p, p.jit(lambda t: ld4(t, 2)))

    @p.jit
    def sub(t, i):
        scale = i32(u32((shr(ld4(t, i >> 3), 4 * (i & 7)) & u32(15)) * u32(2) + u32(1)))
        return i32(-scale) if shr(ld2(t, 0), i) & u32(1) else scale, i32(0)

    return Parts(three_bit_codes(p, ldw, of_sixteen(p, x)), sub, group)


def six_bit_scales(p, ldw, header):
    """(sub, group, x) of a piece of d and x, the upper two bits of 16 scales (sh), their nibbles (sl); minus 32."""
    shr = p.shr
    group, x = scale_and_bits(p, p.jit(lambda t: ldw(t, header, 0)))

    @p.jit
    def sub(t, i):
        low, high = shr(ldw(t, header, 2 + (i >> 3)), 4 * (i & 7)) & u32(15), shr(ldw(t, header, 1), 2 * i) & u32(3)
        return i32(i32(low | high << u32(4)) - i32(32)), i32(0)
    return sub, group, x


def iq4_k(p, ldw, ld4, ld2):
    sub, group, x = six_bit_scales(p, ldw, 8)
    return Parts(four_bit_codes(p, ldw, of_sixteen(p, x)), sub, group)


def iq5_k(p, ldw, ld4, ld2):
    sub, group, x = six_bit_scales(p, ldw, 10)
    return Parts(upper_codes(p, ldw, fifth_bits(p, ldw), FIVE_BIT_LEVELS, FIVE_BIT_SHIFT, of_sixteen(p, x)), sub, group)


def iq6_k(p, ldw, ld4, ld2):
    """Piece 12: int8 scales. Word: d and x. Levels are integers, as all of ik_llama.cpp's products take them."""
    shr, byte = p.shr, p.byte
    group, x = scale_and_bits(p, p.jit(lambda t: ld4(t, 0)))

    @p.jit
    def upper(t, j, h, q):
        return u32(shr(ldw(t, 8 + 2 * (j >> 2) + h, q), 2 * (j & 3)) & TWOS)

    @p.jit
    def sub(t, i):
        return i32(i32(byte(ldw(t, 12, i >> 2), i & 3) ^ u32(128)) - i32(128)), i32(0)

    return Parts(upper_codes(p, ldw, upper, SIX_BIT_LEVELS, SIX_BIT_SHIFT, of_sixteen(p, x)), sub, group)


# Sub-blocks of 32 columns, one scale a row

def of_bits(p, x, first):
    """`selected` by the bits first.. of x(t), one for 32 columns."""
    shr = p.shr

    @p.jit
    def selected(t, j, h):
        return u32(shr(x(t), first + j) & u32(1))
    return selected


def nibble_of_four(p, word):
    """(t, i) -> nibble of scale i of eight: the bytes of word(t) have those of i and i + 4."""
    shr = p.shr

    @p.jit
    def nibble(t, i):
        return u32(shr(word(t), 8 * (i & 3) + 4 * (i >> 2)) & u32(15))
    return nibble


def iq2_ks(p, ldw, ld4, ld2):
    """Words: sc, eight nibbles; d and x, which has the selecting bits, then the scales' fifth ones."""
    shr = p.shr
    group, x = scale_and_bits(p, p.jit(lambda t: ld4(t, 1)))

    @p.jit
    def sub(t, i):
        fifth = u32(shr(x(t), 8 + i) & u32(1))
        return i32(i32(shr(ld4(t, 0), 4 * i) & u32(15) | fifth << u32(4)) - i32(16)), i32(0)

    return Parts(two_bit_codes(p, ldw, of_bits(p, x, 0)), sub, group)


def iq3_ks(p, ldw, ld4, ld2):
    """Words: sc; d and x, which has the scales' fifth bits, then the selecting ones."""
    shr, nibble = p.shr, nibble_of_four(p, p.jit(lambda t: ld4(t, 0)))
    group, x = scale_and_bits(p, p.jit(lambda t: ld4(t, 1)))

    @p.jit
    def sub(t, i):
        fifth = u32(shr(x(t), i) & u32(1))
        return i32(i32(nibble(t, i) | fifth << u32(4)) - i32(16)), i32(0)

    return Parts(three_bit_codes(p, ldw, of_bits(p, x, 8)), sub, group)


def iq2_kl(p, ldw, ld4, ld2):
    """Codes of five bits for pairs of columns: nibbles in pieces 0..3, fifth bits in piece 4. Words: sc; d and x, the upper two
    bits of the scales."""
    shr, byte, nibble = p.shr, p.byte, nibble_of_four(p, p.jit(lambda t: ld4(t, 0)))
    group, x = scale_and_bits(p, p.jit(lambda t: ld4(t, 1)))
    pairs = p.table(np.array(PAIR_LEVELS, np.int8).reshape(-1).view(np.uint16).astype(np.uint32))

    @p.jit
    def pair(t, j, i):
        low = shr(byte(ldw(t, j >> 1, i >> 2), i & 3), 4 * (j & 1)) & u32(15)
        return u32(pairs(t, i32(low | (shr(byte(ldw(t, 4, i >> 2), i & 3), j) & u32(1)) << u32(4))))

    @p.jit
    def quarter(t, j, q):
        return (i32(u32(pair(t, j, 2 * q) | pair(t, j, 2 * q + 1) << u32(16))),
                i32(u32(pair(t, j, 8 + 2 * q) | pair(t, j, 9 + 2 * q) << u32(16))))

    @p.jit
    def sub(t, i):
        low, high = nibble(t, i), shr(x(t), 2 * i) & u32(3)
        return i32(i32(low | high << u32(4)) - i32(32)), i32(0)

    return Parts(quarter, sub, group)


def float_scale(p, ld4, k, factor=1.0):
    """`group` of a float32 scale, word k, times a factor, rounded."""
    as_f32, mul, factor = p.f32, p.mul, f32(factor)

    if factor == 1:
        @p.jit
        def group(t, g):
            return as_f32(ld4(t, k)), ZERO
    else:
        @p.jit
        def group(t, g):
            return mul(as_f32(ld4(t, k)), factor), ZERO
    return group


def byte_scales(p, ld4):
    """(sub, selected) of a byte for each 32 columns, in words 0 and 1: seven bits of an odd scale, and the selecting bit."""
    byte = p.byte

    @p.jit
    def sub(t, i):
        return i32(i32(byte(ld4(t, i >> 2), i & 3) & u32(254)) - i32(127)), i32(0)

    @p.jit
    def selected(t, j, h):
        return u32(byte(ld4(t, j >> 2), j & 3) & u32(1))
    return sub, selected


def iq4_ks(p, ldw, ld4, ld2):
    sub, selected = byte_scales(p, ld4)
    return Parts(four_bit_codes(p, ldw, selected), sub, float_scale(p, ld4, 2))


def iq5_ks(p, ldw, ld4, ld2):
    sub, selected = byte_scales(p, ld4)
    return Parts(upper_codes(p, ldw, fifth_bits(p, ldw), FIVE_BIT_LEVELS, FIVE_BIT_SHIFT, selected), sub, float_scale(p, ld4, 2))


def iq4_kss(p, ldw, ld4, ld2):
    """Piece j: eight 16-bit words of 32 columns. Their lowest bits together are the byte of the scale; each word v without that
    bit stands for v ^ v >> 1, nibbles as in the legacy formats."""
    lowest, others = u32(0x00010001), u32(0xfffefffe)

    @p.jit
    def word(t, j, q):
        v = u32(ldw(t, j, q) & others)
        return u32(v ^ (v >> u32(1)) & u32(0x7fff7fff))

    @p.jit
    def scale(t, i):
        bits = u32(0)
        for k in range(4):
            w = u32(ldw(t, i, k) & lowest)
            bits = u32(bits | ((w | w >> u32(15)) & u32(3)) << u32(2 * k))
        return bits

    @p.jit
    def sub(t, i):
        return i32(i32(scale(t, i) & u32(254)) - i32(127)), i32(0)

    @p.jit
    def selected(t, j, h):
        return u32(scale(t, j) & u32(1))

    return Parts(four_bit_codes(p, word, selected), sub, float_scale(p, ld4, 0))


# Trellis: column k of a group has the sum of the lowest six bits of the four bytes of start * MULTIPLIER^(k + 1), minus 126

def four_levels(p, first):
    """(start) -> word of the levels of columns first .. first + 3 of a group, and 128 more: 2 to 254."""
    k0, k1, k2, k3 = (u64(pow(MULTIPLIER, first + k + 1, 1 << 32)) for k in range(4))
    word, sixes, ones = u64(0xffffffff), u64(0x3f3f3f3f), u64(ONES)

    @p.jit
    def total(start, factor):
        return u32(u32((u64(start) * factor & sixes) * ones & word) >> u32(24))  # the highest byte is the sum of the four

    @p.jit
    def four(start):
        low = u32(total(start, k0) | total(start, k1) << u32(8))
        return u32(u32(low | total(start, k2) << u32(16) | total(start, k3) << u32(24)) + TWOS - ONES)
    return four


def eight_levels(p, start):
    """`quarter` of groups of eight columns. start: (t, g)."""
    low, high = four_levels(p, 0), four_levels(p, 4)

    @p.jit
    def quarter(t, j, q):
        x = start(t, 4 * j + q)
        return i32(u32(low(x) ^ TOPS)), i32(u32(high(x) ^ TOPS))
    return quarter


def table_scale(p):
    """(code) -> int32 entry of IQ4_LEVELS."""
    entries = p.table(np.array(IQ4_LEVELS, np.int32).view(np.uint32))

    @p.jit
    def scale(t, code):
        return i32(u32(entries(t, i32(code))))
    return scale


def iq1_kt(p, ldw, ld4, ld2):
    """Indices of 13 bits: bytes in pieces 0 and 1, nibbles in piece 2, the last bits above the scales' nibbles in words 0, 1."""
    shr, byte, scale = p.shr, p.byte, table_scale(p)

    @p.jit
    def start(t, g):
        low, high = byte(ldw(t, g >> 4, (g >> 2) & 3), g & 3), byte(ldw(t, 2, (g >> 2) & 3), g & 3)
        top = shr(byte(ld4(t, g >> 4), (g >> 2) & 3), 4 + (g & 3)) & u32(1)
        return u32((low | (shr(high, 4 * (g >> 4)) & u32(15)) << u32(8) | top << u32(12)) + u32(4096))

    @p.jit
    def sub(t, i):
        return scale(t, byte(ld4(t, i >> 2), i & 3) & u32(15)), i32(0)

    return Parts(eight_levels(p, start), sub, float_scale(p, ld4, 2), pairs=True)


def sixteen_bit_start(p, ldw):
    """`start` of indices of 16 bits in pieces 0..3."""
    half = p.half

    @p.jit
    def start(t, g):
        return u32(half(ldw(t, g >> 3, (g >> 1) & 3), g & 1) + u32(4096))
    return start


def iq2_kt(p, ldw, ld4, ld2):
    """The scale is 1.05 times the file's, as in ik_llama.cpp's products. Words: nibbles of the scales; d."""
    scale, nibble = table_scale(p), nibble_of_four(p, p.jit(lambda t: ld4(t, 0)))

    @p.jit
    def sub(t, i):
        return scale(t, nibble(t, i)), i32(0)

    return Parts(eight_levels(p, sixteen_bit_start(p, ldw)), sub, float_scale(p, ld4, 1, 1.05), pairs=True)


def iq3_kt(p, ldw, ld4, ld2):
    """Magnitudes; bit j of byte c % 32 of pieces 4 and 5 is a sign. The scale is 1.01 times the file's. Words: as IQ2_KT."""
    shr, nibble, start = p.shr, nibble_of_four(p, p.jit(lambda t: ld4(t, 0))), sixteen_bit_start(p, ldw)
    first, last = four_levels(p, 0), four_levels(p, 4)

    @p.jit
    def signed(w, signs):
        """Of words of level + 128: the level with the sign that the bits ask for. 256 - b = (b ^ 255) + 1 carries nothing."""
        kept = u32(((w >> u32(7)) ^ signs) & ONES)  # 1 where the level has that sign already
        return i32(u32(u32((~w ^ u32(kept * u32(255))) + (kept ^ ONES)) ^ TOPS))

    @p.jit
    def quarter(t, j, q):
        x, piece, word = start(t, 4 * j + q), 4 + (q >> 1), 2 * (q & 1)
        return (signed(first(x), shr(ldw(t, piece, word), j)), signed(last(x), shr(ldw(t, piece, word + 1), j)))

    @p.jit
    def sub(t, i):
        return i32(nibble(t, i)), i32(0)

    return Parts(quarter, sub, float_scale(p, ld4, 1, 1.01), pairs=True)


def iq4_kt(p, ldw, ld4, ld2):
    """Groups of four columns, indices of 15 bits and one of the sub-block: bytes in pieces 0..3, nibbles in 4 and 5, three bits
    in the sub-block's word in 6 and 7, whose lowest byte has the sub-block's bit and the scale."""
    shr, byte, word = p.shr, p.byte, four_levels(p, 0)

    @p.jit
    def start(t, g):
        w = ldw(t, 6 + (g >> 5), (g >> 3) & 3)
        low = byte(ldw(t, g >> 4, (g >> 2) & 3), g & 3)
        high = shr(byte(ldw(t, 4 + ((g >> 4) & 1), (g >> 2) & 3), g & 3), 4 * (g >> 5)) & u32(15)
        top = shr(w, 8 + 3 * (g & 7)) & u32(7)
        return u32((low | high << u32(8) | top << u32(12)) + u32(4096) + (w & u32(1)) * u32(32768))

    @p.jit
    def quarter(t, j, q):
        return i32(u32(word(start(t, 8 * j + 2 * q)) ^ TOPS)), i32(u32(word(start(t, 8 * j + 2 * q + 1)) ^ TOPS))

    @p.jit
    def sub(t, i):
        return i32(i32((ldw(t, 6 + (i >> 2), i & 3) >> u32(1)) & u32(127)) - i32(64)), i32(0)

    return Parts(quarter, sub, float_scale(p, ld4, 0), pairs=True)
