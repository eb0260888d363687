"""gemma (Gemma 1): embeddings multiplied by the root of their length, feed-forward blocks gated by gelu, a tied head."""
import numpy as np

from ..graph.graph import Tensor
from .common import Batch, Transformer
from .hparams import Hparams


class Gemma(Transformer):
    name = "gemma"
    tied = True

    def read_hparams(self) -> Hparams:
        hp = super().read_hparams()
        self.embedding_scale = float(np.sqrt(np.float32(hp.n_embd)))
        return hp

    def activate(self, b: Batch, gate: Tensor, up: Tensor, name: str) -> Tensor:
        return b.g.geglu(gate, up, name=name)
