"""Ids that are no experts on a GPU: what kernels left of them is raised with the outputs of their run, and of no other."""
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from ggml_py.backends.transfers import Pending
from ggml_py.graph.graph import Graph, Tensor
from ggml_py.graph.program import Arenas, Program
from recording_target import RecordingBackend


class Backend(RecordingBackend):
    """Reading gives what was written, and zeros where nothing was. left: int32 [4],
    what the kernels of the next run leave of a bad id."""

    def __init__(self):
        super().__init__()
        self.contents, self.left = {}, None

    def run(self, steps):
        super().run(steps)
        if self.left is not None:
            self.write(self.faults.buffer, 0, np.int32(self.left).view(np.uint8))
            self.left = None

    def write(self, buffer, offset, data):
        super().write(buffer, offset, data)
        self.contents[buffer.handle + offset] = np.array(data).reshape(-1).view(np.uint8)

    def read(self, buffer, offset, n_bytes):
        return Pending(self.contents.get(buffer.handle + offset, np.zeros(n_bytes, np.uint8)))


def graph(names):
    g = Graph("cuda:0")
    x, ids = g.input("x", "f32", (3, 64)), g.input("ids", "i32", (3, 2))
    w = Tensor("w", "F32", (8, 5, 64), device="cuda:0", buffer=BACKEND.empty(8 * 32 * 64 * 4))
    g.outputs = [g.mul_mat_id(w, x, ids, name=name) for name in names] or [g.scale(x, factor=2.0)]
    return Program(g, Arenas({"cuda:0": BACKEND})), {"x": np.zeros((3, 64), np.float32), "ids": np.zeros((3, 2), np.int32)}


BACKEND = Backend()


def test_faults_of_nodes():
    program, values = graph(["up", "down"])
    assert program.late == [BACKEND]
    outputs = program.run(values)
    assert [out.shape for out in outputs] == [(6, 5), (6, 5)]
    faults = BACKEND.faults
    launched = [launch.args for launch in BACKEND.stream.take() if launch.name == "dispatch"]
    assert [args[2] for args in launched] == [faults.buffer.handle] * 2 and len({int(args[3]) for args in launched}) == 2
    for args, name in zip(launched, ("up", "down")):
        BACKEND.left = args[3], 5, -7, 0
        with pytest.raises(IndexError, match=f"^{name}: token 2 has expert -7 at rank 1, allowed: 0 to 7$"):
            program.run(values)
        program.run(values)  # it was told


def test_an_error_is_of_its_run():
    """Of three runs that are queued, the second has a bad id: the first and the third are right, whatever is waited for first,
    or not at all."""
    for waited in (0, 1, 2), (2, 1, 0), (2,):
        program, values = graph(["up", "down"])
        outputs = []
        for left in None, (1, 0, 9, 0), None:
            BACKEND.left = left
            outputs.append(program.queue(values))
        for i in waited:
            if i == 1:
                with pytest.raises(IndexError, match="^up: token 0 has expert 9 at rank 0, allowed: 0 to 7$"):
                    outputs[i].result()
            else:
                outputs[i].result()


def test_what_is_known_to_be_zero_is_not_written():
    """Where errors lie is cleared before a run unless the last one has told that it left none."""
    program, values = graph(["up", "down"])
    program.run(values)

    def is_cleared():
        del BACKEND.written[:]
        outputs = program.queue(values)
        return BACKEND.faults.buffer.handle in [address for address, _ in BACKEND.written], outputs
    cleared, first = is_cleared()
    assert not cleared
    cleared, second = is_cleared()
    assert cleared  # nobody has waited for the first one
    first.result()
    cleared, third = is_cleared()
    assert cleared  # nor for the second one, and what the first one told is older
    second.result(), third.result()
    assert not is_cleared()[0]
    BACKEND.left = 1, 0, 9, 0
    with pytest.raises(IndexError, match="^up: token 0 has expert 9"):
        program.run(values)
    assert is_cleared()[0]
    program.run(values)
    BACKEND.left, launch = (1, 0, 9, 0), BACKEND.read
    try:
        BACKEND.read = lambda *given: 1 // 0
        with pytest.raises(ZeroDivisionError):  # behind the kernels, before anything is asked of them
            program.queue(values)
    finally:
        BACKEND.read = launch
    program.run(values)


def test_other_programs_do_not_ask():
    program, values = graph([])
    assert program.late == []
    program.run({"x": values["x"]} if "ids" not in [t.name for t in program.inputs] else values)


def test_nodes_keep_their_numbers():
    """However often programs with nodes of these names are made."""
    for _ in range(3):
        program, values = graph(["up", "down"])
        program.run(values)
    assert len(BACKEND.faults.messages) == 2
