"""Computation graphs in the style of ggml: tensors are made by ops, a graph is the list of nodes in the order they were made."""
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .ops import OPS, ShapeError
from .quant.formats import FORMATS


class GraphError(ValueError):
    """A node that cannot be: names the node, its op and the shapes."""


@dataclass(eq=False)
class Tensor:
    """A leaf (weight, cache, input) or a node. `storage` of leaves: (buffer of the backend, byte offset); nodes get theirs from the plan."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    op: str | None = None
    src: tuple["Tensor", ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    device: str | None = None
    storage: Any = None
    also: tuple["Tensor", ...] = ()  # further tensors that the node writes: results, which have no op of their own, or scratch memory, which nobody reads
    alias: "Tensor | None" = None  # of a further result: the cache that it is, where it has no memory of its own
    replaces: tuple[str, ...] = ()  # of a fused node: the names of the nodes it was made of, in their order

    def __repr__(self):
        return f"{self.name}: {self.dtype} [{', '.join(map(str, self.shape))}]"

    @property
    def in_place(self) -> bool:
        return bool(self.op) and OPS[self.op].in_place

    @property
    def is_view(self) -> bool:
        return bool(self.op) and OPS[self.op].is_view

    @property
    def base(self) -> "Tensor":
        """The tensor whose memory this one's is: itself, or the cache that an in-place op wrote, or what it is a view of."""
        return self.alias or (self.src[0].base if self.in_place or self.is_view else self)

    @property
    def written(self) -> tuple["Tensor", ...]:
        """All that a node writes: its result, and what else there is."""
        return self, *self.also


class Graph:
    """Ops are methods: `g.rms_norm(x, w, eps=..., name=...)` checks its operands by the op table, appends a node and returns its tensor."""

    def __init__(self, device: str = "cpu"):
        self.nodes: list[Tensor] = []
        self.inputs: dict[str, Tensor] = {}
        self.outputs: list[Tensor] = []
        self.device = device  # where the nodes made from here on run
        self._quantized: dict[Tensor, Tensor] = {}

    def __getattr__(self, name):
        if name not in OPS:
            raise AttributeError(f"graph: no op {name}; ops: {', '.join(OPS)}")
        return partial(self.apply, name)

    def input(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that the caller fills before each run."""
        self.inputs[name] = Tensor(name, dtype, tuple(shape), device=self.device)
        return self.inputs[name]

    def apply(self, op: str, /, *src: Tensor, name: str = "", **params) -> Tensor:
        declared, node = OPS[op], name or f"{op}-{len(self.nodes)}"
        params = {**declared.defaults, **params}
        if len(src) not in (len(declared.operands), len(declared.operands) - declared.n_optional) or set(params) != set(declared.params):
            raise GraphError(f"{node}: {op}({', '.join(declared.operands + declared.params)}) got {len(src)} operands and {', '.join(params) or 'no'} parameters")
        try:
            dtype, shape = declared.result(params, *src)
        except ShapeError as error:
            raise GraphError(f"{node}: {op}: {error}; operands: {'; '.join(map(repr, src))}") from None
        operands = dict(zip(declared.operands, src))
        also = tuple(Tensor(f"{node}-{what}", *(of(params, *src) if callable(of) else (operands[of].dtype, operands[of].shape)), device=self.device,
                            alias=operands[of].base if of in declared.into else None) for what, of in declared.also.items())
        tensor = Tensor(node, dtype, tuple(shape), op, src, params, self.device, also=also)
        self.nodes.append(tensor)
        return tensor

    def mul_mat(self, w: Tensor, x: Tensor, name: str = "") -> Tensor:
        """W x. A quantized weight takes x as activation blocks, made once however many products read them."""
        return self.apply("mul_mat", w, self._factor(w, x), name=name)

    def mul_mat_id(self, w: Tensor, x: Tensor, ids: Tensor, name: str = "") -> Tensor:
        """W x for each token and expert; x as of mul_mat."""
        return self.apply("mul_mat_id", w, self._factor(w, x), ids, name=name)

    def mul_mat_heads(self, w: Tensor, x: Tensor, name: str = "") -> Tensor:
        """W x for each token and head; x as of mul_mat."""
        return self.apply("mul_mat_heads", w, self._factor(w, x), name=name)

    def _factor(self, w: Tensor, x: Tensor) -> Tensor:
        if w.dtype not in FORMATS or not FORMATS[w.dtype].is_quantized:
            return x
        if x not in self._quantized:
            self._quantized[x] = self.apply("quantize", x, name=f"{x.name}-act")
            # Right behind the node that makes x, which nobody writes again, before its other readers; of a cache when it is read
            if x.base.op and x.device == self.device:
                self.nodes.insert(self.nodes.index(x) + 1, self.nodes.pop())
        return self._quantized[x]

    def live(self) -> list[Tensor]:
        """The nodes that an output or a cache write depends on, in order."""
        wanted = set(self.outputs) | {node for node in self.nodes if node.in_place}
        for node in reversed(self.nodes):
            if not wanted.isdisjoint(node.written):
                wanted.update((node, *node.src))
        return [node for node in self.nodes if node in wanted]
