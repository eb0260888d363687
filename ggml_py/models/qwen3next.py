"""qwen3next (Qwen3-Next): gated delta nets, gated attention, experts and a shared one with a gate."""
from ..graph.graph import Tensor
from .common import Batch
from .delta_net import DeltaNetModel
from .experts import SOFTMAX, MixtureOfExperts


class Qwen3Next(MixtureOfExperts, DeltaNetModel):
    name = "qwen3next"
    routing = SOFTMAX, True
    gates_shared = True

    def check(self) -> None:
        self.n_ff_shared = self.keys.per_block("expert_shared_feed_forward_length", self.hp.n_block, self.hp.n_ff)
        super().check()

    def qkv_and_z(self, b: Batch, il: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """Older files have one matrix, in which each key head has q, k, and v and z of its value heads."""
        d, g, p = self.delta, b.g, f"blk.{il}.ssm_in"
        if f"{p}.weight" not in self.w:
            return super().qkv_and_z(b, il, h)
        qkvz, n = self.linear(b, h, p, d.n_channels + d.n_values, name=f"ssm_in-{il}"), d.n_head_v // d.n_head_k * d.dim
        starts = {"q": (0, d.dim), "k": (d.dim, d.dim), "v": (2 * d.dim, n), "z": (2 * d.dim + n, n)}
        parts = {part: g.slice_heads(qkvz, n_head=d.n_head_k, first=first, n=n, name=f"ssm_{part}-{il}")
                 for part, (first, n) in starts.items()}
        qk = g.concat_heads(parts["q"], parts["k"], n_head=1, n_head_y=1, name=f"ssm_qk-{il}")
        return g.concat_heads(qk, parts["v"], n_head=1, n_head_y=1, name=f"ssm_qkv-{il}"), parts["z"]

    def beta_and_alpha(self, b: Batch, il: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """Of each key head beta of its value heads, and behind them alpha."""
        d, n = self.delta, self.delta.n_head_v // self.delta.n_head_k
        ba = self.linear(b, h, f"blk.{il}.ssm_ba", 2 * d.n_head_v, name=f"ssm_ba-{il}")
        beta, alpha = (b.g.slice_heads(ba, n_head=d.n_head_k, first=i * n, n=n, name=f"ssm_{name}_lin-{il}")
                       for i, name in enumerate(("beta", "alpha")))
        return beta, alpha
