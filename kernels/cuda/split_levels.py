"""Levels times their integer scales, v = isc * level, as bytes for the tensor core, and the sum of what it makes of them
(docs/numerics.md, section 3).

A word holds four levels, so a multiplication by a small enough factor makes four bytes at once. If all v are bytes, that factor
is isc. Else isc = 2^k a + b, and v = 2^k h + l with h = a * level and l = b * level: of scales of up to six bits and small levels
both are bytes. Of all others two levels are multiplied at once, to 16 bits each, of which h and l are the two bytes.

Signed bytes are multiplied as level + 128 or, of a format with a zero point, as codes, and 128 is added to each product, so that
nothing is borrowed from the byte beside it.
"""
from typing import NamedTuple

from ...quant.formats import Format
from ...quant.words import EVEN, ONES, TOPS
from .ptx import add, as_f32, device, f32, fma, hidden, i2f, i32, i64, prmt, u32
from .tile_form import form


class Split(NamedTuple):
    """v = 2^shift h + l, or, of one limb, h."""
    n_limbs: int
    shift: int
    unsigned: bool  # whether h is uint8, else int8
    negated: bool   # h = -v

    @property
    def by_scale(self) -> bool:
        """Whether isc is split, not v."""
        return self != BYTES

    @property
    def l_unsigned(self) -> bool:
        return self.unsigned or not self.by_scale


BYTES = Split(2, 8, False, False)


def split_of(fmt: Format) -> Split:
    """Of a format with integer scales. 128 is no int8, but -128 is. Where levels and scales are signed integers of some bits,
    none is +max_level or +max_isc, so v may be 128, but not -128, and h = -v."""
    most, largest = 255 if fmt.has_min else 127, fmt.max_level * fmt.max_isc
    if largest == 128 and not fmt.has_min:
        assert fmt.zero == fmt.max_level and not fmt.zero & (fmt.zero - 1) and not fmt.max_isc & (fmt.max_isc - 1), fmt.name
        return Split(1, 0, False, True)
    if largest <= most:
        return Split(1, 0, fmt.has_min, False)
    for k in range(1, 7):
        if fmt.max_level * max(-(-fmt.max_isc >> k), (1 << k) - 1) <= most:
            return Split(2, k, fmt.has_min, False)
    return BYTES


def splitter(fmt: Format):
    """(w, f0, f1, f2, f3) -> the limbs of v = isc * level of the words of a fragment of 16 rows: fragments h, then l; of one limb
    h twice. f: isc of each word."""
    split = split_of(fmt)
    return scale_splitter(fmt, split) if split.by_scale else byte_splitter(fmt)


def of_fragment(limbs_of):
    """`splitter` by what splits a word: (w, f) -> (h, l)."""
    @device
    def four_limbs(w, f0, f1, f2, f3):
        h0, l0 = limbs_of(w[0], f0)
        h1, l1 = limbs_of(w[1], f1)
        h2, l2 = limbs_of(w[2], f2)
        h3, l3 = limbs_of(w[3], f3)
        return h0, h1, h2, h3, l0, l1, l2, l3
    return four_limbs


def scale_splitter(fmt: Format, split: Split):
    """As `splitter`, where isc is split, or a factor itself."""
    two, shift, negated, signed, offset = split.n_limbs == 2, split.shift, split.negated, not split.unsigned, fmt.zero or 128
    tops, offsets = i64(TOPS), i64(offset * ONES)

    @device
    def limb(w, f):
        """f * level of four levels."""
        w, f = i64(w), i64(f)
        return i32(u32(w * f + i64(tops - f * offsets)) ^ TOPS) if signed else i32(u32(w * f))

    @device
    def limbs_of(w, f):
        w, f = u32(w), i32(f)
        if offset == 128 and signed:
            w = u32(w ^ TOPS)
        if two:
            return limb(w, f >> shift), limb(w, f & ((1 << shift) - 1))
        h = limb(w, -f if negated else f)
        return h, h
    return of_fragment(limbs_of)


def byte_splitter(fmt: Format, signed: bool = False):
    """As `splitter`, for v = 256 h + l of int8 and uint8. The products of two levels are one multiplication: 16-bit lanes hold v
    + 2^15, whose bytes are h + 128 and l, so |v| < 2^15. signed: l is int8, too, and |h| <= 127 where |v| < 2^15 - 128."""
    offset = 0 if fmt.has_min else fmt.zero or 128  # of levels, which are then no less than 0
    assert not (fmt.has_min and fmt.zero) and fmt.max_level * fmt.max_isc < 2**15 - 128 * signed, fmt.name
    offsets, middle, tops_of_low = i64(offset * 0x00010001), i64(0x80808080 if signed else 0x80008000), TOPS if signed else u32(0)
    tops_of_even = hidden((TOPS & EVEN,))  # as in weights.lookup_nibbles

    @device
    def limbs_of(w, f):
        w, f = u32(w), i64(f)
        addend = i64(middle - f * offsets) if offset else middle
        first, second = u32(w & EVEN), u32((w >> u32(8)) & EVEN)
        if offset == 128:  # one operation with the mask
            tops = tops_of_even(0)
            first, second = u32(first ^ tops), u32(second ^ tops)
        even, odd = u32(i64(first) * f + addend), u32(i64(second) * f + addend)
        return i32(u32(prmt(even, odd, u32(0x7351))) ^ TOPS), i32(u32(prmt(even, odd, u32(0x6240))) ^ tops_of_low)
    return of_fragment(limbs_of)


power = hidden((0x4b000000,))  # 2^23, a float whose last bits count ones


def limb_summer(fmt: Format):
    """(h_high, h_low, l_high, l_low) -> RN(S) of the sums of h and l times the limbs of q: S = 2^k (128 h_high + h_low) + 128
    l_high + l_low, or of one limb 128 h_high + h_low, negated where h is, so that 0 may be -0.

    If S is an int32, integers give the whole of it, modulo 2^32. Else S = 2^(k + 7) a + r: a and r are exact in float32, so the
    sum is rounded once. r becomes a float without a conversion, on another pipe. b = 128 l_high + l_low + 2^k h_low is an int32:
    of bytes of up to 255, and limbs of q up to 127 and 64, it is at most 256 * 255 * (128 * 127 + 64 + 64 * 2^k) < 2^31 for k up
    to 8, and a is at most 256 * 255 * 127 + 2^31 / 2^(k + 7) < 2^24."""
    n_limbs, k, _, negated = split_of(fmt)
    one, wide, ones, unit = n_limbs == 1, form(fmt).wide, i32((1 << k + 7) - 1), f32(1 << k + 7)
    assert not (one and wide), fmt.name

    @device
    def limb_sum(h_high, h_low, l_high, l_low):
        if one:
            s = i2f(i32((h_high << 7) + h_low))
            return f32(-s) if negated else s
        if wide:
            b = i32(i32((l_high << 7) + l_low) + (h_low << k))
            r = add(as_f32(i32(u32(b & ones) | power(0))), f32(-8388608))
            return fma(i2f(i32(h_high + (b >> (k + 7)))), unit, r)
        return i2f(i32((i32((h_high << 7) + h_low) << k) + i32((l_high << 7) + l_low)))
    return limb_sum
