"""What a warp of `flash_attn_ext_tile` makes of a piece in shared memory for its 16 rows: scores, p, o. The stages are counted as
there."""
from numba import cuda

from .fixed_point import CHANNELS, MINUS_INFINITY, ZERO, fixed_point, larger_float, limbs4, rest, scales
from .flash_attn_ext_combine import PIECE, capping
from .flash_attn_ext_tile_limbs import Q_WORDS, ROWS, Constants, k_stride, keys_stride, n_kept, piece_of_keys, values_in_turn
from .lane_floats import get, max_lane, max_pattern, put
from .ptx import (add, afresh, apart, as_f32, as_i32, before_blackwell, device, exp, f32, fma, i32, i64, ld4, ldmatrix4, lds2,
                  lds4, mma32, mul, shuffle, st, st4, sts4, sub, syncwarp, u32)
from .set_rows import larger

ONE, MINUS_ZERO = f32(1), f32(-0.0)


@device
def add_lanes(x, lane):
    """Sum over the four lanes of a row, as the tree's last halvings but one."""
    x = add(x, as_f32(shuffle(as_i32(x), lane ^ 2)))
    return add(x, as_f32(shuffle(as_i32(x), lane ^ 1)))


@device
def add4(a, b):
    return add(a[0], b[0]), add(a[1], b[1]), add(a[2], b[2]), add(a[3], b[3])


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
