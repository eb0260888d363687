"""qwen3vl and qwen3vlmoe (Qwen3-VL), the text: as qwen3 and qwen3moe with rotary pairs dealt to sections in turn."""
import numpy as np

from . import sections
from .qwen3 import Qwen3
from .qwen3moe import Qwen3MoE


class Qwen3VL(Qwen3):
    name = "qwen3vl"

    def rope_factors(self, n_ctx: int) -> np.ndarray | None:
        return sections.divisors(self.keys, self.hp.rope.n_rot, in_turn=True)


class Qwen3VLMoE(Qwen3MoE, Qwen3VL):
    name = "qwen3vlmoe"
