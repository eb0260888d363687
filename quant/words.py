"""What every unpacking is built of: integer operations on 32-bit words (four packed bytes), compiled for one target.

All formats are unpacked by the same source on every target. A target is a `Primitives` value: `primitives(jit)` gives the
portable ones, compiled by `jit` (`numba.njit`, `numba.cuda.jit(device=True)`, or the identity for plain Python), and a target
that has an instruction for one of them passes it by name, `primitives(jit, shr=..., f16=...)`: the others are then built on it.

Words are uint32 throughout, constants included: numba makes uint64 of them, which is harmless, but int64 (and with it float64) of
a mixture of signs. Byte sums are arranged so that no byte, and so no word, ever overflows: plain Python gives the same without
warnings.
"""
from typing import NamedTuple
from collections.abc import Callable

import numpy as np

u32, u64, i32, f32 = np.uint32, np.uint64, np.int32, np.float32

ONES = u32(0x01010101)    # one in each byte
TWOS = u32(0x03030303)    # the low two bits of each byte
NIBBLES = u32(0x0f0f0f0f)
TOPS = u32(0x80808080)
SUMMED = 126              # of a `Summed` level, less than the sum of its bytes
EVEN = u32(0x00ff00ff)    # bytes 0 and 2 in 16-bit lanes
ZERO = f32(0)


class Looked(NamedTuple):
    """A quarter of codes that count levels."""
    levels: tuple[int, ...]  # 4, 8 or 16, int8
    word: Callable           # (t, j, q) -> uint32: low nibbles are the codes of the quarter's first word, high ones of its second
    # (t, j, h, q), where j % 4 < 2 -> uint32: low nibbles are the codes of columns 32j + 16h + 4q .., high ones those of columns
    # that are 64 behind them; where this is less work
    blocks: Callable | None = None


class Summed(NamedTuple):
    """A quarter of levels that are sums of four bytes, minus SUMMED."""
    words: Callable  # (t, j, q) -> 8 uint32, one a column: four bytes up to 63


class Paired(NamedTuple):
    """A quarter, with columns in pairs of words, of codes of five bits that count pairs of levels."""
    levels: tuple[tuple[int, int], ...]  # 32, int8
    quarter: Callable                    # as of `Parts`
    nibbles: Callable  # (t, j, q), j even -> uint32: low nibbles are those of the codes of block j, high ones of block j + 1
    fifths: Callable   # the same -> uint32: the codes' fifth bits, in the uppermost bits of their nibbles


class FiveBits(NamedTuple):
    """A quarter of codes of five bits that count levels."""
    levels: tuple[int, ...]  # 32, int8, ascending: 16 negative ones
    quarter: Callable        # as of `Parts`
    # (t, j, h, q), j even -> uint32: low nibbles are those of the codes of columns 32j + 16h + 4q .., high ones those of columns
    # that are 32 behind them
    nibbles: Callable
    fifths: Callable   # the same -> uint32: the codes' fifth bits, in the uppermost bits of their nibbles


class Scales(NamedTuple):
    """Of several sub-blocks of a row, for a lane that takes them: sub-blocks p and p + 4 of 32 columns; p, p + 4, p + 8 and
    p + 12 of 16 columns, or, where these have `Looked.blocks`, b, b + 2, b + 8 and b + 10, b = 4 (p % 2) + p // 2. p is 0..3."""
    load: Callable  # (t, first sub-block) -> words
    take: Callable  # (words, n) -> int32 of the n-th of them: isc, and the shift as of `Parts`


class BitFields(NamedTuple):
    """Codes in fields of bytes, of `width` bits, those of 8 / width blocks of 32 columns in a byte; and maybe one more bit of
    each, elsewhere."""
    width: int
    # (t, j, q), j even -> two uint32 words in whose fields j mod (8 / width) the codes of quarter (t, j, q) are, and in the next
    # ones those of quarter (t, j + 1, q)
    words: Callable
    # (t, k) -> uint32 words of the bytes isc - `offset`. Of four bits: of all sub-blocks, then of the bytes imin. Of two bits: a
    # single word, of the four sub-blocks from column 64 k on; where there are minima they are its high nibbles, isc the low ones
    scales: Callable
    offset: int = 0
    # (t, q) -> two uint32 words, bit j of whose bytes is the bit above the field of the codes of quarter (t, j, q)
    tops: Callable | None = None


