"""add, mul, scale, sigmoid, softcap, softplus, relu_sqr, gelu and the gated linear units: one result an element (numerics,
section 5), one thread an element.

Blocks of the grid: x = row, y = 256 columns. `out` may be the memory of an operand of its shape.
"""
from numba import cuda

from . import ptx
from ..arith import relu as cpu_relu
from ..call import Call, Operand
from .launch import F32, N, N64, SCALAR_F32, Kernel, factory, need
from .operands import addresses
from .ptx import device, gelu, i64, ld, silu, st

THREADS = 256
MOST_COLUMNS = 65535 * THREADS  # of a grid's y


relu = device(cpu_relu.py_func)


def gated(activation):
    return device(lambda g, u: ptx.mul(activation(g), u))


@device
def squared_relu(x):
    r = relu(x)
    return ptx.mul(r, r)


@device
def capped(x, cap):
    return ptx.mul(cap, ptx.tanh(ptx.div(x, cap)))


BINARY = {"add": ptx.add, "mul": ptx.mul, "swiglu": gated(silu), "geglu": gated(gelu), "reglu": gated(relu)}
UNARY = {"sigmoid": ptx.sigmoid, "softplus": ptx.softplus, "relu_sqr": squared_relu, "gelu": ptx.gelu}
BY_NUMBER = {"scale": ptx.mul, "softcap": capped}  # of x and a number
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


@factory([(op,) for op in BY_NUMBER])
def by_number_kernel(op):
    function = BY_NUMBER[op]

    def kernel(x, out, n_cols, number):
        column = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            i = i64(cuda.blockIdx.x) * n_cols + column
            st(out, i, function(ld(x, i), number))
    return Kernel(kernel, (F32, F32, N, SCALAR_F32), n_threads=THREADS)


@factory([(op,) for op in UNARY])
def unary_kernel(op):
    function = UNARY[op]

    def kernel(x, out, n_cols):
        column = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            i = i64(cuda.blockIdx.x) * n_cols + column
            st(out, i, function(ld(x, i)))
    return Kernel(kernel, (F32, F32, N), THREADS)


def check_grid(out: Operand) -> None:
    need(out.n_rows >= 1, "n_rows", out.n_rows, "at least 1")
    need(1 <= out.n_cols <= MOST_COLUMNS, "n_cols", out.n_cols, f"1 to {MOST_COLUMNS}")


def check(call):
    check_grid(call.out)
    if call.op == "softcap":
        need(call.cap > 0, "cap", call.cap, "above 0")
    if call.op in ("add", "mul"):
        need(call.y.n_rows in (1, call.x.n_rows), "y_rows", call.y.n_rows, f"1 or {call.x.n_rows}")


def grid(out: Operand) -> tuple[int, int]:
    """Blocks of a result."""
    return out.n_rows, -(-out.n_cols // THREADS)


def by_element(call: Call, kernel: Kernel, *args):
    """The launch of a kernel of a thread for each element of call.out."""
    return call.device.launch(kernel, grid(call.out), THREADS, args)


def binary(call: Call, x: Operand, y: Operand):
    """out = op(x, y), op of BINARY. x, out: f32 [n, k]; y: the same, or f32 [k], one row for all."""
    n_cols = call.out.n_cols
    return by_element(call, binary_kernel(call.op), *addresses(x, y, call.out), n_cols, n_cols if y.n_rows > 1 else 0)


def add(call):
    """out = x + y. x, out: f32 [n, k]; y: the same, or f32 [k], one row for all."""
    return binary(call, call.x, call.y)


def mul(call):
    """out = x * y, operands as of `add`."""
    return binary(call, call.x, call.y)


def swiglu(call):
    """out = silu(gate) * up. gate, up, out: f32 [n, k]."""
    return binary(call, call.gate, call.up)


def by_number(call: Call, number: float):
    """out = op(x, number), op of BY_NUMBER. x, out: f32 [n, k]; number: a float32."""
    return by_element(call, by_number_kernel(call.op), *addresses(call.x, call.out), call.out.n_cols, number)


def scale(call):
    """out = x * factor. x, out: f32 [n, k]; factor: a float32."""
    return by_number(call, call.factor)


def softcap(call):
    """out = cap * tanh(x / cap). x, out: f32 [n, k]; cap: a float32 above 0."""
    return by_number(call, call.cap)


def unary(call: Call):
    """out = op(x), op of UNARY. x, out: f32 [n, k]."""
    return by_element(call, unary_kernel(call.op), *addresses(call.x, call.out), call.out.n_cols)


def sigmoid(call):
    """out = 1 / (1 + exp(-x)). x, out: f32 [n, k]."""
    return unary(call)


def softplus(call):
    """out = log(1 + exp(x)), x above 20. x, out: f32 [n, k]."""
    return unary(call)


def relu_sqr(call):
    """out = relu(x) * relu(x). x, out: f32 [n, k]."""
    return unary(call)


def gelu(call):
    """out = x / 2 * (1 + tanh(0.7979 (x + 0.0447 x^3))). x, out: f32 [n, k]."""
    return unary(call)
