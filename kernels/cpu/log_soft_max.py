"""The logarithm of the softmax of each row, at some of its columns; sum128's partials are lanes."""
from functools import partial

import numpy as np

from ..arith import NAN, add, exp, f32, log, sub
from ..compile import jit
from ..reference import log_soft_max as reference
from ..reference.log_soft_max import MINUS_INFINITY
from .parallel import over_rows
from .rms_norm import halve128


@jit
def log_soft_max_rows(first, last, x, ids, out):
    partial, largest = np.empty(128, np.float32), np.empty(128, np.float32)
    for row in range(first, last):
        a = x[row]
        k = a.shape[0]
        largest[:] = MINUS_INFINITY
        for start in range(0, k, 128):
            for j in range(min(128, k - start)):
                largest[j] = a[start + j] if a[start + j] > largest[j] else largest[j]
        m = MINUS_INFINITY
        for j in range(128):
            m = largest[j] if largest[j] > m else m
        m = add(m, f32(0))
        partial[:] = 0
        for start in range(0, k, 128):
            for j in range(min(128, k - start)):
                partial[j] = add(partial[j], exp(sub(a[start + j], m)))
        total = log(halve128(partial))
        for i in range(ids.shape[1]):
            column = ids[row, i]
            out[row, i] = sub(sub(a[column], m), total) if 0 <= column < k else NAN


log_soft_max = partial(reference.log_soft_max, kernel=over_rows(log_soft_max_rows))
