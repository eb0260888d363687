"""Ops of recurrent layers on the CPU: equal to the definition bit for bit, with one thread and two, whatever the vector
instructions; gated delta nets and Mamba 2 over thousands of tokens: the error stays within what follows from each rounding, and
NaN in its sequence."""
import numpy as np
import pytest
from cpu_comparisons import compare, numbers, seeded
from op_runs import plain, values
from recurrent_comparisons import conv_case, delta_net_case, ssm_scan_case

from ggml_py.backends.cpu import CPUBackend
from ggml_py.check.evaluate import evaluate
from ggml_py.kernels.cpu.gated_delta_net import gated_delta_net_arrays
from ggml_py.kernels.cpu.ssm_scan import ssm_scan_arrays
from ggml_py.kernels.cpu.vector import available_isas
from ggml_py.kernels.reference import gated_delta_net as reference, ssm_scan as reference_scan
from ggml_py.testing import assert_bitwise_equal


@pytest.mark.parametrize("dim, n_head_k, n_head_v, tiled", [(8, 1, 1, False), (16, 2, 6, True), (24, 2, 4, False),
                                                            (64, 1, 3, True), (128, 2, 4, False)])
@pytest.mark.parametrize("n_kept", [1, 3, 5])
def test_gated_delta_net(dim, n_head_k, n_head_v, tiled, n_kept, n_threads):
    name, params = f"{dim} {n_head_k} {n_head_v} {tiled} {n_kept}", dict(n_head_k=n_head_k, n_head_v=n_head_v, tiled=tiled)
    compare(name, "gated_delta_net", *delta_net_case(dim, n_head_k, n_head_v, (3, 0, 1, 17), n_kept, seeded(name)), **params)


@pytest.mark.parametrize("n_state, dim, n_head, n_group", [(8, 6, 1, 1), (16, 80, 4, 2), (32, 64, 2, 1), (128, 64, 3, 3)])
@pytest.mark.parametrize("n_kept", [1, 4])
def test_ssm_scan(n_state, dim, n_head, n_group, n_kept, n_threads):
    name, params = f"{n_state} {dim} {n_head} {n_group} {n_kept}", dict(n_head=n_head, n_group=n_group, n_state=n_state)
    compare(name, "ssm_scan", *ssm_scan_case(n_state, dim, n_head, n_group, (3, 0, 1, 17), n_kept, seeded(name)), **params)


@pytest.mark.parametrize("op, case, params, step_of", [
    ("gated_delta_net", lambda rng: delta_net_case(40, 1, 2, (9, 1), 2, rng), dict(n_head_k=1, n_head_v=2, tiled=True),
     lambda call, isa: reference.gated_delta_net(call, gated_delta_net_arrays(40, isa))),
    ("ssm_scan", lambda rng: ssm_scan_case(16, 40, 2, 1, (9, 1), 2, rng), dict(n_head=2, n_group=1, n_state=16),
     lambda call, isa: reference_scan.ssm_scan(call, ssm_scan_arrays(16, isa)))], ids=["gated_delta_net", "ssm_scan"])
@pytest.mark.parametrize("isa", available_isas())
def test_every_instruction_set(isa, op, case, params, step_of):
    operands = values(op, case(seeded(isa)))
    expected = evaluate(CPUBackend("reference"), op, operands, params)

    class OfIsa(CPUBackend):
        def step(self, call):
            return step_of(call, isa)
    for (a,), (b,) in zip(evaluate(OfIsa(), op, operands, params), expected, strict=True):
        assert_bitwise_equal(a, b, isa)


@pytest.mark.parametrize("n_channels, taps, n_kept", [(40, 4, 3), (257, 3, 1), (8, 2, 5), (20000, 4, 2)])
def test_ssm_conv(n_channels, taps, n_kept, n_threads):
    name = f"{n_channels} {taps} {n_kept}"
    compare(name, "ssm_conv", *conv_case(n_channels, taps, (30, 0, 1, 2, 3), n_kept, seeded(name)))


@pytest.mark.parametrize("activation, biased", [("silu", True), ("none", False), ("none", True)])
def test_ssm_conv_with_bias_and_without_activation(activation, biased, n_threads):
    name = f"{activation} {biased}"
    compare(name, "ssm_conv", *conv_case(257, 3, (30, 0, 1, 2, 3), 2, seeded(name), biased), activation=activation)


