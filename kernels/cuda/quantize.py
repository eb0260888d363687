"""Activations as two int8 limbs (docs/numerics.md, section 3), what matrix products with quantized weights take.

The activations of n rows of k columns, nc = ceil(k / 256) chunks, are one allocation of five planes in this order, each on 64
bytes:

    hi    int8    [n][nc * 256]     q = 128 hi + lo, zeros beyond the row's end
    lo    int8    [n][nc * 256]
    d     float32 [nc][n]
    sums  int32   [n][nc * 16]      of q over 16 columns
    limbs int8    [nc][n][2][4][2][4]   of the sums of a chunk: the minima of a chunk are a product, too

A sum is 1024 u + r, -512 <= r < 512, and each of the two 4 b + c, 0 <= c < 4: four bytes. A word holds bytes of four sums; words
of c and of b lie side by side, four such pairs for u, then four for r. So a tensor core adds up imin u = imin c + 4 imin b, and
the same of r, in one product (`tile_product.minima_product`); 4 imin is a byte.

What is a few bytes of a token and a chunk lies beside that of the other tokens, which are multiplied together: a copy of pieces
that are far apart takes longer than the rows of q (docs/kernels-log.md, "Two to 16 tokens").
"""
from functools import lru_cache

from numba import cuda

from ...quant.activation import LIMIT
from ...quant.formats import CHUNK
from ..call import Call
from .launch import F32, Kernel, N, U32, factory, need
from .ptx import as_f32, as_i32, device, f2i, f32, fma, i32, i64, ld, ld4, lds, mul, redux_max, shuffle, st, sts, u32

N_THREADS = 64  # of a chunk: four columns each
GROUPS = 4      # chunks of a block, where there are many
MOST_BLOCKS = 4096  # of a chunk each; a multiprocessor starts one in 0.16 us (docs/kernels-log.md)


@device
def plane_words(n, n_chunks):
    """(lo, d, sums, limbs) in words of four bytes; hi begins at 0."""
    lo = i64(n) * n_chunks * 64
    d = 2 * lo
    sums = d + ((i64(n) * n_chunks + 15) & -16)
    return lo, d, sums, sums + i64(n) * n_chunks * 16


def most_rows(n_cols: int) -> int:
    """Rows of activations of which an int32 counts the words, with room for what lies behind them."""
    return (1 << 31) // (168 * -(-n_cols // CHUNK))


@device
def planes(n, n_chunks):
    """`plane_words`, int32, of `most_rows` rows at most."""
    lo, d, sums, limbs = plane_words(n, n_chunks)
    return i32(lo), i32(d), i32(sums), i32(limbs)


@device
def four_bytes(a, b, c, d):
    return u32((a & 255) | (b & 255) << 8 | (c & 255) << 16 | (d & 255) << 24)


@device
def limb_of(s, k):
    """Of a sum: c and b of u, then of r."""
    u = i32((s + 512) >> 10)
    part = i32(s - (u << 10) if k & 2 else u)
    return i32(part >> 2 if k & 1 else part & 3)


FULL, SMALLEST = f32(LIMIT), f32(2.0**-100)
INFINITY_BITS, NAN_BITS = i32(0x7f800000), i32(0x7fc00000)


# div of an x from 2^-100 on and 16256, both ways, as straight code: a quotient near it and its remainder, which fma gives exactly
# (Markstein). tests/kernels/cuda/test_divisions.py compares every mantissa.

UNIT, ONE = f32(1 / LIMIT), f32(1)
SIXTEENTH, FULL_16 = f32(-1 / 16), f32(LIMIT / 16)  # of x: that no reciprocal is subnormal
SEED = i32(0x7ef31000 - 2**31)                      # less the bits of -x: those of 1 / x but for 5 %


@device
def over_full(x):
    """div(x, 16256)."""
    q = mul(x, UNIT)
    return fma(fma(q, -FULL, x), UNIT, q)


@device
def full_over(x):
    """div(16256, x)."""
    x = mul(x, SIXTEENTH)
    y = as_f32(i32(SEED - as_i32(x)))
    y = fma(fma(x, y, ONE), y, y)
    y = fma(fma(x, y, ONE), y, y)
    y = fma(fma(x, y, ONE), y, y)
    q = mul(y, FULL_16)
    return fma(fma(x, q, FULL_16), y, q)


@device
def magnitude(x):
    return i32(as_i32(x) & 0x7fffffff)


@device
def level(x, inverse, used):
    return f2i(mul(x, inverse)) if used else i32(0)


@device
def largest(a, b, c, d):
    """The bits of the largest magnitude of four."""
    return i32(max(max(magnitude(a), magnitude(b)), max(magnitude(c), magnitude(d))))  # noqa: PLW3301 (two at a time)


@device
def levels_of(bits):
    """(used, inverse) of a chunk with that amax, given as its bits: whether it has levels, and what a column is multiplied by to
    be one."""
    amax = as_f32(bits)
    used = bits < INFINITY_BITS and amax >= SMALLEST
    return used, full_over(amax) if used else f32(0)


@device
def d_bits(bits, used):
    return as_i32(over_full(as_f32(bits))) if used else NAN_BITS if bits >= INFINITY_BITS else i32(0)


