"""What a block of `flash_attn_ext_few` does with a piece: its shared memory, and its stages, which are counted as there."""
from itertools import accumulate
from typing import NamedTuple

from numba import cuda

from .fixed_point import (CHANNELS, HI, LO, MINUS_INFINITY, Z, ZERO, fixed_point, key_loader, larger_float, lifted, limb_pair,
                          limbs4, octet_loader, octets_of, rest, scales, value_loader)
from .flash_attn_ext_combine import MOST_HEADS, PIECE, stride
from .flash_attn_ext_queries import query_limbs
from .lane_floats import add_lane, get, max_lane, max_pattern, put, sum8
from .ptx import (afresh, architecture, as_f32, as_i32, device, exp, fma, halves, i32, i64, ld, lds, lds4, mma16, mma32, mul,
                  shuffle, sts, sts4, sub, syncwarp, u32)
from .set_rows import larger

STEP = 8             # keys that a warp takes at once
MOST_SUMS = 64       # of (head, warp) of a multiprocessor whose sums of two slabs have room
RESIDENT = {16: 1, 8: 2}  # warps of a block: blocks of a multiprocessor; what registers allow
ALL, FIRST, LAST = i32(0), i32(1), i32(2)  # `flash_attn_ext_few.Where.half`
LANE = 36            # words from one lane's 32 to the next one's: 16 bytes of eight lanes then lie in all 32 banks


class Shared(NamedTuple):
    """Words of shared memory; multiples of four."""
    maxima: int   # f32 [warp][8 heads]
    amaxes: int   # of p', the same
    d_p: int      # f32 [8 heads]
    p: int        # f32 [heads][128]
    q: int        # words of A [block][half][lane][4]
    q_d: int      # f32 [block][8 heads]: d_q * scale
    sums: int     # i32 [slab][warp][head][4 lanes t][LANE]: HH of channels 16 t + i and 16 t + 8 + i, 4 `rest` of both,
                  # for i = 0..7
    n_words: int


def slabs_at_once(dim_v: int, heads: int, n_warps: int) -> int:
    """Slabs of V whose sums have room at once."""
    return 1 if dim_v <= CHANNELS or heads * n_warps * RESIDENT[n_warps] > MOST_SUMS else 2


