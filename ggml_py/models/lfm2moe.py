"""lfm2moe (LFM2 with experts): lfm2 whose feed-forward blocks, but for leading ones, are experts, with a bias for the choice."""
from .experts import MixtureOfExperts
from .lfm2 import Lfm2


class Lfm2MoE(MixtureOfExperts, Lfm2):
    name = "lfm2moe"
    leading_dense = True

    def check(self) -> None:
        self.routing = self.keys.integer("expert_gating_func"), True
        super().check()
        self.require(*(f"blk.{il}.exp_probs_b.bias" for il in range(self.hp.n_layer) if self.has_experts(il)))
