"""add(x, y), and its rms_norm, as floats, as activations or as both: a row at a time, so that it stays in the cache."""
from ..compile import jit
from .elementwise import add_rows
from .parallel import over_rows
from .quantize import quantize_rows
from .rms_norm import rms_norm_rows
from .rms_norm_act import rms_norm_act_rows


@jit
def add_rms_norm_rows(first, last, x, y, w, eps, out, total):
    for row in range(first, last):
        add_rows(row, row + 1, x, y, total)
        rms_norm_rows(row, row + 1, total, w, eps, out)


@jit
def add_rms_norm_act_rows(first, last, x, y, w, eps, q, d, sums, total):
    for row in range(first, last):
        add_rows(row, row + 1, x, y, total)
        rms_norm_act_rows(row, row + 1, total, w, eps, q, d, sums)


@jit
def add_rms_norm_and_act_rows(first, last, x, y, w, eps, q, d, sums, out, total):
    for row in range(first, last):
        add_rms_norm_rows(row, row + 1, x, y, w, eps, out, total)
        quantize_rows(row, row + 1, out, q, d, sums)


add_rms_norm = over_rows(add_rms_norm_rows)                  # (x f32 [n, k], y f32 [n, k], w f32 [k], eps f32, out f32 [n, k], total f32 [n, k])
add_rms_norm_act = over_rows(add_rms_norm_act_rows)          # (x, y, w, eps, q, d, sums as of quantize, total)
add_rms_norm_and_act = over_rows(add_rms_norm_and_act_rows)  # (x, y, w, eps, q, d, sums, out, total)
