"""mmq in numba's CUDA simulator: one format of each form, at a block of one warp."""
import numpy as np
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.cuda.mmq import LEAST_LIMIT, SHARED_LIMIT, TILES, Tile, form, layout, mmq, tile_shape
from ggml_py.quant.formats import FORMATS
from matmul_comparisons import activations, check_extremes, check_mul_mat, seeded

WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.is_quantized]
H200 = SHARED_LIMIT[9, 0], 132


def test_in_the_simulator():
    run_in_simulator(__file__)


def one_warp(target, name, *args):
    return mmq(target, name, *args, tile=Tile(1, 1))


@pytest.mark.parametrize("type_, n_rows, n, expected", [
    ("Q4_0", 4096, 512, (4, 4)), ("Q8_0", 4096, 2048, (4, 4)), ("Q4_K", 4096, 512, (4, 2)), ("Q4_0", 4096, 64, (2, 1)), ("Q4_0", 4096, 9, (1, 1)),
    ("Q4_0", 49152, 9, (2, 1)), ("Q4_1", 576, 512, (2, 1)), ("Q4_1", 1, 9, (1, 1))])
def test_tile_shape(type_, n_rows, n, expected):
    assert tile_shape(type_, n_rows, n, *H200) == expected


@pytest.mark.parametrize("name", WEIGHTS)
def test_layout(name):
    """Every format has a block that any GPU can run, and the one that is chosen fits."""
    fmt = FORMATS[name]
    for limit in {LEAST_LIMIT, *SHARED_LIMIT.values()}:
        for n in 9, 64, 4096:
            tile = tile_shape(name, 4096, n, limit, 132)
            at = layout(fmt, *tile)
            assert at.n_bytes <= limit and not any(words % 4 for words in at[:-1])
            assert tile in TILES and tile.n_threads * (64 if form(fmt).n_accumulators < 3 else 128) <= 65536


@pytest.fixture
def machine():
    return SimulatedMachine()


@pytest.mark.parametrize("name, n_rows, n_cols, n", [
    ("Q4_0", 33, 288, 9),     # groups of 32; two row tiles, two chunks
    ("Q5_1", 2, 32, 9),       # and minima
    ("NVFP4", 1, 64, 9),      # groups of 16
    ("Q1_0", 2, 256, 9),      # groups of 128
    ("TQ2_0", 2, 512, 9),     # a group of 256 without integer scales
    ("Q2_K", 1, 256, 10),     # with small ones, and minima
    ("Q3_K", 3, 256, 9),      # with integer scales in one int32, sub-blocks of 16
    ("Q4_K", 2, 512, 9),      # with a sum a limb, and minima
    ("IQ4_XS", 2, 256, 9)])
def simulate_mmq(machine, name, n_rows, n_cols, n):
    check_mul_mat(machine, name, n_rows, n_cols, n, one_warp)


def simulate_two_warps(machine):
    check_mul_mat(machine, "Q8_0", 33, 32, 9, lambda *args: mmq(*args, tile=Tile(2, 1)))


def simulate_mmq_special(machine):
    """Chunks of zeros, of too small values, or with d = NaN."""
    x = activations(9, 512, seeded("special"))
    x[:5, :256] = 0
    x[:5, 3] = [np.inf, np.nan, 0, 1e-35, 1]
    check_mul_mat(machine, "Q2_K", 2, 512, 9, one_warp, x)


@pytest.mark.parametrize("name, fill, scales", [("Q6_K", 0, 0x80), ("Q4_K", 0xff, 0xff)])
def simulate_mmq_extremes(machine, name, fill, scales):
    """Sums at the bounds of the format table."""
    check_extremes(machine, name, fill, scales, 9, one_warp)
