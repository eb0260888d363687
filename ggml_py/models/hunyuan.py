"""hunyuan-dense and hunyuan-moe (Hunyuan): each head of Q and K is normed after its rotation; of the second, each feed-forward
block is experts chosen by a softmax and a shared one."""
from ..graph.graph import Tensor
from .common import Batch, Transformer
from .experts import SOFTMAX, MixtureOfExperts


class Hunyuan(Transformer):
    name = "hunyuan-dense"
    norms_heads = True

    def placed(self, b: Batch, il: int, x: Tensor, part: str, n_head: int) -> Tensor:
        return self.norm_head(b, il, self.rotate(b, il, x, n_head, f"{part.upper()}cur_rotated-{il}"), part)


class HunyuanMoE(MixtureOfExperts, Hunyuan):
    name = "hunyuan-moe"
    routing = SOFTMAX, True
    as_wide_as_dense = True

    def check(self) -> None:
        self.n_ff_shared = self.keys.per_block("expert_shared_feed_forward_length", self.hp.n_block, self.hp.n_ff)
        super().check()