def shared_layout(dim_k: int, dim_v: int, heads: int, n_warps: int) -> Shared:
    n_blocks = -(-dim_k // CHANNELS)
    sizes = (n_warps * MOST_HEADS, n_warps * MOST_HEADS, MOST_HEADS, heads * PIECE, n_blocks * 256, n_blocks * MOST_HEADS,
             slabs_at_once(dim_v, heads, n_warps) * n_warps * heads * 4 * LANE)
    return Shared(*accumulate(sizes, initial=0))


@device
def key_of(key, i, lane):
    """A lane's i-th key of those that its warp has from `key` on."""
    return i32(key + STEP * (i >> 1) + (i & 1) + 2 * (lane & 3))


@device
def half_of(x, half):
    if half == 0:
        return x[0], x[1], x[2], x[3]
    return x[4], x[5], x[6], x[7]


@device
def weigh(both, a, b, inv, mask):
    """Sums of a lane's two outputs, of one channel's two values: those with hi, then those with lo. both: limbs of p', a step a
    word."""
    p, v = both[0], limb_pair(lifted(a, inv[0]), lifted(b, inv[1]), mask)
    h, l = mma16(p & HI, (p & LO) << u32(8), v, Z, Z, Z, Z), mma16((p >> u32(8)) & LO, p & LO, v, Z, Z, Z, Z)
    return h[0], h[1], h[2], h[3], l[0], l[1], l[2], l[3]


@device
def weigh_two(both, a, b, c, d, inv, mask):
    """The same of two steps, a and b of the first."""
    p, q = both[0], both[1]
    v, w = limb_pair(lifted(a, inv[0]), lifted(b, inv[1]), mask), limb_pair(lifted(c, inv[2]), lifted(d, inv[3]), mask)
    h = mma32(p & HI, (p & LO) << u32(8), q & HI, (q & LO) << u32(8), v, w, Z, Z, Z, Z)
    l = mma32((p >> u32(8)) & LO, p & LO, (q >> u32(8)) & LO, q & LO, v, w, Z, Z, Z, Z)
    return h[0], h[1], h[2], h[3], l[0], l[1], l[2], l[3]


@device
def store_sums(s, i, c):
    """HH of two outputs, 4 `rest` of both."""
    sts4(s, i, c[0], c[1], i32((i32(c[2] + c[4]) << 8) + c[6]), i32((i32(c[3] + c[5]) << 8) + c[7]))


class Constants(NamedTuple):
    """What a kernel is compiled for, and what follows from it: all stages know it when they are compiled."""
    K: object         # Octets: how keys are read and widened,
    V: object         # and values
    dim_k: int
    dim_v: int
    heads: int        # of a block
    n_warps: int
    halves: bool      # both caches are f16
    whole: bool       # keys and values lie in registers as a whole, else 64 channels at a time
    n_blocks: int     # of 64 channels of Q and K
    n_slabs: int      # of 64 channels of V
    at_once: int      # slabs whose sums have room in shared memory
    key_words: int    # of a key in a lane's registers,
    value_words: int  # and of a value
    where: Shared

    @property
    def n_steps(self) -> int:
        """Of a warp with its keys of a piece."""
        return PIECE // self.n_warps // STEP

    @property
    def n_own(self) -> int:
        """Keys of a lane."""
        return 2 * self.n_steps

    @property
    def n_loaded(self) -> tuple[int, int, int]:
        """Words of a lane's arrays of keys, of values, and of whether they are seen."""
        return self.key_words * self.n_steps, 2 * self.value_words * self.n_steps, self.n_own


def constants(type_k: str, type_v: str, dim_k: int, dim_v: int, heads: int, n_warps: int) -> Constants:
    K, V, n_blocks, n_slabs = octets_of(type_k, dim_k), octets_of(type_v, dim_v), -(-dim_k // CHANNELS), -(-dim_v // CHANNELS)
    halves = type_k == type_v == "f16"
    whole = max(dim_k, dim_v) <= (256 if halves else 128)
    const = Constants(K, V, dim_k, dim_v, heads, n_warps, halves, whole, n_blocks, n_slabs, slabs_at_once(dim_v, heads, n_warps),
                      2 * K.n_words * (n_blocks if whole else 1), V.n_words * (n_slabs if whole else 1),
                      shared_layout(dim_k, dim_v, heads, n_warps))
    assert whole or const.n_steps == 1, (dim_k, dim_v, n_warps)
    return const


class Cache(NamedTuple):
    """Where the keys, or the values, of a sequence and a KV head lie, for device functions, in octets of 8 channels."""
    octets: object  # pointer
    first: object   # int64, of the sequence's first cell
    row: object     # int32, from cell to cell


class Pieces(NamedTuple):
    """Where o of a piece goes, for device functions: f32 [piece][v_row], v_row = stride(dim_v)."""
    out: object      # pointer
    first: object    # int32, number of the piece of the block's first head
    n_a_head: object  # int32, from head to head


# The stages. s: the shared memory of the block, int32, laid out as `Shared`. key: position of the first key that the warp has of
# a piece; position: that of the query. Local arrays lie in registers; of n_own elements, i = 0 .. n_own - 1 is the lane's key
# `key_of(key, i, lane)`:
#     held i32 (1: the key is seen), x f32 (score of head g, then p, then p'), inv f32 (16256 / amax of the value).

# Loads. Key key + g and values key + 2 t and key + 2 t + 1 of each step; where they are behind the query's position, what is
# there.

def values_late(const: Constants):
    """(): whether values are loaded behind the scores: before them there are no registers for them."""
    whole, n_steps = const.whole, const.n_steps

    @device
    def late():
        return whole and n_steps > 1 and 1000 <= architecture() < 1100
    return late


def key_loaders(const: Constants):
    """(load_keys, load_key_block): a lane's octets t and t + 4 of each 64 channels of key key + g, all of them from word `at` of
    raw on, or those of block b. raw: u32 array."""
    load_key, load_octet, k_words = key_loader(const.K, const.dim_k), octet_loader(const.K, const.dim_k), const.K.n_words

    @device
    def load_keys(keys, key, position, lane, raw, at):
        load_key(keys.octets, keys.first + i64(min(key + (lane >> 2), position)) * keys.row, lane & 3, raw, at)

    @device
    def load_key_block(keys, key, position, b, lane, raw):
        i, at = 8 * b + (lane & 3), keys.first + i64(min(key + (lane >> 2), position)) * keys.row
        load_octet(keys.octets, at, i, raw, 0)
        load_octet(keys.octets, at, i + 4, raw, k_words)
    return load_keys, load_key_block


def value_loaders(const: Constants):
    """(load_values, load_value_slab): a lane's octet g of each 64 channels of its values, all of them, or those of slab b. raw:
    u32 array, value i from word i value_words on."""
    load_value, load_octet = value_loader(const.V, const.dim_v), octet_loader(const.V, const.dim_v)
    n_own, value_words = const.n_own, const.value_words

    @device
    def load_values(values, key, position, lane, raw):
        for i in range(n_own):
            load_value(values.octets, values.first + i64(min(key_of(key, i, lane), position)) * values.row, lane >> 2, raw,
                       i * value_words)

    @device
    def load_value_slab(values, key, position, b, lane, raw):
        even, i = key + 2 * (lane & 3), 8 * b + (lane >> 2)
        load_octet(values.octets, values.first + i64(min(even, position)) * values.row, i, raw, 0)
        load_octet(values.octets, values.first + i64(min(even + 1, position)) * values.row, i, raw, value_words)
    return load_values, load_value_slab


def newest_taker(const: Constants, newest):
    """(key, position, lane, k_raw, v_raw): the key and the value of the query's own position, if they are among the lane's, in
    the place of what was loaded before they were in the cache. newest: as of `Where`. Of f16, of warps of one step."""
    n_blocks, n_slabs, n_own, value_words = const.n_blocks, const.n_slabs, const.n_own, const.value_words
    dim_k, dim_v = const.dim_k, const.dim_v
    assert const.halves and const.whole and const.n_steps == 1, const

    @device
    def put_octet(x, raw, at):
        raw[at], raw[at + 1] = halves(x[0], x[1]), halves(x[2], x[3])
        raw[at + 2], raw[at + 3] = halves(x[4], x[5]), halves(x[6], x[7])

    @device
    def take_newest(key, position, lane, k_raw, v_raw):
        g, t = i32(lane >> 2), i32(lane & 3)
        if key + g == position:
            for b in range(n_blocks):
                for half in range(2):
                    octet = i32(8 * b + 4 * half + t)
                    if 8 * octet < dim_k:
                        put_octet(newest(False, octet), k_raw, 4 * (2 * b + half))
        for i in range(n_own):
            if key_of(key, i, lane) == position:
                for b in range(n_slabs):
                    octet = i32(8 * b + g)
                    if 8 * octet < dim_v:
                        put_octet(newest(True, octet), v_raw, i * value_words + 4 * b)
    return take_newest


def presence_loader(const: Constants):
    """(present, cell, key, position, lane, held): held = whether a lane's keys are present. present: u8 [cells]; cell: the
    sequence's first one."""
    n_own = const.n_own

    @device
    def load_present(present, cell, key, position, lane, held):
        for i in range(n_own):
            held[i] = ld(present, cell + min(key_of(key, i, lane), position))
    return load_present


# Queries, once a block

def query_loader(const: Constants, limbs_of_query=query_limbs):
    """(q, at, b, valid, lane, scale, s): limbs of the queries in shared memory, block b of 64 channels of all heads, by a warp;
    lane: channels 8 t .. and 32 + 8 t .. of head g. Limbs (`limbs_of_queries`) as words of A to `q` [b][half][lane][4];
    mul(d_q, scale) to `q_d` [b][g]. A barrier of the block follows in the kernel. q: f32 [.., dim_k]; at: where head g's query
    begins."""
    where, dim_k = const.where, const.dim_k

    @device
    def load_query_block(q, at, b, valid, lane, scale, s):
        d, (x, y, u, w) = limbs_of_query(q, at, valid, b, dim_k, lane)
        sts4(s, where.q + b * 256 + 4 * lane, x[0], x[1], y[0], y[1])
        sts4(s, where.q + b * 256 + 128 + 4 * lane, u[0], u[1], w[0], w[1])
        if lane & 3 == 0:
            put(s, where.q_d + b * MOST_HEADS + (lane >> 2), mul(d, scale))
    return load_query_block


# 1. Scores

def block_scorer(const: Constants):
    """(add_block, add_two_blocks): (raw, first, b, lane, s, x) -> x, the scores of a lane's two keys of a step, f32 pair, with
    block b of 64 channels added, or with b and b + 1. Per block: d_k, 16256 / amax = scales(amax of the key's 64 channels); exact
    sums HH and `rest` of limbs of lifted(mul(k, 16256 / amax)) and of the query (`mma32`); x = fma(mul(fixed_point, d_q scale),
    d_k, x).

    raw: u32 array, block b of the lane's key from word `first` on. A key lies with four lanes, which exchange amaxes and scales
    (shuffle). Read: `q`, `q_d`."""
    where, k_words = const.where, const.K.n_words
    amax_of, merge, pattern, values = const.K[3:]

    @device
    def octet_limbs(raw, at, inv):
        x = values(raw, at)
        a, b = limbs4((x[0], x[1], x[2], x[3]), inv), limbs4((x[4], x[5], x[6], x[7]), inv)
        return a[0], b[0], a[1], b[1]

    @device
    def dot(raw, first, inv, q, p):
        """Sums of a block of eight keys with the queries' halves q, p: HH of keys 2 t and 2 t + 1, then `rest` of both."""
        k, r = octet_limbs(raw, first, inv), octet_limbs(raw, first + k_words, inv)
        c = mma32(q[0], q[1], q[2], q[3], k[0], k[1], Z, Z, Z, Z)
        e = mma32(q[0], q[1], q[2], q[3], k[2], k[3], Z, Z, Z, Z)
        c = mma32(p[0], p[1], p[2], p[3], r[0], r[1], c[0], c[1], c[2], c[3])
        e = mma32(p[0], p[1], p[2], p[3], r[2], r[3], e[0], e[1], e[2], e[3])
        return c[0], c[1], rest(c[2] + e[0], e[2]), rest(c[3] + e[1], e[3])

    @device
    def block_amax(raw, first):
        return amax_of(amax_of(Z, raw, first), raw, first + k_words)

    @device
    def block_scales(one, two, lane):
        """d_k and 16256 / amax of two blocks of key g, which lies with four lanes: two of them divide for one block, lane & 2
        says which."""
        state = merge(two if lane & 2 else one, shuffle(one if lane & 2 else two, lane ^ 2))
        d, inv = scales(pattern(merge(state, shuffle(state, lane ^ 1))))
        return as_i32(d), as_i32(inv)

    @device
    def add_dots(raw, first, b, side, d, inv, lane, s, x):
        """d, inv: with lanes of `side`, 0 or 2."""
        q, p = lds4(s, where.q + b * 256 + 4 * lane), lds4(s, where.q + b * 256 + 128 + 4 * lane)
        u = dot(raw, first, as_f32(shuffle(inv, lane & -3 | side)), q, p)
        at, q_d = 8 * (lane & 3) + side, get(s, where.q_d + b * MOST_HEADS + (lane >> 2))  # at: a lane of key 2 t
        return (fma(mul(fixed_point(u[0], u[2]), q_d), as_f32(shuffle(d, at)), x[0]),
                fma(mul(fixed_point(u[1], u[3]), q_d), as_f32(shuffle(d, at + 4)), x[1]))

    @device
    def add_block(raw, first, b, lane, s, x):
        amax = block_amax(raw, first)
        d, inv = block_scales(amax, amax, lane)
        return add_dots(raw, first, b, 0, d, inv, lane, s, x)

    @device
    def add_two_blocks(raw, first, b, lane, s, x):
        d, inv = block_scales(block_amax(raw, first), block_amax(raw, first + 2 * k_words), lane)
        return add_dots(raw, first + 2 * k_words, b + 1, 2, d, inv, lane, s, add_dots(raw, first, b, 0, d, inv, lane, s, x))
    return add_block, add_two_blocks


def scorer(const: Constants):
    """(keys, key, position, lane, raw, s, x): x = the scores of head g with a lane's keys, those of blocks added in order from
    +0. keys: `Cache`; raw: u32 array of the lane's keys, if they are whole, of which the first step's have been loaded."""
    n_blocks, n_steps, whole, key_words, k_words = const.n_blocks, const.n_steps, const.whole, const.key_words, const.K.n_words
    (load_keys, load_key_block), (add_block, add_two_blocks) = key_loaders(const), block_scorer(const)
    n_raw = key_words * n_steps

    @device
    def scores(raw, first, lane, s):
        """Of a step."""
        x = ZERO, ZERO
        if n_blocks > 1:
            x = add_two_blocks(raw, first, 0, lane, s, x)
        if n_blocks > 3:
            x = add_two_blocks(raw, first + 4 * k_words, 2, lane, s, x)
        if n_blocks & 1:
            x = add_block(raw, first + (n_blocks - 1) * 2 * k_words, n_blocks - 1, lane, s, x)
        return x

    @device
    def score_step(i, keys, key, position, lane, raw, s, x):
        """The keys of the next step come meanwhile."""
        if i + 1 < n_steps:
            load_keys(keys, key + (i + 1) * STEP, position, lane, raw, (i + 1) * key_words)
        x[2 * i], x[2 * i + 1] = scores(raw, i * key_words, lane, s)

    @device
    def scores_by_block(keys, key, position, lane, s):
        """The channels of the next block come meanwhile."""
        raw, following = cuda.local.array(n_raw, u32), cuda.local.array(n_raw, u32)
        load_key_block(keys, key, position, 0, lane, following)
        x, b = (ZERO, ZERO), i32(0)
        while b < n_blocks:
            for i in range(n_raw):
                raw[i] = following[i]
            if b + 1 < n_blocks:
                load_key_block(keys, key, position, b + 1, lane, following)
            x = add_block(raw, 0, b, lane, s, x)
            b = i32(b + 1)
        return x

    @device
    def score(keys, key, position, lane, raw, s, x):
        if not whole:
            x[0], x[1] = scores_by_block(keys, key, position, lane, s)
        else:
            score_step(0, keys, key, position, lane, raw, s, x)
        if n_steps == 2:
            score_step(1, keys, key, position, lane, raw, s, x)
    return score


# 2. m, p, l and the levels of p'

def maximum(const: Constants):
    """(write_maximum, read_maximum): m, f32, the largest score that head g has with a visible key of the piece, -infinity where
    none is visible: over the lane's keys and the four lanes of g, then over warps, from `maxima` [warp][g], which a barrier
    between both protects."""
    n_own, n_warps, where = const.n_own, const.n_warps, const.where

    @device
    def write_maximum(held, x, lane, warp, g, t, s):
        m = MINUS_INFINITY
        for i in range(n_own):
            m = larger_float(m, x[i] if held[i] != 0 else MINUS_INFINITY)
        m = max_lane(max_lane(m, lane ^ 1), lane ^ 2)
        if t == 0:
            put(s, where.maxima + warp * MOST_HEADS + g, m)
        return m

    @device
    def read_maximum(m, lane, g, t, s):
        for w in range(0, n_warps, 4):
            m = larger_float(m, get(s, where.maxima + (w + t) * MOST_HEADS + g))
        return max_lane(max_lane(m, lane ^ 1), lane ^ 2)
    return write_maximum, read_maximum


def softener(const: Constants):
    """(m, held, lane, warp, g, s, x): x = p = exp(sub(x, m)) of visible keys, +0 of others; p also to `p` [g][key of the piece]
    for the tree of sums, which a barrier protects that `largest_amax` waits at."""
    n_own, n_keys, heads, where = const.n_own, STEP * const.n_steps, const.heads, const.where

    @device
    def soften(m, held, lane, warp, g, s, x):
        for i in range(n_own):
            p = exp(sub(x[i], m))
            x[i] = p if held[i] != 0 else ZERO
            if g < heads:
                put(s, where.p + g * PIECE + key_of(warp * n_keys, i, lane), x[i])
    return soften


def value_scaler(const: Constants):
    """(values, key, position, lane, raw, held, inv, x): x = p' = mul(p, d_v) of visible keys, +0 of others, and inv; d_v, inv =
    scales(amax of all channels of a value). A value lies with the eight lanes of one t, which exchange amaxes: half of them
    divide for one key. values: `Cache`; raw: u32 array of the lane's values, if they are whole; else they are loaded here,
    64 channels at a time."""
    n_steps, n_slabs, whole, value_words, v_words = const.n_steps, const.n_slabs, const.whole, const.value_words, const.V.n_words
    amax_of, merge, pattern, _ = const.V[3:]
    _, load_value_slab = value_loaders(const)
    step_words = 2 * value_words
    n_raw = step_words * n_steps

    @device
    def value_amax(raw, first):
        """Over a lane's channels of a value."""
        state = amax_of(Z, raw, first)
        if n_slabs > 1:
            state = amax_of(state, raw, first + v_words)
        if n_slabs > 2:
            state = amax_of(state, raw, first + 2 * v_words)
        if n_slabs > 3:
            state = amax_of(state, raw, first + 3 * v_words)
        return state

    @device
    def value_amaxes_by_slab(values, key, position, lane):
        raw = cuda.local.array(n_raw, u32)
        a, b, i = Z, Z, i32(0)
        while i < n_slabs:
            load_value_slab(values, key, position, i, lane, raw)
            a, b = amax_of(a, raw, 0), amax_of(b, raw, value_words)
            i = i32(i + 1)
        return a, b

    @device
    def value_scales(amaxes, lane):
        """d_v and 16256 / amax of a lane's two keys; lane & 16 says for which it divides."""
        a, b = amaxes
        state = merge(b if lane & 16 else a, shuffle(a if lane & 16 else b, lane ^ 16))
        state = merge(state, shuffle(state, lane ^ 8))
        d_v, inv = scales(pattern(merge(state, shuffle(state, lane ^ 4))))
        d_v, inv, t = as_i32(d_v), as_i32(inv), lane & 3
        return (as_f32(shuffle(d_v, t)), as_f32(shuffle(d_v, t + 16))), (as_f32(shuffle(inv, t)), as_f32(shuffle(inv, t + 16)))

    @device
    def scale_step(i, amaxes, lane, held, inv, x):
        d, inv_d = value_scales(amaxes, lane)
        x[2 * i], x[2 * i + 1] = (mul(x[2 * i], d[0]) if held[2 * i] != 0 else ZERO,
                                  mul(x[2 * i + 1], d[1]) if held[2 * i + 1] != 0 else ZERO)
        inv[2 * i], inv[2 * i + 1] = inv_d

    @device
    def scale_values(i, raw, lane, held, inv, x):
        scale_step(i, (value_amax(raw, i * step_words), value_amax(raw, i * step_words + value_words)), lane, held, inv, x)

    @device
    def scale_by_values(values, key, position, lane, raw, held, inv, x):
        if whole:
            scale_values(0, raw, lane, held, inv, x)
            if n_steps == 2:
                scale_values(1, raw, lane, held, inv, x)
        else:
            scale_step(0, value_amaxes_by_slab(values, key, position, lane), lane, held, inv, x)
    return scale_by_values


def largest_weight(const: Constants):
    """(x, lane, warp, g, t, s) -> the bit pattern, int32, of the largest p' of head g in the piece: as of `maximum`, by `amaxes`
    [warp][g]. Behind its barrier p of the piece is there too."""
    n_own, n_warps, where = const.n_own, const.n_warps, const.where

    @device
    def largest_amax(x, lane, warp, g, t, s):
        amax = Z
        for i in range(n_own):
            amax = larger(amax, x[i])
        amax = max_pattern(max_pattern(amax, lane ^ 1), lane ^ 2)
        if t == 0:
            sts(s, where.amaxes + warp * MOST_HEADS + g, amax)
        cuda.syncthreads()  # p and amaxes of the warps are written
        for w in range(0, n_warps, 4):
            other = i32(lds(s, where.amaxes + (w + t) * MOST_HEADS + g))
            amax = other if other > amax else amax
        return max_pattern(max_pattern(amax, lane ^ 1), lane ^ 2)
    return largest_amax


def statistics_writer(const: Constants, put_piece):
    """(to, statistics, m, d_p, tid, lane, warp, g, t, s): m of head g and l = sum128(p) of head `warp` to f32 [piece][2] of
    to.out, which begins at `statistics` for the block's first head; d_p of head g to `d_p`, which a barrier protects before sums
    are read. to: `Pieces`."""
    heads, where = const.heads, const.where

    @device
    def store_statistics(to, statistics, m, d_p, tid, lane, warp, g, t, s):
        if tid < 4 * heads and t == 0:
            put(s, where.d_p + g, d_p)
            put_piece(to.out, statistics + i32(2 * g * to.n_a_head), m)
        if warp < heads:
            l = sum8(s, where.p + warp * PIECE + (lane & 15))
            l = add_lane(add_lane(add_lane(add_lane(l, lane ^ 8), lane ^ 4), lane ^ 2), lane ^ 1)
            if lane == 0:
                put_piece(to.out, statistics + i32(2 * warp * to.n_a_head) + 1, l)
    return store_statistics


# 3. o

def slab_summer(const: Constants):
    """(both, raw, first, side, inv, mask, tid, s, half): a warp's exact sums HH and 4 `rest` of p' and 64 channels of its values,
    or of half of them, to `sums` [side][warp], which a barrier follows. Values are limbs of lifted(mul(v, inv)). both: u32
    [n_steps], limbs of the lane's p' of a step a word; raw: u32 array, the lane's octets of the slab from word `first` on; mask:
    `pair_mask`; half: as of `Where`."""
    n_steps, heads, value_words, where = const.n_steps, const.heads, const.value_words, const.where
    warp_words, step_words, values = heads * 4 * LANE, 2 * const.value_words, const.V.values
    side_words = const.n_warps * warp_words

    @device
    def weigh4(both, raw, first, half, inv, mask):
        """Sums of four channels of one step."""
        a, b = half_of(values(raw, first), half), half_of(values(raw, first + value_words), half)
        return (weigh(both, a[0], b[0], inv, mask), weigh(both, a[1], b[1], inv, mask),
                weigh(both, a[2], b[2], inv, mask), weigh(both, a[3], b[3], inv, mask))

    @device
    def weigh4_two(both, raw, first, half, inv, mask):
        """Of two steps."""
        a, b = half_of(values(raw, first), half), half_of(values(raw, first + value_words), half)
        first += step_words
        c, d = half_of(values(raw, first), half), half_of(values(raw, first + value_words), half)
        return (weigh_two(both, a[0], b[0], c[0], d[0], inv, mask), weigh_two(both, a[1], b[1], c[1], d[1], inv, mask),
                weigh_two(both, a[2], b[2], c[2], d[2], inv, mask), weigh_two(both, a[3], b[3], c[3], d[3], inv, mask))

    @device
    def sum4(both, raw, first, half, inv, mask, s, at, valid):
        """The warp's sums of four channels."""
        x, y, u, w = weigh4(both, raw, first, half, inv, mask) if n_steps == 1 else weigh4_two(both, raw, first, half, inv, mask)
        if valid:
            store_sums(s, at, x)
            store_sums(s, at + 4, y)
            store_sums(s, at + 8, u)
            store_sums(s, at + 12, w)

    @device
    def sum_slab(both, raw, first, side, inv, mask, tid, s, half):
        tid = afresh(tid)  # here and below: places are computed where they are used, registers are for values
        lane = tid & 31
        at = where.sums + side * side_words + (tid >> 5) * warp_words + lane * LANE
        # All lanes, of 8 heads; where ptxas knows that, it has more values on their way than there are registers for two steps
        valid = lane < (i32(4 * heads) if n_steps == 1 else afresh(i32(4 * heads)))
        if half != LAST:
            sum4(both, raw, first, 0, inv, mask, s, at, valid)
        if half != FIRST:
            sum4(both, raw, first, 1, inv, mask, s, at + 16, valid)
        syncwarp()  # the work on one slab after that on the other, or it takes all registers
    return sum_slab


def slab_folder(const: Constants, put_piece):
    """(b, tid, s, to, half): o = mul(fixed_point, d_p) of slabs from b on, as many as have room, from the warps' `sums`, added
    up; two channels a thread. Between two barriers: before it the sums are there, behind it they are read. to: `Pieces`, where o
    goes. put_piece: `Where.put`."""
    heads, n_warps, dim_v, at_once, where = const.heads, const.n_warps, const.dim_v, const.at_once, const.where
    n_threads, warp_words, v_row = 32 * n_warps, heads * 4 * LANE, stride(dim_v)
    side_words, n_sums = n_warps * warp_words, at_once * 32 * heads

    @device
    def fold(b, tid, s, to, half):
        r = i32(0)
        while r < n_sums:
            i = i32(afresh(tid) + r)
            r = i32(r + n_threads)
            side = i32(1 if i >= 32 * heads else 0)
            j = i32(i - side * 32 * heads)
            head, channel = i32(j >> 5), i32((b + side) * CHANNELS + 2 * (j & 24) + (j & 7))
            mine = half == ALL or (half == FIRST) == ((j & 7) < 4)
            if (n_sums % n_threads == 0 or i < n_sums) and mine and (dim_v % (at_once * CHANNELS) == 0 or channel < dim_v):
                at = where.sums + side * side_words + (j >> 3) * LANE + 4 * (j & 7)
                x = lds4(s, at)
                for w in range(1, n_warps):
                    y = lds4(s, at + w * warp_words)
                    x = i32(x[0] + y[0]), i32(x[1] + y[1]), i32(x[2] + y[2]), i32(x[3] + y[3])
                o, d = i64(i32(to.first + head * to.n_a_head)) * v_row + channel, get(s, where.d_p + head)
                put_piece(to.out, o, mul(fixed_point(x[0], x[2] >> 2), d))
                if dim_v % 16 == 0 or channel + 8 < dim_v:
                    put_piece(to.out, o + 8, mul(fixed_point(x[1], x[3] >> 2), d))
    return fold


def weigher(const: Constants, fold):
    """(both, values, key, position, raw, inv, mask, lane, tid, s, to, half): o of the piece, slab after slab: `sum_slab` and
    `fold`. Of whole values the last slabs are left for the kernel to fold behind a barrier of its own, until which it asks for
    the next piece. fold: of `slab_folder`. Arguments as of `slab_summer`, `slab_folder` and `scale_by_values`."""
    n_slabs, at_once, whole, v_words = const.n_slabs, const.at_once, const.whole, const.V.n_words
    sum_slab, (_, load_value_slab) = slab_summer(const), value_loaders(const)

    @device
    def sum_slabs(both, raw, b, inv, mask, tid, s, half):
        """Of as many slabs as have room, whose values lie in registers."""
        sum_slab(both, raw, b * v_words, 0, inv, mask, tid, s, half)
        if at_once > 1 and b + 1 < n_slabs:
            sum_slab(both, raw, (b + 1) * v_words, 1, inv, mask, tid, s, half)

    @device
    def more_slabs(both, raw, b, inv, mask, tid, s, to, half):
        """Folds those before b, sums those from b on."""
        cuda.syncthreads()
        fold(b - at_once, tid, s, to, half)
        cuda.syncthreads()  # those sums are read
        sum_slabs(both, raw, b, inv, mask, tid, s, half)

    @device
    def weigh_slabs(both, values, key, position, raw, inv, mask, lane, tid, s, to, half):
        if whole:
            sum_slabs(both, raw, 0, inv, mask, tid, s, half)
            if n_slabs > at_once:
                more_slabs(both, raw, at_once, inv, mask, tid, s, to, half)
            if n_slabs > 2 * at_once:
                more_slabs(both, raw, 2 * at_once, inv, mask, tid, s, to, half)
            if n_slabs > 3 * at_once:
                more_slabs(both, raw, 3 * at_once, inv, mask, tid, s, to, half)
        else:
            b = i32(0)
            while b < n_slabs:
                load_value_slab(values, key, position, b, lane, raw)
                side = i32(b & (at_once - 1))
                sum_slab(both, raw, 0, side, inv, mask, tid, s, half)
                b = i32(b + 1)
                if side == at_once - 1 or b == n_slabs:
                    cuda.syncthreads()  # sums of the warps are written
                    fold(i32(b - 1 - side), tid, s, to, half)
                    cuda.syncthreads()  # and read
    return weigh_slabs
