"""A short causal convolution of each channel over time, and the states that it leaves."""
import numpy as np

from ..arith import add, f32, fma, silu
from ..compile import jit
from ..reference import ssm_conv as reference
from .parallel import over_rows


@jit
def ssm_conv_rows(first, last, x, state, w, runs, bias, with_silu, out):
    n_before = w.shape[1] - 1
    for run in runs:
        begin, source = run[0], run[2]
        for token in range(max(begin, first), min(begin + run[1], last)):
            o = out[token]
            for channel in range(o.shape[0]):
                o[channel] = f32(0)
            for tap in range(n_before + 1):
                before = token - begin + tap - n_before
                if before >= 0 or source >= 0:  # what lies before the first token of a sequence adds zeros
                    column = x[begin + before] if before >= 0 else state[source, n_before + before]
                    for channel in range(o.shape[0]):
                        o[channel] = fma(w[channel, tap], column[channel], o[channel])
                else:
                    for channel in range(o.shape[0]):
                        o[channel] = fma(w[channel, tap], f32(0), o[channel])
            for channel in range(bias.shape[0]):
                o[channel] = add(o[channel], bias[channel])
            if with_silu:
                for channel in range(o.shape[0]):
                    o[channel] = silu(o[channel])


@jit
def keep_columns(state, x, n_before, runs):
    """The states behind the last tokens of each run."""
    before = np.empty(state.shape[1:], np.float32)
    for run in runs:
        first, n, source = run[0], run[1], run[2]
        if source >= 0:
            before[:] = state[source]
        else:
            before[:] = f32(0)
        for i in range(min(n, run.shape[0] - 3)):
            if run[3 + i] >= 0:
                for j in range(n_before):
                    at = n - i - n_before + j
                    state[run[3 + i], j] = x[first + at] if at >= 0 else before[n_before + at]


outputs = over_rows(ssm_conv_rows)


def kernel(state, x, w, runs, bias, with_silu, out):
    outputs(x, state, w, runs, bias, with_silu, out)
    keep_columns(state, x, w.shape[1] - 1, runs)


def ssm_conv(call):
    """As the definition has it."""
    return reference.ssm_conv(call, kernel)