@pytest.mark.parametrize("n_head, dim, k", [(3, 16, 70), (2, 128, 256), (9, 40, 361), (1, 512, 512)])
def test_l2_norm(n_head, dim, k, n_threads):
    x = numbers((5, k), seeded(f"{dim}"))
    compare(f"{n_head} of {dim}", "l2_norm", x, n_head=n_head, dim=dim, eps=1e-6)


def test_l2_norm_near_eps():
    """eps is added to the sum of squares: ggml's op of this name would take the larger of root and eps."""
    x, eps = np.float32([[1e-3, 0, 0, 0], [0, 3e-4, 0, 4e-4], [0, 0, 0, 0], [2, 0, 0, 0]]), 1e-6
    (found,), = evaluate(CPUBackend(), "l2_norm", [plain("x", x)], dict(n_head=1, dim=4, eps=eps))
    exact = x.astype(np.float64)
    assert np.allclose(found, exact / np.sqrt((exact**2).sum(1, keepdims=True) + eps), rtol=1e-6)
    assert abs(found[0, 0] - 2**-0.5) < 1e-6 and not found[2].any()


N, DIM, U = 8192, 128, 2.0**-24
DECAYS = {
    "one": lambda rng: np.zeros(N), "near one": lambda rng: np.full(N, -1e-6), "0.9": lambda rng: np.full(N, np.log(0.9)),
    "near zero": lambda rng: np.full(N, -80.0), "zero": lambda rng: np.full(N, -200.0),
    "all": lambda rng: -np.exp(4 * rng.standard_normal(N) - 3),
}


def compute(qkv, g, beta, runs, n_head_k=1):
    n_v = g.shape[1]
    dim = qkv.shape[1] // (2 * n_head_k + n_v)
    state = np.full((runs[:, 3:].max() + 1, n_v * dim * dim), 7, np.float32)
    operands = [plain("state", state), plain("qkv", qkv), plain("g", g), plain("beta", beta), plain("runs", runs)]
    (out,), (state,) = evaluate(CPUBackend(), "gated_delta_net", operands, dict(n_head_k=n_head_k, n_head_v=n_v, tiled=False))
    return out, state


