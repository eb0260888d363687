"""y = (x - mean) / sqrt(variance + eps) * w, and + b, over the columns of each row; sum128's partials are lanes."""
from functools import partial

import numpy as np

from ..arith import add, div, f32, i2f, mul, sqrt, sub
from ..compile import jit
from ..reference import layer_norm as reference
from .parallel import over_rows
from .rms_norm import halve128, sum128_of_squares


@jit
def sum128(a, partial):
    """a: f32 [n]. partial: f32 [128], overwritten."""
    partial[:] = 0
    whole = a.shape[0] // 128 * 128
    for start in range(0, whole, 128):
        for j in range(128):
            partial[j] = add(partial[j], a[start + j])
    for j in range(a.shape[0] - whole):
        partial[j] = add(partial[j], a[whole + j])
    return halve128(partial)


@jit
def layer_norm_rows(first, last, x, w, b, eps, out):
    k = x.shape[1]
    partial = np.empty(128, np.float32)
    for row in range(first, last):
        a, d = x[row], out[row]
        mean = div(sum128(a, partial), i2f(np.int32(k)))
        for column in range(k):
            d[column] = sub(a[column], mean)
        r = div(f32(1), sqrt(add(div(sum128_of_squares(d, partial), i2f(np.int32(k))), eps)))
        for column in range(k):
            d[column] = mul(mul(d[column], r), w[column])
        for column in range(b.shape[0]):
            d[column] = add(d[column], b[column])


layer_norm = partial(reference.layer_norm, kernel=over_rows(layer_norm_rows))
