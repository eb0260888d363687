"""Attention of many queries over f16 and q8_0 caches, on int8 tensor cores (numerics, section 8).

A block takes 16 rows a warp, a row being one token and one of up to 8 query heads of one KV head, and goes through the pieces of
128 keys in position order; or several blocks share the pieces of the same rows, each taking every so many-th, and leave (m, l, o)
to `flash_attn_ext_combine`. Tokens of a block that are of several sequences are taken run by run; pieces behind a run's last
position or before what its windows reach are not touched, nor are those of a warp whose rows see none of their keys. In a piece

    1. the block makes limbs of keys and values in shared memory, of 16 keys a warp: lane l = 4 g + t has the channels 8 t .. and
       32 + 8 t .. of each 64 of keys g and g + 8, and the channels 8 g .. of keys 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t
    2. a warp multiplies its queries with all keys: lane l has the scores of rows g and g + 8 with keys 2 t, 2 t + 1 of each 8
    3. m, p, l (the tree goes over the keys of a lane, then over lanes) and the limbs of p', which lie as the next product wants
       them
    4. a warp multiplies p' with all values, and combines or leaves o

Shared memory, [row of 16-byte pieces, one to spare so that eight rows lie in all 32 banks]: a key's words 0..3 of all t, of each
64 channels; a channel's words (four keys) of all t, for each 16 keys. Channel 8 g + e of each 64 is row 8 e + g, a column g of
the e-th product.

Of heads of more than LARGE channels shared memory holds either keys or values: they take turns, scores wait in registers, and
outputs in `out`, where a lane reads what it wrote.
"""
from itertools import accumulate
from typing import NamedTuple

from numba import cuda, types

from ..reference.flash_attn_ext import score_scale
from .fixed_point import (CHANNELS, MINUS_INFINITY, ZERO, fixed_point, key_loader, larger_float, lifted, limbs, octets_of,
                          rest, scales, value_loader)
from .flash_attn_ext_combine import (PIECE, addresses, capping, first_piece, of_few_models, ring_of, sink, sizes, span_of,
                                     statistics_at)
from .flash_attn_ext_few import get, limbs4, max_lane, max_pattern, put, query_limbs
from .launch import F32, I32, Kernel, N, SCALAR_F32, U8, factory
from .ptx import (add, afresh, apart, as_f32, as_i32, before_blackwell, device, div, exp, f32, fma, i32, i64, ld, ld4, ldmatrix4,
                  lds2, lds4, mma32, mul, nothing, shuffle, st, st4, sts, sts4, sub, syncwarp, u32)
from .set_rows import larger

ROWS = 16           # of a warp
MOST_CHANNELS, LARGE = 512, 256  # of a head of K or of V
Q_WORDS = 512       # of a warp's queries in a block of channels
ONE, MINUS_ZERO, NEVER = f32(1), f32(-0.0), i32(0x7fffffff)


class Shared(NamedTuple):
    """Words of shared memory; multiples of four."""
    k_hi: int   # [key][k_stride]
    k_lo: int
    v_hi: int   # [channel][keys_stride]
    v_lo: int
    d_k: int    # f32 [block][128]
    d_v: int    # f32 [128]
    seen: int   # i32 [128]: the positions from which the keys are seen
    q: int      # words of A [warp][block][hi, lo][half][lane][4]
    q_d: int    # f32 [warp][block][16 rows]: d_q * scale
    kept: int   # f32 [warp][n_kept / 4][lane][4], [warp][lane][2]: of O what does not stay in registers, and L
    kept_l: int
    n_words: int


