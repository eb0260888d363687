"""The products of three matrices, such as those of Q, K and V, with one x, and their biases: one kernel where mmq_few takes all
of them, else one after the other."""
from ..call import Call
from .elementwise import add, check_grid
from .launch import Launches
from .mmq_few import FewShape, mmq_few_qkv, qkv_shape
from .mul_mat import check_sizes, limits, mul_mat_shape, product
from .operands import is_quantized, qkv_of


def check(call: Call) -> None:
    names, n_rows, *_ = qkv_of(call)
    is_quantized(call.op, names)
    for rows in n_rows:
        check_sizes(rows, call.x.n_cols, call.x.n_rows)


def plan(call: Call) -> FewShape | None:
    """Of the one kernel; None where the products are computed one after the other."""
    names, n_rows, *_ = qkv_of(call)
    (n, n_cols), device = call.x.shape, limits(call.device)
    if all(isinstance(mul_mat_shape(name, rows, n_cols, n, *device), FewShape) for name, rows in zip(names, n_rows)):
        return qkv_shape(names, n_rows, n_cols, n, *device[:2])
    for out in (call.q_out, call.k_out, call.v_out):
        check_grid(out)  # of the biases' additions
    return None


def mul_mat_qkv(call: Call):
    """q_out, k_out, v_out = q x + q_bias, k x + k_bias, v x + v_bias.

    q, k, v: tiles of weights [m, k], each of its own m, on 16 bytes, all quantized or all float; x: as of `mul_mat`; biases:
    f32 [m], or none is there; results: f32 [n, m]."""
    if call.plan is not None:
        return mmq_few_qkv(call)
    parts = (call.q, call.q_bias, call.q_out), (call.k, call.k_bias, call.k_out), (call.v, call.v_bias, call.v_out)
    products = [product(call, w, out) for w, _, out in parts]
    return Launches((*products, *(add(call.part("add", x=out, y=bias, out=out)) for _, bias, out in parts if bias is not None)))
