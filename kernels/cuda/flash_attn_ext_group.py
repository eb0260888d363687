"""Attention of many queries on Hopper by products of warpgroups (`wgmma`), over limbs of keys and values that
`flash_attn_ext_limbs` has made (numerics, section 8).

A block is 128 rows, a row being one token and one of up to 8 query heads of one KV head: two warpgroups of 64, which share the
tiles of limbs that bulk copies bring, keys and values each to one of two places by turns. A warpgroup goes at its own pace: while
one waits for products, the other has scores, exponentials and outputs to compute. A piece of 128 keys:

    1. products of queries and 32 keys, of each 64 channels; a lane has the scores of rows g and g + 8 with keys 2 t, 2 t + 1 of
       each 8
    2. m, p, l and the limbs of p', which lie as the next products want them
    3. products of p' and 32 channels of the values; O

What decides which keys are seen is looked at only in a warp's pieces of which a row does not see all.
"""
from itertools import accumulate
from typing import NamedTuple

from numba import cuda, types

from ..reference.flash_attn_ext import score_scale
from . import mbarrier
from .fixed_point import CHANNELS, MINUS_INFINITY, ZERO, exp_down, fixed_point, halved
from .flash_attn_ext_combine import PIECE, capping, first_piece, sizes
from .flash_attn_ext_limbs import BLOCK_WORDS, Tile, flash_attn_ext_limbs, tile_of
from .flash_attn_ext_queries import query_limbs
from .flash_attn_ext_tile import row_writer, run_from
from .flash_attn_ext_tile_limbs import Q_WORDS, ROWS, Constants, constants, rows_of
from .flash_attn_ext_tile_rows import MINUS_ZERO, ONE, add4, add_lanes, quantize_p, sees
from .lane_floats import get, max_lane, put
from .launch import F32, HOPPER, I32, Kernel, Launches, N, SCALAR_F32, factory
from .ptx import (add, as_f32, as_i32, device, f32, fma, fmax, fmax_nan, i2f, i32, i64, ld, lds, lds2, lds4, mul, redux_max, sts,
                  sub, u32)
from .wgmma import ATOM_WORDS, PLACE, fence, limb_sums, uniform_place

N_WARPS, N_PLACES = 8, 2
STEP, STEP_V = 32, 64  # keys, and channels of values, of a product
N_SUMS, N_SUMS_V = 3 * STEP // 2, 3 * STEP_V // 2
COLUMN_PLACES = ATOM_WORDS // 8 // PLACE  # of a key, or of a channel of values
MOST_CHANNELS = 128  # of a head: of more keys, registers are not enough
QUARTER, FOUR_HIGHS = f32(0.25), f32(65536)


class Shared(NamedTuple):
    """Words of shared memory."""
    k: int         # [place] the first part of a tile, on 1024 bytes
    v: int         # [place] the second
    q: int         # words of A, as `flash_attn_ext_tile_limbs` has them, but whole low limbs
    q_d: int
    barriers: int  # of keys that are there and that are done with, of values likewise, [place]
    n_words: int


