"""A layer of a small dense model for one token, in one launch (docs/kernels-log.md, "A layer in one launch"): attention with its
norm, rotation and cache, and the feed-forward block with its norm.

One cluster of blocks, whose stages are those of `add_rms_norm_mul_mat`, `mmq_few`, `rope_set_rows` and `flash_attn_ext_few`. What
a product gives, the block sends to all, whose mbarriers count the messages; so each has whole rows in its own shared memory, and
makes the activations of the next product for itself. Only behind the pieces of attention do all wait for all. Of a product, a
block has every n-th row tile, a warp every n-th of the block's pairs of a row tile and a chunk. All of them have places in shared
memory: they are asked for a stage ahead, in two areas by turns. Heads are parted as in a grid of `flash_attn_ext_few`, whose
pieces each block combines for itself.
"""
from functools import lru_cache
from typing import NamedTuple

from numba import cuda, types

from ...quant.formats import CHUNK, format_of
from ...quant.tile import ROWS, tile_bytes
from ..call import Call
from ..reference.flash_attn_ext import score_scale
from . import cluster, mbarrier
from .add_rms_norm_mul_mat import activation_writer, normed
from .fixed_point import MINUS_INFINITY, ZERO, larger_float
from .flash_attn_ext_act import link_unless
from .flash_attn_ext_combine import MOST_HEADS, NO_WINDOW, PIECE, piece_floats, statistics_at
from .flash_attn_ext_few import Where, attention_of, shared_layout
from .glu import gated_unit
from .launch import F32, HOPPER, I32, I64, Kernel, N, SCALAR_F32, U8, U16, U32, factory, need
from .mmq_few import ROW_SLOT, choice, chunk_multiplier, codebooks, copier, fold_chunks, multiplier
from .operands import addresses
from .ptx import (add, as_f32, as_i32, as_u32, copies_commit, copies_wait_but, device, div, exp, f32, i32, i64, ld, ld4, lds,
                  lds4, mul, nothing, st, st4, sts, sts4, sub, syncwarp, u32, wait_for_previous)
from .rms_norm import PARTIALS, halve128, reciprocal, sum_of_partial
from .rope_set_rows import LANES, NORMS, constants, rotation
from .set_rows import PUTS, in_cell
from .tile_product import table_words, takes_sums, tile_product, zero_words

BLOCKS, WARPS = 16, 16      # of a cluster, of a block
MOST_KEYS = 1024            # of a context: beyond, more blocks share the pieces
MOST_BYTES = 6 << 20        # of a layer's weights: beyond, 16 multiprocessors take longer to read them than launches cost
Z = i32(0)


class Shape(NamedTuple):
    """Of a layer, and of the launch."""
    names: tuple[str, ...]  # formats of Q, K, V, the output, gate, up, down
    n_cols: int
    n_head: int
    n_head_kv: int
    dim: int                # of a head
    n_ff: int
    n_blocks: int = BLOCKS
    n_warps: int = WARPS

    @property
    def heads(self) -> int:
        """Of a KV head."""
        return self.n_head // self.n_head_kv

    @property
    def q_cols(self) -> int:
        return self.n_head * self.dim

    @property
    def kv_cols(self) -> int:
        return self.n_head_kv * self.dim

    @property
    def n_splits(self) -> int:
        """Blocks that share the pieces of a KV head."""
        return self.n_blocks // self.n_head_kv


class Stage(NamedTuple):
    """A product. matrices: their numbers among a layer's; tiles: row tiles of each."""
    matrices: tuple[int, ...]
    tiles: tuple[int, ...]
    n_chunks: int
    by_turns: bool = False  # a tile of each, one after the other; else those of one matrix behind those of another

    @property
    def n_tiles(self) -> int:
        """By which blocks take turns."""
        return self.tiles[0] if self.by_turns else sum(self.tiles)


