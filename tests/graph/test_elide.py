"""Results that are only made to be copied are written straight to their destination, unless somebody could notice."""
from dataclasses import replace

import numpy as np
import pytest

from composing_cpu import ComposingCPU
from ggml_py.backends.base import KernelBackend
from ggml_py.backends.cpu import CPUBackend
from ggml_py.graph.graph import Graph, Tensor
from ggml_py.graph.program import Arenas, Program
from ggml_py.ops.table import OPS
from ggml_py.testing import assert_bitwise_equal
from recurrent_op import declared

SLOTS, N, K = 6, 3, 8


@pytest.fixture
def toy():
    with declared():
        yield CPUBackend()


def leaf(backend, name, array):
    return Tensor(name, {"f4": "f32", "i4": "i32", "i8": "i64"}[array.dtype.str[1:]], array.shape,
                  buffer=backend.upload(array.copy()))


def states():
    return np.random.default_rng(1).standard_normal((SLOTS, K)).astype(np.float32)


class Model:
    """One recurrent layer or more: a state is read, updated, and copied back to other rows."""

    def __init__(self, backend, n_layer=1, write="set_rows"):
        self.backend, self.g, self.write = backend, Graph(), write
        self.x = self.g.input("x", "f32", (N, K))
        self.ids, self.rows = self.g.input("ids", "i32", (N,)), self.g.input("rows", "i64", (N,))
        self.states = [leaf(backend, f"state-{i}", states() + np.float32(i)) for i in range(n_layer)]
        self.dst = leaf(backend, "dst",
                        np.array([[backend.address(s) + 4 * K * row for row in (5, 3, 4)] for s in self.states], np.int64))
        out, self.read = self.x, []
        for i, state in enumerate(self.states):
            out, new = self.g.recur(state, out, self.ids, name=f"recur-{i}")
            self.put(i, state, new)
        self.g.outputs = [out, *self.read]

    def put(self, i, state, new):
        if self.write == "set_rows":
            return self.g.set_rows(state, new, self.rows, name=f"put-{i}")
        return self.g.cpy_rows_indirect(state, new, self.dst, slot=i, name=f"put-{i}")

    def run(self, no_fuse=()):
        """(out, states afterwards, names of the ops that ran)."""
        program = Program(self.g, Arenas({"cpu": self.backend}), no_fuse)
        values = {"x": np.arange(N * K, dtype=np.float32).reshape(N, K), "ids": np.int32([0, 1, 2]), "rows": np.int64([5, 3, 4])}
        out, *_ = program.run({name: values[name] for name in self.g.inputs})
        return out, [s.buffer.view(np.float32).reshape(SLOTS, K).copy() for s in self.states], [node.op for node in program.nodes]


@pytest.mark.parametrize("write", ["set_rows", "cpy_rows_indirect"])
def test_no_copy_of_a_state_is_left(toy, write):
    out, after, used = Model(toy, 3, write).run()
    expected, wanted, separate = Model(toy, 3, write).run(["elide"])
    assert used == ["recur"] * 3 and separate == ["recur", write] * 3
    assert_bitwise_equal(out, expected, "out")
    for a, b, before in zip(after, wanted, [states() + np.float32(i) for i in range(3)]):
        assert_bitwise_equal(a, b, "state")
        assert (a[[3, 4, 5]] != before[[3, 4, 5]]).all() and (a[:3] == before[:3]).all()


def refused(model, write="set_rows"):
    out, after, used = model().run()
    expected, wanted, _ = model().run(["elide"])
    assert write in used
    assert_bitwise_equal(out, expected, "out")
    for a, b in zip(after, wanted):
        assert_bitwise_equal(a, b, "state")


def test_a_second_reader_keeps_the_copy(toy):
    class Read(Model):
        def put(self, i, state, new):
            super().put(i, state, new)
            self.read.append(self.g.scale(new, factor=2.0))
    refused(lambda: Read(toy))


def test_an_output_keeps_the_copy(toy):
    class Output(Model):
        def __init__(self, backend):
            super().__init__(backend)
            self.g.outputs.append(self.g.nodes[0].results[1])
    refused(lambda: Output(toy))


def test_a_reader_of_the_destination_in_between_keeps_the_copy(toy):
    class Between(Model):
        def put(self, i, state, new):
            self.read.append(self.g.scale(state, factor=3.0))
            super().put(i, state, new)
    refused(lambda: Between(toy))


