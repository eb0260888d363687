"""The recipes of docs/architecture.md: a toy of each kind, made of what its recipe names and of nothing else,
works everywhere."""
import sys
from types import ModuleType

import numpy as np
import pytest
from composing_cpu import ComposingCPU
from cpu_comparisons import compare
from cuda_simulator import SimulatedMachine, run_in_simulator
from op_runs import check_op, product_input, weight
from tiny_models import write_model

from ggml_py import models
from ggml_py.backends.cpu import CPUBackend
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.graph import fuse
from ggml_py.graph.graph import Graph
from ggml_py.graph.program import Arenas, Program
from ggml_py.models.llama import Llama
from ggml_py.ops.compose import FUSED, fused
from ggml_py.ops.table import OPS, Shape, op
from ggml_py.quant import formats
from ggml_py.quant.dequantize import dequantize
from ggml_py.quant.legacy import q8_0
from ggml_py.quant.words import ZERO
from ggml_py.testing import assert_bitwise_equal

TOKENS = np.random.default_rng(1).integers(0, 70, 19).astype(np.int32)


def module(monkeypatch, room: str, **functions) -> None:
    """kernels/ROOM/NAME.py, NAME being that of the first function."""
    found = ModuleType(f"ggml_py.kernels.{room}.{next(iter(functions))}")
    vars(found).update(functions)
    monkeypatch.setitem(sys.modules, found.__name__, found)


# A primitive op: its declaration, and a module each in kernels/reference, kernels/cpu and kernels/cuda.

def half_less(call):
    """out = x / 2 - y. x, y, out: f32 [n, k]."""
    def step():
        for i in np.ndindex(call.out.shape):
            call.out.data[i] = call.x.data[i] * np.float32(0.5) - call.y.data[i]
    return step


def half_less_vectors(call):
    def step():
        np.subtract(call.x.data * np.float32(0.5), call.y.data, out=call.out.data)
    return step


