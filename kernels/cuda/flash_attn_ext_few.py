"""Attention of single queries over f16 and q8_0 caches: pieces side by side, on int8 tensor cores (numerics, section 8). Many
pieces of narrow heads go to `flash_attn_ext_narrow`, where that takes less.

A block of 16 warps, or 8, is one token and up to 8 query heads of one KV head, which share all that it reads: every n-th piece of
128 keys. What each piece gives, (m, l, o), waits in memory for `flash_attn_ext_combine`. A token has those pieces that its
position and the window reach, which the kernel reads; blocks without one exit at once, so a launch holds no number that grows.
Position and sequence are read before the kernel that writes the cache has ended; all else that a block reads first it asks for at
once when it has.

A warp has 8 keys, or 16 in two steps, and no key or value passes through shared memory. Lane l = 4 g + t

    1. has of key g the channels 8 t .. and 32 + 8 t .. of each 64: a column of B; A has the queries, head g in row g (hi) and g +
       8 (lo)
    2. gets the scores of head g with keys 2 t and 2 t + 1: two levels of p', which stand at the places of hi in a word of A, at
       those of lo in another
    3. has of those two keys the channels 8 g .. of each 64: lo and hi of both are a word of B for each

They are `flash_attn_ext_few_stages`. In 2. the warps exchange maxima, p for the tree of sums, and amaxes; in 3. they leave
integer sums, which threads add up, one for each output. Heads of more than 256 channels (latent attention; q8_0: 128) do not lie
in registers as a whole: they come 64 channels at a time, values for their amax and once more.
"""
from typing import NamedTuple

from numba import cuda, types

from ..reference.flash_attn_ext import score_scale
from .fixed_point import Z, lifted, limb_pair, pair_mask, scales
from .flash_attn_ext_combine import PIECE, addresses, capping, first_piece, of_few_models, ring_of, sizes, span_of, statistics_at
from .flash_attn_ext_few_stages import (ALL, RESIDENT, Cache, Pieces, constants, key_loaders, key_of, largest_weight, maximum,
                                        newest_taker, presence_loader, query_loader, scorer, shared_layout, slab_folder, softener,
                                        statistics_writer, value_loaders, value_scaler, values_late, weigher)
from .flash_attn_ext_queries import four, limbs_of_queries
from .launch import F32, I32, Kernel, N, SCALAR_F32, U8, factory
from .ptx import afresh, before_blackwell, device, f32, i32, i64, ld, nothing, st, u32, wait_for_previous

MOST_CHANNELS = 576  # that are taken
MANY_PIECES = 2      # of a multiprocessor: those of a context that is not full yet are fewer, and must not wait


def block_warps(type_k: str, type_v: str, dim_k: int, dim_v: int, n_pieces: float) -> int:
    """Warps of a block. n_pieces: for each multiprocessor, of those that the context has room for. 16 are done with a piece
    soonest; 8 have less to exchange, and two blocks work on a piece each, where there are registers for the values of two
    steps."""
    registers = max(dim_k, dim_v) <= 128 and type_k == type_v == "f16"
    return 8 if n_pieces >= MANY_PIECES and registers else 16


class Where(NamedTuple):
    """Device functions of what a block works on, without arguments where none are named, and of how it takes and leaves it."""
    token: object
    n_tokens: object
    head_kv: object      # which of n_head_kv
    n_head_kv: object
    part: object         # (position) -> part + parts * split, of
    n_parts: object      # so many
    read: object         # (pointer, token) of pos and of seq
    wait: object         # (given): until queries and caches may be read. given: what the caller of `run` hands on
    query_four: object   # (q, i, valid) -> four float32 of a query, or zeros
    room: object         # (n_ctx) -> positions that `pieces` has room for
    put: object          # (pieces, i, x): stores a float32 there
    half: object         # (position) -> the channels that are the block's: ALL, or of each eight the FIRST or the LAST four
    newest: object = None  # (whether of the value, octet) -> eight float32 of the newest key or value, where `wait` makes them,
                         # and the first of the cache are loaded before it,
    elsewhere: object = nothing  # (given) -> unless they go to another cell than that of the query's position


