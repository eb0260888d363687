"""Activations as two int8 limbs (docs/numerics.md, section 3), what matrix products with quantized weights take.

The activations of n rows of k columns, nc = ceil(k / 256) chunks, are one allocation of four planes in this order, each on 64 bytes:

    hi    int8    [n][nc * 256]     q = 128 hi + lo, zeros beyond the row's end
    lo    int8    [n][nc * 256]
    d     float32 [n][nc]
    sums  int32   [n][nc * 16]      of q over 16 columns
"""
from typing import NamedTuple

from numba import cuda

from ...quant.activation import LIMIT
from ...quant.formats import CHUNK
from .launch import F32, Kernel, N, U32, check, factory
from .ptx import as_f32, as_u32, device, div, f2i, f32, i32, i64, ld, mul, st, u32

N_THREADS = 64  # of a block: four columns each


class Planes(NamedTuple):
    """Bytes at which the planes of an activation buffer begin, and its size."""
    hi: int
    lo: int
    d: int
    sums: int
    n_bytes: int


def _plane_words(n, n_chunks):
    """(lo, d, sums, end) in words of four bytes; hi begins at 0."""
    lo = i64(n) * n_chunks * 64
    d = 2 * lo
    sums = d + ((i64(n) * n_chunks + 15) & -16)
    return lo, d, sums, sums + i64(n) * n_chunks * 16


plane_words = device(_plane_words)


def activation_planes(n: int, k: int) -> Planes:
    return Planes(0, *(4 * int(words) for words in _plane_words(n, -(-k // CHUNK))))


def activation_bytes(n: int, k: int) -> int:
    """Bytes of the activation buffer of n rows of k columns."""
    return activation_planes(n, k).n_bytes


@device
def four_bytes(a, b, c, d):
    return u32((a & 255) | (b & 255) << 8 | (c & 255) << 16 | (d & 255) << 24)


@factory([()])
def quantize_kernel():
    limit, smallest = f32(LIMIT), f32(2.0**-100)
    infinity, nan = u32(0x7f800000), u32(0x7fc00000)

    @device
    def element(x, first, column, k):
        return ld(x, first + column) if column < k else f32(0)

    @device
    def magnitude(x):
        return u32(as_u32(x) & u32(0x7fffffff))

    @device
    def level(x, inverse, used):
        return f2i(mul(x, inverse)) if used else i32(0)

    def kernel(x, act, n, k):  # block: chunk blockIdx.x of row blockIdx.y
        shared = cuda.shared.array(64, u32)
        eighths = cuda.shared.array(8, u32)
        tid, chunk, n_chunks = cuda.threadIdx.x, cuda.blockIdx.x, cuda.gridDim.x
        first, column = i64(cuda.blockIdx.y) * k, chunk * 256 + tid * 4
        a, b = element(x, first, column, k), element(x, first, column + 1, k)
        c, d = element(x, first, column + 2, k), element(x, first, column + 3, k)

        # 1. amax, the largest bit pattern: of four columns, of 32, of all
        shared[tid] = max(max(magnitude(a), magnitude(b)), max(magnitude(c), magnitude(d)))
        cuda.syncthreads()
        if tid < 8:
            largest = shared[tid]
            for i in range(1, 8):
                largest = max(largest, shared[tid + 8 * i])
            eighths[tid] = largest
        cuda.syncthreads()
        bits = eighths[0]
        for i in range(1, 8):
            bits = max(bits, eighths[i])

        # 2. levels and limbs
        amax = as_f32(bits)
        used = bits < infinity and amax >= smallest
        inverse = div(limit, amax) if used else f32(0)
        a, b, c, d = level(a, inverse, used), level(b, inverse, used), level(c, inverse, used), level(d, inverse, used)
        ha, hb, hc, hd = (a + 64) >> 7, (b + 64) >> 7, (c + 64) >> 7, (d + 64) >> 7
        lo, scales, sums, _ = plane_words(n, n_chunks)
        at = i64(cuda.blockIdx.y) * n_chunks + chunk
        st(act, at * 64 + tid, four_bytes(ha, hb, hc, hd))
        st(act, lo + at * 64 + tid, four_bytes(a - (ha << 7), b - (hb << 7), c - (hc << 7), d - (hd << 7)))
        if tid == 0:
            st(act, scales + at, as_u32(div(amax, limit)) if used else nan if bits >= infinity else u32(0))

        # 3. sums of 16 columns
        quarters = cuda.shared.array(64, i32)
        quarters[tid] = i32(a + b + c + d)
        cuda.syncthreads()
        if tid < 16:
            st(act, sums + at * 16 + tid, quarters[4 * tid] + quarters[4 * tid + 1] + quarters[4 * tid + 2] + quarters[4 * tid + 3])
    return Kernel(kernel, (F32, U32, N, N), N_THREADS)


def quantize(target, x, act, n, k):
    """x: address of float32 [n, k]; act: address of `activation_bytes(n, k)`, on 16 bytes."""
    check("quantize", 1 <= n < 65536, "n", n, "1..65535")
    check("quantize", k >= 1, "k", k, "at least 1")
    return target.launch(quantize_kernel(), (-(-k // CHUNK), n), N_THREADS, (x, act, n, k))
