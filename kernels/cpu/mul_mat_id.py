"""Products with experts: rows are sorted by expert, each expert's are a dense product of `mul_mat`; threads share the units,
(expert, row tile, columns)."""
from functools import lru_cache, partial

import numpy as np

from ...quant.activation import SUM_COLUMNS
from ...quant.formats import CHUNK
from ..compile import jit
from ..reference.dispatch import check_ids, sort_by_expert
from ..reference.mul_mat_id import rows_of_pairs
from ..threads import sharing
from .mul_mat import PARALLEL, ROWS, UNPACKING, call as call_unit, compiled_unit, inlined, parts
from .parallel import over_rows, take


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
        call_unit(unit, part(arrays, (e, ends.shape[0]), bounds[e], bounds[e + 1]), u - begin)

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
                call_unit(unit, part(arrays, (expert, n_expert), bounds[expert], bounds[expert + 1]), u - start)
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


# Rows of x and of results, sorted by expert, lie in the scratch memory of the node: fresh memory would cost more than moving them

ALIGNMENT = 64


@jit
def put_rows(first, last, x, rows, out):
    for row in range(first, last):
        a, o = x[row], out[rows[row]]
        for column in range(o.shape[0]):
            o[column] = a[column]


put = over_rows(put_rows)  # (x [n, m], rows i64 [n], out [n, m]): out[rows[i]] = x[i]


def moved(call, n_results: int) -> list[tuple[type, tuple[int, int]]]:
    """(dtype, shape) of the arrays that a call needs sorted: those of x, a row for each of out, and n_results like out."""
    n, chunks = call.out.n_rows, -(-call.x.n_cols // CHUNK)
    x = ([(np.int16, (n, chunks * CHUNK)), (np.float32, (n, chunks)), (np.int32, (n, chunks * (CHUNK // SUM_COLUMNS)))]
         if call.x.dtype == "act" else [(np.float32, (n, call.x.n_cols))])
    return [*x, *[(np.float32, (n, call.out.n_cols))] * n_results]


def scratch_for(call, n_results: int) -> tuple[str, tuple[int, ...]]:
    """What `Sorted` needs, as of kernels/call.py."""
    return "u8", (sum(_size(*each) for each in moved(call, n_results)),)


def _size(dtype, shape) -> int:
    return -(-np.dtype(dtype).itemsize * shape[0] * shape[1] // ALIGNMENT) * ALIGNMENT


class Sorted:
    """The rows of a call in the order of their experts. results: arrays f32 [rows, m] in that order."""

    def __init__(self, call, shape: tuple[int, int], n_results: int = 1):
        """shape: of the ids."""
        at, arrays = 0, []
        for dtype, size in moved(call, n_results):
            end = at + np.dtype(dtype).itemsize * size[0] * size[1]
            arrays.append(call.scratch.data[at:end].view(dtype).reshape(size))
            at += _size(dtype, size)
        self.x, self.results = tuple(arrays[:-n_results]), arrays[-n_results:]
        self.factors, self.name = call.x.factors, call.name
        self.rows = rows_of_pairs(len(self.factors[0]), *shape)
        self.order = np.empty(len(self.rows), np.int64)

    def sort(self, ids: np.ndarray, n_expert: int) -> np.ndarray:
        """Takes the rows of x; bounds i64 [X + 1] of the experts. IndexError for an id that is not an expert."""
        check_ids(ids, n_expert, self.name)
        bounds = np.empty(n_expert + 1, np.int64)
        sort_by_expert(ids.reshape(-1), bounds, self.order)
        rows = self.rows[self.order]
        for part, factor in zip(self.x, self.factors):
            take(part, factor, rows)
        return bounds


def scratch(call):
    return scratch_for(call, 1)


def product_with(call, n_expert: int, shape: tuple[int, int], isa: str | None = None):
    """step(ids i32 `shape`): the products of a call with the matrices w of these experts. isa: as of `mul_mat`."""
    product, words = sorted_product(call.w.dtype, isa), call.w.data.reshape(n_expert, -1)
    rows, out = Sorted(call, shape), call.out.rows

    def step(ids):
        product(words, rows.x, rows.sort(ids, n_expert), rows.results[0])
        put(rows.results[0], rows.order, out)
    return step


def mul_mat_id(call):
    """As in kernels/reference."""
    step, ids = product_with(call, call.w.shape[0], call.ids.shape), call.ids.data
    return lambda: step(ids)


def mul_mat_heads(call):
    """As in kernels/reference: row i has the matrix i % H."""
    n_head = call.w.shape[0]
    ids = np.tile(np.arange(n_head, dtype=np.int32), (call.out.n_rows // n_head, 1))
    return partial(product_with(call, n_head, ids.shape), ids)
