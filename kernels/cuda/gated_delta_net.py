"""The gated delta rule, token by token, with the states of heads in registers (numerics, section 10).

Columns of a state do not depend on one another; a sum over the rows of one has eight partials, each of every eighth row. Two
kernels share them out among threads, one for runs of many tokens and one for runs of few.
"""
from functools import lru_cache

import numpy as np
from numba import cuda

from .launch import F32, I32, Kernel, N, factory, need
from .operands import addresses
from .ptx import (add, as_f32, as_i32, copies_commit, copies_wait_but, copy1, device, exp, f32, fma, i32, i64, ld, ld2, ld4, lds,
                  lds2, lds4, mul, shuffle, sigmoid, softplus, st, st2, st4, sts, u32)

PARTIALS = 8             # of dot8
DIMS = 16, 32, 64, 128   # channels of a head
FEW_TOKENS = 4           # of each of many runs: up to so many are bound by the state's way from and to memory
MANY_TOKENS = 0          # the plan of the kernel for many tokens; of the other one, a plan is a lane's columns
SEVERAL_RUNS, MANY_RUNS = 4, 8


# (g, beta, dt, of_head) -> (logarithm of the decay, beta), of a token and head
@device
def given(g, beta, dt, of_head):
    return g, beta


@device
def made(a, b, dt, of_head):
    return mul(softplus(add(a, dt)), of_head), sigmoid(b)


