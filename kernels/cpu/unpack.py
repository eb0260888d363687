"""Tiles of 32 weight rows, as quant/tile.py lays them out, into what the CPU's products multiply: a chunk of 256 columns at a
time, a row to a lane."""
from functools import lru_cache

from llvmlite import ir
from numba import types, uint32
from numba.extending import intrinsic

from ...quant import tile
from ...quant.device_functions import device, inlined
from ...quant.formats import CHUNK
from ...quant.words import ONES, i32, primitives, u32
from ..float16 import f16_to_f32
from .lanes import Chunk, Lanes, lane_primitives
from .vector import (F32, I8, I16, I32, I64, ISAS, advance, constant, high_pair, instructions, low_pair, mul_i16, prefetch,
                     rolled, shift_right, stack, store)


ROWS = tile.ROWS
LINE = 16        # words of a line of the caches
COLUMN_BLOCK = 32  # columns: the last chunk has so many times that, the others 256
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
    imin uint32 [sub-blocks][32], d, m f32 [groups][32]). imin: (imin, 128 imin), to be multiplied with the halves that
    `split_sum` makes; imin and m are of formats with minima. levels, by form:

    PAIRS: uint32 [128][32], isc * level of two columns in the halves of a word
    LIMBS: uint32 [n_limbs][64][32], the low bytes of isc * level of four columns in those of a word, then the high ones; for
    instruction sets with a dot product of bytes
    """
    if ISAS[isa].dot4:
        return lane_unpacker(fmt, isa, form)
    assert form == PAIRS, isa
    return loop_unpacker(fmt, isa)


def loop_unpacker(fmt, isa):
    """To pairs, an item of all rows after the other."""
    levels, sub, group = fmt.unpack(cpu_primitives(), piece_item, word_item, half_item)[:3]
    n_pieces, n_words, n_halves = fmt.n_pieces, fmt.n_words, fmt.n_halves
    n_rows, rows, transpose = instructions(isa, 1).n_rows, instructions(isa, 1).rows, transposer(isa)
    n_sub, n_group, sub_words, scaled, has_min = CHUNK // fmt.sub, CHUNK // fmt.group, fmt.sub // 4, fmt.max_isc > 1, fmt.has_min
    tile_words = tile.tile_bytes(fmt) // 4
    n_lines = -(-tile_words // (8 * LINE))
    item_words, level_words, isc_words = (stack(uint32, (4 + 4 * n_pieces) * ROWS), stack(uint32, 8 * ROWS),
                                          stack(uint32, n_sub * ROWS))

    @device
    def unpack(words, base, n_blocks, weights):
        out, imin, d, m = weights
        items, w, isc = item_words(), level_words(), isc_words()
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
                    word = (8 * j + k) * 2 * ROWS + r
                    low, high = low_pair(four), high_pair(four)
                    if scaled:
                        scale = rows(isc, (8 * j + k) // sub_words * ROWS + r)
                        low, high = mul_i16(low, scale), mul_i16(high, scale)
                    store(out, word, 0, low)
                    store(out, word + ROWS, 0, high)
    return unpack


class LaneUnpacker:
    """Emits the unpacking of as many rows as a vector has lanes: what it needs of them stays in registers."""

    def __init__(self, fmt, isa, form):
        self.fmt, self.lanes, self.by_pairs = fmt, ISAS[isa].lanes, form == PAIRS
        self.unpack = fmt.unpack(lane_primitives(), Chunk.piece_word, Chunk.word, Chunk.half)

    def store(self, builder, pointer, row, x, element=I32):
        """x, a vector or one number for all, to the lanes of a row of 32 words."""
        type_ = ir.VectorType(element, self.lanes)
        value = x.value if isinstance(x, Lanes) else ir.Constant(type_, [x] * self.lanes)
        builder.store(value, builder.bitcast(builder.gep(pointer, [I64(row * ROWS)]), type_.as_pointer()), align=4)

    def levels(self, builder, codes):
        if not self.fmt.zero:
            return codes
        value = builder.bitcast(codes.value, ir.VectorType(I8, 4 * self.lanes))
        return codes.like(builder.bitcast(builder.sub(value, constant(value, self.fmt.zero)), codes.value.type))

    def scaled(self, builder, four, isc):
        """isc * level of columns 0 and 2, and of 1 and 3, as pairs of int16."""
        value = builder.bitcast(four.value, ir.VectorType(I16, 2 * self.lanes))
        eight = constant(value, 8)
        pairs = builder.ashr(builder.shl(value, eight), eight), builder.ashr(value, eight)
        if self.fmt.max_isc > 1:
            factor = builder.bitcast((isc & 0xffff | isc << 16).value, value.type)
            pairs = tuple(builder.mul(pair, factor) for pair in pairs)
        return [four.like(builder.bitcast(pair, four.value.type)) for pair in pairs]

    def put(self, builder, out, k, four, isc):
        """Levels of four columns, the k-th of a chunk's rows."""
        if not self.by_pairs and self.fmt.max_isc == 1:
            self.store(builder, out, k, four)
            return
        even, odd = self.scaled(builder, four, isc)
        if self.by_pairs:
            self.store(builder, out, 2 * k, even & 0xffff | odd << 16)
            self.store(builder, out, 2 * k + 1, even >> 16 | odd & 0xffff0000)
            return
        self.store(builder, out, k, even & 0x00ff00ff | (odd & 0x00ff00ff) << 8)
        if n_limbs(self.fmt) == 2:
            self.store(builder, out, CHUNK // 4 + k, even >> 8 & 0x00ff00ff | odd & 0xff00ff00)

    def emit(self, builder, words, base, r, n_blocks, out, imin, d, m):
        """The rows r.. of the tile; the last four: pointers to where the first of these rows goes."""
        fmt, chunk = self.fmt, Chunk(self.fmt, self.lanes, builder, words, base, r, I64(AHEAD * tile.tile_bytes(self.fmt) // 4))
        for g in range(CHUNK // fmt.group):
            for pointer, x in zip((d, m) if fmt.has_min else (d,), self.unpack.group(chunk, g)):
                self.store(builder, pointer, g, x, F32)
        end = builder.append_basic_block("end")
        for j in range(CHUNK // COLUMN_BLOCK):
            if j:
                more = builder.append_basic_block("more")
                builder.cbranch(builder.icmp_signed("==", n_blocks, I64(j)), end, more)
                builder.position_at_end(more)
            scales = {}
            for n in range(COLUMN_BLOCK * j // fmt.sub, COLUMN_BLOCK * (j + 1) // fmt.sub):
                scales[n], least = self.unpack.sub(chunk, n)
                if fmt.has_min:
                    self.store(builder, imin, n, least & 0xffff | least << 23)
            for q in range(4):
                places = (2 * q, 2 * q + 1) if self.unpack.pairs else (q, q + 4)
                for k, codes in zip(places, self.unpack.quarter(chunk, j, q)):
                    k += COLUMN_BLOCK // 4 * j
                    self.put(builder, out, k, self.levels(builder, codes), scales[4 * k // fmt.sub])
        builder.branch(end)
        builder.position_at_end(end)


@lru_cache(None)
def lane_unpacker(fmt, isa, form):
    """As many rows as a vector has lanes after the others."""
    unpacker, lanes = LaneUnpacker(fmt, isa, form), ISAS[isa].lanes

    @intrinsic
    def emit(typingctx, words, base, r, n_blocks, out, imin, d, m):
        def codegen(context, builder, signature, args):
            unpacker.emit(builder, *args)
            return context.get_dummy_value()
        return types.none(words, types.int64, types.int64, types.int64, out, imin, d, m), codegen

    @device
    def unpack(words, base, n_blocks, weights):
        out, imin, d, m = weights
        for i in range(rolled(ROWS // lanes)):
            r = i * lanes
            emit(words, base, r, n_blocks, advance(out, r), advance(imin, r), advance(d, r), advance(m, r))
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
