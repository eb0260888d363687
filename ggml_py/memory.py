"""What a sequence remembers. `Memory` is what a context needs of it; `KVCache` is the memory of attention (recurrent state will be another).

Each sequence owns n_ctx cells; position p of sequence s is cell s * n_ctx + p, so a sequence's bits cannot depend on its neighbours.
"""
from typing import Protocol

import numpy as np

from .errors import UserError
from .graph import Graph, Tensor
from .storage import CACHE_TYPES, n_bytes


class Memory(Protocol):
    n_ctx: int      # positions of a sequence
    n_seq_max: int

    def inputs(self, graph: Graph, n_tokens: int) -> None: ...  # declares the inputs its ops need
    def values(self, seq: np.ndarray, pos: np.ndarray) -> dict[str, np.ndarray]: ...  # and gives them for a micro-batch, whose cells it marks
    def length(self, seq_id: int) -> int: ...  # the next position
    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


class KVCache:
    """K and V of every layer: [n_seq_max * n_ctx, n_head_kv * head size] in their cache types, written by set_rows."""

    def __init__(self, backend, layers: list[tuple[int, int]], n_ctx: int, n_seq_max: int, type_k: str, type_v: str):
        """layers: (columns of K, columns of V) each."""
        for option, type_ in ("-ctk", type_k), ("-ctv", type_v):
            if type_ not in CACHE_TYPES:
                raise UserError(f"{option}: {type_!r} is not a cache type; allowed: {', '.join(CACHE_TYPES)}")
        self.n_ctx, self.n_seq_max, self.backend = n_ctx, n_seq_max, backend
        self.present = np.zeros((n_seq_max, n_ctx), np.uint8)
        self.k = [self._tensor(f"cache_k-{i}", type_k, k) for i, (k, _) in enumerate(layers)]
        self.v = [self._tensor(f"cache_v-{i}", type_v, v) for i, (_, v) in enumerate(layers)]

    def _tensor(self, name: str, dtype: str, n_cols: int) -> Tensor:
        if n_cols % CACHE_TYPES[dtype][0]:
            raise UserError(f"{name}: {dtype} rows must be a multiple of {CACHE_TYPES[dtype][0]} values, got {n_cols}")
        tensor = Tensor(name, dtype, (self.n_seq_max * self.n_ctx, n_cols), device=self.backend.device)
        tensor.storage = self.backend.empty(n_bytes(tensor)), 0
        return tensor

    @property
    def n_bytes(self) -> int:
        return sum(n_bytes(t) for t in self.k + self.v)

    def inputs(self, graph: Graph, n_tokens: int) -> None:
        graph.input("seq", "i32", (n_tokens,))
        graph.input("rows", "i64", (n_tokens,))
        graph.input("present", "u8", self.present.shape)

    def values(self, seq: np.ndarray, pos: np.ndarray) -> dict[str, np.ndarray]:
        self.present[seq, pos] = 1
        return {"seq": seq, "rows": seq.astype(np.int64) * self.n_ctx + pos, "present": self.present}

    def length(self, seq_id: int) -> int:
        cells = np.flatnonzero(self.present[seq_id])
        return int(cells[-1]) + 1 if cells.size else 0

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        self.present[seq_id, p0:p1] = 0

    def clear(self) -> None:
        self.present[:] = 0

    def close(self) -> None:
        for tensor in self.k + self.v:
            self.backend.free(tensor.storage[0])
        self.k, self.v = [], []
