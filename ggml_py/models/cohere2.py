"""cohere2 (Command R7B): attention and feed-forward block side by side, behind one layer norm; a tied head, logits with a scale.
Most layers have a window, the others do not rotate heads."""
from ..graph.graph import Tensor
from .common import Batch
from .hparams import Hparams, Windows
from .layer_norms import LayerNormModel


class Cohere(LayerNormModel):
    """What both architectures of this kind have."""
    neox = False
    tied = True

    def layer(self, b: Batch, il: int, x: Tensor) -> Tensor:
        """(FFN(norm x) + x) + Attn(norm x)."""
        h = self.norm(b, x, f"blk.{il}.attn_norm", f"attn_norm-{il}")
        y, out = self.mixed(b, il, h)
        y, h, x = self.wanted_rows(b, il, attn_out=y, ffn_inp=h, inp=x)
        y = self.linear(b, y, f"blk.{il}.{out}", self.hp.n_embd, name=f"attn_out-{il}")
        return b.g.add(b.g.add(self.ffn(b, il, h), x, name=f"ffn_sum-{il}"), y, name=f"l_out-{il}")


class Cohere2(Cohere):
    name = "cohere2"
    windows = Windows(pattern=4)

    def read_hparams(self) -> Hparams:
        self.logit_scale = self.keys.real("logit_scale")
        return super().read_hparams()

    def rope_kind(self, il: int) -> str | None:
        return super().rope_kind(il) if self.hp.windows[il] else None
