"""Mamba 2's recurrence, token by token.

Columns of a head's state, its channels of x, do not depend on one another. A unit of work is a run of tokens and as many columns
of a head as two vectors hold: they stay in the cache from its first token to its last, a row of them for each state value.
"""
from functools import lru_cache

import numpy as np
from numba import float32

from ...quant.device_functions import device
from ..arith import add as plus, exp, f32, mul as times, softplus
from ..compile import jit
from ..reference import ssm_scan as reference
from ..reference.gated_delta_net import PARTIALS
from ..threads import sharing
from .parallel import PART
from .vector import available_isas, fma, fold, instructions, mul, pointer, stack, store


@lru_cache(None)
def ssm_scan_arrays(n_state: int, isa: str | None = None):
    """The kernel of n_state values a channel; arguments as in kernels/reference. isa: a name in vector.ISAS, by default the
    best."""
    isa = isa or available_isas()[0]
    n_rows, zeros, load, rows, columns, *_ = instructions(isa, PARTIALS)
    one = instructions(isa, 1).columns
    columns_of_unit, row_of_unit = stack(float32, n_state * n_rows), stack(float32, 2 * n_rows)

    @device
    def unit(run, head, first_column, state, x, dt, bias, a, d, n_group, out):
        first, n, source, n_head, dim = run[0], run[1], run[2], state.shape[1], state.shape[3]
        n_columns = min(n_rows, dim - first_column)
        of_b = n_head * dim + head // (n_head // n_group) * n_state
        of_c = of_b + n_group * n_state
        s, row, scalars = columns_of_unit(), row_of_unit(), np.empty(3, np.float32)
        number = pointer(scalars)
        scalars[2] = d[head]
        for i in range(2 * n_rows):
            row[i] = f32(0)
        for i in range(n_state):
            for j in range(n_rows):
                s[i * n_rows + j] = state[source, head, i, first_column + j] if source >= 0 and j < n_columns else f32(0)
        for token in range(first, first + n):
            delta = softplus(plus(dt[token, head], bias[head]))
            scalars[0], scalars[1] = exp(times(delta, a[head])), delta
            words = pointer(x[token])
            for j in range(n_columns):
                row[j] = x[token, head * dim + first_column + j]
            decay, taken = one(number, 0, 0), mul(one(number, 1, 0), rows(row, 0))
            y = zeros(s)
            for i in range(0, n_state, PARTIALS):
                now = fma(decay, load(s, i * n_rows, n_rows), mul(columns(words, of_b + i, 1), taken))
                store(s, i * n_rows, n_rows, now)
                y = fma(columns(words, of_c + i, 1), now, y)
            store(row, n_rows, 0, fma(one(number, 2, 0), rows(row, 0), fold(y)))
            for j in range(n_columns):
                out[token, head, first_column + j] = row[n_rows + j]
            i = first + n - 1 - token
            if i < run.shape[0] - 3 and run[3 + i] >= 0:
                for value in range(n_state):
                    for j in range(n_columns):
                        state[run[3 + i], head, value, first_column + j] = s[value * n_rows + j]

    @device
    def unit_of(i, args):
        runs, state, x, dt, bias, a, d, n_group, out = args
        n_head, n_tiles = state.shape[1], (state.shape[3] + n_rows - 1) // n_rows
        unit(runs[i // n_tiles // n_head], i // n_tiles % n_head, i % n_tiles * n_rows, state, x, dt, bias, a, d, n_group, out)

    each = sharing(unit_of)

    @jit(key=(n_state, isa), parallel=True)
    def kernel(control, state, x, dt, bias, a, d, runs, n_group, out):
        n_units = runs.shape[0] * state.shape[1] * ((state.shape[3] + n_rows - 1) // n_rows)
        each(control, n_units, (runs, state, x, dt, bias, a, d, n_group, out), out.size * n_state >= 2 * PART)
    return kernel


def ssm_scan(call):
    """As the definition has it."""
    return reference.ssm_scan(call, ssm_scan_arrays(call.n_state))
