"""Channels of heads, apart and together. Copies of float32, no arithmetic."""
from functools import partial

from ..compile import jit


@jit
def slice_heads_arrays(x, first, out):
    """out[i, h] = the channels of x[i, h] from `first` on. x: f32 [n, heads, dim]; out: f32 [n, heads, count]."""
    for token in range(out.shape[0]):
        for head in range(out.shape[1]):
            for channel in range(out.shape[2]):
                out[token, head, channel] = x[token, head, first + channel]


@jit
def concat_heads_arrays(x, y, out):
    """out[i, h] = the channels of x[i, h], and behind them those of y[i, h], or of y[i, 0] if y has one head. f32 [n, heads,
    dim] each."""
    n, heads, dim = x.shape
    for token in range(n):
        for head in range(heads):
            for channel in range(dim):
                out[token, head, channel] = x[token, head, channel]
            for channel in range(y.shape[2]):
                out[token, head, dim + channel] = y[token, head if y.shape[1] > 1 else 0, channel]


def slice_heads(call, kernel=slice_heads_arrays):
    """Channels first .. first + n - 1 of each head. x: f32 [n, heads * dim]; out: f32 [n, heads * n]."""
    return partial(kernel, call.x.heads(call.n_head), call.first, call.out.heads(call.n_head))


def concat_heads(call, kernel=concat_heads_arrays):
    """The channels of each head of x, and behind them those of the same head of y, or of its only one. f32 [n,
    heads * dim] each."""
    return partial(kernel, call.x.heads(call.n_head), call.y.heads(call.n_head_y), call.out.heads(call.n_head))
