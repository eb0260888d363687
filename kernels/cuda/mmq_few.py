"""Products of quantized weights with 1 to 16 tokens (docs/numerics.md, section 3): the weights are read once for all of them.

A block takes row tiles one after the other; of each, a warp takes every n_warps-th chunk. A warp has a ring of slots in shared memory to itself: while it
multiplies the chunk of one (`tile_product`), the next ones of its chunks, of this tile or of the next, are on their way, and one more as soon as the slot is
free again. So no warp waits for another
but at the end of a round of chunks, where each leaves its chunks' sums; behind the barrier the owner of a (row, token) adds them to its total in the
order of the chunks, and rounds write two places by turns.

Weights are on their way before the kernel waits for the one before it in the stream. So blocks that leave room for those of the next launch hide its
start.
"""
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from numba import cuda, types

from ...quant.formats import CHUNK, FORMATS, Format, format_of
from ...quant.tile import ROWS, tile_bytes
from .cooperative import cooperative
from .launch import F32, Kernel, N, U32, check, factory
from .ptx import as_f32, as_u32, copies4, copies_commit, copies_wait_but, copy1, copy4, device, f32, fma, i32, i64, lds, sts, syncwarp, wait_for_previous
from .quantize import plane_words
from .tile_product import (MOST_FEW, QUAD, QUAD_WORDS, Slot, factors, form, gate_and_store, slot, store, swizzle, table_words, takes_sums,
                           tile_product)

MOST_TOKENS = MOST_FEW * QUAD  # of a block
MAX_WARPS = {1: 16, QUAD: 12, 2 * QUAD: 8, MOST_TOKENS: 8}  # of a block, by its tokens: what registers allow, 128 a thread for 16 warps, 255 for 8
SUM_WORDS = 2112    # of a round's sums, if it has more chunks than warps: 64 chunks of one token
RESERVED = 1024     # bytes of a block's shared memory that are the driver's
LATENCY = 3           # chunks that a scheduler can issue while one waits
IN_FLIGHT = 33 << 10  # bytes on their way that keep the memory of a multiprocessor busy (docs/kernels-log.md)
SCHEDULERS = 4        # of a multiprocessor: warp w of all belongs to w % 4


