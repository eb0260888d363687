"""The routing of a token in one, a row at a time, so that it stays in the cache."""
from functools import lru_cache, partial

import numpy as np

from ..arith import f32
from ..compile import jit
from .elementwise import add_rows, scale_rows, sigmoid_rows
from .parallel import over_rows
from .routing import mask_groups_rows, normalize_rows, take_rows, top_k_rows
from .soft_max import soft_max_rows


@lru_cache(None)
def topk_moe_arrays(gating: str, bias_of: str = "choice"):
    """kernel(logits f32 [n, X], bias f32 [X] or of length 0, n_group, n_group_used, norm, factor f32, weights f32 [n, k],
    ids i32 [n, k])."""
    is_softmax, is_sigmoid, of_chosen = gating == "softmax", gating == "sigmoid", gating == "softmax_of_chosen"
    of_logits = bias_of == "logits"

    @jit(key=(gating, bias_of))
    def topk_moe_rows(first, last, logits, bias, n_group, n_group_used, norm, factor, weights, ids):
        shape = 1, logits.shape[1]
        probs, biased, masked = np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty(shape, np.float32)
        for row in range(first, last):
            x, w, chosen = logits[row:row + 1], weights[row:row + 1], ids[row:row + 1]
            if of_logits and bias.size:
                add_rows(0, 1, x, bias.reshape(1, -1), biased)
                x = biased
            if is_softmax:
                soft_max_rows(0, 1, x, probs)
            elif is_sigmoid:
                sigmoid_rows(0, 1, x, probs)
            else:
                probs[:] = x
            by = probs
            if not of_logits and bias.size:
                add_rows(0, 1, by, bias.reshape(1, -1), biased)
                by = biased
            if n_group > 1:
                mask_groups_rows(0, 1, by, n_group, n_group_used, masked)
                by = masked
            top_k_rows(0, 1, by, chosen)
            take_rows(0, 1, probs, chosen, w)
            if of_chosen:
                soft_max_rows(0, 1, w, w)
            if norm:
                normalize_rows(0, 1, w, w)
            scale_rows(0, 1, w, factor, w)
    return over_rows(topk_moe_rows, (gating, bias_of))


def topk_moe(call):
    """weights and ids of the k experts that each row of logits is sent to. logits: f32 [n, X]; bias: f32 [X] or absent;
    weights: f32, ids: i32 [n, k]."""
    bias = np.empty(0, np.float32) if call.bias is None else call.bias.data
    return partial(topk_moe_arrays(call.gating, call.bias_of), call.logits.data, bias, call.n_group, call.n_group_used, call.norm,
                   f32(call.factor), call.weights.data, call.ids.data)
