"""The gated delta rule, token by token (numerics, section 10)."""
from functools import partial

import numpy as np

from ..arith import add, div, exp, f32, fma, i2f, mul, sqrt
from ..compile import jit

PARTIALS = 8  # of dot8


@jit
def dot8(x, y):
    """x, y: f32 [n] -> their product in 8 interleaved partials."""
    partial = np.zeros(PARTIALS, np.float32)
    for i in range(x.shape[0]):
        partial[i % PARTIALS] = fma(x[i], y[i], partial[i % PARTIALS])
    w = PARTIALS // 2
    while w > 0:
        for j in range(w):
            partial[j] = add(partial[j], partial[j + w])
        w //= 2
    return partial[0]


@jit
def step(state, q, k, v, g, beta, scale, out):
    """One token and head. state: f32 [dim, dim], key channels outside, written; q, k, v, out: f32 [dim]; g, beta, scale: f32."""
    decay = exp(g)
    for j in range(v.shape[0]):
        seen = dot8(k, state[:, j])
        delta = mul(beta, fma(-decay, seen, v[j]))
        for i in range(k.shape[0]):
            state[i, j] = fma(k[i], delta, mul(decay, state[i, j]))
        out[j] = mul(dot8(q, state[:, j]), scale)


@jit
def gated_delta_net_arrays(state, q, k, v, g, beta, runs, tiled, out):
    """state: f32 [rows, n_head_v, dim, dim]; q, k: f32 [n, n_head_k, dim]; v, out: f32 [n, n_head_v, dim]; g, beta: f32
    [n, n_head_v]; runs: i32 [r, 3 + K] (`ops.primitive`)."""
    n_head_v, dim = v.shape[1], v.shape[2]
    scale = div(f32(1), sqrt(i2f(np.int32(dim))))
    for run in runs:
        first, n, source = run[0], run[1], run[2]
        for head in range(n_head_v):
            head_k = head % q.shape[1] if tiled else head // (n_head_v // q.shape[1])
            now = state[source, head].copy() if source >= 0 else np.zeros((dim, dim), np.float32)
            for token in range(first, first + n):
                step(now, q[token, head_k], k[token, head_k], v[token, head], g[token, head], beta[token, head], scale,
                     out[token, head])
                i = first + n - 1 - token
                if i < run.shape[0] - 3 and run[3 + i] >= 0:
                    state[run[3 + i], head] = now


def gated_delta_net(call, kernel=gated_delta_net_arrays):
    """Per value head, with S the state: S = exp(g) S; d = beta (v - S k); S = S + k d; out = S q / sqrt(dim).

    state: f32 [rows, n_head_v * dim * dim], written; qkv: f32 [n, (2 n_head_k + n_head_v) * dim]; g, beta: f32 [n, n_head_v];
    runs: i32 [r, 3 + K]; out: f32 [n, n_head_v * dim]."""
    n, n_k, n_v = call.out.n_rows, call.n_head_k, call.n_head_v
    dim = call.out.n_cols // n_v
    heads = call.qkv.data.reshape(n, 2 * n_k + n_v, dim)
    return partial(kernel, call.state.data.reshape(-1, n_v, dim, dim), heads[:, :n_k], heads[:, n_k:2 * n_k], heads[:, 2 * n_k:],
                   call.g.data, call.beta.data, call.runs.data, call.tiled, call.out.data.reshape(n, n_v, dim))
