"""Rows of f16 and q8_0 caches in shared memory: a warp copies rows of keys or values, and a lane takes octets of channels of them
to registers (`fixed_point.Octets`), or the same few channels of four neighbouring rows.
"""
from collections.abc import Callable
from typing import NamedTuple

from .fixed_point import CHANNELS, OCTETS, ZERO, lifted, masked_limbs, scales
from .ptx import (amax2, as_f32, as_i32, copy1, copy2, copy4, device, dp4a, f16_high_to_f32, f16_to_f32, f32, fma, i32, i64, lds,
                  lds2, lds4, moved, mul, prmt, shuffle, sts, u32)
from .quantize import full_over
from .set_rows import INFINITY_BITS, NAN, Q8_LIMIT

SHARE = f32(1 / 128)
BIASED, MINUS_BIAS = i32(0x4b400000), f32(-12582912)  # an integer added to the bits of 1.5 2^23 is added to the float
STEP = 16     # rows of keys that a warp copies at once
SECTION = 32  # rows of values that a warp copies; lane t of four reads those of the t-th warp
OCTET = OCTETS["f16"]


class Cache(NamedTuple):
    """Where the keys, or the values, of a sequence and a KV head lie, for device functions."""
    words: object  # pointer to words
    first: object  # bytes from there to the sequence's first cell, int64,
    row: object    # and from cell to cell, int32


@device
def smaller(a, b):
    return i32(a if a < b else b)


@device
def words_at(cache, cell, n):
    """Pointer to byte n of a cell."""
    return moved(cache.words, cache.first + n + i64(cell) * cache.row)


class Form(NamedTuple):
    """Of a cache's type."""
    words: Callable       # (channels) -> words of a row
    key_area: Callable    # (dim) -> words of shared memory for a warp's keys of a head of `dim` channels
    value_area: Callable  # (dim) -> for its values
    octet_words: int      # of an octet in registers
    keys: Callable        # (dim) -> (fetch, take, scale, limbs), below
    values: Callable      # (dim) -> (fetch, scale, take4, value)


# fetch (cache, key, position, lane, s, at) asks for a warp's rows of a head, to word `at` of s, the block's shared memory, int32;
# a row lies at `position` where it would be behind that. scale gives (d, 16256 / amax), `scales` of an amax.
#     keys: 16 rows, 2 g + e that of position key + 4 g + e. take (s, at, lane, raw) -> raw, u32 array: of rows 2 g and 2 g + 1
#     octets t + 4 j, all j; zeros behind a row's end. scale (raw, lane): of row 2 g + (t & 1) and of 64 channels, the first or,
#     where dim > 64 and t > 1, the others. limbs (raw, at, inv, mask) -> of two octets, the first at word `at` of raw, the
#     words of high limbs and those of low limbs of lifted(mul(k, inv)), four together; mask: of `masked_limbs`.
#     values: 32 rows, from position `key` on, the warp's section of four. scale (s, at, section, lane): of row `lane`.
#     Behind it and a barrier, take4 (s, at, section, pair, half, lane, raw) -> raw: of four rows of section t, from
#     8 pair + 4 half on, the lane's channels: 32 section + 4 g .. 4 g + 3 where dim > 64, else 16 section + 2 g and 2 g + 1.
#     value (raw, i, c) -> the float of row i and channel c of these.

@device
def key_offset(row):
    """Of the position of a row of keys."""
    return i32(4 * (row >> 1) + (row & 1))


# f16: a row of 64 channels is 32 words, of 128 64, without padding. Octet o of a row, four words, lies at place o ^ turn, so that
# what lanes read together lies in different banks. They read together
#     rows 2 g, or 2 g + 1, of keys: turn is 4 in every second pair of rows, else 0;
#     rows 4 g + i of a section of values, or the same row of all sections: turn is 2 section, ^ 4 in every second four of rows.
# Below, `word` is where an octet lies in rows without that 4, and `word ^ FLIP` in rows with it: areas begin on 2 FLIP words.
FLIP = 16


@device
def flipped(word, has_4):
    return i32(word ^ FLIP) if has_4 else word


