"""IQ1, IQ2, IQ3 and IQ4_XS: blocks of 256 columns whose levels come from codebooks, with signs or a shift beside them.

A codebook entry holds the levels of eight (IQ1, IQ2) or four (IQ3) columns; the codebooks are those of `gguf.quants`. Where gguf multiplies
d by (0.5 + s) / 4 the integer scale is 2s + 1 and the float scale d / 8: the same product, since powers of two are exact.
"""
from functools import lru_cache

import numpy as np
from gguf import quants

from .legacy import IQ4_LEVELS, nibble_levels
from .words import TWOS, Unpacker, half_scale, i32, u32


@lru_cache(None)
def codebook(name: str) -> np.ndarray:
    """int [n_entries, levels of an entry] of an IQ1, IQ2 or IQ3 format."""
    cls = getattr(quants, name)
    cls.init_grid()
    return cls.grid.reshape(cls.grid_shape).astype(np.int64)


def level_words(name: str) -> np.ndarray:
    """A codebook of positive levels as uint32 words of four levels, entries in order."""
    return codebook(name).astype(np.uint8).reshape(-1).view(np.uint32)


def ternary_codes(name: str) -> np.ndarray:
    """A codebook of levels -1, 0, 1 as uint16 entries: eight two-bit fields of level + 1, the first lowest."""
    return ((codebook(name) + 1) << 2 * np.arange(8)).sum(axis=1).astype(np.uint16)


def sign_bits(p):
    """(s) -> eight sign bits: the low seven bits of s, and their parity above them."""
    shr = p.shr

    @p.jit
    def bits(s):
        s = u32(s) & u32(127)
        folded = (s ^ (s >> u32(4))) & u32(15)
        return u32(s | (shr(u32(0x6996), folded) & u32(1)) << u32(7))  # bit k of 0x6996 is the parity of k
    return bits


def pair(p, ld16):
    """(t, first, j) -> words 2j and 2j + 1 of the pieces from `first`: the 8 bytes of the 32 columns j."""
    @p.jit
    def words(t, first, j):
        a, b, c, d = ld16(t, first + (j >> 1))
        return (u32(c), u32(d)) if j & 1 else (u32(a), u32(b))
    return words


def word(p, ld16):
    """(t, first, j) -> word j of the pieces from `first`: the 4 bytes of the 32 columns j."""
    pick = p.pick

    @p.jit
    def get(t, first, j):
        return pick(ld16(t, first + (j >> 2)), j & 3)
    return get


def eight_levels(p, name):
    """(t, entry, signs) -> the two level words of an eight-column entry with eight sign bits."""
    table, signed = p.table(level_words(name)), p.signed

    @p.jit
    def eight(t, entry, signs):
        i = i32(entry) * 2
        return signed(table(t, i), signs), signed(table(t, i + 1), signs >> u32(4))
    return eight


def four_levels(p, name):
    """(t, a, b, signs) -> the two level words of two four-column entries with eight sign bits."""
    table, signed = p.table(level_words(name)), p.signed

    @p.jit
    def four(t, a, b, signs):
        return signed(table(t, i32(a)), signs), signed(table(t, i32(b)), signs >> u32(4))
    return four


def odd_nibble(p):
    """(w, i) -> (isc, imin) with isc = 2s + 1, s the nibble i of the word."""
    shr = p.shr

    @p.jit
    def scale(w, i):
        return i32(u32((shr(w, 4 * i) & u32(15)) * u32(2) + u32(1))), i32(0)
    return scale


def iq2_xxs(p, ld16, ld4, ld2):
    """Per 32 columns 8 bytes: four entry numbers; then four times seven sign bits, and s in the top four bits."""
    words, eight, signs, scale, shr = pair(p, ld16), eight_levels(p, "IQ2_XXS"), sign_bits(p), odd_nibble(p), p.shr

    @p.jit
    def part(t, a, b, l):
        return eight(t, shr(a, 8 * l) & u32(255), signs(shr(b, 7 * l)))

    @p.jit
    def levels(t, j):
        a, b = words(t, 0, j)
        return part(t, a, b, 0) + part(t, a, b, 1) + part(t, a, b, 2) + part(t, a, b, 3)

    @p.jit
    def sub(t, i):
        return scale(words(t, 0, i)[1], 7)

    return Unpacker(levels, sub, half_scale(p, ld2, 1 / 8))


