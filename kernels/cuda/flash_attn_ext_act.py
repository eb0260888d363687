"""quantize(flash_attn_ext(...)): the pieces of few tokens are combined into activation blocks, attention of other shapes is quantized behind.

A block of 256 threads of the combination is 256 columns of a token, whole heads of them or part of one. The warps of a head share its pieces, lane = piece: M
by a scan and from the warps before, a, b and mul(l, b); in rounds, where a head has more pieces than lanes. Then 64 threads have the chains of four columns
each, and quantize them as in `quantize`, while the others copy o into a ring of slots of 16 pieces, four of them on their way. Shared memory gives four bytes
a thread and clock, so factors are read by two warps only, four pieces at a time; where none is left out, nothing is chosen. Of the first pieces nothing
waits but for the kernel before: positions are read earlier. What is left out, and a sink, as in `flash_attn_ext_combine`.
"""
from itertools import accumulate

from numba import cuda, types

from ...quant.formats import CHUNK
from .fixed_point import MINUS_INFINITY, ZERO, larger_float
from .flash_attn_ext import flash_attn_ext, scratch_floats
from .flash_attn_ext_combine import first_piece, most_pieces, running_maximum, sink, statistics_at
from .launch import F32, I32, Kernel, Launches, N, U32, factory
from .ptx import (as_f32, as_i32, copies_commit, copies_wait_but, copy4, device, div, exp, f32, fma, i32, i64, ld, lds, lds4, mul, redux_max, sts, sub,
                  wait_for_previous)
from .quantize import N_THREADS, chunk_quantizer, quantize

THREADS, WARPS = CHUNK, CHUNK // 32
COPYING = THREADS - N_THREADS  # threads
SLOT, SLOTS = 16, 5            # pieces of a slot
MOST_PIECES = 64               # that a context has room for, where few blocks combine them; more come to one multiprocessor too slowly
# Words of shared memory: o [slot][piece][256]; a, b, mul(l, b) and whether it is left out, each [warp][lane]; of a warp the largest m, whether any is left out
OUTPUTS, KEPT, SCALES, LENGTHS, LEFT_OUT, MAXIMA, SOME_LEFT, N_WORDS = accumulate((SLOTS * SLOT * CHUNK, *[THREADS] * 4, WARPS, WARPS), initial=0)
copies_wait = copies_wait_but(SLOTS - 2)  # for the slot that is next


def fills_chunks(dim_v: int) -> bool:
    """Whether a chunk is whole heads of at least a warp's channels, or part of one head."""
    return dim_v % 32 == 0 and (CHUNK % dim_v == 0 or dim_v % CHUNK == 0)


@device
def link(y, a, b, l, x):
    """The chains of L and four columns, y, and a piece with outputs x."""
    a, b = as_f32(a), as_f32(b)
    return (fma(y[0], a, as_f32(l)), fma(y[1], a, mul(as_f32(x[0]), b)), fma(y[2], a, mul(as_f32(x[1]), b)), fma(y[3], a, mul(as_f32(x[2]), b)),
            fma(y[4], a, mul(as_f32(x[3]), b)))


@device
def link_unless(left_out, y, a, b, l, x):
    """The same of a piece that may be left out."""
    z = link(y, a, b, l, x)
    return y if left_out != 0 else z


@device
def four_links(s, factor, o, y):
    """Of four pieces, from those words on."""
    a, b, l = lds4(s, KEPT + factor), lds4(s, SCALES + factor), lds4(s, LENGTHS + factor)
    y = link(link(y, a[0], b[0], l[0], lds4(s, o)), a[1], b[1], l[1], lds4(s, o + CHUNK))
    return link(link(y, a[2], b[2], l[2], lds4(s, o + 2 * CHUNK)), a[3], b[3], l[3], lds4(s, o + 3 * CHUNK))


@device
def eight_links(s, factor, o, y):
    return four_links(s, factor + 4, o + 4 * CHUNK, four_links(s, factor, o, y))


@device
def four_links_unless(s, factor, o, y):
    """Of four pieces that may be left out; those behind the last one are."""
    a, b, l, left_out = lds4(s, KEPT + factor), lds4(s, SCALES + factor), lds4(s, LENGTHS + factor), lds4(s, LEFT_OUT + factor)
    y = link_unless(left_out[1], link_unless(left_out[0], y, a[0], b[0], l[0], lds4(s, o)), a[1], b[1], l[1], lds4(s, o + CHUNK))
    return link_unless(left_out[3], link_unless(left_out[2], y, a[2], b[2], l[2], lds4(s, o + 2 * CHUNK)), a[3], b[3], l[3], lds4(s, o + 3 * CHUNK))


