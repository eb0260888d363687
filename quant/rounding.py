"""Values rounded under a scale that their extremes give, without a search: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0, the
same bytes as `gguf.quants.quantize`.

One scale per block of 32: symmetric formats map the value of largest magnitude to the lowest level (-8, -16) or magnitude to
+-127, affine ones (Q4_1, Q5_1) map minimum and maximum to 0 and 15 or 31. The scale is rounded to float16 only when it is stored.
Each function: float32 blocks [n_blocks, block size] -> the fields of blocks, uint8 [n_blocks, bytes of the field].
"""
import numpy as np


def _inverse(d):
    """1 / d, and 0 for d = 0. Infinite where d is below 2^-128: such blocks get levels of 0 from `_truncated`."""
    return np.where(d == 0, np.float32(0), 1 / d)


def _truncated(x, dtype):
    return np.where(np.isfinite(x), np.trunc(x), np.float32(0)).astype(dtype)


def _symmetric(x, lowest):
    """(d, levels - lowest): d = the value of largest magnitude (the first of equals) / lowest."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    d = extreme / np.float32(lowest)
    return d, np.minimum(_truncated(x * _inverse(d) + np.float32(0.5 - lowest), np.uint8), -2 * lowest - 1)


def _affine(x, highest):
    """(d, minimum, levels)."""
    minimum = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - minimum) / np.float32(highest)
    return d, minimum, np.minimum(_truncated((x - minimum) * _inverse(d) + np.float32(0.5), np.uint8), highest)


def _half(x):
    return x.astype(np.float16).view(np.uint8)


def _nibbles(q):
    return (q[:, :16] & 15) | (q[:, 16:] << 4)


def _fifth_bits(q):
    return np.packbits(q >> 4, axis=1, bitorder="little")


def q4_0(x):
    d, q = _symmetric(x, -8)
    return _half(d), _nibbles(q)


def q4_1(x):
    d, m, q = _affine(x, 15)
    return _half(d), _half(m), _nibbles(q)


def q5_0(x):
    d, q = _symmetric(x, -16)
    return _half(d), _fifth_bits(q), _nibbles(q)


def q5_1(x):
    d, m, q = _affine(x, 31)
    return _half(d), _half(m), _fifth_bits(q), _nibbles(q)


def q8_0(x):
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = np.abs(x * _inverse(d))
    floor = np.floor(scaled)
    q = floor + np.floor(2 * (scaled - floor))  # halves away from zero
    return _half(d), (_truncated(q, np.int8) * np.sign(x).astype(np.int8)).view(np.uint8)


def f32(x):
    return x.view(np.uint8),


def f16(x):
    return _half(x),


def bf16(x):
    """Nearest even; NaNs keep their upper bits and are made quiet."""
    n = x.view(np.uint32)
    rounded = (n.astype(np.uint64) + 0x7fff + (n >> 16 & 1)) >> 16
    return np.where(np.isnan(x), n >> 16 | 64, rounded).astype(np.uint16).view(np.uint8),