def whole_atoms(n_words: int) -> int:
    return -(-n_words // ATOM_WORDS) * ATOM_WORDS


def shared_layout(dim_k: int, dim_v: int) -> Shared:
    tile, n_blocks = tile_of(dim_k, dim_v), -(-dim_k // CHANNELS)
    return Shared(*accumulate((N_PLACES * whole_atoms(tile.v), N_PLACES * whole_atoms(tile.n_words - tile.v),
                               N_WARPS * n_blocks * Q_WORDS, N_WARPS * n_blocks * ROWS, 4 * N_PLACES * mbarrier.WORDS),
                              initial=0))


def fits(dim_k: int, dim_v: int) -> bool:
    """Whether heads are small enough for registers and shared memory."""
    return max(dim_k, dim_v) <= MOST_CHANNELS


class Group(NamedTuple):
    """What a kernel is compiled for, and what follows from it."""
    const: Constants
    where: Shared
    tile: Tile

    @property
    def k_words(self) -> int:
        return self.tile.v

    @property
    def v_words(self) -> int:
        return self.tile.n_words - self.tile.v

    def barrier(self, kind: int) -> int:
        """Where the barriers [place] of a kind begin: 0 keys there, 1 keys done, 2 values there, 3 values done."""
        return self.where.barriers + kind * N_PLACES * mbarrier.WORDS


def query_loader(group: Group):
    """(q, at, valid, tid, row, scale, s): limbs of one query in shared memory, by the four lanes of its row, as in
    `flash_attn_ext_tile_limbs`, but whole low limbs."""
    where, n_blocks, dim_k = group.where, group.const.n_blocks, group.const.dim_k

    @device
    def load_query(q, at, valid, tid, row, scale, s):
        lane, warp = tid & 31, tid >> 5
        for b in range(n_blocks):
            d, words = query_limbs(q, at, valid, b, dim_k, lane)
            to = where.q + (warp * n_blocks + b) * Q_WORDS + 4 * lane + row
            for i in range(4):
                sts(s, to + 128 * (i >> 1) + 2 * (i & 1), words[i][0])
                sts(s, to + 256 + 128 * (i >> 1) + 2 * (i & 1), halved(words[i][1]))
            if lane & 3 == 0:
                put(s, where.q_d + (warp * n_blocks + b) * ROWS + (lane >> 2) + 8 * row, mul(d, scale))
    return load_query


# Tiles, brought by one thread

def bringers(group: Group):
    """(bring_keys, bring_values): (s, limbs, at, i): the part of the tile at word `at` of limbs, to the place of the i-th piece
    that the block takes; behind the wait for all warps to be done with the piece two before."""
    def bringer(first, begin, n_words, there, done):
        slot = whole_atoms(n_words)

        @device
        def bring(s, limbs, at, i):
            turn = i & (N_PLACES - 1)
            mbarrier.wait(s, done + turn * mbarrier.WORDS, i32(((i // N_PLACES) & 1) ^ 1))
            mbarrier.expect(s, there + turn * mbarrier.WORDS, i32(4 * n_words))
            mbarrier.bring(s, first + turn * slot, limbs, at + begin, i32(n_words), there + turn * mbarrier.WORDS)
        return bring
    return (bringer(group.where.k, 0, group.k_words, group.barrier(0), group.barrier(1)),
            bringer(group.where.v, group.tile.v, group.v_words, group.barrier(2), group.barrier(3)))


# 1. Scores

def scorer(group: Group):
    """(tid, s, at, scores): the scores of a lane's two rows with the keys of the place that begins at word `at`.

    Per block b of 64 channels: s = fma(mul(fixed_point, d_q scale), d_k, s) from s = +0. scores: f32 [64], written: [4 i + j] of
    row g (j < 2) or g + 8 and key 8 i + 2 t + j % 2."""
    where, n_blocks, tile, sums = group.where, group.const.n_blocks, group.tile, limb_sums(STEP, 2)
    softcap, capped = group.const.softcap, capping(group.const.softcap)

    @device
    def add_block(tid, s, at, keys, b, c, scores):
        """Block b of channels, keys STEP c .."""
        d, a_hi, a_lo = cuda.local.array(N_SUMS, i32), cuda.local.array(8, i32), cuda.local.array(8, i32)
        q = where.q + ((tid >> 5) * n_blocks + b) * Q_WORDS + 4 * (tid & 31)
        q_d = where.q_d + ((tid >> 5) * n_blocks + b) * ROWS + ((tid & 31) >> 2)
        for half in range(2):
            x, u = lds4(s, q + 128 * half), lds4(s, q + 256 + 128 * half)
            for j in range(4):
                a_hi[4 * half + j], a_lo[4 * half + j] = x[j], u[j]
        hi = i32(keys + (b * (BLOCK_WORDS // PLACE) + c * STEP * COLUMN_PLACES))
        sums(d, s, hi, i32(hi + 4), a_hi, a_lo)
        q0, q1 = get(s, q_d), get(s, q_d + 8)
        for i in range(STEP // 8):
            d_k = lds2(s, at + tile.d_k + b * PIECE + STEP * c + 8 * i + 2 * (tid & 3))
            for j in range(4):
                o, k = STEP // 2 * c + 4 * i + j, 4 * i + j
                x = fixed_point(d[k], i32((d[STEP // 2 + k] << 7) + d[STEP + k]))
                scores[o] = fma(mul(x, q1 if j & 2 else q0), as_f32(d_k[1] if j & 1 else d_k[0]), scores[o] if b else ZERO)

    @device
    def score_step(tid, s, at, keys, c, scores):
        add_block(tid, s, at, keys, 0, c, scores)
        if n_blocks > 1:
            add_block(tid, s, at, keys, 1, c, scores)
        if softcap:
            for o in range(STEP // 2 * c, STEP // 2 * (c + 1)):
                scores[o] = capped(scores[o])

    @device
    def score(tid, s, at, scores):
        keys = uniform_place(s, at)
        score_step(tid, s, at, keys, 0, scores)  # not a loop: scores lie in registers
        score_step(tid, s, at, keys, 1, scores)
        score_step(tid, s, at, keys, 2, scores)
        score_step(tid, s, at, keys, 3, scores)
    return score


# 2. p

def softener(group: Group, masked: bool):
    """`soften` of a piece of which all rows of the warp see all keys, or, masked, of any. at: word at which the place of the
    values begins; bound: positions of the lane's two rows, -1 for one that is not to be touched.

    p = exp(sub(s, m)) of visible keys, +0 of others; p' = mul(p, d_v) likewise; l = sum128(p): over the keys of a lane, 64 apart
    first, then over the four lanes of a row."""
    tile = group.tile.of_values

    @device
    def max_of(lane, s, at, i, bound, window, scores, m):
        """Over four keys."""
        x0, x1, x2, x3 = scores[4 * i], scores[4 * i + 1], scores[4 * i + 2], scores[4 * i + 3]
        if masked:
            seen = lds2(s, at + tile.seen + 8 * i + 2 * (lane & 3))
            x0, x1 = (x0 if sees(bound[0], seen[0], window) else MINUS_INFINITY,
                      x1 if sees(bound[0], seen[1], window) else MINUS_INFINITY)
            x2, x3 = (x2 if sees(bound[1], seen[0], window) else MINUS_INFINITY,
                      x3 if sees(bound[1], seen[1], window) else MINUS_INFINITY)
        return fmax(m[0], x0), fmax(m[1], x1), fmax(m[2], x2), fmax(m[3], x3)

    @device
    def weight(lane, s, at, i, bound, window, m, scores, amax):
        """p of four keys."""
        d = lds2(s, at + tile.d_v + 8 * i + 2 * (lane & 3))
        p0, p1 = exp_down(sub(scores[4 * i], m[0])), exp_down(sub(scores[4 * i + 1], m[0]))
        p2, p3 = exp_down(sub(scores[4 * i + 2], m[1])), exp_down(sub(scores[4 * i + 3], m[1]))
        x0, x1, x2, x3 = mul(p0, as_f32(d[0])), mul(p1, as_f32(d[1])), mul(p2, as_f32(d[0])), mul(p3, as_f32(d[1]))
        if masked:
            seen = lds2(s, at + tile.seen + 8 * i + 2 * (lane & 3))
            see0, see1 = sees(bound[0], seen[0], window), sees(bound[0], seen[1], window)
            see2, see3 = sees(bound[1], seen[0], window), sees(bound[1], seen[1], window)
            p0, p1, p2, p3 = p0 if see0 else ZERO, p1 if see1 else ZERO, p2 if see2 else ZERO, p3 if see3 else ZERO
            x0, x1, x2, x3 = x0 if see0 else ZERO, x1 if see1 else ZERO, x2 if see2 else ZERO, x3 if see3 else ZERO
        scores[4 * i], scores[4 * i + 1], scores[4 * i + 2], scores[4 * i + 3] = x0, x1, x2, x3
        return (p0, p1, p2, p3), (fmax_nan(amax[0], x0), fmax_nan(amax[1], x1), fmax_nan(amax[2], x2), fmax_nan(amax[3], x3))

    @device
    def weights4(lane, s, at, i, bound, window, m, scores, amax):
        """The tree over keys 64, then 32 apart."""
        a, amax = weight(lane, s, at, i, bound, window, m, scores, amax)
        b, amax = weight(lane, s, at, i + 8, bound, window, m, scores, amax)
        c, amax = weight(lane, s, at, i + 4, bound, window, m, scores, amax)
        d, amax = weight(lane, s, at, i + 12, bound, window, m, scores, amax)
        return add4(add4(a, b), add4(c, d)), amax

    @device
    def soften(lane, s, at, bound, window, scores, p_hi, p_lo):
        """(m, l, d_p), pairs of the lane's rows, the same for all lanes of a row. p_hi, p_lo: u32 [16], written: limbs of p' as
        words of A. scores: p' in their place."""
        m = MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY
        for i in range(16):
            m = max_of(lane, s, at, i, bound, window, scores, m)
        m0, m1 = fmax(m[0], m[1]), fmax(m[2], m[3])
        m = max_lane(max_lane(m0, lane ^ 1), lane ^ 2), max_lane(max_lane(m1, lane ^ 1), lane ^ 2)
        x, amax = weights4(lane, s, at, 0, bound, window, m, scores, (ZERO, ZERO, ZERO, ZERO))
        y, amax = weights4(lane, s, at, 2, bound, window, m, scores, amax)
        x = add4(x, y)
        y, amax = weights4(lane, s, at, 1, bound, window, m, scores, amax)
        w, amax = weights4(lane, s, at, 3, bound, window, m, scores, amax)
        x = add4(x, add4(y, w))
        l = add(add_lanes(x[0], lane), add_lanes(x[1], lane)), add(add_lanes(x[2], lane), add_lanes(x[3], lane))
        amax = as_i32(fmax_nan(amax[0], amax[1])), as_i32(fmax_nan(amax[2], amax[3]))
        return m, l, quantize_p(lane, amax, scores, p_hi, p_lo)
    return soften


# 3. O

@device
def rescaling(m, l, M):
    """As in `flash_attn_ext_tile_rows`, by `exp_down`."""
    M0, M1 = fmax(M[0], m[0]), fmax(M[1], m[1])
    a0, b0 = exp_down(sub(M[0], M0)), exp_down(sub(m[0], M0))
    a1, b1 = exp_down(sub(M[1], M1)), exp_down(sub(m[1], M1))
    if l[0] == ZERO:
        a0, b0 = ONE, MINUS_ZERO
    if l[1] == ZERO:
        a1, b1 = ONE, MINUS_ZERO
    return (M0, M1), (a0, a1), (b0, b1)


def weigher(group: Group):
    """(s, at, p_hi, p_lo, d_p, a, b, O): O = fma(O, a, mul(o, b)) of a lane's two rows and all channels, o = mul(fixed_point,
    d_p).

    Of doubled low limbs, 2 MID and 4 LL are there: 256 times one and the other are 4 (128 MID + LL), below 2^31. d_p is a
    quarter, and all is rounded as without the factor."""
    n_slabs, sums, tile = group.const.n_slabs, limb_sums(STEP_V, PIECE // 32), group.tile.of_values

    @device
    def weigh_step(s, values, c, p_hi, p_lo, d_p, a, b, O):
        """Channels STEP_V c .. of the rows of the tile."""
        d, hi = cuda.local.array(N_SUMS_V, i32), i32(values + c * STEP_V * COLUMN_PLACES)
        sums(d, s, hi, i32(hi + tile.v_lo // PLACE), p_hi, p_lo)
        for i in range(STEP_V // 2):
            second, o = (i >> 1) & 1, c * (STEP_V // 2) + i
            x = fma(i2f(d[i]), FOUR_HIGHS, i2f(i32((d[STEP_V // 2 + i] << 8) + d[STEP_V + i])))
            x = mul(x, d_p[1] if second else d_p[0])
            O[o] = fma(O[o], a[1] if second else a[0], mul(x, b[1] if second else b[0]))

    @device
    def weigh(s, at, p_hi, p_lo, d_p, a, b, O):
        values = uniform_place(s, at)
        weigh_step(s, values, 0, p_hi, p_lo, d_p, a, b, O)
        if n_slabs > 1:
            weigh_step(s, values, 1, p_hi, p_lo, d_p, a, b, O)
    return weigh


def piece_worker(group: Group):
    """(scores_of, follow), by a warpgroup, of the i-th piece that the block takes. (tid, s, i, scores): its scores. (tid, s, i,
    first, bound, lowest, highest, window, scores, M, L, O) -> M: what follows. first: position at which it begins; bound:
    positions of the lane's two rows, -1 for one that is not to be touched; lowest, highest: of those of the warp; M: f32 pair;
    L, O: f32 arrays, brought up to date."""
    where, tile, score, weigh = group.where, group.tile.of_values, scorer(group), weigher(group)
    soften_all, soften_masked = softener(group, False), softener(group, True)
    k_there, k_done, v_there, v_done = map(group.barrier, range(4))
    k_slot, v_slot = whole_atoms(group.k_words), whole_atoms(group.v_words)

    @device
    def scores_of(tid, s, i, scores):
        turn = i & (N_PLACES - 1)
        mbarrier.wait(s, k_there + turn * mbarrier.WORDS, i32((i // N_PLACES) & 1))
        score(tid, s, where.k + turn * k_slot, scores)
        mbarrier.leave(tid & 31, s, k_done + turn * mbarrier.WORDS)

    @device
    def follow(tid, s, i, first, bound, lowest, highest, window, scores, M, L, O):
        p_hi, p_lo = cuda.local.array(16, u32), cuda.local.array(16, u32)
        lane, turn = i32(tid & 31), i & (N_PLACES - 1)
        at = where.v + turn * v_slot
        mbarrier.wait(s, v_there + turn * mbarrier.WORDS, i32((i // N_PLACES) & 1))
        if lds(s, at + tile.latest) <= lowest and i32(highest - first) < window:
            m, l, d_p = soften_all(lane, s, at, bound, window, scores, p_hi, p_lo)
        else:
            m, l, d_p = soften_masked(lane, s, at, bound, window, scores, p_hi, p_lo)
        M, a, b = rescaling(m, l, M)
        weigh(s, at, p_hi, p_lo, (mul(d_p[0], QUARTER), mul(d_p[1], QUARTER)), a, b, O)
        mbarrier.leave(lane, s, v_done + turn * mbarrier.WORDS)
        L[0], L[1] = fma(L[0], a[0], mul(l[0], b[0])), fma(L[1], a[1], mul(l[1], b[1]))
        return M
    return scores_of, follow


@factory([(128, 128, 4), (64, 72, 8, True), (128, 64, 1, False, 50.0)])
def flash_attn_ext_group_kernel(dim_k, dim_v, heads, sinks_there=False, softcap=0.0):
    """out: f32 [n, n_head, dim_v]. limbs: i32 [sequence][piece][KV head], tiles. A block: heads from blockIdx.x * heads, tokens
    128 / heads of blockIdx.y. M, L (pairs) and O are of a lane's two rows, in registers."""
    const = constants("f16", "f16", dim_k, dim_v, heads, N_WARPS, False, sinks_there, softcap)
    group = Group(const, shared_layout(dim_k, dim_v), tile_of(dim_k, dim_v))
    tokens, n_outputs, tile_words, barriers = ROWS * N_WARPS // heads, const.n_outputs, group.tile.n_words, group.barrier(0)
    load_query, (bring_keys, bring_values), write_row = query_loader(group), bringers(group), row_writer(const)
    scores_of, follow = piece_worker(group)
    row_of, index, _, _ = rows_of(const)

    @device
    def begin_barriers(s):
        for kind in range(4):
            for turn in range(N_PLACES):
                at = barriers + (kind * N_PLACES + turn) * mbarrier.WORDS
                mbarrier.begin(s, at, i32(N_WARPS if kind & 1 else 1))
        fence()

    @device
    def load(q, s, first_token, n_tokens, tid, second, scale):
        token, head = row_of(tid, second)
        load_query(q, index(first_token, token, head) * dim_k, token < n_tokens, tid, second >> 3, scale, s)

    @device
    def position_of(pos, first_token, run, end, tid, second):
        token, _ = row_of(tid, second)
        return ld(pos, first_token + token) if run <= token and token < end else i32(-1)

    @device
    def write(sinks, out, first_token, n_tokens, tid, second, M, L, O):
        token, head = row_of(tid, second)
        if token < n_tokens:
            write_row(sinks, out, cuda.blockIdx.x * heads + head, index(first_token, token, head) * dim_v, tid & 3, M, L, O,
                      second >> 3)

    def kernel(q, limbs, seq, pos, sinks, out, n, n_ctx, n_head_kv, window, scale):
        s = cuda.shared.array(0, types.int32)
        O, L = cuda.local.array(n_outputs, f32), cuda.local.array(2, f32)
        tid = i32(cuda.threadIdx.x)
        first_token = i32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * tokens)
        n_tokens = i32(min(tokens, n - first_token))
        head_kv, n_pieces = i32(cuda.blockIdx.x // (cuda.gridDim.x // n_head_kv)), i32((n_ctx + PIECE - 1) >> 7)
        load(q, s, first_token, n_tokens, tid, 0, scale)
        load(q, s, first_token, n_tokens, tid, 8, scale)
        for i in range(n_outputs):
            O[i] = ZERO
        M, L[0], L[1] = (MINUS_INFINITY, MINUS_INFINITY), ZERO, ZERO
        if tid == 0:
            begin_barriers(s)
        cuda.syncthreads()  # barriers and queries are there

        run, i = i32(0), i32(0)
        while run < n_tokens:
            sequence, end, first, last = run_from(seq, pos, first_token, run, n_tokens)
            bound = position_of(pos, first_token, run, end, tid, 0), position_of(pos, first_token, run, end, tid, 8)
            highest, lowest = redux_max(i32(max(bound[0], bound[1]))), i32(-redux_max(i32(-min(bound[0], bound[1]))))
            first = i32(first_piece(first, window) * PIECE)
            at = ((i64(sequence) * n_pieces + (first >> 7)) * n_head_kv + head_kv) * tile_words
            if tid == 0:
                bring_keys(s, limbs, at, i)
                bring_values(s, limbs, at, i)
                if first + PIECE <= last:
                    bring_keys(s, limbs, at + n_head_kv * tile_words, i32(i + 1))
            while first <= last:
                scores = cuda.local.array(64, f32)
                scores_of(tid, s, i, scores)
                if tid == 0 and first + PIECE <= last:
                    bring_values(s, limbs, at + n_head_kv * tile_words, i32(i + 1))
                M = follow(tid, s, i, first, bound, lowest, highest, window, scores, M, L, O)
                if tid == 0 and first + 2 * PIECE <= last:
                    bring_keys(s, limbs, at + 2 * n_head_kv * tile_words, i32(i + 2))
                first, i, at = i32(first + PIECE), i32(i + 1), at + n_head_kv * tile_words
            run = end
        write(sinks, out, first_token, n_tokens, tid, 0, M[0], L[0], O)
        write(sinks, out, first_token, n_tokens, tid, 8, M[1], L[1], O)
    return Kernel(kernel, (F32, I32, I32, I32, F32, F32, N, N, N, N, SCALAR_F32), 32 * N_WARPS, arch=HOPPER)


def flash_attn_ext_group(call):
    """`flash_attn_ext` by call.plan: limbs to call.scratch, then attention."""
    size, heads = sizes(call), call.plan.heads
    special = (call.sinks is not None, float(call.softcap)) if call.softcap else (True,) if call.sinks is not None else ()
    kernel = flash_attn_ext_group_kernel(size.dim_k, size.dim_v, heads, *special)
    args = (call.q.data, call.scratch.data, call.seq.data, call.pos.data, (call.sinks or call.q).data, call.out.data, size.n,
            size.n_ctx, size.n_head_kv, size.window, score_scale(call))
    grid = size.n_head // heads, -(-size.n // (ROWS * N_WARPS // heads))
    n_bytes = 4 * shared_layout(size.dim_k, size.dim_v).n_words
    return Launches((flash_attn_ext_limbs(call), call.device.launch(kernel, grid, 32 * N_WARPS, args, n_bytes)))
