"""Copies that cannot be wrong: between host and device, between devices, and between streams. docs/streams.md has the guarantees
as a table.

Two mistakes are easy with asynchronous copies, and rarely seen: the host reads bytes before their copy has run, and the host
frees or overwrites bytes that a copy has yet to read. Here neither can be written:

    buffer = transfers.allocate(n_bytes)
    transfers.write(buffer, 0, array)             # array is free at once: its bytes lie in a ring of page-locked memory
    pending = transfers.read(buffer, 0, n_bytes)  # no array yet, and nothing that passes for one
    data = pending.result()                       # waits for the event of this copy, and for nothing behind it
    transfers.free(buffer)                        # in stream order, so after every copy and kernel that was queued before

A device's memory belongs to one stream, its home. What happens on another stream happens between `fork`, which makes that stream
wait for the home stream, and the join, which makes the home stream wait for it; so the order of calls is the order of effects,
whatever runs where.

A driver is all that a `Transfers` knows of CUDA: `cuda_driver.CUDADriver`, or the scripted fake of the tests. It has `enter()`,
which makes its device current in the calling thread; `is_capturing(stream)`; `allocate(n_bytes, stream)` and `pinned(n_bytes)`,
which give objects with `handle` (the address; 0 once closed), `size` and `close`; `stream()`, `lock_pages(address, n_bytes)` and
`unlock_pages(address)`; `copy(to, source, n_bytes, stream)` between two addresses of this device and of the host, `copy(..,
peer)` from the device of another driver. Streams have `record()`, `wait(event)` and `sync()`, events `is_done` and `sync()`.
"""
from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from threading import RLock
from typing import Any

import numpy as np

RING_BYTES = 32 << 20
PIECES = 4      # a copy longer than a quarter of the ring goes in pieces: the host fills one while the device takes another
ALIGNMENT = 64  # bytes; of slots in the ring
MOST_LANDERS = 8          # threads that take bytes out of the ring
LEAST_LANDING = 1 << 20   # bytes that are worth a thread
LEAST_KEPT = 1 << 22      # bytes of an array whose memory is used again: new memory takes the host longer than the copy
MOST_KEPT = 1 << 30       # bytes that are kept for that


# Device to host

class Pending:
    """Bytes on their way to the host. `result()` waits for them; whatever else would want them now is refused."""

    def __init__(self, data: np.ndarray, lock=None):
        """data: uint8 [n_bytes], where the bytes land. Without flights they are there already."""
        self._data, self._lock = data, lock
        self._flights: list[Flight] = []

    def result(self) -> np.ndarray:
        """uint8 [n_bytes], an array of its own. Waits for the event of this copy; a failure of the device is raised here."""
        if self._flights:
            self._flights[-1].wait()  # the pieces are of one stream, so the last one is
            with self._lock:
                for flight in self._flights:
                    flight.land()
            self._flights = []
        return self._data

    def __getattr__(self, name):
        raise AttributeError(_refusal(f"attribute {name!r}"))


def _refusal(what: str) -> str:
    return f"Pending: {what} of bytes that may still be on their way; call .result(), which waits for them"


def _refuse(name: str):
    def refused(self, *args, **kwargs):
        raise TypeError(_refusal(name))
    return refused


for _name in ("array", "len", "getitem", "setitem", "iter", "contains", "bool", "int", "float", "index", "bytes",
              "eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "matmul", "rmatmul",
              "copy", "deepcopy", "reduce_ex"):  # a copy would not be what the bytes land in
    setattr(Pending, f"__{_name}__", _refuse(f"__{_name}__"))


# Host to device

class Lease:
    """Lets numpy look at memory. Arrays made of it, and every view of them, keep it alive,
    and it keeps the memory."""

    def __init__(self, memory, n_bytes: int, read_only: bool):
        self._memory = memory
        self.__array_interface__ = {"data": (int(memory.handle), read_only), "shape": (n_bytes,), "typestr": "|u1", "version": 3}


