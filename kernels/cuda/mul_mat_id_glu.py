"""out = act(gate x + its bias) * (up x + its bias) with the matrices of experts. Of quantized matrices in one kernel, behind `dispatch` where experts have
more than a few rows; of float ones as two products, then one thread an element, in the place of gate's product."""
from numba import cuda

from .dispatch import dispatch
from .elementwise import GLU, THREADS, grid
from .glu import gated_unit
from .launch import F32, I32, Kernel, Launches, N, check, factory
from .mmq import mmq_id_glu
from .mmq_few_id import mmq_few_id_glu
from .mul_mat_id import FEWEST_TOKENS, check_sizes, float_products, grouped_shape, is_few, likely_rows, own_fault, table_words
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


def mul_mat_id_glu(target, act, gate_type, up_type, gate_words, up_words, x, ids, gate_bias, up_bias, alpha, limit, out, n_expert, n_rows, n_cols, n_tokens,
                   n_used, x_rows_per_token, scratch, fault=None, node=1):
    """act: silu, gelu or relu, or swiglu_oai with the constants alpha and limit. gate_words, up_words, x, ids, out, fault and node: as of `mul_mat_id`, both
    formats quantized or both float; gate_bias, up_bias: addresses of float32 [n_expert, n_rows], or both None; scratch: of int32 [scratch_words], on 16
    bytes, left with anything in it."""
    check("mul_mat_id_glu", act in ACTIVATIONS, "act", act, ", ".join(ACTIVATIONS))
    check("mul_mat_id_glu", act != "swiglu_oai" or limit > 0, "limit", limit, "above 0")
    check("mul_mat_id_glu", (gate_bias is None) == (up_bias is None), "bias", "of one product only", "of both or of none")
    names, n_pairs, n = (gate_type, up_type), n_tokens * n_used, n_tokens * x_rows_per_token
    quantized = check_sizes("mul_mat_id_glu", names, n_expert, n_rows, n_cols, n_pairs, n_used, x_rows_per_token)
    constants = (float(alpha), float(limit)) if act == "swiglu_oai" else (0.0, 0.0)
    fault = own_fault(scratch) if fault is None else fault
    if quantized and is_few(n_expert, n_pairs):
        return mmq_few_id_glu(target, act, names, gate_words, up_words, x, ids, gate_bias, up_bias, alpha, limit, out, n_expert, n_rows, n_cols, n_tokens,
                              n_used, x_rows_per_token, fault, node)
    if quantized:
        shape = grouped_shape(names, likely_rows(n_expert, n_pairs), target.shared_limit, target.warpgroups)
        table = dispatch(target, ids, scratch, n_expert, n_pairs, shape.block.tokens, fault, node)
        return Launches((table, mmq_id_glu(target, act, names, gate_words, up_words, x, scratch, gate_bias, up_bias, constants, out, n_expert, n_rows, n_cols,
                                           n_tokens, n_used, x_rows_per_token, shape)))
    table = dispatch(target, ids, scratch, n_expert, n_pairs, FEWEST_TOKENS, fault, node)
    up = scratch + 4 * table_words(n_expert, n_tokens, n_used)
    products = [float_products(target, name, words, x, ids, result, n_expert, n_rows, n_cols, n, n_pairs, n_used, x_rows_per_token, False)
                for name, words, result in ((gate_type, gate_words, out), (up_type, up_words, up))]
    biased = gate_bias is not None
    args = out, up, *((gate_bias, up_bias) if biased else (out, out)), ids, n_rows, n_expert
    return Launches((table, *products, target.launch(glu_of_experts_kernel(act, biased, *constants), grid("mul_mat_id_glu", n_pairs, n_rows), THREADS, args)))
