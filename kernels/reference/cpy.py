"""A tensor copied as it is. No arithmetic."""
import numpy as np


def cpy(call):
    """dst = x. Both of one dtype, shape and layout; any dtype."""
    parts = zip(call.dst.factors, call.x.factors, strict=True)
    pairs = list(parts)

    def copy():
        for to, source in pairs:
            np.copyto(to, source)
    return copy
