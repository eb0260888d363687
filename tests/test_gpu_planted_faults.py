"""Faults that only a GPU has: work in flight, memory that others write, graphs that remember addresses.

Each is caught, and named where there is a node to name. That twins are named, the simulator shows as well (test_cuda_simulator_verify.py)."""
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Callable

import numpy as np
import pytest
from numba import cuda

from cuda_simulator import no_gpu
from ggml_py.backends.cpu import CPUBackend
from ggml_py.backends.cuda import CUDABackend, address
from ggml_py.backends.transfers import Pending, check_status
from ggml_py.backends.cuda_graphs import GraphCache
from ggml_py.kernels.cuda.launch import F32, I32, N, SCALAR_F32, Kernel, compile_ptx
from ggml_py.kernels.cuda.ptx import add, div, f32, i2f, i32, i64, ld, mul, sqrt, st
from ggml_py.ops import OPS
from planted_faults import caught_by, verify, write_tied_model
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


def racing_top_k(x, ids, n_cols, k):
    """A warp a column, from the last on, counts the larger values; of equal ones each takes the next place as it arrives."""
    arrived = cuda.shared.array(32, i32)
    row, column = i64(cuda.blockIdx.x), i32(n_cols - 1 - cuda.threadIdx.x // 32)
    if cuda.threadIdx.x < n_cols:
        arrived[cuda.threadIdx.x] = i32(0)
    cuda.syncthreads()
    if cuda.threadIdx.x % 32 == 0:
        place, other = i32(0), i32(0)
        while other < n_cols:
            place = i32(place + (1 if ld(x, row * n_cols + other) > ld(x, row * n_cols + column) else 0))
            other = i32(other + 1)
        place = i32(place + cuda.atomic.add(arrived, place, i32(1)))
        if place < k:
            st(ids, row * k + place, column)


def scattered_weighted_sum(x, w, out, n_used, n_cols):
    """A warp an expert adds its output as it arrives."""
    total = cuda.shared.array(32, f32)
    token, lane, rank = i64(cuda.blockIdx.x), i32(cuda.threadIdx.x % 32), i32(cuda.threadIdx.x // 32)
    column = i32(cuda.blockIdx.y * 32 + lane)
    if rank == 0:
        total[lane] = f32(0)
    cuda.syncthreads()
    if column < n_cols:
        row = token * n_used + (n_used - 1 - rank)
        cuda.atomic.add(total, lane, mul(ld(x, row * n_cols + column), ld(w, row)))
    cuda.syncthreads()
    if rank == 0 and column < n_cols:
        st(out, token * n_cols + column, total[lane])


@dataclass(frozen=True)
class Twin:
    """Of the kernel of an op. launch: (target, kernel, node, *addresses of operands and of the result) -> launch."""
    op: str
    kernel: Kernel
    launch: Callable


def launch_norm(target, kernel, node, x, w, out):
    return target.launch(kernel, node.shape[0], THREADS, (x, w, out, node.shape[1], node.params["eps"]))


def launch_top_k(target, kernel, node, x, out):
    n, n_cols = node.src[0].shape
    return target.launch(kernel, n, 32 * n_cols, (x, out, n_cols, node.shape[1]))


def launch_weighted_sum(target, kernel, node, x, w, out):
    (n, n_used), n_cols = node.src[1].shape, node.shape[1]
    return target.launch(kernel, (n, -(-n_cols // 32)), 32 * n_used, (x, w, out, n_used, n_cols))


def twin(op, function, parameters, launch) -> Twin:
    return Twin(op, Kernel(function, parameters, 1024, name=f"{function.__name__} {SOURCE}"), launch)


NORMS = {function.__name__: twin("rms_norm", function, (F32, F32, F32, N, SCALAR_F32), launch_norm) for function in (scattered_rms_norm, unguarded_rms_norm)}
OF_EXPERTS = {"racing_top_k": twin("top_k", racing_top_k, (F32, I32, N, N), launch_top_k),
              "scattered_weighted_sum": twin("weighted_sum", scattered_weighted_sum, (F32, F32, F32, N, N), launch_weighted_sum)}
TWINS = NORMS | OF_EXPERTS


def planted(backend, twin: Twin):
    """The backend, on which every node of an op runs the twin; models are run without the passes that fuse it."""
    bind = backend.bind
    backend.bind = lambda node: bind(node) if node.op != twin.op else twin.launch(backend.target, twin.kernel, node, *map(address, (*node.src, node)))
    return backend


def check_named(found, twin: Twin, always: bool):
    """The twin's op is named. always: the twin is to blame, too, and it alone."""
    assert found is not None and found.op == twin.op, str(found)
    culprits = {f"{found.name}, kernels/cuda/{OPS[twin.op].module}.py: {twin.op} on cuda:0"}
    named = {culprit.split(", in: ")[0] for culprit in found.culprits}
    assert named == culprits and found.inputs_equal if always else named <= culprits, str(found)


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


def check_stale(found):
    """What is replayed writes where the arena was, each time the same: the first node of the first step that is replayed in vain is named, and it alone."""
    assert found is not None and (found.op, found.name) == ("get_rows", "inp_embd") and found.inputs_equal, str(found)
    culprit, = found.culprits
    assert culprit.startswith("inp_embd, kernels/cuda/get_rows.py: get_rows[Q8_0] on cuda:0, in: pieces"), str(found)


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
            check_status(driver.cuMemcpyDtoHAsync(data.ctypes.data, int(buffer.handle) + offset, n_bytes, self.other.handle))
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

    Whichever device is the default one, the node is an op of the twin: all other nodes are right. Where it is the CPU, what the twin gave as it was compared
    is there to be looked at, and it is to blame. Where it is the GPU, the twin runs once more for that: then it may give what is defined, by chance, or
    have been given other inputs by a twin before it. So there it is only certain that nothing else is to blame."""
    from ggml_py import axes
    unfused = axes.Setting
    monkeypatch.setattr(axes, "Setting", lambda *args, **settings: unfused(*args, **{"no_fuse": ("all",), **settings}))
    backends = {"cpu": CPUBackend(), "cuda:0": planted(CUDABackend(0), twin)}
    verification = verify(path, WINDOWS, ["rerun", "noise", "device"], {device: backends[device] for device in sorted(backends, key=first.__ne__)}, reruns=5)
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
    """Where every node is read at once there may be nothing to see: bisection says so, or names the node that was read too early. Which one that is, and
    whether it was read too early again as it was looked at, is chance; that nothing of the CPU is to blame is not."""
    verification = verify(path, WINDOWS, ["rerun", "ubatch", "device"], {"cpu": CPUBackend(), "cuda:0": HastyBackend()})
    result = verification.first_mismatch()
    assert result is not None and result.setting.device == "cuda:0", verification.verdict()
    found = verification.bisect(result)
    assert found is None or all(" on cuda:0, in: " in culprit for culprit in found.culprits), str(found)
