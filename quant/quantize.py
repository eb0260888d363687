"""float32 to the file's bytes, of every type that `encode` has an encoder of."""
from math import prod

import numpy as np

from .encode import ENCODERS
from .entries import jit
from .formats import Format, format_of

SLAB_VALUES = 1 << 22   # quantized at a time: 16 MB of float32
LEAST_IMPORTANCE = np.float32(2.0**-24)  # of a column, over the largest: values without importance are quantized among themselves


def quantize(x: np.ndarray, type_: Format | str | int, name: str = "tensor", imatrix: np.ndarray | None = None) -> np.ndarray:
    """x: float32 [..., n_cols] -> uint8 [..., row_bytes], rows as in the file. name: the tensor's, for errors.

    imatrix: float32 [n_cols], how much the squared error of each column counts; [X, n_cols] for stacks, x [X, n_rows, n_cols].
    Without, every column counts the same. The bytes of a row depend on that row and its importance alone: rows may be quantized
    apart, in any order and by several threads (the searches let go of Python's lock).
    """
    fmt = format_of(type_, name)
    if fmt.name not in ENCODERS:
        raise ValueError(f"{name}: cannot quantize to {fmt.name}; types that can: {', '.join(ENCODERS)}")
    x = np.ascontiguousarray(x, np.float32)
    n_cols = x.shape[-1]
    row_bytes = fmt.row_bytes(n_cols, name)
    if fmt.is_quantized and not _are_finite(x.reshape(-1).view(np.uint32)):
        at = np.argwhere(~np.isfinite(x))[0].tolist()
        raise ValueError(f"{name}: {fmt.name} needs finite values, got {x[tuple(at)]} at {at}")
    importance = None if imatrix is None else _importance(imatrix, x.shape, name)
    n_matrices = 1 if importance is None else len(importance)
    if not x.size:
        return np.zeros((*x.shape[:-1], row_bytes), np.uint8)
    matrices = x.reshape(n_matrices, prod(x.shape[:-1]) // n_matrices, n_cols)
    out = np.empty((*matrices.shape[:2], row_bytes), np.uint8)
    n_rows = max(1, SLAB_VALUES // n_cols)
    for m, matrix in enumerate(matrices):
        for first in range(0, len(matrix), n_rows):
            out[m, first:first + n_rows] = ENCODERS[fmt.name](fmt, matrix[first:first + n_rows],
                                                              None if importance is None else importance[m])
    return out.reshape(*x.shape[:-1], row_bytes)


@jit
def _are_finite(bits):
    """bits: uint32, of float32 numbers."""
    largest = np.uint32(0)
    for word in bits:
        largest = max(largest, word & np.uint32(0x7fffffff))
    return largest < np.uint32(0x7f800000)


def _importance(imatrix: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    """float32 [n_matrices, n_cols], the largest of a matrix 1."""
    imatrix, of_one, of_each = np.asarray(imatrix), shape[-1:], (prod(shape[:-2]), shape[-1])
    if imatrix.shape not in (of_one, of_each):
        raise ValueError(f"{name}: the importance matrix of values {shape} must be {of_one} or {of_each}, got {imatrix.shape}")
    weights = imatrix.reshape(-1, shape[-1]).astype(np.float64)
    allowed = np.isfinite(weights) & (weights >= 0)
    if not allowed.all():
        raise ValueError(f"{name}: importances must be finite and not negative, got {weights[~allowed][0]}")
    largest = weights.max(axis=1, keepdims=True, initial=0)
    weights = np.where(largest > 0, weights / np.where(largest > 0, largest, 1), 1).astype(np.float32)
    return np.maximum(weights, LEAST_IMPORTANCE)
