"""Gated delta nets over thousands of tokens: the error stays within what follows from each rounding, and NaN in its sequence."""
import numpy as np
import pytest
from op_runs import plain

from ggml_py.backends.cpu import CPUBackend
from ggml_py.check.evaluate import evaluate
from ggml_py.testing import assert_bitwise_equal

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
