"""Q and K normed, if wanted, and rotated, K written to its cache, V written to its cache, in one launch (numerics, sections 5 to
7).

Blocks of four warps: x = token, y = first those of Q and of K, a warp a head, then those of V, a thread a value. A lane takes two
pairs of a head at a time, and its partials of sum128; the tree is shuffles. Heads for a q8_0 cache wait in shared memory, from
where their warp takes 32 channels at a time. Angles and norm weights, which no kernel writes, are asked for before the kernel
before has ended.
"""
from numba import cuda, types

from .lane_floats import get, put
from .launch import F32, I32, I64, N, SCALAR_F32, Kernel, factory, need
from .ptx import add, device, f32, fma, i32, i64, ld, mul, st, sub, syncwarp, wait_for_previous
from .rms_norm import halve128, reciprocal, within
from .set_rows import BLOCK, POINTERS, PUTS, at_address, in_cell, row_of

LANES, HEADS = 32, 4


@device
def squared(x, c, dim, ss):
    """A partial with x, channel c, if there is one."""
    x = x if c < dim else f32(0)
    return fma(x, x, ss)


@device
def reciprocal_rms(x, at, dim, eps, lane):
    """r of the head of `dim` channels from x[at] on, for all lanes of a warp."""
    s, t, u, v, c = f32(0), f32(0), f32(0), f32(0), i32(lane)
    while c - lane < dim:
        d, e, f = i32(c + 32), i32(c + 64), i32(c + 96)
        xc, xd, xe, xf = (ld(x, at + within(c, dim)), ld(x, at + within(d, dim)), ld(x, at + within(e, dim)),
                          ld(x, at + within(f, dim)))
        s, t, u, v = squared(xc, c, dim, s), squared(xd, d, dim, t), squared(xe, e, dim, u), squared(xf, f, dim, v)
        c = i32(c + 128)
    return reciprocal(halve128(s, t, u, v, lane), dim, eps)


zero = device(lambda *args: f32(0))
# By whether there are norms: r of a head, (x, r, w) -> the normed x, (w, c) -> weight of a channel
NORMS = {True: (reciprocal_rms, device(lambda x, r, w: mul(mul(x, r), w)), ld), False: (zero, device(lambda x, r, w: x), zero)}


@device
def channels(i, half, neox):
    """Those of pair i, or of the last one."""
    i = within(i, half)
    first = i if neox else i32(2 * i)
    return first, i32(first + (half if neox else 1))


def constants(get_weight):
    """Device function: (cos, sin, weight, weight) of pair i, or of the last one."""
    @device
    def of_pair(w, table, angles, i, half, neox):
        first, second = channels(i, half, neox)
        wa, wb = get_weight(w, first), get_weight(w, second)
        at = angles + 2 * within(i, half)
        return ld(table, at), ld(table, at + 1), wa, wb
    return of_pair


def rotation(put, reciprocal_of_head, norm, get_weight, load=ld):
    """Device function: a lane's part of the head of `dim` channels from x[at] on, normed by w, rotated and put to out[to] and
    behind it. p, q: `constants` of the pairs `lane` and lane + 32."""
    of_pair = constants(get_weight)

    @device
    def put_pair(out, to, i, half, neox, a, b, p, r):
        c, s, wa, wb = p
        if i < half:
            first, second = channels(i, half, neox)
            a, b = norm(a, r, wa), norm(b, r, wb)
            put(out, to + first, sub(mul(a, c), mul(b, s)))
            put(out, to + second, add(mul(a, s), mul(b, c)))

    @device
    def rotate(x, at, w, eps, out, to, table, angles, dim, half, neox, p, q, lane):
        r = reciprocal_of_head(x, at, dim, eps, lane)
        i = i32(lane)
        while i < half:
            j = i32(i + LANES)
            (first, second), (third, fourth) = channels(i, half, neox), channels(j, half, neox)
            a, b, c, d = load(x, at + first), load(x, at + second), load(x, at + third), load(x, at + fourth)
            put_pair(out, to, i, half, neox, a, b, p, r)
            put_pair(out, to, j, half, neox, c, d, q, r)
            i = i32(j + LANES)
            if i < half:
                p, q = of_pair(w, table, angles, i, half, neox), of_pair(w, table, angles, i32(i + LANES), half, neox)
        i = i32(2 * half + lane)
        while i < dim:
            put(out, to + i, norm(load(x, at + i), r, get_weight(w, i)))
            i = i32(i + LANES)
    return rotate


@factory([("f16", "f16", False, False), ("f32", "f16", False, False), ("f16", "f32", True, True), ("f16", "f16", True, False),
          ("f16", "f16", False, True), ("f32", "f32", True, False), ("q8_0", "q8_0", False, True), ("q8_0", "f16", True, False)])
