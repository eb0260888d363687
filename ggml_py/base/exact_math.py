"""exp, log and sums of float64 arrays whose bits are the same on every CPU: perplexity, KL divergence and sampling use these, or
what is compiled of the same definitions (`kernels.cpu.row_scores`).

numpy's own exp, log and sum choose their algorithm by the CPU's vector width. Here every step is one elementwise operation that
IEEE 754 rounds correctly (+, -, *, /) or that is exact (rint of a bounded value, ldexp, frexp, comparison), each a ufunc call of
its own, so nothing is contracted or reordered. Errors stay below 2 ulp (tests/base/test_exact_math.py measures them against
60-digit decimals).
"""
from collections.abc import Sequence
from math import factorial

import numpy as np
from numpy.typing import ArrayLike

from ..kernels.exp64 import EXP_MAX, EXP_MIN, EXP_TERMS, LN2_HI, LN2_LO, LOG2_E

SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")

LOG_TERMS = [2.0 / (2 * k + 1) for k in range(11, 0, -1)]  # 2/23 ... 2/3; with z < 0.0295 the next term is below 2^-64


def _horner(z: np.ndarray, terms: Sequence[float]) -> np.ndarray:
    """The polynomial with these coefficients, the highest power first."""
    p = np.full_like(z, terms[0])
    for term in terms[1:]:
        p *= z
        p += term
    return p


def exp(x: ArrayLike) -> np.ndarray:
    """e^x.   x: float64 of any shape; returns float64 of the same shape.

    n = rint(x * log2 e), r = (x - n * LN2_HI) - n * LN2_LO, |r| < 0.35; p = sum_{k<=13} r^k / k! by Horner's rule;
    result p * 2^n.
    """
    x = np.clip(np.asarray(x, np.float64), EXP_MIN, EXP_MAX)  # NaN stays NaN
    n = np.rint(x * LOG2_E)
    r = x - n * LN2_HI
    r -= n * LN2_LO
    p = _horner(r, EXP_TERMS)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.ldexp(p, n.astype(np.int32))


def log(x: ArrayLike) -> np.ndarray:
    """ln x.   x: float64 of any shape; returns float64 of the same shape; log(0) = -inf, of negative values NaN.

    x = m * 2^e with m in [sqrt 1/2, sqrt 2), f = m - 1 (exact), s = f / (2 + f), z = s^2, R = sum_{k=1..11} 2/(2k+1) z^k,
    h = f^2 / 2; result e * LN2_HI - ((h - (s * (h + R) + e * LN2_LO)) - f).
    """
    x = np.asarray(x, np.float64)
    m, e = np.frexp(np.where((x > 0) & (x < np.inf), x, 1.0))  # m in [1/2, 1)
    low = m < SQRT_HALF
    m = np.where(low, m + m, m)
    e = (e - low).astype(np.float64)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    big_r = z * _horner(z, LOG_TERMS)
    h = 0.5 * f * f
    y = e * LN2_HI - ((h - (s * (h + big_r) + e * LN2_LO)) - f)
    return np.where(x == 0, -np.inf, np.where(x == np.inf, np.inf, np.where(x > 0, y, np.nan)))


def tree_sum(x: np.ndarray) -> np.ndarray:
    """Sum over the last axis.   x: float64 [..., n], n >= 1; returns float64 [...].

    While n > 1: m = ceil(n / 2), element i < n - m becomes x[i] + x[m + i], then n = m. The order depends on n alone.
    """
    x = np.array(x, np.float64)
    n = x.shape[-1]
    while n > 1:
        m = (n + 1) // 2
        x[..., :n - m] += x[..., m:n]
        n = m
    return x[..., 0]


MOST_ANGLE = 2.0**20
# pi/2 = PIO2[0] + PIO2[1] + PIO2[2]; the first two have 33 bits, so n * PIO2[i] is exact for |n| < 2^20.
PIO2 = [float.fromhex(h) for h in ("0x1.921fb54400000p+0", "0x1.0b4611a600000p-34", "0x1.3198a2e037073p-69")]
SIN_TERMS = [(-1.0) ** k / factorial(2 * k + 1) for k in range(8, -1, -1)]  # z^8/17! ... 1; the next term: < 2^-63 (|r| < 0.79)
COS_TERMS = [(-1.0) ** k / factorial(2 * k) for k in range(9, -1, -1)]  # -z^9/18! ... 1


def sin_cos(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sin x and cos x.   x: float64, |x| < 2^20; returns two float64 arrays of its shape, absolute errors below 2^-52.

    n = rint(x * 2/pi), r = ((x - n PIO2[0]) - n PIO2[1]) - n PIO2[2], z = r^2; s = r * (SIN_TERMS at z), c = COS_TERMS at z, both
    by Horner's rule; quadrant n mod 4 chooses among s, c, -s, -c.
    """
    x = np.asarray(x, np.float64)
    if x.size and not np.abs(x).max() < MOST_ANGLE:
        raise ValueError(f"sin_cos: |x| must be below 2^20, got {np.abs(x).max()}")
    n = np.rint(x * (2.0 / np.pi))
    r = x - n * PIO2[0]
    r -= n * PIO2[1]
    r -= n * PIO2[2]
    z = r * r
    s, c, quadrant = r * _horner(z, SIN_TERMS), _horner(z, COS_TERMS), n.astype(np.int64) & 3
    swap, odd = (quadrant & 1).astype(bool), (quadrant & 2).astype(bool)
    sin, cos = np.where(swap, c, s), np.where(swap, s, c)
    return np.where(odd, -sin, sin), np.where(odd ^ swap, -cos, cos)
