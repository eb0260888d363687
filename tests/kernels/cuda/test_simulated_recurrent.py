"""Ops of recurrent layers in the simulator; and what their modules refuse."""
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.base.errors import UserError
from ggml_py.check.evaluate import make_node
from ggml_py.kernels.cuda import ssm_conv
from ggml_py.kernels.cuda.gated_delta_net import MANY_TOKENS
from matmul_comparisons import seeded
from op_runs import MachineBackend, values
from recurrent_comparisons import (check_gated_delta_net, check_gated_delta_net_gates, check_l2_norm, check_ssm_conv,
                                    check_ssm_scan, conv_case, delta_net_case, ssm_scan_case)


def test_in_the_simulator():
    run_in_simulator(__file__)


@pytest.fixture
def machine():
    return SimulatedMachine()


@pytest.mark.parametrize("dim, n_head_k, n_head_v, tiled", [(16, 2, 4, False), (32, 1, 1, True)])
@pytest.mark.parametrize("plan", [MANY_TOKENS, 1])
def simulate_gated_delta_net(machine, dim, n_head_k, n_head_v, tiled, plan):
    check_gated_delta_net(machine, dim, n_head_k, n_head_v, tiled, plan=plan)


@pytest.mark.parametrize("plan", [MANY_TOKENS, 1])
def simulate_heads_with_each_others_keys(machine, plan):
    check_gated_delta_net(machine, 16, 2, 6, True, (9, 1), 1, plan)


@pytest.mark.parametrize("dim, plan", [(64, MANY_TOKENS), (64, 1), (64, 2), (128, MANY_TOKENS), (128, 1), (128, 2), (128, 4)])
def simulate_large_heads(machine, dim, plan):
    check_gated_delta_net(machine, dim, 1, 1, True, (2, 1), 2, plan)


@pytest.mark.parametrize("n", [7, 8, 9, 31, 32, 33, 70])
def simulate_many_stages(machine, n):
    """As many as there are buffers, and more; with the last ones full and not."""
    check_gated_delta_net(machine, 16, 1, 1, True, (n,), 2, MANY_TOKENS)


@pytest.mark.parametrize("lengths", [(9, 1, 2), (2, 1, 4)])
def simulate_gated_delta_net_gates(machine, lengths):
    """By either kernel."""
    check_gated_delta_net_gates(machine, 16, 2, lengths)


@pytest.mark.parametrize("tile", [64, 5])
@pytest.mark.parametrize("n_channels, taps, n_kept", [(40, 4, 3), (257, 3, 1), (8, 2, 5)])
def simulate_ssm_conv(machine, n_channels, taps, n_kept, tile, monkeypatch):
    monkeypatch.setattr(ssm_conv, "TILE", tile)
    ssm_conv.ssm_conv_kernel.cache_clear()
    check_ssm_conv(machine, n_channels, taps, n_kept=n_kept)
    ssm_conv.ssm_conv_kernel.cache_clear()


@pytest.mark.parametrize("activation, biased", [("silu", True), ("none", False), ("none", True)])
def simulate_ssm_conv_with_bias_and_without_activation(machine, activation, biased):
    check_ssm_conv(machine, 40, 3, (3, 0, 17), 2, activation, biased)


@pytest.mark.parametrize("n_state, dim, n_head, n_group", [(16, 6, 4, 2), (32, 40, 1, 1)])
@pytest.mark.parametrize("plan", [MANY_TOKENS, 1])
def simulate_ssm_scan(machine, n_state, dim, n_head, n_group, plan):
    check_ssm_scan(machine, n_state, dim, n_head, n_group, plan=plan)


@pytest.mark.parametrize("n_state, dim, plan", [(64, 34, MANY_TOKENS), (64, 34, 1), (128, 64, MANY_TOKENS), (128, 66, 2)])
def simulate_large_states(machine, n_state, dim, plan):
    check_ssm_scan(machine, n_state, dim, 1, 1, (2, 1), 2, plan)


@pytest.mark.parametrize("n", [7, 8, 9, 33])
def simulate_ssm_scan_of_many_stages(machine, n):
    check_ssm_scan(machine, 16, 8, 1, 1, (n,), 2, MANY_TOKENS)


@pytest.mark.parametrize("n, n_head, dim, n_cols", [(2, 3, 16, 70), (1, 2, 128, 256), (3, 9, 40, 361), (1, 1, 512, 512)])
def simulate_l2_norm(machine, n, n_head, dim, n_cols):
    check_l2_norm(machine, n, n_head, dim, n_cols)


@pytest.mark.parametrize("op, operands, params, message", [
    ("gated_delta_net", delta_net_case(24, 1, 2, (3,), 1, seeded("a")), dict(n_head_k=1, n_head_v=2, tiled=True),
     "channels of a head is 24, allowed: 16, 32, 64, 128"),
    ("ssm_scan", ssm_scan_case(24, 8, 2, 1, (3,), 1, seeded("d")), dict(n_head=2, n_group=1, n_state=24),
     "n_state is 24, allowed: 16, 32, 64, 128"),
    ("ssm_scan", ssm_scan_case(16, 7, 2, 1, (3,), 1, seeded("e")), dict(n_head=2, n_group=1, n_state=16),
     "channels of a head is 7, allowed: an even number"),
    ("ssm_conv", conv_case(8, 9, (3,), 1, seeded("b")), {}, "taps is 9, allowed: 2 to 8"),
    ("l2_norm", [seeded("c").random((2, 520)).astype("f4")], dict(n_head=1, dim=520, eps=1e-6),
     "channels of a head is 520, allowed: 1..512"),
])
def simulate_refusals(machine, op, operands, params, message):
    backend = MachineBackend(machine)
    with pytest.raises(UserError, match=message):
        backend.prepare(make_node(backend, op, values(op, operands), params)[0])
