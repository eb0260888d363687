"""Activations to 15-bit integers in chunks of 256 columns (numerics, section 3)."""
from functools import partial

import numpy as np

from ..arith import as_f32, as_i32, div, f2i, f32, i32, mul, rint
from ..compile import jit

CHUNK = 256
SUM_COLUMNS = 16
LIMIT = f32(16256)        # 127 * 128: 15 bits, two int8 limbs
SMALLEST = f32(2.0**-100)
INFINITY_BITS = i32(0x7f800000)
NAN = f32(np.nan)


@jit
def amax_bits(x):
    """The largest bit pattern of |x_i| as an integer. x: f32 [n]; +0 for n = 0."""
    amax = i32(0)
    for i in range(x.shape[0]):
        amax = max(amax, i32(as_i32(x[i]) & i32(0x7fffffff)))
    return amax


@jit
def quantize_block(x, q):
    """x: f32 [n], q: i16 [n]. Fills q, returns d: x_i is about d * q_i, |q_i| <= 16256."""
    bits = amax_bits(x)
    q[:] = 0
    if bits >= INFINITY_BITS:
        return NAN
    amax = as_f32(bits)
    if amax < SMALLEST:
        return f32(0)
    inv = div(LIMIT, amax)
    for i in range(x.shape[0]):
        q[i] = f2i(rint(mul(x[i], inv)))
    return div(amax, LIMIT)


@jit
def quantize_arrays(x, q, d, sums):
    """x: f32 [n, k] -> q: i16 [n, nc * 256], d: f32 [n, nc], sums: i32 [n, nc * 16] (of q, over 16 columns),
    nc = ceil(k / 256)."""
    n, k = x.shape
    padded = np.zeros(CHUNK, np.float32)
    for token in range(n):
        for chunk in range(d.shape[1]):
            first = chunk * CHUNK
            width = min(CHUNK, k - first)
            padded[:] = 0
            padded[:width] = x[token, first:first + width]
            d[token, chunk] = quantize_block(padded, q[token, first:first + CHUNK])
        for i in range(sums.shape[1]):
            sums[token, i] = np.sum(q[token, i * SUM_COLUMNS:(i + 1) * SUM_COLUMNS])


def quantize(call, kernel=quantize_arrays):
    """act = x in chunks of 256 columns. x: f32 [n, k]; act: q i16 [n, nc * 256], d f32 [n, nc], sums i32 [n, nc * 16]."""
    return partial(kernel, call.x.data, *call.act.data)
