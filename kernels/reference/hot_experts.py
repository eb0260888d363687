"""Experts of which some have copies in slots (numerics, section 9): which are asked for there, and whose rows are taken."""
from functools import partial

from ..compile import jit


@jit
def split_ids_arrays(counts, ids, slots, n_slots, hot, cold):
    """counts, slots: i32 [X]; ids, hot, cold: i32 [n u]. An id that is no expert goes to cold as it is."""
    for pair in range(ids.shape[0]):
        expert = ids[pair]
        known = 0 <= expert < slots.shape[0]
        slot = slots[expert] if known else -1
        hot[pair] = slot if slot >= 0 else n_slots
        cold[pair] = -1 if slot >= 0 else expert
        if known:
            counts[expert] += 1


@jit
def pick_rows_arrays(x, y, ids, out):
    """x, y, out: f32 [n u, m]; ids: i32 [n u]."""
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[row, column] = y[row, column] if ids[row] == -1 else x[row, column]


def split_ids(call):
    """hot = slots[ids], n_slots where that is -1; cold = ids where it is, else -1; counts[ids] += 1. counts, slots: i32 [X]; ids,
    hot, cold: i32 [n, u]. An id that is no expert goes to cold as it is."""
    flat = [each.data.reshape(-1) for each in (call.ids, call.hot, call.cold)]
    return partial(split_ids_arrays, call.counts.data, flat[0], call.slots.data, call.n_slots, *flat[1:])


def pick_rows(call, kernel=pick_rows_arrays):
    """out[i u + j] = x[i u + j], or y[i u + j] where ids[i, j] is -1. x, y, out: f32 [n u, m]; ids: i32 [n, u]."""
    return partial(kernel, call.x.data, call.y.data, call.ids.data.reshape(-1), call.out.data)
