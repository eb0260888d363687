"""Channels of heads, apart and together. Copies of float32, no arithmetic; one thread a result."""
from numba import cuda

from .elementwise import THREADS, grid
from .launch import F32, Kernel, N, check, factory
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


def slice_heads(target, x, out, n_rows, n_head, dim, first, count):
    """out[i, h] = the channels first .. first + count - 1 of x[i, h]. x: address of f32 [n_rows, n_head, dim]; out: of f32 [n_rows, n_head, count]."""
    check("slice_heads", 0 <= first < first + count <= dim, "channels", f"{first}..{first + count - 1}", f"0..{dim - 1}")
    return target.launch(slice_heads_kernel(), grid("slice_heads", n_rows, n_head * count), THREADS, (x, out, n_head, dim, first, count))


def concat_heads(target, x, y, out, n_rows, n_head, n_head_y, dim, dim_y):
    """out[i, h] = x[i, h], and behind it y[i, h], or y[i, 0] if y has one head. x: address of f32 [n_rows, n_head, dim]; y: of f32 [n_rows, n_head_y, dim_y];
    out: of f32 [n_rows, n_head, dim + dim_y]."""
    check("concat_heads", n_head_y in (1, n_head), "n_head_y", n_head_y, f"1 or {n_head}")
    blocks = grid("concat_heads", n_rows, n_head * (dim + dim_y))
    return target.launch(concat_heads_kernel(), blocks, THREADS, (x, y, out, n_head, n_head_y, dim, dim_y))
