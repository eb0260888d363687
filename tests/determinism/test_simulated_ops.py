"""The ops of the op table that take no weights and no caches, in the simulator: the definition's bits for a few rows."""
import numpy as np
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from op_cases import CASES, N, OF_THE_CPU, PLAIN, op_of, operands_of
from op_runs import check_op

ROWS = np.array([0, 1, N - 1])  # of random values, of zeros
LEFT_OUT = {"argmax"} | OF_THE_CPU  # 64 blocks of 256 threads a row take minutes


def test_in_the_simulator():
    run_in_simulator(__file__)


@pytest.mark.parametrize("case", [case for case, (types, _, _) in CASES.items() if types is PLAIN and case not in LEFT_OUT])
def simulate_op(case):
    check_op(SimulatedMachine(), case, op_of(case), *(operand.rows(ROWS) for operand in operands_of(case, "")), **CASES[case][2])
