"""mistral3 (Mistral Small 3, Ministral 3): as llama, with YaRN whose magnitude a log multiplier takes back, and a temperature of
queries; experts as those of Mixtral where there are some."""
from dataclasses import replace

from ..base.exact_math import log
from ..base.rope_table import Temperature
from .experts import SOFTMAX, MixtureOfExperts
from .hparams import Hparams
from .common import Batch
from ..graph.graph import Tensor


class Mistral3(MixtureOfExperts):
    name = "mistral3"
    neox = False
    routing = SOFTMAX, True
    as_wide_as_dense = True
    may_be_dense = True

    def read_hparams(self) -> Hparams:
        """The rotation multiplies by 1 + 0.1 ln f of YaRN's factor f; a multiplier m divides that by 1 + 0.1 m ln f."""
        hp, keys = super().read_hparams(), self.keys
        if scale := keys.real("attention.temperature_scale", 0.0, zero=True):
            self.temperature = Temperature(scale, 0, hp.rope.n_ctx_orig)
        if not hp.rope.yarn:
            return hp
        ln, m = float(log(1 / hp.rope.freq_scale)), keys.real("rope.scaling.yarn_log_multiplier", 0.0, zero=True)
        factor = keys.real("rope.scaling.attn_factor", 1.0) / (1 + 0.1 * m * ln if m and ln > 0 else 1)
        rope = replace(hp.rope, attn_factor=factor, beta_fast=keys.real("rope.scaling.yarn_beta_fast", 32.0),
                       beta_slow=keys.real("rope.scaling.yarn_beta_slow", 1.0))
        return replace(hp, rope=rope)

    def placed(self, b: Batch, il: int, x: Tensor, part: str, n_head: int) -> Tensor:
        x = super().placed(b, il, x, part, n_head)
        return x if part != "q" or self.temperature is None else self.tempered(b, il, x)
