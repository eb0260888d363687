"""Writes a model's tensors in the types of a plan.

Work is done in slabs of rows, by threads. Slabs are the same for any number of threads, and so are the bytes and the errors.
"""
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import prod, sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..base.errors import UserError
from ..base.exact_math import tree_sum
from ..files.gguf import GGUFFile
from ..files.gguf_writer import write_gguf
from ..quant.dequantize import dequantize
from ..quant.quantize import quantize
from ..quant.squares import squares_of_columns
from .imatrix import ImportanceMatrix
from .plan import Change

SLAB_VALUES = 1 << 19  # arrays that caches hold; and of its time Python needs a thirtieth, which is one thread's at a time
GROUP_ROWS = 8  # slabs begin at multiples, so that they are whole groups of interleaved rows
AHEAD = 2       # slabs for each thread that are made before they can be written


class Slab(NamedTuple):
    """Rows [first, last) of all rows of a tensor, which are of one matrix."""
    change: Change
    matrix: int
    first: int
    last: int


class Result(NamedTuple):
    """rows: uint8, as in the new file. sums: float64 [2], of w e^2 and of w x^2 over the values x and what they are off, e."""
    rows: np.ndarray
    sums: np.ndarray


def slabs(change: Change) -> list[Slab]:
    """None of a tensor that keeps its type."""
    n_cols, n_rows = (*change.tensor.shape, 1)[:2]
    step = max(1, SLAB_VALUES // n_cols // GROUP_ROWS) * GROUP_ROWS
    starts = range(0, prod(change.tensor.shape[1:]), n_rows) if not change.is_copy else ()
    return [Slab(change, start // n_rows, start + first, start + min(first + step, n_rows))
            for start in starts for first in range(0, n_rows, step)]


def quantized(file: GGUFFile, slab: Slab, weights: np.ndarray | None) -> Result:
    """weights: float32 [n_matrices, n_cols], or None: all columns count alike."""
    tensor, type, (first, last) = slab.change.tensor, slab.change.type, (slab.first, slab.last)
    shape, row_bytes = (last - first, tensor.shape[0]), tensor.n_bytes // prod(tensor.shape[1:])
    x = dequantize(file.read(tensor.name, first * row_bytes, last * row_bytes), tensor.type.name, shape, tensor.name)
    of_columns = None if weights is None else weights[slab.matrix]
    try:
        rows = quantize(x, type, tensor.name, of_columns)
    except ValueError as error:  # values that the type cannot have
        raise UserError(f"{file.path}: tensor {error}, in rows {first} to {last - 1}") from None
    squares = squares_of_columns(x, dequantize(rows, type, shape))
    return Result(rows, tree_sum(squares if of_columns is None else squares * of_columns))


def in_order(pool: ThreadPoolExecutor, jobs: Iterator[Callable[[], Result]], most: int) -> Iterator[Result]:
    """The results of jobs, of which at most so many are begun before the first is taken."""
    begun: deque[Future[Result]] = deque()
    for job in jobs:
        begun.append(pool.submit(job))
        if len(begun) >= most:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


def convert(file: GGUFFile, changes: list[Change], keys: Mapping[str, bytes], path: Path,
            imatrix: ImportanceMatrix | None = None, n_threads: int = 1,
            on_tensor: Callable[[Change], None] = lambda change: None) -> tuple[int, dict[str, float]]:
    """Writes the file; returns its size in bytes, and of each tensor that was changed sqrt(sum w e^2 / sum w x^2), w being the
    importance matrix where it has a part in it, else 1. on_tensor: is told of each that is written. UserError for values that a
    type cannot have, and where the file cannot be written; then there is none."""
    found: dict[str, float] = {}

    def jobs() -> Iterator[Callable[[], Result]]:
        for change in changes:
            weights = imatrix.weights(change.tensor) if imatrix is not None and change.imatrix else None
            for slab in slabs(change):
                yield partial(quantized, file, slab, weights)

    def pieces(change: Change) -> Iterator[np.ndarray]:
        """The tensor's bytes in the new file."""
        sums = np.zeros(2)
        if change.is_copy:
            yield file.data(change.tensor.name)
        for _ in slabs(change):
            result = next(results)
            sums += result.sums
            yield result.rows
        if not change.is_copy:
            found[change.tensor.name] = sqrt(sums[0] / sums[1]) if sums[1] else 0.0
        file.release(change.tensor.name)
        on_tensor(change)

    with ThreadPoolExecutor(n_threads) as pool:
        results = in_order(pool, jobs(), AHEAD * n_threads)
        try:
            n_bytes = write_gguf(path, keys, [change.entry for change in changes], map(pieces, changes))
        finally:
            pool.shutdown(cancel_futures=True)
    return n_bytes, found
