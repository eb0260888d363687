"""Softmax of each row (numerics, section 9). One warp a row, the row in its registers."""
from functools import lru_cache

from numba import cuda

from ..reference.soft_max import MINUS_INFINITY
from .argmax import MAGNITUDE, order
from .launch import factory
from .ptx import add, as_f32, device, div, exp, f32, i32, redux_max, sub
from .rms_norm import halve128
from .warp_row import VALUES, check_rows, n_values, whole_row_kernel


@device
def of_order(r):
    """The float of an integer that `order` gave, +0 for both zeros."""
    return as_f32(r if r >= 0 else i32(r ^ MAGNITUDE))


@lru_cache(None)
def soft_max_row(n):
    @device
    def soft_max(v, n_cols, lane):
        """A row's values become those of its softmax, +0 behind the last column."""
        partial = cuda.local.array(4, f32)  # lane, lane + 32, lane + 64, lane + 96
        m = MINUS_INFINITY
        for i in range(n):
            m = v[i] if i32(lane + 32 * i) < n_cols and v[i] > m else m
        m = of_order(redux_max(order(m)))
        for i in range(4):
            partial[i] = f32(0)
        for i in range(n):
            e = exp(sub(v[i], m))
            v[i] = e if i32(lane + 32 * i) < n_cols else f32(0)
            partial[i & 3] = add(partial[i & 3], v[i])
        total = halve128(partial[0], partial[1], partial[2], partial[3], lane)
        for i in range(n):
            v[i] = div(v[i], total)
    return soft_max


@factory([(n,) for n in VALUES])
def soft_max_kernel(n):
    return whole_row_kernel(n, soft_max_row(n))


def check(call):
    check_rows(call.x)


def soft_max(call):
    """out = exp(x - max(x)) / sum(exp(x - max(x))) of each row. x, out: f32 [n, k], one memory or apart, k up to 512."""
    n, k = call.x.shape
    return call.device.launch(soft_max_kernel(n_values(k)), n, 32, (call.x.data, call.out.data, k))
