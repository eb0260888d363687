"""Gated linear units beside elementwise's swiglu: out = activation(g) * u."""
from functools import partial

from ..arith import add, div, exp, f32, mul
from ..compile import jit
from ..reference import glu as reference
from .elementwise import over_binary
from .parallel import over_rows


@jit
def swiglu_oai_rows(first, last, g, u, alpha, limit, out):
    for row in range(first, last):
        gate, up, o = g[row], u[row], out[row]
        for column in range(gate.shape[0]):
            a, b = gate[column], up[column]
            a = limit if a > limit else a
            b = limit if b > limit else -limit if b < -limit else b
            o[column] = mul(div(a, add(f32(1), exp(mul(-alpha, a)))), add(b, f32(1)))


swiglu_oai_arrays = over_rows(swiglu_oai_rows)  # as of kernels/reference
geglu = partial(reference.geglu, kernel=over_binary("geglu"))
reglu = partial(reference.reglu, kernel=over_binary("reglu"))
swiglu_oai = partial(reference.swiglu_oai, kernel=swiglu_oai_arrays)
