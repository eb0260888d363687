"""Sub-blocks side by side: what vector instructions work on.

A batch of whole groups is laid out as float32 [n_chunks, columns of a sub-block, LANES]: sub-block i of the batch is lane
i % LANES of chunk i // LANES. What there is once a sub-block is [n_chunks, LANES]. Sums run over a lane's columns in their order,
one lane beside the other: the same bits whatever the width of vectors. Values are those of the group over a power of two that is
larger than all of them, so float32 has room for their squares. Lanes behind the last group hold zeros of weight 1.

A search takes WIDTH lanes at a time through all columns (`vectors`). What there is once a sub-block is written flat, all lanes in
one loop: a call for each group, with its views of arrays, costs as much as 1000 columns.
"""
import numpy as np

from ..device_functions import device, inlined
from .scales import power_of_two
from .vectors import magnitude, repeated, where_less

LANES = 64
F0, F1 = np.float32(0), np.float32(1)
LEAST = np.float32(2.0**-60)  # over the group's largest value: a smaller scale stands for none


@device
def n_groups(n_subs):
    """How many groups of n_subs sub-blocks make a batch."""
    return max(1, LANES // n_subs)


@device
def n_chunks(n_subs):
    return (n_groups(n_subs) * n_subs + LANES - 1) // LANES


@device
def of_lanes(shape):
    return np.zeros(shape, np.float32)


@device
def load(x, w, first, n, sub, group, values, weights, units):
    """Groups first .. first + n of the values x (rows one after the other), weights w [n_cols]. Out: values, weights; units:
    float64 [groups of a batch], what the values of a group are multiples of."""
    values[:], weights[:], units[:] = F0, F1, 1.0
    n_subs = group // sub
    for g in range(n):
        start = (first + g) * group
        units[g] = power_of_two(x, start, group)
        of_one, at = 1.0 / units[g], start % len(w)
        for i in range(n_subs):
            h, l = (g * n_subs + i) // LANES, (g * n_subs + i) % LANES
            for c in range(sub):
                values[h, c, l], weights[h, c, l] = np.float32(x[start + i * sub + c] * of_one), w[at + i * sub + c]


@device
def spread(of_groups, n_subs, of_subs):
    """The number of each group for each of its sub-blocks: float64 [lanes of a batch]."""
    for g in range(len(of_groups)):
        for i in range(g * n_subs, (g + 1) * n_subs):
            of_subs[i] = of_groups[g]


@device
def reciprocal(scale):
    """0 for a scale that stands for none."""
    return F1 / scale if abs(scale) > LEAST else F0


@inlined
def reciprocals(scales):
    """Of a vector."""
    return where_less(repeated(LEAST), magnitude(scales), repeated(F1) / scales, repeated(F0))


@inlined
def within(x, low, high):
    """min(max(x, low), high) of vectors."""
    x = where_less(x, low, low, x)
    return where_less(high, x, high, x)
