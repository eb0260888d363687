"""The memory of models with layers of both kinds: a KV cache for attention, states for recurrent layers."""
import numpy as np

from ..graph.graph import Graph, Tensor
from .kv_cache import KVCache
from .recurrent import RecurrentMemory


class HybridMemory:
    """Both, as `state.base.Memory`. What the states cannot do is refused before the cache does it."""

    def __init__(self, cache: KVCache, states: RecurrentMemory):
        self.cache, self.states = cache, states
        self.n_ctx, self.n_seq_max, self.n_rollback = cache.n_ctx, cache.n_seq_max, min(cache.n_rollback, states.n_rollback)

    @property
    def n_bytes(self) -> int:
        return self.cache.n_bytes + self.states.n_bytes

    def bytes_of_token(self, n_keys: float) -> float:
        return self.cache.bytes_of_token(n_keys) + self.states.bytes_of_token

    def inputs(self, graph: Graph, n_tokens: int) -> None:
        self.cache.inputs(graph, n_tokens)
        self.states.inputs(graph, n_tokens)

    def write(self, graph: Graph, layer: int, part: str, x: Tensor, name: str) -> Tensor:
        return self.cache.write(graph, layer, part, x, name)

    def state(self, layer: int, part: str) -> Tensor:
        return self.states.state(layer, part)

    def hold(self, seq_id: int, position: int) -> None:
        self.states.hold(seq_id, position)
        self.cache.hold(seq_id, position)

    def values(self, seq: np.ndarray, pos: np.ndarray, n: int) -> dict[str, np.ndarray]:
        return {**self.states.values(seq, pos, n), **self.cache.values(seq, pos, n)}

    def length(self, seq_id: int) -> int:
        return self.cache.length(seq_id)

    def reachable(self, seq_id: int, n: int) -> int:
        while (found := self.cache.reachable(seq_id, self.states.reachable(seq_id, n))) < n:
            n = found
        return n

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        self.cache.check(seq_id, self.cache.length_without(seq_id, p0, p1))
        self.states.seq_rm(seq_id, p0, p1)
        self.cache.seq_rm(seq_id, p0, p1)

    def seq_cp(self, source: int, seq_id: int, n: int) -> None:
        self.cache.check(source, n)
        self.states.seq_cp(source, seq_id, n)
        self.cache.seq_cp(source, seq_id, n)

    def checkpoint(self, seq_id: int) -> None:
        self.states.checkpoint(seq_id)
        self.cache.checkpoint(seq_id)

    def drop_checkpoints(self, seq_id: int) -> None:
        self.states.drop_checkpoints(seq_id)
        self.cache.drop_checkpoints(seq_id)

    def clear(self) -> None:
        self.states.clear()
        self.cache.clear()

    def close(self) -> None:
        self.states.close()
        self.cache.close()
