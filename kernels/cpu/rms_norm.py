"""y = x / sqrt(mean(x^2) + eps) * w over the columns of each row; sum128's partials are lanes."""
from functools import partial

import numpy as np

from ..arith import add, div, f32, fma, i2f, mul, sqrt
from ..compile import jit
from ..reference import rms_norm as reference
from .parallel import over_rows


@jit
def halve128(partial):
    """The end of sum128: partial: f32 [128], overwritten; returns its sum, halves added to halves."""
    w = 64
    while w > 0:
        low, high = partial[:w], partial[w:]
        for j in range(w):
            low[j] = add(low[j], high[j])
        w >>= 1
    return partial[0]


@jit
def sum128_of_squares(a, partial):
    """a: f32 [n]. partial: f32 [128], overwritten."""
    partial[:] = 0
    whole = a.shape[0] // 128 * 128
    for start in range(0, whole, 128):
        for j in range(128):
            partial[j] = fma(a[start + j], a[start + j], partial[j])
    for j in range(a.shape[0] - whole):
        partial[j] = fma(a[whole + j], a[whole + j], partial[j])
    return halve128(partial)


@jit
def rms_norm_rows(first, last, x, w, eps, out):
    k = x.shape[1]
    partial = np.empty(128, np.float32)
    for row in range(first, last):
        a, y = x[row], out[row]
        r = div(f32(1), sqrt(add(div(sum128_of_squares(a, partial), i2f(np.int32(k))), eps)))
        for column in range(k):
            y[column] = mul(mul(a[column], r), w[column])


rms_norm = partial(reference.rms_norm, kernel=over_rows(rms_norm_rows))
