"""The pass `letters`: how devices that reach each other's memory hand over what they compute without the host.

Each device has a queue: its nodes in their order, and between them

    Post    behind the node that makes it, a result goes to its receivers' boxes
    Take    before the first node that reads it, the device waits until a box is full

A box is memory of the receiver that its nodes read. Parts of a result that are gathered (`graph.columns`) go to their columns of
one box, the sender's own as well: no node puts them side by side.

No order of the devices can hang: all queues are parts of one order of all items, in which each post comes before its takes, so
the first item of that order that has not run yet can always run.

No box is written too early. A sender knows of an item of another device that it has ended when it has taken what that device
posted later, or what a device posted that knew (`_Clocks`). Two boxes lie in the same memory only where all senders of the later
one know, when they post, that the last reader of the earlier one has ended. Steps follow each other likewise: the first letter of
a step to a receiver is not posted before that one has ended the step before (`backends.letters`).

GPUs post to sealed words in the receiver's mailbox, and its take fills the box. Sealed words lie in the mailbox as boxes lie to
each other, and the take is a reader of theirs that comes before those of the box. So the same rule keeps them.
"""
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..backends.base import Backend
from ..base.storage import n_bytes
from .graph import Node, Tensor
from .plan import ALIGNMENT
from .split import Run

MOST_BYTES = 2 << 20  # of a device's boxes; more, as of prompts, is copied, which is faster then


