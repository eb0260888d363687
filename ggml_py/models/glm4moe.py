"""glm4moe (GLM-4.5): Q, K and V have biases, in some models Q and K a norm a head; leading dense layers, then experts chosen with
a bias, and a shared one.

The NextN block behind the layers rotates without sections, whatever the file says."""
import numpy as np

from ..graph.graph import Tensor
from . import sections
from .common import Batch, RopeTables
from .experts import SIGMOID, MixtureOfExperts


class Glm4MoE(MixtureOfExperts):
    name = "glm4moe"
    ffn_norm = "post_attention_norm"
    default_gating = SIGMOID
    has_nextn = True

    def check(self) -> None:
        super().check()
        self.norms_heads = "blk.0.attn_q_norm.weight" in self.w

    def route(self, b: Batch, il: int, h: Tensor) -> tuple[Tensor, Tensor]:
        self.w(f"blk.{il}.exp_probs_b.bias", self.experts.n)  # must be there
        return super().route(b, il, h)

    def rope_factors(self, n_ctx: int) -> np.ndarray | None:
        return sections.divisors(self.keys, self.hp.rope.n_rot, is_required=False)

    def new_nextn_rope_tables(self, n_ctx: int) -> RopeTables:
        return self.upload_rope_tables(n_ctx, None)
