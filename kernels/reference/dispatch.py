"""Sorted dispatch: the (token, rank) pairs of a batch in the order of their experts, those of an expert in their own order,
and back."""
import numpy as np

from ..compile import jit


def check_ids(ids: np.ndarray, n_expert: int, name: str, may_skip: bool = False) -> None:
    """ids: i32 [n, u]. IndexError, which begins with `name`, for the first that is no expert; may_skip: nor -1."""
    least = -1 if may_skip else 0
    if not ids.size or (ids.min() >= least and ids.max() < n_expert):
        return
    token, rank = np.argwhere((ids < least) | (ids >= n_expert))[0]
    raise IndexError(f"{name}: token {token} has expert {ids[token, rank]} at rank {rank}, allowed: {least} to {n_expert - 1}")


@jit
def sort_by_expert(ids, bounds, order):
    """ids: i32 [n_pairs], all of them experts, or -1; bounds: i64 [n_expert + 1]; order: i64 [n_pairs]. Row i, bounds[e] <= i <
    bounds[e + 1], of the sorted ones is the pair order[i] of expert e, in ascending order: counts, their exclusive scan, a stable
    placement. Pairs of -1 are behind the others."""
    bounds[:] = 0
    for pair in range(ids.shape[0]):
        if ids[pair] >= 0:
            bounds[ids[pair] + 1] += 1
    for expert in range(bounds.shape[0] - 1):
        bounds[expert + 1] += bounds[expert]
    free = bounds.copy()
    for pair in range(ids.shape[0]):  # the last place of `free` is for those without an expert: index -1
        order[free[ids[pair]]] = pair
        free[ids[pair]] += 1


@jit
def invert(order, rows):
    """rows[order[i]] = i: the sorted row of each pair. order, rows: i64 [n_pairs]."""
    for i in range(order.shape[0]):
        rows[order[i]] = i
