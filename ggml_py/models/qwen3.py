"""qwen3 (dense): each head of Q and K is normed, with weights shared by all heads, before its rotation."""
from ..graph.graph import Tensor
from .common import Batch, Transformer


class Qwen3(Transformer):
    name = "qwen3"

    def norm_head(self, b: Batch, x: Tensor, weight: str, name: str) -> Tensor:
        return b.g.rms_norm(x, self.w(weight, self.hp.n_embd_head_k), eps=self.hp.eps, name=name)
