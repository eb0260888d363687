"""Tiles of 32 weight rows, as quant/tile.py lays them out, into what the CPU's products multiply: a chunk of 256 columns at a
time, a row to a lane."""
from functools import lru_cache

from numba import uint32

from ...quant import tile
from ...quant.device_functions import device, inlined
from ...quant.formats import CHUNK
from ...quant.words import ONES, i32, primitives, u32
from ..float16 import f16_to_f32
from .vector import (ISAS, high_bytes, high_pair, instructions, low_bytes, low_pair, mul_i16, prefetch, rolled,
                     shift_right, stack, store)

ROWS = tile.ROWS
LINE = 16        # words of a line of the caches
AHEAD = 2        # which tile behind the one that is unpacked is asked for
PAIRS, LIMBS = "pairs", "limbs"  # what levels become


def lookup_nibbles(levels):
    """`Primitives.lookup_nibbles` by selects, a bit of the nibbles at a time: without loads, so that loops over rows become
    vector code."""
    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = (u32((level & 255) * 0x01010101) for level in levels * (16 // len(levels)))

    @inlined
    def mask(w, bit):
        return u32(((w >> u32(bit)) & ONES) * u32(255))

    @inlined
    def select(mask, x, y):
        return u32(x ^ (mask & (x ^ y)))

    @inlined
    def four(w):
        m0, m1, m2 = mask(w, 0), mask(w, 1), mask(w, 2)
        low = select(m2, select(m1, select(m0, a, b), select(m0, c, d)), select(m1, select(m0, e, f), select(m0, g, h)))
        high = select(m2, select(m1, select(m0, i, j), select(m0, k, l)), select(m1, select(m0, m, n), select(m0, o, p)))
        return i32(select(mask(w, 3), low, high))

    @inlined
    def lookup(w):
        return four(w), four(u32(w) >> u32(4))
    return lookup


@lru_cache(None)
def cpu_primitives():
    return primitives(inlined, f16=f16_to_f32, shr=shift_right, lookup_nibbles=lookup_nibbles)


# Quantized weights

# A tile with the rows of each item side by side, so that loops over rows become vector code: uint32 [items][32 rows], the items
# of a row being its words (up to 3), its half (in item 3), and from item 4 on the words of its pieces.

@lru_cache(None)
def transposer(isa):
    lanes, turn = ISAS[isa].lanes, instructions(isa, 1).turn

    @device
    def transpose(words, base, n_pieces, n_words, n_halves, items):
        """The tile at word `base`, as quant/tile.py lays it out, into items."""
        for p in range(n_pieces):
            for r in range(0, ROWS, lanes):
                turn(words, base + (p * ROWS + r) * 4, items, (4 + 4 * p) * ROWS + r, ROWS)
        plane = base + n_pieces * ROWS * 4
        for i in range(n_words * ROWS):
            items[i] = words[plane + i]
        plane += n_words * ROWS
        for i in range(n_halves * ROWS // 2):
            w = words[plane + i]
            items[3 * ROWS + 2 * i], items[3 * ROWS + 2 * i + 1] = w & u32(0xffff), w >> u32(16)
    return transpose


@inlined
def piece_item(t, p, i):
    items, row = t
    return items[(4 + 4 * p + i) * ROWS + row]


@inlined
def word_item(t, k):
    items, row = t
    return items[k * ROWS + row]


@inlined
def half_item(t, h):
    items, row = t
    return items[3 * ROWS + row]


def n_limbs(fmt):
    """Bytes of isc * level: one, signed, or a signed high one and an unsigned low one."""
    return 1 if fmt.max_isc == 1 or fmt.max_level * fmt.max_isc < 128 else 2


def quantized_unpacker(fmt, isa, form):
    """(words, base, n_blocks, weights): the first n_blocks times 32 columns of the tile at word `base` into weights = (levels,
    isc, imin uint32 [sub-blocks][32], d, m f32 [groups][32]). imin: (imin, 128 imin), to be multiplied with the halves that
    `split_sum` makes. levels, by form:

    PAIRS: uint32 [128][32], isc * level of two columns in the halves of a word
    LIMBS: uint32 [n_limbs][64][32], the low bytes of isc * level of four columns in those of a word, then the high ones
    """
    levels, sub, group = fmt.unpack(cpu_primitives(), piece_item, word_item, half_item)[:3]
    n_pieces, n_words, n_halves = fmt.n_pieces, fmt.n_words, fmt.n_halves
    n_rows, rows, transpose = instructions(isa, 1).n_rows, instructions(isa, 1).rows, transposer(isa)
    n_sub, n_group, sub_words, scaled, has_min = CHUNK // fmt.sub, CHUNK // fmt.group, fmt.sub // 4, fmt.max_isc > 1, fmt.has_min
    tile_words = tile.tile_bytes(fmt) // 4
    n_lines, by_pairs, two = -(-tile_words // (8 * LINE)), form == PAIRS, n_limbs(fmt) == 2
    item_words, level_words = stack(uint32, (4 + 4 * n_pieces) * ROWS), stack(uint32, 8 * ROWS)

    @device
    def unpack(words, base, n_blocks, weights):
        out, isc, imin, d, m = weights
        items, w = item_words(), level_words()
        transpose(words, base, n_pieces, n_words, n_halves, items)
        for g in range(rolled(n_group)):
            for r in range(ROWS):
                d[g * ROWS + r], m[g * ROWS + r] = group((items, r), g)
        if scaled or has_min:
            for i in range(rolled(n_sub)):
                for r in range(ROWS):
                    scale, minimum = sub((items, r), i)
                    if scaled:  # else both are ones, which two arrays would get a word at a time
                        isc[i * ROWS + r] = (u32(scale) & u32(0xffff)) | u32(scale) << u32(16)
                    imin[i * ROWS + r] = (u32(minimum) & u32(0xffff)) | u32(minimum) << u32(7 + 16)
        for j in range(rolled(n_blocks)):
            for line in range(n_lines):  # of a later tile, while this one is unpacked
                prefetch(words, base + AHEAD * tile_words + (j * n_lines + line) * LINE)
            for r in range(ROWS):
                w0, w1, w2, w3, w4, w5, w6, w7 = levels((items, r), j)
                w[r], w[ROWS + r], w[2 * ROWS + r], w[3 * ROWS + r] = u32(w0), u32(w1), u32(w2), u32(w3)
                w[4 * ROWS + r], w[5 * ROWS + r], w[6 * ROWS + r], w[7 * ROWS + r] = u32(w4), u32(w5), u32(w6), u32(w7)
            for k in range(8):
                for r in range(0, ROWS, n_rows):
                    four = rows(w, k * ROWS + r)
                    word = (8 * j + k) * ROWS + r
                    if by_pairs or scaled:
                        low, high = low_pair(four), high_pair(four)
                        if scaled:
                            scale = rows(isc, (8 * j + k) // sub_words * ROWS + r)
                            low, high = mul_i16(low, scale), mul_i16(high, scale)
                        if by_pairs:
                            store(out, 2 * word - r, 0, low)
                            store(out, 2 * word - r + ROWS, 0, high)
                        else:
                            store(out, word, 0, low_bytes(low, high))
                            if two:
                                store(out, CHUNK // 4 * ROWS + word, 0, high_bytes(low, high))
                    else:
                        store(out, word, 0, four)
    return unpack


# Float weights

def float_unpacker(fmt):
    """(words, base, weights): the tile at word `base` into weights float32 [256][32]."""
    values = fmt.values(cpu_primitives(), tile.loads(fmt, inlined)[0])

    @device
    def unpack(words, base, weights):
        for q in range(rolled(CHUNK // 8)):
            for r in range(ROWS):
                w0, w1, w2, w3, w4, w5, w6, w7 = values((words, base, r), q)
                i = 8 * q * ROWS + r
                weights[i], weights[i + ROWS], weights[i + 2 * ROWS], weights[i + 3 * ROWS] = w0, w1, w2, w3
                weights[i + 4 * ROWS], weights[i + 5 * ROWS], weights[i + 6 * ROWS], weights[i + 7 * ROWS] = w4, w5, w6, w7
    return unpack
