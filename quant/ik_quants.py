"""The types of ik_llama.cpp: codes through tables that are not uniform, each with a shifted twin that a bit of the sub-block
selects; and levels that a multiplication generates from an index (trellis types). Facts: ik_llama.cpp's `ggml-common.h` and
`iqk_quantize.cpp`.

Types with a header have one float scale a row (`Format.header`); a tile has it in each chunk, as a field in front of the block's.
"""
import numpy as np

from .legacy import IQ4_LEVELS
from .words import (NIBBLES, ONES, TOPS, TWOS, ZERO, Cubic, FiveBits, Looked, Paired, Parts, Scales, Summed, byte_sums, f32,
                    halves, i32, u32, u64, unit_scales)

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
FIVE_BIT_CUBIC = Cubic(0.00951385498046875, -0.153564453125, 6.4921875, -36, 10)
SIX_BIT_CUBIC = Cubic(0.0012073516845703125, -0.0191497802734375, 2.84765625, -19, 26)
PAIR_LEVELS = ((-63, -23), (-63, 13), (-40, -63), (-40, -10), (-40, 13), (-40, 47), (-23, -40), (-23, -23),
               (-23, 1), (-23, 13), (-23, 28), (-10, -63), (-10, 1), (-10, 13), (-10, 47), (1, -23),
               (1, -10), (1, 1), (1, 13), (1, 28), (13, -40), (13, -23), (13, -10), (13, 1),
               (13, 13), (28, -63), (28, -23), (28, 1), (28, 28), (28, 47), (47, -23), (47, 13))
MULTIPLIER = 0xCBAC1FED  # of the trellis
HIGH_NIBBLES = u32(0xf0f0f0f0)


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

def two_bit_fields(p, ldw):
    """(word, blocks) of 64 bytes of 2-bit fields in pieces 0..3, as of `Looked`."""
    shr, field = p.shr, p.field

    @p.jit
    def word(t, j, q):
        piece, bit = 2 * (j >> 2), 2 * (j & 3)
        return u32(shr(ldw(t, piece, q), bit) & TWOS | field(ldw(t, piece + 1, q), bit, TWOS, 4))

    @p.jit
    def blocks(t, j, h, q):
        return u32(shr(ldw(t, 2 * (j >> 2) + h, q), 2 * (j & 3)) & u32(0x33333333))
    return word, blocks


def three_bit_fields(p, ldw):
    """The same, their third bits in pieces 4 and 5: bit j of byte c % 32."""
    (two, two_blocks), shr, field = two_bit_fields(p, ldw), p.shr, p.field

    @p.jit
    def word(t, j, q):
        third = u32(field(ldw(t, 4, q), j, ONES, 2) | field(ldw(t, 5, q), j, ONES, 6))
        return u32(two(t, j, q) | third)

    @p.jit
    def blocks(t, j, h, q):
        third = u32(shr(ldw(t, 4 + h, q), j & 4) & (u32(0x05050505) << u32(j & 1)))
        # bits 0 and 2, or 1 and 3, to be bits 2 and 6: 20 = 4 + 16
        return u32(two_blocks(t, j, h, q) | u32(third * (u32(20) >> u32(j & 1))) & u32(0x44444444))
    return word, blocks


def upper_codes(p, ldw, upper, levels, cubic):
    """`quarter` of nibbles as Q5_K has them, in pieces 0..7. upper: (t, j, h, q) -> the bits above them, in their places."""
    lookup, shr = p.lookup_codes(levels, cubic), p.shr

    @p.jit
    def code(t, j, h, q):
        return u32(shr(ldw(t, 2 * (j >> 1) + h, q), 4 * (j & 1)) & NIBBLES | upper(t, j, h, q))

    @p.jit
    def quarter(t, j, q):
        return lookup(code(t, j, 0, q), code(t, j, 1, q))
    return quarter


def fifth_bits(p, ldw):
    """`upper` of bits in pieces 8 and 9: bit j of byte c % 32."""
    field = p.field

    @p.jit
    def upper(t, j, h, q):
        return field(ldw(t, 8 + h, q), j, ONES, 4)
    return upper


