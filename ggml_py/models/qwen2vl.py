"""qwen2vl (Qwen2-VL and 2.5-VL), the text: as qwen2 with sections of rotary pairs."""
import numpy as np

from . import sections
from .qwen2 import Qwen2


class Qwen2VL(Qwen2):
    name = "qwen2vl"

    def rope_factors(self, n_ctx: int) -> np.ndarray | None:
        return sections.divisors(self.keys, self.hp.rope.n_rot)
