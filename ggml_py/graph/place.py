"""The pass `place`: every node gets a device, and every result the layout of activations that its device has."""
from collections.abc import Callable, Mapping

from ..backends.base import Backend
from .graph import Graph, GraphError, Node

Placement = Callable[[Node], str]  # node -> the name of its device


def place(graph: Graph, backends: Mapping[str, Backend], placement: Placement | None = None) -> None:
    """placement: None leaves nodes where they were made. A node that writes into a state runs where the state lies, whatever the
    placement says. GraphError for a device without a backend."""
    for node in graph.nodes:
        device = placement(node) if placement else node.device
        for root in node.written:
            device = root.device
        if device not in backends:
            raise GraphError(f"{node.name}: {node.op} is placed on {device}; allowed: {', '.join(backends)}")
        for each in (node, *_inside(node)):
            each.device = device
            for result in each.results:
                if result.base is None:
                    result.device = device
                    result.layout = backends[device].activations.name if result.dtype == "act" else ""


def _inside(node: Node) -> list[Node]:
    return [each for part in node.parts for each in (part, *_inside(part))]
