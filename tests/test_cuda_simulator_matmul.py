"""quantize, mul_mat, get_rows and take_rows in numba's CUDA simulator: every format at the smallest shape, and the edges."""
from dataclasses import astuple

import numpy as np
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.cuda.mmvq import mmvq_kernel, splits
from ggml_py.kernels.cuda.mul_mat import mmvq_shape, use_mmq
from ggml_py.quant.formats import FORMATS
from matmul_comparisons import SPECIAL, activations, check_extremes, check_get_rows, check_mul_mat, check_quantize, check_take_rows, seeded

WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.planes]


def test_in_the_simulator():
    run_in_simulator(__file__)


@pytest.mark.parametrize("type_, n_rows, n_cols, n, expected", [
    ("Q8_0", 1, 1, 1, (1, 8, 1, (8, 1))), ("Q4_1", 32, 256, 2, (2, 1, 1, (1, 1))), ("Q4_K", 33, 257, 3, (2, 1, 2, (2, 2))), ("Q6_K", 33, 257, 3, (4, 1, 2, (2, 1))),
    ("Q4_1", 576, 1536, 1, (1, 8, 6, (144, 1))), ("Q8_0", 49152, 576, 1, (1, 1, 3, (1536, 1))), ("Q4_K", 14336, 4096, 1, (1, 1, 4, (448, 1))),
    ("Q4_K", 4096, 14336, 1, (1, 1, 14, (128, 1))), ("F16", 4096, 14336, 8, (4, 1, 8, (128, 2))), ("Q1_0", 576, 576, 1, (1, 2, 3, (36, 1)))])
def test_mmvq_shape(type_, n_rows, n_cols, n, expected):
    assert astuple(mmvq_shape(type_, n_rows, n_cols, n, 132)) == expected


@pytest.mark.parametrize("type_, n_rows, n, expected", [
    ("Q4_K", 4096, 44, False), ("Q4_K", 4096, 48, True), ("Q4_1", 576, 128, False), ("Q4_1", 576, 512, True), ("Q8_0", 49152, 4, False),
    ("Q8_0", 49152, 5, True), ("F16", 49152, 512, False)])
def test_use_mmq(type_, n_rows, n, expected):
    assert use_mmq(type_, n_rows, n, 132) == expected


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


@pytest.mark.parametrize("name, n_tokens, split, n_warps", [("Q4_0", 1, 1, 1), ("Q4_0", 2, 1, 3), ("Q4_0", 4, 1, 2)] + [
    (name, 1, split, n_warps) for name, n_warps in (("Q4_0", 2), ("Q5_1", 3), ("Q2_K", 1), ("Q6_K", 2), ("NVFP4", 2), ("Q1_0", 2))
    for split in splits(FORMATS[name])[1:]])
def simulate_any_launch_shape(machine, name, n_tokens, split, n_warps):
    """Three tokens of two or three chunks: the bits do not depend on the shape of the launch."""
    def launch(target, name, words, x, out, n_rows, n_cols, n):
        return target.launch(mmvq_kernel(name, n_tokens, split), (split, -(-n // n_tokens)), 32 * n_warps, (words, x, out, n_rows, n_cols, n))
    check_mul_mat(machine, name, 18, 544 if FORMATS[name].block_size == 32 else 512, 3, launch)


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