n_forks = 0  # of this process and those that it comes from


def _count_fork() -> None:
    """After a fork, a write may move a page, and the device would not know. So memory from before a fork is not used again."""
    global n_forks  # noqa: PLW0603 (of the process)
    n_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_count_fork, after_in_child=_count_fork)


class Memory:
    """Memory of the host, which stays in one place."""

    def __init__(self, n_bytes: int):
        self._array, self.n_forks = np.empty(n_bytes, np.uint8), n_forks
        self.handle, self.size = self._array.ctypes.data, n_bytes
        self._pages: LockedPages | None = None
        self._is_refused = False

    def lock(self, driver) -> bool:
        """Whether copies name the memory directly from now on."""
        if self._pages is None and not self._is_refused:
            try:
                self._pages = LockedPages(driver, self._array)
            except RuntimeError:  # the system does not allow it
                self._is_refused = True
        return self._pages is not None


class Landings:
    """Arrays for bytes from the device. The memory of a large one is kept when nobody has the array or a view of it any more, for
    one of a similar size. The first time it is used again, its pages are locked, which takes as long as a copy through the ring.

    Memory is kept by whichever thread lets go of an array, at any moment; so each change of the list is one step."""

    def __init__(self, driver) -> None:
        self.driver, self.is_closed = driver, False
        self.kept: list[Memory] = []

    def new(self, n_bytes: int) -> tuple[np.ndarray, bool]:
        """(uint8 [n_bytes], of any content; whether copies name it directly). Under the ring's lock."""
        if n_bytes < LEAST_KEPT:
            return np.empty(n_bytes, np.uint8), False
        found = self._take(n_bytes)
        memory = found or Memory(n_bytes)
        lease = Lease(memory, n_bytes, read_only=False)
        weakref.finalize(lease, self._keep, memory).atexit = False
        return np.asarray(lease), found is not None and found.lock(self.driver)

    def _take(self, n_bytes: int) -> Memory | None:
        """The smallest that fits; what is from before a fork goes."""
        for memory in sorted(self.kept, key=lambda memory: memory.size):
            is_old = memory.n_forks != n_forks
            if is_old or n_bytes <= memory.size <= 2 * n_bytes:
                with suppress(ValueError):  # another thread has just let go of it
                    self.kept.remove(memory)
                    if not is_old:
                        return memory
        return None

    def _keep(self, memory: Memory) -> None:
        """In the place of the oldest ones."""
        if self.is_closed or memory.n_forks != n_forks or memory.size > MOST_KEPT:
            return
        self.kept.append(memory)
        while sum(each.size for each in list(self.kept)) > MOST_KEPT:
            with suppress(IndexError):
                self.kept.pop(0)

    def close(self) -> None:
        """Nothing is kept any more."""
        self.is_closed = True
        self.kept.clear()


class Pinned:
    """Page-locked memory that `Transfers.write` copies from without staging. Made by `Transfers.pinned`; freed when nothing
    refers to it any more, copies in flight included.

    Its bytes are written through `writable()` alone. That waits for the copies in flight; and while the array that it gives, or
    any view of that array, exists, no copy is made of this memory. So no byte can change under a copy.
    """

    def __init__(self, memory, n_bytes: int):
        self.n_bytes, self._memory = n_bytes, memory
        self._flights: list[Flight] = []
        self._lock = RLock()
        self._lease: Callable[[], Lease | None] = lambda: None  # a weak reference

    def writable(self) -> np.ndarray:
        """uint8 [n_bytes], to be filled. Waits until no copy reads this memory any more."""
        with self._lock:
            for flight in self._flights:
                flight.wait()
            self._flights = []
            lease = self._lease() or Lease(self._memory, self.n_bytes, read_only=False)
            self._lease = weakref.ref(lease)
            return np.asarray(lease)

    def view(self) -> np.ndarray:
        """uint8 [n_bytes], read-only for good."""
        return np.asarray(Lease(self._memory, self.n_bytes, read_only=True))

    def __setitem__(self, key, value) -> None:
        self.writable()[key] = value

    def __len__(self) -> int:
        return self.n_bytes

    @property
    def address(self) -> int:
        return int(self._memory.handle)

    @contextmanager
    def departing(self, flight: Flight):
        """Around the queueing of a copy from here: until it is queued, no thread gets a writable array."""
        with self._lock:
            if self._lease() is not None:
                raise BufferError(f"write: an array of writable() of this Pinned of {self.n_bytes} bytes is still alive, so its "
                                  "bytes could change under the copy; allowed: none (del it, or fill with pinned[...] = values)")
            self._flights = [*(f for f in self._flights if not f.is_done), flight]
            yield


