"""A GPU that runs nothing and remembers every launch: the CUDA backend, its binders and launch functions as they are, on memory
that is only addresses.

What reaches the `stream` is in `stream.launched`, one entry a kernel, whether it came by itself or in a graph. Launching checks
that every address lies in memory that has not been freed; so does replaying, which launches what was captured, as a GPU would.
"""
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numba import types

from ggml_py.backends.base import KernelBackend
from ggml_py.backends.cuda import CUDABackend
from ggml_py.backends.transfers import Pending
from ggml_py.kernels.cuda.launch import arguments, is_large


@dataclass(frozen=True)
class Launch:
    """Everything that a graph would hold of a kernel."""
    name: str
    grid: object
    block: object
    shared: int
    args: tuple
    addresses: tuple[int, ...]  # those of args
    large: bool

    def __call__(self, stream) -> None:
        stream.launch(self)


class Stream:
    def __init__(self, memory):
        self.memory, self.launched = memory, []

    def launch(self, launch: Launch) -> None:
        for address in launch.addresses:
            assert self.memory.holds(address), f"{launch.name}: {address:#x} is not in memory"
        self.launched.append(launch)

    def take(self) -> list[Launch]:
        """What was launched since the last call."""
        taken, self.launched = self.launched, []
        return taken

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class Graph:
    def __init__(self, launches):
        self.launches, self.is_closed = launches, False

    def launch(self, stream) -> None:
        assert not self.is_closed
        for launch in self.launches:
            stream.launch(launch)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class GraphBuilder:
    def __init__(self, device):
        self.device, self.launches, self.state = device, [], "made"

    def begin_building(self):
        assert self.state == "made"
        self.state = "building"
        return self

    def launch(self, launch: Launch) -> None:
        assert self.state == "building"
        self.launches.append(launch)

    def end_building(self):
        assert self.state == "building"
        self.state = "ended"
        return self

    def complete(self) -> Graph:
        assert self.state == "ended"
        self.device.graphs.append(Graph(self.launches))
        return self.device.graphs[-1]

    def close(self) -> None:
        self.state = "closed"


class Device:
    name = "a GPU that remembers"

    def __init__(self):
        self.builders, self.graphs = [], []

    def create_graph_builder(self) -> GraphBuilder:
        self.builders.append(GraphBuilder(self))
        return self.builders[-1]

    @property
    def open_graphs(self) -> int:
        return sum(not graph.is_closed for graph in self.graphs)


class Target:
    """`launch.Target` of an H200."""
    cc, warpgroups, halves, n_multiprocessors, shared_limit = (9, 0), True, True, 132, 227 << 10

    def __init__(self):
        self.device = Device()

    def launch(self, kernel, grid, block, args, shared=0) -> Launch:
        args = arguments(kernel, args)
        addresses = tuple(a for t, a in zip(kernel.parameters, args) if isinstance(t, types.CPointer))
        assert all(isinstance(a, int) for a in addresses), (kernel.name, args)
        return Launch(kernel.name, grid, block, shared, args, addresses, is_large(kernel, grid, block))


@dataclass(eq=False)
class Buffer:
    handle: int
    n_bytes: int


class Memory:
    def __init__(self):
        self.buffers: dict[int, Buffer] = {}  # by address, which is never given twice
        self.end = 1 << 20

    def allocate(self, n_bytes: int) -> Buffer:
        self.buffers[self.end] = Buffer(self.end, n_bytes)
        self.end += -(-n_bytes // 512) * 512 + 512
        return self.buffers[next(reversed(self.buffers))]

    def holds(self, address: int) -> bool:
        starts = list(self.buffers)
        i = bisect_right(starts, address) - 1
        return i >= 0 and address - starts[i] < self.buffers[starts[i]].n_bytes


class Driver:
    def enter(self) -> None:
        pass


class RecordingBackend(CUDABackend):
    """What is written to inputs is in `written`, copies as (to, from, bytes) are in `copied`; reading gives zeros."""
    driver = Driver()

    def __init__(self):
        KernelBackend.__init__(self, "cuda")
        self.target, self.memory, self.device = Target(), Memory(), "cuda:0"
        self.stream, self.written, self.copied = Stream(self.memory), [], []

    def memory_bytes(self):
        return 1 << 40

    def empty(self, n_bytes):
        return self.memory.allocate(max(n_bytes, 256))

    def upload(self, array):
        return self.empty(array.nbytes)

    def free(self, buffer):
        del self.memory.buffers[buffer.handle]

    def write(self, buffer, offset, data):
        assert self.memory.buffers[buffer.handle] is buffer and offset + data.size <= buffer.n_bytes
        self.written.append((buffer.handle + offset, data.tobytes()))

    def read(self, buffer, offset, n_bytes):
        assert self.memory.buffers[buffer.handle] is buffer and offset + n_bytes <= buffer.n_bytes
        return Pending(np.zeros(n_bytes, np.uint8))

    def copy(self, buffer, offset, source, source_buffer, source_offset, n_bytes):
        assert source is self and all(self.memory.holds(at.handle + first + n_bytes - 1)
                                      for at, first in ((buffer, offset), (source_buffer, source_offset)))
        self.copied.append((buffer.handle + offset, source_buffer.handle + source_offset, n_bytes))

    def expect(self):
        pass

    def report(self):
        return ""

    def close(self):
        self.stream.close()
