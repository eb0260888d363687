"""Per-layer embeddings: beside its embedding a token has some channels for each layer, from a table of their own and from its
embedding, which gate what is added behind the layer's feed-forward block."""
from ..graph.graph import Tensor
from .common import Batch, Transformer


class PerLayerEmbeddings(Transformer):
    """Base of architectures whose files may have them."""

    @property
    def n_per_layer(self) -> int:
        """Channels of a token in a layer; 0: there are none."""
        return self.keys.integer("embedding_length_per_layer_input")

    def embed(self, b: Batch, tokens: Tensor) -> Tensor:
        g, x, n, n_embd = b.g, super().embed(b, tokens), self.n_per_layer, self.hp.n_embd
        if n:
            n_all = n * self.hp.n_layer
            own = g.get_rows(self.w("per_layer_token_embd.weight", self.n_vocab, n_all), tokens, name="per_layer_embd")
            own = g.scale(own, factor=n**0.5, name="per_layer_embd_scaled")
            y = g.scale(self.linear(b, x, "per_layer_model_proj", n_all, "per_layer_proj"), factor=n_embd**-0.5,
                        name="per_layer_proj_scaled")
            y = g.rms_norm(y, self.w("per_layer_proj_norm.weight", n), eps=self.hp.eps, name="per_layer_proj_normed")
            b.per_layer = g.scale(g.add(own, y, name="per_layer_sum"), factor=2**-0.5, name="per_layer")
        return x

    def fed(self, b: Batch, il: int, x: Tensor) -> Tensor:
        p, x, n = f"blk.{il}.", super().fed(b, il, x), self.n_per_layer
        if not n:
            return x
        own = b.g.slice_heads(b.per_layer, n_head=1, first=il * n, n=n, name=f"per_layer-{il}")
        (own,) = self.wanted_rows(b, il, per_layer=own)
        h = b.g.geglu(self.linear(b, x, p + "inp_gate", n, f"per_layer_gate-{il}"), own, name=f"per_layer_glu-{il}")
        return self.joined(b, il, x, self.linear(b, h, p + "proj", self.hp.n_embd, f"per_layer_out-{il}"), "post_norm",
                           "per_layer_added")
