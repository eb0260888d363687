"""nemotron_h_moe (Nemotron 3): nemotron_h whose feed-forward blocks are experts and a shared one, all without gates; the experts
may see a narrower, latent row."""
from ..graph.graph import Tensor
from .common import Batch
from .experts import SIGMOID, Chosen, MixtureOfExperts
from .nemotron_h import NemotronH


class NemotronHMoE(MixtureOfExperts, NemotronH):
    name = "nemotron_h_moe"
    default_gating = SIGMOID

    def check(self) -> None:
        self.n_latent = self.keys.integer("moe_latent_size", 0)
        self.n_ff_shared = self.keys.per_block("expert_shared_feed_forward_length", self.hp.n_block)
        super().check()
        self.require(*(f"blk.{il}.exp_probs_b.bias" for il in range(self.hp.n_layer) if self.is_ffn(il)))

    def shared(self, b: Batch, il: int, h: Tensor, n_ff: int) -> Tensor:
        return self.plain_ffn(b, il, h, n_ff, "relu_sqr", "_shexp")

    def routed(self, b: Batch, il: int, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.n_latent:
            h = self.linear(b, h, f"blk.{il}.ffn_latent_down", self.n_latent, name=f"ffn_latent_down-{il}")
        y = b.g.weighted_sum(self.outputs(b, il, h, ids), weights, name=f"ffn_moe_out-{il}")
        return self.linear(b, y, f"blk.{il}.ffn_latent_up", self.hp.n_embd, name=f"ffn_latent_up-{il}") if self.n_latent else y

    def blocks(self, b: Batch, il: int, h: Tensor, chosen: Chosen) -> Tensor:
        p, n_ff, n, end = f"blk.{il}.ffn_", self.experts.n_ff[il], h.shape[1], f"-{il}{chosen.suffix}"
        y = b.g.relu_sqr(self.expert_linear(b, h, chosen, f"{p}up_exps", n_ff, f"ffn_moe_up{end}"), name=f"ffn_moe_act{end}")
        return self.expert_linear(b, y, chosen, f"{p}down_exps", n, f"ffn_moe_down{end}")
