"""Gated linear units beside elementwise's swiglu: out = activation(g) * u."""
from ..arith import gelu, mul, relu
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


geglu = over_rows(geglu_rows)  # (g f32 [n, k], u f32 [n, k], out f32 [n, k])
reglu = over_rows(reglu_rows)  # the same
