"""A layer in one launch, in the simulator: by smaller clusters of smaller blocks than a GPU's."""
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.cuda.dense_layer import Shape
from layer_comparisons import check_dense_layer


def test_in_the_simulator():
    run_in_simulator(__file__)


@pytest.fixture
def machine():
    machine = SimulatedMachine()
    machine.target.cc, machine.target.shared_limit = (9, 0), 227 << 10
    return machine


# Tiles that not all blocks have, two chunks, formats with codebooks, zeros and both kinds of scales; pieces that blocks share, or
# take one after the other, of which one is left out; blocks without heads; rotation of a part of a head
@pytest.mark.parametrize("types, n_cols, heads, dim, n_ff, n_ctx, position, n_blocks, options", [
    (("Q4_1",) * 7, 64, (2, 1), 32, 96, 128, 0, 2, {"zeros": True}),
    (("Q8_0", "Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_0", "Q4_1"), 288, (4, 2), 32, 96, 300, 270, 3, {"holes": range(128, 256)}),
    (("IQ4_NL",) * 7, 96, (3, 1), 64, 288, 300, 140, 2, {"neox": True, "n_rot": 32}),
])
def simulate_layer(machine, types, n_cols, heads, dim, n_ff, n_ctx, position, n_blocks, options):
    shape = Shape(types, n_cols, *heads, dim, n_ff, n_blocks, 8)
    check_dense_layer(machine, types, n_cols, heads, dim, n_ff, n_ctx, position, plan=shape, **options)
