"""ernie4_5-moe: leading dense layers, then experts chosen by a softmax, in some files with a bias, and a shared one."""
from .ernie4_5 import Ernie45
from .experts import SOFTMAX, MixtureOfExperts


class Ernie45MoE(MixtureOfExperts, Ernie45):
    name = "ernie4_5-moe"
    routing = SOFTMAX, True
    leading_dense = True

    def check(self) -> None:
        self.n_ff_shared = self.keys.per_block("expert_shared_feed_forward_length", self.hp.n_block, 0)
        self.keys.integer("interleave_moe_layer_step", 1, least=1, most=1)
        super().check()
