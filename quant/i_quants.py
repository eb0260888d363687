"""IQ1, IQ2, IQ3 and IQ4_XS: blocks of 256 columns whose levels come from codebooks, with signs or a shift beside them.

A codebook entry holds the levels of eight (IQ1, IQ2) or four (IQ3) columns; the codebooks are those of `gguf.quants`. Where gguf
multiplies d by (0.5 + s) / 4 the integer scale is 2s + 1 and the float scale d / 8: the same product, since powers of two are
exact.
"""
from functools import lru_cache

import numpy as np
from gguf import quants

from .legacy import IQ4_LEVELS
from .words import Looked, Parts, half_scale, i32, negated, signs8, u32


@lru_cache(None)
def codebook(name: str) -> np.ndarray:
    """int [n_entries, levels of an entry] of an IQ1, IQ2 or IQ3 format."""
    cls = getattr(quants, name)
    cls.init_grid()
    return cls.grid.reshape(cls.grid_shape).astype(np.int64)


def level_words(name: str) -> np.ndarray:
    """A codebook of four positive levels as uint32 words, entries in order."""
    return codebook(name).astype(np.uint8).reshape(-1).view(np.uint32)


def eighths(name: str) -> np.ndarray:
    """A codebook of eight levels -1, 0, 1 as uint32 words: bits 3..4 of byte k are level + 1 of column k,
    bits 5..6 of column 4 + k."""
    fields = (codebook(name) + 1).astype(np.uint8)
    return (fields[:, :4] << 3 | fields[:, 4:] << 5).reshape(-1).view(np.uint32)


def odd_nibble(p):
    """(w, i) -> (isc, imin) with isc = 2s + 1, s the nibble i of the word."""
    shr = p.shr

    @p.jit
    def scale(w, i):
        return i32(u32((shr(w, 4 * i) & u32(15)) * u32(2) + u32(1))), i32(0)
    return scale


def iq2_xxs(p, ldw, ld4, ld2):
    """Per 32 columns 8 bytes: four entry numbers; then four times seven sign bits, and s in the top four bits."""
    eight, scale, shr, byte = p.signed8(codebook("IQ2_XXS"), True), odd_nibble(p), p.shr, p.byte

    @p.jit
    def quarter(t, j, q):
        return eight(t, byte(ldw(t, j >> 1, 2 * (j & 1)), q), shr(ldw(t, j >> 1, 2 * (j & 1) + 1), 7 * q))

    @p.jit
    def sub(t, i):
        return scale(ldw(t, i >> 1, 2 * (i & 1) + 1), 7)

    return Parts(quarter, sub, half_scale(p, ld2, 1 / 8), pairs=True)


def iq2_xs(p, ldw, ld4, ld2):
    """Per 8 columns 16 bits: the entry number in nine, seven sign bits above; s of 16 columns in nibbles."""
    eight, scale, shr = p.signed8(codebook("IQ2_XS"), True), odd_nibble(p), p.shr

    @p.jit
    def quarter(t, j, q):
        w = shr(ldw(t, j >> 1, 2 * (j & 1) + (q >> 1)), 16 * (q & 1))
        return eight(t, w & u32(511), w >> u32(9))

    @p.jit
    def sub(t, i):
        return scale(ld4(t, i >> 3), i & 7)

    return Parts(quarter, sub, half_scale(p, ld2, 1 / 8), pairs=True)


def iq2_s(p, ldw, ld4, ld2):
    """Entry numbers in bytes, their bits 8 and 9 in two-bit fields of qh; sign bits in bytes; s of 16 columns in nibbles."""
    eight, scale, shr, byte = p.signed8(codebook("IQ2_S"), False), odd_nibble(p), p.shr, p.byte

    @p.jit
    def quarter(t, j, q):
        upper = shr(ldw(t, 4, j >> 2), 8 * (j & 3) + 2 * q) & u32(3)
        return eight(t, byte(ldw(t, j >> 2, j & 3), q) | upper << u32(8), byte(ldw(t, 2 + (j >> 2), j & 3), q))

    @p.jit
    def sub(t, i):
        return scale(ldw(t, 4, 2 + (i >> 3)), i & 7)

    return Parts(quarter, sub, half_scale(p, ld2, 1 / 8), pairs=True)


def iq3_xxs(p, ldw, ld4, ld2):
    """Entry numbers in bytes; per 32 columns a word of four times seven sign bits, and s in the top four bits."""
    table, signs, negate, scale, shr = p.table(level_words("IQ3_XXS")), signs8(p, True), negated(p), odd_nibble(p), p.shr

    @p.jit
    def quarter(t, j, q):
        low, high = signs(shr(ldw(t, 4 + (j >> 2), j & 3), 7 * q))
        w = shr(ldw(t, j >> 1, 2 * (j & 1) + (q >> 1)), 16 * (q & 1))
        return negate(table(t, i32(w & u32(255))), low), negate(table(t, i32((w >> u32(8)) & u32(255))), high)

    @p.jit
    def sub(t, i):
        return scale(ldw(t, 4 + (i >> 2), i & 3), 7)

    return Parts(quarter, sub, half_scale(p, ld2, 1 / 4), pairs=True)


