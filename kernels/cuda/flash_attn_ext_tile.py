"""Attention of many queries over f16 and q8_0 caches, on int8 tensor cores (numerics, section 8).

A block takes 16 rows a warp, a row being one token and one of up to 8 query heads of one KV head, and goes through the pieces of 128 keys in position order;
or several blocks share the pieces of the same rows, each taking every so many-th, and leave (m, l, o) to `flash_attn_ext_combine`.
Tokens of a block that are of several sequences are taken run by run; pieces behind a run's last position or before what its windows reach are not touched,
nor are those of a warp whose rows see none of their keys. In a piece

    1. the block makes limbs of keys and values in shared memory, of 16 keys a warp: lane l = 4 g + t has the channels 8 t .. and 32 + 8 t .. of each 64 of
       keys g and g + 8, and the channels 8 g .. of keys 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t
    2. a warp multiplies its queries with all keys: lane l has the scores of rows g and g + 8 with keys 2 t, 2 t + 1 of each 8
    3. m, p, l (the tree goes over the keys of a lane, then over lanes) and the limbs of p', which lie as the next product wants them
    4. a warp multiplies p' with all values, and combines or leaves o

Shared memory, [row of 16-byte pieces, one to spare so that eight rows lie in all 32 banks]: a key's words 0..3 of all t, of each 64 channels; a channel's words
(four keys) of all t, for each 16 keys. Channel 8 g + e of each 64 is row 8 e + g, a column g of the e-th product.
"""
from itertools import accumulate
from typing import NamedTuple

from numba import cuda, types

from .fixed_point import CHANNELS, MINUS_INFINITY, OCTETS, ZERO, fixed_point, key_loader, larger_float, lifted, limbs, rest, scales, value_loader
from .flash_attn_ext_combine import PIECE, first_piece, sink, statistics_at
from .flash_attn_ext_few import amax4, four, get, limbs4, max_lane, max_pattern, put
from .launch import F32, I32, Kernel, N, SCALAR_F32, U8, factory
from .ptx import (add, afresh, apart, as_f32, as_i32, before_blackwell, device, div, exp, f32, fma, i32, i64, ld, ldmatrix4, lds2, lds4, mma32, mul,
                  shuffle, st, st4, sts, sub, u32)
from .set_rows import larger

ROWS = 16           # of a warp
MOST_CHANNELS_K, MOST_CHANNELS = 192, 128  # of K, of V
KEYS_STRIDE = PIECE // 4 + 4  # words of a channel
Q_WORDS = 512       # of a warp's queries in a block of channels
ONE, MINUS_ZERO, NEVER = f32(1), f32(-0.0), i32(0x7fffffff)


class Shared(NamedTuple):
    """Words of shared memory; multiples of four."""
    k_hi: int   # [key][k_stride]
    k_lo: int
    v_hi: int   # [channel][KEYS_STRIDE]
    v_lo: int
    d_k: int    # f32 [block][128]
    d_v: int    # f32 [128]
    seen: int   # i32 [128]: the positions from which the keys are seen
    q: int      # words of A [warp][block][hi, lo][half][lane][4]
    q_d: int    # f32 [warp][block][16 rows]: d_q * scale
    n_words: int


