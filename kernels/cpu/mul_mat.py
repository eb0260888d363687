"""out[i, r] = sum over c of w[r, c] * x[i, c], in the order of docs/numerics.md, sections 3 and 4.

A unit of work is a tile of 32 weight rows and up to N_COLUMNS columns (rows of activations). Per chunk of 256 columns of the
weights the tile is unpacked once, a row to a lane, and multiplied with the columns of the unit, BLOCK at a time. Quantized
weights become pairs of int16, levels times integer scales, so that one instruction multiplies and adds two columns of 16 rows.
"""
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import float32, int16, int32, int64, types, uint32
from numba.extending import intrinsic

from ...quant import tile
from ...quant.activation import LIMIT, SUM_COLUMNS
from ...quant.formats import CHUNK, format_of
from ...quant.words import ONES, f32, i32, primitives, u32
from ..compile import device, jit
from ..float16 import f16_to_f32
from ..threads import THREADS, sharing
from .vector import (ISAS, add, add_i32, as_int8, as_int16, available_isas, fma, fnma, high16, high_pair, instructions, join16,
                     limbs_to_f32, limbs_to_i32, low16, low_pair, mul_i16, mul_i32, plus_128, prefetch, rolled,
                     shift_right, stack, store, to_f32)

ROWS = tile.ROWS
PAIRS = CHUNK // 2
BLOCK = 4        # columns that are multiplied at a time
N_COLUMNS = 128  # columns of a unit
LINE = 16        # words of a line of the caches
AHEAD = 2        # which tile behind the one that is unpacked is asked for
UNPACKING = 8    # columns that could be multiplied while a chunk is unpacked (5 for Q4_1, 17 for IQ3_S)
PARALLEL, GRAIN = 1 << 20, 1 << 21   # multiplications that threads share, about 10 us of work; those of a part at most
PARTS = 4        # of a thread at least

f32_2d = float32[:, ::1]
QUANTIZED = types.Tuple((uint32[::1], int16[:, ::1], f32_2d, int32[:, ::1], f32_2d))  # words, q, d, sums, out
FLOAT = types.Tuple((uint32[::1], f32_2d, f32_2d))                                    # words, x, out

# What units take: pointers. Arrays would be counted as references at each call, by all threads in one place.
u32_at, f32_at = types.CPointer(uint32), types.CPointer(float32)
OPERANDS = {QUANTIZED: types.Tuple((u32_at, u32_at, f32_at, u32_at, f32_at, int64, int64, int64)),  # ..., n, n_chunks, m
            FLOAT: types.Tuple((u32_at, f32_at, f32_at, int64, int64, int64))}                      # ..., n, k, m


inlined = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


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


# Units: what is multiplied by whom

@inlined
def parts(n):
    """Into how many units n columns are divided."""
    return (n + N_COLUMNS - 1) // N_COLUMNS


@inlined
def place(u, n):
    """Row tile, first column and one past the last of unit u: equal parts of whole blocks, but for the last."""
    n_parts = parts(n)
    width = (n + BLOCK * n_parts - 1) // (BLOCK * n_parts) * BLOCK
    first = u % n_parts * width
    return u // n_parts, first, min(first + width, n)


@inlined
def write(total, row_tile, first, last, out, m):
    """total: float32 [columns][32 rows] -> out: float32 [n, m]; rows beyond m are padding."""
    for c in range(first, last):
        for r in range(row_tile * ROWS, min((row_tile + 1) * ROWS, m)):
            out[c * m + r] = total[(c - first) * ROWS + r % ROWS]


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


