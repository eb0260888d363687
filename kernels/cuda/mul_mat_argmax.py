"""out = argmax(w x): where mmq_few multiplies, blocks keep the best row of a tile, and a second launch the best of those; else
the product, then `argmax`."""
from ...quant.tile import ROWS
from ..call import Call, Operand
from . import argmax, mul_mat
from .launch import Launches
from .mmq_few import FewShape, mmq_few_argmax

check = mul_mat.check


def argmax_of(call: Call, data=None) -> Call:
    """Of the product, f32 [n, m], at an address, where it is in memory."""
    return call.part("argmax", x=Operand("f32", (call.x.shape[0], call.w.shape[0]), data), out=call.out)


def plan(call: Call):
    """Of the product. A `FewShape` leaves it in no memory."""
    shape = mul_mat.plan_without_scratch(call)
    if not isinstance(shape, FewShape):
        argmax.check(argmax_of(call))
    return shape


def scratch(call: Call) -> tuple[str, tuple[int]]:
    """A pair of words for each token and row tile; or the product, and behind it the scratch memory of `argmax`."""
    n, n_rows = call.x.shape[0], call.w.shape[0]
    if isinstance(call.plan, FewShape):
        return "i32", (n * -(-n_rows // ROWS) * 2,)
    _, (n_words,) = argmax.scratch(argmax_of(call))
    return "i32", (n * n_rows + n_words,)


def mul_mat_argmax(call: Call):
    """out[i] = the first row r of the largest product of w[r] and x[i], or -1 where one is NaN.

    w, x: as of `mul_mat`; out: i32 [n]; scratch: on 16 bytes, left with anything in it."""
    n, n_rows = call.x.shape[0], call.w.shape[0]
    if isinstance(call.plan, FewShape):
        parts = mmq_few_argmax(call)
        return Launches((parts, argmax.argmax_of_parts(call.device, call.scratch.data, call.out.data, n, -(-n_rows // ROWS))))
    part = argmax_of(call, call.scratch.data)
    part.scratch = part.x.behind(4 * n * n_rows, *argmax.scratch(part))
    return Launches((mul_mat.product(call, call.w, part.x, call.plan), argmax.argmax(part)))
