"""olmo2 (OLMo 2, Olmo 3): norms after both blocks, none before; Q and K are normed as a whole. Of Olmo 3 most layers have a
window; they rotate without the scaling of the others."""
from .common import Transformer
from .hparams import Windows


class Olmo2(Transformer):
    name = "olmo2"
    attn_norm = ffn_norm = ""
    attn_post_norm, ffn_post_norm = "post_attention_norm", "post_ffw_norm"
    norms_projections = True
    windows = Windows(size=0, pattern=4, scaled=False)

    def check(self) -> None:
        super().check()
        self.require("output.weight")
