"""Weight tiles on the device: the unpackings of quant/ over 16-byte loads, with PTX where it has an instruction for them."""
from functools import lru_cache
from typing import Callable, NamedTuple

import numpy as np

from ...quant import tile, words
from ...quant.formats import Format, format_of
from .ptx import as_f32, constant, device, f16_to_f32, i32, ldc, ldc4, lds, mul, prmt, shr, u32


def loads(fmt: Format):
    """(ld16, ld4, ld2) of `quant.tile.loads` on a pointer to uint32. t = (words, base, row, ...): pointer, the tile's first word, row in it."""
    rows = tile.ROWS
    word_plane = rows * 4 * fmt.n_pieces
    half_plane = word_plane + rows * fmt.n_words

    @device
    def ld16(t, p):
        words, base, row = t[:3]
        return ldc4(words, base + (p * rows + row) * 4)

    @device
    def ld4(t, k):
        words, base, row = t[:3]
        return ldc(words, base + word_plane + k * rows + row)

    @device
    def ld2(t, h):
        words, base, row = t[:3]
        return u32(shr(ldc(words, base + half_plane + ((h * rows + row) >> 1)), (row & 1) << 4) & u32(0xffff))
    return ld16, ld4, ld2


def lookup16(levels):
    """(w of four nibbles) -> int32 word of their levels: both halves of the table by prmt, then a choice by the nibbles' bit 3."""
    table = np.asarray(levels, np.int8).view(np.uint32)
    assert table.shape == (4,), table.shape
    t0, t1, t2, t3 = (u32(w) for w in table)

    @device
    def lookup(w):
        w = u32(w)
        nibbles = prmt(u32(w | w >> u32(4)), u32(0), u32(0x4420))  # the four of them in 16 bits
        index = u32(nibbles & u32(0x7777))
        return i32(prmt(prmt(t0, t1, index), prmt(t2, t3, index), u32((nibbles & u32(0x8888)) >> u32(1) | u32(0x3210))))
    return lookup


PRIMITIVES = words.primitives(device, f16=f16_to_f32, f32=as_f32, mul=mul, shr=shr, lookup16=lookup16)


@lru_cache(None)
def unpacker(name: str) -> words.Unpacker:
    """(levels, sub, group) of a quantized format on the device."""
    fmt = format_of(name)
    return fmt.unpack(PRIMITIVES, *loads(fmt))


class Tables(NamedTuple):
    """An `Unpacker` whose codebooks lie in shared memory, where lanes that look up different entries do not wait for each other."""
    unpacker: words.Unpacker  # t = (words, base, row, shared): a shared array of int32 that begins with the entries
    n_entries: int
    entry: Callable           # (i) -> entry i of all codebooks, uint32; None without any


@lru_cache(None)
def unpacker_with_tables(name: str) -> Tables:
    parts = []

    def table(entries):
        first = sum(map(len, parts))
        parts.append(np.asarray(entries, np.uint32))

        @device
        def entry(t, i):
            return u32(lds(t[3], first + i))
        return entry

    fmt = format_of(name)
    unpack = fmt.unpack(PRIMITIVES._replace(table=table), *loads(fmt))
    return Tables(unpack, sum(map(len, parts)), constant(np.concatenate(parts)) if parts else None)


@lru_cache(None)
def float_values(name: str):
    """(t, q) -> the float32 values of columns 8q..8q+7, of a float format on the device."""
    fmt = format_of(name)
    return fmt.values(PRIMITIVES, loads(fmt)[0])
