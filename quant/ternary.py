"""TQ1_0 and TQ2_0 (levels -1, 0, 1) and Q1_0 (levels -1, 1), with one float16 scale d per 256 or 128 columns."""
from .k_quants import two_bits
from .words import EVEN, Parts, ZERO, half_scale, halves, u32, unit_scales


def tq1_0(p, ldw, ld4, ld2):
    """Five columns in a byte, as the digits of a fraction in base 3: level + 1 = floor(3 frac(3^n b / 256)), n = 0..4.

    Bytes c = 0..31 hold columns 32n + c; bytes 32 + c (c = 0..15) columns 160 + 16n + c; the word of qh columns 240 + 4n + c, n =
    0..3.
    """
    odd_bytes = p.odd_bytes

    @p.jit
    def digits(w, n):
        power = u32((3 if n & 1 else 1) * (9 if n & 2 else 1) * (81 if n & 4 else 1))
        even, odd = u32(w) & EVEN, (u32(w) >> u32(8)) & EVEN
        even, odd = ((even * power) & EVEN) * u32(3), ((odd * power) & EVEN) * u32(3)
        return odd_bytes(even, odd)

    @p.jit
    def word(t, j, h, q):
        if j < 5:
            return digits(ldw(t, h, q), j)
        if j == 7 and h == 1:
            return digits(ld4(t, 0), q)
        return digits(ldw(t, 2, q), 2 * j - 10 + h)

    return Parts(halves(p, word), unit_scales(p), half_scale(p, ld2))


def tq2_0(p, ldw, ld4, ld2):
    return Parts(two_bits(p, ldw), unit_scales(p), half_scale(p, ld2))


def q1_0(p, ldw, ld4, ld2):
    """Bit c of a block's 128 bits is column c: set means +d, clear -d."""
    spread, half, shr, f16 = p.spread, p.half, p.shr, p.f16

    @p.jit
    def word(t, j, h, q):
        return u32(spread(shr(ldw(t, j >> 2, j & 3), 16 * h + 4 * q)) << u32(1))

    @p.jit
    def group(t, g):
        return f16(half(ld4(t, 0), g)), ZERO

    return Parts(halves(p, word), unit_scales(p), group)
