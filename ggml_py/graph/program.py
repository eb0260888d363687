"""The last pass: a graph made ready to run many times. Operands lie in memory,
every node is bound to a kernel of its device's backend."""
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from ..backends.base import Backend, Step
from ..base.placement import Offload
from ..base.storage import DTYPES, as_arrays, as_bytes, n_bytes
from .columns import share
from .elide import elide
from ..ops.compose import FUSED
from .fuse import fuse, lower
from .graph import Graph, Node, Tensor
from .letters import letters
from .place import DeviceOf, place
from .plan import ALIGNMENT, plan_memory
from .split import Run, first_runs, split


class Arenas:
    """The scratch memory of a context, one buffer a device, shared by its programs (which run one after the other). It grows, and
    tells so.

    The old buffer goes before the new one comes, so that both need not fit. Should the new one not come, for want of memory or
    since somebody interrupts, the device has none, and whatever program is next allocates what it needs."""

    def __init__(self, backends: Mapping[str, Backend]):
        self.backends = backends
        self.buffers: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        self.generation = 0  # programs bound before the last growth, or an attempt at one, hold addresses that are gone

    def ensure(self, device: str, size: int) -> None:
        if self.sizes.get(device, -1) < size:
            self.generation += 1
            self.sizes.pop(device, None)
            if device in self.buffers:
                self.backends[device].free(self.buffers.pop(device))
            self.buffers[device] = self.backends[device].empty(size)
            self.sizes[device] = size

    def close(self) -> None:
        for device, buffer in self.buffers.items():
            self.backends[device].free(buffer)
        self.buffers, self.sizes = {}, {}


class Outputs:
    """What a run of a program gives, once it has run."""

    def __init__(self, program: "Program", pending: list, errors: list[Callable[[], None]]):
        """pending: of each output, its bytes; errors: each raises an error that kernels have left, if there is one."""
        self.program, self._pending, self._errors = program, pending, errors

    def result(self) -> list[np.ndarray]:
        """Waits for the outputs, arrays of their own. IndexError for an id that is not an expert, naming its node."""
        for raise_error in self._errors:
            raise_error()
        return [as_arrays(data.result(), tensor.dtype, tensor.shape)[0]
                for data, tensor in zip(self._pending, self.program.outputs)]


class Crossing:
    """An operand that comes from another device, in the layout that its own device has. All that a run needs begin before one of
    them ends, so the host waits once."""

    def __init__(self, backend: Any, to: Tensor, source_backend: Backend, source: Tensor):
        """backend: a Backend, and a `Transfers` where it has locked memory."""
        self.backend, self.to, self.source_backend, self.source = backend, to, source_backend, source
        same, size = source.layout == to.layout, n_bytes(source)
        self.copies = same and type(source_backend) is type(backend)
        # where the other device copies into memory of the one, or out of it
        self.into, self.out_of = (tensor.memory[0][tensor.memory[1]:tensor.memory[1] + size]
                                  if same and other.has_locked(tensor.memory[0]) else None
                                  for other, tensor in ((source_backend, to), (backend, source)))
        self.pending: Any = None
        self.departing: Any = None

    def begin(self) -> None:
        if self.into is None and self.out_of is None and not self.copies:
            self.pending = self.source_backend.read(*self.source.memory, n_bytes(self.source))

    def end(self) -> None:
        source, to = self.source, self.to
        if self.pending is not None:
            data, self.pending = self.pending.result(), None
            if source.layout != to.layout:
                data = as_bytes(as_arrays(data, source.dtype, source.shape, source.layout), to.dtype, to.shape, to.layout)
            self.backend.write(*to.memory, data)
        elif self.out_of is not None:
            self.departing = self.backend.write_locked(*to.memory, self.out_of)

    def as_copy(self) -> tuple | None:
        """Of `copy_together`, where one device copies from the other."""
        if not self.copies or self.into is not None or self.out_of is not None:
            return None
        return self.backend, *self.to.memory, self.source_backend, *self.source.memory, n_bytes(self.source)

    def settle(self) -> None:
        """Waits until the source may be written again."""
        self.pending = None  # of a run that an exception ended
        if self.departing is not None:
            self.departing.wait()
            self.departing = None


