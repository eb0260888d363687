"""The table of rotary angles: cosines and sines of every position and pair, made in float64 by exact_math and rounded once to float32."""
from dataclasses import dataclass

import numpy as np

from .exact_math import exp, log, sin_cos


@dataclass(frozen=True)
class RopeSettings:
    """What the angles depend on (reference: ggml's rope op). R = n_rot, s = 1 / freq_scale.

    theta_e(i) = position * base^(-2i/R) / factors[i], theta_i = freq_scale * theta_e. Without YaRN the angle is theta_i and the magnitude
    attn_factor. With YaRN (ext_factor 1) it is theta_i (1 - ramp) + theta_e ramp, ramp = 1 - clamp((i - low) / max(0.001, high - low), 0, 1),
    and the magnitude attn_factor * (1 + 0.1 ln s); low and high are the pairs that turn beta_fast and beta_slow times within n_ctx_orig.
    """
    n_rot: int
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    yarn: bool = False
    attn_factor: float = 1.0
    n_ctx_orig: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def _ln(x: float) -> float:
    return float(log(np.float64(x)))


def rope_table(settings: RopeSettings, n_positions: int, factors: np.ndarray | None = None) -> np.ndarray:
    """factors: float32 [R/2] or None. Returns float32 [n_positions, R/2, 2]: (cos, sin), each times the magnitude."""
    half = settings.n_rot // 2
    i = np.arange(half, dtype=np.float64)
    ln_base = _ln(settings.freq_base)
    frequency = exp(i * (-2.0 / settings.n_rot) * ln_base)
    if factors is not None:
        frequency = frequency / factors.astype(np.float64)
    magnitude = settings.attn_factor
    if settings.yarn:
        def pair(beta):  # the pair whose wavelength fits beta times into the original context
            return settings.n_rot * _ln(settings.n_ctx_orig / (beta * 2 * np.pi)) / (2 * ln_base)
        low = max(0.0, np.floor(pair(settings.beta_fast)))
        high = min(settings.n_rot - 1.0, np.ceil(pair(settings.beta_slow)))
        ramp = 1.0 - np.clip((i - low) / max(0.001, high - low), 0.0, 1.0)
        frequency = settings.freq_scale * frequency * (1.0 - ramp) + frequency * ramp
        magnitude = magnitude * (1.0 + 0.1 * _ln(1.0 / settings.freq_scale))
    else:
        frequency = settings.freq_scale * frequency
    table = np.empty((n_positions, half, 2), np.float32)
    for first in range(0, n_positions, 4096):  # float64 temporaries stay small
        positions = np.arange(first, min(first + 4096, n_positions), dtype=np.float64)
        sin, cos = sin_cos(positions[:, None] * frequency)
        table[first:first + len(positions), :, 0] = cos * magnitude
        table[first:first + len(positions), :, 1] = sin * magnitude
    return table
