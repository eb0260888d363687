"""y = x / sqrt(mean(x^2) + eps) * w over the columns of each row; sum128's partials are lanes."""
from functools import partial

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...quant.device_functions import inlined
from ..arith import add, div, f32, fma, i2f, mul, sqrt
from ..compile import jit
from ..reference import rms_norm as reference
from .parallel import over_rows
from .vector import F32, I32, pointer


@intrinsic
def sum_of_128(typingctx, first):
    """Of 128 float32 from a pointer on, halves added to halves."""
    def codegen(context, builder, signature, args):
        x = builder.load(builder.bitcast(args[0], ir.VectorType(F32, 128).as_pointer()), align=4)
        while (w := x.type.count // 2) > 0:
            low, high = (builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, w), list(range(lane, lane + w))))
                         for lane in (0, w))
            x = builder.fadd(low, high)
        return builder.extract_element(x, I32(0))
    return types.float32(first), codegen


@inlined
def halve128(partial):
    """The end of sum128. partial: f32 [128]."""
    return sum_of_128(pointer(partial))


@jit
def sum128_of_squares(a, partial):
    """a: f32 [n]. partial: f32 [128], overwritten."""
    x, sums = pointer(a), pointer(partial)
    for j in range(128):
        sums[j] = f32(0)
    whole = a.shape[0] // 128 * 128
    for start in range(0, whole, 128):
        for j in range(128):
            sums[j] = fma(x[start + j], x[start + j], sums[j])
    for j in range(a.shape[0] - whole):
        sums[j] = fma(x[whole + j], x[whole + j], sums[j])
    return sum_of_128(sums)


@jit
def rms_norm_rows(first, last, x, w, eps, out):
    k = x.shape[1]
    partial = np.empty(128, np.float32)
    for row in range(first, last):
        a, y = x[row], out[row]
        r = div(f32(1), sqrt(add(div(sum128_of_squares(a, partial), i2f(np.int32(k))), eps)))
        for column in range(k):
            y[column] = mul(mul(a[column], r), w[column])


rms_norm = partial(reference.rms_norm, kernel=over_rows(rms_norm_rows))
