"""Which experts a token is sent to, and how much each counts (numerics, section 9)."""
from functools import partial

import numpy as np

from ..arith import add, div, f32
from ..compile import jit
from .dispatch import check_ids

MINUS_INFINITY = f32(-np.inf)
SMALLEST_SUM = f32(2.0**-14)


@jit
def rank_value(x):
    """What x is ranked by: NaN as -infinity."""
    return x if x == x else MINUS_INFINITY


@jit
def largest(x, taken):
    """The first column of the largest value of those that are not taken. x: f32 [k]; taken: bool [k], one false at least."""
    best = -1
    for column in range(x.shape[0]):
        if not taken[column] and (best < 0 or rank_value(x[column]) > rank_value(x[best])):
            best = column
    return best


@jit
def top_k_arrays(x, ids):
    """x: f32 [n, k]; ids: i32 [n, number of columns wanted, at most k]: the columns by value, the largest first,
    of equal ones the lower first."""
    for row in range(x.shape[0]):
        taken = np.zeros(x.shape[1], np.bool_)
        for rank in range(ids.shape[1]):
            best = largest(x[row], taken)
            taken[best], ids[row, rank] = True, best


@jit
def mask_groups_arrays(x, n_group, n_group_used, out):
    """x, out: f32 [n, k]: x in the n_group_used groups of k / n_group columns whose two largest values have the largest sums,
    -infinity in all others."""
    n, k = x.shape
    size = k // n_group
    score = np.zeros(n_group, np.float32)
    for row in range(n):
        for group in range(n_group):
            values = x[row, group * size:(group + 1) * size]
            taken = np.zeros(size, np.bool_)
            first = largest(values, taken)
            taken[first] = True
            score[group] = add(rank_value(values[first]), rank_value(values[largest(values, taken)]))
        out[row] = MINUS_INFINITY
        taken = np.zeros(n_group, np.bool_)
        for _ in range(n_group_used):
            group = largest(score, taken)
            taken[group] = True
            for column in range(group * size, (group + 1) * size):
                out[row, column] = x[row, column]


def take_columns_arrays(x, ids, out, name):
    """out[i, j] = x[i, ids[i, j]]. x: f32 [n, k]; ids: i32 [n, u]; out: f32 [n, u]. IndexError as of `check_ids`."""
    check_ids(ids, x.shape[1], name)
    take(x, ids, out)


@jit
def take(x, ids, out):
    for row in range(ids.shape[0]):
        for rank in range(ids.shape[1]):
            out[row, rank] = x[row, ids[row, rank]]


@jit
def normalize_arrays(x, out):
    """x, out: f32 [n, u]: each row divided by its sum, or by 2^-14 where that is less."""
    for row in range(x.shape[0]):
        total = f32(0)
        for rank in range(x.shape[1]):
            total = add(total, x[row, rank])
        total = SMALLEST_SUM if total < SMALLEST_SUM else total
        for rank in range(x.shape[1]):
            out[row, rank] = div(x[row, rank], total)


def top_k(call, kernel=top_k_arrays):
    """ids = the columns of the k largest values of each row, the largest first, of equal ones the lower first. x: f32 [n, X];
    ids: i32 [n, k]."""
    return partial(kernel, call.x.data, call.ids.data)


def mask_groups(call, kernel=mask_groups_arrays):
    """out = x in the groups that rank first by the sum of their two largest values, -infinity elsewhere. x, out: f32 [n, X]."""
    return partial(kernel, call.x.data, call.n_group, call.n_group_used, call.out.data)


def take_columns(call, kernel=take_columns_arrays):
    """out[i, j] = x[i, ids[i, j]]. x: f32 [n, X]; ids: i32 [n, u]; out: f32 [n, u]. The step raises IndexError as `check_ids`."""
    return partial(kernel, call.x.data, call.ids.data, call.out.data, call.name)


def normalize(call, kernel=normalize_arrays):
    """out = x over the sum of its row, or over 2^-14 where that is less. x, out: f32 [n, u]."""
    return partial(kernel, call.x.data, call.out.data)
