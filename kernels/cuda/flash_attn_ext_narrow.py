"""Attention of single queries over f16 and q8_0 caches, heads of up to 128 channels: pieces side by side, on int8 tensor cores
(numerics, section 8).

A block of 8 warps is one token and up to 8 query heads of one KV head, which share all that it reads: every n-th piece of 128
keys. What each piece gives, (m, l, o), waits in memory for `flash_attn_ext_combine`. A token has those pieces that its position
and the window reach, which the kernel reads; blocks without one exit at once, so a launch holds no number that grows. Position
and sequence are read before the kernel that writes the cache has ended; all else that a block reads first it asks for at once
when it has. The keys and values of the next piece are copied to shared memory while one is worked on; a lane copies what it
reads itself, so nothing waits for it but the lane.

A warp has 16 keys. Keys and channels of values are rows of A, queries and p' are columns of B: head h of four has its high limbs
in column 2 h, its low limbs in 2 h + 1, so that a sum with either is in one lane; of more than four heads, B comes twice. Lane
l = 4 g + t

    1. has of keys g and g + 8 the channels 8 t .. and 32 + 8 t .. of each 64, and gets the scores of head t with both
    2. exchanges maxima, p for the tree of sums, and amaxes with the others; two levels of p' of head t are a word
    3. has of keys 2 t, 2 t + 8, 2 t + 1, 2 t + 9 the channels 8 g .. of each 64: lo and hi of two keys are a word of A. The words
       of p' of these keys come from two lanes, once at the places of hi and once at those of lo. It gets the sums of head t, and
       leaves them for a thread that adds up those of the warps

Where a block has all pieces of its heads, it combines them itself, as `flash_attn_ext_combine` does: a warp has the chain of a
head's length, threads those of its outputs. They are written as floats, or quantized (`quantize`).
"""
from itertools import accumulate
from typing import NamedTuple

from numba import cuda, types

from ...quant.formats import CHUNK
from ..reference.flash_attn_ext import score_scale
from .fixed_point import (CHANNELS, EVEN_BITS, MINUS_INFINITY, ZERO, fixed_point, larger_float, lifted, limb_pair, masked_limbs,
                          pair_mask, rest, scales)
from .flash_attn_ext_combine import (MOST_HEADS, ONE, PIECE, addresses, capping, first_piece, heads_together, of_few_models,
                                     ring_of, sink, sizes, span_of, statistics_at, stride)
from .flash_attn_ext_few import Z, add_lane, get, half_of, max_lane, max_pattern, put, query_loader, sum8
from .flash_attn_ext_rows import FORMS, ROWS, Cache, smaller
from .launch import F32, I32, Kernel, N, SCALAR_F32, U32, U8, factory
from .ptx import (afresh, apart, as_f32, as_i32, before_blackwell, copies_commit, copies_wait_but, device, div, exp, f32, fma,
                  i32, i64, ld, ldc, lds, lds4, mma32, mul, prmt, shuffle, st, st2, sts, sts4, sub, syncwarp, u32,
                  wait_for_previous)
from .quantize import N_THREADS, chunk_quantizer
from .set_rows import larger

MOST_CHANNELS = 128
WARPS = 8
THREADS = 32 * WARPS
RESIDENT = 2
TILE = 4      # heads of a tile of B
MINUS_ONE = f32(-1)  # in the place of b for a piece without a visible key: its o, +0, becomes -0, which changes no sum
copies_wait = copies_wait_but(1)  # for keys where values are on their way, and for values where the next keys are


class Shared(NamedTuple):
    """Words of shared memory; multiples of four."""
    maxima: int   # f32 [warp][8 heads]
    amaxes: int   # of p', the same
    d_p: int      # f32 [8 heads]
    kept: int     # the same: a of a head's chain,
    scales: int   # and b
    p: int        # f32 [heads][128]
    sums: int     # i32 [warp][tile][slab][pair of channels][lane][4]: HH and 4 `rest` of both channels
    keys: int     # copies
    values: int
    n_words: int
    # of one tile only before the first sums
    q: int        # words [block][half][lane][4], as `query_loader` has them
    q_d: int      # f32 [block][8 heads]: d_q * scale


