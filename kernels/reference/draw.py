"""A draw of one of the largest values of each row (numerics, section 5), in float64."""
from functools import partial

import numpy as np

from ..compile import jit
from ..exp64 import Operations, exponential


@jit
def add(a, b):
    return a + b


@jit
def sub(a, b):
    return a - b


@jit
def mul(a, b):
    return a * b


@jit
def rint(a):
    return np.rint(a)


@jit
def d2i(a):
    return np.int32(a)


@jit
def power(n):
    return np.int64((np.int64(n) + 1023) << 52).view(np.float64)


exp = exponential(jit(key="cpu"), Operations(add, sub, mul, rint, d2i, power))


@jit
def tree_sum(x):
    """As `base.exact_math.tree_sum`. x: float64 [n], overwritten."""
    n = len(x)
    while n > 1:
        m = (n + 1) // 2
        for i in range(n - m):
            x[i] += x[m + i]
        n = m
    return x[0]


@jit
def draw_row(l, temperature, top_p, min_p, u):
    """Which of the values l, float64 [k], in falling order, none NaN, is drawn; of temperature 0 the first."""
    if temperature == 0:
        return 0
    d, p = np.empty(len(l)), np.empty(len(l))
    for j in range(len(l)):
        d[j] = 0.0 if l[j] == l[0] else l[j] - l[0]
        p[j] = exp(d[j])
    total, n = tree_sum(p.copy()), len(l)
    for j in range(len(l)):
        p[j] /= total
    if top_p < 1:
        cumulative = 0.0
        for j in range(len(l)):
            cumulative += p[j]
            if cumulative >= top_p:
                n = j + 1
                break
    for j in range(n):
        if p[j] < min_p * p[0]:
            n = j
            break
    cumulative = 0.0
    for j in range(n):
        p[j] = exp(d[j] / temperature)
        cumulative += p[j]
    bound, cumulative = u * cumulative, 0.0
    for j in range(n):
        cumulative += p[j]
        if cumulative > bound:
            return j
    return n - 1


@jit
def draw_rows(first, last, x, settings, out):
    """x: f32 [n, k]; settings: f64 [n, 5], `draws.SETTINGS`; out: i32 [n], -1 where a value is NaN. Rows first .. last - 1."""
    for row in range(first, last):
        top_k = min(int(settings[row, 0]), x.shape[1])
        ids, l, n, is_nan = np.empty(top_k, np.int32), np.empty(top_k), 0, False
        for column in range(x.shape[1]):
            value = np.float64(x[row, column])
            is_nan = is_nan or value != value
            if n < top_k or value > l[n - 1]:
                n = min(n + 1, top_k)
                at = n - 1
                while at > 0 and value > l[at - 1]:
                    l[at], ids[at] = l[at - 1], ids[at - 1]
                    at -= 1
                l[at], ids[at] = value, column
        if is_nan:
            out[row] = -1
        else:
            out[row] = ids[draw_row(l, settings[row, 1], settings[row, 2], settings[row, 3], settings[row, 4])]


@jit
def draw_arrays(x, settings, out):
    draw_rows(0, x.shape[0], x, settings, out)


def draw(call, kernel=draw_arrays):
    """out[i] = a column of the top_k largest values of x[i], drawn by settings[i] (`draws.SETTINGS`), -1 where a value is NaN.
    x: f32 [n, k]; settings: f64 [n, 5]; out: i32 [n]."""
    return partial(kernel, call.x.data, call.settings.data, call.out.data)
