"""A cache whose writes no CUDA graph can repeat."""
from ggml_py.state.kv_cache import KVCache


class MovingCache(KVCache):
    """The cache of an engine that copies K and V to where the next cell is when the graph is built."""

    def write(self, graph, layer, part, x, name):
        return graph.cpy_rows({"k": self.k, "v": self.v}[part][layer], x, cell=max(0, self.length(0) - x.shape[0]), name=name)