IN_GRID = Where(device(lambda: cuda.blockIdx.z), device(lambda: cuda.gridDim.z), device(lambda: cuda.blockIdx.y),
                device(lambda: cuda.gridDim.y), device(lambda position: cuda.blockIdx.x), device(lambda: cuda.gridDim.x), ld,
                device(lambda given: wait_for_previous()), four, device(lambda n_ctx: n_ctx), st, device(lambda position: ALL))


def attention_of(where, type_k, type_v, dim_k, dim_v, heads, parts, n_warps,  # noqa: PLR0915 (a kernel: its steps in order)
                 softcap=0.0, is_ring=False):
    """(run, load_first): the body of the kernel below, for a block whose work is `where`; all its threads call it. With
    `where.newest` the caller calls `load_first` before; else `run` loads the same itself."""
    const = constants(type_k, type_v, dim_k, dim_v, heads, n_warps)
    n_steps, n_own, n_blocks, n_slabs = const.n_steps, const.n_own, const.n_blocks, const.n_slabs
    whole, at_once, n_keys = const.whole, const.at_once, PIECE // n_warps
    ahead = const.halves and whole and n_steps == 1  # keys are loaded a piece ahead; else there are no registers for them
    (load_keys, _), (load_values, _), load_present = key_loaders(const), value_loaders(const), presence_loader(const)
    (at_token, n_tokens, at_head_kv, n_head_kv, at_part, n_parts, read, wait, query_four, room, put_piece, at_half, newest,
     elsewhere) = where
    late, load_query_block, score = values_late(const), query_loader(const, limbs_of_queries(query_four)), scorer(const)
    (write_maximum, read_maximum), soften = maximum(const), softener(const)
    scale_by_values, largest_amax, fold = value_scaler(const), largest_weight(const), slab_folder(const, put_piece)
    store_statistics, weigh_slabs = statistics_writer(const, put_piece), weigher(const, fold)
    early, take_newest = newest is not None, newest_taker(const, newest) if newest else nothing
    capped, ring = capping(softcap), ring_of(is_ring)

    @device
    def cache_at(octets, first, row, span, piece):
        """first: of the sequence's first cell; the piece's keys, or values, are found by their positions."""
        return Cache(octets, first - i64(ring.moved(span, i32(piece * PIECE))) * row, row)

    @device
    def load_first(k, v, sequence, position, present, n_ctx, cell_v, span, loaded):
        """The first keys and values, before `run` is called with `loaded`; where there are none, some that are there."""
        k_raw, v_raw, held = loaded
        piece, tid = i32(first_piece(position, ring.window(span)) + at_part(position) // parts), i32(cuda.threadIdx.x)
        piece = i32(min(piece, position >> 7))
        lane, key = i32(tid & 31), i32(piece * PIECE + (tid >> 5) * n_keys)
        cell, row_k, row_v = i64(sequence) * n_ctx, i32(n_head_kv() * (dim_k // 8)), i32(cell_v >> 3)
        first = ring.begin(span, sequence, cell)
        load_present(present, cell, key, position, lane, held)
        load_keys(cache_at(k, first * row_k + at_head_kv() * (dim_k // 8), row_k, span, piece), key, position, lane, k_raw, 0)
        load_values(cache_at(v, first * row_v + at_head_kv() * (dim_v // 8), row_v, span, piece), key, position, lane, v_raw)

    @device
    def run(q, k, v, seq, pos, present, pieces, n_ctx, cell_v, span, scale,  # noqa: PLR0915 (a kernel: its steps in order)
            given, loaded):
        s, (k_raw, v_raw, held) = cuda.shared.array(0, types.int32), loaded
        x, inv, both = cuda.local.array(n_own, f32), cuda.local.array(n_own, f32), cuda.local.array(n_steps, u32)
        token = at_token()
        position, sequence, window = read(pos, token), read(seq, token), ring.window(span)
        half = at_half(position)
        n_splits = i32(n_parts() // parts)
        piece = i32(first_piece(position, window) + at_part(position) // parts)
        wait(given)
        if piece > position >> 7:
            return
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        g, t = i32(lane >> 2), i32(lane & 3)
        n_head = i32(n_head_kv() * (parts * heads))
        first_head = i32((at_head_kv() * parts + at_part(position) % parts) * heads)
        cell, row_k, row_v = i64(sequence) * n_ctx, i32(n_head_kv() * (dim_k // 8)), i32(cell_v >> 3)
        begin = ring.begin(span, sequence, cell)  # of K and V
        first_k, first_v = begin * row_k + at_head_kv() * (dim_k // 8), begin * row_v + at_head_kv() * (dim_v // 8)

        key = i32(piece * PIECE + warp * n_keys)
        if early:
            if elsewhere(given):
                load_first(k, v, sequence, position, present, n_ctx, cell_v, span, loaded)
            else:
                take_newest(key, position, lane, k_raw, v_raw)
        else:
            load_present(present, cell, key, position, lane, held)
            if whole:
                load_keys(cache_at(k, first_k, row_k, span, piece), key, position, lane, k_raw, 0)
            if whole and not late():
                load_values(cache_at(v, first_v, row_v, span, piece), key, position, lane, v_raw)
        block = warp
        while block < n_blocks:
            load_query_block(q, (i64(token) * n_head + first_head + g) * dim_k, block, g < heads, lane, scale, s)
            block = i32(block + n_warps)
        cuda.syncthreads()  # the queries are prepared

        while piece <= position >> 7:
            # 1. Scores of the lane's keys; those beyond the query's position are not seen
            now, here_key = piece, key
            score(cache_at(k, first_k, row_k, span, now), key, position, lane, k_raw, s, x)
            if softcap:
                for i in range(n_own):
                    x[i] = capped(x[i])
            if late():
                load_values(cache_at(v, first_v, row_v, span, now), here_key, position, lane, v_raw)
            oldest = i32(position - (window if before_blackwell() else afresh(window)))
            for i in range(n_own):
                held[i] = 1 if oldest < key_of(key, i, lane) <= position and held[i] != 0 else 0
            piece = i32(piece + n_splits)
            key = i32(piece * PIECE + warp * n_keys)
            if ahead and piece <= position >> 7:  # the next keys come while this piece is worked on
                load_keys(cache_at(k, first_k, row_k, span, piece), key, position, lane, k_raw, 0)

            # 2. m, p, l and the levels of p'
            m = write_maximum(held, x, lane, warp, g, t, s)
            cuda.syncthreads()  # maxima of the warps are written
            tid = afresh(tid)
            lane, warp, g, t = i32(tid & 31), i32(tid >> 5), i32((tid & 31) >> 2), i32(tid & 3)
            m = read_maximum(m, lane, g, t, s)
            soften(m, held, lane, warp, g, s, x)
            scale_by_values(cache_at(v, first_v, row_v, span, now), here_key, position, lane, v_raw, held, inv, x)
            amax = largest_amax(x, lane, warp, g, t, s)
            here = afresh(room(n_ctx))  # what follows of it is not kept in registers
            most_pieces = i32(i32(here + PIECE - 1) >> 7)
            first_head = i32((afresh(i32(at_head_kv())) * parts + at_part(position) % parts) * heads)
            to = Pieces(pieces, i32(i32(token * n_head + first_head) * most_pieces + now), most_pieces)
            statistics = statistics_at(n_tokens(), n_head, here, dim_v) + 2 * to.first
            d_p, inv_p = scales(amax)
            mask = pair_mask(here)
            for i in range(n_steps):
                both[i] = limb_pair(lifted(x[2 * i], inv_p), lifted(x[2 * i + 1], inv_p), mask)
            store_statistics(to, statistics, m, d_p, tid, lane, warp, g, t, s)

            # 3. o
            values = cache_at(v, first_v, row_v, span, now)
            weigh_slabs(both, values, here_key, position, v_raw, inv, mask, lane, tid, s, to, half)
            if piece <= position >> 7:
                row_v = i32(afresh(cell_v) >> 3)
                load_present(present, i64(afresh(sequence)) * n_ctx, key, position, lane, held)
                if whole and not ahead:
                    load_keys(cache_at(k, first_k, row_k, span, piece), key, position, lane, k_raw, 0)
                if whole and not late():
                    load_values(cache_at(v, first_v, row_v, span, piece), key, position, lane, v_raw)
            if whole:
                cuda.syncthreads()  # sums of the warps are written; all that the next piece writes before its sums is read
                fold((n_slabs - 1) // at_once * at_once, tid, s, to, half)
    return run, load_first


@factory([("f16", "f16", 64, 64, 3, 1, 16), ("f16", "f16", 128, 128, 4, 1, 16), ("q8_0", "q8_0", 128, 128, 8, 2, 16),
          ("f16", "q8_0", 80, 72, 1, 1, 16), ("q8_0", "f16", 256, 256, 8, 1, 16), ("f16", "f16", 256, 256, 6, 1, 16),
          ("q8_0", "q8_0", 576, 512, 8, 16, 16), ("f16", "f16", 576, 512, 8, 2, 16), ("f16", "f16", 64, 64, 3, 1, 8),
          ("f16", "f16", 80, 120, 2, 2, 8), ("f16", "f16", 128, 128, 4, 1, 8),
          ("f16", "f16", 128, 128, 8, 1, 8), ("f16", "f16", 128, 128, 2, 1, 8, 50.0), ("q8_0", "f16", 256, 256, 2, 1, 16, 50.0),
          ("f16", "f16", 64, 64, 8, 1, 8, 0.0, True), ("f16", "f16", 128, 128, 2, 1, 16, 0.0, True),
          ("q8_0", "q8_0", 256, 256, 2, 1, 16, 50.0, True)])
def flash_attn_ext_few_kernel(type_k, type_v, dim_k, dim_v, heads, parts, n_warps, softcap=0.0, is_ring=False):
    """parts: blocks of the heads of a KV head. A block: token blockIdx.z, KV head blockIdx.y, part blockIdx.x % parts, and of the
    pieces those from the blockIdx.x // parts-th on by steps of gridDim.x // parts. pieces: what `flash_attn_ext_combine`
    takes."""
    const, ring = constants(type_k, type_v, dim_k, dim_v, heads, n_warps), ring_of(is_ring)
    run, _ = attention_of(IN_GRID, type_k, type_v, dim_k, dim_v, heads, parts, n_warps, softcap, is_ring)
    n_k_raw, n_v_raw, n_own = const.n_loaded

    def kernel(q, k, v, seq, pos, present, pieces, n_ctx, cell_v, span, scale):
        loaded = cuda.local.array(n_k_raw, u32), cuda.local.array(n_v_raw, u32), cuda.local.array(n_own, i32)
        run(q, k, v, seq, pos, present, pieces, n_ctx, cell_v, span, scale, Z, loaded)
    parameters = F32, const.K.pointer, const.V.pointer, I32, I32, U8, F32, N, N, ring.parameter, SCALAR_F32
    return Kernel(kernel, parameters, 32 * n_warps, RESIDENT[n_warps])


def flash_attn_ext_few(call):
    """The pieces of `flash_attn_ext` in call.scratch, by call.plan: n_splits blocks of n_warps share those of a token's heads."""
    plan, size = call.plan, sizes(call)
    parts = size.n_head // size.n_head_kv // plan.heads
    kernel = flash_attn_ext_few_kernel(call.k.dtype, call.v.dtype, size.dim_k, size.dim_v, plan.heads, parts, plan.n_warps,
                                       *of_few_models(call))
    args = *addresses(call), call.scratch.data, size.n_ctx, size.row_v, span_of(size), score_scale(call)
    n_bytes = 4 * shared_layout(size.dim_k, size.dim_v, plan.heads, plan.n_warps).n_words
    return call.device.launch(kernel, (plan.n_splits * parts, size.n_head_kv, size.n), 32 * plan.n_warps, args, n_bytes)
