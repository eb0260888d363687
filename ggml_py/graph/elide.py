"""The pass `elide`: a result that is only made to be copied is written straight to where it would be copied.

The copy may be a `cpy`, or a `set_rows` or `cpy_rows_indirect` whose rows keep their type; then the op must be able to write rows
by their numbers or addresses (`Op.scatters`). The copy's node is left out where

- the result is not an output, and nobody but the copy reads it,
- nobody between the op and the copy reads or writes the destination's bytes,
- the op reads none of these bytes itself, or reads exactly them and declares that it may write over them (`Op.overwrites`),
- both are on one device.
"""
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ..base.storage import n_bytes
from .graph import Node, Tensor

NAME = "elide"  # as a pass that can be switched off
COPIES = {"cpy": "", "set_rows": "rows", "cpy_rows_indirect": "dst"}  # ops that copy their x -> what says to which rows


class Region(NamedTuple):
    """Bytes start .. end - 1 of a tensor that owns memory."""
    root: Tensor
    start: int
    end: int

    def overlaps(self, other: "Region") -> bool:
        return self.root is other.root and self.start < other.end and other.start < self.end


def region(tensor: Tensor) -> Region:
    start, each = 0, tensor
    while each.base is not None:
        start, each = start + each.offset, each.base
    return Region(each, start, start + n_bytes(tensor))


def elide(nodes: Sequence[Node], outputs: Sequence[Tensor], no_fuse=()) -> list[Node]:
    """The nodes without the copies that are not needed. no_fuse: as of `fuse`."""
    if NAME in no_fuse or "all" in no_fuse:
        return list(nodes)
    readers: dict[Tensor, list[Node]] = defaultdict(list)
    for node in nodes:
        for tensor in (each for source in node.src for each in source.chain):
            readers[tensor].append(node)
    kept = list(nodes)
    for copy in nodes:
        if copy.op in COPIES:
            x = copy.src[copy.declared.operands.index("x")]
            # A result of its own, which nobody else wants
            if (x.node is not None and x.base is None and x.node.device == copy.device and readers[x] == [copy]
                    and x not in outputs and _may(kept, x.node, x, copy)):
                _write_through(x.node, x, copy)
                kept.remove(copy)
    return kept


def _name(node: Node, x: Tensor) -> str:
    """Of a result, as it is declared."""
    return next(name for name, result in zip(node.declared.results, node.results) if result is x)


def _may(nodes: list[Node], node: Node, x: Tensor, copy: Node) -> bool:
    """Whether the node can write its result x where the copy would put it."""
    result, destination = _name(node, x), copy.results[0]
    if copy.op != "cpy":
        rows = node.declared.scatters.get(result)
        # Optional operands are all there or none: that of the rows must be the only one
        if (rows is None or node.operands[rows] is not None or node.declared.n_optional > 1
                or x.dtype != destination.dtype or not copy.params.keys() <= node.params.keys()):
            return False
    written, first, last = region(destination), nodes.index(node), nodes.index(copy)
    between = nodes[first + 1:last]
    if any(written.overlaps(region(tensor)) for each in between for tensor in (*each.src, *each.results)):
        return False
    if any(source.maker in between for source in copy.src if source is not x):
        return False
    allowed = node.declared.overwrites.get(result)
    return not any(written.overlaps(region(tensor)) and (name != allowed or region(tensor) != written)
                   for name, tensor in node.operands.items() if tensor is not None)


def _write_through(node: Node, x: Tensor, copy: Node) -> None:
    """The node gives the copy's result in the place of x, its own."""
    if copy.op != "cpy":
        operands = {**node.operands, node.declared.scatters[_name(node, x)]: copy.operands[COPIES[copy.op]]}
        node.src = tuple(tensor for tensor in operands.values() if tensor is not None)
        node.params.update(copy.params)
    destination, = copy.results
    node.give_instead(x, destination)
    destination.node = node
