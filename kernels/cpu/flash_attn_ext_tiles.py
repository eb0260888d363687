"""Attention of many queries over f16 and q8_0 caches by tiles of AMX: 32 queries are computed together, one to a lane.

Queries are the rows of a run (`flash_attn_ext_runs`): tokens times the query heads of a KV head. Limbs are signed bytes,
q = 128 hi + lo, so that tiles give the definition's sums HH, MID and LL themselves. In scores, keys are the rows of the first
operand, as they lie in the cache, and queries the columns of the second. In weighted values, channels are the rows of the first,
and probabilities, four keys to a word, are the second.

So what lies between the two products is done key by key, and no lane needs another one's values: neither for the maximum, nor for
the sum of 128 exponentials, nor for the integers of probabilities.

Operands of tiles begin at a cache line: rows that lie in two lines are loaded at a quarter of the speed.
"""
from functools import lru_cache

import numpy as np
from numba import float32, int32, uint32

from ...quant.device_functions import device, inlined
from ...quant.words import u32
from ..arith import as_i32, f2i, f32, i32, mul, rint, tanh
from ..reference.flash_attn_ext import BLOCK, MINUS_INFINITY, PIECE
from . import amx, vector
from .flash_attn_ext_runs import finish, seen_by, start_of
from .quantize import scale_of
from .vector import LINE_BYTES, advance, as_uint8, at_line, instructions, pointer, stack, store

LANES = amx.ROWS               # queries of a tile
GROUP = amx.COLUMNS            # keys, and channels of values, of a product of tiles
SUMS = GROUP * LANES           # of one such product, of limbs of one kind
BLOCK_WORDS = BLOCK // 4 * LANES   # limbs of one kind: of a block of queries
PIECE_WORDS = PIECE // 4 * LANES   # and of the probabilities of a piece
NOWHERE = i32(0x7fffffff)      # of a key that is not there

