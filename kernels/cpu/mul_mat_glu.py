"""out = act(gate x + its bias) * (up x + its bias): both products, then one pass over them in which out takes the place of gate's."""
from functools import lru_cache

from ..arith import add, gelu, mul, relu, silu
from ..compile import jit
from .mul_mat import mul_mat
from .parallel import over_rows

ACTIVATIONS = {"silu": silu, "gelu": gelu, "relu": relu}


@lru_cache(None)
def glu_in_place(act, biased):
    """(gate f32 [n, m], up f32 [n, m], *biases): gate = act(gate) * up. biased: both have theirs added first, gate_bias and up_bias, each f32 [m]."""
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


def mul_mat_glu(act, gate_type, up_type):
    """kernel(gate words, up words, x, biases, out f32 [n, m], scratch f32 [n, m]): words and x as of `mul_mat`, x a tuple, (q, d, sums) or (f32 [n, k],);
    biases: (gate's, up's), each f32 [m], or (). scratch is left with anything in it."""
    gate_product, up_product = mul_mat(gate_type), mul_mat(up_type)

    def mul_mat_glu(gate_words, up_words, x, biases, out, scratch):
        gate_product(gate_words, *x, out)
        up_product(up_words, *x, scratch)
        glu_in_place(act, bool(biases))(out, scratch, *biases)
    return mul_mat_glu
