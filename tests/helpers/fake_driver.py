"""The stream semantics of a CUDA driver, scripted: nothing that is queued happens before it must, or before a test says so.

A `FakeGPU` has the interface that `ggml_py.backends.transfers` asks of a driver, and real memory. An operation runs when `step`
picks its stream, or when a host waits (`sync` of an event or of a stream), and then no more runs than the wait needs. So what a
host does too early, it does before the copy, every time. What a real driver lets pass in silence, an operation on memory that is
not there when it runs, is noted in `violations`.
"""
import ctypes
import weakref
from collections import deque
from dataclasses import dataclass
from threading import RLock, local

import numpy as np

GONE = 0xDB   # what freed memory reads as
FRESH = 0xA5  # what memory that was not written yet reads as
ALIGNMENT = 256


class FakeError(RuntimeError):
    pass


class FakeWorld:
    """What the GPUs of a machine share: the memory of the host, the device that is current in a thread,
    and streams that wait for each other."""

    def __init__(self):
        self.lock = RLock()
        self.gpus: list[FakeGPU] = []
        self.streams: list[FakeStream] = []
        self.violations: list[str] = []
        self.host: list[tuple[int, np.ndarray, weakref.ref]] = []  # (address, bytes, owner), page-locked and pageable
        self._thread = local()

    def enter(self, gpu) -> None:
        self._thread.gpu = gpu

    def check_entered(self, gpu=None) -> None:
        current = getattr(self._thread, "gpu", None)
        if current is None or gpu not in (None, current):
            raise FakeError(f"the device current in this thread is {current}, expected {gpu or 'one'}")

    def step(self, index: int) -> bool:
        """Runs an operation of stream `index`, or of the first one behind it that does not wait for another."""
        return any(self.streams[(index + i) % len(self.streams)].step() for i in range(len(self.streams)))

    def add_host(self, owner, address: int, data: np.ndarray) -> None:
        self.host = [part for part in self.host if part[2]() is not None] + [(address, data, weakref.ref(owner))]

    def at(self, address: int, n_bytes: int):
        """What an operation that is queued now finds at an address when it runs: a function that gives the bytes,
        or None when they are gone."""
        for gpu in self.gpus:
            for block in gpu.blocks:
                if not block.is_closed and block.address <= address and address + n_bytes <= block.address + block.size:
                    first = address - gpu.address
                    return lambda: gpu.bytes[first:first + n_bytes] if block.is_there else None
        for start, data, owner in self.host:
            if owner() is not None and start <= address and address + n_bytes <= start + data.size:
                first = address - start
                return lambda: data[first:first + n_bytes] if owner() is not None and getattr(owner(), "handle", True) else None
        raise FakeError(f"{n_bytes} bytes at {address:#x} are not memory")


class FakeEvent:
    def __init__(self, stream):
        self.stream, self.happened = stream, False

    @property
    def is_done(self) -> bool:
        self.stream.world.check_entered()
        with self.stream.world.lock:
            return self.happened

    def sync(self) -> None:
        self.stream.world.check_entered()
        with self.stream.world.lock:
            self.stream.run_until(lambda: self.happened)


class FakeStream:
    def __init__(self, gpu):
        self.gpu, self.world = gpu, gpu.world
        self.operations = deque()  # (event that has to happen first, or None; function)
        self.is_captured = False   # as a test says
        self.world.streams.append(self)

    def queue(self, function, first: FakeEvent | None = None) -> None:
        with self.world.lock:
            self.operations.append((first, function))

    def record(self) -> FakeEvent:
        self.world.check_entered(self.gpu)
        event = FakeEvent(self)
        self.queue(lambda: setattr(event, "happened", True))
        return event

    def wait(self, event: FakeEvent) -> None:
        self.queue(lambda: None, first=event)

    def sync(self) -> None:
        with self.world.lock:
            self.run_until(lambda: not self.operations)

    def step(self) -> bool:
        """Runs the oldest operation, unless it waits for an event."""
        with self.world.lock:
            if not self.operations or (self.operations[0][0] is not None and not self.operations[0][0].happened):
                return False
            self.operations.popleft()[1]()
            return True

    def run_until(self, reached) -> None:
        while not reached():
            first, function = self.operations[0]
            if first is not None:
                first.stream.run_until(lambda: first.happened)
            self.operations.popleft()
            function()


@dataclass(eq=False)
class Block:
    """A GPU's memory from an allocation to its free. The host closes it; it is there, for operations,
    as long as the order of its stream says."""
    address: int
    size: int
    is_closed: bool = False
    is_there: bool = False


@dataclass(eq=False)
class Hole:
    """Memory that can be allocated: in `stream` at once, elsewhere when the free has run (stream is None then)."""
    offset: int
    size: int
    stream: FakeStream | None = None


class FakeBuffer:
    """A handle of memory. Without a close it is freed, in the stream of its allocation, when nothing refers to it."""

    def __init__(self, gpu, handle: int, size: int, free, stream=None):
        self.gpu, self.handle, self.size = gpu, handle, size
        self._free = weakref.finalize(self, free, stream)
        self._free.atexit = False

    def fill(self, value: int, *, stream) -> None:
        values = np.full(self.size, value, np.uint8)
        self.gpu.write(self.handle, self.size, lambda: values, stream)

    def close(self, stream=None) -> None:
        if found := self._free.detach():
            _, free, args, _ = found
            free(stream or args[0])
        self.handle = self.size = 0


