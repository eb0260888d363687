"""Recording and bisection between the CPU and CUDA in the simulator: every node's rows compare, limbs of activations included,
and a fault is named."""
from contextlib import nullcontext

import numpy as np
import pytest

from cuda_simulator import run_in_simulator
from tiny_models import write_model

SIZES = dict(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, head=16, n_ff=32, n_vocab=16, n_ctx=300)
WINDOWS = np.array([[3, 1, 5, 2]], np.int32)


def test_in_the_simulator():
    run_in_simulator(__file__)


def simulate_bisection(tmp_path):
    from ggml_py.check.axes import Setting
    from ggml_py.backends.cpu import CPUBackend
    from ggml_py.check.bisection import first_difference
    from ggml_py.files.gguf import GGUFFile
    from ggml_py.engine.model import Model
    from ggml_py.check.recording import Capture, recompute
    from ggml_py.testing import assert_bitwise_equal
    from ggml_py.check.verify import Verification
    from simulated_backend import simulated_backend

    class Faulty:
        """A step, and then a bit of its result turned."""

        def __init__(self, step, buffer, offset):
            self.step, self.buffer, self.offset, self.large = step, buffer, offset, step.large

        def __call__(self, stream):
            self.step(stream)
            stream.launch(lambda _: self.buffer.memory.__setitem__(self.offset, self.buffer.memory[self.offset] ^ 1))

    def faulty(bind, i, chosen):
        """`bind` with a bit of result i turned in the nodes chosen(node)."""
        def bind_one(node, settled):
            step = bind(node, settled)
            return Faulty(step, *node.results[i].memory) if chosen(node) else step
        return bind_one

    path = write_model(tmp_path / "m.gguf", "llama", ("Q8_0",), **SIZES)
    backend = simulated_backend()
    with Model(GGUFFile.open(path), CPUBackend()) as on_cpu, Model(GGUFFile.open(path), backend) as on_gpu:
        default, other = Setting("default", "", "cpu"), Setting("device", "replayed", "cuda:0", n_ubatch=2, kv_write="cpy")
        assert first_difference(on_cpu, on_gpu, WINDOWS, default, other, 0) is None
        eager = Setting("launch", "eager", "cuda:0", n_ubatch=2, graphs=False)
        with Verification(lambda device: nullcontext(on_cpu if device == "cpu" else on_gpu), WINDOWS,
                          [default, other, eager]) as verification:
            verification.run()
        assert verification.confirmed and len({result.digest for result in verification.results}) == 1

        bind = backend.bind
        backend.bind = faulty(bind, 0, lambda node: node.name == "attn_out-0")
        found = first_difference(on_cpu, on_gpu, WINDOWS, default, eager, 0)
        found.save(tmp_path / "dump")
        backend.bind = bind
        assert (found.name, found.op, found.n_different, found.first,
                found.inputs_equal) == ("attn_out-0", "mul_mat", 1, (0, 0), True)
        assert found.culprits == ["attn_out-0, kernels/cuda/mul_mat.py: mul_mat[Q8_0] on cuda:0, in: launch, eager"]
        assert found.max_ulps == 1
        expected, wrong = (Capture.read(tmp_path / "dump" / f"{side}.npz") for side in ("default", "other"))
        for capture in expected, wrong:  # from what the CPU's kernel read, and CUDA's
            made, = recompute(capture, backend)["attn_out-0"]
            reference, = recompute(capture, CPUBackend("reference"))["attn_out-0"]
            assert_bitwise_equal(made, reference, "attn_out-0")
        assert (wrong.results["attn_out-0"].arrays[0] != reference).sum() == 1

        backend.bind = faulty(bind, 1, lambda node: node.op == "mul_mat_qkv")
        found = first_difference(on_cpu, on_gpu, WINDOWS, default, eager, 0)
        backend.bind = bind
        assert (found.name, found.op, found.parts, found.n_different) == ("Klin-0", "mul_mat_qkv", ["mul_mat"] * 3, 1), str(found)
        culprit, = found.culprits
        assert culprit == ("Vlin-0, kernels/cuda/mul_mat_qkv.py: mul_mat_qkv[Q8_0, Q8_0, Q8_0] on cuda:0, in: launch, eager; "
                           "stands for mul_mat, mul_mat, mul_mat; as defined: mul_mat (Qlin-0), mul_mat (Vlin-0); "
                           "not as defined: mul_mat (Klin-0)")


def without_last_bits(exact):
    """Sums of products of float16, which count 2^-24, without their last bit."""
    def multiply(a, b, c):
        sums = exact(a, b, c)
        return np.where(abs(sums) < 1, np.floor(sums * np.float32(2**23)) / np.float32(2**23), sums)
    return multiply


