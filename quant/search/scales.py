"""Scales: how they are stored, and the integer scales under them."""
import math

import numba
import numpy as np

HALF, ANY = -1, -2  # how d is rounded, in place of the number of allowed values
LARGEST_HALF = 65504.0
ENTRIES: list = []  # compiled functions that Python calls: `kernels.compile` keeps them on disk as it keeps kernels

# Of functions that only compiled ones call: without wrappers, whose compilation takes as long
device = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def jit(function):
    """numba.njit of a function that Python calls."""
    ENTRIES.append(numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function))
    return ENTRIES[-1]


@device
def power_of_two(x):
    """The least power of two that is larger than all magnitudes; 1 for zeros."""
    largest = 0.0
    for c in range(len(x)):
        largest = max(largest, abs(float(x[c])))
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
