"""quantize, mul_mat, get_rows and take_rows in numba's CUDA simulator: every format at the smallest shape, and the edges."""
import numpy as np
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.cuda.mul_mat import launch_shape, mul_mat_kernel
from ggml_py.quant.formats import FORMATS
from matmul_comparisons import SPECIAL, activations, check_extremes, check_get_rows, check_mul_mat, check_quantize, check_take_rows, seeded

WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.planes]


def test_in_the_simulator():
    run_in_simulator(__file__)


@pytest.mark.parametrize("n_rows, n_cols, n, expected", [
    (1, 1, 1, (1, 1, (1, 1))), (32, 256, 2, (2, 1, (1, 1))), (33, 257, 3, (4, 2, (2, 1))), (576, 1536, 512, (8, 6, (18, 64))),
    (49152, 576, 1, (1, 3, (1536, 1))), (4096, 2304, 9, (8, 5, (128, 2))), (4096, 14336, 8, (8, 8, (128, 1)))])
def test_launch_shape(n_rows, n_cols, n, expected):
    assert launch_shape(n_rows, n_cols, n) == expected


@pytest.fixture
def machine():
    return SimulatedMachine()


def partial_columns(name):
    """Two chunks, the second one partial where the format's blocks allow it."""
    block = FORMATS[name].block_size
    return 512 if block == 256 else 256 + max(block, 32 if block > 1 else 21)


@pytest.mark.parametrize("n, k", [(1, 1), (2, 257), (1, 512)])
def simulate_quantize(machine, n, k):
    check_quantize(machine, activations(n, k, seeded(f"quantize {n} {k}")), f"quantize[n={n}, k={k}]")


@pytest.mark.parametrize("value", SPECIAL)
def simulate_quantize_special(machine, value):
    x = np.zeros((1, 300), np.float32)
    x[0, 7], x[0, 255], x[0, 256:] = value, value / 3, np.linspace(-1, 1, 44)
    check_quantize(machine, x, f"quantize[{value}]")


@pytest.mark.parametrize("name", WEIGHTS)
def simulate_mul_mat(machine, name):
    check_mul_mat(machine, name, 33, partial_columns(name), 1)


@pytest.mark.parametrize("name, n_rows, n_cols, n", [
    ("Q4_1", 31, 288, 2),     # sub-blocks of 32, groups of 32, minima
    ("Q2_K", 1, 256, 3),      # sub-blocks of 16 in a group of 256, minima
    ("Q6_K", 32, 512, 3),     # sums of 64 bits
    ("NVFP4", 5, 320, 9),     # groups of 16; two groups of tokens
    ("Q8_0", 3, 2336, 1),     # ten chunks in two rounds of five warps
    ("F16", 3, 2310, 3), ("F32", 33, 7, 5)])
def simulate_mul_mat_edges(machine, name, n_rows, n_cols, n):
    check_mul_mat(machine, name, n_rows, n_cols, n)


@pytest.mark.parametrize("n_tokens, n_warps", [(1, 1), (2, 3), (4, 2)])
def simulate_any_launch_shape(machine, n_tokens, n_warps):
    """Three tokens of three chunks: the bits do not depend on the shape of the launch."""
    def launch(target, name, words, x, out, n_rows, n_cols, n):
        return target.launch(mul_mat_kernel(name, n_tokens), (1, -(-n // n_tokens)), 32 * n_warps, (words, x, out, n_rows, n_cols, n))
    check_mul_mat(machine, "Q4_0", 2, 544, 3, launch)


@pytest.mark.parametrize("value", [np.inf, np.nan, 0, 1e-35])
def simulate_mul_mat_special(machine, value):
    """A chunk of zeros, of too small values, or with d = NaN."""
    x = activations(1, 320, seeded("special"))
    x[0, :256] = 0
    x[0, 3] = value
    check_mul_mat(machine, "Q5_1", 2, 320, 1, x=x)


@pytest.mark.parametrize("name, fill, scales", [
    ("Q6_K", 0, 0x80), ("Q4_K", 0xff, 0xff), ("IQ4_XS", 0, 0), ("IQ3_S", 0xff, 0xff), ("Q8_0", 0x80, 0)])
def simulate_mul_mat_extremes(machine, name, fill, scales):
    check_extremes(machine, name, fill, scales)


@pytest.mark.parametrize("name", WEIGHTS)
def simulate_get_rows(machine, name):
    check_get_rows(machine, name, 34, partial_columns(name), [33])


def simulate_get_rows_in_any_order(machine):
    check_get_rows(machine, "Q4_0", 40, 1056, [39, 0, 31, 32, 0])


@pytest.mark.parametrize("n_cols, ids", [(1, [0]), (129, [4, 4, 0])])
def simulate_take_rows(machine, n_cols, ids):
    check_take_rows(machine, 5, n_cols, ids)
