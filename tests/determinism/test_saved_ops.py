"""Every op of the op table, saved as `verify --dump` does: read again, it gives what it gave."""
import numpy as np
import pytest

from ggml_py.backends.cpu import CPUBackend
from ggml_py.check.recording import Capture, recompute
from ggml_py.testing import assert_bitwise_equal
from op_cases import N, SINGLE, capture_of, op_cases, operands_of


@pytest.mark.parametrize("op, type_", op_cases())
def test_saved_and_read(op, type_, tmp_path):
    """What was saved is computed again, also where two operands are one."""
    backend = CPUBackend()
    rows = np.arange(1 if op in SINGLE else N)
    capture = capture_of(op, [operand.rows(rows) for operand in operands_of(op, type_)], backend)
    capture.save(tmp_path / "node.npz")
    found = Capture.read(tmp_path / "node.npz")
    for what in "name", "op", "params", "kernel", "device":
        assert getattr(found, what) == getattr(capture, what)
    for a, b in zip([*found.operands, *found.results.values()], [*capture.operands, *capture.results.values()], strict=True):
        assert (a.name, a.dtype, a.shape) == (b.name, b.dtype, b.shape)
        for i, (read, saved) in enumerate(zip(a.arrays, b.arrays, strict=True)):
            assert_bitwise_equal(read, saved, f"{op}[{type_}], saved, {a.name} {i}")
    first_places = [[each.operands.index(operand) for operand in each.operands] for each in (found, capture)]
    assert first_places[0] == first_places[1]
    again = recompute(found, backend)
    assert again.keys() == found.results.keys() == capture.results.keys()
    for name, arrays in again.items():
        for i, (made, saved) in enumerate(zip(arrays, capture.results[name].arrays, strict=True)):
            assert_bitwise_equal(made, saved, f"{op}[{type_}], computed again, {name} {i}")
