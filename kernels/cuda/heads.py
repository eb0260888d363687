"""Channels of heads, apart and together. Copies of float32, no arithmetic; one thread a result."""
from numba import cuda

from .elementwise import THREADS, by_element, check_grid
from .launch import F32, Kernel, N, factory, need
from .operands import addresses
from .ptx import i32, i64, ld, st


@factory([()])
def slice_heads_kernel():
    def kernel(x, out, n_head, dim, first, count):
        column = i32(cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
        if column < n_head * count:
            head, token = i32(column // count), i64(cuda.blockIdx.x)
            st(out, token * n_head * count + column, ld(x, (token * n_head + head) * dim + first + (column - head * count)))
    return Kernel(kernel, (F32, F32, N, N, N, N), THREADS)


@factory([()])
def concat_heads_kernel():
    def kernel(x, y, out, n_head, n_head_y, dim, dim_y):
        both, column = i32(dim + dim_y), i32(cuda.blockIdx.y * THREADS + cuda.threadIdx.x)
        if column < n_head * both:
            head, token = i32(column // both), i64(cuda.blockIdx.x)
            channel = i32(column - head * both)
            if channel < dim:
                value = ld(x, (token * n_head + head) * dim + channel)
            else:
                value = ld(y, (token * n_head_y + (head if n_head_y > 1 else 0)) * dim_y + (channel - dim))
            st(out, token * n_head * both + column, value)
    return Kernel(kernel, (F32, F32, F32, N, N, N, N), THREADS)


def check(call):
    check_grid(call.out)
    if call.op == "slice_heads":
        dim, last = call.x.n_cols // call.n_head, call.first + call.n - 1
        need(0 <= call.first <= last < dim, "channels", f"{call.first}..{last}", f"0..{dim - 1}")
    else:
        need(call.n_head_y in (1, call.n_head), "n_head_y", call.n_head_y, f"1 or {call.n_head}")


def slice_heads(call):
    """out[i, h] = the channels first .. first + n - 1 of x[i, h].

    x: f32 [rows, n_head * channels]; out: f32 [rows, n_head * n]."""
    return by_element(call, slice_heads_kernel(), *addresses(call.x, call.out), call.n_head, call.x.n_cols // call.n_head,
                      call.first, call.n)


def concat_heads(call):
    """out[i, h] = x[i, h], and behind it y[i, h], or y[i, 0] where y has one head.

    x: f32 [rows, n_head * channels]; y: f32 [rows, n_head_y * its channels]; out: f32 [rows, n_head * both]."""
    n_head, n_head_y = call.n_head, call.n_head_y
    return by_element(call, concat_heads_kernel(), *addresses(call.x, call.y, call.out), n_head, n_head_y,
                      call.x.n_cols // n_head, call.y.n_cols // n_head_y)