def fifths_of_two(p):
    """(w, j) -> `fifths` of `Paired` and `FiveBits` from a word whose bytes have block j's bit in bit j: bits j and j + 1 to be
    bits 3 and 7, 72 = 8 + 64."""
    shr = p.shr

    @p.jit
    def fifths(w, j):
        return u32(u32(shr(w, j & 4) & (TWOS << u32(j & 2))) * (u32(72) >> u32(j & 2)))
    return fifths


def five_bit_codes(p, ldw):
    """IQ5_K's and IQ5_KS's levels."""
    quarter, two = upper_codes(p, ldw, fifth_bits(p, ldw), FIVE_BIT_LEVELS, FIVE_BIT_CUBIC), fifths_of_two(p)
    nibbles = p.jit(lambda t, j, h, q: u32(ldw(t, j + h, q)))
    return FiveBits(FIVE_BIT_LEVELS, quarter, nibbles, p.jit(lambda t, j, h, q: two(ldw(t, 8 + h, q), j)))


def of_bits(p, x, amount, first=0):
    """`shift` by `amount` where the sub-block's bit of x(t), from bit `first` on, is set."""
    shr = p.shr

    @p.jit
    def shift(t, i):
        return i32(u32(shr(x(t), first + i) & u32(1)) * u32(amount))
    return shift


# Several scales of a row at once, as of `Scales`

def four_nibbles(p, far):
    """(v, w, i) -> bytes, of the nibbles of v, then of those of w: i and i + 4 or, far, i + 2 of each."""
    shr, bytes_of, s = p.shr, p.bytes_of, u32(0x5410 if far else 0x6420)
    return p.jit(lambda v, w, i: u32(bytes_of(shr(v, 4 * i), shr(w, 4 * i), s) & NIBBLES))


def four_bits(p, far, amount):
    """(split, shift). split: (w) -> two words: in bytes bits 0 and 8, 16, 24 of w, and bits 4 or, far, 2 behind these. shift: (a,
    b, n) -> `amount` where the n-th of bits 0, 4, 8, 12 or 0, 2, 8, 10 is set."""
    weighed, behind = p.weighed, u32(2 if far else 4)

    @p.jit
    def split(w):
        return u32(u32(w) & ONES), u32((u32(w) >> behind) & ONES)
    return split, p.jit(lambda a, b, n: weighed(b if n & 1 else a, n >> 1, amount, 0))


# Sub-blocks of 16 columns, a float16 scale d a block; x has a bit for each sub-block


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

    nibbles, (split, bit), weighed = four_nibbles(p, True), four_bits(p, True, TWO_BIT_SHIFT), p.weighed

    @p.jit
    def load(t, i):
        a, b = split(shr(ld4(t, 2), 16 + i))
        return nibbles(ld4(t, 0), ld4(t, 1), i), a, b

    @p.jit
    def take(w, n):
        return weighed(w[0], n, 1, -8), bit(w[1], w[2], n)

    return Parts(Looked(TWO_BIT_LEVELS, *two_bit_fields(p, ldw)), sub, group, shift=of_bits(p, x, TWO_BIT_SHIFT),
                 scales=Scales(load, take))


def iq3_k(p, ldw, ld4, ld2):
    """Words: sl, two of nibbles; d and x. Half: sh, the scales' signs."""
    shr = p.shr
    group, x = scale_and_bits(p, p.jit(lambda t: ld4(t, 2)))

    @p.jit
    def sub(t, i):
        scale, sign = i32(shr(ld4(t, i >> 3), 4 * (i & 7)) & u32(15)), i32(shr(ld2(t, 0), i) & u32(1))
        return i32(i32(2 * scale + 1) * i32(1 - 2 * sign)), i32(0)

    nibbles, (split, bit) = four_nibbles(p, True), four_bits(p, True, THREE_BIT_SHIFT)
    signed_byte, bytes_of = p.signed_byte, p.bytes_of

    @p.jit
    def load(t, i):
        a, b = split(shr(bytes_of(ld4(t, 2), ld2(t, 0), u32(0x5432)), i))  # of x, and of sh above it
        scales, signs = u32(nibbles(ld4(t, 0), ld4(t, 1), i) * u32(2) + ONES), u32(bytes_of(a, b, u32(0x7362)))
        return u32(u32(scales ^ u32(signs * u32(255))) + signs), a, b  # -s = ~s + 1: without carry, since s > 0

    @p.jit
    def take(w, n):
        return signed_byte(w[0], n), bit(w[1], w[2], n)

    return Parts(Looked(THREE_BIT_LEVELS, *three_bit_fields(p, ldw)), sub, group, shift=of_bits(p, x, THREE_BIT_SHIFT),
                 scales=Scales(load, take))


