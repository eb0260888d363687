"""Attention of single queries over f16 and q8_0 caches, heads of up to 128 channels: pieces side by side, on int8 tensor cores
(numerics, section 8).

A block of 4 warps is one token and up to 8 query heads of one KV head, which share all that it reads: every n-th piece of 128
keys. What each piece gives, (m, l, o), waits in memory for `flash_attn_ext_combine`. A token has those pieces that its position
and the window reach, which the kernel reads; blocks without one exit at once, so a launch holds no number that grows. Position
and sequence are read before the kernel that writes the cache has ended; all else that a block reads first it asks for at once
when it has. Keys come through shared memory 16 a warp, the next ones while these are multiplied, and the values of a piece while
its keys are; four blocks on a multiprocessor wait at different times.

Keys and channels of values are rows of A, queries and p' are columns of B: head h of four has its high limbs in column 2 h, its
low limbs in 2 h + 1, so that a sum with either is in one lane; of more than four heads, B comes twice. Lane l = 4 g + t

    1. has, twice, of two of its warp's 32 keys the channels 8 t .. and 32 + 8 t .. of each 64, and so gets the scores of head t
       with keys 4 g .. 4 g + 3
    2. exchanges maxima, p for the tree of sums, amaxes, and limbs of p' with the others
    3. has of all keys of the piece the channels 4 g .. of its warp's 32 (of heads up to 64 channels 2 g .. of 16), four keys of
       warp t's at a time: their high limbs are a word of A, their low limbs another, those of p' words of B. So tensor cores add
       up the piece, and the lane gets four outputs of head t, or two

Where a block has all pieces of its heads, it combines them itself, as `flash_attn_ext_combine` does: a warp has the chain of a
head's length, lanes those of their outputs. They are written as floats, or quantized (`quantize`).
"""
from itertools import accumulate
from math import prod
from typing import NamedTuple

from numba import cuda, types

from ...quant.formats import CHUNK
from ..reference.flash_attn_ext import score_scale
from .fixed_point import (CHANNELS, EVEN_BITS, MINUS_INFINITY, Z, ZERO, amax4, fixed_point, larger_float, lifted, masked_limbs,
                          rest, scales)
from .flash_attn_ext_combine import (MOST_HEADS, ONE, PIECE, addresses, capping, first_piece, heads_together, of_few_models,
                                     ring_of, sink, sizes, span_of, statistics_at, stride)
from .flash_attn_ext_few_stages import query_loader
from .flash_attn_ext_rows import FORMS, SECTION, Cache, smaller
from .lane_floats import add_lane, get, max_lane, max_pattern, put, sum8
from .launch import F32, I32, Kernel, N, RESERVED, SCALAR_F32, U32, U8, even_bytes, factory
from .ptx import (afresh, as_f32, as_i32, before_blackwell, copies_commit, copies_wait_but, device, div, exp, f32, fma, i32, i64,
                  ld, ldc, lds, lds2, lds4, mma32, mul, shuffle, st, st2, st4, sts, sts4, sub, syncwarp, u32, wait_for_previous)
from .quantize import N_THREADS, chunk_quantizer

MOST_CHANNELS = 128
WARPS = 4
THREADS = 32 * WARPS
RESIDENT, LEAST_RESIDENT = 4, 3  # blocks of a multiprocessor; with fewer, `flash_attn_ext_few` takes less
TILE = 4       # heads of a tile of B
PLANE = 36     # words from the limbs of p' of a head to its others: what lanes read together lies in different banks
MINUS_ONE = f32(-1)  # in the place of b for a piece without a visible key: its o, +0, becomes -0, which changes no sum
others_wait, all_wait = copies_wait_but(1), copies_wait_but(0)  # but for those asked for last


