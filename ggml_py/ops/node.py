"""Tensors and nodes, and how ops make them."""
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..base.storage import bytes_of
from .table import OPS, Op, Shape, ShapeError


class GraphError(ValueError):
    """A node that cannot be: names the node, its op and the shapes."""


@dataclass(eq=False)
class Tensor:
    """A region of memory: `offset` bytes into `buffer`, or into the region of another tensor, its `base`.

    node: whose result it is; None of a leaf (weight, cache, input) and of a view, which is a part of its base. The result of an
    op that writes into an operand has the operand as its base. shards: what other devices have of a leaf, each a copy; or, where
    its own device is among them, each a part (`graph.columns`). layout: how a backend holds the dtype (`base.storage.LAYOUTS`),
    "" where there is one way only."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"
    node: "Node | None" = None
    base: "Tensor | None" = None
    offset: int = 0
    buffer: Any = None
    layout: str = ""
    shards: dict[str, "Tensor"] = field(default_factory=dict)

    def __repr__(self):
        return f"{self.name}: {self.dtype} [{', '.join(map(str, self.shape))}]"

    @property
    def is_cut(self) -> bool:
        """Of a leaf, whether its shards are parts."""
        return self.device in self.shards

    @property
    def held(self) -> list["Tensor"]:
        """Of a leaf, what has memory of its own: itself or its parts, and its copies."""
        whole = [self] if not self.is_cut or self.shards[self.device].is_view else []
        return whole + [shard for shard in self.shards.values() if not shard.is_view]

    @property
    def root(self) -> "Tensor":
        """The tensor that owns the memory: this one, or what it lies in."""
        return self if self.base is None else self.base.root

    @property
    def is_view(self) -> bool:
        """Whether it is a part of another tensor, not a result of its own."""
        return self.base is not None and self.node is None

    @property
    def chain(self) -> list["Tensor"]:
        """The tensor, and those that it is a view of."""
        return [self, *self.base.chain] if self.base is not None and self.node is None else [self]

    @property
    def maker(self) -> "Node | None":
        """The node whose result it is, or is a view of; None of leaves."""
        return self.chain[-1].node

    @property
    def is_state(self) -> bool:
        """Whether a node wrote it into memory that was there before."""
        return self.node is not None and self.root.node is None

    @property
    def memory(self) -> tuple[Any, int]:
        """(buffer, bytes into it)."""
        if self.base is None:
            return self.buffer, self.offset
        buffer, offset = self.base.memory
        return buffer, offset + self.offset

    def view(self, shape: tuple[int, ...], offset: int = 0, name: str = "") -> "Tensor":
        """A contiguous part of this tensor, or all of it in another shape. offset: bytes.
        GraphError for one that is not within it, and for activation blocks, whose planes depend on their shape."""
        if self.dtype == "act":
            raise GraphError(f"{self!r}: activation blocks have no views")
        size, here = bytes_of(self.dtype, tuple(shape)), bytes_of(self.dtype, self.shape)
        if offset < 0 or offset + size > here:
            raise GraphError(f"{self!r}: a view {list(shape)} of it would have bytes {offset} to {offset + size}, allowed: 0 to "
                             f"{here}")
        return Tensor(name or self.name, self.dtype, tuple(shape), self.device, None, self, offset, layout=self.layout)


@dataclass(eq=False)
class Node:
    """An op with its operands. parts: of a fused op, the nodes that it stands for, in their order; their results that it does not
    give are in no memory. scratch, plan: what its kernel asked for (`kernels.call`)."""
    name: str
    op: str
    src: tuple[Tensor, ...]
    params: dict[str, Any]
    device: str = "cpu"
    results: tuple[Tensor, ...] = ()
    parts: tuple["Node", ...] = ()
    scratch: Tensor | None = None
    plan: Any = None

    def __repr__(self):
        return f"{self.name}: {self.op}({', '.join(source.name for source in self.src)})"

    @property
    def declared(self) -> Op:
        return OPS[self.op]

    @property
    def operands(self) -> dict[str, Tensor | None]:
        """By name; None where an optional one is absent."""
        names = self.declared.operands
        return {**dict.fromkeys(names), **dict(zip(names, self.src))}

    @property
    def written(self) -> tuple[Tensor, ...]:
        """The tensors, roots, that the node writes into beside results of its own: states."""
        return tuple(result.root for result in self.results if result.is_state)

    def primitives(self) -> list["Node"]:
        """The primitive nodes that it stands for: itself, or those of its parts."""
        return [each for part in self.parts for each in part.primitives()] if self.parts else [self]

    def read_instead(self, old: Tensor, new: Tensor) -> None:
        """The node, and its parts, read another tensor in the place of an operand."""
        self.src = tuple(new if source is old else source for source in self.src)
        for part in self.parts:
            part.read_instead(old, new)

    def give_instead(self, old: Tensor, new: Tensor) -> None:
        """The node, and the part that makes it, gives another tensor in the place of a result; its other parts read that."""
        self.results = tuple(new if result is old else result for result in self.results)
        for part in self.parts:
            part.give_instead(old, new)
            part.read_instead(old, new)

    def take_back(self) -> tuple["Node", ...]:
        """The parts, as the makers of their results again."""
        for part in self.parts:
            for result in part.results:
                result.node = part
        return self.parts


@dataclass
class Builder:
    """A list of nodes that grows. Ops are methods: `g.rms_norm(x, w, eps=..., name=...)` checks its operands by the op table,
    appends a node and returns its result, a tuple where there are several."""
    device: str = "cpu"
    nodes: list[Node] = field(default_factory=list)

    def __getattr__(self, name):
        if name not in OPS:
            raise AttributeError(f"graph: no op {name}; ops: {', '.join(OPS)}")
        return partial(self.apply, name)

    def need(self, condition: Callable[[], bool], message: str) -> None:
        """What a template asks of its operands beyond what its parts ask."""
        if not condition():
            raise ShapeError(message)

    def apply(self, op: str, /, *src: Tensor, name: str = "", **params) -> Any:
        node = self.make(op, src, params, name or f"{op}-{len(self.nodes)}")
        self.nodes.append(node)
        return node.results[0] if len(node.results) == 1 else node.results

    def make(self, op: str, src: tuple[Tensor, ...], params: dict[str, Any], name: str) -> Node:
        declared = OPS[op]
        params = {**declared.defaults, **params}
        n = len(declared.operands)
        if len(src) not in (n, n - declared.n_optional) or set(params) != set(declared.params):
            raise GraphError(f"{name}: {op}({', '.join(declared.operands + declared.params)}) got {len(src)} operands and "
                             f"{', '.join(params) or 'no'} parameters")
        try:
            node = Node(name, op, tuple(src), params, self.device)
            if declared.template:
                node.parts, node.results = declared.template.build(node)
            else:
                shapes = declared.rule(params, *src)
                node.results = tuple(self._result(node, what, shape) for what, shape in
                                     zip(declared.results, [shapes] if isinstance(shapes, Shape) else shapes, strict=True))
        except ShapeError as error:
            raise self.refusal(name, op, src, error) from None
        for result in node.results:
            result.node = node
        return node

    def refusal(self, name: str, op: str, src: tuple[Tensor, ...], error: ShapeError) -> Exception:
        return GraphError(f"{name}: {op}: {error}; operands: {'; '.join(map(repr, src))}")

    def _result(self, node: Node, what: str, shape) -> Tensor:
        declared = node.declared
        name = node.name if what == declared.results[0] else f"{node.name}-{what}"
        base = node.operands[what] if what in declared.operands else None
        if base is None:
            return Tensor(name, shape.dtype, tuple(shape.shape), self.device, node)
        return Tensor(name, shape.dtype, tuple(shape.shape), base.device, node, base, layout=base.layout)