class Landing:
    """What a run needs that another device copies into memory of the run's device."""

    def __init__(self, backend: Any, crossings: list[Crossing]):
        """backend: a Backend and a `Transfers`."""
        self.backend, self.crossings = backend, crossings
        self.flight: Any = None

    def begin(self) -> None:
        self.flight = self.backend.read_locked([(*each.source.memory, each.into) for each in self.crossings])

    def settle(self) -> None:
        """Waits until it is there."""
        if self.flight is not None:
            self.flight.wait()
            self.flight = None


class Fetch:
    """A weight that is brought beside what its device computes."""

    def __init__(self, backend: Backend, to: Tensor, source_backend: Backend, source: Tensor):
        self.backend, self.to, self.source_backend, self.source = backend, to, source_backend, source

    def begin(self) -> None:
        self.await_it = self.backend.fetch(*self.to.memory, self.source_backend, *self.source.memory, n_bytes(self.source))

    def arrive(self) -> None:
        """What is queued on the device from now on finds it there."""
        self.await_it()


@dataclass(frozen=True)
class Part:
    """A run of nodes, bound. copies: wait for those that still read memory of the device, bring what it reads from other devices,
    and begin to bring what is read later."""
    device: str
    copies: list[Callable[[], None]]
    steps: list[Step]


def refusal(nodes: Sequence[Node]) -> str | None:
    """Why a CUDA graph of these nodes would be stale, naming the first node that is to blame; None if they can be captured."""
    for node in nodes:
        for name in node.declared.step_params:
            return (f"{node.name}: {node.op} to {name} {node.params[name]} of {node.results[0].root.name}, which moves from step "
                    f"to step; {node.op}_indirect reads it as data")
    return None


