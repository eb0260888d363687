"""Attention of many queries over f16 and q8_0 caches, on int8 tensor cores (numerics, section 8).

A block takes 16 rows a warp, a row being one token and one of up to 8 query heads of one KV head, and goes through the pieces of
128 keys in position order; or several blocks share the pieces of the same rows, each taking every so many-th, and leave (m, l, o)
to `flash_attn_ext_combine`. Tokens of a block that are of several sequences are taken run by run; pieces behind a run's last
position or before what its windows reach are not touched, nor are those of a warp whose rows see none of their keys. In a piece

    1. the block makes limbs of keys and values in shared memory, of 16 keys a warp: lane l = 4 g + t has the channels 8 t .. and
       32 + 8 t .. of each 64 of keys g and g + 8, and the channels 8 g .. of keys 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t
    2. a warp multiplies its queries with all keys: lane l has the scores of rows g and g + 8 with keys 2 t, 2 t + 1 of each 8
    3. m, p, l (the tree goes over the keys of a lane, then over lanes) and the limbs of p', which lie as the next product wants
       them
    4. a warp multiplies p' with all values, and combines or leaves o

1. is `flash_attn_ext_tile_limbs`, 2. to 4. are `flash_attn_ext_tile_rows`. Of heads of more than LARGE channels shared memory
holds either keys or values: they take turns, scores wait in registers, and outputs in `out`, where a lane reads what it wrote.
"""
from numba import cuda, types

from ..reference.flash_attn_ext import score_scale
from .fixed_point import CHANNELS, MINUS_INFINITY, ZERO
from .flash_attn_ext_combine import PIECE, addresses, first_piece, of_few_models, ring_of, sink, sizes, span_of, statistics_at
from .flash_attn_ext_tile_limbs import NEVER, ROWS, Constants, constants, piece_stager, query_loader, rows_of, shared_layout
from .flash_attn_ext_tile_rows import ONE, keeper, piece_worker, piece_worker_by_turns
from .lane_floats import max_pattern
from .launch import F32, I32, Kernel, N, SCALAR_F32, U8, factory
from .ptx import afresh, device, div, f32, i32, i64, ld, ld4, mul, st4

MOST_CHANNELS = 512  # of a head of K or of V


# The result, once a block that is alone with its rows

def row_writer(const: Constants):
    """(sinks, out, head, at, t, M, L, O, row): out = div(O, L) of the lane's channels of row g (row = 0) or g + 8 (row = 1); with
    a sink of the head, f32 [head], (a, L) = sink(M, L, it) and div(mul(O, a), L). O: f32 array, of `weigher`; out: f32 [..,
    dim_v]; at: index of the row's first channel."""
    sinks_there, n_slabs, dim_v = const.sinks_there, const.n_slabs, const.dim_v

    @device
    def result(x, a, L):
        return div(mul(x, a) if sinks_there else x, L)

    @device
    def write_octet(out, at, o, a, L, O, row, column):
        """o: index in O of the first product of the slab."""
        i = o + 2 * row + column
        st4(out, at, result(O[i], a, L), result(O[i + 4], a, L), result(O[i + 8], a, L), result(O[i + 12], a, L))
        st4(out, at + 4, result(O[i + 16], a, L), result(O[i + 20], a, L), result(O[i + 24], a, L), result(O[i + 28], a, L))

    @device
    def write_row(sinks, out, head, at, t, M, L, O, row):
        a = ONE
        if sinks_there:
            a, L = sink(M, L, ld(sinks, head))
        for b in range(n_slabs):
            for column in range(2):
                channel = b * CHANNELS + 16 * t + 8 * column
                if dim_v % CHANNELS == 0 or channel < dim_v:
                    write_octet(out, at + channel, 32 * b, a, L, O, row, column)
    return write_row


