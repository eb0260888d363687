"""mmq and mmq_few in numba's CUDA simulator: one format of each form, at blocks of one warp and of some."""
from dataclasses import astuple

import numpy as np
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.cuda import mul_mat_glu
from ggml_py.kernels.cuda.mmq import BLOCKS, Block, block_shape, mmq, most_quads, shared_bytes
from ggml_py.kernels.cuda.mmq_few import MAX_WARPS, FewShape, few_shape, mmq_few, shared_words
from ggml_py.quant.formats import FORMATS
from matmul_comparisons import activations, check_extremes, check_mul_mat, seeded
from op_comparisons import check_mul_mat_glu

WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.is_quantized]
KIB = 1 << 10
LIMITS = 227 * KIB, 163 * KIB, 99 * KIB  # bytes of shared memory of a block on GPUs of compute capability 9.0, 8.0 and 8.6
ONE_WARP = BLOCKS[-1]


def test_in_the_simulator():
    run_in_simulator(__file__)


# Shapes

@pytest.mark.parametrize("name", WEIGHTS)
def test_blocks_fit(name):
    """Every format has a block for any GPU; on large ones it is the first that registers hold."""
    fmt = FORMATS[name]
    blocks = [block_shape((name,), limit) for limit in LIMITS]
    assert blocks[0] == next(block for block in BLOCKS if block.quads <= most_quads(fmt))
    for block, limit in zip(blocks, LIMITS):
        assert shared_bytes((name,), block) <= limit and 32 * block.n_warps <= 256


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_few_shapes_fit(name, limit):
    """Warps have equal work, rounds whole turns of the warps, and the blocks of a multiprocessor its registers and shared memory."""
    fmt = FORMATS[name]
    for n_rows, n_cols, n in ((4096, 14336, 1), (4096, 14336, 8), (128256, 4096, 1), (576, 1536, 16), (32, 256, 3), (33, 70000, 40)):
        shape = few_shape((name,), n_rows, n_cols, n, 132, limit)
        n_chunks, n_tiles, n_valid = -(-n_cols // 256), -(-n_rows // 32), min(n, 4 * shape.n_quads)
        resident = 2 if shape.grid[0] * shape.grid[1] > 132 or shape.grid[0] < n_tiles else 1
        assert shape.n_bytes == 4 * shared_words((name,), shape.n_quads, shape.n_warps, shape.per_round, n_valid)
        assert resident * shape.n_bytes <= limit and shape.grid[1] * 4 * shape.n_quads >= n
        assert 1 <= shape.n_warps <= min(MAX_WARPS[shape.n_quads], n_chunks) and shape.per_round % shape.n_warps == 0
        turns = -(-n_chunks // shape.n_warps)
        assert (turns - 1) * shape.n_warps < n_chunks and shape.n_warps == -(-n_chunks // turns)


@pytest.mark.parametrize("type_, n_rows, n_cols, n, expected", [
    ("Q4_K", 4096, 14336, 1, (1, 8, 56, (128, 1))), ("Q8_0", 4096, 14336, 8, (2, 8, 8, (128, 1))),
    ("Q4_K", 128256, 4096, 1, (1, 4, 16, (264, 1))), ("Q4_1", 576, 1536, 512, (4, 3, 3, (18, 32)))])
def test_few_shape(type_, n_rows, n_cols, n, expected):
    assert astuple(few_shape((type_,), n_rows, n_cols, n, 132, LIMITS[0]))[:4] == expected


@pytest.mark.parametrize("names, n_rows, n_cols, n, expected", [
    (("Q4_K", "Q4_K"), 14336, 4096, 1, FewShape), (("Q8_0", "Q8_0"), 14336, 4096, 512, Block(4, 2, 16)), (("Q8_0", "Q6_K"), 14336, 4096, 512, Block(4, 2, 8)),
    (("Q4_1", "Q4_1"), 1536, 576, 512, FewShape)])
def test_glu_shape(names, n_rows, n_cols, n, expected):
    found = mul_mat_glu.glu_shape(names, n_rows, n_cols, n, 132, LIMITS[0])
    assert found == expected or type(found) is expected


# Bits

@pytest.fixture
def machine():
    return SimulatedMachine()


FORMS = [
    ("Q8_0", 33, 288),    # groups of 32; two row tiles, two chunks
    ("Q4_0", 2, 288),     # with a zero point
    ("Q5_1", 2, 32),      # with minima
    ("NVFP4", 1, 64),     # groups of 16
    ("Q1_0", 2, 512),     # groups of 128
    ("TQ2_0", 2, 256),    # a group of 256 without integer scales
    ("Q2_K", 1, 256),     # with them for 16 columns, and minima
    ("Q3_K", 3, 256),     # and a zero point
    ("IQ2_XS", 2, 256),   # and lanes of eight columns
    ("Q6_K", 2, 256),     # and a sum a limb
    ("Q4_K", 2, 512),     # for 32 columns, and minima
    ("IQ4_XS", 2, 256),
    ("IQ1_S", 1, 256),
    ("IQ3_XXS", 2, 256)]


def one_warp(target, name, *args):
    return mmq(target, name, *args, block=ONE_WARP)


@pytest.mark.parametrize("name, n_rows, n_cols", FORMS)
def simulate_mmq(machine, name, n_rows, n_cols):
    check_mul_mat(machine, name, n_rows, n_cols, 9, one_warp)


@pytest.mark.parametrize("name, n_rows, n, block", [
    ("Q8_0", 33, 17, Block(1, 1, 16)), ("Q4_K", 65, 33, Block(2, 1, 8)), ("Q6_K", 33, 34, Block(2, 2, 8))])
def simulate_mmq_blocks(machine, name, n_rows, n, block):
    check_mul_mat(machine, name, n_rows, 256, n, lambda *args: mmq(*args, block=block))


@pytest.mark.parametrize("name, n_rows, n_cols", FORMS)
def simulate_mmq_few(machine, name, n_rows, n_cols):
    check_mul_mat(machine, name, n_rows, n_cols, 3, mmq_few)


@pytest.mark.parametrize("name, n_rows, n_cols, n, n_quads, n_warps, per_round, grid", [
    ("Q8_0", 65, 1312, 5, 2, 2, 2, (2, 1)),      # three row tiles to two blocks, six chunks in rounds of two
    ("Q4_0", 33, 800, 17, 4, 3, 6, (2, 2)),      # two groups of tokens
    ("Q5_K", 40, 768, 9, 4, 1, 3, (1, 1)),       # one warp, one round
    ("IQ2_XXS", 33, 1280, 1, 1, 2, 4, (1, 1)),   # codebooks
    ("Q6_K", 3, 768, 8, 2, 2, 4, (1, 1))])
def simulate_mmq_few_launch_shapes(machine, name, n_rows, n_cols, n, n_quads, n_warps, per_round, grid):
    """The bits do not depend on the shape of the launch."""
    n_bytes = 4 * shared_words((name,), n_quads, n_warps, per_round, min(n, 4 * n_quads))
    check_mul_mat(machine, name, n_rows, n_cols, n, lambda *args: mmq_few(*args, shape=FewShape(n_quads, n_warps, per_round, grid, n_bytes)))


@pytest.mark.parametrize("shape", [ONE_WARP, FewShape(2, 1, 1, (1, 1), 64 * KIB)], ids=["mmq", "mmq_few"])
@pytest.mark.parametrize("act, types, n_rows, n_cols, n, biased", [
    ("silu", ("Q8_0", "Q8_0"), 33, 288, 5, False), ("gelu", ("Q4_K", "Q6_K"), 2, 256, 2, True), ("relu", ("IQ2_XXS", "IQ3_S"), 1, 512, 1, True)], ids=str)
def simulate_glu(machine, monkeypatch, act, types, n_rows, n_cols, n, biased, shape):
    """Gate and up of one format and of two, with a codebook each."""
    monkeypatch.setattr(mul_mat_glu, "glu_shape", lambda *args: shape)
    check_mul_mat_glu(machine, act, types, n_rows, n_cols, n, biased)


@pytest.mark.parametrize("launch", [one_warp, mmq_few])
@pytest.mark.parametrize("name", ["Q2_K", "Q4_1", "Q6_K"])
def simulate_special(machine, name, launch):
    """Chunks of zeros, of too small values, or with d = NaN."""
    x = activations(5, 512, seeded("special"))
    x[:, :256] = 0
    x[:, 3] = [np.inf, np.nan, 0, 1e-35, 1]
    check_mul_mat(machine, name, 2, 512, 5, launch, x)


@pytest.mark.parametrize("launch", [one_warp, mmq_few])
@pytest.mark.parametrize("name, fill, scales", [
    ("Q6_K", 0, 0x80), ("Q6_K", 0xff, 0x7f), ("Q4_K", 0xff, 0xff), ("Q3_K", 0, 0), ("Q2_K", 0xff, 0xff), ("IQ4_XS", 0, 0), ("IQ3_S", 0xff, 0xff),
    ("Q8_0", 0x80, 0), ("Q5_0", 0, 0)])
def simulate_extremes(machine, name, fill, scales, launch):
    """Sums at the bounds of the format table."""
    check_extremes(machine, name, fill, scales, 2, launch)
