"""Activation blocks: 15 bits per value in two int8 limbs, one float32 scale per chunk of 256 columns. This is the definition;
kernels equal it.

Per chunk, with amax = max |x| (taken over the bit patterns of |x| as integers, so that a NaN wins):
    amax < 2^-100:    d = 0, q = 0
    amax not finite:  d = NaN (0x7fc00000), q = 0
    otherwise:        d = amax / 16256, q = rint(x * (16256 / amax)); each operation float32, nearest even
|q| <= 16256 = 127 * 128, so q = 128 hi + lo with hi in -127..127 and lo in -64..63.
"""
import numpy as np

from .formats import CHUNK

LIMIT = 16256
SUM_COLUMNS = 16  # columns in one of the sums kept for minima


def quantize_activations(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x: float32 [n, n_cols], padded with zeros to n_chunks = ceil(n_cols / 256) chunks.
    Returns q int16 [n, n_chunks * 256], d float32 [n, n_chunks], sums int32 [n, n_chunks * 16]: the sums of q over 16 columns."""
    x = np.asarray(x)
    if x.ndim != 2 or x.dtype != np.float32:
        raise ValueError(f"activations: expected float32 [n, n_cols], got {x.dtype} {list(x.shape)}")
    n, n_cols = x.shape
    n_chunks = -(-n_cols // CHUNK)
    chunks = np.zeros((n, n_chunks, CHUNK), np.float32)
    chunks.reshape(n, n_chunks * CHUNK)[:, :n_cols] = x
    amax = (chunks.view(np.uint32) & np.uint32(0x7fffffff)).max(axis=2).view(np.float32)
    finite = np.isfinite(amax)
    used = finite & (amax >= np.float32(2.0**-100))
    safe = np.where(used, amax, np.float32(LIMIT))  # any divisor that raises nothing where the quotient is not used
    d = np.where(used, safe / np.float32(LIMIT), np.where(finite, np.float32(0), np.uint32(0x7fc00000).view(np.float32)))
    inverse = np.float32(LIMIT) / safe
    q = np.rint(np.where(used[..., None], chunks, np.float32(0)) * inverse[..., None]).astype(np.int16)
    sums = q.reshape(n, n_chunks * (CHUNK // SUM_COLUMNS), SUM_COLUMNS).sum(axis=2, dtype=np.int32)
    return q.reshape(n, n_chunks * CHUNK), d, sums


def split_limbs(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q: int16 in -16256..16256 -> (hi, lo) int8 of its shape, q = 128 hi + lo."""
    hi = (q + np.int16(64)) >> np.int16(7)
    return hi.astype(np.int8), (q - (hi << np.int16(7))).astype(np.int8)


def split_sums(sums: np.ndarray) -> np.ndarray:
    """sums: int32 [..., 16] of a chunk, below 2^18 -> int8 [..., 2, 4, 2, 4]: s = 1024 u + r with r in -512..511, and each of
    them 4 b + c with c in 0..3. [u or r][four sums][c or b][of four sums]."""
    u = (sums + 512) >> 10
    parts = np.stack([u, sums - (u << 10)], axis=-2)
    limbs = np.stack([parts & 3, parts >> 2], axis=-2).astype(np.int8)  # [u or r][c or b][16]
    return limbs.reshape(*limbs.shape[:-1], 4, 4).swapaxes(-3, -2)
