"""gemma4: gemma3 with heads of another size in layers that see all positions, values that are normed, and scores that are not
scaled; maybe with layers that share caches, embeddings for each layer, experts beside each dense block."""
from ..graph.graph import Tensor
from .common import Batch
from .experts import SOFTMAX, MixtureOfExperts
from .gemma3 import Gemma3
from .hparams import Windows
from .per_layer import PerLayerEmbeddings
from .shared_caches import SharedCaches


class Gemma4(SharedCaches, PerLayerEmbeddings, MixtureOfExperts, Gemma3):
    name = "gemma4"
    routing = SOFTMAX, True
    may_be_dense = True
    windows = Windows(base=10000.0, scaled=False, heads=True)

    def check(self) -> None:
        super().check()
        self.require("rope_freqs.weight")

    def attention_scale(self, il: int) -> float:
        return 1.0

    def qkv(self, b: Batch, il: int, h: Tensor, wanted: str = "qkv") -> list[Tensor]:
        """Without a matrix for V, V is the product for K."""
        has_v = f"blk.{il}.attn_v.weight" in self.w or f"blk.{il}.attn_qkv.weight" in self.w
        head_k, head_v = self.hp.n_embd_head_k[il], self.hp.n_embd_head_v[il]
        if not has_v and head_v != head_k:
            raise self.keys.error("attention.value_length", head_v, f"{head_k}, that of keys, since there is no "
                                  f"blk.{il}.attn_v.weight", head_k)
        parts = super().qkv(b, il, h, wanted if has_v else wanted.removesuffix("v"))
        return parts if len(parts) == len(wanted) else [*parts, parts[1]]

    def attend(self, b: Batch, il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ones = self.w.ones(f"blk.{il}.attn_v_norm", self.hp.n_embd_head_v[il])
        return super().attend(b, il, q, k, b.g.rms_norm(v, ones, eps=self.hp.eps, name=f"Vcur_normed-{il}"))

    def fed(self, b: Batch, il: int, x: Tensor) -> Tensor:
        name, x = f"blk.{il}.layer_output_scale.weight", super().fed(b, il, x)
        return b.g.scale(x, factor=float(self.w.vector(name, 1)[0]), name=f"l_out_scaled-{il}") if name in self.w else x

    def feed_forward(self, b: Batch, il: int, x: Tensor) -> Tensor:
        """Experts are chosen by x as it is, and beside the dense block."""
        y = self.gated_ffn(b, il, self.norm(b, x, f"blk.{il}.ffn_norm", f"ffn_norm-{il}"), self.hp.n_ff[il])
        if not self.has_experts(il):
            return y
        norm = lambda x, name: self.norm(b, x, f"blk.{il}.{name}", f"{name}-{il}")
        routed = self.routed(b, il, norm(x, "pre_ffw_norm_2"), *self.route(b, il, x))
        return b.g.add(norm(y, "post_ffw_norm_1"), norm(routed, "post_ffw_norm_2"), name=f"ffn_sum-{il}")

    def router_logits(self, b: Batch, il: int, h: Tensor) -> Tensor:
        """Of h, normed with weights, over the root of its length."""
        p = f"blk.{il}.ffn_gate_inp"
        h = b.g.rms_norm(h, self.w(p + ".scale", self.hp.n_embd), eps=self.hp.eps, name=f"ffn_moe_inp-{il}")
        h = b.g.scale(h, factor=self.hp.n_embd**-0.5, name=f"ffn_moe_inp_scaled-{il}")
        return self.product(b, h, p, self.experts.n, f"ffn_moe_logits-{il}")
