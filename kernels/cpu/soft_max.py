"""Softmax of each row; sum128's partials are lanes."""
from functools import partial

import numpy as np

from ..arith import add, div, exp, sub
from ..compile import jit
from ..reference import soft_max as reference
from ..reference.soft_max import MINUS_INFINITY
from .parallel import over_rows
from .rms_norm import halve128


@jit
def soft_max_rows(first, last, x, out):
    partial = np.empty(128, np.float32)
    for row in range(first, last):
        a, y = x[row], out[row]
        m = MINUS_INFINITY
        for column in range(a.shape[0]):
            m = a[column] if a[column] > m else m
        partial[:] = 0
        for start in range(0, a.shape[0], 128):
            for j in range(min(128, a.shape[0] - start)):
                y[start + j] = exp(sub(a[start + j], m))
                partial[j] = add(partial[j], y[start + j])
        total = halve128(partial)
        for column in range(a.shape[0]):
            y[column] = div(y[column], total)


soft_max = partial(reference.soft_max, kernel=over_rows(soft_max_rows))
