"""y = x / sqrt(sum(x^2) + eps) of heads."""
from functools import partial

import numpy as np

from ..arith import add, div, f32, mul, sqrt
from ..compile import jit
from ..reference import l2_norm as reference
from .parallel import over_rows
from .rms_norm import sum128_of_squares


@jit
def l2_norm_rows(first, last, x, n_head, dim, eps, out):
    partial = np.empty(128, np.float32)
    for row in range(first, last):
        for head in range(n_head):
            a, y = x[row, head * dim:(head + 1) * dim], out[row, head * dim:(head + 1) * dim]
            r = div(f32(1), sqrt(add(sum128_of_squares(a, partial), eps)))
            for column in range(dim):
                y[column] = mul(a[column], r)
        for column in range(n_head * dim, x.shape[1]):
            out[row, column] = x[row, column]


l2_norm = partial(reference.l2_norm, kernel=over_rows(l2_norm_rows))
