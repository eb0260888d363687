"""How tensors lie in memory, the same on every backend: plain arrays, cache rows, activation blocks, tiles."""
from math import prod

import numpy as np

from .graph import Tensor
from .quant.formats import CHUNK, FORMATS
from .quant.tile import Tiling

DTYPES = {"f32": np.dtype(np.float32), "i32": np.dtype(np.int32), "i64": np.dtype(np.int64), "u8": np.dtype(np.uint8)}
CACHE_TYPES = {"f32": (1, 4, np.dtype(np.float32)), "f16": (1, 2, np.dtype(np.uint16)), "q8_0": (32, 34, np.dtype(np.uint8))}  # block, its bytes, held as


def activation_planes(n_rows: int, n_cols: int) -> tuple[int, int, int, int]:
    """Byte offsets of the planes of activation blocks (two bytes a level, then d, then sums), and the total with the sums' limbs (of GPUs) behind."""
    n_chunks = n_rows * -(-n_cols // CHUNK)
    d = 2 * CHUNK * n_chunks
    sums = d + -(-4 * n_chunks // 64) * 64
    return 0, d, sums, sums + (64 + 48) * n_chunks


def n_bytes(tensor: Tensor) -> int:
    if tensor.dtype == "act":
        return activation_planes(*tensor.shape)[3]
    if tensor.dtype in DTYPES:
        return prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
    if tensor.dtype in CACHE_TYPES:
        block, size, _ = CACHE_TYPES[tensor.dtype]
        return prod(tensor.shape) // block * size
    return Tiling(FORMATS[tensor.dtype], *tensor.shape[-2:], prod(tensor.shape[:-2])).n_bytes
