"""glm4moe (GLM-4.5): Q, K and V have biases, in some models Q and K a norm a head; leading dense layers, then experts chosen with
a bias, and a shared one.

The NextN block behind the layers rotates without sections, whatever the file says."""
import numpy as np

from ..graph.graph import Tensor
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
        """Of text the positions of the first three sections are the token's, that of a fourth is 0: its pairs do not turn."""
        sections = self.keys.per_block("rope.dimension_sections", 4, 0, kind="i32")
        if not (sections[0] > 0 and sections[1] > 0) or sections[3] <= 0:
            return None
        pairs = np.arange(self.hp.rope.n_rot // 2) % sum(sections)
        return np.where(pairs < sum(sections[:3]), 1, np.inf).astype(np.float32)

    def new_nextn_rope_tables(self, n_ctx: int) -> RopeTables:
        return self.upload_rope_tables(n_ctx, None)
