"""Operations of one element each."""
from .. import arith
from ..compile import jit
from .parallel import over_rows


@jit
def add_rows(first, last, x, y, out):
    for row in range(first, last):
        a, b, o = x[row], y[row if y.shape[0] > 1 else 0], out[row]
        for column in range(a.shape[0]):
            o[column] = arith.add(a[column], b[column])


@jit
def mul_rows(first, last, x, y, out):
    for row in range(first, last):
        a, b, o = x[row], y[row if y.shape[0] > 1 else 0], out[row]
        for column in range(a.shape[0]):
            o[column] = arith.mul(a[column], b[column])


@jit
def scale_rows(first, last, x, a, out):
    for row in range(first, last):
        v, o = x[row], out[row]
        for column in range(v.shape[0]):
            o[column] = arith.mul(v[column], a)


@jit
def swiglu_rows(first, last, g, u, out):
    for row in range(first, last):
        a, b, o = g[row], u[row], out[row]
        for column in range(a.shape[0]):
            o[column] = arith.mul(arith.silu(a[column]), b[column])


@jit
def sigmoid_rows(first, last, x, out):
    for row in range(first, last):
        v, o = x[row], out[row]
        for column in range(v.shape[0]):
            o[column] = arith.sigmoid(v[column])


add = over_rows(add_rows)        # (x f32 [n, k], y f32 [n, k] or [1, k], out)
mul = over_rows(mul_rows)        # the same
scale = over_rows(scale_rows)    # (x, a f32, out)
swiglu = over_rows(swiglu_rows)  # (g, u, out)
sigmoid = over_rows(sigmoid_rows)  # (x, out)
