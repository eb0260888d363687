"""Post offices: they run programs whose devices hand over by letters (`graph.letters`), each device its own queue.

`HostOffice` is for devices that are the CPU, each with memory of its own: a queue runs until it must wait, then another one does.
`DeviceOffice` is for GPUs that reach each other's memory: a queue is one CUDA graph, in which kernels post and wait
(kernels/cuda/letters.py); the host launches a graph for each device and has no part in what they hand over.

Both number their steps. A letter says which step it was posted in, so one of an earlier step is never taken; and each device
knows which step the others have ended. When a program follows another one, or a run by copies, all devices meet first, since
boxes lie where other programs compute.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..base.storage import n_bytes
from ..graph.graph import Node
from ..graph.letters import MOST_BYTES, Box, Item, Joined, Post, Take, joined
from .base import Backend, Step


def new_office(backends: Mapping[str, Backend], replaying: Sequence[str]) -> PostOffice | None:
    """None where there is one device, where devices do not reach each other, and on GPUs that do not replay graphs.
    replaying: the devices that do."""
    devices = [*backends.values()]
    if len(devices) < 2 or not all(a.reaches(b) for a in devices for b in devices if a is not b):
        return None
    if not devices[0].asynchronous:
        return HostOffice(backends)
    return DeviceOffice(backends) if {*replaying} == {*backends} else None


def name_of(item: Item) -> str:
    """Of what it waits for."""
    return item.box.tensor.name if isinstance(item, Take) else item.source.name if isinstance(item, Post) else item.name


@dataclass
class Bound:
    """The letters of a program. steps: of each node and letter by itself. queues: of each device what a graph is captured from.
    items: of each device those that its kernels name, by their numbers from 1. tables: memory that the kernels read."""
    steps: dict[Item, Callable[..., Any]]
    queues: dict[str, list[Step]] = field(default_factory=dict)
    items: dict[str, list[Item]] = field(default_factory=dict)
    tables: list[Any] = field(default_factory=list)


class PostOffice:
    """Of a context. `enter` makes all devices ready for a program, `run` runs it, `visit` runs it item by item."""

    def __init__(self, backends: Mapping[str, Any]):
        self.backends, self.devices = backends, [*backends]
        self.step = 1          # number of the next one
        self.last: Any = None  # the program that ran last, by letters
        self.programs: WeakKeyDictionary[Any, Bound] = WeakKeyDictionary()

    def bound(self, program: Any) -> Bound:
        if program not in self.programs:
            steps = {node: step for run, part in zip(program.runs, program.parts) for node, step in zip(run.nodes, part.steps)}
            self.programs[program] = self.bind(program, steps)
        return self.programs[program]

    def bind(self, program: Any, steps: dict[Item, Callable[..., Any]]) -> Bound:
        """steps: of the nodes."""
        raise NotImplementedError

    def enter(self, program: Any) -> None:
        if self.last is not program:
            self.last = None
            self.begin()
            self.last = program

    @contextmanager
    def visiting(self, program: Any) -> Iterator[None]:
        """A step of a program. One that ends with an exception has its number too, so that nobody takes what it has posted."""
        self.enter(program)
        try:
            yield
        except BaseException:
            self.last = None
            raise
        finally:
            self.step += 1

    def begin(self) -> None:
        """Nobody has anything to do any more; all know the number of the step."""
        raise NotImplementedError

    def leave(self) -> None:
        """What runs next is by copies."""
        self.last = None

    def run(self, program: Any, graphs: Mapping[str, Any] | None, key: Hashable) -> Callable[[], Callable[[], None]]:
        """Queues a step. Returns what queues reading whether a letter has been missed, a function that raises it."""
        raise NotImplementedError

    def visit(self, program: Any, run_node: Callable[[int, Node, Step], None], see: Callable[[Item], None]) -> None:
        """Runs a step. run_node: runs a node, (number of the run, node, its step); see: is told of each post and take that has
        run."""
        raise NotImplementedError

    def close(self) -> None:
        self.programs.clear()


class HostOffice(PostOffice):
    """Devices that are the CPU."""

    def __init__(self, backends: Mapping[str, Any]):
        super().__init__(backends)
        self.flags: dict[tuple[Post, Any], int] = {}
        self.ended = dict.fromkeys(self.devices, 0)

    def begin(self) -> None:
        self.flags.clear()
        self.ended = dict.fromkeys(self.devices, self.step - 1)

    def bind(self, program: Any, steps: dict[Item, Callable[..., Any]]) -> Bound:
        for *_, item in program.mail.order:
            if isinstance(item, Post):
                steps[item] = partial(self.post, item)
            elif isinstance(item, Take):
                steps[item] = partial(self.take, item)
        return Bound(steps)

    def post(self, post: Post) -> bool:
        """Whether it is posted: not before its receivers have ended the step before."""
        if any(first and self.ended[box.device] < self.step - 1 for (box, _), first in zip(post.to, post.first)):
            return False
        n, row = post.rows
        buffer, offset = post.source.memory
        payload = buffer[offset:offset + n * row].reshape(n, row)
        for box, column in post.to:
            self.write(box, *post.place(box, column), payload)
            self.flags[post, box] = self.step
        return True

    @staticmethod
    def write(box: Box, first: int, stride: int, payload: np.ndarray) -> None:
        """Rows, each from a byte of the box's on."""
        buffer, offset = box.tensor.memory
        buffer[offset:offset + n_bytes(box.tensor)].reshape(len(payload), stride)[:, first:first + payload.shape[1]] = payload

    def take(self, take: Take) -> bool:
        """Whether all is there."""
        return all(self.flags.get((post, take.box)) == self.step for post in take.awaited)

    def run(self, program: Any, graphs: Mapping[str, Any] | None, key: Hashable) -> Callable[[], Callable[[], None]]:
        self.visit(program, lambda i, node, step: self.backends[node.device].run([step]), lambda item: None)
        return lambda: lambda: None

    def visit(self, program: Any, run_node: Callable[[int, Node, Step], None], see: Callable[[Item], None]) -> None:
        """Each device runs until it waits for another, the last one first: a device that took what is not there yet would be
        found."""
        steps = self.bound(program).steps
        queues = {device: deque(queue) for device, queue in reversed(program.mail.queues().items())}
        with self.visiting(program):
            while any(queues.values()):
                moved = False
                for device, queue in queues.items():
                    while queue:
                        i, item = queue[0]
                        if isinstance(item, Node):
                            run_node(i, item, steps[item])
                        elif steps[item]():
                            see(item)
                        else:
                            break
                        queue.popleft()
                        moved = True
                    if not queue:
                        self.ended[device] = self.step
                if not moved:
                    raise RuntimeError("letters: devices wait for ever: " + ", ".join(
                        f"{device} for {name_of(queue[0][1])}" for device, queue in queues.items() if queue))
            self.ended = dict.fromkeys(self.devices, self.step)