def tiles_of(n_rows: int) -> int:
    return -(-n_rows // ROWS)


def chunks_of(n_cols: int) -> int:
    return -(-n_cols // CHUNK)


def stages_of(shape: Shape) -> tuple[Stage, Stage, Stage, Stage]:
    q, kv, out, ff = map(tiles_of, (shape.q_cols, shape.kv_cols, shape.n_cols, shape.n_ff))
    chunks = chunks_of(shape.n_cols)
    return (Stage((0, 1, 2), (q, kv, kv), chunks), Stage((3,), (out,), chunks_of(shape.q_cols)),
            Stage((4, 5), (ff, ff), chunks, True), Stage((6,), (out,), chunks_of(shape.n_ff)))


def most_tiles(stage: Stage, shape: Shape) -> int:
    """Of a block."""
    return -(-stage.n_tiles // shape.n_blocks) * (2 if stage.by_turns else 1)


def most_pairs(stage: Stage, shape: Shape) -> int:
    return most_tiles(stage, shape) * stage.n_chunks


def tile_words(names: tuple[str, ...], stage: Stage) -> int:
    return max(tile_bytes(format_of(names[matrix])) for matrix in stage.matrices) // 4


class Layout(NamedTuple):
    """Words of shared memory at which each begins: behind what attention works with, codebooks and zeros, weights of the stages
    by turns, the activations, partials of a norm, sums of chunks, totals; the row that layers add to, Q K V, the attention, its
    product (at first y), the gated unit."""
    tables: int
    zeros: int
    even: int
    odd: int
    row: int
    partials: int
    sums: int
    totals: int
    state: int
    qkv: int
    att: int
    outs: int
    gated: int
    arrivals: int  # mbarriers of what blocks send each other: Q K V, the product, the gated unit
    n_words: int


@lru_cache(None)
def layout(shape: Shape) -> Layout:
    stages, names = stages_of(shape), shape.names
    areas = [most_pairs(stage, shape) * tile_words(names, stage) for stage in stages]
    row = max(2 * CHUNK * -(-shape.n_cols // (2 * CHUNK)), CHUNK * max(stage.n_chunks for stage in stages))
    sums = (ROWS + 1) * max(most_pairs(stage, shape) for stage in stages)
    each = (shared_layout(shape.dim, shape.dim, shape.heads, shape.n_warps).n_words, sum(map(table_words, dict.fromkeys(names))),
            max(map(zero_words, names)), max(areas[::2]), max(areas[1::2]), row, PARTIALS, sums,
            ROWS * max(most_tiles(stage, shape) for stage in stages), shape.n_cols, shape.q_cols + 2 * shape.kv_cols,
            shape.q_cols, shape.n_cols, shape.n_ff, 3 * mbarrier.WORDS)
    first, at = [], 0
    for n in each:
        first.append(at)
        at += n + 31 & -32  # 128 bytes: banks as the stages know them
    return Layout(*first[1:], at)


# Parts of a stage. shared: uint32, the block's dynamic shared memory. w: the words of the matrices, seven pointers.

def place_of(stage: Stage, shape: Shape, kinds: tuple[int, ...]):
    """(w, rank, t) -> (words, row tile, kind, whether there is such a tile) of a block's t-th tile."""
    a, b, c = (*stage.matrices, *stage.matrices, *stage.matrices)[:3]
    kind_a, kind_b, kind_c = (i32(kinds[matrix]) for matrix in (a, b, c))
    n, n_blocks, to_b = stage.n_tiles, shape.n_blocks, stage.tiles[0]
    to_c = sum(stage.tiles[:2])

    @device
    def by_turns(w, rank, t):
        v = i32(rank + n_blocks * (t >> 1))
        return w[b] if t & 1 else w[a], v, kind_b if t & 1 else kind_a, v < n

    @device
    def alone(w, rank, t):
        v = i32(rank + n_blocks * t)
        return w[a], v, kind_a, v < n

    @device
    def in_a_row(w, rank, t):
        v = i32(rank + n_blocks * t)
        if v < to_b:
            return w[a], v, kind_a, True
        if v < to_c:
            return w[b], i32(v - to_b), kind_b, True
        return w[c], i32(v - to_c), kind_c, v < n
    return by_turns if stage.by_turns else in_a_row if len(stage.tiles) > 1 else alone


def worker(stage: Stage, shape: Shape, first: int):
    """(ask, work, total_of). ask: (w, rank, lane, warp, shared): a warp asks for its weights, a group of copies. work: the same,
    and acc: when they are there, it multiplies them and leaves sums, which are there for all threads behind it. total_of:
    (shared, t, lane) -> the total of row `lane` of the block's t-th tile. first: word at which the weights begin."""
    at, kinds = layout(shape), tuple(dict.fromkeys(shape.names))
    here = tuple(dict.fromkeys(shape.names[matrix] for matrix in stage.matrices))
    numbers = tuple(here.index(name) if name in here else 0 for name in shape.names)
    tables = [at.tables + sum(map(table_words, kinds[:kinds.index(name)])) for name in here]
    products = [tile_product(name, 1, table, True) for name, table in zip(here, tables)]
    multiply = chunk_multiplier([multiplier(product, ROW_SLOT) for product in products], [ROW_SLOT] * len(here), 1)
    copy = choice([copier(format_of(name), 1, False)[0] for name in here])
    place, n_chunks, n_warps = place_of(stage, shape, numbers), stage.n_chunks, shape.n_warps
    pairs, words = most_pairs(stage, shape), tile_words(shape.names, stage)
    row, sums, totals, zeros = at.row, at.sums, at.totals, at.zeros
    depth = -(-pairs // n_warps)
    wait = copies_wait_but(0 if stage == stages_of(shape)[-1] else 1)  # the next stage's stay on their way

    @device
    def ask(w, rank, lane, warp, shared):
        for i in range(depth):
            p = i32(warp + n_warps * i)
            t = i32(p // n_chunks)
            matrix, tile, kind, there = place(w, rank, t)
            if p < pairs and there:
                copy(kind, lane, shared, i32(first + p * words), matrix, tile, i32(p - t * n_chunks), i32(n_chunks))
        copies_commit()

    @device
    def work(w, rank, lane, warp, shared, acc):
        wait()
        syncwarp()  # they are there, for all lanes
        for i in range(depth):
            p = i32(warp + n_warps * i)
            t = i32(p // n_chunks)
            _, _, kind, there = place(w, rank, t)
            if p < pairs and there:
                multiply(kind, lane, shared, i32(first + p * words), i32(row + (p - t * n_chunks) * CHUNK), i32(zeros), acc,
                         i32(sums), Z, p, i32(1), i32(1))
        syncwarp()  # all are done with the slots, which may be filled anew
        cuda.syncthreads()  # the sums are there

    @device
    def total_of(shared, t, lane):
        own = i32(sums + (ROWS + 1) * n_chunks * t)
        return fold_chunks(shared, i32(totals + ROWS * t), own, Z, lane, i32(1), Z, i32(n_chunks))
    return ask, work, total_of


def row_normer(shape: Shape):
    """(weights, make). weights: (w, lane, warp) -> those of the norm that a warp multiplies. make: state += y, both in shared
    memory, and the activations of its norm."""
    at, n_cols, n_warps = layout(shape), shape.n_cols, shape.n_warps
    state, row, partials = at.state, at.row, at.partials
    last, chunks, padded = n_cols - 4, chunks_of(n_cols), 2 * CHUNK * -(-n_cols // (2 * CHUNK))
    names, step = shape.names, 4 * 32 * n_warps
    write = activation_writer(any(takes_sums(format_of(name)) for name in names))

    @device
    def weights(w, lane, warp):
        """Of the columns 4 lane .. and 128 + 4 lane .. of its chunk."""
        column = i32(CHUNK * warp + 4 * lane)
        return ld4(w, min(column, last)), ld4(w, min(column + CHUNK // 2, last))

    @device
    def make(shared, y, out, keeps, w, eps, tid, lane, warp):
        """y: a word of shared memory. out: where the sum goes too, if the block keeps it. w: what `weights` gave."""
        i = i32(4 * tid)
        while i < padded:
            a, b, c, d = ZERO, ZERO, ZERO, ZERO
            if i < n_cols:
                xa, xb, xc, xd = lds4(shared, state + i)
                ya, yb, yc, yd = lds4(shared, y + i)
                a, b = add(as_f32(xa), as_f32(ya)), add(as_f32(xb), as_f32(yb))
                c, d = add(as_f32(xc), as_f32(yc)), add(as_f32(xd), as_f32(yd))
                sts4(shared, state + i, as_u32(a), as_u32(b), as_u32(c), as_u32(d))
                if keeps:
                    st4(out, i, a, b, c, d)
            sts4(shared, row + i, as_u32(a), as_u32(b), as_u32(c), as_u32(d))
            i = i32(i + step)
        cuda.syncthreads()  # the row is there
        if tid < PARTIALS:
            sts(shared, partials + tid, as_u32(sum_of_partial(shared, i32(row + tid), i32(row + padded))))
        cuda.syncthreads()  # the partials are there
        if warp < chunks:
            p, column = i32(partials + lane), i32(CHUNK * warp + 4 * lane)
            squares = halve128(as_f32(lds(shared, p)), as_f32(lds(shared, p + 32)), as_f32(lds(shared, p + 64)),
                               as_f32(lds(shared, p + 96)), lane)
            r, (first, second) = reciprocal(squares, i32(n_cols), eps), w
            write(shared, i32(row + CHUNK * warp), lane, normed(shared, i32(row), column, i32(last), r, *first),
                  normed(shared, i32(row), i32(column + CHUNK // 2), i32(last), r, *second))
        cuda.syncthreads()  # the activations are there
    return weights, make


def row_quantizer(shape: Shape, first: int, n: int):
    """(shared, lane, warp): the activations of the n columns in shared memory from word `first` on."""
    row, chunks = layout(shape).row, chunks_of(n)
    write = activation_writer(any(takes_sums(format_of(name)) for name in shape.names))

    @device
    def four(shared, column):
        a, b, c, d = lds4(shared, first + min(column, n - 4))
        there = column < n
        return (as_f32(a) if there else ZERO, as_f32(b) if there else ZERO,
                as_f32(c) if there else ZERO, as_f32(d) if there else ZERO)

    @device
    def make(shared, lane, warp):
        if warp < chunks:
            column = i32(CHUNK * warp + 4 * lane)
            write(shared, i32(row + CHUNK * warp), lane, four(shared, column), four(shared, i32(column + CHUNK // 2)))
        cuda.syncthreads()  # the activations are there
    return make


def combiner(shape: Shape):
    """(shared, pieces, position, n_ctx, tid): the pieces of all heads together, in the order of `flash_attn_ext_combine`, to
    shared memory."""
    att, n_head, dim, q_cols, step = layout(shape).att, shape.n_head, shape.dim, shape.q_cols, 4 * 32 * shape.n_warps

    @device
    def combine(shared, pieces, position, n_ctx, tid):
        most, n_pieces = i32((n_ctx + PIECE - 1) >> 7), i32((position >> 7) + 1)
        statistics, column = statistics_at(1, n_head, n_ctx, dim), i32(4 * tid)
        while column < q_cols:
            head = i32(column // dim)
            o, at = i64(head * most) * dim + (column - head * dim), statistics + 2 * head * most
            M, y, p = MINUS_INFINITY, (ZERO, ZERO, ZERO, ZERO, ZERO), i32(0)  # y: L and o of four columns
            m, l, x = ld(pieces, at), ld(pieces, at + 1), ld4(pieces, o)
            while p < n_pieces:
                left_out = i32(1 if l == ZERO else 0)
                new_M = M if left_out else larger_float(M, m)
                a, b = exp(sub(M, new_M)), exp(sub(m, new_M))
                o_words = as_i32(x[0]), as_i32(x[1]), as_i32(x[2]), as_i32(x[3])
                y = link_unless(left_out, y, as_i32(a), as_i32(b), as_i32(mul(l, b)), o_words)
                M, p = new_M, i32(p + 1)
                behind = i32(min(p, n_pieces - 1))
                m, l, x = ld(pieces, at + 2 * behind), ld(pieces, at + 2 * behind + 1), ld4(pieces, o + i64(behind) * dim)
            L, a, b, c, d = y
            sts4(shared, att + column, as_u32(div(a, L)), as_u32(div(b, L)), as_u32(div(c, L)), as_u32(div(d, L)))
            column = i32(column + step)
        cuda.syncthreads()  # the attention is there
    return combine


@factory([(Shape(("Q4_1",) * 7, 576, 9, 3, 64, 1536),),
          (Shape(("Q4_K", "Q4_K", "Q6_K", "Q4_K", "IQ2_S", "Q4_K", "Q6_K"), 512, 8, 2, 64, 1024),)])
def dense_layer_kernel(shape):  # noqa: PLR0915 (a kernel: its steps in order)
    at, n_blocks, n_warps, n_threads, n_splits = layout(shape), shape.n_blocks, shape.n_warps, 32 * shape.n_warps, shape.n_splits
    qkv, out, glu, down = stages_of(shape)
    ask_qkv, work_qkv, total_of_qkv = worker(qkv, shape, at.even)
    ask_out, work_out, total_of_out = worker(out, shape, at.odd)
    ask_glu, work_glu, total_of_glu = worker(glu, shape, at.even)
    ask_down, work_down, total_of_down = worker(down, shape, at.odd)
    weights, norm = row_normer(shape)
    quantize_att, quantize_gated = row_quantizer(shape, at.att, shape.q_cols), row_quantizer(shape, at.gated, shape.n_ff)
    combine, unit = combiner(shape), gated_unit("silu")
    n_qkv, n_out, n_glu = qkv.n_tiles, out.n_tiles, glu.n_tiles
    most_qkv, most_out, most_glu = (most_tiles(stage, shape) for stage in (qkv, out, glu))
    most_glu //= 2
    kinds = tuple(dict.fromkeys(shape.names))
    tables = [at.tables + sum(map(table_words, kinds[:i])) for i in range(len(kinds))]
    write_codebooks = codebooks([tile_product(name, 1, table, True) for name, table in zip(kinds, tables)], tables)
    zeros, n_zeros, state, qkv_at = at.zeros, max(map(zero_words, shape.names)), at.state, at.qkv
    outs, gated, arrivals, has_tables = at.outs, at.gated, at.arrivals, at.tables < at.zeros
    n_cols, n_head_kv, dim, heads = shape.n_cols, shape.n_head_kv, shape.dim, shape.heads
    q_cols, kv_cols = shape.q_cols, shape.kv_cols
    rank_of, load = cluster.rank, device(lambda shared, i: as_f32(lds(shared, i)))
    rotate_q, rotate_k = (rotation(put, *NORMS[False], load) for put in (st, PUTS["f16"]))
    put_v, of_pair = PUTS["f16"], constants(NORMS[False][2])
    one, no_token = device(lambda: i32(1)), device(lambda: Z)
    attend = attention_of(
        Where(token=no_token, n_tokens=one, head_kv=device(lambda: i32(rank_of() // n_splits)),
              n_head_kv=device(lambda: i32(n_head_kv)), part=device(lambda: i32(rank_of() % n_splits)),
              n_parts=device(lambda: i32(n_splits)), read=device(lambda value, token: value), wait=nothing),
        "f16", "f16", dim, dim, heads, 1, n_warps)

    @device
    def send(shared, to, rank, word, arrivals):
        """To all blocks, each beginning with another one."""
        for i in range(n_blocks):
            cluster.send(shared, to, i32((rank + i) % n_blocks), word, arrivals)

    @device
    def rotate(rotate_head, shared, at, out, to, turn, half, neox, lane):
        """A head from word `at` of shared memory on. turn: (table, angles of the position, those of the lane's pairs)."""
        table, angles, p, q = turn
        rotate_head(shared, at, table, f32(0), out, to, table, angles, i32(dim), half, neox, p, q, lane)

    @device
    def write(shared, q_out, k_cache, v_cache, dst, position, turn, half, neox, rank, lane, warp):
        """Queries of the block's heads, rotated; by the block that reads it first, key and value of its KV head."""
        head_kv, newest = i32(rank // n_splits), i32(rank % n_splits) == i32(position >> 7) % n_splits
        if warp < heads:
            first = i32((head_kv * heads + warp) * dim)
            rotate(rotate_q, shared, i32(qkv_at + first), q_out, i64(first), turn, half, neox, lane)
        elif newest and warp == heads:
            cell, to = in_cell(k_cache, dst, 0, kv_cols)
            rotate(rotate_k, shared, i32(qkv_at + q_cols + head_kv * dim), cell, to + head_kv * dim, turn, half, neox, lane)
        elif newest and warp == heads + 1:
            cell, to = in_cell(v_cache, dst, 0, kv_cols)
            i = lane
            while i < dim:
                put_v(cell, to + head_kv * dim + i, load(shared, qkv_at + q_cols + kv_cols + head_kv * dim + i))
                i = i32(i + LANES)

    def kernel(x, y, att_norm, ffn_norm, q_words, k_words, v_words, o_words,  # noqa: PLR0915 (a kernel: its steps in order)
               gate_words, up_words, down_words, pos, table, k, v, k_cache, v_cache, dst, seq, present, q_out, pieces, total, out,
               n_ctx, half, neox, eps, scale):
        shared, acc = cuda.shared.array(0, types.uint32), cuda.local.array(4, f32)
        tid, rank = i32(cuda.threadIdx.x), rank_of()
        lane, warp = i32(tid & 31), i32(tid >> 5)
        w = q_words, k_words, v_words, o_words, gate_words, up_words, down_words
        if tid == 0:
            for which, n in ((0, ROWS * n_qkv), (1, ROWS * n_out), (2, ROWS * n_glu)):
                mbarrier.begin(shared, arrivals + which * mbarrier.WORDS, i32(1))
                mbarrier.expect(shared, arrivals + which * mbarrier.WORDS, i32(4 * n))
        cluster.arrive()
        # What no kernel writes: the first weights, the norm's, codebooks
        ask_qkv(w, rank, lane, warp, shared)
        ask_out(w, rank, lane, warp, shared)
        of_norm = weights(att_norm, lane, warp)
        if has_tables:
            write_codebooks(shared, tid, i32(n_threads))
        i = tid
        while i < n_zeros:
            sts(shared, zeros + i, u32(0))
            i = i32(i + n_threads)
        position, sequence = ld(pos, 0), ld(seq, 0)
        wait_for_previous()

        # 1. Norm; Q, K and V
        i = i32(4 * tid)
        while i < n_cols:
            a, b, c, d = ld4(x, i)
            e, f, g, h = ld4(y, i)
            sts4(shared, state + i, as_u32(a), as_u32(b), as_u32(c), as_u32(d))
            sts4(shared, outs + i, as_u32(e), as_u32(f), as_u32(g), as_u32(h))
            i = i32(i + 4 * n_threads)
        norm(shared, i32(outs), total, False, of_norm, eps, tid, lane, warp)
        work_qkv(w, rank, lane, warp, shared, acc)
        cluster.wait()  # all blocks have begun
        t = i32(rank + n_blocks * warp)
        if warp < most_qkv and t < n_qkv:
            send(shared, qkv_at + ROWS * t + lane, rank, as_u32(total_of_qkv(shared, warp, lane)), arrivals)
        ask_glu(w, rank, lane, warp, shared)
        angles = i64(position) * (2 * half)
        turn = (table, angles, of_pair(table, table, angles, lane, half, neox),
                of_pair(table, table, angles, i32(lane + LANES), half, neox))
        mbarrier.wait(shared, arrivals, i32(0))

        # 2. Attention
        if rank < n_splits * n_head_kv:
            write(shared, q_out, k_cache, v_cache, dst, position, turn, half, neox, rank, lane, warp)
            cuda.syncthreads()  # they are there, for the block
            attend(q_out, k, v, sequence, position, present, pieces, n_ctx, i32(kv_cols), i32(NO_WINDOW), scale)
        cluster.meet()
        combine(shared, pieces, position, n_ctx, tid)
        quantize_att(shared, lane, warp)
        work_out(w, rank, lane, warp, shared, acc)
        t = i32(rank + n_blocks * warp)
        if warp < most_out and t < n_out:
            send(shared, outs + ROWS * t + lane, rank, as_u32(total_of_out(shared, warp, lane)), arrivals + mbarrier.WORDS)
        ask_down(w, rank, lane, warp, shared)
        of_norm = weights(ffn_norm, lane, warp)
        mbarrier.wait(shared, arrivals + mbarrier.WORDS, i32(0))

        # 3. Norm; gate and up, down
        norm(shared, i32(outs), total, rank == 0, of_norm, eps, tid, lane, warp)
        work_glu(w, rank, lane, warp, shared, acc)
        t = i32(rank + n_blocks * warp)
        if warp < most_glu and t < n_glu:
            gate = total_of_glu(shared, i32(2 * warp), lane)
            total_of_up = total_of_glu(shared, i32(2 * warp + 1), lane)
            send(shared, gated + ROWS * t + lane, rank, as_u32(unit(gate, total_of_up)), arrivals + 2 * mbarrier.WORDS)
        mbarrier.wait(shared, arrivals + 2 * mbarrier.WORDS, i32(0))
        quantize_gated(shared, lane, warp)
        work_down(w, rank, lane, warp, shared, acc)
        t = i32(rank + n_blocks * warp)
        if warp < most_out and t < n_out:
            st(out, ROWS * t + lane, total_of_down(shared, warp, lane))
    parameters = (*[F32] * 4, *[U32] * 7, I32, F32, U32, U32, U16, U16, I64, I32, U8, *[F32] * 4, N, N, N, SCALAR_F32, SCALAR_F32)
    return Kernel(kernel, parameters, n_threads, arch=HOPPER, n_cluster=n_blocks)


def matrices(call: Call) -> tuple:
    return call.q, call.k, call.v, call.o, call.gate, call.up, call.down


def shape_of(call: Call) -> Shape:
    n_cols = call.x.n_cols
    return Shape(tuple(w.dtype for w in matrices(call)), n_cols, call.n_head, call.n_head_kv, call.q.shape[0] // call.n_head,
                 call.gate.shape[0])


def check(call: Call) -> None:
    """One token; quantized weights, float16 caches; rows of whole row tiles, no more chunks of them than warps."""
    need(call.device.cc == HOPPER[:2], "compute capability", "{}.{}".format(*call.device.cc), "{}.{}".format(*HOPPER[:2]))
    need(call.x.n_rows == 1, "n", call.x.n_rows, "1")
    for what, cache in ("K", call.cache_k), ("V", call.cache_v):
        need(cache.dtype == "f16", f"type of {what}", cache.dtype, "f16")
    for w in matrices(call):
        need(format_of(w.dtype, call.op).is_quantized, "type", w.dtype, "quantized types")
        need(w.shape[0] % ROWS == 0 and w.shape[0] >= ROWS, "n_rows", w.shape[0], f"a multiple of {ROWS}")
    shape = shape_of(call)
    need(max(shape.n_cols, shape.q_cols, shape.n_ff) <= CHUNK * WARPS, "n_cols", max(shape.n_cols, shape.q_cols, shape.n_ff),
         f"up to {CHUNK * WARPS}")
    need(shape.dim % 32 == 0 and shape.dim <= 128, "channels of a head", shape.dim, "32, 64, 96 or 128")
    need(shape.heads <= MOST_HEADS and shape.n_head_kv <= BLOCKS, "heads", (shape.n_head, shape.n_head_kv),
         f"up to {MOST_HEADS} of a KV head, up to {BLOCKS} of these")
    need(call.cache_v.n_cols == shape.kv_cols, "columns of V", call.cache_v.n_cols, f"{shape.kv_cols}, those of K")


def plan(call: Call) -> Shape:
    shape = shape_of(call)
    need(4 * layout(shape).n_words <= call.device.shared_limit, "bytes of shared memory", 4 * layout(shape).n_words,
         f"up to {call.device.shared_limit}")
    return shape


def scratch(call: Call):
    """The queries, rotated, and the pieces of attention."""
    return "f32", (call.plan.q_cols + piece_floats(1, call.n_head, call.present.shape[1], call.plan.dim),)


def declines(call: Call) -> bool:
    """Behind long contexts more blocks share the pieces, and more multiprocessors the weights of larger layers."""
    n_bytes = sum(w.shape[0] * format_of(w.dtype).row_bytes(w.shape[1]) for w in matrices(call))
    return call.present.shape[1] > MOST_KEYS or n_bytes > MOST_BYTES


def dense_layer(call: Call):
    """sum = x + y + o attention(q a, k a, v a), out = down (silu(gate b) * (up b)), where a = quantize(norm of x + y), b =
    quantize(norm of sum); K and V go to their caches. As of `flash_attn_ext_act`, `rope_set_rows`, and

    x, y, sum, out: f32 [1, k], att_norm, ffn_norm: f32 [k], all on 16 bytes; q, k, v, o, gate, up, down: quantized."""
    shape, q_out = call.plan, call.scratch.data
    caches = addresses(call.cache_k, call.cache_v)
    scale = score_scale(call.part("flash_attn_ext", scale=call.scale, softcap=0.0))
    args = (*addresses(call.x, call.y, call.att_norm, call.ffn_norm), *addresses(*matrices(call)),
            *addresses(call.pos, call.table), *caches, *caches, *addresses(call.dst, call.seq, call.present), q_out,
            q_out + 4 * shape.q_cols, call.sum.data, call.out.data, call.present.shape[1], call.table.shape[1], int(call.neox),
            call.eps, scale)
    return call.device.launch(dense_layer_kernel(shape), shape.n_blocks, 32 * shape.n_warps, args, 4 * layout(shape).n_words)