@dataclass(eq=False)
class Box:
    """Memory of a receiver. tensor: what lies there. parts: what is posted to it, each to its columns; one without columns is all
    of it. offset: in the device's boxes."""
    tensor: Tensor
    parts: list[tuple[Tensor, int | None]]
    offset: int = 0
    posts: list["Post"] = field(default_factory=list)
    last: int = 0  # its last reader, counted in the device's queue

    @property
    def device(self) -> str:
        return self.tensor.device

    @property
    def size(self) -> int:
        return -(-n_bytes(self.tensor) // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class Post:
    """A result goes to boxes, to each from a column on. first: whether it is the sender's first letter of a step to that
    receiver."""
    source: Tensor
    to: list[tuple[Box, int | None]] = field(default_factory=list)
    first: list[bool] = field(default_factory=list)
    knows: dict[str, int] = field(default_factory=dict)  # of each device, how many of its items have ended when it is posted

    @property
    def device(self) -> str:
        return self.source.root.device

    @property
    def rows(self) -> tuple[int, int]:
        """(rows, bytes of a row): of what is gathered those of the result, else all in one."""
        size, n = n_bytes(self.source), self.source.shape[0]
        return (n, size // n) if any(column is not None for _, column in self.to) else (1, size)

    def place(self, box: Box, column: int | None) -> tuple[int, int]:
        """(bytes into the box, bytes from row to row there)."""
        n, row = self.rows
        return (0, row) if column is None else (4 * column, n_bytes(box.tensor) // n)


@dataclass(eq=False)
class Take:
    box: Box

    @property
    def awaited(self) -> list[Post]:
        """Those of other devices."""
        return [post for post in self.box.posts if post.device != self.box.device]


Item = Node | Post | Take


@dataclass(frozen=True)
class Mail:
    """order: all items, with the number of the run of nodes that each belongs to. replaced: nodes that run only where there are
    no letters. sizes: of each device's boxes."""
    order: list[tuple[int, str, Item]]
    boxes: dict[Tensor, Box]
    replaced: set[Node]
    sizes: dict[str, int]

    def queues(self) -> dict[str, list[tuple[int, Item]]]:
        found: dict[str, list[tuple[int, Item]]] = {}
        for i, device, item in self.order:
            found.setdefault(device, []).append((i, item))
        return found

    def read_until(self) -> dict[Tensor, Node]:
        """Of each result that is posted in one launch with a later node, which writes while it is read: that node."""
        launches = [each for queue in self.queues().values() for each in joined([item for _, item in queue])]
        return {each.post.source: each.quantize for each in launches
                if isinstance(each, Joined) and each.post is not None and each.quantize is not None}


class Joined(NamedTuple):
    """What is one launch on a GPU: a post, a take, or a post and the take behind it; with both the weighted sum that makes what
    is posted, or the node that quantizes what is taken."""
    post: Post | None = None
    take: Take | None = None
    weighted_sum: Node | None = None
    quantize: Node | None = None


def joined(queue: Sequence[Item]) -> Iterator[Node | Joined]:
    """The items of a device, in their order."""
    i = 0
    while i < len(queue):
        n = 1
        match [*queue[i:i + 3]]:
            case [Node(op="weighted_sum") as node, Post() as post, Take() as take] if (
                    post.source is node.results[0] and post.rows[0] == post.source.shape[0]):
                n = 3
                yield Joined(post, take, weighted_sum=node)
            case [Post() as post, Take() as take, Node(op="quantize") as node] if node.src[0] is take.box.tensor:
                n = 3
                yield Joined(post, take, quantize=node)
            case [Post() as post, Take() as take, *_]:
                n = 2
                yield Joined(post, take)
            case [Post() as post, *_]:
                yield Joined(post)
            case [Take() as take, *_]:
                yield Joined(take=take)
            case [Node() as node, *_]:
                yield node
        i += n


def letters(runs: Sequence[Run], backends: Mapping[str, Backend], inputs: set[Tensor], outputs: Sequence[Tensor]) -> Mail | None:
    """None where there is one device, where devices do not reach each other, and where something else crosses than inputs, which
    each device has, and results."""
    devices = [*dict.fromkeys(run.device for run in runs)]
    copies = [copy for run in runs for copy in run.copies if copy.src[0].root not in inputs]
    made = {result: node for run in runs for node in run.nodes for result in node.results}
    if (len(devices) < 2 or not copies or any(run.begun or run.awaited for run in runs)
            or not all(backends[a].reaches(backends[b]) for a in devices for b in devices if a != b)
            or not all(_is_posted(copy, made) for copy in copies)):
        return None
    boxes, replaced = _gathers(runs, {copy.results[0]: copy.src[0] for copy in copies}, made, {*outputs})
    gathered = {part for box in boxes for part, _ in box.parts}
    for copy in copies:
        to = copy.results[0]
        if not (copy.src[0] in gathered and any(to in node.src for node in replaced)):
            boxes.append(Box(to, [(copy.src[0], None)]))
    order = _ordered(runs, boxes, replaced, made)
    if {box for box in boxes if any(made[part.chain[-1]] in replaced for part, _ in box.parts)}:
        return None
    taken = {item.box for *_, item in order if isinstance(item, Take)}
    mail = Mail(order, {box.tensor: box for box in boxes}, replaced, _placed(order, devices))
    return mail if taken == {*boxes} and max(mail.sizes.values()) <= MOST_BYTES else None


def _is_posted(copy: Node, made: Mapping[Tensor, Node]) -> bool:
    source, to = copy.src[0], copy.results[0]
    return (source.chain[-1] in made and not source.is_state and source.root.node is not None and source.layout == to.layout
            and n_bytes(source) % 4 == 0)


def _gathers(runs: Sequence[Run], crossed: Mapping[Tensor, Tensor], made: Mapping[Tensor, Node],
             outputs: set[Tensor]) -> tuple[list[Box], set[Node]]:
    """Boxes of parts that lie side by side in the end, and the nodes that put them there. crossed: of what a device has of
    another one's result, that result."""
    readers: dict[Tensor, int] = {}
    for run in runs:
        for node in run.nodes:
            for tensor in {source.chain[-1] for source in node.src}:
                readers[tensor] = readers.get(tensor, 0) + 1

    def puts_side_by_side(node: Node | None) -> bool:
        return node is not None and node.op == "concat_heads" and node.params["n_head"] == node.params["n_head_y"] == 1

    def parts(node: Node) -> Iterator[tuple[Tensor, list[Node]]]:
        """Those of a node, from the left, and the nodes between."""
        for source in node.src:
            if puts_side_by_side(source.node) and source in made and readers[source] == 1 and source not in outputs:
                assert source.node is not None
                for part, between in parts(source.node):
                    yield part, [source.node, *between]
            else:
                yield source, []

    boxes: list[Box] = []
    replaced: set[Node] = set()
    inner: set[Node] = set()
    for run in reversed(runs):
        for node in reversed(run.nodes):
            if not puts_side_by_side(node) or node in inner:
                continue
            found = [*parts(node)]
            inner.update(each for _, between in found for each in between)
            whole, at = node.results[0], 0
            box_parts: list[tuple[Tensor, int | None]] = []
            for part, _ in found:
                box_parts.append((crossed.get(part, part), at))
                at += part.shape[-1]
            if (whole.base is None and whole not in outputs and len(whole.shape) == 2 and whole.dtype == "f32"
                    and any(part in crossed for part, _ in found)
                    and all(readers[part] == 1 if part in crossed else part.chain[-1] in made and not part.is_state
                            for part, _ in found)):
                boxes.append(Box(whole, box_parts))
                replaced |= {node, *(each for _, between in found for each in between)}
    return boxes[::-1], replaced


class _Clocks:
    """What each device knows of the others: how many items of their queues have ended."""

    def __init__(self, devices):
        self.known: dict[str, dict[str, int]] = {device: dict.fromkeys(devices, 0) for device in devices}

    def ended(self, device: str) -> int:
        """An item of its own; how many they are now."""
        self.known[device][device] += 1
        return self.known[device][device]

    def told(self, device: str, knows: Mapping[str, int]) -> None:
        for other, n in knows.items():
            self.known[device][other] = max(self.known[device][other], n)


def _ordered(runs: Sequence[Run], boxes: Sequence[Box], replaced: set[Node],
             made: Mapping[Tensor, Node]) -> list[tuple[int, str, Item]]:
    """Posts and takes between the nodes; what is known at each post, and the last reader of each box."""
    posts: dict[Tensor, Post] = {}
    for box in boxes:
        for part, column in box.parts:
            post = posts.setdefault(part, Post(part))
            post.to.append((box, column))
            box.posts.append(post)
    of_node: dict[Node, list[Post]] = {}
    for part, post in posts.items():
        of_node.setdefault(made[part.chain[-1]], []).append(post)
    order: list[tuple[int, str, Item]] = []
    full, waiting = {box.tensor: box for box in boxes}, {box.tensor: box for box in boxes}
    clocks = _Clocks({run.device for run in runs})
    met: set[tuple[str, str]] = set()

    def add(i: int, device: str, item: Item) -> None:
        order.append((i, device, item))
        read: Sequence[Tensor] = ()
        if isinstance(item, Take):
            for post in item.awaited:
                clocks.told(device, post.knows)
        elif isinstance(item, Post):
            item.knows, read = dict(clocks.known[device]), (item.source,)
            item.first = [(device, box.device) not in met and device != box.device for box, _ in item.to]
            met.update((device, box.device) for box, _ in item.to)
        else:
            read = item.src
        n = clocks.ended(device)
        for tensor in read:
            if tensor.root in full:
                full[tensor.root].last = n

    for i, run in enumerate(runs):
        for node in run.nodes:
            if node not in replaced:
                for root in dict.fromkeys(source.root for source in node.src):
                    if root in waiting:
                        add(i, run.device, Take(waiting.pop(root)))
                add(i, run.device, node)
                for post in of_node.get(node, ()):
                    add(i, run.device, post)
    return order


def _placed(order: Sequence[tuple[int, str, Item]], devices: Sequence[str]) -> dict[str, int]:
    """First fit, in the order of the first letters to the boxes. Gives the boxes their offsets; how many bytes each device needs
    for them."""
    placed: dict[str, list[Box]] = {device: [] for device in devices}
    for box in dict.fromkeys(box for *_, item in order if isinstance(item, Post) for box, _ in item.to):
        device, offset = box.device, 0
        others = [other for other in placed[device] if any(post.knows[device] < other.last for post in box.posts)]
        for other in sorted(others, key=lambda other: other.offset):
            if offset + box.size <= other.offset:
                break
            offset = max(offset, other.offset + other.size)
        box.offset = offset
        placed[device].append(box)
    return {device: max((box.offset + box.size for box in boxes), default=0) for device, boxes in placed.items()}
