"""out = act(gate x + its bias) * (up x + its bias) with the matrices of experts: rows are sorted by expert once, and both
products stay in that order."""
import numpy as np

from ..arith import f32
from .experts import add_rows
from .glu import swiglu_oai_arrays
from .mul_mat_glu import glu_in_place
from .mul_mat_id import sort_rows, sorted_product


def scratch(call):
    return "f32", call.out.shape


def mul_mat_id_glu(call):
    """out = the gated unit of two products with the matrices of experts, and their biases. gate, up: tiles [X, m, k]; x: act or
    f32 [n b, k]; ids: i32 [n, u]; biases: f32 [X, m], or none; out: f32 [n u, m]. The step raises IndexError for an id that is
    not an expert."""
    ids, out, up = call.ids.data, call.out.data, call.scratch.data
    matrices = [(sorted_product(w.dtype), w.data.reshape(w.shape[0], -1)) for w in (call.gate, call.up)]
    biases = () if call.gate_bias is None else (call.gate_bias.data, call.up_bias.data)
    alpha, limit = f32(call.alpha), f32(call.limit)

    def run():
        order, bounds, rows = sort_rows(call.x.factors, ids, call.gate.shape[0], call.name)
        gate = np.empty_like(out)
        for (product, words), result in zip(matrices, (gate, up)):
            product(words, rows, bounds, result)
        for result, bias in zip((gate, up), biases):
            add_rows(result, bias, ids.reshape(-1)[order], result)
        if call.act == "swiglu_oai":
            swiglu_oai_arrays(gate, up, alpha, limit, gate)
        else:
            glu_in_place(call.act, False)(gate, up)
        out[order] = gate
    return run
