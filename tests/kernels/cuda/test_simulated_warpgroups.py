"""Products of warpgroups (`wgmma`) in the simulator, against the reference bit for bit."""
from dataclasses import astuple, replace

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.cuda.mmq import SHARED_LIMIT, Block, team_blocks
from ggml_py.quant.formats import FORMATS
from matmul_comparisons import activations, check_extremes, check_mul_mat, check_mul_mat_glu, check_mul_mat_qkv, seeded
from thread_order import hold_back, hold_back_at_leave

HALF = Block(1, 1, 16, True)  # half a warpgroup, of which the simulator asks for warps only
TWO_WARPGROUPS = Block(4, 1, 16, True, 3)


@pytest.fixture
def machine():
    return SimulatedMachine()


def test_in_the_simulator():
    run_in_simulator(__file__, "-k", "not left_late")


def test_late_warps_in_the_simulator():
    run_in_simulator(__file__, "-k", "left_late")


@pytest.mark.parametrize("name, n_cols", [
    ("Q8_0", 288),     # groups of 32
    ("Q4_0", 32),      # with a zero point
    ("Q4_1", 32),      # with minima
    ("NVFP4", 64),     # groups of 16
    ("Q1_0", 256),     # groups of 128
    ("TQ2_0", 256),    # a group of 256 without integer scales
    ("Q2_K", 256),     # with them for 16 columns, and minima
    ("Q4_K", 512),     # for 32 columns
    ("Q6_K", 256),     # with a zero point
    ("IQ4_XS", 256),   # without
    ("IQ2_XS", 256)])  # and lanes of eight columns
def simulate_mmq(machine, name, n_cols):
    check_mul_mat(machine, name, 31, n_cols, 9, HALF)


@pytest.mark.parametrize("name, n_rows, n_cols, n", [
    ("TQ2_0", 129, 1280, 65),
    ("IQ4_XS", 129, 1280, 3),  # by turns
    ("Q4_K", 100, 1024, 3)])   # whose sums are followed up behind a chunk, with a barrier for each
def simulate_mmq_slots(machine, name, n_rows, n_cols, n):
    """Warpgroups that go each at its own pace, and copy before and after their products; slots used again;
    rows and tokens beyond a block."""
    check_mul_mat(machine, name, n_rows, n_cols, n, TWO_WARPGROUPS)


@pytest.mark.parametrize("name, n_rows, n_cols, n, block", [
    ("Q4_K", 31, 1024, 9, Block(1, 1, 16, True, 4, 2)),   # each team half of the chunks
    ("Q4_K", 31, 1792, 9, Block(1, 1, 16, True, 3, 2)),   # by turns in the same slots
    ("Q8_0", 31, 544, 3, Block(1, 1, 4, True, 8, 4)),     # the last team has none
    ("Q6_K", 33, 2304, 5, Block(2, 1, 4, True, 8, 4)),    # one chunk in the last turn
    ("Q4_0", 31, 1408, 9, Block(1, 1, 8, True, 9, 3)),    # parts of the sums that are not equal
    ("TQ2_0", 31, 1280, 9, Block(1, 1, 8, True, 4, 2)),
    ("Q4_K", 33, 2560, 9, Block(1, 1, 16, True, 2, 1, 2, 2)),         # a team in each block of a cluster
    ("Q4_K", 33, 1280, 9, Block(1, 1, 16, True, 3, 1, 3, 2)),         # of three, whose parts are no whole turns of the ending
    ("Q8_0", 65, 1568, 17, Block(2, 1, 4, True, 4, 2, 2)),
    ("Q6_K", 31, 1536, 40, Block(1, 1, 8, True, 4, 2, 2)),
    ("Q4_0", 31, 2304, 9, Block(1, 1, 8, True, 5, 3, 2)),
    ("IQ4_XS", 31, 256, 9, Block(1, 1, 16, True, 3, 2, 2)),           # of four teams one has a chunk
    ("IQ6_K", 31, 256, 9, Block(1, 1, 16, True, 3, 2, 2, 2)),         # and with room for two turns
    ("Q8_0", 65, 4896, 17, Block(2, 1, 16, True, 3, 2, 2, 2)),
    ("MXFP4", 31, 7680, 5, Block(1, 1, 8, True, 5, 4, 2, 2)),
    ("Q8_0", 31, 3328, 3, Block(1, 1, 4, True, 5, 3)),     # slots that are filled anew behind the products of another team
    ("Q8_0", 31, 3584, 3, Block(1, 1, 4, True, 6, 4)),
    ("Q4_0", 31, 7680, 3, Block(1, 1, 4, True, 5, 4, 2)),
    ("Q4_0", 31, 2816, 3, Block(1, 1, 4, True, 4, 3)),
    ("Q4_K", 33, 4864, 37, Block(2, 1, 8, True, 5, 4, 2)),  # threads that do not remember where their pieces begin
    ("Q5_1", 31, 832, 9, Block(1, 1, 4, True, 4, 2)),     # sums followed by minima
    ("NVFP4", 31, 576, 9, Block(1, 1, 8, True, 4, 2))])   # and by scales for 16 columns
def simulate_teams(machine, name, n_rows, n_cols, n, block):
    """Teams give each other the sums of their chunks."""
    check_mul_mat(machine, name, n_rows, n_cols, n, block)


