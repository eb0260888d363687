"""lfm2 (LFM2): blocks without KV heads have, in the place of attention, a short convolution over time, gated before it and
behind."""
from ..graph.graph import Tensor
from ..state.recurrent import StateSizes
from .common import Batch, Transformer
from .hparams import Hparams, Windows


class Lfm2(Transformer):
    name = "lfm2"
    without_kv = True
    norms_heads = True
    final_norm = "token_embd_norm"
    windows = Windows(size=0, pattern=0)

    def read_hparams(self) -> Hparams:
        self.taps = self.keys.integer("shortconv.l_cache", least=2)
        return super().read_hparams()

    def state_sizes(self) -> StateSizes:
        n = (self.taps - 1) * self.hp.n_embd
        return {il: {"conv": n} for il in range(self.hp.n_layer) if not self.hp.n_head_kv[il]}

    def mixed(self, b: Batch, il: int, h: Tensor) -> tuple[Tensor, str]:
        if self.hp.n_head_kv[il]:
            return super().mixed(b, il, h)
        n, g, p = self.hp.n_embd, b.g, f"blk.{il}.shortconv."
        before, behind, x = (self.linear(b, h, p + "in_proj", 3 * n, f"conv_{part}-{il}", (i * n, (i + 1) * n))
                             for i, part in enumerate("bcx"))
        y, _ = g.ssm_conv(b.memory.state(il, "conv"), g.mul(before, x, name=f"conv_bx-{il}"),
                          self.w.table(p + "conv.weight", n, self.taps), g.inputs["runs"], activation="none", name=f"conv-{il}")
        return g.mul(behind, y, name=f"conv_gated-{il}"), "shortconv.out_proj"
