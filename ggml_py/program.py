"""A graph made ready to run many times: operands resolved to memory, every node bound to a kernel of its device's backend."""
from functools import cached_property
from itertools import accumulate

import numpy as np

from .backends.cuda_graphs import refusal
from .graph import Graph, Tensor
from .passes import fuse
from .plan import ALIGNMENT, plan_memory, split
from .storage import DTYPES, n_bytes


class Arenas:
    """The scratch memory of a context, one buffer a device, shared by its programs (which run one after the other). It grows, and tells so.

    The old buffer goes before the new one comes, so that both need not fit. Should the new one not come, for want of memory or since somebody interrupts,
    the device has none, and whatever program is next allocates what it needs."""

    def __init__(self, backends: dict):
        self.backends = backends
        self.buffers: dict = {}
        self.sizes: dict[str, int] = {}
        self.generation = 0  # programs bound before the last growth, or an attempt at one, hold addresses that are gone

    def ensure(self, device: str, size: int):
        if self.sizes.get(device, -1) < size:
            self.generation += 1
            self.sizes.pop(device, None)
            if device in self.buffers:
                self.backends[device].free(self.buffers.pop(device))
            self.buffers[device] = self.backends[device].empty(size)
            self.sizes[device] = size

    def close(self):
        for device, buffer in self.buffers.items():
            self.backends[device].free(buffer)
        self.buffers, self.sizes = {}, {}


class Outputs:
    """What a run of a program gives, once it has run."""

    def __init__(self, program: "Program", pending: list, errors: list):
        """pending: of each output, its bytes; errors: what raises an error that kernels have left, if there is one."""
        self.program, self._pending, self._errors = program, pending, errors

    def result(self) -> list[np.ndarray]:
        """Waits for the outputs, arrays of their own. IndexError for an id that is no expert, naming its node."""
        for raise_error in self._errors:
            raise_error()
        return [data.result().view(DTYPES[tensor.dtype]).reshape(tensor.shape) for data, tensor in zip(self._pending, self.program.outputs)]


def _crosses(node: Tensor) -> bool:
    return node.op == "cpy" and node.src[0].base.device != node.device


class Program:
    """Runs a graph, after the passes that no_fuse does not switch off have rewritten it.

    Inputs and intermediate results share the arenas; the inputs of a device lie side by side and are written in one transfer."""

    def __init__(self, graph: Graph, arenas: Arenas, no_fuse=()):
        backends = arenas.backends
        self.backends, self.outputs = backends, graph.outputs
        fuse(graph, no_fuse, lambda device, op, match: backends[device].declines(op, match))
        self.splits = split([node for node in graph.live() if not node.is_view])
        nodes = [node for part in self.splits for node in part.nodes]
        for node in nodes:
            backends[node.device].check(node)
            if scratch := backends[node.device].scratch(node):
                node.also += Tensor(f"{node.name}-scratch", *scratch, device=node.device),
        self.plan = plan_memory(nodes, graph.outputs, n_bytes)
        self.inputs = list(graph.inputs.values())
        self.input_device = self.inputs[0].device
        padded = [-(-n_bytes(t) // ALIGNMENT) * ALIGNMENT for t in self.inputs]
        ends = list(accumulate(padded, initial=0))
        self.input_offsets, self.input_bytes = dict(zip(self.inputs, ends)), ends[-1]
        for device, size in {self.input_device: 0, **self.plan.arena_bytes}.items():
            arenas.ensure(device, size + (self.input_bytes if device == self.input_device else 0))
        self.staging = np.zeros(self.input_bytes, np.uint8)
        self.staged: list[tuple[Tensor, np.ndarray]] = []  # the inputs and where their values go
        for tensor, offset in self.input_offsets.items():
            tensor.storage = arenas.buffers[self.input_device], offset
            self.staged.append((tensor, self.staging[offset:offset + n_bytes(tensor)].view(DTYPES[tensor.dtype]).reshape(tensor.shape)))
        for tensor, place in self.plan.placements.items():
            tensor.storage = arenas.buffers[tensor.device], place.offset + (self.input_bytes if tensor.device == self.input_device else 0)
        self.late = list(dict.fromkeys(backend for node in nodes if node.op in (backend := backends[node.device]).late_errors))
        self.generation = arenas.generation
        self.nodes = nodes
        self.refused = refusal(nodes)
        self.runs_ahead = backends[self.input_device].asynchronous and not self.refused  # queued before the run before it is over

    def off_device(self) -> tuple[int, int]:
        """How many nodes compute elsewhere than on the device of the inputs, and how many copies cross devices."""
        copies = sum(_crosses(node) for node in self.nodes)
        return sum(node.device != self.input_device and not _crosses(node) for node in self.nodes), copies

    def report(self) -> str:
        """What runs where, and the memory plan, in a few lines."""
        computed, copied = self.off_device()
        parts = ", ".join(f"{len(part.nodes)} on {part.device}" for part in self.splits)
        return f"nodes: {parts}; off {self.input_device}: {computed} nodes, {copied} copies\n{self.plan.report()}"

    @cached_property
    def steps(self) -> list[tuple]:
        """(backend, steps of its nodes) for each run of nodes on one device, bound when they are first wanted."""
        return [(self.backends[part.device], [self._bind(node) for node in part.nodes]) for part in self.splits]

    def _bind(self, node: Tensor):
        backend = self.backends[node.device]
        if _crosses(node):
            return self._transfer(node, self.backends[node.src[0].base.device], backend)
        return backend.bind(node)

    @staticmethod
    def _transfer(node: Tensor, source_backend, backend):
        source = node.src[0].base

        def transfer():
            if type(source_backend) is type(backend):
                backend.copy(*node.storage, source_backend, *source.storage, n_bytes(source))
            else:
                backend.write(*node.storage, source_backend.read(*source.storage, n_bytes(source)).result())
        return transfer

    def run(self, values: dict, graphs=None, key=None) -> list[np.ndarray]:
        """Queues a run and waits for its outputs."""
        return self.queue(values, graphs, key).result()

    def queue(self, values: dict, graphs=None, key=None) -> Outputs:
        """values: one array for each input, of its dtype and shape, or the Outputs of the last run in these arenas, whose first has that dtype and shape and,
        where it is of this program, is copied on the device. graphs: what replays the steps, under the key, or None."""
        backend, copied = self.backends[self.input_device], []
        for tensor, staged in self.staged:
            value = values[tensor.name]
            if isinstance(value, Outputs):
                value = self.outputs[0] if value.program is self else value.result()[0]  # the memory of another program may be gone
            if value.shape != tensor.shape:
                raise ValueError(f"{tensor!r}: got an array of shape {value.shape}")
            if isinstance(value, Tensor):
                copied.append((tensor, value.base))
            else:
                staged[...] = value
        backend.write(*self.inputs[0].storage, self.staging)
        for tensor, output in copied:
            backend.copy(*tensor.storage, backend, *output.storage, n_bytes(tensor))
        parts = self.steps
        for late in self.late:
            late.forget_error()  # of a run whose outputs nobody waited for
        if graphs is None or self.refused:
            for backend, steps in parts:
                backend.run(steps)
            if graphs is not None:
                graphs.refuse(self.refused)
        else:
            graphs.run(key, parts[0][1])
        return Outputs(self, [self._read(tensor) for tensor in self.outputs], [late.read_error() for late in self.late])

    def _read(self, tensor: Tensor):
        return self.backends[tensor.device].read(*tensor.storage, n_bytes(tensor))
