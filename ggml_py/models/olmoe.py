"""olmoe (OLMoE): Q and K are normed as a whole; experts chosen by a softmax, whose weights are not divided by their sum."""
from .experts import SOFTMAX, MixtureOfExperts


class OlmoE(MixtureOfExperts):
    name = "olmoe"
    norms_projections = True
    routing = SOFTMAX, False
    as_wide_as_dense = True

    def check(self) -> None:
        super().check()
        self.require("output.weight")
