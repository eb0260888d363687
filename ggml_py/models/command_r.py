"""command-r (Command R and R+): as cohere2, but all layers see all positions and rotate heads. The larger model norms each head
of Q and K before its rotation, with weights of its own."""
from ..graph.graph import Tensor
from .cohere2 import Cohere
from .common import Batch
from .counted import COMMAND_R_NORMS
from .hparams import Hparams


class CommandR(Cohere):
    name = "command-r"

    def read_hparams(self) -> Hparams:
        self.logit_scale = self.keys.real("logit_scale", 0.0, zero=True) or 1.0
        return super().read_hparams()

    def norm_head(self, b: Batch, il: int, x: Tensor, part: str) -> Tensor:
        if self.hp.n_layer < COMMAND_R_NORMS:
            return x
        base, dim = f"blk.{il}.attn_{part}_norm", self.hp.n_embd_head_k[il]
        w, name = self.w.table(f"{base}.weight", x.shape[1] // dim, dim), f"{part.upper()}cur_normed-{il}"
        y = b.g.layer_norm(x, self.w.ones(f"{base}.ones", dim), eps=self.hp.eps, name=f"{name}_unweighted")
        return b.g.mul(y, w.view((x.shape[1],)), name=name)