class Program:
    """Runs a graph, after the passes have rewritten it.

    Inputs, boxes of letters and intermediate results share the arenas. The inputs lie side by side on the first device and on
    each that reads some of them, and are written in one transfer each."""

    def __init__(self, graph: Graph, arenas: Arenas, no_fuse=(), device_of: DeviceOf | None = None,
                 offload: Offload | None = None, columns: Sequence[str] = ()):
        """no_fuse: names of passes that are left out, or "all". device_of: node -> device; None: as `place` has it. offload:
        which weights of the host are streamed. columns: the devices that share what is on the first of them."""
        self.backends = arenas.backends
        self.inputs = list(graph.inputs.values())
        self.input_device = self.inputs[0].device
        backend_of = lambda node: self.backends[node.device]
        place(graph, self.backends, device_of, offload)
        if columns:
            share(graph, self.backends, columns)
        self.outputs = graph.outputs
        ops = [op for op in FUSED if any(backend.has_kernel(op) for backend in self.backends.values())]
        nodes = lower(fuse(graph, no_fuse, lambda node: backend_of(node).accepts(node), ops),
                      lambda node: backend_of(node).has_kernel(node.op))
        nodes = elide(nodes, graph.outputs, no_fuse)
        self.runs: list[Run] = split(nodes, self.backends)
        self.nodes = [node for run in self.runs for node in (*run.begun, *run.copies, *run.nodes)]
        self.streamed = {node for run in self.runs for node in run.begun}
        self.on_their_way: list[Crossing | Landing] = []
        self.crossings = {node for run in self.runs for node in run.copies} | self.streamed
        for run in self.runs:
            for node in run.nodes:
                self.backends[run.device].prepare(node)
        inputs = {*self.inputs}
        # what other devices have of inputs
        self.mirrors = {copy.results[0]: copy.src[0] for run in self.runs for copy in run.copies if copy.src[0].root in inputs}
        # None where devices hand over by copies alone
        self.mail = letters(self.runs, self.backends, inputs, graph.outputs)
        self.boxes = self.mail.boxes if self.mail else {}
        self.plan = plan_memory(self.nodes, graph.outputs, n_bytes, {*self.mirrors, *self.boxes},
                                self.mail.read_until() if self.mail else None)
        self.passing = {*self.inputs, *self.mirrors, *self.boxes, *self.plan.extents}  # whose memory is others' later
        self.has_run = False
        self._give_memory(arenas)
        self.late = list(dict.fromkeys(self.backends[run.device] for run in self.runs for node in run.nodes
                                       if self.backends[run.device].leaves_errors(node)))
        self.generation = arenas.generation
        self.refused = refusal(self.nodes)
        # It can be queued before the run before it is over: the host has no part in it
        self.runs_ahead = not self.refused and all(self.backends[run.device].asynchronous for run in self.runs)

    def _give_memory(self, arenas: Arenas) -> None:
        padded = [-(-n_bytes(t) // ALIGNMENT) * ALIGNMENT for t in self.inputs]
        *starts, self.input_bytes = accumulate(padded, initial=0)
        self.input_devices = dict.fromkeys([self.input_device, *(tensor.device for tensor in self.mirrors)])
        before_boxes = dict.fromkeys(self.input_devices, self.input_bytes)
        ahead = {device: before_boxes.get(device, 0) + (self.mail.sizes.get(device, 0) if self.mail else 0)
                 for device in dict.fromkeys([*self.input_devices, *(tensor.device for tensor in self.boxes),
                                              *self.plan.arena_bytes])}
        for device, size in ahead.items():
            arenas.ensure(device, size + self.plan.arena_bytes.get(device, 0))
        self.arenas = {device: arenas.buffers[device] for device in ahead}
        self.staging = np.zeros(self.input_bytes, np.uint8)
        self.staged: dict[Tensor, np.ndarray] = {}  # the inputs and where their values go
        for tensor, start in zip(self.inputs, starts):
            tensor.buffer, tensor.offset = arenas.buffers[self.input_device], start
            values = self.staging[start:start + n_bytes(tensor)].view(DTYPES[tensor.dtype])
            self.staged[tensor] = values.reshape(tensor.shape)
        for tensor, source in self.mirrors.items():
            tensor.buffer, tensor.offset = arenas.buffers[tensor.device], source.memory[1]
        for tensor, box in self.boxes.items():
            tensor.buffer, tensor.offset = arenas.buffers[tensor.device], before_boxes.get(tensor.device, 0) + box.offset
        for tensor, extent in self.plan.extents.items():
            tensor.buffer, tensor.offset = arenas.buffers[tensor.device], ahead[tensor.device] + extent.offset

    def off_device(self) -> tuple[int, int]:
        """How many nodes compute elsewhere than on the device of the inputs, and how many copies cross devices."""
        return sum(len(run.nodes) for run in self.runs if run.device != self.input_device), len(self.crossings)

    def report(self) -> str:
        """What runs where, what is brought from other devices, and the memory plan, in a few lines."""
        computed, copied = self.off_device()
        brought, streamed = (sum(n_bytes(copy.src[0]) for copy in copies) for copies in (self.crossings, self.streamed))
        runs = ", ".join(f"{sum(len(run.nodes) for run in each)} on {device}"
                         for device, each in groupby(self.runs, lambda run: run.device))
        return (f"nodes: {runs}; off {self.input_device}: {computed} nodes; {copied} copies between devices, {brought:,} bytes, "
                f"of which {streamed:,} of weights\n{self.plan.report()}")

    @cached_property
    def parts(self) -> list[Part]:
        """The runs of nodes, bound when they are first wanted."""
        fetches = {node: self._fetch(node) for node in self.streamed}
        parts: list[Part] = []
        departing: dict[str, list[Crossing]] = defaultdict(list)  # that read memory of a device, since its last run
        for run, first in zip(self.runs, first_runs(self.runs)):
            crossings = [self._crossing(node) for node in run.copies if node.results[0] not in self.mirrors]
            landings = [Landing(backend, [each for each in crossings if each.into is not None and each.source_backend is backend])
                        for backend in dict.fromkeys(each.source_backend for each in crossings if each.into is not None)]
            copies = [*(each.settle for each in departing.pop(run.device, ())), *(fetches[node].begin for node in run.begun)]
            parts.append(Part(run.device, copies, self.backends[run.device].bind_all(run.nodes)))
            parts[first].copies.extend([*(each.begin for each in landings), *(each.begin for each in crossings)])
            copies += [*(each.end for each in crossings)]
            if together := [copy for each in crossings if (copy := each.as_copy()) is not None]:
                copies.append(partial(together[0][0].copy_together, together))
            copies += [*(each.settle for each in landings),
                       *(fetches[node].arrive for node in run.awaited)]
            for each in crossings:
                departing[each.source.root.device].append(each)
            self.on_their_way += [*crossings, *landings]
        self.departing = [each for waiting in departing.values() for each in waiting]
        return parts

    def _fetch(self, node: Node) -> Fetch:
        source, to = node.src[0], node.results[0]
        return Fetch(self.backends[to.device], to, self.backends[source.root.device], source)

    def _crossing(self, node: Node) -> Crossing:
        source, to = node.src[0], node.results[0]
        return Crossing(self.backends[to.device], to, self.backends[source.root.device], source)

    def run(self, values: dict, graphs: Mapping[str, Any] | None = None, key: tuple = (), office: Any = None) -> list[np.ndarray]:
        """Queues a run and waits for its outputs."""
        return self.queue(values, graphs, key, office).result()

    def queue(self, values: dict, graphs: Mapping[str, Any] | None = None, key: tuple = (), office: Any = None) -> Outputs:
        """values: one array for each input, of its dtype and shape; or (Outputs, i) of the last run in these arenas, whose output
        i has that dtype and shape and, where it is of this program, is copied on the device; Outputs alone: the first. graphs: by
        device, what replays the steps, under the key and the number of the run. office: of the context (`backends.letters`), by
        which devices hand over from the second run on; the first one loads the kernels of both, which must not wait for each
        other then."""
        copied: dict[Tensor, Tensor] = {}
        for tensor, staged in self.staged.items():
            value = values[tensor.name]
            if isinstance(value, (tuple, Outputs)):
                outputs, i = value if isinstance(value, tuple) else (value, 0)
                # The memory of another program may be gone
                value = self.outputs[i] if outputs.program is self and self._copies(self.outputs[i]) else outputs.result()[i]
            if value.shape != tensor.shape:
                raise ValueError(f"{tensor!r}: got an array of shape {value.shape}")
            if isinstance(value, Tensor):
                copied[tensor] = value
            else:
                staged[...] = value
        for device in self.input_devices:
            self.backends[device].write(self.arenas[device], 0, self.staging)
        for tensor, output in copied.items():
            for to in (tensor, *(mirror for mirror, source in self.mirrors.items() if source.root is tensor)):
                assert to.shape == tensor.shape, to
                self.backends[to.device].copy(*to.memory, self.backends[output.root.device], *output.memory, n_bytes(tensor))
        for late in self.late:
            late.forget_error()  # of a run whose outputs nobody waited for
        errors = [late.read_error for late in self.late]
        if self.mail is not None and office is not None and self.has_run and not self.refused:
            errors.append(office.run(self, graphs, key))
        else:
            if office is not None:
                office.leave()
            self._run_by_copies(graphs, key)
        self.has_run = True
        return Outputs(self, [self._read(tensor) for tensor in self.outputs], [read() for read in errors])

    def _copies(self, output: Tensor) -> bool:
        """Whether all devices that have the inputs copy what lies where an output does."""
        kind = type(self.backends[output.root.device])
        return all(type(self.backends[device]) is kind for device in self.input_devices)

    def _run_by_copies(self, graphs: Mapping[str, Any] | None, key: tuple) -> None:
        parts = self.parts
        try:
            for i, part in enumerate(parts):
                for copy in part.copies:
                    copy()
                replay = graphs.get(part.device) if graphs else None
                if replay is None or self.refused:
                    self.backends[part.device].run(part.steps)
                    if replay is not None:
                        replay.refuse(self.refused)
                else:
                    replay.run((key, i), part.steps)
            for crossing in self.departing:
                crossing.settle()
        except BaseException:
            for each in self.on_their_way:
                each.settle()
            for device in {node.device for node in self.streamed}:
                self.backends[device].settle()  # the memory is others' now
            raise

    def _read(self, tensor: Tensor):
        return self.backends[tensor.root.device].read(*tensor.memory, n_bytes(tensor))
