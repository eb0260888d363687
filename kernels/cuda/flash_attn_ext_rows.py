"""Rows of f16 and q8_0 caches in shared memory: a warp copies rows of keys or values, and a lane takes octets of channels of them
to registers (`fixed_point.Octets`), or the same few channels of four neighbouring rows.
"""
from collections.abc import Callable
from typing import NamedTuple

from .fixed_point import CHANNELS, OCTETS, Octets, TOP_BITS
from .ptx import (add2, amax2, as_f32, as_i32, copy1, copy2, copy4, device, dp4a, f16_high_to_f32, f16_to_f32, f32, fma, i32,
                  i64, lds, lds2, lds4, moved, mul, prmt, u32)
from .set_rows import larger

BIASED, MINUS_BIAS = i32(0x4b400000), f32(-12582912)  # an integer added to the bits of 1.5 2^23 is added to the float
SECTION = 32  # rows of values that a warp copies; lane t of four reads those of the t-th warp


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
    words: Callable          # (channels) -> words of a row
    section: Callable        # (channels of a head, rows) -> words of shared memory for so many rows of one
    keys: Callable           # (dim) -> (fetch, take), below
    values: Callable         # (dim) -> (fetch, amax, take4)
    octets: Octets           # how an octet in registers is read
    value: Callable          # (dim) -> function, below


# fetch (cache, key, position, lane, s, at) asks for a warp's rows of a head of `dim` channels, to word `at` of s, the block's
# shared memory, int32; a row lies at `position` where it would be behind that.
#     keys: 16 rows, 2 g + e that of position key + 4 g + e. take (s, at, lane, raw) -> raw, u32 array: of rows 2 g and 2 g + 1
#     octets t + 4 j, all j; zeros behind a row's end.
#     values: 32 rows, from position `key` on, the warp's section of four. amax (s, at, section, i, lane) -> the state, as of
#     `Octets.amax`, of a quarter of row 4 g + i, all of which lanes 4 g .. 4 g + 3 have. take4 (s, at, section, pair, half, lane,
#     raw) -> raw: of four rows of section t, from 8 pair + 4 half on, the lane's channels: 32 section + 4 g .. 4 g + 3 where
#     dim > 64, else 16 section + 2 g and 2 g + 1. value (raw, i, c) -> the float of row i and channel c of these.

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
    return fetch, take


