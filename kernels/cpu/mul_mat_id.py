"""Products with experts: rows are sorted by expert, each expert's are a dense product of `mul_mat`; threads share the units,
(expert, row tile, columns)."""
from functools import lru_cache, partial

import numpy as np

from ..compile import jit
from ..reference import mul_mat_id as reference
from ..reference.dispatch import check_ids, sort_by_expert
from ..reference.mul_mat_id import rows_of_pairs
from ..threads import sharing
from .mul_mat import PARALLEL, ROWS, UNPACKING, call, compiled_unit, inlined, parts


@inlined
def quantized_part(arrays, expert, first, last):
    """What a unit of `mul_mat` takes, of one expert and its rows."""
    words, q, d, sums, out = arrays
    n_words = words.shape[0] // expert[1]
    return words[expert[0] * n_words:(expert[0] + 1) * n_words], q[first:last], d[first:last], sums[first:last], out[first:last]


@inlined
def float_part(arrays, expert, first, last):
    words, x, out = arrays
    n_words = words.shape[0] // expert[1]
    return words[expert[0] * n_words:(expert[0] + 1) * n_words], x[first:last], out[first:last]


@lru_cache(None)
def runner(is_quantized):
    """(address of a unit, arrays with the words of all experts and sorted rows, out, bounds i64 [X + 1]): all products, in
    parallel where that pays."""
    part = quantized_part if is_quantized else float_part

    @inlined
    def one(u, args):
        unit, arrays, bounds, ends = args
        e = np.searchsorted(ends, u, side="right")
        begin = ends[e - 1] if e else 0
        call(unit, part(arrays, (e, ends.shape[0]), bounds[e], bounds[e + 1]), u - begin)

    each = sharing(one)

    @jit(key=is_quantized, parallel=True)
    def run(control, unit, arrays, out, bounds):
        n_expert = bounds.shape[0] - 1
        n_tiles = (out.shape[1] + ROWS - 1) // ROWS
        ends, n_units, n_parts = np.empty(n_expert, np.int64), 0, 0  # one past the last unit of each expert
        for expert in range(n_expert):
            n = parts(out[bounds[expert]:bounds[expert + 1]])
            n_parts, n_units = n_parts + n, n_units + n * n_tiles
            ends[expert] = n_units
        if out.shape[1] * arrays[1].shape[1] * (out.shape[0] + UNPACKING * n_parts) < PARALLEL:
            expert = 0
            for u in range(n_units):
                while u >= ends[expert]:
                    expert += 1
                start = ends[expert - 1] if expert else 0
                call(unit, part(arrays, (expert, n_expert), bounds[expert], bounds[expert + 1]), u - start)
        else:
            each(control, n_units, (unit, arrays, bounds, ends))
    return run


@lru_cache(None)
def sorted_product(format_name: str, isa: str | None = None):
    """(words u32 [X, words of a matrix], x, bounds i64 [X + 1], out f32 [rows, m]): of sorted rows, each expert's with its
    matrix. isa: as of `mul_mat`."""
    address, fmt, unit = compiled_unit(format_name, isa)
    run = runner(fmt.is_quantized)

    def product(words, x, bounds, out):
        run(address, (words.reshape(-1), *x, out), out, bounds)
    product.unit = unit  # its code is what `address` points at
    return product


def sort_rows(x, ids, n_expert, name):
    """(order, bounds) of `sort_by_expert`, and x, a tuple of arrays, in that order."""
    check_ids(ids, n_expert, name)
    bounds, order = np.empty(n_expert + 1, np.int64), np.empty(ids.size, np.int64)
    sort_by_expert(ids.reshape(-1), bounds, order)
    rows = rows_of_pairs(len(x[0]), *ids.shape)[order]
    return order, bounds, tuple(part[rows] for part in x)


@lru_cache(None)
def mul_mat_id_arrays(format_name: str, isa: str | None = None):
    """kernel(words u32 [X, words of a matrix], *x, ids i32 [n, u], out f32 [n * u, m], name), as in kernels/reference. isa: as of
    `mul_mat`."""
    product = sorted_product(format_name, isa)

    def mul_mat_id(words, *operands):
        *x, ids, out, name = operands
        order, bounds, rows = sort_rows(x, ids, len(words), name)
        result = np.empty_like(out)
        product(words, rows, bounds, result)
        out[order] = result
    return mul_mat_id


def mul_mat_heads_arrays(format_name: str):
    """kernel(words u32 [H, words of a matrix], *x, out f32 [n * H, m]): row i of x with matrix i % H."""
    return reference.mul_mat_heads_arrays(format_name, mul_mat_id_arrays)


mul_mat_id = partial(reference.mul_mat_id, kernel=mul_mat_id_arrays)
mul_mat_heads = partial(reference.mul_mat_heads, kernel=mul_mat_heads_arrays)
