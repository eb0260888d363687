"""total = x + y and its rms_norm, as floats, as activations or as both: the residual added where it is normed. Blocks as in
rms_norm and rms_norm_act.

The thread that loads an element of x and y writes that of total; rows longer than a round of rms_norm are read back from there.
"""
from math import prod

from .launch import F32, N, SCALAR_F32, U32, Kernel, factory
from .ptx import add, device, ld, ld4, st, st4
from .rms_norm import MOST_THREADS, Source, check_rows, n_threads, put, row_norm
from .rms_norm_act import is_round, round_norm_act, row_norm_act


@device
def add4(t, i):
    """Elements i .. i + 3 of the sum."""
    a, b, c, d = ld4(t[1], i)
    e, f, g, h = ld4(t[2], i)
    return add(a, e), add(b, f), add(c, g), add(d, h)


# t = (total, x, y), or, where the norm is written as floats too, (total, x, y, norm)
SUMS = Source(load=device(lambda t, i: add(ld(t[1], i), ld(t[2], i))), keep=device(lambda t, i, value: st(t[0], i, value)),
              load4=add4, keep4=device(lambda t, i, a, b, c, d: st4(t[0], i, a, b, c, d)))
put_norm = device(lambda t, row, column, n_cols, y: put(t[3], row, column, n_cols, y))
put_norm4 = device(lambda t, i, a, b, c, d: st4(t[3], i, a, b, c, d))


@factory([()])
def add_rms_norm_kernel():
    norm_row = row_norm(SUMS)

    def kernel(x, y, w, out, total, n_cols, eps):
        norm_row((total, x, y), w, out, n_cols, eps)
    return Kernel(kernel, (F32, F32, F32, F32, F32, N, SCALAR_F32), MOST_THREADS)


@factory([(True,), (False,)])
def add_rms_norm_act_kernel(one_round):
    norm_row_act = round_norm_act(SUMS) if one_round else row_norm_act(SUMS)

    def kernel(x, y, w, act, total, n, n_cols, eps):
        norm_row_act((total, x, y), w, act, n, n_cols, eps)
    return Kernel(kernel, (F32, F32, F32, U32, F32, N, N, SCALAR_F32), MOST_THREADS, n_blocks=2 if one_round else 1)


@factory([(True,), (False,)])
def add_rms_norm_and_act_kernel(one_round):
    norm_row_act = round_norm_act(SUMS, put_norm4) if one_round else row_norm_act(SUMS, put_norm)

    def kernel(x, y, w, act, norm, total, n, n_cols, eps):
        norm_row_act((total, x, y, norm), w, act, n, n_cols, eps)
    return Kernel(kernel, (F32, F32, F32, U32, F32, F32, N, N, SCALAR_F32), MOST_THREADS, n_blocks=2 if one_round else 1)


def check(call):
    check_rows(call.x, call.w)


def add_rms_norm(call):
    """sum = x + y, out = rms_norm(sum, w) over runs of k columns.

    x, y, out, sum: f32 [n, a multiple of k], out and sum apart; w: f32 [k]."""
    n_cols = call.w.n_cols
    args = call.x.data, call.y.data, call.w.data, call.out.data, call.sum.data, n_cols, call.eps
    return call.device.launch(add_rms_norm_kernel(), prod(call.x.shape) // n_cols, n_threads(n_cols), args)


def add_rms_norm_act(call):
    """sum = x + y, act = quantize(rms_norm(sum, w)).

    x, y, sum: f32 [n, k]; w: f32 [k]; act: activations [n, k]; all on 16 bytes."""
    n, k = call.x.shape
    args = call.x.data, call.y.data, call.w.data, call.act.data, call.sum.data, n, k, call.eps
    return call.device.launch(add_rms_norm_act_kernel(is_round(k)), n, n_threads(k), args)


def add_rms_norm_and_act(call):
    """The same, and out = rms_norm(sum, w), f32 [n, k] on 16 bytes; act, out and sum apart."""
    n, k = call.x.shape
    args = call.x.data, call.y.data, call.w.data, call.act.data, call.out.data, call.sum.data, n, k, call.eps
    return call.device.launch(add_rms_norm_and_act_kernel(is_round(k)), n, n_threads(k), args)
