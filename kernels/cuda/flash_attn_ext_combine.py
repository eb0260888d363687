"""The combination of pieces in position order (numerics, section 8), where blocks have computed them side by side.

`pieces`, float32, on 16 bytes: o [n, n_head, pieces of n_ctx keys, Dv rounded up to 4], then (m, l) [n, n_head, pieces of n_ctx
keys, 2]. Of a token, those are there that its position and the window reach. A piece without a visible key has l = 0, one with a
visible key never (its largest p is 1, or NaN): it is left out as (a, mul(l, b), mul(o, b)) = (1, -0, -0), with which fma gives
what was there, the sign of a zero included. A sink comes last.

A block of 256 threads is a head of a token and 32 channels, in rounds of 256 pieces. thread = piece: M, the maximum of all m up
to there, which has no order, by a scan of each warp and from the warps before; a, b and mul(l, b). Threads of four channels, for
32 pieces at a time: mul(o, b), loaded before that, into shared memory. thread = channel: the chain, sixteen pieces at a time,
those behind the last one left out. Of the first pieces nothing waits but for the kernel before: positions are read earlier.
"""
from itertools import accumulate
from typing import NamedTuple

from numba import cuda, types

from ..call import Call
from .fixed_point import MINUS_INFINITY, ZERO, larger_float
from .launch import F32, I32, Kernel, N, N64, factory
from .ptx import (as_f32, as_i32, device, div, exp, f32, fma, i32, i64, ld, ld4, ldc, lds, lds4, mul, shuffle, st, sts, sts4, sub,
                  tanh, wait_for_previous)

PIECE = 128        # keys
MOST_HEADS = 8     # of a block
NO_WINDOW = 2**31 - 1
CHANNELS = 32      # of a block
THREADS = ROUND = 256
WARPS = THREADS // 32
LOADS = ROUND * CHANNELS // 4 // THREADS  # of four channels by a thread in a round
LOADED = 4 * LOADS
LINKS = 16         # of a chain at a time
ONE, MINUS_ZERO = f32(1), f32(-0.0)
# Words of shared memory: the largest m of a warp; a, b and mul(l, b) of a piece; mul(o, b) [piece][channel]
MAXIMA, KEPT, SCALES, LENGTHS, OUTPUTS, N_WORDS = accumulate((WARPS, ROUND, ROUND, ROUND, ROUND * CHANNELS), initial=0)


class Sizes(NamedTuple):
    """Of an attention."""
    n: int          # query tokens
    n_head: int     # of queries
    n_head_kv: int  # of keys and values
    dim_k: int      # channels of a head of queries and keys
    dim_v: int      # of values
    n_ctx: int      # positions of a sequence
    row_v: int      # values of a row of V's cache
    window: int     # positions that a query sees, its own and those before it
    ring: int       # cells of a sequence, where they are fewer than its positions; else 0


