"""Layer norms in the place of RMS norms, with biases or without."""
from ..graph.graph import Tensor
from .common import Batch, Transformer


class LayerNormModel(Transformer):
    """Base of the architectures."""
    eps_key = "attention.layer_norm_epsilon"
    norm_biases = False

    def norm(self, b: Batch, x: Tensor, base: str, name: str) -> Tensor:
        weights = [self.w(f"{base}.{part}", x.shape[1]) for part in ("weight", "bias")[:1 + self.norm_biases]]
        return b.g.layer_norm(x, *weights, eps=self.hp.eps, name=name)
