"""The pass `fuse`: runs of nodes become fused ops where a device has a kernel for them. No bit changes; each can be switched off
by its name.

A match of a template's pattern (`ops.compose`) becomes one node, in the place of its last part, where

- all parts are on one device, which has a kernel for the fused op, takes these operands, and does not decline,
- nobody else reads a result that is not one of the fused op, nor is it an output; other readers of its results stand behind it,
- no other node between its parts writes a state that it reads, or reads one that it writes.
"""
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from ..base.errors import UserError
from ..ops.compose import FUSED, Match, Template
from . import elide
from .graph import Graph, Node, Tensor

PASSES = (*FUSED, elide.NAME)  # in their order: larger templates stand before those that they contain


def switched_off(no_fuse) -> frozenset[str]:
    """no_fuse: names of passes, or "all". Returns the names of the passes left out; UserError for one that is unknown."""
    names = frozenset([no_fuse] if isinstance(no_fuse, str) else no_fuse)
    for name in sorted(names - {*PASSES, "all"}):
        raise UserError(f"no_fuse: {name!r} is not a graph pass; allowed: {', '.join(PASSES)}, all")
    return frozenset(PASSES) if "all" in names else names


def fuse(graph: Graph, no_fuse=(), accepts: Callable[[Node], bool] = lambda node: True,
         ops: Collection[str] = PASSES) -> list[Node]:
    """The live nodes of a graph, with fused ones in the place of what the passes that no_fuse does not name found.
    accepts: node -> whether its device has a kernel for it and would rather run that than the parts. ops: those of which some
    device has kernels."""
    off = switched_off(no_fuse)
    fusion = _Fusion(graph, accepts)
    for name, template in FUSED.items():
        if name in ops and name not in off:
            fusion.run(template)
    return [node for node in fusion.nodes if node is not None]


def lower(nodes: Sequence[Node], has_kernel: Callable[[Node], bool]) -> list[Node]:
    """Fused nodes whose device has no kernel for them are replaced by their parts."""
    found: list[Node] = []
    for node in nodes:
        found += lower(node.take_back(), has_kernel) if node.parts and not has_kernel(node) else [node]
    return found


class _Fusion:
    def __init__(self, graph: Graph, accepts: Callable):
        live = graph.live()
        self.nodes: list[Node | None] = list(live)
        self.outputs, self.accepts = set(graph.outputs), accepts
        self.index = {node: i for i, node in enumerate(live)}
        self.readers: dict[Tensor, list[Node]] = defaultdict(list)
        for node in live:
            self._add_reader(node)

    def _add_reader(self, node: Node) -> None:
        for tensor in _read(node):
            self.readers[tensor].append(node)

    def run(self, template: Template) -> None:
        by_op = defaultdict(list)
        for node in self.index:
            by_op[node.op].append(node)
        for pattern in template.patterns:
            for node in by_op[pattern.anchor.op]:
                if node in self.index and (match := pattern.find(node, self.readers, self.index)) is not None:
                    self._replace(template.op, match)

    def _replace(self, op: str, match: Match) -> None:
        parts = sorted(match.nodes, key=self.index.__getitem__)
        first, last = self.index[parts[0]], self.index[parts[-1]]
        if not self._may(parts, match, first, last):
            return
        name = parts[-1].name
        node = Node(name, op, match.src, match.params, parts[-1].device, match.results, tuple(parts))
        if not self.accepts(node):
            return
        for part in parts:
            self.nodes[self.index.pop(part)] = None
            for tensor in _read(part):
                self.readers[tensor].remove(part)
        self.nodes[last], self.index[node] = node, last
        self._add_reader(node)
        for result in match.results:
            result.node = node

    def _may(self, parts: list[Node], match: Match, first: int, last: int) -> bool:
        if len({part.device for part in parts}) > 1:
            return False
        for part in parts:
            for result in part.results:
                others = [reader for reader in self.readers[result] if reader not in parts]
                if any(result is each for each in match.results):
                    if any(self.index[reader] < last for reader in others):
                        return False
                elif others or result in self.outputs:
                    return False
        between = [node for node in self.nodes[first:last] if node is not None and node not in parts]
        written = {root for node in between for root in node.written}
        read = {tensor.root for node in between for tensor in node.src}
        return (written.isdisjoint(tensor.root for tensor in match.src)
                and read.isdisjoint(root for part in parts for root in part.written))


def _read(node: Node) -> list[Tensor]:
    """The tensors that a node reads, once each, and what they are views of."""
    found: dict[Tensor, None] = {}
    for tensor in node.src:
        found[tensor] = None
        while tensor.is_view and tensor.base is not None:
            tensor = tensor.base
            found[tensor] = None
    return list(found)
