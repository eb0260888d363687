"""Mamba 2's recurrence, token by token, with the states of heads in registers (numerics, section 10).

Columns of a head's state, its channels of x, do not depend on one another; a sum over the rows of one has eight partials, each of
every eighth row. Two kernels share them out among threads as those of `gated_delta_net` do, one for runs of many tokens and one
for runs of few: B and C are in the places of k and q, x in that of v. Blocks of the grid: x = columns, y = head, z = run; those
beyond a head's last column do what the last ones do.
"""
from functools import lru_cache

from numba import cuda

from .gated_delta_net import (BUFFERS, COLUMNS, FEW_TOKENS, MANY_RUNS, MANY_TOKENS, PARTIALS, SEVERAL_RUNS, STAGE, Token,
                              row_loader, state_access, sums8, total_of)
from .launch import F32, I32, Kernel, N, factory, need
from .operands import addresses
from .ptx import (add, copies_commit, copies_wait_but, copy1, device, exp, f32, fma, i32, i64, ld, lds, lds2, mul, shuffle,
                  softplus, st, st2, sts, u32)

STATES = 16, 32, 64, 128       # values of a channel
N_WARPS = 4                    # that compute, and as many that bring: of the kernel for many tokens
BLOCK = 4 * COLUMNS * N_WARPS  # its columns


@device
def gates(dt, bias, a):
    """(decay, delta) of a token and head."""
    delta = softplus(add(dt, bias))
    return exp(mul(delta, a)), delta


# Many tokens

@lru_cache(None)
def token_step(n_rows):
    """(step, finish)."""
    word, load_rows = Token(n_rows, N_WARPS), row_loader(n_rows)
    to_b, to_x, to_gates = word.k, word.v, word.gates

    @device
    def finish(y, x, skip, lane, out, to):
        """The outputs of a token, from their partials."""
        first, second = sums8(y[0], y[1], lane)
        if lane & 7 == 0:
            st2(out, to, fma(skip, x[0], first), fma(skip, x[1], second))

    @device
    def step(s, y, x, b, next_b, c, skip, stages, token, next_token, rows, column, lane, out, to):
        """A token with its B. stages[token ..], stages[next_token ..]: words of it and of the next one; rows: of the lane among
        those of B or C. next_b: receives that of the next token. y, x: the partials of the outputs of the token before, which go
        to element `to` of out, and its values; then those of this one."""
        decay, delta = lds2(stages, token + to_gates)
        now_x = lds2(stages, token + to_x + column)
        load_rows(stages, next_token + to_b + rows, next_b)
        load_rows(stages, token + rows, c)
        finish(y, x, skip, lane, out, to)
        for k in range(COLUMNS):
            x[k], y[k] = now_x[k], f32(0)
        taken = mul(x[0], delta), mul(x[1], delta)
        for m in range(n_rows):
            for k in range(COLUMNS):
                now = fma(decay, s[m * COLUMNS + k], mul(b[m], taken[k]))
                s[m * COLUMNS + k] = now
                y[k] = fma(c[m], now, y[k])
    return step, finish


