"""Products of int8 of split formats (`split_product`) in the simulator, against the reference bit for bit."""
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.cuda import ptx, split_product
from ggml_py.kernels.cuda.half_forms import MOST_SPLIT, half_form, largest_weight
from ggml_py.kernels.cuda.mmq_half import EXPERTS, Halves, dense_blocks, expert_blocks
from ggml_py.kernels.cuda.split_levels import byte_splitter, limb_summer, split_of, splitter
from ggml_py.kernels.cuda.tile_form import form
from ggml_py.quant.activation import LIMIT
from ggml_py.quant.formats import CHUNK, FORMATS
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
        four_limbs, offset = byte_splitter(fmt, True), fmt.zero
        levels = np.arange(-fmt.max_level, fmt.max_level + 1)
        codes = np.uint8(np.resize(levels, -(-len(levels) // 4) * 4) + offset).view(np.uint32)
        for isc in (0, 1, fmt.max_isc):
            scales = isc, -isc, 1, -1
            for w in codes:
                limbs = np.array(four_limbs((w,) * 4, *map(ptx.i32, scales))).view(np.int8).reshape(2, 4, 4).astype(int)
                found = w.reshape(1).view(np.uint8 if offset else np.int8).astype(int) - offset
                assert np.array_equal(256 * limbs[0] + limbs[1], np.outer(scales, found)) and abs(limbs[0]).max() <= 127, fmt.name


INTEGER = [fmt for fmt in FORMATS.values() if fmt.is_quantized and form(fmt).integer]


def bounds_of(fmt):
    """(least, most) of levels and of integer scales: from 0 on where there are minima, else of both signs. Signed integers of
    some bits, which have a power of two as their bound, are less than it."""
    if fmt.has_min:
        return (0, fmt.max_level), (0, fmt.max_isc)
    whole_levels, whole_scales = (x & (x - 1) == 0 for x in (fmt.zero or 3, fmt.max_isc))
    return (-fmt.max_level, fmt.max_level - whole_levels), (-fmt.max_isc, fmt.max_isc - whole_scales)


@pytest.mark.parametrize("fmt", INTEGER, ids=lambda fmt: fmt.name)
def simulate_limbs(fmt):
    """Of all levels, at every place of a word, and all scales, or of formats of which products are split some: 2^k h + l is their
    product, each a byte of its type."""
    split, four_limbs = split_of(fmt), splitter(fmt)
    (least, most), (least_isc, most_isc) = bounds_of(fmt)
    levels = np.arange(least, most + 1)
    codes = np.uint8(np.resize(levels, -(-len(levels) // 4) * 4) + fmt.zero)
    types = [np.uint8 if unsigned else np.int8 for unsigned in (split.unsigned, split.l_unsigned)]
    scales = {*range(least_isc, most_isc + 1)}
    for isc in scales if split.by_scale else scales & {least_isc, -1, 0, 1, 5, most_isc}:
        for w in np.concatenate([np.roll(codes, i).view(np.uint32) for i in range(4)]):
            found = w.reshape(1).view(np.uint8 if fmt.zero or fmt.has_min else np.int8).astype(int) - fmt.zero
            words = np.array(four_limbs((w,) * 4, *[ptx.i32(isc)] * 4)).reshape(2, 4)[:split.n_limbs]
            limbs = [np.ascontiguousarray(each[:1]).view(kind).astype(int) for each, kind in zip(words, types)]
            v = (2**split.shift * limbs[0] + limbs[1] if split.n_limbs == 2 else -limbs[0] if split.negated else limbs[0])
            assert np.array_equal(v, isc * found), (fmt.name, isc, found)
            assert (words == words[:, :1]).all(), fmt.name


def simulate_which_scales_are_split():
    one = {fmt.name for fmt in INTEGER if split_of(fmt).n_limbs == 1}
    assert one == {"Q2_K", "Q3_K"} and [fmt.name for fmt in INTEGER if split_of(fmt).negated] == ["Q3_K"]
    assert {fmt.name for fmt in INTEGER if split_of(fmt).by_scale} - one == {
        "Q4_K", "Q5_K", "IQ1_S", "IQ1_M", "IQ1_M_R1", "IQ3_S", "IQ2_K", "IQ2_KS"}


@pytest.mark.parametrize("fmt", INTEGER, ids=lambda fmt: fmt.name)
def simulate_limb_sums(fmt):
    """RN(S) of the sums of a chunk: of levels, scales and q that are all at a bound but for a few, and of random ones."""
    split, limb_sum, rng = split_of(fmt), limb_summer(fmt), seeded(fmt.name)
    (least, most), (least_isc, most_isc) = bounds_of(fmt)
    for trial in range(60):
        levels, isc = rng.integers(least, most + 1, CHUNK), rng.integers(least_isc, most_isc + 1, CHUNK)
        q = rng.integers(-LIMIT, LIMIT + 1, CHUNK) >> rng.integers(0, 14)
        if trial % 3 == 0:
            levels, isc, q = (np.full(CHUNK, rng.choice(bounds)) for bounds in (
                [least, most], [least_isc, most_isc], [-LIMIT, LIMIT, 65 - LIMIT]))
            q[:rng.integers(0, 4)] //= 3
        high, low = (q + 64) >> 7, q - ((q + 64) >> 7 << 7)
        v = levels * isc
        if split.n_limbs == 1:
            limbs = (-v if split.negated else v), np.zeros(CHUNK, int)
        elif split.by_scale:
            limbs = levels * (isc >> split.shift), levels * (isc & ((1 << split.shift) - 1))
        else:
            limbs = v >> 8, v & 255
        sums = [ptx.i32(int(limb @ of_q)) for limb in limbs for of_q in (high, low)]
        assert limb_sum(*sums) == np.float32(int(v @ q)), (fmt.name, sums)


@pytest.mark.parametrize("fmt", INTEGER, ids=lambda fmt: fmt.name)
def simulate_limb_sums_are_rounded_once(fmt):
    """S halfway between two floats, or 1 from there, of sums of h and l of any sizes that add up to it."""
    split, limb_sum, rng = split_of(fmt), limb_summer(fmt), seeded("once " + fmt.name)
    largest, sign, k = CHUNK * fmt.max_level * fmt.max_isc * LIMIT, -1 if split.negated else 1, split.shift
    for e in range(largest.bit_length() - 25):
        for _ in range(40):
            middle = int(rng.integers(2**24, 2**25)) | 1
            for s in ((middle << e) + n for n in (-1, 0, 1)):
                s = s if rng.integers(2) else -s
                if abs(s) > largest:
                    continue
                h_low, l_high = (int(x) for x in rng.integers(-2**20, 2**20, 2)) if split.n_limbs == 2 else (0, 0)
                rest = sign * s - (h_low << k) - (l_high << 7)
                h_high, l_low = rest >> (k + 7), rest & ((1 << k + 7) - 1)
                if split.n_limbs == 1:
                    h_low, l_low = l_low, 0
                assert limb_sum(*map(ptx.i32, (h_high, h_low, l_high, l_low))) == np.float32(s), (fmt.name, s)


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
