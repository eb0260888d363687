"""Sums of squares by columns, for importance matrices: no op of a graph, and the same order whatever rows come together."""
import numpy as np

from ...quant.device_functions import device
from ..compile import jit
from ..threads import sharing
from .parallel import PART

LEAST_COLUMNS = 1024  # of a thread, so that it reads pages of a row


@device
def add_columns(u, args):
    n_parts, sums, rows, to = args
    first, last = u * rows.shape[1] // n_parts, (u + 1) * rows.shape[1] // n_parts
    for i in range(rows.shape[0]):
        a, x = sums[to[i]][first:last], rows[i][first:last]
        for j in range(len(x)):
            a[j] += np.float64(x[j]) * np.float64(x[j])


each = sharing(add_columns)


@jit(parallel=True)
def add_squares(control, sums, rows, to):
    """sums[to[i]] = sums[to[i]] + rows[i]^2 for i = 0, 1, ..., each square exact; threads share the columns.
    sums: float64 [n, n_cols], written; rows: float32 [m, n_cols]; to: int64 [m]."""
    n_parts = max(1, min(rows.shape[1] // LEAST_COLUMNS, rows.size // PART))
    each(control, n_parts, (n_parts, sums, rows, to))