class Parts(NamedTuple):
    """What a format states of its unpacking; the rest of an `Unpacker` follows. t names the chunk, as the loads understand it."""
    # (t, j, q) -> 2 int32 words: the codes of eight of the columns 32j..32j+31, q = 0..3, the lowest byte first; or what they are
    # made of
    quarter: Callable | Looked | Summed | Paired | FiveBits
    sub: Callable        # (t, i) -> (isc, imin) int32 of the i-th sub-block (`Format.sub` columns)
    group: Callable      # (t, g) -> (d, m) float32 of the g-th group (`Format.group` columns)
    pairs: bool = False  # the columns of a quarter: 8q..8q+3 and 8q+4..8q+7, else 4q..4q+3 and 16+4q..16+4q+3
    shift: Callable | None = None  # (t, i) -> int32, no less than 0: what is added to each level of the i-th sub-block
    # (t) -> uint32 words of the bytes isc of all sub-blocks, then of the bytes imin, if that is less work than `sub` of each
    packed: Callable | None = None
    scales: Scales | None = None   # what sub and shift give, where there is a shorter way for several
    bit_fields: BitFields | None = None   # where codes lie so


class Unpacker(NamedTuple):
    """A format's unpacking of one chunk (256 columns of a row), compiled for one target; level = code - `Format.zero`.

    value[c] = sub(mul(mul(d, isc), level[c]), mul(m, imin)), each operation float32, nearest even; without minima the first
    product.
    """
    levels: Callable  # (t, j) -> 8 int32 words: the int8 levels of columns 32j..32j+31 in column order, the lowest byte first
    sub: Callable     # sub, group, quarter, pairs: see `Parts`
    group: Callable
    quarter: Callable
    pairs: bool
    unshifted: Callable                 # a quarter before the shift
    source: Callable | Looked | Summed | Paired | FiveBits  # shift, source: see `Parts`; of what a quarter is before the shift
    shift: Callable | None
    packed: Callable | None             # see `Parts`
    scales: Scales | None
    bit_fields: BitFields | None


class Cubic(NamedTuple):
    """((a y + b) y + c) y + d with y = code - middle, each step rounded to float16 and the last one to an integer, are the levels
    of the codes. a, b, c are float16."""
    a: float
    b: float
    c: float
    d: int
    middle: int


class Primitives(NamedTuple):
    """Device functions of one target. w: uint32 word of four bytes; t: whatever the loads take."""
    jit: Callable       # compiles a device function for the target
    f16: Callable       # (bits of a half, 0..65535) -> float32, exact
    f32: Callable       # (bits) -> float32 of that pattern
    mul: Callable       # (a, b) -> a * b in float32, nearest even
    shr: Callable       # (w, s) -> w >> s, s in 0..31
    select: Callable    # (condition, a, b) -> a where the condition holds, else b
    half: Callable      # (w, i) -> 16-bit half i of the word, 0 or 1
    byte: Callable      # (w, i) -> byte i of the word, 0..3
    weighed: Callable   # (w, i, factor, more) -> int32 factor * byte i of the word + more; factor 0..255
    signed_byte: Callable  # (w, i) -> byte i of the word as int8, int32
    half_plus: Callable  # (w, i, more) -> 16-bit half i of the word + more
    bytes_of: Callable  # (v, w, s) -> of the bytes 0..3 of v, 4..7 of w those that the low four nibbles of s count
    field: Callable     # (w, s, mask, up) -> (w >> s & mask) << up, s and up in 0..31
    odd_bytes: Callable  # (v, w) -> bytes 1 and 3 of v and of w, in the order v, w, v, w
    top_bytes: Callable  # (a, b, c, d) -> the highest byte of each, the lowest first
    distances: Callable  # (w) -> |b - SUMMED| of the bytes b of w, up to 2 SUMMED
    spread: Callable    # (w) -> the low four bits of w, one in each byte
    table: Callable     # (1-d unsigned array) -> device function (t, i) -> entry i as uint32
    # (4, 8 or 16 int8 levels) -> device function (w) -> int32 words of the levels of w's low nibbles, and of its high ones, which
    # count them
    lookup_nibbles: Callable
    # (16 int8 levels, negative ones first) -> device functions: (w) -> words, and (words, n) -> int32 level that nibble n of w
    # counts; n is known to the compiler
    lookup_each: Callable
    # (32 or 64 int8 levels, `Cubic` of theirs) -> device function (a, b) -> int32 words of the levels of the codes in the bytes
    # of a and of b
    lookup_codes: Callable
    # ([n, 8] of three positive levels, parity) -> device function (t, i, s) -> 2 int32 words: entry i, negated where the bits
    # 0..7 of s are set; with parity bit 7 is that of the bits 0..6
    signed8: Callable


