"""y = mul(mul(d, r), w) of d = x - mean with r = 1 / sqrt(mean(d^2) + eps) over the columns of each row, and + b (numerics,
section 5).

One block a row, which is read three times: for its sum, for that of the squares of the differences, both as `rms_norm` makes its
sum, and to be normed."""
from math import prod

from numba import cuda

from .launch import F32, N, SCALAR_F32, Kernel, factory
from .rms_norm import MOST_THREADS, ROWS, STAGE, Source, check_rows, n_threads, reciprocal, sum_of_row, with_square
from .ptx import add, device, div, f32, i2f, i32, i64, ld, ldc, mul, nothing, st, sub

# t = (x, mean)
DIFFERENCES = Source(device(lambda t, i: sub(ld(t[0], i), t[1])), nothing, nothing, nothing)


@factory([(False,), (True,)])
def layer_norm_kernel(biased):
    sum_of, sum_of_squares = sum_of_row(ROWS, add), sum_of_row(DIFFERENCES, with_square)

    def kernel(x, w, b, out, n_cols, eps):
        stage = cuda.shared.array(STAGE, f32)
        row, column = i64(cuda.blockIdx.x) * n_cols, i32(cuda.threadIdx.x)
        mean = div(sum_of((x,), stage, row, n_cols), i2f(n_cols))
        r = reciprocal(sum_of_squares((x, mean), stage, row, n_cols), n_cols, eps)
        while column < n_cols:
            y = mul(mul(sub(ld(x, row + column), mean), r), ldc(w, column))
            st(out, row + column, add(y, ldc(b, column)) if biased else y)
            column = i32(column + cuda.blockDim.x)
    return Kernel(kernel, (F32, F32, F32, F32, N, SCALAR_F32), MOST_THREADS)


def check(call):
    check_rows(call.x, call.w)


def layer_norm(call):
    """out = (x - mean) / sqrt(variance + eps) * w, plus b where there is one, over runs of k columns.

    x, out: f32 [n, a multiple of k], one memory or apart; w, b: f32 [k]."""
    n_cols = call.w.n_cols
    args = call.x.data, call.w.data, (call.b or call.w).data, call.out.data, n_cols, call.eps
    return call.device.launch(layer_norm_kernel(call.b is not None), prod(call.x.shape) // n_cols, n_threads(n_cols), args)
