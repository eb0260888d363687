"""Gated linear units beside elementwise's swiglu: out = activation(g) * u (numerics, section 5). g, u, out: f32 [n, k]."""
from functools import partial

from .. import arith
from ..compile import jit


@jit
def geglu_arrays(g, u, out):
    for token in range(g.shape[0]):
        for column in range(g.shape[1]):
            out[token, column] = arith.mul(arith.gelu(g[token, column]), u[token, column])


@jit
def reglu_arrays(g, u, out):
    for token in range(g.shape[0]):
        for column in range(g.shape[1]):
            out[token, column] = arith.mul(arith.relu(g[token, column]), u[token, column])


@jit
def swiglu_oai_arrays(g, u, alpha, limit, out):
    """out = g' / (1 + exp(-alpha g')) * (u' + 1), g' = g up to limit, u' = u from -limit to limit. alpha, limit: f32,
    limit > 0."""
    for token in range(g.shape[0]):
        for column in range(g.shape[1]):
            a, b = g[token, column], u[token, column]
            a = limit if a > limit else a
            b = limit if b > limit else -limit if b < -limit else b
            swish = arith.div(a, arith.add(arith.f32(1), arith.exp(arith.mul(-alpha, a))))
            out[token, column] = arith.mul(swish, arith.add(b, arith.f32(1)))


def geglu(call, kernel=geglu_arrays):
    """out = gelu(gate) * up. f32 [n, k] each."""
    return partial(kernel, call.gate.rows, call.up.rows, call.out.rows)


def reglu(call, kernel=reglu_arrays):
    """out = relu(gate) * up. f32 [n, k] each."""
    return partial(kernel, call.gate.rows, call.up.rows, call.out.rows)


def swiglu_oai(call, kernel=swiglu_oai_arrays):
    """The unit of gpt-oss, with constants alpha and limit (numerics, section 9). gate, up, out: f32 [n, k]."""
    return partial(kernel, call.gate.rows, call.up.rows, arith.f32(call.alpha), arith.f32(call.limit), call.out.rows)