@pytest.mark.parametrize("fault", [None, without_last_bits])
def simulate_products(tmp_path, monkeypatch, fault):
    """The axis `products` finds what products of float16 add wrong, and bisection names the product."""
    from ggml_py.check.axes import settings_of
    from ggml_py.check.verify import Verification
    from ggml_py.engine.model import Model
    from ggml_py.files.gguf import GGUFFile
    from ggml_py.kernels.cuda import mul_mat, simulator
    from ggml_py.kernels.cuda.half_forms import has_halves
    from ggml_py.kernels.cuda.mmq_half import DENSE, mmq_half_kernel
    from ggml_py.kernels.cuda.wgmma import half_products
    from ggml_py.quant.formats import format_of
    from simulated_backend import simulated_backend

    def forget():
        for made in half_products, mmq_half_kernel:
            made.cache_clear()
    if fault:
        monkeypatch.setattr(simulator.products, "_multiply_halves", fault(simulator.products._multiply_halves))
    monkeypatch.setattr(mul_mat, "half_block", lambda type_, *sizes: DENSE[0] if has_halves(format_of(type_)) else None)
    forget()
    path = write_model(tmp_path / "m.gguf", "llama", ("Q4_K",), **SIZES | dict(n_embd=256, n_ff=256, head=128))
    backend = simulated_backend()
    backend.target.halves = True
    settings = settings_of(["products"], ["cuda:0"], WINDOWS.shape)[:2]
    try:
        with Model(GGUFFile.open(path), backend) as model, Verification(lambda device: nullcontext(model), WINDOWS,
                                                                        settings) as verification:
            verification.run()
            if fault is None:
                assert verification.confirmed
            else:
                found = verification.bisect(verification.first_mismatch())
                assert found.inputs_equal and found.culprits == [
                    f"{found.name}, kernels/cuda/mul_mat.py: mul_mat[Q4_K] on cuda:0, in: default, one window after the other"]
    finally:
        forget()


class Atomic:
    """Threads of the simulator run one at a time."""

    @staticmethod
    def add(array, index, value):
        before = array[index].copy()
        array[index] += value
        return before


@pytest.mark.parametrize("name, first",
                         [("scattered_rms_norm", "cpu"), ("scattered_rms_norm", "cuda:0"), ("unguarded_rms_norm", "cpu"),
                          ("racing_top_k", "cpu"), ("scattered_weighted_sum", "cpu")])
def simulate_twins_of_gpu_faults(name, first, tmp_path, monkeypatch):
    """What test_gpu_planted_faults.py asks of bisection on a GPU."""
    from ggml_py.check.axes import Setting
    from ggml_py.backends.cpu import CPUBackend
    from ggml_py.check.bisection import first_difference
    from ggml_py.files.gguf import GGUFFile
    from ggml_py.engine.model import Model
    from numba import cuda
    from planted_faults import write_tied_model
    from simulated_backend import simulated_backend
    from gpu_faults import OF_EXPERTS, TWINS, check_named, planted

    monkeypatch.setattr(cuda, "atomic", Atomic, raising=False)
    twin, path = TWINS[name], tmp_path / "m.gguf"
    write_tied_model(path) if name in OF_EXPERTS else write_model(path, "llama", ("Q8_0",), **SIZES)
    backends = {"cpu": CPUBackend(), "cuda:0": planted(simulated_backend(), twin)}
    settings = [Setting("default", "", device, no_fuse=("all",)) for device in sorted(backends, key=first.__ne__)]
    with (Model(GGUFFile.open(path), backends[settings[0].device]) as a,
          Model(GGUFFile.open(path), backends[settings[1].device]) as b):
        check_named(first_difference(a, b, WINDOWS, *settings, 0), twin, always=first == "cpu")


def simulate_a_stale_graph_address(tmp_path):
    """The steps of one token in the second window are those that were captured in the first, with the arena that it had then."""
    from ggml_py.check.axes import Setting
    from ggml_py.check.bisection import first_difference
    from ggml_py.files.gguf import GGUFFile
    from ggml_py.engine.model import Model
    from simulated_backend import simulated_backend
    from gpu_faults import StaleGraphs, check_stale

    windows, backend = np.concatenate([WINDOWS, WINDOWS + 1]), simulated_backend()
    settings = Setting("default", "", "cuda:0"), Setting("pieces", "growing", "cuda:0", growing=True)
    with Model(GGUFFile.open(write_model(tmp_path / "m.gguf", "llama", ("Q8_0",), **SIZES)), backend) as model:
        assert first_difference(model, model, windows, *settings, 1) is None
        backend.new_graphs = lambda: StaleGraphs(backend)
        check_stale(first_difference(model, model, windows, *settings, 1))
