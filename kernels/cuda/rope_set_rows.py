"""Q and K normed, if wanted, and rotated, K written to its cache, V written to its cache, in one launch (numerics, sections 5 to 7).

Blocks of four warps: x = token, y = first those of Q and of K, a warp a head, then those of V, a thread a value.
"""
from numba import cuda

from .launch import F32, I32, I64, N, SCALAR_F32, U16, Kernel, check, factory
from .ptx import add, device, div, f32, f32_to_f16, fma, i2f, i64, ld, ldc, lds, mul, sqrt, st, sts, sub, syncwarp
from .set_rows import at_address, in_cell

LANES, HEADS = 32, 4
PARTIALS = 128
STAGE = HEADS * PARTIALS
POINTERS = {"f32": F32, "f16": U16}  # of caches that are written here, by type


@device
def put_f32(p, i, x):
    st(p, i, x)


@device
def put_f16(p, i, x):
    st(p, i, f32_to_f16(x))


PUTS = {"f32": put_f32, "f16": put_f16}


@device
def reciprocal_rms(x, at, dim, eps, stage, first, lane):
    """r of the head of `dim` channels from x[at] on, for all lanes of a warp. stage[first..first + 127] is the warp's."""
    for j in range(lane, PARTIALS, LANES):
        ss = f32(0)
        for c in range(j, dim, PARTIALS):
            ss = fma(ld(x, at + c), ld(x, at + c), ss)
        sts(stage, first + j, ss)
    half = PARTIALS // 2
    while half > 0:
        syncwarp()  # both halves are written
        for j in range(lane, half, LANES):
            sts(stage, first + j, add(lds(stage, first + j), lds(stage, first + j + half)))
        half >>= 1
    syncwarp()
    return div(f32(1), sqrt(add(div(lds(stage, first), i2f(dim)), eps)))


@device
def no_norm(x, at, dim, eps, stage, first, lane):
    return f32(0)


@device
def normed(x, at, c, w, r):
    return mul(mul(ld(x, at + c), r), ldc(w, c))


@device
def as_it_is(x, at, c, w, r):
    return ld(x, at + c)


def rotation(put, reciprocal, get):
    """Device function: a lane's part of the head of `dim` channels from x[at] on, normed by w, rotated and put to out[to] and behind it."""
    @device
    def rotate(x, at, w, eps, out, to, table, angles, dim, half, neox, stage, warp, lane):
        r = reciprocal(x, at, dim, eps, stage, warp * PARTIALS, lane)
        for i in range(lane, half, LANES):
            first = i if neox else 2 * i
            second = first + (half if neox else 1)
            a, b = get(x, at, first, w, r), get(x, at, second, w, r)
            c, s = ldc(table, angles + 2 * i), ldc(table, angles + 2 * i + 1)
            put(out, to + first, sub(mul(a, c), mul(b, s)))
            put(out, to + second, add(mul(a, s), mul(b, c)))
        for i in range(2 * half + lane, dim, LANES):
            put(out, to + i, get(x, at, i, w, r))
    return rotate


@factory([("f16", "f16", False, False), ("f32", "f16", False, False), ("f16", "f32", True, True), ("f16", "f16", False, True), ("f32", "f32", True, False)])
def rope_set_rows_kernel(type_k, type_v, with_norms, indirect):
    how, place = (reciprocal_rms, normed) if with_norms else (no_norm, as_it_is), at_address if indirect else in_cell
    rotate_q, rotate_k, put_v = rotation(put_f32, *how), rotation(PUTS[type_k], *how), PUTS[type_v]

    def kernel(q, k, v, q_norm, k_norm, pos, table, dst_k, dst_v, q_out, cache_k, cache_v, n_head, n_head_kv, dim, half, neox, v_cols, eps):
        stage = cuda.shared.array(STAGE, f32)
        token, block, warp, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.y, cuda.threadIdx.x
        q_blocks, k_blocks = (n_head + HEADS - 1) // HEADS, (n_head_kv + HEADS - 1) // HEADS
        angles = i64(ld(pos, token)) * half * 2
        if block < q_blocks:
            head = block * HEADS + warp
            if head < n_head:
                at = (i64(token) * n_head + head) * dim
                rotate_q(q, at, q_norm, eps, q_out, at, table, angles, dim, half, neox, stage, warp, lane)
        elif block < q_blocks + k_blocks:
            head = (block - q_blocks) * HEADS + warp
            if head < n_head_kv:
                at = (i64(token) * n_head_kv + head) * dim
                cell, first = place(cache_k, dst_k, token, n_head_kv * dim)
                rotate_k(k, at, k_norm, eps, cell, first + head * dim, table, angles, dim, half, neox, stage, warp, lane)
        else:
            column = ((block - q_blocks - k_blocks) * HEADS + warp) * LANES + lane
            if column < v_cols:
                cell, first = place(cache_v, dst_v, token, v_cols)
                put_v(cell, first + column, ld(v, i64(token) * v_cols + column))
    pointers = F32, F32, F32, F32, F32, I32, F32, I64, I64, F32, POINTERS[type_k], POINTERS[type_v]
    return Kernel(kernel, (*pointers, N, N, N, N, N, N, SCALAR_F32), n_threads=LANES * HEADS)


def rope_set_rows(target, type_k, type_v, q, k, v, norms, eps, pos, table, indirect, dst_k, dst_v, q_out, cache_k, cache_v, n, n_head, n_head_kv, dim, n_rot,
                  neox, v_cols):
    """q_out = rope(q), cache_k row dst_k[i] = rope(k)[i], cache_v row dst_v[i] = v[i]; bits of `rope` and `set_rows`, and of `rms_norm`.

    q, q_out: addresses of f32 [n, n_head, dim], apart; k: of [n, n_head_kv, dim]; v: of [n, v_cols]; norms: of two f32 [dim], by which each head of q and of
    k is normed first, or none; pos: of i32 [n]; table: of f32 [n_ctx, n_rot / 2, 2]; dst_k, dst_v: of i64 [n], no two equal, cells or, if indirect, addresses
    of rows of the caches; cache_k, cache_v: of [n_cells, n_head_kv * dim] and [n_cells, v_cols], f32 or f16."""
    op = "rope_set_rows"
    for what, type_ in ("K", type_k), ("V", type_v):
        check(op, type_ in POINTERS, f"type of {what}", type_, ", ".join(POINTERS))
    for what, found in ("n", n), ("n_head", n_head), ("n_head_kv", n_head_kv), ("v_cols", v_cols):
        check(op, found >= 1, what, found, "at least 1")
    check(op, n_rot % 2 == 0 and 0 < n_rot <= dim, "n_rot", n_rot, f"even, 2 to {dim}")
    check(op, len(norms) in (0, 2), "norms", len(norms), "0 or 2")
    grid = n, -(-n_head // HEADS) + -(-n_head_kv // HEADS) + -(-v_cols // (LANES * HEADS))
    q_norm, k_norm = norms or (q, k)  # without norms no weights are read
    args = q, k, v, q_norm, k_norm, pos, table, dst_k, dst_v, q_out, cache_k, cache_v, n_head, n_head_kv, dim, n_rot // 2, int(neox), v_cols, eps
    return target.launch(rope_set_rows_kernel(type_k, type_v, bool(norms), indirect), grid, (LANES, HEADS), args)