def six_bit_scales(p, ldw, header, amount):
    """(sub, group, shift, scales) of a piece of d and x, the upper two bits of 16 scales (sh), their nibbles (sl); minus 32."""
    shr, weighed, nibbles, (split, bit) = p.shr, p.weighed, four_nibbles(p, False), four_bits(p, False, amount)
    group, x = scale_and_bits(p, p.jit(lambda t: ldw(t, header, 0)))

    @p.jit
    def sub(t, i):
        low, high = shr(ldw(t, header, 2 + (i >> 3)), 4 * (i & 7)) & u32(15), shr(ldw(t, header, 1), 2 * i) & u32(3)
        return i32(i32(low | high << u32(4)) - i32(32)), i32(0)

    @p.jit
    def load(t, i):
        high = u32(shr(ldw(t, header, 1), 2 * i) & TWOS)
        a, b = split(shr(ldw(t, header, 0), 16 + i))
        return u32(high * u32(16) + nibbles(ldw(t, header, 2), ldw(t, header, 3), i)), a, b

    @p.jit
    def take(w, n):
        return weighed(w[0], n, 1, -32), bit(w[1], w[2], n)
    return sub, group, of_bits(p, x, amount), Scales(load, take)


def iq4_k(p, ldw, ld4, ld2):
    sub, group, shift, scales = six_bit_scales(p, ldw, 8, FOUR_BIT_SHIFT)
    return Parts(Looked(IQ4_LEVELS, ldw), sub, group, shift=shift, scales=scales)


def iq5_k(p, ldw, ld4, ld2):
    sub, group, shift, scales = six_bit_scales(p, ldw, 10, FIVE_BIT_SHIFT)
    return Parts(five_bit_codes(p, ldw), sub, group, shift=shift, scales=scales)


def iq6_k(p, ldw, ld4, ld2):
    """Piece 12: int8 scales. Word: d and x. Levels are integers, as all of ik_llama.cpp's products take them."""
    byte, field = p.byte, p.field
    group, x = scale_and_bits(p, p.jit(lambda t: ld4(t, 0)))

    @p.jit
    def upper(t, j, h, q):
        return field(ldw(t, 8 + 2 * (j >> 2) + h, q), 2 * (j & 3), TWOS, 4)

    @p.jit
    def sub(t, i):
        return i32(i32(byte(ldw(t, 12, i >> 2), i & 3) ^ u32(128)) - i32(128)), i32(0)

    packed = p.jit(lambda t: (ldw(t, 12, 0), ldw(t, 12, 1), ldw(t, 12, 2), ldw(t, 12, 3)))
    return Parts(upper_codes(p, ldw, upper, SIX_BIT_LEVELS, SIX_BIT_CUBIC), sub, group, shift=of_bits(p, x, SIX_BIT_SHIFT),
                 packed=packed)


# Sub-blocks of 32 columns, one scale a row

def two_nibbles(p):
    """(w, i) -> nibbles of scales i and i + 4 of `nibble_of_four`."""
    shr = p.shr

    @p.jit
    def two(w, i):
        w = u32(shr(w, 8 * i))
        return u32(w & u32(15)), u32((w >> u32(4)) & u32(15))
    return two


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

    (split, bit), weighed = four_bits(p, False, TWO_BIT_SHIFT), p.weighed

    @p.jit
    def load(t, i):
        a, b = split(shr(ld4(t, 1), 16 + i))
        return u32(shr(ld4(t, 0), 4 * i) & u32(0x000f000f)), a, b

    @p.jit
    def take(w, n):
        return weighed(w[2] if n else w[1], 1, 16, weighed(w[0], 2 * n, 1, -16)), bit(w[1], w[2], n)

    return Parts(Looked(TWO_BIT_LEVELS, *two_bit_fields(p, ldw)), sub, group, shift=of_bits(p, x, TWO_BIT_SHIFT),
                 scales=Scales(load, take))


