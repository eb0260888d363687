"""What recurrent layers remember of each sequence: a state of fixed size, whatever its length.

A state cannot forget a token, so a sequence goes back only to where a state of it was kept. Each sequence has `n_rollback + 1`
slots, rows of each layer's tensors, and a slot holds the state behind some number of tokens. A call leaves behind those of its
last n_rollback tokens, in the slots of the oldest; the one that it began from stays until the next call begins. So a call that
fails, and a step that greedy queued in vain, are taken back exactly. Which slot is read and which are written is data (the input
`runs`, `ops.primitive`): CUDA graphs replay, and nothing is copied.

Checkpoints are copies of a slot, and reach back further.
"""
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..backends.base import Backend
from ..base.errors import ParameterError, UserError
from ..base.storage import n_bytes
from ..graph.graph import Graph, Tensor

LEAST_ROLLBACK = 2  # greedy's step ahead, and the step before it, which may fail

StateSizes = dict[int, dict[str, int]]  # layer -> name of a part of its state -> float32 values of a sequence


def state_tensors(sizes: StateSizes, n_rows: int, devices: Sequence[str]) -> dict[tuple[int, str], Tensor]:
    """f32 [n_rows, values] for each part of each layer's state, without memory. devices: of each layer."""
    return {(il, part): Tensor(f"{part}_state-{il}", "f32", (n_rows, n), devices[il])
            for il, parts in sizes.items() for part, n in parts.items()}


