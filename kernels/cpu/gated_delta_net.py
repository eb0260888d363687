"""The gated delta rule, token by token.

Columns of a head's state, its value channels, do not depend on one another. A unit of work is a run of tokens and as many columns
of a head as two vectors hold: they stay in the cache from its first token to its last, a row of them for each key channel.
"""
from functools import lru_cache

import numpy as np
from numba import float32

from ...quant.device_functions import device
from ..arith import div, exp, f32, i2f, sqrt
from ..compile import jit
from ..reference import gated_delta_net as reference
from ..reference.gated_delta_net import PARTIALS
from ..threads import sharing
from .parallel import PART
from .vector import available_isas, fma, fnma, fold, instructions, mul, pointer, stack, store


@lru_cache(None)
def gated_delta_net_arrays(dim: int, isa: str | None = None):
    """The kernel of heads of dim channels; arguments as in kernels/reference. isa: a name in vector.ISAS, by default the best."""
    isa = isa or available_isas()[0]
    n_rows, zeros, load, rows, columns, *_ = instructions(isa, PARTIALS)
    one = instructions(isa, 1).columns
    columns_of_unit, row_of_unit = stack(float32, dim * n_rows), stack(float32, 2 * n_rows)
    n_tiles = -(-dim // n_rows)

    @device
    def unit(run, head, first_column, state, q, k, v, g, beta, tiled, out):
        first, n, source = run[0], run[1], run[2]
        n_columns = min(n_rows, dim - first_column)
        head_k = head % q.shape[1] if tiled else head // (v.shape[1] // q.shape[1])
        s, row, scalars = columns_of_unit(), row_of_unit(), np.empty(3, np.float32)
        number = pointer(scalars)
        scalars[2] = div(f32(1), sqrt(i2f(np.int32(dim))))
        for i in range(2 * n_rows):
            row[i] = f32(0)
        for i in range(dim):
            for j in range(n_rows):
                s[i * n_rows + j] = state[source, head, i, first_column + j] if source >= 0 and j < n_columns else f32(0)
        for token in range(first, first + n):
            scalars[0], scalars[1] = exp(g[token, head]), beta[token, head]
            keys, queries = pointer(k[token, head_k]), pointer(q[token, head_k])
            for j in range(n_columns):
                row[j] = v[token, head, first_column + j]
            seen = zeros(s)
            for i in range(0, dim, PARTIALS):
                seen = fma(columns(keys, i, 1), load(s, i * n_rows, n_rows), seen)
            decay = one(number, 0, 0)
            delta = mul(one(number, 1, 0), fnma(decay, fold(seen), rows(row, 0)))
            y = zeros(s)
            for i in range(0, dim, PARTIALS):
                now = fma(columns(keys, i, 1), delta, mul(decay, load(s, i * n_rows, n_rows)))
                store(s, i * n_rows, n_rows, now)
                y = fma(columns(queries, i, 1), now, y)
            store(row, n_rows, 0, mul(one(number, 2, 0), fold(y)))
            for j in range(n_columns):
                out[token, head, first_column + j] = row[n_rows + j]
            i = first + n - 1 - token
            if i < run.shape[0] - 3 and run[3 + i] >= 0:
                for channel in range(dim):
                    for j in range(n_columns):
                        state[run[3 + i], head, channel, first_column + j] = s[channel * n_rows + j]

    @device
    def unit_of(i, args):
        runs, state, q, k, v, g, beta, tiled, out = args
        unit(runs[i // n_tiles // v.shape[1]], i // n_tiles % v.shape[1], i % n_tiles * n_rows, state, q, k, v, g, beta, tiled,
             out)

    each = sharing(unit_of)

    @jit(key=(dim, isa), parallel=True)
    def kernel(control, state, q, k, v, g, beta, runs, tiled, out):
        n_units, args = runs.shape[0] * v.shape[1] * n_tiles, (runs, state, q, k, v, g, beta, tiled, out)
        each(control, n_units, args, v.size * dim >= 2 * PART)
    return kernel


def gated_delta_net(call):
    """As the definition has it."""
    return reference.gated_delta_net(call, gated_delta_net_arrays(call.out.n_cols // call.n_head_v))