def primitives(jit, **native):
    """The `Primitives` of a target: portable ones compiled by `jit`, but for the `native` device functions given under their
    names."""
    unknown = native.keys() - set(Primitives._fields)
    if unknown:
        raise TypeError(f"primitives: unknown {', '.join(sorted(unknown))}; known: {', '.join(Primitives._fields)}")

    @jit
    def as_f32(bits):
        return u32(bits).view(f32)

    @jit
    def mul(a, b):
        return f32(f32(a) * f32(b))

    as_f32, mul = native.get("f32", as_f32), native.get("mul", mul)

    @jit
    def f16(bits):
        # Exponent and mantissa moved to float32's places are too small by 2^112, subnormals included; infinity and NaN keep all
        # ones above.
        bits = u32(bits)
        shifted = (bits & u32(0x8000)) << u32(16) | (bits & u32(0x7fff)) << u32(13)
        not_finite = (bits & u32(0x7c00)) == u32(0x7c00)
        return as_f32(shifted | u32(0x7f800000)) if not_finite else mul(as_f32(shifted), f32(2.0**112))

    @jit
    def shr(w, s):
        return u32(u32(w) >> (u32(s) & u32(31)))

    @jit
    def select(condition, a, b):
        return a if condition else b

    shr, select = native.get("shr", shr), native.get("select", select)

    @jit
    def half(w, i):
        return u32(shr(w, i << 4) & u32(0xffff))

    @jit
    def byte(w, i):
        return u32(shr(w, i << 3) & u32(0xff))

    @jit
    def weighed(w, i, factor, more):
        return i32(i32(byte(w, i)) * i32(factor) + i32(more))

    @jit
    def signed_byte(w, i):
        return i32(i32(byte(w, i) ^ u32(128)) - i32(128))

    @jit
    def half_plus(w, i, more):
        return u32(half(w, i) + u32(more))

    @jit
    def bytes_of(v, w, s):
        both, found = u64(v) | u64(w) << u64(32), u64(0)
        for k in range(4):
            found |= (both >> (u64(8) * (u64(s) >> u64(4 * k) & u64(7))) & u64(255)) << u64(8 * k)
        return u32(found)

    @jit
    def field(w, s, mask, up):
        return u32((shr(w, s) & mask) << u32(up))

    @jit
    def odd_bytes(v, w):
        return u32((u32(v) >> u32(8)) & EVEN | u32(w) & (EVEN << u32(8)))

    @jit
    def top_bytes(a, b, c, d):
        low, high = u32(a) >> u32(24) | (u32(b) >> u32(24)) << u32(8), (u32(c) >> u32(24)) << u32(16) | u32(d) & u32(0xff000000)
        return u32(u32(low) | u32(high))

    @jit
    def distances(w):
        w = u32(w + u32(128 - SUMMED) * ONES)  # 128 and the difference: where it is negative, 256 - w is as far from 128
        less = u32((w >> u32(7)) & ONES ^ ONES)
        return u32(u32(u32(w ^ u32(less * u32(255))) + less) & ~TOPS)

    @jit
    def spread(w):
        return u32(((u32(w) & u32(15)) * u32(0x00204081)) & ONES)  # copies 7 bits apart do not overlap, and put bit k at 8k

    spread, top_bytes = native.get("spread", spread), native.get("top_bytes", top_bytes)

    def table(entries):
        entries = np.ascontiguousarray(entries)
        assert entries.ndim == 1 and entries.dtype.kind == "u", entries.dtype

        @jit
        def entry(t, i):
            return u32(entries[i])
        return entry

    def lookup_nibbles(levels):
        bytes_ = np.resize(np.asarray(levels, np.int8).view(np.uint8).astype(np.uint32), 16)
        assert len(levels) in (4, 8, 16), levels

        @jit
        def four(w):
            return i32(u32(bytes_[w & u32(15)] | bytes_[(w >> u32(8)) & u32(15)] << u32(8)
                           | bytes_[(w >> u32(16)) & u32(15)] << u32(16) | bytes_[(w >> u32(24)) & u32(15)] << u32(24)))

        @jit
        def lookup(w):
            return four(u32(w)), four(u32(w) >> u32(4))
        return lookup

    table, lookup_nibbles = native.get("table", table), native.get("lookup_nibbles", lookup_nibbles)

    def lookup_each(levels):
        return lookup_nibbles(levels), jit(lambda words, n: signed_byte(words[1] if n & 1 else words[0], n >> 1))

    portable = Primitives(jit, f16, as_f32, mul, shr, select, half, byte, weighed, signed_byte, half_plus, bytes_of, field,
                          odd_bytes, top_bytes, distances, spread, table, lookup_nibbles, lookup_each,
                          lookup_codes=lambda levels, cubic: _lookup_codes(portable, levels),
                          signed8=lambda levels, parity: _signed8(portable, levels, parity))
    return portable._replace(**native)


