"""The shared memory of a block of `flash_attn_ext_tile`, and how limbs of its queries and of the keys and values of a piece come
there.

[row of 16-byte pieces, one to spare so that eight rows lie in all 32 banks]: a key's words 0..3 of all t, of each 64 channels; a
channel's words (four keys) of all t, for each 16 keys. Channel 8 g + e of each 64 is row 8 e + g, a column g of the e-th product.
Of heads of more than LARGE channels it holds either keys or values.
"""
from itertools import accumulate
from typing import NamedTuple

from numba import cuda

from .fixed_point import CHANNELS, key_loader, lifted, limbs, limbs4, octets_of, scales, value_loader
from .flash_attn_ext_combine import PIECE
from .flash_attn_ext_queries import query_limbs
from .lane_floats import put
from .ptx import afresh, as_f32, as_i32, device, i32, i64, ld, mul, nothing, shuffle, sts, syncwarp, u32

ROWS = 16           # of a warp
LARGE = 256         # channels of a head of K or of V, of more of which keys and values take turns
Q_WORDS = 512       # of a warp's queries in a block of channels
NEVER = i32(0x7fffffff)


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
