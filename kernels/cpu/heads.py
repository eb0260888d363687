"""Channels of heads, apart and together."""
from ..compile import jit
from .parallel import over_rows


@jit
def slice_heads_rows(first, last, x, start, out):
    for token in range(first, last):
        for head in range(out.shape[1]):
            v, o = x[token, head], out[token, head]
            for channel in range(o.shape[0]):
                o[channel] = v[start + channel]


@jit
def concat_heads_rows(first, last, x, y, out):
    for token in range(first, last):
        for head in range(out.shape[1]):
            a, b, o = x[token, head], y[token, head if y.shape[1] > 1 else 0], out[token, head]
            for channel in range(a.shape[0]):
                o[channel] = a[channel]
            for channel in range(b.shape[0]):
                o[a.shape[0] + channel] = b[channel]


slice_heads = over_rows(slice_heads_rows)    # (x f32 [n, heads, dim], first channel, out f32 [n, heads, count])
concat_heads = over_rows(concat_heads_rows)  # (x f32 [n, heads, dim], y f32 [n, heads or 1, dim of y], out f32 [n, heads, both])