def f16_values(dim):
    n_octets = 8 * -(-dim // CHANNELS)
    fetch_rows, row_words, whole = f16_fetcher(dim, SECTION, False), 4 * n_octets, dim % CHANNELS == 0

    @device
    def fetch(cache, key, position, lane, section, s, at):
        fetch_rows(cache, key, position, lane, i32(2 * section), s, at)

    @device
    def amax(s, at, section, i, lane):
        t, state = i32(lane & 3), u32(0)
        word = i32(at + (lane & 28) * row_words + 4 * (t ^ (lane & 4) ^ (2 * section)))
        for j in range(n_octets // 4):
            if whole or t + 4 * j < dim // 8:
                w = lds4(s, flipped(word, j & 1) + i * row_words + 32 * (j >> 1))
                state = amax2(amax2(amax2(amax2(state, u32(w[0])), u32(w[1])), u32(w[2])), u32(w[3]))
        return i32(state)

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
    return fetch, amax, take4


def f16_value(dim):
    n_words = -(-dim // CHANNELS)

    @device
    def value(raw, i, c):
        w = raw[n_words * i + (c >> 1)]
        return f16_high_to_f32(w) if c & 1 else f16_to_f32(w)
    return value


# q8_0: a row of 64 channels is 17 words, of 128 34. Every second block of 32 begins in the middle of a word. In registers an
# octet is its levels and d as a float.

def q8_0_words(dim):
    return dim // CHANNELS * 17


def q8_0_stride(dim):
    """From one row to the next one, but for every eighth."""
    return 18 * (dim // CHANNELS)


def q8_0_section(dim, rows):
    """The rows, and eight words: two for each eight of rows, and so that sections begin in different banks."""
    return rows * q8_0_stride(dim) + 8


def q8_0_place(dim):
    """(eight, row) -> the word of row 8 eight + row; of the rows 4 g + i that lanes read together all lie in different banks."""
    stride = q8_0_stride(dim)
    return device(lambda eight, row: i32(eight * (8 * stride + 2) + row * stride))


@device
def q8_0_block(b):
    """The word of a row with d of its block b of 32, in the upper half of which that lies where b is odd."""
    return i32(17 * (b >> 1) + 8 * (b & 1))


def q8_0_fetcher(dim, n_rows, is_key):
    """A half warp copies 16 of 17 parts of a row, and lanes the last ones of a row each."""
    width, place = dim // CHANNELS, q8_0_place(dim)
    copy_part = copy1 if width == 1 else copy2

    @device
    def fetch_part(cache, row, key, position, part, s, at):
        cell = smaller(i32(key + (key_offset(row) if is_key else row)), position)
        copy_part(s, at + place(row >> 3, row & 7) + width * part, words_at(cache, cell, 4 * width * part), 0)

    @device
    def fetch(cache, key, position, lane, s, at):
        for i in range(n_rows // 2):
            fetch_part(cache, i32(2 * i + (lane >> 4)), key, position, i32(lane & 15), s, at)
        if lane < n_rows:
            fetch_part(cache, lane, key, position, i32(16), s, at)
    return fetch


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
    n_octets, place, stride = dim // 32, q8_0_place(dim), q8_0_stride(dim)  # octets of a lane and row

    @device
    def take(s, at, lane, raw):
        row = at + place(i32(lane >> 4), i32(2 * ((lane >> 2) & 3)))
        for e in range(2):
            for j in range(n_octets):
                q8_0_octet(s, i32(row + e * stride + q8_0_block(j)), i32(lane & 3), j & 1, raw, 3 * (e * n_octets + j))
    return q8_0_fetcher(dim, 16, True), take


def q8_0_values(dim):
    n_blocks, place, stride, n_section = dim // 32, q8_0_place(dim), q8_0_stride(dim), q8_0_section(dim, SECTION)
    fetch_rows, n_words = q8_0_fetcher(dim, SECTION, False), 2 * n_blocks  # of a lane, of a row

    @device
    def fetch(cache, key, position, lane, section, s, at):
        fetch_rows(cache, key, position, lane, s, at)

    @device
    def amax(s, at, section, i, lane):
        """Of 128 channels a block, of 64 half of one. Where it begins in the middle of a word, so does the end of its last."""
        part = i32(lane & 3)
        b, later = (part, i32(0)) if n_blocks == 4 else (i32(part >> 1), i32(4 * (part & 1)))
        block, odd = i32(at + place(i32(lane >> 3), i32((lane & 4) + i)) + q8_0_block(b)), i32(b & 1)
        d, first = u32(lds(s, block)), i32(block + later)
        most = larger_level(u32(0), prmt(u32(lds(s, first)), u32(lds(s, first + n_words)), u32(0x7654 if odd else 0x5432)))
        for w in range(1, n_words):
            most = larger_level(most, u32(lds(s, first + w)))
        return larger(i32(0), mul(f16_to_f32(u32(d >> u32(16 * odd))), level_of(most)))

    @device
    def take4(s, at, section, pair, half, lane, raw):
        """A row: levels, d."""
        g, begin = i32(lane >> 2), at + i32(lane & 3) * n_section + place(pair, 4 * half)
        b = section if n_blocks == 4 else i32(section >> 1)
        for i in range(4):
            block, odd = i32(begin + i * stride + q8_0_block(b)), i32(b & 1)
            if n_blocks == 4:
                first = i32(block + g + odd)
                raw[2 * i] = prmt(u32(lds(s, first)), u32(lds(s, first + 1)), u32(0x3210 if odd else 0x5432))
            else:
                at_half = i32(8 * (section & 1) + g + 1 + odd)  # of a word, from d's on
                raw[2 * i] = u32(u32(lds(s, block + (at_half >> 1))) >> u32(16 * (at_half & 1)))
            raw[2 * i + 1] = u32(as_i32(f16_to_f32(u32(u32(lds(s, block)) >> u32(16 * odd)))))
    return fetch, amax, take4


@device
def _q8_0_value(w, c, d, offset):
    """mul(d, level) of byte c, which is exact: so is that of level + 1.5 2^23, less 1.5 2^23 d."""
    return fma(as_f32(dp4a(i32(w), i32(1 << (8 * c)), BIASED)), d, offset)


def q8_0_value(dim):
    @device
    def value(raw, i, c):
        d = as_f32(i32(raw[2 * i + 1]))
        return _q8_0_value(raw[2 * i], c, d, mul(d, MINUS_BIAS))
    return value


@device
def larger_level(most, w):
    """Of magnitudes of levels, as two float16: those of a word with."""
    w = u32(w ^ TOP_BITS)
    return amax2(amax2(most, _level_pair(w, 0x4140)), _level_pair(w, 0x4342))


@device
def level_of(most):
    """The larger one, as a float."""
    return f16_to_f32(amax2(most, prmt(most, most, 0x1032)))


@device
def _level_pair(w, selector):
    """float16 of two levels, whose bytes have 128 added."""
    return add2(prmt(w, 0x64646464, selector), 0xe480e480)


@device
def _q8_0_amax(state, raw, at):
    return larger(state, mul(as_f32(i32(raw[at + 2])), level_of(larger_level(larger_level(u32(0), raw[at]), raw[at + 1]))))


@device
def _q8_0_values(raw, at):
    a, b, d = raw[at], raw[at + 1], as_f32(i32(raw[at + 2]))
    offset = mul(d, MINUS_BIAS)
    return (_q8_0_value(a, 0, d, offset), _q8_0_value(a, 1, d, offset), _q8_0_value(a, 2, d, offset),
            _q8_0_value(a, 3, d, offset), _q8_0_value(b, 0, d, offset), _q8_0_value(b, 1, d, offset),
            _q8_0_value(b, 2, d, offset), _q8_0_value(b, 3, d, offset))


FORMS = {"f16": Form(lambda n: n // 2, lambda dim, rows: rows * 32 * -(-dim // CHANNELS), f16_keys, f16_values, OCTETS["f16"],
                     f16_value),
         "q8_0": Form(q8_0_words, q8_0_section, q8_0_keys, q8_0_values,
                      OCTETS["q8_0"]._replace(amax=_q8_0_amax, values=_q8_0_values), q8_0_value)}