def iq3_ks(p, ldw, ld4, ld2):
    """Words: sc; d and x, which has the scales' fifth bits, then the selecting ones."""
    shr, nibble = p.shr, nibble_of_four(p, p.jit(lambda t: ld4(t, 0)))
    group, x = scale_and_bits(p, p.jit(lambda t: ld4(t, 1)))

    @p.jit
    def sub(t, i):
        fifth = u32(shr(x(t), i) & u32(1))
        return i32(i32(nibble(t, i) | fifth << u32(4)) - i32(16)), i32(0)

    (split, _), nibbles, weighed = four_bits(p, False, THREE_BIT_SHIFT), two_nibbles(p), p.weighed

    @p.jit
    def load(t, i):
        (low, high), (a, b) = nibbles(ld4(t, 0), i), split(shr(ld4(t, 1), 16 + i))
        return low, high, a, b

    @p.jit
    def take(w, n):
        low, bits = (w[1], w[3]) if n else (w[0], w[2])
        return weighed(bits, 0, 16, i32(i32(low) - i32(16))), weighed(bits, 1, THREE_BIT_SHIFT, 0)

    return Parts(Looked(THREE_BIT_LEVELS, *three_bit_fields(p, ldw)), sub, group, shift=of_bits(p, x, THREE_BIT_SHIFT, 8),
                 scales=Scales(load, take))


def iq2_kl(p, ldw, ld4, ld2):
    """Codes of five bits for pairs of columns: nibbles in pieces 0..3, fifth bits in piece 4. Words: sc; d and x, the upper two
    bits of the scales."""
    shr, byte, nibble = p.shr, p.byte, nibble_of_four(p, p.jit(lambda t: ld4(t, 0)))
    group, x = scale_and_bits(p, p.jit(lambda t: ld4(t, 1)))
    pairs = p.table(np.array(PAIR_LEVELS, np.int8).reshape(-1).view(np.uint16).astype(np.uint32))

    @p.jit
    def quarter(t, j, q):
        codes = u32(shr(ldw(t, j >> 1, q), 4 * (j & 1)) & NIBBLES | (shr(ldw(t, 4, q), j) & ONES) << u32(4))
        a, b = u32(pairs(t, i32(byte(codes, 0)))), u32(pairs(t, i32(byte(codes, 1))))
        c, d = u32(pairs(t, i32(byte(codes, 2)))), u32(pairs(t, i32(byte(codes, 3))))
        return i32(u32(a | b << u32(16))), i32(u32(c | d << u32(16)))

    @p.jit
    def sub(t, i):
        low, high = nibble(t, i), shr(x(t), 2 * i) & u32(3)
        return i32(i32(low | high << u32(4)) - i32(32)), i32(0)

    two_fifths, two, weighed = fifths_of_two(p), two_nibbles(p), p.weighed
    nibbles, fifths = p.jit(lambda t, j, q: u32(ldw(t, j >> 1, q))), p.jit(lambda t, j, q: two_fifths(ldw(t, 4, q), j))

    @p.jit
    def load(t, i):
        low, high = two(ld4(t, 0), i)
        return low, high, u32(shr(ld4(t, 1), 16 + 2 * i) & TWOS)

    @p.jit
    def take(w, n):
        return weighed(w[2], n, 16, i32(i32(w[1] if n else w[0]) - i32(32))), i32(0)

    return Parts(Paired(PAIR_LEVELS, quarter, nibbles, fifths), sub, group, pairs=True, scales=Scales(load, take))


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


def byte_scales(p, ld4, amount):
    """(sub, shift, scales) of a byte for each 32 columns in words 0 and 1: seven bits of an odd scale, and the selecting bit."""
    weighed, bytes_of, sevens = p.weighed, p.bytes_of, u32(0xfefefefe)

    @p.jit
    def sub(t, i):
        return weighed(ld4(t, i >> 2) & sevens, i & 3, 1, -127), i32(0)

    @p.jit
    def shift(t, i):
        return weighed(ld4(t, i >> 2) & ONES, i & 3, amount, 0)

    @p.jit
    def load(t, i):
        w = bytes_of(ld4(t, 0), ld4(t, 1), u32(0x40 + 0x11 * i))
        return u32(w & sevens), u32(w & ONES)

    @p.jit
    def take(w, n):
        return weighed(w[0], n, 1, -127), weighed(w[1], n, amount, 0)
    return sub, shift, Scales(load, take)