def test_a_writer_of_the_destination_in_between_keeps_the_copy(toy):
    class Written(Model):
        def put(self, i, state, new):
            self.g.set_rows(state, self.x, self.rows)
            super().put(i, state, new)
    refused(lambda: Written(toy))


def test_rows_that_are_made_in_between_keep_the_copy(toy):
    class Late(Model):
        def put(self, i, state, new):
            rows = leaf(self.backend, "other", np.zeros(N, np.int64))
            to = self.g.cpy(self.rows, rows, name="rows copied")
            self.g.set_rows(state, new, to, name=f"put-{i}")
    refused(lambda: Late(toy))


def test_an_op_that_may_not_write_over_its_operand_keeps_the_copy(toy):
    OPS["recur"].overwrites.clear()
    refused(lambda: Model(toy))


def test_an_op_with_several_optional_operands_keeps_the_copy(toy):
    """They are all there or none: rows for one of two results cannot be."""
    op = OPS["recur"]
    OPS["recur"] = replace(op, operands=(*op.operands, "rows_too"), roles={**op.roles, "rows_too": "rows"}, n_optional=2)
    refused(lambda: Model(toy))


def test_rows_of_another_type_keep_the_copy(toy):
    class Half(Model):
        def put(self, i, state, new):
            half = Tensor("half", "f16", (SLOTS, K), buffer=self.backend.empty(2 * SLOTS * K))
            self.g.set_rows(half, new, self.rows)
    refused(lambda: Half(toy))


# Copies to a place that is known when the graph is planned

def copied(offset=0, read=None):
    """x doubled is copied to rows of a state; (out, state afterwards, ops)."""
    def make(no_fuse):
        backend, g = CPUBackend(), Graph()
        state = leaf(backend, "state", states())
        part = state.view((N, K), 4 * K * offset)
        g.outputs = []
        source = g.input("x", "f32", (N, K)) if read is None else state.view((N, K), 4 * K * read)
        if read is not None:
            g.input("unused", "f32", (1, 1))
        g.cpy(g.scale(source, factor=2.0), part, name="copied")
        program = Program(g, Arenas({"cpu": backend}), no_fuse)
        program.run({name: np.ones(t.shape, np.float32) for name, t in g.inputs.items()})
        return state.buffer.view(np.float32).reshape(SLOTS, K).copy(), [node.op for node in program.nodes]
    (found, used), (wanted, separate) = make(()), make(["elide"])
    assert_bitwise_equal(found, wanted, "state")
    assert separate == ["scale", "cpy"]
    return used


def test_a_copy_into_a_part_of_a_state():
    assert copied(offset=2) == ["scale"]


def test_a_part_of_a_state_made_of_another_part():
    assert copied(offset=3, read=0) == ["scale"]


@pytest.mark.parametrize("read", [1, 2, 3])
def test_a_destination_that_overlaps_an_operand_keeps_the_copy(read):
    """scale does not declare that it may write over x, wherever the two overlap."""
    assert copied(offset=3, read=read) == ["scale", "cpy"]


@pytest.mark.parametrize("copied", [0, 1])
def test_a_copy_of_a_result_of_a_fused_node(copied):
    """Its parts write to the destination, and read what lies there: a device may run the node by them."""
    def make(no_fuse):
        backend, g = ComposingCPU(), Graph()
        x, w, state = g.input("x", "f32", (N, K)), leaf(backend, "w", np.ones(K, np.float32)), leaf(backend, "state", states())
        total = g.add(x, x)
        results = total, g.rms_norm(total, w, eps=1e-5)
        g.cpy(results[copied], state.view((N, K), 4 * K), name="copied")
        g.outputs = [results[1 - copied]]
        program = Program(g, Arenas({"cpu": backend}), no_fuse)
        out, = program.run({"x": np.arange(N * K, dtype=np.float32).reshape(N, K)})
        return out, state.buffer.view(np.float32).reshape(SLOTS, K).copy(), [node.op for node in program.nodes]
    (out, found, used), (expected, wanted, separate) = make(()), make(["elide"])
    assert_bitwise_equal(out, expected, "out")
    assert_bitwise_equal(found, wanted, "state")
    assert used == ["add_rms_norm"] and separate == ["add_rms_norm", "cpy"]


def test_a_backend_has_no_kernel_of_an_op_that_no_module_has():
    assert not KernelBackend("cpu").has_kernel("mul_mat_argmax") and KernelBackend("cpu").has_kernel("mul_mat")
