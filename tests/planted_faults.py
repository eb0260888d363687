"""Backends whose kernel of one op is a faulty twin: what `ggml-py verify` must catch, and bisection must name."""
from contextlib import nullcontext

import numpy as np

from ggml_py.axes import settings_of
from ggml_py.backends.cpu import CPUBackend
from ggml_py.gguf_file import GGUFFile
from ggml_py.model import Model
from ggml_py.verify import Verification


class FaultyBackend(CPUBackend):
    """op: whose kernel is twin(kernel), where kernel is what the room has: a kernel, or what makes one of types."""

    def __init__(self, op: str, twin, device: str = "cpu"):
        super().__init__(device=device)
        self.op, self.twin = op, twin

    def kernel(self, op: str):
        kernel = super().kernel(op)
        return self.twin(kernel) if op == self.op else kernel


def after(change):
    """A twin of a kernel that is called with its operands: change(*operands) behind it."""
    def twin(kernel):
        def faulty(*operands):
            kernel(*operands)
            change(*operands)
        return faulty
    return twin


def made(twin):
    """The same for kernels that are made of types."""
    return lambda make: lambda *types: twin(make(*types))


def verify(path, windows, axes, op=None, twin=None, devices=("cpu",), **settings) -> Verification:
    """A verification that has run, whose models are open; the last device is the one with the fault. twin None: no fault."""
    backends = {device: CPUBackend(device=device) for device in devices}
    if twin:
        backends[devices[-1]] = FaultyBackend(op, twin, devices[-1])
    models = {device: Model(GGUFFile.open(path), backend) for device, backend in backends.items()}
    verification = Verification(lambda device: nullcontext(models[device]), windows, settings_of(axes, list(devices), windows.shape, **settings))
    verification.run()
    return verification


def caught_by(verification: Verification) -> set[str]:
    """The axes of the settings that differ."""
    return {result.setting.axis for result in verification.results if result.status == "different"}


def reversed_sum128(squares: np.ndarray) -> np.float32:
    """A sum of squares one after the other from the end, in float32."""
    total = np.float32(0)
    for value in squares[::-1]:
        total = np.float32(total + np.float32(value * value))
    return total