def memory_rows(const: Constants):
    """(clear_row, finish_row) of outputs that lie in memory: (out, row, t) writes +0 to the lane's channels of a row of `out`;
    (sinks, out, head, row, t, M, L) makes results of what is there, as `row_writer` does."""
    sinks_there, dim_v = const.sinks_there, const.dim_v

    @device
    def clear_row(out, row, t):
        channel = i32(16 * t)
        while channel < dim_v:
            for i in range(0, 16, 4):
                if channel + i < dim_v:
                    st4(out, i64(row) * dim_v + channel + i, ZERO, ZERO, ZERO, ZERO)
            channel = i32(channel + CHANNELS)

    @device
    def finish4(out, at, a, L):
        x = ld4(out, at)
        if sinks_there:
            x = mul(x[0], a), mul(x[1], a), mul(x[2], a), mul(x[3], a)
        st4(out, at, div(x[0], L), div(x[1], L), div(x[2], L), div(x[3], L))

    @device
    def finish_row(sinks, out, head, row, t, M, L):
        a, channel = ONE, i32(16 * t)
        if sinks_there:
            a, L = sink(M, L, ld(sinks, head))
        while channel < dim_v:
            for i in range(0, 16, 4):
                if channel + i < dim_v:
                    finish4(out, i64(row) * dim_v + channel + i, a, L)
            channel = i32(channel + CHANNELS)
    return clear_row, finish_row


# The runs of a block: tokens of one sequence that follow each other

@device
def run_from(seq, pos, first_token, run, n_tokens):
    """(sequence, end, first, last) of the run that begins with token `run` of the block: its tokens are run .. end - 1, their
    positions first .. last."""
    sequence, end, last, first = ld(seq, first_token + run), run, i32(-1), NEVER
    while end < n_tokens and ld(seq, first_token + end) == sequence:
        position = ld(pos, first_token + end)
        first, last, end = i32(min(first, position)), i32(max(last, position)), i32(end + 1)
    return sequence, end, first, last


@device
def positions_of_warp(bound, lane):
    """(first, last) of the positions `bound` of a warp's rows, i32 pairs with its lanes, without those that are -1; NEVER and -1
    if all are."""
    last = max_pattern(max_pattern(max_pattern(i32(max(bound[0], bound[1])), lane ^ 4), lane ^ 8), lane ^ 16)
    first = i32(min(bound[0] if bound[0] >= 0 else NEVER, bound[1] if bound[1] >= 0 else NEVER))
    return i32(-max_pattern(max_pattern(max_pattern(i32(-first), lane ^ 4), lane ^ 8), lane ^ 16)), last


@factory([("f16", "f16", 64, 64, 3, 4, False, False), ("f16", "f16", 128, 128, 4, 8, False, False),
          ("f16", "f16", 64, 64, 8, 8, False, True), ("q8_0", "f16", 128, 72, 8, 4, False, True),
          ("f16", "f16", 192, 128, 1, 8, False, False), ("q8_0", "q8_0", 128, 128, 1, 8, False, False),
          ("f16", "f16", 256, 256, 8, 8, False, False), ("q8_0", "q8_0", 256, 256, 8, 8, False, True),
          ("q8_0", "f16", 256, 200, 4, 4, False, False), ("f16", "q8_0", 256, 256, 8, 4, True, False),
          ("f16", "f16", 64, 64, 3, 4, True, False), ("f16", "q8_0", 128, 128, 4, 4, True, False),
          ("q8_0", "f16", 192, 72, 8, 4, True, False), ("f16", "f16", 128, 128, 2, 8, False, False, 50.0),
          ("f16", "f16", 256, 256, 2, 8, False, False, 50.0), ("f16", "f16", 256, 256, 2, 4, True, False, 50.0),
          ("f16", "f16", 64, 64, 8, 8, False, True, 0.0, True), ("f16", "f16", 128, 128, 2, 8, False, False, 0.0, True),
          ("f16", "f16", 512, 512, 8, 4, False, False), ("q8_0", "f16", 512, 264, 1, 4, False, True),
          ("f16", "q8_0", 264, 512, 4, 4, True, False), ("f16", "f16", 256, 256, 2, 8, False, False, 50.0, True),
          ("q8_0", "q8_0", 256, 256, 2, 4, True, False, 0.0, True)])
