"""Mamba 2's recurrence, token by token (numerics, section 10)."""
from functools import partial

import numpy as np

from ..arith import add, exp, fma, mul, softplus
from ..compile import jit
from .gated_delta_net import dot8


@jit
def step(state, x, b, c, dt, bias, a, d, out):
    """One token and head. state: f32 [n_state, dim], written; x, out: f32 [dim]; b, c: f32 [n_state]; dt, bias, a, d: f32."""
    delta = softplus(add(dt, bias))
    decay = exp(mul(delta, a))
    for j in range(x.shape[0]):
        taken = mul(x[j], delta)
        for i in range(b.shape[0]):
            state[i, j] = fma(decay, state[i, j], mul(b[i], taken))
        out[j] = fma(d, x[j], dot8(c, state[:, j]))


@jit
def ssm_scan_arrays(state, x, dt, bias, a, d, runs, n_group, out):
    """state: f32 [rows, n_head, n_state, dim]; x: f32 [n, n_head * dim + 2 n_group * n_state]; dt: f32 [n, n_head]; bias, a, d:
    f32 [n_head]; runs: i32 [r, 3 + K] (`ops.primitive`); out: f32 [n, n_head, dim]."""
    n_head, n_state, dim = state.shape[1:]
    for run in runs:
        first, n, source = run[0], run[1], run[2]
        for head in range(n_head):
            of_b = n_head * dim + head // (n_head // n_group) * n_state
            of_c = of_b + n_group * n_state
            now = state[source, head].copy() if source >= 0 else np.zeros((n_state, dim), np.float32)
            for token in range(first, first + n):
                row = x[token]
                step(now, row[head * dim:(head + 1) * dim], row[of_b:of_b + n_state], row[of_c:of_c + n_state], dt[token, head],
                     bias[head], a[head], d[head], out[token, head])
                i = first + n - 1 - token
                if i < run.shape[0] - 3 and run[3 + i] >= 0:
                    state[run[3 + i], head] = now


def ssm_scan(call, kernel=ssm_scan_arrays):
    """Per head, with S the state and delta = softplus(dt + bias): S = exp(delta a) S + B (delta x); out = C S + d x.

    state: f32 [rows, n_head * n_state * dim], written; x: f32 [n, n_head * dim + 2 n_group * n_state], heads of x, groups of B,
    groups of C; dt: f32 [n, n_head]; bias, a, d: f32 [n_head]; runs: i32 [r, 3 + K]; out: f32 [n, n_head * dim]."""
    n, n_head = call.out.n_rows, call.n_head
    dim = call.out.n_cols // n_head
    return partial(kernel, call.state.data.reshape(-1, n_head, call.n_state, dim), call.x.data, call.dt.data,
                   *(each.data.reshape(-1) for each in (call.bias, call.a, call.d)), call.runs.data, call.n_group,
                   call.out.data.reshape(n, n_head, dim))
