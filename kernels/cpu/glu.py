"""Gated linear units beside elementwise's swiglu: out = activation(g) * u."""
from ..arith import add, div, exp, f32, gelu, mul, relu
from ..compile import jit
from .parallel import over_rows


@jit
def geglu_rows(first, last, g, u, out):
    for row in range(first, last):
        a, b, o = g[row], u[row], out[row]
        for column in range(a.shape[0]):
            o[column] = mul(gelu(a[column]), b[column])


@jit
def reglu_rows(first, last, g, u, out):
    for row in range(first, last):
        a, b, o = g[row], u[row], out[row]
        for column in range(a.shape[0]):
            o[column] = mul(relu(a[column]), b[column])


@jit
def swiglu_oai_rows(first, last, g, u, alpha, limit, out):
    for row in range(first, last):
        gate, up, o = g[row], u[row], out[row]
        for column in range(gate.shape[0]):
            a, b = gate[column], up[column]
            a = limit if a > limit else a
            b = limit if b > limit else -limit if b < -limit else b
            o[column] = mul(div(a, add(f32(1), exp(mul(-alpha, a)))), add(b, f32(1)))


geglu = over_rows(geglu_rows)  # (g f32 [n, k], u f32 [n, k], out f32 [n, k])
reglu = over_rows(reglu_rows)  # the same
swiglu_oai = over_rows(swiglu_oai_rows)  # (g, u, alpha f32, limit f32, out)