@pytest.mark.parametrize("name, n_rows, n_cols, n, block", [
    ("Q4_K", 31, 1280, 9, Block(1, 1, 16, True, 3, copiers=2)),   # slots used again
    ("Q8_0", 65, 1568, 61, Block(2, 1, 16, True, 3, copiers=4)),  # levels from shared memory,
    ("Q8_0", 129, 800, 65, Block(4, 1, 16, True, 3, copiers=4)),  # of two pairs of tiles,
    ("Q8_0", 65, 1568, 61, Block(2, 2, 8, True, 3, copiers=4)),   # by two warpgroups for the same rows
    ("IQ4_XS", 129, 1280, 3, Block(4, 1, 16, True, 3, copiers=4)),  # warpgroups by turns
    ("TQ2_0", 31, 256, 9, Block(1, 1, 16, True, 3, copiers=2)),   # fewer chunks than slots
    ("Q2_K", 129, 768, 5, Block(4, 1, 16, True, 3, copiers=4)),    # with minima
    ("Q2_K", 31, 1536, 9, Block(1, 1, 16, True, 4, copiers=2)),    # four slots, one limb,
    ("IQ2_KS", 31, 1536, 9, Block(1, 1, 16, True, 4, copiers=2)),  # two of signed levels
    ("Q6_K", 33, 2304, 5, Block(1, 1, 8, True, 5, 4, copiers=2)),
    ("Q4_0", 31, 2816, 9, Block(1, 1, 8, True, 5, 3, copiers=2)),
    ("Q4_1", 33, 2560, 9, Block(1, 1, 16, True, 3, 2, 2, 2, 2)),
    ("MXFP4", 31, 7680, 5, Block(1, 1, 8, True, 5, 4, 2, 2, 2)),
    ("Q8_0", 65, 4896, 17, Block(2, 1, 16, True, 3, 2, 2, 2, 4)),
    ("IQ2_XXS", 31, 1280, 9, Block(1, 1, 16, True, 3, 2, 2, 2, 2)),  # codebooks
    ("Q8_0", 33, 1024, 9, Block(2, 1, 8, True, 5, 4, 2, 1, 4))])
def simulate_copiers(machine, name, n_rows, n_cols, n, block):
    """Warps that only copy, beside those that multiply."""
    check_mul_mat(machine, name, n_rows, n_cols, n, block)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("sides", [1, 2])
def simulate_copiers_of_blocks_apart(machine, monkeypatch, late, sides):
    """One block of a cluster does nothing that the other one need not wait for."""
    hold_back(monkeypatch, lambda cluster: set(cluster.blocks[late].threads))
    check_mul_mat(machine, "Q4_0", 31, 2304, 9, Block(1, 1, 8, True, 5, 3, 2, sides, 2))


def halved(block):
    """With a tile, and half of the copiers."""
    return replace(block, row_tiles=1, copiers=block.copiers // 2)


TEAMS = sorted({astuple(halved(block)) for fmt in FORMATS.values() if fmt.is_quantized
                for block in team_blocks((fmt.name,), SHARED_LIMIT) if block.quads > 4 and block.n_teams > 1})


@pytest.mark.parametrize("block", TEAMS, ids=str)
@pytest.mark.parametrize("late", ["first", "last"])
def simulate_teams_whose_slots_are_left_late(machine, monkeypatch, block, late):
    """A warp lags behind all others when it tells that it is done with a slot; of all numbers of slots that there are."""
    block = Block(*block)
    held = hold_back_at_leave(monkeypatch, 0 if late == "first" else block.n_multiplying // 32 - 1)
    check_mul_mat(machine, "Q4_0", 31, 44 * 256, 5, block)
    assert held.all


@pytest.mark.parametrize("names, n_rows, n, block", [
    (("Q4_K",) * 3, (33, 31, 65), 9, Block(1, 1, 4, True, 4, 2, 2)),
    (("Q8_0", "Q8_0", "Q6_K"), (31, 33, 1), 3, Block(1, 1, 4, True, 3, 2)),
    (("Q8_0", "Q8_0", "Q6_K"), (65, 1, 64), 3, Block(2, 1, 8, True, 5, 2, copiers=4)),
    (("Q4_K", "Q6_K", "Q4_K"), (65, 1, 64), 5, Block(2, 1, 4, True, 3))])  # a single team
@pytest.mark.parametrize("biased", [False, True])
def simulate_three_matrices(machine, names, n_rows, n, block, biased):
    """In one launch, of one format or of several."""
    check_mul_mat_qkv(machine, names, n_rows, 768, n, biased, block)


@pytest.mark.parametrize("names", [("Q8_0", "Q4_K"), ("IQ4_XS", "Q3_K")])
def simulate_glu_slots(machine, names):
    """Barriers of one matrix end before those of the next begin."""
    check_mul_mat_glu(machine, "silu", names, 33, 512, 2, False, TWO_WARPGROUPS)


@pytest.mark.parametrize("name", ["Q6_K", "IQ3_S"])
def simulate_extremes(machine, name):
    check_extremes(machine, name, 0x80, 0x7f, 1, HALF)


def simulate_special(machine):
    """Chunks of zeros, of too small values, or with d = NaN."""
    x = activations(5, 512, seeded("special"))
    x[:, :256] = 0
    x[:, 3] = [np.inf, np.nan, 0, 1e-35, 1]
    check_mul_mat(machine, "Q4_K", 2, 512, 5, HALF, x)
