"""Operations of one element each (numerics, section 5). f32 [n, k] throughout; y of add and mul may be one row, [1, k],
for all tokens."""
from functools import partial

from .. import arith
from ..arith import f32
from ..compile import jit


@jit
def add_arrays(x, y, out):
    for token in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[token, column] = arith.add(x[token, column], y[token if y.shape[0] > 1 else 0, column])


@jit
def mul_arrays(x, y, out):
    for token in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[token, column] = arith.mul(x[token, column], y[token if y.shape[0] > 1 else 0, column])


@jit
def scale_arrays(x, a, out):
    """out = x * a, a: f32."""
    for token in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[token, column] = arith.mul(x[token, column], a)


@jit
def softcap_arrays(x, c, out):
    """out = c * tanh(x / c), c: f32."""
    for token in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[token, column] = arith.mul(c, arith.tanh(arith.div(x[token, column], c)))


@jit
def swiglu_arrays(g, u, out):
    """out = silu(g) * u."""
    for token in range(g.shape[0]):
        for column in range(g.shape[1]):
            out[token, column] = arith.mul(arith.silu(g[token, column]), u[token, column])


@jit
def sigmoid_arrays(x, out):
    for token in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[token, column] = arith.sigmoid(x[token, column])


@jit
def softplus_arrays(x, out):
    for token in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[token, column] = arith.softplus(x[token, column])


@jit
def relu_sqr_arrays(x, out):
    """out = relu(x) squared."""
    for token in range(x.shape[0]):
        for column in range(x.shape[1]):
            r = arith.relu(x[token, column])
            out[token, column] = arith.mul(r, r)


@jit
def gelu_arrays(x, out):
    for token in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[token, column] = arith.gelu(x[token, column])


def add(call, kernel=add_arrays):
    """out = x + y. x, out: f32 [n, k]; y: f32 of x's shape, or [k], one row for all. out may be x or y."""
    return partial(kernel, call.x.rows, call.y.rows, call.out.rows)


def mul(call, kernel=mul_arrays):
    """out = x * y, as `add`."""
    return partial(kernel, call.x.rows, call.y.rows, call.out.rows)


def scale(call, kernel=scale_arrays):
    """out = x * factor. x, out: f32 [n, k]."""
    return partial(kernel, call.x.rows, f32(call.factor), call.out.rows)


def softcap(call, kernel=softcap_arrays):
    """out = cap * tanh(x / cap). x, out: f32 [n, k]."""
    return partial(kernel, call.x.rows, f32(call.cap), call.out.rows)


def swiglu(call, kernel=swiglu_arrays):
    """out = silu(gate) * up. f32 [n, k] each."""
    return partial(kernel, call.gate.rows, call.up.rows, call.out.rows)


def sigmoid(call, kernel=sigmoid_arrays):
    """out = 1 / (1 + exp(-x)). x, out: f32 [n, k]."""
    return partial(kernel, call.x.rows, call.out.rows)


def softplus(call, kernel=softplus_arrays):
    """out = log(1 + exp(x)), x above 20. x, out: f32 [n, k]."""
    return partial(kernel, call.x.rows, call.out.rows)


def relu_sqr(call, kernel=relu_sqr_arrays):
    """out = relu(x) * relu(x). x, out: f32 [n, k]."""
    return partial(kernel, call.x.rows, call.out.rows)


def gelu(call, kernel=gelu_arrays):
    """out = x / 2 * (1 + tanh(0.7979 (x + 0.0447 x^3))). x, out: f32 [n, k]."""
    return partial(kernel, call.x.rows, call.out.rows)
