"""Products of int8 of split formats (`split_product`) in the simulator, against the reference bit for bit."""
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.cuda import ptx, split_product
from ggml_py.kernels.cuda.half_forms import MOST_SPLIT, half_form, largest_weight
from ggml_py.kernels.cuda.mmq_half import EXPERTS, Halves, dense_blocks, expert_blocks
from ggml_py.kernels.cuda.tile_product import splitter
from ggml_py.quant.formats import CHUNK
from expert_comparisons import check_mul_mat_id, check_mul_mat_id_glu, routed
from matmul_comparisons import SPLIT, check_mul_mat, extreme_weight, seeded, weight_of_scales

WIDE, = dense_blocks(SPLIT[0])


@pytest.fixture
def machine():
    return SimulatedMachine()


def test_in_the_simulator():
    run_in_simulator(__file__, "-k", "not experts")


def test_experts_in_the_simulator():
    run_in_simulator(__file__, "-k", "experts")


@pytest.mark.parametrize("fmt", SPLIT, ids=lambda fmt: fmt.name)
def simulate_each_format(machine, fmt):
    check_mul_mat(machine, fmt.name, 129, 512, 9, Halves(WIDE))


@pytest.mark.parametrize("name, n_rows, n_cols, n", [("IQ4_XS", 31, 256, 1), ("Q6_K", 250, 1024, 128), ("IQ4_KT", 257, 768, 129)])
def simulate_sizes(machine, name, n_rows, n_cols, n):
    """Rows and tokens beyond a block; several items for a block of the GPU."""
    check_mul_mat(machine, name, n_rows, n_cols, n, Halves(WIDE))


@pytest.mark.parametrize("fmt", SPLIT, ids=lambda fmt: fmt.name)
def simulate_extremes(machine, fmt):
    """Large weights of both signs, by the largest limbs of both signs, alike and by turns."""
    x, signs = np.ones((4, CHUNK), np.float32), np.where(np.arange(CHUNK) & 1, np.float32(1), np.float32(-1))
    x[1], x[2], x[3, 1:] = -1, signs, np.float32(16192 / 16256)  # hi 127 and the least lo
    fills = [(0, 0xff), (0xff, 0xff), (0, 0), (0x77, 0x7f)]
    for fill, scales in fills + [(0, 0x80), (0xff, 0x80), (0xff, 0x7f)] * (fmt.max_isc == 128):  # bytes
        check_mul_mat(machine, fmt.name, 2, CHUNK, 4, Halves(WIDE), x, extreme_weight(fmt, 2, CHUNK, fill, scales))


@pytest.mark.parametrize("fmt", SPLIT, ids=lambda fmt: fmt.name)
def simulate_float_scales(machine, fmt):
    """The smallest, the largest and special ones."""
    blocks = weight_of_scales(fmt, 512, seeded(fmt.name))
    check_mul_mat(machine, fmt.name, len(blocks), 512, 2, Halves(WIDE), blocks=blocks)


def simulate_special(machine):
    """Chunks of zeros, of too small values, or with d = NaN."""
    x = seeded("special").standard_normal((5, 512)).astype(np.float32)
    x[:, :256] = 0
    x[:, 3] = [np.inf, np.nan, 0, 1e-35, 1]
    check_mul_mat(machine, "IQ4_XS", 2, 512, 5, Halves(WIDE), x)


@pytest.mark.parametrize("name, n_rows, n_cols, n, b, block", [
    ("IQ4_XS", 33, 512, 23, 1, EXPERTS[0]), ("Q6_K", 33, 512, 23, 2, EXPERTS[1]), ("IQ2_KT", 200, 256, 59, 1, EXPERTS[2]),
    ("IQ3_XXS", 33, 256, 41, 1, EXPERTS[2])])
def simulate_experts(machine, name, n_rows, n_cols, n, b, block):
    check_mul_mat_id(machine, name, 5, n_rows, n_cols, routed(n, 2, 5, "experts"), b, Halves(block))


@pytest.mark.parametrize("name, biased, block", [("Q6_K", False, EXPERTS[1]), ("IQ4_K", True, EXPERTS[2])])
def simulate_gated_experts(machine, name, biased, block):
    """The gate's totals wait until those of up are there."""
    check_mul_mat_id_glu(machine, "silu", (name, name), 4, 34, 512, routed(40, 2, 4, "gated"), 1, biased, Halves(block))


def simulate_split(machine):
    """Of all levels and scales, in both halves of a register: 256 h + l is their product, |h| <= 127."""
    for fmt in SPLIT:
        four_limbs, offset = splitter(fmt, True), fmt.zero
        levels = np.arange(-fmt.max_level, fmt.max_level + 1)
        codes = np.uint8(np.resize(levels, -(-len(levels) // 4) * 4) + offset).view(np.uint32)
        for isc in (0, 1, fmt.max_isc):
            scales = isc, -isc, 1, -1
            for w in codes:
                limbs = np.array(four_limbs((w,) * 4, *map(ptx.i32, scales))).view(np.int8).reshape(2, 4, 4).astype(int)
                found = w.reshape(1).view(np.uint8 if offset else np.int8).astype(int) - offset
                assert np.array_equal(256 * limbs[0] + limbs[1], np.outer(scales, found)) and abs(limbs[0]).max() <= 127, fmt.name


def simulate_sum_of_three(machine):
    """2^15 high + 2^7 middle + low / 2, rounded once, at the bounds and among random sums of the same size."""
    rng, bounds = seeded("three"), np.array([127 * 127, 127 * 128 + 128 * 127, 128 * 128]) * CHUNK
    sums = np.concatenate([bounds * np.array(np.meshgrid(*[[-1, 0, 1]] * 3)).reshape(3, -1).T,
                           rng.integers(-bounds, bounds, (500, 3)), rng.integers(-999, 999, (500, 3))])
    for high, middle, low in sums & [-1, -1, -2]:
        exact = 2**15 * int(high) + 2**7 * int(middle) + int(low) // 2
        assert split_product.sum_of_three(*map(np.int32, (high, middle, low))) == np.float32(exact)  # float64 holds it


def test_bounds():
    """Of the formats, and of the sums that `split_product.sum_of_three` forms."""
    assert {fmt.name for fmt in SPLIT} == {"Q6_K", "IQ3_XXS", "IQ4_XS", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K", "IQ2_KL", "IQ4_KS",
                                           "IQ4_KSS", "IQ5_KS", "IQ1_KT", "IQ2_KT", "IQ3_KT", "IQ4_KT"}
    for fmt in SPLIT:
        assert half_form(fmt).split and largest_weight(fmt) < MOST_SPLIT
    middle = (127 * 128 + 128 * 127) * CHUNK
    assert 2**8 * middle + 128 * 128 * CHUNK < 2**31
    assert 127 * 127 * CHUNK + (2**31 >> 16) < 2**24


def test_blocks():
    """All of experts have room in shared memory; of one format lanes have no registers for the largest."""
    assert all(dense_blocks(fmt) == (WIDE,) for fmt in SPLIT)
    assert all(expert_blocks(fmt) == EXPERTS[:2 if fmt.name == "IQ4_KSS" else 3] for fmt in SPLIT)
