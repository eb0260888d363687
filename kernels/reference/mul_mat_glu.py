"""The gated product of two matrix products, with biases added to both or to none: mul_mat, add and swiglu, geglu or reglu one after the other."""
from .elementwise import add, swiglu
from .glu import geglu, reglu
from .mul_mat import mul_mat

GLU = {"silu": swiglu, "gelu": geglu, "relu": reglu}


def mul_mat_glu(act, gate_type, up_type):
    """kernel(gate words, up words, x, biases, out f32 [n, m], scratch f32 [n, m]): words and x as of `mul_mat`, x a tuple, (q, d, sums) or (f32 [n, k],);
    biases: (gate's, up's), each f32 [m], or (). scratch is left with anything in it."""
    gate_product, up_product, glu = mul_mat(gate_type), mul_mat(up_type), GLU[act]

    def mul_mat_glu(gate_words, up_words, x, biases, out, scratch):
        gate_product(gate_words, *x, out)
        up_product(up_words, *x, scratch)
        for product, bias in zip((out, scratch), biases):
            add(product, bias.reshape(1, -1), product)
        glu(out, scratch, out)
    return mul_mat_glu