def sizes(call: Call) -> Sizes:
    (n, q_cols), (_, row_v), (_, n_ctx) = call.q.shape, call.v.shape, call.present.shape
    n_head, n_head_kv = call.n_head, call.n_head_kv
    dim_v = call.n_embd_head_v or row_v // n_head_kv
    cells = call.k.n_rows // call.present.n_rows
    return Sizes(n, n_head, n_head_kv, q_cols // n_head, dim_v, n_ctx, row_v, call.window or NO_WINDOW, cells * (cells < n_ctx))


def heads_together(group: int) -> int:
    """Query heads of a block: of the `group` heads that share a KV head, the largest divisor up to 8."""
    return max(h for h in range(1, MOST_HEADS + 1) if group % h == 0)


def addresses(call: Call) -> tuple:
    """Of what every kernel of attention reads."""
    return call.q.data, call.k.data, call.v.data, call.seq.data, call.pos.data, call.present.data


def stride(dim_v):
    """Floats of a piece's o."""
    return (dim_v + 3) & -4


stride_there = device(stride)


@device
def first_piece(position, window):
    """The first one with a key that a query at a position sees."""
    return i32(max(0, i32(position - window) + 1) >> 7)


def most_pieces(n_ctx: int, window: int) -> int:
    """That a query sees keys of."""
    return min(-(-n_ctx // PIECE), (window - 2) // PIECE + 2)


def of_few_models(call: Call) -> tuple:
    """The arguments of the factories of attention that have defaults, softcap and whether there is a ring, where they are not
    those."""
    softcap, is_ring = float(call.softcap), sizes(call).ring > 0
    return (softcap, is_ring) if is_ring else (softcap,) if softcap else ()


def span_of(size: Sizes) -> int:
    """What kernels take of window and ring, in one number: without a ring, the window."""
    return size.ring << 32 | size.window


class Ring(NamedTuple):
    """Device functions of a cache whose cells are a ring, or are not."""
    window: object     # (span) -> positions that a query sees
    begin: object      # (span, sequence, cell) -> the sequence's first cell, int64; cell: what it is without a ring
    moved: object      # (span, first) -> how many cells the piece that begins at `first` lies before where it is without a ring
    parameter: object  # the type of `span`


def ring_of(is_ring: bool) -> Ring:
    if not is_ring:
        return Ring(device(lambda span: span), device(lambda span, sequence, cell: cell), device(lambda span, first: i32(0)), N)
    return Ring(device(lambda span: i32(span & 0xffffffff)), device(lambda span, sequence, cell: i64(sequence) * i32(span >> 32)),
                device(lambda span, first: i32(first - first % i32(span >> 32))), N64)


def capping(softcap: float):
    """Device function s -> softcap tanh(s); of scores that were multiplied by `score_scale`."""
    c = f32(softcap)
    return device(lambda s: mul(c, tanh(s)))


@device
def sink(M, L, s):
    """(a, L) with the sink logit s: outputs are multiplied by a."""
    new_M = larger_float(M, s)
    a = exp(sub(M, new_M))
    return a, fma(L, a, exp(sub(s, new_M)))


@device
def statistics_at(n, n_head, n_ctx, dim_v):
    """Where (m, l) begin."""
    return i64(i32(i32(n * n_head) * (i32(n_ctx + PIECE - 1) >> 7))) * stride_there(dim_v)


def piece_floats(n: int, n_head: int, n_ctx: int, dim_v: int) -> int:
    """Of the pieces of n tokens."""
    return n * n_head * -(-n_ctx // PIECE) * (stride(dim_v) + 2)


@device
def scanned(x, lane, distance):
    """A step of the running maximum over lanes."""
    other = as_f32(shuffle(as_i32(x), (lane - distance) & 31))
    return larger_float(x, other) if lane >= distance else x


@device
def running_maximum(x, lane):
    """Of the lanes up to this one, and of those before it."""
    x = scanned(scanned(scanned(scanned(scanned(x, lane, 1), lane, 2), lane, 4), lane, 8), lane, 16)
    before = as_f32(shuffle(as_i32(x), (lane - 1) & 31))
    return x, MINUS_INFINITY if lane == 0 else before


@device
def four_links(s, j, channel, L, O):
    """The chains of L and of a channel, from piece j of the round on."""
    a, l, o = lds4(s, KEPT + j), lds4(s, LENGTHS + j), OUTPUTS + j * CHANNELS + channel
    L = fma(fma(L, as_f32(a[0]), as_f32(l[0])), as_f32(a[1]), as_f32(l[1]))
    O = fma(fma(O, as_f32(a[0]), as_f32(lds(s, o))), as_f32(a[1]), as_f32(lds(s, o + CHANNELS)))
    L = fma(fma(L, as_f32(a[2]), as_f32(l[2])), as_f32(a[3]), as_f32(l[3]))
    O = fma(fma(O, as_f32(a[2]), as_f32(lds(s, o + 2 * CHANNELS))), as_f32(a[3]), as_f32(lds(s, o + 3 * CHANNELS)))
    return L, O


@factory([(False,), (True,)])
def flash_attn_ext_combine_kernel(sinks_there):  # noqa: PLR0915 (a kernel: its steps in order)
    @device
    def scale_half(s, x, first, tid):
        """mul(o, b) of half of the pieces of a round, straight code."""
        for i in range(first, first + LOADS // 2):
            j = i32((tid >> 3) + i * (THREADS // 8))
            b, left_out = as_f32(lds(s, SCALES + j)), lds(s, LENGTHS + j) == as_i32(MINUS_ZERO)
            sts4(s, OUTPUTS + j * CHANNELS + 4 * (tid & 7), as_i32(MINUS_ZERO if left_out else mul(x[4 * i], b)),
                 as_i32(MINUS_ZERO if left_out else mul(x[4 * i + 1], b)),
                 as_i32(MINUS_ZERO if left_out else mul(x[4 * i + 2], b)),
                 as_i32(MINUS_ZERO if left_out else mul(x[4 * i + 3], b)))

    def kernel(pos, pieces, sinks, out, n_ctx, dim_v, window):
        s = cuda.shared.array(N_WORDS, types.int32)
        x = cuda.local.array(LOADED, f32)
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        token, head, n_head = i32(cuda.blockIdx.z), i32(cuda.blockIdx.y), i32(cuda.gridDim.y)
        position = ld(pos, token)
        begin = first_piece(position, window)
        n_pieces = i32((position >> 7) + 1 - begin)
        row = (i64(token) * n_head + head) * ((n_ctx + PIECE - 1) // PIECE) + begin
        statistics, v_row = statistics_at(cuda.gridDim.z, n_head, n_ctx, dim_v), stride_there(dim_v)
        channel, mine = i32(cuda.blockIdx.x * CHANNELS + 4 * (tid & 7)), i32(cuda.blockIdx.x * CHANNELS + tid)
        M, L, O = MINUS_INFINITY, ZERO, ZERO  # M: of all earlier rounds
        wait_for_previous()
        first = i32(0)
        while first < n_pieces:
            count = i32(min(ROUND, n_pieces - first))
            for i in range(LOADS):
                j = i32((tid >> 3) + i * (THREADS // 8))
                x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3] = ZERO, ZERO, ZERO, ZERO
                if j < count and channel < v_row:
                    x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3] = ld4(pieces, (row + first + j) * v_row + channel)
            m, l = MINUS_INFINITY, ZERO
            if tid < count:
                m, l = ld(pieces, statistics + 2 * (row + first + tid)), ld(pieces, statistics + 2 * (row + first + tid) + 1)
            left_out = l == ZERO
            new_M, before = running_maximum(MINUS_INFINITY if left_out else m, lane)
            if lane == 31:
                sts(s, MAXIMA + warp, as_i32(new_M))
            cuda.syncthreads()  # the warps' maxima are there; the chain of the round before is done
            earlier = M
            for w in range(WARPS):
                other = as_f32(lds(s, MAXIMA + w))
                M = larger_float(M, other)
                earlier = larger_float(earlier, other) if w < warp else earlier
            before, new_M = larger_float(earlier, before), larger_float(earlier, new_M)
            a, b = exp(sub(before, new_M)), exp(sub(m, new_M))
            sts(s, KEPT + tid, as_i32(ONE if left_out else a))
            sts(s, SCALES + tid, as_i32(b))
            sts(s, LENGTHS + tid, as_i32(MINUS_ZERO if left_out else mul(l, b)))
            cuda.syncthreads()  # a, b and mul(l, b) are there
            scale_half(s, x, 0, tid)
            if count > ROUND // 2:
                scale_half(s, x, LOADS // 2, tid)
            cuda.syncthreads()  # mul(o, b) is there
            if tid < CHANNELS:
                j = i32(0)
                while j < count:
                    L, O = four_links(s, j, tid, L, O)
                    L, O = four_links(s, j + 4, tid, L, O)
                    L, O = four_links(s, j + 8, tid, L, O)
                    L, O = four_links(s, j + 12, tid, L, O)
                    j = i32(j + LINKS)
            first = i32(first + ROUND)
        if tid < CHANNELS and mine < dim_v:
            if sinks_there:
                a, L = sink(M, L, ldc(sinks, head))
                O = mul(O, a)
            st(out, (i64(token) * n_head + head) * dim_v + mine, div(O, L))
    return Kernel(kernel, (I32, F32, F32, F32, N, N, N), THREADS)


def flash_attn_ext_combine(call):
    """out = the pieces in call.scratch together. Operands as of `flash_attn_ext`."""
    size = sizes(call)
    grid = -(-size.dim_v // CHANNELS), size.n_head, size.n
    args = call.pos.data, call.scratch.data, (call.sinks or call.out).data, call.out.data, size.n_ctx, size.dim_v, size.window
    return call.device.launch(flash_attn_ext_combine_kernel(call.sinks is not None), grid, THREADS, args)
