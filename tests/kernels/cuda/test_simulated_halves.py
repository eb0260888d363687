"""Products of float16 (`mmq_half`) in the simulator, against the reference bit for bit, and the check that a GPU may use them."""
from dataclasses import astuple

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.call import HALVES, Call, Operand, planned_without
from ggml_py.kernels.cuda import (half_check as half_check_module, half_product, mmq_stages, mul_mat, mul_mat_glu,
                                  mul_mat_id, mul_mat_id_glu, simulator)
from ggml_py.kernels.cuda.block import Block
from ggml_py.kernels.cuda.half_check import (MINIMA_WIDTHS, MOST_LEVEL, IN_PARTS, WIDTHS, half_check, half_check_kernel,
                                             levels_and_limbs, weights_and_limbs)
from ggml_py.kernels.cuda.half_limbs import half_limbs_kernel
from ggml_py.kernels.cuda.half_forms import EXACT, half_form, has_halves, largest_weight, most_reach
from ggml_py.kernels.cuda.half_product import minima_together, together_of_quarters
from ggml_py.kernels.cuda.half_scaled import tokens_of_unit
from ggml_py.kernels.cuda.launch import FACTORIES
from ggml_py.kernels.cuda.mmq import GroupedShape
from ggml_py.kernels.cuda.mmq_few import FewShape
from ggml_py.kernels.cuda.half_slots import half_bytes, kept_sums
from ggml_py.kernels.cuda.mmq_half import DENSE, EXPERTS, Halves, dense_blocks, expert_blocks, mmq_half_kernel
from ggml_py.kernels.cuda.wgmma import half_products, uniform_place
from ggml_py.quant.dequantize import dequantize
from ggml_py.quant.formats import CHUNK, FORMATS
from expert_comparisons import check_mul_mat_id, check_mul_mat_id_glu, routed
from matmul_comparisons import (HALF_FORMATS, PACKED, SCALED, SPLIT, activations, check_extremes, check_mul_mat,
                                check_mul_mat_qkv, extreme_weight, seeded, weight_of_scales)
from thread_order import hold_back, hold_back_at_leave, hold_back_warp

WIDE = DENSE[-1]


@pytest.fixture
def machine():
    return SimulatedMachine()


def test_in_the_simulator():
    run_in_simulator(__file__, "-k", "not (experts or check or bytes or extremes or limit or scales or apart)")


def test_late_warps_in_the_simulator():
    run_in_simulator(__file__, "-k", "apart")


def test_bounds_and_levels_in_bytes_in_the_simulator():
    run_in_simulator(__file__, "-k", "bytes or extremes or limit or scales")


def test_experts_in_the_simulator():
    run_in_simulator(__file__, "-k", "experts and not gated")


def test_gated_experts_and_check_in_the_simulator():
    run_in_simulator(__file__, "-k", "gated or check")


@pytest.mark.parametrize("n_rows, n_cols, n, block", [(31, 256, 9, DENSE[0]), (129, 1280, 65, DENSE[0]), (100, 768, 3, DENSE[0]),
                                                      (129, 1280, 33, DENSE[1]), (129, 512, 129, WIDE), (250, 1024, 128, WIDE)])
def simulate_mmq_half(machine, n_rows, n_cols, n, block):
    """Slots used again; rows and tokens beyond a block; several items for a block of the GPU."""
    check_mul_mat(machine, "Q4_K", n_rows, n_cols, n, Halves(block))


@pytest.mark.parametrize("name, n_rows, n_cols, n, block", [
    ("Q5_K", 31, 256, 9, DENSE[2]), ("Q5_K", 129, 1280, 65, DENSE[0]), ("Q5_K", 129, 768, 33, DENSE[1]),
    ("Q5_K", 31, 2560, 31, DENSE[3]), ("Q4_K", 129, 2816, 33, DENSE[3]), ("Q2_K", 129, 1280, 65, DENSE[0]),
    ("Q2_K", 31, 2560, 31, DENSE[3]),
    ("Q3_K", 31, 256, 9, DENSE[2]), ("Q3_K", 31, 512, 9, DENSE[0]), ("Q3_K", 31, 1280, 9, DENSE[3]),
    ("Q3_K", 250, 1024, 128, WIDE), ("Q5_K", 129, 512, 130, WIDE)])
def simulate_other_fields(machine, name, n_rows, n_cols, n, block):
    """Fifth and third bits, fields of two bits."""
    check_mul_mat(machine, name, n_rows, n_cols, n, Halves(block))


