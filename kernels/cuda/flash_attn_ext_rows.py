"""Rows of f16 and q8_0 caches through shared memory: a warp copies its rows of the next piece of 128 keys while it works on one,
and a lane takes octets of channels of them to registers (`fixed_point.Octets`).
"""
from collections.abc import Callable
from typing import NamedTuple

from .fixed_point import CHANNELS, OCTETS, Octets, TOP_BITS
from .ptx import (add2, afresh, amax2, as_f32, as_i32, copies4, copy1, copy2, copy4, device, f16_high_to_f32, f16_to_f32, f32,
                  fma, i32, i64, lds, lds4, mul, prmt, sts4, syncwarp, u32)
from .set_rows import larger

ROWS = 16  # of a warp


class Cache(NamedTuple):
    """Where the keys, or the values, of a sequence and a KV head lie, for device functions, in words."""
    words: object  # pointer
    first: object  # int64, of the sequence's first cell
    row: object    # int32, from cell to cell


@device
def smaller(a, b):
    return i32(a if a < b else b)


class Form(NamedTuple):
    """Of a cache's type."""
    words: Callable       # (channels) -> words of a row
    staged: Callable      # (channels of a head) -> words of shared memory for a warp's rows of one
    copier: Callable      # (dim, n_rows, n_octets, step, first, row_of, octet_of) -> (fetch, take), below
    octets: Octets        # how an octet in registers is read


# fetch (cache, key, position, lane, warp, s) asks for the warp's 16 rows of a head of `dim` channels, from position `key` on, the
# row at `position` in the place of those behind it; take (lane, warp, s, raw) -> raw, u32 array: n_octets octets of each of
# n_rows rows of the lane, when its copies are there. first: where the warps' copies begin in s, the block's shared memory, int32;
# row_of(i, lane): a lane's i-th row; octet_of(lane): its first octet, the others being `step` on each time.

def f16_copier(dim, n_rows, n_octets, step, first, row_of, octet_of):
    """A lane copies what it takes itself, to [row][octet][lane][4]; zeros behind a row's end."""
    row_copies = copies4(n_octets, 4 * step)

    @device
    def fetch(cache, key, position, lane, warp, s):
        octet = octet_of(lane)
        for i in range(n_rows):
            at = cache.first + i64(smaller(i32(key + row_of(i, lane)), position)) * cache.row
            place = first + (warp * n_rows + i) * n_octets * 128 + 4 * lane
            if dim % CHANNELS == 0:
                row_copies(s, place, cache.words, at + 4 * octet)
            else:
                for j in range(n_octets):
                    if octet + j * step < dim // 8:
                        copy4(s, place + 128 * j, cache.words, at + 4 * (octet + j * step))
                    else:
                        sts4(s, place + 128 * j, 0, 0, 0, 0)

    @device
    def take(lane, warp, s, raw):
        for i in range(n_rows * n_octets):
            w = lds4(s, first + (warp * n_rows * n_octets + i) * 128 + 4 * lane)
            raw[4 * i], raw[4 * i + 1], raw[4 * i + 2], raw[4 * i + 3] = u32(w[0]), u32(w[1]), u32(w[2]), u32(w[3])
    return fetch, take


