"""The floor under token generation: the bytes that a token has to read, over what the device's memory can do at most."""
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..kernels.call import Call, Operand

N_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}  # of a copied buffer: far more than caches hold
N_COPIES, N_RUNS = 8, 5


def copy_GB_s(backend, n_bytes: int | None = None) -> float:
    """1e9 bytes a second of a copy within the backend's memory, read plus write: the fastest of 5 runs of 8 copies of random
    bytes.

    n_bytes: of a copy, 256 MiB on a CPU, whose threads share it, and 1 GiB on a GPU."""
    kind = backend.device.partition(":")[0]
    n_bytes = n_bytes or N_BYTES[kind]
    source, out = backend.upload(np.frombuffer(np.random.default_rng(0).bytes(n_bytes), np.uint8)), backend.empty(n_bytes)
    try:
        copy = {"cpu": copies_on_cpu, "cuda": copies_on_cuda}[kind](backend, source, out, n_bytes)
        copy(1)  # touches the pages, loads the code
        return 2 * n_bytes * N_COPIES / min(seconds(copy, N_COPIES) for _ in range(N_RUNS)) / 1e9
    finally:
        backend.free(source)
        backend.free(out)


def seconds(function, *args) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def copies_on_cpu(backend, source, out, n_bytes: int) -> Callable[[int], None]:
    """A function of n that returns after n copies."""
    n_threads = len(os.sched_getaffinity(0))
    parts = np.array_split(out, n_threads), np.array_split(source, n_threads)

    def copies(n: int) -> None:
        with ThreadPoolExecutor(n_threads) as pool:
            for _ in range(n):
                list(pool.map(np.copyto, *parts))  # numpy lets other threads run meanwhile
    return copies


def copies_on_cuda(backend, source, out, n_bytes: int) -> Callable[[int], None]:
    """The same."""
    from ..kernels.cuda.cpy import cpy
    x, dst = (Operand("u8", (n_bytes,), int(buffer.handle)) for buffer in (source, out))
    launch = cpy(Call("cpy", "copy", backend.target, {"x": x, "dst": dst}))

    def copies(n: int) -> None:
        for _ in range(n):
            launch(backend.stream)
        backend.stream.sync()
    return copies


def weight_bytes_per_token(file) -> float:
    """Bytes of a GGUF file's tensors that a token alone reads: of the embedding a row, where it is not the output head as well;
    of experts those used."""
    arch = file.get("general.architecture", "str")
    n_layer = file.get(f"{arch}.block_count", "u32") - file.get(f"{arch}.nextn_predict_layers", "u32", 0)
    share_used = file.get(f"{arch}.expert_used_count", "u32", 0) / (file.get(f"{arch}.expert_count", "u32", 0) or 1)

    def read(tensor) -> float:
        name = tensor.name.split(".")
        if name[0] == "blk" and int(name[1]) >= n_layer:
            return 0
        if name[0] == "token_embd" and "output.weight" in file.tensors:
            return tensor.n_bytes / tensor.shape[-1]
        return tensor.n_bytes * (share_used if name[-2].endswith("_exps") else 1)
    return sum(map(read, file.tensors.values()))
