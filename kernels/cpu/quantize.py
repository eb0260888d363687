"""Activations to 15-bit integers in chunks of 256 columns."""
from functools import partial

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...quant.device_functions import device, inlined
from ...quant.words import u32
from ..arith import as_f32, div, f2i, f32, i32, mul, rint
from ..compile import jit
from ..reference import quantize as reference
from ..reference.quantize import CHUNK, INFINITY_BITS, LIMIT, NAN, SMALLEST, SUM_COLUMNS, amax_bits
from .parallel import over_rows
from .vector import I16, I32, advance, as_int16, as_uint32, call, pointer


@inlined
def scale_of(bits):
    """d, and what values are multiplied by, 0 where all levels are. bits: the pattern of the largest |x|."""
    amax = as_f32(bits)
    if bits >= INFINITY_BITS or amax < SMALLEST:
        return NAN if bits >= INFINITY_BITS else f32(0), f32(0)
    return div(amax, LIMIT), div(LIMIT, amax)


@jit
def quantize_block(x, q):
    """x: f32 [n], q: i16 [n or more], zero beyond n. Returns d: x_i is about d * q_i."""
    d, inv = scale_of(amax_bits(x))
    if inv == 0:
        q[:] = 0
        return d
    for i in range(x.shape[0]):
        q[i] = f2i(rint(mul(x[i], inv)))
    q[x.shape[0]:] = 0
    return d


@intrinsic
def sum_of_levels(typingctx, q):
    """Of SUM_COLUMNS int16 from a pointer on, as int32: in a loop LLVM adds them one by one."""
    def codegen(context, builder, signature, args):
        place = builder.bitcast(args[0], ir.VectorType(I16, SUM_COLUMNS).as_pointer())
        wide = builder.sext(builder.load(place, align=2), ir.VectorType(I32, SUM_COLUMNS))
        return call(builder, f"llvm.vector.reduce.add.v{SUM_COLUMNS}i32", I32, wide)
    return types.int32(q), codegen


@device
def quantize_row(x, n, q, d, sums):
    """Pointers: x f32 [n]; q i16 [nc * 256], d f32 [nc], sums i32 [nc * 16], nc = ceil(n / 256)."""
    words = as_uint32(x)
    for chunk in range((n + CHUNK - 1) // CHUNK):
        start, width = chunk * CHUNK, min(CHUNK, n - chunk * CHUNK)
        a, bits, levels = advance(x, start), advance(words, start), advance(q, start)
        largest = i32(0)
        for i in range(width):
            largest = max(largest, i32(bits[i] & u32(0x7fffffff)))
        d[chunk], inv = scale_of(largest)
        if inv == 0:
            width = 0
        for i in range(width):
            levels[i] = f2i(rint(mul(a[i], inv)))
        for i in range(width, CHUNK):
            levels[i] = 0
        for s in range(CHUNK // SUM_COLUMNS):
            sums[start // SUM_COLUMNS + s] = sum_of_levels(advance(levels, s * SUM_COLUMNS))


@jit
def quantize_rows(first, last, x, q, d, sums):
    for row in range(first, last):
        quantize_row(pointer(x[row]), x.shape[1], as_int16(pointer(q[row])), pointer(d[row]), pointer(sums[row]))


quantize_arrays = over_rows(quantize_rows)  # as of kernels/reference
quantize = partial(reference.quantize, kernel=quantize_arrays)
