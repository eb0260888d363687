"""Channels of heads, apart and together."""
from functools import partial

from ..compile import jit
from ..reference import heads as reference
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


slice_heads = partial(reference.slice_heads, kernel=over_rows(slice_heads_rows))
concat_heads = partial(reference.concat_heads, kernel=over_rows(concat_heads_rows))
