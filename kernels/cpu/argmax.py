"""The column of the largest value of each row, -1 where there is a NaN."""
from functools import partial

from ..arith import add, as_i32, f32, i32
from ..compile import jit
from ..reference import argmax as reference
from .flash_attn_ext import LOWEST, ordered
from .parallel import over_rows

BLOCK = 512  # columns of which only the largest value is looked for at first


@jit
def argmax_rows(first, last, x, out):
    """As integers that order as the floats do, vectors have a maximum; x + 0 makes one zero of the two."""
    for row in range(first, last):
        values, n_nan, best, start = x[row], i32(0), LOWEST, 0
        for block in range(0, values.shape[0], BLOCK):
            top = LOWEST
            for column in range(block, min(block + BLOCK, values.shape[0])):
                value = values[column]
                n_nan = i32(n_nan + i32(value != value))
                top = max(top, ordered(as_i32(add(value, f32(0)))))
            if top > best:
                best, start = top, block
        while n_nan == 0 and ordered(as_i32(add(values[start], f32(0)))) != best:
            start += 1
        out[row] = -1 if n_nan else start


argmax = partial(reference.argmax, kernel=over_rows(argmax_rows))
