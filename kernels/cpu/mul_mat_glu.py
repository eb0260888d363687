"""out = act(gate x + its bias) * (up x + its bias): both products, then one pass over them in which out takes the place of
gate's."""
from functools import lru_cache, partial

import numpy as np

from ..arith import add, gelu, mul, relu, silu
from ..compile import jit
from .mul_mat import limbs_of, products_of
from ..together import steps
from .parallel import over_rows
from .scratch import arrays_in, memory_of

ACTIVATIONS = {"silu": silu, "gelu": gelu, "relu": relu}


@lru_cache(None)
def glu_in_place(act, biased):
    """(gate f32 [n, m], up f32 [n, m], *biases): gate = act(gate) * up. biased: both have theirs added first, gate_bias and
    up_bias, each f32 [m]."""
    activation = ACTIVATIONS[act]

    @jit(key=act)
    def plain_rows(first, last, gate, up):
        for row in range(first, last):
            a, b = gate[row], up[row]
            for column in range(a.shape[0]):
                a[column] = mul(activation(a[column]), b[column])

    @jit(key=act)
    def biased_rows(first, last, gate, up, gate_bias, up_bias):
        for row in range(first, last):
            a, b = gate[row], up[row]
            for column in range(a.shape[0]):
                a[column] = mul(activation(add(a[column], gate_bias[column])), add(b[column], up_bias[column]))
    return over_rows(biased_rows if biased else plain_rows, (act,))


def needed(call) -> list:
    """What up gives, and the limbs of x."""
    return [(np.float32, (call.out.n_rows, call.out.n_cols)), limbs_of(call, (call.gate, call.up))]


def scratch(call):
    return memory_of(needed(call))


def mul_mat_glu(call):
    """out = act(gate x + gate_bias) * (up x + up_bias). gate, up: tiles [m, k]; x: act [n, k], f32 for float weights;
    biases: f32 [m], or none; out: f32 [n, m]."""
    up, limbs = arrays_in(call.scratch, needed(call))
    products = products_of(call, [(call.gate, call.out.data), (call.up, up)], limbs)
    biases = () if call.gate_bias is None else (call.gate_bias.data, call.up_bias.data)
    unit = partial(glu_in_place(call.act, bool(biases)), call.out.data, up, *biases)
    return steps(products, unit)
