"""Gated linear units beside elementwise's swiglu: out = activation(g) * u (numerics, section 5). One thread an element."""
from .elementwise import binary


def geglu(target, g, u, out, n_rows, n_cols):
    """out = gelu(g) * u. g, u, out: addresses of f32 [n_rows, n_cols]."""
    return binary(target, "geglu", g, u, out, n_rows, n_cols, n_rows)


def reglu(target, g, u, out, n_rows, n_cols):
    """out = relu(g) * u, operands as for `geglu`."""
    return binary(target, "reglu", g, u, out, n_rows, n_cols, n_rows)
