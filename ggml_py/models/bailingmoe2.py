"""bailingmoe2 (Ling 2.0): Q, K and V are rows of one matrix, Q and K are normed a head; leading dense layers, then experts, mostly in groups, with a bias
for the choice, and shared ones."""
from ..errors import UserError
from .experts import Experts, MixtureOfExperts
from .qwen3 import Qwen3


class BailingMoE2(MixtureOfExperts, Qwen3):
    name = "bailingmoe2"

    def read_experts(self) -> Experts:
        u32 = lambda key, *default: self.file.get(f"{self.name}.{key}", "u32", *default)
        shared, n_shared = u32("expert_shared_feed_forward_length", 0), u32("expert_shared_count")
        return Experts.read(self.file, self.hp, **{"n_ff_shared": [shared * n_shared] * self.hp.n_layer} if shared else {})

    def check(self) -> None:
        super().check()
        for name in "output.weight", "blk.0.attn_qkv.weight":
            if name not in self.w:
                raise UserError(f"{self.file.path}: tensor {name} is missing")
