"""What comes before and after the products with experts: rows of biases, scales, and the weighted sum (numerics, section 9). One thread an element."""
from numba import cuda

from . import ptx
from ..arith import NAN
from .elementwise import THREADS, grid
from .launch import F32, I32, Kernel, N, check, factory
from .ptx import f32, fma, i32, i64, ld, st

RANKS = 8  # of which all values are loaded before the first is added


@factory([()])
def add_id_kernel():
    def kernel(x, b, ids, out, n_cols, n_expert):
        column = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            i, expert = i64(cuda.blockIdx.x) * n_cols + column, ld(ids, cuda.blockIdx.x)
            bias = NAN
            if 0 <= expert < n_expert:
                bias = ld(b, i64(expert) * n_cols + column)
            st(out, i, ptx.add(ld(x, i), bias))
    return Kernel(kernel, (F32, F32, I32, F32, N, N), THREADS)


@factory([()])
def scale_id_kernel():
    def kernel(x, s, ids, out, n_cols, n_expert):
        column = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            i, expert = i64(cuda.blockIdx.x) * n_cols + column, ld(ids, cuda.blockIdx.x)
            factor = NAN
            if 0 <= expert < n_expert:
                factor = ld(s, expert)
            st(out, i, ptx.mul(ld(x, i), factor))
    return Kernel(kernel, (F32, F32, I32, F32, N, N), THREADS)


@factory([()])
def weighted_sum_kernel():
    def kernel(x, w, out, n_used, n_cols):
        values, weights = cuda.local.array(RANKS, f32), cuda.local.array(RANKS, f32)
        token, column = i64(cuda.blockIdx.x), cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            total, j = f32(0), i32(0)
            while j < n_used:
                for i in range(RANKS):
                    row = token * n_used + min(i32(j + i), i32(n_used - 1))
                    values[i], weights[i] = ld(x, row * n_cols + column), ld(w, row)
                for i in range(RANKS):
                    total = fma(values[i], weights[i], total) if j + i < n_used else total
                j = i32(j + RANKS)
            st(out, token * n_cols + column, total)
    return Kernel(kernel, (F32, F32, F32, N, N), THREADS)


def add_id(target, x, b, ids, out, n_rows, n_cols, n_expert):
    """out[i] = x[i] + b[ids[i]], NaN where there is no such expert. x, out: addresses of f32 [n_rows, n_cols], equal or apart; b: of f32 [n_expert, n_cols];
    ids: of i32 [n_rows]."""
    return target.launch(add_id_kernel(), grid("add_id", n_rows, n_cols), THREADS, (x, b, ids, out, n_cols, n_expert))


def scale_id(target, x, s, ids, out, n_rows, n_cols, n_expert):
    """out[i] = x[i] * s[ids[i]], NaN where there is no such expert. x, out: addresses of f32 [n_rows, n_cols], equal or apart; s: of f32 [n_expert]; ids: of
    i32 [n_rows]."""
    return target.launch(scale_id_kernel(), grid("scale_id", n_rows, n_cols), THREADS, (x, s, ids, out, n_cols, n_expert))


def weighted_sum(target, x, w, out, n_tokens, n_used, n_cols):
    """out[i] = the sum of x[i, j] * w[i, j] in the order of j. x: address of f32 [n_tokens, n_used, n_cols]; w: of f32 [n_tokens, n_used]; out: of f32
    [n_tokens, n_cols]."""
    check("weighted_sum", n_used >= 1, "n_used", n_used, "at least 1")
    return target.launch(weighted_sum_kernel(), grid("weighted_sum", n_tokens, n_cols), THREADS, (x, w, out, n_used, n_cols))
