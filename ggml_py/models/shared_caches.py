"""Layers that share caches: the last ones have no keys and values of their own, they read those of an earlier layer of their
kind."""
from ..graph.graph import Tensor
from .common import Batch, Transformer


class SharedCaches(Transformer):
    """Base of architectures whose files may have such layers."""

    @property
    def n_own(self) -> int:
        """Layers with a cache of their own."""
        return self.hp.n_layer - self.keys.integer("attention.shared_kv_layers", 0, most=self.hp.n_layer)

    def source(self, il: int) -> int:
        """The layer whose cache a layer reads: its own, or of those with a cache the last but one, which has a window, or the
        last, which has none."""
        return il if il < self.n_own else self.n_own - (2 if self.hp.windows[il] else 1)

    def check(self) -> None:
        super().check()
        kind = lambda il: (self.hp.windows[il], self.hp.n_head_kv[il])
        for il in range(self.hp.n_layer):
            if (source := self.source(il)) < 0 or kind(source) != kind(il):
                shared = self.hp.n_layer - self.n_own
                raise self.keys.error("attention.shared_kv_layers", shared, f"a number that leaves layer {il} the cache of one "
                                      "with its window and KV heads", shared)

    def cache_sizes(self) -> list[tuple[int, int]]:
        return [sizes if il < self.n_own else (0, 0) for il, sizes in enumerate(super().cache_sizes())]

    def attention(self, b: Batch, il: int, h: Tensor) -> Tensor:
        if il < self.n_own:
            return super().attention(b, il, h)
        (q,) = self.qkv(b, il, h, "q")
        return self.over_caches(b, il, self.placed(b, il, q, "q", self.hp.n_head[il]), *b.caches[self.source(il)])

    def over_caches(self, b: Batch, il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b.caches[il] = k, v
        return super().over_caches(b, il, q, k, v)
