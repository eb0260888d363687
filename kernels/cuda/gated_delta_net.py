"""The gated delta rule, token by token, with the states of heads in registers (numerics, section 10).

Columns of a state do not depend on one another. Eight lanes share columns: lane p has the rows p, p + 8, p + 16, .. of them,
which are its partial of dot8, so that a sum is three additions across lanes. A lane has one or two columns where there are many
tokens, that a head has many warps; or four, that a state is read and written by 16 bytes.

A token takes one pass over the registers: it updates them, and makes the partials of the outputs and of the next token's dot with
k at once. Their sums go side by side, at the beginning of the next token's step: nothing but these sums and the pass waits for
another. Q, K and V of some tokens at a time (a stage) are copied to shared memory, in the order in which lanes take them, while
others are computed; of three buffers one is written, one is read, and of one the first token is.
"""
from functools import lru_cache

import numpy as np
from numba import cuda

from .launch import F32, I32, Kernel, N, factory, need
from .operands import addresses
from .ptx import (add, as_f32, as_i32, copies_wait, copy1, device, exp, f32, fma, i32, i64, ld, ld4, lds, lds4, mul, shuffle,
                  sigmoid, softplus, st, st4, sts, u32)

LANES = 8                # that share columns: the partials of dot8
DIMS = 16, 32, 64, 128   # channels of a head
BUFFERS = 3              # of stages
MOST_STAGED = 8          # tokens of a stage
MOST_WARPS = {1: 8, 2: 4, 4: 4}  # of a block, by a lane's columns
NOWHERE = -(1 << 62)     # negative, as many tokens as there may be further on
FEW_TOKENS = 4           # of each run: up to so many are bound by the state's way from and to memory
SEVERAL_RUNS, MANY_RUNS = 4, 8


