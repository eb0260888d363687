"""float32 to the file's bytes: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, F32, F16 and BF16, the same bytes as `gguf.quants.quantize`.

One scale per block of 32: symmetric formats map the value of largest magnitude to the lowest level (-8, -16) or magnitude to
+-127, affine ones (Q4_1, Q5_1) map minimum and maximum to 0 and 15 or 31. The scale is rounded to float16 only when it is stored.
"""
import numpy as np

from .formats import Format, format_of

SLAB_BLOCKS = 1 << 17  # blocks quantized at a time: 16 MB of float32


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


def _q4_0(x):
    d, q = _symmetric(x, -8)
    return _half(d), _nibbles(q)


def _q4_1(x):
    d, m, q = _affine(x, 15)
    return _half(d), _half(m), _nibbles(q)


def _q5_0(x):
    d, q = _symmetric(x, -16)
    return _half(d), _fifth_bits(q), _nibbles(q)


def _q5_1(x):
    d, m, q = _affine(x, 31)
    return _half(d), _half(m), _fifth_bits(q), _nibbles(q)


def _q8_0(x):
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = np.abs(x * _inverse(d))
    floor = np.floor(scaled)
    q = floor + np.floor(2 * (scaled - floor))  # halves away from zero
    return _half(d), (_truncated(q, np.int8) * np.sign(x).astype(np.int8)).view(np.uint8)


def _bf16(x):
    """Nearest even; NaNs keep their upper bits and are made quiet."""
    n = x.view(np.uint32)
    rounded = (n.astype(np.uint64) + 0x7fff + (n >> 16 & 1)) >> 16
    return np.where(np.isnan(x), n >> 16 | 64, rounded).astype(np.uint16).view(np.uint8),


# -> the fields of blocks, as bytes
_QUANTIZERS = {"F32": lambda x: (x.view(np.uint8),), "F16": lambda x: (_half(x),), "BF16": _bf16,
               "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0}


def quantize(x: np.ndarray, type_: Format | str | int, name: str = "tensor") -> np.ndarray:
    """x: float32 [..., n_cols] -> uint8 [..., row_bytes], rows as in the file. name: the tensor's, for errors."""
    fmt = format_of(type_, name)
    if fmt.name not in _QUANTIZERS:
        raise ValueError(f"{name}: cannot quantize to {fmt.name}; types that can: {', '.join(_QUANTIZERS)}")
    x = np.ascontiguousarray(x, np.float32)
    row_bytes = fmt.row_bytes(x.shape[-1], name)
    blocks = x.reshape(-1, fmt.block_size)
    if fmt.is_quantized and not np.isfinite(blocks).all():
        at = np.argwhere(~np.isfinite(x))[0].tolist()
        raise ValueError(f"{name}: {fmt.name} needs finite values, got {x[tuple(at)]} at {at}")
    out = np.empty((len(blocks), fmt.type_size), np.uint8)
    # scales beyond float16, and those of subnormal blocks
    with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
        for first in range(0, len(blocks), SLAB_BLOCKS):
            np.concatenate(_QUANTIZERS[fmt.name](blocks[first:first + SLAB_BLOCKS]), axis=1, out=out[first:first + SLAB_BLOCKS])
    return out.reshape(*x.shape[:-1], row_bytes)
