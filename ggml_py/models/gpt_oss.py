"""gpt-oss: attention with a sink a head and, in all but every second layer, a sliding window; experts with biases and a clamped
gated unit, chosen by their logits, whose weights are the softmax of the chosen ones' logits."""
from ..graph.graph import Tensor
from .common import Batch
from .experts import SOFTMAX_OF_CHOSEN, MixtureOfExperts

ALPHA, LIMIT = 1.702, 7.0


class GptOss(MixtureOfExperts):
    name = "gpt-oss"
    ffn_norm = "post_attention_norm"
    routing = SOFTMAX_OF_CHOSEN, False

    def check(self) -> None:
        super().check()
        self.n_swa = self.keys.integer("attention.sliding_window", least=1)
        self.pattern = self.keys.integer("attention.sliding_window_pattern", 2)

    def window(self, il: int) -> int:
        """The last layer of each `pattern` layers sees all positions."""
        return self.n_swa if not self.pattern or il % self.pattern < self.pattern - 1 else 0

    def sinks(self, il: int) -> tuple[Tensor, ...]:
        return self.w(f"blk.{il}.attn_sinks.weight", self.hp.n_head[il]),

    def activate(self, b: Batch, gate: Tensor, up: Tensor, name: str) -> Tensor:
        return b.g.swiglu_oai(gate, up, alpha=ALPHA, limit=LIMIT, name=name)
