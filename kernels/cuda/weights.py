"""Weight tiles on the device: the unpackings of quant/ over 16-byte loads, with PTX where it has an instruction for them."""
from functools import lru_cache

import numpy as np

from ...quant import tile, words
from ...quant.formats import Format, format_of
from .ptx import as_f32, device, f16_to_f32, i32, ldc, ldc4, mul, prmt, shr, u32


def loads(fmt: Format):
    """(ld16, ld4, ld2) of `quant.tile.loads` on a pointer to uint32. t = (words, base, row): pointer, the tile's first word, row in it."""
    rows = tile.ROWS
    word_plane = rows * 4 * fmt.n_pieces
    half_plane = word_plane + rows * fmt.n_words

    @device
    def ld16(t, p):
        words, base, row = t
        return ldc4(words, base + (p * rows + row) * 4)

    @device
    def ld4(t, k):
        words, base, row = t
        return ldc(words, base + word_plane + k * rows + row)

    @device
    def ld2(t, h):
        words, base, row = t
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
        pairs = u32(w | w >> u32(4))
        selector = u32(((pairs & u32(0xff)) | (pairs >> u32(8) & u32(0xff00))) & u32(0x7777))
        upper = prmt(u32((w & u32(0x08080808)) << u32(4)), u32(0), u32(0xba98))  # the bytes' signs: ones where bit 3 is set
        return i32(u32((prmt(t0, t1, selector) & (upper ^ u32(0xffffffff))) | (prmt(t2, t3, selector) & upper)))
    return lookup


PRIMITIVES = words.primitives(device, f16=f16_to_f32, f32=as_f32, mul=mul, shr=shr, lookup16=lookup16)


@lru_cache(None)
def unpacker(name: str) -> words.Unpacker:
    """(levels, sub, group) of a quantized format on the device."""
    fmt = format_of(name)
    return fmt.unpack(PRIMITIVES, *loads(fmt))


@lru_cache(None)
def float_values(name: str):
    """(t, q) -> the float32 values of columns 8q..8q+7, of a float format on the device."""
    fmt = format_of(name)
    return fmt.values(PRIMITIVES, loads(fmt)[0])
