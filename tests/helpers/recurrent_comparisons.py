"""Ops of recurrent layers on a machine (`cuda_simulator`) and on the CPU, against their definitions, bit for bit."""
import numpy as np

from matmul_comparisons import EPS, SPECIAL, activations, seeded
from op_runs import check_op

LENGTHS = (3, 0, 1, 17, 2)
N_ROWS = 23  # of a state


def runs_of(lengths, n_kept: int, rng: np.random.Generator) -> np.ndarray:
    """A table of runs (`ops.primitive`): every second sequence begins anew, of the others some write the row that they read;
    every third state is not kept. Rows that no run names are left."""
    runs, rows = np.full((len(lengths), 3 + n_kept), -1, np.int32), iter(rng.permutation(N_ROWS).tolist())
    for i, (run, n) in enumerate(zip(runs, lengths)):
        run[:2] = sum(lengths[:i]), n
        run[3:] = [-1 if (i + j) % 3 == 2 else next(rows) for j in range(n_kept)]
        if i % 2 == 0:
            run[2] = run[3] if i % 4 == 0 and run[3] >= 0 else next(rows)
    return runs


def delta_net_case(dim: int, n_head_k: int, n_head_v: int, lengths, n_kept: int, rng) -> list[np.ndarray]:
    """state, qkv, g, beta, runs: decays of 0, 1 and between, and what is no number in the last sequence."""
    n = sum(lengths)
    state = activations(N_ROWS, n_head_v * dim * dim, rng)
    qkv = activations(n, (2 * n_head_k + n_head_v) * dim, rng)
    g, beta = -np.exp(2 * rng.standard_normal((n, n_head_v))).astype(np.float32), rng.random((n, n_head_v)).astype(np.float32)
    g[::5], g[1::7] = 0, -200
    if n > 3:
        qkv[-1, :len(SPECIAL)] = SPECIAL[:qkv.shape[1]]
    return [state, qkv, g, beta, runs_of(lengths, n_kept, rng)]


def check_gated_delta_net(machine, dim, n_head_k, n_head_v, tiled, lengths=LENGTHS, n_kept=3, plan=None) -> None:
    """plan: columns of a lane."""
    name = f"gated_delta_net[{dim}, {n_head_k}, {n_head_v}, {tiled}, {lengths}, {n_kept}, {plan}]"
    operands = delta_net_case(dim, n_head_k, n_head_v, lengths, n_kept, seeded(name))
    check_op(machine, name, "gated_delta_net", *operands, n_head_k=n_head_k, n_head_v=n_head_v, tiled=tiled, plan=plan)


def check_gated_delta_net_gates(machine, dim, n_head_v, lengths=LENGTHS, n_kept=3) -> None:
    name = f"gated_delta_net_gates[{dim}, {n_head_v}, {lengths}, {n_kept}]"
    rng = seeded(name)
    state, qkv, a, b, runs = delta_net_case(dim, 1, n_head_v, lengths, n_kept, rng)
    dt, of_head = rng.standard_normal((2, n_head_v)).astype(np.float32)
    a, b = (rng.standard_normal(a.shape).astype(np.float32) for _ in range(2))
    check_op(machine, name, "gated_delta_net_gates", state, qkv, a, dt, -np.exp(of_head), b, runs, n_head_k=1, n_head_v=n_head_v,
             tiled=True)


def ssm_scan_case(n_state: int, dim: int, n_head: int, n_group: int, lengths, n_kept: int, rng) -> list[np.ndarray]:
    """state, x, dt, bias, a, d, runs: decays of 0, 1 and between, and what is no number in the last sequence."""
    n, inner = sum(lengths), n_head * dim
    state, x = activations(N_ROWS, inner * n_state, rng), activations(n, inner + 2 * n_group * n_state, rng)
    dt = (3 * rng.standard_normal((n, n_head))).astype(np.float32)
    dt[::5], dt[1::7] = -100, 90
    if n > 3:
        x[-1, :len(SPECIAL)] = SPECIAL[:x.shape[1]]
    bias, a, d = rng.standard_normal((3, n_head)).astype(np.float32)
    return [state, x, dt, bias, -np.exp(a), d, runs_of(lengths, n_kept, rng)]


def check_ssm_scan(machine, n_state, dim, n_head, n_group, lengths=LENGTHS, n_kept=3, plan=None) -> None:
    """plan: columns of a lane."""
    name = f"ssm_scan[{n_state}, {dim}, {n_head}, {n_group}, {lengths}, {n_kept}, {plan}]"
    check_op(machine, name, "ssm_scan", *ssm_scan_case(n_state, dim, n_head, n_group, lengths, n_kept, seeded(name)),
             n_head=n_head, n_group=n_group, n_state=n_state, plan=plan)


def conv_case(n_channels: int, taps: int, lengths, n_kept: int, rng, biased: bool = False) -> list[np.ndarray]:
    """state, x, w, runs, and a bias if there is one."""
    x = activations(sum(lengths), n_channels, rng)
    x.reshape(-1)[-len(SPECIAL):] = SPECIAL[:x.size]
    w = rng.standard_normal((n_channels, taps)).astype(np.float32)
    bias = [activations(1, n_channels, rng)[0]] * biased
    return [activations(N_ROWS, (taps - 1) * n_channels, rng), x, w, runs_of(lengths, n_kept, rng), *bias]


def check_ssm_conv(machine, n_channels, taps, lengths=LENGTHS, n_kept=3, activation="silu", biased=False) -> None:
    name = f"ssm_conv[{n_channels}, {taps}, {lengths}, {n_kept}, {activation}, {biased}]"
    check_op(machine, name, "ssm_conv", *conv_case(n_channels, taps, lengths, n_kept, seeded(name), biased),
             activation=activation)


def check_l2_norm(machine, n, n_head, dim, n_cols, eps=EPS) -> None:
    name = f"l2_norm[{n}, {n_head}, {dim}, {n_cols}, {eps}]"
    x = activations(n, n_cols, seeded(name))
    x[0, :dim] = 0
    x.reshape(-1)[-len(SPECIAL):] = SPECIAL[:x.size]
    check_op(machine, name, "l2_norm", x, n_head=n_head, dim=dim, eps=eps, in_place="x")
