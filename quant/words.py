"""What every unpacking is built of: integer operations on 32-bit words (four packed bytes), compiled for one target.

All formats are unpacked by the same source on every target. A target is a `Primitives` value: `primitives(jit)` gives the
portable ones, compiled by `jit` (`numba.njit`, `numba.cuda.jit(device=True)`, or the identity for plain Python), and a target that
has an instruction for one of them passes it by name, `primitives(jit, shr=..., f16=...)`: the others are then built on it.

Words are uint32 throughout, constants included: numba makes uint64 of them, which is harmless, but int64 (and with it float64) of a
mixture of signs. Byte sums are arranged so that no byte, and so no word, ever overflows: plain Python gives the same without warnings.
"""
from typing import Callable, NamedTuple

import numpy as np

u32, i32, f32 = np.uint32, np.int32, np.float32

ONES = u32(0x01010101)    # one in each byte
TWOS = u32(0x03030303)    # the low two bits of each byte
NIBBLES = u32(0x0f0f0f0f)
TOPS = u32(0x80808080)
EVEN = u32(0x00ff00ff)    # bytes 0 and 2 in 16-bit lanes
ZERO = f32(0)


class Unpacker(NamedTuple):
    """A format's unpacking of one chunk (256 columns of a row), compiled for one target. t names the chunk, as the loads understand it.

    value[c] = sub(mul(mul(d, isc), level[c]), mul(m, imin)), each operation float32, nearest even; without minima the first product.
    """
    levels: Callable  # (t, j) -> 8 int32 words: the int8 levels of columns 32j..32j+31 in column order, the lowest byte first
    sub: Callable     # (t, i) -> (isc, imin) int32 of the i-th sub-block (`Format.sub` columns)
    group: Callable   # (t, g) -> (d, m) float32 of the g-th group (`Format.group` columns)


class Primitives(NamedTuple):
    """Device functions of one target. w: uint32 word of four bytes; w4: four words (a 16-byte piece); t: whatever the loads take."""
    jit: Callable       # compiles a device function for the target
    f16: Callable       # (bits of a half, 0..65535) -> float32, exact
    f32: Callable       # (bits) -> float32 of that pattern
    mul: Callable       # (a, b) -> a * b in float32, nearest even
    shr: Callable       # (w, s) -> w >> s, s in 0..31
    pick: Callable      # (w4, i) -> word i
    half: Callable      # (w4, i) -> 16-bit half i, 0..7
    byte: Callable      # (w4, i) -> byte i, 0..15
    nibbles: Callable   # (w, s) -> the low (s = 0) or high (s = 4) nibbles of the bytes
    less: Callable      # (w, c) -> int32 word of the bytes minus c, signed; bytes < 128 + c, c <= 128
    spread: Callable    # (w) -> the low four bits of w, one in each byte
    signed: Callable    # (w, s) -> int32 word of the bytes, negated where the bits 0..3 of s are set; bytes in 1..127
    table: Callable     # (1-d unsigned array) -> device function (t, i) -> entry i as uint32
    lookup16: Callable  # (16 int8 levels) -> device function (w of four nibbles) -> int32 word of their levels


def primitives(jit, **native):
    """The `Primitives` of a target: portable ones compiled by `jit`, but for the `native` device functions given under their names."""
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
        # Exponent and mantissa moved to float32's places are too small by 2^112, subnormals included; infinity and NaN keep all ones above.
        bits = u32(bits)
        shifted = (bits & u32(0x8000)) << u32(16) | (bits & u32(0x7fff)) << u32(13)
        not_finite = (bits & u32(0x7c00)) == u32(0x7c00)
        return as_f32(shifted | u32(0x7f800000)) if not_finite else mul(as_f32(shifted), f32(2.0**112))

    @jit
    def shr(w, s):
        return u32(u32(w) >> (u32(s) & u32(31)))

    shr = native.get("shr", shr)

    @jit
    def pick(w4, i):
        low = w4[1] if i & 1 else w4[0]
        high = w4[3] if i & 1 else w4[2]
        return u32(high if i & 2 else low)

    pick = native.get("pick", pick)

    @jit
    def half(w4, i):
        return u32(shr(pick(w4, i >> 1), (i & 1) << 4) & u32(0xffff))

    @jit
    def byte(w4, i):
        return u32(shr(pick(w4, i >> 2), (i & 3) << 3) & u32(0xff))

    @jit
    def nibbles(w, s):
        return u32(shr(w, s) & NIBBLES)

    @jit
    def less(w, c):
        return i32(u32((u32(w) + (TOPS - u32(c) * ONES)) ^ TOPS))  # adding 128 - c instead keeps every byte positive: no borrow between bytes

    @jit
    def spread(w):
        return u32(((u32(w) & u32(15)) * u32(0x00204081)) & ONES)  # copies 7 bits apart do not overlap, and put bit k at 8k

    spread = native.get("spread", spread)

    @jit
    def signed(w, s):
        negative = spread(s)
        return i32(u32((u32(w) ^ (negative * u32(255))) + negative))  # -b = ~b + 1, without carry since b > 0

    def table(entries):
        entries = np.ascontiguousarray(entries)
        assert entries.ndim == 1 and entries.dtype.kind == "u", entries.dtype

        @jit
        def entry(t, i):
            return u32(entries[i])
        return entry

    def lookup16(levels):
        bytes_ = np.asarray(levels, np.int8).view(np.uint8).astype(np.uint32)
        assert bytes_.shape == (16,), bytes_.shape

        @jit
        def lookup(w):
            w = u32(w)
            return i32(u32(bytes_[w & u32(15)] | bytes_[(w >> u32(8)) & u32(15)] << u32(8)
                           | bytes_[(w >> u32(16)) & u32(15)] << u32(16) | bytes_[(w >> u32(24)) & u32(15)] << u32(24)))
        return lookup

    portable = Primitives(jit, f16, as_f32, mul, shr, pick, half, byte, nibbles, less, spread, signed, table, lookup16)
    return portable._replace(**native)


def unit_scales(p):
    """`sub` of a format whose sub-blocks have neither integer scales nor minima."""
    @p.jit
    def sub(t, i):
        return i32(1), i32(0)
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