def iq3_s(p, ldw, ld4, ld2):
    """Entry numbers in bytes, their bit 8 in the bits of qh; sign bits in bytes; s of 32 columns in nibbles. Scale d, not d / 4.
    Levels are odd: for them -b = b ^ 254 as bytes."""
    table, signs, scale, shr, byte = p.table(level_words("IQ3_S")), signs8(p, False), odd_nibble(p), p.shr, p.byte

    @p.jit
    def quarter(t, j, q):
        low, high = signs(byte(ldw(t, 4 + (j >> 2), j & 3), q))
        w, h = ldw(t, j >> 1, 2 * (j & 1) + (q >> 1)), shr(ld4(t, j >> 2), 8 * (j & 3) + 2 * q)
        a, b = byte(w, 2 * (q & 1)) | (h & u32(1)) << u32(8), byte(w, 2 * (q & 1) + 1) | (h & u32(2)) << u32(7)
        return i32(u32(table(t, i32(a)) ^ low * u32(254))), i32(u32(table(t, i32(b)) ^ high * u32(254)))

    @p.jit
    def sub(t, i):
        return scale(ld4(t, 2), i)

    return Parts(quarter, sub, half_scale(p, ld2), pairs=True)


def shifted(p, name):
    """(t, entry, minus) -> the two words of codes 8 (l + 1), and 2 more where minus is 0,
    of an eight-column entry of levels l in -1, 0, 1."""
    table, fields, twos = p.table(eighths(name)), u32(0x18181818), u32(0x02020202)

    @p.jit
    def eight(t, entry, minus):
        w, two = table(t, i32(entry)), u32(twos - minus * twos)
        return i32(u32(w & fields | two)), i32(u32((w >> u32(2)) & fields | two))
    return eight


def iq1_s(p, ldw, ld4, ld2):
    """Entry numbers in bytes, their bits 8..10 in three-bit fields of qh; qh also has s in bits 12..14 and the shift's sign in
    bit 15: set means minus."""
    eight, shr, byte, half = shifted(p, "IQ1_S"), p.shr, p.byte, p.half

    @p.jit
    def quarter(t, j, q):
        h = half(ldw(t, 2, j >> 1), j & 1)
        return eight(t, byte(ldw(t, j >> 2, j & 3), q) | (shr(h, 3 * q) & u32(7)) << u32(8), h >> u32(15))

    @p.jit
    def sub(t, i):
        return i32(u32(((half(ldw(t, 2, i >> 1), i & 1) >> u32(12)) & u32(7)) * u32(2) + u32(1))), i32(0)

    return Parts(quarter, sub, half_scale(p, ld2, 1 / 8), pairs=True)


def nibbles_above(p, ldw):
    """`quarter` of entry numbers in bytes, their bits 8..10 and the shift's sign in nibbles of qh."""
    eight, shr, byte = shifted(p, "IQ1_M"), p.shr, p.byte

    @p.jit
    def quarter(t, j, q):
        h = shr(ldw(t, 2, j >> 1), 16 * (j & 1) + 4 * q)
        return eight(t, byte(ldw(t, j >> 2, j & 3), q) | (h & u32(7)) << u32(8), (h >> u32(3)) & u32(1))
    return quarter


def iq1_m(p, ldw, ld4, ld2):
    """Four 16-bit words hold s of 16 columns in three-bit fields, and together, in their top four bits, the float16 d."""
    shr, f16, mul = p.shr, p.f16, p.mul
    eighth = np.float32(1 / 8)

    @p.jit
    def sub(t, i):
        s = shr(ld4(t, i >> 3), 16 * ((i >> 2) & 1) + 3 * (i & 3))
        return i32(u32((s & u32(7)) * u32(2) + u32(1))), i32(0)

    @p.jit
    def group(t, g):
        a, b = u32(ld4(t, 0)), u32(ld4(t, 1))
        bits = (a >> u32(12)) & u32(15) | (a >> u32(24)) & u32(0xf0) | (b >> u32(4)) & u32(0xf00) | (b >> u32(16)) & u32(0xf000)
        return mul(f16(bits), eighth), np.float32(0)

    return Parts(nibbles_above(p, ldw), sub, group, pairs=True)


def iq1_m_r1(p, ldw, ld4, ld2):
    """As IQ1_M; d a row, and isc in nibbles."""
    shr = p.shr

    @p.jit
    def sub(t, i):
        return i32(shr(ld4(t, i >> 3), 4 * (i & 7)) & u32(15)), i32(0)

    return Parts(nibbles_above(p, ldw), sub, half_scale(p, ld2, 1 / 8), pairs=True)


def iq4_xs(p, ldw, ld4, ld2):
    """Nibbles as in the legacy formats, through IQ4_NL's table; word 0 is d and the upper two bits of eight scales,
    word 1 their low nibbles."""
    f16, shr = p.f16, p.shr

    @p.jit
    def sub(t, i):
        low, high = shr(ld4(t, 1), 4 * i) & u32(15), shr(ld4(t, 0), 16 + 2 * i) & u32(3)
        return i32(i32(low | high << u32(4)) - i32(32)), i32(0)

    @p.jit
    def group(t, g):
        return f16(u32(ld4(t, 0)) & u32(0xffff)), np.float32(0)

    return Parts(Looked(IQ4_LEVELS, ldw), sub, group)