def quantized_unpacker(fmt, isa, by_bytes=False):
    """(words, base, weights): the tile at word `base` into weights = (pairs uint32 [128][32], isc, imin uint32
    [sub-blocks][32], d, m f32 [groups][32]). pairs: isc * level of two columns in the halves of a word; imin: (imin, 128 imin),
    to be multiplied with the halves that `split_sums` makes. by_bytes: instead of pairs uint32 [64][32], level + 128 of four
    columns in the bytes of a word."""
    levels, sub, group = fmt.unpack(cpu_primitives(), piece_item, word_item, half_item)[:3]
    n_pieces, n_words, n_halves = fmt.n_pieces, fmt.n_words, fmt.n_halves
    n_rows, rows, transpose = instructions(isa, 1).n_rows, instructions(isa, 1).rows, transposer(isa)
    n_sub, n_group, sub_words, scaled, has_min = CHUNK // fmt.sub, CHUNK // fmt.group, fmt.sub // 4, fmt.max_isc > 1, fmt.has_min
    tile_words = tile.tile_bytes(fmt) // 4
    n_lines = -(-tile_words // (8 * LINE))
    item_words, level_words = stack(uint32, (4 + 4 * n_pieces) * ROWS), stack(uint32, 8 * ROWS)

    @device
    def unpack(words, base, weights):
        pairs, isc, imin, d, m = weights
        items, w = item_words(), level_words()
        transpose(words, base, n_pieces, n_words, n_halves, items)
        for g in range(rolled(n_group)):
            for r in range(ROWS):
                d[g * ROWS + r], m[g * ROWS + r] = group((items, r), g)
        if scaled or has_min:
            for i in range(rolled(n_sub)):
                for r in range(ROWS):
                    scale, minimum = sub((items, r), i)
                    isc[i * ROWS + r] = u32(scale) if by_bytes else (u32(scale) & u32(0xffff)) | u32(scale) << u32(16)
                    imin[i * ROWS + r] = (u32(minimum) & u32(0xffff)) | u32(minimum) << u32(7 + 16)
        for j in range(rolled(8)):
            for line in range(n_lines):  # of a later tile, while this one is unpacked
                prefetch(words, base + AHEAD * tile_words + (j * n_lines + line) * LINE)
            for r in range(ROWS):
                w0, w1, w2, w3, w4, w5, w6, w7 = levels((items, r), j)
                w[r], w[ROWS + r], w[2 * ROWS + r], w[3 * ROWS + r] = u32(w0), u32(w1), u32(w2), u32(w3)
                w[4 * ROWS + r], w[5 * ROWS + r], w[6 * ROWS + r], w[7 * ROWS + r] = u32(w4), u32(w5), u32(w6), u32(w7)
            for k in range(8):
                for r in range(0, ROWS, n_rows):
                    four = rows(w, k * ROWS + r)
                    if by_bytes:
                        store(pairs, (8 * j + k) * ROWS + r, 0, plus_128(four))
                    else:
                        low, high = low_pair(four), high_pair(four)
                        if scaled:
                            scale = rows(isc, (8 * j + k) // sub_words * ROWS + r)
                            low, high = mul_i16(low, scale), mul_i16(high, scale)
                        first = 2 * (8 * j + k) * ROWS + r
                        store(pairs, first, 0, low)
                        store(pairs, first + ROWS, 0, high)
    return unpack


class Form(NamedTuple):
    """What a product needs to know of a format. span: columns of a group whose sum of isc * level * q surely fits 32 bits: all of
    them or, halving, a part; sub: columns with one minimum, 0 without minima."""
    group: int
    span: int
    sub: int


def form_of(fmt):
    assert fmt.max_level * fmt.max_isc < 2**15 and fmt.group * fmt.max_imin * LIMIT < 2**31, fmt.name
    span = fmt.group
    while span * fmt.max_level * fmt.max_isc * LIMIT >= 2**31:
        span //= 2
    return Form(fmt.group, span, fmt.sub if fmt.has_min else 0)


@device
def sum_of(sums, i, n):
    """Of the i-th n sums."""
    s = i32(0)
    for h in range(n):
        s = i32(s + i32(sums[i * n + h]))
    return s


@lru_cache(None)
def sum_splitter(form):
    """(sums, block, c, out): the sums of the block of 256 activations over sub-blocks, |s| <= 32 * 127 * 128, as pairs of int16
    (s mod 128, floor(s / 128)) into column c, uint32 [columns][sub-blocks]."""
    n_sub, n_sums = CHUNK // form.sub, form.sub // SUM_COLUMNS

    @device
    def split_sums(sums, block, c, out):
        for i in range(n_sub):
            s = sum_of(sums, block * n_sub + i, n_sums)
            out[c * n_sub + i] = u32(s & i32(127)) | u32(s >> i32(7)) << u32(16)
    return split_sums


@lru_cache(None)
def quantized_multiplier(form, isa, n_columns):
    """(weights, x, c, chunk, total): total[c + i] = fma(acc, d of the activations, total[c + i]) for the n_columns columns from
    c. x = (q as pairs, d, split sums, first, n_chunks): c counts from column `first`; total: float32 [columns][32]."""
    n_rows, zeros, load, rows, columns, dot, *_ = instructions(isa, n_columns)
    n_group, group_pairs, span_pairs = CHUNK // form.group, form.group // 2, form.span // 2
    wide, has_min = form.span < form.group, form.sub > 0
    n_sub, group_subs = (CHUNK // form.sub, form.group // form.sub) if has_min else (0, 0)

    @device
    def multiply(weights, x, c, chunk, total):
        pairs, _, imin, d, m = weights
        q, dx, sums, first, n_chunks = x
        block = (first + c) * n_chunks + chunk
        for r in range(0, ROWS, n_rows):
            acc = zeros(d)
            for g in range(n_group):
                s = high = low = zeros(pairs)  # S = 65536 high + low where the group is wide
                for p in range(g * group_pairs, (g + 1) * group_pairs, span_pairs):
                    s = zeros(pairs)
                    for k in range(p, p + span_pairs):
                        s = dot(s, rows(pairs, k * ROWS + r), columns(q, block * PAIRS + k, n_chunks * PAIRS))
                    if wide:
                        high, low = add_i32(high, high16(s)), add_i32(low, low16(s))
                acc = fma(join16(high, low) if wide else to_f32(s), rows(d, g * ROWS + r), acc)
                if has_min:
                    s = zeros(pairs)
                    for i in range(g * group_subs, (g + 1) * group_subs):
                        s = dot(s, rows(imin, i * ROWS + r), columns(sums, c * n_sub + i, n_sub))
                    acc = fnma(rows(m, g * ROWS + r), to_f32(s), acc)
            t = c * ROWS + r
            store(total, t, ROWS, fma(acc, columns(dx, block, n_chunks), load(total, t, ROWS)))
    return multiply


def pair_product(fmt, isa):
    """(operands, row_tile, first, last): rows of the tile times the columns first..last - 1, by pairs."""
    form, has_min = form_of(fmt), fmt.has_min
    unpack, split_sums = quantized_unpacker(fmt, isa), sum_splitter(form) if has_min else None
    multiply_one, multiply = quantized_multiplier(form, isa, 1), quantized_multiplier(form, isa, BLOCK)
    n_sub, n_group, tile_words = CHUNK // fmt.sub, CHUNK // fmt.group, tile.tile_bytes(fmt) // 4
    pair_words, sub_words, group_words = stack(uint32, PAIRS * ROWS), stack(uint32, n_sub * ROWS), stack(float32, n_group * ROWS)
    sum_words, total_words = stack(uint32, N_COLUMNS * n_sub), stack(float32, N_COLUMNS * ROWS)

    @device
    def product(operands, row_tile, first, last):
        words, q, d, sums, out, _, n_chunks, m = operands
        weights, split, total = (pair_words(), sub_words(), sub_words(), group_words(), group_words()), sum_words(), total_words()
        x = q, d, split, first, n_chunks
        for i in range((last - first) * ROWS):
            total[i] = f32(0)
        whole = (last - first) // BLOCK * BLOCK
        for chunk in range(n_chunks):
            unpack(words, (row_tile * n_chunks + chunk) * tile_words, weights)
            if has_min:
                for c in range(last - first):
                    split_sums(sums, (first + c) * n_chunks + chunk, c, split)
            for c in range(0, whole, BLOCK):
                multiply(weights, x, c, chunk, total)
            for c in range(whole, last - first):
                multiply_one(weights, x, c, chunk, total)
        write(total, row_tile, first, last, out, m)
    return product


# Quantized weights times fewer columns than a block, where the CPU has a dot product of bytes: levels stay bytes, activations are
# two, q = 128 high + low. That is a third of the work of pairs for one column, and more than pairs for four.

@lru_cache(None)
def limb_splitter(sub):
    """(q, sums, block, c, high, low, offsets): the limbs of the block of 256 activations, low >= 0, into column c, int8
    [columns][256], and minus its sums over sub-blocks, int32 [columns][sub-blocks]."""
    n_sub, n_sums = CHUNK // sub, sub // SUM_COLUMNS

    @device
    def split_limbs(q, sums, block, c, high, low, offsets):
        for i in range(CHUNK):
            level = q[block * CHUNK + i]
            high[c * CHUNK + i], low[c * CHUNK + i] = level >> 7, level & 127
        for i in range(n_sub):
            offsets[c * n_sub + i] = u32(-sum_of(sums, block * n_sub + i, n_sums))
    return split_limbs


@lru_cache(None)
def byte_multiplier(form, sub, scaled, isa):
    """(weights, x, c, chunk, total): as that of pairs, of one column. x = (high, low, offsets, d, split sums, first, n_chunks).
    With w = level + 128, sum level * q = 128 (sum w * high - sum q) + sum w * low: each sum begins with its offset."""
    n_rows, zeros, load, rows, columns, dot, dot4, _ = instructions(isa, 1)
    n_group, group_subs, n_sub, n_words, sub_words = CHUNK // form.group, form.group // sub, CHUNK // sub, CHUNK // 4, sub // 4
    wide, has_min = form.span < form.group, form.sub > 0

    @device
    def multiply(weights, x, c, chunk, total):
        levels, isc, imin, d, m = weights
        high, low, offsets, dx, sums, first, n_chunks = x
        for r in range(0, ROWS, n_rows):
            acc = zeros(d)
            for g in range(n_group):
                s_high = s_low = s_min = zeros(levels)
                for i in range(g * group_subs, (g + 1) * group_subs):
                    h, l = add_i32(zeros(levels), columns(offsets, c * n_sub + i, 0)), zeros(levels)
                    for k in range(i * sub_words, (i + 1) * sub_words):
                        four = rows(levels, k * ROWS + r)
                        h = dot4(h, four, columns(high, c * n_words + k, 0))
                        l = dot4(l, four, columns(low, c * n_words + k, 0))
                    if scaled:
                        scale = rows(isc, i * ROWS + r)
                        h, l = mul_i32(h, scale), mul_i32(l, scale)
                    s_high, s_low = add_i32(s_high, h), add_i32(s_low, l)
                    if has_min:
                        s_min = dot(s_min, rows(imin, i * ROWS + r), columns(sums, c * n_sub + i, 0))
                s = limbs_to_f32(s_high, s_low) if wide else to_f32(limbs_to_i32(s_high, s_low))
                acc = fma(s, rows(d, g * ROWS + r), acc)
                if has_min:
                    acc = fnma(rows(m, g * ROWS + r), to_f32(s_min), acc)
            t = c * ROWS + r
            store(total, t, ROWS, fma(acc, columns(dx, (first + c) * n_chunks + chunk, 0), load(total, t, ROWS)))
    return multiply


def byte_product(fmt, isa):
    """As `pair_product`, by bytes: of fewer columns than BLOCK."""
    form, has_min = form_of(fmt), fmt.has_min
    assert CHUNK * 255 * 127 * fmt.max_isc < 2**31, fmt.name
    unpack, split_sums = quantized_unpacker(fmt, isa, by_bytes=True), sum_splitter(form) if has_min else None
    split_limbs, multiply = limb_splitter(fmt.sub), byte_multiplier(form, fmt.sub, fmt.max_isc > 1, isa)
    n_sub, n_group, tile_words = CHUNK // fmt.sub, CHUNK // fmt.group, tile.tile_bytes(fmt) // 4
    level_words, sub_words, group_words = (stack(uint32, CHUNK // 4 * ROWS), stack(uint32, n_sub * ROWS),
                                           stack(float32, n_group * ROWS))
    limb_words, sum_words, total_words = (stack(uint32, BLOCK * CHUNK // 4), stack(uint32, BLOCK * n_sub),
                                          stack(float32, BLOCK * ROWS))

    @device
    def product(operands, row_tile, first, last):
        words, q, d, sums, out, _, n_chunks, m = operands
        weights = level_words(), sub_words(), sub_words(), group_words(), group_words()
        high, low, offsets, split, total = limb_words(), limb_words(), sum_words(), sum_words(), total_words()
        x = high, low, offsets, d, split, first, n_chunks
        for i in range((last - first) * ROWS):
            total[i] = f32(0)
        for chunk in range(n_chunks):
            unpack(words, (row_tile * n_chunks + chunk) * tile_words, weights)
            for c in range(last - first):
                block = (first + c) * n_chunks + chunk
                split_limbs(as_int16(q), sums, block, c, as_int8(high), as_int8(low), offsets)
                if has_min:
                    split_sums(sums, block, c, split)
                multiply(weights, x, c, chunk, total)
        write(total, row_tile, first, last, out, m)
    return product


def quantized_unit(fmt, isa):
    """(operands, u): unit u of out."""
    many = pair_product(fmt, isa)
    few = byte_product(fmt, isa) if ISAS[isa].dot4 else many

    def unit(operands, u):
        row_tile, first, last = place(u, operands[5])
        if last - first < BLOCK:
            few(operands, row_tile, first, last)
        else:
            many(operands, row_tile, first, last)
    return unit


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


@lru_cache(None)
def float_multiplier(isa, n_columns):
    """(weights, x, c, chunk, total): total[c + i] = add(total[c + i], acc) for the n_columns columns from c.
    x = (values, first, k): rows of k values, c counts from column `first`; total: float32 [columns][32]."""
    n_rows, zeros, load, rows, columns, *_ = instructions(isa, n_columns)

    @device
    def multiply(weights, x, c, chunk, total):
        values, first, k = x
        start = (first + c) * k + chunk * CHUNK
        for r in range(0, ROWS, n_rows):
            acc = zeros(weights)
            for i in range(min(CHUNK, k - chunk * CHUNK)):
                acc = fma(rows(weights, i * ROWS + r), columns(values, start + i, k), acc)
            t = c * ROWS + r
            store(total, t, ROWS, add(load(total, t, ROWS), acc))
    return multiply


def float_unit(fmt, isa):
    """(operands, u): unit u of out."""
    unpack, multiply_one, multiply = float_unpacker(fmt), float_multiplier(isa, 1), float_multiplier(isa, BLOCK)
    tile_words = tile.tile_bytes(fmt) // 4
    weight_words, total_words = stack(float32, CHUNK * ROWS), stack(float32, N_COLUMNS * ROWS)

    def unit(operands, u):
        words, values, out, n, k, m = operands
        n_chunks = (k + CHUNK - 1) // CHUNK
        row_tile, first, last = place(u, n)
        weights, total = weight_words(), total_words()
        x = values, first, k
        for i in range((last - first) * ROWS):
            total[i] = f32(0)
        whole = (last - first) // BLOCK * BLOCK
        for chunk in range(n_chunks):
            unpack(words, (row_tile * n_chunks + chunk) * tile_words, weights)
            for c in range(0, whole, BLOCK):
                multiply(weights, x, c, chunk, total)
            for c in range(whole, last - first):
                multiply_one(weights, x, c, chunk, total)
        write(total, row_tile, first, last, out, m)
    return unit


# Launch. Products that threads share as one job are rows of a table: one past the last unit, counted through all rows; the
# address of a unit's code; what units take (OPERANDS), as integers.

COLUMNS = 2 + len(OPERANDS[QUANTIZED].types)


@lru_cache(None)
def operands_in(is_quantized):
    """Device function (words i64, first): what units take, from word `first` on."""
    result = OPERANDS[QUANTIZED if is_quantized else FLOAT]

    @intrinsic
    def operands(typingctx, words, first):
        def codegen(context, builder, signature, args):
            start = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
            loaded = [builder.load(builder.gep(start, [ir.IntType(64)(i)])) for i in range(len(result.types))]
            return context.make_tuple(builder, result, [
                builder.inttoptr(word, context.get_value_type(t)) if isinstance(t, types.CPointer) else word
                for word, t in zip(loaded, result.types)])
        return result(words, types.int64), codegen
    return operands


@intrinsic
def call(typingctx, address, operands, u):
    """Calls the function (operands, int64) -> None that was compiled for these types to code at `address`."""
    def codegen(context, builder, signature, args):
        argtypes = signature.args[1:]
        function = builder.inttoptr(args[0], context.call_conv.get_function_type(types.none, argtypes).as_pointer())
        # units raise nothing: no status to pass on
        context.call_conv.call_function(builder, function, types.none, argtypes, args[1:])
        return context.get_dummy_value()
    return types.none(types.int64, operands, types.int64), codegen


@inlined
def parts_of(control, n_units, n_multiplications):
    """How many parts threads share. A part is of neighbouring units: its thread has asked for the next tile when it comes to
    it."""
    return 1 if n_multiplications < PARALLEL else min(n_units, max(PARTS * control[THREADS], n_multiplications // GRAIN))


@lru_cache(None)
def runner(is_quantized):
    """(table i64 [products, COLUMNS], n_multiplications): all units of all products, in parallel where that pays. One loop for
    all formats: with its own each format would take twice as long to compile."""
    operands = operands_in(is_quantized)

    @inlined
    def units_of_part(i, args):
        table, n_parts = args
        n_units, row = table[table.shape[0] - 1, 0], 0
        for u in range(i * n_units // n_parts, (i + 1) * n_units // n_parts):
            while u >= table[row, 0]:
                row += 1
            call(table[row, 1], operands(table, row * COLUMNS + 2), u - (table[row - 1, 0] if row else 0))

    each = sharing(units_of_part)

    @jit(key=is_quantized, parallel=True)
    def run(control, table, n_multiplications):
        n_parts = parts_of(control, table[table.shape[0] - 1, 0], n_multiplications)
        each(control, n_parts, (table, n_parts))
    return run


class Products:
    """A step: out = w x of several matrices with the same x, which threads share as one job."""

    def __init__(self, matrices, x, isa: str | None = None):
        """matrices: of each (format, words u32 of its tiles, out f32 [n, m]); x: quantized activations (q, d, sums), or (values
        f32 [n, k],) for float weights. isa: a name in vector.ISAS, by default the best; the bits are the same with each."""
        units = [compiled_unit(name, isa) for name, _, _ in matrices]
        self.table, self.n_multiplications, n_units = np.zeros((len(matrices), COLUMNS), np.int64), 0, 0
        for row, (address, fmt, _), (_, words, out) in zip(self.table, units, matrices):
            operands = operands_of(fmt, words, x, out)
            (n, m), k = out.shape, x[0].shape[1]
            n_chunks = -(-k // CHUNK)
            needed = -(-m // ROWS) * n_chunks * tile.tile_bytes(fmt) // 4
            assert words.size == needed, (f"mul_mat: {fmt.name} tiles of {m} rows x {n_chunks} chunks are {needed} words, "
                                          f"got {words.size}")
            n_parts = parts.py_func(n)
            n_units += -(-m // ROWS) * n_parts
            self.n_multiplications += m * k * (n + UNPACKING * n_parts)
            row[:2 + len(operands)] = n_units, address, *operands
        self.run = runner(units[0][1].is_quantized)
        self.kept = matrices, x, units  # the memory and the code that rows of the table name

    def __call__(self) -> None:
        self.run(self.table, self.n_multiplications)


def operands_of(fmt, words, x, out) -> list[int]:
    """What units of these arrays take, as integers."""
    kinds = QUANTIZED if fmt.is_quantized else FLOAT
    arrays = words, *x, out
    found = [(array.dtype, array.ndim) for array in arrays]
    allowed = [(np.dtype(kind.dtype.name), kind.ndim) for kind in kinds]
    assert found == allowed and all(array.flags.c_contiguous for array in arrays), (
        f"mul_mat: {fmt.name}: arrays {found}, not {allowed}, or not contiguous")
    (n, k), shapes = x[0].shape, [array.shape for array in (*x[1:], out[:, 0])]
    assert shapes == ([(n, k // CHUNK), (n, k // SUM_COLUMNS), (n,)] if fmt.is_quantized else [(n,)]), (
        f"mul_mat: {fmt.name}: x {x[0].shape}, {shapes}")
    return [*(array.ctypes.data for array in arrays), n, k // CHUNK if fmt.is_quantized else k, out.shape[1]]


@lru_cache(None)
def compiled_unit(format_name: str, isa: str | None = None):
    """(address of the code that `call` calls, format, the function whose code it is) of a weight format; isa as of `mul_mat`."""
    fmt, isa = format_of(format_name, "mul_mat"), isa or available_isas()[0]
    if isa not in ISAS:
        raise ValueError(f"mul_mat: unknown instruction set {isa!r}; known: {', '.join(ISAS)}")
    arrays, make = (QUANTIZED, quantized_unit) if fmt.is_quantized else (FLOAT, float_unit)
    unit = jit(key=(fmt.name, isa))(make(fmt, isa))
    unit.compile((OPERANDS[arrays], int64))
    result = unit.overloads[OPERANDS[arrays], int64]
    return result.library.get_pointer_to_function(result.fndesc.llvm_func_name), fmt, unit


def mul_mat_arrays(format_name: str, isa: str | None = None):
    """The product for a weight format: (words, q, d, sums, out), or (words, x, out) for F32, F16 and BF16; as of `Products`."""
    compiled_unit(format_name, isa)

    def product(words, *x_and_out):
        Products([(format_name, words, x_and_out[-1])], x_and_out[:-1], isa)()
    return product


def mul_mat(call):
    """As in kernels/reference."""
    return Products([(call.w.dtype, call.w.data, call.out.data)], call.x.factors)