def iq2_xs(p, ld16, ld4, ld2):
    """Per 8 columns 16 bits: the entry number in nine, seven sign bits above; s of 16 columns in nibbles."""
    words, eight, signs, scale = pair(p, ld16), eight_levels(p, "IQ2_XS"), sign_bits(p), odd_nibble(p)

    @p.jit
    def part(t, q):
        return eight(t, q & u32(511), signs(q >> u32(9)))

    @p.jit
    def levels(t, j):
        a, b = words(t, 0, j)
        return part(t, a) + part(t, a >> u32(16)) + part(t, b) + part(t, b >> u32(16))

    @p.jit
    def sub(t, i):
        return scale(ld4(t, i >> 3), i & 7)

    return Unpacker(levels, sub, half_scale(p, ld2, 1 / 8))


def iq2_s(p, ld16, ld4, ld2):
    """Entry numbers in bytes, their bits 8 and 9 in two-bit fields of qh; sign bits in bytes; s of 16 columns in nibbles."""
    get, eight, scale, shr, byte, pick = word(p, ld16), eight_levels(p, "IQ2_S"), odd_nibble(p), p.shr, p.byte, p.pick

    @p.jit
    def part(t, q, s, h, l):
        return eight(t, (shr(q, 8 * l) & u32(255)) | (shr(h, 2 * l) & u32(3)) << u32(8), shr(s, 8 * l))

    @p.jit
    def levels(t, j):
        q, s, h = get(t, 0, j), get(t, 2, j), byte(ld16(t, 4), j)
        return part(t, q, s, h, 0) + part(t, q, s, h, 1) + part(t, q, s, h, 2) + part(t, q, s, h, 3)

    @p.jit
    def sub(t, i):
        return scale(pick(ld16(t, 4), 2 + (i >> 3)), i & 7)

    return Unpacker(levels, sub, half_scale(p, ld2, 1 / 8))


def iq3_xxs(p, ld16, ld4, ld2):
    """Entry numbers in bytes; per 32 columns a word of four times seven sign bits, and s in the top four bits."""
    words, get, four, signs, scale, shr = pair(p, ld16), word(p, ld16), four_levels(p, "IQ3_XXS"), sign_bits(p), odd_nibble(p), p.shr

    @p.jit
    def part(t, q, s, l):
        return four(t, q & u32(255), (q >> u32(8)) & u32(255), signs(shr(s, 7 * l)))

    @p.jit
    def levels(t, j):
        a, b = words(t, 0, j)
        s = get(t, 4, j)
        return part(t, a, s, 0) + part(t, a >> u32(16), s, 1) + part(t, b, s, 2) + part(t, b >> u32(16), s, 3)

    @p.jit
    def sub(t, i):
        return scale(get(t, 4, i), 7)

    return Unpacker(levels, sub, half_scale(p, ld2, 1 / 4))


def iq3_s(p, ld16, ld4, ld2):
    """Entry numbers in bytes, their bit 8 in the bits of qh; sign bits in bytes; s of 32 columns in nibbles. Scale d, not d / 4."""
    words, get, four, scale, shr = pair(p, ld16), word(p, ld16), four_levels(p, "IQ3_S"), odd_nibble(p), p.shr

    @p.jit
    def part(t, q, s, h, l):
        a = (q & u32(255)) | (shr(h, 2 * l) & u32(1)) << u32(8)
        b = ((q >> u32(8)) & u32(255)) | (shr(h, 2 * l + 1) & u32(1)) << u32(8)
        return four(t, a, b, shr(s, 8 * l))

    @p.jit
    def levels(t, j):
        a, b = words(t, 0, j)
        s, h = get(t, 4, j), shr(ld4(t, j >> 2), 8 * (j & 3))
        return part(t, a, s, h, 0) + part(t, a >> u32(16), s, h, 1) + part(t, b, s, h, 2) + part(t, b >> u32(16), s, h, 3)

    @p.jit
    def sub(t, i):
        return scale(ld4(t, 2), i)

    return Unpacker(levels, sub, half_scale(p, ld2))


