"""The pass `place`: every node gets a device, and every result the layout of activations that its device has.

Nodes follow what is large and stays: the largest of the weights, tables and states that they read. Other nodes run where the
fewest bytes must be brought, of equals where they were made, which is where their layer is. So between the devices of a layer
whose experts lie elsewhere, hidden states and the choice of experts cross, and nothing else.

Where many tokens share a weight of the host, it is brought to another device instead, which computes faster (`Offload`)."""
from collections.abc import Callable, Iterable, Mapping
from math import prod

from ..backends.base import Backend
from ..base.errors import ParameterError
from ..base.placement import HOST, Offload
from ..base.storage import n_bytes
from ..ops.table import OPS
from .graph import Graph, GraphError, Node, Tensor

DeviceOf = Callable[[Node], str]  # node -> the name of its device


def place(graph: Graph, backends: Mapping[str, Backend], device_of: DeviceOf | None = None,
          offload: Offload | None = None) -> None:
    """device_of: decides in the place of the rules above. A node that writes into a state runs where the state lies, whatever it
    says. GraphError for a device without a backend."""
    inputs, follow = {*graph.inputs.values()}, device_of is None and len(backends) > 1
    for node in graph.nodes:
        device = device_of(node) if device_of else _followed(node, inputs, offload) if follow else node.device
        for root in node.written:
            device = root.device
        if device not in backends:
            raise GraphError(f"{node.name}: {node.op} is placed on {device}; allowed: {', '.join(backends)}")
        put(node, device, backends)
    if follow:
        _quantize_where_read(graph, backends)


def put(node: Node, device: str, backends: Mapping[str, Backend]) -> None:
    """A node and its results on a device, activation blocks in the layout that they have there."""
    for each in (node, *_inside(node)):
        each.device = device
        for result in each.results:
            if result.base is None:
                result.device = device
                result.layout = backends[device].activations.name if result.dtype == "act" else ""


def check_offload(asked: Iterable[tuple[str, int | None]]) -> None:
    """ParameterError for a name that is not an op's, before ops are fused."""
    known = [op.name for op in OPS.values() if op.template is None]
    for name, _ in asked:
        if name not in known and name != "all":
            raise ParameterError("offload", f"{name!r} is not an op; allowed: all, ", ", ".join(known))


def _inside(node: Node) -> list[Node]:
    return [each for part in node.parts for each in (part, *_inside(part))]


def _followed(node: Node, inputs: set[Tensor], offload: Offload | None) -> str:
    sources = [tensor for tensor in dict.fromkeys(node.src) if tensor.root not in inputs]  # those are on every device
    roots = dict.fromkeys(tensor.root for tensor in sources)
    home, is_offloaded = node.device, offload is not None and offload.pays(node.op, *_counts(node))
    if offload is not None and is_offloaded and home == HOST:
        home = offload.device
    if lasting := [root for root in roots if root.node is None]:
        device = max(lasting, key=lambda root: (n_bytes(root), root.device == node.device)).device
        return home if device == HOST and is_offloaded else device
    brought = {device: sum(n_bytes(tensor) for tensor in sources if tensor.root.device != device)
               for device in dict.fromkeys([home, *(root.device for root in roots)])}
    return min(brought, key=brought.__getitem__)


def _counts(node: Node) -> tuple[int, float]:
    """Tokens that a node is of, and how many of them there are for each of its matrices. 0 for a node that reads rows of a
    weight."""
    if node.op == "get_rows":
        return 0, 0
    weight = next((x for name, x in node.operands.items() if node.declared.roles[name] == "weight" and x is not None), None)
    ids = node.operands.get("ids")
    if ids is not None and weight is not None:
        return ids.shape[0], prod(ids.shape) / weight.shape[0]
    n = node.results[0].shape[0] // (weight.shape[0] if node.op == "mul_mat_heads" and weight is not None else 1)
    return n, n


def _quantize_where_read(graph: Graph, backends: Mapping[str, Backend]) -> None:
    """Floats cross, not activation blocks, whose layout is their device's: they are quantized again, to the same bits."""
    again: dict[tuple[Node, str], Tensor] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        for act in [tensor for tensor in node.src if tensor.dtype == "act" and tensor.root.device != node.device]:
            made = act.node
            if made is None or made.op != "quantize":
                continue
            key = made, node.device
            if key not in again:
                result = again[key] = Tensor(f"{act.name}@{node.device}", "act", act.shape, node.device,
                                             layout=backends[node.device].activations.name)
                result.node = Node(result.name, "quantize", made.src, {}, node.device, (result,))
                nodes.append(result.node)
            node.read_instead(act, again[key])
        nodes.append(node)
    graph.nodes[:] = nodes
