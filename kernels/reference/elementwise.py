"""Operations of one element each (numerics, section 5). f32 [n, k] throughout; y of add and mul may be one row, [1, k], for all tokens."""
from .. import arith
from ..compile import jit


@jit
def add(x, y, out):
    for token in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[token, column] = arith.add(x[token, column], y[token if y.shape[0] > 1 else 0, column])


@jit
def mul(x, y, out):
    for token in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[token, column] = arith.mul(x[token, column], y[token if y.shape[0] > 1 else 0, column])


@jit
def scale(x, a, out):
    """out = x * a, a: f32."""
    for token in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[token, column] = arith.mul(x[token, column], a)


@jit
def swiglu(g, u, out):
    """out = silu(g) * u."""
    for token in range(g.shape[0]):
        for column in range(g.shape[1]):
            out[token, column] = arith.mul(arith.silu(g[token, column]), u[token, column])


@jit
def sigmoid(x, out):
    for token in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[token, column] = arith.sigmoid(x[token, column])
