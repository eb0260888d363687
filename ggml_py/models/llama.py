"""llama: Llama 1 to 3, Mistral, SmolLM2 and others. Rotary pairs are neighbours;
frequency factors come from `rope_freqs.weight` or longrope's tensors."""
import numpy as np

from ..base.errors import UserError
from .common import Transformer


class Llama(Transformer):
    name = "llama"
    neox = False

    def check(self) -> None:
        super().check()
        n_rot = self.hp.rope.n_rot
        for key, size in ("key_length", self.hp.n_embd_head_k[0]), ("value_length", self.hp.n_embd_head_v[0]):
            if size != n_rot:
                raise self.keys.error(f"attention.{key}", size, f"{n_rot}, since all channels of heads are rotated", n_rot)

    def rope_factors(self, n_ctx: int) -> np.ndarray | None:
        name = "rope_freqs.weight"
        if self.hp.scaling == "longrope":
            name = "rope_factors_long.weight" if n_ctx > self.hp.rope.n_ctx_orig else "rope_factors_short.weight"
        if name not in self.w:
            return None
        factors = self.w.vector(name, self.hp.rope.n_rot // 2)
        if not (factors > 0).all():
            raise UserError(f"{self.file.path}: tensor {name} has the value {factors[~(factors > 0)][0]}, all must be positive")
        return factors
