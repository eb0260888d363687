"""Attention over the KV cache in pieces of 128 positions.

A unit of work is a run of queries of one KV head (`flash_attn_ext_runs`). Piece by piece, the keys and values of the KV head are
read into vectors' order once, and the rows of the run go over them four at a time: scores, softmax of the piece, weighted values,
combination with the pieces before. Runs of many rows over f16 and q8_0 caches go by tiles of AMX where the CPU has them
(`flash_attn_ext_tiles`).

Fixed-point sums are two products of int16 pairs: with q = 128 hi + lo, T = sum of q * q' and HH = sum of hi * hi', both modulo
2^32, the definition's 128 MID + LL is T - 16384 HH; it fits 32 bits, so that the difference modulo 2^32 is all of it.
"""
from functools import lru_cache, partial

import numpy as np

from ...quant.device_functions import device
from ..arith import as_f32, as_i32, exp, f2i, f32, fma, i2f, i32, mul, rint, sub, tanh
from ..reference import flash_attn_ext as reference
from ..reference.flash_attn_ext import BLOCK, PIECE
from . import amx
from .flash_attn_ext_halves import key_loader, value_loader
from .flash_attn_ext_runs import combine, copy, finish, read_ahead, seen_by, shared_by_runs, start_of
from .flash_attn_ext_tiles import attention_by_tiles
from .quantize import quantize_block, scale_of
from .rms_norm import halve128
from .vector import ISAS, advance, as_int16, available_isas, instructions, pointer, store
from .vector import fma as fma_block

TILE = 4        # rows that are computed together: the columns of a block
TILES_FROM, TILES_ROWS = 9, 1024  # rows of a run from which on tiles of AMX are faster; rows of a run of theirs at most
LANES = 32      # a multiple of every instruction set's rows of a block
HI = f32(16384)
LOWEST = i32(-0x7f800001)  # ordered(-infinity)

# For parts of one kernel, which are cached with it.


