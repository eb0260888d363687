"""MMQ: matrix products for many tokens on int8 tensor cores (docs/numerics.md, section 3), for every quantized format.

A block takes 32 rows x 32 tokens a warp. It goes through the columns in parts of 128, half a chunk: while a part is multiplied, the next one is
unpacked and the activations of the one after it, or the weight tiles of the next chunk, are on their way. One barrier a part.

    raw     2 x    weight tiles as they lie in memory; sums of the activations, for minima              of a chunk
    act     2 x    hi, lo [tokens][8 pieces of 16 columns] and d [tokens] of the activations            of a part
    levels  2 x    int8 [8 pieces][rows][16 columns]; planes of scales [..][rows] and of minima         of a part

Piece p of token t lies at place p ^ (t & 7), so that eight tokens' pieces, as ldmatrix reads them, lie in different banks.

The sum over a sub-block is exact in int32: 128 sum(level * hi) + sum(level * lo), the first product shifted and passed to the second one as its
addend. What follows depends on the format alone:
- groups of 16 and 32: one conversion and one fma with the float scale;
- larger groups without integer scales, or whose scaled levels still fit int8 (they are then multiplied while unpacking): sums go on;
- with integer scales: the sub-block's sum times its scale is added to the group's, in one int32 or, for large scales, in one a limb.
Minima of a whole chunk, sum over 16 parts of imin * (sum of q), are a product for tensor cores as well: the sums are split into three limbs.
"""
from functools import lru_cache
from typing import NamedTuple

from numba import cuda, types

from ...quant.activation import LIMIT
from ...quant.formats import CHUNK, FORMATS, Format, format_of
from ...quant.tile import ROWS, tile_bytes
from ...quant.words import EVEN, TOPS
from .launch import F32, Kernel, N, U32, check, factory
from .ptx import (afresh, as_f32, as_u32, copies_wait, copy1, copy4, device, f32, fma, i2f, i32, i64, l2f, ldmatrix4, lds, lds4, mma16, mma32, shr, st,
                  sts, sts4, u32)
from .quantize import four_bytes, plane_words
from .weights import PRIMITIVES

PART = 128  # columns


class Form(NamedTuple):
    """How the sums of a format are formed."""
    step: int          # columns of an int32 sum: 16, or 32
    group: int         # columns of a float scale
    premultiplied: bool  # levels are multiplied by their integer scale while unpacking
    integer: bool      # sums are multiplied by their integer scale
    wide: bool         # S is kept as the sums over hi and over lo, else as an int32
    carried: bool      # a sum goes on over several steps

    @property
    def n_accumulators(self) -> int:
        """Registers of 32 rows x 32 tokens: totals, the chunk's float sums, integer sums."""
        return 1 + (self.group < CHUNK) + (1 + self.wide if self.carried else 0)


def form(fmt: Format) -> Form:
    largest = fmt.max_level * fmt.max_isc
    premultiplied = fmt.max_isc > 1 and largest <= 127
    integer = fmt.max_isc > 1 and not premultiplied
    step = 16 if fmt.group == 16 or (integer and fmt.sub == 16) else 32
    return Form(step, fmt.group, premultiplied, integer, fmt.group * largest * LIMIT >= 2**31, fmt.group > step)


class Layout(NamedTuple):
    """Shared memory of a block, in words: two stages of each kind."""
    raw: int           # of a stage
    sums: int          # in a raw stage
    act: int           # of a stage
    levels: int        # of a stage; in it:
    isc: int
    d: int
    m: int
    imin: int
    q_sums: int
    n_bytes: int


