"""Products with experts: rows are sorted by expert, each expert's are a dense product of `mul_mat`; threads share the units,
(expert, row tile, columns)."""
from functools import lru_cache, partial

import numpy as np

from ...quant.activation import SUM_COLUMNS
from ...quant.device_functions import inlined
from ...quant.formats import CHUNK, format_of
from ..compile import jit
from ..reference.dispatch import check_ids, sort_by_expert
from ..reference.mul_mat_id import rows_of_pairs
from ..threads import sharing
from .limbs import LIMB_ROW, TILE_COLUMNS, split_arrays
from .mul_mat import UNPACKING, call as call_unit, compiled_unit, limbs_of, operands_in, operands_of, parts, parts_of, tiles_for
from .parallel import PART, over_rows
from .quantized_products import CHUNK_PAIRS
from .scratch import arrays_in, memory_of
from .unpack import ROWS
from .vector import advance


@inlined
def quantized_part(operands, words, first, last):
    """What a unit of `mul_mat` takes: of the matrix from word `words` on, and the rows first..last - 1."""
    w, q, d, sums, limbs, out, chunk_bytes, n_last, _, n_chunks, m = operands
    block = first * n_chunks
    return (advance(w, words), advance(q, block * CHUNK_PAIRS), advance(d, block), advance(sums, block * (CHUNK // SUM_COLUMNS)),
            advance(limbs, first * LIMB_ROW), advance(out, first * m), chunk_bytes, n_last, last - first,
            n_chunks, m)


@inlined
def float_part(operands, words, first, last):
    w, x, out, _, k, m = operands
    return advance(w, words), advance(x, first * k), advance(out, first * m), last - first, k, m


@lru_cache(None)
def runner(is_quantized):
    """(addresses of a unit of few rows and of one of many, operands i64 of a unit with the words of all experts and sorted rows,
    words of an expert, bounds i64 [X + 1]): all products, in parallel where that pays."""
    part, operands_at = quantized_part if is_quantized else float_part, operands_in(is_quantized)

    @inlined
    def units_of_part(i, args):
        few, many, operands, bounds, ends, n_words, n_parts = args
        n_units, expert = ends[ends.shape[0] - 1], 0
        for u in range(i * n_units // n_parts, (i + 1) * n_units // n_parts):
            while u >= ends[expert]:
                expert += 1
            first, unit = ends[expert - 1] if expert else 0, many if bounds[expert + 1] - bounds[expert] >= TILE_COLUMNS else few
            call_unit(unit, part(operands, expert * n_words, bounds[expert], bounds[expert + 1]), u - first)

    each = sharing(units_of_part)

    @jit(key=is_quantized, parallel=True)
    def run(control, few, many, words, n_words, bounds):
        operands = operands_at(words, 0)
        n, k, m = operands[-3], operands[-2] * (CHUNK if is_quantized else 1), operands[-1]
        n_tiles, n_expert = (m + ROWS - 1) // ROWS, bounds.shape[0] - 1
        ends, n_units = np.empty(n_expert, np.int64), 0  # one past the last unit of each expert
        for expert in range(n_expert):
            n_units += parts(bounds[expert + 1] - bounds[expert]) * n_tiles
            ends[expert] = n_units
        n_parts = parts_of(control, n_units, m * k * (n + UNPACKING * (n_units // max(n_tiles, 1))))
        each(control, n_parts, (few, many, operands, bounds, ends, n_words, n_parts))
    return run


def sorted_product(format_name: str, n_expert: int, words, rows: "Sorted", out, isa: str | None = None):
    """step(bounds i64 [X + 1]): of sorted rows, each expert's with its matrix. words: u32, the matrices of all experts; out and
    isa: as of `mul_mat.Products`."""
    tiles = tiles_for(format_of(format_name), len(out), isa)
    units = [compiled_unit(format_name, isa, by) for by in (None, tiles)]
    fmt, words = units[0][1], words.reshape(-1)
    run, n_words = runner(fmt.is_quantized), words.size // n_expert
    (few, *_), (many, *_), operands = *units, np.array(operands_of(fmt, words, rows.x, rows.limbs, out, rows.n_cols))

    def product(bounds):
        run(few, many, operands, n_words, bounds)
    product.kept = words, rows, out, units  # the memory and the code that are named by addresses
    return product


# Rows of x and of results, sorted by expert, lie in the scratch memory of the node: fresh memory would cost more than moving them

@inlined
def take_part(i, args):
    n_parts, parts, x, pairs, order, n = args
    for part in range(len(parts)):
        for row in range(i * n // n_parts, (i + 1) * n // n_parts):
            to, source = parts[part][row], x[part][pairs[order[row]]]
            for word in range(to.shape[0]):
                to[word] = source[word]


take_parts = sharing(take_part)


@jit(parallel=True)
def sort_and_take(control, ids, least, bounds, order, pairs, x, parts):
    """As `sort_by_expert`, then parts[j][i] = x[j][pairs[order[i]]], words u32; without that where an id is not an expert:
    bounds[0] = -1. least: of the ids, 0, or -1 for pairs without an expert, which are the last in the order."""
    for pair in range(ids.shape[0]):
        if ids[pair] < least or ids[pair] >= bounds.shape[0] - 1:
            bounds[0] = -1
            return
    sort_by_expert(ids, bounds, order)
    n = bounds[bounds.shape[0] - 1]
    n_parts = max(1, min(n, n * parts[0].shape[1] // PART))
    take_parts(control, n_parts, (n_parts, parts, x, pairs, order, n))


@jit
def put_rows(first, last, x, rows, out):
    for row in range(first, last):
        a, o = x[row], out[rows[row]]
        for column in range(o.shape[0]):
            o[column] = a[column]


put = over_rows(put_rows)  # (x [n, m], rows i64 [n], out [n, m]): out[rows[i]] = x[i]


def moved(call, weights, n_results: int) -> list:
    """Arrays that a call needs sorted: those of x, a row for each of out, n_results like out, the limbs of x."""
    n, chunks = call.out.n_rows, -(-call.x.n_cols // CHUNK)
    x = ([(np.int16, (n, chunks * CHUNK)), (np.float32, (n, chunks)), (np.int32, (n, chunks * (CHUNK // SUM_COLUMNS)))]
         if call.x.dtype == "act" else [(np.float32, (n, call.x.n_cols))])
    return [*x, *[(np.float32, (n, call.out.n_cols))] * n_results, limbs_of(call, weights, n, least=1)]


class Sorted:
    """The rows of a call in the order of their experts. results: arrays f32 [rows, m] in that order."""

    def __init__(self, call, weights, shape: tuple[int, int], n_results: int = 1):
        """shape: of the ids."""
        *arrays, self.limbs = arrays_in(call.scratch, moved(call, weights, n_results))
        self.x, self.results, self.name = tuple(arrays[:-n_results]), arrays[-n_results:], call.name
        self.n_cols = call.x.n_cols
        self.pairs = rows_of_pairs(len(call.x.factors[0]), *shape)
        self.order = np.empty(len(self.pairs), np.int64)
        self.words = tuple(tuple(array.view(np.uint32) for array in each) for each in (call.x.factors, self.x))

    def sort(self, ids: np.ndarray, n_expert: int, may_skip: bool = False) -> np.ndarray:
        """Takes the rows of x; bounds i64 [X + 1] of the experts. Results of pairs without an expert (-1, where that may be) are
        0, behind the others. IndexError for an id that is not an expert."""
        bounds = np.empty(n_expert + 1, np.int64)
        sort_and_take(ids.reshape(-1), -1 if may_skip else 0, bounds, self.order, self.pairs, *self.words)
        if bounds[0] < 0:
            check_ids(ids, n_expert, self.name, may_skip)
        if self.limbs is not None:
            split_arrays(self.x[0], self.x[2], self.limbs)
        for result in self.results:
            result[bounds[-1]:] = 0
        return bounds


def scratch(call):
    return memory_of(moved(call, [call.w], 1))


def product_with(call, n_expert: int, shape: tuple[int, int], isa: str | None = None, may_skip: bool = False):
    """step(ids i32 `shape`): the products of a call with the matrices w of these experts. isa: as of `mul_mat`. may_skip: ids may
    be -1."""
    rows, out = Sorted(call, [call.w], shape), call.out.rows
    product = sorted_product(call.w.dtype, n_expert, call.w.data, rows, rows.results[0], isa)

    def step(ids):
        product(rows.sort(ids, n_expert, may_skip))
        put(rows.results[0], rows.order, out)
    return step


def mul_mat_id(call):
    """As in kernels/reference."""
    step, ids = product_with(call, call.w.shape[0], call.ids.shape, may_skip=call.may_skip), call.ids.data
    return lambda: step(ids)


def mul_mat_heads(call):
    """As in kernels/reference: row i has the matrix i % H."""
    n_head = call.w.shape[0]
    ids = np.tile(np.arange(n_head, dtype=np.int32), (call.out.n_rows // n_head, 1))
    return partial(product_with(call, n_head, ids.shape), ids)
