"""The logarithm of the softmax of each row, at some of its columns (numerics, section 5). One block a row: its largest value,
then sum128 of the exponentials as the norms add squares, then a thread for each column that is asked for.
"""
from numba import cuda

from ..arith import NAN
from .argmax import best_of_block, order
from .launch import F32, I32, Kernel, N, factory, need
from .ptx import add, device, exp, f32, i32, i64, ld, log, nothing, st, sub
from .rms_norm import MOST_THREADS, STAGE, Source, n_threads, sum_of_row
from .soft_max import MINUS_INFINITY, of_order

# t = (x, the largest value of the row)
EXPONENTIALS = Source(device(lambda t, i: exp(sub(ld(t[0], i), t[1]))), nothing, nothing, nothing)


@factory([()])
def log_soft_max_kernel():
    sum_of_exponentials = sum_of_row(EXPONENTIALS, device(lambda v, total: add(total, v)))

    def kernel(x, ids, out, n_cols, n_ids):
        stage = cuda.shared.array(STAGE, f32)
        row, t = i64(cuda.blockIdx.x), i32(cuda.threadIdx.x)
        m, column = MINUS_INFINITY, t
        while column < n_cols:
            value = ld(x, row * n_cols + column)
            m = value if value > m else m
            column = i32(column + cuda.blockDim.x)
        m = of_order(best_of_block(t, order(m), t)[0])
        total = log(sum_of_exponentials((x, m), stage, row * n_cols, i32(n_cols)))
        i = t
        while i < n_ids:
            column = ld(ids, row * n_ids + i)
            value = NAN
            if 0 <= column < n_cols:
                value = sub(sub(ld(x, row * n_cols + column), m), total)
            st(out, row * n_ids + i, value)
            i = i32(i + cuda.blockDim.x)
    return Kernel(kernel, (F32, I32, F32, N, N), MOST_THREADS)


def check(call):
    need(call.x.n_cols >= 1, "k", call.x.n_cols, "at least 1")


def log_soft_max(call):
    """out[i, j] = log(softmax(x[i]))[ids[i, j]], NaN where there is no such column. x: f32 [n, k]; ids: i32 [n, u]; out: f32
    [n, u]."""
    n, k = call.x.shape
    args = call.x.data, call.ids.data, call.out.data, k, call.ids.shape[1]
    return call.device.launch(log_soft_max_kernel(), n, n_threads(k), args)
