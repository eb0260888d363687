"""Gated linear units beside elementwise's swiglu: out = activation(g) * u (numerics, sections 5 and 9). One thread an element."""
from .elementwise import BINARY, GLU, binary
from .ptx import add, device, div, exp, f32, mul


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