def n_warps(dim: int, n_columns: int) -> int:
    """Of a block, for lanes of n_columns."""
    return min(MOST_WARPS[n_columns], dim // (4 * n_columns))


def n_staged(dim: int, n_columns: int) -> int:
    """Tokens of a stage: a thread brings four values of q and of k."""
    return min(MOST_STAGED, 32 * n_warps(dim, n_columns) // (dim // 4))


@device
def sum8(x, lane):
    """The sum of dot8's partials, those of eight neighbouring lanes, for each of them."""
    for distance in (4, 2, 1):
        x = add(x, as_f32(shuffle(as_i32(x), lane ^ distance)))
    return x


@lru_cache(None)
def row_loader(n_rows, stride):
    """stride: words from the values of one lane to those of the next."""
    @device
    def load_rows(buffer, token, lane, values):
        """values = those of a lane's rows of a token's head of q or k."""
        at = i32((token * LANES + (lane & 7)) * stride)
        if n_rows >= 4:
            for m in range(0, n_rows, 4):
                values[m], values[m + 1], values[m + 2], values[m + 3] = lds4(buffer, at + m)
        else:
            for m in range(n_rows):
                values[m] = lds(buffer, at + m)
    return load_rows


@lru_cache(None)
def token_step(dim, n_columns, of_block, stride):
    """(step, finish)."""
    n_rows = dim // LANES
    load_rows, scale = row_loader(n_rows, stride), np.float32(1) / np.sqrt(np.float32(dim))

    @device
    def step(s, seen, y, k, next_k, q, buffers, slot, next_slot, lane, column, out, to):
        """A token, whose q, v and gates are in `slot`, with its k. next_k: receives that of the next token; seen, y: the partials
        of this token's dot with k and of the outputs of the token before, which go to element `to` of out, if that is not
        negative; then those of the next token's dot, and of this one's outputs."""
        ks, qs, vs, gates = buffers
        load_rows(qs, slot, lane, q)
        load_rows(ks, next_slot, lane, next_k)
        decay, beta = lds(gates, 2 * slot), lds(gates, 2 * slot + 1)
        finish(y, lane, out, to)
        for c in range(n_columns):
            delta = mul(beta, fma(-decay, sum8(seen[c], lane), lds(vs, slot * of_block + column + c)))
            seen[c], y[c] = f32(0), f32(0)
            for m in range(n_rows):
                now = fma(k[m], delta, mul(decay, s[m * n_columns + c]))
                s[m * n_columns + c] = now
                y[c] = fma(q[m], now, y[c])
                seen[c] = fma(next_k[m], now, seen[c])

    @device
    def finish(y, lane, out, to):
        """The outputs of a token, from their partials."""
        for c in range(n_columns):
            x = mul(sum8(y[c], lane), scale)
            if to >= 0:
                st(out, to + c, x)
    return step, finish


@lru_cache(None)
def state_store(dim, n_columns):
    @device
    def store(state, at, s):
        """Writes a lane's rows and columns, from element `at` on."""
        for m in range(dim // LANES):
            where = at + m * LANES * dim
            if n_columns == 4:
                st4(state, where, s[4 * m], s[4 * m + 1], s[4 * m + 2], s[4 * m + 3])
            else:
                for c in range(n_columns):
                    st(state, where + c, s[m * n_columns + c])
    return store


# (g, beta, dt, of_head) -> (logarithm of the decay, beta), of a token and head
@device
def given(g, beta, dt, of_head):
    return g, beta


@device
def made(a, b, dt, of_head):
    return mul(softplus(add(a, dt)), of_head), sigmoid(b)


@factory([(dim, n_columns, makes) for dim in DIMS for n_columns in (1, 2, 4) for makes in (False, True)])
def gated_delta_net_kernel(dim, n_columns, makes):  # noqa: PLR0915 (the same)
    """makes: the gates too."""
    gates_of = made if makes else given
    n_rows = dim // LANES
    stride = n_rows if n_rows <= 4 else n_rows + 4  # so that the lanes' 16 bytes lie in different banks
    threads, of_block = 32 * n_warps(dim, n_columns), 4 * n_columns * n_warps(dim, n_columns)  # columns of a block
    of_stage, load_rows = n_staged(dim, n_columns), row_loader(n_rows, stride)
    n_words, n_values = BUFFERS * of_stage * LANES * stride, BUFFERS * of_stage * of_block
    n_gates, n_state = 2 * BUFFERS * of_stage, n_rows * n_columns  # of a lane
    (step, finish), store = token_step(dim, n_columns, of_block, stride), state_store(dim, n_columns)

    def kernel(state, qkv, g, beta, dt, of_head, runs, out, n_head_k, n_head_v, tiled, n_kept):  # noqa: PLR0915 (it is all in registers)
        ks, qs = cuda.shared.array(n_words, f32), cuda.shared.array(n_words, f32)
        vs, gates = cuda.shared.array(n_values, f32), cuda.shared.array(n_gates, f32)
        s, k, q = cuda.local.array(n_state, f32), cuda.local.array(n_rows, f32), cuda.local.array(n_rows, f32)
        next_k, seen, y = cuda.local.array(n_rows, f32), cuda.local.array(n_columns, f32), cuda.local.array(n_columns, f32)
        tid = i32(cuda.threadIdx.x)
        lane, at = tid & 31, i64(cuda.blockIdx.y) * (3 + n_kept)
        first, n, source = ld(runs, at), ld(runs, at + 1), ld(runs, at + 2)
        buffers = ks, qs, vs, gates
        if n <= 0:
            return
        n_parts = dim // of_block
        head, first_column = i32(cuda.blockIdx.x // n_parts), i32(cuda.blockIdx.x % n_parts * of_block)
        heads_k, heads_v = u32(n_head_k), u32(n_head_v)
        head_k = i32(u32(head) % heads_k) if tiled else i32(u32(head) // u32(heads_v // heads_k))
        column = i32((tid >> 3) * n_columns)  # of a lane, in its block
        row_values, place = i64(n_head_v) * dim * dim, (i64(head) * dim + (lane & 7)) * dim + first_column + column
        n_channels = i64(2 * n_head_k + n_head_v) * dim

        # Where a token's outputs and those before them go: a lane of eight stores, and before the first token there are none
        output, before = i64(NOWHERE), i64(NOWHERE)
        if lane & 7 == 0:
            output = (i64(first) * n_head_v + head) * dim + first_column + column
        for c in range(n_columns):
            y[c] = f32(0)

        # The state
        for m in range(n_rows):
            where = i64(source) * row_values + place + m * LANES * dim
            if n_columns == 4:
                a, b, c, d = f32(0), f32(0), f32(0), f32(0)
                if source >= 0:
                    a, b, c, d = ld4(state, where)
                s[4 * m], s[4 * m + 1], s[4 * m + 2], s[4 * m + 3] = a, b, c, d
            else:
                for c in range(n_columns):
                    s[m * n_columns + c] = ld(state, where + c) if source >= 0 else f32(0)

        # What this thread brings of each stage: four values of q and of k, n_columns of v, the gates of a token
        staged_token, staged = tid // (dim // 4), i32(tid % (dim // 4) * 4)
        of_v, value = i32(tid // (of_block // n_columns)), i32(tid % (of_block // n_columns) * n_columns)
        per_head, per_head_too = f32(0), f32(0)
        if makes:
            per_head, per_head_too = ld(dt, head), ld(of_head, head)
        n_stages = i32((n + of_stage - 1) // of_stage)
        stage = i32(-2)
        while stage < n_stages:
            copies_wait()
            if stage >= -1 and stage + 1 < n_stages and tid < of_stage:  # its own copies are there
                at_gates = 2 * ((stage + 1) % BUFFERS * of_stage + tid)
                log_decay, strength = gates_of(lds(gates, at_gates), lds(gates, at_gates + 1), per_head, per_head_too)
                sts(gates, at_gates, exp(log_decay))
                sts(gates, at_gates + 1, strength)
            cuda.syncthreads()  # the next stage is there, and the buffer that is written now is read no more
            if stage + 2 < n_stages:
                buffer = i32((stage + 2) % BUFFERS * of_stage)
                token = i32(min((stage + 2) * of_stage + staged_token, n - 1))
                if staged_token < of_stage:
                    where = i64(first + token) * n_channels + i64(head_k) * dim + staged
                    to = i32((buffer + staged_token) * LANES * stride + (staged & 7) * stride + (staged >> 3))
                    for i in range(4):
                        copy1(qs, to + i * stride, qkv, where + i)
                        copy1(ks, to + i * stride, qkv, where + i64(n_head_k) * dim + i)
                token = i32(min((stage + 2) * of_stage + of_v, n - 1))
                if of_v < of_stage:
                    where = i64(first + token) * n_channels + (i64(2 * n_head_k) + head) * dim + first_column + value
                    for c in range(n_columns):
                        copy1(vs, (buffer + of_v) * of_block + value + c, qkv, where + c)
                if tid < of_stage:
                    where = i64(first + min((stage + 2) * of_stage + tid, n - 1)) * n_head_v + head
                    copy1(gates, 2 * (buffer + tid), g, where)
                    copy1(gates, 2 * (buffer + tid) + 1, beta, where)
            if stage == -1:  # the first token's dot with the state before it
                load_rows(ks, i32(0), lane, k)
                for c in range(n_columns):
                    seen[c] = f32(0)
                    for m in range(n_rows):
                        seen[c] = fma(k[m], s[m * n_columns + c], seen[c])
            if stage >= 0:
                slot, behind = i32(stage % BUFFERS * of_stage), i32((stage + 1) % BUFFERS * of_stage)
                token, last = i32(stage * of_stage), i32(min(stage * of_stage + of_stage, n))
                # Two at a time, whose k are in each other's place; most of them are not kept
                while token < last and stage * of_stage + of_stage <= n - n_kept:
                    step(s, seen, y, k, next_k, q, buffers, slot, slot + 1, lane, column, out, before)
                    before, output = output, output + i64(n_head_v) * dim
                    after = i32(slot + 2) if token + 2 < last else behind
                    step(s, seen, y, next_k, k, q, buffers, slot + 1, after, lane, column, out, before)
                    before, output = output, output + i64(n_head_v) * dim
                    slot, token = i32(slot + 2), i32(token + 2)
                while token < last:
                    step(s, seen, y, k, next_k, q, buffers, slot, slot + 1, lane, column, out, before)
                    before, output = output, output + i64(n_head_v) * dim
                    if n - token <= n_kept:
                        row = ld(runs, at + 2 + n - token)
                        if row >= 0:
                            store(state, i64(row) * row_values + place, s)
                    if token + 1 < last:
                        after = i32(slot + 2) if token + 2 < stage * of_stage + of_stage else behind
                        step(s, seen, y, next_k, k, q, buffers, slot + 1, after, lane, column, out, before)
                        before, output = output, output + i64(n_head_v) * dim
                        if n - token - 1 <= n_kept:
                            row = ld(runs, at + 1 + n - token)
                            if row >= 0:
                                store(state, i64(row) * row_values + place, s)
                    slot, token = i32(slot + 2), i32(token + 2)
            stage = i32(stage + 1)
        finish(y, lane, out, before)
    return Kernel(kernel, (F32, F32, F32, F32, F32, F32, I32, F32, N, N, N, N), threads)


def check(call):
    dim = call.out.n_cols // call.n_head_v
    need(dim in DIMS, "channels of a head", dim, ", ".join(map(str, DIMS)))
    need(call.runs.shape[0] < 65536, "runs", call.runs.shape[0], "up to 65535")


def plan(call) -> int:
    """Columns of a lane: four where several runs have few tokens each, or there are many runs (docs/kernels-log.md)."""
    n, n_runs = call.out.n_rows, call.runs.shape[0]
    return 4 if n_runs >= MANY_RUNS or (n_runs >= SEVERAL_RUNS and n <= FEW_TOKENS * n_runs) else 1


def gated_delta_net(call):
    """Per value head, with S the state: S = exp(g) S; d = beta (v - S k); S = S + k d; out = S q / sqrt(dim).

    state: f32 [rows, n_head_v * dim * dim], written; qkv: f32 [n, (2 n_head_k + n_head_v) * dim]; g, beta: f32 [n, n_head_v];
    runs: i32 [r, 3 + K]; out: f32 [n, n_head_v * dim]; state and qkv on 16 bytes."""
    return by_head(call, False, call.g, call.beta, call.g, call.g)


def gated_delta_net_gates(call):
    """gated_delta_net with g = softplus(a + dt) * of_head and beta = sigmoid(b).

    a, b: f32 [n, n_head_v]; dt, of_head: f32 [n_head_v]; all else as there."""
    return by_head(call, True, call.a, call.b, call.dt, call.of_head)


def by_head(call, makes: bool, *gates):
    dim, (n_runs, width) = call.out.n_cols // call.n_head_v, call.runs.shape
    warps = n_warps(dim, call.plan)
    grid = call.n_head_v * (dim // (4 * call.plan * warps)), n_runs
    args = (*addresses(call.state, call.qkv, *gates, call.runs, call.out), call.n_head_k, call.n_head_v, int(call.tiled),
            width - 3)
    return call.device.launch(gated_delta_net_kernel(dim, call.plan, makes), grid, 32 * warps, args)
