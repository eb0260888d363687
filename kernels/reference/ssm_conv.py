"""A short causal convolution of each channel over time, with its bias and activation (numerics, section 10)."""
from functools import partial

import numpy as np

from ..arith import add, f32, fma, silu
from ..compile import jit


@jit
def ssm_conv_arrays(state, x, w, runs, bias, with_silu, out):
    """state: f32 [rows, w.shape[1] - 1, channels], the oldest first; x, out: f32 [n, channels]; w: f32 [channels, taps];
    runs: i32 [r, 3 + K] (`ops.primitive`); bias: f32 [channels], or [0] without one."""
    n_channels, n_before = x.shape[1], w.shape[1] - 1
    for run in runs:
        first, n, source = run[0], run[1], run[2]
        columns = np.zeros((n_before + n, n_channels), np.float32)
        if source >= 0:
            columns[:n_before] = state[source]
        columns[n_before:] = x[first:first + n]
        for token in range(n):
            for channel in range(n_channels):
                y = f32(0)
                for tap in range(n_before + 1):
                    y = fma(w[channel, tap], columns[token + tap, channel], y)
                if bias.shape[0]:
                    y = add(y, bias[channel])
                out[first + token, channel] = silu(y) if with_silu else y
        for i in range(min(n, run.shape[0] - 3)):
            if run[3 + i] >= 0:
                state[run[3 + i]] = columns[n - i:n - i + n_before]


def ssm_conv(call, kernel=ssm_conv_arrays):
    """out[t] = silu(sum over k of w[k] * x[t - taps + 1 + k] + bias) of each channel, x before a run's first token from the
    state; activation "none": without silu.

    state: f32 [rows, (taps - 1) * channels], written; x, out: f32 [n, channels]; w: f32 [channels, taps]; runs: i32 [r, 3 + K];
    bias: f32 [channels] or None."""
    state = call.state.data.reshape(len(call.state.data), -1, call.x.n_cols)
    bias = np.empty(0, np.float32) if call.bias is None else call.bias.data
    return partial(kernel, state, call.x.data, call.w.data, call.runs.data, bias, call.activation == "silu", call.out.data)
