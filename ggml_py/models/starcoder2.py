"""starcoder2: layer norms and all products with biases; feed-forward blocks of gelu, without a gate."""
from ..graph.graph import Tensor
from .common import Batch
from .layer_norms import LayerNormModel

BIASED = "attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"


class Starcoder2(LayerNormModel):
    name = "starcoder2"
    norm_biases = True

    def check(self) -> None:
        super().check()
        self.require(*(f"blk.{il}.{name}.bias" for il in range(self.hp.n_layer) for name in BIASED))

    def ffn(self, b: Batch, il: int, h: Tensor) -> Tensor:
        return self.plain_ffn(b, il, h, self.hp.n_ff[il], "gelu")