@pytest.mark.parametrize("name, n_rows, n_cols, n, block", [
    ("IQ2_K", 129, 768, 65, DENSE[0]), ("IQ2_K", 250, 512, 9, WIDE), ("IQ2_KS", 31, 512, 9, DENSE[0]),
    ("IQ1_S", 31, 2560, 31, DENSE[3]), ("IQ3_KS", 129, 768, 33, DENSE[1]), ("IQ3_KS", 250, 512, 9, WIDE),
    ("IQ3_S", 31, 1280, 9, DENSE[3]), ("IQ3_S", 250, 512, 9, WIDE), ("IQ1_S", 31, 512, 9, DENSE[1]),
    ("IQ1_M", 129, 768, 65, DENSE[0]), ("IQ1_M_R1", 31, 512, 9, DENSE[1]), ("IQ2_XXS", 31, 512, 9, DENSE[1]),
    ("IQ2_XS", 129, 768, 65, DENSE[0]), ("IQ2_S", 250, 512, 9, WIDE), ("TQ1_0", 31, 512, 9, DENSE[1]),
    ("TQ2_0", 31, 512, 9, DENSE[1])])
def simulate_levels_in_bytes(machine, name, n_rows, n_cols, n, block):
    """Also of codebooks, and of lanes with eight columns side by side."""
    check_mul_mat(machine, name, n_rows, n_cols, n, Halves(block))


@pytest.mark.parametrize("name, fill, scales", [("Q2_K", 0xff, 0xff), ("Q3_K", 0, 0), ("Q3_K", 0, 0xff), ("IQ2_K", 0, 0),
                                                ("IQ2_KS", 0, 0), ("IQ3_S", 0xff, 0xff), ("IQ1_S", 0xff, 0xff)])
def simulate_extremes_of_whole_chunks(machine, name, fill, scales):
    """Large weights, of most formats the largest; the largest of all limbs hi, and of limbs lo: always multiplied whole."""
    weight = extreme_weight(FORMATS[name], 1, CHUNK, fill, scales)
    x = np.repeat(np.float32([[1], [-1], [63 / 16256], [-63 / 16256]]), CHUNK, axis=1)
    x[2:, 0] = 1
    check_mul_mat(machine, name, 1, CHUNK, 4, Halves(DENSE[1]), x, weight)


@pytest.mark.parametrize("name, n_rows, n_cols, n, block", [
    ("MXFP4", 31, 1024, 61, DENSE[0]), ("MXFP4", 129, 768, 33, DENSE[1]), ("MXFP4", 250, 1024, 130, WIDE),
    ("NVFP4", 31, 1024, 9, DENSE[0]), ("NVFP4", 129, 512, 33, WIDE), ("NVFP4", 31, 2560, 31, DENSE[3]),
    ("Q4_1", 129, 512, 9, DENSE[3]), ("Q5_1", 31, 1792, 33, DENSE[3]),
    ("Q4_0", 33, 512, 9, DENSE[0]), ("Q5_0", 129, 512, 30, DENSE[1]), ("Q6_0", 129, 768, 129, WIDE),
    ("Q4_1", 129, 1024, 65, DENSE[0]), ("Q4_1", 31, 1024, 16, DENSE[2]), ("Q5_1", 129, 512, 33, DENSE[1])])
def simulate_scaled(machine, name, n_rows, n_cols, n, block):
    """Formats with float scales, also with minima."""
    check_mul_mat(machine, name, n_rows, n_cols, n, Halves(block))


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("fill", [0, 0x77, 0xff])
def simulate_extremes_of_scaled(machine, fmt, fill):
    """The largest sums, of both signs."""
    for block, sign in (DENSE[0], 1), (dense_blocks(fmt)[-1], -1):
        x = sign * np.where(np.arange(CHUNK) % 32 == 31, np.float32(0.99), np.float32(1))
        check_mul_mat(machine, fmt.name, 2, CHUNK, 3, Halves(block), np.tile(x.astype(np.float32), (3, 1)),
                      extreme_weight(fmt, 2, CHUNK, fill, 0x3c))


@pytest.mark.parametrize("fmt", [fmt for fmt in HALF_FORMATS if fmt not in SPLIT], ids=lambda fmt: fmt.name)
def simulate_float_scales(machine, fmt):
    """The smallest, the largest and special ones."""
    blocks = weight_of_scales(fmt, 512, seeded(fmt.name))
    check_mul_mat(machine, fmt.name, len(blocks), 512, 9, Halves(DENSE[1]), blocks=blocks)


