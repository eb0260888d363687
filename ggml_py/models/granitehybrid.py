"""granitehybrid (Granite 4): granite, or granitemoe where there are experts, of which the blocks without KV heads are Mamba 2
mixers."""
from .granite import GraniteMoE
from .mamba2 import Mamba2Model


class GraniteHybrid(GraniteMoE, Mamba2Model):
    name = "granitehybrid"
    needs_logit_scale = False
    may_be_dense = True
