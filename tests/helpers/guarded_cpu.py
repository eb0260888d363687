"""CPU devices that hide no missing copy: memory that other devices cannot touch, another layout of activations,
and copies that come as late as they may."""
import ctypes
import mmap
from functools import partial

import numpy as np

from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.storage import LAYOUTS, LEVELS, ActivationLayout
from guarded_arrays import NONE, READ_WRITE, mprotect

REVERSED = LAYOUTS.setdefault("levels-reversed", ActivationLayout("levels-reversed", order=("sums", "d", "q")))
POISON = 0xFF  # NaN in every float type


class LatePending:
    """Bytes that are copied when they are asked for, or when their device is about to run."""

    def __init__(self, copy):
        self._copy, self._data = copy, None

    def land(self) -> None:
        if self._data is None:
            self._data = self._copy()

    def result(self) -> np.ndarray:
        self.land()
        return self._data


class GuardedCPU(CPUBackend):
    """A device among others of its kind. While it runs, the memory of the others cannot be read or written: a kernel that is
    handed a tensor of another device ends the process. New memory is full of NaN. Copies are queued, and made when somebody waits
    for them or the order of work demands it."""

    def __init__(self, device: str, others: "list[GuardedCPU]", activations: ActivationLayout = LEVELS):
        super().__init__(device=device)
        self.activations, self.others, self.queue, self.n_fetched = activations, others, [], 0
        self.pages: list[tuple[int, int, np.ndarray]] = []  # address, bytes, and the array that keeps them
        others.append(self)

    def empty(self, n_bytes: int) -> np.ndarray:
        size = -(-max(n_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        array = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.pages.append((array.ctypes.data, size, array))
        array[:] = POISON
        return array[:n_bytes]

    def upload(self, array: np.ndarray) -> np.ndarray:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer = self.empty(flat.size)
        buffer[:] = flat
        return buffer

    def flush(self) -> None:
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def write(self, buffer, offset, data) -> None:
        kept = np.array(data, np.uint8)  # the caller may write over it when this returns
        self.queue.append(partial(super().write, buffer, offset, kept))

    def read(self, buffer, offset, n_bytes):
        def copy():
            self.flush_before(pending)
            return buffer[offset:offset + n_bytes].copy()
        pending = LatePending(copy)
        self.queue.append(pending.land)
        return pending

    def flush_before(self, pending) -> None:
        """What was queued before a pending value."""
        while pending.land in self.queue:
            if (work := self.queue.pop(0)) != pending.land:
                work()

    def copy(self, buffer, offset, source, source_buffer, source_offset, n_bytes) -> None:
        done = []

        def work():
            if not done:
                done.append(True)
                source.flush_before_work(work)
                self.flush_before_work(work)
                buffer[offset:offset + n_bytes] = source_buffer[source_offset:source_offset + n_bytes]
        self.queue.append(work)
        if source is not self:
            source.queue.append(work)

    def fetch(self, buffer, offset, source, source_buffer, source_offset, n_bytes):
        """Every second one comes at once, the others when they are awaited."""
        def begun():
            """Where it is in the order of work."""

        def bring():
            self.flush_before_work(begun)
            buffer[offset:offset + n_bytes] = source_buffer[source_offset:source_offset + n_bytes]
        source.flush()
        self.queue.append(begun)
        self.n_fetched += 1
        if self.n_fetched % 2:
            return bring
        bring()
        return lambda: None

    def flush_before_work(self, mine) -> None:
        while mine in self.queue:  # else what was before it has been done, or is being done
            if (work := self.queue.pop(0)) is not mine:
                work()

    def run(self, steps) -> None:
        self.flush()
        others = [other for other in self.others if other is not self]
        self.protect(others, NONE)
        try:
            super().run(steps)
        finally:
            self.protect(others, READ_WRITE)

    @staticmethod
    def protect(devices, mode) -> None:
        for device in devices:
            for address, size, _ in device.pages:
                assert mprotect(address, size, mode) == 0, ctypes.get_errno()


def guarded_devices(n: int) -> list[GuardedCPU]:
    """cpu, cpu:1 and so on; every second one holds activations in another layout."""
    devices: list[GuardedCPU] = []
    for i in range(n):
        GuardedCPU(f"cpu:{i}" if i else "cpu", devices, REVERSED if i % 2 else LEVELS)
    return devices


def two_devices() -> list[GuardedCPU]:
    return guarded_devices(2)
