"""quantize(flash_attn_ext(...)): the pieces of few tokens are combined into activation blocks, attention of other shapes is quantized behind.

A block of 512 threads of the combination is 256 columns of a token, whole heads of them or part of one, in rounds of 32 pieces. A warp a head, lane = piece:
M by a scan, a, b and mul(l, b). All threads: o of four columns of a piece into shared memory. thread = column: the chain; then the chunk is quantized as
by `quantize`. Pieces are loaded a round ahead; of the first round nothing waits but for the kernel before: positions are read earlier. What is left out, and
a sink, as in `flash_attn_ext_combine`.
"""
from numba import cuda, types

from ...quant.formats import CHUNK
from .fixed_point import MINUS_INFINITY, ZERO, larger_float
from .flash_attn_ext import flash_attn_ext, scratch_floats
from .flash_attn_ext_combine import first_piece, sink, statistics_at
from .launch import F32, I32, Kernel, Launches, N, U32, factory
from .ptx import as_f32, as_i32, device, div, exp, f32, fma, i32, i64, ld, ld4, ldc, lds, lds4, mul, shuffle, sts, sts4, sub, wait_for_previous
from .quantize import N_THREADS, chunk_quantizer, quantize

THREADS, ROUND = 512, 32
LOADS = ROUND * CHUNK // 4 // THREADS  # of four columns by a thread in a round
LOADED = 4 * LOADS
ONE, MINUS_ZERO = f32(1), f32(-0.0)
MOST_HEADS = 8  # of a chunk
# Words of shared memory: o [piece][256], (a, b, mul(l, b), whether it is left out) [head][piece], M [head]
OUTPUTS, FACTORS, MAXIMA, N_WORDS = 0, ROUND * CHUNK, ROUND * (CHUNK + 4 * MOST_HEADS), ROUND * (CHUNK + 4 * MOST_HEADS) + MOST_HEADS


def fills_chunks(dim_v: int) -> bool:
    """Whether a chunk is whole heads of at least a warp's channels, or part of one head."""
    return dim_v % 32 == 0 and (CHUNK % dim_v == 0 or dim_v % CHUNK == 0)


@device
def scanned(x, lane, distance):
    """A step of the running maximum over lanes."""
    other = as_f32(shuffle(as_i32(x), (lane - distance) & 31))
    return larger_float(x, other) if lane >= distance else x


