"""Recording and bisection between the CPU and CUDA in the simulator: every node's rows compare, limbs of activations included, and a fault is named."""
from contextlib import nullcontext

import numpy as np

from cuda_simulator import run_in_simulator
from tiny_models import write_model

SIZES = dict(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, head=16, n_ff=32, n_vocab=16, n_ctx=300)
WINDOWS = np.array([[3, 1, 5, 2]], np.int32)


def test_in_the_simulator():
    run_in_simulator(__file__)


def simulate_bisection(tmp_path):
    from ggml_py.axes import Setting
    from ggml_py.backends.cpu import CPUBackend
    from ggml_py.bisection import first_difference
    from ggml_py.gguf_file import GGUFFile
    from ggml_py.model import Model
    from ggml_py.recording import Capture, recompute
    from ggml_py.testing import assert_bitwise_equal
    from ggml_py.verify import Verification
    from test_cuda_simulator_graphs import simulated_backend

    class Faulty:
        """A step, and then a bit of its result turned."""

        def __init__(self, step, buffer, offset):
            self.step, self.buffer, self.offset = step, buffer, offset

        def __call__(self, stream):
            self.step(stream)
            stream.launch(lambda _: self.buffer.memory.__setitem__(self.offset, self.buffer.memory[self.offset] ^ 1))

    path = write_model(tmp_path / "m.gguf", "llama", ("Q8_0",), **SIZES)
    backend = simulated_backend()
    with Model(GGUFFile.open(path), CPUBackend()) as on_cpu, Model(GGUFFile.open(path), backend) as on_gpu:
        default, other = Setting("default", "", "cpu"), Setting("device", "replayed", "cuda:0", n_ubatch=2, kv_write="cpy")
        assert first_difference(on_cpu, on_gpu, WINDOWS, default, other, 0) is None
        eager = Setting("launch", "eager", "cuda:0", n_ubatch=2, graphs=False)
        with Verification(lambda device: nullcontext(on_cpu if device == "cpu" else on_gpu), WINDOWS, [default, other, eager]) as verification:
            verification.run()
        assert verification.confirmed and len({result.digest for result in verification.results}) == 1

        bind = backend.bind
        backend.bind = lambda node: Faulty(bind(node), *node.storage) if node.name == "attn_out-0" else bind(node)
        found = first_difference(on_cpu, on_gpu, WINDOWS, default, eager, 0)
        found.save(tmp_path / "dump")
        backend.bind = bind
        assert (found.name, found.op, found.n_different, found.first, found.inputs_equal) == ("attn_out-0", "mul_mat", 1, (0, 0), True)
        assert found.culprits == ["attn_out-0, kernels/cuda/mul_mat.py: mul_mat[Q8_0] on cuda:0, in: launch, eager"] and found.max_ulps == 1
        expected, wrong = (Capture.read(tmp_path / "dump" / f"{side}.npz") for side in ("default", "other"))
        for capture in expected, wrong:  # from what the CPU's kernel read, and CUDA's
            made, = recompute(capture, backend)["attn_out-0"]
            reference, = recompute(capture, CPUBackend("reference"))["attn_out-0"]
            assert_bitwise_equal(made, reference, "attn_out-0")
        assert (wrong.results["attn_out-0"][0] != reference).sum() == 1
