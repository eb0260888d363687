"""The pass `plan`: where in the arena of its device each tensor lies. Tensors that are not needed at one time share memory."""
from dataclasses import dataclass
from collections.abc import Callable, Collection, Mapping, Sequence

from .graph import Node, Tensor

ALIGNMENT = 256  # bytes; of every tensor in an arena


@dataclass(frozen=True)
class Extent:
    """A tensor's bytes in its device's arena, from the node that writes it (index `first`) to the last that reads it."""
    offset: int
    n_bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class MemoryPlan:
    extents: dict[Tensor, Extent]
    arena_bytes: dict[str, int]  # by device

    def report(self) -> str:
        """One line a device: the arena, what its tensors would take without reuse, and the largest of them."""
        lines = []
        for device, n_bytes in self.arena_bytes.items():
            mine = {t: e for t, e in self.extents.items() if t.device == device}
            total, largest = sum(e.n_bytes for e in mine.values()), max(mine, key=lambda t: mine[t].n_bytes)
            lines.append(f"{device}: {len(mine)} tensors in an arena of {n_bytes:,} bytes ({total:,} without reuse); "
                         f"largest {largest!r}, {mine[largest].n_bytes:,}")
        return "\n".join(lines)


def plan_memory(nodes: Sequence[Node], outputs: Sequence[Tensor], n_bytes: Callable[[Tensor], int],
                apart: Collection[Tensor] = (), until: Mapping[Tensor, Node] | None = None) -> MemoryPlan:
    """First fit: each tensor that a node writes and that has no memory yet, nor gets it elsewhere (`apart`), takes the lowest
    free gap of its device's arena, and gives it back after its last reader. Outputs are kept to the end. until: tensors that are
    still read while a later node runs, as if they were its operands.

    A node must not write over what it reads: operands are there until it has run. What crosses devices is there from the run
    before on, whose nodes may still be on their way: its first index is that of the copy. Copies that follow each other run at
    one time: what they read is there until the last of them.
    """
    last: dict[Tensor, int] = {}
    too: dict[Node, list[Tensor]] = {}
    for tensor, node in (until or {}).items():
        too.setdefault(node, []).append(tensor)
    for i, node in enumerate(nodes):
        end = i
        while _crosses(nodes[end]) and end + 1 < len(nodes) and _crosses(nodes[end + 1]):
            end += 1
        last.update((tensor.root, end) for tensor in (*_written(node), *node.src, *too.get(node, ())))
    for tensor in outputs:
        last[tensor.root] = len(nodes)
    extents: dict[Tensor, Extent] = {}
    live: dict[str, list[Extent]] = {}
    arena: dict[str, int] = {}
    for i, tensor in ((i, tensor.root) for i, node in enumerate(nodes) for tensor in _written(node)):
        if tensor.buffer is not None or tensor in extents or tensor in apart:
            continue
        device, size = tensor.device, -(-max(1, n_bytes(tensor)) // ALIGNMENT) * ALIGNMENT
        taken = sorted((e for e in live.get(device, ()) if e.last >= i), key=lambda e: e.offset)
        offset = 0
        for e in taken:
            if offset + size <= e.offset:
                break
            offset = max(offset, e.offset + e.n_bytes)
        extents[tensor] = Extent(offset, size, i, last[tensor])
        live[device] = [*taken, extents[tensor]]
        arena[device] = max(arena.get(device, 0), offset + size)
    return MemoryPlan(extents, arena)


def _crosses(node: Node) -> bool:
    return node.op == "cpy" and node.src[0].root.device != node.device


def _written(node: Node) -> tuple[Tensor, ...]:
    return node.results if node.scratch is None else (*node.results, node.scratch)
