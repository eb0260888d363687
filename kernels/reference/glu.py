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


@jit
def swiglu_oai(g, u, alpha, limit, out):
    """out = g' / (1 + exp(-alpha g')) * (u' + 1), g' = g up to limit, u' = u from -limit to limit. alpha, limit: f32, limit > 0."""
    for token in range(g.shape[0]):
        for column in range(g.shape[1]):
            a, b = g[token, column], u[token, column]
            a = limit if a > limit else a
            b = limit if b > limit else -limit if b < -limit else b
            swish = arith.div(a, arith.add(arith.f32(1), arith.exp(arith.mul(-alpha, a))))
            out[token, column] = arith.mul(swish, arith.add(b, arith.f32(1)))
