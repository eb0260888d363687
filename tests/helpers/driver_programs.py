"""Random programs of what a driver offers, below transfers: to see that the scripted fake does what CUDA does.

A program is a list of phases. In a phase everything that is queued is late, and the host reads and writes page-locked memory at
once; a phase ends when the streams have been waited for. On the devices nothing races: what one stream touches after another
waits for it by an event. So a program has one outcome, what the host saw and what the memory holds at last, and it shows when
each copy took its bytes.
"""
import numpy as np
from hypothesis import strategies as st

from ggml_py.backends.transfers import Lease

N = 300  # bytes of every buffer
N_BUFFERS, N_PINNED, N_STREAMS = 3, 2, 2
BUFFERS, PINNED, STREAMS, VALUES = (st.integers(0, n - 1) for n in (N_BUFFERS, N_PINNED, N_STREAMS, 256))
OPERATIONS = st.one_of(
    st.tuples(st.just("host_write"), PINNED, VALUES), st.tuples(st.just("host_read"), PINNED),
    st.tuples(st.just("upload"), STREAMS, PINNED, BUFFERS), st.tuples(st.just("download"), STREAMS, BUFFERS, PINNED),
    st.tuples(st.just("move"), STREAMS, BUFFERS, BUFFERS), st.tuples(st.just("fill"), STREAMS, BUFFERS, VALUES),
    st.tuples(st.just("replace"), STREAMS, BUFFERS, VALUES))
PROGRAMS = st.lists(st.lists(OPERATIONS, min_size=1, max_size=12), min_size=1, max_size=3)


class Interpreter:
    def __init__(self, machine, before_sync=lambda: None):
        """before_sync: called at the end of a phase, when nothing queued has had to run yet."""
        self.machine, self.driver, self.before_sync, self.seen = machine, machine.drivers[0], before_sync, []
        self.streams = [machine.stream() for _ in range(N_STREAMS)]
        self.driver.enter()
        self.buffers = [self.driver.allocate(N, self.streams[0]) for _ in range(N_BUFFERS)]
        self.pinned = [self.driver.pinned(N) for _ in range(N_PINNED)]
        self.arrays = [np.asarray(Lease(memory, N, read_only=False)) for memory in self.pinned]
        for array in self.arrays:
            array[:] = 0
        for buffer in self.buffers:
            buffer.fill(0, stream=self.streams[0])
        self.streams[0].sync()
        self.last = {}  # ("buffer" or "pinned", index) -> the stream that touched it last

    def run(self, program) -> list[np.ndarray]:
        """What the host saw, in order, and last what the buffers hold."""
        for phase in program:
            late = [self.machine.delay(stream) for stream in self.streams]
            for name, *arguments in phase:
                getattr(self, name)(*arguments)
            assert not any(event.is_done for event in late), "the delay is over too early to show anything"
            self.before_sync()
            for stream in self.streams:
                stream.sync()
        for i in range(N_BUFFERS):
            self.download(0, i, 0)
            self.streams[0].sync()
            self.host_read(0)
        return self.seen

    def _in_order(self, stream: int, *touched) -> None:
        for what in touched:
            before = self.last.get(what, stream)
            if before != stream:
                self.streams[stream].wait(self.streams[before].record())
            self.last[what] = stream

    def host_write(self, p, value):
        self.arrays[p][:] = value

    def host_read(self, p):
        self.seen.append(self.arrays[p].copy())

    def upload(self, s, p, b):
        self._in_order(s, ("pinned", p), ("buffer", b))
        self.driver.copy(int(self.buffers[b].handle), int(self.pinned[p].handle), N, self.streams[s])

    def download(self, s, b, p):
        self._in_order(s, ("pinned", p), ("buffer", b))
        self.driver.copy(int(self.pinned[p].handle), int(self.buffers[b].handle), N, self.streams[s])

    def move(self, s, a, b):
        self._in_order(s, ("buffer", a), ("buffer", b))
        if a != b:
            self.driver.copy(int(self.buffers[b].handle), int(self.buffers[a].handle), N, self.streams[s])

    def fill(self, s, b, value):
        self._in_order(s, ("buffer", b))
        self.buffers[b].fill(value, stream=self.streams[s])

    def replace(self, s, b, value):
        """Freed in the order of a stream, and allocated again, perhaps of the same memory."""
        self._in_order(s, ("buffer", b))
        self.buffers[b].close(self.streams[s])
        self.buffers[b] = self.driver.allocate(N, self.streams[s])
        self.buffers[b].fill(value, stream=self.streams[s])
