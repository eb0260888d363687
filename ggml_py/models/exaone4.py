"""exaone4 (EXAONE 4): norms after both blocks, none before; each head of Q and K is normed before its rotation. The larger model
has windows, and does not rotate heads in the layers without."""
from .common import Transformer
from .counted import EXAONE4_WINDOWS
from .hparams import Hparams, Windows


class Exaone4(Transformer):
    name = "exaone4"
    attn_norm = ffn_norm = ""
    attn_post_norm, ffn_post_norm = "post_attention_norm", "post_ffw_norm"
    norms_heads = True

    def read_hparams(self) -> Hparams:
        if self.keys.block_count() == EXAONE4_WINDOWS:
            self.windows = Windows(size=4096, pattern=4)
        return super().read_hparams()

    def rope_kind(self, il: int) -> str | None:
        return super().rope_kind(il) if self.windows is None or self.hp.windows[il] else None
