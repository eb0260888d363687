"""out = act(gate x + its bias) * (up x + its bias) with the matrices of experts. Of quantized matrices in one kernel, behind
`dispatch` where experts have more than a few rows; of float ones as two products, then one thread an element, in the place of
gate's product."""
from numba import cuda

from ..call import Call
from .elementwise import GLU, THREADS, by_element
from .glu import gated_unit
from .launch import F32, I32, Kernel, Launches, N, factory, need
from .mmq import mmq_id_glu
from .mmq_few import FewShape
from .mmq_half import Halves, half_scratch, mmq_half_glu
from .mmq_few_id import mmq_few_id_glu
from .mmvq import mmvq_id
from .mul_mat_id import plan as plan, sorted_pairs, table_words
from .operands import addresses, constants_of, gated_of, late_error as late_error
from .ptx import add, i64, ld, st

ACTIVATIONS = *GLU, "swiglu_oai"


@factory([("silu", False, 0.0, 0.0), ("swiglu_oai", True, 1.702, 7.0)])
def glu_of_experts_kernel(act, biased, alpha, limit):
    unit = gated_unit(act, alpha, limit)

    def kernel(out, up, gate_bias, up_bias, ids, n_cols, n_expert):  # blocks as in elementwise, of pairs
        column, expert = cuda.blockIdx.y * THREADS + cuda.threadIdx.x, ld(ids, cuda.blockIdx.x)
        if column < n_cols and 0 <= expert < n_expert:
            i, bias = i64(cuda.blockIdx.x) * n_cols + column, i64(expert) * n_cols + column
            g, u = ld(out, i), ld(up, i)
            if biased:
                g, u = add(g, ld(gate_bias, bias)), add(u, ld(up_bias, bias))
            st(out, i, unit(g, u))
    return Kernel(kernel, (F32, F32, F32, F32, I32, N, N), THREADS)


def check(call: Call) -> None:
    need(not call.may_skip, "may_skip", call.may_skip, "False: ids are experts")
    need(call.act in ACTIVATIONS, "act", call.act, ", ".join(ACTIVATIONS))
    need(call.act != "swiglu_oai" or call.limit > 0, "limit", call.limit, "above 0")
    if gated_of(call).biased:
        for bias in (call.gate_bias, call.up_bias):
            need(bias.shape[0] == call.gate.shape[0], "rows of a bias", bias.shape[0], f"those of {call.gate.shape[0]} experts")


def scratch(call: Call) -> tuple[str, tuple[int]]:
    """A dispatch table, and behind it the products of up and x of float matrices."""
    if isinstance(call.plan, Halves):
        return half_scratch(call)
    products = call.out.n_rows * call.out.n_cols if call.plan is None else 0
    return "i32", (table_words(call.gate.shape[0], *call.ids.shape) + products,)


def mul_mat_id_glu(call: Call):
    """out[i u + j] = act(gate[e] x[r] + gate_bias[e]) * (up[e] x[r] + up_bias[e]), where e = ids[i, j] and r = i b + j % b.

    act: silu, gelu or relu, or swiglu_oai with alpha and limit. gate, up: as w of `mul_mat_id`, both quantized or both float;
    gate_bias, up_bias: f32 [X, m], or neither is there; x, ids, out, scratch: as of `mul_mat_id`."""
    if isinstance(call.plan, FewShape):
        return mmq_few_id_glu(call)
    if call.plan is not None:
        return Launches((sorted_pairs(call), mmq_half_glu(call) if isinstance(call.plan, Halves) else mmq_id_glu(call)))
    (_, biased, (_, _, *biases)), out, n_expert = gated_of(call), call.out, call.gate.shape[0]
    up = call.scratch.behind(4 * table_words(n_expert, *call.ids.shape), "f32", out.shape)
    parts = [call.part("mul_mat_id", w=w, x=call.x, ids=call.ids, out=result) for w, result in ((call.gate, out), (call.up, up))]
    kernel = glu_of_experts_kernel(call.act, biased, *constants_of(call))
    unit = by_element(call, kernel, *addresses(out, up), *biases, call.ids.data, out.n_cols, n_expert)
    return Launches((sorted_pairs(call), *map(mmvq_id, parts), unit))
