"""Other codes for the scales that `levels` found: even ones, and those of pairs.

x: float32 [n], rows one after the other; w: float32 [n_cols]. tables: float64 [n_tables, levels]; scales: float64 [n / 32], of
sub-blocks, with the integer ones; selected: uint8 [n / 32], the table; codes: uint8 [n].
"""
import numpy as np

from ..entries import jit
from ..device_functions import device


@device
def parity(code):
    code ^= code >> 2
    return (code ^ code >> 1) & 1


@jit
def make_even(x, w, tables, scales, selected, codes):
    """Codes with an even number of bits in each four, columns 2k, 2k + 1, 16 + 2k and 17 + 2k of a sub-block (IQ4_KSS): where
    they are odd, the change that costs least. Returns codes, changed in place."""
    for i in range(len(scales)):
        table, scale = tables[selected[i]], scales[i]
        for k in range(8):
            first, odd = 32 * i + 2 * k, 0
            for c in (0, 1, 16, 17):
                odd ^= parity(codes[first + c])
            least, at, code = np.inf, first, codes[first]
            for c in (0, 1, 16, 17) if odd else (0, 0, 0, 0):
                v, u = float(x[first + c]), float(w[(first + c) % len(w)])
                before = v - scale * table[codes[first + c]]
                for q in range(16):
                    after = v - scale * table[q]
                    cost = u * (after * after - before * before)
                    if odd and parity(q) != parity(codes[first + c]) and cost < least:
                        least, at, code = cost, first + c, q
            codes[at] = code
    return codes


@jit
def pair_codes(x, w, tables, scales, selected, codes):
    """uint8 [n / 2]: of two columns the pair of levels with the least error (IQ2_KL). tables: float64 [1, pairs, 2]."""
    pairs = tables[0]
    found = np.empty(len(x) // 2, np.uint8)
    for i in range(len(found)):
        scale, at = scales[2 * i // 32], 2 * i % len(w)
        least = np.inf
        for e in range(len(pairs)):
            first, second = x[2 * i] - scale * pairs[e, 0], x[2 * i + 1] - scale * pairs[e, 1]
            cost = w[at] * first * first + w[at + 1] * second * second
            if cost < least:
                least, found[i] = cost, e
    return found