@pytest.mark.parametrize("quads, blocks, n_rows, n_cols, n", [(4, 2, 33, 768, 17), (4, 3, 129, 1792, 16), (4, 4, 2, 256, 5),
                                                              (8, 2, 31, 2560, 9), (8, 3, 129, 1792, 33), (8, 4, 64, 2304, 31)])
def simulate_clusters(machine, quads, blocks, n_rows, n_cols, n):
    """Chunks shared by two to four blocks: fewer of them than blocks, turns for which some have none, places used again."""
    check_mul_mat(machine, "Q4_K", n_rows, n_cols, n, Halves(Block(4, 1, quads, True, 3, 1, blocks, 2)))


@pytest.mark.parametrize("name, late", [(name, late) for name in ("Q4_K", "MXFP4", "IQ3_XXS") for late in (0, 1)])
def simulate_blocks_apart(machine, monkeypatch, name, late):
    """One block of a cluster does nothing that the other one need not wait for."""
    hold_back(monkeypatch, lambda cluster: set(cluster.blocks[late].threads) if len(cluster.blocks) > 1 else set())
    check_mul_mat(machine, name, 250, 1024, 9, Halves(WIDE))


@pytest.mark.parametrize("late", [None, 8, 9])
@pytest.mark.parametrize("name", ["Q4_K", "IQ3_XXS"])
def simulate_items_of_clusters(machine, monkeypatch, name, late):
    """The blocks of a cluster take the same tokens, and one cluster several of them; also where a warp that brings comes last."""
    hold_back_warp(monkeypatch, late)
    machine.target.n_multiprocessors = 3
    for n_cols, n in (256, 260), (768, 130):
        check_mul_mat(machine, name, 2, n_cols, n, Halves(WIDE))


def simulate_number_of_a_block(machine, monkeypatch):
    """Products without swizzle must not get it, which a place of the second block of a cluster has."""
    monkeypatch.setattr(half_product, "unswizzled_place", uniform_place)
    with pytest.raises(RuntimeError, match="the place is 0x10.*, allowed: 0..0x3fff"):
        check_mul_mat(machine, "Q4_K", 2, 256, 1, Halves(WIDE))


def hold_behind_stores(monkeypatch, module, n_threads: int) -> set:
    """The first threads of each block, which let all others go on behind their first store to shared memory by this module."""
    held = set()

    def sts_and_hold(*args):
        if (thread := simulator.threads.getcurrent()).index.x < n_threads:
            held.add(thread)
        sts(*args)
        simulator.syncwarp()  # where others go on

    sts = module.sts
    monkeypatch.setattr(module, "sts", sts_and_hold)
    hold_back(monkeypatch, lambda cluster: held)
    return held


@pytest.mark.parametrize("name, block", [("Q4_K", DENSE[3]), ("Q4_K", WIDE), ("Q5_K", DENSE[1])])
def simulate_warpgroups_apart(machine, monkeypatch, name, block):
    """A warpgroup ends, or is a turn ahead, while another has sums of part of a chunk in its words of shared memory."""
    held = hold_behind_stores(monkeypatch, half_product, 128)
    check_mul_mat(machine, name, 128, 1280, 5, Halves(block), np.ones((5, 1280), np.float32))
    assert held


@pytest.mark.parametrize("name", ["Q4_K", "NVFP4"])
def simulate_totals_apart(machine, monkeypatch, name):
    """Each warp of a team has words of its own for its totals: one team writes them before the other one reads its own."""
    held = hold_behind_stores(monkeypatch, mmq_stages, 256)
    check_mul_mat(machine, name, 31, 1280, 9, Halves(DENSE[3]))
    assert held


