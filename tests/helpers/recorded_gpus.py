"""Several GPUs that run nothing and remember every launch (`recording_target`), and that reach each other's memory."""
from contextlib import contextmanager

from ggml_py.backends.cuda_graphs import GraphCache
from recording_target import Memory, RecordingBackend, Stream


class RecordedGPU(RecordingBackend):
    """One of several: their memory has addresses of one kind, as that of GPUs that reach each other."""

    def __init__(self, ordinal: int, memory: Memory):
        super().__init__()
        self.device, self.memory, self.stream = f"cuda:{ordinal}", memory, Stream(memory)
        self.peers: list[tuple[str, int]] = []  # copies from other devices: from which, bytes
        self.n_meetings = 0

    def reaches(self, other) -> bool:
        return isinstance(other, RecordedGPU)

    def load(self) -> None:
        pass

    @contextmanager
    def fork(self, stream, driver=None):
        self.n_meetings += 1
        yield

    def copy(self, buffer, offset, source, source_buffer, source_offset, n_bytes):
        if source is self:
            super().copy(buffer, offset, source, source_buffer, source_offset, n_bytes)
        else:
            self.peers.append((source.device, n_bytes))

    @staticmethod
    def copy_together(copies):
        for to, *rest in copies:
            to.copy(*rest)

    def new_graphs(self) -> GraphCache:
        return GraphCache(self)


def recorded_gpus(n: int) -> list[RecordedGPU]:
    memory = Memory()
    return [RecordedGPU(i, memory) for i in range(n)]
