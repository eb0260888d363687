"""The routing of a token in one: softmax or sigmoid, bias, groups, top_k, weights, one after the other (numerics, section 9)."""
import numpy as np

from .elementwise import add, scale, sigmoid
from .routing import mask_groups, normalize, take, top_k
from .soft_max import soft_max

GATES = {"softmax": soft_max, "sigmoid": sigmoid}


def topk_moe(gating, top_k=top_k):
    """kernel(logits f32 [n, X], bias f32 [X] or of length 0, n_group, n_group_used, norm, factor f32, weights f32 [n, k], ids i32 [n, k]).

    gating: "softmax", "sigmoid" or "softmax_of_chosen"; n_group: up to 1 for none; norm: whether the weights are normalized."""
    def topk_moe(logits, bias, n_group, n_group_used, norm, factor, weights, ids):
        probs, biased, masked = logits, np.empty_like(logits), np.empty_like(logits)
        if gating in GATES:
            probs = np.empty_like(logits)
            GATES[gating](logits, probs)
        chosen_by = probs
        if bias.size:
            add(chosen_by, bias.reshape(1, -1), biased)
            chosen_by = biased
        if n_group > 1:
            mask_groups(chosen_by, n_group, n_group_used, masked)
            chosen_by = masked
        top_k(chosen_by, ids)
        take(probs, ids, weights)
        if gating == "softmax_of_chosen":
            soft_max(weights, weights)
        if norm:
            normalize(weights, weights)
        scale(weights, factor, weights)
    return topk_moe