def shifted_levels(p, name):
    """(t, entry, minus) -> the two level words 8 l + 1, or 8 l - 1 where minus is 1, of an eight-column entry of levels l in -1, 0, 1."""
    table, less = p.table(ternary_codes(name)), p.less

    @p.jit
    def half_entry(code, minus):
        code = u32(code) & u32(255)
        fields = (code | code << u32(6) | code << u32(12) | code << u32(18)) & TWOS
        return less(u32(fields << u32(3)), u32(7) + (minus << u32(1)))

    @p.jit
    def eight(t, entry, minus):
        code = table(t, i32(entry))
        return half_entry(code, minus), half_entry(code >> u32(8), minus)
    return eight


def iq1_s(p, ld16, ld4, ld2):
    """Entry numbers in bytes, their bits 8..10 in three-bit fields of qh; qh also has s in bits 12..14 and the shift's sign in bit 15."""
    get, eight, shr, half = word(p, ld16), shifted_levels(p, "IQ1_S"), p.shr, p.half

    @p.jit
    def part(t, q, h, l):
        return eight(t, (shr(q, 8 * l) & u32(255)) | (shr(h, 3 * l) & u32(7)) << u32(8), (h >> u32(15)) & u32(1))

    @p.jit
    def levels(t, j):
        q, h = get(t, 0, j), half(ld16(t, 2), j)
        return part(t, q, h, 0) + part(t, q, h, 1) + part(t, q, h, 2) + part(t, q, h, 3)

    @p.jit
    def sub(t, i):
        return i32(u32(((half(ld16(t, 2), i) >> u32(12)) & u32(7)) * u32(2) + u32(1))), i32(0)

    return Unpacker(levels, sub, half_scale(p, ld2, 1 / 8))


def iq1_m(p, ld16, ld4, ld2):
    """Entry numbers in bytes, their bits 8..10 and the shift's sign in nibbles of qh; four 16-bit words hold s of 16 columns in
    three-bit fields, and together, in their top four bits, the float16 d."""
    get, eight, shr, half, f16, mul = word(p, ld16), shifted_levels(p, "IQ1_M"), p.shr, p.half, p.f16, p.mul
    eighth = np.float32(1 / 8)

    @p.jit
    def part(t, q, h, l):
        nibble = shr(h, 4 * l)
        return eight(t, (shr(q, 8 * l) & u32(255)) | (nibble & u32(7)) << u32(8), (nibble >> u32(3)) & u32(1))

    @p.jit
    def levels(t, j):
        q, h = get(t, 0, j), half(ld16(t, 2), j)
        return part(t, q, h, 0) + part(t, q, h, 1) + part(t, q, h, 2) + part(t, q, h, 3)

    @p.jit
    def sub(t, i):
        s = shr(ld4(t, i >> 3), 16 * ((i >> 2) & 1) + 3 * (i & 3))
        return i32(u32((s & u32(7)) * u32(2) + u32(1))), i32(0)

    @p.jit
    def group(t, g):
        a, b = u32(ld4(t, 0)), u32(ld4(t, 1))
        bits = (a >> u32(12)) & u32(15) | (a >> u32(24)) & u32(0xf0) | (b >> u32(4)) & u32(0xf00) | (b >> u32(16)) & u32(0xf000)
        return mul(f16(bits), eighth), np.float32(0)

    return Unpacker(levels, sub, group)


def iq4_xs(p, ld16, ld4, ld2):
    """Nibbles as in the legacy formats, through IQ4_NL's table; word 0 is d and the upper two bits of eight scales, word 1 their low nibbles."""
    f16, shr = p.f16, p.shr

    @p.jit
    def sub(t, i):
        low, high = shr(ld4(t, 1), 4 * i) & u32(15), shr(ld4(t, 0), 16 + 2 * i) & u32(3)
        return i32(i32(low | high << u32(4)) - i32(32)), i32(0)

    @p.jit
    def group(t, g):
        return f16(u32(ld4(t, 0)) & u32(0xffff)), np.float32(0)

    return Unpacker(nibble_levels(p, ld16, p.lookup16(IQ4_LEVELS)), sub, group)
