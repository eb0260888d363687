"""quantize(swiglu(gate, up)), a row at a time, so that the products stay in the cache."""
from functools import partial

import numpy as np

from ..compile import jit
from .elementwise import swiglu_rows
from .parallel import over_rows
from .quantize import quantize_rows


@jit
def swiglu_act_rows(first, last, gate, up, q, d, sums):
    y = np.empty((1, gate.shape[1]), np.float32)
    for row in range(first, last):
        one = slice(row, row + 1)
        swiglu_rows(0, 1, gate[one], up[one], y)
        quantize_rows(0, 1, y, q[one], d[one], sums[one])


kernel = over_rows(swiglu_act_rows)


def swiglu_act(call):
    """act = quantize(swiglu(gate, up)). gate, up: f32 [n, k]."""
    return partial(kernel, call.gate.data, call.up.data, *call.act.data)
