"""Rotary embedding (numerics, section 6): (a, b) -> (a c - b s, a s + b c); channels beyond the rotated ones are copied.

One warp a head, a lane for every 32nd pair; a block is four heads of a token.
"""
from numba import cuda

from .launch import F32, I32, N, Kernel, factory, need
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


def check(call):
    need(call.x.n_rows >= 1, "n", call.x.n_rows, "at least 1")
    need(call.n_head >= 1, "n_head", call.n_head, "at least 1")
    n_rot, dim = 2 * call.table.shape[1], call.x.n_cols // call.n_head
    need(0 < n_rot <= dim, "n_rot", n_rot, f"even, 2 to {dim}")


def rope(call):
    """out = (a c - b s, a s + b c) of each pair (a, b) of each head of x, (c, s) = table[pos[token], pair]; others are x's.

    x, out: f32 [n, n_head * channels], one memory or apart; pos: i32 [n]; table: f32 [n_ctx, n_rot / 2, 2]. Pair i is channels
    (i, i + n_rot / 2) if neox, else (2 i, 2 i + 1)."""
    n_head, half = call.n_head, call.table.shape[1]
    grid = call.x.n_rows, -(-n_head // HEADS)
    args = call.x.data, call.pos.data, call.table.data, call.out.data, n_head, call.x.n_cols // n_head, half, int(call.neox)
    return call.device.launch(rope_kernel(), grid, (LANES, HEADS), args)
