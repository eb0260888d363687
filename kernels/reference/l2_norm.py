"""y = x / sqrt(sum(x^2) + eps) of heads (numerics, section 10)."""
from functools import partial

from ..arith import add, div, f32, mul, sqrt
from ..compile import jit
from .rms_norm import sum128_of_squares


@jit
def l2_norm_arrays(x, n_head, dim, eps, out):
    """x, out: f32 [n, k]."""
    for token in range(x.shape[0]):
        for head in range(n_head):
            channels = slice(head * dim, (head + 1) * dim)
            r = div(f32(1), sqrt(add(sum128_of_squares(x[token, channels]), eps)))
            for column in range(head * dim, (head + 1) * dim):
                out[token, column] = mul(x[token, column], r)
        for column in range(n_head * dim, x.shape[1]):
            out[token, column] = x[token, column]


def l2_norm(call, kernel=l2_norm_arrays):
    """out = x / sqrt(sum(x^2) + eps) over each of the first n_head runs of dim columns, x behind them. x, out: f32 [n, k]."""
    return partial(kernel, call.x.data, call.n_head, call.dim, f32(call.eps), call.out.data)
