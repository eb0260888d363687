"""Products of quantized weights: a tile of 32 rows times columns (rows of activations), docs/numerics.md, section 3.

Per chunk of 256 columns of the weights the tile is unpacked once and multiplied with all columns of the unit, in one of two
ways: pairs of int16, levels times integer scales, so that one instruction multiplies and adds two columns of 16 rows; and tiles
of AMX, for many columns. For fewer columns than a block there is `few`.
"""
from functools import lru_cache
from typing import NamedTuple

from numba import float32, uint32

from ...quant import tile
from ...quant.activation import LIMIT, SUM_COLUMNS
from ...quant.device_functions import device, inlined
from ...quant.formats import CHUNK
from ...quant.words import f32, i32, u32
from ..compile import jit
from ..threads import sharing
from . import amx
from .parallel import PART
from .unpack import LIMBS, PAIRS, ROWS, n_limbs, quantized_unpacker
from .vector import (add, add_i32, advance, as_int16, as_uint8, as_uint32, fma, fnma, halves_to_f32, high16, instructions, join16,
                     low16, pointer, stack, store, thirds_to_f32, to_f32, wide_thirds_to_f32)

CHUNK_PAIRS = CHUNK // 2
BLOCK = 4        # columns that are multiplied at a time
COLUMN_BLOCK = 32  # columns: the last chunk has so many times that, the others 256
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


@device
def split_sum(s):
    """As a pair of int16, (s mod 128, floor(s / 128))."""
    return u32(s & i32(127)) | u32(s >> i32(7)) << u32(16)


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
        pairs, _, imin, d, m = weights
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
        weights, split, total = (pair_words(), sub_words(), sub_words(), group_words(), group_words()), sum_words(), total_words()
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


# Limbs of activations, q = 256 high + low, both signed bytes, which are split once a product: for few columns, and for many

SUMS_16, SUMS_32 = 2 * CHUNK // 4, 2 * CHUNK // 4 + CHUNK // 16  # words of a row at which its sums begin
LIMB_ROW = 2 * CHUNK + 128  # bytes from row to row
LIMB_WORDS = LIMB_ROW // 4


def limbs_shape(n: int, n_chunks: int) -> tuple[int, int, int]:
    """Of the limbs of n rows of activations, u8 [chunks][rows][LIMB_ROW]: the high ones of 256 columns, the low ones, sums over
    16, then over 32 columns as of `split_sum`. Tiles read rows behind the last one."""
    return n_chunks, n + (amx.COLUMNS - 1 if n >= TILE_COLUMNS else 0), LIMB_ROW


