"""Activations to 15-bit integers in chunks of 256 columns."""
from functools import partial

from ..arith import as_f32, div, f2i, f32, i32, mul, rint
from ..compile import jit
from ..reference import quantize as reference
from ..reference.quantize import CHUNK, INFINITY_BITS, LIMIT, NAN, SMALLEST, SUM_COLUMNS, amax_bits
from .parallel import over_rows


@jit
def quantize_block(x, q):
    """x: f32 [n], q: i16 [n or more], zero beyond n. Returns d: x_i is about d * q_i."""
    bits = amax_bits(x)
    amax = as_f32(bits)
    if bits >= INFINITY_BITS or amax < SMALLEST:
        q[:] = 0
        return NAN if bits >= INFINITY_BITS else f32(0)
    inv = div(LIMIT, amax)
    for i in range(x.shape[0]):
        q[i] = f2i(rint(mul(x[i], inv)))
    q[x.shape[0]:] = 0
    return div(amax, LIMIT)


@jit
def quantize_rows(first, last, x, q, d, sums):
    for row in range(first, last):
        for chunk in range(d.shape[1]):
            start = chunk * CHUNK
            d[row, chunk] = quantize_block(x[row, start:start + CHUNK], q[row, start:start + CHUNK])
        for i in range(sums.shape[1]):
            total = i32(0)
            for c in range(SUM_COLUMNS):
                total = i32(total + q[row, i * SUM_COLUMNS + c])
            sums[row, i] = total


quantize_arrays = over_rows(quantize_rows)  # as of kernels/reference
quantize = partial(reference.quantize, kernel=quantize_arrays)
