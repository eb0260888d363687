"""What comes before and after the products with experts: rows of biases, scales, and the weighted sum."""
from functools import partial

from .. import arith
from ..arith import fma
from ..compile import jit
from ..reference import experts as reference
from ..reference.dispatch import check_ids
from .parallel import over_rows


@jit
def add_id_rows(first, last, x, b, ids, out):
    for row in range(first, last):
        a, bias, o = x[row], b[ids[row]], out[row]
        for column in range(a.shape[0]):
            o[column] = arith.add(a[column], bias[column]) if ids[row] >= 0 else a[column]


@jit
def scale_id_rows(first, last, x, s, ids, out):
    for row in range(first, last):
        a, factor, o = x[row], s[ids[row]], out[row]
        for column in range(a.shape[0]):
            o[column] = arith.mul(a[column], factor) if ids[row] >= 0 else a[column]


@jit
def weighted_sum_rows(first, last, x, w, out):
    for token in range(first, last):
        total = out[token]
        total[:] = 0
        for rank in range(x.shape[1]):
            value, weight = x[token, rank], w[token, rank]
            for column in range(total.shape[0]):
                total[column] = fma(value[column], weight, total[column])


add_rows = over_rows(add_id_rows)      # (x f32 [n, m], b f32 [X, m], ids i32 [n], out f32 [n, m])
scale_rows = over_rows(scale_id_rows)  # (x f32 [n, m], s f32 [X], ids i32 [n], out f32 [n, m])


def add_id_arrays(x, b, ids, out, name, may_skip):
    check_ids(ids, len(b), name, may_skip)
    add_rows(x, b, ids.reshape(-1), out)


def scale_id_arrays(x, s, ids, out, name, may_skip):
    check_ids(ids, len(s), name, may_skip)
    scale_rows(x, s, ids.reshape(-1), out)


add_id = partial(reference.add_id, kernel=add_id_arrays)
scale_id = partial(reference.scale_id, kernel=scale_id_arrays)
weighted_sum = partial(reference.weighted_sum, kernel=over_rows(weighted_sum_rows))
