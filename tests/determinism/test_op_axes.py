"""Every op of the op table, for every type of the format table that it takes: the definition's bits on every axis that an op has.

On a GPU the same cases run there as well, in full and beside other work."""
import numpy as np
import pytest

from cuda_simulator import no_gpu
from ggml_py.kernels import threads
from ggml_py.backends import open_backend
from ggml_py.backends.base import KernelBackend
from ggml_py.backends.cpu import CPUBackend
from ggml_py.ops.table import OPS
from ggml_py.testing import assert_bitwise_equal
from op_cases import CASES, N, OF_THE_CPU, SINGLE, WEIGHTS, WHOLE, compute_rows, op_cases, op_of, operands_of

ON_GPU = [case for case in CASES if case not in OF_THE_CPU and KernelBackend("cuda").has_kernel(op_of(case))]


def test_every_op_has_a_case():
    cases = set(map(op_of, CASES))
    assert cases == set(OPS), f"tests/helpers/op_cases.py and the op table differ in {', '.join(sorted(cases ^ set(OPS)))}"
    assert {type_ for op, type_ in op_cases() if op == "mul_mat"} == set(WEIGHTS) and len(WEIGHTS) > 20


def check(op, type_, backend, expected, name, parts):
    found = compute_rows(op, operands_of(op, type_), backend, parts)
    assert found.keys() == expected.keys()
    for tensor, arrays in found.items():
        for i, (a, b) in enumerate(zip(arrays, expected[tensor], strict=True)):
            assert_bitwise_equal(a, b, f"{op}[{type_}] on {name}, {tensor} {i}")


def cut(n: int, order=None) -> list[np.ndarray]:
    """The rows in parts of n."""
    rows = np.arange(N) if order is None else order
    return [rows[i:i + n] for i in range(0, N, n)]


def most(op) -> int:
    """Rows that it takes at once."""
    return 1 if op in SINGLE else N


def definition(op, type_):
    return compute_rows(op, operands_of(op, type_), CPUBackend("reference"), cut(most(op)))


def axes(op, type_, backend, name):
    expected = definition(op, type_)
    for _ in range(2):
        check(op, type_, backend, expected, f"{name}, all rows", cut(most(op)))
    if op in WHOLE:
        return
    for n in 1, 7, 32:
        if n < most(op):
            check(op, type_, backend, expected, f"{name}, rows by {n}", cut(n))
    check(op, type_, backend, expected, f"{name}, in another order",
          cut(min(10, most(op)), np.random.default_rng(3).permutation(N)))


@pytest.mark.parametrize("op, type_", op_cases())
def test_on_the_cpu(op, type_):
    axes(op, type_, CPUBackend(), "cpu")
    before, expected = threads.get_num_threads(), definition(op, type_)
    try:
        threads.set_num_threads(1)
        check(op, type_, CPUBackend(), expected, "cpu, 1 thread", cut(most(op)))
    finally:
        threads.set_num_threads(before)


@pytest.fixture(scope="module")
def gpu():
    reason = no_gpu()
    if reason:
        pytest.skip(reason)
    backend = open_backend("cuda:0")
    yield backend
    backend.close()


@pytest.mark.gpu
@pytest.mark.parametrize("op, type_", [case for case in op_cases() if case[0] in ON_GPU])
def test_on_a_gpu(gpu, op, type_):
    axes(op, type_, gpu, "cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("op", ON_GPU)
def test_beside_other_work(gpu, op):
    from ggml_py.check.noise import Noise
    with Noise("cuda:0"):
        for _ in range(5):
            axes(op, CASES[op][0][0], gpu, "cuda:0, busy")


def test_the_comparison_can_fail():
    class Off(CPUBackend):
        def step(self, call):
            step, out = super().step(call), call.out.data

            def faulty():
                step()
                if len(out) == 7:
                    out[3, 5] = np.nextafter(out[3, 5], np.float32(9))
            return faulty
    with pytest.raises(AssertionError, match=r"^add\[\] on off, rows by 7, out 0: 5 of 20128 differ, first at \(3, 5\): 0x"):
        axes("add", "", Off(), "off")