@lru_cache(None)
def bringer(n_state):
    """What the warps that bring do."""
    threads, word = 32 * N_WARPS, Token(n_state // PARTIALS, N_WARPS)
    n_words, to_b, to_x, to_gates, stride = word.n_words, word.k, word.v, word.gates, word.stride
    at_once, wait, values_at_once = threads // n_state, copies_wait_but(1), threads // BLOCK

    @device
    def bring(tid, stages, x, dt, first, n, n_channels, of_b, of_c, of_x, n_columns, head, n_head, bias, a):
        """tid: among the threads that bring. of_b, of_c, of_x: where these are in a row of x; n_columns: of the block, those that
        there are."""
        row, value = i32(tid % n_state), i32(tid % BLOCK)
        where_b, where_c, where_x = of_b + row, of_c + row, of_x + min(value, n_columns - 1)
        to = i32((row & 7) * stride + (row >> 3))
        n_stages, stage = i32((n + STAGE - 1) // STAGE), i32(-BUFFERS + 1)
        while stage < n_stages:
            if stage >= 0:
                # All but the latest: this stage and the next one
                wait()
                if tid < STAGE and stage + 1 < n_stages:
                    make(stages, i32((stage + 1) % BUFFERS * STAGE + tid) * n_words + to_gates, bias, a)
                if tid < STAGE and stage == 0:
                    make(stages, i32(tid) * n_words + to_gates, bias, a)
                cuda.syncthreads()  # those that compute have the same ones
            ahead = i32(stage + BUFFERS - 1)
            if ahead < n_stages:
                buffer = i32(ahead % BUFFERS * STAGE)
                for i in range(0, STAGE, at_once):
                    slot = i32(i + tid // n_state)
                    of_token, at = i64(first + min(ahead * STAGE + slot, n - 1)) * n_channels, i32((buffer + slot) * n_words + to)
                    copy1(stages, at, x, of_token + where_c)
                    copy1(stages, at + to_b, x, of_token + where_b)
                for i in range(0, STAGE, values_at_once):
                    slot = i32(i + tid // BLOCK)
                    of_token = i64(first + min(ahead * STAGE + slot, n - 1)) * n_channels
                    copy1(stages, i32((buffer + slot) * n_words + to_x + value), x, of_token + where_x)
                if tid < STAGE:
                    token = i64(first + min(ahead * STAGE + tid, n - 1))
                    copy1(stages, i32((buffer + tid) * n_words + to_gates), dt, token * n_head + head)
            copies_commit()
            stage = i32(stage + 1)

    @device
    def make(stages, at, bias, a):
        """The gates of a token whose dt this thread has brought."""
        decay, delta = gates(lds(stages, at), bias, a)
        sts(stages, at, decay)
        sts(stages, at + 1, delta)
    return bring


@factory([(n_state,) for n_state in reversed(STATES)])
def ssm_scan_kernel(n_state):
    """For runs of many tokens."""
    n_rows, threads, word = n_state // PARTIALS, 32 * N_WARPS, Token(n_state // PARTIALS, N_WARPS)
    n_words, to_b, stride, n_values, end = word.n_words, word.k, word.stride, n_rows * COLUMNS, BUFFERS * STAGE * word.n_words
    (step, finish), load_rows, bring = token_step(n_rows), row_loader(n_rows), bringer(n_state)
    load, store = state_access(n_rows, COLUMNS)

    def kernel(state, x, dt, bias, a, d, runs, out, n_head, heads_of_group, n_group, dim, n_kept):
        stages = cuda.shared.array(end, f32)
        s, b, next_b, c = (cuda.local.array(n_values, f32), cuda.local.array(n_rows, f32), cuda.local.array(n_rows, f32),
                           cuda.local.array(n_rows, f32))
        y, values = cuda.local.array(COLUMNS, f32), cuda.local.array(COLUMNS, f32)
        tid, head, run = i32(cuda.threadIdx.x), i32(cuda.blockIdx.y), i64(cuda.blockIdx.z) * (3 + n_kept)
        first, n, source = ld(runs, run), ld(runs, run + 1), ld(runs, run + 2)
        if n <= 0:
            return
        first_column = i32(cuda.blockIdx.x * BLOCK)
        if shuffle(tid, 0) >= threads:  # by all lanes: the compiler must know
            of_b = i64(n_head) * dim + i64(u32(head) // u32(heads_of_group)) * n_state
            of_c, n_channels = of_b + i64(n_group) * n_state, i64(n_head) * dim + i64(2 * n_group) * n_state
            bring(i32(tid - threads), stages, x, dt, first, n, n_channels, of_b, of_c, i64(head) * dim + first_column,
                  i32(dim - first_column), head, n_head, ld(bias, head), ld(a, head))
            return

        lane, column, rows = tid & 31, i32(min((tid >> 3) * COLUMNS, dim - COLUMNS - first_column)), i32((tid & 7) * stride)
        row_values, place = i64(n_head) * n_state * dim, (i64(head) * n_state + (tid & 7)) * dim + first_column + column
        load(state, source, i64(source) * row_values + place, dim, s)
        # Outputs of the token before go out with a token; in the place of those before the first one, its own are written twice
        to, next_to, skip = (i64(first) * n_head + head) * dim + first_column + column, i64(n_head) * dim, ld(d, head)
        before = to
        y[0], y[1], values[0], values[1] = f32(0), f32(0), f32(0), f32(0)
        token, at, n_fast = i32(0), i32(0), i32(n - n_kept)  # tokens that are not kept go two at a time
        while token < n:
            cuda.syncthreads()  # the stage that begins here is there, and the first token of the next one
            if token == 0:
                load_rows(stages, to_b + rows, b)
            last = i32(min(token + STAGE, n))
            while token + 2 <= min(last, n_fast):
                step(s, y, values, b, next_b, c, skip, stages, at, at + n_words, rows, column, lane, out, before)
                after = i32(at + 2 * n_words)
                if after == end:
                    after = i32(0)
                step(s, y, values, next_b, b, c, skip, stages, at + n_words, after, rows, column, lane, out, to)
                before = to + next_to
                token, at, to = i32(token + 2), after, before + next_to
            while token < last:
                after = i32(at + n_words)
                if after == end:
                    after = i32(0)
                step(s, y, values, b, next_b, c, skip, stages, at, after, rows, column, lane, out, before)
                for m in range(n_rows):
                    b[m] = next_b[m]
                before = to
                token, at, to = i32(token + 1), after, to + next_to
                if n - token < n_kept:
                    row = ld(runs, run + 3 + n - token)
                    if row >= 0:
                        store(state, i64(row) * row_values + place, dim, s)
        finish(y, values, skip, lane, out, before)
    return Kernel(kernel, (F32, F32, F32, F32, F32, F32, I32, F32, N, N, N, N, N), 2 * threads)


# Few tokens

@factory([(n_state, n_columns) for n_state in reversed(STATES) for n_columns in (1, 2)])
def ssm_scan_few_kernel(n_state, n_columns):
    """For runs of few tokens. n_columns: of a lane."""
    n_rows, of_block, n_values = n_state // PARTIALS, 32 * n_columns, n_state // PARTIALS * n_columns
    (load, store), total = state_access(n_rows, n_columns), total_of(of_block)
    n_words, end = PARTIALS * of_block, 2 * PARTIALS * of_block

    def kernel(state, x, dt, bias, a, d, runs, out, n_head, heads_of_group, n_group, dim, n_kept):
        partials = cuda.shared.array(end, f32)  # of a token, while those of the one before are read
        s, b, c = cuda.local.array(n_values, f32), cuda.local.array(n_rows, f32), cuda.local.array(n_rows, f32)
        tid, head, run = i32(cuda.threadIdx.x), i32(cuda.blockIdx.y), i64(cuda.blockIdx.z) * (3 + n_kept)
        first, n, source = ld(runs, run), ld(runs, run + 1), ld(runs, run + 2)
        if n <= 0:
            return
        partial, mine, first_column = tid >> 5, i32((tid & 31) * n_columns), i32(cuda.blockIdx.x * of_block)
        column = i32(min(first_column + mine, dim - n_columns))
        row_values, place = i64(n_head) * n_state * dim, (i64(head) * n_state + partial) * dim + column
        load(state, source, i64(source) * row_values + place, dim, s)
        of_x, n_channels = i64(head) * dim, i64(n_head) * dim + i64(2 * n_group) * n_state
        of_b = i64(n_head) * dim + i64(u32(head) // u32(heads_of_group)) * n_state + partial
        of_c, bias_here, a_here, skip = of_b + i64(n_group) * n_state, ld(bias, head), ld(a, head), ld(d, head)
        token, buffer = i64(first), i32(0)
        while token < first + n:
            at, of_token = token * n_channels, token * n_head + head
            for m in range(n_rows):
                b[m], c[m] = ld(x, at + of_b + PARTIALS * m), ld(x, at + of_c + PARTIALS * m)
            decay, delta = gates(ld(dt, of_token), bias_here, a_here)
            for k in range(n_columns):
                taken, y = mul(ld(x, at + of_x + column + k), delta), f32(0)
                for m in range(n_rows):
                    now = fma(decay, s[m * n_columns + k], mul(b[m], taken))
                    s[m * n_columns + k] = now
                    y = fma(c[m], now, y)
                sts(partials, buffer + partial * of_block + mine + k, y)
            cuda.syncthreads()  # all partials are there, and those of the token before are read no more
            if tid < min(of_block, dim - first_column):
                value = ld(x, at + of_x + first_column + tid)
                st(out, of_token * dim + first_column + tid, fma(skip, value, total(partials, buffer + tid)))
            buffer = i32(n_words - buffer)
            token += 1
            if first + n - token < n_kept:
                row = ld(runs, run + 3 + first + n - token)
                if row >= 0:
                    store(state, i64(row) * row_values + place, dim, s)
    return Kernel(kernel, (F32, F32, F32, F32, F32, F32, I32, F32, N, N, N, N, N), 32 * PARTIALS, 2)


def check(call):
    dim = call.out.n_cols // call.n_head
    need(call.n_state in STATES, "n_state", call.n_state, ", ".join(map(str, STATES)))
    need(dim % 2 == 0, "channels of a head", dim, "an even number")
    need(call.n_head < 65536, "n_head", call.n_head, "up to 65535")
    need(call.runs.shape[0] < 65536, "runs", call.runs.shape[0], "up to 65535")


def plan(call) -> int:
    """Columns of a lane where runs have few tokens: as many as leave enough blocks; or MANY_TOKENS."""
    n_runs = call.runs.shape[0]
    if call.out.n_rows > (FEW_TOKENS if n_runs >= MANY_RUNS else 1) * n_runs:
        return MANY_TOKENS
    return 2 if n_runs >= SEVERAL_RUNS and call.out.n_cols // call.n_head > 32 else 1


def ssm_scan(call):
    """Per head, with S the state and delta = softplus(dt + bias): S = exp(delta a) S + B (delta x); out = C S + d x.

    state: f32 [rows, n_head * n_state * dim], written; x: f32 [n, n_head * dim + 2 n_group * n_state], heads of x, groups of B,
    groups of C; dt: f32 [n, n_head]; bias, a, d: f32 [n_head]; runs: i32 [r, 3 + K]; out: f32 [n, n_head * dim]; state and out on
    8 bytes."""
    n_head, (n_runs, width), device = call.n_head, call.runs.shape, call.device
    dim = call.out.n_cols // n_head
    args = (*addresses(call.state, call.x, call.dt, call.bias, call.a, call.d, call.runs, call.out), n_head,
            n_head // call.n_group, call.n_group, dim, width - 3)
    if call.plan != MANY_TOKENS:
        kernel = ssm_scan_few_kernel(call.n_state, call.plan)
        return device.launch(kernel, (-(-dim // (32 * call.plan)), n_head, n_runs), kernel.n_threads, args)
    kernel, n_parts = ssm_scan_kernel(call.n_state), -(-dim // BLOCK)
    # As in gated_delta_net: where each block can have a multiprocessor, none shares one
    shared = device.shared_limit // 2 if n_parts * n_head * n_runs <= device.n_multiprocessors else 0
    return device.launch(kernel, (n_parts, n_head, n_runs), kernel.n_threads, args, shared=shared)
