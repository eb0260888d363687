"""Faults that only a GPU has: work in flight, memory that others write, graphs that remember addresses.

Each is caught, and named where there is a node to name. That twins are named, the simulator shows as well
(test_simulated_faults.py)."""
import numpy as np
import pytest

from cuda_simulator import no_gpu
from ggml_py.backends.cpu import CPUBackend
from ggml_py.backends.cuda import CUDABackend
from ggml_py.backends.cuda_driver import checked
from ggml_py.backends.transfers import Pending
from ggml_py.kernels.cuda.launch import compile_ptx
from gpu_faults import NORMS, OF_EXPERTS, StaleGraphs, TWINS, Twin, check_named, check_stale, planted
from planted_faults import caught_by, verify, write_tied_model
from tiny_models import write_model

WINDOWS = np.random.default_rng(0).integers(0, 70, (3, 90)).astype(np.int32)


class StaleGraphsBackend(CUDABackend):
    def new_graphs(self):
        return StaleGraphs(self)

    def free(self, buffer):
        """What is given back is written over by others, and stays mapped: a stale graph is wrong, not a crash."""
        buffer.fill(0, stream=self.stream)
        self.kept = [*getattr(self, "kept", []), buffer]


class HastyBackend(CUDABackend):
    """Results are copied in a stream that does not wait for the kernels. What they read is there."""

    def __init__(self):
        super().__init__(0)
        self.other = self.target.device.create_stream()

    def write(self, buffer, offset, data):
        super().write(buffer, offset, data)
        self.stream.sync()

    def read(self, buffer, offset, n_bytes):
        from cuda.bindings import driver
        data = np.empty(n_bytes, np.uint8)
        if n_bytes:
            checked(driver.cuMemcpyDtoHAsync(data.ctypes.data, int(buffer.handle) + offset, n_bytes, self.other.handle))
        self.other.sync()
        return Pending(data)


@pytest.mark.parametrize("name", TWINS)
def test_the_kernels_compile(name):
    ptx = compile_ptx(TWINS[name].kernel, (9, 0))
    assert ("atom" in ptx) == ("bar.sync" in ptx) == (name != "unguarded_rms_norm")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    reason = no_gpu()
    if reason:
        pytest.skip(reason)
    return write_model(tmp_path_factory.mktemp("models") / "m.gguf", "llama", ("Q8_0",), n_embd=2048, n_ff=160)


def check_twin(path, twin: Twin, first: str, monkeypatch):
    """The definition has another order, so that the other device always sees it; reruns and noise see what comes and goes.

    Whichever device is the default one, the node is an op of the twin: all other nodes are right. Where it is the CPU, what the
    twin gave as it was compared is there to be looked at, and it is to blame. Where it is the GPU, the twin runs once more for
    that: then it may give what is defined, by chance, or have been given other inputs by a twin before it. So there it is only
    certain that nothing else is to blame."""
    from ggml_py.check import axes
    unfused = axes.Setting
    monkeypatch.setattr(axes, "Setting", lambda *args, **settings: unfused(*args, **{"no_fuse": ("all",), **settings}))
    backends = {"cpu": CPUBackend(), "cuda:0": planted(CUDABackend(0), twin)}
    verification = verify(path, WINDOWS, ["rerun", "noise", "device"],
                          {device: backends[device] for device in sorted(backends, key=first.__ne__)}, reruns=5)
    result, = [result for result in verification.results if result.setting.axis == "device"]
    assert verification.results[0].setting.device == first and result.status == "different"
    check_named(verification.bisect(result), twin, always=first == "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["cpu", "cuda:0"])
@pytest.mark.parametrize("name", NORMS)
def test_norms(path, name, first, monkeypatch):
    """A scatter by atomics; a missing barrier."""
    check_twin(path, NORMS[name], first, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["cpu", "cuda:0"])
@pytest.mark.parametrize("name", OF_EXPERTS)
def test_experts(name, first, monkeypatch, tmp_path):
    """A top-k with unstable ties; an expert sum in arrival order."""
    reason = no_gpu()
    if reason:
        pytest.skip(reason)
    check_twin(write_tied_model(tmp_path / "m.gguf"), OF_EXPERTS[name], first, monkeypatch)


@pytest.mark.gpu
def test_a_stale_graph_address(path):
    verification = verify(path, WINDOWS, ["pieces"], {"cuda:0": StaleGraphsBackend(0)})
    assert "pieces" in caught_by(verification)
    result = verification.first_mismatch()
    assert result.setting.growing
    check_stale(verification.bisect(result))


@pytest.mark.gpu
def test_a_race_between_a_copy_and_a_host_read(path):
    """Where every node is read at once there may be nothing to see: bisection says so, or names the node that was read too early.
    Which one that is, and whether it was read too early again as it was looked at, is chance; that nothing of the CPU is to blame
    is not."""
    verification = verify(path, WINDOWS, ["rerun", "ubatch", "device"], {"cpu": CPUBackend(), "cuda:0": HastyBackend()})
    result = verification.first_mismatch()
    assert result is not None and result.setting.device == "cuda:0", verification.verdict()
    found = verification.bisect(result)
    assert found is None or all(" on cuda:0, in: " in culprit for culprit in found.culprits), str(found)
