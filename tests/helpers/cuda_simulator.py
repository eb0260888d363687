"""Running CUDA kernels in tests: in the simulator, which needs a process of its own, and on a GPU.

A machine has `target`, for launch functions, and `upload(array) -> address`, `number(address)`, what kernels see of it,
`run(launch)`, `download(address, dtype, shape)`, `free()`. Tests of the simulator are functions named simulate_*, run by a pytest
of their own, which one ordinary test of the file starts with `run_in_simulator(__file__)`.
"""
import subprocess
import sys

import numpy as np

from places import ROOT, environment

LIMIT_SECONDS = 600


def simulated(file: str, *options: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs the simulate_* functions of a test file, up to the first that fails, in a process that simulates CUDA. options: of
    pytest; variables: of the environment. Its stdout has its messages too."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "python_functions=simulate_*",
               *options, file]
    return subprocess.run(command, cwd=ROOT, env=environment(NUMBA_ENABLE_CUDASIM="1", **variables),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_SECONDS)


def run_in_simulator(file: str, *options: str) -> None:
    """The same; AssertionError with its output if one fails."""
    done = simulated(file, *options)
    assert done.returncode == 0, done.stdout[-6000:]


class SimulatedMachine:
    """Memory is numpy's: what a kernel writes is in the array that its address was made of."""

    def __init__(self):
        from ggml_py.kernels.cuda.simulator import Target
        self.target = Target()

    def upload(self, array: np.ndarray):
        raw = np.zeros(array.nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        memory = raw[start:start + array.nbytes]
        memory[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self.target.address(memory)

    def number(self, address) -> int:
        return address.memory.ctypes.data + address.offset

    def run(self, launch) -> None:
        launch(None)

    def download(self, address, dtype, shape) -> np.ndarray:
        return address.memory[:int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape).copy()

    def free(self) -> None:
        pass


class GPUMachine:
    """The first GPU, through the backend that models use."""

    def __init__(self):
        from ggml_py.backends.cuda import CUDABackend
        self.backend = CUDABackend(0)
        self.target = self.backend.target
        self.buffers = {}

    def upload(self, array: np.ndarray) -> int:
        buffer = self.backend.upload(array)
        self.buffers[int(buffer.handle)] = buffer
        return int(buffer.handle)

    def number(self, address: int) -> int:
        return address

    def run(self, launch) -> None:
        self.backend.run([launch])

    def download(self, address: int, dtype, shape) -> np.ndarray:
        return self.backend.read(self.buffers[address], 0,
                                 int(np.prod(shape)) * np.dtype(dtype).itemsize).result().view(dtype).reshape(shape)

    def free(self) -> None:
        for buffer in self.buffers.values():
            self.backend.free(buffer)
        self.buffers.clear()


def no_gpu() -> str | None:
    """Why tests marked gpu cannot run here, or None."""
    from ggml_py.backends.cuda import unavailable
    return unavailable(0)
