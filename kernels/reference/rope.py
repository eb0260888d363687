"""Rotary embedding by a table of cosines and sines (numerics, section 6)."""
from functools import partial

from ..arith import add, mul, sub
from ..compile import jit


@jit
def rope_arrays(x, pos, table, neox, out):
    """x, out: f32 [n, heads, dim]; pos: i32 [n]; table: f32 [n_ctx, R / 2, 2] of (cos, sin).
    Pair i is channels (i, i + R / 2) if neox, else (2i, 2i + 1); channels R..dim-1 are copied."""
    n, heads, dim = x.shape
    half = table.shape[1]
    for token in range(n):
        for head in range(heads):
            for i in range(half):
                first, second = (i, i + half) if neox else (2 * i, 2 * i + 1)
                a, b = x[token, head, first], x[token, head, second]
                c, s = table[pos[token], i, 0], table[pos[token], i, 1]
                out[token, head, first] = sub(mul(a, c), mul(b, s))
                out[token, head, second] = add(mul(a, s), mul(b, c))
            for channel in range(2 * half, dim):
                out[token, head, channel] = x[token, head, channel]


def rope(call, kernel=rope_arrays):
    """Pairs of channels turned by the angles of their positions. x, out: f32 [n, heads * dim]; pos: i32 [n]; table: f32 [n_ctx,
    R / 2, 2]."""
    return partial(kernel, call.x.heads(call.n_head), call.pos.data, call.table.data, call.neox, call.out.heads(call.n_head))
