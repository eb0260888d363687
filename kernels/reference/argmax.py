"""The column of the largest value of each row (numerics, section 5)."""
from functools import partial

from ..compile import jit


@jit
def argmax_arrays(x, out):
    """x: f32 [n, k], k >= 1; out: i32 [n]. The first of equal ones; -1 where a value is NaN."""
    for row in range(x.shape[0]):
        best = 0
        for column in range(x.shape[1]):
            if x[row, column] != x[row, column]:
                best = -1
                break
            if x[row, column] > x[row, best]:
                best = column
        out[row] = best


def argmax(call, kernel=argmax_arrays):
    """out[i] = the first column of the largest value of row i of x, -1 where a value is NaN. x: f32 [n, k]; out: i32 [n]."""
    return partial(kernel, call.x.data, call.out.data)