def iq4_ks(p, ldw, ld4, ld2):
    sub, shift, scales = byte_scales(p, ld4, FOUR_BIT_SHIFT)
    return Parts(Looked(IQ4_LEVELS, ldw), sub, float_scale(p, ld4, 2), shift=shift, scales=scales)


def iq5_ks(p, ldw, ld4, ld2):
    sub, shift, scales = byte_scales(p, ld4, FIVE_BIT_SHIFT)
    return Parts(five_bit_codes(p, ldw), sub, float_scale(p, ld4, 2), shift=shift, scales=scales)


def iq4_kss(p, ldw, ld4, ld2):
    """Piece j: eight 16-bit words of 32 columns. Their lowest bits together are the byte of the scale, as of `byte_scales`; each
    word v without that bit stands for v ^ v >> 1, nibbles as in the legacy formats."""
    lowest, others, weighed = u32(0x00010001), u32(0xfffefffe), p.weighed

    @p.jit
    def word(t, j, q):
        v = u32(ldw(t, j, q) & others)
        return u32(v ^ v >> u32(1))

    @p.jit
    def sub(t, i):
        a, b, c, d = ldw(t, i, 0), ldw(t, i, 1) & lowest, ldw(t, i, 2) & lowest, ldw(t, i, 3) & lowest
        scale = weighed(a & (lowest ^ u32(1)), 2, 2, weighed(b, 0, 4, weighed(b, 2, 8, -127)))
        return weighed(c, 0, 16, weighed(c, 2, 32, weighed(d, 0, 64, weighed(d, 2, 128, scale)))), i32(0)

    @p.jit
    def shift(t, i):
        return i32(u32(ldw(t, i, 0) & u32(1)) * u32(FOUR_BIT_SHIFT))

    return Parts(Looked(IQ4_LEVELS, word), sub, float_scale(p, ld4, 0), shift=shift)


# Trellis: column k of a group has the sum of the lowest six bits of the four bytes of start * MULTIPLIER^(k + 1), minus 126

def four_columns(p, first):
    """(start) -> words of which columns first .. first + 3 of a group are the sums: bytes up to 63."""
    k0, k1, k2, k3 = (u64(pow(MULTIPLIER, first + k + 1, 1 << 32)) for k in range(4))
    sixes = u64(0x3f3f3f3f)

    @p.jit
    def four(start):
        x = u64(start)
        return u32(x * k0 & sixes), u32(x * k1 & sixes), u32(x * k2 & sixes), u32(x * k3 & sixes)
    return four


def eight_columns(p, start):
    """`quarter` of groups of eight columns. start: (t, g)."""
    low, high = four_columns(p, 0), four_columns(p, 4)

    @p.jit
    def words(t, j, q):
        x = start(t, 4 * j + q)
        return low(x) + high(x)
    return Summed(words)


def iq1_kt(p, ldw, ld4, ld2):
    """Indices of 13 bits: bytes in pieces 0 and 1, nibbles in piece 2, the last bits above the scales' nibbles in words 0, 1."""
    byte, field, weighed, bytes_of, (lookup, level) = p.byte, p.field, p.weighed, p.bytes_of, p.lookup_each(IQ4_LEVELS)

    @p.jit
    def start(t, g):
        part, word, i = g >> 4, (g >> 2) & 3, g & 3
        low, highs = ldw(t, part, word), u32(u32(ldw(t, 2, word) << u32(4 - 4 * part)) & HIGH_NIBBLES)
        top = field(ld4(t, part), 4 + i, ONES, 5)  # 4096 = 32 * 128
        return u32(weighed(top, word, 128, weighed(highs, i, 16, weighed(low, i, 1, 4096))))

    @p.jit
    def sub(t, i):
        return level(lookup(byte(ld4(t, i >> 2), i & 3)), 0), i32(0)

    load = p.jit(lambda t, i: lookup(bytes_of(ld4(t, 0), ld4(t, 1), u32(0x40 + 0x11 * i))))
    scales = Scales(load, p.jit(lambda w, n: (level(w, 2 * n), i32(0))))
    return Parts(eight_columns(p, start), sub, float_scale(p, ld4, 2), pairs=True, scales=scales)


