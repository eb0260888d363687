"""Timing prepared launches on a GPU: CUDA events around replays of a captured graph, so that no Python time is measured.

Cold: the launches of a round each take another copy of the weights, more than 3 x L2 of them together, so that every byte comes
from memory.
Hot: all take one copy, which stays in L2 if it fits.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import checkout  # noqa: F401
import numpy as np

from ggml_py.backends.base import KernelBackend
from ggml_py.base.storage import bytes_of
from ggml_py.kernels.call import Call, Operand
from ggml_py.ops.compose import OPS
from ggml_py.quant.formats import format_of
from ggml_py.quant.tile import ROWS, Tiling
from weights import random_tiles

REPETITIONS = 11
LEAST_US = 2000        # of a replay: a round is captured as often as it takes, so that the replay's own start does not count
COPY_BYTES = 1 << 30


class Timing(NamedTuple):
    """us of one launch over the repetitions."""
    median: float
    least: float
    most: float


class LaunchClock:
    """Seconds that launches took, as CUDA events around replays tell: a timer for pytest-benchmark. It stands still but for
    `advance`, so a round that calls that once took as long as one launch."""
    __name__ = "cuda_events"  # in the options of a saved benchmark

    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, replay: Callable[[], float]) -> None:
        """replay: as `GPU.replays` gives it."""
        self.seconds += replay() / 1e6


class Copies(NamedTuple):
    """Copies of one buffer, `stride` bytes apart."""
    first: int
    stride: int
    n_copies: int

    @property
    def addresses(self) -> list[int]:
        return [self.first + i * self.stride for i in range(self.n_copies)]


def _ok(result):
    from cuda.bindings import driver
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA: {result[0].name}")
    return result[1] if len(result) == 2 else None


class GPU:
    """One GPU, memory that is freed together, and a stream to measure on."""

    def __init__(self, ordinal: int = 0):
        from cuda.bindings import driver
        from ggml_py.backends.cuda import CUDABackend
        self.driver, self.backend = driver, CUDABackend(ordinal)
        self.target, self.stream = self.backend.target, self.backend.stream
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        self.l2_bytes = _ok(driver.cuDeviceGetAttribute(attribute, driver.CUdevice(ordinal)))
        self.buffers, self.outputs = [], []

    # Memory

    def _keep(self, buffer) -> int:
        self.buffers.append(buffer)
        return int(buffer.handle)

    def upload(self, array: np.ndarray) -> int:
        return self._keep(self.backend.upload(array))

    def empty(self, n_bytes: int) -> int:
        return self._keep(self.backend.empty(n_bytes))

    def output(self, n: int) -> int:
        """float32 [n] of NaN; `check_outputs` expects it full of finite values."""
        address = self.empty(4 * n)
        self.buffers[-1].fill(0xff, stream=self.stream)
        self.outputs.append((self.buffers[-1], n))
        return address

    def filled(self, data: np.ndarray, n_bytes: int, n_copies: int = 1) -> Copies:
        """Copies of n_bytes, each filled with `data` again and again on the device."""
        data, stride = np.ascontiguousarray(data).reshape(-1).view(np.uint8)[:n_bytes], -(-n_bytes // 256) * 256
        address = self.empty(stride * n_copies)
        self.backend.write(self.buffers[-1], 0, data)
        self._repeat(address, data.size, n_bytes)
        self._repeat(address, stride, stride * n_copies)
        return Copies(address, stride, n_copies)

    def _repeat(self, address: int, done: int, n_bytes: int) -> None:
        """Fills n_bytes with what the first `done` of them hold, each time twice as many."""
        while done < n_bytes:
            step = min(done, n_bytes - done)
            _ok(self.driver.cuMemcpyDtoDAsync(address + done, address, step, self.stream.handle))
            done += step

    def run(self, launch: Callable) -> None:
        launch(self.stream)

    def check_outputs(self, name: str) -> None:
        for buffer, n in self.outputs:
            wrong = np.count_nonzero(~np.isfinite(self.backend.read(buffer, 0, 4 * n).result().view(np.float32)))
            if wrong:
                raise RuntimeError(f"{name}: {wrong} of {n} values are not finite or were not written")

    def free(self) -> None:
        self.stream.sync()
        for buffer in self.buffers:
            self.backend.free(buffer)
        self.buffers, self.outputs = [], []

    # Time

    @contextmanager
    def _captured(self, launches):
        driver, handle = self.driver, self.stream.handle
        _ok(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        for launch in launches:
            launch(self.stream)
        graph = _ok(driver.cuStreamEndCapture(handle))
        executable = _ok(driver.cuGraphInstantiate(graph, 0))
        try:
            yield executable
        finally:
            _ok(driver.cuGraphExecDestroy(executable))
            _ok(driver.cuGraphDestroy(graph))

    def _replay_us(self, graph) -> float:
        driver, handle = self.driver, self.stream.handle
        start, end = _ok(driver.cuEventCreate(0)), _ok(driver.cuEventCreate(0))
        _ok(driver.cuEventRecord(start, handle))
        _ok(driver.cuGraphLaunch(graph, handle))
        _ok(driver.cuEventRecord(end, handle))
        _ok(driver.cuEventSynchronize(end))
        us = 1e3 * _ok(driver.cuEventElapsedTime(start, end))
        _ok(driver.cuEventDestroy(start))
        _ok(driver.cuEventDestroy(end))
        return us

    @contextmanager
    def replays(self, launches: list[Callable]) -> Iterator[Callable[[], float]]:
        """A function that replays a graph of the launches and gives the us of one of them; the graph has run before.
        launches: one round of callables of a stream, all equally long."""
        for launch in launches:  # outside a capture, which must not load code
            self.run(launch)
        self.stream.sync()
        with self._captured(launches) as graph:
            round_us = min(self._replay_us(graph) for _ in range(2))
        n_rounds = max(1, -int(-LEAST_US // round_us))
        with self._captured(launches * n_rounds) as graph:
            self._replay_us(graph)
            yield lambda: self._replay_us(graph) / (n_rounds * len(launches))

    def time(self, launches: list[Callable]) -> Timing:
        """launches: as of `replays`."""
        with self.replays(launches) as replay:
            us = np.array([replay() for _ in range(REPETITIONS)])
        return Timing(float(np.median(us)), float(us.min()), float(us.max()))

    def copy_GB_s(self) -> float:
        """Of a device-to-device copy, read plus write: the roof of everything that waits for memory."""
        data = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
        source, target = (Operand("u8", (COPY_BYTES,), address) for address in self.filled(data, COPY_BYTES, 2).addresses)
        us = self.time(launches(self, "cpy", [{"x": source, "dst": target}])).median
        self.free()
        return 2 * COPY_BYTES / us / 1e3


class DryRun:
    """In the place of a GPU where launches are only made, whose kernels `target.load` compiles and loads: all memory is at the
    address 0."""

    def __init__(self, target, l2_bytes: int = 0):
        self.target, self.l2_bytes = target, l2_bytes

    def upload(self, array) -> int:
        return 0

    def empty(self, n_bytes) -> int:
        return 0

    def output(self, n) -> int:
        return 0

    def filled(self, data, n_bytes, n_copies=1) -> Copies:
        return Copies(0, 0, n_copies)

    def run(self, launch) -> None:
        pass


# Launches of ops

def launches(gpu, op: str, rounds: list[dict], plan=None) -> list[Callable]:
    """A launch of an op for each round, made as backends make them. rounds: operands, results and parameters by name; those that
    are optional may be missing. All have one scratch memory. plan: in the place of what the kernel's module would choose."""
    module, made, memory = KernelBackend("cuda").module(op), [], 0
    for values in rounds:
        call = Call(op, op, gpu.target, {**dict.fromkeys(OPS[op].operands), **OPS[op].defaults, **values})
        module.decide(call)
        call.plan = call.plan if plan is None else plan
        scratch = module.scratch(call) if module.scratch else None
        if scratch is not None:
            memory = memory or gpu.empty(bytes_of(*scratch))
            call.scratch = Operand(*scratch, memory)
        made.append(module.op(call))
    return made


