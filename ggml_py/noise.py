"""Other work on a GPU, as another program would put there: additions of large arrays in a stream of their own, until the end of the block."""
import threading

N_ROWS, N_COLS = 4096, 4096  # of arrays of 64 MiB: they leave nothing of the L2 cache to others
LAUNCHES = 16                # in the queue at a time


class Noise:
    """Context manager. device: "cuda:N"."""

    def __init__(self, device: str):
        from .backends import open_backend
        self.backend = open_backend(device)
        self.buffers = [self.backend.empty(4 * N_ROWS * N_COLS) for _ in range(2)]
        self.stopped, self.error = threading.Event(), None
        self.thread = threading.Thread(target=self._work, name="noise", daemon=True)
        from .kernels.cuda.elementwise import add
        x, y = (int(buffer.handle) for buffer in self.buffers)
        self.steps = [add(self.backend.target, *operands, N_ROWS, N_COLS, N_ROWS) for operands in ((x, y, y), (y, x, x))] * (LAUNCHES // 2)
        self.backend.run(self.steps)  # loads the kernel
        self.backend.stream.sync()

    def _work(self):
        try:
            self.backend.target.device.set_current()
            while not self.stopped.is_set():
                self.backend.run(self.steps)
                self.backend.stream.sync()
        except BaseException as error:
            self.error = error

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.stopped.set()
        self.thread.join()
        for buffer in self.buffers:
            self.backend.free(buffer)
        self.backend.close()
        if self.error:
            raise RuntimeError("noise: broke off, so the GPU was not kept busy") from self.error