@lru_cache(None)
def flash_attn_ext_arrays(type_k: str, type_v: str, isa: str | None = None, tiles=None):
    """The kernel of a K and a V cache type; arguments as in kernels/reference. isa: a name in vector.ISAS, by default the best;
    tiles: as of `amx`, of long runs of queries; by default those that there are, none where an instruction set is named."""
    tiles = tiles or (amx.tiles if isa is None and amx.available() else None)
    isa = isa or available_isas()[0]
    prepare_queries, key_buffers, load_keys, score = (_keys_chain if type_k == "f32" else _keys_fixed)(type_k, isa)
    value_buffers, load_values, weigh = (_values_chain if type_v == "f32" else _values_fixed)(type_v, isa)

    @device
    def attend(first, last, head_kv, span, n_spans, parts, q, k, v, n_head_kv, seq, pos, present, scale, out, window, sinks,
               softcap):
        """Tokens first..last-1, all of one sequence, with the query heads of one KV head; of n_spans equal spans of their pieces
        that of number `span`. The only span writes the result; of several, (m, l, o) of each piece go to `parts`."""
        n_head, dim = q.shape[1], q.shape[2]
        dv, ring = out.shape[2], k.shape[0] // present.shape[0]
        group = n_head // n_head_kv
        n_rows = (last - first) * group
        here = present[seq[first]]
        rows = np.zeros(((n_rows + TILE - 1) // TILE * TILE, dim), np.float32)
        for row in range(n_rows):
            copy(q[first + row // group, head_kv * group + row % group], rows[row])
        queries, keys, values = prepare_queries(rows, scale), key_buffers(dim), value_buffers(dv)
        M, L, O = start_of(n_rows, dv)
        all_m, all_l, all_o = parts
        visible = np.zeros((TILE, PIECE), np.int32)
        s, p, o = (np.zeros((TILE, PIECE), np.float32), np.zeros((TILE, PIECE), np.float32),
                   np.zeros((TILE, padded(dv)), np.float32))
        m, l = np.zeros(TILE, np.float32), np.zeros(TILE, np.float32)
        begin, end = seen_by(first, last, pos, window)
        n_pieces = (end - begin + PIECE - 1) // PIECE
        for piece in range(span * n_pieces // n_spans, (span + 1) * n_pieces // n_spans):
            start = begin + piece * PIECE
            n_keys = min(PIECE, end - start)
            if n_spans > 1:
                all_l[piece] = 0
            if mark_visible(here[start:start + n_keys], visible[0]) == 0:
                continue
            cell = seq[first] * ring + start % ring
            load_keys(k, cell, n_keys, head_kv, dim, keys)
            load_values(v, cell, n_keys, head_kv, dv, values)
            for row in range(0, n_rows, TILE):
                n_seen = np.int64(0)  # the keys that some row of the tile sees are among the first n_seen
                for r in range(TILE):
                    bound = max(0, min(n_keys, pos[first + (row + r) // group] + 1 - start)) if row + r < n_rows else 0
                    mark_visible(here[start:start + bound], visible[r])
                    if row + r < n_rows:
                        visible[r, :max(0, min(bound, pos[first + (row + r) // group] + 1 - window - start))] = 0
                    n_seen = max(n_seen, bound)
                if n_seen == 0:
                    continue
                score(queries, row, keys, n_seen, s)
                if softcap != 0:
                    cap(s, softcap)
                n_here = min(TILE, n_rows - row)
                for r in range(n_here):
                    m[r], l[r] = softmax(s[r], visible[r], p[r])
                weigh(p, visible, values, n_seen, o)
                for r in range(n_here):
                    if l[r] != 0:  # the largest of visible keys has p = 1 (or NaN)
                        if n_spans > 1:
                            all_m[piece, row + r], all_l[piece, row + r] = m[r], l[r]
                            copy(o[r, :dv], all_o[piece, row + r])
                        else:
                            M[row + r], L[row + r] = combine(M[row + r], L[row + r], O[row + r], m[r], l[r], o[r])
        if n_spans == 1:
            finish(M, L, O, first, head_kv, group, sinks, out)

    if tiles is None or "f32" in (type_k, type_v):
        return shared_by_runs(attend, (type_k, type_v, isa))
    attend_many = attention_by_tiles(read_ahead(type_k), read_ahead(type_v), isa, tiles)

    @device
    def attend_any(first, last, head_kv, span, n_spans, parts, q, k, v, n_head_kv, *rest):
        if (last - first) * q.shape[1] < TILES_FROM * n_head_kv:
            attend(first, last, head_kv, span, n_spans, parts, q, k, v, n_head_kv, *rest)
        else:
            attend_many(first, last, head_kv, span, n_spans, parts, q, k, v, n_head_kv, *rest)
    return shared_by_runs(attend_any, (type_k, type_v, isa, tiles.__name__), TILES_ROWS)


flash_attn_ext = partial(reference.flash_attn_ext, kernel=flash_attn_ext_arrays)


@device
def padded(n):
    return (n + LANES - 1) // LANES * LANES


@device
def mark_visible(here, visible):
    """visible: i32 [128], set to 1 where here: u8 [n], n <= 128, is not 0, and to 0 elsewhere. Returns the number of ones."""
    visible[here.shape[0]:] = 0
    count = i32(0)
    for j in range(here.shape[0]):
        visible[j] = here[j] != 0
        count = i32(count + visible[j])
    return count


@device
def ordered(x):
    """The bits of a float as an integer that orders as the floats do, -0 before +0; its own inverse on bits."""
    return i32(x ^ i32(i32(x >> i32(31)) & i32(0x7fffffff)))


@device
def cap(s, c):
    """s = c tanh(s). s: f32 [4, 128]."""
    for r in range(TILE):
        for j in range(PIECE):
            s[r, j] = mul(c, tanh(s[r, j]))


@device
def softmax(s, visible, p):
    """(m, l) of a piece, and p, its unscaled probabilities. s, p: f32 [128]; visible: i32 [128]."""
    top = LOWEST  # the maximum as an integer: its order does not matter, and vectors have one
    for j in range(PIECE):
        x = s[j]
        key = ordered(as_i32(x)) if x == x else LOWEST
        top = max(top, key if visible[j] else LOWEST)
    m = as_f32(ordered(top))
    partial = np.empty(PIECE, np.float32)
    for j in range(PIECE):
        e = exp(sub(s[j], m))
        p[j] = e if visible[j] else f32(0)
        partial[j] = p[j]
    return m, halve128(partial)


@device
def high_limbs(q, hi):
    """q = 128 hi + lo, lo in -64..63. q, hi: i16 [n]."""
    for i in range(q.shape[0]):
        hi[i] = (q[i] + 64) >> 7


def products(isa):
    """Device function (a, first, stride, b, b_first, n, n_pairs, sums): for levels (part = 0) and high limbs (part = 1) alike

        sums[part, r, j] = sum over i < n_pairs of a[part][first + r * stride + i] . b[part][b_first + i * width + j]

    modulo 2^32, for r < 4 and j < n rounded up to a block; the dot joins two pairs of int16, which a and b count by.
    a: i16 [2, ...]; b: i32 [2, ...]; sums: i32 [2, 4, width]."""
    n_block, zeros, _, rows, columns, dot, *_ = instructions(isa, TILE)

    @device
    def product(a, first, stride, b, b_first, n, n_pairs, sums):
        width, a_part, b_part = sums.shape[2], a.size // 4, b.size // 2
        a, b, c = pointer(a), pointer(b), pointer(sums)
        for part in range(2):
            for j in range(0, n, n_block):
                total = zeros(c)
                for i in range(n_pairs):
                    total = dot(total, rows(b, part * b_part + b_first + i * width + j),
                                columns(a, part * a_part + first + i, stride))
                store(c, part * TILE * width + j, width, total)
    return product


# `quantize_block`, and high limbs, of n_blocks times BLOCK values: loops of a known length need no rest. x: f32, q, hi: i16,
# pointers.

@device
def quantize_blocks(x, n_blocks, q, hi):
    bits = i32(0)
    for b in range(n_blocks):
        for i in range(BLOCK):
            bits = max(bits, i32(as_i32(x[b * BLOCK + i]) & i32(0x7fffffff)))
    d, inv = scale_of(bits)
    for b in range(n_blocks):
        for i in range(BLOCK):
            level = i32(0) if inv == 0 else i32(f2i(rint(mul(x[b * BLOCK + i], inv))))
            q[b * BLOCK + i], hi[b * BLOCK + i] = level, (level + 64) >> 7
    return d


@device
def fixed_point(T, HH):
    """The sum of products of 15-bit integers as a float: T modulo 2^32, and HH of the products of their high limbs."""
    return fma(i2f(HH), HI, i2f(i32(T - (HH << i32(14)))))


# Scores. Queries, rows: f32 [n_rows, D], n_rows whole tiles. Buffers of keys: made once for a unit, filled for each piece.

def _keys_chain(type_k, isa):
    cached = read_ahead(type_k)
    n_block, zeros, _, block_rows, columns, *_ = instructions(isa, TILE)

    @device
    def prepare_queries(rows, scale):
        return rows, scale

    @device
    def buffers(dim):
        return np.zeros(dim, np.float32), np.zeros((dim, PIECE), np.float32)

    @device
    def load(k, cell, n_keys, head_kv, dim, keys):
        key, transposed = keys
        for j in range(n_keys):
            cached(k, cell + j, head_kv * dim, key)
            for c in range(dim):
                transposed[c, j] = key[c]

    @device
    def score(queries, row, keys, n_seen, s):
        """s: f32 [4, 128], of the first n_seen keys."""
        rows, scale = queries
        dim = rows.shape[1]
        a, b, out = pointer(rows), pointer(keys[1]), pointer(s)
        for j in range(0, n_seen, n_block):
            total = zeros(out)
            for c in range(dim):
                total = fma_block(columns(a, row * dim + c, dim), block_rows(b, c * PIECE + j), total)
            store(out, j, PIECE, total)
        for r in range(TILE):
            for j in range(PIECE):
                s[r, j] = mul(s[r, j], scale)
    return prepare_queries, buffers, load, score


def _keys_fixed(type_k, isa):
    cached, product, lanes, turn = read_ahead(type_k), products(isa), ISAS[isa].lanes, instructions(isa, TILE).turn
    is_half, load_halves = type_k == "f16", key_loader(isa)

    @device
    def prepare_queries(rows, scale):
        """Levels and high limbs i16 [2, n_rows, n_blocks * 64], and d_q * scale f32 [n_rows, n_blocks]."""
        n_rows, dim = rows.shape
        n_blocks = (dim + BLOCK - 1) // BLOCK
        q, d = np.zeros((2, n_rows, n_blocks * BLOCK), np.int16), np.zeros((n_rows, n_blocks), np.float32)
        for row in range(n_rows):
            for b in range(n_blocks):
                d[row, b] = mul(quantize_block(rows[row, b * BLOCK:min(dim, (b + 1) * BLOCK)],
                                               q[0, row, b * BLOCK:(b + 1) * BLOCK]), scale)
            high_limbs(q[0, row], q[1, row])
        return q, d

    @device
    def buffers(dim):
        """Pairs of channels, a key to a lane: levels and high limbs i32 [2, n_blocks, 32, 128]; scales f32 [n_blocks, 128];
        one key; and a vector of keys, four pairs of each together."""
        n_blocks = (dim + BLOCK - 1) // BLOCK
        return (np.empty((2, n_blocks, BLOCK // 2, PIECE), np.int32), np.empty((n_blocks, PIECE), np.float32),
                np.zeros(n_blocks * BLOCK, np.float32), np.empty((2, BLOCK), np.int16),
                np.empty((2, n_blocks * BLOCK // 8, lanes, 4), np.int32))

    @device
    def load(k, cell, n_keys, head_kv, dim, keys):
        levels, d, key, q, four = keys
        if is_half and dim % BLOCK == 0:
            load_halves(k, cell, n_keys, head_kv, dim, levels, d)
            return
        n_fours = four.shape[1]
        values, high, low = pointer(key), as_int16(pointer(q[1])), as_int16(pointer(q[0]))
        pairs, fours, to = pointer(q), pointer(four), pointer(levels)
        for first in range(0, n_keys, lanes):
            for lane in range(min(lanes, n_keys - first)):
                cached(k, cell + first + lane, head_kv * dim, key[:dim])
                for b in range(d.shape[0]):
                    d[b, first + lane] = quantize_blocks(advance(values, b * BLOCK), 1, low, high)
                    at = b * (BLOCK // 8) * lanes + lane
                    for part in range(2):
                        for i in range(BLOCK // 8):
                            for word in range(4):
                                fours[((part * n_fours + i) * lanes + at) * 4 + word] = pairs[part * (BLOCK // 2) + 4 * i + word]
            for i in range(2 * n_fours):
                turn(fours, i * lanes * 4, to, 4 * i * PIECE + first, PIECE)

    @device
    def score(queries, row, keys, n_seen, s):
        q, d_q = queries
        levels, d_k = keys[0], keys[1]
        stride = q.shape[2] // 2
        sums = np.empty((2, TILE, PIECE), np.int32)
        s[:] = 0
        for b in range(d_k.shape[0]):
            product(q, row * stride + b * (BLOCK // 2), stride, levels, b * (BLOCK // 2) * PIECE, n_seen, BLOCK // 2, sums)
            for r in range(TILE):
                total, T, HH, d, scaled = s[r], sums[0, r], sums[1, r], d_k[b], d_q[row + r, b]
                for j in range(padded(n_seen)):
                    total[j] = fma(mul(fixed_point(T[j], HH[j]), scaled), d[j], total[j])
    return prepare_queries, buffers, load, score


# Weighted values. Buffers of values as for keys: what no key of a piece is in is read, but goes to no result.

def _values_chain(type_v, isa):
    cached = read_ahead(type_v)

    @device
    def buffers(dv):
        return np.zeros((PIECE, dv), np.float32)

    @device
    def load(v, cell, n_keys, head_kv, dv, values):
        for j in range(n_keys):
            cached(v, cell + j, head_kv * dv, values[j])

    @device
    def weigh(p, visible, values, n_seen, o):
        """p: f32 [4, 128], visible: i32 [4, 128] -> o: f32 [4, Dv or more]."""
        o[:] = 0
        for r in range(TILE):
            total = o[r]
            for j in range(n_seen):
                if visible[r, j]:
                    value, weight = values[j], p[r, j]
                    for c in range(value.shape[0]):
                        total[c] = fma(weight, value[c], total[c])
    return buffers, load, weigh


def _values_fixed(type_v, isa):
    cached, product, n_block = read_ahead(type_v), products(isa), instructions(isa, 1).n_rows
    is_half, load_halves = type_v == "f16", value_loader(isa)

    @device
    def buffers(dv):
        """Pairs of keys, a channel to a lane: levels and high limbs i32 [2, 64, padded Dv]; scales f32 [128]; a key's values; and
        levels and high limbs of two keys."""
        n_blocks = (dv + BLOCK - 1) // BLOCK
        return (np.empty((2, PIECE // 2, padded(dv)), np.int32), np.empty(PIECE, np.float32),
                np.zeros(n_blocks * BLOCK, np.float32), np.empty((2, 2, n_blocks * BLOCK), np.int16))

    @device
    def load(v, cell, n_keys, head_kv, dv, values):
        levels, d, value, q = values
        if is_half and dv % n_block == 0:
            load_halves(v, cell, n_keys, head_kv, dv, levels, d)
            return
        n_blocks = value.shape[0] // BLOCK
        for j in range(0, n_keys, 2):
            q[0, 1], q[1, 1] = 0, 0
            for odd in range(min(2, n_keys - j)):
                cached(v, cell + j + odd, head_kv * dv, value[:dv])
                d[j + odd] = quantize_blocks(pointer(value), n_blocks, as_int16(pointer(q[0, odd])), as_int16(pointer(q[1, odd])))
            for part in range(2):
                first, second, pairs = q[part, 0], q[part, 1], levels[part, j // 2]
                for c in range(pairs.shape[0]):
                    pairs[c] = i32((i32(first[c]) & i32(0xffff)) | i32(second[c]) << i32(16))

    @device
    def weigh(p, visible, values, n_seen, o):
        levels, d_v = values[0], values[1]
        q, d_p = np.empty((2, TILE, PIECE), np.int16), np.empty(TILE, np.float32)
        scaled = np.empty(PIECE, np.float32)
        for r in range(TILE):
            for j in range(PIECE):
                x = mul(p[r, j], d_v[j])
                scaled[j] = x if visible[r, j] else f32(0)
            d_p[r] = quantize_block(scaled, q[0, r])
            high_limbs(q[0, r], q[1, r])
        sums = np.empty((2, TILE, o.shape[1]), np.int32)
        zero = np.int64(0)
        product(q, zero, PIECE // 2, levels, zero, o.shape[1], (n_seen + 1) // 2, sums)
        for r in range(TILE):
            result, T, HH, d = o[r], sums[0, r], sums[1, r], d_p[r]
            for c in range(result.shape[0]):
                result[c] = mul(fixed_point(T[c], HH[c]), d)
    return buffers, load, weigh
