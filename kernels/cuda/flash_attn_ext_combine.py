"""The combination of pieces in position order (numerics, section 8), where blocks have computed them side by side.

`pieces`, float32, on 16 bytes: o [n, n_head, pieces of n_ctx keys, Dv rounded up to 4], then (m, l) [n, n_head, pieces of n_ctx keys, 2]. Of a token, those
are there that its position and the window reach. A piece without a visible key has l = 0, one with a visible key never (its largest p is 1, or NaN): it is
left out as (a, mul(l, b), mul(o, b)) = (1, -0, -0), with which fma gives what was there, the sign of a zero included. A sink comes last.

A block of 256 threads is a head of a token and 32 channels, in rounds of 256 pieces. thread = piece: M, as the maximum of all m up to there, which has no order;
a, b and mul(l, b). Threads of four channels, for 32 pieces at a time: mul(o, b), loaded before that, into shared memory. thread = channel: the chain.
"""
from numba import cuda, types

from .fixed_point import MINUS_INFINITY, ZERO, larger_float
from .launch import F32, I32, Kernel, N, factory
from .ptx import as_f32, as_i32, device, div, exp, f32, fma, i32, i64, ld, ld4, lds, lds4, mul, st, sts, sts4, sub

PIECE = 128        # keys
CHANNELS = 32      # of a block
THREADS = ROUND = 256
LOADS = ROUND * CHANNELS // 4 // THREADS  # of four channels by a thread in a round
LOADED = 4 * LOADS
ONE, MINUS_ZERO = f32(1), f32(-0.0)
# Words of shared memory
MAXIMA, KEPT, LENGTHS, OUTPUTS, N_WORDS = 0, ROUND + 4, 2 * ROUND + 4, 3 * ROUND + 4, 3 * ROUND + 4 + ROUND * CHANNELS


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


@factory([(False,), (True,)])
def flash_attn_ext_combine_kernel(sinks_there):
    def kernel(pos, pieces, sinks, out, n_ctx, dim_v, window):
        s = cuda.shared.array(N_WORDS, types.int32)
        x = cuda.local.array(LOADED, f32)
        tid = i32(cuda.threadIdx.x)
        token, head, n_head = i32(cuda.blockIdx.z), i32(cuda.blockIdx.y), i32(cuda.gridDim.y)
        position = ld(pos, token)
        begin = first_piece(position, window)
        n_pieces = i32((position >> 7) + 1 - begin)
        row = (i64(token) * n_head + head) * ((n_ctx + PIECE - 1) // PIECE) + begin
        statistics, v_row = statistics_at(cuda.gridDim.z, n_head, n_ctx, dim_v), stride_there(dim_v)
        channel, mine = i32(cuda.blockIdx.x * CHANNELS + 4 * (tid & 7)), i32(cuda.blockIdx.x * CHANNELS + tid)
        M, L, O = MINUS_INFINITY, ZERO, ZERO  # M: of all earlier rounds
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
            sts(s, MAXIMA + tid, as_i32(MINUS_INFINITY if left_out else m))
            cuda.syncthreads()  # m of the round is there; the chain of the round before is done
            before = M
            j = i32(0)
            while j < tid & -4 and j < count:
                y = lds4(s, MAXIMA + j)
                before = larger_float(larger_float(larger_float(larger_float(before, as_f32(y[0])), as_f32(y[1])), as_f32(y[2])), as_f32(y[3]))
                j = i32(j + 4)
            while j < tid and j < count:
                before = larger_float(before, as_f32(lds(s, MAXIMA + j)))
                j = i32(j + 1)
            new_M = larger_float(before, m)
            a, b = exp(sub(before, new_M)), exp(sub(m, new_M))
            sts(s, KEPT + tid, as_i32(ONE if left_out else a))
            sts(s, LENGTHS + tid, as_i32(MINUS_ZERO if left_out else mul(l, b)))
            cuda.syncthreads()
            sts(s, MAXIMA + tid, as_i32(b))
            if tid == count - 1:
                sts(s, ROUND, as_i32(before if left_out else new_M))
            cuda.syncthreads()  # a, mul(l, b) and b are there, and M for the next round
            for i in range(LOADS):
                j = i32((tid >> 3) + i * (THREADS // 8))
                if j < count:
                    b, left_out = as_f32(lds(s, MAXIMA + j)), lds(s, LENGTHS + j) == as_i32(MINUS_ZERO)
                    sts4(s, OUTPUTS + j * CHANNELS + 4 * (tid & 7), as_i32(MINUS_ZERO if left_out else mul(x[4 * i], b)),
                         as_i32(MINUS_ZERO if left_out else mul(x[4 * i + 1], b)), as_i32(MINUS_ZERO if left_out else mul(x[4 * i + 2], b)),
                         as_i32(MINUS_ZERO if left_out else mul(x[4 * i + 3], b)))
            M = as_f32(lds(s, ROUND))
            cuda.syncthreads()  # mul(o, b) is there
            if tid < CHANNELS:
                j = i32(0)
                while j < count:
                    a = as_f32(lds(s, KEPT + j))
                    L = fma(L, a, as_f32(lds(s, LENGTHS + j)))
                    O = fma(O, a, as_f32(lds(s, OUTPUTS + j * CHANNELS + tid)))
                    j = i32(j + 1)
            first = i32(first + ROUND)
        if tid < CHANNELS and mine < dim_v:
            if sinks_there:
                a, L = sink(M, L, ld(sinks, head))
                O = mul(O, a)
            st(out, (i64(token) * n_head + head) * dim_v + mine, div(O, L))
    return Kernel(kernel, (I32, F32, F32, F32, N, N, N), THREADS)


def flash_attn_ext_combine(target, pos, pieces, sinks, out, n, n_head, dim_v, n_ctx, window):
    """pos: address of i32 [n]; pieces: above; sinks: of f32 [n_head], or None; out: of f32 [n, n_head, dim_v]."""
    grid = -(-dim_v // CHANNELS), n_head, n
    args = pos, pieces, out if sinks is None else sinks, out, n_ctx, dim_v, window
    return target.launch(flash_attn_ext_combine_kernel(sinks is not None), grid, THREADS, args)
