"""quantize(swiglu(gate, up)) (numerics, sections 3 and 5)."""
import numpy as np

from ..compile import jit
from .elementwise import swiglu
from .quantize import quantize


@jit
def swiglu_act(gate, up, q, d, sums):
    """gate, up: f32 [n, k] -> q, d, sums as of `quantize`."""
    y = np.empty_like(gate)
    swiglu(gate, up, y)
    quantize(y, q, d, sums)
