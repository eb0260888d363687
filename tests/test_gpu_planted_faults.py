"""Faults that only a GPU has: work in flight, memory that others write, graphs that remember addresses.

Each is caught, and named where there is a node to name."""
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

from cuda_simulator import no_gpu
from ggml_py.backends.cpu import CPUBackend
from ggml_py.backends.cuda import CUDABackend, address
from ggml_py.backends.transfers import Pending, check_status
from ggml_py.backends.cuda_graphs import GraphCache
from ggml_py.kernels.cuda.launch import F32, N, SCALAR_F32, Kernel, compile_ptx
from ggml_py.kernels.cuda.ptx import add, div, f32, i2f, i32, i64, ld, mul, sqrt, st
from planted_faults import caught_by, verify
from tiny_models import write_model

WINDOWS = np.random.default_rng(0).integers(0, 70, (3, 90)).astype(np.int32)
THREADS = 256
SOURCE = sha256(Path(__file__).read_bytes()).hexdigest()[:12]  # compiled kernels are found by their names


def scattered_rms_norm(x, w, out, n_cols, eps):
    """Squares are added up as threads arrive."""
    total = cuda.shared.array(1, f32)
    row, j = i64(cuda.blockIdx.x) * n_cols, i32(cuda.threadIdx.x)
    if j == 0:
        total[0] = f32(0)
    cuda.syncthreads()
    i = j
    while i < n_cols:
        cuda.atomic.add(total, 0, mul(ld(x, row + i), ld(x, row + i)))
        i = i32(i + THREADS)
    cuda.syncthreads()
    r = div(f32(1), sqrt(add(div(total[0], i2f(n_cols)), eps)))
    i = j
    while i < n_cols:
        st(out, row + i, mul(mul(ld(x, row + i), r), ld(w, i)))
        i = i32(i + THREADS)


def unguarded_rms_norm(x, w, out, n_cols, eps):
    """Warps do not wait for each other's partial sums."""
    partials = cuda.shared.array(THREADS, f32)
    row, j = i64(cuda.blockIdx.x) * n_cols, i32(cuda.threadIdx.x)
    ss, i = f32(0), j
    while i < n_cols:
        ss = add(ss, mul(ld(x, row + i), ld(x, row + i)))
        i = i32(i + THREADS)
    partials[j] = ss
    half = THREADS // 2
    while half > 0:
        if j < half:
            partials[j] = add(partials[j], partials[j + half])
        half >>= 1
    r = div(f32(1), sqrt(add(div(partials[0], i2f(n_cols)), eps)))
    i = j
    while i < n_cols:
        st(out, row + i, mul(mul(ld(x, row + i), r), ld(w, i)))
        i = i32(i + THREADS)


KERNELS = {function.__name__: Kernel(function, (F32, F32, F32, N, SCALAR_F32), THREADS, name=f"{function.__name__} {SOURCE}")
           for function in (scattered_rms_norm, unguarded_rms_norm)}


class FaultyNorms(CUDABackend):
    """Every rms_norm is a kernel of KERNELS; models are run without the passes that fuse norms."""

    def __init__(self, name: str):
        super().__init__(0)
        self.faulty = KERNELS[name]

    def bind(self, node):
        if node.op != "rms_norm":
            return super().bind(node)
        x, w, out = (address(tensor) for tensor in (*node.src, node))
        return self.target.launch(self.faulty, node.shape[0], THREADS, (x, w, out, node.shape[1], node.params["eps"]))


class StaleGraphs(GraphCache):
    """Looks at the key alone."""

    def run(self, key, steps):
        entry = self.entries.get(key)
        super().run(key, entry.steps if entry and entry.graph else steps)


class StaleGraphsBackend(CUDABackend):
    def new_graphs(self):
        return StaleGraphs(self)

    def free(self, buffer):
        """What is given back is written over by others, and stays mapped: a stale graph is wrong, not a crash."""
        buffer.fill(0, stream=self.stream)
        self.kept = [*getattr(self, "kept", []), buffer]


class HastyBackend(CUDABackend):
    """Results are copied in a stream that does not wait for the kernels."""

    def __init__(self):
        super().__init__(0)
        self.other = self.target.device.create_stream()

    def read(self, buffer, offset, n_bytes):
        from cuda.bindings import driver
        data = np.empty(n_bytes, np.uint8)
        if n_bytes:
            check_status(driver.cuMemcpyDtoHAsync(data.ctypes.data, int(buffer.handle) + offset, n_bytes, self.other.handle))
        self.other.sync()
        return Pending(data)


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_compile(name):
    ptx = compile_ptx(KERNELS[name], (9, 0))
    assert ("atom" in ptx) == (name == "scattered_rms_norm") and ("bar.sync" in ptx) == (name == "scattered_rms_norm")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    reason = no_gpu()
    if reason:
        pytest.skip(reason)
    return write_model(tmp_path_factory.mktemp("models") / "m.gguf", "llama", ("Q8_0",), n_embd=2048, n_ff=160)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_norms(path, name, monkeypatch):
    """A scatter by atomics; a missing barrier. The definition has another order of additions, so that the other device always sees the first; reruns and
    noise see what comes and goes."""
    from ggml_py import axes
    unfused = axes.Setting
    monkeypatch.setattr(axes, "Setting", lambda *args, **settings: unfused(*args, **{"no_fuse": ("all",), **settings}))
    verification = verify(path, WINDOWS, ["rerun", "noise", "device"], {"cpu": CPUBackend(), "cuda:0": FaultyNorms(name)}, reruns=5)
    assert caught_by(verification) >= {"device"}
    found = verification.bisect(verification.first_mismatch())
    assert found is None or found.op == "rms_norm" and any("rms_norm.py: rms_norm on cuda:0" in culprit for culprit in found.culprits), str(found)


@pytest.mark.gpu
def test_a_stale_graph_address(path):
    verification = verify(path, WINDOWS, ["pieces"], {"cuda:0": StaleGraphsBackend(0)})
    assert "pieces" in caught_by(verification)
    assert next(r for r in verification.results if r.status == "different").setting.growing


@pytest.mark.gpu
def test_a_race_between_a_copy_and_a_host_read(path):
    """Where every node is read at once there may be nothing to see: bisection may say so, or name the node that was read too early."""
    verification = verify(path, WINDOWS, ["rerun", "ubatch", "device"], {"cpu": CPUBackend(), "cuda:0": HastyBackend()})
    assert not verification.confirmed
