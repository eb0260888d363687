"""quantize(flash_attn_ext(...)): the pieces of few tokens are combined into activation blocks, attention of other shapes is
quantized behind.

A block of 256 threads of the combination is 256 columns of a token, whole heads of them or part of one. The warps of a head share
its pieces, lane = piece: M by a scan and from the warps before, a, b and mul(l, b); in rounds, where a head has more pieces than
lanes. Then 64 threads have the chains of four columns each, and quantize them as in `quantize`, while the others copy o into a
ring of slots of 16 pieces, four of them on their way. Shared memory gives four bytes a thread and clock, so factors are read by
two warps only, four pieces at a time; where none is left out, nothing is chosen. Of the first pieces nothing waits but for the
kernel before: positions are read earlier. What is left out, and a sink, as in `flash_attn_ext_combine`.
"""
from itertools import accumulate

from numba import cuda, types

from ...quant.formats import CHUNK
from . import flash_attn_ext as attention
from . import flash_attn_ext_narrow as narrow
from .fixed_point import MINUS_INFINITY, ZERO, larger_float
from .flash_attn_ext_combine import first_piece, most_pieces, running_maximum, sink, sizes, statistics_at
from .launch import F32, I32, Kernel, Launches, N, U32, factory
from .ptx import (as_f32, as_i32, copies_commit, copies_wait_but, copy4, device, div, exp, fma, i32, i64, ld, lds, lds4, mul,
                  redux_max, stage, sts, sub, wait_for_previous)
from .quantize import N_THREADS, chunk_quantizer, quantize

THREADS, WARPS = CHUNK, CHUNK // 32
COPYING = THREADS - N_THREADS  # threads
SLOT, SLOTS = 16, 5            # pieces of a slot
# Of a context that few blocks combine: more pieces come to one multiprocessor too slowly.
MOST_PIECES = 64
# Words of shared memory: o [slot][piece][256]; a, b, mul(l, b) and whether it is left out, each [warp][lane]; of a warp the
# largest m, whether any is left out
OUTPUTS, KEPT, SCALES, LENGTHS, LEFT_OUT, MAXIMA, SOME_LEFT, N_WORDS = accumulate(
    (SLOTS * SLOT * CHUNK, *[THREADS] * 4, WARPS, WARPS), initial=0)
copies_wait = copies_wait_but(SLOTS - 2)  # for the slot that is next


def fills_chunks(dim_v: int) -> bool:
    """Whether a chunk is whole heads of at least a warp's channels, or part of one head."""
    return dim_v % 32 == 0 and (CHUNK % dim_v == 0 or dim_v % CHUNK == 0)


@device
def link(y, a, b, l, x):
    """The chains of L and four columns, y, and a piece with outputs x."""
    a, b = as_f32(a), as_f32(b)
    return (fma(y[0], a, as_f32(l)), fma(y[1], a, mul(as_f32(x[0]), b)), fma(y[2], a, mul(as_f32(x[1]), b)),
            fma(y[3], a, mul(as_f32(x[2]), b)), fma(y[4], a, mul(as_f32(x[3]), b)))


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
    y = link_unless(left_out[2], y, a[2], b[2], l[2], lds4(s, o + 2 * CHUNK))
    return link_unless(left_out[3], y, a[3], b[3], l[3], lds4(s, o + 3 * CHUNK))


# The stages of a round. s: the shared memory of the block, int32. A barrier of the kernel goes between both.

def factor_writer(n_warps: int, sinks_there: bool):
    """(m, l, M, top, n_pieces, first_warp, head_warp, tid, lane, warp, s) -> (M, top): a lane has (m, l) of a piece of the warp's
    head, thread tid writes a = exp(sub(M before it, M)), b = exp(sub(m, M)), mul(l, b) and whether the piece is left out, l = 0,
    to KEPT, SCALES, LENGTHS and LEFT_OUT [tid], and a warp whether it has such a piece to SOME_LEFT [warp]. M, f32: of the
    earlier rounds, then of this one too; top, f32: the same for the head of the thread's columns, where there are sinks.
    first_warp, head_warp: the first of the n_warps with pieces of the one head and of the other."""
    @stage
    def write_factors(m, l, M, top, n_pieces, first_warp, head_warp, tid, lane, warp, s):
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
                    top = larger_float(top, as_f32(lds(s, MAXIMA + head_warp + w)))
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
        return M, top
    return write_factors


@stage
def fold_some(s, factor, o, piece, n_pieces, y):
    """The links of the pieces of a slot, up to the last one, some of which may be left out."""
    j = i32(0)
    while j < SLOT and piece + j < n_pieces:
        y = four_links_unless(s, factor + j, o + j * CHUNK, y)
        j = i32(j + 4)
    return y