def sixteen_bit_start(p, ldw):
    """`start` of indices of 16 bits in pieces 0..3."""
    half_plus = p.half_plus

    @p.jit
    def start(t, g):
        return half_plus(ldw(t, g >> 3, (g >> 1) & 3), g & 1, 4096)
    return start


def iq2_kt(p, ldw, ld4, ld2):
    """The scale is 1.05 times the file's, as in ik_llama.cpp's products. Words: nibbles of the scales; d."""
    nibble, shr, (lookup, level) = nibble_of_four(p, p.jit(lambda t: ld4(t, 0))), p.shr, p.lookup_each(IQ4_LEVELS)

    @p.jit
    def sub(t, i):
        return level(lookup(nibble(t, i)), 0), i32(0)

    scales = Scales(p.jit(lambda t, i: lookup(shr(ld4(t, 0), 8 * i))), p.jit(lambda w, n: (level(w, n), i32(0))))
    return Parts(eight_columns(p, sixteen_bit_start(p, ldw)), sub, float_scale(p, ld4, 1, 1.05), pairs=True, scales=scales)


def iq3_kt(p, ldw, ld4, ld2):
    """Magnitudes; bit j of byte c % 32 of pieces 4 and 5 is a sign. The scale is 1.01 times the file's. Words: as IQ2_KT."""
    shr, nibble, start = p.shr, nibble_of_four(p, p.jit(lambda t: ld4(t, 0))), sixteen_bit_start(p, ldw)
    words, sums, distances = eight_columns(p, start).words, byte_sums(p), p.distances

    @p.jit
    def signed(magnitudes, signs):
        """Levels, where the lowest bit of a byte of `signs` is set negative. Of 128 + b: 256 - that carries nothing."""
        ones = u32(signs & ONES)
        return i32(u32(u32(u32(u32(magnitudes | TOPS) ^ u32(ones * u32(255))) + ones) ^ TOPS))

    @p.jit
    def quarter(t, j, q):
        (a, b, c, d, e, f, g, h), piece, word = words(t, j, q), 4 + (q >> 1), 2 * (q & 1)
        return (signed(distances(sums(a, b, c, d)), shr(ldw(t, piece, word), j)),
                signed(distances(sums(e, f, g, h)), shr(ldw(t, piece, word + 1), j)))

    @p.jit
    def sub(t, i):
        return i32(nibble(t, i)), i32(0)

    return Parts(quarter, sub, float_scale(p, ld4, 1, 1.01), pairs=True)


def iq4_kt(p, ldw, ld4, ld2):
    """Groups of four columns, indices of 15 bits and one of the sub-block: bytes in pieces 0..3, nibbles in 4 and 5, three bits
    in the sub-block's word in 6 and 7, whose lowest byte has the sub-block's bit and the scale."""
    shr, weighed, columns = p.shr, p.weighed, four_columns(p, 0)

    @p.jit
    def words(t, j, q):
        w, word, first = ldw(t, 6 + (j >> 2), j & 3), 2 * (j & 1) + (q >> 1), 2 * (q & 1)
        lows, highs = ldw(t, j >> 1, word), u32(u32(ldw(t, 4 + ((j >> 1) & 1), word) << u32(4 - 4 * (j >> 2))) & HIGH_NIBBLES)
        tops, more = shr(w, 8 + 6 * q), u32(u32(w & u32(1)) * u32(32768) + u32(4096))
        a, b = u32(u32(tops & u32(7)) * u32(4096) + more), u32(u32(tops & u32(56)) * u32(512) + more)
        a = weighed(lows, first, 1, weighed(highs, first, 16, i32(a)))
        b = weighed(lows, first + 1, 1, weighed(highs, first + 1, 16, i32(b)))
        return columns(u32(a)) + columns(u32(b))

    @p.jit
    def sub(t, i):
        return i32(i32((ldw(t, 6 + (i >> 2), i & 3) >> u32(1)) & u32(127)) - i32(64)), i32(0)

    return Parts(Summed(words), sub, float_scale(p, ld4, 0), pairs=True)
