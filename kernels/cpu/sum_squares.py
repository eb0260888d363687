"""Sums of squares by columns, for importance matrices: no op of a graph, and the same order whatever rows come together."""
import numpy as np

from ..compile import jit


@jit
def add_squares(sums, rows, to):
    """sums[to[i]] = sums[to[i]] + rows[i]^2 for i = 0, 1, ..., each square exact.
    sums: float64 [n, n_cols], written; rows: float32 [m, n_cols]; to: int64 [m]."""
    for i in range(len(rows)):
        a, x = sums[to[i]], rows[i]
        for j in range(len(x)):
            a[j] += np.float64(x[j]) * np.float64(x[j])
