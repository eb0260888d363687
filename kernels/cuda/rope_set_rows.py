"""Q rotated, K rotated and written to its cache, V written to its cache, in one launch (numerics, sections 5 to 7).

Blocks of four warps: x = token, y = first those of Q and of K, a warp a head, then those of V, a thread a value.
"""
from numba import cuda

from .launch import F32, I32, I64, N, U16, Kernel, check, factory
from .ptx import add, device, f32_to_f16, i64, ld, ldc, mul, st, sub

LANES, HEADS = 32, 4
POINTERS = {"f32": F32, "f16": U16}  # of caches that are written here, by type


@device
def put_f32(p, i, x):
    st(p, i, x)


@device
def put_f16(p, i, x):
    st(p, i, f32_to_f16(x))


PUTS = {"f32": put_f32, "f16": put_f16}


def rotation(put):
    """Device function: a lane's part of the head of `dim` channels from x[at] on, rotated and put to out[to] and behind it."""
    @device
    def rotate(x, at, out, to, table, angles, dim, half, neox, lane):
        for i in range(lane, half, LANES):
            first = i if neox else 2 * i
            second = first + (half if neox else 1)
            a, b = ld(x, at + first), ld(x, at + second)
            c, s = ldc(table, angles + 2 * i), ldc(table, angles + 2 * i + 1)
            put(out, to + first, sub(mul(a, c), mul(b, s)))
            put(out, to + second, add(mul(a, s), mul(b, c)))
        for i in range(2 * half + lane, dim, LANES):
            put(out, to + i, ld(x, at + i))
    return rotate


@factory([("f16", "f16"), ("f32", "f16"), ("f32", "f32")])
def rope_set_rows_kernel(type_k, type_v):
    rotate_q, rotate_k, put_v = rotation(put_f32), rotation(PUTS[type_k]), PUTS[type_v]

    def kernel(q, k, v, pos, table, rows, q_out, cache_k, cache_v, n_head, n_head_kv, dim, half, neox, v_cols):
        token, block, warp, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.y, cuda.threadIdx.x
        q_blocks, k_blocks = (n_head + HEADS - 1) // HEADS, (n_head_kv + HEADS - 1) // HEADS
        angles = i64(ld(pos, token)) * half * 2
        if block < q_blocks:
            head = block * HEADS + warp
            if head < n_head:
                at = (i64(token) * n_head + head) * dim
                rotate_q(q, at, q_out, at, table, angles, dim, half, neox, lane)
        elif block < q_blocks + k_blocks:
            head = (block - q_blocks) * HEADS + warp
            if head < n_head_kv:
                at, to = (i64(token) * n_head_kv + head) * dim, (ld(rows, token) * n_head_kv + head) * dim
                rotate_k(k, at, cache_k, to, table, angles, dim, half, neox, lane)
        else:
            column = ((block - q_blocks - k_blocks) * HEADS + warp) * LANES + lane
            if column < v_cols:
                put_v(cache_v, ld(rows, token) * v_cols + column, ld(v, i64(token) * v_cols + column))
    pointers = F32, F32, F32, I32, F32, I64, F32, POINTERS[type_k], POINTERS[type_v]
    return Kernel(kernel, (*pointers, N, N, N, N, N, N), n_threads=LANES * HEADS)


def rope_set_rows(target, type_k, type_v, q, k, v, pos, table, rows, q_out, cache_k, cache_v, n, n_head, n_head_kv, dim, n_rot, neox, v_cols):
    """q_out = rope(q), cache_k row rows[i] = rope(k)[i], cache_v row rows[i] = v[i]; bits of `rope` and `set_rows`.

    q, q_out: addresses of f32 [n, n_head, dim], apart; k: of [n, n_head_kv, dim]; v: of [n, v_cols]; pos: of i32 [n]; table: of f32 [n_ctx, n_rot / 2, 2];
    rows: of i64 [n], no two equal; cache_k, cache_v: of [n_cells, n_head_kv * dim] and [n_cells, v_cols], f32 or f16."""
    op = "rope_set_rows"
    for what, type_ in ("K", type_k), ("V", type_v):
        check(op, type_ in POINTERS, f"type of {what}", type_, ", ".join(POINTERS))
    for what, found in ("n", n), ("n_head", n_head), ("n_head_kv", n_head_kv), ("v_cols", v_cols):
        check(op, found >= 1, what, found, "at least 1")
    check(op, n_rot % 2 == 0 and 0 < n_rot <= dim, "n_rot", n_rot, f"even, 2 to {dim}")
    grid = n, -(-n_head // HEADS) + -(-n_head_kv // HEADS) + -(-v_cols // (LANES * HEADS))
    args = q, k, v, pos, table, rows, q_out, cache_k, cache_v, n_head, n_head_kv, dim, n_rot // 2, int(neox), v_cols
    return target.launch(rope_set_rows_kernel(type_k, type_v), grid, (LANES, HEADS), args)
