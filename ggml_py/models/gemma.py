"""gemma (Gemma 1): embeddings multiplied by the root of their length, feed-forward blocks gated by gelu, a tied head."""
import numpy as np

from ..graph.graph import Tensor
from .common import Batch, Transformer


class Gemma(Transformer):
    name = "gemma"
    tied = True

    def check(self) -> None:
        super().check()
        self.embedding_scale = float(np.sqrt(np.float32(self.hp.n_embd)))

    def activate(self, b: Batch, gate: Tensor, up: Tensor, name: str) -> Tensor:
        return b.g.geglu(gate, up, name=name)
