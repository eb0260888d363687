"""Runs of queries that attention on a CPU shares between threads, and the results of their pieces.

A unit of work is a run of query rows: consecutive tokens of one sequence, times the query heads of one KV head. Where there are
fewer runs than threads, as for a token with few KV heads, each is cut into spans of pieces, and the pieces are combined, in the
same order, when all are there.
"""
import numpy as np

from ...quant.device_functions import device, inlined
from ..arith import div, exp, fma, mul, sub
from ..compile import jit
from ..reference.flash_attn_ext import MINUS_INFINITY, PIECE
from ..reference.set_rows import BLOCK as Q8_0_BLOCK
from ..reference.set_rows import BLOCK_BYTES as Q8_0_BYTES
from ..threads import THREADS, sharing
from .parallel import PART
from .set_rows import cached_row
from .vector import LINE_BYTES, pointer, prefetch

ROWS = 192      # of a unit at least, where there are so many: reading a piece costs about a tenth of their work on it
UNITS = 4       # of a thread, where units may have more rows
SPANS = 2       # of pieces, for a thread
MOST_PARTS = 1 << 22  # floats of pieces that wait to be joined
AHEAD = 8       # which cell behind the one that is read is asked for
BYTES = {"f32": (4, 1), "f16": (2, 1), "q8_0": (Q8_0_BYTES, Q8_0_BLOCK)}  # of so many values


