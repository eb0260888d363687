"""bailingmoe2 (Ling 2.0): Q, K and V are rows of one matrix, Q and K are normed a head; leading dense layers, then experts,
mostly in groups, with a bias for the choice, and shared ones."""
from .experts import MixtureOfExperts
from .qwen3 import Qwen3


class BailingMoE2(MixtureOfExperts, Qwen3):
    name = "bailingmoe2"

    def check(self) -> None:
        shared, n_shared = self.keys.integer("expert_shared_feed_forward_length", 0), self.keys.integer("expert_shared_count")
        self.n_ff_shared = [shared * n_shared] * self.hp.n_layer if shared else None
        super().check()
        self.require("output.weight", "blk.0.attn_qkv.weight")
