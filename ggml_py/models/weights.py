"""The tensors of a model file on its devices, each checked by name, type and shape."""
from collections import Counter
from collections.abc import Callable, Mapping
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
from ..quant.interleaved import INTERLEAVED
from .hparams import because

MATRIX_TYPES = *(name for name, format in FORMATS.items() if format.planes and format.is_in_files), *INTERLEAVED  # have tiles
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

    def __init__(self, file: GGUFFile, backends: Mapping, placement: Placement, on_paper: "Weights | None" = None):
        """backends: by device, or `Paper` for each. on_paper: the same there, which know what several devices share."""
        self.file, self.backends, self.placement = file, backends, placement
        self.like = on_paper.loaded if on_paper is not None else {}
        self.loaded: dict[tuple, Tensor] = {}
        self.on_paper = any(isinstance(backend, Paper) for backend in backends.values())

    def __contains__(self, name: str) -> bool:
        return name in self.file.tensors

    def __call__(self, name: str, *shape: int, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor `name`, which must have this shape (numpy order): a vector, a matrix or a stack of them. rows: only those
        [first, last) of matrices."""
        key = name, rows
        if key not in self.loaded:
            self.loaded[key] = self._load(key, shape, rows)
        return self.loaded[key]

    def table(self, name: str, n_rows: int, n_cols: int, columns: tuple[int, int] | None = None) -> Tensor:
        """The matrix `name` as float32 rows, not as tiles. columns: only those [first, last)."""
        key = name, "table", columns
        if key not in self.loaded:
            self.loaded[key] = self._float32(key, (n_rows, n_cols), columns)
        return self.loaded[key]

    def ones(self, name: str, n: int) -> Tensor:
        """f32 [n] of ones, where a weight of that name would be: for ops whose weights a file does not have."""
        key = name, "ones"
        if key not in self.loaded:
            self.loaded[key] = self._leaf(key, "f32", (n,), -1, lambda first, end: np.ones(end - first, np.float32))
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

    def _leaf(self, key: tuple, dtype: str, shape: tuple[int, ...], axis: int, part: Callable[[int, int], np.ndarray]) -> Tensor:
        """A tensor whose memory is on its device, and where the one on paper has shards on theirs; on paper it has none. axis:
        along which shards are cut. part: (first, end) -> the array of what lies between."""
        name = key[0]
        tensor = Tensor(name, dtype, shape, self.placement.weight(name))
        if self.on_paper:
            return tensor
        starts, at = {}, 0
        for device, like in (self.like[key].shards if key in self.like else {}).items():
            shard = tensor.view(like.shape) if like.is_view else Tensor(like.name, dtype, like.shape, device)
            starts[shard], tensor.shards[device] = at, shard
            at += shard.shape[axis] if tensor.device in tensor.shards else 0
        for held in tensor.held:
            first = starts.get(held, 0)
            held.buffer = self.backends[held.device].upload(part(first, first + held.shape[axis]))
            if held.device == HOST and self.placement.offload is not None:
                self.backends[self.placement.offload.device].lock_pages(held.buffer)
        return tensor

    def _values(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        from ..quant.dequantize import dequantize
        info = self._info(name, shape, VECTOR_TYPES)
        if self.on_paper:
            return np.ones(shape, np.float32)
        values = dequantize(self.file.data(name), info.type.name, shape, name)
        self.file.release(name)
        return values

    def _float32(self, key: tuple, shape: tuple[int, ...], columns: tuple[int, int] | None) -> Tensor:
        """Floats, of which only the columns [first, last) are wanted."""
        values = self._values(key[0], shape)[..., slice(*columns or (None,))]
        return self._leaf(key, "f32", values.shape, -1, lambda first, end: np.ascontiguousarray(values[..., first:end]))

    def _load(self, key: tuple, shape: tuple[int, ...], rows: tuple[int, int] | None) -> Tensor:
        if len(shape) == 1:
            return self._float32(key, shape, rows)
        name, info = key[0], self._info(key[0], shape, MATRIX_TYPES)
        *stack, n_rows, n_cols = shape
        first, last = rows or (0, n_rows)
        n_matrices = prod(stack)

        def part(start: int, end: int) -> np.ndarray:
            only = first + start, first + end
            return tile.pack(self.file.data(name), info.type.name, n_rows, n_cols, n_matrices, name, only)
        tensor = self._leaf(key, info.type.read_as, (*stack, last - first, n_cols), -2, part)
        if not self.on_paper:
            self.file.release(name)
        return tensor

    @property
    def held(self) -> list[Tensor]:
        """What has memory: tensors, or their parts and copies."""
        return [held for tensor in self.loaded.values() for held in tensor.held]

    @property
    def n_bytes(self) -> int:
        return sum(self.bytes_by_device().values())

    def bytes_by_device(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for tensor in self.held:
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
        for tensor in self.held:
            self.backends[tensor.device].free(tensor.buffer)
        self.loaded = {}