@pytest.mark.parametrize("name, late, team", [("Q4_K", 0, 0), ("Q4_K", 0, 1), ("Q4_K", 1, 1), ("NVFP4", 1, 0)])
def simulate_teams_apart(machine, monkeypatch, name, late, team):
    """A team of a cluster goes on when all others wait: the third of three turns is not full."""
    hold_back(monkeypatch, lambda cluster: {t for t in cluster.blocks[late].threads if t.index.x // 256 == team}
              if len(cluster.blocks) > 1 else set())
    check_mul_mat(machine, name, 31, 2816, 9, Halves(DENSE[3]))


@pytest.mark.parametrize("name, late", [(name, late) for name in ("Q4_K", "NVFP4") for late in (0, 5, 8)])
def simulate_teams_whose_slots_are_left_late(machine, monkeypatch, name, late):
    """A warp lags behind all others when it tells that it is done with a slot."""
    held = hold_back_at_leave(monkeypatch, late)
    check_mul_mat(machine, name, 31, 3840, 9, Halves(DENSE[3]))
    assert held.all


@pytest.mark.parametrize("name, n_rows, n_cols, n, b, block", [
    ("Q4_K", 33, 512, 23, 1, EXPERTS[0]), ("Q4_K", 70, 1024, 29, 2, EXPERTS[1]), ("Q4_K", 70, 768, 59, 2, EXPERTS[2]),
    ("Q5_K", 33, 512, 23, 2, EXPERTS[0]), ("Q5_K", 70, 768, 29, 1, EXPERTS[1]), ("Q5_K", 33, 768, 59, 2, EXPERTS[2]),
    ("Q2_K", 33, 512, 9, 1, EXPERTS[0]), ("Q3_K", 33, 512, 41, 2, EXPERTS[2]), ("IQ1_M", 33, 512, 29, 1, EXPERTS[1]),
    ("IQ2_XXS", 33, 512, 23, 2, EXPERTS[0]), ("IQ3_S", 33, 512, 41, 1, EXPERTS[2]),
    ("NVFP4", 33, 256, 23, 1, EXPERTS[1]), ("MXFP4", 33, 512, 23, 1, EXPERTS[0]),
    ("Q4_1", 33, 768, 29, 2, EXPERTS[1]), ("MXFP4", 33, 768, 59, 2, EXPERTS[2])])
def simulate_experts(machine, name, n_rows, n_cols, n, b, block):
    """Experts without a token, with few, with more than an item takes."""
    check_mul_mat_id(machine, name, 5, n_rows, n_cols, routed(n, 2, 5, "experts"), b, Halves(block))


@pytest.mark.parametrize("act, name, biased, block", [
    ("silu", "Q4_K", False, EXPERTS[1]), ("silu", "Q4_K", True, EXPERTS[0]), ("silu", "Q4_K", False, EXPERTS[2]),
    ("silu", "Q5_K", False, EXPERTS[1]), ("silu", "Q3_K", False, EXPERTS[0]), ("silu", "Q2_K", True, EXPERTS[2]),
    ("silu", "IQ2_S", False, EXPERTS[1]),
    ("swiglu_oai", "MXFP4", True, EXPERTS[1])])
def simulate_gated_experts(machine, act, name, biased, block):
    """The gate's totals wait until those of up are there."""
    ids = routed(40, 2, 4, "gated")
    check_mul_mat_id_glu(machine, act, (name, name), 4, 34, 512, ids, 1, biased, Halves(block))


@pytest.mark.parametrize("name, block", [("Q4_K", DENSE[0]), ("Q4_K", DENSE[3]), ("Q4_K", WIDE), ("Q5_K", DENSE[0]),
                                         ("Q5_K", DENSE[1]), ("Q5_K", DENSE[2]), ("Q5_K", DENSE[3]), ("Q5_K", WIDE),
                                         ("Q5_K", EXPERTS[0]),
                                         ("Q5_K", EXPERTS[1]), ("Q5_K", EXPERTS[2]), ("IQ3_KS", DENSE[0]), ("IQ3_KS", WIDE),
                                         ("IQ2_S", DENSE[3]), ("IQ2_XXS", DENSE[1]), ("IQ2_XXS", DENSE[3]), ("IQ2_XS", WIDE),
                                         ("IQ2_XS", EXPERTS[1]), ("IQ2_S", DENSE[0])])
def simulate_extremes(machine, name, block):
    """The largest sums, by parts of a chunk."""
    check_extremes(machine, name, 0xff, 0xff, 3, Halves(block))
    if name == "IQ3_KS":  # whose least scales are the largest
        check_extremes(machine, name, 0, 0, 3, Halves(block))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "IQ3_KS", "IQ2_XS"])
def simulate_parts_by_turns(machine, name):
    """Chunks in parts and whole ones."""
    x = activations(3, 1280, seeded("limit"))
    x[0, :512], x[1, 256:768] = 1, -3
    check_mul_mat(machine, name, 33, 1280, 3, Halves(DENSE[0]), x)


