"""A short causal convolution of each channel over time, with its activation, and the states that it leaves (numerics, section
10).

A thread has one channel of a tile of tokens. Runs of tokens are found in their table by each block, so that the shape of a launch
does not depend on them. Where all tokens are one tile, the thread that computes a channel of a run also keeps its columns, behind
all that it reads; else a second launch does, a thread for each channel and run: the row that is read may be one that is written.
"""
from functools import lru_cache

from numba import cuda

from .elementwise import THREADS
from .launch import F32, I32, Kernel, Launches, N, factory, need
from .operands import addresses
from .ptx import device, f32, fma, i32, i64, ld, silu, st

TILE = 64  # tokens
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


@factory([(taps, keeps) for taps in TAPS for keeps in (True, False)])
def ssm_conv_kernel(taps, keeps):
    """keeps: all tokens are one tile, and the states are written too."""
    keep, n_before = keeper(taps), taps - 1

    def kernel(state, x, w, runs, out, n_channels, n_runs, n_kept):
        window, weights = cuda.local.array(taps, f32), cuda.local.array(taps, f32)
        channel = i32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        begin = i32(cuda.blockIdx.y * TILE)
        if channel < n_channels:
            for k in range(taps):
                weights[k] = ld(w, i64(channel) * taps + k)
            run = i32(0)
            while run < n_runs:
                at = i64(run) * (3 + n_kept)
                first, n, source = ld(runs, at), ld(runs, at + 1), ld(runs, at + 2)
                token, end = i32(max(first, begin)), i32(min(first + n, begin + TILE))
                if token < end:
                    for j in range(n_before):
                        place = i32(token - first - n_before + j)  # in the run
                        window[j] = f32(0)
                        if place >= 0:
                            window[j] = ld(x, i64(first + place) * n_channels + channel)
                        elif source >= 0:
                            window[j] = ld(state, (i64(source) * n_before + n_before + place) * n_channels + channel)
                    while token < end:
                        window[n_before] = ld(x, i64(token) * n_channels + channel)
                        y = f32(0)
                        for k in range(taps):
                            y = fma(weights[k], window[k], y)
                        st(out, i64(token) * n_channels + channel, silu(y))
                        for k in range(n_before):
                            window[k] = window[k + 1]
                        token = i32(token + 1)
                if keeps and n > 0:
                    keep(state, x, runs, at, n_kept, n_channels, channel)
                run = i32(run + 1)
    return Kernel(kernel, (F32, F32, F32, I32, F32, N, N, N), THREADS)


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


def ssm_conv(call):
    """out[t] = silu(sum over k of w[k] * x[t - taps + 1 + k]) of each channel, x before a run's first token from the state.

    state: f32 [rows, (taps - 1) * channels], written; x, out: f32 [n, channels]; w: f32 [channels, taps]; runs: i32
    [r, 3 + K]."""
    (n, n_channels), taps, (n_runs, width) = call.x.shape, call.w.n_cols, call.runs.shape
    n_blocks, n_tiles = -(-n_channels // THREADS), -(-n // TILE)
    args = *addresses(call.state, call.x, call.w, call.runs, call.out), n_channels, n_runs, width - 3
    outputs = call.device.launch(ssm_conv_kernel(taps, n_tiles == 1), (n_blocks, n_tiles), THREADS, args)
    if n_tiles == 1:
        return outputs
    args = *addresses(call.state, call.x, call.runs), n_channels, width - 3
    return Launches((outputs, call.device.launch(keep_columns_kernel(taps), (n_blocks, n_runs), THREADS, args)))
