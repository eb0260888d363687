"""out = act(gate x + its bias) * (up x + its bias). Of quantized matrices in one kernel (mmq_few, mmq); of float ones as two
products, then one thread an element, in the place of gate's product."""
from numba import cuda

from ..call import Call
from .elementwise import BINARY, GLU, THREADS, by_element, check_grid, swiglu
from .glu import geglu, reglu
from .launch import F32, Kernel, Launches, N, factory, need
from .mmq import Block, mmq_glu
from .mmq_few import FewShape, mmq_few_glu
from .mmq_half import Halves
from .mul_mat import check_sizes, limits, plan_of, product, quantized_shape
from .operands import addresses, gated_of, is_quantized
from .ptx import add, i64, ld, st

UNITS = {"silu": swiglu, "gelu": geglu, "relu": reglu}
FEWEST_APART = 9  # tokens


@factory([(act,) for act in GLU])
def biased_glu_kernel(act):
    glu = BINARY[GLU[act]]

    def kernel(out, up, gate_bias, up_bias, n_cols):  # blocks as in elementwise
        column = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            i = i64(cuda.blockIdx.x) * n_cols + column
            st(out, i, glu(add(ld(out, i), ld(gate_bias, column)), add(ld(up, i), ld(up_bias, column))))
    return Kernel(kernel, (F32, F32, F32, F32, N), THREADS)


def check(call: Call) -> None:
    need(call.act in GLU, "act", call.act, ", ".join(GLU))
    check_sizes(*call.gate.shape, call.x.shape[0])
    if not is_quantized(call.op, gated_of(call).names):
        check_grid(call.out)


def plan(call: Call) -> FewShape | Block | None:
    """Of the one kernel for gate and up; None for float ones, which have none."""
    names = call.gate.dtype, call.up.dtype
    if not is_quantized(call.op, names):
        return None
    return quantized_shape(names, *call.gate.shape, call.x.shape[0], *limits(call.device))


def scratch(call: Call) -> tuple[str, tuple[int, int]] | None:
    """The product with up, where there are two products."""
    return (call.out.dtype, call.out.shape) if call.plan is None else None


def declines(call: Call) -> bool:
    """Whether gate, up and `swiglu_act` as three launches take less than mul_mat_glu and `quantize`: where warpgroups multiply,
    by mmq or mmq_half, whose registers the totals of two matrices do not fit into (docs/kernels-log.md), and no biases are to be
    added."""
    if call.plan is None or call.act != "silu" or call.gate_bias is not None or call.x.shape[0] < FEWEST_APART:
        return False
    plans = [plan_of(w.dtype, *w.shape, call.x.shape[0], call.device) for w in (call.gate, call.up)]
    return all(isinstance(each, Halves) or (isinstance(each, Block) and each.warpgroups) for each in plans)


def mul_mat_glu(call: Call):
    """out = act(gate x + gate_bias) * (up x + up_bias).

    act: silu, gelu or relu. gate, up: tiles of weights [m, k], on 16 bytes, both quantized or both float; x: as of `mul_mat`;
    gate_bias, up_bias: f32 [m], or neither is there; out: f32 [n, m]; scratch: f32 [n, m], left with anything in it."""
    if call.plan is not None:
        return mmq_glu(call) if isinstance(call.plan, Block) else mmq_few_glu(call)
    out, up = call.out, call.scratch
    products = product(call, call.gate, out), product(call, call.up, up)
    if call.gate_bias is not None:
        args = *addresses(out, up, call.gate_bias, call.up_bias), out.n_cols
        return Launches((*products, by_element(call, biased_glu_kernel(call.act), *args)))
    return Launches((*products, UNITS[call.act](call.part(GLU[call.act], gate=out, up=up, out=out))))