def rope_set_rows_kernel(type_k, type_v, with_norms, indirect):
    how, place, waits = NORMS[with_norms], at_address if indirect else in_cell, type_k not in PUTS
    rotate_q, rotate_k, of_pair = rotation(st, *how), rotation(put if waits else PUTS[type_k], *how), constants(how[2])
    (n_k, put_k), (n_v, put_v) = row_of(type_k), row_of(type_v)

    def kernel(q, k, v, q_norm, k_norm, pos, rope_table, dst_k, dst_v, q_out, cache_k, cache_v, n_head, n_head_kv, dim, half,
               neox, v_cols, eps):
        token, block, warp, lane = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y), i32(cuda.threadIdx.y), i32(cuda.threadIdx.x)
        q_blocks, k_blocks = i32(i32(n_head + 3) >> 2), i32(i32(n_head_kv + 3) >> 2)  # of four heads
        angles = i64(ld(pos, token)) * (2 * half)
        w = q_norm if block < q_blocks else k_norm
        first, second = (of_pair(w, rope_table, angles, lane, half, neox),
                         of_pair(w, rope_table, angles, i32(lane + LANES), half, neox))
        wait_for_previous()
        if block < q_blocks:
            head = i32(block * HEADS + warp)
            if head < n_head:
                at = (i64(token) * n_head + head) * dim
                rotate_q(q, at, w, eps, q_out, at, rope_table, angles, dim, half, neox, first, second, lane)
        elif block < i32(q_blocks + k_blocks):
            head = i32((block - q_blocks) * HEADS + warp)
            if head < n_head_kv:
                at = (i64(token) * n_head_kv + head) * dim
                cell, to = place(cache_k, dst_k, token, n_head_kv * dim // n_k)
                if waits:
                    s, own = cuda.shared.array(0, types.int32), i32(warp * dim)
                    rotate_k(k, at, w, eps, s, own, rope_table, angles, dim, half, neox, first, second, lane)
                    syncwarp()  # the head is there
                    c = lane
                    while c < dim:
                        put_k(cell, to, i32(head * dim + c), get(s, own + c))
                        c = i32(c + LANES)
                else:
                    rotate_k(k, at, w, eps, cell, to + head * dim, rope_table, angles, dim, half, neox, first, second, lane)
        else:
            column = i32(((block - q_blocks - k_blocks) * HEADS + warp) * LANES + lane)
            if column < v_cols:
                cell, to = place(cache_v, dst_v, token, v_cols // n_v)
                put_v(cell, to, column, ld(v, i64(token) * v_cols + column))
    pointers = F32, F32, F32, F32, F32, I32, F32, I64, I64, F32, POINTERS[type_k], POINTERS[type_v]
    return Kernel(kernel, (*pointers, N, N, N, N, N, N, SCALAR_F32), n_threads=LANES * HEADS, n_blocks=12)


def check(call):
    q, k, v, n_head, n_head_kv = call.q, call.k, call.v, call.n_head, call.n_head_kv
    for what, cache, channels_of, n_channels in (("K", call.cache_k, "head size", q.n_cols // n_head),
                                                 ("V", call.cache_v, "columns", v.n_cols)):
        need(cache.dtype in POINTERS, f"type of {what}", cache.dtype, ", ".join(POINTERS))
        need(cache.dtype != "q8_0" or n_channels % BLOCK == 0, f"{channels_of} of {what}", n_channels,
             f"a multiple of {BLOCK} for q8_0")
    for what, found in ("n", q.n_rows), ("n_head", n_head), ("n_head_kv", n_head_kv), ("v_cols", v.n_cols):
        need(found >= 1, what, found, "at least 1")
    dim, n_rot = q.n_cols // n_head, 2 * call.table.shape[1]
    need(k.n_cols == n_head_kv * dim, "head size of K", k.n_cols // n_head_kv, f"{dim}, that of Q")
    need(0 < n_rot <= dim, "n_rot", n_rot, f"even, 2 to {dim}")
    norms = [norm for norm in (call.q_norm, call.k_norm) if norm is not None]
    need(len(norms) in (0, 2), "norms", len(norms), "0 or 2")
    for norm in norms:
        need((norm.dtype, norm.shape) == ("f32", (dim,)), "a norm", f"{norm.dtype} {list(norm.shape)}", f"f32 [{dim}]")


def rope_set_rows(call):
    """q_out = rope(rms_norm(q, q_norm)), cache_k[dst[i]] = rope(rms_norm(k, k_norm))[i], cache_v[dst[i]] = v[i]; without norms
    nothing is normed.

    q, q_out: f32 [n, n_head * channels], apart; k: f32 [n, n_head_kv * channels]; v: f32 [n, v_cols]; q_norm, k_norm: f32
    [channels], or absent; pos: i32 [n]; table: f32 [n_ctx, n_rot / 2, 2]; cache_k, cache_v: f32, f16 or q8_0 [cells, columns of
    k, of v]; dst: i64 [n], no two equal, or, where slots are given, i64 [slots, n], addresses of rows, of cache_k in row slot_k,
    of cache_v in row slot_v."""
    q, k, v, cache_k, cache_v, n_head, n_head_kv = call.q, call.k, call.v, call.cache_k, call.cache_v, call.n_head, call.n_head_kv
    normed, indirect, (n, v_cols) = call.q_norm is not None, call.slot_k is not None, v.shape
    dst_k, dst_v = (call.dst.data + 8 * n * (slot if indirect else 0) for slot in (call.slot_k, call.slot_v))
    q_norm, k_norm = (call.q_norm, call.k_norm) if normed else (q, k)  # without norms no weights are read
    grid = n, -(-n_head // HEADS) + -(-n_head_kv // HEADS) + -(-v_cols // (LANES * HEADS))
    args = (q.data, k.data, v.data, q_norm.data, k_norm.data, call.pos.data, call.table.data, dst_k, dst_v, call.q_out.data,
            cache_k.data, cache_v.data, n_head, n_head_kv, q.n_cols // n_head, call.table.shape[1], int(call.neox), v_cols,
            call.eps if normed else 0.0)
    n_bytes = 4 * HEADS * (q.n_cols // n_head) if cache_k.dtype not in PUTS else 0
    return call.device.launch(rope_set_rows_kernel(cache_k.dtype, cache_v.dtype, normed, indirect), grid, (LANES, HEADS), args,
                              n_bytes)
