"""Block-scaled fixed point of attention (numerics, sections 3 and 8): levels of 15 bits in two int8 limbs, made in registers, and
sums of their products.

A level is made by adding a large float, whose last bit is worth 1, to mul(x, 16256 / amax): that rounds as `rint` does, and the
bits of the sum hold the limbs. The low limbs are kept doubled (2 lo is a signed byte whose bit 0 is 0), so that both limbs begin
on a bit of a byte; `rest` halves their sums.
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..arith import E2, E3, E4, E5, E6, EXP_MIN, LN2_HI, LN2_LO, LOG2E, ROUND
from .launch import U16, U32
from .ptx import add, amax2, as_f32, as_i32, device, f16_high_to_f32, f16_to_f32, f32, fma, i2f, i32, ld, ld4, mul, prmt, sub, u32
from .quantize import full_over, over_full
from .set_rows import BLOCK, BLOCK_HALVES, INFINITY_BITS, NAN, Q8_LIMIT, SMALLEST, larger

HIGH, ZERO, ONE, Z = f32(16384), f32(0), f32(1), i32(0)
ROUND_BIASED = f32(ROUND + 127)  # leaves the nearest integer's exponent in the low bits
MINUS_LN2_HI, MINUS_LN2_LO = f32(-LN2_HI), f32(-LN2_LO)
MINUS_INFINITY = f32(-np.inf)
LIFT = f32(1.5 * 2**23 + 64)                   # bits of x + LIFT: 128 hi + lo + 64 in the low 16
EVEN_BITS, TOP_BITS = u32(0xfefefefe), u32(0x80808080)
HI, LO = u32(0xff00ff00), u32(0x00ff00ff)      # bytes of limb_pair
BYTE_FLOAT, BYTE_ZERO = u32(0x4b000000), f32(2**23 + 128)  # a byte b below BYTE_FLOAT is 2^23 + b


@device
def larger_float(m, x):
    """The larger one; m where x is NaN."""
    return x if x > m else m


@device
def scales(amax):
    """Bit pattern of an amax -> (d, 16256 / amax), the latter 0 where all levels are 0."""
    x = as_f32(amax)
    finite = amax < INFINITY_BITS
    used = finite and x >= SMALLEST
    return over_full(x) if used else ZERO if finite else NAN, full_over(x) if used else ZERO


@device
def lifted(x, inv):
    """A level, to be split by `limbs`. Where d is NaN it may be anything: so is all that becomes of it."""
    return as_i32(add(mul(x, inv), LIFT))


@device
def masked_limbs(a, b, c, d, mask):
    """Four lifted levels -> words of their high limbs and of their low limbs, these doubled. mask: EVEN_BITS."""
    x, y = prmt(a, b, 0x5410), prmt(c, d, 0x5410)
    x, y = u32(x << u32(1)), u32(y << u32(1))
    return prmt(x, y, 0x7531), u32((prmt(x, y, 0x6420) & mask) ^ TOP_BITS)


@device
def limbs(a, b, c, d):
    return masked_limbs(a, b, c, d, EVEN_BITS)


@device
def pair_mask(n):
    """For `limb_pair`. n: an int32 that is not negative, of which the compiler does not know that: of two constants one is in a
    register then."""
    return u32(u32(0xfffefffe) + u32(n >> 31))


@device
def limb_pair(a, b, mask):
    """Two lifted levels -> a word: low limb, doubled, and high limb of one, then of the other. mask: `pair_mask`."""
    return u32(((prmt(a, b, 0x5410) << u32(1)) & mask) ^ u32(0x00800080))


@device
def rest(mid, ll):
    """128 MID + LL of sums with doubled low limbs, 2 MID and 4 LL."""
    return i32((mid << 6) + (ll >> 2))


@device
def fixed_point(hh, rest):
    return fma(i2f(hh), HIGH, i2f(rest))


@device
def halved(lo):
    """A word of doubled low limbs -> of the limbs themselves."""
    return u32(((lo >> u32(1)) & u32(0x7f7f7f7f)) | (lo & TOP_BITS))


@device
def limbs4(x, inv):
    return limbs(lifted(x[0], inv), lifted(x[1], inv), lifted(x[2], inv), lifted(x[3], inv))


@device
def exp_down(x):
    """exp(x) of x <= 0, or NaN: the same bits in 14 instructions in the place of 20. There the result is 0 or a normal number, so
    one multiplication by a power of two is exact."""
    t = fma(x, LOG2E, ROUND_BIASED)
    n = sub(t, ROUND_BIASED)
    r = fma(n, MINUS_LN2_LO, fma(n, MINUS_LN2_HI, x))
    y = fma(fma(fma(fma(E6, r, E5), r, E4), r, E3), r, E2)
    y = fma(fma(y, r, ONE), r, ONE)
    return ZERO if x < EXP_MIN else mul(y, as_f32(i32(as_i32(t) << 23)))


# Eight values of a cache in registers: what is read, `amax` of it, and the values

class Octets(NamedTuple):
    """raw: array of words in registers, an octet from `at` on. i: index of an octet, counted through all rows."""
    pointer: object    # type of the kernel's parameter
    n_words: int
    load: Callable     # (pointer, i, raw, at)
    amax: Callable     # (state, raw, at) -> state, an int32 that is 0 at first
    merge: Callable    # (state, state) -> state
    pattern: Callable  # (state) -> bit pattern of an amax
    values: Callable   # (raw, at) -> eight float32


CHANNELS = 64  # of Q and K with one scale; of a slab of V


def octet_loader(octets: Octets, dim: int):
    """(p, row, i, raw, at): octet i of a row of `dim` channels, zeros behind its end. row: index of its first octet."""
    load, n_words, whole, n = octets.load, octets.n_words, dim % CHANNELS == 0, dim // 8

    @device
    def load_octet(p, row, i, raw, at):
        if whole or i < n:
            load(p, row + i, raw, at)
        else:
            for w in range(n_words):
                raw[at + w] = u32(0)
    return load_octet


def key_loader(octets: Octets, dim: int, begin: int = 0, end: int | None = None):
    """(p, row, t, raw, first): the octets of a key that lane t of four takes, two of each 64 channels; of the blocks of 64 from
    `begin` to `end`, all by default."""
    load_octet, n_words = octet_loader(octets, dim), octets.n_words
    n_blocks = (-(-dim // CHANNELS) if end is None else end) - begin

    @device
    def load_key(p, row, t, raw, first):
        for b in range(n_blocks):
            for half in range(2):
                load_octet(p, row, 8 * (begin + b) + 4 * half + t, raw, first + (2 * b + half) * n_words)
    return load_key


def value_loader(octets: Octets, dim: int, begin: int = 0, end: int | None = None):
    """(p, row, g, raw, first): the octets of a value that lane g of eight takes, one of each 64 channels; of these from `begin`
    to `end`, all by default."""
    load_octet, n_words = octet_loader(octets, dim), octets.n_words
    n_slabs = (-(-dim // CHANNELS) if end is None else end) - begin

    @device
    def load_value(p, row, g, raw, first):
        for b in range(n_slabs):
            load_octet(p, row, 8 * (begin + b) + g, raw, first + b * n_words)
    return load_value


@device
def _f16_load(p, i, raw, at):
    raw[at], raw[at + 1], raw[at + 2], raw[at + 3] = ld4(p, i << 2)


@device
def _f16_amax(state, raw, at):
    return i32(amax2(amax2(amax2(amax2(state, raw[at]), raw[at + 1]), raw[at + 2]), raw[at + 3]))


@device
def _f16_pattern(state):
    low, high = u32(state & u32(0xffff)), u32(u32(state) >> u32(16))
    return as_i32(f16_to_f32(high if high > low else low))


@device
def _f16_pair(w):
    return f16_to_f32(w), f16_high_to_f32(w)


@device
def _f16_values(raw, at):
    a, b, c, d = _f16_pair(raw[at]), _f16_pair(raw[at + 1]), _f16_pair(raw[at + 2]), _f16_pair(raw[at + 3])
    return a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]


@device
def _q8_0_load(p, i, raw, at):
    """Words: four levels, four levels, d."""
    block = (i >> 2) * BLOCK_HALVES
    first = block + 1 + ((i & 3) << 2)
    raw[at] = prmt(ld(p, first), ld(p, first + 1), 0x5410)
    raw[at + 1] = prmt(ld(p, first + 2), ld(p, first + 3), 0x5410)
    raw[at + 2] = u32(ld(p, block))


@device
def _q8_0_value(word, selector, scale):
    return mul(scale, sub(as_f32(prmt(word, BYTE_FLOAT, selector)), BYTE_ZERO))


@device
def _q8_0_values(raw, at):
    a, b, d = u32(raw[at] ^ TOP_BITS), u32(raw[at + 1] ^ TOP_BITS), f16_to_f32(raw[at + 2])
    return (_q8_0_value(a, 0x7540, d), _q8_0_value(a, 0x7541, d), _q8_0_value(a, 0x7542, d), _q8_0_value(a, 0x7543, d),
            _q8_0_value(b, 0x7540, d), _q8_0_value(b, 0x7541, d), _q8_0_value(b, 0x7542, d), _q8_0_value(b, 0x7543, d))


@device
def amax4(amax, x):
    return larger(larger(larger(larger(amax, x[0]), x[1]), x[2]), x[3])


@device
def amax_of(amax, x):
    """x: eight values."""
    return amax4(amax4(amax, (x[0], x[1], x[2], x[3])), (x[4], x[5], x[6], x[7]))


@device
def _q8_0_amax(state, raw, at):
    return amax_of(state, _q8_0_values(raw, at))


# Whoever wrote a block of q8_0, one of its levels is 127 or -127, or d is 0 or NaN (numerics, section 7). So the amax of some
# blocks is mul(127, d) of their largest d, which as an integer is the largest, too: none is negative.

@device
def _q8_0_largest(state, raw, at):
    return i32(max(state, i32(raw[at + 2])))


@device
def _q8_0_pattern(state):
    return as_i32(mul(f16_to_f32(u32(state)), Q8_LIMIT))


OCTETS = {"f16": Octets(U32, 4, _f16_load, _f16_amax, device(lambda a, b: i32(amax2(a, b))), _f16_pattern, _f16_values),
          "q8_0": Octets(U16, 3, _q8_0_load, _q8_0_amax, device(lambda a, b: a if a > b else b), device(lambda state: state),
                         _q8_0_values)}


def octets_of(type_: str, dim: int) -> Octets:
    """Of heads of `dim` channels, of caches that `set_rows` wrote. Heads that are no whole blocks have parts of some."""
    octets = OCTETS[type_]
    return octets._replace(amax=_q8_0_largest, pattern=_q8_0_pattern) if type_ == "q8_0" and dim % BLOCK == 0 else octets
