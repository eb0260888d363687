"""Gated linear units beside elementwise's swiglu: out = activation(g) * u (numerics, section 5). g, u, out: f32 [n, k]."""
from .. import arith
from ..compile import jit


@jit
def geglu(g, u, out):
    for token in range(g.shape[0]):
        for column in range(g.shape[1]):
            out[token, column] = arith.mul(arith.gelu(g[token, column]), u[token, column])


@jit
def reglu(g, u, out):
    for token in range(g.shape[0]):
        for column in range(g.shape[1]):
            out[token, column] = arith.mul(arith.relu(g[token, column]), u[token, column])
