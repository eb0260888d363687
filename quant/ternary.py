"""TQ1_0 and TQ2_0 (levels -1, 0, 1) and Q1_0 (levels -1, 1), with one float16 scale d per 256 or 128 columns."""
from .k_quants import two_bit_levels
from .legacy import minus
from .words import EVEN, Unpacker, ZERO, half_scale, u32, unit_scales


def tq1_0(p, ld16, ld4, ld2):
    """Five columns in a byte, as the digits of a fraction in base 3: level + 1 = floor(3 frac(3^n b / 256)), n = 0..4.

    Bytes c = 0..31 hold columns 32n + c; bytes 32 + c (c = 0..15) columns 160 + 16n + c; the word of qh columns 240 + 4n + c, n = 0..3.
    """
    less, pick = p.less, p.pick

    @p.jit
    def digits(w, n):
        power = u32(1)
        for _ in range(n):
            power = u32(power * u32(3))
        even, odd = u32(w) & EVEN, (u32(w) >> u32(8)) & EVEN
        even, odd = ((even * power) & EVEN) * u32(3), ((odd * power) & EVEN) * u32(3)
        return less(u32((even >> u32(8)) & EVEN | odd & (EVEN << u32(8))), u32(1))

    @p.jit
    def levels(t, j):
        if j < 5:
            low, high, n, m = ld16(t, 0), ld16(t, 1), j, j
        else:
            low, high, n, m = ld16(t, 2), ld16(t, 2), 2 * j - 10, 2 * j - 9
        a, b, c, d = low
        if j == 7:
            w = ld4(t, 0)
            return digits(a, n), digits(b, n), digits(c, n), digits(d, n), digits(w, 0), digits(w, 1), digits(w, 2), digits(w, 3)
        e, f, g, h = high
        return digits(a, n), digits(b, n), digits(c, n), digits(d, n), digits(e, m), digits(f, m), digits(g, m), digits(h, m)

    return Unpacker(levels, unit_scales(p), half_scale(p, ld2))


def tq2_0(p, ld16, ld4, ld2):
    return Unpacker(two_bit_levels(p, ld16, minus(p, 1)), unit_scales(p), half_scale(p, ld2))


def q1_0(p, ld16, ld4, ld2):
    """Bit c of a block's 128 bits is column c: set means +d, clear -d."""
    pick, spread, less, shr, f16 = p.pick, p.spread, p.less, p.shr, p.f16

    @p.jit
    def word(w, k):
        return less(u32(spread(shr(w, 4 * k)) << u32(1)), u32(1))

    @p.jit
    def levels(t, j):
        w = pick(ld16(t, j >> 2), j & 3)
        return word(w, 0), word(w, 1), word(w, 2), word(w, 3), word(w, 4), word(w, 5), word(w, 6), word(w, 7)

    @p.jit
    def group(t, g):
        return f16(shr(ld4(t, 0), 16 * g) & u32(0xffff)), ZERO

    return Unpacker(levels, unit_scales(p), group)