def k_stride(dim_k: int) -> int:
    """Words of a key."""
    return -(-dim_k // CHANNELS) * CHANNELS // 4 + 4


def shared_layout(dim_k: int, dim_v: int, n_warps: int) -> Shared:
    n_blocks, n_slabs = -(-dim_k // CHANNELS), -(-dim_v // CHANNELS)
    k, v = PIECE * k_stride(dim_k), n_slabs * CHANNELS * KEYS_STRIDE
    return Shared(*accumulate((k, k, v, v, n_blocks * PIECE, PIECE, PIECE, n_warps * n_blocks * Q_WORDS, n_warps * n_blocks * ROWS), initial=0))


@device
def add_lanes(x, lane):
    """Sum over the four lanes of a row, as the tree's last halvings but one."""
    x = add(x, as_f32(shuffle(as_i32(x), lane ^ 2)))
    return add(x, as_f32(shuffle(as_i32(x), lane ^ 1)))


@factory([("f16", "f16", 64, 64, 3, 4, False, False), ("f16", "f16", 128, 128, 4, 8, False, False), ("f16", "f16", 64, 64, 8, 8, False, True),
          ("q8_0", "f16", 128, 72, 8, 4, False, True), ("f16", "f16", 192, 128, 1, 8, False, False), ("q8_0", "q8_0", 128, 128, 1, 8, False, False),
          ("f16", "f16", 64, 64, 3, 4, True, False), ("f16", "q8_0", 128, 128, 4, 4, True, False), ("q8_0", "f16", 192, 72, 8, 4, True, False)])
def flash_attn_ext_tile_kernel(type_k, type_v, dim_k, dim_v, heads, n_warps, split, sinks_there):
    K, V, where, z = OCTETS[type_k], OCTETS[type_v], shared_layout(dim_k, dim_v, n_warps), i32(0)
    n_blocks, n_slabs, tokens = -(-dim_k // CHANNELS), -(-dim_v // CHANNELS), ROWS * n_warps // heads
    k_words, v_words, k_row = K.n_words, V.n_words, k_stride(dim_k)
    n_k_raw, n_v_raw, n_outputs = 2 * n_blocks * k_words, n_slabs * v_words, 16 if split else 32 * n_slabs
    amax_k, merge_k, pattern_k, values_k = K[3:]
    amax_v, merge_v, pattern_v, values_v = V[3:]
    load_key, load_value = key_loader(K, dim_k), value_loader(V, dim_v)

    # 1. Limbs in shared memory

    @device
    def key_octets(raw, first, inv, at, s):
        x, y = values_k(raw, first), values_k(raw, first + k_words)
        a, c = limbs4((x[0], x[1], x[2], x[3]), inv), limbs4((x[4], x[5], x[6], x[7]), inv)
        e, f = limbs4((y[0], y[1], y[2], y[3]), inv), limbs4((y[4], y[5], y[6], y[7]), inv)
        sts(s, where.k_hi + at, a[0])
        sts(s, where.k_hi + at + 4, c[0])
        sts(s, where.k_hi + at + 8, e[0])
        sts(s, where.k_hi + at + 12, f[0])
        sts(s, where.k_lo + at, a[1])
        sts(s, where.k_lo + at + 4, c[1])
        sts(s, where.k_lo + at + 8, e[1])
        sts(s, where.k_lo + at + 12, f[1])

    @device
    def key_block(raw0, raw1, b, key, lane, s):
        """Block b of keys key and key + 8, which lie with four lanes: two of these divide for one."""
        first, at = 2 * b * k_words, key * k_row + b * 16 + (lane & 3)
        one, two = amax_k(amax_k(z, raw0, first), raw0, first + k_words), amax_k(amax_k(z, raw1, first), raw1, first + k_words)
        state = merge_k(two if lane & 2 else one, shuffle(one if lane & 2 else two, lane ^ 2))
        d, inv = scales(pattern_k(merge_k(state, shuffle(state, lane ^ 1))))
        if lane & 1 == 0:
            put(s, where.d_k + b * PIECE + key + 4 * (lane & 2), d)
        key_octets(raw0, first, as_f32(shuffle(as_i32(inv), lane & -3)), at, s)
        key_octets(raw1, first, as_f32(shuffle(as_i32(inv), lane | 2)), at + 8 * k_row, s)

    @device
    def value_state(raw):
        state = amax_v(z, raw, 0)
        if n_slabs > 1:
            state = amax_v(state, raw, v_words)
        return state

    @device
    def value_scales(raw0, raw1, raw2, raw3, key, lane, s):
        """16256 / amax of keys 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t, whose channels lie with the lanes of one t: each divides for key g & 3 of these."""
        a, b, c, d = value_state(raw0), value_state(raw1), value_state(raw2), value_state(raw3)
        a, b = (merge_v(c if lane & 8 else a, shuffle(a if lane & 8 else c, lane ^ 8)), merge_v(d if lane & 8 else b, shuffle(b if lane & 8 else d, lane ^ 8)))
        state = merge_v(b if lane & 4 else a, shuffle(a if lane & 4 else b, lane ^ 4))
        d_v, inv = scales(pattern_v(merge_v(state, shuffle(state, lane ^ 16))))
        if lane < 16:
            put(s, where.d_v + key + 2 * (lane & 3) + (lane & 8) + ((lane >> 2) & 1), d_v)
        inv, t = as_i32(inv), lane & 3
        return as_f32(shuffle(inv, t)), as_f32(shuffle(inv, t + 4)), as_f32(shuffle(inv, t + 8)), as_f32(shuffle(inv, t + 12))

    @device
    def value_word(a, b, c, d, inv, at, s):
        hi, lo = limbs(lifted(a, inv[0]), lifted(b, inv[1]), lifted(c, inv[2]), lifted(d, inv[3]))
        sts(s, where.v_hi + at, hi)
        sts(s, where.v_lo + at, lo)

    @device
    def value_slab(raw0, raw1, raw2, raw3, b, inv, at, s):
        """at: of channel 8 g of the slab."""
        x, y, u, w = values_v(raw0, b * v_words), values_v(raw1, b * v_words), values_v(raw2, b * v_words), values_v(raw3, b * v_words)
        value_word(x[0], y[0], u[0], w[0], inv, at, s)
        value_word(x[1], y[1], u[1], w[1], inv, at + 8 * KEYS_STRIDE, s)
        value_word(x[2], y[2], u[2], w[2], inv, at + 16 * KEYS_STRIDE, s)
        value_word(x[3], y[3], u[3], w[3], inv, at + 24 * KEYS_STRIDE, s)
        value_word(x[4], y[4], u[4], w[4], inv, at + 32 * KEYS_STRIDE, s)
        value_word(x[5], y[5], u[5], w[5], inv, at + 40 * KEYS_STRIDE, s)
        value_word(x[6], y[6], u[6], w[6], inv, at + 48 * KEYS_STRIDE, s)
        value_word(x[7], y[7], u[7], w[7], inv, at + 56 * KEYS_STRIDE, s)

    @device
    def load_pair(v, cell, position, last, row_v, head_kv, g, raw0, raw1):
        """Values of two keys."""
        load_value(v, (cell + min(position, last)) * (row_v >> 3) + head_kv * (dim_v // 8), g, raw0, 0)
        load_value(v, (cell + min(position + 1, last)) * (row_v >> 3) + head_kv * (dim_v // 8), g, raw1, 0)

    @device
    def stage(k, v, present, cell, row_v, first, last, key, n_head_kv, head_kv, lane, s):
        """Keys key .. key + 15 of the piece that begins at position `first`; those beyond `last` are not seen, and read there or not at all."""
        k0, k1 = cuda.local.array(n_k_raw, u32), cuda.local.array(n_k_raw, u32)
        v0, v1 = cuda.local.array(n_v_raw, u32), cuda.local.array(n_v_raw, u32)
        v2, v3 = cuda.local.array(n_v_raw, u32), cuda.local.array(n_v_raw, u32)
        g, t = lane >> 2, lane & 3
        if lane < ROWS:
            position = i32(first + key + lane)
            sts(s, where.seen + key + lane, position if position <= last and ld(present, cell + min(position, last)) != 0 else NEVER)
        if first + key <= last:
            at, even = first + key + g, first + key + 2 * t
            load_key(k, ((cell + min(at, last)) * n_head_kv + head_kv) * (dim_k // 8), t, k0, 0)
            load_key(k, ((cell + min(at + 8, last)) * n_head_kv + head_kv) * (dim_k // 8), t, k1, 0)
            load_pair(v, cell, even, last, row_v, head_kv, g, v0, v1)
            if n_blocks < 3:  # of more, registers are not enough
                load_pair(v, cell, even + 8, last, row_v, head_kv, g, v2, v3)
            key_block(k0, k1, 0, key + g, lane, s)
            if n_blocks > 1:
                key_block(k0, k1, 1, key + g, lane, s)
            if n_blocks > 2:
                key_block(k0, k1, 2, key + g, lane, s)
                load_pair(v, cell, even + 8, last, row_v, head_kv, g, v2, v3)
            inv, to = value_scales(v0, v1, v2, v3, key, lane, s), g * KEYS_STRIDE + (key >> 2) + t
            value_slab(v0, v1, v2, v3, 0, inv, to, s)
            if n_slabs > 1:
                value_slab(v0, v1, v2, v3, 1, inv, to + CHANNELS * KEYS_STRIDE, s)

    # 2. Scores

    @device
    def query_block(q, at, b, row, valid, tid, scale, s):
        """Block b of the query of row g (row = 0) or g + 8 (1): its words of A and d_q * scale. at: where it begins."""
        lane, warp = tid & 31, tid >> 5
        channel = b * CHANNELS + 8 * (lane & 3)
        first, second = valid and channel < dim_k, valid and channel + 32 < dim_k
        x, y = four(q, at + channel, first), four(q, at + channel + 4, first)
        u, w = four(q, at + channel + 32, second), four(q, at + channel + 36, second)
        amax = max_pattern(max_pattern(amax4(amax4(amax4(amax4(z, x), y), u), w), lane ^ 1), lane ^ 2)
        d, inv = scales(amax)
        x, y, u, w = limbs4(x, inv), limbs4(y, inv), limbs4(u, inv), limbs4(w, inv)
        to = where.q + (warp * n_blocks + b) * Q_WORDS + 4 * lane + row
        sts(s, to, x[0])
        sts(s, to + 2, y[0])
        sts(s, to + 128, u[0])
        sts(s, to + 130, w[0])
        sts(s, to + 256, x[1])
        sts(s, to + 258, y[1])
        sts(s, to + 384, u[1])
        sts(s, to + 386, w[1])
        if lane & 3 == 0:
            put(s, where.q_d + (warp * n_blocks + b) * ROWS + (lane >> 2) + 8 * row, mul(d, scale))

    @device
    def add_block(tid, s, i, b, q_hi, q_lo, u_hi, u_lo, q_d, scores):
        """Adds block b to the scores of two rows with keys 8 i + 2 t and 8 i + 2 t + 1. q_hi to u_lo: words of A."""
        tid = afresh(tid)  # here and below: addresses are computed where they are used, registers are for sums
        lane = tid & 31
        at = (8 * i + (lane & 7)) * k_row + b * 16 + (lane >> 3) * 4
        hi, lo = ldmatrix4(s, where.k_hi + at), ldmatrix4(s, where.k_lo + at)
        hh = mma32(q_hi[0], q_hi[1], q_hi[2], q_hi[3], hi[0], hi[1], z, z, z, z)
        mid = mma32(q_hi[0], q_hi[1], q_hi[2], q_hi[3], lo[0], lo[1], z, z, z, z)
        ll = mma32(q_lo[0], q_lo[1], q_lo[2], q_lo[3], lo[0], lo[1], z, z, z, z)
        mid = mma32(q_lo[0], q_lo[1], q_lo[2], q_lo[3], hi[0], hi[1], mid[0], mid[1], mid[2], mid[3])
        hh = mma32(u_hi[0], u_hi[1], u_hi[2], u_hi[3], hi[2], hi[3], hh[0], hh[1], hh[2], hh[3])
        mid = mma32(u_hi[0], u_hi[1], u_hi[2], u_hi[3], lo[2], lo[3], mid[0], mid[1], mid[2], mid[3])
        ll = mma32(u_lo[0], u_lo[1], u_lo[2], u_lo[3], lo[2], lo[3], ll[0], ll[1], ll[2], ll[3])
        mid = mma32(u_lo[0], u_lo[1], u_lo[2], u_lo[3], hi[2], hi[3], mid[0], mid[1], mid[2], mid[3])
        d = lds2(s, where.d_k + b * PIECE + 8 * i + 2 * (lane & 3))
        d0, d1 = as_f32(d[0]), as_f32(d[1])
        scores[4 * i] = fma(mul(fixed_point(hh[0], rest(mid[0], ll[0])), q_d[0]), d0, scores[4 * i])
        scores[4 * i + 1] = fma(mul(fixed_point(hh[1], rest(mid[1], ll[1])), q_d[0]), d1, scores[4 * i + 1])
        scores[4 * i + 2] = fma(mul(fixed_point(hh[2], rest(mid[2], ll[2])), q_d[1]), d0, scores[4 * i + 2])
        scores[4 * i + 3] = fma(mul(fixed_point(hh[3], rest(mid[3], ll[3])), q_d[1]), d1, scores[4 * i + 3])

    @device
    def add_block4(tid, s, i, b, reach, scores):
        tid = afresh(tid)
        at, d = where.q + ((tid >> 5) * n_blocks + b) * Q_WORDS + 4 * (tid & 31), where.q_d + ((tid >> 5) * n_blocks + b) * ROWS + ((tid & 31) >> 2)
        q_hi, u_hi, q_lo, u_lo = lds4(s, at), lds4(s, at + 128), lds4(s, at + 256), lds4(s, at + 384)
        q_d = get(s, d), get(s, d + 8)
        add_block(tid, s, i, b, q_hi, q_lo, u_hi, u_lo, q_d, scores)
        apart()
        add_block(tid, s, i + 1, b, q_hi, q_lo, u_hi, u_lo, q_d, scores)
        if 8 * i + 16 <= reach:
            add_block(tid, s, i + 2, b, q_hi, q_lo, u_hi, u_lo, q_d, scores)
            apart()
            add_block(tid, s, i + 3, b, q_hi, q_lo, u_hi, u_lo, q_d, scores)

    @device
    def sees(bound, at, window):
        """Whether a query at position `bound` sees a key that is seen from `at` on: 0 <= bound - at < window."""
        return u32(i32(bound - at)) < u32(window)

    @device
    def max_of(tid, s, i, bound, window, scores, m):
        """m: of the lane's two rows."""
        at = lds2(s, where.seen + 8 * i + 2 * (tid & 3))
        m0 = larger_float(m[0], scores[4 * i] if sees(bound[0], at[0], window) else MINUS_INFINITY)
        m1 = larger_float(m[1], scores[4 * i + 2] if sees(bound[1], at[0], window) else MINUS_INFINITY)
        return (larger_float(m0, scores[4 * i + 1] if sees(bound[0], at[1], window) else MINUS_INFINITY),
                larger_float(m1, scores[4 * i + 3] if sees(bound[1], at[1], window) else MINUS_INFINITY))

    @device
    def scores4(tid, s, i, bound, window, reach, scores, m):
        """reach: the last key of the piece that a row of the warp may see; scores of pairs of eights beyond are not computed."""
        for j in range(16):
            scores[4 * i + j] = ZERO
        if 8 * i <= reach:
            add_block4(tid, s, i, 0, reach, scores)
            if n_blocks > 1:
                add_block4(tid, s, i, 1, reach, scores)
            if n_blocks > 2:
                add_block4(tid, s, i, 2, reach, scores)
            m = max_of(tid, s, i, bound, window, scores, m)
            m = max_of(tid, s, i + 1, bound, window, scores, m)
            m = max_of(tid, s, i + 2, bound, window, scores, m)
            m = max_of(tid, s, i + 3, bound, window, scores, m)
        return m

    # 3. p

    @device
    def weight(lane, s, i, bound, window, reach, m, scores, amax):
        """p of four keys; their p' take the place of scores."""
        p0, p1, p2, p3 = ZERO, ZERO, ZERO, ZERO
        if 8 * (i & -2) <= reach:
            lane = afresh(lane)
            at, d = lds2(s, where.seen + 8 * i + 2 * (lane & 3)), lds2(s, where.d_v + 8 * i + 2 * (lane & 3))
            see0, see1 = sees(bound[0], at[0], window), sees(bound[0], at[1], window)
            see2, see3 = sees(bound[1], at[0], window), sees(bound[1], at[1], window)
            p0, p1 = exp(sub(scores[4 * i], m[0])), exp(sub(scores[4 * i + 1], m[0]))  # side by side, without branches
            p2, p3 = exp(sub(scores[4 * i + 2], m[1])), exp(sub(scores[4 * i + 3], m[1]))
            x0, x1, x2, x3 = mul(p0, as_f32(d[0])), mul(p1, as_f32(d[1])), mul(p2, as_f32(d[0])), mul(p3, as_f32(d[1]))
            p0, p1, p2, p3 = p0 if see0 else ZERO, p1 if see1 else ZERO, p2 if see2 else ZERO, p3 if see3 else ZERO
            x0, x1, x2, x3 = x0 if see0 else ZERO, x1 if see1 else ZERO, x2 if see2 else ZERO, x3 if see3 else ZERO
            amax = larger(larger(amax[0], x0), x1), larger(larger(amax[1], x2), x3)
            scores[4 * i], scores[4 * i + 1], scores[4 * i + 2], scores[4 * i + 3] = x0, x1, x2, x3
        return (p0, p1, p2, p3), amax

    @device
    def add4(a, b):
        return add(a[0], b[0]), add(a[1], b[1]), add(a[2], b[2]), add(a[3], b[3])

    @device
    def weights4(lane, s, i, bound, window, reach, m, scores, amax):
        """The tree over keys 64, then 32 apart."""
        a, amax = weight(lane, s, i, bound, window, reach, m, scores, amax)
        b, amax = weight(lane, s, i + 8, bound, window, reach, m, scores, amax)
        c, amax = weight(lane, s, i + 4, bound, window, reach, m, scores, amax)
        d, amax = weight(lane, s, i + 12, bound, window, reach, m, scores, amax)
        return add4(add4(a, b), add4(c, d)), amax

    # 4. o

    @device
    def weigh_half(s, at, p_hi, p_lo, o, hh, mid, ll):
        """Adds the products with 64 keys."""
        hi, lo = ldmatrix4(s, where.v_hi + at), ldmatrix4(s, where.v_lo + at)
        hh = mma32(p_hi[o], p_hi[o + 1], p_hi[o + 2], p_hi[o + 3], hi[0], hi[1], hh[0], hh[1], hh[2], hh[3])
        mid = mma32(p_hi[o], p_hi[o + 1], p_hi[o + 2], p_hi[o + 3], lo[0], lo[1], mid[0], mid[1], mid[2], mid[3])
        ll = mma32(p_lo[o], p_lo[o + 1], p_lo[o + 2], p_lo[o + 3], lo[0], lo[1], ll[0], ll[1], ll[2], ll[3])
        mid = mma32(p_lo[o], p_lo[o + 1], p_lo[o + 2], p_lo[o + 3], hi[0], hi[1], mid[0], mid[1], mid[2], mid[3])
        hh = mma32(p_hi[o + 4], p_hi[o + 5], p_hi[o + 6], p_hi[o + 7], hi[2], hi[3], hh[0], hh[1], hh[2], hh[3])
        mid = mma32(p_hi[o + 4], p_hi[o + 5], p_hi[o + 6], p_hi[o + 7], lo[2], lo[3], mid[0], mid[1], mid[2], mid[3])
        ll = mma32(p_lo[o + 4], p_lo[o + 5], p_lo[o + 6], p_lo[o + 7], lo[2], lo[3], ll[0], ll[1], ll[2], ll[3])
        mid = mma32(p_lo[o + 4], p_lo[o + 5], p_lo[o + 6], p_lo[o + 7], hi[2], hi[3], mid[0], mid[1], mid[2], mid[3])
        return hh, mid, ll

    @device
    def output(O, i, hh, mid, ll, d_p, a, b):
        o = mul(fixed_point(hh, rest(mid, ll)), d_p)
        O[i] = o if split else fma(O[i], a, mul(o, b))

    @device
    def outputs(O, i, hh, mid, ll, d_p, a, b):
        output(O, i, hh[0], mid[0], ll[0], d_p[0], a[0], b[0])
        output(O, i + 1, hh[1], mid[1], ll[1], d_p[0], a[0], b[0])
        output(O, i + 2, hh[2], mid[2], ll[2], d_p[1], a[1], b[1])
        output(O, i + 3, hh[3], mid[3], ll[3], d_p[1], a[1], b[1])

    @device
    def weigh2(lane, s, i, to, reach, p_hi, p_lo, d_p, a, b, O):
        """Columns 8 i + 2 t, 8 i + 2 t + 1 and those 8 further of two rows: two products side by side, but no more, or they take all registers. What keeps
        them apart is the branch."""
        lane = afresh(lane)
        at, none = (8 * i + (lane & 7)) * KEYS_STRIDE + (lane >> 3) * 4, (z, z, z, z)
        hh0, mid0, ll0 = weigh_half(s, at, p_hi, p_lo, 0, none, none, none)
        apart()
        hh1, mid1, ll1 = weigh_half(s, at + 8 * KEYS_STRIDE, p_hi, p_lo, 0, none, none, none)
        if PIECE // 2 <= reach:
            hh0, mid0, ll0 = weigh_half(s, at + 16, p_hi, p_lo, 8, hh0, mid0, ll0)
            hh1, mid1, ll1 = weigh_half(s, at + 8 * KEYS_STRIDE + 16, p_hi, p_lo, 8, hh1, mid1, ll1)
        outputs(O, to, hh0, mid0, ll0, d_p, a, b)
        outputs(O, to + 4, hh1, mid1, ll1, d_p, a, b)
        if not (before_blackwell() or split) and reach < 0:  # never, but the compiler does not know: it does not put the outputs off until all sums are there
            for k in range(8):
                put(s, k, O[to + k])

    @device
    def leave_row(out, row, t, i, O, second):
        """o of four channels of either column; row: of the pieces, -1 where nothing is to be left."""
        channel = (i >> 3) * CHANNELS + 16 * t + (i & 4)
        if row >= 0:
            if dim_v % CHANNELS == 0 or channel < dim_v:
                st4(out, i64(row) * dim_v + channel, O[second], O[4 + second], O[8 + second], O[12 + second])
            if dim_v % CHANNELS == 0 or channel + 8 < dim_v:
                st4(out, i64(row) * dim_v + channel + 8, O[second + 1], O[5 + second], O[9 + second], O[13 + second])

    @device
    def leave_statistics(out, statistics, row, lane, m, l):
        if row >= 0 and lane & 3 == 0:
            st(out, statistics + 2 * i64(row), m)
            st(out, statistics + 2 * i64(row) + 1, l)

    @device
    def weigh4(lane, s, i, reach, p_hi, p_lo, d_p, a, b, O, out, rows):
        to = 0 if split else 4 * i
        weigh2(lane, s, i, to, reach, p_hi, p_lo, d_p, a, b, O)
        weigh2(lane, s, i + 2, to + 8, reach, p_hi, p_lo, d_p, a, b, O)
        if split:
            leave_row(out, rows[0], lane & 3, i, O, 0)
            leave_row(out, rows[1], lane & 3, i, O, 2)

    @device
    def work(tid, s, bound, window, reach, M, L, O, out, rows, statistics):
        """A warp's rows with the piece in shared memory. bound: the positions of two rows, -1 for a row that is not to be touched. Returns M and L; where
        the blocks share pieces, (m, l, o) go to `rows` of `out`, -1 for none."""
        scores, p_hi, p_lo = cuda.local.array(64, f32), cuda.local.array(16, u32), cuda.local.array(16, u32)
        lane = i32(tid & 31)
        m = scores4(tid, s, 0, bound, window, reach, scores, (MINUS_INFINITY, MINUS_INFINITY))
        m = scores4(tid, s, 4, bound, window, reach, scores, m)
        m = scores4(tid, s, 8, bound, window, reach, scores, m)
        m = scores4(tid, s, 12, bound, window, reach, scores, m)
        m = max_lane(max_lane(m[0], lane ^ 1), lane ^ 2), max_lane(max_lane(m[1], lane ^ 1), lane ^ 2)
        x, amax = weights4(lane, s, 0, bound, window, reach, m, scores, (z, z))
        y, amax = weights4(lane, s, 2, bound, window, reach, m, scores, amax)
        x = add4(x, y)
        y, amax = weights4(lane, s, 1, bound, window, reach, m, scores, amax)
        w, amax = weights4(lane, s, 3, bound, window, reach, m, scores, amax)
        x = add4(x, add4(y, w))
        l0 = add(add_lanes(x[0], lane), add_lanes(x[1], lane))
        l1 = add(add_lanes(x[2], lane), add_lanes(x[3], lane))
        d0, inv0 = scales(max_pattern(max_pattern(amax[0], lane ^ 1), lane ^ 2))
        d1, inv1 = scales(max_pattern(max_pattern(amax[1], lane ^ 1), lane ^ 2))
        for i in range(8):  # a word of either row, of 16 keys
            j = 8 * i
            p_hi[2 * i], p_lo[2 * i] = limbs4((scores[j], scores[j + 1], scores[j + 4], scores[j + 5]), inv0)
            p_hi[2 * i + 1], p_lo[2 * i + 1] = limbs4((scores[j + 2], scores[j + 3], scores[j + 6], scores[j + 7]), inv1)
        if split:
            leave_statistics(out, statistics, rows[0], lane, m[0], l0)
            leave_statistics(out, statistics, rows[1], lane, m[1], l1)
        # A row that sees no key, whose l is 0 (the largest of visible keys has p = 1, or NaN), stays as it is: fma(O, 1, mul(+0, -0))
        M0, M1 = larger_float(M[0], m[0]), larger_float(M[1], m[1])
        a0, b0 = exp(sub(M[0], M0)), exp(sub(m[0], M0))
        a1, b1 = exp(sub(M[1], M1)), exp(sub(m[1], M1))
        if l0 == ZERO:
            a0, b0 = ONE, MINUS_ZERO
        if l1 == ZERO:
            a1, b1 = ONE, MINUS_ZERO
        weigh4(lane, s, 0, reach, p_hi, p_lo, (d0, d1), (a0, a1), (b0, b1), O, out, rows)
        weigh4(lane, s, 4, reach, p_hi, p_lo, (d0, d1), (a0, a1), (b0, b1), O, out, rows)
        if n_slabs > 1:
            weigh4(lane, s, 8, reach, p_hi, p_lo, (d0, d1), (a0, a1), (b0, b1), O, out, rows)
            weigh4(lane, s, 12, reach, p_hi, p_lo, (d0, d1), (a0, a1), (b0, b1), O, out, rows)
        return (M0, M1), (fma(L[0], a0, mul(l0, b0)), fma(L[1], a1, mul(l1, b1)))

    @device
    def result(x, a, L):
        return div(mul(x, a) if sinks_there else x, L)

    @device
    def write_octet(out, at, o, a, L, O, row, column):
        """o: index in O of the first product of the slab."""
        i = o + 2 * row + column
        st4(out, at, result(O[i], a, L), result(O[i + 4], a, L), result(O[i + 8], a, L), result(O[i + 12], a, L))
        st4(out, at + 4, result(O[i + 16], a, L), result(O[i + 20], a, L), result(O[i + 24], a, L), result(O[i + 28], a, L))

    @device
    def write_row(sinks, out, head, at, t, M, L, O, row):
        a = ONE
        if sinks_there:
            a, L = sink(M, L, ld(sinks, head))
        for b in range(n_slabs):
            for column in range(2):
                channel = b * CHANNELS + 16 * t + 8 * column
                if dim_v % CHANNELS == 0 or channel < dim_v:
                    write_octet(out, at + channel, 32 * b, a, L, O, row, column)

    @device
    def row_of(tid, second):
        """(token of the block, head of the block) of row g or, second = 8, g + 8 of a lane."""
        row = i32((tid >> 5) * ROWS + ((tid & 31) >> 2) + second)
        token = i32(row // heads)
        return token, i32(row - token * heads)

    @device
    def index(first_token, token, head):
        """Of a row among all tokens' heads."""
        return i64(i32(i32(first_token + token) * i32(cuda.gridDim.x * heads) + i32(cuda.blockIdx.x * heads) + head))

    @device
    def row_of_piece(first_token, token, head, n_ctx, first, bound):
        """Where o of a row and the piece that begins at `first` goes; -1 for a row whose query is before the piece, or is not to be touched."""
        row = -1
        if first <= bound:
            row = i32(i32(index(first_token, token, head)) * ((n_ctx + PIECE - 1) // PIECE) + (first >> 7))
        return i32(row)

    def kernel(q, k, v, seq, pos, present, sinks, out, n, n_ctx, n_head_kv, row_v, window, scale, n_falling):
        s = cuda.shared.array(0, types.int32)
        O = cuda.local.array(n_outputs, f32)
        tid = i32(cuda.threadIdx.x)
        first_token = i32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * tokens)
        if n_warps == 4 and not split:
            if cuda.blockIdx.y >= n_falling:
                first_token = i32((cuda.blockIdx.y - n_falling) * tokens)
        n_tokens = i32(min(tokens, n - first_token))
        token, head = row_of(tid, 0)
        for b in range(n_blocks):
            query_block(q, index(first_token, token, head) * dim_k, b, 0, token < n_tokens, tid, scale, s)
        token, head = row_of(tid, 8)
        for b in range(n_blocks):
            query_block(q, index(first_token, token, head) * dim_k, b, 1, token < n_tokens, tid, scale, s)
        for i in range(n_outputs):
            O[i] = ZERO
        M, L = (MINUS_INFINITY, MINUS_INFINITY), (ZERO, ZERO)

        run = i32(0)
        while run < n_tokens:
            sequence, end, last, first = ld(seq, first_token + run), run, i32(-1), NEVER
            while end < n_tokens and ld(seq, first_token + end) == sequence:
                position = ld(pos, first_token + end)
                first, last, end = i32(min(first, position)), i32(max(last, position)), i32(end + 1)
            tid, bound0, bound1 = afresh(tid), i32(-1), i32(-1)
            token, _ = row_of(tid, 0)
            if run <= token and token < end:
                bound0 = ld(pos, first_token + token)
            token, _ = row_of(tid, 8)
            if run <= token and token < end:
                bound1 = ld(pos, first_token + token)
            lane = i32(tid & 31)
            warp_last = max_pattern(max_pattern(max_pattern(i32(max(bound0, bound1)), lane ^ 4), lane ^ 8), lane ^ 16)
            before = i32(min(bound0 if bound0 >= 0 else NEVER, bound1 if bound1 >= 0 else NEVER))  # the first key that is seen is behind `before` - window
            before = i32(-max_pattern(max_pattern(max_pattern(i32(-before), lane ^ 4), lane ^ 8), lane ^ 16))
            first = i32((first_piece(first, window) + (cuda.blockIdx.z if split else 0)) * PIECE)
            while first <= last:
                tid = afresh(tid)
                lane, cell, head_kv = i32(tid & 31), i64(sequence) * n_ctx, i32(cuda.blockIdx.x // (cuda.gridDim.x // n_head_kv))
                cuda.syncthreads()  # all are done with the piece before
                part = i32(tid >> 5)
                while part < PIECE // ROWS:
                    stage(k, v, present, cell, row_v, first, last, i32(part * ROWS), n_head_kv, head_kv, lane, s)
                    part = i32(part + n_warps)
                cuda.syncthreads()  # the limbs are there
                if first <= warp_last and first_piece(before, window) * PIECE <= first:
                    rows, statistics = (z, z), i64(0)
                    if split:
                        token, head = row_of(tid, 0)
                        row0 = row_of_piece(first_token, token, head, n_ctx, first, bound0)
                        token, head = row_of(tid, 8)
                        rows = row0, row_of_piece(first_token, token, head, n_ctx, first, bound1)
                        statistics = statistics_at(n, cuda.gridDim.x * heads, n_ctx, dim_v)
                    M, L = work(tid, s, (bound0, bound1), window, i32(warp_last - first), M, L, O, out, rows, statistics)
                first = i32(first + (PIECE * cuda.gridDim.z if split else PIECE))
            run = end
        if not split:
            tid, first_token = afresh(tid), afresh(first_token)
            token, head = row_of(tid, 0)
            if token < n_tokens:
                write_row(sinks, out, cuda.blockIdx.x * heads + head, index(first_token, token, head) * dim_v, tid & 3, M[0], L[0], O, 0)
            token, head = row_of(tid, 8)
            if token < n_tokens:
                write_row(sinks, out, cuda.blockIdx.x * heads + head, index(first_token, token, head) * dim_v, tid & 3, M[1], L[1], O, 1)
    return Kernel(kernel, (F32, K.pointer, V.pointer, I32, I32, U8, F32, F32, N, N, N, N, N, SCALAR_F32, N), 32 * n_warps)


def flash_attn_ext_tile(target, type_k, type_v, q, k, v, seq, pos, present, sinks, out, n, n_head, n_head_kv, dim_k, dim_v, n_ctx, row_v, window, scale, heads,
                        n_splits, n_warps):
    """Arguments of `flash_attn_ext`; heads and warps of a block. n_splits blocks share the pieces of the same rows, whose results they leave in `out` for
    `flash_attn_ext_combine`, sinks being None; None: one block, and out is out."""
    kernel = flash_attn_ext_tile_kernel(type_k, type_v, dim_k, dim_v, heads, n_warps, n_splits is not None, sinks is not None)
    n_tiles, parts = -(-n // (ROWS * n_warps // heads)), n_head // heads
    # The last positions have most pieces: they go first. Where all tiles are resident, two on each multiprocessor, the least then go beside the most.
    together = n_warps == 4 and n_splits is None and n_tiles * parts <= 2 * target.n_multiprocessors
    args = (q, k, v, seq, pos, present, q if sinks is None else sinks, out, n, n_ctx, n_head_kv, row_v, window, scale, (n_tiles + 1) // 2 if together else n_tiles)
    grid = parts, n_tiles, n_splits or 1
    return target.launch(kernel, grid, 32 * n_warps, args, 4 * shared_layout(dim_k, dim_v, n_warps).n_words)
