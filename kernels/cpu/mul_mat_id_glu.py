"""out = act(gate x + its bias) * (up x + its bias) with the matrices of experts: rows are sorted by expert once, and both products stay in that order."""
from functools import lru_cache

import numpy as np

from .experts import add_rows
from .glu import swiglu_oai
from .mul_mat_glu import glu_in_place
from .mul_mat_id import sort_rows, sorted_product


@lru_cache(None)
def mul_mat_id_glu(act: str, gate_type: str, up_type: str):
    """As in kernels/reference."""
    gate_product, up_product = sorted_product(gate_type), sorted_product(up_type)

    def mul_mat_id_glu(gate_words, up_words, x, ids, biases, alpha, limit, out, scratch, name):
        order, bounds, rows = sort_rows(x, ids, len(gate_words), name)
        gate = np.empty_like(out)
        gate_product(gate_words, rows, bounds, gate)
        up_product(up_words, rows, bounds, scratch)
        for product, bias in zip((gate, scratch), biases):
            add_rows(product, bias, ids.reshape(-1)[order], product)
        if act == "swiglu_oai":
            swiglu_oai(gate, scratch, alpha, limit, gate)
        else:
            glu_in_place(act, False)(gate, scratch)
        out[order] = gate
    return mul_mat_id_glu