class FakeLock:
    """Of pages of the host."""


class FakeGPU:
    """The driver of one GPU of a world."""

    def __init__(self, world: FakeWorld | None = None, n_bytes: int = 1 << 16):
        self.world = world or FakeWorld()
        storage = np.full(n_bytes + ALIGNMENT, FRESH, np.uint8)
        self.bytes = storage[-storage.ctypes.data % ALIGNMENT:][:n_bytes]
        self.address = self.bytes.ctypes.data
        self.blocks: list[Block] = []
        self.locked: dict[int, FakeLock] = {}
        self.holes = [Hole(0, n_bytes)]  # those of frees that have not run yet come first
        self.world.gpus.append(self)

    def __repr__(self):
        return f"fake:{self.world.gpus.index(self)}"

    @property
    def used_bytes(self) -> int:
        return sum(block.size for block in self.blocks if not block.is_closed)

    def enter(self) -> None:
        self.world.enter(self)

    def is_capturing(self, stream: FakeStream) -> bool:
        return stream.is_captured

    def stream(self) -> FakeStream:
        return FakeStream(self)

    def allocate(self, n_bytes: int, stream) -> FakeBuffer:
        self.world.check_entered()
        needed = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        with self.world.lock:
            hole = self._hole(needed, stream)
            if hole is None:  # as a driver, it waits for frees before it gives up
                for other in self.world.streams:
                    other.sync()
                hole = self._hole(needed, stream)
            if hole is None:
                raise FakeError(f"{self}: out of memory")
            block = Block(self.address + hole.offset, needed)
            hole.offset, hole.size = hole.offset + needed, hole.size - needed
            self.holes = [h for h in self.holes if h.size]
            self.blocks.append(block)

            def appear():
                block.is_there = True
                self._of(block)[:] = FRESH
            stream.queue(appear)
        return FakeBuffer(self, block.address, n_bytes, lambda stream: self._free(block, stream), stream)

    def _hole(self, needed: int, stream: FakeStream) -> Hole | None:
        return next((h for h in self.holes if h.size >= needed and h.stream in (None, stream)), None)

    def _of(self, block: Block) -> np.ndarray:
        return self.bytes[block.address - self.address:][:block.size]

    def _free(self, block: Block, stream: FakeStream) -> None:
        with self.world.lock:
            block.is_closed = True
            hole = Hole(block.address - self.address, block.size, stream)
            self.holes.insert(0, hole)

            def disappear():
                block.is_there = False
                self.blocks.remove(block)
                hole.stream = None
                free = sorted((h for h in self.holes if h.stream is None), key=lambda h: h.offset)
                merged = free[:1]
                for h in free[1:]:
                    if merged[-1].offset + merged[-1].size == h.offset:
                        merged[-1].size += h.size
                    else:
                        merged.append(h)
                self.holes = [h for h in self.holes if h.stream is not None] + merged
            stream.queue(disappear)

    def pinned(self, n_bytes: int) -> FakeBuffer:
        self.world.check_entered()
        data = np.full(n_bytes, FRESH, np.uint8)

        def free(stream):
            data[:] = GONE
        memory = FakeBuffer(self, data.ctypes.data, n_bytes, free)
        self.world.add_host(memory, memory.handle, data)
        return memory

    def lock_pages(self, address: int, n_bytes: int) -> None:
        self.world.check_entered()
        if address in self.locked:
            raise FakeError(f"the pages at {address:#x} are locked already")
        data = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))
        owner = self.locked[address] = FakeLock()
        self.world.add_host(owner, address, data)

    def unlock_pages(self, address: int) -> None:
        if self.locked.pop(address, None) is None:
            raise FakeError(f"the pages at {address:#x} are not locked")

    def pageable(self, values: np.ndarray) -> np.ndarray:
        """An array of the host that copies may name by its address, as a driver lets them: when it is dropped,
        its memory is gone."""
        owner = np.array(values, np.uint8)
        self.world.add_host(owner, owner.ctypes.data,
                            np.ctypeslib.as_array((ctypes.c_uint8 * owner.size).from_address(owner.ctypes.data)))
        return owner

    def copy(self, to: int, source: int, n_bytes: int, stream, peer=None) -> None:
        self.world.check_entered()
        for address, gpu in (to, self), (source, peer or self):
            if any(other.address <= address < other.address + len(other.bytes) for other in self.world.gpus if other is not gpu):
                raise FakeError(f"{address:#x} is memory of another device than {gpu}")
        found = self.world.at(source, n_bytes)

        def values():
            data = found()
            if data is None:
                self.world.violations.append(f"{n_bytes} bytes at {source:#x} were gone when a copy read them")
                return np.full(n_bytes, GONE, np.uint8)
            return data.copy()
        self.write(to, n_bytes, values, stream)

    def write(self, to: int, n_bytes: int, values, stream) -> None:
        """Queues an operation that writes values() to an address."""
        found = self.world.at(to, n_bytes)

        def run():
            data, target = values(), found()
            if target is None:
                self.world.violations.append(f"{n_bytes} bytes at {to:#x} were gone when they were written")
            else:
                target[:] = data
        stream.queue(run)
