"""minimax-m2 (MiniMax M2): Q and K are normed as a whole, some of the channels rotated; experts chosen by sigmoids and a bias."""
from .experts import SIGMOID, MixtureOfExperts


class MiniMaxM2(MixtureOfExperts):
    name = "minimax-m2"
    norms_projections = True
    routing = SIGMOID, True
    as_wide_as_dense = True

    def check(self) -> None:
        super().check()
        self.keys.integer("expert_gating_func", 0, least=SIGMOID, most=SIGMOID)
        self.require("output.weight", *(f"blk.{il}.exp_probs_b.bias" for il in range(self.hp.n_layer)))
