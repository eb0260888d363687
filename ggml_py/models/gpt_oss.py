"""gpt-oss: attention with a sink a head and, in all but every second layer, a sliding window; experts with biases and a clamped gated unit, chosen by their
logits, whose weights are the softmax of the chosen ones' logits."""
from ..errors import UserError
from ..graph import Tensor
from .common import Batch
from .experts import SOFTMAX_OF_CHOSEN, Experts, MixtureOfExperts

ALPHA, LIMIT = 1.702, 7.0


class GptOss(MixtureOfExperts):
    name = "gpt-oss"
    ffn_norm = "post_attention_norm"

    def read_experts(self) -> Experts:
        return Experts.read(self.file, self.hp, gating=SOFTMAX_OF_CHOSEN, norm=False, scale=0.0, n_dense=0, n_ff_shared=[0] * self.hp.n_layer)

    def check(self) -> None:
        super().check()
        self.n_swa = self.file.get(f"{self.name}.attention.sliding_window", "u32")
        self.pattern = self.file.get(f"{self.name}.attention.sliding_window_pattern", "u32", 2)
        if not self.n_swa:
            raise UserError(f"{self.file.path}: {self.name}.attention.sliding_window is 0, must be positive")

    def window(self, il: int) -> int:
        """The last layer of each `pattern` layers sees all positions."""
        return self.n_swa if not self.pattern or il % self.pattern < self.pattern - 1 else 0

    def sinks(self, il: int) -> tuple[Tensor, ...]:
        return self.w(f"blk.{il}.attn_sinks.weight", self.hp.n_head[il]),

    def activate(self, b: Batch, gate: Tensor, up: Tensor, name: str) -> Tensor:
        return b.g.swiglu_oai(gate, up, alpha=ALPHA, limit=LIMIT, name=name)
