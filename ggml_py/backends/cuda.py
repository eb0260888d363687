"""One NVIDIA GPU: memory and a stream of cuda-core, and the kernels of kernels/cuda as prepared launches."""
from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any
from weakref import WeakMethod

import numpy as np

from ..base.errors import ParameterError
from ..base.storage import LIMBS
from ..kernels.call import Call
from ..ops.node import Node, Tensor
from .base import KernelBackend, Step
from .cuda_driver import CUDADriver, checked
from .cuda_graphs import GraphCache
from .transfers import LOCKED, LockedPages, Transfers

FAULT_BYTES = 16
LEAST_LOCKED = 1 << 20  # bytes; less is staged as fast


class Faults:
    """Where kernels leave the first error of a run, which they cannot raise: int32 [number of the node or 0, i, what was found,
    -] in device memory."""

    def __init__(self, backend: CUDABackend):
        self.backend, self.buffer = backend, backend.empty(FAULT_BYTES)
        self.messages: list[Callable[[int, int], str]] = []  # of node number i + 1
        self.numbers: dict[Any, int] = {}
        self.run, self.none_behind = 0, -1  # the number of the last run, and of one that is known to have left no error

    def register(self, call: Call, late_error: Callable) -> tuple[int, int]:
        """(address, number of the call's node). late_error: as of kernels/call.py.
        A node that is bound again keeps its number."""
        key = call.name, *(operand.shape for operand in call.values.values() if hasattr(operand, "shape"))
        if key not in self.numbers:
            unbound = Call(call.op, call.name, None, {name: value._replace(data=None) if hasattr(value, "shape") else value
                                                      for name, value in call.values.items()})
            self.messages.append(lambda i, found: late_error(unbound, i, found))
            self.numbers[key] = len(self.messages)
        return int(self.buffer.handle), self.numbers[key]

    def forget(self) -> None:
        """Before a run. Nothing is queued where the run before is known to have left nothing."""
        if self.none_behind != self.run:
            self.backend.write(self.buffer, 0, np.zeros(FAULT_BYTES, np.uint8))
        self.run += 1

    def read(self) -> Callable[[], None]:
        pending, run = self.backend.read(self.buffer, 0, FAULT_BYTES), self.run

        def raise_error() -> None:
            number, i, found, _ = map(int, pending.result().view(np.int32))
            if number:
                raise IndexError(self.messages[number - 1](i, found))
            self.none_behind = run
        return raise_error


def unavailable(ordinal: int) -> str | None:
    """Why cuda:ordinal cannot be used, in a few words; None if it can."""
    try:
        from numba import cuda as numba_cuda
        from cuda.bindings import driver
    except ImportError as error:
        return f"numba-cuda is not installed ({error}); install ggml-bitwise[cu13] or ggml-bitwise[cu12]"
    if "numba_cuda" not in numba_cuda.__file__:
        return "numba.cuda is numba's built-in target, numba-cuda is not in effect"
    try:
        if driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
            return "no NVIDIA GPU found"
        status, count = driver.cuDeviceGetCount()
    except RuntimeError:  # the driver's library is not there
        return "no NVIDIA driver found"
    if status != driver.CUresult.CUDA_SUCCESS or not count:
        return "no NVIDIA GPU found"
    return None if ordinal < count else f"this machine has {count} GPUs, cuda:0 to cuda:{count - 1}"