def _lookup_codes(p, levels):
    """`Primitives.lookup_codes` by tables of 16, of which the upper bits choose."""
    tables = [p.lookup_nibbles(levels[first:first + 16]) for first in range(0, len(levels), 16)]

    @p.jit
    def select(bits, x, y):
        return u32(u32(x) ^ (u32((bits & ONES) * u32(255)) & (u32(x) ^ u32(y))))

    if len(tables) == 2:
        low, high = tables

        @p.jit
        def lookup(a, b):
            w = u32(a & NIBBLES | (b & NIBBLES) << u32(4))
            (x0, y0), (x1, y1) = low(w), high(w)
            return i32(select(u32(a) >> u32(4), x0, x1)), i32(select(u32(b) >> u32(4), y0, y1))
    else:
        first, second, third, fourth = tables

        @p.jit
        def lookup(a, b):
            w = u32(a & NIBBLES | (b & NIBBLES) << u32(4))
            (x0, y0), (x1, y1), (x2, y2), (x3, y3) = first(w), second(w), third(w), fourth(w)
            low_a, low_b, top_a, top_b = u32(a) >> u32(4), u32(b) >> u32(4), u32(a) >> u32(5), u32(b) >> u32(5)
            return (i32(select(top_a, select(low_a, x0, x1), select(low_a, x2, x3))),
                    i32(select(top_b, select(low_b, y0, y1), select(low_b, y2, y3))))
    return lookup


def signs8(p, parity):
    """(s) -> two words with a one in each byte whose bit of s is set, bits 0..3 and 4..7;
    with parity bit 7 is that of the bits 0..6."""
    spread = p.spread

    @p.jit
    def signs(s):
        s = u32(s)
        low, high = spread(s), spread(s >> u32(4))
        if parity:
            high = u32(high & u32(0x00010101))
            high = u32(high | u64(low ^ high) * u64(ONES) & u64(0x01000000))  # byte 3 of the product is the sum of the bytes
        return low, high
    return signs


def negated(p):
    """(w, ones) -> int32 word of the bytes of w, in 1..127, negated where `ones` has a one."""
    @p.jit
    def word(w, ones):
        return i32(u32((u32(w) ^ (ones * u32(255))) + ones))  # -b = ~b + 1, without carry since b > 0
    return word


def _signed8(p, levels, parity):
    """`Primitives.signed8` from a table of level words."""
    table, signs, negate = p.table(np.asarray(levels, np.uint8).reshape(-1).view(np.uint32)), signs8(p, parity), negated(p)

    @p.jit
    def eight(t, i, s):
        low, high = signs(s)
        first = i32(i) * 2
        return negate(table(t, first), low), negate(table(t, first + 1), high)
    return eight


