"""Gated linear units beside elementwise's swiglu: out = activation(g) * u (numerics, sections 5 and 9). One thread an element."""
from numba import cuda

from .elementwise import BINARY, GLU, THREADS, binary, by_element, check_grid
from .launch import F32, Kernel, N, SCALAR_F32, factory, need
from .operands import addresses
from .ptx import add, device, div, exp, f32, i64, ld, mul, st


@device
def clamped_swiglu(g, u, minus_alpha, limit):
    """swiglu_oai of one gate and up."""
    a = limit if g > limit else g
    b = limit if u > limit else -limit if u < -limit else u
    return mul(div(a, add(f32(1), exp(mul(minus_alpha, a)))), add(b, f32(1)))


def gated_unit(activation: str, alpha: float = 0.0, limit: float = 0.0):
    """(g, u) -> the gated linear unit of silu, gelu or relu, or swiglu_oai, which alone has constants."""
    if activation != "swiglu_oai":
        return BINARY[GLU[activation]]
    minus_alpha, limit = f32(-alpha), f32(limit)
    return device(lambda g, u: clamped_swiglu(g, u, minus_alpha, limit))


@factory([()])
def swiglu_oai_kernel():
    def kernel(g, u, out, n_cols, minus_alpha, limit):  # blocks as in elementwise
        column = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            i = i64(cuda.blockIdx.x) * n_cols + column
            st(out, i, clamped_swiglu(ld(g, i), ld(u, i), minus_alpha, limit))
    return Kernel(kernel, (F32, F32, F32, N, SCALAR_F32, SCALAR_F32), THREADS)


def check(call):
    check_grid(call.out)
    if call.op == "swiglu_oai":
        need(call.limit > 0, "limit", call.limit, "above 0")


def geglu(call):
    """out = gelu(gate) * up. gate, up, out: f32 [n, k]."""
    return binary(call, call.gate, call.up)


def reglu(call):
    """out = relu(gate) * up, operands as of `geglu`."""
    return binary(call, call.gate, call.up)


def swiglu_oai(call):
    """out = g / (1 + exp(-alpha g)) * (u + 1), g = gate up to limit, u = up from -limit to limit.

    gate, up, out: f32 [n, k]; alpha, limit: float32, limit > 0."""
    return by_element(call, swiglu_oai_kernel(), *addresses(call.gate, call.up, call.out), call.out.n_cols, -call.alpha,
                      call.limit)
