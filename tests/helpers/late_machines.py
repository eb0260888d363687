"""Machines on which what is queued runs late: the scripted fake, and real GPUs with a kernel that spins. Checks of transfers run
on both.

A machine has `drivers`, two of them, for `Transfers`; `stream(i)` of driver i; `delay(stream)`, behind which everything is late,
and whose event says whether it still is; `let_run(stream)`, which runs, or gives time to, what nothing holds up;
`pageable(values)`, an array that the driver's copies may name; `used_bytes(i)` of the memory of driver i; `check()`, which fails
if the driver saw something that must not be.
"""
import gc
import time
from contextlib import contextmanager

import numpy as np
from fake_driver import FakeGPU, FakeWorld

from ggml_py.backends.cpu import CPUBackend
from ggml_py.backends.cuda import CUDABackend
from ggml_py.backends.transfers import Transfers
from ggml_py.ops.node import Tensor


class FakeMachine:
    """Everything is late until somebody waits for it. Two GPUs of n_bytes."""

    def __init__(self, n_bytes: int = 1 << 16):
        self.world = FakeWorld()
        self.drivers = [FakeGPU(self.world, n_bytes), FakeGPU(self.world, n_bytes)]

    def stream(self, i: int = 0):
        return self.drivers[i].stream()

    def delay(self, stream):
        stream.gpu.enter()
        return stream.record()

    def let_run(self, stream) -> None:
        while stream.step():
            pass

    def pageable(self, values: np.ndarray) -> np.ndarray:
        return self.drivers[0].pageable(values)

    def used_bytes(self, i: int = 0) -> int:
        return self.drivers[i].used_bytes

    def check(self) -> None:
        assert not self.world.violations, self.world.violations


class CUDAMachine:
    """The first two GPUs, or the first one twice: then both drivers are of one GPU, with streams of their own.
    A delay takes `seconds`."""

    def __init__(self, seconds: float = 0.1):
        from cuda.core import Device
        from ggml_py.backends.cuda import unavailable
        from ggml_py.backends.cuda_driver import CUDADriver
        from ggml_py.kernels.cuda.launch import Target
        from ggml_py.kernels.cuda.spin import spin
        ordinals = (0, 0) if unavailable(1) else (0, 1)
        self.devices, self.drivers = [Device(i) for i in ordinals], [CUDADriver(i) for i in ordinals]
        self.spins = {i: spin(Target(i), seconds) for i in set(ordinals)}
        self.seconds = seconds
        for i in range(2):
            self._warm_up(i)

    def _warm_up(self, i: int) -> None:
        """The first launch, copy or fill of a process may wait for the device."""
        driver, stream = self.drivers[i], self.stream(i)
        host, buffers = driver.pinned(1024), [driver.allocate(1024, stream) for _ in range(2)]
        for _ in range(2):
            driver.copy(int(buffers[0].handle), int(host.handle), 1024, stream)
            driver.copy(int(buffers[1].handle), int(buffers[0].handle), 1000, stream)
            driver.copy(int(host.handle), int(buffers[1].handle), 300, stream)
            buffers[0].fill(0, stream=stream)
        self.delay(stream).sync()

    def stream(self, i: int = 0):
        self.devices[i].set_current()
        return self.devices[i].create_stream()

    def delay(self, stream):
        stream.device.set_current()
        self.spins[stream.device.device_id](stream)
        return stream.record()

    def let_run(self, stream) -> None:
        time.sleep(self.seconds / 20)

    def pageable(self, values: np.ndarray) -> np.ndarray:
        return np.array(values, np.uint8)

    def used_bytes(self, i: int = 0) -> int:
        gc.collect()
        self.devices[i].set_current()
        self.devices[i].sync()
        return self.devices[i].memory_resource.attributes.used_mem_current

    def check(self) -> None:
        pass


class LateBackend(Transfers, CPUBackend):
    """The CPU's kernels as a GPU of a FakeMachine runs them: on its memory, queued in its stream, late.
    Copies are those of the CUDA backend."""
    asynchronous = True
    empty, upload = CUDABackend.empty, CUDABackend.upload
    fetch, lock_pages, unlock_pages = CUDABackend.fetch, CUDABackend.lock_pages, CUDABackend.unlock_pages
    has_locked, settle = CUDABackend.has_locked, Transfers.settle

    def __init__(self, machine: FakeMachine, device: str = "cpu"):
        CPUBackend.__init__(self, device=device)
        self.gpu = machine.drivers[0]
        Transfers.__init__(self, self.gpu, machine.stream())

    def memory(self, buffer) -> np.ndarray:
        """uint8 [n_bytes] of a buffer, as it is now."""
        first = buffer.handle - self.gpu.address
        return self.gpu.bytes[first:first + buffer.size]

    def data(self, tensor: Tensor):
        buffer, offset = tensor.memory
        return super().data(Tensor(tensor.name, tensor.dtype, tensor.shape, buffer=self.memory(buffer), offset=offset))

    def address(self, tensor: Tensor) -> int:
        buffer, offset = tensor.memory
        return int(buffer.handle) + offset

    def run(self, steps) -> None:
        for step in steps:
            self.stream.queue(step)


@contextmanager
def late_inputs(machine, backend):
    """Whatever is written to memory of a model's backend meanwhile, as the inputs of each step are, comes behind a delay.
    Gives the events of the delays."""
    write, delays = backend.write, []

    def late_write(*args):
        delays.append(machine.delay(backend.stream))
        write(*args)
        assert not delays[-1].is_done, "the delay is over too early to show anything"
    backend.write = late_write
    try:
        yield delays
    finally:
        del backend.write
