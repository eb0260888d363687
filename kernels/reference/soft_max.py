"""Softmax of each row (numerics, section 9)."""
from functools import partial

import numpy as np

from ..arith import div, exp, f32, sub
from ..compile import jit
from .rms_norm import sum128

MINUS_INFINITY = f32(-np.inf)


@jit
def soft_max_arrays(x, out):
    """x, out: f32 [n, k]."""
    for row in range(x.shape[0]):
        m = MINUS_INFINITY
        for column in range(x.shape[1]):
            m = x[row, column] if x[row, column] > m else m
        for column in range(x.shape[1]):
            out[row, column] = exp(sub(x[row, column], m))
        total = sum128(out[row])
        for column in range(x.shape[1]):
            out[row, column] = div(out[row, column], total)


def soft_max(call, kernel=soft_max_arrays):
    """out = exp(x - max) over the sum of these, row by row. x, out: f32 [n, k]."""
    return partial(kernel, call.x.data, call.out.data)
