"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL: blocks of 32 columns with one float16 scale d, the _1 formats with a minimum m.

In the 16 bytes of nibbles the low ones are columns 0..15, the high ones columns 16..31; bit c of the word qh is the fifth bit of column c.
"""
from .words import Unpacker, ZERO, i32, u32, unit_scales

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4_NL and IQ4_XS


def nibble_levels(p, ld16, level):
    """`levels` where piece j holds the nibbles of columns 32j..; level: a word of four nibbles -> int32 word of four levels."""
    nibbles = p.nibbles

    @p.jit
    def levels(t, j):
        a, b, c, d = ld16(t, j)
        return (level(nibbles(a, 0)), level(nibbles(b, 0)), level(nibbles(c, 0)), level(nibbles(d, 0)),
                level(nibbles(a, 4)), level(nibbles(b, 4)), level(nibbles(c, 4)), level(nibbles(d, 4)))
    return levels


def five_bit_levels(p, ld16, level):
    """`levels` where piece j holds the nibbles of columns 32j.., and word j of pieces 8 and 9 their fifth bits."""
    nibbles, pick, shr, spread = p.nibbles, p.pick, p.shr, p.spread

    @p.jit
    def join(w, s, bits):
        return level(u32(nibbles(w, s) | spread(bits) << u32(4)))

    @p.jit
    def levels(t, j):
        a, b, c, d = ld16(t, j)
        h = pick(ld16(t, 8 + (j >> 2)), j & 3)
        return (join(a, 0, h), join(b, 0, shr(h, 4)), join(c, 0, shr(h, 8)), join(d, 0, shr(h, 12)),
                join(a, 4, shr(h, 16)), join(b, 4, shr(h, 20)), join(c, 4, shr(h, 24)), join(d, 4, shr(h, 28)))
    return levels


def scales(p, ld16, piece):
    """`group` of blocks with a scale only: the chunk's eight d fill one piece."""
    f16, half = p.f16, p.half

    @p.jit
    def group(t, g):
        return f16(half(ld16(t, piece), g)), ZERO
    return group


def scales_and_minima(p, ld16, piece):
    """`group` of blocks with pairs (d, m): eight words in two pieces. The file's value is d * level + m, so the minimum is -m."""
    f16, pick = p.f16, p.pick

    @p.jit
    def group(t, g):
        w = pick(ld16(t, piece + (g >> 2)), g & 3)
        return f16(w & u32(0xffff)), f16((w >> u32(16)) ^ u32(0x8000))
    return group


def unit_scales_and_minima(p):
    @p.jit
    def sub(t, i):
        return i32(1), i32(1)
    return sub


def minus(p, c):
    less, c = p.less, u32(c)

    @p.jit
    def level(w):
        return less(w, c)
    return level


def as_is(p):
    @p.jit
    def level(w):
        return i32(w)
    return level


def q4_0(p, ld16, ld4, ld2):
    return Unpacker(nibble_levels(p, ld16, minus(p, 8)), unit_scales(p), scales(p, ld16, 8))


def q4_1(p, ld16, ld4, ld2):
    return Unpacker(nibble_levels(p, ld16, as_is(p)), unit_scales_and_minima(p), scales_and_minima(p, ld16, 8))


def q5_0(p, ld16, ld4, ld2):
    return Unpacker(five_bit_levels(p, ld16, minus(p, 16)), unit_scales(p), scales(p, ld16, 10))


def q5_1(p, ld16, ld4, ld2):
    return Unpacker(five_bit_levels(p, ld16, as_is(p)), unit_scales_and_minima(p), scales_and_minima(p, ld16, 10))


def iq4_nl(p, ld16, ld4, ld2):
    return Unpacker(nibble_levels(p, ld16, p.lookup16(IQ4_LEVELS)), unit_scales(p), scales(p, ld16, 8))


def q8_0(p, ld16, ld4, ld2):
    @p.jit
    def levels(t, j):
        a, b, c, d = ld16(t, 2 * j)
        e, f, g, h = ld16(t, 2 * j + 1)
        return i32(a), i32(b), i32(c), i32(d), i32(e), i32(f), i32(g), i32(h)

    return Unpacker(levels, unit_scales(p), scales(p, ld16, 16))
