"""The ops of the op table that take no weights and no caches, as the CUDA backend binds them, in the simulator: the definition's bits for a few rows."""
import numpy as np
import pytest

from cuda_simulator import run_in_simulator
from ggml_py.backends.cpu import CPUBackend
from ggml_py.testing import assert_bitwise_equal
from op_cases import CASES, N, PLAIN, compute, operands_of

ROWS = np.array([0, 1, N - 1])  # of random values, of zeros
ELSEWHERE = {"cpy", "argmax"}   # copies are the program's; 64 blocks of 256 threads a row take minutes


def test_in_the_simulator():
    run_in_simulator(__file__)


@pytest.mark.parametrize("op", [op for op, (types, _, _) in CASES.items() if types is PLAIN and op not in ELSEWHERE])
def simulate_op(op):
    from test_cuda_simulator_graphs import simulated_backend
    operands = [operand.rows(ROWS) for operand in operands_of(op, "")]
    expected, found = (compute(op, operands, backend) for backend in (CPUBackend("reference"), simulated_backend()))
    assert found.keys() == expected.keys()
    for name, arrays in found.items():
        for i, (a, b) in enumerate(zip(arrays, expected[name], strict=True)):
            assert_bitwise_equal(a, b, f"{op}, {name} {i}")
