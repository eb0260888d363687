"""K and V of every layer: the memory of attention.

Each sequence owns n_ctx cells; position p of sequence s is cell s * n_ctx + p, so a sequence's bits cannot depend on its
neighbours.
"""
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ..backends.base import Backend
from ..base.errors import ParameterError, UserError
from ..base.storage import CACHE_TYPES, n_bytes
from ..graph.graph import Graph, Tensor

KV_WRITES = "set_rows", "cpy"
Shards = Mapping[str, Mapping[str, int]]  # of caches that several devices share, by name: device -> columns


def cache_tensors(layers: list[tuple[int, int]], n_cells: int, type_k: str, type_v: str,
                  devices: Sequence[str], shards: Shards = MappingProxyType({})) -> tuple[list[Tensor], list[Tensor]]:
    """K and V of each layer, [n_cells, columns] in their cache types, without memory.
    layers: (columns of K, columns of V) each; devices: of each."""
    for parameter, type_ in ("type_k", type_k), ("type_v", type_v):
        if type_ not in CACHE_TYPES:
            raise ParameterError(parameter, f"{type_!r} is not a cache type; allowed: {', '.join(CACHE_TYPES)}")

    def tensor(name: str, dtype: str, n_cols: int, device: str) -> Tensor:
        if n_cols % CACHE_TYPES[dtype][0]:
            raise UserError(f"{name}: {dtype} rows must be a multiple of {CACHE_TYPES[dtype][0]} values, got {n_cols}")
        parts = {each: Tensor(f"{name}@{each}", dtype, (n_cells, n), each) for each, n in shards.get(name, {}).items()}
        return Tensor(name, dtype, (n_cells, n_cols), device, shards=parts)
    return ([tensor(f"cache_k-{i}", type_k, k, device) for i, ((k, _), device) in enumerate(zip(layers, devices))],
            [tensor(f"cache_v-{i}", type_v, v, device) for i, ((_, v), device) in enumerate(zip(layers, devices))])


class KVCache:
    """K and V of every layer: [n_seq_max * n_ctx, n_head_kv * head size] in their cache types.

    kv_write: "set_rows" takes the numbers of the cells as data, "cpy" their addresses (copy indirection): `cpy_rows_indirect`
    copies to where a table says, a row of it for each cache. Same bits."""

    def __init__(self, backends: Mapping[str, Backend], layers: list[tuple[int, int]], devices: Sequence[str], n_ctx: int,
                 n_seq_max: int, type_k: str, type_v: str, kv_write: str = "set_rows", shards: Shards = MappingProxyType({})):
        """layers: (columns of K, columns of V) each; devices: of each."""
        if kv_write not in KV_WRITES:
            raise ParameterError("kv_write", f"{kv_write!r} is not allowed; allowed: {', '.join(KV_WRITES)}")
        self.n_ctx, self.n_seq_max, self.backends, self.kv_write = n_ctx, n_seq_max, backends, kv_write
        self.n_rollback = n_ctx  # cells stay where they are
        self.lengths = np.zeros(n_seq_max, np.int32)  # the next positions
        self.present = np.zeros((n_seq_max, n_ctx), np.uint8)
        self.k, self.v = cache_tensors(layers, n_seq_max * n_ctx, type_k, type_v, devices, shards)
        self.held = [held for cache in self.k + self.v for held in cache.held]
        for tensor in self.held:
            tensor.buffer = backends[tensor.device].empty(n_bytes(tensor))
        if kv_write == "cpy":
            self.slots = {cache: slot for slot, cache in enumerate(self.held)}  # parts of a cache follow each other
            self.addresses = np.array([[backends[cache.device].address(cache)] for cache in self.held], np.int64)
            self.row_bytes = np.array([[n_bytes(cache) // cache.shape[0]] for cache in self.held], np.int64)

    @property
    def n_bytes(self) -> int:
        return sum(map(n_bytes, self.held))

    def bytes_of_token(self, n_keys: float) -> float:
        return n_keys * self.n_bytes / (self.n_ctx * self.n_seq_max)

    def inputs(self, graph: Graph, n_tokens: int) -> None:
        graph.input("seq", "i32", (n_tokens,))
        if self.kv_write == "cpy":
            graph.input("dst", "i64", (len(self.slots), n_tokens))
        else:
            graph.input("rows", "i64", (n_tokens,))
        graph.input("present", "u8", self.present.shape)

    def write(self, graph: Graph, layer: int, part: str, x: Tensor, name: str) -> Tensor:
        cache = {"k": self.k, "v": self.v}[part][layer]
        if self.kv_write == "cpy":
            return graph.cpy_rows_indirect(cache, x, graph.inputs["dst"], slot=self.slots[cache.held[0]], name=name)
        return graph.set_rows(cache, x, graph.inputs["rows"], name=name)

    def state(self, layer: int, part: str) -> Tensor:
        raise LookupError(f"layer {layer}: no layer of this memory has a state, {part}; allowed: `write`, of K and V")

    def hold(self, seq_id: int, position: int) -> None:
        pass  # no call writes a cell of another one

    def checkpoint(self, seq_id: int) -> None:
        pass  # cells stay

    def drop_checkpoints(self, seq_id: int) -> None:
        pass

    def values(self, seq: np.ndarray, pos: np.ndarray) -> dict[str, np.ndarray]:
        self.present[seq, pos] = 1
        np.maximum.at(self.lengths, seq, pos + 1)
        rows = seq.astype(np.int64) * self.n_ctx + pos
        where = {"dst": self.addresses + self.row_bytes * rows} if self.kv_write == "cpy" else {"rows": rows}
        return {"seq": seq, "present": self.present, **where}

    def length(self, seq_id: int) -> int:
        return int(self.lengths[seq_id])

    def reachable(self, seq_id: int, n: int) -> int:
        return min(n, self.length(seq_id))

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        self.present[seq_id, p0:p1] = 0
        cells = np.flatnonzero(self.present[seq_id])
        self.lengths[seq_id] = cells[-1] + 1 if cells.size else 0

    def seq_cp(self, source: int, seq_id: int, n: int) -> None:
        for tensor in self.held:
            row_bytes = n_bytes(tensor) // tensor.shape[0]
            backend = self.backends[tensor.device]
            backend.copy(tensor.buffer, seq_id * self.n_ctx * row_bytes, backend, tensor.buffer, source * self.n_ctx * row_bytes,
                         n * row_bytes)
        self.present[seq_id] = 0
        self.present[seq_id, :n] = self.present[source, :n]
        self.lengths[seq_id] = n

    def clear(self) -> None:
        self.present[:] = 0
        self.lengths[:] = 0

    def close(self) -> None:
        for tensor in self.held:
            self.backends[tensor.device].free(tensor.buffer)
        self.k, self.v, self.held = [], [], []
