"""A short causal convolution of each channel over time, with its bias and activation, and the states that it leaves (numerics,
section 10).

A thread has one channel of tiles of TILE tokens of a run, and reads a tile before it computes. The shape of a launch follows from
the numbers of tokens and runs alone: each run has as many blocks as if all were of one length. Where that is one, the thread also
keeps the columns, behind all that it reads; else a second launch does, a thread for each channel and run: the row that is read
may be one that is written.
"""
from functools import lru_cache

from numba import cuda

from .elementwise import THREADS
from .launch import F32, I32, Kernel, Launches, N, factory, need
from .operands import addresses
from .ptx import add, device, f32, fma, i32, i64, ld, silu, st, stage

TILE = 8  # tokens
TAPS = 2, 3, 4, 5, 6, 7, 8


@lru_cache(None)
def keeper(taps):
    n_before = taps - 1

    @device
    def keep(state, x, runs, at, n_kept, n_channels, channel):
        """Writes the columns of a channel behind the last tokens of the run at element `at` of the table."""
        old = cuda.local.array(n_before, f32)
        first, n, source = ld(runs, at), ld(runs, at + 1), ld(runs, at + 2)
        for m in range(n_before):
            old[m] = f32(0)
            if source >= 0:
                old[m] = ld(state, (i64(source) * n_before + m) * n_channels + channel)
        for i in range(n_kept):
            row = ld(runs, at + 3 + i)
            if i < n and row >= 0:
                for j in range(n_before):
                    token = i32(n - i - n_before + j)
                    value = f32(0)
                    for m in range(n_before):
                        value = old[m] if token == m - n_before else value
                    if token >= 0:
                        value = ld(x, i64(first + token) * n_channels + channel)
                    st(state, (i64(row) * n_before + j) * n_channels + channel, value)
    return keep


@lru_cache(None)
def convolver(taps, keeps, activation, biased):
    keep, n_before, n_read = keeper(taps), taps - 1, taps - 1 + TILE

    @stage
    def convolve(state, x, w, runs, bias, out, n_channels, n_kept):
        values, weights = cuda.local.array(n_read, f32), cuda.local.array(taps, f32)
        channel = i32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        at = i64(cuda.blockIdx.z) * (3 + n_kept)
        first, n, source = ld(runs, at), ld(runs, at + 1), ld(runs, at + 2)
        begin = i32(cuda.blockIdx.y * TILE)  # in the run
        if channel < n_channels and begin < n:
            for k in range(taps):
                weights[k] = ld(w, i64(channel) * taps + k)
            added = f32(0)
            if biased:
                added = ld(bias, channel)
            while begin < n:
                for j in range(n_before):
                    place = i32(begin - n_before + j)
                    values[j] = f32(0)
                    if place >= 0:
                        values[j] = ld(x, i64(first + place) * n_channels + channel)
                    elif source >= 0:
                        values[j] = ld(state, (i64(source) * n_before + n_before + place) * n_channels + channel)
                for j in range(TILE):
                    values[n_before + j] = ld(x, i64(first + min(begin + j, n - 1)) * n_channels + channel)
                for j in range(TILE):
                    if begin + j < n:
                        y = f32(0)
                        for k in range(taps):
                            y = fma(weights[k], values[j + k], y)
                        if biased:
                            y = add(y, added)
                        st(out, i64(first + begin + j) * n_channels + channel, silu(y) if activation == "silu" else y)
                begin = i32(begin + TILE * cuda.gridDim.y)
            if keeps:
                keep(state, x, runs, at, n_kept, n_channels, channel)
    return convolve


@factory([(taps, keeps, "silu", False) for taps in TAPS for keeps in (True, False)]
         + [(taps, keeps, *kind) for taps, kind in ((4, ("silu", True)), (4, ("none", True)), (3, ("none", False)))
            for keeps in (True, False)])
def ssm_conv_kernel(taps, keeps, activation, biased):
    """keeps: a run has one block of each channel, and the states are written too. biased: there is a bias."""
    convolve = convolver(taps, keeps, activation, biased)

    def kernel(state, x, w, runs, out, n_channels, n_kept):
        convolve(state, x, w, runs, w, out, n_channels, n_kept)

    def kernel_with_bias(state, x, w, runs, bias, out, n_channels, n_kept):
        convolve(state, x, w, runs, bias, out, n_channels, n_kept)
    return Kernel(*((kernel_with_bias, (F32, F32, F32, I32, F32, F32, N, N)) if biased
                    else (kernel, (F32, F32, F32, I32, F32, N, N))), THREADS)


@factory([(taps,) for taps in TAPS])
def keep_columns_kernel(taps):
    keep = keeper(taps)

    def kernel(state, x, runs, n_channels, n_kept):
        channel = i32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        if channel < n_channels:
            keep(state, x, runs, i64(cuda.blockIdx.y) * (3 + n_kept), n_kept, n_channels, channel)
    return Kernel(kernel, (F32, F32, I32, N, N), THREADS)


def check(call):
    need(call.x.n_rows >= 1, "n", call.x.n_rows, "at least 1")
    need(call.w.n_cols in TAPS, "taps", call.w.n_cols, f"{TAPS[0]} to {TAPS[-1]}")
    need(call.x.n_rows <= 65535 * TILE, "n", call.x.n_rows, f"up to {65535 * TILE}")
    need(call.runs.shape[0] < 65536, "runs", call.runs.shape[0], "up to 65535")


def ssm_conv(call):
    """out[t] = silu(sum over k of w[k] * x[t - taps + 1 + k] + bias) of each channel, x before a run's first token from the
    state; activation "none": without silu.

    state: f32 [rows, (taps - 1) * channels], written; x, out: f32 [n, channels]; w: f32 [channels, taps]; runs: i32 [r, 3 + K];
    bias: f32 [channels] or None."""
    (n, n_channels), taps, (n_runs, width) = call.x.shape, call.w.n_cols, call.runs.shape
    n_blocks, n_parts = -(-n_channels // THREADS), max(1, -(-n // (TILE * max(1, n_runs))))
    bias = [call.bias] * (call.bias is not None)
    args = *addresses(call.state, call.x, call.w, call.runs, *bias, call.out), n_channels, width - 3
    kernel = ssm_conv_kernel(taps, n_parts == 1, call.activation, bool(bias))
    outputs = call.device.launch(kernel, (n_blocks, n_parts, n_runs), THREADS, args)
    if n_parts == 1:
        return outputs
    args = *addresses(call.state, call.x, call.runs), n_channels, width - 3
    return Launches((outputs, call.device.launch(keep_columns_kernel(taps), (n_blocks, n_runs), THREADS, args)))