def flash_attn_ext_tile_kernel(type_k, type_v, dim_k, dim_v, heads, n_warps,  # noqa: PLR0915 (a kernel: its steps in order)
                               split, sinks_there, softcap=0.0, is_ring=False):
    """out: f32 [n, n_head, dim_v], or the pieces of `flash_attn_ext_combine` where blocks share them (split). A block: heads from
    blockIdx.x * heads, tokens ROWS n_warps / heads of blockIdx.y, split: every gridDim.z-th piece from the blockIdx.z-th. M, L
    (pairs) and O are of a lane's two rows, in registers."""
    const = constants(type_k, type_v, dim_k, dim_v, heads, n_warps, split, sinks_there, softcap)
    tokens, n_outputs, turns = ROWS * n_warps // heads, const.n_outputs, const.turns
    load_query, stage_piece, write_row, (keep, fetch) = query_loader(const), piece_stager(const), row_writer(const), keeper(const)
    work, (clear_row, finish_row) = (piece_worker_by_turns if turns else piece_worker)(const), memory_rows(const)
    row_of, index, row_of_piece, row_of_out = rows_of(const)
    row_in_memory, in_memory, ring = row_of_piece if split else row_of_out, split or turns, ring_of(is_ring)

    @device
    def rows_of_piece(first_token, n_ctx, first, bound, tid):
        token, head = row_of(tid, 0)
        row0 = row_in_memory(first_token, token, head, n_ctx, first, bound[0])
        token, head = row_of(tid, 8)
        return row0, row_in_memory(first_token, token, head, n_ctx, first, bound[1])

    @device
    def clear(out, first_token, n_tokens, second, tid):
        token, head = row_of(tid, second)
        if token < n_tokens:
            clear_row(out, index(first_token, token, head), tid & 3)

    @device
    def finish(sinks, out, first_token, n_tokens, second, tid, M, L):
        token, head = row_of(tid, second)
        if token < n_tokens:
            finish_row(sinks, out, cuda.blockIdx.x * heads + head, index(first_token, token, head), tid & 3, M, L)

    def kernel(q, k, v, seq, pos, present, sinks, out, n, n_ctx, n_head_kv, row_v, span, scale, n_falling):
        s = cuda.shared.array(0, types.int32)
        O, L = cuda.local.array(n_outputs, f32), cuda.local.array(2, f32)
        tid, window = i32(cuda.threadIdx.x), ring.window(span)
        first_token = i32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * tokens)
        if n_warps == 4 and not split and cuda.blockIdx.y >= n_falling:
            first_token = i32((cuda.blockIdx.y - n_falling) * tokens)
        n_tokens = i32(min(tokens, n - first_token))
        token, head = row_of(tid, 0)
        load_query(q, first_token, n_tokens, token, head, 0, tid, scale, s)
        token, head = row_of(tid, 8)
        load_query(q, first_token, n_tokens, token, head, 1, tid, scale, s)
        for i in range(n_outputs):
            O[i] = ZERO
        M, L[0], L[1] = (MINUS_INFINITY, MINUS_INFINITY), ZERO, ZERO
        keep(tid, s, L, O)
        if turns and not split:
            clear(out, first_token, n_tokens, 0, tid)
            clear(out, first_token, n_tokens, 8, tid)

        run = i32(0)
        while run < n_tokens:
            sequence, end, first, last = run_from(seq, pos, first_token, run, n_tokens)
            tid, bound0, bound1 = afresh(tid), i32(-1), i32(-1)
            token, _ = row_of(tid, 0)
            if run <= token and token < end:
                bound0 = ld(pos, first_token + token)
            token, _ = row_of(tid, 8)
            if run <= token and token < end:
                bound1 = ld(pos, first_token + token)
            bound = bound0, bound1  # positions of the lane's two rows, -1 for one whose token is not of the run
            warp_first, warp_last = positions_of_warp(bound, i32(tid & 31))
            first = i32((first_piece(first, window) + (cuda.blockIdx.z if split else 0)) * PIECE)
            while first <= last:
                tid = afresh(tid)
                lane, cell, head_kv = i32(tid & 31), i64(sequence) * n_ctx, i32(cuda.blockIdx.x // (cuda.gridDim.x // n_head_kv))
                at = ring.begin(span, sequence, cell) - ring.moved(span, first)
                stage_piece(k, v, present, cell, at, row_v, first, last, n_head_kv, head_kv, lane, tid, s)
                # A row of the warp sees keys of the piece
                sees_some = first <= warp_last and first_piece(warp_first, window) * PIECE <= first
                if turns or sees_some:
                    rows, statistics = (i32(0), i32(0)), i64(0)
                    if in_memory:
                        rows = rows_of_piece(first_token, n_ctx, first, bound, tid)
                        statistics = statistics_at(n, cuda.gridDim.x * heads, n_ctx, dim_v)
                    place = v, at, row_v, first, last, head_kv
                    M = work(place, sees_some, tid, s, bound, window, i32(warp_last - first), M, L, O, out, rows, statistics)
                first = i32(first + (PIECE * cuda.gridDim.z if split else PIECE))
            run = end
        if turns and not split:
            tid, first_token = afresh(tid), afresh(first_token)
            finish(sinks, out, first_token, n_tokens, 0, tid, M[0], L[0])
            finish(sinks, out, first_token, n_tokens, 8, tid, M[1], L[1])
        elif not split:
            tid, first_token = afresh(tid), afresh(first_token)
            fetch(tid, s, L, O)
            token, head = row_of(tid, 0)
            if token < n_tokens:
                write_row(sinks, out, cuda.blockIdx.x * heads + head, index(first_token, token, head) * dim_v, tid & 3,
                          M[0], L[0], O, 0)
            token, head = row_of(tid, 8)
            if token < n_tokens:
                write_row(sinks, out, cuda.blockIdx.x * heads + head, index(first_token, token, head) * dim_v, tid & 3,
                          M[1], L[1], O, 1)
    parameters = F32, const.K.pointer, const.V.pointer, I32, I32, U8, F32, F32, N, N, N, N, ring.parameter, SCALAR_F32, N
    return Kernel(kernel, parameters, 32 * n_warps)


def flash_attn_ext_tile(call):
    """`flash_attn_ext` by call.plan; where n_splits blocks share the pieces of the same rows, these, in call.scratch."""
    plan, size, split = call.plan, sizes(call), call.plan.n_splits is not None
    sinks, out = (None, call.scratch) if split else (call.sinks, call.out)
    n_tiles, parts = -(-size.n // (ROWS * plan.n_warps // plan.heads)), size.n_head // plan.heads
    # The last positions have most pieces: they go first. Where all tiles are resident, two on each multiprocessor, the least then
    # go beside the most.
    together = plan.n_warps == 4 and not split and n_tiles * parts <= 2 * call.device.n_multiprocessors
    of = call.k.dtype, call.v.dtype, size.dim_k, size.dim_v, plan.heads, plan.n_warps
    kernel = flash_attn_ext_tile_kernel(*of, split, sinks is not None, *of_few_models(call))
    args = (*addresses(call), (sinks or call.q).data, out.data, size.n, size.n_ctx, size.n_head_kv, size.row_v, span_of(size),
            score_scale(call), (n_tiles + 1) // 2 if together else n_tiles)
    n_bytes = 4 * shared_layout(size.dim_k, size.dim_v, plan.n_warps, split).n_words
    return call.device.launch(kernel, (parts, n_tiles, plan.n_splits or 1), 32 * plan.n_warps, args, n_bytes)
