"""add, mul, scale, sigmoid and the gated linear units: one result an element (numerics, section 5), one thread an element.

Blocks of the grid: x = row, y = 256 columns. `out` may be one of the operands.
"""
from numba import cuda

from . import ptx
from ..arith import relu as cpu_relu
from .launch import F32, N, N64, SCALAR_F32, Kernel, check, factory
from .ptx import device, gelu, i64, ld, silu, st

THREADS = 256
MOST_COLUMNS = 65535 * THREADS  # of a grid's y


relu = device(cpu_relu.py_func)


def gated(activation):
    @device
    def glu(g, u):
        return ptx.mul(activation(g), u)
    return glu


BINARY = {"add": ptx.add, "mul": ptx.mul, "swiglu": gated(silu), "geglu": gated(gelu), "reglu": gated(relu)}
GLU = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}  # activation -> its gated linear unit


@factory([(op,) for op in BINARY])
def binary_kernel(op):
    operation = BINARY[op]

    def kernel(x, y, out, n_cols, y_stride):
        column = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            i = i64(cuda.blockIdx.x) * n_cols + column
            st(out, i, operation(ld(x, i), ld(y, i64(cuda.blockIdx.x) * y_stride + column)))
    return Kernel(kernel, (F32, F32, F32, N, N64), n_threads=THREADS)


@factory([()])
def scale_kernel():
    def kernel(x, out, n_cols, a):
        column = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            i = i64(cuda.blockIdx.x) * n_cols + column
            st(out, i, ptx.mul(ld(x, i), a))
    return Kernel(kernel, (F32, F32, N, SCALAR_F32), n_threads=THREADS)


@factory([()])
def sigmoid_kernel():
    def kernel(x, out, n_cols):
        column = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            i = i64(cuda.blockIdx.x) * n_cols + column
            st(out, i, ptx.sigmoid(ld(x, i)))
    return Kernel(kernel, (F32, F32, N), THREADS)


def grid(op, n_rows, n_cols):
    check(op, n_rows >= 1, "n_rows", n_rows, "at least 1")
    check(op, 1 <= n_cols <= MOST_COLUMNS, "n_cols", n_cols, f"1 to {MOST_COLUMNS}")
    return n_rows, -(-n_cols // THREADS)


def binary(target, op, x, y, out, n_rows, n_cols, y_rows):
    """out = op(x, y), op of BINARY, operands as for `add`."""
    check(op, y_rows in (1, n_rows), "y_rows", y_rows, f"1 or {n_rows}")
    return target.launch(binary_kernel(op), grid(op, n_rows, n_cols), THREADS, (x, y, out, n_cols, n_cols if y_rows > 1 else 0))


def add(target, x, y, out, n_rows, n_cols, y_rows):
    """out = x + y. x, out: addresses of f32 [n_rows, n_cols]; y: of f32 [y_rows, n_cols], y_rows = n_rows, or 1: one row for all."""
    return binary(target, "add", x, y, out, n_rows, n_cols, y_rows)


def mul(target, x, y, out, n_rows, n_cols, y_rows):
    """out = x * y, operands as for `add`."""
    return binary(target, "mul", x, y, out, n_rows, n_cols, y_rows)


def swiglu(target, g, u, out, n_rows, n_cols):
    """out = silu(g) * u. g, u, out: addresses of f32 [n_rows, n_cols]."""
    return binary(target, "swiglu", g, u, out, n_rows, n_cols, n_rows)


def scale(target, x, out, n_rows, n_cols, a):
    """out = x * a. x, out: addresses of f32 [n_rows, n_cols]; a: float32."""
    return target.launch(scale_kernel(), grid("scale", n_rows, n_cols), THREADS, (x, out, n_cols, a))


def sigmoid(target, x, out, n_rows, n_cols):
    """out = 1 / (1 + exp(-x)). x, out: addresses of f32 [n_rows, n_cols]."""
    return target.launch(sigmoid_kernel(), grid("sigmoid", n_rows, n_cols), THREADS, (x, out, n_cols))
