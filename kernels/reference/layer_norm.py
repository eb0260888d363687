"""y = (x - mean) / sqrt(variance + eps) * w, and + b, over the columns of each row (numerics, section 5)."""
from functools import partial

import numpy as np

from ..arith import add, div, f32, i2f, mul, sqrt, sub
from ..compile import jit
from .rms_norm import sum128, sum128_of_squares

NO_BIAS = np.empty(0, np.float32)


@jit
def layer_norm_arrays(x, w, b, eps, out):
    """x: f32 [n, k], w: f32 [k], b: f32 [k] or [0], without a bias; eps: f32, out: f32 [n, k]."""
    n, k = x.shape
    d = np.empty(k, np.float32)
    for token in range(n):
        mean = div(sum128(x[token]), i2f(np.int32(k)))
        for column in range(k):
            d[column] = sub(x[token, column], mean)
        r = div(f32(1), sqrt(add(div(sum128_of_squares(d), i2f(np.int32(k))), eps)))
        for column in range(k):
            y = mul(mul(d[column], r), w[column])
            out[token, column] = add(y, b[column]) if b.shape[0] > 0 else y


def layer_norm(call, kernel=layer_norm_arrays):
    """out = (x - mean) / sqrt(variance + eps) * w, plus b where there is one, over runs of len(w) columns: whole rows, or each
    head of a row. x, out: f32 [n, k]; w, b: f32."""
    k = call.w.shape[0]
    bias = NO_BIAS if call.b is None else call.b.data
    return partial(kernel, call.x.data.reshape(-1, k), call.w.data, bias, f32(call.eps), call.out.data.reshape(-1, k))
