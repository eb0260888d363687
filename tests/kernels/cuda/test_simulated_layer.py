"""What one cluster computes in one launch, in the simulator: by smaller clusters than a GPU's."""
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.cuda.dense_layer_shape import Shape
from layer_comparisons import check_dense_layer
from matmul_comparisons import check_add_rms_norm_topk_moe


def test_in_the_simulator():
    run_in_simulator(__file__)


@pytest.fixture
def machine():
    machine = SimulatedMachine()
    machine.target.cc, machine.target.shared_limit = (9, 0), 227 << 10
    return machine


# Tiles that not all blocks have, two chunks, formats with codebooks, also two beside one that is not read, zeros, both kinds of
# scales; pieces that blocks share, or take one after the other, of which one is left out, or whose channels two blocks share;
# blocks without heads; rotation of a part of a head; the gated unit in the place of the pieces; key and value that go to another
# cell than that of their position
@pytest.mark.parametrize("types, n_cols, heads, dim, n_ff, n_ctx, position, n_blocks, options", [
    (("Q4_1",) * 7, 64, (2, 1), 32, 96, 128, 0, 2, {"zeros": True}),
    (("Q8_0", "Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_0", "Q4_1"), 288, (4, 2), 32, 96, 300, 270, 3, {"holes": range(128, 256)}),
    (("IQ4_NL",) * 7, 96, (3, 1), 64, 288, 300, 140, 2, {"neox": True, "n_rot": 32}),
    (("Q4_K", "Q6_K", "Q5_K", "Q4_1", "IQ2_S", "Q6_K", "Q4_K"), 256, (4, 1), 64, 512, 256, 130, 5, {"neox": True}),
    (("IQ2_KL", "IQ2_S", "IQ3_S", "IQ3_S", "IQ2_KL", "IQ2_S", "IQ2_KL"), 256, (4, 1), 64, 256, 64, 9, 3, {}),
    (("Q4_1",) * 7, 64, (2, 1), 64, 64, 300, 260, 2, {"behind": 100}),
    (("Q4_1",) * 7, 64, (8, 1), 96, 64, 128, 100, 2, {"behind": 30, "neox": True}),
])
def simulate_layer(machine, types, n_cols, heads, dim, n_ff, n_ctx, position, n_blocks, options):
    shape = Shape(types, n_cols, *heads, dim, n_ff, options.get("n_rot", dim) // 2, options.get("neox", False), n_blocks)
    check_dense_layer(machine, types, n_cols, heads, dim, n_ff, n_ctx, position, plan=shape, **options)


# Clusters of 2, 4, 8 and 16 blocks, of which the last have no rows, or no whole eight of them; some eights of rows in a block;
# more chunks than warps, than blocks, and than a round of the quantization has; rows that end within a chunk; NaN and zeros
@pytest.mark.parametrize("type_, n_expert, n_cols, most_warps, options", [
    ("F32", 1, 32, 2, {"k": 1}), ("F16", 12, 288, 2, {"gating": "sigmoid", "bias_of": "choice", "factor": 2.5}),
    ("BF16", 32, 1284, 4, {"gating": "softmax_of_chosen", "norm": False, "bias_of": "logits"}),
    ("F32", 60, 260, 2, {"k": 8}), ("F32", 136, 520, 2, {"k": 8, "norm": False}), ("F16", 16, 544, 2, {"kind": 1}),
    ("F32", 9, 2308, 2, {"kind": 2, "k": 9}), ("F32", 128, 256, 2, {"kind": 3}),
    ("F32", 128, 256, 2, {"limit": 16000})])
def simulate_routing(machine, type_, n_expert, n_cols, most_warps, options):
    check_add_rms_norm_topk_moe(machine, type_, n_expert, n_cols, most_warps=most_warps, **options)