sum_words, weight_words, config_words = stack(uint32, 3 * SUMS), stack(uint32, 2 * PIECE_WORDS), stack(uint32, amx.CONFIG_WORDS)
piece_floats, lane_floats, lane_ints = stack(float32, PIECE * LANES), stack(float32, LANES), stack(int32, LANES)
block_words, block_floats, key_ints = stack(uint32, 2 * BLOCK // 4), stack(float32, BLOCK), stack(int32, PIECE + 1)
below_or_zero, below_or_lowest = vector.below(0.0), vector.below(-np.inf)


@inlined
def from_line(n):
    """Memory for n words of `at_line`, zeros."""
    return np.zeros(n + LINE_BYTES // 4, np.uint32)


@inlined
def quantize_bytes(x, n, high, low):
    """`quantize_block` of n values, a multiple of BLOCK, to limbs. x: f32; high, low: u8; pointers."""
    bits = i32(0)
    for b in range(0, n, BLOCK):
        for i in range(BLOCK):
            bits = max(bits, i32(as_i32(x[b + i]) & i32(0x7fffffff)))
    d, inv = scale_of(bits)
    for b in range(0, n, BLOCK):
        for i in range(BLOCK):
            level = i32(0) if inv == 0 else i32(f2i(rint(mul(x[b + i], inv))))
            high[b + i], low[b + i] = (level + 64) >> 7, ((level + 64) & 127) - 64
    return d


@inlined
def prepare_queries(q, first, head_kv, group, n_rows, scale, queries):
    """The queries of a run. queries: limbs of four channels each, low ones, then high ones, u32 [n_tiles, n_blocks, 2, 16, 32];
    d_q * scale, f32 [n_tiles, n_blocks, 32]."""
    limbs, scales = queries
    n_blocks, dim = scales.shape[1], q.shape[2]
    words, row = block_words(), block_floats()
    low, high, to = as_uint8(words), advance(as_uint8(words), BLOCK), at_line(limbs)
    for r in range(n_rows):
        x, tile, lane = q[first + r // group, head_kv * group + r % group], r // LANES, r % LANES
        for b in range(n_blocks):
            for c in range(BLOCK):
                row[c] = x[b * BLOCK + c] if b * BLOCK + c < dim else f32(0)
            scales[tile, b, lane] = mul(quantize_bytes(row, BLOCK, high, low), scale)
            for i in range(2 * BLOCK // 4):
                to[((tile * n_blocks + b) * (2 * BLOCK // 4) + i) * LANES + lane] = words[i]


@inlined
def keys_there(here, start, n_keys, there, n_before):
    """there: i32 [128], the keys of a piece, NOWHERE in the place of those that are not in the cache; n_before: i32 [129], how
    many of the first 0, 1, ... are. Returns how many are in all."""
    n_before[0] = i32(0)
    for j in range(PIECE):
        is_there = j < n_keys and here[start + j] != 0
        there[j], n_before[j + 1] = i32(j) if is_there else NOWHERE, n_before[j] + i32(is_there)
    return n_before[PIECE]


@inlined
def seen_keys(ends, start, n_keys, window, n_before, low, count, seen):
    """For each lane, whose query sees positions below `ends`: it sees `count` keys of the piece from key `low` on, if they are
    there; seen: whether one is. Returns one past the last key that some lane sees, 0 where no lane sees a key."""
    last, any_seen = np.int64(0), False
    for r in range(LANES):
        high = max(0, min(n_keys, ends[r] - start))
        lowest = max(0, min(high, ends[r] - window - start))
        low[r], count[r], seen[r] = lowest, high - lowest, n_before[high] > n_before[lowest]
        any_seen |= seen[r] != 0
        last = max(last, high)
    return last if any_seen else 0


@inlined
def factors(amax, inv, d):
    """`scale_of` each lane."""
    for r in range(LANES):
        d[r], inv[r] = scale_of(amax[r])


@device
def keep_part(m, l, seen, o, n_rows, row, all_m, all_l, all_o):
    """(m, l, o) of a piece, of the first n_rows lanes, which are rows from `row` on. o: f32 [channels][32], a pointer."""
    for r in range(n_rows):
        if seen[r]:
            all_m[row + r], all_l[row + r] = m[r], l[r]
            for c in range(all_o.shape[1]):
                all_o[row + r, c] = o[c * LANES + r]


@device
def rows_of(all_O, n_rows, n_channels, dv):
    """f32 [n_rows, dv], of all_O: f32 [n_tiles][n_channels][32] from a line on."""
    results = np.empty((n_rows, dv), np.float32)
    for r in range(n_rows):
        O = advance(at_line(all_O), r // LANES * LANES * n_channels + r % LANES)
        for c in range(dv):
            results[r, c] = O[c * LANES]
    return results


@lru_cache(None)
def passes(isa):
    """What is done to 32 queries, a lane each, between products of tiles, by an instruction set. s, p, x: f32 [keys][32]; keys:
    i32, positions in the piece, NOWHERE for those that are not there. A lane sees `count` keys from key `low` on."""
    n_lanes, zeros, _, rows, columns, *_ = instructions(isa, 1)
    load_two, load_eight = instructions(isa, 2).load, instructions(isa, 8).load

    @inlined
    def sum_at(sums, i):
        return vector.fixed_point(rows(sums, i), rows(sums, SUMS + i), rows(sums, 2 * SUMS + i))

    @inlined
    def score(sums, d_q, d_k, is_first, s):
        """A block's part of the scores of 16 keys."""
        for r in range(0, LANES, n_lanes):
            scale = rows(d_q, r)
            for i in range(GROUP):
                at = i * LANES + r
                x = vector.mul(sum_at(sums, at), scale)
                store(s, at, 0, vector.fma(x, columns(d_k, i, 0), zeros(s) if is_first else rows(s, at)))

    @inlined
    def maxima(s, n, keys, low, count, m):
        for r in range(LANES):
            m[r] = MINUS_INFINITY
        for r in range(0, LANES, n_lanes):
            top, first, n_seen = rows(m, r), rows(low, r), rows(count, r)
            for j in range(n):
                i = vector.sub_i32(columns(keys, j, 0), first)
                top = vector.larger(top, below_or_lowest(i, n_seen, rows(s, j * LANES + r)))
            store(m, r, 0, top)

    @inlined
    def exponentials(s, n, keys, low, count, m, d_v, x, amax):
        """s becomes p, x = p * d_v; amax: bits of the largest x."""
        for r in range(0, LANES, n_lanes):
            bits, top, first, n_seen = zeros(amax), rows(m, r), rows(low, r), rows(count, r)
            for j in range(n):
                i, at = vector.sub_i32(columns(keys, j, 0), first), j * LANES + r
                p = vector.exp(vector.sub(rows(s, at), top))
                y = below_or_zero(i, n_seen, vector.mul(p, columns(d_v, j, 0)))
                store(s, at, 0, below_or_zero(i, n_seen, p))
                store(x, at, 0, y)
                bits = vector.larger_bits(bits, y)
            store(amax, r, 0, bits)

    @inlined
    def sum128(p, l):
        """p is overwritten: three steps of a sum at a time, of values 16 keys apart, then two, then one."""
        for r in range(0, LANES, n_lanes):
            for j in range(0, 16 * LANES, LANES):
                store(p, j + r, 0, vector.fold(load_eight(p, j + r, 16 * LANES)))
            for j in range(0, 2 * LANES, LANES):
                store(p, j + r, 0, vector.fold(load_eight(p, j + r, 2 * LANES)))
            store(l, r, 0, vector.fold(load_two(p, r, LANES)))

    @inlined
    def weights(x, n, inv, words):
        """Limbs of x, four keys to a word."""
        for r in range(0, LANES, n_lanes):
            scale = rows(inv, r)
            for j in range(0, n, 4):
                at, to = j * LANES + r, j // 4 * LANES + r
                even = vector.pair_limbs(vector.levels(rows(x, at), scale), vector.levels(rows(x, at + 2 * LANES), scale))
                odd = vector.pair_limbs(vector.levels(rows(x, at + LANES), scale), vector.levels(rows(x, at + 3 * LANES), scale))
                store(words, to, 0, vector.low_limbs(even, odd))
                store(words, PIECE_WORDS + to, 0, vector.high_limbs(even, odd))

    @inlined
    def combine_lanes(m, l, seen, M, L, a, b):
        """(M, L) of the pieces so far and of this one, and what the outputs of both are multiplied by."""
        for r in range(0, LANES, n_lanes):
            which, old, new, total = rows(seen, r), rows(M, r), rows(m, r), rows(L, r)
            top = vector.larger(old, new)
            x, y = vector.exp(vector.sub(old, top)), vector.exp(vector.sub(new, top))
            store(a, r, 0, x)
            store(b, r, 0, y)
            store(M, r, 0, vector.chosen(which, top, old))
            store(L, r, 0, vector.chosen(which, vector.fma(total, x, vector.mul(rows(l, r), y)), total))

    @inlined
    def outputs(sums, d_p, o):
        """o of 16 channels, f32 [16][32]."""
        for r in range(0, LANES, n_lanes):
            scale = rows(d_p, r)
            for i in range(r, r + GROUP * LANES, LANES):
                store(o, i, 0, vector.mul(sum_at(sums, i), scale))

    @inlined
    def accumulate(sums, d_p, seen, a, b, O):
        """O = fma(O, a, mul(o, b)) of 16 channels, in lanes that have seen something."""
        for r in range(0, LANES, n_lanes):
            scale, x, y, which = rows(d_p, r), rows(a, r), rows(b, r), rows(seen, r)
            for i in range(r, r + GROUP * LANES, LANES):
                o, old = vector.mul(sum_at(sums, i), scale), rows(O, i)
                store(O, i, 0, vector.chosen(which, vector.fma(old, x, vector.mul(o, y)), old))
    return score, maxima, exponentials, sum128, weights, combine_lanes, outputs, accumulate


def loaders(cached_k, cached_v):
    """The keys of a piece, and its values, from the cache to limbs."""
    @inlined
    def load_keys(k, cell, n_keys, head_kv, dim, keys):
        """keys: limbs u8 [n_blocks, 128, 2, 64], high ones, then low ones; d_k f32 [n_blocks, 128]; a key, f32
        [n_blocks * 64]."""
        limbs, d, key = keys
        values, n_blocks = pointer(key), d.shape[0]
        for j in range(n_keys):
            cached_k(k, cell + j, head_kv * dim, key[:dim])
            for b in range(n_blocks):
                to = advance(as_uint8(at_line(limbs)), (b * PIECE + j) * 2 * BLOCK)
                d[b, j] = quantize_bytes(advance(values, b * BLOCK), BLOCK, to, advance(to, BLOCK))

    @inlined
    def load_values(v, cell, n_keys, head_kv, dv, values):
        """values: limbs of four keys each, high ones, then low ones, u32 [n_channels, 2, 32]; d_v f32 [128]; a key's values, f32
        [n_blocks * 64]; limbs of four keys, u8 [2, 4, n_blocks * 64]."""
        limbs, d, value, four = values
        n, part = value.shape[0], as_uint8(pointer(four))
        for j in range(0, n_keys, 4):
            for i in range(min(4, n_keys - j)):
                cached_v(v, cell + j + i, head_kv * dv, value[:dv])
                d[j + i] = quantize_bytes(pointer(value), n, advance(part, i * n), advance(part, (4 + i) * n))
            for kind in range(2):
                x, to = advance(part, kind * 4 * n), advance(at_line(limbs), kind * (PIECE // 4) + j // 4)
                for c in range(dv):
                    to[c * (2 * PIECE // 4)] = (u32(x[c]) | u32(x[n + c]) << u32(8) | u32(x[2 * n + c]) << u32(16)
                                                | u32(x[3 * n + c]) << u32(24))
    return load_keys, load_values


def products(isa, tiles):
    """Both products, and what a thread does before and behind them."""
    begin, score_tile, end, _ = tiles(2, BLOCK, 1, BLOCK_WORDS, "s")
    _, value_tile, *_ = tiles(2, amx.N_BYTES, PIECE // amx.N_BYTES, PIECE_WORDS, "s")
    score, *_, outputs, accumulate = passes(isa)

    @inlined
    def scores(keys, queries, tile, n, s):
        """s of the first n keys, a multiple of 16."""
        d_k, d_q, sums = pointer(keys[1]), pointer(queries[1]), sum_words()
        limbs, words, n_blocks = as_uint8(at_line(keys[0])), at_line(queries[0]), keys[1].shape[0]
        for b in range(n_blocks):
            block = tile * n_blocks + b
            for j in range(0, n, GROUP):
                at = (b * PIECE + j) * 2 * BLOCK
                score_tile(limbs, at, at + BLOCK, 2 * BLOCK, words, block * 2 * BLOCK_WORDS, sums)
                score(sums, advance(d_q, block * LANES), advance(d_k, b * PIECE + j), b == 0, advance(s, j * LANES))

    @inlined
    def weigh(limbs, words, d_p, is_sum, seen, a, b, n_channels, O):
        """Values with the weights `words`: what they add up to with those of the pieces before, or they alone."""
        sums = sum_words()
        for c in range(0, n_channels, GROUP):
            at, o = c * 2 * PIECE, advance(O, c * LANES)
            value_tile(limbs, at, at + PIECE, 2 * PIECE, words, 0, sums)
            if is_sum:
                accumulate(sums, d_p, seen, a, b, o)
            else:
                outputs(sums, d_p, o)
    return begin, scores, weigh, end


def attention_by_tiles(cached_k, cached_v, isa, tiles):
    """As `attend` in flash_attn_ext."""
    load_keys, load_values = loaders(cached_k, cached_v)
    begin, scores, weigh, end = products(isa, tiles)
    _, maxima, exponentials, sum128, weights, combine_lanes, *_ = passes(isa)

    @device
    def attend(first, last, head_kv, span, n_spans, parts, q, k, v, n_head_kv, seq, pos, present, scale, out, window, sinks,
               softcap):
        dim, dv, ring, group = q.shape[2], out.shape[2], k.shape[0] // present.shape[0], q.shape[1] // n_head_kv
        n_rows, here = (last - first) * group, present[seq[first]]
        n_tiles, n_channels = (n_rows + LANES - 1) // LANES, (dv + GROUP - 1) // GROUP * GROUP
        n_blocks, n_value_blocks = (dim + BLOCK - 1) // BLOCK, (dv + BLOCK - 1) // BLOCK
        queries = (from_line(n_tiles * n_blocks * 2 * BLOCK_WORDS), np.zeros((n_tiles, n_blocks, LANES), np.float32))
        prepare_queries(q, first, head_kv, group, n_rows, scale, queries)
        keys = (from_line(n_blocks * PIECE * 2 * BLOCK // 4), np.empty((n_blocks, PIECE), np.float32),
                np.zeros(n_blocks * BLOCK, np.float32))
        values = (from_line(n_channels * 2 * PIECE // 4), np.empty(PIECE, np.float32),
                  np.zeros(n_value_blocks * BLOCK, np.float32), np.empty((2, 4, n_value_blocks * BLOCK), np.uint8))
        ends = np.zeros(n_tiles * LANES, np.int64)
        for r in range(n_rows):
            ends[r] = pos[first + r // group] + 1
        all_M, all_L, _ = start_of(n_tiles * LANES, 0)
        all_O = np.zeros(n_tiles * LANES * n_channels + LINE_BYTES // 4, np.float32)
        part_m, part_l, part_o = parts
        s, x, words = piece_floats(), piece_floats(), weight_words()
        there, n_before, low, count, seen, amax = key_ints(), key_ints(), lane_ints(), lane_ints(), lane_ints(), lane_ints()
        m, l, inv, d_p, a, b = lane_floats(), lane_floats(), lane_floats(), lane_floats(), lane_floats(), lane_floats()
        begin(config_words())
        begin_pos, end_pos = seen_by(first, last, pos, window)
        n_pieces = (end_pos - begin_pos + PIECE - 1) // PIECE
        for piece in range(span * n_pieces // n_spans, (span + 1) * n_pieces // n_spans):
            start = begin_pos + piece * PIECE
            n_keys = min(PIECE, end_pos - start)
            if n_spans > 1:
                part_l[piece] = 0
            if keys_there(here, start, n_keys, there, n_before) == 0:
                continue
            cell = seq[first] * ring + start % ring
            load_keys(k, cell, n_keys, head_kv, dim, keys)
            load_values(v, cell, n_keys, head_kv, dv, values)
            for tile in range(n_tiles):
                row = tile * LANES
                n_seen = seen_keys(ends[row:row + LANES], start, n_keys, window, n_before, low, count, seen)
                if n_seen == 0:
                    continue
                n = (n_seen + GROUP - 1) // GROUP * GROUP
                scores(keys, queries, tile, n, s)
                if softcap != 0:
                    for i in range(n * LANES):
                        s[i] = mul(softcap, tanh(s[i]))
                maxima(s, n, there, low, count, m)
                exponentials(s, n, there, low, count, m, pointer(values[1]), x, amax)
                for i in range(n * LANES, PIECE * LANES):
                    s[i] = f32(0)
                sum128(s, l)
                factors(amax, inv, d_p)
                for i in range(n // 4 * LANES, PIECE_WORDS):
                    words[i] = words[PIECE_WORDS + i] = u32(0)
                weights(x, n, inv, words)
                O = advance(at_line(all_O), row * n_channels)
                if n_spans == 1:
                    combine_lanes(m, l, seen, advance(pointer(all_M), row), advance(pointer(all_L), row), a, b)
                weigh(as_uint8(at_line(values[0])), words, d_p, n_spans == 1, seen, a, b, n_channels, O)
                if n_spans > 1:
                    keep_part(m, l, seen, O, min(LANES, n_rows - row), row, part_m[piece], part_l[piece], part_o[piece])
        end()
        if n_spans == 1:
            results = rows_of(all_O, n_rows, n_channels, dv)
            finish(all_M[:n_rows], all_L[:n_rows], results, first, head_kv, group, sinks, out)
    return attend
