"""gpt-oss: attention with a sink a head and, in all but every second layer, a sliding window; experts with biases and a clamped
gated unit, chosen by their logits, whose weights are the softmax of the chosen ones' logits."""
from ..graph.graph import Tensor
from .common import Batch
from .experts import SOFTMAX_OF_CHOSEN, MixtureOfExperts
from .hparams import Windows

ALPHA, LIMIT = 1.702, 7.0


class GptOss(MixtureOfExperts):
    name = "gpt-oss"
    ffn_norm = "post_attention_norm"
    routing = SOFTMAX_OF_CHOSEN, False
    windows = Windows(pattern=2)

    def sinks(self, il: int) -> tuple[Tensor, ...]:
        return self.w(f"blk.{il}.attn_sinks.weight", self.hp.n_head[il]),

    def activate(self, b: Batch, gate: Tensor, up: Tensor, name: str) -> Tensor:
        return b.g.swiglu_oai(gate, up, alpha=ALPHA, limit=LIMIT, name=name)
