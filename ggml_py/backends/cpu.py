"""A CPU device: numpy memory and the kernels of kernels/cpu (or kernels/reference), compiled on first use and kept on disk.

There may be several ("cpu", "cpu:1", ...), each with memory of its own: placements can be tried where there is no GPU."""
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np

from ..base.errors import UserError
from ..base.storage import as_arrays, n_bytes
from ..ops.node import Node, Tensor
from .base import Backend, KernelBackend
from .transfers import Pending

WHOLE_MATRICES = "mul_mat", "mul_mat_glu", "mul_mat_qkv"  # modules whose kernels read all of their first operands


class CPUBackend(KernelBackend):
    """room: "cpu", or "reference" to run the definition itself."""
    asynchronous = False  # steps have run when `run` returns

    def __init__(self, room: str = "cpu", device: str = "cpu"):
        super().__init__(room)
        self.device = device
        from ..kernels.compile import check_cpu
        try:
            check_cpu()
        except RuntimeError as error:
            raise UserError(str(error)) from None

    @property
    def name(self) -> str:
        return llvm.get_host_cpu_name()

    def versions(self) -> dict[str, str]:
        return {}

    def report(self) -> str:
        return ""

    def memory_bytes(self) -> int:
        """What the system can still give. It would promise more, and end the process when that is used."""
        try:
            lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
            return sum(int(words[1]) * 1024 for words in lines if words[0] in ("MemAvailable:", "SwapFree:"))
        except OSError:  # not Linux
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def free_bytes(self) -> int:
        return self.memory_bytes()

    def empty(self, n_bytes: int) -> np.ndarray:
        try:
            buffer = _aligned(n_bytes)
        except MemoryError as error:
            raise MemoryError(f"{self.device}: {n_bytes} bytes are not to be had") from error
        if self.reader is not None:
            self.reader.lock_pages(buffer)
        return buffer

    def upload(self, array: np.ndarray) -> np.ndarray:
        """array: contiguous, any dtype. It is kept, not copied, when its memory is 64-byte aligned (tiles are asked to be)."""
        flat = array.reshape(-1).view(np.uint8)
        if flat.ctypes.data % 64:
            flat, source = _aligned(flat.size), flat
            flat[:] = source
        return flat

    def free(self, buffer) -> None:
        if self.reader is not None:
            self.reader.unlock_pages(buffer)

    def write(self, buffer: np.ndarray, offset: int, data: np.ndarray) -> None:
        buffer[offset:offset + data.size] = data

    def read(self, buffer: np.ndarray, offset: int, n_bytes: int) -> Pending:
        return Pending(buffer[offset:offset + n_bytes].copy())

    def copy(self, buffer: np.ndarray, offset: int, source: "CPUBackend", source_buffer: np.ndarray, source_offset: int,
             n_bytes: int) -> None:
        buffer[offset:offset + n_bytes] = source_buffer[source_offset:source_offset + n_bytes]

    @staticmethod
    def copy_together(copies: Sequence[tuple]) -> None:
        for to, buffer, offset, *source in copies:
            to.copy(buffer, offset, *source)

    def fetch(self, buffer: np.ndarray, offset: int, source: "CPUBackend", source_buffer: np.ndarray, source_offset: int,
              n_bytes: int) -> Callable[[], None]:
        """Has copied when it returns."""
        self.copy(buffer, offset, source, source_buffer, source_offset, n_bytes)
        return lambda: None

    def settle(self) -> None:
        pass

    def lock_pages(self, buffer: np.ndarray) -> None:
        pass

    def unlock_pages(self, buffer: np.ndarray) -> None:
        pass

    def has_locked(self, buffer: np.ndarray) -> bool:
        return False

    def data(self, tensor: Tensor):
        """A tensor's memory as kernels take it: an array; (q, d, sums) of activation blocks; uint32 words of tiles;
        rows of a cache."""
        buffer, offset = tensor.memory
        if tensor.dtype == "act":
            return self.activations.view(buffer[offset:], *tensor.shape)
        return as_arrays(buffer[offset:], tensor.dtype, tensor.shape)[0]

    def address(self, tensor: Tensor) -> int:
        buffer, offset = tensor.memory
        return buffer.ctypes.data + offset

    def reaches(self, other: Backend) -> bool:
        return isinstance(other, CPUBackend) and not self.asynchronous and not other.asynchronous

    def bind_all(self, nodes: Sequence[Node]) -> list[Callable[[], None]]:
        """Before a product begins, threads that wait are told of the matrix behind it: they ask the memory for it from then on,
        and while the small ops between the two run."""
        from ..kernels import threads
        from ..kernels.together import steps as steps_of
        steps = super().bind_all(nodes)
        products = [i for i, node in enumerate(nodes) if node.declared.module in WHOLE_MATRICES]
        for i, following in zip(products, products[1:] + products[:1]):
            weight = nodes[following].src[0]
            steps[i] = steps_of(partial(threads.ahead, self.address(weight), n_bytes(weight)), steps[i])
        return Steps(steps)

    def new_graphs(self) -> None:
        return None

    def run(self, steps: Sequence[Callable[[], None]]) -> None:
        for step in steps.together() if isinstance(steps, Steps) else steps:
            step()

    def close(self) -> None:
        pass


class Steps(list):
    """Steps that are run again and again: kernels side by side in one call."""

    def __init__(self, steps: Sequence[Callable[[], None]]):
        super().__init__(steps)
        self._joined: list[Callable[[], None]] = []
        self._of: list[Callable[[], None]] = []

    def together(self) -> list[Callable[[], None]]:
        if self._of != self:
            from ..kernels.together import together
            self._joined, self._of = together(self), [*self]
        return self._joined


def _aligned(n_bytes: int) -> np.ndarray:
    """Zeros, from a multiple of 64 on."""
    raw = np.zeros(n_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + n_bytes]
