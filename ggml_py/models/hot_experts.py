"""Copies of experts that lie on the host, in the memory of the device of their layer: of those that are asked for most.

Each layer has as many slots as any other; a slot holds all that belongs to an expert, and behind the slots lies one of zeros.
`split_ids` (`ops.primitive`) sends each pair of a token and an expert to where that expert is, by a table that is an input of a
step, and counts. Every PERIOD tokens the counts come to the host, and slots are filled anew behind what is queued: an expert is
in the table of a step only if its copy has come before that step. So no bit depends on what is in the slots.
"""
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.base import Backend
from ..base.errors import ParameterError
from ..base.placement import EXPERTS, HOST, Placement
from ..base.storage import n_bytes
from ..graph.graph import Graph, Tensor

PERIOD = 8              # tokens between two looks at what was asked for
FADING = 0.95           # what shares from before are worth at the next look
BETTER = 1.5            # times as often must an expert be asked for as the one that it takes the slot of
MOST_BYTES = 512 << 20  # that are brought in a period to empty slots
SWAP_BYTES = 128 << 20  # and in the place of others: the CPU reads its own experts from the same memory


@dataclass(frozen=True)
class Layer:
    """Of a layer with hot experts. row: its number in the table. counts: i32 [X] on its device."""
    row: int
    device: str
    counts: Tensor


@dataclass
class Arrival:
    """A copy on its way into a slot."""
    il: int
    slot: int
    expert: int
    arrive: list[Callable[[], None]]


def expert_tensors(loaded: Mapping[Any, Tensor], placement: Placement, n_layer: int) -> dict[int, list[Tensor]]:
    """Of each layer on a device, what belongs to its experts, if all of that lies on the host."""
    found: dict[int, list[Tensor]] = {}
    for tensor in loaded.values():
        if block := re.match(rf"blk\.([0-9]+){EXPERTS}", tensor.name):
            found.setdefault(int(block[1]), []).append(tensor)
    return {il: tensors for il, tensors in sorted(found.items())
            if il < n_layer and placement.layers[il] != HOST and all(tensor.device == HOST for tensor in tensors)}


def size_of(tensor: Tensor) -> int:
    """Bytes of what belongs to one expert."""
    return n_bytes(tensor) // tensor.shape[0]


