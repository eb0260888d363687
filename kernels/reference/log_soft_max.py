"""The logarithm of the softmax of each row, at some of its columns (numerics, section 5)."""
from functools import partial

import numpy as np

from ..arith import NAN, add, exp, f32, log, sub
from ..compile import jit
from .rms_norm import sum128

MINUS_INFINITY = f32(-np.inf)


@jit
def log_soft_max_arrays(x, ids, out):
    """x: f32 [n, k], k >= 1; ids: i32 [n, u]; out: f32 [n, u], NaN where there is no such column."""
    e = np.empty(x.shape[1], np.float32)
    for row in range(x.shape[0]):
        m = MINUS_INFINITY
        for column in range(x.shape[1]):
            m = x[row, column] if x[row, column] > m else m
        m = add(m, f32(0))
        for column in range(x.shape[1]):
            e[column] = exp(sub(x[row, column], m))
        total = log(sum128(e))
        for i in range(ids.shape[1]):
            column = ids[row, i]
            out[row, i] = sub(sub(x[row, column], m), total) if 0 <= column < x.shape[1] else NAN


def log_soft_max(call, kernel=log_soft_max_arrays):
    """out[i, j] = (x[i, ids[i, j]] - max(x[i])) - log(sum(exp(x[i] - max(x[i])))), NaN where there is no such column. x: f32
    [n, k]; ids: i32 [n, u]; out: f32 [n, u]."""
    return partial(kernel, call.x.data, call.ids.data, call.out.data)
