"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL: blocks of 32 columns with one float16 scale d, the _1 formats with a minimum m.

In the 16 bytes of nibbles the low ones are columns 0..15, the high ones columns 16..31; bit c of the word qh is the fifth bit of
column c.
"""
from .words import NIBBLES, Looked, Parts, ZERO, halves, u32, unit_scales

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4_NL and IQ4_XS


def nibbles(p, ldw):
    """`quarter` where piece j holds the nibbles of columns 32j..: they are the codes."""
    shr = p.shr

    @p.jit
    def word(t, j, h, q):
        return u32(shr(ldw(t, j, q), 4 * h) & NIBBLES)
    return halves(p, word)


def five_bits(p, ldw):
    """`quarter` where piece j holds the nibbles of columns 32j.., and word j of pieces 8 and 9 their fifth bits."""
    shr, spread = p.shr, p.spread

    @p.jit
    def word(t, j, h, q):
        fifth = shr(ldw(t, 8 + (j >> 2), j & 3), 16 * h + 4 * q)
        return u32(shr(ldw(t, j, q), 4 * h) & NIBBLES | spread(fifth) << u32(4))
    return halves(p, word)


def scales(p, ldw, piece):
    """`group` of blocks with a scale only: the chunk's eight d fill one piece."""
    f16, half = p.f16, p.half

    @p.jit
    def group(t, g):
        return f16(half(ldw(t, piece, g >> 1), g & 1)), ZERO
    return group


def scales_and_minima(p, ldw, piece):
    """`group` of blocks with pairs (d, m): eight words in two pieces. The file's value is d * level + m, so the minimum is -m."""
    f16 = p.f16

    @p.jit
    def group(t, g):
        w = u32(ldw(t, piece + (g >> 2), g & 3))
        return f16(w & u32(0xffff)), f16((w >> u32(16)) ^ u32(0x8000))
    return group


def q4_0(p, ldw, ld4, ld2):
    return Parts(nibbles(p, ldw), unit_scales(p), scales(p, ldw, 8))


def q4_1(p, ldw, ld4, ld2):
    return Parts(nibbles(p, ldw), unit_scales(p, 1), scales_and_minima(p, ldw, 8))


def q5_0(p, ldw, ld4, ld2):
    return Parts(five_bits(p, ldw), unit_scales(p), scales(p, ldw, 10))


def q5_1(p, ldw, ld4, ld2):
    return Parts(five_bits(p, ldw), unit_scales(p, 1), scales_and_minima(p, ldw, 10))


def iq4_nl(p, ldw, ld4, ld2):
    return Parts(Looked(IQ4_LEVELS, ldw), unit_scales(p), scales(p, ldw, 8))


def q8_0(p, ldw, ld4, ld2):
    @p.jit
    def word(t, j, h, q):
        return ldw(t, 2 * j + h, q)

    return Parts(halves(p, word), unit_scales(p), scales(p, ldw, 16))
