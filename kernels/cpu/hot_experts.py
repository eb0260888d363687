"""Experts of which some have copies in slots: which are asked for there, and whose rows are taken."""
from functools import partial

from ..compile import jit
from ..reference import hot_experts as reference
from ..reference.hot_experts import split_ids as split_ids
from .parallel import over_rows


@jit
def pick_some(first, last, x, y, ids, out):
    for row in range(first, last):
        a, o = y[row] if ids[row] == -1 else x[row], out[row]
        for column in range(o.shape[0]):
            o[column] = a[column]


pick_rows = partial(reference.pick_rows, kernel=over_rows(pick_some))
