"""Q2_K to Q6_K: blocks of 256 columns, a float16 scale d (and dmin), integer scales (and minima) per 16 or 32 columns.

A run of 32 bytes (two pieces) holds several rounds of 32 columns, one in each bit field of the bytes:
2-bit fields: columns 128k + 32r + c in byte c of run k, bits 2r..2r+1; nibbles: columns 64k + 32r + c, bits 4r..4r+3 (Q6_K: see there).
"""
from .words import ONES, TWOS, Unpacker, half_scale, i32, u32


def words32(p, ld16, word):
    """(t, piece, s, more, u) -> 8 words: word(a, s, b, u) over the words a of two pieces from `piece`, b of two pieces from `more`."""
    @p.jit
    def words(t, piece, s, more, u):
        a0, a1, a2, a3 = ld16(t, piece)
        a4, a5, a6, a7 = ld16(t, piece + 1)
        b0, b1, b2, b3 = ld16(t, more)
        b4, b5, b6, b7 = ld16(t, more + 1)
        return (word(a0, s, b0, u), word(a1, s, b1, u), word(a2, s, b2, u), word(a3, s, b3, u),
                word(a4, s, b4, u), word(a5, s, b5, u), word(a6, s, b6, u), word(a7, s, b7, u))
    return words


def two_bit_levels(p, ld16, level):
    """`levels` of 64 bytes of 2-bit fields in pieces 0..3; level: word of four fields -> int32 word of four levels."""
    shr = p.shr

    @p.jit
    def word(w, s):
        return level(u32(shr(w, s) & TWOS))

    @p.jit
    def levels(t, j):
        a, b, c, d = ld16(t, 2 * (j >> 2))
        e, f, g, h = ld16(t, 2 * (j >> 2) + 1)
        s = 2 * (j & 3)
        return word(a, s), word(b, s), word(c, s), word(d, s), word(e, s), word(f, s), word(g, s), word(h, s)
    return levels


def min_pair(p):
    """A word's halves (d, dmin) as float32."""
    f16 = p.f16

    @p.jit
    def pair(w):
        return f16(w & u32(0xffff)), f16(w >> u32(16))
    return pair


def six_bit_scales(p, ld16, header):
    """(sub, group) of Q4_K and Q5_K: a piece of d, dmin and 12 bytes of six-bit scales and minima.

    With bytes a = 0..3, b = 4..7, c = 8..11: scales 0..3 and minima 0..3 are the low six bits of a and b;
    scales 4..7 have their low four bits in c's low nibbles, minima 4..7 in its high ones, and the upper two bits in the tops of a and b.
    """
    shr, pair = p.shr, min_pair(p)

    @p.jit
    def sub(t, i):
        w = ld16(t, header)
        s = 8 * (i & 3)
        a, b, c = shr(w[1], s), shr(w[2], s), shr(w[3], s)
        if i < 4:
            return i32(a & u32(63)), i32(b & u32(63))
        return i32((c & u32(15)) | ((a >> u32(2)) & u32(48))), i32(((c >> u32(4)) & u32(15)) | ((b >> u32(2)) & u32(48)))

    @p.jit
    def group(t, g):
        return pair(ld16(t, header)[0])
    return sub, group


def q2_k(p, ld16, ld4, ld2):
    byte, pair = p.byte, min_pair(p)

    @p.jit
    def level(w):
        return i32(w)

    @p.jit
    def sub(t, i):
        b = byte(ld16(t, 4), i)
        return i32(b & u32(15)), i32(b >> u32(4))

    @p.jit
    def group(t, g):
        return pair(ld4(t, 0))

    return Unpacker(two_bit_levels(p, ld16, level), sub, group)


def q3_k(p, ld16, ld4, ld2):
    """A clear bit of hmask (column 32r + c: byte c, bit r) means minus 4. Six-bit scales minus 32, their low nibbles in 8 bytes, upper bits in 4."""
    shr, less = p.shr, p.less

    @p.jit
    def word(q, s, h, u):
        return less(u32((shr(q, s) & TWOS) | (shr(h, u) & ONES) << u32(2)), u32(4))

    words = words32(p, ld16, word)

    @p.jit
    def levels(t, j):
        return words(t, 2 * (j >> 2), 2 * (j & 3), 4, j)

    @p.jit
    def sub(t, i):
        low = shr(ld4(t, (i >> 2) & 1), 8 * (i & 3) + 4 * (i >> 3)) & u32(15)
        high = shr(ld4(t, 2), 8 * (i & 3) + 2 * (i >> 2)) & u32(3)
        return i32(i32(low | high << u32(4)) - i32(32)), i32(0)

    return Unpacker(levels, sub, half_scale(p, ld2))


def q4_k(p, ld16, ld4, ld2):
    nibbles = p.nibbles

    @p.jit
    def levels(t, j):
        a, b, c, d = ld16(t, 2 * (j >> 1))
        e, f, g, h = ld16(t, 2 * (j >> 1) + 1)
        s = 4 * (j & 1)
        return (i32(nibbles(a, s)), i32(nibbles(b, s)), i32(nibbles(c, s)), i32(nibbles(d, s)),
                i32(nibbles(e, s)), i32(nibbles(f, s)), i32(nibbles(g, s)), i32(nibbles(h, s)))

    return Unpacker(levels, *six_bit_scales(p, ld16, 8))


def q5_k(p, ld16, ld4, ld2):
    nibbles, shr = p.nibbles, p.shr

    @p.jit
    def word(q, s, h, u):
        return i32(u32(nibbles(q, s) | (shr(h, u) & ONES) << u32(4)))

    words = words32(p, ld16, word)

    @p.jit
    def levels(t, j):
        return words(t, 2 * (j >> 1), 4 * (j & 1), 8, j)

    return Unpacker(levels, *six_bit_scales(p, ld16, 10))


def q6_k(p, ld16, ld4, ld2):
    """Nibbles in runs of 64 bytes (columns 128k + 64r + c in byte c, bits 4r..), the upper two bits in 2-bit fields; levels minus 32."""
    nibbles, shr, less, byte = p.nibbles, p.shr, p.less, p.byte

    @p.jit
    def word(q, s, h, u):
        return less(u32(nibbles(q, s) | (shr(h, u) & TWOS) << u32(4)), u32(32))

    words = words32(p, ld16, word)

    @p.jit
    def levels(t, j):
        return words(t, 4 * (j >> 2) + 2 * (j & 1), 2 * (j & 2), 8 + 2 * (j >> 2), 2 * (j & 3))

    @p.jit
    def sub(t, i):
        return i32(i32(byte(ld16(t, 12), i) ^ u32(128)) - i32(128)), i32(0)

    return Unpacker(levels, sub, half_scale(p, ld2))
