"""The products of three matrices, such as those of Q, K and V, with one x: threads share their units as one job."""
from .elementwise import add
from .mul_mat import limbs_of, products_of
from ..together import steps
from .scratch import arrays_in, memory_of


def scratch(call):
    return memory_of([limbs_of(call, (call.q, call.k, call.v))])


def mul_mat_qkv(call):
    """q_out, k_out, v_out = q x + q_bias, k x + k_bias, v x + v_bias. q, k, v: tiles [m, k], each of its own m; x: act [n, k],
    f32 for float weights; biases: f32 [m], or none is there; results: f32 [n, m]."""
    parts = (call.q, call.q_bias, call.q_out), (call.k, call.k_bias, call.k_out), (call.v, call.v_bias, call.v_out)
    limbs, = arrays_in(call.scratch, [limbs_of(call, (call.q, call.k, call.v))])
    products = products_of(call, [(w, out.data) for w, _, out in parts], limbs)
    return steps(products, *(add(call.part("add", x=out, y=bias, out=out)) for _, bias, out in parts if bias is not None))
