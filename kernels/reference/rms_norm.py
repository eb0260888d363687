"""y = x / sqrt(mean(x^2) + eps) * w over the columns of each row (numerics, section 5), and its tree, sum128."""
from functools import partial

import numpy as np

from ..arith import add, div, f32, fma, i2f, mul, sqrt
from ..compile import jit


@jit
def halve128(partial):
    """The end of sum128: partial: f32 [128], overwritten; returns its sum, halves added to halves."""
    w = 64
    while w > 0:
        for j in range(w):
            partial[j] = add(partial[j], partial[j + w])
        w //= 2
    return partial[0]


@jit
def sum128(x):
    """x: f32 [n] -> the sum of x in 128 interleaved partials."""
    partial = np.zeros(128, np.float32)
    for i in range(x.shape[0]):
        partial[i % 128] = add(partial[i % 128], x[i])
    return halve128(partial)


@jit
def sum128_of_squares(x):
    partial = np.zeros(128, np.float32)
    for i in range(x.shape[0]):
        partial[i % 128] = fma(x[i], x[i], partial[i % 128])
    return halve128(partial)


@jit
def rms_norm_arrays(x, w, eps, out):
    """x: f32 [n, k], w: f32 [k], eps: f32, out: f32 [n, k]."""
    n, k = x.shape
    for token in range(n):
        mean = div(sum128_of_squares(x[token]), i2f(np.int32(k)))
        r = div(f32(1), sqrt(add(mean, eps)))
        for column in range(k):
            out[token, column] = mul(mul(x[token, column], r), w[column])


def rms_norm(call, kernel=rms_norm_arrays):
    """out = x / sqrt(mean(x^2) + eps) * w over runs of len(w) columns: whole rows, or each head of a row. x, out: f32 [n, k];
    w: f32."""
    k = call.w.shape[0]
    return partial(kernel, call.x.data.reshape(-1, k), call.w.data, f32(call.eps), call.out.data.reshape(-1, k))
