"""The CUDA backend in the simulator, for whole models."""
from dataclasses import dataclass

import numpy as np

from ggml_py.backends.base import KernelBackend
from ggml_py.backends.transfers import Pending


@dataclass(frozen=True)
class Launch:
    run: object  # simulator.Launch
    large: bool

    def __call__(self, stream):
        stream.launch(self.run)


def simulated_backend():
    """The CUDA backend with its binders and graphs; memory is numpy's, addresses are the host's."""
    from ggml_py.kernels.cuda import simulator
    from ggml_py.kernels.cuda.launch import is_large
    from numba import types
    from recording_target import Device, RecordingBackend

    class Target(simulator.Target):
        def __init__(self, buffers):
            super().__init__()
            self.device, self.buffers = Device(), buffers

        def at(self, number):
            """The address with this number."""
            memory, = [b.memory for b in self.buffers if 0 <= number - b.handle < b.memory.size]
            return simulator.Address(memory, number - memory.ctypes.data)

        def launch(self, kernel, grid, block, args, shared=0):
            args = [self.at(a) if isinstance(t, types.CPointer) else a for t, a in zip(kernel.parameters, args)]
            return Launch(super().launch(kernel, grid, block, tuple(args), shared), is_large(kernel, grid, block))

    class Stream:
        def launch(self, run):
            run(None)

        def sync(self):
            pass

        close = sync

    class Buffer:
        def __init__(self, n_bytes):
            raw = np.zeros(n_bytes + 512, np.uint8)
            start = -raw.ctypes.data % 256
            self.memory = raw[start:start + n_bytes]
            self.handle = self.memory.ctypes.data

    class SimulatedBackend(RecordingBackend):
        def __init__(self):
            KernelBackend.__init__(self, "cuda")
            self.buffers, self.device, self.stream = [], "cuda:0", Stream()
            self.target = Target(self.buffers)

        def empty(self, n_bytes):
            self.buffers.append(Buffer(n_bytes))
            return self.buffers[-1]

        def upload(self, array):
            buffer = self.empty(array.nbytes)
            self.write(buffer, 0, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            return buffer

        def free(self, buffer):
            self.buffers.remove(buffer)

        def write(self, buffer, offset, data):
            buffer.memory[offset:offset + data.size] = data

        def read(self, buffer, offset, n_bytes):
            return Pending(buffer.memory[offset:offset + n_bytes].copy())

        def copy(self, buffer, offset, source, source_buffer, source_offset, n_bytes):
            self.write(buffer, offset, source_buffer.memory[source_offset:source_offset + n_bytes])
    return SimulatedBackend()
