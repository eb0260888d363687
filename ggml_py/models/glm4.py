"""glm4 (GLM-4-0414, GLM-Z1, dense): norms before and after both blocks; gate and up are rows of one matrix. Files of models that
see images too have sections of rotary pairs, which are then halves instead of neighbours."""
import numpy as np

from . import sections
from .common import Transformer


class Glm4(Transformer):
    name = "glm4"
    attn_post_norm, ffn_post_norm = "post_attention_norm", "post_ffw_norm"
    gate_in_up = True

    def check(self) -> None:
        super().check()
        self.neox = self.rope_factors(1) is not None

    def rope_factors(self, n_ctx: int) -> np.ndarray | None:
        return sections.divisors(self.keys, self.hp.rope.n_rot, is_required=False)
