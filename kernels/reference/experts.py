"""What comes before and after the products with experts: rows of biases, scales, and the weighted sum (numerics, section 9)."""
from functools import partial

from .. import arith
from ..arith import f32, fma
from ..compile import jit
from .dispatch import check_ids


def add_id_arrays(x, b, ids, out, name, may_skip):
    """out[i u + j] = x[i u + j] + b[ids[i, j]], x where the id is -1. x, out: f32 [n u, m]; b: f32 [X, m]; ids: i32 [n, u].
    IndexError as of `check_ids`."""
    check_ids(ids, len(b), name, may_skip)
    add_rows(x, b, ids.reshape(-1), out)


@jit
def add_rows(x, b, ids, out):
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[row, column] = arith.add(x[row, column], b[ids[row], column]) if ids[row] >= 0 else x[row, column]


def scale_id_arrays(x, s, ids, out, name, may_skip):
    """out[i u + j] = x[i u + j] * s[ids[i, j]], x where the id is -1. x, out: f32 [n u, m]; s: f32 [X]; ids: i32 [n, u].
    IndexError as of `check_ids`."""
    check_ids(ids, len(s), name, may_skip)
    scale_rows(x, s, ids.reshape(-1), out)


@jit
def scale_rows(x, s, ids, out):
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[row, column] = arith.mul(x[row, column], s[ids[row]]) if ids[row] >= 0 else x[row, column]


@jit
def weighted_sum_arrays(x, w, out):
    """out[i] = the sum of x[i, j] * w[i, j] over the ranks j. x: f32 [n, u, m]; w: f32 [n, u]; out: f32 [n, m]."""
    n, u, m = x.shape
    for token in range(n):
        for column in range(m):
            total = f32(0)
            for rank in range(u):
                total = fma(x[token, rank, column], w[token, rank], total)
            out[token, column] = total


def add_id(call, kernel=add_id_arrays):
    """out[i u + j] = x[i u + j] + b[ids[i, j]]. x, out: f32 [n u, m]; b: f32 [X, m]; ids: i32 [n, u].
    The step raises IndexError as `check_ids`."""
    return partial(kernel, call.x.data, call.b.data, call.ids.data, call.out.data, call.name, call.may_skip)


def scale_id(call, kernel=scale_id_arrays):
    """out[i u + j] = x[i u + j] * s[ids[i, j]]. x, out: f32 [n u, m]; s: f32 [X]; ids: i32 [n, u].
    The step raises IndexError as `check_ids`."""
    return partial(kernel, call.x.data, call.s.data, call.ids.data, call.out.data, call.name, call.may_skip)


def weighted_sum(call, kernel=weighted_sum_arrays):
    """out[i] = the sum of x[i u + j] * w[i, j] over the ranks j. x: f32 [n u, m]; w: f32 [n, u]; out: f32 [n, m]."""
    return partial(kernel, call.x.data.reshape(*call.w.shape, call.x.n_cols), call.w.data, call.out.data)
