"""The pass `columns`: several devices share the products of a model (`-sm column`). Each has some rows of a matrix, so it gives
some columns of the product. What follows goes on with these columns where it can: heads, caches of heads, elementwise ops.

    mul_mat, mul_mat_id     whole x on each device, which gives its columns
    RULES                   columns to columns; the heads of a device are whole
    all other ops           whole operands: the parts are gathered, side by side

No sum is split, so no bit depends on the number of devices or on their shares. Nodes that take whole operands run on the first
device; on others too, where they read little and their results are wanted, and what they read comes from other devices else.

Which columns a device has is decided once, on paper (`decide`): matrices whose rows are not a multiple of 32, or that lead to
fewer heads than there are devices, stay whole; so do small ones whose products are gathered at once, which each device has for
itself (`WORTH_A_GATHER`). A leaf that is shared out has its parts in `Tensor.shards`, all of them together
as long as the whole; one that each device has for itself has copies there, for all devices but the first. After that (`share`) a
graph is rewritten by what its leaves have."""
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd

from ..backends.base import Backend
from ..base.storage import bytes_of, n_bytes
from ..quant.tile import ROWS
from ..ops.node import Builder
from .graph import Graph, Node, Tensor
from .place import put

PRODUCTS = "mul_mat", "mul_mat_id"
# Products are cut though these read them as a whole. What leads to others, such as the choice of experts, is not worth a gather
GATHERED = {*PRODUCTS, "quantize", "add", "rms_norm", "layer_norm", "argmax", "draw", "log_soft_max"}
EVERYWHERE = 16 << 20  # bytes of weights of a node that each device has for itself rather than wait for another one's result
WORTH_A_GATHER = 16 << 20  # bytes of a matrix that is cut though all that it gives is gathered at once
HEADS = "n_head", "n_head_kv", "n_head_y"  # parameters that count heads
CACHE_BLOCK = 32       # columns; caches of some types are made of blocks


@dataclass(frozen=True)
class Rule:
    """How columns go through an op. tied: operands whose columns are dealt out like those of the results; a vector among them,
    and those of `vectors`, have a value for each column, or head. pieces: node -> into how many parts its columns can be cut
    at most."""
    tied: str
    pieces: Callable[[Node], int] = lambda node: node.results[0].shape[1]
    vectors: str = ""


def _pieces_of_cache(node: Node) -> int:
    n = node.results[0].shape[1]
    return n if n % CACHE_BLOCK else n // CACHE_BLOCK


def _n_head(node: Node) -> int:
    return node.params["n_head"]


