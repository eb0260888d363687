"""add(x, y), and its rms_norm, as floats, as activations or as both (numerics, sections 3 and 5)."""
from ..compile import jit
from .elementwise import add
from .quantize import quantize
from .rms_norm import rms_norm
from .rms_norm_act import rms_norm_act


@jit
def add_rms_norm(x, y, w, eps, out, total):
    """x, y: f32 [n, k], w: f32 [k], eps: f32, out, total: f32 [n, k]. total = x + y, out = its norm."""
    add(x, y, total)
    rms_norm(total, w, eps, out)


@jit
def add_rms_norm_act(x, y, w, eps, q, d, sums, total):
    """The same, of whose norm q, d, sums are as of `quantize`."""
    add(x, y, total)
    rms_norm_act(total, w, eps, q, d, sums)


@jit
def add_rms_norm_and_act(x, y, w, eps, q, d, sums, out, total):
    """Both."""
    add_rms_norm(x, y, w, eps, out, total)
    quantize(out, q, d, sums)
