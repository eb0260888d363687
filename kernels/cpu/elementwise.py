"""Operations of one element each."""
from functools import partial

from .. import arith
from ..compile import jit
from ..reference import elementwise as reference
from .parallel import over_rows


def binary_rows(name, operation):
    """(first, last, x, y, out) of over_rows: out = operation(x, y). x, out: f32 [n, k]; y: the same, or one row for all."""
    @jit(key=name)
    def rows(first, last, x, y, out):
        for row in range(first, last):
            a, b, o = x[row], y[row if y.shape[0] > 1 else 0], out[row]
            for column in range(a.shape[0]):
                o[column] = operation(a[column], b[column])
    return rows


def gated_rows(name, activation):
    """`binary_rows` of activation(x) * y."""
    @jit(key=name)
    def glu(g, u):
        return arith.mul(activation(g), u)
    return binary_rows(name, glu)


BINARY = {"add": binary_rows("add", arith.add), "mul": binary_rows("mul", arith.mul), "swiglu": gated_rows("swiglu", arith.silu),
          "geglu": gated_rows("geglu", arith.gelu), "reglu": gated_rows("reglu", arith.relu)}
add_rows, swiglu_rows = BINARY["add"], BINARY["swiglu"]


@jit
def scale_rows(first, last, x, a, out):
    for row in range(first, last):
        v, o = x[row], out[row]
        for column in range(v.shape[0]):
            o[column] = arith.mul(v[column], a)


@jit
def softcap_rows(first, last, x, c, out):
    for row in range(first, last):
        v, o = x[row], out[row]
        for column in range(v.shape[0]):
            o[column] = arith.mul(c, arith.tanh(arith.div(v[column], c)))


def unary_rows(name, function):
    """(first, last, x, out) of over_rows: out = function(x). x, out: f32 [n, k]."""
    @jit(key=name)
    def rows(first, last, x, out):
        for row in range(first, last):
            v, o = x[row], out[row]
            for column in range(v.shape[0]):
                o[column] = function(v[column])
    return rows


@jit
def squared_relu(x):
    r = arith.relu(x)
    return arith.mul(r, r)


sigmoid_rows, softplus_rows = unary_rows("sigmoid", arith.sigmoid), unary_rows("softplus", arith.softplus)
relu_sqr_rows, gelu_rows = unary_rows("relu_sqr", squared_relu), unary_rows("gelu", arith.gelu)


def over_binary(name):
    return over_rows(BINARY[name], (name,))


add = partial(reference.add, kernel=over_binary("add"))
mul = partial(reference.mul, kernel=over_binary("mul"))
scale = partial(reference.scale, kernel=over_rows(scale_rows))
softcap = partial(reference.softcap, kernel=over_rows(softcap_rows))
swiglu = partial(reference.swiglu, kernel=over_binary("swiglu"))
sigmoid = partial(reference.sigmoid, kernel=over_rows(sigmoid_rows, ("sigmoid",)))
softplus = partial(reference.softplus, kernel=over_rows(softplus_rows, ("softplus",)))
relu_sqr = partial(reference.relu_sqr, kernel=over_rows(relu_sqr_rows, ("relu_sqr",)))
gelu = partial(reference.gelu, kernel=over_rows(gelu_rows, ("gelu",)))
