"""Where graphs run. A backend owns memory and binds nodes to the kernels of its device; all give the same bits.

A backend has: `device`; `empty(n_bytes)` (zeroed) and `upload(array)`, which give a buffer, and `free(buffer)`; `write(buffer, offset, array)`;
`read(buffer, offset, n_bytes)`, which gives a `transfers.Pending`; `copy(buffer, offset, source backend of this class, its buffer, its offset, n_bytes)`;
`versions()`, by name, of what compiles and runs its kernels beside Python's packages; `report()`, lines about its copies for --verbose;
`declines(op, match)`, whether it computes what a pass found (`passes.Match`) faster as it is than by the fused op; `check(node)`, UserError for a node that
it has no kernel for; `scratch(node)`, (dtype, shape) of the memory that the kernel of a node needs beside its results, or None; `bind(node)`, which makes a
step of a node whose operands and results have storage; `run(steps)`;
`late_errors`, the ops whose steps cannot raise an error when they run, `forget_error()`, which queues forgetting what they left so far, and `read_error()`,
which queues reading what they left since and gives a function that waits for it and raises it; `address(tensor)`; `new_graphs()`, which gives what replays
steps (`cuda_graphs.GraphCache`), or None; `close()`.
"""
from ..errors import UserError


def open_backend(device: str = "auto"):
    """The backend of "cpu", "cuda", "cuda:N" or "auto" (the first GPU if there is one); UserError when it is not to be had."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or index and (kind != "cuda" or not index.isdecimal()):
        raise UserError(f"--device: {device!r} is not a device; allowed: auto, cpu, cuda, cuda:N")
    if kind != "cpu":
        from . import cuda
        missing = cuda.unavailable(int(index or 0))
        if missing is None:
            return cuda.CUDABackend(int(index or 0))
        if kind == "cuda":
            raise UserError(f"--device: {device}: {missing}")
    from .cpu import CPUBackend
    return CPUBackend()


def device_of(device: str) -> str:
    """The name of the device that `open_backend` finds: "auto" is "cuda:0" or "cpu"."""
    backend = open_backend(device)
    backend.close()
    return backend.device


def present_devices() -> list[str]:
    """The names of the GPUs that can be used, then "cpu"."""
    from . import cuda
    gpus = []
    while cuda.unavailable(len(gpus)) is None:
        gpus.append(f"cuda:{len(gpus)}")
    return [*gpus, "cpu"]
