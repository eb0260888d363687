"""The tensors of a model file on its devices, each checked by name, type and shape."""
from collections import Counter
from collections.abc import Mapping
from itertools import dropwhile
from math import prod

import numpy as np

from ..base.errors import UserError
from ..base.placement import HOST, Placement
from ..base.storage import n_bytes
from ..files.gguf import GGUFFile, TensorInfo
from ..graph.graph import Tensor
from ..quant import tile
from ..quant.formats import CHUNK, FORMATS
from .hparams import because

MATRIX_TYPES = tuple(name for name, format in FORMATS.items() if format.planes)  # those that have a tile layout
VECTOR_TYPES = tuple(name for name, format in FORMATS.items() if format.values)  # floats
# Tiles are padded to 32 rows and 256 columns: a file of tiny matrices could take thousands of times its size. Weights may take
# MOST_TIMES as many bytes as the tensors of the file, and SPARE_BYTES.
MOST_TIMES, SPARE_BYTES = 4, 32 << 20


class Paper:
    """A device without memory. What is built on it is checked, and neither read nor computed."""

    def __init__(self, device: str):
        self.device = device

    def empty(self, n_bytes: int) -> None: ...
    def free(self, buffer) -> None: ...


class Weights:
    """The tensors of a file by name, put on their devices when first asked for: matrices as tiles, vectors as float32.

    On `Paper` they have no memory, and vectors for the host are ones.
    """

    def __init__(self, file: GGUFFile, backends: Mapping, placement: Placement):
        """backends: by device, or `Paper` for each."""
        self.file, self.backends, self.placement = file, backends, placement
        self.loaded: dict[tuple, Tensor] = {}
        self.on_paper = any(isinstance(backend, Paper) for backend in backends.values())

    def __contains__(self, name: str) -> bool:
        return name in self.file.tensors

    def __call__(self, name: str, *shape: int, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor `name`, which must have this shape (numpy order): a vector, a matrix or a stack of them. rows: only those
        [first, last) of matrices."""
        key = name, rows
        if key not in self.loaded:
            self.loaded[key] = self._load(name, shape, rows)
        return self.loaded[key]

    def table(self, name: str, n_rows: int, n_cols: int, columns: tuple[int, int] | None = None) -> Tensor:
        """The matrix `name` as float32 rows, not as tiles. columns: only those [first, last)."""
        key = name, "table", columns
        if key not in self.loaded:
            self.loaded[key] = self._float32(name, (n_rows, n_cols), (slice(None), slice(*columns or (None,))))
        return self.loaded[key]

    def vector(self, name: str, n: int) -> np.ndarray:
        """float32 [n] on the host."""
        return self._values(name, (n,))

    def _info(self, name: str, shape: tuple[int, ...], types: tuple[str, ...]) -> TensorInfo:
        """The tensor's entry in the file, of this shape (numpy order; ones in front do not count) and one of these types."""
        info = self.file.tensors.get(name)
        if info is None:
            raise UserError(f"{self.file.path}: tensor {name} is missing")
        found = tuple(reversed(info.shape))
        without_ones_in_front = lambda sizes: list(dropwhile(lambda n: n == 1, sizes))
        if without_ones_in_front(found) != without_ones_in_front(shape):
            raise UserError(f"{self.file.path}: tensor {name} has shape {list(found)}, expected {list(shape)}{because(*shape)}")
        if info.type.name not in types:
            raise UserError(f"{self.file.path}: tensor {name} is of type {info.type.name}, must be one of {', '.join(types)}")
        return info

    def _leaf(self, name: str, dtype: str, shape: tuple[int, ...], array: np.ndarray | None) -> Tensor:
        """A tensor whose memory on its device holds the array; on paper it has none."""
        device = self.placement.weight(name)
        if self.on_paper:
            return Tensor(name, dtype, shape, device)
        buffer, offload = self.backends[device].upload(array), self.placement.offload
        if device == HOST and offload is not None:
            self.backends[offload.device].lock_pages(buffer)
        return Tensor(name, dtype, shape, device, buffer=buffer)

    def _values(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        from ..quant.dequantize import dequantize
        info = self._info(name, shape, VECTOR_TYPES)
        if self.on_paper:
            return np.ones(shape, np.float32)
        values = dequantize(self.file.data(name), info.type.name, shape, name)
        self.file.release(name)
        return values

    def _float32(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
        values = np.ascontiguousarray(self._values(name, shape)[part])
        return self._leaf(name, "f32", values.shape, values)

    def _load(self, name: str, shape: tuple[int, ...], rows: tuple[int, int] | None) -> Tensor:
        if len(shape) == 1:
            return self._float32(name, shape, (slice(*rows or (None,)),))
        info = self._info(name, shape, MATRIX_TYPES)
        *stack, n_rows, n_cols = shape
        first, last = rows or (0, n_rows)
        tiles = None
        if not self.on_paper:
            n_matrices = prod(stack)
            data = self.file.data(name).reshape(n_matrices, n_rows, -1)[:, first:last]
            tiles = tile.pack(data, info.type.name, last - first, n_cols, n_matrices, name=name)
            self.file.release(name)
        return self._leaf(name, info.type.name, (*stack, last - first, n_cols), tiles)

    @property
    def n_bytes(self) -> int:
        return sum(self.bytes_by_device().values())

    def bytes_by_device(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for tensor in self.loaded.values():
            found[tensor.device] += n_bytes(tensor)
        return found

    def check_bytes(self) -> None:
        """Refuses weights whose tiles are mostly padding."""
        in_file = sum(t.n_bytes for t in self.file.tensors.values())
        if self.n_bytes > MOST_TIMES * in_file + SPARE_BYTES:
            raise UserError(f"{self.file.path}: the weights, {in_file:,} bytes, would take {self.n_bytes:,} bytes as tiles of "
                            f"{tile.ROWS} rows and {CHUNK} columns, allowed: {MOST_TIMES} times as many and {SPARE_BYTES:,}; "
                            "the matrices are too small")

    def close(self) -> None:
        if self.placement.offload is not None:
            for backend in self.backends.values():
                backend.settle()
        for tensor in self.loaded.values():
            self.backends[tensor.device].free(tensor.buffer)
        self.loaded = {}
