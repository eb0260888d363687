"""quantize(rms_norm(x, w)) over whole rows: activation blocks of normed rows that are never written as floats.

One block a row, as in rms_norm; then each 64 of its threads take a chunk of 256 columns, as in quantize.
"""
from numba import cuda

from ...quant.formats import CHUNK
from .launch import F32, N, SCALAR_F32, U32, Kernel, check, factory
from .ptx import device, f32, i64
from .quantize import N_THREADS, chunk_quantizer
from .rms_norm import MOST_THREADS, n_threads, normed, reciprocal_rms


@device
def element(x, w, row, column, n_cols, r):
    y = normed(x, w, row, column, n_cols, r)
    return y if column < n_cols else f32(0)


@factory([()])
def rms_norm_act_kernel():
    quantize_chunk = chunk_quantizer(MOST_THREADS // N_THREADS)

    def kernel(x, w, act, n, n_cols, eps):
        row, tid = i64(cuda.blockIdx.x) * n_cols, cuda.threadIdx.x
        n_chunks = (n_cols + CHUNK - 1) // CHUNK
        r = reciprocal_rms(x, row, n_cols, eps)
        for first in range(0, n_chunks, cuda.blockDim.x // N_THREADS):
            chunk = first + tid // N_THREADS
            column = chunk * CHUNK + tid % N_THREADS * 4
            a, b = element(x, w, row, column, n_cols, r), element(x, w, row, column + 1, n_cols, r)
            c, d = element(x, w, row, column + 2, n_cols, r), element(x, w, row, column + 3, n_cols, r)
            quantize_chunk(a, b, c, d, act, n, cuda.blockIdx.x, chunk, n_chunks)
    return Kernel(kernel, (F32, F32, U32, N, N, SCALAR_F32), MOST_THREADS)


def rms_norm_act(target, x, w, act, n, k, eps):
    """x: address of f32 [n, k]; w: of f32 [k]; act: address of `activation_bytes(n, k)`, on 16 bytes."""
    check("rms_norm_act", n >= 1, "n", n, "at least 1")
    check("rms_norm_act", k >= 1, "k", k, "at least 1")
    return target.launch(rms_norm_act_kernel(), n, n_threads(k), (x, w, act, n, k, eps))
