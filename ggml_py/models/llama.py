"""llama: Llama 1 to 3, Mistral, SmolLM2 and others. Rotary pairs are neighbours; frequency factors come from `rope_freqs.weight` or longrope's tensors."""
import numpy as np

from ..errors import UserError
from .common import Transformer


class Llama(Transformer):
    name = "llama"
    neox = False

    def check(self) -> None:
        super().check()
        hp = self.hp
        if not hp.rope.n_rot == hp.n_embd_head_k == hp.n_embd_head_v:
            raise UserError(f"{self.file.path}: llama: rotated channels, key and value size must be equal, got {hp.rope.n_rot}, {hp.n_embd_head_k}, {hp.n_embd_head_v}")

    def rope_factors(self, n_ctx: int) -> np.ndarray | None:
        name = "rope_freqs.weight"
        if self.hp.scaling == "longrope":
            name = "rope_factors_long.weight" if n_ctx > self.hp.rope.n_ctx_orig else "rope_factors_short.weight"
        return self.w.vector(name, self.hp.rope.n_rot // 2) if name in self.w else None
