"""What a context needs of the memory of its sequences."""
from typing import Protocol

import numpy as np

from ..graph.graph import Graph, Tensor


class Memory(Protocol):
    """What sequences remember between their steps. A sequence has a number, its positions count from 0."""
    n_ctx: int      # positions of a sequence
    n_seq_max: int
    n_rollback: int  # positions that a sequence goes back to, at least, from its end

    @property
    def n_bytes(self) -> int: ...
    def bytes_of_token(self, n_keys: float) -> float: ...  # that a token behind so many positions reads and writes at least
    def inputs(self, graph: Graph, n_tokens: int) -> None: ...  # declares the inputs that its ops need
    # the node that keeps a micro-batch's rows; part: "k" or "v"
    def write(self, graph: Graph, layer: int, part: str, x: Tensor, name: str) -> Tensor: ...
    def state(self, layer: int, part: str) -> Tensor: ...  # of a recurrent layer, a row of it for each of its states
    # what a sequence is at a position, where a call begins, stays until the next time this is called
    def hold(self, seq_id: int, position: int) -> None: ...
    # of the inputs, for a micro-batch, of which it marks the first n positions as there; the tokens behind them fill it up
    def values(self, seq: np.ndarray, pos: np.ndarray, n: int) -> dict[str, np.ndarray]: ...
    def length(self, seq_id: int) -> int: ...  # the next position
    # the most positions, n at most, that the sequence can be taken back to
    def reachable(self, seq_id: int, n: int) -> int: ...
    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None: ...  # UserError for what recurrent layers cannot forget
    # the sequence becomes the first n positions of another, which may go on; what it had is gone
    def seq_cp(self, source: int, seq_id: int, n: int) -> None: ...
    def checkpoint(self, seq_id: int) -> None: ...  # the sequence can go back to its length, until it is shorter
    def drop_checkpoints(self, seq_id: int) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...
