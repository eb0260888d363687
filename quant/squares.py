"""Sums of squares of columns: how far values are off after they were quantized."""
import numpy as np

from .entries import jit


@jit
def squares_of_columns(x, values):
    """float64 [2, n_cols]: of each column the sums of (value - x)^2 and of x^2, rows in their order. x, values: float32 [n_rows,
    n_cols]; the difference is a float32, squares and sums are float64."""
    n_rows, n_cols = x.shape
    sums = np.zeros((2, n_cols))
    errors, squares = sums[0], sums[1]
    for row in range(n_rows):
        for c in range(n_cols):
            error, v = np.float64(values[row, c] - x[row, c]), np.float64(x[row, c])
            errors[c] += error * error
            squares[c] += v * v
    return sums
