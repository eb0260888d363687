"""Decode steps in the simulator, eager and replayed, with cells by address: the CPU's bits."""
from dataclasses import dataclass

import numpy as np

from cuda_simulator import run_in_simulator
from ggml_py.backends.transfers import Pending
from ggml_py.testing import assert_bitwise_equal
from tiny_models import write_model

SIZES = dict(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, head=16, n_ff=32, n_vocab=16, n_ctx=300)
TOKENS = [[3, 1], [5], [2], [11]]  # decoded one after the other


def test_in_the_simulator():
    run_in_simulator(__file__)


@dataclass(frozen=True)
class Launch:
    run: object  # simulator.Launch

    def __call__(self, stream):
        stream.launch(self.run)


def simulated_backend():
    """The CUDA backend with its binders and graphs; memory is numpy's, addresses are the host's."""
    from ggml_py.kernels.cuda import simulator
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
            return Launch(super().launch(kernel, grid, block, tuple(args), shared))

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


def simulate_decode(tmp_path):
    """The first step of a batch shape is eager, later ones come from the graph; the last one decoded is another sequence's, then it is continued greedily."""
    from ggml_py.gguf_file import GGUFFile
    from ggml_py.model import Model
    path, settings = write_model(tmp_path / "m.gguf", "llama", ("Q8_0",), **SIZES), dict(n_ctx=2 * 16, n_seq_max=2, kv_write="cpy")

    def run(context):
        return [context.decode(tokens) for tokens in TOKENS] + [context.decode([6], seq_id=1), np.int32(list(context.greedy(7, 3, seq_id=1)))]
    with Model.load(path, device="cpu") as model, model.new_context(**settings) as context:
        expected = run(context)
    with Model(GGUFFile.open(path), simulated_backend()) as model, model.new_context(**settings) as context:
        for i, (found, wanted) in enumerate(zip(run(context), expected, strict=True)):
            assert_bitwise_equal(found, wanted, f"step {i}")
        assert (context.graphs.counters.captures, context.graphs.counters.replays) == (2, 3 + 2)
