"""Faults that only a GPU has, for a GPU and for the simulator: kernels that race, graphs that remember addresses."""
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from collections.abc import Callable

from numba import cuda

from ggml_py.backends.cuda_graphs import GraphCache
from ggml_py.kernels.cuda.launch import F32, I32, N, SCALAR_F32, Kernel
from ggml_py.kernels.cuda.ptx import add, div, f32, i2f, i32, i64, ld, mul, sqrt, st
from ggml_py.ops.table import OPS

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
    """Of the kernel of an op. launch: (kernel, call) -> launch."""
    op: str
    kernel: Kernel
    launch: Callable


def launch_norm(kernel, call):
    return call.device.launch(kernel, call.x.n_rows, THREADS, (call.x.data, call.w.data, call.out.data, call.x.n_cols, call.eps))


def launch_top_k(kernel, call):
    n, n_cols = call.x.shape
    return call.device.launch(kernel, n, 32 * n_cols, (call.x.data, call.ids.data, n_cols, call.k))


def launch_weighted_sum(kernel, call):
    (n, n_used), n_cols = call.w.shape, call.out.n_cols
    args = call.x.data, call.w.data, call.out.data, n_used, n_cols
    return call.device.launch(kernel, (n, -(-n_cols // 32)), 32 * n_used, args)


def twin(op, function, parameters, launch) -> Twin:
    return Twin(op, Kernel(function, parameters, 1024, name=f"{function.__name__} {SOURCE}"), launch)


NORMS = {function.__name__: twin("rms_norm", function, (F32, F32, F32, N, SCALAR_F32), launch_norm)
         for function in (scattered_rms_norm, unguarded_rms_norm)}
OF_EXPERTS = {"racing_top_k": twin("top_k", racing_top_k, (F32, I32, N, N), launch_top_k),
              "scattered_weighted_sum": twin("weighted_sum", scattered_weighted_sum, (F32, F32, F32, N, N), launch_weighted_sum)}
TWINS = NORMS | OF_EXPERTS


def planted(backend, twin: Twin):
    """The backend, on which every node of an op runs the twin; models are run without the passes that fuse it."""
    step = backend.step
    backend.step = lambda call: twin.launch(twin.kernel, call) if call.op == twin.op else step(call)
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


def check_stale(found):
    """What is replayed writes where the arena was, each time the same: the first node of the first step that is replayed in vain
    is named, and it alone."""
    assert found is not None and (found.op, found.name) == ("get_rows", "inp_embd") and found.inputs_equal, str(found)
    culprit, = found.culprits
    assert culprit.startswith("inp_embd, kernels/cuda/get_rows.py: get_rows[Q8_0] on cuda:0, in: pieces"), str(found)


