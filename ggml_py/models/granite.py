"""granite and granitemoe (Granite 3): as llama, with scales of embeddings, of what both blocks add, of attention and of logits;
files may say that heads are not rotated. Of the second each feed-forward block is experts chosen by a softmax, in some files with
a shared one."""
from ..graph.graph import Tensor
from .common import Batch, Transformer
from .experts import SOFTMAX, MixtureOfExperts
from .hparams import Hparams


class Granite(Transformer):
    name = "granite"
    neox = False
    needs_logit_scale = True

    def read_hparams(self) -> Hparams:
        keys = self.keys
        scale = lambda key: keys.real(key, 0.0, zero=True)
        self.embedding_scale, self.residual_scale = scale("embedding_scale") or 1.0, scale("residual_scale") or 1.0
        self.kq_scale = scale("attention.scale")
        self.logit_scale = 1 / (keys.real("logit_scale") if self.needs_logit_scale else scale("logit_scale") or 1.0)
        self.rotates = keys.flag("rope.scaling.finetuned", True)
        return super().read_hparams()

    def rope_kind(self, il: int) -> str | None:
        return super().rope_kind(il) if self.rotates else None

    def attention_scale(self, il: int) -> float:
        return self.kq_scale or super().attention_scale(il)

    def joined(self, b: Batch, il: int, x: Tensor, y: Tensor, post_norm: str, name: str) -> Tensor:
        if self.residual_scale != 1:
            y = b.g.scale(y, factor=self.residual_scale, name=f"{name}_scaled-{il}")
        return super().joined(b, il, x, y, post_norm, name)


class GraniteMoE(MixtureOfExperts, Granite):
    name = "granitemoe"
    routing = SOFTMAX, True
    as_wide_as_dense = True

    def check(self) -> None:
        self.n_ff_shared = self.keys.per_block("expert_shared_feed_forward_length", self.hp.n_block, 0)
        super().check()
