"""The table of rotary angles: cosines and sines of every position and pair, made in float64 by exact_math and rounded once
to float32; and the table of attention temperatures, made in the same way."""
from dataclasses import dataclass

import numpy as np

from .errors import UserError
from .exact_math import MOST_ANGLE, exp, log, sin_cos


@dataclass(frozen=True)
class RopeSettings:
    """What the angles depend on (reference: ggml's rope op). R = n_rot, s = 1 / freq_scale.

    theta_e(i) = position * base^(-2i/R) / factors[i], theta_i = freq_scale * theta_e. Without YaRN the angle is theta_i and the
    magnitude attn_factor. With YaRN (ext_factor 1) it is theta_i (1 - ramp) + theta_e ramp, ramp = 1 - clamp((i - low) /
    max(0.001, high - low), 0, 1), and the magnitude attn_factor * (1 + 0.1 ln s); low and high are the pairs that turn beta_fast
    and beta_slow times within n_ctx_orig.
    """
    n_rot: int
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    yarn: bool = False
    attn_factor: float = 1.0
    n_ctx_orig: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def rope_table(settings: RopeSettings, n_positions: int, factors: np.ndarray | None = None) -> np.ndarray:
    """factors: float32 [R/2] or None. Returns float32 [n_positions, R/2, 2]: (cos, sin), each times the magnitude.
    UserError where an angle would be 2^20 or more, which `sin_cos` does not take."""
    half = settings.n_rot // 2
    i = np.arange(half, dtype=np.float64)
    ln_base = log(settings.freq_base)
    frequency = exp(i * (-2.0 / settings.n_rot) * ln_base)
    if factors is not None:
        frequency = frequency / factors.astype(np.float64)
    magnitude = settings.attn_factor
    if settings.yarn:
        def pair(beta):  # the pair whose wavelength fits beta times into the original context
            return settings.n_rot * log(settings.n_ctx_orig / (beta * 2 * np.pi)) / (2 * ln_base)
        low = max(0.0, np.floor(pair(settings.beta_fast)))
        high = min(settings.n_rot - 1.0, np.ceil(pair(settings.beta_slow)))
        ramp = 1.0 - np.clip((i - low) / max(0.001, high - low), 0.0, 1.0)
        frequency = settings.freq_scale * frequency * (1.0 - ramp) + frequency * ramp
        magnitude = magnitude * (1.0 + 0.1 * float(log(1.0 / settings.freq_scale)))
    else:
        frequency = settings.freq_scale * frequency
    if not (n_positions - 1) * frequency.max() < MOST_ANGLE:
        raise UserError(f"n_ctx: in a context of {n_positions} positions rotary angles would reach "
                        f"{(n_positions - 1) * frequency.max():.6g} radians, must be below {MOST_ANGLE:.0f}; "
                        f"they grow by up to {frequency.max():.6g} a position")
    table = np.empty((n_positions, half, 2), np.float32)
    for first in range(0, n_positions, 4096):  # float64 temporaries stay small
        positions = np.arange(first, min(first + 4096, n_positions), dtype=np.float64)
        sin, cos = sin_cos(positions[:, None] * frequency)
        table[first:first + len(positions), :, 0] = cos * magnitude
        table[first:first + len(positions), :, 1] = sin * magnitude
    return table


@dataclass(frozen=True)
class Temperature:
    """What a query at position p is multiplied by: 1 + scale ln(floor((p + offset) / length) + 1)."""
    scale: float
    offset: int
    length: int

    def table(self, n_positions: int) -> np.ndarray:
        """float32 [n_positions, 1]."""
        steps = (np.arange(n_positions, dtype=np.int64) + self.offset) // self.length + 1
        return (1 + self.scale * log(steps.astype(np.float64)))[:, None].astype(np.float32)
