"""Rotary embedding (numerics, section 6): (a, b) -> (a c - b s, a s + b c); channels beyond the rotated ones are copied.

One warp a head, a lane for every 32nd pair; a block is four heads of a token.
"""
from numba import cuda

from .launch import F32, I32, N, Kernel, check, factory
from .ptx import add, i64, ld, ldc, mul, st, sub

LANES, HEADS = 32, 4


@factory([()])
def rope_kernel():
    def kernel(x, pos, table, out, n_head, dim, half, neox):
        token, head = cuda.blockIdx.x, cuda.blockIdx.y * HEADS + cuda.threadIdx.y
        if head < n_head:
            first = (i64(token) * n_head + head) * dim
            angles = i64(ld(pos, token)) * half * 2
            for i in range(cuda.threadIdx.x, half, LANES):
                a_at = first + (i if neox else 2 * i)
                b_at = a_at + (half if neox else 1)
                a, b = ld(x, a_at), ld(x, b_at)
                c, s = ldc(table, angles + 2 * i), ldc(table, angles + 2 * i + 1)
                st(out, a_at, sub(mul(a, c), mul(b, s)))
                st(out, b_at, add(mul(a, s), mul(b, c)))
            for i in range(2 * half + cuda.threadIdx.x, dim, LANES):
                st(out, first + i, ld(x, first + i))
    return Kernel(kernel, (F32, I32, F32, F32, N, N, N, N), n_threads=LANES * HEADS)


def rope(target, x, pos, table, out, n, n_head, dim, n_rot, neox):
    """x, out: addresses of f32 [n, n_head, dim], equal or apart; pos: of i32 [n]; table: of f32 [n_ctx, n_rot / 2, 2] of (cos, sin).

    Pair i is channels (i, i + n_rot / 2) if neox, else (2i, 2i + 1); channels n_rot..dim-1 are copied.
    """
    check("rope", n >= 1, "n", n, "at least 1")
    check("rope", n_head >= 1, "n_head", n_head, "at least 1")
    check("rope", n_rot % 2 == 0 and 0 < n_rot <= dim, "n_rot", n_rot, f"even, 2 to {dim}")
    grid = n, -(-n_head // HEADS)
    return target.launch(rope_kernel(), grid, (LANES, HEADS), (x, pos, table, out, n_head, dim, n_rot // 2, int(neox)))
