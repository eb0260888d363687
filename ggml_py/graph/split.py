"""The pass `split`: runs of nodes on one device, with copies between them."""
from dataclasses import dataclass, field, replace
from collections import defaultdict
from collections.abc import Mapping

from ..backends.base import Backend
from ..base.placement import HOST
from ..base.storage import n_bytes
from .graph import GraphError, Node, Tensor

WINDOW = 512 << 20  # bytes of weights that are on their way to a device, or being read there
LEAST_AHEAD = 3     # of the largest, whatever they take
WORTH = 1 << 20     # bytes of weights that a device reads for longer than it takes to begin another run


@dataclass(frozen=True)
class Run:
    """Nodes of one device. copies: nodes that bring what they read from other devices, before they run. begun: nodes that bring
    weights for this run and later ones, beside what runs until these are awaited; awaited: those that must have come by now."""
    device: str
    nodes: list[Node]
    copies: list[Node] = field(default_factory=list)
    begun: list[Node] = field(default_factory=list)
    awaited: list[Node] = field(default_factory=list)


def split(nodes: list[Node], backends: Mapping[str, Backend]) -> list[Run]:
    """An operand that lies on another device is brought by a `cpy` node, once a device and for as long as nobody writes it.
    Weights of the host are brought ahead, as far as `WINDOW` goes. GraphError for a node that writes into a state of another
    device."""
    runs: list[Run] = []
    copies: dict[tuple[Tensor, str, int], Tensor] = {}
    writes: dict[Tensor, int] = {}  # how often a state has been written so far
    streams: dict[str, list[tuple[Node, Run]]] = defaultdict(list)  # of a device: what brings a weight, and the run that reads it
    for node in nodes:
        streamed = {source for source in node.src if source.root.device != node.device and _is_streamed(node, source)}
        new = any((source, node.device, 0) not in copies for source in streamed)
        if not runs or runs[-1].device != node.device or new:
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
                if source in streamed:
                    run.awaited.append(copy.node)
                    streams[node.device].append((copy.node, run))
                else:
                    run.copies.append(copy.node)
            node.read_instead(source, copies[key])
        run.nodes.append(node)
    for stream in streams.values():
        _bring_ahead(stream)
    _copy_early(runs)
    return _side_by_side(runs)


def _side_by_side(runs: list[Run]) -> list[Run]:
    """What the host reads is copied as soon as it is there: a run before it, whose rest takes a while, is cut behind that. So the
    device computes its rest beside the host."""
    cut: list[Run] = []
    for run in runs:
        before = cut[-1] if cut else run
        made = [i for i, node in enumerate(before.nodes) for copy in run.copies if copy.src[0].maker is node]
        if run.device == HOST != before.device and made:
            head, rest = before.nodes[:max(made) + 1], before.nodes[max(made) + 1:]
            if sum(n_bytes(tensor) for node in rest for tensor in node.src if tensor.root.node is None) >= WORTH:
                cut[-1:] = replace(before, nodes=head), Run(before.device, rest)
        cut.append(run)
    return cut


def first_runs(runs: list[Run]) -> list[int]:
    """Of each run, from which one on what it brings from other devices is there: an earlier one than itself for the host, where
    one device works beside it."""
    devices = {run.device for run in runs} - {HOST}
    made_in = {result: i for i, run in enumerate(runs) for node in run.nodes for result in node.results}
    return [max((made_in.get(copy.src[0].chain[-1], i - 1) for copy in run.copies), default=i - 1) + 1
            if run.device == HOST and len(devices) == 1 else i for i, run in enumerate(runs)]


def _copy_early(runs: list[Run]) -> None:
    """Results cross between devices that work by themselves as soon as both have come to it: a device that went on would let the
    other wait for more than it reads. Nobody writes results again."""
    made_in = {result: i for i, run in enumerate(runs) for node in run.nodes for result in node.results}
    last: dict[str, int] = {}  # run of a device
    for i, run in enumerate(runs):
        for copy in list(run.copies):
            source, = copy.src[:1]
            if HOST not in (source.root.device, run.device) and not source.is_state and source.chain[-1] in made_in:
                first = max(made_in[source.chain[-1]], last.get(run.device, -1)) + 1
                if first < i:
                    run.copies.remove(copy)
                    runs[first].copies.append(copy)
        last[run.device] = i


def _is_streamed(node: Node, source: Tensor) -> bool:
    """Whether it lies on the host before the graph runs, and stays as it is."""
    names = [name for name, tensor in node.operands.items() if tensor is source]
    return (source.root.device == HOST and source.root.node is None
            and all(node.declared.roles[name] == "weight" for name in names))


def _bring_ahead(stream: list[tuple[Node, Run]]) -> None:
    """Each weight begins to come with the earliest run from which on those to come and those that are read fit the window. That
    run begins when all before it have ended, so nobody reads what is written over."""
    sizes = [n_bytes(node.src[0]) for node, _ in stream]
    window = max(WINDOW, LEAST_AHEAD * max(sizes))
    first = taken = 0
    for i, (node, _) in enumerate(stream):
        taken += sizes[i]
        while taken > window:
            taken -= sizes[first]
            first += 1
        stream[first][1].begun.append(node)
