"""From a graph to something that can run: splits by device with copies between them, and a memory plan that reuses buffers."""
from dataclasses import dataclass

from .graph import Tensor

ALIGNMENT = 256  # bytes; of every tensor in an arena


@dataclass(frozen=True)
class Split:
    """A run of nodes on one device."""
    device: str
    nodes: list[Tensor]


@dataclass(frozen=True)
class Placement:
    """A node's bytes in its device's arena, from the node that makes it (index `first`) to the last that reads it."""
    offset: int
    n_bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class MemoryPlan:
    placements: dict[Tensor, Placement]
    arena_bytes: dict[str, int]  # by device

    def report(self) -> str:
        """One line a device: the arena, what its tensors would take without reuse, and the largest of them."""
        lines = []
        for device, n_bytes in self.arena_bytes.items():
            mine = {t: p for t, p in self.placements.items() if t.device == device}
            total, largest = sum(p.n_bytes for p in mine.values()), max(mine, key=lambda t: mine[t].n_bytes)
            lines.append(f"{device}: {len(mine)} tensors in an arena of {n_bytes:,} bytes ({total:,} without reuse); largest {largest!r}, {mine[largest].n_bytes:,}")
        return "\n".join(lines)


def split(nodes: list[Tensor]) -> list[Split]:
    """Runs of nodes on one device. An operand made on another device (or a leaf that lives there) is brought by a `cpy` node, once a device."""
    splits: list[Split] = []
    copies: dict[tuple[Tensor, str], Tensor] = {}
    for node in nodes:
        if not splits or splits[-1].device != node.device:
            splits.append(Split(node.device, []))
        for i, source in enumerate(node.src):
            if source.base.device != node.device:
                copy = copies.get((source, node.device))
                if copy is None:
                    copy = Tensor(f"{source.name}@{node.device}", source.dtype, source.shape, "cpy", (source,), device=node.device)
                    copies[source, node.device] = copy
                    splits[-1].nodes.append(copy)
                node.src = (*node.src[:i], copy, *node.src[i + 1:])
        splits[-1].nodes.append(node)
    return splits


def plan_memory(nodes: list[Tensor], outputs: list[Tensor], n_bytes) -> MemoryPlan:
    """First fit: each node's result takes the lowest free gap of its device's arena, and gives it back after its last reader.

    n_bytes: tensor -> bytes. In-place nodes take no memory; outputs are kept to the end.
    """
    last = {}
    for i, node in enumerate(nodes):
        last[node] = i
        for source in node.src:
            last[source] = i
    for tensor in outputs:
        last[tensor] = len(nodes)
    placements: dict[Tensor, Placement] = {}
    live: dict[str, list[Placement]] = {}
    arena: dict[str, int] = {}
    for i, node in enumerate(nodes):
        if node.base is not node:
            continue
        size = -(-max(1, n_bytes(node)) // ALIGNMENT) * ALIGNMENT
        taken = sorted((p for p in live.get(node.device, ()) if p.last >= i), key=lambda p: p.offset)  # a node must not write over what it reads
        offset = 0
        for p in taken:
            if offset + size <= p.offset:
                break
            offset = max(offset, p.offset + p.n_bytes)
        placements[node] = Placement(offset, size, i, last[node])
        live[node.device] = [*taken, placements[node]]
        arena[node.device] = max(arena.get(node.device, 0), offset + size)
    return MemoryPlan(placements, arena)
