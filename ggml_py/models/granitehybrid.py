"""granitehybrid (Granite 4): granite, or granitemoe where there are experts, of which the blocks without KV heads are Mamba 2
mixers."""
from .granite import GraniteMoE
from .mamba2 import Mamba2Model


class GraniteHybrid(GraniteMoE, Mamba2Model):
    name = "granitehybrid"
    needs_logit_scale = False

    def check(self) -> None:
        if self.has_experts(0):
            super().check()

    def has_experts(self, il: int) -> bool:
        return self.keys.integer("expert_count", 0) > 0