def q8_0_copier(dim, n_rows, n_octets, step, first, row_of, octet_of):
    """A row of 64 channels is 17 words, of 128 17 times two: a half warp copies 16 of these parts, and 16 lanes the last ones of
    all rows, to [row][20 words for 64 channels]. In registers an octet is its levels, 128 added to each, and d as a float."""
    width = dim // CHANNELS
    stride, copy_part, by_lane = 20 * width, copy1 if width == 1 else copy2, step == 8

    @device
    def fetch_part(cache, row, key, position, part, warp, s):
        at = cache.first + i64(smaller(i32(key + row), position)) * cache.row
        copy_part(s, first + (warp * ROWS + row) * stride + width * part, cache.words, at + width * part)

    @device
    def fetch(cache, key, position, lane, warp, s):
        syncwarp()  # what was there has been taken
        lane = afresh(lane)  # places are computed where they are used, registers are for values
        for i in range(ROWS // 2):
            fetch_part(cache, i32(2 * i + (lane >> 4)), key, position, i32(lane & 15), warp, s)
        if lane < ROWS:
            fetch_part(cache, lane, key, position, i32(16), warp, s)

    @device
    def levels(s, begin, odd):
        """Words of eight levels, 128 added to each; odd: they begin a word, else in the middle of one."""
        a, b = lds(s, begin), lds(s, begin + 1)
        if by_lane:
            c, selector = lds(s, begin + 2), u32(0x3210 if odd else 0x5432)
            return u32(prmt(a, b, selector) ^ TOP_BITS), u32(prmt(b, c, selector) ^ TOP_BITS)
        if odd:
            return u32(u32(a) ^ TOP_BITS), u32(u32(b) ^ TOP_BITS)
        return u32(prmt(a, b, 0x5432) ^ TOP_BITS), u32(prmt(b, lds(s, begin + 2), 0x5432) ^ TOP_BITS)

    @device
    def take_octet(s, block, octet, odd, raw, at):
        raw[at], raw[at + 1] = levels(s, i32(block + 2 * octet + odd), odd)
        d = u32(lds(s, block))
        if by_lane:
            raw[at + 2] = u32(as_i32(f16_to_f32(u32(d >> u32(16 * odd)))))
        else:
            raw[at + 2] = u32(as_i32(f16_high_to_f32(d) if odd else f16_to_f32(d)))

    @device
    def take(lane, warp, s, raw):
        syncwarp()  # what the other lanes have copied is there
        lane = afresh(lane)
        row = i32(first + (warp * ROWS + row_of(i32(0), lane)) * stride)
        for i in range(n_rows):
            for j in range(n_octets):
                here = row + (8 * (i & 1) + (i >> 1)) * stride
                # a block of 32, every second of which begins in the middle of a word
                if by_lane:
                    odd = i32(lane >> 4)
                    take_octet(s, i32(here + 17 * j + 8 * odd), i32((lane >> 2) & 3), odd, raw, 3 * (i * n_octets + j))
                else:
                    take_octet(s, i32(here + 17 * (j >> 1) + 8 * (j & 1)), i32(lane & 3), j & 1, raw, 3 * (i * n_octets + j))
    return fetch, take


@device
def _q8_0_amax(state, raw, at):
    a, b = raw[at], raw[at + 1]
    most = amax2(amax2(amax2(amax2(u32(0), _level_pair(a, 0x4140)), _level_pair(a, 0x4342)), _level_pair(b, 0x4140)),
                 _level_pair(b, 0x4342))
    return larger(state, mul(as_f32(i32(raw[at + 2])), f16_to_f32(amax2(most, prmt(most, most, 0x1032)))))


@device
def _level_pair(w, selector):
    """float16 of two levels, whose bytes have 128 added."""
    return add2(prmt(w, 0x64646464, selector), 0xe480e480)


@device
def _q8_0_value(w, selector, d, offset):
    return fma(as_f32(i32(prmt(w, 0x47000000, selector))), d, offset)


@device
def _q8_0_values(raw, at):
    """mul(d, level), which is exact: so is that of level + 2^15 + 128, less (2^15 + 128) d."""
    a, b, d = raw[at], raw[at + 1], as_f32(i32(raw[at + 2]))
    offset = mul(d, f32(-32896))
    return (_q8_0_value(a, 0x7604, d, offset), _q8_0_value(a, 0x7614, d, offset), _q8_0_value(a, 0x7624, d, offset),
            _q8_0_value(a, 0x7634, d, offset), _q8_0_value(b, 0x7604, d, offset), _q8_0_value(b, 0x7614, d, offset),
            _q8_0_value(b, 0x7624, d, offset), _q8_0_value(b, 0x7634, d, offset))


FORMS = {"f16": Form(lambda n: n // 2, lambda n: -(-n // CHANNELS) * 4 * 128, f16_copier, OCTETS["f16"]),
         "q8_0": Form(lambda n: n // CHANNELS * 17, lambda n: n // CHANNELS * 20 * ROWS, q8_0_copier,
                      OCTETS["q8_0"]._replace(amax=_q8_0_amax, values=_q8_0_values))}