@device
def key_head(head, n_head_k, n_head_v, tiled):
    """The head of q and k of a value head."""
    return i32(u32(head) % u32(n_head_k)) if tiled else i32(u32(head) // u32(u32(n_head_v) // u32(n_head_k)))


def row_access(n_columns):
    """(load, store) of neighbouring columns of a state's row, in values[at], values[at + 1], ..."""
    @device
    def load(state, where, values, at):
        if n_columns == 4:
            values[at], values[at + 1], values[at + 2], values[at + 3] = ld4(state, where)
        elif n_columns == 2:
            values[at], values[at + 1] = ld2(state, where)
        else:
            values[at] = ld(state, where)

    @device
    def store(state, where, values, at):
        if n_columns == 4:
            st4(state, where, values[at], values[at + 1], values[at + 2], values[at + 3])
        elif n_columns == 2:
            st2(state, where, values[at], values[at + 1])
        else:
            st(state, where, values[at])
    return load, store


def state_access(n_rows, n_columns):
    """(load, store) of the rows and columns of a thread, from the element `where` of its first row on, `dim` columns a row."""
    load_row, store_row = row_access(n_columns)

    @device
    def load(state, row, where, dim, s):
        """row: the state's, negative for one of zeros."""
        for m in range(n_rows):
            for c in range(n_columns):
                s[m * n_columns + c] = f32(0)
            if row >= 0:
                load_row(state, where + m * PARTIALS * dim, s, m * n_columns)

    @device
    def store(state, where, dim, s):
        for m in range(n_rows):
            store_row(state, where + m * PARTIALS * dim, s, m * n_columns)
    return load, store


# Many tokens
#
# Eight lanes share two columns: lane p has the rows p, p + 8, p + 16, .. of them, its partials. A token takes one pass over the
# registers: it updates them, and makes the partials of the outputs and of the next token's dot with k at once. Their sums go side
# by side, at the beginning of the next token's step: nothing but these sums and the pass waits for another.
#
# Half of a block's warps compute. The others bring q, k, v and gates of a stage of tokens to shared memory, in the order in which
# lanes take them, three stages ahead; one barrier for each stage keeps both together. So the instructions of a warp that computes
# are those of the rule, and each scheduler has one such warp and one that brings.

COLUMNS = 2   # of a lane
STAGE = 8     # tokens
BUFFERS = 4   # of stages: one is computed, of one the first token's k is read, two are on their way


def n_warps(dim: int) -> int:
    """That compute, and as many that bring."""
    return min(4, dim // (4 * COLUMNS))


@device
def sums8(a, b, lane):
    """The sums of dot8's partials, those of eight neighbouring lanes, for each of them."""
    for distance in (4, 2, 1):
        other_a, other_b = shuffle(as_i32(a), lane ^ distance), shuffle(as_i32(b), lane ^ distance)
        a, b = add(a, as_f32(other_a)), add(b, as_f32(other_b))
    return a, b


class Token:
    """Words of a token in a stage: q, k, both as lanes take them, v of the block's columns, decay and beta."""
    def __init__(self, n_rows: int, n_warps: int):
        """n_rows: of a lane."""
        self.stride = n_rows if n_rows <= 4 else n_rows + 4  # so that the lanes' 16 bytes lie in different banks
        self.k = PARTIALS * self.stride
        self.v = 2 * self.k
        self.gates = self.v + 4 * COLUMNS * n_warps
        self.n_words = self.gates + 4


@lru_cache(None)
def row_loader(n_rows):
    @device
    def load_rows(stages, at, values):
        """values = those of a lane's rows of q or k."""
        if n_rows >= 4:
            for m in range(0, n_rows, 4):
                values[m], values[m + 1], values[m + 2], values[m + 3] = lds4(stages, at + m)
        else:
            for m in range(n_rows):
                values[m] = lds(stages, at + m)
    return load_rows


@lru_cache(None)
def token_step(dim):
    """(load_rows, step, finish)."""
    n_rows, scale = dim // PARTIALS, np.float32(1) / np.sqrt(np.float32(dim))
    word, load_rows = Token(n_rows, n_warps(dim)), row_loader(n_rows)
    to_k, to_v, to_gates = word.k, word.v, word.gates

    @device
    def finish(y, lane, out, to):
        """The outputs of a token, from their partials."""
        a, b = sums8(y[0], y[1], lane)
        if lane & 7 == 0:
            st2(out, to, mul(a, scale), mul(b, scale))

    @device
    def step(s, seen, y, k, next_k, q, stages, token, next_token, rows, column, lane, out, to):
        """A token with its k. stages[token ..], stages[next_token ..]: words of it and of the next one; rows: of the lane among
        those of q or k. next_k: receives that of the next token. seen, y: the partials of this token's dot with k, and of the
        outputs of the token before, which go to element `to` of out; then those of the next one's dot, and of this one's
        outputs."""
        decay, beta = lds2(stages, token + to_gates)
        v = lds2(stages, token + to_v + column)
        load_rows(stages, next_token + to_k + rows, next_k)
        load_rows(stages, token + rows, q)
        sums = sums8(seen[0], seen[1], lane)
        finish(y, lane, out, to)
        delta = mul(beta, fma(-decay, sums[0], v[0])), mul(beta, fma(-decay, sums[1], v[1]))
        for c in range(COLUMNS):
            seen[c], y[c] = f32(0), f32(0)
        for m in range(n_rows):
            for c in range(COLUMNS):
                now = fma(k[m], delta[c], mul(decay, s[m * COLUMNS + c]))
                s[m * COLUMNS + c] = now
                seen[c] = fma(next_k[m], now, seen[c])
                y[c] = fma(q[m], now, y[c])
    return load_rows, step, finish


@lru_cache(None)
def bringer(dim, makes):
    """What the warps that bring do."""
    threads, word, gates_of = 32 * n_warps(dim), Token(dim // PARTIALS, n_warps(dim)), made if makes else given
    n_words, to_k, to_v, to_gates, stride = word.n_words, word.k, word.v, word.gates, word.stride
    of_block, at_once, wait = 4 * COLUMNS * n_warps(dim), threads // dim, copies_wait_but(1)
    values_at_once = threads // of_block

    @device
    def bring(tid, stages, qkv, g, beta, first, n, n_channels, head_k, n_head_k, head, n_head_v, first_column, dt, of_head):
        """tid: among the threads that bring."""
        channel, value = i32(tid % dim), i32(tid % of_block)
        where_q = i64(head_k) * dim + channel
        where_k, where_v = where_q + i64(n_head_k) * dim, i64(2 * n_head_k + head) * dim + first_column + value
        to = i32((channel & 7) * stride + (channel >> 3))
        n_stages, stage = i32((n + STAGE - 1) // STAGE), i32(-BUFFERS + 1)
        while stage < n_stages:
            if stage >= 0:
                # All but the latest: this stage and the next one
                wait()
                if tid < STAGE and stage + 1 < n_stages:
                    make(tid, stages, i32((stage + 1) % BUFFERS * STAGE + tid) * n_words + to_gates, dt, of_head)
                if tid < STAGE and stage == 0:
                    make(tid, stages, i32(tid) * n_words + to_gates, dt, of_head)
                cuda.syncthreads()  # `compute` has the same ones
            ahead = i32(stage + BUFFERS - 1)
            if ahead < n_stages:
                buffer = i32(ahead % BUFFERS * STAGE)
                for i in range(0, STAGE, at_once):
                    slot = i32(i + tid // dim)
                    token, at = i32(min(ahead * STAGE + slot, n - 1)), i32((buffer + slot) * n_words + to)
                    copy1(stages, at, qkv, i64(first + token) * n_channels + where_q)
                    copy1(stages, at + to_k, qkv, i64(first + token) * n_channels + where_k)
                for i in range(0, STAGE, values_at_once):
                    slot = i32(i + tid // of_block)
                    token, at = i32(min(ahead * STAGE + slot, n - 1)), i32((buffer + slot) * n_words + to_v + value)
                    copy1(stages, at, qkv, i64(first + token) * n_channels + where_v)
                if tid < STAGE:
                    token, at = i32(min(ahead * STAGE + tid, n - 1)), i32((buffer + tid) * n_words + to_gates)
                    copy1(stages, at, g, i64(first + token) * n_head_v + head)
                    copy1(stages, at + 1, beta, i64(first + token) * n_head_v + head)
            copies_commit()
            stage = i32(stage + 1)

    @device
    def make(tid, stages, at, dt, of_head):
        """The gates of a token that this thread has brought."""
        log_decay, strength = gates_of(lds(stages, at), lds(stages, at + 1), dt, of_head)
        sts(stages, at, exp(log_decay))
        sts(stages, at + 1, strength)
    return bring


@factory([(dim, makes) for dim in DIMS for makes in (False, True)])
def gated_delta_net_kernel(dim, makes):
    """For runs of many tokens. makes: the gates too."""
    n_rows, n_state, threads = dim // PARTIALS, dim // PARTIALS * COLUMNS, 32 * n_warps(dim)
    word = Token(n_rows, n_warps(dim))
    n_words, to_k, stride, of_block = word.n_words, word.k, word.stride, 4 * COLUMNS * n_warps(dim)
    n_parts, end = dim // of_block, BUFFERS * STAGE * word.n_words
    (load_rows, step, finish), (load, store), bring = token_step(dim), state_access(n_rows, COLUMNS), bringer(dim, makes)

    def kernel(state, qkv, g, beta, dt, of_head, runs, out, n_head_k, n_head_v, tiled, n_kept):
        stages = cuda.shared.array(end, f32)
        s, k, q = cuda.local.array(n_state, f32), cuda.local.array(n_rows, f32), cuda.local.array(n_rows, f32)
        next_k, seen, y = cuda.local.array(n_rows, f32), cuda.local.array(COLUMNS, f32), cuda.local.array(COLUMNS, f32)
        tid, run = i32(cuda.threadIdx.x), i64(cuda.blockIdx.y) * (3 + n_kept)
        first, n, source = ld(runs, run), ld(runs, run + 1), ld(runs, run + 2)
        if n <= 0:
            return
        head, first_column = i32(cuda.blockIdx.x // n_parts), i32(cuda.blockIdx.x % n_parts * of_block)
        if shuffle(tid, 0) >= threads:  # by all lanes: the compiler must know
            head_k, n_channels = key_head(head, n_head_k, n_head_v, tiled), i64(2 * n_head_k + n_head_v) * dim
            dt_here, of_head_here = f32(0), f32(0)
            if makes:
                dt_here, of_head_here = ld(dt, head), ld(of_head, head)
            bring(i32(tid - threads), stages, qkv, g, beta, first, n, n_channels, head_k, n_head_k, head, n_head_v, first_column,
                  dt_here, of_head_here)
            return

        lane, column, rows = tid & 31, i32((tid >> 3) * COLUMNS), i32((tid & 7) * stride)
        row_values, place = i64(n_head_v) * dim * dim, (i64(head) * dim + (tid & 7)) * dim + first_column + column
        load(state, source, i64(source) * row_values + place, dim, s)
        # Outputs of the token before go out with a token; in the place of those before the first one, its own are written twice
        to, next_to = (i64(first) * n_head_v + head) * dim + first_column + column, i64(n_head_v) * dim
        before = to
        y[0], y[1], seen[0], seen[1] = f32(0), f32(0), f32(0), f32(0)
        token, at, n_fast = i32(0), i32(0), i32(n - n_kept)  # tokens that are not kept go two at a time
        while token < n:
            cuda.syncthreads()  # the stage that begins here is there, and the first token of the next one
            if token == 0:
                load_rows(stages, to_k + rows, k)
                for c in range(COLUMNS):
                    for m in range(n_rows):
                        seen[c] = fma(k[m], s[m * COLUMNS + c], seen[c])
            last = i32(min(token + STAGE, n))
            while token + 2 <= min(last, n_fast):
                step(s, seen, y, k, next_k, q, stages, at, at + n_words, rows, column, lane, out, before)
                after = i32(at + 2 * n_words)
                if after == end:
                    after = i32(0)
                step(s, seen, y, next_k, k, q, stages, at + n_words, after, rows, column, lane, out, to)
                before = to + next_to
                token, at, to = i32(token + 2), after, before + next_to
            while token < last:
                after = i32(at + n_words)
                if after == end:
                    after = i32(0)
                step(s, seen, y, k, next_k, q, stages, at, after, rows, column, lane, out, before)
                for m in range(n_rows):
                    k[m] = next_k[m]
                before = to
                token, at, to = i32(token + 1), after, to + next_to
                if n - token < n_kept:
                    row = ld(runs, run + 3 + n - token)
                    if row >= 0:
                        store(state, i64(row) * row_values + place, dim, s)
        finish(y, lane, out, before)
    return Kernel(kernel, (F32, F32, F32, F32, F32, F32, I32, F32, N, N, N, N), 2 * threads)


# Few tokens
#
# Partial p is a warp's, of as many columns as it has lanes, times one, two or four: so rows of a state come and go whole, and no
# thread waits for another before it has its part of the state. Partials meet in shared memory.

@lru_cache(None)
def total_of(of_block):
    @device
    def two(partials, column):
        return add(lds(partials, column), lds(partials, column + 4 * of_block))

    @device
    def total(partials, column):
        """The sum of dot8's partials of a column, each of them of_block words behind the one before."""
        a, b = two(partials, column), two(partials, column + of_block)
        c, d = two(partials, column + 2 * of_block), two(partials, column + 3 * of_block)
        return add(add(a, c), add(b, d))
    return total


@factory([(dim, n_columns, makes) for dim in DIMS for n_columns in (1, 2, 4) if 32 * n_columns <= max(32, dim)
          for makes in (False, True)])
def gated_delta_net_few_kernel(dim, n_columns, makes):
    """For runs of few tokens. n_columns: of a lane; makes: the gates too."""
    gates_of = made if makes else given
    n_rows, of_block, scale = dim // PARTIALS, min(dim, 32 * n_columns), np.float32(1) / np.sqrt(np.float32(dim))
    n_parts, n_words, n_state = dim // of_block, PARTIALS * of_block, n_rows * n_columns
    (load, store), total = state_access(n_rows, n_columns), total_of(of_block)

    def kernel(state, qkv, g, beta, dt, of_head, runs, out, n_head_k, n_head_v, tiled, n_kept):
        seen, outputs = cuda.shared.array(n_words, f32), cuda.shared.array(n_words, f32)
        s, k, q = cuda.local.array(n_state, f32), cuda.local.array(n_rows, f32), cuda.local.array(n_rows, f32)
        tid, run = i32(cuda.threadIdx.x), i64(cuda.blockIdx.y) * (3 + n_kept)
        first, n, source = ld(runs, run), ld(runs, run + 1), ld(runs, run + 2)
        if n <= 0:
            return
        head, first_column = i32(cuda.blockIdx.x // n_parts), i32(cuda.blockIdx.x % n_parts * of_block)
        # Of 16 columns, the lanes that have none do what the last one does
        partial, column = tid >> 5, i32(min((tid & 31) * n_columns, of_block - n_columns))
        row_values, place = i64(n_head_v) * dim * dim, (i64(head) * dim + partial) * dim + first_column + column
        load(state, source, i64(source) * row_values + place, dim, s)
        dt_here, of_head_here = f32(0), f32(0)
        if makes:
            dt_here, of_head_here = ld(dt, head), ld(of_head, head)
        of_q = i64(key_head(head, n_head_k, n_head_v, tiled)) * dim + partial
        of_k, of_v = of_q + i64(n_head_k) * dim, i64(2 * n_head_k + head) * dim + first_column + column
        token = i64(first)
        while token < first + n:
            at = token * i64(2 * n_head_k + n_head_v) * dim
            for m in range(n_rows):
                k[m], q[m] = ld(qkv, at + of_k + PARTIALS * m), ld(qkv, at + of_q + PARTIALS * m)
            of_token = token * n_head_v + head
            log_decay, strength = gates_of(ld(g, of_token), ld(beta, of_token), dt_here, of_head_here)
            decay = exp(log_decay)
            for c in range(n_columns):
                x = f32(0)
                for m in range(n_rows):
                    x = fma(k[m], s[m * n_columns + c], x)
                sts(seen, partial * of_block + column + c, x)
            cuda.syncthreads()  # all partials are there, and the outputs' are read no more
            for c in range(n_columns):
                delta, x = mul(strength, fma(-decay, total(seen, column + c), ld(qkv, at + of_v + c))), f32(0)
                for m in range(n_rows):
                    now = fma(k[m], delta, mul(decay, s[m * n_columns + c]))
                    s[m * n_columns + c] = now
                    x = fma(q[m], now, x)
                sts(outputs, partial * of_block + column + c, x)
            cuda.syncthreads()  # and the other way round
            if tid < of_block:
                st(out, of_token * dim + first_column + tid, mul(total(outputs, tid), scale))
            token += 1
            if first + n - token < n_kept:
                row = ld(runs, run + 3 + first + n - token)
                if row >= 0:
                    store(state, i64(row) * row_values + place, dim, s)
    return Kernel(kernel, (F32, F32, F32, F32, F32, F32, I32, F32, N, N, N, N), 32 * PARTIALS, 2)


def check(call):
    dim = call.out.n_cols // call.n_head_v
    need(dim in DIMS, "channels of a head", dim, ", ".join(map(str, DIMS)))
    need(call.runs.shape[0] < 65536, "runs", call.runs.shape[0], "up to 65535")


def plan(call) -> int:
    """Columns of a lane where runs have few tokens: as many as leave enough blocks; or MANY_TOKENS."""
    dim, n_runs = call.out.n_cols // call.n_head_v, call.runs.shape[0]
    if call.out.n_rows > (FEW_TOKENS if n_runs >= MANY_RUNS else 1) * n_runs:
        return MANY_TOKENS
    return min(4 if n_runs >= MANY_RUNS else 2 if n_runs >= SEVERAL_RUNS else 1, max(1, dim // 32))


def gated_delta_net(call):
    """Per value head, with S the state: S = exp(g) S; d = beta (v - S k); S = S + k d; out = S q / sqrt(dim).

    state: f32 [rows, n_head_v * dim * dim], written; qkv: f32 [n, (2 n_head_k + n_head_v) * dim]; g, beta: f32 [n, n_head_v];
    runs: i32 [r, 3 + K]; out: f32 [n, n_head_v * dim]; state and out on 16 bytes."""
    return by_head(call, False, call.g, call.beta, call.g, call.g)


def gated_delta_net_gates(call):
    """gated_delta_net with g = softplus(a + dt) * of_head and beta = sigmoid(b).

    a, b: f32 [n, n_head_v]; dt, of_head: f32 [n_head_v]; all else as there."""
    return by_head(call, True, call.a, call.b, call.dt, call.of_head)


def by_head(call, makes: bool, *gates):
    dim, (n_runs, width), device = call.out.n_cols // call.n_head_v, call.runs.shape, call.device
    args = (*addresses(call.state, call.qkv, *gates, call.runs, call.out), call.n_head_k, call.n_head_v, int(call.tiled),
            width - 3)
    if call.plan != MANY_TOKENS:
        kernel = gated_delta_net_few_kernel(dim, call.plan, makes)
        return device.launch(kernel, (call.n_head_v * -(-dim // (32 * call.plan)), n_runs), kernel.n_threads, args)
    kernel = gated_delta_net_kernel(dim, makes)
    n_blocks = call.n_head_v * (dim // (4 * COLUMNS * n_warps(dim)))
    # Where each block can have a multiprocessor, none shares one: a block begins while those of the kernel before still run, and
    # would go where there is room. Half of the shared memory for each sees to that.
    alone = n_blocks * n_runs <= device.n_multiprocessors
    return device.launch(kernel, (n_blocks, n_runs), kernel.n_threads, args, shared=device.shared_limit // 2 if alone else 0)
