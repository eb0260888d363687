"""quantize(rms_norm(x, w)) (numerics, sections 3 and 5)."""
import numpy as np

from ..compile import jit
from .quantize import quantize
from .rms_norm import rms_norm


@jit
def rms_norm_act(x, w, eps, q, d, sums):
    """x: f32 [n, k], w: f32 [k], eps: f32 -> q, d, sums as of `quantize`."""
    y = np.empty_like(x)
    rms_norm(x, w, eps, y)
    quantize(y, q, d, sums)