class RecurrentMemory:
    """States of recurrent layers, as `state.base.Memory`. n_rollback: positions that a sequence goes back without a
    checkpoint."""

    def __init__(self, backends: Mapping[str, Backend], sizes: StateSizes, devices: Sequence[str], n_ctx: int, n_seq_max: int,
                 n_rollback: int = LEAST_ROLLBACK):
        """devices: of each layer."""
        if n_rollback < LEAST_ROLLBACK:
            raise ParameterError("n_rollback", f"must be at least {LEAST_ROLLBACK}, got {n_rollback}")
        self.backends, self.n_ctx, self.n_seq_max, self.n_rollback = backends, n_ctx, n_seq_max, n_rollback
        self.n_slots = n_rollback + 1
        self.states = state_tensors(sizes, n_seq_max * self.n_slots, devices)
        for tensor in self.states.values():
            tensor.buffer = backends[tensor.device].empty(n_bytes(tensor))
        self.clear_marks()

    def clear_marks(self) -> None:
        """No sequence has a position."""
        self.lengths = [0] * self.n_seq_max
        self.held: list[dict[int, int]] = [{} for _ in range(self.n_seq_max)]  # of a sequence: length -> the slot of its state
        self.kept = [0] * self.n_seq_max  # the length whose state is not written over
        self.checkpoints: list[dict[int, Any]] = [{} for _ in range(self.n_seq_max)]  # length -> by device, a buffer

    @property
    def n_bytes(self) -> int:
        return sum(map(n_bytes, self.states.values()))

    @property
    def bytes_of_token(self) -> int:
        """That a token reads and writes, however many are before it."""
        return 2 * self.n_bytes // (self.n_seq_max * self.n_slots)

    def inputs(self, graph: Graph, n_tokens: int) -> None:
        graph.input("runs", "i32", (min(n_tokens, self.n_seq_max), 3 + self.n_rollback))

    def state(self, layer: int, part: str) -> Tensor:
        return self.states[layer, part]

    def hold(self, seq_id: int, position: int) -> None:
        self.kept[seq_id] = position

    def values(self, seq: np.ndarray, pos: np.ndarray, n: int) -> dict[str, np.ndarray]:
        """No run has the tokens that fill a micro-batch up: what recurrent layers make of them is whatever lay there."""
        runs = np.full((min(len(seq), self.n_seq_max), 3 + self.n_rollback), -1, np.int32)
        runs[:, :2] = 0
        seq = seq[:n]
        firsts = [0, *(np.flatnonzero(np.diff(seq)) + 1), len(seq)]
        for run, first, end in zip(runs, firsts, firsts[1:]):
            seq_id, begin = int(seq[first]), int(pos[first])
            rows = seq_id * self.n_slots
            run[:3] = first, end - first, rows + self.held[seq_id][begin] if begin else -1
            for i, slot in enumerate(self._written(seq_id, begin, int(end - first))):
                run[3 + i] = rows + slot
        return {"runs": runs}

    def _written(self, seq_id: int, begin: int, n: int) -> list[int]:
        """The slots of the states behind the last tokens of n that follow `begin` others, the last first."""
        held, end = self.held[seq_id], begin + n
        free = [slot for slot in range(self.n_slots) if slot not in held.values()]
        oldest = [length for length in sorted(held) if length != self.kept[seq_id]]
        lengths = range(end, max(begin, end - self.n_rollback), -1)
        slots = [free.pop() if free else held.pop(oldest.pop(0)) for _ in lengths]
        held.update(zip(lengths, slots))
        self.lengths[seq_id] = end
        return slots

    def length(self, seq_id: int) -> int:
        return self.lengths[seq_id]

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        length, held = self.lengths[seq_id], self.held[seq_id]
        if p0 >= min(p1, length):
            return
        if p1 < length:
            raise UserError(f"seq_rm: positions {p0} to {p1 - 1} of sequence {seq_id}, which has {length}: recurrent layers "
                            f"cannot forget positions before others; allowed: to its end")
        if p0:
            self._check(seq_id, p0)
        for length in [each for each in held if each > p0]:
            del held[length]
        for length in [each for each in self.checkpoints[seq_id] if each > p0]:
            self._free(self.checkpoints[seq_id].pop(length))
        if p0 and p0 not in held:
            self._restore(seq_id, p0, seq_id)
        self.lengths[seq_id] = p0

    def positions(self, seq_id: int) -> list[int]:
        """The lengths that the sequence can go back to."""
        return sorted({0, *self.held[seq_id], *self.checkpoints[seq_id]})

    def reachable(self, seq_id: int, n: int) -> int:
        return max(length for length in self.positions(seq_id) if length <= n)

    def seq_cp(self, source: int, seq_id: int, n: int) -> None:
        if n:
            self._check(source, n)
        self.seq_rm(seq_id, 0, self.n_ctx)
        if n in self.held[source]:
            self.held[seq_id][n], rows = 0, (source * self.n_slots + self.held[source][n], seq_id * self.n_slots)
            for backend, state, row, _ in self._parts():
                backend.copy(state, rows[1] * row, backend, state, rows[0] * row, row)
        elif n:
            self._restore(source, n, seq_id)
        self.lengths[seq_id] = n

    def _check(self, seq_id: int, n: int) -> None:
        if n not in self.positions(seq_id):
            raise UserError(f"sequence {seq_id}: its recurrent layers hold no state behind {n} positions; allowed: "
                            f"{', '.join(map(str, self.positions(seq_id)))}, and where there is a checkpoint")

    def checkpoint(self, seq_id: int) -> None:
        n = self.lengths[seq_id]
        if not n or n in self.checkpoints[seq_id]:
            return
        sizes = {backend.device: at + row for backend, _, row, at in self._parts()}
        buffers, slot = {device: self.backends[device].empty(size) for device, size in sizes.items()}, self.held[seq_id][n]
        for backend, state, row, at in self._parts():
            backend.copy(buffers[backend.device], at, backend, state, (seq_id * self.n_slots + slot) * row, row)
        self.checkpoints[seq_id][n] = buffers

    def _restore(self, source: int, n: int, seq_id: int) -> None:
        """The state behind n positions of `source`, of its checkpoint, into a free slot of a sequence."""
        held, buffers = self.held[seq_id], self.checkpoints[source][n]
        slot = next(slot for slot in range(self.n_slots) if slot not in held.values())
        for backend, state, row, at in self._parts():
            backend.copy(state, (seq_id * self.n_slots + slot) * row, backend, buffers[backend.device], at, row)
        held[n] = slot

    def _parts(self) -> Iterator[tuple[Backend, Any, int, int]]:
        """Of each part: its backend, its memory, the bytes of a row, and where it is in a checkpoint's buffer of that device."""
        ends: Counter[str] = Counter()
        for tensor in self.states.values():
            row = n_bytes(tensor) // tensor.shape[0]
            yield self.backends[tensor.device], tensor.buffer, row, ends[tensor.device]
            ends[tensor.device] += row

    def _free(self, checkpoint: dict[str, Any]) -> None:
        for device, buffer in checkpoint.items():
            self.backends[device].free(buffer)

    def drop_checkpoints(self, seq_id: int) -> None:
        while self.checkpoints[seq_id]:
            self._free(self.checkpoints[seq_id].popitem()[1])

    def clear(self) -> None:
        for seq_id in range(self.n_seq_max):
            self.drop_checkpoints(seq_id)
        self.clear_marks()

    def close(self) -> None:
        self.clear()
        for backend, state, _, _ in self._parts():
            backend.free(state)
        self.states = {}
