"""quantize(rms_norm(x, w)) over whole rows: activation blocks of normed rows that are never written as floats.

One block a row, as in rms_norm; then each 64 of its threads take a chunk of 256 columns, as in quantize. A row of one round, of
whole fours of columns, stays in the registers of those threads (`round_norm_act`).
"""
from functools import lru_cache

from numba import cuda

from ...quant.formats import CHUNK
from .launch import F32, N, SCALAR_F32, U32, Kernel, factory
from .ptx import as_u32, device, f32, i32, i64, ld4, mul, nothing, sts4, u32, wait_for_previous
from .quantize import N_THREADS, chunk_quantizer
from .rms_norm import (COLUMNS, MOST_THREADS, ROWS, STAGE, Source, check_rows, n_threads, normed, reciprocal_of_round,
                       reciprocal_rms)


@device
def padded(y, column, n_cols):
    return y if column < n_cols else f32(0)


@lru_cache(None)
def row_norm_act(source: Source, put=nothing):
    """put: (t, row, column, n_cols, y): writes a normed value elsewhere too, if its column is in the row."""
    reciprocal_of_row, quantize_chunk = reciprocal_rms(source), chunk_quantizer(MOST_THREADS // N_THREADS)

    @device
    def norm_row_act(t, w, act, n, n_cols, eps):
        """Row blockIdx.x of n of act."""
        stage = cuda.shared.array(STAGE, f32)
        row, tid, n_threads = i64(cuda.blockIdx.x) * n_cols, cuda.threadIdx.x, cuda.blockDim.x
        n_chunks = (n_cols + CHUNK - 1) // CHUNK
        r = reciprocal_of_row(t, stage, row, n_cols, eps)
        first = i32(0)
        while first < n_chunks:
            chunk = first + tid // N_THREADS
            column = chunk * CHUNK + tid % N_THREADS * 4
            a, b, c, d = normed(t, stage, w, row, column, 1, n_cols, n_threads, r)
            a, b, c, d = (padded(a, column, n_cols), padded(b, column + 1, n_cols), padded(c, column + 2, n_cols),
                          padded(d, column + 3, n_cols))
            put(t, row, column, n_cols, a)
            put(t, row, column + 1, n_cols, b)
            put(t, row, column + 2, n_cols, c)
            put(t, row, column + 3, n_cols, d)
            quantize_chunk(a, b, c, d, act, n, cuda.blockIdx.x, chunk, n_chunks)
            first = i32(first + n_threads // N_THREADS)
            if first < n_chunks:
                cuda.syncthreads()  # the maxima of this round have been read
    return norm_row_act


@lru_cache(None)
def round_norm_act(source: Source, put4=nothing):
    """put4: (t, i, a, b, c, d): writes the normed elements i .. i + 3 elsewhere too."""
    quantize_chunk, load4, keep4 = chunk_quantizer(MOST_THREADS // N_THREADS), source.load4, source.keep4

    @device
    def norm_round_act(t, w, act, n, n_cols, eps):
        """Row blockIdx.x of n of act, a thread for each four columns. Weights are asked for before the kernel that makes the row
        has ended."""
        stage = cuda.shared.array(STAGE, u32)
        tid = i32(cuda.threadIdx.x)
        column, row = i32(4 * tid), i64(cuda.blockIdx.x) * n_cols
        last = i32(n_cols - 4)
        wa, wb, wc, wd = ld4(w, min(column, last))
        wait_for_previous()
        a, b, c, d = load4(t, row + min(column, last))
        if column > last:
            a, b, c, d = f32(0), f32(0), f32(0), f32(0)
        else:
            keep4(t, row + column, a, b, c, d)
        sts4(stage, column, as_u32(a), as_u32(b), as_u32(c), as_u32(d))
        r = reciprocal_of_round(stage, n_cols, eps)
        if column <= last:
            a, b, c, d = mul(mul(a, r), wa), mul(mul(b, r), wb), mul(mul(c, r), wc), mul(mul(d, r), wd)
            put4(t, row + column, a, b, c, d)
        quantize_chunk(a, b, c, d, act, n, cuda.blockIdx.x, tid // N_THREADS, (n_cols + CHUNK - 1) // CHUNK)
    return norm_round_act


def is_round(k: int) -> bool:
    return k % 4 == 0 and k <= COLUMNS * n_threads(k)


@factory([(True,), (False,)])
def rms_norm_act_kernel(one_round):
    norm_row_act = round_norm_act(ROWS) if one_round else row_norm_act(ROWS)

    def kernel(x, w, act, n, n_cols, eps):
        norm_row_act((x,), w, act, n, n_cols, eps)
    return Kernel(kernel, (F32, F32, U32, N, N, SCALAR_F32), MOST_THREADS, n_blocks=2 if one_round else 1)


def check(call):
    check_rows(call.x, call.w)


def rms_norm_act(call):
    """act = quantize(rms_norm(x, w)). x: f32 [n, k]; w: f32 [k]; act: activations [n, k]; all on 16 bytes."""
    n, k = call.x.shape
    args = call.x.data, call.w.data, call.act.data, n, k, call.eps
    return call.device.launch(rms_norm_act_kernel(is_round(k)), n, n_threads(k), args)
