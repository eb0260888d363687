"""Which experts a token is sent to, and how much each counts: one pass over a row that keeps its largest values in order."""
from functools import partial

import numpy as np

from ..arith import add, div, f32
from ..compile import jit
from ..reference import routing as reference
from ..reference.dispatch import check_ids
from ..reference.routing import MINUS_INFINITY, SMALLEST_SUM, rank_value
from .parallel import over_rows


@jit
def keep_largest(x, values, ids):
    """The columns of the largest values, in order. x: f32 [k]; ids: i32 [count], count <= k; values: f32 [count],
    receives what they are ranked by."""
    count = 0
    for column in range(x.shape[0]):
        value = rank_value(x[column])
        if count == ids.shape[0] and not value > values[count - 1]:
            continue
        place = count if count < ids.shape[0] else count - 1
        while place > 0 and value > values[place - 1]:  # equal ones stay where they are: the lower column is before
            values[place], ids[place] = values[place - 1], ids[place - 1]
            place -= 1
        values[place], ids[place] = value, column
        count = min(count + 1, ids.shape[0])


@jit
def top_k_rows(first, last, x, ids):
    values = np.empty(ids.shape[1], np.float32)
    for row in range(first, last):
        keep_largest(x[row], values, ids[row])


@jit
def mask_groups_rows(first, last, x, n_group, n_group_used, out):
    size = x.shape[1] // n_group
    score, values, columns = np.empty(n_group, np.float32), np.empty(2, np.float32), np.empty(2, np.int32)
    top, groups = np.empty(n_group_used, np.float32), np.empty(n_group_used, np.int32)
    for row in range(first, last):
        for group in range(n_group):
            keep_largest(x[row, group * size:(group + 1) * size], values, columns)
            score[group] = add(values[0], values[1])
        keep_largest(score, top, groups)
        out[row] = MINUS_INFINITY
        for i in range(n_group_used):
            chosen = slice(groups[i] * size, (groups[i] + 1) * size)
            out[row, chosen] = x[row, chosen]


@jit
def take_rows(first, last, x, ids, out):
    for row in range(first, last):
        for rank in range(ids.shape[1]):
            out[row, rank] = x[row, ids[row, rank]]


@jit
def normalize_rows(first, last, x, out):
    for row in range(first, last):
        total = f32(0)
        for rank in range(x.shape[1]):
            total = add(total, x[row, rank])
        total = SMALLEST_SUM if total < SMALLEST_SUM else total
        for rank in range(x.shape[1]):
            out[row, rank] = div(x[row, rank], total)


take = over_rows(take_rows)  # (x f32 [n, k], ids i32 [n, u], out f32 [n, u])


def take_columns_arrays(x, ids, out, name):
    check_ids(ids, x.shape[1], name)
    take(x, ids, out)


top_k = partial(reference.top_k, kernel=over_rows(top_k_rows))
mask_groups = partial(reference.mask_groups, kernel=over_rows(mask_groups_rows))
take_columns = partial(reference.take_columns, kernel=take_columns_arrays)
normalize = partial(reference.normalize, kernel=over_rows(normalize_rows))
