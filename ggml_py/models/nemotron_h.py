"""nemotron_h (Nemotron-H, Nemotron Nano 2): each block is one of three: a Mamba 2 mixer, attention that rotates nothing, or a
feed-forward block without a gate, of squared relu."""
from ..graph.graph import Tensor
from .common import Batch
from .mamba2 import Mamba2Model


class NemotronH(Mamba2Model):
    name = "nemotron_h"

    def is_ffn(self, il: int) -> bool:
        return self.hp.n_ff[il] > 0

    def is_recurrent(self, il: int) -> bool:
        return not self.is_ffn(il) and super().is_recurrent(il)

    def cache_sizes(self) -> list[tuple[int, int]]:
        return [(0, 0) if self.is_ffn(il) else sizes for il, sizes in enumerate(super().cache_sizes())]

    def rope_kind(self, il: int) -> None:
        return None

    def attention_scale(self, il: int) -> float:
        return self.keys.real("attention.scale", 0.0, zero=True) or super().attention_scale(il)

    def layer(self, b: Batch, il: int, x: Tensor) -> Tensor:
        """x + Block(norm x)."""
        h = self.norm(b, x, f"blk.{il}.attn_norm", f"attn_norm-{il}")
        h, out = (h, "") if self.is_ffn(il) else self.mixed(b, il, h)
        h, x = self.wanted_rows(b, il, attn_out=h, inp=x)
        h = self.linear(b, h, f"blk.{il}.{out}", self.hp.n_embd, name=f"attn_out-{il}") if out else self.ffn(b, il, h)
        return b.g.add(x, h, name=f"l_out-{il}")

    def ffn(self, b: Batch, il: int, h: Tensor) -> Tensor:
        return self.plain_ffn(b, il, h, self.hp.n_ff[il], "relu_sqr")