def k_stride(dim_k: int) -> int:
    """Words of a key."""
    return -(-dim_k // CHANNELS) * CHANNELS // 4 + 4


def by_turns(dim_k: int, dim_v: int) -> bool:
    """Whether values come to shared memory in the place of keys, and outputs lie in memory."""
    return max(dim_k, dim_v) > LARGE


def n_kept(dim_k: int, dim_v: int, split: bool) -> int:
    """Outputs of a lane that wait in shared memory while scores need the registers, with its pair L: of four slabs the last."""
    return 24 if dim_v > 3 * CHANNELS and not split and not by_turns(dim_k, dim_v) else 0


def keys_stride(n_slabs: int) -> int:
    """Words of a channel. Where shared memory has none to spare, 16-byte pieces are exchanged instead (`piece_of_keys`)."""
    return PIECE // 4 + (4 if n_slabs < 3 else 0)


def piece_of_keys(n_slabs: int):
    """Device function (row, i) -> word, from a row's first one on, of its i-th 16 keys."""
    if n_slabs < 3:
        return device(lambda row, i: i * 4)
    return device(lambda row, i: i32(4 * (i ^ (row & 7))))


def shared_layout(dim_k: int, dim_v: int, n_warps: int, split: bool) -> Shared:
    n_blocks, n_slabs = -(-dim_k // CHANNELS), -(-dim_v // CHANNELS)
    k, v = PIECE * k_stride(dim_k), n_slabs * CHANNELS * keys_stride(n_slabs)
    turns, kept = by_turns(dim_k, dim_v), n_kept(dim_k, dim_v, split)
    sizes = (*((max(k, v),) * 2 + (0, 0) if turns else (k, k, v, v)), n_blocks * PIECE, PIECE, PIECE,
             n_warps * n_blocks * Q_WORDS, n_warps * n_blocks * ROWS, n_warps * 32 * kept, n_warps * 64 * (kept > 0))
    where = Shared(*accumulate(sizes, initial=0))
    return where._replace(v_hi=where.k_hi, v_lo=where.k_lo) if turns else where


@device
def add_lanes(x, lane):
    """Sum over the four lanes of a row, as the tree's last halvings but one."""
    x = add(x, as_f32(shuffle(as_i32(x), lane ^ 2)))
    return add(x, as_f32(shuffle(as_i32(x), lane ^ 1)))


@device
def add4(a, b):
    return add(a[0], b[0]), add(a[1], b[1]), add(a[2], b[2]), add(a[3], b[3])


class Constants(NamedTuple):
    """What a kernel is compiled for, and what follows from it: all stages know it when they are compiled."""
    K: object          # Octets: how keys are read and widened,
    V: object          # and values
    dim_k: int
    dim_v: int
    heads: int         # of a block, of one KV head
    n_warps: int
    split: bool        # several blocks share the pieces of the same rows: they store (m, l, o) of each piece
    sinks_there: bool
    softcap: float     # of scores, 0: they have none
    n_blocks: int      # of 64 channels of Q and K
    n_slabs: int       # of 64 channels of V
    where: Shared

    @property
    def turns(self) -> bool:
        return by_turns(self.dim_k, self.dim_v)

    @property
    def n_outputs(self) -> int:
        """Of a lane, in registers."""
        return 16 if self.split or self.turns else 32 * self.n_slabs


def constants(type_k, type_v, dim_k, dim_v, heads, n_warps, split, sinks_there, softcap) -> Constants:
    return Constants(octets_of(type_k, dim_k), octets_of(type_v, dim_v), dim_k, dim_v, heads, n_warps, split, sinks_there,
                     softcap, -(-dim_k // CHANNELS), -(-dim_v // CHANNELS), shared_layout(dim_k, dim_v, n_warps, split))


# The stages. s: the shared memory of the block, int32, laid out as `Shared`. Lane l = 4 g + t of a warp has rows g and g + 8 of
# the warp's 16. Local arrays lie in registers. Where a stage has no barrier of its own, the kernel's two around `stage_piece`
# protect what it reads and writes.

class Rows(NamedTuple):
    """Device functions of the rows of a block: which token and head each is, and where its values lie."""
    token_and_head: object  # (tid, second) -> (token, head) of the block, of a lane's row g (second = 0) or g + 8 (second = 8)
    index: object           # (first_token, token, head) -> number, int64, of a row among all tokens' heads: q is [index][dim_k],
                            # out is [index][dim_v]
    of_piece: object        # (first_token, token, head, n_ctx, first, bound) -> number of a row's piece among all stored pieces
    of_out: object          # the same -> number of a row of `out`


def rows_of(const: Constants) -> Rows:
    heads = const.heads

    @device
    def token_and_head(tid, second):
        row = i32((tid >> 5) * ROWS + ((tid & 31) >> 2) + second)
        token = i32(row // heads)
        return token, i32(row - token * heads)

    @device
    def index(first_token, token, head):
        return i64(i32(i32(first_token + token) * i32(cuda.gridDim.x * heads) + i32(cuda.blockIdx.x * heads) + head))

    @device
    def of_piece(first_token, token, head, n_ctx, first, bound):
        """Of the piece that begins at position `first`; -1 for a row whose query is before the piece, or is not to be touched."""
        row = -1
        if first <= bound:
            row = i32(i32(index(first_token, token, head)) * ((n_ctx + PIECE - 1) // PIECE) + (first >> 7))
        return i32(row)

    @device
    def of_out(first_token, token, head, n_ctx, first, bound):
        """-1 as there."""
        row = -1
        if first <= bound:
            row = i32(index(first_token, token, head))
        return i32(row)
    return Rows(token_and_head, index, of_piece, of_out)


# Queries, once a block

def query_loader(const: Constants):
    """(q, first_token, n_tokens, token, head, row, tid, scale, s): limbs of one query in shared memory, by the four lanes of its
    row, that of row g (row = 0) or g + 8 (row = 1). Of each 64 channels b: d_q, 16256 / amax = scales(amax); hi and lo limbs of
    lifted(mul(q, 16256 / amax)) as words of A to `q` [warp][b][hi, lo][half][lane][4], mul(d_q, scale) to `q_d` [warp][b][row].
    Only this warp reads them, behind the kernel's first barrier.

    q: f32 [tokens][heads][dim_k]; first_token: of the block; token, head: of the row, from the block's first ones; zeros where
    token >= n_tokens."""
    where, n_blocks, dim_k, index = const.where, const.n_blocks, const.dim_k, rows_of(const).index

    @device
    def load_block(q, at, b, row, valid, tid, scale, s):
        """64 channels. at: index of the query's first channel; valid: whether there is such a query."""
        lane, warp = tid & 31, tid >> 5
        d, (x, y, u, w) = query_limbs(q, at, valid, b, dim_k, lane)
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
    def load_query(q, first_token, n_tokens, token, head, row, tid, scale, s):
        for b in range(n_blocks):
            load_block(q, index(first_token, token, head) * dim_k, b, row, token < n_tokens, tid, scale, s)
    return load_query


# 1. Limbs of keys and values in shared memory

def key_splitter(const: Constants):
    """(raw0, raw1, first, b, key, lane, s): limbs and scale of block b (64 channels) of keys `key` and key + 8 of the piece.
    raw0, raw1: u32 arrays, what the lane has read of either key: of each block the channels 8 t .. and 32 + 8 t .., those of
    block b from word `first` on.

    d_k, 16256 / amax = scales(amax of the block), limbs of lifted(mul(k, 16256 / amax)). Written: int8 limbs to `k_hi`, `k_lo`
    [key][k_stride words], f32 to `d_k` [b][key]. A key lies with four lanes, which exchange their amaxes: two lanes divide for
    one key."""
    where, k_words, k_row, z = const.where, const.K.n_words, k_stride(const.dim_k), i32(0)
    amax_of, merge, pattern, values = const.K[3:]

    @device
    def split_octets(raw, first, inv, at, s):
        x, y = values(raw, first), values(raw, first + k_words)
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
    def split_keys(raw0, raw1, first, b, key, lane, s):
        at = key * k_row + b * 16 + (lane & 3)
        one = amax_of(amax_of(z, raw0, first), raw0, first + k_words)
        two = amax_of(amax_of(z, raw1, first), raw1, first + k_words)
        state = merge(two if lane & 2 else one, shuffle(one if lane & 2 else two, lane ^ 2))
        d, inv = scales(pattern(merge(state, shuffle(state, lane ^ 1))))
        if lane & 1 == 0:
            put(s, where.d_k + b * PIECE + key + 4 * (lane & 2), d)
        split_octets(raw0, first, as_f32(shuffle(as_i32(inv), lane & -3)), at, s)
        split_octets(raw1, first, as_f32(shuffle(as_i32(inv), lane | 2)), at + 8 * k_row, s)
    return split_keys


def value_splitter(const: Constants):
    """(amaxes, exchange_scales, split_values): limbs and scales of the values of 16 keys of the piece, from `key` on, some slabs
    at a time. raw0 .. raw3: u32 arrays, what the lane has read of the values of keys key + 2 t, + 2 t + 1, + 8 + 2 t, + 9 + 2 t:
    of each 64 channels those from 8 g on. First amaxes of all slabs (states: those of slabs before), then the scales, then limbs.

    d_v, 16256 / amax = scales(amax of all channels of a value), limbs of lifted(mul(v, 16256 / amax)). Written: int8 limbs to
    `v_hi`, `v_lo` [row][keys_stride words], a word the limbs of the lane's four keys and row 8 e + g the channel 8 g + e of each
    64; f32 to `d_v` [key]. A value lies with the eight lanes of one t, which exchange their amaxes: each divides for one of four
    keys."""
    where, v_words, n_slabs = const.where, const.V.n_words, const.n_slabs
    stride, piece_of = keys_stride(n_slabs), piece_of_keys(n_slabs)
    amax_of, merge, pattern, values = const.V[3:]

    @device
    def amax(state, raw, n):
        state = amax_of(state, raw, 0)
        if n > 1:
            state = amax_of(state, raw, v_words)
        return state

    @device
    def amaxes(states, raw0, raw1, raw2, raw3, n):
        """Of n slabs, one or two."""
        return amax(states[0], raw0, n), amax(states[1], raw1, n), amax(states[2], raw2, n), amax(states[3], raw3, n)

    @device
    def exchange_scales(states, key, lane, s):
        """16256 / amax of the lane's four keys, of which it divides for number g & 3."""
        a, b, c, d = states
        a, b = (merge(c if lane & 8 else a, shuffle(a if lane & 8 else c, lane ^ 8)),
                merge(d if lane & 8 else b, shuffle(b if lane & 8 else d, lane ^ 8)))
        state = merge(b if lane & 4 else a, shuffle(a if lane & 4 else b, lane ^ 4))
        d_v, inv = scales(pattern(merge(state, shuffle(state, lane ^ 16))))
        if lane < 16:
            put(s, where.d_v + key + 2 * (lane & 3) + (lane & 8) + ((lane >> 2) & 1), d_v)
        inv, t = as_i32(inv), lane & 3
        return as_f32(shuffle(inv, t)), as_f32(shuffle(inv, t + 4)), as_f32(shuffle(inv, t + 8)), as_f32(shuffle(inv, t + 12))

    @device
    def split_channel(a, b, c, d, inv, at, s):
        hi, lo = limbs(lifted(a, inv[0]), lifted(b, inv[1]), lifted(c, inv[2]), lifted(d, inv[3]))
        sts(s, where.v_hi + at, hi)
        sts(s, where.v_lo + at, lo)

    @device
    def split_slab(raw0, raw1, raw2, raw3, b, inv, at, s):
        """The lane's eight channels of a slab, the b-th that was read. at: word of channel 8 g of the slab."""
        x, y, u, w = values(raw0, b * v_words), values(raw1, b * v_words), values(raw2, b * v_words), values(raw3, b * v_words)
        split_channel(x[0], y[0], u[0], w[0], inv, at, s)
        split_channel(x[1], y[1], u[1], w[1], inv, at + 8 * stride, s)
        split_channel(x[2], y[2], u[2], w[2], inv, at + 16 * stride, s)
        split_channel(x[3], y[3], u[3], w[3], inv, at + 24 * stride, s)
        split_channel(x[4], y[4], u[4], w[4], inv, at + 32 * stride, s)
        split_channel(x[5], y[5], u[5], w[5], inv, at + 40 * stride, s)
        split_channel(x[6], y[6], u[6], w[6], inv, at + 48 * stride, s)
        split_channel(x[7], y[7], u[7], w[7], inv, at + 56 * stride, s)

    @device
    def split_values(raw0, raw1, raw2, raw3, first, n, key, g, t, inv, s):
        """n slabs, one or two, from number `first` on."""
        to = (first * CHANNELS + g) * stride + piece_of(g, key >> 4) + t
        split_slab(raw0, raw1, raw2, raw3, 0, inv, to, s)
        if n > 1:
            split_slab(raw0, raw1, raw2, raw3, 1, inv, to + CHANNELS * stride, s)
    return amaxes, exchange_scales, split_values


class CacheRows(NamedTuple):
    """Device functions of 16 keys of a piece, from `key` on, that a warp takes. Positions behind `last`, the last one that a row
    of the block may see, are read there."""
    mark_seen: object  # (present, cell, first, last, key, lane, s): writes `seen`, the position from which a key is seen
    key: object        # (cell, position, last, n_head_kv, head_kv) -> first octet of a key in k
    value: object      # (cell, position, last, row_v, head_kv) -> first octet of a value in v


def cache_rows(const: Constants) -> CacheRows:
    seen, dim_k, dim_v = const.where.seen, const.dim_k, const.dim_v

    @device
    def mark_seen(present, cell, first, last, key, lane, s):
        if lane < ROWS:
            position = i32(first + key + lane)
            sts(s, seen + key + lane, position if position <= last and ld(present, cell + min(position, last)) != 0 else NEVER)

    @device
    def row_of_key(cell, position, last, n_head_kv, head_kv):
        return ((cell + min(position, last)) * n_head_kv + head_kv) * (dim_k // 8)

    @device
    def row_of_value(cell, position, last, row_v, head_kv):
        return (cell + min(position, last)) * (row_v >> 3) + head_kv * (dim_v // 8)
    return CacheRows(mark_seen, row_of_key, row_of_value)


def stager(const: Constants):
    """(k, v, present, cell, at, row_v, first, last, key, n_head_kv, head_kv, lane, s): keys key .. key + 15 of the piece and
    their values, by a warp, of heads up to 192 channels of K and 128 of V. The arguments are those of `piece_stager`."""
    n_blocks, n_slabs, z = const.n_blocks, const.n_slabs, i32(0)
    mark_seen, row_of_key, row_of_value = cache_rows(const)
    block_words = 2 * const.K.n_words
    n_k_raw, n_v_raw = n_blocks * block_words, n_slabs * const.V.n_words
    load_key, load_value = key_loader(const.K, const.dim_k), value_loader(const.V, const.dim_v)
    split_keys, (amaxes, exchange_scales, split_values) = key_splitter(const), value_splitter(const)

    @device
    def load_pair(v, at, position, last, row_v, head_kv, g, raw0, raw1):
        """Values of two keys."""
        load_value(v, row_of_value(at, position, last, row_v, head_kv), g, raw0, 0)
        load_value(v, row_of_value(at, position + 1, last, row_v, head_kv), g, raw1, 0)

    @device
    def stage(k, v, present, cell, at, row_v, first, last, key, n_head_kv, head_kv, lane, s):
        k0, k1 = cuda.local.array(n_k_raw, u32), cuda.local.array(n_k_raw, u32)
        v0, v1 = cuda.local.array(n_v_raw, u32), cuda.local.array(n_v_raw, u32)
        v2, v3 = cuda.local.array(n_v_raw, u32), cuda.local.array(n_v_raw, u32)
        g, t = lane >> 2, lane & 3
        mark_seen(present, cell, first, last, key, lane, s)
        if first + key <= last:
            own, even = first + key + g, first + key + 2 * t
            load_key(k, row_of_key(at, own, last, n_head_kv, head_kv), t, k0, 0)
            load_key(k, row_of_key(at, own + 8, last, n_head_kv, head_kv), t, k1, 0)
            load_pair(v, at, even, last, row_v, head_kv, g, v0, v1)
            if n_blocks < 3:  # of more, registers are not enough
                load_pair(v, at, even + 8, last, row_v, head_kv, g, v2, v3)
            split_keys(k0, k1, 0, 0, key + g, lane, s)
            if n_blocks > 1:
                split_keys(k0, k1, block_words, 1, key + g, lane, s)
            if n_blocks > 2:
                split_keys(k0, k1, 2 * block_words, 2, key + g, lane, s)
                load_pair(v, at, even + 8, last, row_v, head_kv, g, v2, v3)
            inv = exchange_scales(amaxes((z, z, z, z), v0, v1, v2, v3, n_slabs), key, lane, s)
            split_values(v0, v1, v2, v3, 0, n_slabs, key, g, t, inv, s)
    return stage


def stagers_of_large_heads(const: Constants):
    """(stage_keys, stage_values), of 16 keys by a warp, where registers are not enough for `stager`: two blocks of keys, then the
    others; all slabs of values for their amaxes, and again, two by two. The arguments are those of `piece_stager`."""
    n_blocks, n_slabs, turns, z = const.n_blocks, const.n_slabs, const.turns, i32(0)
    mark_seen, row_of_key, row_of_value = cache_rows(const)
    block_words, n_v_raw = 2 * const.K.n_words, 2 * const.V.n_words
    n_k_raw = 2 * block_words
    split_keys, (amaxes, exchange_scales, split_values) = key_splitter(const), value_splitter(const)

    def four(load):
        """Values of a lane's four keys."""
        @device
        def load_four(place, g, raw):
            v, at, even, last, row_v, head_kv = place
            load(v, row_of_value(at, even, last, row_v, head_kv), g, raw[0], 0)
            load(v, row_of_value(at, even + 1, last, row_v, head_kv), g, raw[1], 0)
            load(v, row_of_value(at, even + 8, last, row_v, head_kv), g, raw[2], 0)
            load(v, row_of_value(at, even + 9, last, row_v, head_kv), g, raw[3], 0)
        return load_four

    def blocks_from(begin):
        """(k, row0, row1, t, key, lane, k0, k1, s): two blocks of keys, then those behind them."""
        load, has_two = key_loader(const.K, const.dim_k, begin, min(begin + 2, n_blocks)), begin + 1 < n_blocks
        others = blocks_from(begin + 2) if begin + 2 < n_blocks else nothing

        @device
        def stage_blocks(k, row0, row1, t, key, lane, k0, k1, s):
            load(k, row0, t, k0, 0)
            load(k, row1, t, k1, 0)
            split_keys(k0, k1, 0, begin, key, lane, s)
            if has_two:
                split_keys(k0, k1, block_words, begin + 1, key, lane, s)
            others(k, row0, row1, t, key, lane, k0, k1, s)
        return stage_blocks

    def slabs_from(begin):
        """Of two slabs and those behind them: (place, g, raw, states) -> states, with their amaxes; (place, g, raw, key, t, inv,
        s): their limbs, those behind first. place: (v, at, even, last, row_v, head_kv); raw: where values are read to."""
        n = min(2, n_slabs - begin)
        load, none = four(value_loader(const.V, const.dim_v, begin, begin + n)), device(lambda place, g, raw, states: states)
        other_amaxes, other_limbs = slabs_from(begin + 2) if begin + 2 < n_slabs else (none, nothing)

        @device
        def amaxes_of(place, g, raw, states):
            load(place, g, raw)
            return other_amaxes(place, g, raw, amaxes(states, raw[0], raw[1], raw[2], raw[3], n))

        @device
        def limbs_of(place, g, raw, key, t, inv, s):
            other_limbs(place, g, raw, key, t, inv, s)
            if turns:  # beside scores, registers are not enough for what is read of more slabs
                syncwarp()
            load(place, g, raw)
            split_values(raw[0], raw[1], raw[2], raw[3], begin, n, key, g, t, inv, s)
        return amaxes_of, limbs_of
    stage_blocks, (amaxes_of, limbs_of) = blocks_from(0), slabs_from(0)

    @device
    def stage_keys(k, present, cell, at, first, last, key, n_head_kv, head_kv, lane, s):
        k0, k1 = cuda.local.array(n_k_raw, u32), cuda.local.array(n_k_raw, u32)
        g, t = lane >> 2, lane & 3
        mark_seen(present, cell, first, last, key, lane, s)
        if first + key <= last:
            row0 = row_of_key(at, first + key + g, last, n_head_kv, head_kv)
            row1 = row_of_key(at, first + key + g + 8, last, n_head_kv, head_kv)
            stage_blocks(k, row0, row1, t, key + g, lane, k0, k1, s)

    @device
    def stage_values(v, at, row_v, first, last, key, head_kv, lane, s):
        v0, v1 = cuda.local.array(n_v_raw, u32), cuda.local.array(n_v_raw, u32)
        v2, v3 = cuda.local.array(n_v_raw, u32), cuda.local.array(n_v_raw, u32)
        g, t = lane >> 2, lane & 3
        if first + key <= last:
            even, raw = first + key + 2 * t, (v0, v1, v2, v3)
            inv = exchange_scales(amaxes_of((v, at, even, last, row_v, head_kv), g, raw, (z, z, z, z)), key, lane, s)
            even = afresh(even)  # else the compiler keeps what it has read and widened before
            limbs_of((v, at, even, last, row_v, head_kv), g, raw, key, t, inv, s)
    return stage_keys, stage_values


def piece_stager(const: Constants):
    """(k, v, present, cell, at, row_v, first, last, n_head_kv, head_kv, lane, tid, s): the block makes limbs of a piece in shared
    memory, 16 keys a warp at a time: k_hi, k_lo, d_k, v_hi, v_lo, d_v, and `seen` [key], the position from which a key is seen,
    NEVER where it is not present or lies behind `last`. Between two barriers of the block: before the first all are done with the
    piece before, behind the second all see this one.

    k: cache [cells][n_head_kv][dim_k]; v: cache [cells][row_v], dim_v channels a KV head; present: u8 [positions]; cell: that of
    the sequence's position 0 in present; at: likewise in k and v, for the keys of this piece; first: position at which it begins;
    last: position of the last key that a row of the block may see. Keys behind it are read there or not at all."""
    n_warps, is_large, turns = const.n_warps, const.n_blocks > 3 or const.n_slabs > 2, const.turns
    stage, stage_keys, stage_values = (None, *stagers_of_large_heads(const)) if is_large else (stager(const), None, None)

    @device
    def stage_piece(k, v, present, cell, at, row_v, first, last, n_head_kv, head_kv, lane, tid, s):
        cuda.syncthreads()  # all are done with the piece before
        part = i32(tid >> 5)
        while part < PIECE // ROWS:
            stage(k, v, present, cell, at, row_v, first, last, i32(part * ROWS), n_head_kv, head_kv, lane, s)
            part = i32(part + n_warps)
        cuda.syncthreads()  # the limbs are there

    @device
    def stage_large_piece(k, v, present, cell, at, row_v, first, last, n_head_kv, head_kv, lane, tid, s):
        cuda.syncthreads()
        part = i32(tid >> 5)
        while part < PIECE // ROWS:
            stage_keys(k, present, cell, at, first, last, i32(part * ROWS), n_head_kv, head_kv, lane, s)
            part = i32(part + n_warps)
        part = i32(tid >> 5)
        while part < PIECE // ROWS and not turns:
            stage_values(v, at, row_v, first, last, i32(part * ROWS), head_kv, lane, s)
            part = i32(part + n_warps)
        cuda.syncthreads()
    return stage_large_piece if is_large else stage_piece


def values_in_turn(const: Constants):
    """((v, at, row_v, first, last, head_kv), lane, tid, s): the block makes limbs of the values in the place of the keys: v_hi,
    v_lo, d_v, between two barriers. The arguments are those of `piece_stager`."""
    n_warps, (_, stage_values) = const.n_warps, stagers_of_large_heads(const)

    @device
    def stage_all(place, lane, tid, s):
        v, at, row_v, first, last, head_kv = place
        cuda.syncthreads()  # all have their scores
        part = i32(tid >> 5)
        while part < PIECE // ROWS:
            stage_values(v, at, row_v, first, last, i32(part * ROWS), head_kv, lane, s)
            part = i32(part + n_warps)
        cuda.syncthreads()  # the limbs are there
    return stage_all


# 2. Scores

@device
def sees(bound, at, window):
    """Whether a query at position `bound` sees a key that is seen from `at` on: 0 <= bound - at < window."""
    return u32(i32(bound - at)) < u32(window)


def fence(const: Constants):
    """(s, i, window, scores): the scores before, [4 i ..], are there before those behind are computed: beside outputs of four
    slabs, registers are not enough for more at a time. No window is negative, but the compiler does not know."""
    n_blocks = const.n_blocks

    @device
    def between(s, i, window, scores):
        apart()
        if n_blocks > 3 and window < 0:
            for k in range(4):
                put(s, k, scores[4 * i + k])
    return between


def max_over_seen(const: Constants):
    """(tid, s, i, bound, window, scores, m) -> m, f32 pair, of the lane's two rows: also over the scores [4 i ..] that count."""
    where = const.where

    @device
    def max_of(tid, s, i, bound, window, scores, m):
        at = lds2(s, where.seen + 8 * i + 2 * (tid & 3))
        m0 = larger_float(m[0], scores[4 * i] if sees(bound[0], at[0], window) else MINUS_INFINITY)
        m1 = larger_float(m[1], scores[4 * i + 2] if sees(bound[1], at[0], window) else MINUS_INFINITY)
        return (larger_float(m0, scores[4 * i + 1] if sees(bound[0], at[1], window) else MINUS_INFINITY),
                larger_float(m1, scores[4 * i + 3] if sees(bound[1], at[1], window) else MINUS_INFINITY))
    return max_of


def block_scorer(const: Constants):
    """(tid, s, i, b, window, reach, scores): adds block b of channels to the scores of a lane's two rows with four eights of
    keys, from number i on. The arguments are those of `scorer`.

    Per block b of 64 channels, with exact sums HH, MID, LL of the limbs' products (`mma32`): s = fma(mul(fixed_point, d_q scale),
    d_k, s) from s = +0."""
    where, n_blocks, k_row, z, between = const.where, const.n_blocks, k_stride(const.dim_k), i32(0), fence(const)

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
    def add_block4(tid, s, i, b, window, reach, scores):
        """Of four eights of keys."""
        tid = afresh(tid)
        at, d = (where.q + ((tid >> 5) * n_blocks + b) * Q_WORDS + 4 * (tid & 31),
                 where.q_d + ((tid >> 5) * n_blocks + b) * ROWS + ((tid & 31) >> 2))
        q_hi, u_hi, q_lo, u_lo = lds4(s, at), lds4(s, at + 128), lds4(s, at + 256), lds4(s, at + 384)
        q_d = get(s, d), get(s, d + 8)
        add_block(tid, s, i, b, q_hi, q_lo, u_hi, u_lo, q_d, scores)
        between(s, i, window, scores)
        add_block(tid, s, i + 1, b, q_hi, q_lo, u_hi, u_lo, q_d, scores)
        if 8 * i + 16 <= reach:
            add_block(tid, s, i + 2, b, q_hi, q_lo, u_hi, u_lo, q_d, scores)
            between(s, i + 2, window, scores)
            add_block(tid, s, i + 3, b, q_hi, q_lo, u_hi, u_lo, q_d, scores)
            if n_blocks > 3:
                between(s, i + 3, window, scores)

    return add_block4


def scorer(const: Constants):
    """(tid, s, bound, window, reach, scores) -> m: the scores of a lane's two rows with the piece's keys, and the rows' largest
    ones over visible keys of the lane, f32 pair, -infinity where there is none.

    scores: f32 [64] of the lane, written: [4 i + j] of row g (j < 2) or g + 8 and key 8 i + 2 t + j % 2. bound: positions of the
    two rows' queries. Read: `q` and `q_d` of the warp, `k_hi`, `k_lo`, `d_k`, `seen`. reach: the last key of the piece that a row
    of the warp may see; scores of pairs of eights beyond are not computed."""
    n_blocks, add_block4, between, max_of = const.n_blocks, block_scorer(const), fence(const), max_over_seen(const)
    softcap, capped = const.softcap, capping(const.softcap)

    @device
    def scores4(tid, s, i, bound, window, reach, scores, m):
        """Of four eights of keys."""
        for j in range(16):
            scores[4 * i + j] = ZERO
        if 8 * i <= reach:
            add_block4(tid, s, i, 0, window, reach, scores)
            if n_blocks > 1:
                add_block4(tid, s, i, 1, window, reach, scores)
            if n_blocks > 2:
                add_block4(tid, s, i, 2, window, reach, scores)
            if n_blocks > 3:
                add_block4(tid, s, i, 3, window, reach, scores)
            b = i32(4)
            while b < n_blocks:
                add_block4(tid, s, i, b, window, reach, scores)
                b = i32(b + 1)
            if softcap:
                for j in range(4):
                    for k in range(4 * (i + j), 4 * (i + j) + 4):
                        scores[k] = capped(scores[k])
                    between(s, i + j, window, scores)
            m = max_of(tid, s, i, bound, window, scores, m)
            m = max_of(tid, s, i + 1, bound, window, scores, m)
            m = max_of(tid, s, i + 2, bound, window, scores, m)
            m = max_of(tid, s, i + 3, bound, window, scores, m)
        return m

    @device
    def score(tid, s, bound, window, reach, scores):
        m = scores4(tid, s, 0, bound, window, reach, scores, (MINUS_INFINITY, MINUS_INFINITY))
        m = scores4(tid, s, 4, bound, window, reach, scores, m)
        m = scores4(tid, s, 8, bound, window, reach, scores, m)
        return scores4(tid, s, 12, bound, window, reach, scores, m)
    return score


# 3. p

def exponentials(const: Constants):
    """(lane, s, bound, window, reach, m, scores) -> (l, amax): p of a lane's keys and two rows, and p' in the place of the
    scores.

    p = exp(sub(s, m)) of visible keys, +0 of others; p' = mul(p, d_v) likewise; l = sum128(p): over the keys of a lane, 64 apart
    first, then over the four lanes of a row. m: f32 pair, of the rows, the same for all their lanes; l: f32 pair, likewise; amax:
    i32 pair, bit patterns of the largest p' of the lane. Read: `seen`, `d_v`. The other arguments are as of `scorer`."""
    where, z = const.where, i32(0)

    @device
    def weight(lane, s, i, bound, window, reach, m, scores, amax):
        """p of four keys."""
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
    def weights4(lane, s, i, bound, window, reach, m, scores, amax):
        """The tree over keys 64, then 32 apart."""
        a, amax = weight(lane, s, i, bound, window, reach, m, scores, amax)
        b, amax = weight(lane, s, i + 8, bound, window, reach, m, scores, amax)
        c, amax = weight(lane, s, i + 4, bound, window, reach, m, scores, amax)
        d, amax = weight(lane, s, i + 12, bound, window, reach, m, scores, amax)
        return add4(add4(a, b), add4(c, d)), amax

    @device
    def soften(lane, s, bound, window, reach, m, scores):
        x, amax = weights4(lane, s, 0, bound, window, reach, m, scores, (z, z))
        y, amax = weights4(lane, s, 2, bound, window, reach, m, scores, amax)
        x = add4(x, y)
        y, amax = weights4(lane, s, 1, bound, window, reach, m, scores, amax)
        w, amax = weights4(lane, s, 3, bound, window, reach, m, scores, amax)
        x = add4(x, add4(y, w))
        l0 = add(add_lanes(x[0], lane), add_lanes(x[1], lane))
        l1 = add(add_lanes(x[2], lane), add_lanes(x[3], lane))
        return (l0, l1), amax
    return soften


@device
def quantize_p(lane, amax, scores, p_hi, p_lo):
    """d_p, f32 pair: d_p, 16256 / amax = scales(largest p' of a row, over its four lanes); limbs of lifted(mul(p', 16256 /
    amax)). scores: f32 [64], p' of the lane; p_hi, p_lo: u32 [16], written: the words of A for `mma32`, [2 i + r] of row g + 8 r
    and 16 keys from 16 i on, four of them a lane."""
    d0, inv0 = scales(max_pattern(max_pattern(amax[0], lane ^ 1), lane ^ 2))
    d1, inv1 = scales(max_pattern(max_pattern(amax[1], lane ^ 1), lane ^ 2))
    for i in range(8):  # a word of either row, of 16 keys
        j = 8 * i
        p_hi[2 * i], p_lo[2 * i] = limbs4((scores[j], scores[j + 1], scores[j + 4], scores[j + 5]), inv0)
        p_hi[2 * i + 1], p_lo[2 * i + 1] = limbs4((scores[j + 2], scores[j + 3], scores[j + 6], scores[j + 7]), inv1)
    return d0, d1


# 4. o

@device
def rescaling(m, l, M):
    """(M, a, b), f32 pairs, of two rows and a piece: new M = the larger of M and m, a = exp(sub(M, new M)), b = exp(sub(m, new
    M)). A row that sees no key, whose l is 0 (the largest of visible keys has p = 1, or NaN), stays as it is: fma(O, 1, mul(+0,
    -0))."""
    M0, M1 = larger_float(M[0], m[0]), larger_float(M[1], m[1])
    a0, b0 = exp(sub(M[0], M0)), exp(sub(m[0], M0))
    a1, b1 = exp(sub(M[1], M1)), exp(sub(m[1], M1))
    if l[0] == ZERO:
        a0, b0 = ONE, MINUS_ZERO
    if l[1] == ZERO:
        a1, b1 = ONE, MINUS_ZERO
    return (M0, M1), (a0, a1), (b0, b1)


@device
def store_statistics(out, statistics, row, lane, m, l):
    """(m, l) of a row's piece to f32 [piece][2], which begins at `statistics` of `out`; row: the piece's number, -1 where nothing
    is to be stored."""
    if row >= 0 and lane & 3 == 0:
        st(out, statistics + 2 * i64(row), m)
        st(out, statistics + 2 * i64(row) + 1, l)


def keeper(const: Constants):
    """(keep, fetch), each (tid, s, L, O): L and the last `n_kept` of a lane's outputs to shared memory and from there. A lane
    reads what it wrote."""
    where, n_words = const.where, n_kept(const.dim_k, const.dim_v, const.split)
    first = 32 * const.n_slabs - n_words

    @device
    def keep(tid, s, L, O):
        at = where.kept + (tid >> 5) * 32 * n_words + 4 * (tid & 31)
        for j in range(n_words // 4):
            i = first + 4 * j
            sts4(s, at + 128 * j, as_i32(O[i]), as_i32(O[i + 1]), as_i32(O[i + 2]), as_i32(O[i + 3]))
        if n_words:
            put(s, where.kept_l + 2 * tid, L[0])
            put(s, where.kept_l + 2 * tid + 1, L[1])

    @device
    def fetch(tid, s, L, O):
        at = where.kept + (tid >> 5) * 32 * n_words + 4 * (tid & 31)
        for j in range(n_words // 4):
            i, x = first + 4 * j, lds4(s, at + 128 * j)
            O[i], O[i + 1], O[i + 2], O[i + 3] = as_f32(x[0]), as_f32(x[1]), as_f32(x[2]), as_f32(x[3])
        if n_words:
            L[0], L[1] = get(s, where.kept_l + 2 * tid), get(s, where.kept_l + 2 * tid + 1)
    return keep, fetch


def piece_row_writer(const: Constants):
    """(out, row, t, i, O, second, a): o of four channels of the columns 8 i + 2 t and 8 i + 2 t + 1 to a row's piece, or, where
    outputs lie in memory, added to what is there times a. row: its number, -1 where nothing is to be stored; O: as of `weigher`,
    from index `second` on."""
    dim_v, split = const.dim_v, const.split

    @device
    def store4(out, at, x, y, u, w, a):
        if not split:
            O = ld4(out, at)
            x, y, u, w = fma(O[0], a, x), fma(O[1], a, y), fma(O[2], a, u), fma(O[3], a, w)
        st4(out, at, x, y, u, w)

    @device
    def store_row(out, row, t, i, O, second, a):
        channel = (i >> 3) * CHANNELS + 16 * t + (i & 4)
        if row >= 0:
            if dim_v % CHANNELS == 0 or channel < dim_v:
                store4(out, i64(row) * dim_v + channel, O[second], O[4 + second], O[8 + second], O[12 + second], a)
            if dim_v % CHANNELS == 0 or channel + 8 < dim_v:
                store4(out, i64(row) * dim_v + channel + 8, O[second + 1], O[5 + second], O[9 + second], O[13 + second], a)
    return store_row


def half_slab_weigher(const: Constants):
    """(lane, s, i, reach, p_hi, p_lo, d_p, a, b, O, out, rows): the piece's o of a lane's two rows and four eights of columns,
    from number i on. The arguments are those of `weigher`.

    With exact sums HH, MID, LL over the keys (`mma32`): o = mul(fixed_point, d_p). One block for all pieces: O = fma(O, a, mul(o,
    b)), in registers or in `out`; where blocks share them, o goes to `out`."""
    where, split, turns, n_slabs, z = const.where, const.split, const.turns, const.n_slabs, i32(0)
    in_memory = split or turns
    stride, piece_of, store_row = keys_stride(n_slabs), piece_of_keys(n_slabs), piece_row_writer(const)

    @device
    def multiply_half(s, at, p_hi, p_lo, o, hh, mid, ll):
        """Adds the products with 64 keys, whose words of A begin at o."""
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
    def add_output(O, i, hh, mid, ll, d_p, a, b):
        o = mul(fixed_point(hh, rest(mid, ll)), d_p)
        O[i] = o if split else mul(o, b) if turns else fma(O[i], a, mul(o, b))

    @device
    def add_outputs(O, i, hh, mid, ll, d_p, a, b):
        add_output(O, i, hh[0], mid[0], ll[0], d_p[0], a[0], b[0])
        add_output(O, i + 1, hh[1], mid[1], ll[1], d_p[0], a[0], b[0])
        add_output(O, i + 2, hh[2], mid[2], ll[2], d_p[1], a[1], b[1])
        add_output(O, i + 3, hh[3], mid[3], ll[3], d_p[1], a[1], b[1])

    @device
    def weigh2(lane, s, i, to, reach, p_hi, p_lo, d_p, a, b, O):
        """Columns 8 i + 2 t, 8 i + 2 t + 1 and those 8 further of two rows: two products side by side, but no more, or they take
        all registers. What keeps them apart is the branch."""
        lane = afresh(lane)
        at, none = (8 * i + (lane & 7)) * stride + piece_of(lane & 7, lane >> 3), (z, z, z, z)
        hh0, mid0, ll0 = multiply_half(s, at, p_hi, p_lo, 0, none, none, none)
        apart()
        hh1, mid1, ll1 = multiply_half(s, at + 8 * stride, p_hi, p_lo, 0, none, none, none)
        if reach >= PIECE // 2:
            at = at + 16 if n_slabs < 3 else at ^ 16
            hh0, mid0, ll0 = multiply_half(s, at, p_hi, p_lo, 8, hh0, mid0, ll0)
            hh1, mid1, ll1 = multiply_half(s, at + 8 * stride, p_hi, p_lo, 8, hh1, mid1, ll1)
        add_outputs(O, to, hh0, mid0, ll0, d_p, a, b)
        add_outputs(O, to + 4, hh1, mid1, ll1, d_p, a, b)
        # It never is, but the compiler does not know: it does not put the outputs off until all sums are there
        if (n_slabs > 2 or not before_blackwell()) and not split and reach < 0:
            for k in range(8):
                put(s, k, O[to + k])

    @device
    def weigh4(lane, s, i, reach, p_hi, p_lo, d_p, a, b, O, out, rows):
        """Half a slab: four eights of columns from 8 i on."""
        to = 0 if in_memory else 4 * i
        weigh2(lane, s, i, to, reach, p_hi, p_lo, d_p, a, b, O)
        weigh2(lane, s, i + 2, to + 8, reach, p_hi, p_lo, d_p, a, b, O)
        if in_memory:
            store_row(out, rows[0], lane & 3, i, O, 0, a[0])
            store_row(out, rows[1], lane & 3, i, O, 2, a[1])
        if n_slabs > 2:
            syncwarp()  # one after the other: of all, registers are not enough
    return weigh4


def weigher(const: Constants):
    """(tid, lane, s, reach, p_hi, p_lo, d_p, a, b, L, O, out, rows): the piece's o of a lane's two rows.

    O: f32 [32 slabs], [4 i + j] of row g (j < 2) or g + 8 and column 8 i + 2 t + j % 2 of V, of which column 8 e + g of each 64
    is the channel 8 g + e; where outputs go to memory [16], half a slab at a time. p_hi, p_lo: u32 [16], of `quantize_p`; d_p, a,
    b: f32 pairs; rows: i32 pair, the numbers of the rows or of their pieces in out, f32 [number][dim_v], -1 for none. Read:
    `v_hi`, `v_lo`. reach: as of `scorer`."""
    n_slabs, turns, weigh4, (_, fetch) = const.n_slabs, const.turns, half_slab_weigher(const), keeper(const)

    @device
    def weigh(tid, lane, s, reach, p_hi, p_lo, d_p, a, b, L, O, out, rows):
        weigh4(lane, s, 0, reach, p_hi, p_lo, d_p, a, b, O, out, rows)
        weigh4(lane, s, 4, reach, p_hi, p_lo, d_p, a, b, O, out, rows)
        if n_slabs > 1:
            weigh4(lane, s, 8, reach, p_hi, p_lo, d_p, a, b, O, out, rows)
            weigh4(lane, s, 12, reach, p_hi, p_lo, d_p, a, b, O, out, rows)
        if n_slabs > 2:
            weigh4(lane, s, 16, reach, p_hi, p_lo, d_p, a, b, O, out, rows)
            weigh4(lane, s, 20, reach, p_hi, p_lo, d_p, a, b, O, out, rows)
        if n_slabs > 3:
            fetch(tid, s, L, O)
            weigh4(lane, s, 24, reach, p_hi, p_lo, d_p, a, b, O, out, rows)
            weigh4(lane, s, 28, reach, p_hi, p_lo, d_p, a, b, O, out, rows)

    @device
    def weigh_in_memory(tid, lane, s, reach, p_hi, p_lo, d_p, a, b, L, O, out, rows):
        i = i32(0)
        while i < 8 * n_slabs:
            weigh4(lane, s, i, reach, p_hi, p_lo, d_p, a, b, O, out, rows)
            i = i32(i + 4)
    return weigh_in_memory if turns else weigh


# A warp and a piece: 2., 3. and 4.

def piece_follower(const: Constants):
    """What a warp makes of the scores of a piece: 3. and 4., and M of all pieces so far. m: f32 pair, the largest scores of the
    lane's rows; the other arguments are those of `piece_worker`."""
    split, soften, weigh = const.split, exponentials(const), weigher(const)

    @device
    def follow(lane, tid, s, bound, window, reach, m, scores, p_hi, p_lo, M, L, O, out, rows, statistics):
        l, amax = soften(lane, s, bound, window, reach, m, scores)
        d_p = quantize_p(lane, amax, scores, p_hi, p_lo)
        if split:
            store_statistics(out, statistics, rows[0], lane, m[0], l[0])
            store_statistics(out, statistics, rows[1], lane, m[1], l[1])
        M, a, b = rescaling(m, l, M)
        weigh(tid, lane, s, reach, p_hi, p_lo, d_p, a, b, L, O, out, rows)
        L[0], L[1] = fma(L[0], a[0], mul(l[0], b[0])), fma(L[1], a[1], mul(l[1], b[1]))
        return M
    return follow


def piece_worker(const: Constants):
    """(place, sees_some, tid, s, bound, window, reach, M, L, O, out, rows, statistics) -> M: a warp's rows with the piece in
    shared memory. place, sees_some: as of `piece_worker_by_turns`, not needed here.

    bound: i32 pair, positions of the lane's rows, -1 for one that is not to be touched; M: f32 pair, L, O: f32 arrays, of all
    pieces before, brought up to date. Where blocks share pieces, (m, l, o) of this one goes to numbers `rows` of `out` instead,
    -1 for none. The warp's 32 lanes work together; in shared memory it writes what only its own lanes read (`keeper`), so
    warps need no barrier between them."""
    score, follow, (keep, _) = scorer(const), piece_follower(const), keeper(const)

    @device
    def work(place, sees_some, tid, s, bound, window, reach, M, L, O, out, rows, statistics):
        scores, p_hi, p_lo = cuda.local.array(64, f32), cuda.local.array(16, u32), cuda.local.array(16, u32)
        lane = i32(tid & 31)
        m = score(tid, s, bound, window, reach, scores)
        m = max_lane(max_lane(m[0], lane ^ 1), lane ^ 2), max_lane(max_lane(m[1], lane ^ 1), lane ^ 2)
        M = follow(lane, tid, s, bound, window, reach, m, scores, p_hi, p_lo, M, L, O, out, rows, statistics)
        keep(tid, s, L, O)
        return M
    return work


def piece_worker_by_turns(const: Constants):
    """What `piece_worker` does, by all warps of a block: between scores and outputs are its barriers, where values come in the
    place of keys. place: what `values_in_turn` takes of them, (v, at, row_v, first, last, head_kv); sees_some: whether a row of
    the warp sees keys of the piece. rows: of shared pieces as there, else of `out`, f32 [row][dim_v], where outputs are brought
    up to date."""
    score, follow, stage_values = scorer(const), piece_follower(const), values_in_turn(const)

    @device
    def work(place, sees_some, tid, s, bound, window, reach, M, L, O, out, rows, statistics):
        scores, p_hi, p_lo = cuda.local.array(64, f32), cuda.local.array(16, u32), cuda.local.array(16, u32)
        lane, m = i32(tid & 31), (MINUS_INFINITY, MINUS_INFINITY)
        if sees_some:
            m = score(tid, s, bound, window, reach, scores)
            m = max_lane(max_lane(m[0], lane ^ 1), lane ^ 2), max_lane(max_lane(m[1], lane ^ 1), lane ^ 2)
        stage_values(place, lane, tid, s)
        if sees_some:
            M = follow(lane, tid, s, bound, window, reach, m, scores, p_hi, p_lo, M, L, O, out, rows, statistics)
        return M
    return work


# The result, once a block that is alone with its rows

def row_writer(const: Constants):
    """(sinks, out, head, at, t, M, L, O, row): out = div(O, L) of the lane's channels of row g (row = 0) or g + 8 (row = 1); with
    a sink of the head, f32 [head], (a, L) = sink(M, L, it) and div(mul(O, a), L). O: f32 array, of `weigher`; out: f32 [..,
    dim_v]; at: index of the row's first channel."""
    sinks_there, n_slabs, dim_v = const.sinks_there, const.n_slabs, const.dim_v

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
    return write_row


def memory_rows(const: Constants):
    """(clear_row, finish_row) of outputs that lie in memory: (out, row, t) writes +0 to the lane's channels of a row of `out`;
    (sinks, out, head, row, t, M, L) makes results of what is there, as `row_writer` does."""
    sinks_there, dim_v = const.sinks_there, const.dim_v

    @device
    def clear_row(out, row, t):
        channel = i32(16 * t)
        while channel < dim_v:
            for i in range(0, 16, 4):
                if channel + i < dim_v:
                    st4(out, i64(row) * dim_v + channel + i, ZERO, ZERO, ZERO, ZERO)
            channel = i32(channel + CHANNELS)

    @device
    def finish4(out, at, a, L):
        x = ld4(out, at)
        if sinks_there:
            x = mul(x[0], a), mul(x[1], a), mul(x[2], a), mul(x[3], a)
        st4(out, at, div(x[0], L), div(x[1], L), div(x[2], L), div(x[3], L))

    @device
    def finish_row(sinks, out, head, row, t, M, L):
        a, channel = ONE, i32(16 * t)
        if sinks_there:
            a, L = sink(M, L, ld(sinks, head))
        while channel < dim_v:
            for i in range(0, 16, 4):
                if channel + i < dim_v:
                    finish4(out, i64(row) * dim_v + channel + i, a, L)
            channel = i32(channel + CHANNELS)
    return clear_row, finish_row


# The runs of a block: tokens of one sequence that follow each other

@device
def run_from(seq, pos, first_token, run, n_tokens):
    """(sequence, end, first, last) of the run that begins with token `run` of the block: its tokens are run .. end - 1, their
    positions first .. last."""
    sequence, end, last, first = ld(seq, first_token + run), run, i32(-1), NEVER
    while end < n_tokens and ld(seq, first_token + end) == sequence:
        position = ld(pos, first_token + end)
        first, last, end = i32(min(first, position)), i32(max(last, position)), i32(end + 1)
    return sequence, end, first, last


@device
def positions_of_warp(bound, lane):
    """(first, last) of the positions `bound` of a warp's rows, i32 pairs with its lanes, without those that are -1; NEVER and -1
    if all are."""
    last = max_pattern(max_pattern(max_pattern(i32(max(bound[0], bound[1])), lane ^ 4), lane ^ 8), lane ^ 16)
    first = i32(min(bound[0] if bound[0] >= 0 else NEVER, bound[1] if bound[1] >= 0 else NEVER))
    return i32(-max_pattern(max_pattern(max_pattern(i32(-first), lane ^ 4), lane ^ 8), lane ^ 16)), last


@factory([("f16", "f16", 64, 64, 3, 4, False, False), ("f16", "f16", 128, 128, 4, 8, False, False),
          ("f16", "f16", 64, 64, 8, 8, False, True), ("q8_0", "f16", 128, 72, 8, 4, False, True),
          ("f16", "f16", 192, 128, 1, 8, False, False), ("q8_0", "q8_0", 128, 128, 1, 8, False, False),
          ("f16", "f16", 256, 256, 8, 8, False, False), ("q8_0", "q8_0", 256, 256, 8, 8, False, True),
          ("q8_0", "f16", 256, 200, 4, 4, False, False), ("f16", "q8_0", 256, 256, 8, 4, True, False),
          ("f16", "f16", 64, 64, 3, 4, True, False), ("f16", "q8_0", 128, 128, 4, 4, True, False),
          ("q8_0", "f16", 192, 72, 8, 4, True, False), ("f16", "f16", 128, 128, 2, 8, False, False, 50.0),
          ("f16", "f16", 256, 256, 2, 8, False, False, 50.0), ("f16", "f16", 256, 256, 2, 4, True, False, 50.0),
          ("f16", "f16", 64, 64, 8, 8, False, True, 0.0, True), ("f16", "f16", 128, 128, 2, 8, False, False, 0.0, True),
          ("f16", "f16", 512, 512, 8, 4, False, False), ("q8_0", "f16", 512, 264, 1, 4, False, True),
          ("f16", "q8_0", 264, 512, 4, 4, True, False), ("f16", "f16", 256, 256, 2, 8, False, False, 50.0, True),
          ("q8_0", "q8_0", 256, 256, 2, 4, True, False, 0.0, True)])
def flash_attn_ext_tile_kernel(type_k, type_v, dim_k, dim_v, heads, n_warps,  # noqa: PLR0915 (a kernel: its steps in order)
                               split, sinks_there, softcap=0.0, is_ring=False):
    """out: f32 [n, n_head, dim_v], or the pieces of `flash_attn_ext_combine` where blocks share them (split). A block: heads from
    blockIdx.x * heads, tokens ROWS n_warps / heads of blockIdx.y, split: every gridDim.z-th piece from the blockIdx.z-th. M, L
    (pairs) and O are of a lane's two rows, in registers."""
    const = constants(type_k, type_v, dim_k, dim_v, heads, n_warps, split, sinks_there, softcap)
    tokens, n_outputs, turns = ROWS * n_warps // heads, const.n_outputs, const.turns
    load_query, stage_piece, write_row, (keep, fetch) = query_loader(const), piece_stager(const), row_writer(const), keeper(const)
    work, (clear_row, finish_row) = (piece_worker_by_turns if turns else piece_worker)(const), memory_rows(const)
    row_of, index, row_of_piece, row_of_out = rows_of(const)
    row_in_memory, in_memory, ring = row_of_piece if split else row_of_out, split or turns, ring_of(is_ring)

    @device
    def rows_of_piece(first_token, n_ctx, first, bound, tid):
        token, head = row_of(tid, 0)
        row0 = row_in_memory(first_token, token, head, n_ctx, first, bound[0])
        token, head = row_of(tid, 8)
        return row0, row_in_memory(first_token, token, head, n_ctx, first, bound[1])

    @device
    def clear(out, first_token, n_tokens, second, tid):
        token, head = row_of(tid, second)
        if token < n_tokens:
            clear_row(out, index(first_token, token, head), tid & 3)

    @device
    def finish(sinks, out, first_token, n_tokens, second, tid, M, L):
        token, head = row_of(tid, second)
        if token < n_tokens:
            finish_row(sinks, out, cuda.blockIdx.x * heads + head, index(first_token, token, head), tid & 3, M, L)

    def kernel(q, k, v, seq, pos, present, sinks, out, n, n_ctx, n_head_kv, row_v, span, scale, n_falling):
        s = cuda.shared.array(0, types.int32)
        O, L = cuda.local.array(n_outputs, f32), cuda.local.array(2, f32)
        tid, window = i32(cuda.threadIdx.x), ring.window(span)
        first_token = i32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * tokens)
        if n_warps == 4 and not split and cuda.blockIdx.y >= n_falling:
            first_token = i32((cuda.blockIdx.y - n_falling) * tokens)
        n_tokens = i32(min(tokens, n - first_token))
        token, head = row_of(tid, 0)
        load_query(q, first_token, n_tokens, token, head, 0, tid, scale, s)
        token, head = row_of(tid, 8)
        load_query(q, first_token, n_tokens, token, head, 1, tid, scale, s)
        for i in range(n_outputs):
            O[i] = ZERO
        M, L[0], L[1] = (MINUS_INFINITY, MINUS_INFINITY), ZERO, ZERO
        keep(tid, s, L, O)
        if turns and not split:
            clear(out, first_token, n_tokens, 0, tid)
            clear(out, first_token, n_tokens, 8, tid)

        run = i32(0)
        while run < n_tokens:
            sequence, end, first, last = run_from(seq, pos, first_token, run, n_tokens)
            tid, bound0, bound1 = afresh(tid), i32(-1), i32(-1)
            token, _ = row_of(tid, 0)
            if run <= token and token < end:
                bound0 = ld(pos, first_token + token)
            token, _ = row_of(tid, 8)
            if run <= token and token < end:
                bound1 = ld(pos, first_token + token)
            bound = bound0, bound1  # positions of the lane's two rows, -1 for one whose token is not of the run
            warp_first, warp_last = positions_of_warp(bound, i32(tid & 31))
            first = i32((first_piece(first, window) + (cuda.blockIdx.z if split else 0)) * PIECE)
            while first <= last:
                tid = afresh(tid)
                lane, cell, head_kv = i32(tid & 31), i64(sequence) * n_ctx, i32(cuda.blockIdx.x // (cuda.gridDim.x // n_head_kv))
                at = ring.begin(span, sequence, cell) - ring.moved(span, first)
                stage_piece(k, v, present, cell, at, row_v, first, last, n_head_kv, head_kv, lane, tid, s)
                # A row of the warp sees keys of the piece
                sees_some = first <= warp_last and first_piece(warp_first, window) * PIECE <= first
                if turns or sees_some:
                    rows, statistics = (i32(0), i32(0)), i64(0)
                    if in_memory:
                        rows = rows_of_piece(first_token, n_ctx, first, bound, tid)
                        statistics = statistics_at(n, cuda.gridDim.x * heads, n_ctx, dim_v)
                    place = v, at, row_v, first, last, head_kv
                    M = work(place, sees_some, tid, s, bound, window, i32(warp_last - first), M, L, O, out, rows, statistics)
                first = i32(first + (PIECE * cuda.gridDim.z if split else PIECE))
            run = end
        if turns and not split:
            tid, first_token = afresh(tid), afresh(first_token)
            finish(sinks, out, first_token, n_tokens, 0, tid, M[0], L[0])
            finish(sinks, out, first_token, n_tokens, 8, tid, M[1], L[1])
        elif not split:
            tid, first_token = afresh(tid), afresh(first_token)
            fetch(tid, s, L, O)
            token, head = row_of(tid, 0)
            if token < n_tokens:
                write_row(sinks, out, cuda.blockIdx.x * heads + head, index(first_token, token, head) * dim_v, tid & 3,
                          M[0], L[0], O, 0)
            token, head = row_of(tid, 8)
            if token < n_tokens:
                write_row(sinks, out, cuda.blockIdx.x * heads + head, index(first_token, token, head) * dim_v, tid & 3,
                          M[1], L[1], O, 1)
    parameters = F32, const.K.pointer, const.V.pointer, I32, I32, U8, F32, F32, N, N, N, N, ring.parameter, SCALAR_F32, N
    return Kernel(kernel, parameters, 32 * n_warps)


def flash_attn_ext_tile(call):
    """`flash_attn_ext` by call.plan; where n_splits blocks share the pieces of the same rows, these, in call.scratch."""
    plan, size, split = call.plan, sizes(call), call.plan.n_splits is not None
    sinks, out = (None, call.scratch) if split else (call.sinks, call.out)
    n_tiles, parts = -(-size.n // (ROWS * plan.n_warps // plan.heads)), size.n_head // plan.heads
    # The last positions have most pieces: they go first. Where all tiles are resident, two on each multiprocessor, the least then
    # go beside the most.
    together = plan.n_warps == 4 and not split and n_tiles * parts <= 2 * call.device.n_multiprocessors
    of = call.k.dtype, call.v.dtype, size.dim_k, size.dim_v, plan.heads, plan.n_warps
    kernel = flash_attn_ext_tile_kernel(*of, split, sinks is not None, *of_few_models(call))
    args = (*addresses(call), (sinks or call.q).data, out.data, size.n, size.n_ctx, size.n_head_kv, size.row_v, span_of(size),
            score_scale(call), (n_tiles + 1) // 2 if together else n_tiles)
    n_bytes = 4 * shared_layout(size.dim_k, size.dim_v, plan.n_warps, split).n_words
    return call.device.launch(kernel, (parts, n_tiles, plan.n_splits or 1), 32 * plan.n_warps, args, n_bytes)
