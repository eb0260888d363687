"""qwen2moe (Qwen 1.5 and 2 with experts): experts chosen by a softmax, whose weights are not divided by their sum, and a shared
one with a gate; Q, K and V have biases."""
from .experts import SOFTMAX, MixtureOfExperts


class Qwen2MoE(MixtureOfExperts):
    name = "qwen2moe"
    routing = SOFTMAX, False
    gates_shared = True

    def check(self) -> None:
        self.n_ff_shared = self.keys.per_block("expert_shared_feed_forward_length", self.hp.n_block, self.hp.n_ff)
        super().check()
