"""Every op of the op table, saved as `verify --dump` does: read again, it gives what it gave."""
import numpy as np
import pytest

from ggml_py.backends.cpu import CPUBackend
from ggml_py.recording import Capture, kernel_of, recompute
from ggml_py.testing import assert_bitwise_equal
from op_cases import N, SINGLE, capture_of, op_cases, operands_of


@pytest.mark.parametrize("op, type_", op_cases())
def test_saved_and_read(op, type_, tmp_path):
    """What was saved is computed again, also where two operands are one."""
    backend = CPUBackend()
    rows = np.arange(1 if op in SINGLE else N)
    capture = capture_of(op, [operand.rows(rows) for operand in operands_of(op, type_)])
    capture.kernel, capture.device, capture.results = kernel_of(capture.node, backend), backend.device, recompute(capture, backend)
    capture.save(tmp_path / "node.npz")
    found = Capture.read(tmp_path / "node.npz")
    assert (found.kernel, found.device, found.addresses) == (capture.kernel, capture.device, capture.addresses)
    assert [repr(source) for source in found.node.src] == [repr(source) for source in capture.node.src]
    assert [found.node.src.index(source) for source in found.node.src] == [capture.node.src.index(source) for source in capture.node.src]
    again = recompute(found, backend)
    assert again.keys() == found.results.keys() == capture.results.keys()
    for name, arrays in capture.results.items():
        for i, (array, read, made) in enumerate(zip(arrays, found.results[name], again[name], strict=True)):
            assert_bitwise_equal(read, array, f"{op}[{type_}], saved, {name} {i}")
            assert_bitwise_equal(made, array, f"{op}[{type_}], computed again, {name} {i}")
