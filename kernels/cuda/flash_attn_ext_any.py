"""Attention for every type of cache and size of head (numerics, section 8).

A block of 128 threads is one query token and `heads` query heads of one KV head: keys and values are read and quantized once for
all of them. It takes all pieces of 128 keys in position order and combines them; or every n_splits-th, and (m, l, o) of each
waits for `flash_attn_ext_combine`. In a piece

    1. thread = key       scores of every head; the value's scale
    2. trees of 128       m, then l and the amax of p' = p * d_v
    3. thread = key       limbs of p', and of the value, 64 channels at a time, transposed into shared memory
    4. thread = (head, channel), again and again      o, combined with what came before (O = -0, a = b = 1 where that is to wait:
       O is o then)

float32 caches take float32 chains in steps 1 and 4, f16 and q8_0 caches exact integer sums of limbs (dp4a).
"""
from typing import NamedTuple

from numba import cuda, types

from ..reference.flash_attn_ext import score_scale
from .fixed_point import MINUS_INFINITY, ZERO, amax_of, fixed_point, larger_float, scales
from .flash_attn_ext_combine import (PIECE, addresses, capping, first_piece, of_few_models, ring_of, sink, sizes, span_of,
                                     statistics_at, stride)
from .lane_floats import get, put, sum8
from .launch import F32, I32, N, SCALAR_F32, U8, Kernel, factory
from .ptx import (add, as_f32, device, div, dp4a, exp, f2i, f32, fma, i32, i64, ld, ldc, lds, lds4, mul, prmt, st, stage,
                  sts, sts8, sub, u32)
from .set_rows import cached, larger

# A block has a thread for each key of a piece.
CHANNELS = 64      # of Q and K with one scale; of V in shared memory at a time
V_STRIDE = PIECE + 16  # bytes of a channel's limbs: 16 keys of eight threads then lie in all 32 banks once
V_WORDS = V_STRIDE // 4
ONE, MINUS_ZERO = f32(1), f32(-0.0)


class Shared(NamedTuple):
    """Where everything lies in shared memory, in words of four bytes; multiples of four."""
    visible: int       # bytes [128]
    scores: int        # f32 [heads][128]: s, then p
    weights: int       # f32 [heads][128]: p' (p where V is float32)
    maxima: int        # f32 [heads][16]: partials of m,
    sums: int          # of l,
    amaxes: int        # and of the amax of p' (bit patterns)
    rescale_old: int   # f32 [heads]: a,
    rescale_new: int   # b,
    d_p: int           # scale of the limbs of p',
    inv_p: int         # and 16256 / amax
    outputs: int       # f32 [heads][Dv]: O
    q: int             # f32 [heads][q_row], or limbs int8 [heads][q_row] of both kinds
    q_lo: int
    q_d: int           # f32 [heads][blocks of 64]: d_q * scale
    p_hi: int          # limbs of p', int8 [heads][128]
    p_lo: int
    v_hi: int          # limbs of V, int8 [64 channels][V_STRIDE]
    v_lo: int
    n_words: int


