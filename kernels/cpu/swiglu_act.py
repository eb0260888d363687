"""quantize(swiglu(gate, up)), a row at a time, so that the products stay in the cache."""
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


swiglu_act = over_rows(swiglu_act_rows)  # (gate f32 [n, k], up f32 [n, k], q, d, sums as of quantize)