LOCKED: dict[int, LockedPages] = {}  # by the address of the array


class LockedPages:
    """Memory of an array that copies name directly: until it is closed, or nobody has the array any more."""

    def __init__(self, driver, array: np.ndarray):
        """RuntimeError where the system does not allow it."""
        address, owner = array.ctypes.data, array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        driver.enter()
        try:
            driver.lock_pages(address, array.nbytes)
            LOCKED[address] = self
            # Copies in flight keep the array; see also `settle`
            self.close = weakref.finalize(owner, _unlock, driver, address, os.getpid())
            self.close.atexit = False
        except RuntimeError:
            raise
        except BaseException:  # an interrupt comes behind a long call
            with suppress(RuntimeError):
                _unlock(driver, address, os.getpid())
            raise


def _unlock(driver, address: int, pid: int) -> None:
    """By whichever thread lets go of the array. pid: of the process that locked the pages; one that was forked has no device."""
    if os.getpid() == pid:
        LOCKED.pop(address, None)
        driver.unlock_pages(address)


# What is in flight

class Flight:
    """A copy that is queued. Without an event (an exception came between the copy and its event) the end of its stream's work
    stands for it."""

    def __init__(self, ring: Ring, end: int, source=None, landing=None):
        """end: of its slot in the ring, counted through all rounds. source: kept alive until the copy is over.
        landing: what is left to do then."""
        self.driver, self.stream, self.end, self.source, self.landing = ring.driver, ring.stream, end, source, landing
        self.event, self._is_over = None, False

    @property
    def is_done(self) -> bool:
        self._is_over = self._is_over or (self.event is not None and self.event.is_done)
        return self._is_over

    def wait(self) -> None:
        if not self._is_over:
            self.driver.enter()
            (self.event or self.stream).sync()
            self._is_over = self.event is not None

    def land(self) -> None:
        """Once the copy is over, under the ring's lock."""
        if self.landing is not None:
            self.landing()
        self.landing = self.source = None


@dataclass
class Statistics:
    """Of a device's transfers. Bytes through the ring, or to the host directly, count as to_device or to_host;
    those from pinned memory and between devices apart."""
    n_to_device: int = 0
    bytes_to_device: int = 0
    n_pinned: int = 0
    bytes_pinned: int = 0
    n_to_host: int = 0
    bytes_to_host: int = 0
    n_peer: int = 0
    bytes_peer: int = 0
    n_brought: int = 0
    bytes_brought: int = 0
    n_wraps: int = 0            # rounds of the ring
    most_in_flight: int = 0     # bytes of the ring
    n_waits: int = 0            # the ring was full and the host waited for its oldest copy
    wait_seconds: float = 0.0

    def report(self, ring_bytes: int) -> str:
        return (f"{self.n_to_device} copies to the device ({self.bytes_to_device:,} bytes), "
                f"{self.n_pinned} from pinned memory ({self.bytes_pinned:,}), "
                f"{self.n_to_host} to the host ({self.bytes_to_host:,}), {self.n_peer} from other devices ({self.bytes_peer:,}), "
                f"{self.n_brought} weights from the host ({self.bytes_brought:,})\n"
                f"pinned ring of {ring_bytes:,} bytes: at most {self.most_in_flight:,} in flight, {self.n_wraps} rounds, "
                f"{self.n_waits} waits of {1e3 * self.wait_seconds:.1f} ms in all")


