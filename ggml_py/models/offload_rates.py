"""From how many rows on the weights of a product are brought from the host to a GPU: as soon as the CPU would compute for
longer than they take to come. Both are measured, once a machine, number of threads and
type, and kept beside the compiled kernels."""
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from ..backends.base import Backend
from ..base.placement import HOST, Placement
from ..base.storage import n_bytes
from ..kernels.compile import cache_folder
from ..kernels.disk_cache import read_entry, write_entry
from ..kernels.threads import get_num_threads
from ..ops.node import Tensor
from ..quant import tile
from ..quant.activation import quantize_activations
from ..quant.formats import CHUNK, FORMATS, format_of

ROWS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64  # of activations that are tried
N_BYTES, N_COLUMNS = 64 << 20, 4096              # of the matrix: more than caches hold, about
N_RUNS = 10                                      # of which the fastest counts: the first ones wait for threads to wake
N_TIMES = 3                                      # that the CPU must be slower: it may have been somebody else's for a while


def with_measured_rows(placement: Placement, backends: Mapping[str, Backend], weights: Collection[Tensor]) -> Placement:
    """The same, with the rows of the type that most of the matrices on the host have; as it is where the rows were asked for,
    nothing is streamed, or the device is no GPU."""
    offload = placement.offload
    if offload is None or offload.n_rows is not None or not backends[offload.device].asynchronous:
        return placement
    types: Counter[str] = Counter()
    for weight in weights:
        if weight.device == HOST and weight.dtype in FORMATS:
            types[weight.dtype] += n_bytes(weight)
    if not types:
        return placement
    dtype, device = types.most_common(1)[0][0], backends[offload.device]
    return replace(placement, offload=replace(offload, n_rows=rows_that_pay(dtype, backends[HOST], device)))


def rows_that_pay(dtype: str, host: Backend, device: Backend) -> int:
    """The least of `ROWS` for which it pays to bring weights of this type to the device; the last where none does."""
    key = f"rows {dtype}, {host.name}, {get_num_threads()} threads, {device.name}"
    path = cache_folder() / f"offload.{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    kept = read_entry(path, key)
    found = None if kept is None else int(bytes(kept))
    if found is None:
        row_bytes = N_COLUMNS // CHUNK * tile.tile_bytes(format_of(dtype)) // tile.ROWS
        n_rows = N_BYTES // row_bytes // tile.ROWS * tile.ROWS
        with ExitStack() as to_free:
            weights, buffer = host.empty(n_rows * row_bytes), device.empty(n_rows * row_bytes)
            to_free.callback(host.free, weights)
            to_free.callback(device.free, buffer)
            weights[:] = 1  # pages of its own
            device.lock_pages(weights)

            def bring() -> None:
                device.fetch(buffer, 0, host, weights, 0, weights.nbytes)()
                device.read(buffer, 0, 4).result()
            found = first_slower(computing(dtype, weights, n_rows), seconds(bring))
        write_entry(path, key, str(found).encode())
    return found


def first_slower(seconds_of: Callable[[int], float], limit: float) -> int:
    """seconds_of: rows -> seconds that the CPU takes for them."""
    return next((n for n in ROWS if all(seconds_of(n) >= limit for _ in range(N_TIMES))), ROWS[-1])


def computing(dtype: str, weights: np.ndarray, n_rows: int) -> Callable[[int], float]:
    """A function of n: the seconds that the CPU takes for a product of the weights with n rows of activations."""
    from ..kernels.cpu.mul_mat import mul_mat_arrays
    kernel, words = mul_mat_arrays(dtype), weights.view(np.uint32)

    def seconds_of(n: int) -> float:
        x = np.ones((n, N_COLUMNS), np.float32)
        operands = quantize_activations(x) if format_of(dtype).is_quantized else (x,)
        out = np.empty((n, n_rows), np.float32)
        return seconds(lambda: kernel(words, *operands, out))
    return seconds_of


def seconds(function: Callable[[], object]) -> float:
    function()  # compiles, and touches the memory

    def once() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    return min(once() for _ in range(N_RUNS))