@factory([(64, True), (128, False), (512, False)])
def flash_attn_ext_combine_act_kernel(dim_v, sinks_there):  # noqa: PLR0915 (a kernel: its steps in order)
    n_warps, quantize_chunk = min(dim_v, CHUNK) // 32, chunk_quantizer(THREADS // N_THREADS)  # n_warps: with pieces of a head
    n_round, write_factors = 32 * n_warps, factor_writer(n_warps, sinks_there)  # n_round: pieces of a round

    @device
    def copy(s, pieces, at, piece, n_pieces, slot, tid):
        """Asks for o of the pieces of a slot, by the threads that copy. at: of the thread's columns of the first piece of all, -1
        where there is no head."""
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
        head_warp = i32((tid & 63) >> 3 & -n_warps)  # the first warp with pieces of their head
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
            M, top = write_factors(m, l, M, top, n_pieces, first_warp, head_warp, tid, lane, warp, s)
            end = i32(min(piece + n_round, n_pieces))
            m, l = load_statistics(pieces, statistics, piece + n_round + own, n_pieces)
            while piece < end:
                copies_wait()
                cuda.syncthreads()  # the slot is there, and the factors; the slot before is read
                factor, o = i32(head_warp * 32 + (piece & (n_round - 1))), i32(OUTPUTS + slot * SLOT * CHUNK + 4 * tid)
                if tid >= N_THREADS:
                    copy(s, pieces, at, piece + (SLOTS - 1) * SLOT, n_pieces, slot - 1 if slot > 0 else SLOTS - 1, tid)
                elif there and lds(s, SOME_LEFT + (factor >> 5)) == 0:
                    y = eight_links(s, factor + 8, o + 8 * CHUNK, eight_links(s, factor, o, y))
                elif there:
                    y = fold_some(s, factor, o, piece, n_pieces, y)
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


def flash_attn_ext_combine_act(call):
    """act = quantize(the pieces in call.scratch together), where heads fill chunks. act: activations [n, n_head * Dv], on 16
    bytes."""
    size, pieces = sizes(call), call.scratch
    kernel = flash_attn_ext_combine_act_kernel(size.dim_v, call.sinks is not None)
    grid = -(-size.n_head * size.dim_v // CHUNK), size.n
    args = call.pos.data, pieces.data, (call.sinks or pieces).data, call.act.data, size.n_ctx, size.n_head, size.window
    return call.device.launch(kernel, grid, THREADS, args, 4 * N_WORDS)


check, plan = attention.check, attention.plan


def direct(call) -> bool:
    """Whether the kernel of attention itself writes activations."""
    return call.plan.kernel == "narrow" and call.plan.n_splits is None and narrow.fills_chunks(call.plan.heads, sizes(call).dim_v)


def float_words(call) -> int:
    """Of the attention itself, where it is written: pieces that fill chunks never are combined as floats."""
    size = sizes(call)
    combined = call.plan.n_splits is not None and fills_chunks(size.dim_v)
    return 0 if direct(call) or combined else (size.n * size.n_head * size.dim_v + 3) & -4


def scratch(call):
    """The attention as floats, where it is written, and behind it the scratch of `flash_attn_ext`, if it has any."""
    n_floats = float_words(call) + attention.scratch_words(call)
    return ("f32", (n_floats,)) if n_floats else None


def declines(call) -> bool:
    """Whether the combination as floats, whose blocks are eight times as many, and `quantize` take less than the one into
    activations: where its blocks are few, each of which reads many pieces."""
    size = sizes(call)
    n_blocks = size.n * -(-size.n_head * size.dim_v // CHUNK)
    return most_pieces(size.n_ctx, size.window) > MOST_PIECES and 2 * n_blocks <= call.device.n_multiprocessors


def flash_attn_ext_act(call):
    """act = quantize(flash_attn_ext(...)), operands as of `flash_attn_ext`. act: activations [n, n_head * Dv], on 16 bytes."""
    if direct(call):
        return narrow.flash_attn_ext_narrow(call)
    n_floats = float_words(call)
    if not n_floats:
        return Launches((attention.KERNELS[call.plan.kernel](call), flash_attn_ext_combine_act(call)))
    floats = call.scratch.behind(0, "f32", call.act.shape)
    inner = call.part("flash_attn_ext", **{**call.values, "out": floats})
    inner.plan, inner.scratch = call.plan, call.scratch.behind(4 * n_floats, "f32", (attention.scratch_words(call),))
    launch = attention.flash_attn_ext(inner)
    launches = launch.launches if isinstance(launch, Launches) else (launch,)
    return Launches((*launches, quantize(call.part("quantize", x=floats, act=call.act))))