class Ring:
    """Page-locked memory in which the copies of one stream are staged, one after the other and round and round; and all that is
    in flight on it.

    Positions count on through the rounds, position p is byte p modulo the size; slots in use lie between tail and head."""

    def __init__(self, driver, stream, n_bytes: int):
        self.driver, self.stream, self.n_bytes = driver, stream, n_bytes
        self.piece = n_bytes // PIECES // ALIGNMENT * ALIGNMENT
        if not self.piece:
            raise ValueError(f"ring_bytes: must be at least {PIECES * ALIGNMENT}, got {n_bytes}")
        driver.enter()
        self.memory = driver.pinned(n_bytes)  # now: it may make the host wait for the device
        self.bytes = np.asarray(Lease(self.memory, n_bytes, read_only=False))
        self.flights: deque[Flight] = deque()  # in the order of the stream
        self.head = self.tail = 0
        self.lock = RLock()
        self.statistics = Statistics()
        self.closed = False
        self.landers: ThreadPoolExecutor | None = None

    def reserve(self, n_bytes: int) -> tuple[int, int]:
        """A slot of n_bytes, at most a piece: its address, and the position of its end. While there is no room,
        waits for the oldest copy."""
        n_slot, counts = -(-n_bytes // ALIGNMENT) * ALIGNMENT, self.statistics
        while True:
            if not self.flights:
                self.head = self.tail = 0  # small copies use the same memory, in the host's cache, again and again
            start = self.head
            if start % self.n_bytes + n_slot > self.n_bytes:
                start += -start % self.n_bytes
            end = start + n_slot
            if end - self.tail <= self.n_bytes:
                break
            counts.n_waits += 1
            begin = time.perf_counter()
            self._retire_oldest()
            counts.wait_seconds += time.perf_counter() - begin
        counts.n_wraps += start > 0 and start % self.n_bytes == 0
        counts.most_in_flight = max(counts.most_in_flight, end - self.tail)
        return int(self.memory.handle) + start % self.n_bytes, end

    def slot(self, address: int, n_bytes: int) -> np.ndarray:
        first = address - int(self.memory.handle)
        return self.bytes[first:first + n_bytes]

    def take_out(self, slot: np.ndarray, to: np.ndarray) -> None:
        """The bytes of a slot to where they are wanted, by several threads where they are many."""
        n = min(MOST_LANDERS, os.cpu_count() or 1, to.size // LEAST_LANDING)
        if n < 2:
            to[:] = slot
            return
        ends = [to.size * i // n for i in range(n + 1)]
        landers = self.landers = self.landers or ThreadPoolExecutor(MOST_LANDERS, "ggml-py-landing")
        try:
            for part in [landers.submit(np.copyto, to[first:last], slot[first:last]) for first, last in pairwise(ends)]:
                part.result()
        except BaseException as error:
            self.landers = None
            landers.shutdown()  # no part is copied later: the slot may be filled anew
            if not isinstance(error, RuntimeError):
                raise
            to[:] = slot  # there are no more threads, as when the interpreter ends

    def queue(self, flight: Flight, *copies: tuple[int, int, int]) -> None:
        """Queues copies, each (to, source, number of bytes). Their flight is on the list before they are on their way, so that no
        exception can lose sight of it."""
        self.flights.append(flight)
        self.head = flight.end
        for to, source, n_bytes in copies:
            self.driver.copy(to, source, n_bytes, self.stream)
        flight.event = self.stream.record()

    def retire(self) -> None:
        """Lets go of what is over. Waits for nothing but flights without an event."""
        while self.flights and (self.flights[0].event is None or self.flights[0].is_done):
            self._retire_oldest()

    def _retire_oldest(self) -> None:
        flight = self.flights[0]
        flight.wait()
        flight.land()
        self.flights.popleft()
        self.tail = flight.end

    def close(self) -> None:
        """Waits for what is in flight, lands it, and frees the memory."""
        with self.lock:
            self.closed = True
            while self.flights:
                self._retire_oldest()
            if self.landers is not None:
                self.landers.shutdown()
            del self.bytes
            self.driver.enter()
            self.memory.close()


# All together

class Transfers:
    """Memory of one device and every copy to, from and on it. Threads may share it. Closing, or losing the last reference,
    waits for what is in flight."""

    def __init__(self, driver, stream, ring_bytes: int = RING_BYTES):
        """stream: the home stream, on which the device's kernels run. ring_bytes: page-locked memory for staging."""
        self.driver, self.stream = driver, stream
        self._ring, self._landings = Ring(driver, stream, ring_bytes), Landings(driver)
        self._bringing: Any = None  # the stream of `bring`
        self._finalizer = weakref.finalize(self, _close, self._ring, self._landings)  # also at the exit of the interpreter

    @property
    def statistics(self) -> Statistics:
        return self._ring.statistics

    def report(self) -> str:
        """The statistics in two lines."""
        return self.statistics.report(self._ring.n_bytes)

    # Memory

    def allocate(self, n_bytes: int, zeroed: bool = False):
        """A buffer of the device, in stream order: it may be used by whatever is queued after this call."""
        with self._ring.lock:
            self._begin("allocate")
            buffer = self.driver.allocate(n_bytes, self.stream)
            if zeroed:
                buffer.fill(0, stream=self.stream)
            return buffer

    def free(self, buffer) -> None:
        """Gives a buffer back in stream order: its memory is used again after all that is queued now.
        A second time does nothing."""
        with self._ring.lock:
            self._enter("free")
            buffer.close(self.stream)

    def pinned(self, n_bytes: int) -> Pinned:
        """Page-locked memory to be filled and written from, n_bytes of any content."""
        with self._ring.lock:
            self._begin("pinned")
            return Pinned(self.driver.pinned(max(n_bytes, 1)), n_bytes)

    # Copies

    def write(self, buffer, offset: int, data: np.ndarray | Pinned) -> None:
        """Bytes `offset` and on of the buffer become those of `data`, in stream order. An array of any dtype may be overwritten
        or dropped when this returns; a Pinned is kept, and kept as it is, until its copy has run."""
        if isinstance(data, Pinned):
            self._write_pinned(buffer, offset, data)
            return
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        with self._ring.lock:
            to, ring = _address("write", buffer, offset, data.size), self._begin("write")
            for first in range(0, data.size, ring.piece):
                part = data[first:first + ring.piece]
                address, end = ring.reserve(part.size)
                ring.slot(address, part.size)[:] = part
                ring.queue(Flight(ring, end), (to + first, address, part.size))
            ring.statistics.n_to_device += 1
            ring.statistics.bytes_to_device += data.size

    def _write_pinned(self, buffer, offset, pinned: Pinned) -> None:
        with self._ring.lock:
            to, ring = _address("write", buffer, offset, pinned.n_bytes), self._begin("write")
            if not pinned.n_bytes:
                return
            flight = Flight(ring, ring.head, source=pinned)
            with pinned.departing(flight):
                ring.queue(flight, (to, pinned.address, pinned.n_bytes))
            ring.statistics.n_pinned += 1
            ring.statistics.bytes_pinned += pinned.n_bytes

    def read(self, buffer, offset: int, n_bytes: int) -> Pending:
        """Bytes offset .. offset + n_bytes - 1 of the buffer, as they are after all that is queued now.
        The buffer may be overwritten or freed at once."""
        with self._ring.lock:
            source, ring = _address("read", buffer, offset, n_bytes), self._begin("read")
            landing, directly = self._landings.new(n_bytes)
            pending = Pending(landing, ring.lock)
            if directly:
                flight = Flight(ring, ring.head, source=landing)
                ring.queue(flight, (landing.ctypes.data, source, n_bytes))
                pending._flights.append(flight)
            else:
                self._read_by_ring(ring, source, n_bytes, pending)
            ring.statistics.n_to_host += 1
            ring.statistics.bytes_to_host += n_bytes
            return pending

    @staticmethod
    def _read_by_ring(ring: Ring, source: int, n_bytes: int, pending: Pending) -> None:
        for first in range(0, n_bytes, ring.piece):
            n = min(ring.piece, n_bytes - first)
            address, end = ring.reserve(n)
            flight = Flight(ring, end, landing=_landing(ring, weakref.ref(pending), first, ring.slot(address, n)))
            ring.queue(flight, (address, source + first, n))
            pending._flights.append(flight)

    def write_locked(self, buffer, offset: int, data: np.ndarray) -> Flight:
        """As `write`, from memory in `LockedPages` itself, which stays as it is until the flight has been waited for."""
        with self._ring.lock:
            to, ring = _address("write_locked", buffer, offset, data.nbytes), self._begin("write_locked")
            flight = Flight(ring, ring.head, source=data)
            ring.queue(flight, (to, data.ctypes.data, data.nbytes))
            ring.statistics.n_pinned += 1
            ring.statistics.bytes_pinned += data.nbytes
            return flight

    def read_locked(self, pieces: Sequence[tuple[Any, int, np.ndarray]]) -> Flight:
        """As `read`, of each (buffer, offset, data) into data, memory in `LockedPages`: the bytes are there when the flight has
        been waited for. Nobody touches them before."""
        with self._ring.lock:
            ring = self._begin("read_locked")
            copies = [(data.ctypes.data, _address("read_locked", buffer, offset, data.nbytes), data.nbytes)
                      for buffer, offset, data in pieces]
            flight = Flight(ring, ring.head, source=[data for *_, data in pieces])
            ring.queue(flight, *copies)
            ring.statistics.n_to_host += len(copies)
            ring.statistics.bytes_to_host += sum(n_bytes for *_, n_bytes in copies)
            return flight

    def copy(self, buffer, offset: int, source: Transfers, source_buffer, source_offset: int, n_bytes: int) -> None:
        """Bytes of a buffer of the device of `source` (or of this one) to this device, in the order of both home streams."""
        first, second = sorted((self._ring.lock, source._ring.lock), key=id)  # in one order, whichever way threads copy
        with first, second:
            to, from_ = _address("copy", buffer, offset, n_bytes), _address("copy", source_buffer, source_offset, n_bytes)
            self._begin("copy")
            with source.fork(self.stream, self.driver):
                if n_bytes:
                    self.driver.copy(to, from_, n_bytes, self.stream, source.driver)
            if source is not self:
                self.statistics.n_peer += 1
                self.statistics.bytes_peer += n_bytes

    @staticmethod
    def copy_together(copies: Sequence[tuple[Transfers, Any, int, Transfers, Any, int, int]]) -> None:
        """Each as `copy` of the first, (to, buffer, offset, source, source_buffer, source_offset, n_bytes), but none waits for
        another: what two devices bring from each other is under way both ways."""
        ends = dict.fromkeys(each for to, _, _, source, *_ in copies for each in (to, source))
        with ExitStack() as held:
            for end in sorted(ends, key=lambda end: id(end._ring.lock)):
                held.enter_context(end._ring.lock)
            pieces = [(to, source, _address("copy", buffer, offset, n), _address("copy", source_buffer, source_offset, n), n)
                      for to, buffer, offset, source, source_buffer, source_offset, n in copies]
            befores = {}
            for end in ends:
                end._begin("copy")
                befores[end] = end.stream.record()
            try:
                for to, source in dict.fromkeys((to, source) for to, source, *_ in pieces if source is not to):
                    to.driver.enter()
                    to.stream.wait(befores[source])
                for to, source, address, source_address, n in pieces:
                    to.driver.enter()
                    if n:
                        to.driver.copy(address, source_address, n, to.stream, source.driver)
                    to.statistics.n_peer += source is not to
                    to.statistics.bytes_peer += n * (source is not to)
            finally:
                try:
                    for to, source in dict.fromkeys((to, source) for to, source, *_ in pieces if source is not to):
                        to.driver.enter()
                        after = to.stream.record()
                        source.driver.enter()
                        source.stream.wait(after)
                except BaseException:
                    for to, *_ in pieces:
                        to.stream.sync()  # the host waits where the streams cannot
                    raise

    def bring(self, buffer, offset: int, data: np.ndarray) -> Callable[[], None]:
        """Bytes `offset` and on of the buffer become those of page-locked memory, on a stream of its own: behind all that is
        queued now, beside what is queued later. What is queued behind a call of the function finds them. Nobody writes to the
        memory, nor closes it, before that or `settle`."""
        with self._ring.lock:
            to, _ = _address("bring", buffer, offset, data.nbytes), self._begin("bring")
            if self._bringing is None:
                self._bringing = self.driver.stream()
            stream = self._bringing
            stream.wait(self.stream.record())
            try:
                self.driver.copy(to, data.ctypes.data, data.nbytes, stream)
                event = stream.record()
            except BaseException:
                stream.sync()
                raise
            self.statistics.n_brought += 1
            self.statistics.bytes_brought += data.nbytes

        def arrive() -> None:
            with self._ring.lock:
                self._enter("bring")
                self.stream.wait(event)
        return arrive

    def settle(self) -> None:
        """Waits for what `bring` began."""
        if self._bringing is not None:
            self.driver.enter()
            self._bringing.sync()

    @contextmanager
    def fork(self, stream, driver=None):
        """Work on another stream, of the device of `driver` (this one by default): it starts after all that is queued on the home
        stream now, and what is queued there later starts after it."""
        if stream is self.stream:
            yield
            return
        driver = driver or self.driver
        self._enter("fork")
        stream.wait(self.stream.record())
        driver.enter()
        try:
            yield
        finally:
            try:
                driver.enter()
                self.stream.wait(stream.record())
            except BaseException:
                stream.sync()  # the host waits where the home stream cannot
                raise

    # Order and end

    def _begin(self, what: str) -> Ring:
        """Before each call that queues, under the lock."""
        ring = self._ring
        if ring.closed:
            raise RuntimeError(f"{what}: these transfers are closed")
        self._enter(what)
        ring.retire()
        return ring

    def _enter(self, what: str) -> None:
        self.driver.enter()
        if self.driver.is_capturing(self.stream):  # a graph would replay a copy with the addresses of this moment
            raise RuntimeError(f"{what}: the stream is being captured; allowed: before and after a capture")

    def close(self) -> None:
        """Waits for what is in flight; pending values have their bytes then. Nothing can be copied afterwards,
        buffers can still be freed."""
        self._finalizer()


def _close(ring: Ring, landings: Landings) -> None:
    ring.close()
    landings.close()


def _address(what: str, buffer, offset: int, n_bytes: int) -> int:
    address = int(buffer.handle)
    if not address:
        raise ValueError(f"{what}: the buffer has been freed")
    if offset < 0 or n_bytes < 0 or offset + n_bytes > buffer.size:
        raise ValueError(f"{what}: bytes {offset} to {offset + n_bytes} of a buffer, allowed: 0 to {buffer.size}")
    return address + int(offset)


def _landing(ring: Ring, pending, first: int, slot: np.ndarray):
    """Takes the bytes of a slot to a pending value, if that is still wanted."""
    def land():
        wanted = pending()
        if wanted is not None:
            ring.take_out(slot, wanted._data[first:first + slot.size])
    return land
