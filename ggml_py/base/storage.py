"""How tensors lie in memory: plain arrays, cache rows, activation blocks, tiles.
Of activation blocks each kind of device has a layout of its own."""
from dataclasses import dataclass
from math import prod

import numpy as np

from ..quant.activation import split_limbs, split_sums
from ..quant.formats import CHUNK, FORMATS
from ..quant.tile import Tiling

DTYPES: dict[str, np.dtype] = {"f32": np.dtype(np.float32), "i32": np.dtype(np.int32), "i64": np.dtype(np.int64),
                               "u8": np.dtype(np.uint8), "f64": np.dtype(np.float64)}
CACHE_TYPES: dict[str, tuple[int, int, np.dtype]] = {  # block, its bytes, held as
    "f32": (1, 4, np.dtype(np.float32)), "f16": (1, 2, np.dtype(np.uint16)), "q8_0": (32, 34, np.dtype(np.uint8))}
Arrays = tuple[np.ndarray, ...]  # of a tensor on the host: one; q int16, d float32 and sums int32 of activation blocks


@dataclass(frozen=True)
class ActivationLayout:
    """Where the planes of activation blocks lie: two bytes a level (q), a scale a chunk (d), sums over 16 columns (sums).

    order: of the planes. limbs: q is a plane of high limbs and one of low limbs, d is [nc][n], and the limbs of the sums lie
    behind everything, [nc][n][64] (`quant.activation.split_sums`)."""
    name: str
    order: tuple[str, ...] = ("q", "d", "sums")
    limbs: bool = False

    def planes(self, n_rows: int, n_cols: int) -> dict[str, int]:
        """Byte offsets of the planes, and the total as "end"; 64 bytes a chunk for the limbs of sums lie before the end."""
        n_chunks = n_rows * -(-n_cols // CHUNK)
        sizes, found, at = {"q": 2 * CHUNK * n_chunks, "d": -(-4 * n_chunks // 64) * 64, "sums": 64 * n_chunks}, {}, 0
        for plane in self.order:
            found[plane], at = at, at + sizes[plane]
        return {**found, "end": at + 64 * n_chunks}

    def view(self, data: np.ndarray, n_rows: int, n_cols: int) -> Arrays:
        """q [n, nc * 256], d [n, nc], sums [n, nc * 16] as arrays in `data` (uint8, at least "end" bytes). Where q is in limbs,
        its bytes are as they lie."""
        at, n_chunks = self.planes(n_rows, n_cols), -(-n_cols // CHUNK)

        def part(plane, width, dtype):
            return data[at[plane]:at[plane] + n_rows * width * np.dtype(dtype).itemsize].view(dtype).reshape(n_rows, width)
        d = part("d", n_chunks, np.float32)
        d = d.reshape(n_chunks, n_rows).T if self.limbs else d
        return part("q", n_chunks * CHUNK, np.int16), d, part("sums", n_chunks * 16, np.int32)

    def read(self, data: np.ndarray, n_rows: int, n_cols: int) -> Arrays:
        """q, d and sums, q as levels, copied."""
        q, d, sums = self.view(data, n_rows, n_cols)
        if self.limbs:
            high, low = q.view(np.int8).reshape(2, *q.shape)
            q = np.int16(128) * high + low
        return q.copy(), d.copy(), sums.copy()

    def write(self, arrays: Arrays, n_rows: int, n_cols: int) -> np.ndarray:
        """uint8 ["end"]: what `read` gives these arrays of."""
        data = np.zeros(self.planes(n_rows, n_cols)["end"], np.uint8)
        for part, array in zip(self.view(data, n_rows, n_cols), arrays):
            part[...] = array
        if self.limbs:
            q, _, sums = arrays
            limbs, first = split_sums(sums.reshape(n_rows, -1, 16)), self.planes(n_rows, n_cols)["q"]
            data[first:first + 2 * q.size] = np.concatenate([limb.reshape(-1) for limb in split_limbs(q)]).view(np.uint8)
            data[data.size - limbs.size:] = limbs.swapaxes(0, 1).reshape(-1).view(np.uint8)
        return data


LEVELS, LIMBS = ActivationLayout("levels"), ActivationLayout("limbs", limbs=True)
LAYOUTS = {layout.name: layout for layout in (LEVELS, LIMBS)}


def n_bytes(tensor) -> int:
    """Of a tensor's memory, without padding."""
    return bytes_of(tensor.dtype, tensor.shape)


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    if dtype == "act":
        return LEVELS.planes(*shape)["end"]  # as many in every layout
    if dtype in DTYPES:
        return prod(shape) * DTYPES[dtype].itemsize
    if dtype in CACHE_TYPES:
        block, size, _ = CACHE_TYPES[dtype]
        return prod(shape) // block * size
    return Tiling(FORMATS[dtype], shape[-2], shape[-1], prod(shape[:-2])).n_bytes


def as_arrays(data: np.ndarray, dtype: str, shape: tuple[int, ...], layout: str = "") -> Arrays:
    """A tensor's bytes as arrays: of tiles uint32 words, of caches rows of their type, of activation blocks q, d and sums
    (copied).   data: uint8."""
    data = data[:bytes_of(dtype, shape)]
    if dtype == "act":
        return LAYOUTS[layout].read(data, *shape)
    if dtype in DTYPES:
        return data.view(DTYPES[dtype]).reshape(shape),
    if dtype in CACHE_TYPES:
        return data.view(CACHE_TYPES[dtype][2]).reshape(shape[0], -1),
    return data.view(np.uint32),


def as_bytes(arrays: Arrays, dtype: str, shape: tuple[int, ...], layout: str = "") -> np.ndarray:
    """uint8: what `as_arrays` gives these arrays of."""
    if dtype == "act":
        return LAYOUTS[layout].write(arrays, *shape)
    return np.ascontiguousarray(arrays[0]).reshape(-1).view(np.uint8)