def shared_layout(type_k: str, type_v: str, dim_k: int, dim_v: int, heads: int) -> Shared:
    fixed_k, fixed_v = type_k != "f32", type_v != "f32"
    blocks = -(-dim_k // CHANNELS)
    q_words = heads * blocks * CHANNELS // (4 if fixed_k else 1)
    sizes = dict(
        visible=PIECE // 4, scores=heads * PIECE, weights=heads * PIECE, maxima=heads * 16, sums=heads * 16, amaxes=heads * 16,
        rescale_old=heads, rescale_new=heads, d_p=heads, inv_p=heads, outputs=heads * dim_v,
        q=q_words, q_lo=q_words * fixed_k, q_d=heads * blocks * fixed_k,
        p_hi=heads * PIECE // 4 * fixed_v, p_lo=heads * PIECE // 4 * fixed_v,
        v_hi=CHANNELS * V_WORDS * fixed_v, v_lo=CHANNELS * V_WORDS * fixed_v)
    offsets, end = {}, 0
    for name, n in sizes.items():
        offsets[name] = end
        end += (n + 3) & -4
    return Shared(**offsets, n_words=end)


# Device functions. s: shared memory as words

def amax_over(octet, width):
    """Device function (p, at) -> amax of `width` values from index `at` on, 32 at a time so that several loads are under way."""
    whole = width // 32 * 32

    @device
    def amax_of_row(p, at):
        amax = i32(0)
        for c in range(0, whole, 32):
            x, y, z, w = octet(p, at + c, 8), octet(p, at + c + 8, 8), octet(p, at + c + 16, 8), octet(p, at + c + 24, 8)
            amax = amax_of(amax_of(amax_of(amax_of(amax, x), y), z), w)
        for c in range(whole, width, 8):
            amax = amax_of(amax, octet(p, at + c, width - c))
        return amax
    return amax_of_row


@device
def level(x, inv):
    """0 for inv = 0, whatever x: 0 and NaN both become 0."""
    return f2i(mul(x, inv))


@device
def high_limb(q):
    return i32(i32(q + 64) >> 7)


@device
def low_limb(q, hi):
    return i32(q - (hi << 7))


@device
def bytes4(a, b, c, d):
    return prmt(prmt(a, b, 0x0040), prmt(c, d, 0x0040), 0x5410)


@device
def limbs4(a, b, c, d, inv):
    """Four values -> words of their four high and of their four low limbs."""
    a, b, c, d = level(a, inv), level(b, inv), level(c, inv), level(d, inv)
    ha, hb, hc, hd = high_limb(a), high_limb(b), high_limb(c), high_limb(d)
    return bytes4(ha, hb, hc, hd), bytes4(low_limb(a, ha), low_limb(b, hb), low_limb(c, hc), low_limb(d, hd))


@device
def dot4(a, b, total):
    """a, b: four words."""
    return dp4a(a[3], b[3], dp4a(a[2], b[2], dp4a(a[1], b[1], dp4a(a[0], b[0], total))))


# The tree of 128 in two steps: partials i, i + 16, ... of every head, then those 16; the same additions as by seven halvings.

@device
def max8(s, i):
    m = get(s, i)
    m = m if m == m else MINUS_INFINITY
    for k in range(16, PIECE, 16):
        m = larger_float(m, get(s, i + k))
    return m


@device
def max16(s, i):
    """Of partials, which are not NaN."""
    m = get(s, i)
    for k in range(0, 16, 4):
        a, b, c, d = lds4(s, i + k)
        m = larger_float(larger_float(larger_float(larger_float(m, as_f32(a)), as_f32(b)), as_f32(c)), as_f32(d))
    return m


@device
def amax8(s, i):
    amax = i32(0)
    for k in range(0, PIECE, 16):
        amax = larger(amax, get(s, i + k))
    return amax


@device
def amax16(s, i):
    amax = i32(0)
    for k in range(16):
        amax = larger(amax, get(s, i + k))
    return amax


@device
def sum4_of_16(s, i):
    """The partial i that is left of 16 when halves of 8 and of 4 have been added."""
    return add(add(get(s, i), get(s, i + 8)), add(get(s, i + 4), get(s, i + 12)))


@device
def sum16(s, i):
    return add(add(sum4_of_16(s, i), sum4_of_16(s, i + 2)), add(sum4_of_16(s, i + 1), sum4_of_16(s, i + 3)))


# Scores. prepare(q, at, scale, s, t) puts the block's queries into shared memory, score(k, at, scale, s, t) the scores of thread
# t's key.

def chain_scores(octet, where: Shared, dim, heads):
    row = -(-dim // CHANNELS) * CHANNELS

    @device
    def prepare(q, at, scale, s, t):
        for h in range(heads):
            for c in range(t, row, PIECE):
                put(s, where.q + h * row + c, ldc(q, at + h * dim + c) if c < dim else ZERO)

    @device
    def score(k, at, scale, s, t):
        for h in range(heads):
            put(s, where.scores + h * PIECE + t, ZERO)
        for c in range(0, dim, 8):
            x = octet(k, at + c, dim - c)  # zeros beyond the head's end add +0: they change the sign of a zero score at most
            for h in range(heads):
                a, b = lds4(s, where.q + h * row + c), lds4(s, where.q + h * row + c + 4)
                chain = get(s, where.scores + h * PIECE + t)
                chain = fma(as_f32(a[3]), x[3], fma(as_f32(a[2]), x[2], fma(as_f32(a[1]), x[1], fma(as_f32(a[0]), x[0], chain))))
                chain = fma(as_f32(b[3]), x[7], fma(as_f32(b[2]), x[6], fma(as_f32(b[1]), x[5], fma(as_f32(b[0]), x[4], chain))))
                put(s, where.scores + h * PIECE + t, chain)
        for h in range(heads):
            put(s, where.scores + h * PIECE + t, mul(get(s, where.scores + h * PIECE + t), scale))
    return prepare, score


def fixed_scores(octet, q_octet, where: Shared, dim, heads):
    blocks = -(-dim // CHANNELS)
    row = blocks * CHANNELS // 4  # words
    n_full, last = dim // CHANNELS, dim % CHANNELS

    @device
    def element(q, at, c):
        return ldc(q, at + c) if c < dim else ZERO

    @device
    def prepare(q, at, scale, s, t):
        for i in range(t, heads * row, PIECE):  # four channels a thread, each thread finding the amax of their block
            h = i // row
            w = i - h * row
            b = w >> 4
            head = at + h * dim
            amax = i32(0)
            for c in range(b * CHANNELS, min((b + 1) * CHANNELS, dim), 8):
                amax = amax_of(amax, q_octet(q, head + c, dim - c))
            d, inv = scales(amax)
            hi, lo = limbs4(element(q, head, 4 * w), element(q, head, 4 * w + 1),
                            element(q, head, 4 * w + 2), element(q, head, 4 * w + 3), inv)
            sts(s, where.q + i, hi)
            sts(s, where.q_lo + i, lo)
            if w & 15 == 0:
                put(s, where.q_d + h * blocks + b, mul(d, scale))

    def block_of(width):
        """Adds one block of `width` channels to the scores."""
        n_words = -(-width // 16) * 4
        block_amax = amax_over(octet, width)

        @device
        def block(k, at, b, s, t):
            hi = cuda.local.array(n_words, u32)
            lo = cuda.local.array(n_words, u32)
            for i in range(n_words):
                hi[i] = u32(0)
                lo[i] = u32(0)
            d, inv = scales(block_amax(k, at))
            for c in range(0, width, 8):
                x = octet(k, at + c, width - c)
                hi[c // 4], lo[c // 4] = limbs4(x[0], x[1], x[2], x[3], inv)
                hi[c // 4 + 1], lo[c // 4 + 1] = limbs4(x[4], x[5], x[6], x[7], inv)
            for h in range(heads):
                at_q = h * row + b * (CHANNELS // 4)
                hh, mid, ll = i32(0), i32(0), i32(0)
                for i in range(0, n_words, 4):
                    k_hi, k_lo = (hi[i], hi[i + 1], hi[i + 2], hi[i + 3]), (lo[i], lo[i + 1], lo[i + 2], lo[i + 3])
                    q_hi, q_lo = lds4(s, where.q + at_q + i), lds4(s, where.q_lo + at_q + i)
                    hh = dot4(q_hi, k_hi, hh)
                    mid = dot4(q_lo, k_hi, dot4(q_hi, k_lo, mid))
                    ll = dot4(q_lo, k_lo, ll)
                x = mul(fixed_point(hh, i32((mid << 7) + ll)), get(s, where.q_d + h * blocks + b))
                put(s, where.scores + h * PIECE + t, fma(x, d, get(s, where.scores + h * PIECE + t)))
        return block

    full_block, last_block = block_of(CHANNELS), block_of(last or CHANNELS)

    @device
    def score(k, at, scale, s, t):
        for h in range(heads):
            put(s, where.scores + h * PIECE + t, ZERO)
        for b in range(n_full):
            full_block(k, at + b * CHANNELS, b, s, t)
        if last:
            last_block(k, at + n_full * CHANNELS, n_full, s, t)
    return prepare, score


# Values. key_scale(v, at) -> (d_v, 16256 / amax) of thread t's key; weigh(v, at, step, visible, inv_v, s, t) adds the piece to
# the outputs. at: index of the key's first channel, for weigh of the piece's first key; step: from key to key.

@device
def combine(s, output, h, where_a, where_b, o):
    put(s, output, fma(get(s, output), get(s, where_a + h), mul(o, get(s, where_b + h))))


def chain_values(where: Shared, dim, heads):
    @device
    def key_scale(v, at):
        return ONE, ZERO

    @device
    def weigh(v, at, step, visible, inv_v, s, t):
        for first in range(0, dim, CHANNELS):
            for i in range(t, heads * CHANNELS, PIECE):
                h, c = i // CHANNELS, first + i % CHANNELS
                if c < dim:
                    o = ZERO
                    for j in range(0, PIECE, 4):
                        mask, p, key = lds(s, where.visible + j // 4), lds4(s, where.weights + h * PIECE + j), at + j * step + c
                        if mask & 0x1:
                            o = fma(as_f32(p[0]), ldc(v, key), o)
                        if mask & 0x100:
                            o = fma(as_f32(p[1]), ldc(v, key + step), o)
                        if mask & 0x10000:
                            o = fma(as_f32(p[2]), ldc(v, key + 2 * step), o)
                        if mask & 0x1000000:
                            o = fma(as_f32(p[3]), ldc(v, key + 3 * step), o)
                    combine(s, where.outputs + h * dim + c, h, where.rescale_old, where.rescale_new, o)
    return key_scale, weigh


def fixed_values(octet, where: Shared, dim, heads):
    row_amax = amax_over(octet, dim)

    @device
    def key_scale(v, at):
        return scales(row_amax(v, at))

    @device
    def put_limbs(s, c, t, x, inv):
        q = level(x, inv)
        hi = high_limb(q)
        sts8(s, 4 * where.v_hi + c * V_STRIDE + t, hi)
        sts8(s, 4 * where.v_lo + c * V_STRIDE + t, low_limb(q, hi))

    @device
    def weigh(v, at, step, visible, inv_v, s, t):
        for h in range(heads):
            q = level(get(s, where.weights + h * PIECE + t), get(s, where.inv_p + h))
            hi = high_limb(q)
            sts8(s, 4 * where.p_hi + h * PIECE + t, hi)
            sts8(s, 4 * where.p_lo + h * PIECE + t, low_limb(q, hi))
        for first in range(0, dim, CHANNELS):
            if visible:  # whatever lies in the places of other keys is multiplied by 0
                for c in range(0, min(CHANNELS, dim - first), 8):
                    x = octet(v, at + t * step + first + c, dim - first - c)
                    put_limbs(s, c, t, x[0], inv_v)
                    put_limbs(s, c + 1, t, x[1], inv_v)
                    put_limbs(s, c + 2, t, x[2], inv_v)
                    put_limbs(s, c + 3, t, x[3], inv_v)
                    put_limbs(s, c + 4, t, x[4], inv_v)
                    put_limbs(s, c + 5, t, x[5], inv_v)
                    put_limbs(s, c + 6, t, x[6], inv_v)
                    put_limbs(s, c + 7, t, x[7], inv_v)
            cuda.syncthreads()  # limbs are written
            for i in range(t, heads * CHANNELS, PIECE):
                h, c = i // CHANNELS, i % CHANNELS
                if first + c < dim:
                    hh, mid, ll = i32(0), i32(0), i32(0)
                    for w in range(0, PIECE // 4, 4):
                        p_hi, p_lo = lds4(s, where.p_hi + h * (PIECE // 4) + w), lds4(s, where.p_lo + h * (PIECE // 4) + w)
                        v_hi, v_lo = lds4(s, where.v_hi + c * V_WORDS + w), lds4(s, where.v_lo + c * V_WORDS + w)
                        hh = dot4(p_hi, v_hi, hh)
                        mid = dot4(p_lo, v_hi, dot4(p_hi, v_lo, mid))
                        ll = dot4(p_lo, v_lo, ll)
                    o = mul(fixed_point(hh, i32((mid << 7) + ll)), get(s, where.d_p + h))
                    combine(s, where.outputs + h * dim + first + c, h, where.rescale_old, where.rescale_new, o)
            cuda.syncthreads()  # limbs are read
    return key_scale, weigh


# The stages of a piece. s: the shared memory of the block, int32, laid out as `Shared`; t: the thread. Each ends with the barrier
# that protects what the next one reads.

@stage
def any_visible(where, visible, s, t):
    """Whether a key of the piece is visible, not 0, for all threads; visible: whether that of thread t is."""
    sts8(s, 4 * where.visible + t, 1 if visible else 0)
    cuda.syncthreads()  # visible keys are known; the queries are prepared
    found = i32(0)
    for i in range(0, PIECE // 4, 4):
        a, b, c, d = lds4(s, where.visible + i)
        found = i32(found | a | b | c | d)
    return found


def softener(where: Shared, heads: int):
    """(visible, d_v, s, t): `scores` [head][128] become p = exp(sub(s, m)) of visible keys, +0 of others, `weights` p' = mul(p,
    d_v); of their trees the 16 partials that are left go to `maxima`, `sums` and `amaxes` [head][16]. thread = key."""
    @stage
    def soften(visible, d_v, s, t):
        for i in range(t, heads * 16, PIECE):
            put(s, where.maxima + i, max8(s, where.scores + (i >> 4) * PIECE + (i & 15)))
        cuda.syncthreads()  # partial maxima are written, scores of other threads read
        for h in range(heads):
            p, weight = ZERO, ZERO
            if visible:
                p = exp(sub(get(s, where.scores + h * PIECE + t), max16(s, where.maxima + h * 16)))
                weight = mul(p, d_v)
            put(s, where.scores + h * PIECE + t, p)
            put(s, where.weights + h * PIECE + t, weight)
        cuda.syncthreads()  # p and p' are written
        for i in range(t, heads * 16, PIECE):
            put(s, where.sums + i, sum8(s, where.scores + (i >> 4) * PIECE + (i & 15)))
            sts(s, where.amaxes + i, amax8(s, where.weights + (i >> 4) * PIECE + (i & 15)))
        cuda.syncthreads()  # partial sums and amaxes are written
    return soften


def head_folder(where: Shared, heads: int, split: bool):
    """(out, at, M, L, s, t) -> (M, L) of head t, by threads t < heads: new M = the larger of M and m, a = exp(sub(M, new M)), b =
    exp(sub(m, new M)), L = fma(L, a, mul(l, b)); a, b and the scales of p' for the head's threads to `rescale_old`,
    `rescale_new`, `d_p` and `inv_p` [head]. split: (m, l) go to f32 out[at], out[at + 1] instead, and a = b = 1."""
    @stage
    def fold_head(out, at, M, L, s, t):
        if t < heads:
            m, l = max16(s, where.maxima + t * 16), sum16(s, where.sums + t * 16)
            new_M = larger_float(M, m)
            a, b = exp(sub(M, new_M)), exp(sub(m, new_M))
            M, L = new_M, fma(L, a, mul(l, b))
            if split:
                st(out, at, m)
                st(out, at + 1, l)
                M, a, b = MINUS_INFINITY, ONE, ONE
            d_p, inv_p = scales(amax16(s, where.amaxes + t * 16))
            put(s, where.rescale_old + t, a)
            put(s, where.rescale_new + t, b)
            put(s, where.d_p + t, d_p)
            put(s, where.inv_p + t, inv_p)
        cuda.syncthreads()  # what a head's threads share is written
        return M, L
    return fold_head


def result_writer(where: Shared, dim_v: int, heads: int, sinks_there: bool):
    """(sinks, first_head, out, at, M, L, s, t): out = div(O, L), with a sink of the head (a, L) = sink(M, L, it) and div(mul(O,
    a), L). sinks: f32 [n_head]; first_head: of the block; out: f32, its outputs [heads][dim_v] from `at` on; M, L: of head t <
    heads."""
    @stage
    def write_result(sinks, first_head, out, at, M, L, s, t):
        if t < heads:
            if sinks_there:
                a, L = sink(M, L, ld(sinks, first_head + t))
                put(s, where.rescale_new + t, a)
            put(s, where.rescale_old + t, L)
        cuda.syncthreads()
        for i in range(t, heads * dim_v, PIECE):
            O = get(s, where.outputs + i)
            if sinks_there:
                O = mul(O, get(s, where.rescale_new + i // dim_v))
            st(out, at + i, div(O, get(s, where.rescale_old + i // dim_v)))
    return write_result


@factory([("f16", "f16", 64, 64, 3, False, False), ("q8_0", "q8_0", 80, 80, 1, False, True),
          ("f32", "f32", 64, 64, 3, True, False), ("f16", "q8_0", 10, 8, 4, False, False),
          ("q8_0", "f32", 128, 128, 8, True, False), ("f32", "f16", 65, 63, 2, True, False),
          ("f32", "f32", 576, 512, 8, False, False), ("f16", "f16", 576, 512, 8, True, False),
          ("f32", "f32", 256, 256, 2, False, False, True, 50.0),
          ("f16", "f16", 64, 64, 8, True, False, True, 0.0, True), ("f32", "f32", 64, 64, 2, False, True, True, 0.0, True)])
def flash_attn_ext_any_kernel(type_k, type_v, dim_k, dim_v, heads, split, sinks_there, whole_octets=True, softcap=0.0,
                              is_ring=False):
    """whole_octets: rows of V are, as heads of dim_v channels may be."""
    where = shared_layout(type_k, type_v, dim_k, dim_v, heads)
    q_row, k_row, v_row = cached("f32", dim_k), cached(type_k, dim_k), cached(type_v, dim_v if whole_octets else 1)
    prepare, score = (chain_scores(k_row.octet, where, dim_k, heads) if type_k == "f32"
                      else fixed_scores(k_row.octet, q_row.octet, where, dim_k, heads))
    key_scale, weigh = chain_values(where, dim_v, heads) if type_v == "f32" else fixed_values(v_row.octet, where, dim_v, heads)
    soften, fold_head = softener(where, heads), head_folder(where, heads, split)
    write_result, capped = result_writer(where, dim_v, heads, sinks_there), capping(softcap)
    v_stride, ring = stride(dim_v), ring_of(is_ring)

    def kernel(q, k, v, seq, pos, present, sinks, out, n_ctx, step_v, span, scale, n_splits):  # out: the pieces if split
        s = cuda.shared.array(0, types.int32)
        t = cuda.threadIdx.x
        token = (cuda.gridDim.x - 1 - cuda.blockIdx.x) // n_splits  # the last positions have most pieces: they go first
        head_kv, n_head_kv = cuda.blockIdx.y, cuda.gridDim.y
        heads_before = (i64(token) * n_head_kv + head_kv) * cuda.gridDim.z * heads + cuda.blockIdx.z * heads
        prepare(q, heads_before * dim_k, scale, s, t)
        for i in range(t, heads * dim_v, PIECE):
            put(s, where.outputs + i, ZERO)
        M, L = MINUS_INFINITY, ZERO  # of head t, where t < heads
        position, cell, window = ldc(pos, token), i64(ldc(seq, token)) * n_ctx, ring.window(span)
        begin = ring.begin(span, ldc(seq, token), cell)  # of K and V
        step_k = n_head_kv * dim_k

        n, n_head = cuda.gridDim.x // n_splits, cuda.gridDim.y * cuda.gridDim.z * heads
        most_pieces, statistics = (n_ctx + PIECE - 1) // PIECE, statistics_at(n, n_head, n_ctx, dim_v)

        for first in range((first_piece(position, window) + cuda.blockIdx.x % n_splits) * PIECE, position + 1, n_splits * PIECE):
            piece = heads_before * most_pieces + first // PIECE  # of the first head
            if split:
                for i in range(t, heads * dim_v, PIECE):
                    put(s, where.outputs + i, MINUS_ZERO)
            visible = position - window < first + t <= position and ldc(present, cell + min(first + t, position)) != 0
            if any_visible(where, visible, s, t) != 0:
                # 1. s and d_v
                at = begin - ring.moved(span, first)
                d_v, inv_v = ZERO, ZERO
                if visible:
                    score(k, (at + first + t) * step_k + head_kv * dim_k, scale, s, t)
                    if softcap:
                        for h in range(heads):
                            put(s, where.scores + h * PIECE + t, capped(get(s, where.scores + h * PIECE + t)))
                    d_v, inv_v = key_scale(v, (at + first + t) * step_v + head_kv * dim_v)
                else:
                    for h in range(heads):
                        put(s, where.scores + h * PIECE + t, MINUS_INFINITY)
                cuda.syncthreads()  # scores are written

                # 2. m, p and p', l and amax
                soften(visible, d_v, s, t)
                M, L = fold_head(out, statistics + 2 * (piece + t * most_pieces), M, L, s, t)

                # 3. and 4.
                weigh(v, (at + first) * step_v + head_kv * dim_v, step_v, visible, inv_v, s, t)
                if split:
                    cuda.syncthreads()  # the outputs are there
                    for i in range(t, heads * dim_v, PIECE):
                        h = i // dim_v
                        st(out, (piece + h * most_pieces) * v_stride + i - h * dim_v, get(s, where.outputs + i))
            elif split and t < heads:
                st(out, statistics + 2 * (piece + t * most_pieces) + 1, ZERO)
            cuda.syncthreads()  # everything of this piece is read

        if not split:
            write_result(sinks, (head_kv * cuda.gridDim.z + cuda.blockIdx.z) * heads, out, heads_before * dim_v, M, L, s, t)
    return Kernel(kernel, (F32, k_row.pointer, v_row.pointer, I32, I32, U8, F32, F32, N, N, ring.parameter, SCALAR_F32, N),
                  n_threads=PIECE)


def flash_attn_ext_any(call):
    """`flash_attn_ext` by call.plan; where n_splits blocks share the pieces of a token's heads, these, in call.scratch."""
    plan, size, split = call.plan, sizes(call), call.plan.n_splits is not None
    sinks, out, n_splits = (None, call.scratch, plan.n_splits) if split else (call.sinks, call.out, 1)
    of = call.k.dtype, call.v.dtype, size.dim_k, size.dim_v, plan.heads
    kernel = flash_attn_ext_any_kernel(*of, split, sinks is not None, size.row_v % 8 == 0, *of_few_models(call))
    args = *addresses(call), (sinks or call.q).data, out.data, size.n_ctx, size.row_v, span_of(size), score_scale(call), n_splits
    grid = size.n * n_splits, size.n_head_kv, size.n_head // size.n_head_kv // plan.heads
    return call.device.launch(kernel, grid, PIECE, args, 4 * shared_layout(*of).n_words)
