"""Products of quantized weights: a tile of 32 rows times columns (rows of activations), docs/numerics.md, section 3.

Per chunk of 256 columns of the weights the tile is unpacked once and multiplied with all columns of the unit: pairs of int16,
levels times integer scales, so that one instruction multiplies and adds two columns of 16 rows. For fewer columns than a block
there is `few`, for many `tile_products`, where the CPU has what they take.
"""
from functools import lru_cache
from typing import NamedTuple

from numba import float32, uint32

from ...quant import tile
from ...quant.activation import LIMIT, SUM_COLUMNS
from ...quant.device_functions import device, inlined
from ...quant.formats import CHUNK
from ...quant.words import f32, i32
from .limbs import split_sum
from .unpack import COLUMN_BLOCK, PAIRS, ROWS, quantized_unpacker
from .vector import add, add_i32, fma, fnma, high16, instructions, join16, low16, stack, store, to_f32

CHUNK_PAIRS = CHUNK // 2
BLOCK = 4        # columns that are multiplied at a time
N_COLUMNS = 128  # columns of a unit


@inlined
def write(total, row_tile, first, last, out, m):
    """total: float32 [columns][32 rows] -> out: float32 [n, m]; rows beyond m are padding."""
    for c in range(first, last):
        for r in range(row_tile * ROWS, min((row_tile + 1) * ROWS, m)):
            out[c * m + r] = total[(c - first) * ROWS + r % ROWS]


# The last chunk of a row may have fewer columns. Of groups of 32 columns those that are not there are left out; their sums would
# be zeros, all of which together do what one does: acc becomes add(acc, +0).

def group_counter(group):
    """(n_blocks): how many groups of a chunk are multiplied, of n_blocks that it has."""
    n_group = CHUNK // group

    @inlined
    def count(n_blocks):
        return n_blocks if group == COLUMN_BLOCK else n_group
    return count


@inlined
def blocks_of(chunk, n_chunks, n_last):
    return n_last if chunk == n_chunks - 1 else CHUNK // COLUMN_BLOCK


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
            out[c * n_sub + i] = split_sum(sum_of(sums, block * n_sub + i, n_sums))
    return split_sums


@lru_cache(None)
def quantized_multiplier(form, isa, n_columns):
    """(weights, x, c, chunk, n_groups, total): total[c + i] = fma(acc, d of the activations, total[c + i]) for the n_columns
    columns from c. x = (q as pairs, d, split sums, first, n_chunks): c counts from column `first`; total: float32
    [columns][32]."""
    n_rows, zeros, load, rows, columns, dot, *_ = instructions(isa, n_columns)
    n_group, group_pairs, span_pairs = CHUNK // form.group, form.group // 2, form.span // 2
    wide, has_min = form.span < form.group, form.sub > 0
    n_sub, group_subs = (CHUNK // form.sub, form.group // form.sub) if has_min else (0, 0)

    @device
    def multiply(weights, x, c, chunk, n_groups, total):
        pairs, imin, d, m = weights
        q, dx, sums, first, n_chunks = x
        block = (first + c) * n_chunks + chunk
        for r in range(0, ROWS, n_rows):
            acc = zeros(d)
            for g in range(n_groups):
                s = high = low = zeros(pairs)  # S = 65536 high + low where the group is wide
                for p in range(g * group_pairs, (g + 1) * group_pairs, span_pairs):
                    s = zeros(pairs)
                    for k in range(p, p + span_pairs):
                        s = dot(s, rows(pairs, k * ROWS + r), columns(q, block * CHUNK_PAIRS + k, n_chunks * CHUNK_PAIRS))
                    if wide:
                        high, low = add_i32(high, high16(s)), add_i32(low, low16(s))
                acc = fma(join16(high, low) if wide else to_f32(s), rows(d, g * ROWS + r), acc)
                if has_min:
                    s = zeros(pairs)
                    for i in range(g * group_subs, (g + 1) * group_subs):
                        s = dot(s, rows(imin, i * ROWS + r), columns(sums, c * n_sub + i, n_sub))
                    acc = fnma(rows(m, g * ROWS + r), to_f32(s), acc)
            if n_groups < n_group:
                acc = add(acc, zeros(d))
            t = c * ROWS + r
            store(total, t, ROWS, fma(acc, columns(dx, block, n_chunks), load(total, t, ROWS)))
    return multiply


def pair_product(fmt, isa):
    """(operands, row_tile, first, last): rows of the tile times the columns first..last - 1, by pairs."""
    form, has_min = form_of(fmt), fmt.has_min
    unpack, split_sums = quantized_unpacker(fmt, isa, PAIRS), sum_splitter(form) if has_min else None
    multiply_one, multiply = quantized_multiplier(form, isa, 1), quantized_multiplier(form, isa, BLOCK)
    n_sub, n_group, tile_words = CHUNK // fmt.sub, CHUNK // fmt.group, tile.tile_bytes(fmt) // 4
    pair_words, sub_words, group_words = (stack(uint32, CHUNK_PAIRS * ROWS), stack(uint32, n_sub * ROWS),
                                          stack(float32, n_group * ROWS))
    sum_words, total_words, count = stack(uint32, N_COLUMNS * n_sub), stack(float32, N_COLUMNS * ROWS), group_counter(fmt.group)

    @device
    def product(operands, row_tile, first, last):
        words, q, d, sums, _, out, _, n_last, _, n_chunks, m = operands
        weights, split, total = (pair_words(), sub_words(), group_words(), group_words()), sum_words(), total_words()
        x = q, d, split, first, n_chunks
        for i in range((last - first) * ROWS):
            total[i] = f32(0)
        whole = (last - first) // BLOCK * BLOCK
        for chunk in range(n_chunks):
            n_blocks = blocks_of(chunk, n_chunks, n_last)
            unpack(words, (row_tile * n_chunks + chunk) * tile_words, n_blocks, weights)
            if has_min:
                for c in range(last - first):
                    split_sums(sums, (first + c) * n_chunks + chunk, c, split)
            for c in range(0, whole, BLOCK):
                multiply(weights, x, c, chunk, count(n_blocks), total)
            for c in range(whole, last - first):
                multiply_one(weights, x, c, chunk, count(n_blocks), total)
        write(total, row_tile, first, last, out, m)
    return product
