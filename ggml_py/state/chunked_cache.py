"""A KV cache of which some layers see the positions of a query's own chunk alone: to them chunks are sequences."""
import numpy as np

from ..base.errors import UserError
from ..graph.graph import Graph, Tensor
from .kv_cache import KVCache


class ChunkedKVCache(KVCache):
    """Contexts of more than a chunk have as many cells as whole chunks, of which each is as a sequence in `present`."""

    def __init__(self, chunk: int, backends, layers, devices, n_ctx: int, *args, **kwargs):
        """chunk: positions of one; the rest as of KVCache."""
        if n_ctx > chunk and n_ctx % chunk:
            raise UserError(f"n_ctx: {n_ctx} positions of a sequence are not whole chunks, allowed: up to {chunk}, or so many "
                            "times a number")
        super().__init__(backends, layers, devices, n_ctx, *args, **kwargs)
        self.chunk = chunk

    def inputs(self, graph: Graph, n_tokens: int) -> None:
        super().inputs(graph, n_tokens)
        if self.n_ctx > self.chunk:
            graph.input("chunk", "i32", (n_tokens,))
            graph.input("chunk_pos", "i32", (n_tokens,))

    def values(self, seq: np.ndarray, pos: np.ndarray, n: int) -> dict[str, np.ndarray]:
        found = super().values(seq, pos, n)
        if self.n_ctx > self.chunk:
            chunks = seq * (self.n_ctx // self.chunk) + pos // self.chunk
            found |= {"chunk": chunks.astype(np.int32), "chunk_pos": (pos % self.chunk).astype(np.int32)}
        return found


def seen_in_chunk(graph: Graph, pos: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """(chunk and position in it of each token, which positions of each chunk are there), as attention takes sequences."""
    present = graph.inputs["present"]
    if "chunk" not in graph.inputs:  # all positions are in the first
        return graph.inputs["seq"], pos, present
    n_seq, n_ctx = present.shape
    return graph.inputs["chunk"], graph.inputs["chunk_pos"], present.view((n_seq * n_ctx // chunk, chunk))