@inlined
def split_rows(i, args):
    q, sums, limbs, chunk_bytes, n_parts, n, n_chunks = args
    for row in range(i * n // n_parts, (i + 1) * n // n_parts):
        for chunk in range(n_chunks):
            block, at = row * n_chunks + chunk, chunk * chunk_bytes + row * LIMB_ROW
            levels, high, low = advance(as_int16(q), block * CHUNK), advance(limbs, at), advance(limbs, at + CHUNK)
            for c in range(CHUNK):
                high[c] = (levels[c] + 128) >> 8
            for c in range(CHUNK):
                low[c] = levels[c] & 255
            words, of_block = advance(as_uint32(limbs), at // 4), advance(sums, block * (CHUNK // SUM_COLUMNS))
            for s in range(CHUNK // 16):
                words[SUMS_16 + s] = split_sum(i32(of_block[s]))
            for s in range(CHUNK // 32):
                words[SUMS_32 + s] = split_sum(i32(i32(of_block[2 * s]) + i32(of_block[2 * s + 1])))


_split = sharing(split_rows)


@inlined
def split_activations(control, q, sums, limbs, chunk_bytes, n, n_chunks):
    """Pointers to the levels and sums of n rows of activations, and to their limbs, of chunk_bytes a chunk."""
    n_parts = max(1, min(n, n * n_chunks * CHUNK // PART))
    _split(control, n_parts, (q, sums, limbs, chunk_bytes, n_parts, n, n_chunks))


@jit(parallel=True)
def split_arrays(control, q, sums, limbs):
    """q: i16 [n, k]; sums: i32 [n, k / 16]; limbs: of `limbs_shape`."""
    n_chunks, n_rows, row_bytes = limbs.shape
    split_activations(control, pointer(q), pointer(sums), as_uint8(pointer(limbs)), n_rows * row_bytes, q.shape[0], n_chunks)


# Quantized weights times many columns, where the CPU has tiles (`amx`): weights of one limb or two, activations of two

TILE_COLUMNS = 12        # columns from which on this is faster than pairs
TILE_GROUP = 32          # columns of a group at least: of fewer, tiles would be half empty


def has_tiles(fmt) -> bool:
    return fmt.is_quantized and fmt.group >= TILE_GROUP


@lru_cache(None)
def tile_finisher(form, limbs, isa, n_columns):
    """(weights, x, c, chunk, g, n_groups, sums, i, accs, total): what follows the sums of group g, of the columns i.. of 16, c..
    of the unit. x = (d of the activations, words of limbs, words of a chunk of them, first, n_chunks); accs: float32 [16][32],
    between groups."""
    n_rows, zeros, load, rows, columns, dot, *_ = instructions(isa, n_columns)
    n_group, wide, has_min = CHUNK // form.group, form.span < form.group, form.sub > 0
    group_subs, of_sub = form.group // form.sub if has_min else 0, SUMS_16 if form.sub == 16 else SUMS_32
    size = amx.COLUMNS * ROWS

    @inlined
    def sum_at(sums, t):
        if limbs == 1:
            return halves_to_f32(load(sums, t, ROWS), load(sums, size + t, ROWS))
        high, middle, low = load(sums, t, ROWS), load(sums, size + t, ROWS), load(sums, 2 * size + t, ROWS)
        return wide_thirds_to_f32(high, middle, low) if wide else thirds_to_f32(high, middle, low)

    @inlined
    def finish(weights, x, c, chunk, g, n_groups, sums, i, accs, total):
        _, _, imin, d, m = weights
        dx, limbs, chunk_words, first, n_chunks = x
        at = chunk * chunk_words + (first + c) * LIMB_WORDS + of_sub
        for r in range(0, ROWS, n_rows):
            t = i * ROWS + r
            acc = fma(sum_at(sums, t), rows(d, g * ROWS + r), load(accs, t, ROWS) if g > 0 else zeros(d))
            if has_min:
                s = zeros(imin)
                for j in range(g * group_subs, (g + 1) * group_subs):
                    s = dot(s, rows(imin, j * ROWS + r), columns(limbs, at + j, LIMB_WORDS))
                acc = fnma(rows(m, g * ROWS + r), to_f32(s), acc)
            if g < n_groups - 1:
                store(accs, t, ROWS, acc)
            else:
                if n_groups < n_group:
                    acc = add(acc, zeros(d))
                t = c * ROWS + r
                store(total, t, ROWS, fma(acc, columns(dx, (first + c) * n_chunks + chunk, n_chunks), load(total, t, ROWS)))
    return finish


def tile_product(fmt, isa, tiles):
    """As `pair_product`, by tiles. Sums of the next 16 columns, or of the next group, are on their way while those before are
    finished."""
    form, limbs, group = form_of(fmt), n_limbs(fmt), fmt.group
    assert group * 255 * 128 + 255 * 256 < 2**24, fmt.name  # of `wide_thirds_to_f32`
    unpack = quantized_unpacker(fmt, isa, LIMBS)
    finish_one, finish = tile_finisher(form, limbs, isa, 1), tile_finisher(form, limbs, isa, BLOCK)
    n_sub, n_group, tile_words, n_bytes = CHUNK // fmt.sub, CHUNK // group, tile.tile_bytes(fmt) // 4, min(group, amx.N_BYTES)
    begin, multiply, end = tiles(limbs, n_bytes, group // n_bytes)
    level_words, sub_words, group_words = (stack(uint32, limbs * CHUNK // 4 * ROWS), stack(uint32, n_sub * ROWS),
                                           stack(float32, n_group * ROWS))
    total_words, acc_words = stack(float32, N_COLUMNS * ROWS), stack(float32, amx.COLUMNS * ROWS)
    n_words = (limbs + 1) * amx.COLUMNS * ROWS
    product_words, config_words, count = stack(uint32, 2 * n_words), stack(uint32, amx.CONFIG_WORDS), group_counter(group)

    @inlined
    def finish_step(weights, x, step, n, chunk, n_groups, sums, accs, total):
        c, g = step // n_groups * amx.COLUMNS, step % n_groups
        n_here = min(amx.COLUMNS, n - c)
        whole = n_here // BLOCK * BLOCK
        for i in range(0, whole, BLOCK):
            finish(weights, x, c + i, chunk, g, n_groups, sums, i, accs, total)
        for i in range(whole, n_here):
            finish_one(weights, x, c + i, chunk, g, n_groups, sums, i, accs, total)

    @device
    def product(operands, row_tile, first, last):
        words, _, d, _, x, out, chunk_bytes, n_last, _, n_chunks, m = operands
        weights = level_words(), sub_words(), sub_words(), group_words(), group_words()
        total, accs, products = total_words(), acc_words(), product_words()
        factors, n = (d, as_uint32(x), chunk_bytes // 4, first, n_chunks), last - first
        for i in range(n * ROWS):
            total[i] = f32(0)
        begin(config_words())
        for chunk in range(n_chunks):
            n_blocks = blocks_of(chunk, n_chunks, n_last)
            unpack(words, (row_tile * n_chunks + chunk) * tile_words, n_blocks, weights)
            n_groups = count(n_blocks)
            n_steps = (n + amx.COLUMNS - 1) // amx.COLUMNS * n_groups
            for step in range(n_steps + 1):
                if step < n_steps:
                    g = step % n_groups * group
                    at = chunk * chunk_bytes + (first + step // n_groups * amx.COLUMNS) * LIMB_ROW + g
                    multiply(x, at, at + CHUNK, LIMB_ROW, weights[0], g // 4 * ROWS, advance(products, step % 2 * n_words))
                if step > 0:
                    sums = advance(products, (step - 1) % 2 * n_words)
                    finish_step(weights, factors, step - 1, n, chunk, n_groups, sums, accs, total)
        end()
        write(total, row_tile, first, last, out, m)
    return product
