"""total = x + y and its rms_norm, as floats, as activations or as both: the residual added where it is normed. Blocks as in rms_norm and rms_norm_act.

The thread that loads an element of x and y writes that of total; rows longer than a round of rms_norm are read back from there.
"""
from .launch import F32, N, SCALAR_F32, U32, Kernel, check, factory
from .ptx import add, device, ld, ld4, st, st4
from .rms_norm import MOST_THREADS, Source, n_threads, put, row_norm
from .rms_norm_act import is_round, round_norm_act, row_norm_act


@device
def _add(t, i):
    return add(ld(t[1], i), ld(t[2], i))


@device
def _keep(t, i, value):
    st(t[0], i, value)


@device
def _add4(t, i):
    a, b, c, d = ld4(t[1], i)
    e, f, g, h = ld4(t[2], i)
    return add(a, e), add(b, f), add(c, g), add(d, h)


@device
def _keep4(t, i, a, b, c, d):
    st4(t[0], i, a, b, c, d)


@device
def _put(t, row, column, n_cols, y):
    put(t[3], row, column, n_cols, y)


@device
def _put4(t, i, a, b, c, d):
    st4(t[3], i, a, b, c, d)


SUMS = Source(_add, _keep, _add4, _keep4)  # t = (total, x, y); or (total, x, y, norm) with _put


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
    norm_row_act = round_norm_act(SUMS, _put4) if one_round else row_norm_act(SUMS, _put)

    def kernel(x, y, w, act, norm, total, n, n_cols, eps):
        norm_row_act((total, x, y, norm), w, act, n, n_cols, eps)
    return Kernel(kernel, (F32, F32, F32, U32, F32, F32, N, N, SCALAR_F32), MOST_THREADS, n_blocks=2 if one_round else 1)


def add_rms_norm(target, x, y, w, out, total, n_rows, n_cols, eps):
    """total = x + y, out = rms_norm(total) * w. x, y, out, total: addresses of f32 [n_rows, n_cols], out and total apart; w: of f32 [n_cols]."""
    check("add_rms_norm", n_rows >= 1, "n_rows", n_rows, "at least 1")
    check("add_rms_norm", n_cols >= 1, "n_cols", n_cols, "at least 1")
    return target.launch(add_rms_norm_kernel(), n_rows, n_threads(n_cols), (x, y, w, out, total, n_cols, eps))


def add_rms_norm_act(target, x, y, w, act, total, n, k, eps):
    """x, y, total: addresses of f32 [n, k]; w: of f32 [k]; act: address of `activation_bytes(n, k)`; all on 16 bytes."""
    check("add_rms_norm_act", n >= 1, "n", n, "at least 1")
    check("add_rms_norm_act", k >= 1, "k", k, "at least 1")
    return target.launch(add_rms_norm_act_kernel(is_round(k)), n, n_threads(k), (x, y, w, act, total, n, k, eps))


def add_rms_norm_and_act(target, x, y, w, act, norm, total, n, k, eps):
    """The same, and norm = rms_norm(total) * w, address of f32 [n, k], on 16 bytes; act, norm and total apart."""
    check("add_rms_norm_and_act", n >= 1, "n", n, "at least 1")
    check("add_rms_norm_and_act", k >= 1, "k", k, "at least 1")
    return target.launch(add_rms_norm_and_act_kernel(is_round(k)), n, n_threads(k), (x, y, w, act, norm, total, n, k, eps))
