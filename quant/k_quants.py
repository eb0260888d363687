"""Q2_K to Q6_K: blocks of 256 columns, a float16 scale d (and dmin), integer scales (and minima) per 16 or 32 columns.

A run of 32 bytes (two pieces) holds several rounds of 32 columns, one in each bit field of the bytes:
2-bit fields: columns 128k + 32r + c in byte c of run k, bits 2r..2r+1; nibbles: columns 64k + 32r + c, bits 4r..4r+3 (Q6_K: see
there).
"""
from .words import NIBBLES, ONES, TWOS, BitFields, Parts, half_scale, halves, i32, u32

SIXES, TOP_TWOS = u32(0x3f3f3f3f), u32(0x30303030)  # the low six bits of each byte, the upper two of them


def two_bits_word(p, ldw):
    """(t, j, h, q) -> word of 2-bit codes of 64 bytes in pieces 0..3."""
    shr = p.shr

    @p.jit
    def word(t, j, h, q):
        return u32(shr(ldw(t, 2 * (j >> 2) + h, q), 2 * (j & 3)) & TWOS)
    return word


def two_bits(p, ldw):
    """`quarter` of the same."""
    return halves(p, two_bits_word(p, ldw))


def field_words(p, ldw, width):
    """`BitFields.words` of 32 * width bytes in the first pieces."""
    @p.jit
    def words(t, j, q):
        piece = j if width == 4 else 2 * (j >> 2)
        return u32(ldw(t, piece, q)), u32(ldw(t, piece + 1, q))
    return words


def min_pair(p):
    """A word's halves (d, dmin) as float32."""
    f16 = p.f16

    @p.jit
    def pair(w):
        w = u32(w)
        return f16(w & u32(0xffff)), f16(w >> u32(16))
    return pair


def six_bit_scales(p, ldw, header, tops=None):
    """sub, group, packed and bit_fields of Q4_K and Q5_K: a piece of d, dmin and 12 bytes of six-bit scales and minima.

    With bytes a = 0..3, b = 4..7, c = 8..11: scales 0..3 and minima 0..3 are the low six bits of a and b;
    scales 4..7 have their low four bits in c's low nibbles, minima 4..7 in its high ones, and the upper two bits in the tops of a
    and b.
    """
    shr, pair = p.shr, min_pair(p)

    @p.jit
    def sub(t, i):
        s = 8 * (i & 3)
        a, b, c = shr(ldw(t, header, 1), s), shr(ldw(t, header, 2), s), shr(ldw(t, header, 3), s)
        if i < 4:
            return i32(a & u32(63)), i32(b & u32(63))
        return i32((c & u32(15)) | ((a >> u32(2)) & u32(48))), i32(((c >> u32(4)) & u32(15)) | ((b >> u32(2)) & u32(48)))

    @p.jit
    def group(t, g):
        return pair(ldw(t, header, 0))

    @p.jit
    def packed(t):
        a, b, c = u32(ldw(t, header, 1)), u32(ldw(t, header, 2)), u32(ldw(t, header, 3))
        return (u32(a & SIXES), u32(c & NIBBLES | (a >> u32(2)) & TOP_TWOS),
                u32(b & SIXES), u32((c >> u32(4)) & NIBBLES | (b >> u32(2)) & TOP_TWOS))

    @p.jit
    def scales(t, k):
        return packed(t)
    return dict(sub=sub, group=group, packed=packed, bit_fields=BitFields(4, field_words(p, ldw, 4), scales, tops=tops))


def q2_k(p, ldw, ld4, ld2):
    byte, pair = p.byte, min_pair(p)

    @p.jit
    def sub(t, i):
        b = byte(ldw(t, 4, i >> 2), i & 3)
        return i32(b & u32(15)), i32(b >> u32(4))

    @p.jit
    def group(t, g):
        return pair(ld4(t, 0))

    @p.jit
    def scales(t, k):
        return u32(ldw(t, 4, k)),

    return Parts(two_bits(p, ldw), sub, group, bit_fields=BitFields(2, field_words(p, ldw, 2), scales))


def q3_k(p, ldw, ld4, ld2):
    """A set bit of hmask (column 32r + c: byte c, bit r) means 4 more. Six-bit scales minus 32, their low nibbles in 8 bytes,
    upper bits in 4."""
    shr = p.shr

    @p.jit
    def word(t, j, h, q):
        return u32(shr(ldw(t, 2 * (j >> 2) + h, q), 2 * (j & 3)) & TWOS | (shr(ldw(t, 4 + h, q), j) & ONES) << u32(2))

    @p.jit
    def sub(t, i):
        low = shr(ld4(t, (i >> 2) & 1), 8 * (i & 3) + 4 * (i >> 3)) & u32(15)
        high = shr(ld4(t, 2), 8 * (i & 3) + 2 * (i >> 2)) & u32(3)
        return i32(i32(low | high << u32(4)) - i32(32)), i32(0)

    @p.jit
    def scales(t, k):
        low, high = u32(ld4(t, k & 1)), u32(ld4(t, 2))
        return u32(shr(low, 4 * (k >> 1)) & NIBBLES | (shr(high, 2 * k) & TWOS) << u32(4)),

    @p.jit
    def tops(t, q):
        return u32(ldw(t, 4, q)), u32(ldw(t, 5, q))

    return Parts(halves(p, word), sub, half_scale(p, ld2), bit_fields=BitFields(2, field_words(p, ldw, 2), scales, -32, tops))


def q4_k(p, ldw, ld4, ld2):
    shr = p.shr

    @p.jit
    def word(t, j, h, q):
        return u32(shr(ldw(t, 2 * (j >> 1) + h, q), 4 * (j & 1)) & NIBBLES)

    return Parts(halves(p, word), **six_bit_scales(p, ldw, 8))


def q5_k(p, ldw, ld4, ld2):
    shr = p.shr

    @p.jit
    def word(t, j, h, q):
        return u32(shr(ldw(t, 2 * (j >> 1) + h, q), 4 * (j & 1)) & NIBBLES | (shr(ldw(t, 8 + h, q), j) & ONES) << u32(4))

    @p.jit
    def tops(t, q):
        return u32(ldw(t, 8, q)), u32(ldw(t, 9, q))

    return Parts(halves(p, word), **six_bit_scales(p, ldw, 10, tops))


def q6_k(p, ldw, ld4, ld2):
    """Nibbles in runs of 64 bytes (columns 128k + 64r + c in byte c, bits 4r..), the upper two bits in 2-bit fields;
    levels minus 32."""
    shr, byte = p.shr, p.byte

    @p.jit
    def word(t, j, h, q):
        upper = shr(ldw(t, 8 + 2 * (j >> 2) + h, q), 2 * (j & 3)) & TWOS
        return u32(shr(ldw(t, 4 * (j >> 2) + 2 * (j & 1) + h, q), 2 * (j & 2)) & NIBBLES | upper << u32(4))

    @p.jit
    def sub(t, i):
        return i32(i32(byte(ldw(t, 12, i >> 2), i & 3) ^ u32(128)) - i32(128)), i32(0)

    @p.jit
    def packed(t):
        return u32(ldw(t, 12, 0)), u32(ldw(t, 12, 1)), u32(ldw(t, 12, 2)), u32(ldw(t, 12, 3))

    return Parts(halves(p, word), sub, half_scale(p, ld2), packed=packed)
