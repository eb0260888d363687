"""qwen3moe: attention as qwen3; each feed-forward block is experts chosen by a softmax over all, whose weights are normed."""
from .experts import SOFTMAX, MixtureOfExperts
from .qwen3 import Qwen3


class Qwen3MoE(MixtureOfExperts, Qwen3):
    name = "qwen3moe"
    routing = SOFTMAX, True