RULES = {
    **dict.fromkeys(("add", "mul"), Rule("x y")),
    **dict.fromkeys(("scale", "sigmoid", "softcap", "softplus", "relu_sqr", "gelu", "take_rows", "weighted_sum", "scale_id"),
                    Rule("x")),
    **dict.fromkeys(("swiglu", "geglu", "reglu", "swiglu_oai"), Rule("gate up")),
    "add_id": Rule("x b"),
    **dict.fromkeys(("rms_norm", "layer_norm"), Rule("x", lambda node: node.results[0].shape[1] // node.src[1].shape[0])),
    **dict.fromkeys(("rope", "slice_heads"), Rule("x", _n_head)),
    "concat_heads": Rule("x y", lambda node: _n_head(node) if node.params["n_head_y"] == _n_head(node) else 1),
    **dict.fromkeys(("set_rows", "cpy_rows", "cpy_rows_indirect"), Rule("cache x", _pieces_of_cache)),
    "flash_attn_ext": Rule("q k v", lambda node: 1 if node.params["n_embd_head_v"] else node.params["n_head_kv"], "sinks"),
}


def _is_vector(tensor: Tensor) -> bool:
    return tensor.maker is None and len(tensor.shape) == 1


def _tied(node: Node) -> list[Tensor]:
    """The operands whose columns a rule ties to those of the results, but for vectors."""
    rule = RULES.get(node.op)
    return [] if rule is None else [tensor for name in rule.tied.split()
                                    if (tensor := node.operands[name]) is not None and not _is_vector(tensor)]


# On paper: what is cut

class _Groups:
    """Tensors whose columns are dealt out alike, and into how many parts they can be cut. Of matrices these are their rows."""

    def __init__(self):
        self.next: dict[Tensor, Tensor] = {}
        self.pieces: dict[Tensor, int] = {}
        self.matrices: set[Tensor] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self.next

    @property
    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in self.next if tensor.maker is None]

    def find(self, tensor: Tensor) -> Tensor:
        while self.next[tensor] is not tensor:
            tensor = self.next[tensor]
        return tensor

    def is_small_and_alone(self, matrix: Tensor) -> bool:
        """Whether all that it gives would be gathered at once, and each device has it in less time for itself."""
        if matrix not in self.matrices or n_bytes(matrix) >= WORTH_A_GATHER:
            return False
        head = self.find(matrix)
        return all((node := tensor.maker) is not None and node.op in PRODUCTS
                   for tensor in self.next if tensor is not matrix and self.find(tensor) is head)

    def join(self, tensors: Sequence[Tensor], pieces: int) -> None:
        for tensor in tensors:
            if tensor not in self:
                self.next[tensor], self.pieces[tensor] = tensor, pieces
        heads = [self.find(tensor) for tensor in tensors]
        self.pieces[heads[0]] = gcd(pieces, *(self.pieces[head] for head in heads))
        for head in heads:
            self.next[head] = heads[0]

    def spoil(self, tensor: Tensor) -> None:
        """It is not cut."""
        if tensor in self:
            self.pieces[self.find(tensor)] = 1


def decide(graphs: Sequence[Graph], shares: Mapping[str, float]) -> list[Tensor]:
    """Gives the leaves of graphs on paper their `shards`, without memory. shares: device -> in which proportion; nodes of the
    first are shared out. Returns the leaves that are cut."""
    home, cut = next(iter(shares)), []
    for graph in graphs:
        groups, nodes = _Groups(), graph.live()
        for node in nodes:
            _group(node, home, groups)
        for leaf in groups.leaves:
            pieces = groups.pieces[groups.find(leaf)]
            if len(shares) <= pieces and not leaf.shards and not groups.is_small_and_alone(leaf):
                is_whole_too = any(leaf in node.src and node.op not in PRODUCTS for node in nodes) and leaf in groups.matrices
                _deal(leaf, -2 if leaf in groups.matrices else -1, pieces, shares, is_whole_too)
                cut.append(leaf)
        share(graph, None, [*shares])
    return cut


def _group(node: Node, home: str, groups: _Groups) -> None:
    """What a node says of how its operands and results can be cut."""
    w = node.operands.get("w")
    if node.op in PRODUCTS and w is not None and node.device == w.device == home and w.shape[-2] % ROWS == 0:
        groups.matrices.add(w)
        groups.join([w, *node.results], w.shape[-2] // ROWS)
        return
    tied = [stands_for(tensor) for tensor in _tied(node)]
    roles = node.declared.roles
    # Tables and the caches that it writes are cut as the others are
    led = {x for name, x in node.operands.items() if x is not None and (roles[name] == "weight" or x.root in node.written)}
    if (tied and node.device == home and all(x.root.device == home for x in node.src if x.root.node is None)
            and all(x in groups for x in tied if x not in led) and (pieces := RULES[node.op].pieces(node)) > 1):
        groups.join([*tied, *map(stands_for, node.results)], pieces)
        return
    for source in node.src:
        if node.op not in GATHERED or source.is_view:
            groups.spoil(stands_for(source.chain[-1]))


def stands_for(tensor: Tensor) -> Tensor:
    """Of a state the one tensor that is written over and over."""
    return tensor.root if tensor.is_state else tensor


def _deal(leaf: Tensor, axis: int, pieces: int, shares: Mapping[str, float], is_whole_too: bool) -> None:
    """To each device at least one piece. axis: -2, the rows of matrices; -1, the columns of what is not a matrix.
    is_whole_too: the first device has it as a whole, and its own part as a view of that."""
    ends = [round(pieces * end / sum(shares.values())) for end in accumulate(shares.values())]
    n = len(ends)
    for i, end in enumerate(ends):
        ends[i] = min(max(end, ends[i - 1] + 1 if i else 1), pieces - (n - 1 - i))
    for device, (first, end) in zip(shares, pairwise([0, *ends])):
        shape = [*leaf.shape]
        shape[axis] = shape[axis] // pieces * (end - first)
        mine = is_whole_too and not first
        leaf.shards[device] = (leaf.view(tuple(shape)) if mine else
                               Tensor(f"{leaf.name}@{device}", leaf.dtype, tuple(shape), device))


# A graph rewritten

def share(graph: Graph, backends: Mapping[str, Backend] | None, devices: Sequence[str]) -> None:
    """Rewrites a graph by the shards of its leaves: nodes of the first of the devices. backends: None on paper, where leaves that
    are read on other devices get copies there."""
    _Sharing(graph, backends, devices).run()


class _Sharing:
    def __init__(self, graph: Graph, backends: Mapping[str, Backend] | None, devices: Sequence[str]):
        self.graph, self.backends, self.home, self.devices = graph, backends, devices[0], devices
        self.inputs = {*graph.inputs.values()}
        self.nodes: list[Node] = []
        self.gathers: set[Node] = set()
        self.places: dict[Node, int] = {}  # in the graph as it was: of a node, or of the one that it stands for
        self.sources: dict[Node, tuple[Tensor, ...]] = {}  # of the graph's nodes, as they were
        self.parts: dict[Tensor, list[Tensor]] = {}  # of what is cut, in the order of the devices
        self.wholes: dict[tuple[Tensor, str], Tensor] = {}  # what stands for a tensor on another device than its own

    def run(self) -> None:
        live = self.graph.live()
        self.places.update((node, i) for i, node in enumerate(live))
        for node in live:
            self.sources[node] = node.src
            if not (node.device == self.home and self._cut(node)):
                for source in dict.fromkeys(node.src):
                    node.read_instead(source, self._whole(source, node.device))
                self.nodes.append(node)
        self.graph.outputs = [self._whole(tensor, self.home) for tensor in self.graph.outputs]
        self.graph.nodes[:] = in_stages(self.nodes, self.gathers, self.places)

    def _cut(self, node: Node) -> bool:
        """Whether the node gives columns, each device its own."""
        w = node.operands.get("w")
        if node.op in PRODUCTS and w is not None and w.is_cut:
            for i, device in enumerate(self.devices):
                operands = [w.shards[device] if source is w else self._whole(source, device) for source in node.src]
                self._give(node, i, operands, node.params)
            return True
        tied = _tied(node)
        if not tied or not all(map(self._is_cut, tied)) or RULES[node.op].pieces(node) < len(self.devices):
            return False
        of = tied[0]
        vectors = {node.operands[name] for name in (*RULES[node.op].tied.split(), *RULES[node.op].vectors.split())} - {*tied}
        widths = [part.shape[1] for part in self._parts(of)]
        for i, device in enumerate(self.devices):
            at, n = sum(widths[:i]), widths[i]
            operands = []
            for source in node.src:
                if source in tied:
                    operands.append(self._parts(source)[i])
                elif source in vectors:
                    here, unit = self._whole(source, device), of.shape[1] // source.shape[0]
                    operands.append(here.view((n // unit,), at // unit * bytes_of(here.dtype, (1,))))
                else:
                    operands.append(self._whole(source, device))
            params = {name: value * n // of.shape[1] if name in HEADS else value for name, value in node.params.items()}
            if "slot" in params:
                params["slot"] += i
            self._give(node, i, operands, params)
        return True

    def _is_cut(self, tensor: Tensor) -> bool:
        return tensor in self.parts or tensor.is_cut

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        return self.parts[tensor] if tensor in self.parts else [tensor.shards[device] for device in self.devices]

    def _give(self, node: Node, i: int, operands: Sequence[Tensor], params: Mapping) -> None:
        """The part of a node's results that device i gives."""
        made = self._make(node.name, self.devices[i], node.op, operands, params, node)
        for result, part in zip(node.results, made.results, strict=True):
            part.name = f"{result.name}@{self.devices[i]}"
            self.parts.setdefault(result, []).append(part)

    def _make(self, name: str, device: str, op: str, operands: Sequence[Tensor], params: Mapping, of: Node | None) -> Node:
        """of: the node that it stands for, or whose parts it puts side by side."""
        made = Builder(device).make(op, tuple(operands), dict(params), name)
        self.places[made] = self.places[of] if of in self.places else len(self.places)
        if self.backends is not None:
            put(made, device, self.backends)
        self.nodes.append(made)
        return made

    def _whole(self, tensor: Tensor, device: str) -> Tensor:
        """What a node on a device reads in the place of a tensor, as a whole."""
        if device not in self.devices:
            device = self.home
        if tensor.is_view and tensor.base is not None:
            base = self._whole(tensor.base, device)
            return tensor if base is tensor.base else base.view(tensor.shape, tensor.offset, tensor.name)
        if not self._is_cut(tensor) and (device == self.home or tensor in self.inputs):
            return tensor
        if (tensor, device) not in self.wholes:
            self.wholes[tensor, device] = self._made_whole(tensor, device)
        return self.wholes[tensor, device]

    def _made_whole(self, tensor: Tensor, device: str) -> Tensor:
        if tensor in self.parts:
            return self._gathered(tensor, device)
        node = tensor.maker
        if node is None:
            if self.backends is None and device not in tensor.shards and tensor.device == self.home:
                tensor.shards[device] = Tensor(tensor.name, tensor.dtype, tensor.shape, device)
            return tensor if tensor.is_cut else tensor.shards.get(device, tensor)
        if not self._is_cheap(node):
            return tensor
        made = self._make(node.name, device, node.op, [self._whole(source, device) for source in self.sources[node]], node.params,
                          node)
        for result, again in zip(node.results, made.results, strict=True):
            self.wholes[result, device] = again
        return self.wholes[tensor, device]

    def _is_cheap(self, node: Node) -> bool:
        """Whether another device would rather run the node too."""
        roles = node.declared.roles
        weights = [x for name, x in node.operands.items() if roles[name] == "weight" and x is not None]
        return (node.device == self.home and not {"state", "slots"} & {*roles.values()}
                and not any(x.device != self.home or self._is_cut(x) for x in weights)
                and sum(map(n_bytes, weights)) <= EVERYWHERE)

    def _gathered(self, tensor: Tensor, device: str) -> Tensor:
        """The parts, side by side."""
        first, *others = self.parts[tensor]
        for part in others:
            node = self._make(tensor.name, device, "concat_heads", (first, part), dict(n_head=1, n_head_y=1), tensor.maker)
            self.gathers.add(node)
            first, = node.results
        return first


def in_stages(nodes: Sequence[Node], gathers: Collection[Node], places: Mapping[Node, int]) -> list[Node]:
    """The nodes in another order: those that wait for as few turns of other devices as they may come first, device by device. So
    devices work side by side between what they bring from each other. gathers: nodes that put parts side by side, which begin a
    stage on every device: one that went on behind its own part would keep the others waiting for what it gives later. places: in
    which order nodes of one stage and device stay, so that all devices find the same patterns to fuse."""
    stages: dict[Node, int] = {}
    touched: dict[Tensor, list[Node]] = defaultdict(list)  # of a state: who read or wrote it
    writers: dict[Tensor, Node] = {}
    for node in nodes:
        before = {maker for tensor in node.src if (maker := tensor.maker) is not None}
        before.update(writers[root] for tensor in node.src if (root := tensor.root) in writers)
        for root in node.written:
            before.update(touched[root])
        stages[node] = max((stages[each] + (each.device != node.device or (node in gathers and each not in gathers))
                            for each in before if each in stages), default=0)
        for root in dict.fromkeys(tensor.root for tensor in (*node.src, *node.results)):
            touched[root].append(node)
        writers.update(dict.fromkeys(node.written, node))
    devices = {device: i for i, device in enumerate(dict.fromkeys(node.device for node in nodes))}
    return sorted(nodes, key=lambda node: (stages[node], devices[node.device], places[node]))
