"""Heads divided by their lengths: y = mul(x, r), r = 1 / sqrt(sum of x^2 + eps) (numerics, section 10). One warp a head, which is
in its registers; the columns behind the heads are copied by as many warps as they would have heads."""
from numba import cuda

from .launch import F32, N, SCALAR_F32, Kernel, factory, need
from .ptx import add, div, f32, fma, i32, i64, ld, mul, sqrt, st
from .rms_norm import halve128, within
from .warp_row import MOST_COLUMNS, VALUES, n_values

WARPS = 8  # of a block


@factory([(n,) for n in VALUES])
def l2_norm_kernel(n):
    """Of heads of up to 32 n channels."""
    def kernel(x, out, n_head, dim, n_cols, eps):
        v, partial = cuda.local.array(n, f32), cuda.local.array(4, f32)
        lane, head = i32(cuda.threadIdx.x & 31), i32(cuda.blockIdx.y * WARPS + (cuda.threadIdx.x >> 5))
        row, first = i64(cuda.blockIdx.x) * n_cols, i32(head * dim)
        if first < n_cols:
            for i in range(4):
                partial[i] = f32(0)
            for i in range(n):
                column = i32(lane + 32 * i)
                v[i] = ld(x, row + within(i32(first + column), n_cols))
                partial[i & 3] = fma(v[i], v[i], partial[i & 3]) if column < dim else partial[i & 3]
            r = div(f32(1), sqrt(add(halve128(partial[0], partial[1], partial[2], partial[3], lane), eps)))
            for i in range(n):
                column = i32(lane + 32 * i)
                if column < dim and first + column < n_cols:
                    st(out, row + first + column, mul(v[i], r) if head < n_head else v[i])
    return Kernel(kernel, (F32, F32, N, N, N, SCALAR_F32), 32 * WARPS)


def check(call):
    need(call.x.n_rows >= 1, "n_rows", call.x.n_rows, "at least 1")
    need(1 <= call.dim <= MOST_COLUMNS, "channels of a head", call.dim, f"1..{MOST_COLUMNS}")


def l2_norm(call):
    """out = x / sqrt(sum(x^2) + eps) over each of the first n_head runs of dim columns, x behind them.

    x, out: f32 [n, k], one memory or apart."""
    n, k = call.x.shape
    grid = n, -(-k // (call.dim * WARPS))
    args = call.x.data, call.out.data, call.n_head, call.dim, k, call.eps
    return call.device.launch(l2_norm_kernel(n_values(call.dim)), grid, 32 * WARPS, args)