def driver_release() -> str:
    """Of the NVIDIA driver, such as 580.159.04, or none where nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "none"


class CUDABackend(KernelBackend, Transfers):
    """All work is in the order of one stream, copies included: memory and copies are those of `Transfers` (docs/streams.md)."""
    activations = LIMBS
    asynchronous = True

    def __init__(self, ordinal: int = 0, expect: bool = False):
        """expect: as of `open_backend`."""
        from ..kernels.cuda import launch
        KernelBackend.__init__(self, "cuda")
        if expect:
            launch.expect()
        try:
            self.target = launch.Target(ordinal)
        except RuntimeError as error:
            launch.dismiss()
            raise ParameterError("device", str(error)) from None
        self.device = f"cuda:{ordinal}"
        Transfers.__init__(self, CUDADriver(ordinal), self.target.device.create_stream())
        self.target.run_once = WeakMethod(self._run_once)

    def _run_once(self, launch: Callable, found: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        """launch: (addresses) -> a step that reads copies of found and writes what results are filled with."""
        buffers = [*map(self.upload, found), *(self.empty(array.nbytes) for array in results)]
        self.run([launch([int(buffer.handle) for buffer in buffers])])
        for buffer, array in zip(buffers[len(found):], results):
            array.reshape(-1).view(np.uint8)[:] = self.read(buffer, 0, array.nbytes).result()
        for buffer in buffers:
            self.free(buffer)

    @property
    def name(self) -> str:
        return self.target.device.name

    def driver_version(self) -> str:
        """The CUDA version of the driver, such as 13.0."""
        from cuda.bindings import driver
        number, = checked(driver.cuDriverGetVersion())
        return f"{number // 1000}.{number % 1000 // 10}"

    def versions(self) -> dict[str, str]:
        from ..kernels.cuda.launch import nvvm_release
        return {"nvidia-driver": driver_release(), "nvvm": nvvm_release()}

    def memory_bytes(self) -> int:
        """All that the GPU has; what is free later cannot be told, as freed memory stays with the process for its next use."""
        return self.driver.memory_bytes()[1]

    def free_bytes(self) -> int:
        return self.driver.memory_bytes()[0]

    def empty(self, n_bytes: int):
        return self.allocate(max(n_bytes, 256), zeroed=True)

    def upload(self, array: np.ndarray):
        buffer = self.allocate(max(array.nbytes, 256))
        self.write(buffer, 0, array)
        return buffer

    def fetch(self, buffer, offset: int, source, source_buffer, source_offset: int, n_bytes: int) -> Callable[[], None]:
        """Beside other work from page-locked memory of the host; else in the order of the stream."""
        if isinstance(source, CUDABackend):
            self.copy(buffer, offset, source, source_buffer, source_offset, n_bytes)
            return lambda: None
        data = source_buffer[source_offset:source_offset + n_bytes]
        if not self.has_locked(source_buffer):
            self.write(buffer, offset, data)
            return lambda: None
        return self.bring(buffer, offset, data)

    def has_locked(self, buffer) -> bool:
        return isinstance(buffer, np.ndarray) and buffer.ctypes.data in LOCKED

    def lock_pages(self, buffer: np.ndarray) -> None:
        if buffer.nbytes >= LEAST_LOCKED and not self.has_locked(buffer):
            with suppress(RuntimeError):  # the system does not let us; copies are staged then
                LockedPages(self.driver, buffer)

    def unlock_pages(self, buffer: np.ndarray) -> None:
        if self.has_locked(buffer):
            LOCKED[buffer.ctypes.data].close()

    def data(self, tensor: Tensor) -> int:
        buffer, offset = tensor.memory
        return int(buffer.handle) + offset

    def address(self, tensor: Tensor) -> int:
        return self.data(tensor)

    @cached_property
    def faults(self) -> Faults:
        """From the first node that may leave one on."""
        return Faults(self)

    def bind_all(self, nodes: Sequence[Node]) -> list[Step]:
        """Tells each what is settled: written by a node that has a large launch between itself and this one."""
        from ..kernels.cuda.launch import has_large
        steps: list[Step] = []
        written: dict[Tensor, int] = {}  # by which node last
        large = -1                       # the last one with a large launch
        for i, node in enumerate(nodes):
            settled = [name for name, tensor in zip(node.declared.operands, node.src) if written.get(tensor.root, i) < large]
            steps.append(self.bind(node, frozenset(settled)))
            written.update(dict.fromkeys((tensor.root for tensor in node.results), i))
            large = i if has_large(steps[-1]) else large
        return steps

    def step(self, call: Call) -> Step:
        module = self.module(call.op)
        if module is not None and module.late_error is not None:
            call.fault = self.faults.register(call, module.late_error)
        return super().step(call)

    def expect(self) -> None:
        from ..kernels.cuda.launch import expect
        expect()

    def leaves_errors(self, node: Node) -> bool:
        module = self.module(node.op)
        return module is not None and module.late_error is not None

    def forget_error(self) -> None:
        self.faults.forget()

    def read_error(self) -> Callable[[], None]:
        return self.faults.read()

    def reaches(self, other: Any) -> bool:
        """Whether kernels of this GPU write to memory of the other one. It opens that; copies between them are direct then, too.
        Streams of one GPU do not reach each other: what waits on one might keep the other from running."""
        return isinstance(other, CUDABackend) and self.driver.reaches(other.driver)

    def new_graphs(self) -> GraphCache:
        return GraphCache(self)

    def new_graph_builder(self) -> Any:
        self.driver.enter()
        return self.target.device.create_graph_builder()

    def load(self) -> None:
        """All kernels of launches that were prepared."""
        self.driver.enter()
        self.target.load()

    def launch(self, graph: Any) -> None:
        self.driver.enter()
        graph.launch(self.stream)

    def run(self, steps: Sequence[Step]) -> None:
        self.driver.enter()
        stream = self.stream
        for step in steps:
            step(stream)

    def close(self) -> None:
        super().close()
        self.target.close()
        self.stream.sync()
        self.stream.close()
