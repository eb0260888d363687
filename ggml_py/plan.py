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
    """A tensor's bytes in its device's arena, from the node that writes it (index `first`) to the last that reads it."""
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
    """First fit: each tensor that a node writes takes the lowest free gap of its device's arena, and gives it back after its last reader.

    n_bytes: tensor -> bytes. In-place nodes and views take no memory; outputs are kept to the end.
    """
    last = {}
    for i, node in enumerate(nodes):
        last.update((tensor.base, i) for tensor in (*node.written, *node.src))
    for tensor in outputs:
        last[tensor.base] = len(nodes)
    placements: dict[Tensor, Placement] = {}
    live: dict[str, list[Placement]] = {}
    arena: dict[str, int] = {}
    for i, tensor in ((i, tensor) for i, node in enumerate(nodes) for tensor in node.written):
        if tensor.base is not tensor:
            continue
        device, size = tensor.device, -(-max(1, n_bytes(tensor)) // ALIGNMENT) * ALIGNMENT
        taken = sorted((p for p in live.get(device, ()) if p.last >= i), key=lambda p: p.offset)  # a node must not write over what it reads
        offset = 0
        for p in taken:
            if offset + size <= p.offset:
                break
            offset = max(offset, p.offset + p.n_bytes)
        placements[tensor] = Placement(offset, size, i, last[tensor])
        live[device] = [*taken, placements[tensor]]
        arena[device] = max(arena.get(device, 0), offset + size)
    return MemoryPlan(placements, arena)
