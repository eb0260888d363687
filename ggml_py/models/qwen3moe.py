"""qwen3moe: attention as qwen3; each feed-forward block is experts chosen by a softmax over all, whose weights are normed."""
from .experts import SOFTMAX, Experts, MixtureOfExperts
from .qwen3 import Qwen3


class Qwen3MoE(MixtureOfExperts, Qwen3):
    name = "qwen3moe"

    def read_experts(self) -> Experts:
        return Experts.read(self.file, self.hp, gating=SOFTMAX, norm=True, scale=0.0, n_dense=0, n_ff_shared=[0] * self.hp.n_layer)