def chunk_of_reach(reach: int, sign: int) -> np.ndarray:
    """float32 [256]: limbs hi of so much reach, then others of the other sign, whose product is one of its own."""
    (n, rest), x = divmod(reach, 127), np.zeros(CHUNK, np.float32)
    x[:n], x[n], x[-(-(n + 1) // 16) * 16:] = 127, rest, -1
    return sign * x / np.float32(127)


LIMITS = [chunk_of_reach(most_reach(FORMATS[name]) + more, sign) for name in ("Q4_K", "Q5_K") for more in (0, 1)
          for sign in (1, -1)]
LIMITS += [np.where(np.arange(CHUNK) == 0, 1, np.float32(lo / 16256)) for lo in (63, -63)]  # of the largest low limbs


@pytest.mark.parametrize("name, large", [("Q4_K", [0, 0, 1, 1, 0, 0, 0, 0, 0, 0]), ("Q5_K", [1, 1, 1, 1, 0, 0, 1, 1, 1, 1])])
def simulate_limit(machine, monkeypatch, name, large):
    """Of all reaches up to `most_reach` a chunk is multiplied whole, else in parts: whole its sums would pass 2^24."""
    weight = extreme_weight(FORMATS[name], 1, CHUNK, 0xff, 0xff)
    check_parts(machine, monkeypatch, name, weight, DENSE[2], LIMITS, large)


def check_parts(machine, monkeypatch, name, weight, block, chunks, large):
    """Which chunks are multiplied in parts: their sums alone are stored."""
    def sts_and_note(*args):
        stored.append(args)
        return sts(*args)
    stored, sts = [], half_product.sts
    monkeypatch.setattr(half_product, "sts", sts_and_note)
    for x, in_parts in zip(chunks, large, strict=True):
        check_mul_mat(machine, name, 1, CHUNK, 1, Halves(block), x[None], weight)
        assert bool(stored) == bool(in_parts)
        stored.clear()


@pytest.mark.parametrize("name", ["IQ3_KS", "IQ2_XXS", "IQ2_XS", "IQ2_S"])
def simulate_limit_of_both_signs(machine, monkeypatch, name):
    """Where weights have both signs, limbs of both count, those of hi and of lo. Of IQ2_S all products have one sign."""
    weight, fields = extreme_weight(FORMATS[name], 1, CHUNK, 0xff, 0xff), dict(FORMATS[name].fields)
    if name == "IQ2_S":  # a bit for each column
        first = fields["d"] + fields["qs"]
        weight[:, first:first + fields["signs"]] = 0x55
    signs, chunks = np.float32(1 - 2 * (np.arange(CHUNK) & 1)), []
    for more in 0, 1:
        (n, rest), x = divmod(most_reach(FORMATS[name]) + more, 127), np.zeros(CHUNK, np.float32)
        x[:n], x[n] = 127, rest
        chunks.append(signs * x / np.float32(127))
    chunks.append(np.where(np.arange(CHUNK) == 0, np.float32(1), np.float32(63 / 16256)) * signs)
    check_parts(machine, monkeypatch, name, weight, DENSE[1], chunks, [0, 1, most_reach(FORMATS[name]) < 63 * CHUNK])


def simulate_large_sums_of_wide_blocks(machine):
    """Of some tokens, so that halves and whole chunks use the same places by turns."""
    x = activations(128, 1024, seeded("wide"))
    x[1, :256], x[100, 512:768] = 1, -1
    check_mul_mat(machine, "Q4_K", 250, 1024, 128, Halves(WIDE), x)


@pytest.mark.parametrize("name, block, n", [("Q4_K", EXPERTS[2], 41), ("Q4_K", DENSE[0], 57), ("Q4_K", DENSE[1], 25),
                                            ("Q4_K", WIDE, 121), ("Q4_K", WIDE, 33), ("Q5_K", DENSE[0], 57)])
def simulate_limit_of_the_last(machine, name, block, n):
    """One token of a block has more than `most_reach`."""
    x = activations(n, CHUNK, seeded("last"))
    x[-1] = 1
    check_mul_mat(machine, name, 1, CHUNK, n, Halves(block), x, extreme_weight(FORMATS[name], 1, CHUNK, 0xff, 0xff))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q3_K", "IQ2_XS", "MXFP4", "Q4_1"])
def simulate_special(machine, name):
    """Chunks of zeros, of too small values, or with d = NaN."""
    x = activations(5, 512, seeded("special"))
    x[:, :256] = 0
    x[:, 3] = [np.inf, np.nan, 0, 1e-35, 1]
    check_mul_mat(machine, name, 2, 512, 5, Halves(DENSE[0]), x)


@pytest.mark.parametrize("names", [("Q4_K",) * 3, ("IQ2_XS", "IQ2_K", "Q4_K")], ids=str)
def simulate_three_matrices(machine, monkeypatch, names):
    """One after the other, whose activations are widened once for a type and a block's tokens."""
    monkeypatch.setattr(mul_mat, "plan", lambda call: Halves(DENSE[call.w.shape[0] == 33]))
    monkeypatch.setattr("ggml_py.kernels.cuda.mul_mat_qkv.team_shape", lambda *args: None)
    monkeypatch.setattr("ggml_py.kernels.cuda.mul_mat_qkv.mul_mat_shape", lambda *args: None)
    check_mul_mat_qkv(machine, names, (33, 31, 2), 512, 5, True)


def without_last_bits(exact):
    """Sums from 2^23 on without their last bit."""
    def multiply(a, b, c):
        sums = exact(a, b, c)
        return np.where(abs(sums) >= 0.5, np.floor(sums * np.float32(2**23)) / np.float32(2**23), sums)
    return multiply


def without_last_bits_of_integers(exact):
    """The same where products count 1, as those of scaled formats do."""
    def multiply(a, b, c):
        sums = exact(a, b, c)
        return np.where(abs(sums) >= 2**23, np.trunc(sums / 2) * 2, sums).astype(np.float32)
    return multiply


def without_subnormals(exact):
    """Float16 below 2^-14 count as 0."""
    def flushed(x):
        return np.where(abs(x) < 2**-14, np.float16(0), x)
    return lambda a, b, c: exact(flushed(a), flushed(b), c)


def checked(machine):
    """What `half_check` says of the simulator as it is now."""
    def run(launch, found, results):
        launch([machine.target.address(x) for x in (*found, *results)])(None)
    made = half_products, half_check_kernel
    for each in made:
        each.cache_clear()
    try:
        return half_check(machine.target, run)
    finally:
        for each in made:
            each.cache_clear()


@pytest.mark.parametrize("fault", [None, without_last_bits, without_last_bits_of_integers, without_subnormals])
def simulate_check(machine, monkeypatch, fault):
    """The sums of the simulator are exact; a unit that is not is found."""
    if fault:
        monkeypatch.setattr(half_check_module, "IN_PARTS", IN_PARTS[:1])  # some of the cases see it already
        monkeypatch.setattr(simulator.products, "_multiply_halves", fault(simulator.products._multiply_halves))
    assert checked(machine) == (fault is None)


@pytest.mark.parametrize("width", MINIMA_WIDTHS)
def simulate_check_of_minima(machine, monkeypatch, width):
    """A unit is found that forms no product without swizzle right, of so many columns."""
    def faulty(n):
        start = made(n)
        return start if n != width else lambda d, array, place, *words: start(d, array, place, *words[:3], int(words[3]) & 0xffff)
    made = simulator.unswizzled_product
    monkeypatch.setattr(half_check_module, "IN_PARTS", IN_PARTS[:1])
    monkeypatch.setattr(half_check_module, "weights_and_limbs", lambda fmt: [x[:4] for x in weights_and_limbs(fmt)])
    monkeypatch.setattr(simulator, "unswizzled_product", faulty)
    assert not checked(machine)


def call_of(n, target, m=14336, k=4096, type_="Q4_K"):
    return Call("mul_mat", "w x", target, dict(w=Operand(type_, (m, k), None), x=Operand("act", (n, k), None),
                                               out=Operand("f32", (n, m), None)))


def simulate_plan(machine):
    """Where they are exact and pay; else as before."""
    target = machine.target
    target.warpgroups, target.n_multiprocessors, target.shared_limit = True, 132, 227 << 10
    assert not isinstance(mul_mat.plan(call_of(512, target)), Halves)
    target.halves = True
    plans = [mul_mat.plan(call_of(n, target)) for n in (16, 32, 64, 512, 1024)]
    assert plans == [Halves(DENSE[i]) for i in (2, 1, 0, 0, 4)]
    assert not isinstance(mul_mat.plan(call_of(8, target)), Halves)
    assert mul_mat.plan(call_of(2048, target, 4096, 14336)) == Halves(WIDE)
    target.halves = False  # split formats want no products of float16
    assert mul_mat.plan(call_of(1024, target, type_="IQ4_XS")) == Halves(WIDE)
    with planned_without(HALVES):
        assert not isinstance(mul_mat.plan(call_of(1024, target, type_="IQ4_XS")), Halves)
    target.n_multiprocessors = 1  # has no cluster of two
    assert not isinstance(mul_mat.plan(call_of(1024, target, type_="IQ4_XS")), Halves)
    target.halves, target.n_multiprocessors = True, 132
    assert not isinstance(mul_mat.plan(call_of(32, target, 4096, 14336)), Halves)
    for type_, teams in ("Q4_1", True), ("NVFP4", True), ("IQ1_S", False), ("IQ2_K", False), ("MXFP4", False):
        plan = mul_mat.plan(call_of(64, target, 4096, 14336, type_))
        assert plan == Halves(DENSE[3]) if teams else not isinstance(plan, Halves), type_
    for type_, n in ("Q4_1", 512), ("Q4_1", 64), ("Q8_0", 512):
        matrices = dict.fromkeys(("gate", "up"), Operand(type_, (14336, 4096)))
        call = Call("mul_mat_glu", "act(w x) * u x", target, dict(
            **matrices, gate_bias=None, up_bias=None, act="silu", x=Operand("act", (n, 4096)), out=Operand("f32", (n, 14336))))
        call.plan = mul_mat_glu.plan(call)
        assert mul_mat_glu.declines(call), type_
    for type_, blocks in (("Q5_K", (None, 1, None, 0, 4)), ("Q2_K", (None, 1, None, None, None)),
                          ("Q3_K", (None, 1, None, None, None)), ("NVFP4", (None, 1, 0, 0, 4)),
                          ("IQ2_XXS", (None, 1, 0, 4, 4)), ("IQ3_S", (None, 1, 0, 4, 4)),
                          ("TQ2_0", (None,) * 5), ("IQ4_XS", (None, None, None, 4, 4)), ("MXFP4", (None, 1, 0, 0, 4)),
                          ("Q4_1", (None, 1, 0, 0, 0)), ("Q8_0", (None,) * 5)):
        plans = [mul_mat.plan(call_of(n, target, type_=type_)) for n in (16, 32, 64, 512, 1024)]
        assert [plan.block if isinstance(plan, Halves) else None for plan in plans] == [
            i if i is None else DENSE[i] for i in blocks], type_


def experts_call(n, n_rows, types, target):
    operands = dict(zip(("gate", "up"), (Operand(t, (128, n_rows, 2048)) for t in types)), x=Operand("act", (n, 2048)),
                    ids=Operand("i32", (n, 8)), out=Operand("f32", (8 * n, n_rows)))
    return Call("mul_mat_id_glu", "experts", target, operands)


def simulate_plan_of_experts(machine):
    """With many tokens, where matrices are of one format and fill blocks."""
    target = machine.target
    target.warpgroups, target.n_multiprocessors, target.shared_limit = True, 132, 227 << 10
    both = "Q4_K", "Q4_K"
    assert isinstance(mul_mat_id_glu.plan(experts_call(512, 768, both, target)), GroupedShape)
    target.halves = True
    for n, block in (128, EXPERTS[0]), (512, EXPERTS[1]), (1024, EXPERTS[1]), (2048, EXPERTS[2]):
        assert mul_mat_id_glu.plan(experts_call(n, 768, both, target)) == Halves(block)
    assert [mul_mat_id.half_block(both, 768, 768, n) for n in (16, 17, 127, 128)] == [EXPERTS[i] for i in (0, 1, 1, 2)]
    assert [mul_mat_id.half_block(("MXFP4",) * 2, 2880, 2880, n) for n in (16, 17, 128)] == [None, *EXPERTS[1:]]
    assert [mul_mat_id.half_block(("Q5_1",) * 2, 768, 768, n) for n in (16, 17, 128)] == [EXPERTS[0], None, EXPERTS[2]]  # no room
    assert [mul_mat_id.half_block(("Q6_K",) * 2, 768, 2048, n) for n in (16, 17, 32, 33)] == [EXPERTS[i] for i in (0, 1, 1, 2)]
    assert not any(mul_mat_id.half_block(("Q6_K",), 2048, 768, n) for n in (16, 17, 128))  # short rows
    for name in "Q5_K", "Q2_K", "Q3_K", "NVFP4", "IQ2_XXS", "IQ3_S":
        assert [mul_mat_id.half_block((name,) * 2, 768, 2048, n) for n in (16, 17, 128)] == [*EXPERTS]
    assert not any(mul_mat_id.half_block(("TQ2_0",) * 2, 768, 2048, n) for n in (16, 17, 128))
    assert isinstance(mul_mat_id_glu.plan(experts_call(512, 768, ("Q4_K", "Q6_K"), target)), GroupedShape)
    assert isinstance(mul_mat_id_glu.plan(experts_call(512, 64, both, target)), GroupedShape)
    assert isinstance(mul_mat_id_glu.plan(experts_call(8, 768, both, target)), FewShape)


@pytest.mark.parametrize("fmt", HALF_FORMATS, ids=lambda fmt: fmt.name)
def test_blocks_fit(fmt):
    """In shared memory of a multiprocessor of Hopper."""
    for block in (*dense_blocks(fmt), *expert_blocks(fmt)):
        assert half_bytes(fmt, block) <= 227 << 10, block


def test_all_blocks_of_teams_are_compiled():
    compiled = FACTORIES[mmq_half_kernel]
    for fmt in (*PACKED, *SCALED):
        if has_halves(fmt) and DENSE[3] in dense_blocks(fmt):
            assert (fmt.name, False, *astuple(DENSE[3])) in compiled and mul_mat.half_times(fmt).turn_us, fmt.name


def test_all_widths_are_checked():
    quads = {block.quads for block in (*DENSE, *EXPERTS)}
    assert {8 * n for n in quads} | {tokens_of_unit(n) for n in quads} == set(WIDTHS)
    for fmt in PACKED:
        parts = half_form(fmt).parts
        for block in (*dense_blocks(fmt), *expert_blocks(fmt)) if parts > 1 else ():
            n_kept = kept_sums(fmt, block)
            assert 8 * (n_kept // 2 if parts == 2 else together_of_quarters(n_kept)) in WIDTHS, (fmt.name, block)
    assert {8 * minima_together(n) for n in quads} <= set(MINIMA_WIDTHS)


@pytest.mark.parametrize("name, scales", [("IQ2_K", 0), ("IQ2_KS", 0), ("IQ3_KS", 0), ("Q3_K", 0), ("Q5_K", 0xff)])
def test_extremes_are_the_largest(name, scales):
    fmt = FORMATS[name]
    weight = extreme_weight(fmt, 1, CHUNK, scales, scales)
    assert abs(dequantize(weight, name, (1, CHUNK))).min() >= largest_weight(fmt) - fmt.max_imin


@pytest.mark.parametrize("name", IN_PARTS)
def test_cases_are_within_the_bounds(name):
    """No partial sum of what a GPU is asked passes 2^24, in whatever order products are added."""
    a, b = weights_and_limbs(FORMATS[name])
    most = (np.einsum("cik,cjk->cij", abs(a), abs(b)) + abs(np.einsum("cik,cjk->cij", a, b))) // 2
    assert (most <= EXACT).all()


def test_cases_of_scaled_are_within_the_bounds():
    a, b = levels_and_limbs()
    assert (np.einsum("cik,cjk->cij", abs(a), abs(b)) <= EXACT).all()


def test_activations_are_widened_for_all_blocks():
    """By kernels whose code is checked."""
    blocks = [(block.tokens, experts) for experts, blocks in ((False, DENSE), (True, EXPERTS)) for block in blocks]
    assert {(name, *each) for name in ("Q4_K", "Q5_K") for each in blocks} <= set(FACTORIES[half_limbs_kernel])


def test_bounds():
    """Of parts of a chunk, and of a whole one within `most_reach`; of scaled formats of the sums over both."""
    assert {fmt.name for fmt in SCALED} == {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_0", "MXFP4", "NVFP4"}
    assert [fmt.name for fmt in SCALED if half_form(fmt).halved] == ["MXFP4", "NVFP4"]
    assert max(fmt.max_level for fmt in SCALED) == MOST_LEVEL
    for fmt in SCALED:
        assert fmt.max_level * 32 * (128 * 127 + 64) <= EXACT
    assert {fmt.name: (half_form(fmt).tops, half_form(fmt).parts) for fmt in PACKED} == {
        "Q2_K": (False, 1), "Q3_K": (True, 1), "Q4_K": (False, 2), "Q5_K": (True, 4), "IQ3_KS": (False, 2),
        **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), (False, 4)),
        **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ1_M_R1", "IQ3_S", "TQ1_0", "TQ2_0", "IQ2_K", "IQ2_KS"), (False, 1))}
    for fmt in PACKED:
        w, parts = largest_weight(fmt), half_form(fmt).parts
        assert w <= 2048 and w * 127 * CHUNK // parts <= EXACT
        assert fmt.max_imin * 16 * 2032 <= EXACT
        if parts > 1:
            assert w * 127 * CHUNK // (parts // 2) > EXACT and not fmt.zero
            assert w * most_reach(fmt) <= EXACT < w * (most_reach(fmt) + 1)
    assert tuple(fmt.name for fmt in PACKED if half_form(fmt).parts > 1 and not half_form(fmt).signed) == IN_PARTS
