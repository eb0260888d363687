"""Limbs of queries of attention, in registers (numerics, section 8)."""
from .fixed_point import CHANNELS, Z, ZERO, amax4, limbs4, scales
from .lane_floats import max_pattern
from .ptx import device, ld4


@device
def four(p, i, valid):
    """Four float32 from i on, zeros where they are not valid."""
    x = ZERO, ZERO, ZERO, ZERO
    if valid:
        x = ld4(p, i)
    return x


def limbs_of_queries(four):
    """(q, at, valid, b, dim, lane) -> (d_q, (hi, lo) of the channels from 8 t, 8 t + 4, 32 + 8 t and 36 + 8 t on) of 64 channels
    of a query, by the four lanes of its row. d_q, 16256 / amax = scales(amax); words of limbs of lifted(mul(q, 16256 / amax)). b:
    which 64 of `dim` channels, the first of which is q[at]; zeros behind them, and where the query is not valid. four: (q, i,
    valid) -> q[i] and the three behind it, or zeros."""
    @device
    def of_query(q, at, valid, b, dim, lane):
        channel = b * CHANNELS + 8 * (lane & 3)
        first, second = valid and channel < dim, valid and channel + 32 < dim
        x, y = four(q, at + channel, first), four(q, at + channel + 4, first)
        u, w = four(q, at + channel + 32, second), four(q, at + channel + 36, second)
        amax = max_pattern(max_pattern(amax4(amax4(amax4(amax4(Z, x), y), u), w), lane ^ 1), lane ^ 2)
        d, inv = scales(amax)
        return d, (limbs4(x, inv), limbs4(y, inv), limbs4(u, inv), limbs4(w, inv))
    return of_query


query_limbs = limbs_of_queries(four)