@factory([(64, True), (128, False), (512, False)])
def flash_attn_ext_combine_act_kernel(dim_v, sinks_there):
    n_warps, quantize_chunk = min(dim_v, CHUNK) // 32, chunk_quantizer(THREADS // N_THREADS)  # n_warps: with pieces of a head
    n_round = 32 * n_warps  # pieces of a round

    @device
    def copy(s, pieces, at, piece, n_pieces, slot, tid):
        """Asks for o of the pieces of a slot, by the threads that copy. at: of the thread's columns of the first piece of all, -1 where there is no head."""
        j = i32((tid - N_THREADS) >> 6)
        while at >= 0 and j < SLOT and piece + j < n_pieces:
            copy4(s, OUTPUTS + (slot * SLOT + j) * CHUNK + 4 * (tid & 63), pieces, at + i64(piece + j) * dim_v)
            j = i32(j + COPYING // N_THREADS)
        copies_commit()

    @device
    def load_statistics(pieces, at, piece, n_pieces):
        """(m, l) of a lane's piece; at: of the first piece of the warp's head, -1 where there is none."""
        m, l = MINUS_INFINITY, ZERO
        if at >= 0 and piece < n_pieces:
            m, l = as_f32(ld(pieces, at + 2 * piece)), as_f32(ld(pieces, at + 2 * piece + 1))
        return m, l

    def kernel(pos, pieces, sinks, act, n_ctx, n_head, window):
        s = cuda.shared.array(0, types.int32)
        tid, chunk, token = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        position, n = ld(pos, token), i32(cuda.gridDim.y)
        begin, most_pieces = first_piece(position, window), i32((n_ctx + 127) >> 7)
        n_pieces = i32((position >> 7) + 1 - begin)
        copied = i32(chunk * CHUNK + 4 * (tid & 63))
        own_head = i32(copied // dim_v)  # of the thread's four columns
        at = i64(-1)
        if own_head < n_head:
            at = ((i64(token) * n_head + own_head) * most_pieces + begin) * dim_v + (copied - own_head * dim_v)
        there = tid < N_THREADS and own_head < n_head
        also_first = i32((tid & 63) >> 3 & -n_warps)  # the first warp with pieces of their head
        head = i32((chunk * CHUNK + tid) // dim_v)  # of the warp's pieces
        first_warp = i32(warp & -n_warps)
        own = i32(32 * (warp - first_warp) + lane)  # piece of a round
        statistics = i64(-1)
        if head < n_head:
            statistics = statistics_at(n, n_head, n_ctx, dim_v) + 2 * ((i64(token) * n_head + head) * most_pieces + begin)
        wait_for_previous()
        m, l = load_statistics(pieces, statistics, own, n_pieces)
        slot = i32(0)
        n_slots = i32(min(SLOTS - 1, (n_pieces + SLOT - 1) >> 4))
        while slot < n_slots and tid >= N_THREADS:
            copy(s, pieces, at, slot * SLOT, n_pieces, slot, tid)
            slot = i32(slot + 1)
        while slot < SLOTS - 1:  # groups without copies
            copies_commit()
            slot = i32(slot + 1)
        M, top = MINUS_INFINITY, MINUS_INFINITY  # of earlier rounds; top: of the head of the thread's columns
        y = ZERO, ZERO, ZERO, ZERO, ZERO  # L and o of four columns
        piece, slot = i32(0), i32(0)
        while piece < n_pieces:
            left_out = l == ZERO
            new_M, before = running_maximum(MINUS_INFINITY if left_out else m, lane)
            if sinks_there or n_pieces > 32:
                if lane == 31:
                    sts(s, MAXIMA + warp, as_i32(new_M))
                cuda.syncthreads()  # the warps' maxima are there; the round before is done
                earlier = M
                for w in range(n_warps):
                    x = as_f32(lds(s, MAXIMA + first_warp + w))
                    M = larger_float(M, x)
                    earlier = larger_float(earlier, x) if first_warp + w < warp else earlier
                    if sinks_there:
                        top = larger_float(top, as_f32(lds(s, MAXIMA + also_first + w)))
                before, new_M = larger_float(earlier, before), larger_float(earlier, new_M)
            a, b = exp(sub(before, new_M)), exp(sub(m, new_M))
            sts(s, KEPT + tid, as_i32(a))
            sts(s, SCALES + tid, as_i32(b))
            sts(s, LENGTHS + tid, as_i32(mul(l, b)))
            left = i32(1 if left_out else 0)
            sts(s, LEFT_OUT + tid, left)
            some_left = redux_max(left)
            if lane == 0:
                sts(s, SOME_LEFT + warp, some_left)
            end = i32(min(piece + n_round, n_pieces))
            m, l = load_statistics(pieces, statistics, piece + n_round + own, n_pieces)
            while piece < end:
                copies_wait()
                cuda.syncthreads()  # the slot is there, and the factors; the slot before is read
                factor, o = i32(also_first * 32 + (piece & (n_round - 1))), i32(OUTPUTS + slot * SLOT * CHUNK + 4 * tid)
                if tid >= N_THREADS:
                    copy(s, pieces, at, piece + (SLOTS - 1) * SLOT, n_pieces, slot - 1 if slot > 0 else SLOTS - 1, tid)
                elif there and lds(s, SOME_LEFT + (factor >> 5)) == 0:
                    y = eight_links(s, factor + 8, o + 8 * CHUNK, eight_links(s, factor, o, y))
                elif there:
                    j = i32(0)
                    while j < SLOT and piece + j < n_pieces:
                        y = four_links_unless(s, factor + j, o + j * CHUNK, y)
                        j = i32(j + 4)
                piece = i32(piece + SLOT)
                slot = i32(slot + 1 if slot < SLOTS - 1 else 0)
        L, a, b, c, d = y
        if there and sinks_there:
            e, L = sink(top, L, ld(sinks, own_head))
            a, b, c, d = mul(a, e), mul(b, e), mul(c, e), mul(d, e)
        if there:
            a, b, c, d = div(a, L), div(b, L), div(c, L), div(d, L)
        to = chunk if tid < N_THREADS else i32(cuda.gridDim.x)  # the other threads store nothing
        quantize_chunk(a, b, c, d, act, n, token, to, i32(cuda.gridDim.x))
    return Kernel(kernel, (I32, U32, F32, U32, N, N, N), THREADS)


def flash_attn_ext_combine_act(target, pos, pieces, sinks, act, n, n_head, dim_v, n_ctx, window):
    """As `flash_attn_ext_combine`; act: address of `activation_bytes(n, n_head * dim_v)`, on 16 bytes."""
    grid = -(-n_head * dim_v // CHUNK), n
    args = pos, pieces, pieces if sinks is None else sinks, act, n_ctx, n_head, window
    return target.launch(flash_attn_ext_combine_act_kernel(dim_v, sinks is not None), grid, THREADS, args, 4 * N_WORDS)


def float_words(n: int, n_head: int, dim_v: int, n_ctx: int) -> int:
    """Of the attention itself, where it is written: pieces that fill chunks never are combined as floats."""
    return 0 if scratch_floats(n, n_head, dim_v, n_ctx) and fills_chunks(dim_v) else (n * n_head * dim_v + 3) & -4


def act_scratch_floats(n: int, n_head: int, dim_v: int, n_ctx: int) -> int:
    """float32 of scratch for n tokens."""
    return float_words(n, n_head, dim_v, n_ctx) + scratch_floats(n, n_head, dim_v, n_ctx)


def takes_less_apart(n: int, n_head: int, dim_v: int, n_ctx: int, window: int, n_multiprocessors: int) -> bool:
    """Whether the combination as floats, whose blocks are eight times as many, and `quantize` take less than the one into activations: where its blocks are
    few, each of which reads many pieces."""
    return most_pieces(n_ctx, window) > MOST_PIECES and 2 * n * -(-n_head * dim_v // CHUNK) <= n_multiprocessors


def flash_attn_ext_act(target, type_k, type_v, q, k, v, seq, pos, present, act, n, n_head, n_head_kv, dim_k, dim_v, n_ctx, scale, scratch, **given):
    """Arguments of `flash_attn_ext`, but act in the place of out: address of `activation_bytes(n, n_head * dim_v)`, on 16 bytes; scratch: of f32
    [act_scratch_floats]."""
    operands, sizes = (type_k, type_v, q, k, v, seq, pos, present), (n, n_head, n_head_kv, dim_k, dim_v, n_ctx, scale)
    n_floats = float_words(n, n_head, dim_v, n_ctx)
    if not n_floats:
        return flash_attn_ext(target, *operands, act, *sizes, scratch, combine=flash_attn_ext_combine_act, **given)
    attention = flash_attn_ext(target, *operands, scratch, *sizes, scratch + 4 * n_floats, **given)
    launches = attention.launches if isinstance(attention, Launches) else (attention,)
    return Launches((*launches, quantize(target, scratch, act, n, n_head * dim_v)))