class Shared(NamedTuple):
    """Words of shared memory; multiples of four."""
    keys: int     # copies
    values: int   # the same; later outputs that are quantized
    maxima: int   # f32 [8 heads][warp]
    amaxes: int   # of p', the same
    kept: int     # f32 [8 heads]: a of a head's chain,
    scales: int   # and b
    inv: int      # f32 [128]: 16256 / amax of a value
    planes: int   # limbs of p', bytes [head][high, low][key]; of two tiles in the place of p, when that is read
    p: int        # f32 [heads][128]
    n_words: int
    # of one tile only before the first p
    q: int        # words [block][half][lane][4], as `query_loader` has them
    q_d: int      # f32 [block][8 heads]: d_q * scale


class Constants(NamedTuple):
    """What a kernel is compiled for, and what follows from it: all stages know it when they are compiled."""
    dim_k: int
    dim_v: int
    heads: int        # of a block
    n_tiles: int      # of four heads
    n_blocks: int     # of 64 channels of Q and K
    n_own: int        # channels of a lane, of V
    where: Shared


def shared_layout(type_k: str, type_v: str, dim_k: int, dim_v: int, heads: int) -> Shared:
    n_tiles, n_blocks = -(-heads // TILE), -(-dim_k // CHANNELS)
    n_queries = n_blocks * (256 + MOST_HEADS)
    sizes = (WARPS * FORMS[type_k].key_area(dim_k), WARPS * FORMS[type_v].value_area(dim_v), WARPS * MOST_HEADS,
             WARPS * MOST_HEADS, MOST_HEADS, MOST_HEADS, PIECE, 2 * TILE * PLANE * (n_tiles == 1),
             max(heads * PIECE, n_queries if n_tiles == 1 else 0))
    *places, n_words = accumulate(sizes, initial=0)
    q = places[-1] if n_tiles == 1 else n_words
    return Shared(*places, n_words + (n_tiles - 1) * n_queries, q, q + n_blocks * 256)


def constants(type_k: str, type_v: str, dim_k: int, dim_v: int, heads: int) -> Constants:
    return Constants(dim_k, dim_v, heads, -(-heads // TILE), -(-dim_k // CHANNELS), 2 * -(-dim_v // CHANNELS),
                     shared_layout(type_k, type_v, dim_k, dim_v, heads))


# The stages. s: the shared memory of the block, int32, laid out as `Shared`. Local arrays lie in registers: raw u32, what a lane
# took (`flash_attn_ext_rows`); x f32 [4 n_tiles], of head 4 j + t and keys 4 g .. 4 g + 3 from 4 j on; sums i32
# [n_tiles][channels of a lane][4]: HH, v_hi p_lo, v_lo p_hi, LL.

@device
def limbs4_masked(x, inv, mask):
    return masked_limbs(lifted(x[0], inv), lifted(x[1], inv), lifted(x[2], inv), lifted(x[3], inv), mask)


def query_reader(const: Constants):
    """(load, words): of one tile a lane's words of B and d_q scale lie in registers, of two there is no room. (lane, s, q, q_d);
    (j, b, lane, s, q, q_d) -> (four words, d_q scale) of tile j and block b."""
    n_blocks, where, kept = const.n_blocks, const.where, const.n_tiles == 1

    @device
    def read(j, b, lane, s):
        head = TILE * j + (lane >> 3)
        at = i32(where.q + b * 256 + 16 * head + 4 * (lane & 3) + ((lane >> 2) & 1))
        return (u32(lds(s, at)), u32(lds(s, at + 2)), u32(lds(s, at + 128)), u32(lds(s, at + 130)),
                get(s, where.q_d + b * MOST_HEADS + TILE * j + (lane & 3)))

    @device
    def load(lane, s, q, q_d):
        for b in range(n_blocks if kept else 0):
            q[4 * b], q[4 * b + 1], q[4 * b + 2], q[4 * b + 3], q_d[b] = read(0, b, lane, s)

    @device
    def words(j, b, lane, s, q, q_d):
        if kept:
            return q[4 * b], q[4 * b + 1], q[4 * b + 2], q[4 * b + 3], q_d[b]
        return read(j, b, afresh(lane), s)
    return load, words


def scorer(const: Constants, octet_words: int, scale_key, limbs):
    """(raw, step, q, q_d, lane, s, mask, x): x of keys 2 step and 2 step + 1 = scores of the lane's heads with the keys in raw,
    blocks of 64 channels added in order from +0: d_k, 16256 / amax = scales(amax of the key's 64 channels); exact sums HH and
    `rest` of limbs of lifted(mul(k, 16256 / amax)) and of the query; x = fma(mul(fixed_point, d_q scale), d_k, x). A key lies
    with four lanes, each of which divides for one block of one key. q, q_d: as of `query_reader`; mask: of `masked_limbs`.
    octet_words, scale_key, limbs: of `flash_attn_ext_rows`."""
    n_blocks, n_tiles, (_, words) = const.n_blocks, const.n_tiles, query_reader(const)
    block_words, row_words = 2 * octet_words, 2 * n_blocks * octet_words

    @device
    def add_block(raw, b, d, inv, step, q, q_d, lane, s, mask, x):
        at, from_lane = b * block_words, (lane & 28) + 2 * b
        inv_0, inv_1 = as_f32(shuffle(inv, from_lane)), as_f32(shuffle(inv, from_lane + 1))
        d_0, d_1 = as_f32(shuffle(d, from_lane)), as_f32(shuffle(d, from_lane + 1))
        k, u = limbs(raw, at, inv_0, mask)
        r, w = limbs(raw, at + row_words, inv_1, mask)
        for j in range(n_tiles):
            y = words(j, b, lane, s, q, q_d)
            c = mma32(k[0], r[0], k[1], r[1], y[0], y[1], Z, Z, Z, Z)
            e = mma32(k[2], r[2], k[3], r[3], y[0], y[1], Z, Z, Z, Z)
            c = mma32(u[0], w[0], u[1], w[1], y[2], y[3], c[0], c[1], c[2], c[3])
            e = mma32(u[2], w[2], u[3], w[3], y[2], y[3], e[0], e[1], e[2], e[3])
            scale, i = y[4], 4 * j + 2 * step
            x[i] = fma(mul(fixed_point(c[0], rest(c[1] + e[0], e[1])), scale), d_0, x[i])
            x[i + 1] = fma(mul(fixed_point(c[2], rest(c[3] + e[2], e[3])), scale), d_1, x[i + 1])

    @device
    def score(raw, step, q, q_d, lane, s, mask, x):
        for j in range(n_tiles):
            x[4 * j + 2 * step] = x[4 * j + 2 * step + 1] = ZERO
        d, inv = scale_key(raw, lane)
        d, inv = as_i32(d), as_i32(inv)
        add_block(raw, 0, d, inv, step, q, q_d, lane, s, mask, x)
        if n_blocks > 1:
            add_block(raw, 1, d, inv, step, q, q_d, lane, s, mask, x)
    return score


@device
def max_rows(m, lane):
    """Over the lanes of a head."""
    return max_lane(max_lane(max_lane(m, lane ^ 4), lane ^ 8), lane ^ 16)


@device
def max_row_patterns(m, lane):
    return max_pattern(max_pattern(max_pattern(m, lane ^ 4), lane ^ 8), lane ^ 16)


def value_scaler(const: Constants, scale_value):
    """(lane, warp, s, at, d_v): d_v, f32 [4], of keys 4 g .. 4 g + 3; 16256 / amax of key 4 g + t to `inv`, which a barrier
    follows. d_v, 16256 / amax = scales(amax of all channels of a value). scale_value, at: of `flash_attn_ext_rows`."""
    where = const.where

    @device
    def scale_values(lane, warp, s, at, d_v):
        lane, warp = afresh(lane), afresh(warp)  # here and below: places are made where they are used, registers are for values
        own, inv = scale_value(s, at, warp, lane)
        put(s, where.inv + SECTION * warp + lane, inv)
        for i in range(4):
            d_v[i] = as_f32(shuffle(as_i32(own), (lane & 28) + i))
    return scale_values


def weigher(const: Constants, take4, value):
    """(lane, warp, s, mask, sums): exact sums, over the piece, of limbs of p' and of the lane's channels of the values, limbs of
    lifted(mul(v, inv))."""
    n_tiles, n_own, where = const.n_tiles, const.n_own, const.where
    n_limbs, n_sums = 4 * n_own, 4 * n_tiles * n_own

    @device
    def channel_limbs(raw, c, inv, mask):
        """(high, low) limbs of channel c of four keys."""
        return masked_limbs(lifted(value(raw, 0, c), inv[0]), lifted(value(raw, 1, c), inv[1]),
                            lifted(value(raw, 2, c), inv[2]), lifted(value(raw, 3, c), inv[3]), mask)

    @device
    def weigh(lane, warp, s, mask, sums):
        lane, warp = afresh(lane), afresh(warp)
        raw, v, t = cuda.local.array(8, u32), cuda.local.array(n_limbs, u32), i32(lane & 3)
        planes = i32(where.planes + (lane >> 2) * PLANE + 8 * t)
        for i in range(n_sums):
            sums[i] = Z
        for pair in range(4):  # eight keys of a section
            for half in range(2):
                take4(s, where.values, warp, pair, half, lane, raw)
                inv = lds4(s, where.inv + SECTION * t + 8 * pair + 4 * half)
                inv = as_f32(inv[0]), as_f32(inv[1]), as_f32(inv[2]), as_f32(inv[3])
                for c in range(n_own):
                    v[4 * c + half], v[4 * c + 2 + half] = channel_limbs(raw, c, inv, mask)
            for j in range(n_tiles):
                p = lds2(s, planes + 2 * TILE * PLANE * j + 2 * pair)
                b, d = u32(p[0]), u32(p[1])
                for c in range(0, n_own, 2):  # rows g and g + 8 of A
                    x, y = 4 * c, 4 * c + 4
                    i, k = 4 * (j * n_own + c), 4 * (j * n_own + c + 1)
                    h = mma32(v[x], v[y], v[x + 1], v[y + 1], b, d, sums[i], sums[i + 1], sums[k], sums[k + 1])
                    l = mma32(v[x + 2], v[y + 2], v[x + 3], v[y + 3], b, d, sums[i + 2], sums[i + 3], sums[k + 2], sums[k + 3])
                    sums[i], sums[i + 1], sums[k], sums[k + 1] = h
                    sums[i + 2], sums[i + 3], sums[k + 2], sums[k + 3] = l
    return weigh


@factory([("f16", "f16", 64, 64, 3, 1), ("f16", "f16", 80, 120, 2, 2), ("f16", "f16", 128, 128, 4, 1),
          ("q8_0", "q8_0", 128, 128, 4, 1), ("f16", "f16", 128, 128, 8, 1), ("q8_0", "q8_0", 128, 128, 8, 1),
          ("f16", "f16", 128, 128, 2, 1, "act", True, 50.0), ("f16", "f16", 64, 64, 8, 1, "f32", False, 0.0, True),
          ("f16", "f16", 128, 128, 8, 1, "act"), ("q8_0", "q8_0", 128, 128, 4, 1, "act"), ("f16", "f16", 128, 128, 4, 1, "act")])
def flash_attn_ext_narrow_kernel(type_k, type_v, dim_k, dim_v, heads, parts, result="pieces",  # noqa: PLR0915 (a kernel: its steps in order)
                                 sinks_there=False, softcap=0.0, is_ring=False):
    """parts: blocks of the heads of a KV head. A block: token blockIdx.z, KV head blockIdx.y, part blockIdx.x % parts, and of the
    pieces those from the blockIdx.x // parts-th on by steps of gridDim.x // parts. pieces: what `flash_attn_ext_combine`
    takes."""
    const = constants(type_k, type_v, dim_k, dim_v, heads)
    n_tiles, n_blocks, n_own, where = const.n_tiles, const.n_blocks, const.n_own, const.where
    form_k, form_v = FORMS[type_k], FORMS[type_v]
    n_k_raw, n_scores, n_query_words = 4 * n_blocks * form_k.octet_words, 4 * n_tiles, 4 * n_blocks
    n_outputs, n_sums, (load_queries, _) = n_tiles * n_own, 4 * n_tiles * n_own, query_reader(const)
    (fetch_keys, take_keys, *of_keys), (fetch_values, scale_value, take4, value) = form_k.keys(dim_k), form_v.values(dim_v)
    k_words, v_words, key_area = form_k.words(dim_k), form_v.words(dim_v), form_k.key_area(dim_k)
    load_query_block, score = query_loader(const), scorer(const, form_k.octet_words, *of_keys)
    scale_values, weigh = value_scaler(const, scale_value), weigher(const, take4, value)
    value_area, capped, ring = form_v.value_area(dim_v), capping(softcap), ring_of(is_ring)
    n_groups = THREADS // N_THREADS
    quantize_chunk = chunk_quantizer(n_groups)
    alone, v_row, n_chunks = result != "pieces", stride(dim_v), heads * dim_v // CHUNK

    @device
    def cache_at(words, first, row, span, piece):
        """first: of the sequence's first cell; the piece's keys, or values, are found by their positions."""
        return Cache(words, first - i64(ring.moved(span, i32(piece * PIECE))) * row, row)

    @device
    def head_there(head):
        return heads % TILE == 0 or head < heads

    @device
    def store_outputs(out, at, o, first):
        if n_own == 4:
            st4(out, at, o[first], o[first + 1], o[first + 2], o[first + 3])
        else:
            st2(out, at, o[first], o[first + 1])

    def kernel(q, k, v, seq, pos, present, sinks, out, n_ctx, row_v, span, scale):  # noqa: PLR0915 (a kernel: its steps in order)
        s = cuda.shared.array(0, types.int32)
        k_raw, held = cuda.local.array(n_k_raw, u32), cuda.local.array(4, i32)
        x, sums = cuda.local.array(n_scores, f32), cuda.local.array(n_sums, i32)
        p, d_v = cuda.local.array(4, f32), cuda.local.array(4, f32)
        queries, q_d = cuda.local.array(n_query_words, u32), cuda.local.array(n_blocks, f32)
        m, d_p = cuda.local.array(n_tiles, f32), cuda.local.array(n_tiles, f32)
        o, M, L = cuda.local.array(n_outputs, f32), cuda.local.array(n_tiles, f32), cuda.local.array(n_tiles, f32)
        for i in range(n_outputs):
            o[i] = ZERO
        for j in range(n_tiles):  # of head TILE j + warp
            M[j], L[j] = MINUS_INFINITY, ZERO
        token = cuda.blockIdx.z
        position, sequence, window = ld(pos, token), ld(seq, token), ring.window(span)
        n_splits = i32(cuda.gridDim.x // parts)
        piece = i32(first_piece(position, window) + cuda.blockIdx.x // parts)
        wait_for_previous()
        if piece > position >> 7:
            return
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        g, t = i32(lane >> 2), i32(lane & 3)
        n_head = i32(cuda.gridDim.y * (parts * heads))
        first_head = i32((cuda.blockIdx.y * parts + cuda.blockIdx.x % parts) * heads)
        cell, row_k, row_v = i64(sequence) * n_ctx, i32(cuda.gridDim.y * (4 * k_words)), i32(4 * row_v)
        begin = ring.begin(span, sequence, cell)  # of K and V
        first_k, first_v = begin * row_k + cuda.blockIdx.y * (4 * k_words), begin * row_v + cuda.blockIdx.y * (4 * v_words)
        own_keys, own_values = i32(where.keys + warp * key_area), i32(where.values + warp * value_area)
        channel = i32(8 * n_own * warp + n_own * g)

        key = i32(piece * PIECE + warp * SECTION)
        fetch_keys(cache_at(k, first_k, row_k, span, piece), key, position, lane, s, own_keys)
        copies_commit()
        fetch_values(cache_at(v, first_v, row_v, span, piece), key, position, lane, warp, s, own_values)
        copies_commit()
        asked = True  # for the first values already; for others behind the second keys, since copies end in order
        for i in range(4):
            held[i] = ld(present, cell + smaller(i32(key + 4 * g + i), position))
        if warp < n_blocks:
            load_query_block(q, (i64(token) * n_head + first_head + g) * dim_k, warp, g < heads, lane, scale, s)
        cuda.syncthreads()  # the queries are prepared
        load_queries(lane, s, queries, q_d)

        while piece <= position >> 7:
            # 1. Scores of the lane's keys; those beyond the query's position are not seen
            tid = afresh(tid)
            lane, warp = i32(tid & 31), i32(tid >> 5)
            g, t = i32(lane >> 2), i32(lane & 3)
            now, here = piece, key
            piece = i32(piece + n_splits)
            key = i32(piece * PIECE + warp * SECTION)
            more, mask = piece <= position >> 7, u32(EVEN_BITS + u32(n_ctx >> 31))
            if asked:
                others_wait()
            else:
                all_wait()
            syncwarp()  # the first sixteen are there
            take_keys(s, own_keys, lane, k_raw)
            syncwarp()  # and taken
            fetch_keys(cache_at(k, first_k, row_k, span, now), i32(here + 2), position, lane, s, own_keys)
            copies_commit()
            if not asked:
                fetch_values(cache_at(v, first_v, row_v, span, now), here, position, lane, warp, s, own_values)
            copies_commit()
            asked = False
            score(k_raw, 0, queries, q_d, lane, s, mask, x)
            others_wait()
            syncwarp()  # the others are there
            take_keys(s, own_keys, lane, k_raw)
            syncwarp()
            if more:
                fetch_keys(cache_at(k, first_k, row_k, span, piece), key, position, lane, s, own_keys)
            copies_commit()
            score(k_raw, 1, queries, q_d, lane, s, mask, x)
            if softcap:
                for i in range(n_scores):
                    x[i] = capped(x[i])
            oldest = i32(position - (window if before_blackwell() else afresh(window)))
            for i in range(4):
                held[i] = 1 if oldest < i32(here + 4 * g + i) <= position and held[i] != 0 else 0

            # 2. m, p, l and the levels of p'
            for j in range(n_tiles):
                most = MINUS_INFINITY
                for i in range(4):
                    most = larger_float(most, x[4 * j + i] if held[i] != 0 else MINUS_INFINITY)
                most = max_rows(most, lane)
                if g == 0:
                    put(s, where.maxima + (TILE * j + t) * WARPS + warp, most)
            others_wait()
            syncwarp()  # values are there
            scale_values(lane, warp, s, own_values, d_v)
            cuda.syncthreads()  # maxima of the warps are written
            for j in range(n_tiles):
                w = lds4(s, where.maxima + (TILE * j + t) * WARPS)
                m[j] = larger_float(larger_float(larger_float(larger_float(MINUS_INFINITY, as_f32(w[0])), as_f32(w[1])),
                                                 as_f32(w[2])), as_f32(w[3]))
                for i in range(4):
                    e = exp(sub(x[4 * j + i], m[j]))
                    p[i] = e if held[i] != 0 else ZERO
                    x[4 * j + i] = mul(p[i], d_v[i]) if held[i] != 0 else ZERO
                if head_there(TILE * j + t):
                    sts4(s, where.p + (TILE * j + t) * PIECE + warp * SECTION + 4 * g, as_i32(p[0]), as_i32(p[1]), as_i32(p[2]),
                         as_i32(p[3]))
                amax = max_row_patterns(amax4(Z, (x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3])), lane)
                if g == 0:
                    sts(s, where.amaxes + (TILE * j + t) * WARPS + warp, amax)
            for i in range(4):
                if more:
                    held[i] = ld(present, cell + smaller(i32(key + 4 * g + i), position))
            cuda.syncthreads()  # p, amaxes and inv of the warps are written
            most_pieces = i32(i32(n_ctx + PIECE - 1) >> 7)
            first_piece_of = i32(i32(token * n_head + first_head) * most_pieces + now)
            heads_here = n_head if n_tiles == 1 else afresh(n_head)
            statistics = statistics_at(cuda.gridDim.z, heads_here, n_ctx, dim_v) + 2 * first_piece_of
            for j in range(n_tiles):
                head = i32(TILE * j + warp)
                if head_there(head):
                    l = sum8(s, where.p + head * PIECE + (lane & 15))
                    l = add_lane(add_lane(add_lane(add_lane(l, lane ^ 8), lane ^ 4), lane ^ 2), lane ^ 1)
                    if alone:
                        own_m = as_f32(shuffle(as_i32(m[j]), warp))
                        left_out = l == ZERO
                        new_M = larger_float(M[j], own_m)
                        a, b = exp(sub(M[j], new_M)), exp(sub(own_m, new_M))
                        L[j] = L[j] if left_out else fma(L[j], a, mul(l, b))
                        M[j] = M[j] if left_out else new_M
                        if lane == 0:
                            put(s, where.kept + head, ONE if left_out else a)
                            put(s, where.scales + head, MINUS_ONE if left_out else b)
                    elif lane == 0:
                        st(out, statistics + i32(2 * head * most_pieces) + 1, l)
            if n_tiles > 1:
                cuda.syncthreads()  # p is read
            for j in range(n_tiles):
                w = lds4(s, where.amaxes + (TILE * j + t) * WARPS)
                d_p[j], inv_p = scales(max(w[0], w[1], w[2], w[3]))
                if tid < TILE and not alone and head_there(TILE * j + t):
                    st(out, statistics + i32(2 * (TILE * j + t) * most_pieces), m[j])
                high, low = limbs4_masked((x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]), inv_p, mask)
                plane = i32(where.planes + 2 * (TILE * j + t) * PLANE + 8 * warp + g)
                sts(s, plane, i32(high))
                sts(s, plane + PLANE, i32(low))
            cuda.syncthreads()  # limbs of p' are written

            # 3. o
            weigh(lane, warp, s, mask, sums)
            for j in range(n_tiles):
                a, b = ONE, ONE
                if alone:
                    a, b = get(s, where.kept + TILE * j + t), get(s, where.scales + TILE * j + t)
                for c in range(n_own):
                    i, r = n_own * j + c, 4 * (n_own * j + c)
                    y = mul(fixed_point(sums[r], rest(sums[r + 1] + sums[r + 2], sums[r + 3])), d_p[j])
                    o[i] = fma(o[i], a, mul(y, b)) if alone else y
                if not alone and head_there(TILE * j + t) and (dim_v % CHANNELS == 0 or channel < dim_v):
                    store_outputs(out, i64(i32(first_piece_of + (TILE * j + t) * most_pieces)) * v_row + channel, o, n_own * j)
            cuda.syncthreads()  # values and limbs are read
        if alone:
            for j in range(n_tiles):
                head = i32(TILE * j + warp)
                if head_there(head):
                    e = ONE
                    if sinks_there:
                        e, L[j] = sink(M[j], L[j], ldc(sinks, first_head + head))
                    if lane == 0:
                        put(s, where.kept + head, e)
                        put(s, where.scales + head, L[j])
            cuda.syncthreads()  # L is there
            for j in range(n_tiles):
                head = i32(TILE * j + t)
                if head_there(head) and (dim_v % CHANNELS == 0 or channel < dim_v):
                    e, length = get(s, where.kept + head), get(s, where.scales + head)
                    for c in range(n_own):
                        i = n_own * j + c
                        if sinks_there:
                            o[i] = mul(o[i], e)
                        o[i] = div(o[i], length)
                        if result == "act":
                            put(s, where.values + head * dim_v + channel + c, o[i])
                    if result == "f32":
                        store_outputs(out, (i64(token) * n_head + first_head + head) * dim_v + channel, o, n_own * j)
            if result == "act":
                all_chunks, r = i32(n_head * dim_v // CHUNK), i32(0)
                while r < n_chunks:
                    cuda.syncthreads()  # outputs are there, and what quantizes is free
                    own = i32(r + (tid >> 6))
                    w = lds4(s, where.values + 4 * (tid + r * N_THREADS)) if own < n_chunks else (0, 0, 0, 0)
                    chunk = i32(first_head * dim_v // CHUNK + own) if own < n_chunks else all_chunks
                    quantize_chunk(as_f32(w[0]), as_f32(w[1]), as_f32(w[2]), as_f32(w[3]), out, cuda.gridDim.z, token, chunk,
                                   all_chunks)
                    r = i32(r + n_groups)
    parameters = F32, U32, U32, I32, I32, U8, F32, U32 if result == "act" else F32, N, N, ring.parameter, SCALAR_F32
    return Kernel(kernel, parameters, THREADS, RESIDENT)


def resident(call) -> int:
    """Blocks that find room on a multiprocessor."""
    size = sizes(call)
    heads = heads_together(size.n_head // size.n_head_kv)
    n_words = shared_layout(call.k.dtype, call.v.dtype, size.dim_k, size.dim_v, heads).n_words
    return min(RESIDENT, (call.device.shared_limit + RESERVED) // (4 * n_words + RESERVED))


def takes(call) -> bool:
    """Whether heads and rows are such as this kernel has copies for, and a multiprocessor has room for enough blocks of them."""
    size, types = sizes(call), (call.k.dtype, call.v.dtype)
    dims = size.dim_k, size.dim_v
    return (set(types) <= set(FORMS) and max(dims) <= MOST_CHANNELS and size.row_v == size.n_head_kv * size.dim_v
            and all(dim % (8 if type_ == "f16" else CHANNELS) == 0 for type_, dim in zip(types, dims))
            and resident(call) >= LEAST_RESIDENT)


def fills_chunks(heads: int, dim_v: int) -> bool:
    """Whether a block that has all pieces of its heads has whole chunks of activations."""
    return heads * dim_v % CHUNK == 0


def flash_attn_ext_narrow(call):
    """The pieces of `flash_attn_ext` in call.scratch, by call.plan: n_splits blocks share those of a token's heads; of None, one
    has all of them, and the result is that of the op, call.out or call.act."""
    plan, size = call.plan, sizes(call)
    parts, sinks_there = size.n_head // size.n_head_kv // plan.heads, False
    if plan.n_splits is not None:
        result, out = "pieces", call.scratch
    else:
        result, out = ("f32", call.out) if "out" in call.values else ("act", call.act)
        sinks_there = call.sinks is not None
    rest = of_few_models(call)
    kernel = flash_attn_ext_narrow_kernel(call.k.dtype, call.v.dtype, size.dim_k, size.dim_v, plan.heads, parts,
                                          *((result, sinks_there, *rest) if rest or result != "pieces" else ()))
    args = (*addresses(call), (call.sinks or call.q).data, out.data, size.n_ctx, FORMS[call.v.dtype].words(size.row_v),
            span_of(size), score_scale(call))
    grid = (plan.n_splits or 1) * parts, size.n_head_kv, size.n
    n_bytes = 4 * shared_layout(call.k.dtype, call.v.dtype, size.dim_k, size.dim_v, plan.heads).n_words
    if prod(grid) <= (RESIDENT - 1) * call.device.n_multiprocessors:  # else registers see to it, and memory is for the cache
        n_bytes = even_bytes(n_bytes, prod(grid), call.device.n_multiprocessors, call.device.shared_limit)
    return call.device.launch(kernel, grid, THREADS, args, n_bytes)
