"""Tensors to float32 on the host: the same unpacking source as every kernel, compiled by numba for the CPU and run over tiles."""
from functools import lru_cache
from math import prod

import numpy as np

from . import tile
from .device_functions import inlined
from .entries import jit
from .formats import CHUNK, check_bytes, format_of
from .interleaved import INTERLEAVED, Interleaved
from .words import f32, primitives

CPU = primitives(inlined)
SLAB_ROWS = 1024  # rows that are packed and dequantized at a time


@lru_cache(None)
def _kernel(name: str):
    """(words, out): float32 rows out of the tiles of one matrix. words: uint32, the tiles; out: float32 [n_rows, n_cols]."""
    fmt = format_of(name)
    levels, sub, group = fmt.unpack(CPU, *tile.loads(fmt, CPU.jit))[:3]
    n_sub, n_group, has_min, tile_words = fmt.sub, fmt.group, fmt.has_min, tile.tile_bytes(fmt) // 4

    @jit(key=name)
    def dequantize_tiles(words, out):
        n_rows, n_cols = out.shape
        n_chunks = (n_cols + CHUNK - 1) // CHUNK
        for row in range(n_rows):
            for first in range(0, n_cols, n_sub):  # a sub-block at a time; blocks are whole sub-blocks
                chunk, col = first // CHUNK, first % CHUNK
                t = (words, (row // tile.ROWS * n_chunks + chunk) * tile_words, row % tile.ROWS)
                w = levels(t, col // 32)
                isc, imin = sub(t, col // n_sub)
                d, m = group(t, col // n_group)
                scale, minimum = d * f32(isc), m * f32(imin)
                for c in range(n_sub):
                    value = scale * f32(np.int8(w[(col + c) % 32 // 4] >> (c % 4 * 8)))
                    out[row, first + c] = value - minimum if has_min else value
    return dequantize_tiles


def dequantize(data: np.ndarray, type_, shape, name: str = "tensor") -> np.ndarray:
    """data: the bytes of a tensor of `shape` (numpy order: rows last) as in the file. type_: also the name of an interleaved one.
    Returns float32 of that shape, the same bits as `gguf.quants.dequantize`. name: the tensor's, for errors."""
    source, shape = INTERLEAVED.get(type_) or format_of(type_, name), tuple(shape)
    fmt = source.plain if isinstance(source, Interleaved) else source
    data = check_bytes(source, data, shape, name)
    if not fmt.is_quantized:
        return _float_values(fmt, data, name).reshape(shape)
    n_rows, n_cols = prod(shape[:-1]), shape[-1]
    out = np.empty((n_rows, n_cols), np.float32)
    kernel = _kernel(fmt.name)
    for first in range(0, n_rows, SLAB_ROWS):
        slab = out[first:first + SLAB_ROWS]
        tiles = tile.pack(data, type_, n_rows, n_cols, name=name, only=(first, first + len(slab)))
        kernel(tiles.reshape(-1).view(np.uint32), slab)
    return out.reshape(shape)


def _float_values(fmt, rows, name):
    if fmt.name == "BF16":
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if fmt.values is None:
        raise ValueError(f"{name}: {fmt.name} is no weight type; dequantize takes float and quantized types")
    if fmt.name == "F16":
        return _halves_to_floats(rows.view("<u2"))
    return rows.view(fmt.dtype).astype(np.float32)


_f16 = CPU.f16


@jit
def _halves_to_floats(halves):
    """float32 [n_rows, n_cols] of float16 held as uint16: numpy takes one at a time."""
    out = np.empty(halves.shape, np.float32)
    for row in range(len(out)):
        for c in range(out.shape[1]):
            out[row, c] = _f16(halves[row, c])
    return out
