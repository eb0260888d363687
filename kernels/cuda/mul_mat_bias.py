"""out = w x + bias: one kernel where mmq_few multiplies, else the product, then the addition."""
from ..call import Call
from . import mul_mat
from .elementwise import add, check_grid
from .launch import Launches
from .mmq_few import FewShape, mmq_few_bias


def check(call: Call) -> None:
    mul_mat.check(call)
    check_grid(call.out)


plan, scratch = mul_mat.plan, mul_mat.scratch


def mul_mat_bias(call: Call):
    """out[i] = w x[i] + bias. w, x, out: as of `mul_mat`; bias: f32 [m]."""
    if isinstance(call.plan, FewShape):
        return mmq_few_bias(call)
    return Launches((mul_mat.product(call, call.w, call.out, call.plan), add(call.part("add", x=call.out, y=call.bias,
                                                                                         out=call.out))))
