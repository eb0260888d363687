"""out = act(gate x + its bias) * (up x + its bias) with the matrices of experts: rows are sorted by expert once, and both
products stay in that order."""
from ..arith import f32
from .experts import add_rows
from .glu import swiglu_oai_arrays
from .mul_mat_glu import glu_in_place
from .mul_mat_id import Sorted, moved, put, sorted_product
from .scratch import memory_of


def scratch(call):
    return memory_of(moved(call, (call.gate, call.up), 2))


def mul_mat_id_glu(call):
    """out = the gated unit of two products with the matrices of experts, and their biases. gate, up: tiles [X, m, k]; x: act or
    f32 [n b, k]; ids: i32 [n, u]; biases: f32 [X, m], or none; out: f32 [n u, m]. The step raises IndexError for an id that is
    not an expert; may_skip: for -1 both products are 0, without a bias."""
    ids, n_expert, out = call.ids.data, call.gate.shape[0], call.out.rows
    rows = Sorted(call, (call.gate, call.up), call.ids.shape, 2)
    gate, up = rows.results
    products = [sorted_product(w.dtype, n_expert, w.data, rows, out) for w, out in ((call.gate, gate), (call.up, up))]
    biases = () if call.gate_bias is None else (call.gate_bias.data, call.up_bias.data)
    alpha, limit = f32(call.alpha), f32(call.limit)

    def run():
        bounds = rows.sort(ids, n_expert, call.may_skip)
        for product in products:
            product(bounds)
        for result, bias in zip(rows.results, biases):
            add_rows(result, bias, ids.reshape(-1)[rows.order], result)
        if call.act == "swiglu_oai":
            swiglu_oai_arrays(gate, up, alpha, limit, gate)
        else:
            glu_in_place(call.act, False)(gate, up)
        put(gate, rows.order, out)
    return run
