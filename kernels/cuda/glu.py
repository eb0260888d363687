"""Gated linear units beside elementwise's swiglu: out = activation(g) * u (numerics, sections 5 and 9). One thread an element."""
from numba import cuda

from .elementwise import BINARY, GLU, THREADS, binary, grid
from .launch import F32, Kernel, N, SCALAR_F32, check, factory
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

    @device
    def unit(g, u):
        return clamped_swiglu(g, u, minus_alpha, limit)
    return unit


def geglu(target, g, u, out, n_rows, n_cols):
    """out = gelu(g) * u. g, u, out: addresses of f32 [n_rows, n_cols]."""
    return binary(target, "geglu", g, u, out, n_rows, n_cols, n_rows)


def reglu(target, g, u, out, n_rows, n_cols):
    """out = relu(g) * u, operands as for `geglu`."""
    return binary(target, "reglu", g, u, out, n_rows, n_cols, n_rows)


@factory([()])
def swiglu_oai_kernel():
    def kernel(g, u, out, n_cols, minus_alpha, limit):  # blocks as in elementwise
        column = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            i = i64(cuda.blockIdx.x) * n_cols + column
            st(out, i, clamped_swiglu(ld(g, i), ld(u, i), minus_alpha, limit))
    return Kernel(kernel, (F32, F32, F32, N, SCALAR_F32, SCALAR_F32), THREADS)


def swiglu_oai(target, g, u, out, n_rows, n_cols, alpha, limit):
    """out = g' / (1 + exp(-alpha g')) * (u' + 1), g' = g up to limit, u' = u from -limit to limit. g, u, out as for `geglu`; alpha, limit:
    float32, limit > 0."""
    check("swiglu_oai", limit > 0, "limit", limit, "above 0")
    return target.launch(swiglu_oai_kernel(), grid("swiglu_oai", n_rows, n_cols), THREADS, (g, u, out, n_cols, -alpha, limit))