@factory([(64, True), (128, False), (512, False)])
def flash_attn_ext_combine_act_kernel(dim_v, sinks_there):
    heads, quantize_chunk = max(1, CHUNK // dim_v), chunk_quantizer(THREADS // N_THREADS)

    @device
    def load(pieces, at, first, n_pieces, tid, x):
        """at: of the thread's columns of the first piece, -1 where there is no head."""
        for i in range(LOADS):
            j = i32(first + (tid >> 6) + i * (THREADS // 64))
            if at >= 0 and j < n_pieces:
                x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3] = ld4(pieces, at + i64(j) * dim_v)

    @device
    def load_statistics(pieces, at, piece, n_pieces):
        """(m, l) of a lane's piece; at: of the first piece of the warp's head, -1 where there is none."""
        m, l = MINUS_INFINITY, ZERO
        if at >= 0 and piece < n_pieces:
            m, l = ld(pieces, at + 2 * piece), ld(pieces, at + 2 * piece + 1)
        return m, l

    def kernel(pos, pieces, sinks, act, n_ctx, n_head, window):
        s = cuda.shared.array(N_WORDS, types.int32)
        x = cuda.local.array(LOADED, f32)
        tid, chunk, token = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        position, n = ld(pos, token), i32(cuda.gridDim.y)
        begin, most_pieces = first_piece(position, window), i32((n_ctx + 127) >> 7)
        n_pieces = i32((position >> 7) + 1 - begin)
        loaded = i32(chunk * CHUNK + 4 * (tid & 63))
        head = i32(loaded // dim_v)
        at = i64(-1)
        if head < n_head:
            at = ((i64(token) * n_head + head) * most_pieces + begin) * dim_v + (loaded - head * dim_v)
        first_head = i32(chunk * CHUNK // dim_v)
        counts = warp < heads and first_head + warp < n_head
        statistics = i64(-1)
        if counts:
            statistics = statistics_at(n, n_head, n_ctx, dim_v) + 2 * ((i64(token) * n_head + first_head + warp) * most_pieces + begin)
        own = i32((tid & (CHUNK - 1)) // dim_v)  # head of the chunk
        for i in range(LOADED):
            x[i] = ZERO
        wait_for_previous()
        m, l = load_statistics(pieces, statistics, lane, n_pieces)
        load(pieces, at, 0, n_pieces, tid, x)
        M, L, O = MINUS_INFINITY, ZERO, ZERO  # M of a warp's head, L and O of a thread's column
        first = i32(0)
        while first < n_pieces:
            if counts:
                left_out = l == ZERO
                new_M = larger_float(M, MINUS_INFINITY if left_out else m)
                new_M = scanned(scanned(scanned(scanned(scanned(new_M, lane, 1), lane, 2), lane, 4), lane, 8), lane, 16)
                before = as_f32(shuffle(as_i32(new_M), (lane - 1) & 31))
                before = M if lane == 0 else before
                a, b = exp(sub(before, new_M)), exp(sub(m, new_M))
                sts4(s, FACTORS + 4 * tid, as_i32(ONE if left_out else a), as_i32(b), as_i32(MINUS_ZERO if left_out else mul(l, b)), 1 if left_out else 0)
                M = as_f32(shuffle(as_i32(new_M), 31))
                if sinks_there and lane == 0:
                    sts(s, MAXIMA + warp, as_i32(M))
            for i in range(LOADS):
                if first + i * (THREADS // 64) < n_pieces:
                    to = OUTPUTS + ((tid >> 6) + i * (THREADS // 64)) * CHUNK + 4 * (tid & 63)
                    sts4(s, to, as_i32(x[4 * i]), as_i32(x[4 * i + 1]), as_i32(x[4 * i + 2]), as_i32(x[4 * i + 3]))
            cuda.syncthreads()  # o and the factors are there
            m, l = load_statistics(pieces, statistics, first + ROUND + lane, n_pieces)
            load(pieces, at, first + ROUND, n_pieces, tid, x)
            if tid < CHUNK:
                j = i32(0)
                while j < ROUND and first + j < n_pieces:
                    for i in range(4):  # those behind the last piece are left out
                        factors, o = lds4(s, FACTORS + 4 * (own * ROUND + j + i)), as_f32(lds(s, OUTPUTS + (j + i) * CHUNK + tid))
                        a = as_f32(factors[0])
                        L = fma(L, a, as_f32(factors[2]))
                        O = fma(O, a, MINUS_ZERO if factors[3] != 0 else mul(o, as_f32(factors[1])))
                    j = i32(j + 4)
            first = i32(first + ROUND)
            if first < n_pieces:
                cuda.syncthreads()  # and read
        if tid < CHUNK:
            y = ZERO  # past the row's end
            if first_head + own < n_head:
                if sinks_there:
                    a, L = sink(as_f32(lds(s, MAXIMA + own)), L, ldc(sinks, first_head + own))
                    O = mul(O, a)
                y = div(O, L)
            sts(s, OUTPUTS + tid, as_i32(y))  # of its own column it has read all
        cuda.syncthreads()
        four = lds4(s, OUTPUTS + 4 * (tid & 63))
        to = chunk if tid < N_THREADS else i32(cuda.gridDim.x)  # one group of threads stores
        quantize_chunk(as_f32(four[0]), as_f32(four[1]), as_f32(four[2]), as_f32(four[3]), act, n, token, to, i32(cuda.gridDim.x))
    return Kernel(kernel, (I32, F32, F32, U32, N, N, N), THREADS)


def flash_attn_ext_combine_act(target, pos, pieces, sinks, act, n, n_head, dim_v, n_ctx, window):
    """As `flash_attn_ext_combine`; act: address of `activation_bytes(n, n_head * dim_v)`, on 16 bytes."""
    grid = -(-n_head * dim_v // CHUNK), n
    args = pos, pieces, pieces if sinks is None else sinks, act, n_ctx, n_head, window
    return target.launch(flash_attn_ext_combine_act_kernel(dim_v, sinks is not None), grid, THREADS, args)


def float_words(n: int, n_head: int, dim_v: int, n_ctx: int) -> int:
    """Of the attention itself, where it is written: pieces that fill chunks never are combined as floats."""
    return 0 if scratch_floats(n, n_head, dim_v, n_ctx) and fills_chunks(dim_v) else (n * n_head * dim_v + 3) & -4


def act_scratch_floats(n: int, n_head: int, dim_v: int, n_ctx: int) -> int:
    """float32 of scratch for n tokens."""
    return float_words(n, n_head, dim_v, n_ctx) + scratch_floats(n, n_head, dim_v, n_ctx)


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