def read_ahead(type_):
    """`cached_row` of a cache type, which also asks the memory for the same part of the cell AHEAD cells further on: the keys of
    all other KV heads lie between the two, and the processor does not foresee such steps."""
    cached, size, block = cached_row(type_), *BYTES[type_]

    @inlined
    def row(cache, cell, first, values):
        words = pointer(cache)
        to = ((cell + AHEAD) * cache.shape[1] * cache.itemsize + first * size // block) // 4
        for line in range(0, values.shape[0] * size // block // 4, LINE_BYTES // 4):
            prefetch(words, to + line)
        cached(cache, cell, first, values)
    return row


@device
def start_of(n_rows, dv):
    """(M, L, O) of rows that have seen nothing."""
    M, L, O = np.empty(n_rows, np.float32), np.zeros(n_rows, np.float32), np.zeros((n_rows, dv), np.float32)
    M[:] = MINUS_INFINITY
    return M, L, O


@device
def seen_by(first, last, pos, window):
    """The first position of the first piece that the tokens first..last-1 see, and one past the last that they see."""
    begin, end = np.int64(pos[first]), np.int64(0)
    for token in range(first, last):
        begin, end = min(begin, pos[token] + 1 - window), max(end, pos[token] + 1)
    return max(0, begin) // PIECE * PIECE, end


@device
def finish(M, L, O, first, head_kv, group, sinks, out):
    """The results of tokens from `first` on, of the query heads of one KV head."""
    for row in range(L.shape[0]):
        total, result = O[row], out[first + row // group, head_kv * group + row % group]
        if sinks.shape[0]:
            L[row] = sink(M[row], L[row], total, sinks[head_kv * group + row % group])
        for c in range(result.shape[0]):
            result[c] = div(total[c], L[row])


@device
def join(u, args):
    """The pieces of a run of tokens and a KV head, one after the other."""
    runs, n_head_kv, pos, window, parts, sinks, out = args
    run, head_kv, group = u // n_head_kv, u % n_head_kv, out.shape[1] // n_head_kv
    first, last = runs[run], runs[run + 1]
    M, L, O = start_of((last - first) * group, out.shape[2])
    begin, end = seen_by(first, last, pos, window)
    m, l, o = parts[0][u], parts[1][u], parts[2][u]
    for piece in range((end - begin + PIECE - 1) // PIECE):
        for row in range(L.shape[0]):
            if l[piece, row] != 0:
                M[row], L[row] = combine(M[row], L[row], O[row], m[piece, row], l[piece, row], o[piece, row])
    finish(M, L, O, first, head_kv, group, sinks, out)


join_each = sharing(join)


def shared_by_runs(attend, key, most_rows=ROWS):
    """All queries, cut into runs of up to most_rows for each KV head; where these are fewer than threads, into spans of pieces as
    well, which are joined in a second job. key: the arguments of the factory that made `attend`."""
    @device
    def unit(u, args):
        """Late runs, which see many keys, go first."""
        runs, n_runs, n_spans, parts, rest = args
        n_head_kv = rest[3]
        of_run = u // n_spans
        run, head_kv = n_runs - 1 - of_run // n_head_kv, of_run % n_head_kv
        i = run * n_head_kv + head_kv if n_spans > 1 else 0
        attend(runs[run], runs[run + 1], head_kv, u % n_spans, n_spans, (parts[0][i], parts[1][i], parts[2][i]), *rest)

    each = sharing(unit)

    @jit(key=key, parallel=True)
    def run(control, q, k, v, n_head_kv, seq, pos, present, scale, out, window, sinks, softcap):
        runs, group, dv = np.empty(seq.shape[0] + 1, np.int64), q.shape[1] // n_head_kv, out.shape[2]
        n_tokens = min(most_rows // group, seq.shape[0] * n_head_kv // (UNITS * control[THREADS]))
        n_runs = query_runs(seq, max(1, ROWS // group, n_tokens), runs)
        n_seen, n_pieces, n_rows = 0, 1, 0
        for token in range(pos.shape[0]):
            n_seen += pos[token] + 1
            n_pieces = max(n_pieces, pos[token] // PIECE + 1)
        for i in range(n_runs):
            n_rows = max(n_rows, (runs[i + 1] - runs[i]) * group)
        n_units = n_runs * n_head_kv
        many = n_seen * n_head_kv * (q.shape[2] + dv) >= 2 * PART
        n_spans = min(n_pieces, (SPANS * control[THREADS] + n_units - 1) // n_units)
        if not many or n_units >= control[THREADS] or n_units * n_pieces * n_rows * (dv + 2) > MOST_PARTS:
            n_spans = 1
        shape = (n_units, n_pieces, n_rows) if n_spans > 1 else (1, 0, 0)
        parts = np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty((*shape, dv), np.float32)
        rest = q, k, v, n_head_kv, seq, pos, present, scale, out, window, sinks, softcap
        each(control, n_units * n_spans, (runs, n_runs, n_spans, parts, rest), True, True)
        if n_spans > 1:
            join_each(control, n_units, (runs, n_head_kv, pos, window, parts, sinks, out))
    return run


@device
def query_runs(seq, n_tokens, starts):
    """Cuts the tokens into runs of one sequence, none longer than n_tokens. starts: i64 [n + 1], receives where each begins, and
    the end. Returns the number of runs."""
    n_runs = 0
    for token in range(seq.shape[0]):
        if token == 0 or seq[token] != seq[token - 1] or token - starts[n_runs - 1] == n_tokens:
            starts[n_runs] = token
            n_runs += 1
    starts[n_runs] = seq.shape[0]
    return n_runs


@device
def copy(x, out):
    for i in range(x.shape[0]):
        out[i] = x[i]


@device
def combine(M, L, O, m, l, o):
    """Adds a piece (m, l, o) to (M, L, O). O: f32 [Dv], o: f32 [Dv or more]. Returns M and L."""
    new_M = m if m > M else M
    a, b = exp(sub(M, new_M)), exp(sub(m, new_M))
    for c in range(O.shape[0]):
        O[c] = fma(O[c], a, mul(o[c], b))
    return new_M, fma(L, a, mul(l, b))


@device
def sink(M, L, O, s):
    """Adds the sink logit s of a head to (M, L, O). O: f32 [Dv]. Returns L."""
    new_M = s if s > M else M
    a = exp(sub(M, new_M))
    for c in range(O.shape[0]):
        O[c] = mul(O[c], a)
    return fma(L, a, exp(sub(s, new_M)))