def f16_rows(dim, rows):
    """Words of so many rows."""
    return rows * 32 * -(-dim // CHANNELS)


def f16_fetcher(dim, n_rows, is_key):
    """(cache, key, position, lane, turn, s, at): octets of a row by lanes side by side. turn: what all rows have of it."""
    n_octets = 8 * -(-dim // CHANNELS)
    at_once, row_words, whole, bit = 32 // n_octets, 4 * n_octets, dim % CHANNELS == 0, 2 if is_key else 4

    @device
    def fetch(cache, key, position, lane, turn, s, at):
        octet, own = i32(lane & (n_octets - 1)), i32((lane & 31) >> (n_octets // 8 + 2))
        if is_key and at_once == 4:
            turn = i32(turn ^ ((own & 2) << 1))
        word = i32(at + own * row_words + 4 * (octet ^ turn))
        first = i32(key + (key_offset(own) if is_key else own))
        if whole or octet < dim // 8:
            for i in range(n_rows // at_once):
                row = at_once * i
                cell = smaller(i32(first + (2 * row if is_key else row)), position)
                copy4(s, flipped(word, row & bit) + row * row_words, words_at(cache, cell, 16 * octet), 0)
    return fetch


@device
def exchanged(a, b, c, d, lane):
    """`scales` of one of four rows, lane t of four those of the t-th. a .. d: states of the four, each over a lane's quarter."""
    second, odd = lane & 2, lane & 1
    one = OCTET.merge(c if second else a, shuffle(a if second else c, lane ^ 2))
    two = OCTET.merge(d if second else b, shuffle(b if second else d, lane ^ 2))
    return scales(OCTET.pattern(OCTET.merge(two if odd else one, shuffle(one if odd else two, lane ^ 1))))


def f16_keys(dim):
    n_octets = 8 * -(-dim // CHANNELS)
    fetch_rows, whole, row_words = f16_fetcher(dim, 16, True), dim % CHANNELS == 0, 4 * n_octets

    @device
    def fetch(cache, key, position, lane, s, at):
        fetch_rows(cache, key, position, lane, i32(0), s, at)

    @device
    def take(s, at, lane, raw):
        t, first = i32(lane & 3), 0
        word = i32(at + 2 * (lane >> 2) * row_words + 4 * (t ^ (lane & 4)))
        for e in range(2):
            for j in range(n_octets // 4):
                w = 0, 0, 0, 0
                if whole or t + 4 * j < dim // 8:
                    w = lds4(s, flipped(word, j & 1) + e * row_words + 32 * (j >> 1))
                raw[first], raw[first + 1], raw[first + 2], raw[first + 3] = u32(w[0]), u32(w[1]), u32(w[2]), u32(w[3])
                first += 4

    @device
    def quarter(raw, i, b):
        """Of one of four lanes, as `Octets.amax`: of 64 channels b of row i."""
        at = n_octets * i + 8 * b
        return OCTET.amax(OCTET.amax(i32(0), raw, at), raw, at + 4)

    @device
    def scale(raw, lane):
        one, two = quarter(raw, 0, 0), quarter(raw, 1, 0)
        if n_octets == 16:
            return exchanged(one, two, quarter(raw, 0, 1), quarter(raw, 1, 1), lane)
        odd = lane & 1
        m = OCTET.merge(two if odd else one, shuffle(one if odd else two, lane ^ 1))
        return scales(OCTET.pattern(OCTET.merge(m, shuffle(m, lane ^ 2))))
    return fetch, take, scale, f16_limbs


@device
def limbs8(x, inv, mask):
    a = masked_limbs(lifted(x[0], inv), lifted(x[1], inv), lifted(x[2], inv), lifted(x[3], inv), mask)
    b = masked_limbs(lifted(x[4], inv), lifted(x[5], inv), lifted(x[6], inv), lifted(x[7], inv), mask)
    return a[0], b[0], a[1], b[1]


@device
def f16_limbs(raw, at, inv, mask):
    return limbs8(OCTET.values(raw, at), inv, mask), limbs8(OCTET.values(raw, at + 4), inv, mask)


def f16_values(dim):
    n_octets = 8 * -(-dim // CHANNELS)
    fetch_rows, row_words, whole = f16_fetcher(dim, SECTION, False), 4 * n_octets, dim % CHANNELS == 0

    @device
    def fetch(cache, key, position, lane, section, s, at):
        fetch_rows(cache, key, position, lane, i32(2 * section), s, at)

    @device
    def quarter(s, at, section, i, lane):
        t, state = i32(lane & 3), u32(0)
        word = i32(at + (lane & 28) * row_words + 4 * (t ^ (lane & 4) ^ (2 * section)))
        for j in range(n_octets // 4):
            if whole or t + 4 * j < dim // 8:
                w = lds4(s, flipped(word, j & 1) + i * row_words + 32 * (j >> 1))
                state = amax2(amax2(amax2(amax2(state, u32(w[0])), u32(w[1])), u32(w[2])), u32(w[3]))
        return i32(state)

    @device
    def scale(s, at, section, lane):
        return exchanged(quarter(s, at, section, 0, lane), quarter(s, at, section, 1, lane), quarter(s, at, section, 2, lane),
                         quarter(s, at, section, 3, lane), lane)

    @device
    def take4(s, at, section, pair, half, lane, raw):
        g, t = i32(lane >> 2), i32(lane & 3)
        n_own, shift = n_octets // 8, 1 if n_octets == 16 else 2
        octet = i32(((2 * n_own * section) | (g >> shift)) ^ (2 * t))
        word = i32(at + t * (SECTION * row_words) + 4 * octet + n_own * (g & (2 * shift - 1)))
        for i in range(4):
            place = flipped(word, half) + (8 * pair + 4 * half + i) * row_words
            if n_octets == 16:
                w = lds2(s, place)
                raw[2 * i], raw[2 * i + 1] = u32(w[0]), u32(w[1])
            else:
                raw[i] = u32(lds(s, place))

    @device
    def value(raw, i, c):
        w = raw[n_octets // 8 * i + (c >> 1)]
        return f16_high_to_f32(w) if c & 1 else f16_to_f32(w)
    return fetch, scale, take4, value


# q8_0: a row of 64 channels is 17 words, of 128 34. Every second block of 32 begins in the middle of a word. In registers an
# octet is its levels and d as a float.
#
# The amax of some blocks is mul(127, d) of their largest d (`fixed_point`), and `scales` of it d / 128 and 128 / d, rounded. A
# level of that block becomes 128 times itself, since the roundings of `lifted` do not reach another integer: the level is the
# high limb, the low limb is zero.

def q8_0_words(dim):
    return dim // CHANNELS * 17


def q8_0_stride(dim, is_key):
    """From one row to the next one, but for every eighth."""
    return (18 if is_key else 17) * (dim // CHANNELS)


def q8_0_rows(dim, is_key):
    """Words of a warp's rows and eight: two for each eight of 32 rows, and so that sections begin in different banks."""
    return (STEP if is_key else SECTION) * q8_0_stride(dim, is_key) + 8


def q8_0_section(dim):
    """Words of a warp's values and, behind them, d of their blocks: f32 [block][row]."""
    return q8_0_rows(dim, False) + dim // 32 * SECTION


def q8_0_place(dim, is_key):
    """(eight, row) -> the word of row 8 eight + row; of the rows of values 4 g + i, for all g, all lie in different banks."""
    stride = q8_0_stride(dim, is_key)
    return device(lambda eight, row: i32(eight * (8 * stride + 2) + row * stride))


@device
def q8_0_block(b):
    """The word of a row with d of its block b of 32, in the upper half of which that lies where b is odd."""
    return i32(17 * (b >> 1) + 8 * (b & 1))


def q8_0_fetcher(dim, is_key):
    """A half warp copies 16 of 17 parts of a row, and lanes the last ones of a row each."""
    width, n_rows, place = dim // CHANNELS, STEP if is_key else SECTION, q8_0_place(dim, is_key)
    copy_part = copy1 if width == 1 else copy2

    @device
    def fetch(cache, key, position, lane, s, at):
        lane = i32(lane & 31)  # of which the compiler knows that
        second, part = i32(lane >> 4), i32(width * (lane & 15))
        own, first = i32(at + place(0, second) + part), i32(key + second)
        for i in range(0, n_rows, 2):
            cell = smaller(i32(first + (2 * i if is_key else i)), position)
            copy_part(s, own + place(i >> 3, i & 7), words_at(cache, cell, 4 * part), 0)
        if lane < n_rows:
            cell = smaller(i32(key + (key_offset(lane) if is_key else lane)), position)
            copy_part(s, at + place(lane >> 3, lane & 7) + 16 * width, words_at(cache, cell, 64 * width), 0)
    return fetch


@device
def larger_d(a, b):
    """Of two floats that are not negative, or NaN, which is above all, as words."""
    return i32(max(i32(a), i32(b)))


@device
def q8_0_scale(d):
    """d: the largest one of the blocks. A float16 is above `SMALLEST`, or 0."""
    used = 0 < d < INFINITY_BITS
    x = as_f32(d)
    return mul(x, SHARE) if d < INFINITY_BITS else NAN, full_over(mul(x, Q8_LIMIT)) if used else ZERO


@device
def q8_0_octet(s, block, octet, odd, raw, at):
    """block: the word with d; odd: of a block that begins in the middle of a word."""
    d, begin = u32(lds(s, block)), i32(block + 2 * octet + odd)
    a, b = u32(lds(s, begin)), u32(lds(s, begin + 1))
    if odd:
        raw[at], raw[at + 1], raw[at + 2] = a, b, u32(as_i32(f16_high_to_f32(d)))
    else:
        raw[at], raw[at + 1] = prmt(a, b, 0x5432), prmt(b, u32(lds(s, begin + 2)), 0x5432)
        raw[at + 2] = u32(as_i32(f16_to_f32(d)))


def q8_0_keys(dim):
    n_octets, place, stride = dim // 32, q8_0_place(dim, True), q8_0_stride(dim, True)  # octets of a lane and row

    @device
    def take(s, at, lane, raw):
        row = at + place(i32(lane >> 4), i32(2 * ((lane >> 2) & 3)))
        for e in range(2):
            for j in range(n_octets):
                q8_0_octet(s, i32(row + e * stride + q8_0_block(j)), i32(lane & 3), j & 1, raw, 3 * (e * n_octets + j))

    @device
    def larger_of(raw, i, b):
        at = 3 * (n_octets * i + 2 * b)
        return larger_d(raw[at + 2], raw[at + 5])

    @device
    def scale(raw, lane):
        d = larger_of(raw, 1, 0) if lane & 1 else larger_of(raw, 0, 0)
        if n_octets == 4:
            e = larger_of(raw, 1, 1) if lane & 1 else larger_of(raw, 0, 1)
            d = e if lane & 2 else d
        return q8_0_scale(d)
    return q8_0_fetcher(dim, True), take, scale, q8_0_limbs


@device
def q8_0_limbs(raw, at, inv, mask):
    """The block with the larger d has its levels as high limbs; limbs of the other one are made."""
    first, made = i32(raw[at + 2]) >= i32(raw[at + 5]), inv != 0
    a, b = raw[at] if first else raw[at + 3], raw[at + 1] if first else raw[at + 4]
    x = u32(a if made else 0), u32(b if made else 0), u32(0), u32(0)
    y = limbs8(_q8_0_values(raw[at + 3] if first else raw[at], raw[at + 4] if first else raw[at + 1],
                            as_f32(i32(raw[at + 5] if first else raw[at + 2]))), inv, mask)
    return (x if first else y), (y if first else x)


def q8_0_values(dim):
    n_blocks, place, stride, n_section = dim // 32, q8_0_place(dim, False), q8_0_stride(dim, False), q8_0_section(dim)
    fetch_rows, floats = q8_0_fetcher(dim, False), q8_0_rows(dim, False)

    @device
    def fetch(cache, key, position, lane, section, s, at):
        fetch_rows(cache, key, position, lane, s, at)

    @device
    def scale(s, at, section, lane):
        row, most = at + place(i32(lane >> 3), i32(lane & 7)), i32(0)
        for b in range(n_blocks):
            w = u32(lds(s, i32(row + q8_0_block(b))))
            d = as_i32(f16_high_to_f32(w) if b & 1 else f16_to_f32(w))
            sts(s, at + floats + SECTION * b + lane, d)
            most = larger_d(most, d)
        return q8_0_scale(most)

    @device
    def take4(s, at, section, pair, half, lane, raw):
        """A row: levels, d."""
        g, begin = i32(lane >> 2), at + i32(lane & 3) * n_section
        b = section if n_blocks == 4 else i32(section >> 1)
        row, odd = i32(begin + place(pair, 4 * half) + q8_0_block(b)), i32(b & 1)
        d = lds4(s, begin + floats + SECTION * b + 8 * pair + 4 * half)
        for i in range(4):
            if n_blocks == 4:
                first = i32(row + i * stride + g + odd)
                raw[2 * i] = prmt(u32(lds(s, first)), u32(lds(s, first + 1)), u32(0x3210 if odd else 0x5432))
            else:
                at_half = i32(8 * (section & 1) + g + 1 + odd)  # of a word, from d's on
                raw[2 * i] = u32(u32(lds(s, row + i * stride + (at_half >> 1))) >> u32(16 * (at_half & 1)))
            raw[2 * i + 1] = u32(d[i])

    @device
    def value(raw, i, c):
        d = as_f32(i32(raw[2 * i + 1]))
        return _q8_0_value(raw[2 * i], c, d, mul(d, MINUS_BIAS))
    return fetch, scale, take4, value


@device
def _q8_0_value(w, c, d, offset):
    """mul(d, level) of byte c, which is exact: so is that of level + 1.5 2^23, less 1.5 2^23 d."""
    return fma(as_f32(dp4a(i32(w), i32(1 << (8 * c)), BIASED)), d, offset)


@device
def _q8_0_values(a, b, d):
    offset = mul(d, MINUS_BIAS)
    return (_q8_0_value(a, 0, d, offset), _q8_0_value(a, 1, d, offset), _q8_0_value(a, 2, d, offset),
            _q8_0_value(a, 3, d, offset), _q8_0_value(b, 0, d, offset), _q8_0_value(b, 1, d, offset),
            _q8_0_value(b, 2, d, offset), _q8_0_value(b, 3, d, offset))


FORMS = {"f16": Form(lambda n: n // 2, lambda dim: f16_rows(dim, STEP), lambda dim: f16_rows(dim, SECTION), 4, f16_keys,
                     f16_values),
         "q8_0": Form(q8_0_words, lambda dim: q8_0_rows(dim, True), q8_0_section, 3, q8_0_keys, q8_0_values)}
