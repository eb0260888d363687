"""Rotary embedding by a table of cosines and sines."""
from functools import partial

from ..arith import add, mul, sub
from ..compile import jit
from ..reference import rope as reference
from .parallel import over_rows


@jit
def rope_rows(first, last, x, pos, table, neox, out):
    half = table.shape[1]
    step, apart = (1, half) if neox else (2, 1)  # from pair to pair, from a pair's first channel to its second
    for token in range(first, last):
        turn = table[pos[token]]
        for head in range(x.shape[1]):
            v, o = x[token, head], out[token, head]
            for i in range(half):
                a, b, c, s = v[i * step], v[i * step + apart], turn[i, 0], turn[i, 1]
                o[i * step] = sub(mul(a, c), mul(b, s))
                o[i * step + apart] = add(mul(a, s), mul(b, c))
            for channel in range(2 * half, v.shape[0]):
                o[channel] = v[channel]


rope = partial(reference.rope, kernel=over_rows(rope_rows))
