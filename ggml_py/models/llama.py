"""llama: Llama 1 to 3, Mistral, SmolLM2 and others. Rotary pairs are neighbours."""
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
