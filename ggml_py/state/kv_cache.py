"""K and V of every layer: the memory of attention.

Each sequence owns a ring of cells in each layer: position p of sequence s is cell s * ring + p % ring, so a sequence's bits
cannot depend on its neighbours. A ring has n_ctx cells, or, in layers with a window, as many as are needed: those of the window,
of the tokens that are computed together, and of the positions that a sequence goes back; what lay there before has been written
over. Pieces of 128 positions are 128 cells side by side, since such rings are multiples of that.

Where a sequence must go back further, to a checkpoint or to where a call began, its rings are copied before.
"""
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ..backends.base import Backend
from ..base.errors import ParameterError, UserError
from ..base.storage import CACHE_TYPES, n_bytes
from ..graph.graph import Graph, Tensor

KV_WRITES = "set_rows", "cpy"
PIECE = 128  # positions that attention takes together
Shards = Mapping[str, Mapping[str, int]]  # of caches that several devices share, by name: device -> columns


def ring_of(window: int, n_ctx: int, n_others: int) -> int:
    """Cells of a sequence of n_ctx positions in a layer with a window, 0: without. n_others: positions beside it, of tokens that
    are computed together and of those that a sequence goes back."""
    return min(n_ctx, -(-(window + n_others) // PIECE) * PIECE) if window else n_ctx


def cache_tensors(layers: list[tuple[int, int]], n_cells: Sequence[int], type_k: str, type_v: str,
                  devices: Sequence[str], shards: Shards = MappingProxyType({})) -> tuple[list[Tensor], list[Tensor]]:
    """K and V of each layer, [n_cells, columns] in their cache types, without memory.
    layers: (columns of K, columns of V) each; n_cells, devices: of each."""
    for parameter, type_ in ("type_k", type_k), ("type_v", type_v):
        if type_ not in CACHE_TYPES:
            raise ParameterError(parameter, f"{type_!r} is not a cache type; allowed: {', '.join(CACHE_TYPES)}")

    def tensor(name: str, dtype: str, n: int, n_cols: int, device: str) -> Tensor:
        if n_cols % CACHE_TYPES[dtype][0]:
            raise UserError(f"{name}: {dtype} rows must be a multiple of {CACHE_TYPES[dtype][0]} values, got {n_cols}")
        parts = {each: Tensor(f"{name}@{each}", dtype, (n, part), each) for each, part in shards.get(name, {}).items()}
        return Tensor(name, dtype, (n, n_cols), device, shards=parts)
    of_each = list(enumerate(zip(layers, n_cells, devices)))
    return ([tensor(f"cache_k-{i}", type_k, n, k, device) for i, ((k, _), n, device) in of_each],
            [tensor(f"cache_v-{i}", type_v, n, v, device) for i, ((_, v), n, device) in of_each])


class KVCache:
    """K and V of every layer: [n_seq_max * ring, n_head_kv * head size] in their cache types.

    kv_write: "set_rows" takes the numbers of the cells as data, "cpy" their addresses (copy indirection): `cpy_rows_indirect`
    copies to where a table says, a row of it for each cache. Same bits."""

    def __init__(self, backends: Mapping[str, Backend], layers: list[tuple[int, int]],  # noqa: PLR0913 (each is its own)
                 devices: Sequence[str], n_ctx: int,
                 n_seq_max: int, type_k: str, type_v: str, kv_write: str = "set_rows", shards: Shards = MappingProxyType({}),
                 windows: Sequence[int] = (), n_together: int = 0, n_rollback: int = 0):
        """layers: (columns of K, columns of V) each; devices: of each; windows: likewise, 0 or none for a layer that sees all
        positions. n_together: the most tokens of a micro-batch; n_rollback: positions that a sequence goes back."""
        if kv_write not in KV_WRITES:
            raise ParameterError("kv_write", f"{kv_write!r} is not allowed; allowed: {', '.join(KV_WRITES)}")
        self.n_ctx, self.n_seq_max, self.backends, self.kv_write = n_ctx, n_seq_max, backends, kv_write
        self.windows = [*windows, *[0] * (len(layers) - len(windows))]
        self.rings = [ring_of(window, n_ctx, n_together + n_rollback) for window in self.windows]
        self.reused = {(ring, window) for ring, window in zip(self.rings, self.windows) if ring < n_ctx}
        self.n_rollback = n_rollback if self.reused else n_ctx
        self.lengths = np.zeros(n_seq_max, np.int32)  # the next positions
        self.present = np.zeros((n_seq_max, n_ctx), np.uint8)
        self.k, self.v = cache_tensors(layers, [n_seq_max * ring for ring in self.rings], type_k, type_v, devices, shards)
        self.clear_marks()
        self.held = [held for cache in self.k + self.v for held in cache.held]
        for tensor in self.held:
            tensor.buffer = backends[tensor.device].empty(n_bytes(tensor))
        if kv_write == "cpy":
            self.slots = {cache: slot for slot, cache in enumerate(self.held)}  # parts of a cache follow each other
            self.addresses = np.array([[backends[cache.device].address(cache)] for cache in self.held], np.int64)
            self.row_bytes = np.array([[n_bytes(cache) // cache.shape[0]] for cache in self.held], np.int64)
            self.ring_of_slot = np.array([[cache.shape[0] // n_seq_max] for cache in self.held], np.int64)

    def clear_marks(self) -> None:
        """No sequence has a position."""
        self.present[:], self.lengths[:] = 0, 0
        self.written = np.zeros(self.n_seq_max, np.int64)  # the positions before, as far as rings have room, lie in their cells
        self.kept = [0] * self.n_seq_max  # the length to which a call that fails takes a sequence back
        # length -> (written, by device a buffer with the sequence's rings)
        self.checkpoints: list[dict[int, tuple[int, dict[str, Any]]]] = [{} for _ in range(self.n_seq_max)]
        self.own_checkpoints: list[set[int]] = [set() for _ in range(self.n_seq_max)]  # made for `kept`

    @property
    def n_bytes(self) -> int:
        return sum(map(n_bytes, self.held))

    def bytes_of_token(self, n_keys: float) -> float:
        each = [(min(n_keys, window or n_keys), sum(n_bytes(held) // held.shape[0] for cache in caches for held in cache.held))
                for window, *caches in zip(self.windows, self.k, self.v)]
        return sum(n * row for n, row in each)

    def inputs(self, graph: Graph, n_tokens: int) -> None:
        graph.input("seq", "i32", (n_tokens,))
        if self.kv_write == "cpy":
            graph.input("dst", "i64", (len(self.slots), n_tokens))
        else:
            for ring in sorted({*self.rings}):
                graph.input(self._rows(ring), "i64", (n_tokens,))
        graph.input("present", "u8", self.present.shape)

    def _rows(self, ring: int) -> str:
        """The input with the cells of a micro-batch in layers with such a ring."""
        return "rows" if ring == self.n_ctx else f"rows_of_{ring}"

    def write(self, graph: Graph, layer: int, part: str, x: Tensor, name: str) -> Tensor:
        cache = {"k": self.k, "v": self.v}[part][layer]
        if self.kv_write == "cpy":
            return graph.cpy_rows_indirect(cache, x, graph.inputs["dst"], slot=self.slots[cache.held[0]], name=name)
        return graph.set_rows(cache, x, graph.inputs[self._rows(self.rings[layer])], name=name)

    def state(self, layer: int, part: str) -> Tensor:
        raise LookupError(f"layer {layer}: no layer of this memory has a state, {part}; allowed: `write`, of K and V")

    def hold(self, seq_id: int, position: int) -> None:
        self.kept[seq_id] = position
        for n in self.own_checkpoints[seq_id] - {position}:
            self._drop(seq_id, n)

    def values(self, seq: np.ndarray, pos: np.ndarray, n: int) -> dict[str, np.ndarray]:
        if self.reused:
            self._keep_what_calls_go_back_to(seq, pos)
        self.present[seq[:n], pos[:n]] = 1
        np.maximum.at(self.lengths, seq[:n], pos[:n] + 1)
        np.maximum.at(self.written, seq, pos + 1)
        if self.kv_write == "cpy":
            rows = seq * self.ring_of_slot + pos % self.ring_of_slot
            where = {"dst": self.addresses + self.row_bytes * rows}
        else:
            where = {self._rows(ring): seq.astype(np.int64) * ring + pos % ring for ring in {*self.rings}}
        return {"seq": seq, "present": self.present, **where}

    def _keep_what_calls_go_back_to(self, seq: np.ndarray, pos: np.ndarray) -> None:
        """Copies the rings of sequences before a micro-batch writes over what they go back to if their call fails."""
        for seq_id in np.unique(seq):
            kept, written = self.kept[seq_id], max(self.written[seq_id], int(pos[seq == seq_id].max()) + 1)
            if 0 < kept < self._least(written) and kept not in self.checkpoints[seq_id]:
                self._copy_rings(seq_id, kept)
                self.own_checkpoints[seq_id].add(kept)

    def _least(self, written: int) -> int:
        """The least length but 0 that a sequence goes back to when positions up to there have been written: all that is seen from
        it lies in its cells."""
        return max((written - ring + window - 1 for ring, window in self.reused if written > ring), default=0)

    def length(self, seq_id: int) -> int:
        return int(self.lengths[seq_id])

    def reachable(self, seq_id: int, n: int) -> int:
        n = min(n, self.length(seq_id))
        if n >= self._least(self.written[seq_id]):
            return n
        return max((length for length in self.checkpoints[seq_id] if length <= n), default=0)

    def check(self, seq_id: int, n: int) -> None:
        """UserError unless the sequence can go back to n positions."""
        if self.reachable(seq_id, n) != n:
            found = [0, *sorted(self.checkpoints[seq_id])]
            raise UserError(f"sequence {seq_id}: its layers with a window do not hold what {n} positions see; allowed: "
                            f"{', '.join(map(str, found))}, {self._least(self.written[seq_id])} to {self.length(seq_id)}, and "
                            "where there is a checkpoint")

    def length_without(self, seq_id: int, p0: int, p1: int) -> int:
        """How long the sequence is without positions p0 <= p < p1."""
        present = self.present[seq_id]
        there = np.flatnonzero(np.concatenate([present[:p0], np.zeros_like(present[p0:p1]), present[max(p0, p1):]]))
        return int(there[-1]) + 1 if there.size else 0

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        n = self.length_without(seq_id, p0, p1)
        self.check(seq_id, n)
        if 0 < n < self._least(self.written[seq_id]):
            self._copy_back(seq_id, n, seq_id)
        self.present[seq_id, p0:p1] = 0
        self.lengths[seq_id] = n
        if not n:
            self.written[seq_id] = 0
        for length in [length for length in self.checkpoints[seq_id] if length > n]:
            self._drop(seq_id, length)

    def seq_cp(self, source: int, seq_id: int, n: int) -> None:
        self.check(source, n)
        self.drop_checkpoints(seq_id)
        self.written[seq_id] = self.written[source]
        for tensor in self.held:
            row_bytes, ring, backend = n_bytes(tensor) // tensor.shape[0], self._ring(tensor), self.backends[tensor.device]
            backend.copy(tensor.buffer, seq_id * ring * row_bytes, backend, tensor.buffer, source * ring * row_bytes,
                         (n if ring == self.n_ctx else ring) * row_bytes)
        if 0 < n < self._least(self.written[source]):
            self._copy_back(source, n, seq_id)
        self.present[seq_id] = 0
        self.present[seq_id, :n] = self.present[source, :n]
        self.lengths[seq_id] = n

    # Copies of rings that are reused

    def checkpoint(self, seq_id: int) -> None:
        n = self.length(seq_id)
        self.own_checkpoints[seq_id].discard(n)
        if self.reused and n and n not in self.checkpoints[seq_id]:
            self._copy_rings(seq_id, n)

    def drop_checkpoints(self, seq_id: int) -> None:
        for n in [*self.checkpoints[seq_id]]:
            self._drop(seq_id, n)

    def _drop(self, seq_id: int, n: int) -> None:
        _, buffers = self.checkpoints[seq_id].pop(n)
        self.own_checkpoints[seq_id].discard(n)
        for device, buffer in buffers.items():
            self.backends[device].free(buffer)

    def _ring(self, tensor: Tensor) -> int:
        return tensor.shape[0] // self.n_seq_max

    def _parts(self) -> Iterator[tuple[Tensor, int, int]]:
        """Of each cache whose cells are reused: the bytes of a sequence's ring, and where they are in a copy's buffer of that
        device."""
        ends: Counter[str] = Counter()
        for tensor in self.held:
            if self._ring(tensor) < self.n_ctx:
                size = n_bytes(tensor) // self.n_seq_max
                yield tensor, size, ends[tensor.device]
                ends[tensor.device] += size

    def _copy_rings(self, seq_id: int, n: int) -> None:
        """Behind n positions."""
        sizes = {tensor.device: at + size for tensor, size, at in self._parts()}
        buffers = {device: self.backends[device].empty(size) for device, size in sizes.items()}
        for tensor, size, at in self._parts():
            backend = self.backends[tensor.device]
            backend.copy(buffers[tensor.device], at, backend, tensor.buffer, seq_id * size, size)
        self.checkpoints[seq_id][n] = int(self.written[seq_id]), buffers

    def _copy_back(self, source: int, n: int, seq_id: int) -> None:
        """The rings of `source` behind n positions to those of a sequence."""
        self.written[seq_id], buffers = self.checkpoints[source][n]
        for tensor, size, at in self._parts():
            backend = self.backends[tensor.device]
            backend.copy(tensor.buffer, seq_id * size, backend, buffers[tensor.device], at, size)

    def clear(self) -> None:
        for seq_id in range(self.n_seq_max):
            self.drop_checkpoints(seq_id)
        self.clear_marks()

    def close(self) -> None:
        for seq_id in range(self.n_seq_max):
            self.drop_checkpoints(seq_id)
        for tensor in self.held:
            self.backends[tensor.device].free(tensor.buffer)
        self.k, self.v, self.held = [], [], []
