"""add(x, y), and its rms_norm, as floats, as activations or as both: a row at a time, so that it stays in the cache."""
from functools import partial

from ..arith import f32
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


floats, activations, both = map(over_rows, (add_rms_norm_rows, add_rms_norm_act_rows, add_rms_norm_and_act_rows))


def add_rms_norm(call):
    """sum = x + y, out = rms_norm(sum, w) over runs of len(w) columns. x, y, sum, out: f32 [n, k]; w: f32."""
    x, y, out, total = (each.data.reshape(-1, call.w.shape[0]) for each in (call.x, call.y, call.out, call.sum))
    return partial(floats, x, y, call.w.data, f32(call.eps), out, total)


def add_rms_norm_act(call):
    """sum = x + y, act = quantize(rms_norm(sum, w)). x, y, sum: f32 [n, k]; w: f32 [k]."""
    return partial(activations, call.x.data, call.y.data, call.w.data, f32(call.eps), *call.act.data, call.sum.data)


def add_rms_norm_and_act(call):
    """The same, and out = rms_norm(sum, w), f32 [n, k]."""
    return partial(both, call.x.data, call.y.data, call.w.data, f32(call.eps), *call.act.data, call.out.data, call.sum.data)
