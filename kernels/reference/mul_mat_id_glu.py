"""The gated product of two products with experts, with their biases added to both or to none: mul_mat_id, add_id and the gated unit one after the other."""
from .experts import add_id
from .glu import swiglu_oai
from .mul_mat_glu import GLU
from .mul_mat_id import mul_mat_id


def mul_mat_id_glu(act, gate_type, up_type):
    """kernel(gate words u32 [X, ...], up words, x, ids i32 [n, u], biases, alpha f32, limit f32, out f32 [n u, m], scratch like out, name): words, x and ids
    as of `mul_mat_id`, x a tuple; biases: (gate's, up's), each f32 [X, m], or (); act: "silu", "gelu", "relu", or "swiglu_oai", which alone takes alpha
    and limit. scratch is left with anything in it."""
    gate_product, up_product = mul_mat_id(gate_type), mul_mat_id(up_type)

    def mul_mat_id_glu(gate_words, up_words, x, ids, biases, alpha, limit, out, scratch, name):
        gate_product(gate_words, *x, ids, out, name)
        up_product(up_words, *x, ids, scratch, name)
        for product, bias in zip((out, scratch), biases):
            add_id(product, bias, ids, product, name)
        if act == "swiglu_oai":
            swiglu_oai(out, scratch, alpha, limit, out)
        else:
            GLU[act](out, scratch, out)
    return mul_mat_id_glu
