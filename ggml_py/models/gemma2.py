"""gemma2: gemma with norms behind attention and feed-forward blocks, caps of scores and logits, and windows in every other
layer."""
from .counted import LAYERS_OF_27B
from .gemma import Gemma
from .hparams import Hparams, Windows


class Gemma2(Gemma):
    name = "gemma2"
    attn_post_norm, ffn_post_norm = "post_attention_norm", "post_ffw_norm"
    windows = Windows(size=4096, pattern=2)

    def read_hparams(self) -> Hparams:
        self.read_caps()
        return super().read_hparams()

    def read_caps(self) -> None:
        self.attention_cap = self.keys.real("attn_logit_softcapping", 50.0)
        self.logit_cap = self.keys.real("final_logit_softcapping", 30.0)

    def attention_scale(self, il: int) -> float:
        hp = self.hp
        size = hp.n_embd // hp.n_head[il] if hp.n_layer == LAYERS_OF_27B.get(self.name) else hp.n_embd_head_k[il]
        return size**-0.5
