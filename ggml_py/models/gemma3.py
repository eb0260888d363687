"""gemma3 (its text): gemma2 with a norm of each head of Q and K instead of the scores' cap. Layers with a window, all but every
sixth, have rotary angles of their own, which are never scaled."""
from .gemma2 import Gemma2
from .hparams import Windows


class Gemma3(Gemma2):
    name = "gemma3"
    tied = False
    norms_heads = True
    windows = Windows(size=0, pattern=6, base=10000.0, scaled=False)

    def read_caps(self) -> None:
        self.logit_cap = self.keys.real("final_logit_softcapping", 0.0, zero=True)