def half_less_cuda(call):
    from numba import cuda

    from ggml_py.kernels.cuda import ptx
    from ggml_py.kernels.cuda.launch import F32, N, Kernel, factory

    @factory([()])
    def half_less_kernel():
        def kernel(x, y, out, n):
            i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
            if i < n:
                ptx.st(out, i, ptx.sub(ptx.mul(ptx.ld(x, i), ptx.f32(0.5)), ptx.ld(y, i)))
        return Kernel(kernel, (F32, F32, F32, N), 32)
    n = call.out.n_rows * call.out.n_cols
    return call.device.launch(half_less_kernel(), -(-n // 32), 32, (call.x.data, call.y.data, call.out.data, n))


@pytest.fixture
def primitive_op(monkeypatch):
    @op("x y")
    def half_less(params, x, y):
        return Shape("f32", x.shape)
    module(monkeypatch, "reference", half_less=globals()["half_less"])
    module(monkeypatch, "cpu", half_less=half_less_vectors)
    module(monkeypatch, "cuda", half_less=half_less_cuda)
    yield
    del OPS["half_less"]


def rows(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_a_primitive_op(primitive_op):
    compare("half_less", "half_less", rows(5, 7), rows(5, 7)[::-1])


def simulate_a_primitive_op(primitive_op):
    check_op(SimulatedMachine(), "half_less", "half_less", rows(5, 7), rows(5, 7)[::-1])


# A fused op without a kernel of its own: a template.

@pytest.fixture
def fused_op(primitive_op, monkeypatch):
    @fused("x y w", "eps")
    def half_less_norm(g, x, y, w, eps):
        return g.rms_norm(g.half_less(x, y), w, eps=eps)
    monkeypatch.setitem(FUSED, "half_less_norm", OPS["half_less_norm"].template)
    monkeypatch.setattr(fuse, "PASSES", (*fuse.PASSES, "half_less_norm"))
    yield
    del OPS["half_less_norm"]


def run_norm(backend, no_fuse=()):
    g = Graph()
    x, y, w = (g.input(name, "f32", shape) for name, shape in (("x", (5, 8)), ("y", (5, 8)), ("w", (8,))))
    g.outputs = [g.rms_norm(g.half_less(x, y, name="less"), w, eps=1e-5, name="norm")]
    program = Program(g, Arenas({"cpu": backend}), no_fuse)
    return program.run({"x": rows(5, 8), "y": rows(5, 8)[::-1], "w": rows(8)})[0], [node.op for node in program.nodes]


def test_a_fused_op(fused_op, monkeypatch):
    """A device without a kernel for it runs its parts; one whose kernels have it gets it, with the same bits."""
    expected, ops = run_norm(CPUBackend())
    assert ops == ["half_less", "rms_norm"]
    module(monkeypatch, "cuda", half_less_norm=lambda call: None)
    found, ops = run_norm(ComposingCPU())
    assert ops == ["half_less_norm"] and run_norm(ComposingCPU(), ["half_less_norm"])[1] == ["half_less", "rms_norm"]
    assert_bitwise_equal(found, expected, "norm")


# A type: a row of the format table and the function that unpacks it. Q8_K: level * d, d being a float32; bsums are not needed.

def q8_k(p, ldw, ld4, ld2):
    f32 = p.f32

    @p.jit
    def group(t, g):
        return f32(ld4(t, 0)), ZERO
    return q8_0(p, ldw, ld4, ld2)._replace(group=group)


@pytest.fixture
def type_(monkeypatch):
    formats._row("Q8_K", 256, "d:4 qs:256 bsums:32", "qs bsums d", q8_k, 0, 32, 256, 128, 1)
    monkeypatch.setitem(formats._BY_ID, int(formats.FORMATS["Q8_K"].type_id), formats.FORMATS["Q8_K"])
    yield "Q8_K"
    del formats.FORMATS["Q8_K"]


def q8_k_blocks(n_rows: int, n_cols: int) -> tuple[np.ndarray, np.ndarray]:
    """(bytes as a file has them, their values)."""
    rng = np.random.default_rng(3)
    d, q = (rng.random((n_rows, n_cols // 256, 1), np.float32),
            rng.integers(-127, 128, (n_rows, n_cols // 256, 256)).astype(np.int8))
    bsums = q.reshape(n_rows, -1, 16, 16).sum(-1).astype(np.int16)
    blocks = np.concatenate([d.view(np.uint8), q.view(np.uint8), bsums.view(np.uint8)], -1).reshape(n_rows, -1)
    return blocks, (d * q.astype(np.float32)).reshape(n_rows, n_cols)


def operands_of(name: str):
    """Of a product and of a lookup of rows."""
    w = weight("w", name, q8_k_blocks(5, 512)[0], 512)
    return (w, product_input(name, rows(3, 512))), (w, np.int32([4, 0, 3]))


def test_a_type(type_):
    blocks, values = q8_k_blocks(5, 512)
    assert_bitwise_equal(dequantize(blocks, type_, (5, 512)), values, "values")
    product, lookup = operands_of(type_)
    compare("mul_mat", "mul_mat", *product)
    compare("get_rows", "get_rows", *lookup)


def simulate_a_type(type_):
    product, lookup = operands_of(type_)
    check_op(SimulatedMachine(), "mul_mat", "mul_mat", *product)
    check_op(SimulatedMachine(), "get_rows", "get_rows", *lookup)


# An architecture: a class in a file of models/, and its name in the list.

def logits(path, backend, device_of=None, *others):
    with Model(GGUFFile.open(path), backend) as model:
        model.backends |= {other.device: other for other in others}
        return model.new_context(64, device_of=device_of).decode(TOKENS)


class Loud(Llama):
    """llama whose layers' outputs count twice."""
    name = "loud"

    def ffn(self, b, il, h):
        return b.g.scale(super().ffn(b, il, h), factor=2.0, name=f"ffn_loud-{il}")


def test_an_architecture(tmp_path, monkeypatch):
    monkeypatch.setitem(models.ARCHITECTURES, "loud", Loud)
    loud, plain_ = (logits(write_model(tmp_path / f"{arch}.gguf", arch), CPUBackend()) for arch in ("loud", "llama"))
    assert loud.shape == plain_.shape and (loud != plain_).any()


# A device: a class that follows backends/base.py.

class OtherCPU(CPUBackend):
    def __init__(self):
        super().__init__(device="cpu:other")


def test_a_device(tmp_path):
    path = write_model(tmp_path / "llama.gguf", "llama")
    placed = logits(path, CPUBackend(), lambda node: "cpu:other" if "ffn" in node.name else "cpu", OtherCPU())
    assert_bitwise_equal(placed, logits(path, CPUBackend()), "logits")


def test_in_the_simulator():
    run_in_simulator(__file__)