class Constants(NamedTuple):
    """What a kernel is compiled for, and what follows from it: all stages know it when they are compiled."""
    K: object         # Octets
    V: object
    dim_k: int
    dim_v: int
    heads: int        # of a block
    n_tiles: int      # of four heads
    n_blocks: int     # of 64 channels of Q and K
    n_slabs: int      # of 64 channels of V
    at_once: int      # slabs whose sums have room in shared memory
    where: Shared


def shared_layout(type_k: str, type_v: str, dim_k: int, dim_v: int, heads: int) -> Shared:
    n_tiles, n_blocks, n_slabs = -(-heads // TILE), -(-dim_k // CHANNELS), -(-dim_v // CHANNELS)
    at_once = n_slabs if n_tiles == 1 else 1
    sizes = (WARPS * MOST_HEADS, WARPS * MOST_HEADS, MOST_HEADS, MOST_HEADS, MOST_HEADS, heads * PIECE,
             WARPS * n_tiles * at_once * 512, WARPS * FORMS[type_k].staged(dim_k), WARPS * FORMS[type_v].staged(dim_v))
    *places, n_words = accumulate(sizes, initial=0)
    q = places[6] if n_tiles == 1 else n_words
    return Shared(*places, n_words + (n_tiles - 1) * n_blocks * (256 + MOST_HEADS), q, q + n_blocks * 256)


def constants(type_k: str, type_v: str, dim_k: int, dim_v: int, heads: int) -> Constants:
    n_tiles, n_slabs = -(-heads // TILE), -(-dim_v // CHANNELS)
    return Constants(FORMS[type_k].octets, FORMS[type_v].octets, dim_k, dim_v, heads, n_tiles, -(-dim_k // CHANNELS), n_slabs,
                     n_slabs if n_tiles == 1 else 1, shared_layout(type_k, type_v, dim_k, dim_v, heads))


@device
def key_row(i, lane):
    """Of a lane's i-th key: its row among the warp's 16."""
    return i32((lane >> 2) + 8 * i)


@device
def value_row(i, lane):
    """The same of its i-th value."""
    return i32(2 * (lane & 3) + (i >> 1) + 8 * (i & 1))


# The stages. s: the shared memory of the block, int32, laid out as `Shared`. Local arrays lie in registers: raw u32, a lane's
# octets (`flash_attn_ext_rows`); x f32 [2 n_tiles], of head 4 j + t and keys g, g + 8 from 2 j on; inv f32 [4], 16256 / amax of a
# lane's values; columns u32 [4 n_tiles], of each tile the words of B, two with p' at the places of hi, two at those of lo.

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


def scorer(const: Constants):
    """(raw, q, q_d, lane, s, mask, x): x = the scores of the lane's heads with its two keys, blocks of 64 channels added in order
    from +0: d_k, 16256 / amax = scales(amax of the key's 64 channels); exact sums HH and `rest` of limbs of
    lifted(mul(k, 16256 / amax)) and of the query (`mma32`); x = fma(mul(fixed_point, d_q scale), d_k, x). A key lies with four
    lanes, which exchange amaxes and divide for one block of one key each. q, q_d: as of `query_reader`; mask: EVEN_BITS, as
    `pair_mask`."""
    n_blocks, n_tiles, k_words, (_, words) = const.n_blocks, const.n_tiles, const.K.n_words, query_reader(const)
    amax_of, merge, pattern, values = const.K[3:]
    row_words = 2 * n_blocks * k_words

    @device
    def octet_limbs(raw, at, inv, mask):
        x = values(raw, at)
        a, b = limbs4_masked((x[0], x[1], x[2], x[3]), inv, mask), limbs4_masked((x[4], x[5], x[6], x[7]), inv, mask)
        return a[0], b[0], a[1], b[1]

    @device
    def state(raw, i, b):
        at = i * row_words + b * 2 * k_words
        return amax_of(amax_of(Z, raw, at), raw, at + k_words)

    @device
    def block_scales(raw, lane):
        """Of one block of one key of this group of four lanes: block t >> 1 of key g + 8 (t & 1)."""
        odd = lane & 1
        if n_blocks == 1:
            one, two = state(raw, 0, 0), state(raw, 1, 0)
            m = merge(two if odd else one, shuffle(one if odd else two, lane ^ 1))
            m = merge(m, shuffle(m, lane ^ 2))
        else:
            second = lane & 2
            a, b = state(raw, 0, 0), state(raw, 0, 1)
            one = merge(b if second else a, shuffle(a if second else b, lane ^ 2))
            a, b = state(raw, 1, 0), state(raw, 1, 1)
            two = merge(b if second else a, shuffle(a if second else b, lane ^ 2))
            m = merge(two if odd else one, shuffle(one if odd else two, lane ^ 1))
        d, inv = scales(pattern(m))
        return as_i32(d), as_i32(inv)

    @device
    def add_block(raw, b, d, inv, q, q_d, lane, s, mask, x):
        at, from_lane = b * 2 * k_words, (lane & 28) + 2 * b
        inv_0, inv_1 = as_f32(shuffle(inv, from_lane)), as_f32(shuffle(inv, from_lane + 1))
        d_0, d_1 = as_f32(shuffle(d, from_lane)), as_f32(shuffle(d, from_lane + 1))
        k, r = octet_limbs(raw, at, inv_0, mask), octet_limbs(raw, at + row_words, inv_1, mask)
        u, w = (octet_limbs(raw, at + k_words, inv_0, mask),
                octet_limbs(raw, at + k_words + row_words, inv_1, mask))
        for j in range(n_tiles):
            y = words(j, b, lane, s, q, q_d)
            c = mma32(k[0], r[0], k[1], r[1], y[0], y[1], Z, Z, Z, Z)
            e = mma32(k[2], r[2], k[3], r[3], y[0], y[1], Z, Z, Z, Z)
            c = mma32(u[0], w[0], u[1], w[1], y[2], y[3], c[0], c[1], c[2], c[3])
            e = mma32(u[2], w[2], u[3], w[3], y[2], y[3], e[0], e[1], e[2], e[3])
            scale = y[4]
            x[2 * j] = fma(mul(fixed_point(c[0], rest(c[1] + e[0], e[1])), scale), d_0, x[2 * j])
            x[2 * j + 1] = fma(mul(fixed_point(c[2], rest(c[3] + e[2], e[3])), scale), d_1, x[2 * j + 1])

    @device
    def score(raw, q, q_d, lane, s, mask, x):
        for i in range(2 * n_tiles):
            x[i] = ZERO
        d, inv = block_scales(raw, lane)
        add_block(raw, 0, d, inv, q, q_d, lane, s, mask, x)
        if n_blocks > 1:
            add_block(raw, 1, d, inv, q, q_d, lane, s, mask, x)
    return score


@device
def max_rows(m, lane):
    """Over the lanes of a head."""
    return max_lane(max_lane(max_lane(m, lane ^ 4), lane ^ 8), lane ^ 16)


@device
def max_row_patterns(m, lane):
    return max_pattern(max_pattern(max_pattern(m, lane ^ 4), lane ^ 8), lane ^ 16)


def value_scaler(const: Constants):
    """(raw, lane, inv) -> d_v of keys g and g + 8, and inv; d_v, 16256 / amax = scales(amax of all channels of a value). Four
    values lie with the eight lanes of one t, which exchange amaxes: two divide for each."""
    n_slabs, v_words = const.n_slabs, const.V.n_words
    amax_of, merge, pattern, _ = const.V[3:]

    @device
    def state(raw, i):
        a = amax_of(Z, raw, i * n_slabs * v_words)
        if n_slabs > 1:
            a = amax_of(a, raw, (i * n_slabs + 1) * v_words)
        return a

    @device
    def scale_values(raw, lane, inv):
        second, odd, t = lane & 16, lane & 8, lane & 3
        a, b, c, d = state(raw, 0), state(raw, 1), state(raw, 2), state(raw, 3)
        one = merge(c if second else a, shuffle(a if second else c, lane ^ 16))
        two = merge(d if second else b, shuffle(b if second else d, lane ^ 16))
        m = merge(two if odd else one, shuffle(one if odd else two, lane ^ 8))
        m = merge(m, shuffle(m, lane ^ 4))
        d_v, inv_v = scales(pattern(m))
        d_v, inv_v = as_i32(d_v), as_i32(inv_v)
        for i in range(4):
            inv[i] = as_f32(shuffle(inv_v, t + 8 * (i & 1) + 16 * (i >> 1)))
        row = i32((lane >> 3) + ((lane & 4) << 2))
        return as_f32(shuffle(d_v, row)), as_f32(shuffle(d_v, row + 8))
    return scale_values


def slab_summer(const: Constants):
    """(raw, b, side, inv, mask, columns, lane, warp, s): a warp's exact sums HH and 4 `rest` of p' and channels 64 b .. of its
    values, to `sums` [warp][tile][side], which a barrier follows. Values are limbs of lifted(mul(v, inv)). mask: `pair_mask`."""
    n_tiles, n_slabs, at_once, v_words, values, where = (const.n_tiles, const.n_slabs, const.at_once, const.V.n_words,
                                                         const.V.values, const.where)
    row_words = n_slabs * v_words

    @device
    def sum_pair(a, b, inv, mask, columns, lane, s, at):
        """a, b: values (f32) of two channels of the first two keys and of the others."""
        v = limb_pair(lifted(a[0], inv[0]), lifted(a[2], inv[1]), mask)
        w = limb_pair(lifted(a[1], inv[0]), lifted(a[3], inv[1]), mask)
        x = limb_pair(lifted(b[0], inv[2]), lifted(b[2], inv[3]), mask)
        y = limb_pair(lifted(b[1], inv[2]), lifted(b[3], inv[3]), mask)
        for j in range(n_tiles):
            h = mma32(v, w, x, y, columns[4 * j], columns[4 * j + 1], Z, Z, Z, Z)
            l = mma32(v, w, x, y, columns[4 * j + 2], columns[4 * j + 3], Z, Z, Z, Z)
            sts4(s, at + j * at_once * 512, h[0], i32((i32(h[1] + l[0]) << 8) + l[1]), h[2], i32((i32(h[3] + l[2]) << 8) + l[3]))

    @device
    def sum_half(raw, first, half, inv, mask, columns, lane, s, at):
        a, b = half_of(values(raw, first), half), half_of(values(raw, first + row_words), half)
        c, d = half_of(values(raw, first + 2 * row_words), half), half_of(values(raw, first + 3 * row_words), half)
        sum_pair((a[0], a[1], b[0], b[1]), (c[0], c[1], d[0], d[1]), inv, mask, columns, lane, s, at)
        if n_tiles > 1:
            apart()
        sum_pair((a[2], a[3], b[2], b[3]), (c[2], c[3], d[2], d[3]), inv, mask, columns, lane, s, at + 128)

    @device
    def sum_slab(raw, b, side, inv, mask, columns, lane, warp, s):
        at = where.sums + (warp * n_tiles * at_once + side) * 512 + 4 * lane
        sum_half(raw, b * v_words, 0, inv, mask, columns, lane, s, at)
        if n_tiles > 1:
            apart()
        sum_half(raw, b * v_words, 1, inv, mask, columns, lane, s, at + 256)
    return sum_slab


def slab_folder(const: Constants):
    """(own_place, fold): (b, tid) -> (whether thread tid has outputs of the slabs from b on, as many as have room; their
    head; the first of their two channels); (tid, head, s) -> o = mul(fixed_point, d_p) of both, of the warps' `sums`, added up.
    Between two barriers: before it the sums are there, behind it they are read."""
    heads, n_tiles, at_once, dim_v, where = const.heads, const.n_tiles, const.at_once, const.dim_v, const.where
    warp_words = n_tiles * at_once * 512
    n_units = warp_words // 4

    @device
    def own_place(b, tid):
        lane, c, group = i32(tid & 31), i32((tid >> 5) & 3), i32(tid >> 7)
        side, tile = (group, i32(0)) if n_tiles == 1 else (i32(0), group)
        head, channel = i32(TILE * tile + (lane & 3)), i32((b + side) * CHANNELS + 8 * (lane >> 2) + 2 * c)
        mine = (n_units == THREADS or tid < n_units) and (heads % TILE == 0 or head < heads) and (
            dim_v % (at_once * CHANNELS) == 0 or channel < dim_v)
        return mine, head, channel

    @device
    def fold(tid, head, s):
        at = where.sums + 4 * tid
        x = lds4(s, at)
        for w in range(1, WARPS):
            y = lds4(s, at + w * warp_words)
            x = i32(x[0] + y[0]), i32(x[1] + y[1]), i32(x[2] + y[2]), i32(x[3] + y[3])
        d = get(s, where.d_p + head)
        return mul(fixed_point(x[0], x[1] >> 2), d), mul(fixed_point(x[2], x[3] >> 2), d)
    return own_place, fold


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
    n_tiles, n_blocks, n_slabs, at_once, where = const.n_tiles, const.n_blocks, const.n_slabs, const.at_once, const.where
    n_k_raw, n_v_raw = 4 * n_blocks * const.K.n_words, 4 * n_slabs * const.V.n_words
    n_scores, n_columns = 2 * n_tiles, 4 * n_tiles
    n_query_words, (load_queries, _) = 4 * n_blocks, query_reader(const)
    form_k, form_v = FORMS[type_k], FORMS[type_v]
    fetch_keys, take_keys = form_k.copier(dim_k, 2, 2 * n_blocks, 4, where.keys, key_row, device(lambda lane: lane & 3))
    fetch_values, take_values = form_v.copier(dim_v, 4, n_slabs, 8, where.values, value_row, device(lambda lane: lane >> 2))
    k_words, v_words = form_k.words(dim_k), form_v.words(dim_v)
    load_query_block, score, scale_values = query_loader(const), scorer(const), value_scaler(const)
    sum_slab, (own_place, fold), capped, ring = slab_summer(const), slab_folder(const), capping(softcap), ring_of(is_ring)
    quantize_chunk = chunk_quantizer(THREADS // N_THREADS)
    alone, n_rounds, v_row, n_chunks = result != "pieces", n_slabs // at_once, stride(dim_v), heads * dim_v // CHUNK
    n_outputs = 2 * n_rounds

    @device
    def cache_at(words, first, row, span, piece):
        """first: of the sequence's first cell; the piece's keys, or values, are found by their positions."""
        return Cache(words, first - i64(ring.moved(span, i32(piece * PIECE))) * row, row)

    def kernel(q, k, v, seq, pos, present, sinks, out, n_ctx, row_v, span, scale):  # noqa: PLR0915 (a kernel: its steps in order)
        s = cuda.shared.array(0, types.int32)
        k_raw, v_raw, held = cuda.local.array(n_k_raw, u32), cuda.local.array(n_v_raw, u32), cuda.local.array(2, i32)
        x, inv, columns = cuda.local.array(n_scores, f32), cuda.local.array(4, f32), cuda.local.array(n_columns, u32)
        queries, q_d = cuda.local.array(n_query_words, u32), cuda.local.array(n_blocks, f32)
        m, amax = cuda.local.array(n_tiles, f32), cuda.local.array(n_tiles, i32)
        o, M, L = cuda.local.array(n_outputs, f32), MINUS_INFINITY, ZERO  # of head `warp`
        for i in range(n_outputs):
            o[i] = ZERO
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
        cell, row_k = i64(sequence) * n_ctx, i32(cuda.gridDim.y * k_words)
        begin = ring.begin(span, sequence, cell)  # of K and V
        first_k, first_v = begin * row_k + cuda.blockIdx.y * k_words, begin * row_v + cuda.blockIdx.y * v_words

        key = i32(piece * PIECE + warp * ROWS)
        fetch_keys(cache_at(k, first_k, row_k, span, piece), key, position, lane, warp, s)
        copies_commit()
        fetch_values(cache_at(v, first_v, row_v, span, piece), key, position, lane, warp, s)
        copies_commit()
        for i in range(2):
            held[i] = ld(present, cell + smaller(i32(key + key_row(i, lane)), position))
        if warp < n_blocks:
            load_query_block(q, (i64(token) * n_head + first_head + g) * dim_k, warp, g < heads, lane, scale, s)
        cuda.syncthreads()  # the queries are prepared
        load_queries(lane, s, queries, q_d)

        while piece <= position >> 7:
            # 1. Scores of the lane's keys; those beyond the query's position are not seen
            now, here = piece, key
            piece = i32(piece + n_splits)
            key = i32(piece * PIECE + warp * ROWS)
            more = piece <= position >> 7
            copies_wait()  # keys are there
            take_keys(lane, warp, s, k_raw)
            if more:
                fetch_keys(cache_at(k, first_k, row_k, span, piece), key, position, lane, warp, s)
            copies_commit()
            score(k_raw, queries, q_d, lane, s, u32(EVEN_BITS + u32(n_ctx >> 31)), x)
            if softcap:
                for i in range(2 * n_tiles):
                    x[i] = capped(x[i])
            oldest = i32(position - (window if before_blackwell() else afresh(window)))
            for i in range(2):
                held[i] = 1 if oldest < i32(here + key_row(i, lane)) <= position and held[i] != 0 else 0

            # 2. m, p, l and the levels of p'
            for j in range(n_tiles):
                one, two = x[2 * j] if held[0] != 0 else MINUS_INFINITY, x[2 * j + 1] if held[1] != 0 else MINUS_INFINITY
                m[j] = max_rows(larger_float(larger_float(MINUS_INFINITY, one), two), lane)
                if g == 0:
                    put(s, where.maxima + warp * MOST_HEADS + TILE * j + t, m[j])
            copies_wait()  # values are there
            take_values(lane, warp, s, v_raw)
            if more:
                fetch_values(cache_at(v, first_v, row_v, span, piece), key, position, lane, warp, s)
            copies_commit()
            d_v = scale_values(v_raw, lane, inv)
            cuda.syncthreads()  # maxima of the warps are written
            for j in range(n_tiles):
                m[j] = max_rows(get(s, where.maxima + g * MOST_HEADS + TILE * j + t), lane)
            for j in range(n_tiles):
                for i in range(2):
                    p = exp(sub(x[2 * j + i], m[j]))
                    p = p if held[i] != 0 else ZERO
                    if heads % TILE == 0 or TILE * j + t < heads:
                        put(s, where.p + (TILE * j + t) * PIECE + warp * ROWS + key_row(i, lane), p)
                    x[2 * j + i] = mul(p, d_v[i]) if held[i] != 0 else ZERO
            for j in range(n_tiles):
                amax[j] = max_row_patterns(larger(larger(Z, x[2 * j]), x[2 * j + 1]), lane)
                if g == 0:
                    sts(s, where.amaxes + warp * MOST_HEADS + TILE * j + t, amax[j])
            for i in range(2):
                if more:
                    held[i] = ld(present, cell + smaller(i32(key + key_row(i, lane)), position))
            cuda.syncthreads()  # p and amaxes of the warps are written
            most_pieces = i32(i32(n_ctx + PIECE - 1) >> 7)
            first_piece_of = i32(i32(token * n_head + first_head) * most_pieces + now)
            heads_here = n_head if n_tiles == 1 else afresh(n_head)
            statistics = statistics_at(cuda.gridDim.z, heads_here, n_ctx, dim_v) + 2 * first_piece_of
            mask = pair_mask(n_ctx)
            for j in range(n_tiles):
                d_p, inv_p = scales(max_row_patterns(i32(lds(s, where.amaxes + g * MOST_HEADS + TILE * j + t)), lane))
                both = i32(limb_pair(lifted(x[2 * j], inv_p), lifted(x[2 * j + 1], inv_p), mask))
                if tid < TILE:
                    put(s, where.d_p + TILE * j + t, d_p)
                    if not alone and (heads % TILE == 0 or TILE * j + t < heads):
                        st(out, statistics + i32(2 * (TILE * j + t) * most_pieces), m[j])
                first, second = u32(shuffle(both, 8 * t + (g >> 1))), u32(shuffle(both, 8 * t + 4 + (g >> 1)))
                hi, lo = u32(0x3414 - (g & 1) * 0x1010), u32(0x4341 - (g & 1) * 0x0101)
                columns[4 * j], columns[4 * j + 1] = prmt(first, 0, hi), prmt(second, 0, hi)
                columns[4 * j + 2], columns[4 * j + 3] = prmt(first, 0, lo), prmt(second, 0, lo)
            if warp < heads:
                l = sum8(s, where.p + warp * PIECE + (lane & 15))
                l = add_lane(add_lane(add_lane(add_lane(l, lane ^ 8), lane ^ 4), lane ^ 2), lane ^ 1)
                if alone:
                    own_m = as_f32(shuffle(as_i32(m[0] if n_tiles == 1 or warp < TILE else m[n_tiles - 1]), warp & 3))
                    left_out = l == ZERO
                    new_M = larger_float(M, own_m)
                    a, b = exp(sub(M, new_M)), exp(sub(own_m, new_M))
                    L = L if left_out else fma(L, a, mul(l, b))
                    M = M if left_out else new_M
                    if lane == 0:
                        put(s, where.kept + warp, ONE if left_out else a)
                        put(s, where.scales + warp, MINUS_ONE if left_out else b)
                elif lane == 0:
                    st(out, statistics + i32(2 * warp * most_pieces) + 1, l)

            # 3. o
            for r in range(n_rounds):
                if r > 0:
                    cuda.syncthreads()  # the sums before are read
                for i in range(at_once):
                    if r + i > 0:
                        syncwarp()
                    sum_slab(v_raw, r * at_once + i, i, inv, mask, columns, lane, warp, s)
                cuda.syncthreads()  # sums of the warps are written; all that the next piece writes before its sums is read
                mine, head, channel = own_place(r * at_once, tid)
                if mine:
                    x0, x1 = fold(tid, head, s)
                    if alone:
                        a, b = get(s, where.kept + head), get(s, where.scales + head)
                        o[2 * r], o[2 * r + 1] = fma(o[2 * r], a, mul(x0, b)), fma(o[2 * r + 1], a, mul(x1, b))
                    else:
                        st2(out, i64(i32(first_piece_of + head * most_pieces)) * v_row + channel, x0, x1)
        if alone:
            cuda.syncthreads()  # a, b and sums are read
            if warp < heads:
                e = ONE
                if sinks_there:
                    e, L = sink(M, L, ldc(sinks, first_head + warp))
                if lane == 0:
                    put(s, where.kept + warp, e)
                    put(s, where.scales + warp, L)
            cuda.syncthreads()  # L is there
            for r in range(n_rounds):
                mine, head, channel = own_place(r * at_once, tid)
                if mine:
                    a, b, length = o[2 * r], o[2 * r + 1], get(s, where.scales + head)
                    if sinks_there:
                        e = get(s, where.kept + head)
                        a, b = mul(a, e), mul(b, e)
                    a, b = div(a, length), div(b, length)
                    if result == "f32":
                        st2(out, (i64(token) * n_head + first_head + head) * dim_v + channel, a, b)
                    else:
                        put(s, where.sums + head * dim_v + channel, a)
                        put(s, where.sums + head * dim_v + channel + 1, b)
            if result == "act":
                cuda.syncthreads()  # outputs are there
                all_chunks = i32(n_head * dim_v // CHUNK)
                chunk = i32(first_head * dim_v // CHUNK + (tid >> 6) if tid < n_chunks * N_THREADS else all_chunks)
                w = lds4(s, where.sums + 4 * tid) if tid < n_chunks * N_THREADS else (0, 0, 0, 0)
                quantize_chunk(as_f32(w[0]), as_f32(w[1]), as_f32(w[2]), as_f32(w[3]), out, cuda.gridDim.z, token, chunk,
                               all_chunks)
    parameters = F32, U32, U32, I32, I32, U8, F32, U32 if result == "act" else F32, N, N, ring.parameter, SCALAR_F32
    return Kernel(kernel, parameters, THREADS, RESIDENT)


def takes(call) -> bool:
    """Whether heads and rows are such as this kernel has copies for, and a block has room for them."""
    size, types = sizes(call), (call.k.dtype, call.v.dtype)
    dims, heads = (size.dim_k, size.dim_v), heads_together(size.n_head // size.n_head_kv)
    return (set(types) <= set(FORMS) and max(dims) <= MOST_CHANNELS and size.row_v == size.n_head_kv * size.dim_v
            and all(dim % (8 if type_ == "f16" else CHANNELS) == 0 for type_, dim in zip(types, dims))
            and 4 * shared_layout(*types, *dims, heads).n_words <= call.device.shared_limit)


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
    n_bytes = 4 * shared_layout(call.k.dtype, call.v.dtype, size.dim_k, size.dim_v, plan.heads).n_words
    return call.device.launch(kernel, ((plan.n_splits or 1) * parts, size.n_head_kv, size.n), THREADS, args, n_bytes)
