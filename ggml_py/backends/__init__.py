"""Where graphs run. A backend (`base.Backend`) owns memory and binds nodes to the kernels of its device;
all give the same bits."""
from contextlib import closing

from ..base.errors import ParameterError
from ..base.placement import device_name
from .base import Backend


def open_backend(device: str = "auto", parameter: str = "device", expect: bool = False) -> Backend:
    """The backend of "cpu", "cuda", "cuda:N" or "auto" (the first GPU if there is one); ParameterError when there is none, of the
    parameter that names the device. "cpu:N" is the same CPU with memory of its own. expect: a model will be put there, which is
    better known before a GPU is opened (`Backend.expect`)."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind == "auto" or not index.isdecimal())):
        raise ParameterError(parameter, f"{device!r} is not a device; allowed: auto, cpu, cpu:N, cuda, cuda:N")
    if kind != "cpu":
        from . import cuda
        missing = cuda.unavailable(int(index or 0))
        if missing is None:
            return cuda.CUDABackend(int(index or 0), expect)
        if kind == "cuda":
            raise ParameterError(parameter, f"{device}: {missing}")
    from .cpu import CPUBackend
    return CPUBackend(device=device_name("cpu", int(index or 0)))


def device_of(device: str) -> str:
    """The name of the device that `open_backend` finds: "auto" is "cuda:0" or "cpu", "cpu:0" is "cpu". Another one's is its own,
    found or not."""
    if device not in ("auto", "cuda"):
        kind, _, index = device.partition(":")
        return device_name(kind, int(index)) if index.isdecimal() else device
    backend = open_backend(device)
    backend.close()
    return backend.device


def present_devices() -> list[str]:
    """The names of the GPUs that can be used, then "cpu"."""
    from . import cuda
    gpus: list[str] = []
    while cuda.unavailable(len(gpus)) is None:
        gpus.append(f"cuda:{len(gpus)}")
    return [*gpus, "cpu"]


def described_devices() -> list[str]:
    """A line for each: its name, the hardware, its memory."""
    lines = []
    for device in present_devices():
        with closing(open_backend(device)) as backend:
            lines.append(f"{device}: {backend.name} ({backend.memory_bytes() >> 20} MiB, {backend.free_bytes() >> 20} MiB free)")
    return lines
