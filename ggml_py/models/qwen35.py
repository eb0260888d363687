"""qwen35 (Qwen 3.5, dense): gated delta nets and gated attention; value heads of the file are in the order of their key heads."""
import numpy as np

from . import sections
from .delta_net import DeltaNetModel


class Qwen35(DeltaNetModel):
    name = "qwen35"
    tiled = True

    def rope_factors(self, n_ctx: int) -> np.ndarray | None:
        return sections.divisors(self.keys, self.hp.rope.n_rot, in_turn=True)