def slots_and_bytes(tensors: Mapping[int, list[Tensor]], placement: Placement) -> tuple[int, Counter[str]]:
    """Slots of each layer, as many as the placement says, and the bytes on each device that they take. ParameterError where
    there is room for none."""
    one: Counter[str] = Counter()
    for il, each in tensors.items():
        one[placement.layers[il]] += sum(map(size_of, each))
    if not one:
        raise ParameterError("hot_experts", "no layer of a GPU has all its experts on the CPU; allowed: 0")
    (device, size), asked = one.most_common(1)[0], placement.hot_experts
    most = max(each[0].shape[0] for each in tensors.values())
    n = max(1, int(asked * most)) if asked < 1 else min(int(asked) // size - 1, most)
    if n < 1:
        raise ParameterError("hot_experts", f"{asked:,} bytes have no room for one expert of each layer and "
                                            f"zeros behind it; {device} needs at least {2 * size:,}")
    return n, Counter({device: (n + 1) * size for device, size in one.items()})


class HotExperts:
    """Of one model, shared by its contexts: used under the model's lock."""

    def __init__(self, backends: Mapping[str, Backend], tensors: Mapping[int, list[Tensor]], placement: Placement):
        """tensors: of each layer, as `expert_tensors` finds them; those that `stack` is asked for later are alike."""
        self.backends, self.placement = backends, placement
        self.n_slots, self.n_expert = slots_and_bytes(tensors, placement)[0], max(each[0].shape[0] for each in tensors.values())
        self.layers: dict[int, Layer] = {}
        for row, (il, each) in enumerate(tensors.items()):
            device = placement.layers[il]
            counts = Tensor(f"expert_counts-{il}", "i32", (each[0].shape[0],), device)
            counts.buffer = backends[device].empty(n_bytes(counts))
            backends[device].write(counts.buffer, 0, np.zeros(n_bytes(counts), np.uint8))
            self.layers[il] = Layer(row, device, counts)
        self.stacks: dict[Tensor, Tensor] = {}                     # what lies on the host -> the slots
        self.of_layer: dict[int, list[Tensor]] = {il: [] for il in self.layers}
        self.slots = np.full((len(self.layers), self.n_expert), -1, np.int32)  # the table
        self.experts = np.full((len(self.layers), self.n_slots), -1, np.int64)  # what is in each slot, or on its way there
        self.seen = np.zeros(self.slots.shape, np.int64)
        self.rates = np.zeros(self.slots.shape)
        self.reading: list[Any] = []
        self.arrivals: list[Arrival] = []
        self.n_tokens = self.n_brought = 0

    # For graphs

    def inputs(self, g: Graph) -> None:
        g.input("expert_slots", "i32", self.slots.shape)

    def takes(self, n_tokens: int, n_used: int) -> bool:
        """Whether a micro-batch of so many tokens computes with the slots: not where all experts come to the device for it."""
        offload = self.placement.offload
        return offload is None or not offload.pays("mul_mat_id", n_tokens, n_tokens * n_used / self.n_expert)

    def split(self, g: Graph, il: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(slots of ids, ids that have none), as of `split_ids`, which counts them."""
        layer = self.layers[il]
        row = g.inputs["expert_slots"].view(layer.counts.shape, 4 * layer.row * self.n_expert, name=f"expert_slots-{il}")
        hot, cold, _ = g.split_ids(layer.counts, ids, row, n_slots=self.n_slots, name=f"ffn_moe_hot-{il}")
        return hot, cold

    def stack(self, il: int, tensor: Tensor) -> Tensor:
        """The slots of what belongs to the experts of a layer, and zeros behind them."""
        if tensor not in self.stacks:
            device = self.layers[il].device
            stack = Tensor(f"{tensor.name}@{device}", tensor.dtype, (self.n_slots + 1, *tensor.shape[1:]), device)
            stack.buffer = self.backends[device].empty(n_bytes(stack))
            self.backends[device].write(stack.buffer, self.n_slots * size_of(tensor), np.zeros(size_of(tensor), np.uint8))
            if self.placement.offload is None:  # else it is locked already
                self.backends[device].lock_pages(tensor.buffer)
            self.stacks[tensor] = stack
            self.of_layer[il].append(tensor)
        return self.stacks[tensor]

    @property
    def n_bytes(self) -> int:
        return sum(map(n_bytes, self.stacks.values()))

    # For contexts

    def values(self) -> dict[str, np.ndarray]:
        return {"expert_slots": self.slots}

    def queued(self, n_tokens: int) -> None:
        """A step of so many tokens has been queued. Every PERIOD tokens: what has come by now is in the table; what the counts of
        the period before say begins to come."""
        self.n_tokens += n_tokens
        if self.n_tokens < PERIOD:
            return
        self.n_tokens = 0
        for each in self.arrivals:
            for arrive in each.arrive:
                arrive()
            self.slots[self.layers[each.il].row, each.expert] = each.slot
        self.arrivals = []
        if self.reading:
            counts = np.zeros(self.slots.shape, np.int64)
            for layer, pending in zip(self.layers.values(), self.reading):
                counts[layer.row, :layer.counts.shape[0]] = pending.result().view(np.int32)
            asked = (counts - self.seen) % (1 << 32)
            # Shares, so that a prompt of thousands of tokens counts no more than some tokens behind it
            self.rates = FADING * self.rates + asked / np.maximum(asked.sum(axis=1, keepdims=True), 1)
            self.seen = counts
            self._fill()
        self.reading = [self.backends[layer.device].read(layer.counts.buffer, 0, n_bytes(layer.counts))
                        for layer in self.layers.values()]

    def _fill(self) -> None:
        """Begins to bring what is asked for more than what is there."""
        left = {True: MOST_BYTES, False: SWAP_BYTES}  # is the slot empty
        for il, layer in self.layers.items():
            rates, inside = self.rates[layer.row], self.experts[layer.row]
            size = sum(map(size_of, self.of_layer[il]))
            most = np.argsort(-rates, kind="stable")[:self.n_slots]
            least = np.argsort(np.where(inside >= 0, rates[inside], -1), kind="stable")
            for expert, slot in zip((expert for expert in most if expert not in inside and rates[expert]), least):
                old = int(inside[slot])
                if left[old < 0] < size or (old >= 0 and rates[expert] < BETTER * rates[old]):
                    break
                left[old < 0] -= size
                self._bring(il, int(expert), int(slot), old)

    def _bring(self, il: int, expert: int, slot: int, old: int) -> None:
        """What is queued by now may read the slot; steps that are queued later do not until the copy has come."""
        layer = self.layers[il]
        if old >= 0:
            self.slots[layer.row, old] = -1
        self.experts[layer.row, slot] = expert
        arrive = [self.backends[layer.device].fetch(self.stacks[tensor].buffer, slot * size_of(tensor), self.backends[HOST],
                                                    tensor.buffer, expert * size_of(tensor), size_of(tensor))
                  for tensor in self.of_layer[il]]
        self.arrivals.append(Arrival(il, slot, expert, arrive))
        self.n_brought += 1

    def report(self) -> str:
        inside = (self.slots >= 0).sum()
        return f"hot experts: {inside} of {self.experts.size} slots in use, {self.n_bytes:,} bytes; {self.n_brought} were brought"

    def close(self) -> None:
        for layer in self.layers.values():
            self.backends[layer.device].settle()
            self.backends[layer.device].free(layer.counts.buffer)
        for stack in self.stacks.values():
            self.backends[stack.device].free(stack.buffer)
        self.stacks, self.layers = {}, {}
