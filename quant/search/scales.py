"""Scales: how they are stored, and the integer scales under them."""
import math

import numpy as np

from ..device_functions import device
from .vectors import WIDTH, at, largest_lane, magnitude, repeated, where_less

HALF, ANY = -1, -2  # how d is rounded, in place of the number of allowed values
LARGEST_HALF = 65504.0


@device
def power_of_two(x, first, n):
    """The least power of two that is larger than the magnitudes of the values first .. first + n; 1 for zeros."""
    vector, most = repeated(np.float32(0)), np.float32(0)
    for c in range(n // WIDTH):
        here = magnitude(at(x, first + c * WIDTH))
        vector = where_less(vector, here, here, vector)
    for c in range(first + n // WIDTH * WIDTH, first + n):
        most = max(most, abs(x[c]))
    largest = float(max(most, largest_lane(vector)))
    return 2.0 ** math.frexp(largest)[1] if largest > 0.0 else 1.0


@device
def as_half(x):
    """x as a float16 has it, nearest even; no infinities."""
    if abs(x) < 2.0**-14:
        return (x + 1.5 * 2.0**28) - 1.5 * 2.0**28
    c = x * (2.0**42 + 1)
    return min(max(c - (c - x), -LARGEST_HALF), LARGEST_HALF)


@device
def rounded(d, allowed):
    """d as it is stored. allowed: ascending positive values, else one that is HALF or ANY."""
    if allowed[0] == HALF:
        return as_half(d)
    if allowed[0] == ANY:
        return float(np.float32(d))
    i = np.searchsorted(allowed, abs(d))
    if i > 0 and (i == len(allowed) or abs(d) - allowed[i - 1] <= allowed[i] - abs(d)):
        i -= 1
    return allowed[i]


@device
def nearest_scale(scale, d, first, step, n_scales):
    """j of the integer scale first + step j that is nearest to scale / d."""
    return int(min(max(np.floor((scale / d - first) / step + 0.5), 0.0), n_scales - 1.0)) if d != 0.0 else 0