class DeviceOffice(PostOffice):
    """GPUs. A mailbox a device, as kernels/cuda/letters.py has it. Sealed words lie there as boxes do, twice as far apart."""

    def __init__(self, backends: Mapping[str, Any]):
        from ..kernels.cuda.letters import SEALED
        super().__init__(backends)
        self.mailboxes = {device: backend.empty(SEALED + 2 * MOST_BYTES) for device, backend in backends.items()}
        self.turns: dict[str, Step] = {}
        self.tables: list[tuple[Any, Any]] = []  # (backend, buffer)

    def mailbox(self, device: str) -> int:
        return int(self.mailboxes[device].handle)

    def sealed(self, box: Box) -> int:
        """Where the sealed words of a box lie."""
        from ..kernels.cuda.letters import SEALED
        return self.mailbox(box.device) + SEALED + 2 * box.offset

    def begin(self) -> None:
        from ..kernels.cuda.letters import ENDED, SEALED, SEQ
        self._meet()
        header = np.zeros(SEALED // 4, np.int32)
        header[SEQ], header[ENDED:] = self.step, self.step - 1
        for device, backend in self.backends.items():
            backend.write(self.mailboxes[device], 0, header)
        self._meet()

    def enter(self, program: Any) -> None:
        """Before seals would come again steps are numbered from 1, and all sealed words are wiped out."""
        from ..kernels.cuda.letters import MOST_STEPS, SEALED
        if self.step > MOST_STEPS:
            self.last = None
            self._meet()
            for device, backend in self.backends.items():
                backend.write(self.mailboxes[device], SEALED, np.zeros(2 * MOST_BYTES // 4, np.int32))
            self.step = 1
        super().enter(program)

    def _meet(self) -> None:
        """What is queued on any device now is before what is queued on any later."""
        first, *others = self.backends.values()
        for _ in range(2):
            for backend in others:
                with first.fork(backend.stream, backend.driver):
                    pass

    def bind(self, program: Any, steps: dict[Item, Callable[..., Any]]) -> Bound:
        """Posts and takes by themselves, and, for the graphs, those that are `joined`."""
        from ..kernels.cuda.letters import ENDED, LETTERS, ROW, turn
        queues = program.mail.queues()
        numbers: dict[Box, int] = {}
        for queue in queues.values():
            boxes = [item.box for _, item in queue if isinstance(item, Take)]
            assert len(boxes) < LETTERS, len(boxes)
            numbers.update((box, n) for n, box in enumerate(boxes, 1))
        bound = Bound(steps)
        for device, backend in self.backends.items():
            items = [item for _, item in queues.get(device, ())]
            table: list[tuple[int, ...]] = [(0,) * ROW]
            starts: dict[Item, int] = {}
            for post in items:
                if isinstance(post, Post):
                    starts[post] = len(table)
                    for (box, column), first in zip(post.to, post.first):
                        at, stride = post.place(box, column)
                        ended = ENDED + self.devices.index(box.device) if first else 0
                        table.append((self.sealed(box) + 2 * at, stride // 4, numbers[box], ended))
            bound.tables.append(backend.upload(np.array(table, np.int64)))
            launch = partial(self._letter, backend, bound.items.setdefault(device, []), int(bound.tables[-1].handle), starts,
                             numbers)
            launches: list[Step] = []
            for item in items:
                if isinstance(item, Post):
                    bound.steps[item] = launch(Joined(item))
                elif isinstance(item, Take):
                    bound.steps[item] = launch(Joined(take=item))
            for each in joined(items):
                launches.append(launch(each) if isinstance(each, Joined) else steps[each])
            if device not in self.turns:
                others = [self.mailbox(other) + 4 * (ENDED + self.devices.index(device)) for other in self.devices
                          if other != device]
                self.tables.append((backend, backend.upload(np.array(others, np.int64))))
                self.turns[device] = turn(backend.target, self.mailbox(device), int(self.tables[-1][1].handle), len(others))
            bound.queues[device] = [*launches, self.turns[device]]
            backend.load()  # nothing is loaded while somebody waits
        return bound

    def _letter(self, backend: Any, items: list[Item], table: int, starts: dict[Item, int], numbers: dict[Box, int],
                joined: Joined) -> Step:
        from ..kernels.cuda.letters import ROW, letter
        post, take, summed, quantize = joined
        item = take or post
        assert item is not None
        items.append(item)
        named: dict[str, Any] = {}
        if post is not None:
            n_rows, row_bytes = post.rows
            named["post"] = backend.address(post.source), table + 8 * ROW * starts[post], len(post.to), n_rows, row_bytes // 4
        if take is not None:
            tensor = take.box.tensor
            named["take"] = backend.address(tensor), self.sealed(take.box), n_bytes(tensor) // 4, numbers[take.box]
        if summed is not None:
            named["weighted_sum"] = *map(backend.address, summed.src), summed.src[1].shape[1]
        if quantize is not None:
            named["quantize"] = backend.address(quantize.results[0]), *quantize.src[0].shape
        return letter(backend.target, self.mailbox(backend.device), name=len(items), **named)

    def run(self, program: Any, graphs: Mapping[str, Any] | None, key: Hashable) -> Callable[[], Callable[[], None]]:
        """One graph a device. All are there before the first is launched."""
        assert graphs is not None
        bound = self.bound(program)
        ready = [(graphs[device], graphs[device].ready((key, "letters"), queue)) for device, queue in bound.queues.items()]
        self.enter(program)
        failure = None
        for cache, graph in ready:  # all of them, since each waits for the others
            try:
                cache.replay(graph)
            except BaseException as error:
                failure, self.last = error, None
        self.step += 1
        if failure is not None:
            raise failure
        return partial(self._read_faults, bound)

    def _read_faults(self, bound: Bound) -> Callable[[], None]:
        from ..kernels.cuda.letters import FAULT
        pending = {device: self.backends[device].read(self.mailboxes[device], 4 * FAULT, 12) for device in self.devices}

        def raise_error() -> None:
            for device, found in pending.items():
                number, word, there = map(int, found.result().view(np.int32))
                if number:
                    self.last = None
                    name = name_of(bound.items[device][number - 1]) if number <= len(bound.items[device]) else "a letter"
                    raise RuntimeError(f"letters: {device} waited too long for {name}, and found {there} at word {word}; another "
                                       "GPU has failed or is far behind")
        return raise_error

    def visit(self, program: Any, run_node: Callable[[int, Node, Step], None], see: Callable[[Item], None]) -> None:
        """In the one order of all items, in which nobody waits."""
        steps = self.bound(program).steps
        with self.visiting(program):
            for i, device, item in program.mail.order:
                if isinstance(item, Node):
                    run_node(i, item, steps[item])
                else:
                    self.backends[device].run([steps[item]])
                    see(item)
            for device, step in self.turns.items():
                self.backends[device].run([step])

    def close(self) -> None:
        super().close()
        for backend, buffer in (*self.tables, *((self.backends[device], each) for device, each in self.mailboxes.items())):
            backend.free(buffer)
        self.tables, self.mailboxes = [], {}