def byte_sums(p):
    """(a, b, c, d) -> uint32 word of the sums of the bytes of each word, which are less than 256."""
    word, ones, top_bytes = u64(0xffffffff), u64(ONES), p.top_bytes

    @p.jit
    def total(w):
        return u32(u64(w) * ones & word)  # its highest byte is the sum of the four

    @p.jit
    def sums(a, b, c, d):
        return top_bytes(total(a), total(b), total(c), total(d))
    return sums


def quarter_of(p, source):
    """`quarter` of a `Looked`, `Summed`, `Paired` or `FiveBits`."""
    if isinstance(source, Paired | FiveBits):
        return source.quarter
    if isinstance(source, Looked):
        lookup, word = p.lookup_nibbles(source.levels), source.word

        @p.jit
        def quarter(t, j, q):
            return lookup(word(t, j, q))
    else:
        sums, words, more = byte_sums(p), source.words, u32(128 - SUMMED) * ONES

        @p.jit
        def quarter(t, j, q):
            a, b, c, d, e, f, g, h = words(t, j, q)
            return i32(u32((sums(a, b, c, d) + more) ^ TOPS)), i32(u32((sums(e, f, g, h) + more) ^ TOPS))
    return quarter


def shifted(p, quarter, shift, sub):
    """The quarter with the shifts of sub-blocks of `sub` columns. No level leaves int8."""
    steps = 32 // sub

    @p.jit
    def more(w, n):
        return i32(u32(((u32(w) ^ TOPS) + u32(n) * ONES) ^ TOPS))  # bytes of level + 128 have no carry

    @p.jit
    def shifted_quarter(t, j, q):
        a, b = quarter(t, j, q)
        return more(a, shift(t, steps * j)), more(b, shift(t, steps * j + steps - 1))
    return shifted_quarter


def unpacker(p, zero: int, parts: Parts, sub: int = 32) -> Unpacker:
    """The unpacking of a format whose level is code - zero; codes are bytes 0..127, where zero is 0 also int8. sub: columns of
    its sub-blocks."""
    source, shift, pairs, offset = parts.quarter, parts.shift, parts.pairs, TOPS - u32(zero) * ONES
    assert not shift or (not zero and not (pairs and sub == 16))
    unshifted = quarter_of(p, source) if isinstance(source, Looked | Summed | Paired | FiveBits) else source
    quarter = shifted(p, unshifted, shift, sub) if shift else unshifted

    @p.jit
    def level(w):
        # adding 128 - zero keeps every byte positive: no borrow between bytes
        return i32(u32((u32(w) + offset) ^ TOPS)) if zero else w

    @p.jit
    def levels(t, j):
        a, b = quarter(t, j, 0)
        c, d = quarter(t, j, 1)
        e, f = quarter(t, j, 2)
        g, h = quarter(t, j, 3)
        a, b, c, d, e, f, g, h = level(a), level(b), level(c), level(d), level(e), level(f), level(g), level(h)
        return (a, b, c, d, e, f, g, h) if pairs else (a, c, e, g, b, d, f, h)
    return Unpacker(levels, parts.sub, parts.group, quarter, pairs, unshifted, source, shift, parts.packed, parts.scales,
                    parts.bit_fields)


def halves(p, word):
    """`quarter` of words of codes: word(t, j, h, q) -> uint32, the codes of columns 16h + 4q .. of the columns 32j..32j+31."""
    @p.jit
    def quarter(t, j, q):
        return i32(word(t, j, 0, q)), i32(word(t, j, 1, q))
    return quarter


def unit_scales(p, minimum=0):
    """`sub` of a format whose sub-blocks have no integer scales; minimum: 1 where groups have minima."""
    @p.jit
    def sub(t, i):
        return i32(1), i32(minimum)
    return sub


def half_scale(p, ld2, factor=1):
    """`group` of a format with one scale d, the chunk's half 0, times `factor` (a power of two)."""
    f16, mul, factor = p.f16, p.mul, f32(factor)

    if factor == 1:
        @p.jit
        def group(t, g):
            return f16(ld2(t, 0)), ZERO
    else:
        @p.jit
        def group(t, g):
            return mul(f16(ld2(t, 0)), factor), ZERO
    return group
