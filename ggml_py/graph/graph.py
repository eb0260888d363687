"""Computation graphs in the style of ggml: tensors are made by ops, a graph is the list of nodes in the order in which they
run."""
from ..ops import compose  # noqa: F401  enters the fused ops into the table
from ..ops.node import Builder, GraphError, Node, Tensor
from ..quant.formats import FORMATS

__all__ = ["Graph", "GraphError", "Node", "Tensor"]


class Graph(Builder):
    """A graph of a model's step. inputs: tensors that the caller fills before each run;
    outputs: those that are brought to the caller."""

    def __init__(self, device: str = "cpu"):
        super().__init__(device)
        self.inputs: dict[str, Tensor] = {}
        self.outputs: list[Tensor] = []
        self._quantized: dict[Tensor, Tensor] = {}

    def input(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that the caller fills before each run."""
        self.inputs[name] = Tensor(name, dtype, tuple(shape), self.device)
        return self.inputs[name]

    def mul_mat(self, w: Tensor, x: Tensor, name: str = "") -> Tensor:
        """W x. A quantized weight takes x as activation blocks, made once however many products read them."""
        return self.apply("mul_mat", w, self._factor(w, x), name=name)

    def mul_mat_id(self, w: Tensor, x: Tensor, ids: Tensor, name: str = "", **params) -> Tensor:
        """W x for each token and expert; x as of mul_mat."""
        return self.apply("mul_mat_id", w, self._factor(w, x), ids, name=name, **params)

    def mul_mat_heads(self, w: Tensor, x: Tensor, name: str = "") -> Tensor:
        """W x for each token and head; x as of mul_mat."""
        return self.apply("mul_mat_heads", w, self._factor(w, x), name=name)

    def _factor(self, w: Tensor, x: Tensor) -> Tensor:
        if w.dtype not in FORMATS or not FORMATS[w.dtype].is_quantized:
            return x
        if x not in self._quantized:
            self._quantized[x] = self.apply("quantize", x, name=f"{x.name}-act")
            # Right behind the node that makes x, which nobody writes again, before its other readers; of a state when it is read
            if x.maker is not None and x.root.node is not None and x.root.device == self.device:
                self.nodes.insert(self.nodes.index(x.maker) + 1, self.nodes.pop())
        return self._quantized[x]

    def live(self) -> list[Node]:
        """The nodes that an output or a write to a state depends on, in order."""
        wanted = {tensor.maker for tensor in self.outputs} | {node for node in self.nodes if node.written}
        for node in reversed(self.nodes):
            if node in wanted:
                wanted.update(source.maker for source in node.src)
        return [node for node in self.nodes if node in wanted]
