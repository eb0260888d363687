"""out[token, rank] = the product with the matrix of the expert that the token has at this rank (numerics, section 9)."""
from functools import partial

import numpy as np

from .dispatch import check_ids
from .mul_mat import mul_mat_arrays


def mul_mat_id_arrays(format_name):
    """kernel(words u32 [X, words of a matrix], *x, ids i32 [n, u], out f32 [n * u, m], name, may_skip): x as of `mul_mat`, (q, d,
    sums) or f32 [n * b, k], where b divides u: rank j of token i has row i * b + j % b. IndexError as of `check_ids`."""
    product = mul_mat_arrays(format_name)

    def mul_mat_id(words, *operands):
        *x, ids, out, name, may_skip = operands
        check_ids(ids, len(words), name, may_skip)
        rows = rows_of_pairs(len(x[0]), *ids.shape)
        for pair, expert in enumerate(ids.ravel()):
            row = slice(rows[pair], rows[pair] + 1)
            if expert < 0:
                out[pair] = 0
            else:
                product(words[expert], *(part[row] for part in x), out[pair:pair + 1])
    return mul_mat_id


def mul_mat_heads_arrays(format_name, mul_mat_id=mul_mat_id_arrays):
    """kernel(words u32 [H, words of a matrix], *x, out f32 [n * H, m]): row i of x with matrix i % H."""
    product = mul_mat_id(format_name)

    def mul_mat_heads(words, *operands):
        *x, out = operands
        n_head = len(words)
        ids = np.tile(np.arange(n_head, dtype=np.int32), (len(out) // n_head, 1))
        product(words, *x, ids, out, "mul_mat_heads", False)
    return mul_mat_heads


def rows_of_pairs(n_rows, n, u):
    """int64 [n * u]: the row of x, of n_rows, of each (token, rank) pair."""
    b = n_rows // n if n else 1
    pairs = np.arange(n * u)
    return pairs // u * b + pairs % u % b


def mul_mat_id(call, kernel=mul_mat_id_arrays):
    """out[i u + j] = the product of w[ids[i, j]] with its row of x. w: tiles [X, m, k]; x: act or f32 [n b, k], b a divisor of u;
    ids: i32 [n, u];
    out: f32 [n u, m]. The step raises IndexError for an id that is not an expert; may_skip: for -1 the row is 0."""
    return partial(kernel(call.w.dtype), call.w.data.reshape(call.w.shape[0], -1), *call.x.factors, call.ids.data, call.out.data,
                   call.name, call.may_skip)


def mul_mat_heads(call, kernel=mul_mat_heads_arrays):
    """out[i] = the product of w[i % H] with x[i]. w: tiles [H, m, k]; x: act or f32 [n H, k]; out: f32 [n H, m]."""
    return partial(kernel(call.w.dtype), call.w.data.reshape(call.w.shape[0], -1), *call.x.factors, call.out.data)