@device
def limb_words(a, b, c, d, inverse, used):
    """(hi, lo, sum) of four columns: words of their limbs, the sum of their levels."""
    qa, qb, qc, qd = level(a, inverse, used), level(b, inverse, used), level(c, inverse, used), level(d, inverse, used)
    ha, hb, hc, hd = (qa + 64) >> 7, (qb + 64) >> 7, (qc + 64) >> 7, (qd + 64) >> 7
    return (four_bytes(ha, hb, hc, hd), four_bytes(qa - (ha << 7), qb - (hb << 7), qc - (hc << 7), qd - (hd << 7)),
            i32(qa + qb + qc + qd))


@device
def sum_of_four_lanes(s, lane):
    s = i32(s + shuffle(s, lane ^ 1))
    return i32(s + shuffle(s, lane ^ 2))


@lru_cache(None)
def chunk_quantizer(n_groups: int):
    """The function by which each group of 64 threads, of at most n_groups in a block, quantizes a chunk."""
    n_warps = n_groups * (N_THREADS // 32)

    @device
    def quantize_chunk(a, b, c, d, act, n, row, chunk, n_chunks):
        """a, b, c, d: columns 4 t .. 4 t + 3 of chunk `chunk` of row `row` of n, t the thread in its group; +0 past the row's
        end. Every thread of the block takes part; chunks from n_chunks on are not stored. Called again, it wants a barrier
        between."""
        maxima = cuda.shared.array(n_warps, i32)
        tid = i32(cuda.threadIdx.x)
        t, lane, warp = i32(tid & (N_THREADS - 1)), i32(tid & 31), i32(tid >> 5)

        # 1. amax, the largest bit pattern: of four columns, of a warp's, of both warps'
        bits = redux_max(largest(a, b, c, d))
        if lane == 0:
            sts(maxima, warp, bits)
        cuda.syncthreads()
        if chunk >= n_chunks:
            return
        bits = i32(max(bits, lds(maxima, warp ^ 1)))

        # 2. levels and limbs
        used, inverse = levels_of(bits)
        hi, low, s = limb_words(a, b, c, d, inverse, used)
        lo, scales, sums, limbs = plane_words(n, n_chunks)
        at, beside = i64(row) * n_chunks + chunk, i64(chunk) * n + row
        st(act, at * 64 + t, hi)
        st(act, lo + at * 64 + t, low)
        if t == 0:
            st(act, scales + beside, d_bits(bits, used))

        # 3. sums of 16 columns, with each of their four lanes, which make a limb each; words of the limbs of four sums
        s = sum_of_four_lanes(s, lane)
        if lane & 3 == 0:
            st(act, sums + at * 16 + (t >> 2), s)
        k = i32(lane & 3)
        word = u32(u32(limb_of(s, k) & 255) << u32((lane & 12) << 1))
        word = u32(word | u32(shuffle(word, lane ^ 4)))
        word = u32(word | u32(shuffle(word, lane ^ 8)))
        if lane & 15 < 4:
            st(act, limbs + beside * 16 + 8 * (k >> 1) + 2 * (t >> 4) + (k & 1), word)
    return quantize_chunk


@device
def element(x, first, column, k):
    """x[first + column] of a row of k columns, +0 past its end."""
    return ld(x, first + column) if column < k else f32(0)


@device
def four_elements(x, first, column, k):
    """Those of columns column .. column + 3. x: on 16 bytes."""
    if k & 3:
        a, b = element(x, first, column, k), element(x, first, column + 1, k)
        c, d = element(x, first, column + 2, k), element(x, first, column + 3, k)
    else:
        a, b, c, d = ld4(x, first + min(column, i32(k - 4)))
        if column >= k:
            a, b, c, d = f32(0), f32(0), f32(0), f32(0)
    return a, b, c, d


@device
def own_chunk():
    """(chunk, first of the four columns of a thread) in a block of `blocks`."""
    tid = i32(cuda.threadIdx.x)
    chunk = i32(cuda.blockIdx.x * (cuda.blockDim.x // N_THREADS) + tid // N_THREADS)
    return chunk, i32(chunk * CHUNK + (tid & (N_THREADS - 1)) * 4)


@factory([()])
def quantize_kernel():
    quantize_chunk = chunk_quantizer(GROUPS)

    def kernel(x, act, n, k):  # block: chunks of row blockIdx.y
        row, (chunk, column) = cuda.blockIdx.y, own_chunk()
        a, b, c, d = four_elements(x, i64(row) * k, column, k)
        quantize_chunk(a, b, c, d, act, n, row, chunk, (k + 255) >> 8)
    return Kernel(kernel, (F32, U32, N, N), GROUPS * N_THREADS)


def blocks(n: int, k: int) -> tuple[tuple[int, int], int]:
    """(grid, threads of a block): a block for each chunk of each of n rows of k columns, or for four of them."""
    need(1 <= n < 65536, "n", n, "1..65535")
    need(k >= 1, "k", k, "at least 1")
    n_chunks = -(-k // CHUNK)
    groups = 1 if n_chunks * n <= MOST_BLOCKS else min(GROUPS, n_chunks)
    return (-(-n_chunks // groups), n), groups * N_THREADS


def check(call: Call) -> None:
    blocks(*call.x.shape)


def quantize(call: Call):
    """act = x in chunks of 256 columns: d = amax / 16256, q = rint(x * (16256 / amax)), amax a chunk's largest magnitude, and
    sums of q.

    x: f32 [n, k]; act: act [n, k]; both on 16 bytes."""
    n, k = call.x.shape
    grid, n_threads = blocks(n, k)
    return call.device.launch(quantize_kernel(), grid, n_threads, (call.x.data, call.act.data, n, k))
