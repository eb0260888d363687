"""The pass `split`: runs of nodes on one device, with copies between them."""
from dataclasses import dataclass, field
from collections.abc import Mapping

from ..backends.base import Backend
from .graph import GraphError, Node, Tensor


@dataclass(frozen=True)
class Run:
    """Nodes of one device. copies: nodes that bring what they read from other devices, before they run."""
    device: str
    nodes: list[Node]
    copies: list[Node] = field(default_factory=list)


def split(nodes: list[Node], backends: Mapping[str, Backend]) -> list[Run]:
    """An operand that lies on another device is brought by a `cpy` node, once a device and for as long as nobody writes it.
    GraphError for a node that writes into a state of another device."""
    runs: list[Run] = []
    copies: dict[tuple[Tensor, str, int], Tensor] = {}
    writes: dict[Tensor, int] = {}  # how often a state has been written so far
    for node in nodes:
        if not runs or runs[-1].device != node.device:
            runs.append(Run(node.device, []))
        run = runs[-1]
        for root in node.written:
            if root.device != node.device:
                raise GraphError(f"{node.name}: {node.op} on {node.device} would write into {root.name}, which lies on "
                                 f"{root.device}; allowed: to run it on {root.device}")
            writes[root] = writes.get(root, 0) + 1
        for source in node.src:
            if source.root.device == node.device:
                continue
            key = source, node.device, writes.get(source.root, 0)
            if key not in copies:
                copy = Tensor(f"{source.name}@{node.device}", source.dtype, source.shape, node.device,
                              layout=backends[node.device].activations.name if source.dtype == "act" else "")
                copy.node = Node(copy.name, "cpy", (source, copy), {}, node.device, (copy,))  # so it is a result, not a state
                copies[key] = copy
                run.copies.append(copy.node)
            node.read_instead(source, copies[key])
        run.nodes.append(node)
    return runs
