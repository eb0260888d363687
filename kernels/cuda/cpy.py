"""dst = x, byte for byte, 16 bytes a thread where addresses and size allow it: what a device's memory can do at most.

The driver's own copy reaches two thirds of that in a graph (measured on an H200)."""
from math import prod

from numba import cuda

from ...quant.formats import CHUNK
from ..call import Operand
from .launch import N64, U8, U32, Kernel, factory, need
from .ptx import i64, ld, ld4, st, st4
from .set_rows import TYPES, row_bytes

THREADS = 256
WIDTHS = 16, 4, 1  # bytes of a thread
SIZES = {"i32": 4, "i64": 8, "u8": 1}  # of elements that are in no cache


@factory([(width,) for width in WIDTHS])
def cpy_kernel(width):
    def kernel_16(x, dst, n):
        i = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if i < n:
            a, b, c, d = ld4(x, 4 * i)
            st4(dst, 4 * i, a, b, c, d)

    def kernel(x, dst, n):
        i = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if i < n:
            st(dst, i, ld(x, i))
    pointer = U8 if width == 1 else U32
    return Kernel(kernel_16 if width == 16 else kernel, (pointer, pointer, N64), THREADS)


def n_bytes(x: Operand) -> int:
    if x.dtype == "act":  # planes of limbs, of scales on 64 bytes, of sums, and of their limbs (`quantize`)
        n_chunks = x.n_rows * -(-x.n_cols // CHUNK)
        return n_chunks * (2 * CHUNK + 4 * 16 + 4 * 16) + -(-4 * n_chunks // 64) * 64
    return x.n_rows * row_bytes(x.dtype, x.n_cols) if x.dtype in TYPES else prod(x.shape) * SIZES[x.dtype]


def check(call):
    types = (*TYPES, *SIZES, "act")
    need(call.x.dtype in types, "type", call.x.dtype, ", ".join(types))
    need(prod(call.x.shape) >= 1, "shape", list(call.x.shape), "at least one element")


def cpy(call):
    """dst = x. Both of one dtype and shape; one memory or apart."""
    size = n_bytes(call.x)
    width = next(width for width in WIDTHS if size % width == call.x.data % width == call.dst.data % width == 0)
    n = size // width
    return call.device.launch(cpy_kernel(width), -(-n // THREADS), THREADS, (call.x.data, call.dst.data, n))