def quads_of(n_tokens: int) -> int:
    return -(-n_tokens // QUAD)


def chunk_slot(fmt: Format, n_tokens: int) -> Slot:
    """Of one token: its two rows, its scale and, where they are wanted, the sums of q in the place of limbs."""
    if n_tokens > 1:
        return slot(fmt, 1, quads_of(n_tokens), False)
    act = tile_bytes(fmt) // 4
    d = act + 2 * CHUNK // 4
    return Slot(act, d, d + 4, d + 4 + 16 * takes_sums(fmt))


class Layout(NamedTuple):
    """Words of shared memory: codebooks, the warps' own, totals [token][row], one or two rounds of sums."""
    warps: int       # where the warps' own words begin
    n_own: int       # of a warp: factors, then slots
    slot: int        # where its slots begin
    slot_words: int
    n_slots: int     # chunks on their way, or one that is multiplied and the others on their way


def layout(names: tuple[str, ...], n_tokens: int) -> Layout:
    """names: formats of the matrices."""
    fmts = [format_of(name) for name in names]
    words = max(chunk_slot(fmt, n_tokens).n_words for fmt in fmts)
    if n_tokens > 1:
        first, n_slots = max(factors(fmt, quads_of(n_tokens)).n_words for fmt in fmts), 3 if words <= 3072 else 2
    else:  # so many that eight warps keep the memory busy
        first, n_slots = 0, min(4, 1 - -IN_FLIGHT // (8 * max(map(tile_bytes, fmts))))
    return Layout(sum(map(table_words, dict.fromkeys(names))), first + n_slots * words, first, words, n_slots)


def sum_words(n: int) -> int:
    """Words that a chunk of n tokens leaves: sums [token][row] and the activations' scales."""
    return n * (ROWS + 1)


def shared_words(names: tuple[str, ...], n_tokens: int, n_warps: int, per_round: int, n: int, n_sides: int = 2) -> int:
    """n_sides: 1 where a block has a single round."""
    at = layout(names, n_tokens)
    return at.warps + n_warps * at.n_own + n * ROWS + n_sides * per_round * sum_words(n)


def copier(fmt: Format, n_tokens: int):
    """A warp starts the copies of a chunk: (lane, shared, to, words, row_tile, chunk, n_chunks) of the weight's,
    (lane, shared, to, act, chunk, first, n_valid, n, n_chunks) of the activations'."""
    at, n_pieces, sums_too = chunk_slot(fmt, n_tokens), tile_bytes(fmt) // 16, n_tokens == 1 and takes_sums(fmt)
    act_at, d_at, sums_at, rest, tile_copies = at.act, at.d, at.limbs, n_pieces % 32, copies4(n_pieces // 32)

    @device
    def copy_tile(lane, shared, to, words, row_tile, chunk, n_chunks):
        tile = (i64(row_tile) * n_chunks + chunk) * (n_pieces * 4) + lane * 4
        tile_copies(shared, to + lane * 4, words, tile)
        if rest:
            if lane < rest:
                copy4(shared, to + lane * 4 + (n_pieces - rest) * 4, words, tile + (n_pieces - rest) * 4)

    @device
    def copy_token(lane, shared, to, act, chunk, first, n_valid, n, n_chunks):
        lo, scales, sums, _ = plane_words(n, n_chunks)
        limb, piece, at = lane >> 4, lane & 15, i64(first) * n_chunks
        copy4(shared, to + act_at + limb * 64 + ((piece ^ swizzle(limb)) << 2), act, (at + chunk) * 64 + ((lo if limb else i64(0)) + piece * 4))
        if lane == 0:
            copy1(shared, to + d_at, act, scales + at + chunk)
        if sums_too:
            if lane < 4:
                copy4(shared, to + sums_at + lane * 4, act, (at + chunk) * 16 + (sums + lane * 4))

    @device
    def copy_tokens(lane, shared, to, act, chunk, first, n_valid, n, n_chunks):
        lo, scales, _, _ = plane_words(n, n_chunks)
        limb, piece = lane >> 4, lane & 15
        source = (i64(first) * n_chunks + chunk) * 64 + (lo if limb else i64(0)) + piece * 4
        token = i32(0)
        while token < n_valid:
            r = (token & 3) * 2 + limb
            copy4(shared, to + act_at + (token >> 2) * QUAD_WORDS + r * 64 + ((piece ^ swizzle(r)) << 2), act, source)
            source += i64(n_chunks) * 64
            token = i32(token + 1)
        if lane < n_valid:
            copy1(shared, to + d_at + lane, act, scales + i64(first + lane) * n_chunks + chunk)
    return copy_tile, copy_token if n_tokens == 1 else copy_tokens


def products(names: tuple[str, ...], n_tokens: int, finish):
    """The body of a kernel for one matrix, or for two of the same sizes whose tiles are taken by turns. finish: (out, i, row, total, last, *biases), what
    becomes of a total, i being its place in `out`; last: of the last matrix."""
    two, alike, at, n_quads, single = len(names) == 2, len(set(names)) == 1, layout(names, n_tokens), quads_of(n_tokens), n_tokens == 1
    first_name, last_name = format_of(names[0]), format_of(names[-1])
    (first_tile, first_tokens), (multiply_first, n_first, entry_first) = copier(first_name, n_tokens), tile_product(names[0], n_quads, 0, single)
    n_tables = 0 if alike else table_words(names[0])
    (last_tile, last_tokens), (multiply_last, n_last, entry_last) = copier(last_name, n_tokens), tile_product(names[-1], n_quads, n_tables, single)
    act_first, d_first, limbs_first, act_last, d_last, limbs_last = (at for fmt in (first_name, last_name) for at in chunk_slot(fmt, n_tokens)[:3])
    first_warp, own_words, first_slot, slot_words, slots = at
    n_sums, n_matrices = 4 * n_quads, len(names)
    wait = copies_wait_but(slots - 1)

    @device
    def copy_tile(matrix, lane, shared, to, words, other_words, row_tile, chunk, n_chunks):
        if two and matrix:
            last_tile(lane, shared, to, other_words, row_tile, chunk, n_chunks)
        else:
            first_tile(lane, shared, to, words, row_tile, chunk, n_chunks)

    @device
    def copy_tokens(matrix, lane, shared, to, act, chunk, first, n_valid, n, n_chunks):
        if two and matrix:
            last_tokens(lane, shared, to, act, chunk, first, n_valid, n, n_chunks)
        else:
            first_tokens(lane, shared, to, act, chunk, first, n_valid, n, n_chunks)

    @device
    def following(tile, matrix, chunk, warp, n_warps, n_chunks):
        """(tile, matrix, chunk) of the warp's next chunk."""
        chunk = i32(chunk + n_warps)
        if chunk >= n_chunks:
            chunk, matrix = warp, i32(matrix + 1)
            if matrix == n_matrices:
                matrix, tile = i32(0), i32(tile + cuda.gridDim.x)
        return tile, matrix, chunk

    @cooperative
    def run(words, other_words, bias, other_bias, act, out, n_rows, n_cols, n, per_round):
        shared = cuda.shared.array(0, types.uint32)
        acc = cuda.local.array(n_sums, f32)
        tid, n_threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
        lane, warp, n_warps = i32(tid & 31), i32(tid >> 5), i32(n_threads >> 5)
        first = i32(cuda.blockIdx.y * n_tokens)
        n_valid = i32(1 if single else min(n_tokens, n - first))
        n_chunks, n_tiles = i32((n_cols + 255) >> 8), i32((n_rows + 31) >> 5)
        scratch = i32(first_warp + warp * own_words)
        ring = i32(scratch + first_slot)
        side_words = i32(per_round * n_valid * 33)
        totals = i32(first_warp + n_warps * own_words)
        sums = i32(totals + n_valid * 32)
        # The copies run ahead by as many chunks as there are slots; those of weights begin before the kernel that makes the activations has ended.
        block_tile, to = i32(cuda.blockIdx.x), ring
        ahead_tile, ahead_matrix, ahead_chunk = block_tile, i32(0), warp
        for _ in range(slots):
            if ahead_tile < n_tiles:
                copy_tile(ahead_matrix, lane, shared, to, words, other_words, ahead_tile, ahead_chunk, n_chunks)
            ahead_tile, ahead_matrix, ahead_chunk = following(ahead_tile, ahead_matrix, ahead_chunk, warp, n_warps, n_chunks)
            to = i32(to + slot_words)
        if n_first:
            p = tid
            while p < n_first:
                sts(shared, p, entry_first(p))
                p = i32(p + n_threads)
        if n_last and not alike:
            p = tid
            while p < n_last:
                sts(shared, n_tables + p, entry_last(p))
                p = i32(p + n_threads)
        wait_for_previous()
        ahead_tile, ahead_matrix, ahead_chunk, to = block_tile, i32(0), warp, ring
        for _ in range(slots):
            if ahead_tile < n_tiles:
                copy_tokens(ahead_matrix, lane, shared, to, act, ahead_chunk, first, n_valid, n, n_chunks)
            copies_commit()
            ahead_tile, ahead_matrix, ahead_chunk = following(ahead_tile, ahead_matrix, ahead_chunk, warp, n_warps, n_chunks)
            to = i32(to + slot_words)
        if n_first or n_last:
            cuda.syncthreads()  # the codebooks are there
        now, side, tile, matrix = ring, i32(0), block_tile, i32(0)
        while tile < n_tiles:
            before = i32(0)  # chunks of earlier rounds
            while before < n_chunks:
                in_round = i32(min(per_round, n_chunks - before))
                w = warp
                while w < in_round:
                    wait()
                    syncwarp()  # the chunk is there, for all lanes
                    d_at = d_first
                    if alike or matrix == 0:
                        multiply_first(lane, shared, now, now + act_first, now + limbs_first, scratch, acc)
                    else:
                        d_at = d_last
                        multiply_last(lane, shared, now, now + act_last, now + limbs_last, scratch, acc)
                    place = i32(sums + side + w * n_valid * 33)
                    if single:
                        sts(shared, place + (lane >> 2) + ((lane & 3) << 3), as_u32(acc[0]))
                    else:
                        for quad in range(n_quads):
                            token = i32(quad * 4 + (lane & 3))
                            if token < n_valid:
                                for k in range(4):
                                    sts(shared, place + token * 32 + 8 * k + (lane >> 2), as_u32(acc[4 * quad + k]))
                    if lane < n_valid:
                        sts(shared, place + n_valid * 32 + lane, lds(shared, now + d_at + lane))
                    syncwarp()  # all are done with the slot, which is filled anew
                    if ahead_tile < n_tiles:
                        copy_tile(ahead_matrix, lane, shared, now, words, other_words, ahead_tile, ahead_chunk, n_chunks)
                        copy_tokens(ahead_matrix, lane, shared, now, act, ahead_chunk, first, n_valid, n, n_chunks)
                    copies_commit()
                    ahead_tile, ahead_matrix, ahead_chunk = following(ahead_tile, ahead_matrix, ahead_chunk, warp, n_warps, n_chunks)
                    now = i32(now + slot_words)
                    if now == ring + slots * slot_words:
                        now = ring
                    w = i32(w + n_warps)
                cuda.syncthreads()  # the sums of the round are there, and the owners are done with the round before, whose place is next
                p = tid
                while p < n_valid * 32:
                    total = f32(0)
                    if before > 0:
                        total = as_f32(lds(shared, totals + p))
                    place, d = i32(sums + side + p), i32(sums + side + n_valid * 32 + (p >> 5))
                    w = i32(0)
                    while w + 4 <= in_round:  # the loads of four chunks are under way together
                        a0, d0 = lds(shared, place), lds(shared, d)
                        a1, d1 = lds(shared, place + n_valid * 33), lds(shared, d + n_valid * 33)
                        a2, d2 = lds(shared, place + n_valid * 66), lds(shared, d + n_valid * 66)
                        a3, d3 = lds(shared, place + n_valid * 99), lds(shared, d + n_valid * 99)
                        total = fma(as_f32(a1), as_f32(d1), fma(as_f32(a0), as_f32(d0), total))
                        total = fma(as_f32(a3), as_f32(d3), fma(as_f32(a2), as_f32(d2), total))
                        place, d, w = i32(place + n_valid * 132), i32(d + n_valid * 132), i32(w + 4)
                    while w < in_round:
                        total = fma(as_f32(lds(shared, place)), as_f32(lds(shared, d)), total)
                        place, d, w = i32(place + n_valid * 33), i32(d + n_valid * 33), i32(w + 1)
                    sts(shared, totals + p, as_u32(total))
                    row = i32(tile * 32 + (p & 31))
                    if before + in_round == n_chunks and row < n_rows:
                        finish(out, i64(first + (p >> 5)) * n_rows + row, row, total, not two or matrix == 1, bias, other_bias)
                    p = i32(p + n_threads)
                before, side = i32(before + in_round), i32(side_words - side)
            matrix = i32(matrix + 1)
            if matrix == n_matrices:
                matrix, tile = i32(0), i32(tile + cuda.gridDim.x)
    return run


@factory([(fmt.name, n_tokens) for fmt in FORMATS.values() if fmt.is_quantized for n_tokens in MAX_WARPS])
def mmq_few_kernel(name, n_tokens):
    run = products((name,), n_tokens, store)

    def kernel(words, act, out, n_rows, n_cols, n, per_round):  # block: row tiles from blockIdx.x by gridDim.x, tokens from blockIdx.y * n_tokens
        run(words, words, out, out, act, out, n_rows, n_cols, n, per_round)
    return Kernel(kernel, (U32, U32, F32, N, N, N, N), 32 * MAX_WARPS[n_tokens])


@factory([("silu", "Q4_K", "Q4_K", False, 1), ("gelu", "IQ2_S", "IQ3_S", True, 8), ("relu", "Q8_0", "Q6_K", True, 16)])
def mmq_few_glu_kernel(activation, gate, up, biased, n_tokens):
    run = products((gate, up), n_tokens, gate_and_store(activation, biased))

    def kernel(gate_words, up_words, gate_bias, up_bias, act, out, n_rows, n_cols, n, per_round):  # blocks as in mmq_few_kernel
        run(gate_words, up_words, gate_bias, up_bias, act, out, n_rows, n_cols, n, per_round)
    return Kernel(kernel, (U32, U32, F32, F32, U32, F32, N, N, N, N), 32 * MAX_WARPS[n_tokens])


@dataclass(frozen=True)
class FewShape:
    """Launch of mmq_few: tokens of a block, its warps, the chunks of a round, blocks over row tiles and tokens, bytes of shared memory. A round is all
    chunks of a row or whole turns of the warps."""
    n_tokens: int
    n_warps: int
    per_round: int
    grid: tuple[int, int]
    n_bytes: int


def work(n_warps: int, n_blocks: int, n_chunks: int) -> int:
    """How long n_blocks of n_warps on a multiprocessor take for n_chunks each: turns of the warps, each as long as the busiest scheduler has warps, or as
    a warp waits for its own loads and sums, which is about as long as LATENCY chunks are issued (docs/kernels-log.md)."""
    return -(-n_chunks // n_warps) * max(LATENCY, -(-n_blocks * n_warps // SCHEDULERS))


def shape_of(names: tuple[str, ...], n_rows: int, n_cols: int, n: int, n_tokens: int, n_warps: int, n_blocks: int) -> FewShape:
    """The shape with so many warps a block. A round is a whole row where its sums are small. names: formats of the matrices; n_blocks: of the grid
    over row tiles at most."""
    n_tiles, n_chunks, n_valid = -(-n_rows // ROWS), -(-n_cols // CHUNK), min(n, n_tokens)
    whole = n_chunks * sum_words(n_valid) <= SUM_WORDS
    per_round = n_chunks if whole else n_warps * min(-(-n_chunks // n_warps), max(1, SUM_WORDS // (n_warps * sum_words(n_valid))))
    n_sides = 1 if per_round >= n_chunks and n_tiles <= n_blocks and len(names) == 1 else 2
    n_bytes = 4 * shared_words(names, n_tokens, n_warps, per_round, n_valid, n_sides)
    return FewShape(n_tokens, n_warps, per_round, (min(n_tiles, n_blocks), -(-n // n_tokens)), n_bytes)


@lru_cache(None)
def few_shape(names: tuple[str, ...], n_rows: int, n_cols: int, n: int, n_multiprocessors: int, shared_limit: int) -> FewShape:
    """As many tokens as a block can take, as many warps as registers and shared memory hold, of those numbers the one that `work` finds the fastest.
    One block a multiprocessor for one token, else two where there are more row tiles than those. names: formats of the matrices."""
    n_tokens = next((t for t in MAX_WARPS if t >= n), MOST_TOKENS)
    n_tiles, n_chunks, groups = -(-n_rows // ROWS), -(-n_cols // CHUNK), -(-n // n_tokens)
    resident = 1 if n_tokens == 1 or n_tiles * groups <= n_multiprocessors else 2
    shapes = [shape_of(names, n_rows, n_cols, n, n_tokens, n_warps, resident * n_multiprocessors)
              for n_warps in range(1, min(MAX_WARPS[n_tokens] // resident, n_chunks) + 1)]
    fitting = [shape for shape in shapes if resident * (shape.n_bytes + RESERVED) <= shared_limit + RESERVED] or shapes[:1]
    return min(fitting, key=lambda shape: work(shape.n_warps, resident, n_chunks))


def checked_sizes(op, names, n_rows, n_cols, n):
    for what, found in (("n_rows", n_rows), ("n_cols", n_cols)):
        check(op, found >= 1, what, found, "at least 1")
    check(op, 1 <= n <= 65535 * MOST_TOKENS, "n", n, f"1..{65535 * MOST_TOKENS}")
    for name in names:
        check(op, format_of(name, op).is_quantized, "type", name, "quantized types")


def mmq_few(target, format_name, words, act, out, n_rows, n_cols, n, shape=None):
    """words: address of the weight's tiles [n_rows, n_cols], act: of the activation buffer of `quantize`, both on 16 bytes; out: of float32
    [n, n_rows]. shape: `few_shape` chooses where it is not given."""
    checked_sizes("mmq_few", (format_name,), n_rows, n_cols, n)
    shape = shape or few_shape((format_name,), n_rows, n_cols, n, target.n_multiprocessors, target.shared_limit)
    kernel, args = mmq_few_kernel(format_name, shape.n_tokens), (words, act, out, n_rows, n_cols, n, shape.per_round)
    return target.launch(kernel, shape.grid, 32 * shape.n_warps, args, shape.n_bytes)


def mmq_few_glu(target, activation, names, gate_words, up_words, act, gate_bias, up_bias, out, n_rows, n_cols, n, shape=None):
    """out = activation(gate x + its bias) * (up x + its bias). names: formats of gate and up; biases: addresses of float32 [n_rows], or both None;
    the rest as for `mmq_few`."""
    checked_sizes("mmq_few_glu", names, n_rows, n_cols, n)
    shape = shape or few_shape(names, n_rows, n_cols, n, target.n_multiprocessors, target.shared_limit)
    kernel, biased = mmq_few_glu_kernel(activation, *names, gate_bias is not None, shape.n_tokens), (gate_bias, up_bias)
    args = gate_words, up_words, *(biased if gate_bias is not None else (out, out)), act, out, n_rows, n_cols, n, shape.per_round
    return target.launch(kernel, shape.grid, 32 * shape.n_warps, args, shape.n_bytes)
