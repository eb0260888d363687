"""Attention over the KV cache in pieces of 128 positions (numerics, section 8)."""
from functools import lru_cache, partial

import numpy as np

from ...quant.device_functions import device
from ..arith import div, exp, f32, fma, l2f, mul, sub, tanh
from ..compile import jit
from .quantize import quantize_block
from .rms_norm import sum128
from .set_rows import cached_value

PIECE = 128           # keys
BLOCK = 64            # channels of Q and K with one scale
MINUS_INFINITY = f32(-np.inf)
NO_WINDOW = 2**31 - 1
NO_SINKS, NO_CAP = np.empty(0, np.float32), f32(0)
# For parts of one kernel, which are cached with it.


@lru_cache(None)
def flash_attn_ext_arrays(type_k, type_v):
    """kernel(q f32 [n, H, D], k, v, n_head_kv, seq i32 [n], pos i32 [n], present u8 [n_seq, n_ctx], scale f32, out f32 [n, H,
    Dv], window, sinks, softcap).

    k, v: caches of n_head_kv * D and n_head_kv * Dv values a cell (`set_rows`); the cell of (seq, position) is seq * ring +
    position % ring, ring = cells of a sequence. With one KV head v may have more, as K's cache has, of which the first Dv count.
    Query head h reads KV head h // (H // n_head_kv).
    window: how many positions a query sees, its own and those before it, by default all; sinks: f32 [H], by default none, of
    length 0; softcap: f32, 0 by default, else scale is divided by it, and scores become softcap times their tanh.
    """
    score = _score_chain(cached_value(type_k)) if type_k == "f32" else _score_fixed(cached_value(type_k))
    weigh = _weigh_chain(cached_value(type_v)) if type_v == "f32" else _weigh_fixed(cached_value(type_v))

    @jit(key=(type_k, type_v))
    def attend(q, k, v, n_head_kv, seq, pos, present, scale, out, window, sinks, softcap):
        n, n_head, dv = out.shape
        ring = k.shape[0] // present.shape[0]
        visible = np.zeros(PIECE, np.bool_)
        s, p, o = np.zeros(PIECE, np.float32), np.zeros(PIECE, np.float32), np.zeros(dv, np.float32)
        for token in range(n):
            for head in range(n_head):
                head_kv = head // (n_head // n_head_kv)
                M, L, O = MINUS_INFINITY, f32(0), np.zeros(dv, np.float32)
                for first in range(0, pos[token] + 1, PIECE):
                    for j in range(PIECE):
                        visible[j] = pos[token] - window < first + j <= pos[token] and present[seq[token], first + j]
                    if not visible.any():
                        continue
                    cell = seq[token] * ring + first % ring
                    m = MINUS_INFINITY
                    for j in range(PIECE):
                        if visible[j]:
                            s[j] = score(q[token, head], k, cell + j, head_kv, scale)
                            s[j] = mul(softcap, tanh(s[j])) if softcap != 0 else s[j]
                            m = s[j] if s[j] > m else m
                    for j in range(PIECE):
                        p[j] = exp(sub(s[j], m)) if visible[j] else f32(0)
                    l = sum128(p)
                    weigh(p, visible, v, cell, head_kv, o)
                    new_M = m if m > M else M
                    a, b = exp(sub(M, new_M)), exp(sub(m, new_M))
                    L = fma(L, a, mul(l, b))
                    for c in range(dv):
                        O[c] = fma(O[c], a, mul(o[c], b))
                    M = new_M
                if sinks.shape[0]:
                    new_M = sinks[head] if sinks[head] > M else M
                    a = exp(sub(M, new_M))
                    L = fma(L, a, exp(sub(sinks[head], new_M)))
                    for c in range(dv):
                        O[c] = mul(O[c], a)
                for c in range(dv):
                    out[token, head, c] = div(O[c], L)

    def attention(q, k, v, n_head_kv, seq, pos, present, scale, out, window=NO_WINDOW, sinks=NO_SINKS, softcap=NO_CAP):
        attend(q, k, v, n_head_kv, seq, pos, present, scale, out, window, sinks, softcap)
    return attention


