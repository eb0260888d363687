"""Other work on a GPU, as another program would put there: additions of large arrays in a stream of their own,
until the end of the block."""
import threading
from typing import Self

from ..kernels.call import Call, Operand

N_ROWS, N_COLS = 4096, 4096  # of arrays of 64 MiB: they leave nothing of the L2 cache to others
LAUNCHES = 16                # in the queue at a time


class Noise:
    """Context manager. device: "cuda:N"."""

    def __init__(self, device: str):
        from ..backends.cuda import CUDABackend
        self.backend = CUDABackend(int(device.removeprefix("cuda:")))
        self.buffers = [self.backend.empty(4 * N_ROWS * N_COLS) for _ in range(2)]
        self.error: BaseException | None = None
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._work, name="noise", daemon=True)
        from ..kernels.cuda.elementwise import add
        x, y = (Operand("f32", (N_ROWS, N_COLS), int(buffer.handle)) for buffer in self.buffers)
        self.steps = [add(Call("add", "noise", self.backend.target, {"x": a, "y": b, "out": b}))
                      for a, b in ((x, y), (y, x))] * (LAUNCHES // 2)
        self.backend.run(self.steps)  # loads the kernel
        self.backend.stream.sync()

    def _work(self) -> None:
        try:
            self.backend.target.device.set_current()
            while not self.stopped.is_set():
                self.backend.run(self.steps)
                self.backend.stream.sync()
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.stopped.set()
        self.thread.join()
        for buffer in self.buffers:
            self.backend.free(buffer)
        self.backend.close()
        if self.error:
            raise RuntimeError("noise: broke off, so the GPU was not kept busy") from self.error
