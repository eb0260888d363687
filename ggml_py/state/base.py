"""What a context needs of the memory of its sequences."""
from typing import Protocol

import numpy as np

from ..graph.graph import Graph, Tensor


class Memory(Protocol):
    """What sequences remember between their steps. A sequence has a number, its positions count from 0."""
    n_ctx: int      # positions of a sequence
    n_seq_max: int

    @property
    def n_bytes(self) -> int: ...
    def inputs(self, graph: Graph, n_tokens: int) -> None: ...  # declares the inputs that its ops need
    # the node that keeps a micro-batch's rows; part: "k" or "v"
    def write(self, graph: Graph, layer: int, part: str, x: Tensor, name: str) -> Tensor: ...
    # of the inputs, for a micro-batch, whose positions it marks
    def values(self, seq: np.ndarray, pos: np.ndarray) -> dict[str, np.ndarray]: ...
    def length(self, seq_id: int) -> int: ...  # the next position
    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None: ...
    # the sequence becomes the first n positions of another, which may go on; what it had is gone
    def seq_cp(self, source: int, seq_id: int, n: int) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...
