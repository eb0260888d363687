"""The column of the largest value of each row, -1 where there is a NaN."""
from functools import partial

from ..compile import jit
from ..reference import argmax as reference
from .parallel import over_rows


@jit
def argmax_rows(first, last, x, out):
    for row in range(first, last):
        values, best, at, n_nan = x[row], x[row, 0], 0, 0
        for column in range(values.shape[0]):
            value = values[column]
            n_nan += value != value
            if value > best:
                best, at = value, column
        out[row] = -1 if n_nan else at


argmax = partial(reference.argmax, kernel=over_rows(argmax_rows))