def layout(fmt: Format, row_tiles: int, token_tiles: int) -> Layout:
    rows, tokens = 32 * row_tiles, 32 * token_tiles
    chosen = form(fmt)
    n_groups = max(1, PART // fmt.group)
    sums = row_tiles * tile_bytes(fmt) // 4
    raw = sums + (tokens * 16 if fmt.has_min else 0)
    act = tokens * (2 * PART // 4 + 1)
    isc = rows * PART // 4
    d = isc + (rows * PART // chosen.step if chosen.integer else 0)
    m = d + n_groups * rows
    imin = m + (n_groups * rows if fmt.has_min else 0)
    whole = fmt.has_min and fmt.group == CHUNK
    q_sums = imin + (4 * rows if whole else 0)
    levels = q_sums + (3 * 4 * tokens if whole else n_groups * tokens if fmt.has_min else 0)
    return Layout(raw, sums, act, levels, isc, d, m, imin, q_sums, 8 * (raw + act + levels))


def loads(fmt: Format):
    """(ld16, ld4, ld2) of `quant.tile.loads` on a shared array of uint32."""
    word_plane = ROWS * 4 * fmt.n_pieces
    half_plane = word_plane + ROWS * fmt.n_words

    @device
    def ld16(t, p):
        words, base, row = t
        return lds4(words, base + (p * ROWS + row) * 4)

    @device
    def ld4(t, k):
        words, base, row = t
        return lds(words, base + word_plane + k * ROWS + row)

    @device
    def ld2(t, h):
        words, base, row = t
        return u32(shr(lds(words, base + half_plane + ((h * ROWS + row) >> 1)), (row & 1) << 4) & u32(0xffff))
    return ld16, ld4, ld2


@device
def scaled(w, isc):
    """The four int8 of a word times isc; the products must fit int8. Each of two 16-bit lanes holds 128 + its product, from 128 + its level."""
    w, offset = u32(u32(w) ^ TOPS), (128 - 128 * isc) * 0x00010001
    even, odd = u32(i64(w & EVEN) * isc + offset), u32(i64((w >> u32(8)) & EVEN) * isc + offset)
    return i32(u32(even | odd << u32(8)) ^ TOPS)


@device
def limbs3(s):
    """(a, b, c) of an integer below 2^20: 16384 a + 128 b + c, b and c in -64..63."""
    t = i32((s + 64) >> 7)
    a = i32((t + 64) >> 7)
    return a, i32(t - (a << 7)), i32(s - (t << 7))


def part_unpacker(fmt: Format, row_tiles: int, token_tiles: int):
    """(shared, levels stage, raw stage, part) by all threads: a part of the raw tiles as levels, scales and minima."""
    levels, sub, group = fmt.unpack(PRIMITIVES, *loads(fmt))
    at, chosen = layout(fmt, row_tiles, token_tiles), form(fmt)
    rows, tokens, n_threads = 32 * row_tiles, 32 * token_tiles, 32 * row_tiles * token_tiles
    tile_words, n_units = tile_bytes(fmt) // 4, 4 // token_tiles
    subs, steps, halves = 32 // fmt.sub, 32 // chosen.step, fmt.sub // 16
    integer, premultiplied, has_min, n_group = chosen.integer, chosen.premultiplied, fmt.has_min, fmt.group
    groups, whole, group_sums = max(1, 32 // n_group), n_group == CHUNK, min(n_group, 32) // 16
    every = max(1, min(n_group, PART) // 32)  # of so many units, one stores the group's scales
    isc_at, d_at, m_at, imin_at, q_at, sums_at = at.isc, at.d, at.m, at.imin, at.q_sums, at.sums
    assert not has_min or n_group in (32, CHUNK), fmt.name

    @device
    def unpack_unit(shared, to, raw, j, k, row):
        """Columns 32 j .. 32 j + 31 of a chunk, 32 k .. of the part."""
        t = (shared, raw + (row >> 5) * tile_words, row & 31)
        w = levels(t, j)
        if premultiplied:
            low, _ = sub(t, j * subs)
            high, _ = sub(t, j * subs + subs - 1)
            sts4(shared, to + (2 * k * rows + row) * 4, scaled(w[0], low), scaled(w[1], low), scaled(w[2], low), scaled(w[3], low))
            sts4(shared, to + ((2 * k + 1) * rows + row) * 4, scaled(w[4], high), scaled(w[5], high), scaled(w[6], high), scaled(w[7], high))
        else:
            sts4(shared, to + (2 * k * rows + row) * 4, w[0], w[1], w[2], w[3])
            sts4(shared, to + ((2 * k + 1) * rows + row) * 4, w[4], w[5], w[6], w[7])
        if integer:
            for s in range(steps):
                isc, _ = sub(t, j * steps + s)
                sts(shared, to + isc_at + (k * steps + s) * rows + row, isc)
        if k % every == 0:
            for s in range(groups):
                d, m = group(t, j * 32 // n_group + s)
                sts(shared, to + d_at + (k * 32 // n_group + s) * rows + row, as_u32(d))
                if has_min:
                    sts(shared, to + m_at + (k * 32 // n_group + s) * rows + row, as_u32(-m))

    @device
    def four_minima(t, q):
        """imin of the sixteenths 4 q .. 4 q + 3 of the chunk."""
        _, a = sub(t, 4 * q // halves)
        _, b = sub(t, (4 * q + 1) // halves)
        _, c = sub(t, (4 * q + 2) // halves)
        _, d = sub(t, (4 * q + 3) // halves)
        return four_bytes(a, b, c, d)

    @device
    def unpack(shared, to, raw, part):
        tid = afresh(cuda.threadIdx.x)
        for i in range(n_units):
            u = i * n_threads + tid
            k = u // rows
            unpack_unit(shared, to, raw, (part & 1) * 4 + k, k, u % rows)
        if has_min and whole:
            if part & 1:
                for u in range(tid, 4 * rows, n_threads):
                    row = u % rows
                    sts(shared, to + imin_at + row * 4 + u // rows, four_minima((shared, raw + (row >> 5) * tile_words, row & 31), u // rows))
                for u in range(tid, 4 * tokens, n_threads):
                    token, q = u >> 2, u & 3
                    a, b, c, d = lds4(shared, raw + sums_at + u * 4)
                    a0, a1, a2 = limbs3(i32(a))
                    b0, b1, b2 = limbs3(i32(b))
                    c0, c1, c2 = limbs3(i32(c))
                    d0, d1, d2 = limbs3(i32(d))
                    sts(shared, to + q_at + token * 4 + q, four_bytes(a0, b0, c0, d0))
                    sts(shared, to + q_at + (tokens + token) * 4 + q, four_bytes(a1, b1, c1, d1))
                    sts(shared, to + q_at + (2 * tokens + token) * 4 + q, four_bytes(a2, b2, c2, d2))
        elif has_min:
            for u in range(tid, 4 * tokens, n_threads):
                token, k = u % tokens, u // tokens
                s = raw + sums_at + token * 16 + (part & 1) * 8 + 2 * k
                sts(shared, to + q_at + k * tokens + token, as_u32(i2f(i32(i32(lds(shared, s)) + i32(lds(shared, s + 1))))))
    return unpack


def copier(fmt: Format, row_tiles: int, token_tiles: int):
    """(copy_raw, copy_act): start the copies of a chunk's tiles and sums, of a part's activations. Rows and tokens beyond the last repeat it."""
    at = layout(fmt, row_tiles, token_tiles)
    tokens, n_threads = 32 * token_tiles, 32 * row_tiles * token_tiles
    tile_pieces, has_min, sums_at, act_d = tile_bytes(fmt) // 16, fmt.has_min, at.sums, 64 * tokens

    @device
    def copy_raw(shared, to, words, act, chunk, n_row_tiles, n, n_chunks):
        tid = afresh(cuda.threadIdx.x)
        for tile in range(row_tiles):
            first = (i64(min(cuda.blockIdx.x * row_tiles + tile, n_row_tiles - 1)) * n_chunks + chunk) * (tile_pieces * 4)
            for p in range(tid, tile_pieces, n_threads):
                copy4(shared, to + (tile * tile_pieces + p) * 4, words, first + p * 4)
        if has_min:
            _, _, sums, _ = plane_words(n, n_chunks)
            for p in range(tid, tokens * 4, n_threads):
                token = min(cuda.blockIdx.y * tokens + (p >> 2), n - 1)
                copy4(shared, to + sums_at + p * 4, act, sums + (i64(token) * n_chunks + chunk) * 16 + (p & 3) * 4)

    @device
    def copy_act(shared, to, act, part, n, n_chunks):
        tid = afresh(cuda.threadIdx.x)
        lo, scales, _, _ = plane_words(n, n_chunks)
        for p in range(tid, tokens * 8, n_threads):
            row, piece = p >> 3, p & 7
            first = i64(min(cuda.blockIdx.y * tokens + row, n - 1)) * n_chunks * 64 + part * 32 + piece * 4
            place = to + row * 32 + ((piece ^ (row & 7)) << 2)
            copy4(shared, place, act, first)
            copy4(shared, place + 32 * tokens, act, lo + first)
        for row in range(tid, tokens, n_threads):
            copy1(shared, to + act_d + row, act, scales + i64(min(cuda.blockIdx.y * tokens + row, n - 1)) * n_chunks + (part >> 1))
    return copy_raw, copy_act


class Tile(NamedTuple):
    """A block: 32 row_tiles rows x 32 token_tiles tokens, a warp for each 32 x 32."""
    row_tiles: int
    token_tiles: int

    @property
    def n_threads(self) -> int:
        return 32 * self.row_tiles * self.token_tiles


SHARED_LIMIT = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10, (11, 0): 227 << 10}
LEAST_LIMIT = 99 << 10  # bytes of shared memory that a block can have on any GPU of compute capability 8.0 or later
TILES = Tile(4, 4), Tile(4, 2), Tile(2, 2), Tile(2, 1), Tile(1, 1)


@lru_cache(None)
def tile_shape(type_, n_rows: int, n: int, shared_limit: int = LEAST_LIMIT, n_multiprocessors: int = 1) -> Tile:
    """The largest tile that the registers and the shared memory of a block hold, that is not empty by half, and of which there is one for
    nearly every multiprocessor; the smallest one where there is none."""
    fmt = format_of(type_)
    most = 4 if form(fmt).n_accumulators < 3 else 2  # token tiles: 16 warps have 128 registers a thread
    for tile in TILES:
        n_blocks = -(-n_rows // (32 * tile.row_tiles)) * -(-n // (32 * tile.token_tiles))
        if (tile.token_tiles <= most and layout(fmt, *tile).n_bytes <= shared_limit and n_blocks * 4 >= n_multiprocessors * 3
                and 16 * tile.token_tiles < max(n, 17)):
            return tile
    return TILES[-1]


SMALL_TESTED = [("Q4_0", 2, 2), ("Q5_1", 2, 2), ("Q4_0", 1, 1), ("Q4_K", 1, 1)]  # blocks that every GPU can hold


@factory(SMALL_TESTED[:2] + [(fmt.name, *tile_shape(fmt.name, 1 << 20, 1 << 20, SHARED_LIMIT[9, 0])) for fmt in FORMATS.values() if fmt.is_quantized]
         + SMALL_TESTED[2:])
def mmq_kernel(name, row_tiles, token_tiles):
    fmt = format_of(name)
    at, chosen = layout(fmt, row_tiles, token_tiles), form(fmt)
    unpack, (copy_raw, copy_act) = part_unpacker(fmt, row_tiles, token_tiles), copier(fmt, row_tiles, token_tiles)
    rows, tokens = 32 * row_tiles, 32 * token_tiles
    raw_words, act_words, level_words = at.raw, at.act, at.levels
    first_act, first_level, act_lo, act_d = 2 * at.raw, 2 * (at.raw + at.act), 32 * tokens, 64 * tokens
    isc_at, d_at, m_at, imin_at, q_at = at.isc, at.d, at.m, at.imin, at.q_sums
    step, integer, wide, carried = chosen.step, chosen.integer, chosen.wide, chosen.carried
    steps, n_b, has_min, whole = PART // step, step // 16, fmt.has_min, fmt.group == CHUNK
    assert fmt.group in (16, 32, PART, CHUNK) and not (wide and not integer), fmt.name

    @device
    def product(a, b0, b1, mi, c0, c1, c2, c3):
        """C + level * limb over `step` columns: a, the rows' fragments; b0, b1, the tokens'."""
        if step == 32:
            return mma32(a[4 * mi], a[4 * mi + 1], a[4 * mi + 2], a[4 * mi + 3], b0, b1, c0, c1, c2, c3)
        return mma16(a[2 * mi], a[2 * mi + 1], b0, c0, c1, c2, c3)

    @device
    def place_of_warp():
        """(lane, first row and first token of the warp in the block)"""
        tid = afresh(cuda.threadIdx.x)
        return i32(tid & 31), i32((tid >> 5) % row_tiles * 32), i32((tid >> 5) // row_tiles * 32)

    @device
    def minima(a0, a1, q0, q1, q2):
        """The four sums over a chunk of imin * q."""
        z = i32(0)
        r = mma16(a0, a1, q0, z, z, z, z)
        r = mma16(a0, a1, q1, r[0] << 7, r[1] << 7, r[2] << 7, r[3] << 7)
        return mma16(a0, a1, q2, r[0] << 7, r[1] << 7, r[2] << 7, r[3] << 7)

    def kernel(words, act, out, n_rows, n_cols, n):  # block: rows from blockIdx.x * rows, tokens from blockIdx.y * tokens
        shared = cuda.shared.array(0, types.uint32)
        total, acc = cuda.local.array(32, f32), cuda.local.array(32, f32)    # [16 rows][8 tokens][fragment]
        low, high = cuda.local.array(32, i32), cuda.local.array(32, i32)     # S, or S = 128 high + low
        a = cuda.local.array(8, i32)
        isc, d, m = cuda.local.array(4, i32), cuda.local.array(4, f32), cuda.local.array(4, f32)
        d_act = cuda.local.array(8, f32)
        z = i32(0)
        n_chunks, n_row_tiles = i32((n_cols + 255) >> 8), i32((n_rows + 31) >> 5)
        for o in range(32):
            total[o], acc[o], low[o], high[o] = f32(0), f32(0), z, z
        copy_raw(shared, 0, words, act, 0, n_row_tiles, n, n_chunks)
        part = i32(-2)
        while part + 1 < 2 * n_chunks:
            part = i32(part + 1)
            copies_wait()          # the activations of `part`, and the tiles that part + 1 is unpacked from
            cuda.syncthreads()     # all have them; and the levels of `part` are there, those of part - 1 no longer needed
            later = part + 1
            if later < 2 * n_chunks:
                n_now, chunks_now = afresh(n), afresh(n_chunks)
                copy_act(shared, first_act + (later & 1) * act_words, act, later, n_now, chunks_now)
                if part & 1 and part + 3 < 2 * n_chunks:
                    chunk = (part + 3) >> 1
                    copy_raw(shared, (chunk & 1) * raw_words, words, act, chunk, afresh(n_row_tiles), n_now, chunks_now)
            for turn in range(2):  # of each multiprocessor's quarter, half the warps unpack while the others multiply
                if (turn ^ (cuda.threadIdx.x >> 7)) & 1:
                    if later < 2 * n_chunks:
                        unpack(shared, first_level + (later & 1) * level_words, ((later >> 1) & 1) * raw_words, later)
                elif part >= 0:
                    lane, row0, token0 = place_of_warp()
                    row, token = i32(row0 + (lane >> 2)), i32(token0 + (lane & 3) * 2)  # of the first sum; others: 8 i rows, 8 j and 1 tokens on
                    a_place = i32((row0 + (lane & 15) + (lane >> 4) * rows) * 4)
                    b_place, b_piece = i32((token0 + (lane & 7) + ((lane >> 4) << 3)) * 32), i32((lane >> 3) & 1)
                    level, limbs = i32(first_level + (part & 1) * level_words), i32(first_act + (part & 1) * act_words)
                    for kk in range(steps):
                        k = i32(kk)
                        if step == 32:
                            for mi in range(2):
                                a[4 * mi], a[4 * mi + 1], a[4 * mi + 2], a[4 * mi + 3] = ldmatrix4(shared, level + a_place + (2 * k * rows + 16 * mi) * 4)
                        else:
                            a[0], a[1], a[2], a[3] = ldmatrix4(shared, level + (k * rows + row0 + lane) * 4)
                        for i in range(4):
                            place = i32(level + k * rows + row + 8 * i)
                            if integer:
                                isc[i] = i32(lds(shared, place + isc_at))
                            elif not carried:
                                d[i] = as_f32(lds(shared, place + d_at))
                                if has_min:
                                    m[i] = as_f32(lds(shared, place + m_at))
                        for some in range(step // 16):
                            if step == 32:
                                place = i32(limbs + b_place + some * 512 + (((2 * k + b_piece) ^ (lane & 7)) << 2))
                            else:
                                place = i32(limbs + (token0 + lane) * 32 + ((k ^ (lane & 7)) << 2))
                            f = ldmatrix4(shared, place)
                            e = ldmatrix4(shared, place + act_lo)
                            for one in range(64 // step):
                                nj, b = some * (64 // step) + one, one * n_b
                                q0, q1 = f32(0), f32(0)
                                if has_min and not whole:
                                    q0 = as_f32(lds(shared, level + q_at + k * tokens + token + 8 * nj))
                                    q1 = as_f32(lds(shared, level + q_at + k * tokens + token + 8 * nj + 1))
                                for mi in range(2):
                                    o = (4 * mi + nj) * 4
                                    h = product(a, f[b], f[b + n_b - 1], mi, z, z, z, z)
                                    if wide:
                                        r = product(a, e[b], e[b + n_b - 1], mi, z, z, z, z)
                                        for i in range(4):
                                            scale = isc[2 * mi + (i >> 1)]
                                            high[o + i] = i32(high[o + i] + scale * h[i])
                                            low[o + i] = i32(low[o + i] + scale * r[i])
                                    elif carried and not integer:
                                        r = product(a, e[b], e[b + n_b - 1], mi, i32(low[o] + (h[0] << 7)), i32(low[o + 1] + (h[1] << 7)),
                                                    i32(low[o + 2] + (h[2] << 7)), i32(low[o + 3] + (h[3] << 7)))
                                        for i in range(4):
                                            low[o + i] = r[i]
                                    else:
                                        r = product(a, e[b], e[b + n_b - 1], mi, h[0] << 7, h[1] << 7, h[2] << 7, h[3] << 7)
                                        for i in range(4):
                                            if integer:
                                                low[o + i] = i32(low[o + i] + isc[2 * mi + (i >> 1)] * r[i])
                                            else:
                                                acc[o + i] = fma(i2f(r[i]), d[2 * mi + (i >> 1)], acc[o + i])
                                                if has_min:
                                                    acc[o + i] = fma(m[2 * mi + (i >> 1)], q1 if i & 1 else q0, acc[o + i])
                    if carried and (not whole or part & 1):
                        for i in range(4):
                            d[i] = as_f32(lds(shared, level + d_at + row + 8 * i))
                    if carried and not whole:  # the end of a group
                        for o in range(32):
                            acc[o] = fma(i2f(low[o]), d[2 * (o >> 4) + ((o >> 1) & 1)], acc[o])
                            low[o] = z
                    if part & 1:               # the end of a chunk
                        if whole and has_min:
                            for i in range(4):
                                m[i] = as_f32(lds(shared, level + m_at + row + 8 * i))
                            a[0], a[1], a[2], a[3] = ldmatrix4(shared, level + imin_at + (row0 + lane) * 4)
                            l0 = ldmatrix4(shared, level + q_at + (token0 + lane) * 4)
                            l1 = ldmatrix4(shared, level + q_at + (tokens + token0 + lane) * 4)
                            l2 = ldmatrix4(shared, level + q_at + (2 * tokens + token0 + lane) * 4)
                        lane, row0, token0 = place_of_warp()
                        token = i32(token0 + (lane & 3) * 2)
                        for nj in range(4):
                            d_act[2 * nj] = as_f32(lds(shared, limbs + act_d + token + 8 * nj))
                            d_act[2 * nj + 1] = as_f32(lds(shared, limbs + act_d + token + 8 * nj + 1))
                        if whole:
                            for tile in range(8):
                                if has_min:
                                    b = 2 * (tile >> 2)
                                    r = minima(a[b], a[b + 1], l0[tile & 3], l1[tile & 3], l2[tile & 3])
                                for i in range(4):
                                    o = 4 * tile + i
                                    rounded = l2f(i64(high[o]) * 128 + low[o]) if wide else i2f(low[o])
                                    x = fma(rounded, d[2 * (tile >> 2) + (i >> 1)], f32(0))
                                    if has_min:
                                        x = fma(m[2 * (tile >> 2) + (i >> 1)], i2f(r[i]), x)
                                    total[o] = fma(x, d_act[2 * (tile & 3) + (i & 1)], total[o])
                                    low[o], high[o] = z, z
                        else:
                            for o in range(32):
                                total[o] = fma(acc[o], d_act[2 * ((o >> 2) & 3) + (o & 1)], total[o])
                                acc[o] = f32(0)
        lane, row0, token0 = place_of_warp()
        for mi in range(2):
            for nj in range(4):
                for i in range(4):
                    to_row = cuda.blockIdx.x * rows + row0 + (lane >> 2) + 16 * mi + 8 * (i >> 1)
                    to_token = cuda.blockIdx.y * tokens + token0 + (lane & 3) * 2 + 8 * nj + (i & 1)
                    if to_row < n_rows and to_token < n:
                        st(out, i64(to_token) * n_rows + to_row, total[(4 * mi + nj) * 4 + i])
    return Kernel(kernel, (U32, U32, F32, N, N, N), 32 * row_tiles * token_tiles)


def mmq(target, format_name, words, act, out, n_rows, n_cols, n, tile=None):
    """words: address of the weight's tiles [n_rows, n_cols], act: of the activation buffer of `quantize`, both on 16 bytes; out: of float32
    [n, n_rows]. tile: `tile_shape` chooses where it is not given."""
    for what, found in (("n_rows", n_rows), ("n_cols", n_cols), ("n", n)):
        check("mmq", found >= 1, what, found, "at least 1")
    fmt = format_of(format_name, "mmq")
    check("mmq", fmt.is_quantized, "type", fmt.name, "quantized types")
    tile = tile or tile_shape(fmt.name, n_rows, n, SHARED_LIMIT.get(target.cc, LEAST_LIMIT), target.n_multiprocessors)
    grid = -(-n_rows // (32 * tile.row_tiles)), -(-n // (32 * tile.token_tiles))
    check("mmq", grid[1] < 65536, "n", n, f"1..{65535 * 32 * tile.token_tiles}")
    return target.launch(mmq_kernel(fmt.name, *tile), grid, tile.n_threads, (words, act, out, n_rows, n_cols, n), layout(fmt, *tile).n_bytes)
