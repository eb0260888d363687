"""qwen35moe (Qwen 3.5 and 3.6 with experts): qwen35 whose feed-forward blocks are experts and a shared one with a gate."""
from .experts import SOFTMAX, MixtureOfExperts
from .qwen35 import Qwen35


class Qwen35MoE(MixtureOfExperts, Qwen35):
    name = "qwen35moe"
    routing = SOFTMAX, True
    gates_shared = True

    def check(self) -> None:
        self.n_ff_shared = self.keys.per_block("expert_shared_feed_forward_length", self.hp.n_block, self.hp.n_ff)
        super().check()