def floats(gpu, *shape: int, change: Callable = lambda x: x) -> Operand:
    """f32, normal. change: what becomes of them."""
    row = change(np.random.default_rng(0).standard_normal(1 << 16, dtype=np.float32))
    return Operand("f32", shape, gpu.filled(row, 4 * int(np.prod(shape))).first)


def output(gpu, *shape: int) -> Operand:
    """f32, as of `GPU.output`."""
    return Operand("f32", shape, gpu.output(int(np.prod(shape))))


def matrices(gpu, type_: str, m: int, k: int, cache: str) -> list[Operand]:
    """Weights [m, k] of one tile row of random blocks, again and again; so many copies as a round takes. cache: "cold" or
    "hot"."""
    tiles, fmt = random_tiles(type_, ROWS, k, np.random.default_rng(0)), format_of(type_)
    copies = gpu.filled(tiles, Tiling(fmt, m, k).n_bytes, copies_of(gpu, m * fmt.row_bytes(k), cache))
    return [Operand(type_, (m, k), address) for address in copies.addresses]


def blocks(gpu, n: int, k: int) -> Operand:
    """act [n, k]."""
    return Operand("act", (n, k), gpu.empty(bytes_of("act", (n, k))))


def copies_of(gpu, n_bytes: int, cache: str) -> int:
    """Of a buffer of n_bytes in a round. cache: "cold" or "hot"."""
    return 1 if cache == "hot" else -(-3 * gpu.l2_bytes // n_bytes) + 1
