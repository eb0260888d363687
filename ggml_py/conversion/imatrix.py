"""Importance matrices: of each matrix product, the sum over tokens of the squares of what the matrix is multiplied with.

A quantizer weighs the squared error of a column by its mean, `weights`. Files are llama.cpp's (GGUF): for a matrix NAME the
tensors NAME.in_sum2, f32 [n_matrices, n_cols], and NAME.counts, f32 [n_matrices, 1], how many tokens each of a stack has seen;
keys imatrix.datasets, imatrix.chunk_count and imatrix.chunk_size. Files of its older format (.dat) are read, not written.
"""
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from ..base.errors import UserError, quoted
from ..files.gguf import GGUFError, GGUFFile, TensorInfo
from ..files.gguf_writer import Entry, string, strings, u32, write_gguf

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNK_COUNT, CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
# May stand in a file although a model has no such tensor, or one of other sizes: both are read as one where a model has no head
OUTPUTS = "output.weight", "token_embd.weight"


class Sums(NamedTuple):
    """sums: float32 [n_matrices * n_cols]. counts: int64, of each matrix, or one for all."""
    values: np.ndarray
    counts: np.ndarray


@dataclass
class ImportanceMatrix:
    """chunk_count: windows of text, chunk_size: tokens of each; 0 where a file does not say."""
    path: Path
    entries: dict[str, Sums]
    datasets: list[str] = field(default_factory=list)
    chunk_count: int = 0
    chunk_size: int = 0

    @classmethod
    def read(cls, path: Path) -> Self:
        """UserError for what is no such file, or holds a NaN or an infinity."""
        with open(path, "rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        matrix = cls._read_gguf(path) if is_gguf else cls._read_dat(path)
        for name, (values, _) in matrix.entries.items():
            if not np.isfinite(values).all() or (values < 0).any():
                raise UserError(f"{path}: the entry of {quoted(name)} has a value that is negative or not finite")
        return matrix

    @classmethod
    def _read_gguf(cls, path: Path) -> Self:
        with GGUFFile.open(path) as file:
            names = {name.removesuffix(SUMS) for name in file.tensors if name.endswith(SUMS)}
            others = set(file.tensors) - {name + end for name in names for end in (SUMS, COUNTS)}
            if not names or others:
                raise GGUFError(f"{path}: not an importance matrix: " + (f"it has the tensor {quoted(min(others))}" if others else
                                "it has no tensors") + f"; allowed are NAME{SUMS} and NAME{COUNTS}")
            entries = {}
            for name in sorted(names):
                for end in SUMS, COUNTS:
                    info = file.tensors.get(name + end)
                    if info is None or info.type.name != "F32":
                        found = "missing" if info is None else f"of type {info.type.name}"
                        raise GGUFError(f"{path}: tensor {quoted(name + end)} is {found}, must be there as F32")
                values, counts = (file.data(name + end).view(np.float32) for end in (SUMS, COUNTS))
                if values.size % counts.size:
                    raise GGUFError(f"{path}: tensor {quoted(name + SUMS)} has {values.size} values, must have a multiple of the "
                                    f"{counts.size} of {quoted(name + COUNTS)}")
                if not np.isfinite(counts).all() or (counts < 0).any() or (counts >= 2**62).any():
                    raise GGUFError(f"{path}: tensor {quoted(name + COUNTS)} has a value that is no count")
                entries[name] = Sums(values.copy(), np.rint(counts).astype(np.int64))
            missing = [key for key in (DATASETS, CHUNK_COUNT, CHUNK_SIZE) if key not in file.metadata]
            if missing:
                raise GGUFError(f"{path}: key {missing[0]!r} is missing, must be there")
            return cls(path, entries, list(file.get(DATASETS, "arr[str]")), file.get(CHUNK_COUNT, "u32"),
                       file.get(CHUNK_SIZE, "u32"))

    @classmethod
    def _read_dat(cls, path: Path) -> Self:
        """i32 number of entries; of each i32 length and name, i32 number of calls, i32 n, f32 [n] means times calls; then, maybe,
        i32 number of chunks, i32 length and name of the text."""
        data, at = path.read_bytes(), 0

        def take(n: int) -> bytes:
            nonlocal at
            if not 0 <= n <= len(data) - at:
                raise UserError(f"{path}: not an importance matrix: neither GGUF nor entries that end in its {len(data)} bytes")
            at += n
            return data[at - n:at]
        number = lambda: int.from_bytes(take(4), "little", signed=True)
        entries, n_entries = {}, number()
        if n_entries < 1:
            raise UserError(f"{path}: not an importance matrix: neither GGUF nor at least one entry, got {n_entries}")
        for _ in range(n_entries):
            name, calls, n = take(number()).decode("utf-8", "backslashreplace"), number(), number()
            values = np.frombuffer(take(4 * n), "<f4")
            entries[name] = Sums(values, np.array([max(calls, 1)], np.int64))
        matrix = cls(path, entries)
        if at < len(data):
            matrix.chunk_count = number()
            matrix.datasets = [take(number()).decode("utf-8", "backslashreplace")] if at < len(data) else []
        return matrix

    def write(self, path: Path) -> None:
        """As llama-imatrix does, with the names in order. Whole or not at all."""
        keys = {"general.type": string("imatrix"), DATASETS: strings(self.datasets), CHUNK_COUNT: u32(self.chunk_count),
                CHUNK_SIZE: u32(self.chunk_size)}
        entries, tensors = [], []
        for name, (values, counts) in sorted(self.entries.items()):
            n = len(counts)
            shapes = ((values.size // n, n), (1, n)) if n > 1 else ((values.size,), (1,))
            entries += [Entry(name + end, shape, "F32") for end, shape in zip((SUMS, COUNTS), shapes)]
            tensors += [[values.astype("<f4")], [counts.astype("<f4")]]
        write_gguf(path, keys, entries, tensors)

    def check(self, file: GGUFFile) -> None:
        """UserError unless every entry is of a tensor of the file and of its size: else the matrix is of another model."""
        for name, (values, _) in self.entries.items():
            if name in OUTPUTS:
                continue
            tensor = file.tensors.get(name)
            if tensor is None:
                raise UserError(f"{self.path}: it is of another model: {file.path} has no tensor {quoted(name)}")
            if values.size != (expected := n_weights(tensor)):
                raise UserError(f"{self.path}: it is of another model: {values.size} values for {quoted(name)}, which has "
                                f"{expected} columns in {file.path}")

    def has(self, tensor: TensorInfo) -> bool:
        found = self.entries.get(tensor.name)
        return found is not None and found.values.size == n_weights(tensor)

    def weights(self, tensor: TensorInfo) -> np.ndarray:
        """float32 [n_matrices, n_cols]: means; 1 for a matrix that no token has seen."""
        values, counts = self.entries[tensor.name]
        means = values.reshape(len(counts), -1) / np.maximum(counts, 1).astype(np.float32)[:, None]
        return np.where(counts[:, None] > 0, means, np.float32(1)).astype(np.float32).reshape(-1, tensor.shape[0])


def n_weights(tensor: TensorInfo) -> int:
    """Columns of all matrices of a stack."""
    return tensor.shape[0] * math.prod(tensor.shape[2:])