def flash_attn_ext(call, kernel=flash_attn_ext_arrays):
    """out = attention of q over the cached keys and values that each query sees (numerics, section 8). q: f32 [n, heads * D]; k,
    v: caches; seq, pos: i32 [n];
    present: u8 [sequences, positions]; sinks: f32 [heads] or absent; out: f32 [n, heads * Dv]. window: positions that a query
    sees, 0 for all; softcap: of scores, 0 for none."""
    sinks = NO_SINKS if call.sinks is None else call.sinks.data
    return partial(kernel(call.k.dtype, call.v.dtype), call.q.heads(call.n_head), call.k.data, call.v.data, call.n_head_kv,
                   call.seq.data, call.pos.data,
                   call.present.data, score_scale(call), call.out.heads(call.n_head), call.window or NO_WINDOW, sinks,
                   f32(call.softcap))


def score_scale(call) -> np.float32:
    """What scores are multiplied by, before their tanh where they have a cap."""
    return f32(call.scale) / f32(call.softcap) if call.softcap else f32(call.scale)


# Scores: (q f32 [D], cache, cell, KV head, scale) -> s

def _score_chain(value):
    @device
    def score(q, k, cell, head_kv, scale):
        s = f32(0)
        for c in range(q.shape[0]):
            s = fma(q[c], value(k, cell, head_kv * q.shape[0] + c), s)
        return mul(s, scale)
    return score


def _score_fixed(value):
    @device
    def score(q, k, cell, head_kv, scale):
        dim = q.shape[0]
        s = f32(0)
        for first in range(0, dim, BLOCK):
            width = min(BLOCK, dim - first)
            key = np.zeros(width, np.float32)
            for c in range(width):
                key[c] = value(k, cell, head_kv * dim + first + c)
            q_levels, k_levels = np.zeros(width, np.int16), np.zeros(width, np.int16)
            d_q, d_k = quantize_block(q[first:first + width], q_levels), quantize_block(key, k_levels)
            x = fixed_point_dot(q_levels, k_levels)
            s = fma(mul(x, mul(d_q, scale)), d_k, s)
        return s
    return score


@jit
def fixed_point_dot(a, b):
    """a, b: i16 [n], each 128 hi + lo with lo in -64..63 -> the sum of a * b, from the sums of the products of limbs."""
    HH, MID, LL = np.int64(0), np.int64(0), np.int64(0)
    for i in range(a.shape[0]):
        hi_a, hi_b = (np.int64(a[i]) + 64) >> 7, (np.int64(b[i]) + 64) >> 7
        lo_a, lo_b = np.int64(a[i]) - 128 * hi_a, np.int64(b[i]) - 128 * hi_b
        HH += hi_a * hi_b
        MID += hi_a * lo_b + lo_a * hi_b
        LL += lo_a * lo_b
    return fma(l2f(HH), f32(16384), l2f(128 * MID + LL))


# Values: (p f32 [128], visible, cache, cell of the piece's first position, KV head, o f32 [Dv]) fills o

def _weigh_chain(value):
    @device
    def weigh(p, visible, v, cell, head_kv, o):
        dv = o.shape[0]
        for c in range(dv):
            o[c] = f32(0)
            for j in range(PIECE):
                if visible[j]:
                    o[c] = fma(p[j], value(v, cell + j, head_kv * dv + c), o[c])
    return weigh


def _weigh_fixed(value):
    @device
    def weigh(p, visible, v, cell, head_kv, o):
        dv = o.shape[0]
        row, levels, scaled = np.zeros(dv, np.float32), np.zeros((dv, PIECE), np.int16), np.zeros(PIECE, np.float32)
        v_levels, p_levels = np.zeros(dv, np.int16), np.zeros(PIECE, np.int16)
        for j in range(PIECE):
            if visible[j]:
                for c in range(dv):
                    row[c] = value(v, cell + j, head_kv * dv + c)
                scaled[j] = mul(p[j], quantize_block(row, v_levels))
                levels[:, j] = v_levels
        d_p = quantize_block(scaled, p_levels)
        for c in range(dv):
            o[c] = mul(fixed_point_dot(p_levels, levels[c]), d_p)
    return weigh
