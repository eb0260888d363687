"""quantize(rms_norm(x, w)), a row at a time, so that the normed row stays in the cache."""
from functools import partial

import numpy as np

from ..arith import f32
from ..compile import jit
from .parallel import over_rows
from .quantize import quantize_rows
from .rms_norm import rms_norm_rows


@jit
def rms_norm_act_rows(first, last, x, w, eps, q, d, sums):
    y = np.empty((1, x.shape[1]), np.float32)
    for row in range(first, last):
        one = slice(row, row + 1)
        rms_norm_rows(0, 1, x[one], w, eps, y)
        quantize_rows(0, 1, y, q[one], d[one], sums[one])


kernel = over_rows(rms_norm_act_rows)


def rms_norm_act(call):
    """act = quantize(rms_norm(x, w)). x: f32 [n, k]; w: f32 [k]."""
    return partial(kernel, call.x.data, call.w.data, f32(call.eps), *call.act.data)