def bounded(q, k, v, g, beta):
    """(outputs in float64, a bound of the error of the definition's), [n, channels] each.

    With E the error of a column's state, the exact update turns it into γ (I − β k kᵀ) E, which is no longer than E for a unit k
    and β <= 1; the rounding of each operation adds to it."""
    s, error = np.zeros((DIM, DIM)), np.zeros(DIM)
    out, bound, sigma = np.empty((N, DIM)), np.empty((N, DIM)), DIM**-0.5
    exp_error, dot_error = 4 * U, (DIM // 8 + 3) * U  # relative; of the sum of |k_i S_ij|
    for t in range(N):
        decay = np.exp(g[t])
        size = np.linalg.norm(s, axis=0) + error
        delta = beta[t] * (v[t] - decay * (k[t] @ s))
        of_delta = beta[t] * decay * size * (dot_error + exp_error) + 3 * U * beta[t] * (np.abs(v[t]) + decay * size)
        s = decay * s + np.outer(k[t], delta)
        error = 1.0001 * (decay * error + decay * size * (exp_error + 2 * U) + 1.0001 * of_delta + U * np.abs(delta))
        out[t] = sigma * (q[t] @ s)
        bound[t] = 1.001 * sigma * (error + (np.linalg.norm(s, axis=0) + error) * (dot_error + 4 * U))
    return out, bound


@pytest.mark.parametrize("name", DECAYS)
def test_long_inputs(name):
    rng = np.random.default_rng(len(name))
    qkv = rng.standard_normal((N, 3 * DIM)).astype(np.float32)
    (qkv,), = evaluate(CPUBackend(), "l2_norm", [plain("x", qkv)], dict(n_head=2, dim=DIM, eps=1e-6))
    g, beta = DECAYS[name](rng)[:, None].astype(np.float32), rng.random((N, 1)).astype(np.float32)
    found, state = compute(qkv, g, beta, np.int32([[0, N, -1, 0]]))
    q, k, v = np.split(qkv.astype(np.float64), 3, axis=1)
    expected, bound = bounded(q, k, v, g[:, 0].astype(np.float64), beta[:, 0].astype(np.float64))
    error = np.abs(found - expected)
    assert (error <= bound).all() and np.isfinite(state).all()
    # the bound says something: a fault of one in a thousand would be seen
    assert bound.max() < 1e-3 * max(np.abs(expected).max(), 1e-3) * (60 if name in ("one", "near one") else 1), bound.max()


def scanned(x, dt, a, d, n_state, runs):
    """(out, state) of one head and group."""
    state = np.full((runs[:, 3:].max() + 1, (x.shape[1] - 2 * n_state) * n_state), 7, np.float32)
    operands = values("ssm_scan", [state, x, dt, np.zeros(1, "f4"), np.float32([a]), np.float32([d]), runs])
    (out,), (state,) = evaluate(CPUBackend(), "ssm_scan", operands, dict(n_head=1, n_group=1, n_state=n_state))
    return out, state


@pytest.mark.parametrize("delta, a", [(0.01, -1e-4), (0.1, -1), (3, -30), (60, -4), (None, -1)])
def test_long_inputs_of_mamba(delta, a):
    """With E the error of a state value of size |S|: a token makes it γ (E + |S| times what γ loses) + what B x delta loses."""
    rng, n_state, dim = np.random.default_rng(0), DIM, 8
    x = rng.standard_normal((N, dim + 2 * n_state)).astype(np.float32)
    delta = np.full(N, delta) if delta else np.exp(rng.uniform(-5, 4, N))
    dt = np.where(delta > 20, delta, np.log(np.expm1(np.minimum(delta, 20))))[:, None].astype(np.float32)
    found, state = scanned(x, dt, a, 0.5, n_state, np.int32([[0, N, -1, 0]]))
    exact, t = x.astype(np.float64), dt[:, 0].astype(np.float64)
    delta = np.where(t > 20, t, np.log1p(np.exp(np.minimum(t, 20))))
    of_delta = 4 * U * (1 + delta)  # log takes 1 + exp(dt), rounded
    s, error, size = (np.zeros((n_state, dim)) for _ in range(3))
    bound, expected = np.empty((N, dim)), np.empty((N, dim))
    for i in range(N):
        values_, b, c = exact[i, :dim], exact[i, dim:dim + n_state, None], exact[i, dim + n_state:, None]
        decay, taken = np.exp(delta[i] * a), np.abs(b * values_)
        of_decay = -a * (of_delta[i] + U * delta[i]) + 4 * U
        error = 1.0001 * (decay * (error + of_decay * size) + taken * (of_delta[i] + 4 * U * delta[i]))
        size = decay * size + taken * delta[i]
        s = decay * s + b * values_ * delta[i]
        expected[i] = (c * s).sum(0) + 0.5 * values_
        bound[i] = 1.01 * ((np.abs(c) * (error + (n_state // 8 + 4) * U * size)).sum(0) + 4 * U * np.abs(values_))
    assert (np.abs(found - expected) <= bound).all() and np.isfinite(state).all()
    # the bound says something: a fault of one in a thousand would be seen, but where nothing is forgotten
    assert bound.max() < 1e-3 * np.abs(expected).max() * (300 if a > -1e-3 else 1), bound.max() / np.abs(expected).max()


def test_nan_stays_in_its_sequence():
    """And in its head, and in its channel of v."""
    rng = np.random.default_rng(0)
    n, dim = 12, 16
    qkv, g = rng.standard_normal((n, 4 * dim)).astype(np.float32), -rng.random((n, 2)).astype(np.float32)
    beta, runs = rng.random((n, 2)).astype(np.float32), np.int32([[0, 4, -1, 0], [4, 4, -1, 1], [8, 4, -1, 2]])
    expected, expected_state = compute(qkv, g, beta, runs)
    for where, value in ((5, 0), np.nan), ((5, dim + 3), np.inf), ((6, 2 * dim + 1), np.nan), ((4, 3 * dim), -np.inf):
        bad = qkv.copy()
        bad[where] = value
        found, state = compute(bad, g, beta, runs)
        others = [0, 1, 2, 3, 8, 9, 10, 11]
        assert_bitwise_equal(found[others], expected[others], "out")
        assert_bitwise_equal(state[[0, 2]], expected_state[[0, 2]], "state")
        assert np.isnan(found[4:8]).any() or np.isinf(found[4:8]).any()
        if where[1] >= 2 * dim:
            same = np.arange(2 * dim) != where[1] - 2 * dim
            assert_bitwise_equal(found[:, same], expected[:, same], "other channels")
