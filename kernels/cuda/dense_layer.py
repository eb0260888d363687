"""A layer of a small dense model for one token, in one launch (docs/kernels-log.md, "A layer in one launch"): attention with its
norm, rotation and cache, and the feed-forward block with its norm.

One cluster of blocks, whose stages are those of `add_rms_norm_mul_mat`, `few_product`, `rope_set_rows` and `flash_attn_ext_few`.
What a product gives, and the pieces of attention, the block sends to all, whose mbarriers count the messages; so each has whole
rows in its own shared memory, makes the activations of the next product for itself, and nobody waits but for what it reads. Of a
product, a block has every n-th row tile, a warp every n-th of the block's pairs of a row tile and a chunk, of gate and up those
of both. All weights of a block have places in its shared memory: they are asked for a stage ahead, in two areas by turns. Heads
are parted as in a grid of `flash_attn_ext_few`; where there are two blocks for each piece, they share its channels. The first
keys and values come during the norm. The newest are taken from shared memory, if they go to the cell of their position; else all
blocks meet when they are in the cache, and load anew.

Here the instructions that all warps issue cost four clocks each, and those of one warp as many or more: what does not depend on
other kernels stands before the wait for them, and indices are divided in 32 bits (`quotient`).
"""
from typing import NamedTuple

from numba import cuda, types

from ...quant.formats import CHUNK, format_of
from ...quant.tile import ROWS, tile_bytes
from ..call import Call
from ..reference.flash_attn_ext import score_scale
from . import cluster, mbarrier
from .add_rms_norm_mul_mat import activation_writer
from .dense_layer_shape import (BLOCKS, GATED, N_ARRIVALS, N_STAGES, OUT, PIECES, QKV, SUMS, WARPS, Shape, Stage, chunks_of,
                                layout, most_pairs, most_tiles, stages_of, tile_words)
from .few_product import codebooks, multiplier
from .few_slots import ROW_SLOT, choice
from .fixed_point import MINUS_INFINITY, ZERO, larger_float
from .flash_attn_ext_act import link_unless
from .flash_attn_ext_combine import MOST_HEADS, NO_WINDOW, PIECE
from .flash_attn_ext_few import Where, attention_of
from .flash_attn_ext_few_stages import ALL, FIRST, LAST, constants as attention_constants
from .glu import gated_unit
from .launch import F32, HOPPER, I32, I64, Kernel, N, SCALAR_F32, U8, U16, U32, factory, need
from .operands import addresses
from .ptx import (add, afresh, as_f32, as_i32, as_u32, device, div, exp, f32, fma, i32, i64, ld, ld4, lds, lds2, lds4, mul,
                  quotient, remainder, st, st4, sts, sts4, sub, u32, wait_for_previous)
from .rms_norm import PARTIALS, halve_fours, reciprocal
from .rope_set_rows import LANES, NORMS, constants, rotation
from .set_rows import PUTS
from .tile_form import takes_sums
from .token_product import token_product, token_table_words, zero_words
from .wgmma import fence

MOST_ROUNDS = 4       # of a block with its pieces: beyond, a grid of more blocks is faster
MOST_BYTES = 6 << 20  # of a layer's weights: beyond, 16 multiprocessors take longer to read them than launches cost
Z = i32(0)


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


def asker(stage: Stage, shape: Shape, first: int, number: int):
    """(w, rank, lane, warp, shared): a warp asks for its pairs of the block's tiles of a stage and chunks, p = t n_chunks + chunk
    of a block's t-th tile, to words first + p words: bulk copies, whose bytes the stage's mbarrier counts. number: its number."""
    n_chunks, n_warps, pairs = stage.n_chunks, shape.n_warps, most_pairs(stage, shape)
    words, barrier = tile_words(shape.names, stage), layout(shape).copies + number * mbarrier.WORDS
    n_rounds = -(-pairs // n_warps)
    sizes = tuple(i32(tile_bytes(format_of(name)) // 4) for name in shape.names)
    place = place_of(stage, shape, range(len(shape.names)))

    @device
    def tile_of(w, rank, p):
        """(words, row tile, words of a tile there, whether there is one)."""
        matrix, tile, kind, there = place(w, rank, quotient(p, n_chunks))
        return matrix, tile, sizes[kind], there

    @device
    def ask(w, rank, lane, warp, shared):
        if lane == 0:
            n_words = Z
            for i in range(n_rounds):
                p = i32(warp + n_warps * i)
                _, _, size, there = tile_of(w, rank, p)
                n_words = i32(n_words + (size if p < pairs and there else Z))
            mbarrier.expect(shared, barrier, i32(4 * n_words))
            for i in range(n_rounds):
                p = i32(warp + n_warps * i)
                matrix, tile, size, there = tile_of(w, rank, p)
                if p < pairs and there:
                    chunk = i64(tile) * n_chunks + (p - quotient(p, n_chunks) * n_chunks)
                    mbarrier.bring(shared, first + p * words, matrix, chunk * size, size, barrier)
    return ask


def worker(stage: Stage, shape: Shape, first: int, number: int):
    """(work, total_of). work: (w, rank, lane, warp, shared): a warp multiplies its pairs, of a stage by turns those of both
    matrices together, and leaves sums, which are there for all threads behind it. total_of: (shared, t, lane) -> the total of row
    `lane` of the block's t-th tile."""
    at, kinds = layout(shape), tuple(dict.fromkeys(shape.names))
    here = tuple(dict.fromkeys(shape.names[matrix] for matrix in stage.matrices))
    numbers = tuple(here.index(name) if name in here else 0 for name in shape.names)
    tables = [at.tables + sum(map(token_table_words, kinds[:kinds.index(name)])) for name in here]
    products = [multiplier(token_product(name, table), ROW_SLOT) for name, table in zip(here, tables)]
    multiply, multiply_first, multiply_last = choice(products), products[0], products[-1]
    n_chunks, n_warps, n_blocks, by_turns = stage.n_chunks, shape.n_warps, shape.n_blocks, stage.by_turns
    pairs, n_tiles, barrier = most_pairs(stage, shape), stage.n_tiles, at.copies + number * mbarrier.WORDS
    place, words, row, sums, zeros, d_at = (place_of(stage, shape, numbers), tile_words(shape.names, stage), at.row, at.sums,
                                            at.zeros, ROW_SLOT.d)
    n_each = 2 if by_turns else 1
    n_rounds = -(-(pairs // n_each) // n_warps)

    @device
    def leave(shared, p, lane, chunk, acc):
        sts(shared, sums + SUMS * p + (lane >> 2) + ((lane & 3) << 3), as_u32(acc[0]))
        if lane == 0:
            sts(shared, sums + SUMS * p + ROWS, lds(shared, chunk + d_at))

    @device
    def work(w, rank, lane, warp, shared):
        acc, other = cuda.local.array(4, f32), cuda.local.array(4, f32)
        mbarrier.wait(shared, barrier, Z)  # the weights are there
        for i in range(n_rounds):
            turn = i32(warp + n_warps * i)
            t = quotient(turn, n_chunks)
            chunk = i32(turn - t * n_chunks)
            x = i32(row + chunk * CHUNK)
            if by_turns:
                p = i32(2 * t * n_chunks + chunk)
                if 2 * turn < pairs and i32(rank + n_blocks * t) < n_tiles:
                    multiply_first(lane, shared, i32(first + p * words), x, i32(zeros), acc)
                    multiply_last(lane, shared, i32(first + (p + n_chunks) * words), x, i32(zeros), other)
                    leave(shared, p, lane, x, acc)
                    leave(shared, i32(p + n_chunks), lane, x, other)
            else:
                _, _, kind, there = place(w, rank, t)
                if turn < pairs and there:
                    multiply(kind, lane, shared, i32(first + turn * words), x, i32(zeros), acc)
                    leave(shared, turn, lane, x, acc)
        cuda.syncthreads()  # the sums are there

    @device
    def total_of(shared, t, lane):
        total, own = f32(0), i32(sums + SUMS * n_chunks * t)
        for i in range(n_chunks):
            total = fma(as_f32(lds(shared, own + SUMS * i + lane)), as_f32(lds(shared, own + SUMS * i + ROWS)), total)
        return total
    return work, total_of


# Rows of activations, each made by a block for itself: a lane of a warp has of a chunk of 256 columns those from 4 lane and from
# 128 + 4 lane on, two fours; where there are enough warps, two of them write a half each. make: (given, shared, lane, warp);
# behind it they are there for all threads.

def by_halves(shape: Shape, n: int) -> bool:
    """Whether two warps write a chunk of n columns."""
    return 2 * chunks_of(n) <= shape.n_warps


def row_maker(shape: Shape, n: int, values):
    """values: (given, shared, column, other column, lane) -> two fours of the n columns."""
    row, halved, last = layout(shape).row, by_halves(shape, n), i32(n - 4)
    write, write_half = activation_writer(any(takes_sums(format_of(name)) for name in shape.names))
    n_used = chunks_of(n) * (2 if halved else 1)

    @device
    def there(column, four):
        a, b, c, d = four
        return a if column < n else ZERO, b if column < n else ZERO, c if column < n else ZERO, d if column < n else ZERO

    @device
    def make(given, shared, lane, warp):
        if warp < n_used:
            chunk = i32(warp >> 1 if halved else warp)
            first = i32(CHUNK * chunk + 4 * lane)
            second = i32(first + CHUNK // 2)
            a, b = values(given, shared, i32(min(first, last)), i32(min(second, last)), lane)
            a, b = there(first, a), there(second, b)
            if halved:
                write_half(shared, i32(row + CHUNK * chunk), lane, i32(warp & 1), a, b)
            else:
                write(shared, i32(row + CHUNK * chunk), lane, a, b)
        cuda.syncthreads()  # the activations are there
    return make


def norm_weights(shape: Shape):
    """(w, lane, warp) -> those of the norm that a lane multiplies, two fours."""
    last, halved = i32(shape.n_cols - 4), by_halves(shape, shape.n_cols)

    @device
    def weights(w, lane, warp):
        column = i32(CHUNK * (warp >> 1 if halved else warp) + 4 * lane)
        return ld4(w, i32(min(column, last))), ld4(w, i32(min(i32(column + CHUNK // 2), last)))
    return weights


def norm_maker(shape: Shape, four):
    """The norm of a row. given: (`norm_weights`, eps). four: (shared, column) -> that four of the row. Each warp adds up all
    squares."""
    n_cols = shape.n_cols
    n_turns, last = -(-n_cols // PARTIALS), i32(n_cols - 4)

    @device
    def normed(x, r, w):
        return mul(mul(x[0], r), w[0]), mul(mul(x[1], r), w[1]), mul(mul(x[2], r), w[2]), mul(mul(x[3], r), w[3])

    @device
    def squares(shared, lane):
        """Of the partials 4 lane .. 4 lane + 3."""
        s = ZERO, ZERO, ZERO, ZERO
        for i in range(n_turns):
            column = i32(4 * lane + PARTIALS * i)
            x = four(shared, i32(min(column, last)))
            t = fma(x[0], x[0], s[0]), fma(x[1], x[1], s[1]), fma(x[2], x[2], s[2]), fma(x[3], x[3], s[3])
            s = t if column < n_cols else s
        return s

    @device
    def values(given, shared, first, second, lane):
        (w, v), eps = given
        r = reciprocal(halve_fours(squares(shared, lane), lane), i32(n_cols), eps)
        return normed(four(shared, first), r, w), normed(four(shared, second), r, v)
    return row_maker(shape, n_cols, values)


def combination_maker(shape: Shape):
    """The pieces of all heads together, in the order of `flash_attn_ext_combine`. given: how many there are of a head."""
    at, dim = layout(shape), shape.dim
    outputs, most = at.pieces, at.n_pieces
    statistics = outputs + shape.q_cols * most

    @device
    def link_behind(shared, head, column, p, M, y):
        """M and y, (L, o of four columns), with piece p."""
        at = i32(head * most + p)
        (m, l), o = lds2(shared, statistics + 2 * at), lds4(shared, outputs + at * dim + column)
        m, l = as_f32(m), as_f32(l)
        left_out = i32(1 if l == ZERO else 0)
        new_M = M if left_out else larger_float(M, m)
        a, b = exp(sub(M, new_M)), exp(sub(m, new_M))
        words = i32(o[0]), i32(o[1]), i32(o[2]), i32(o[3])
        return new_M, link_unless(left_out, y, as_i32(a), as_i32(b), as_i32(mul(l, b)), words)

    @device
    def by_length(y):
        return div(y[1], y[0]), div(y[2], y[0]), div(y[3], y[0]), div(y[4], y[0])

    @device
    def values(n_pieces, shared, first, second, lane):
        head, other = quotient(first, dim), quotient(second, dim)
        first, second = i32(first - head * dim), i32(second - other * dim)
        M, N, p = MINUS_INFINITY, MINUS_INFINITY, i32(0)
        y, z = (ZERO, ZERO, ZERO, ZERO, ZERO), (ZERO, ZERO, ZERO, ZERO, ZERO)
        while p < n_pieces:
            M, y = link_behind(shared, head, first, p, M, y)
            N, z = link_behind(shared, other, second, p, N, z)
            p = i32(p + 1)
        return by_length(y), by_length(z)
    return row_maker(shape, shape.q_cols, values)


# What blocks send each other, all to all, each beginning with another one

def total_sender(stage: Stage, shape: Shape, first: int, which: int, value):
    """(shared, rank, lane, warp): of the block's tiles of a stage what becomes of their totals, to word `first` on. Half of the
    warps are parted among the tiles, and those of a tile among the blocks. value: (shared, t, lane) -> it, of the block's t-th
    tile."""
    n_tiles, n_blocks, n_senders, most = stage.n_tiles, shape.n_blocks, shape.n_warps // 2, -(-stage.n_tiles // shape.n_blocks)
    barrier, n_shares = layout(shape).arrivals + which * mbarrier.WORDS, max(1, n_senders // most)

    @device
    def send(shared, rank, lane, warp):
        t, share = remainder(warp, most), quotient(warp, most)
        while warp < n_senders and share < n_shares and t < most:
            tile = i32(rank + n_blocks * t)
            if tile < n_tiles:
                word, to = as_u32(value(shared, t, lane)), share
                while to < n_blocks:
                    cluster.send(shared, first + ROWS * tile + lane, remainder(i32(rank + to), n_blocks), word, barrier)
                    to = i32(to + n_shares)
            t = i32(t + n_senders)
    return send


class Share(NamedTuple):
    """Device functions of a block's share of the pieces of its KV head."""
    part: object   # (rank, n_pieces) -> its first piece, or one that is not there
    half: object   # (rank, n_pieces) -> which channels of it: ALL, FIRST or LAST
    n_bytes: object  # (rank, n_pieces) -> of all pieces but its own


def share_of(shape: Shape) -> Share:
    """Where there are two blocks for each piece, two share one: the channels of its values. n_pieces: of a head."""
    n_splits, n_head, heads, dim, used = shape.n_splits, shape.n_head, shape.heads, shape.dim, shape.n_splits * shape.n_head_kv

    @device
    def part(rank, n_pieces):
        own = remainder(rank, n_splits)
        own = i32(own >> 1) if 2 * n_pieces <= n_splits else own
        return own if rank < used else n_pieces

    @device
    def half(rank, n_pieces):
        return (LAST if remainder(rank, n_splits) & 1 else FIRST) if 2 * n_pieces <= n_splits else ALL

    @device
    def n_bytes(rank, n_pieces):
        first, own = part(rank, n_pieces), Z
        if first < n_pieces:
            own = i32(quotient(i32(n_pieces - first + n_splits - 1), n_splits) * (4 * dim + 8))
            if half(rank, n_pieces) != ALL:
                own = i32(2 * dim + (8 if half(rank, n_pieces) == FIRST else 0))
        return i32(n_head * n_pieces * (4 * dim + 8) - heads * own)
    return Share(part, half, n_bytes)


def piece_sender(shape: Shape):
    """(shared, n_pieces, rank, lane, warp): the block's pieces, to the others. n_pieces: of a head."""
    at, dim, heads, n_splits, n_blocks, n_warps = (layout(shape), shape.dim, shape.heads, shape.n_splits, shape.n_blocks,
                                                   shape.n_warps)
    outputs, most, statistics = at.pieces, at.n_pieces, at.pieces + shape.q_cols * at.n_pieces
    barrier, fours, share = at.arrivals + PIECES * mbarrier.WORDS, dim // 4, share_of(shape)
    n_turns = -(-heads * fours // 32)

    @device
    def send_piece(shared, head, piece, half, to, lane):
        """Of the heads from `head` on."""
        other = cluster.address(shared, barrier, to)
        for turn in range(n_turns):
            i = i32(lane + 32 * turn)
            i = i if half == ALL else i32(2 * i + (1 if half == LAST else 0))
            h = quotient(i, fours)
            if i < heads * fours:
                at = i32(outputs + ((head + h) * most + piece) * dim + 4 * (i - h * fours))
                a, b, c, d = lds4(shared, at)
                cluster.send4(cluster.address(shared, at, to), other, a, b, c, d)
        if lane < heads and half != LAST:
            at = i32(statistics + 2 * ((head + lane) * most + piece))
            m, l = lds2(shared, at)
            cluster.send2(cluster.address(shared, at, to), other, m, l)

    @device
    def send(shared, n_pieces, rank, lane, warp):
        to, half = warp, share.half(rank, n_pieces)
        while to < n_blocks:
            piece = share.part(rank, n_pieces)
            while to > 0 and piece < n_pieces:
                send_piece(shared, i32(quotient(rank, n_splits) * heads), piece, half, remainder(i32(rank + to), n_blocks), lane)
                piece = i32(piece + n_splits)
            to = i32(to + n_warps)
    return send


def attention_writer(shape: Shape):
    """(shared, k_cache, v_cache, cell, newest, kept, turn, rank, lane, warp): the queries of the block's heads, and where it has
    the newest piece the key of its KV head, rotated where they lie; the key, and the value, also to the caches, if they are kept
    there by this block. turn: (table, angles of the position, those of the lane's pairs)."""
    at, heads, dim, q_cols, kv_cols, n_splits = layout(shape), shape.heads, shape.dim, shape.q_cols, shape.kv_cols, shape.n_splits
    half, neox = i32(shape.n_pairs), shape.neox
    assert heads + 2 <= shape.n_warps, shape
    qkv, load = at.qkv, device(lambda shared, i: as_f32(lds(shared, i)))

    @device
    def put_key(to, i, x):
        """to: (shared, word, cache, place there, whether it is kept)."""
        shared, word, cache, place, kept = to
        sts(shared, word + i, as_u32(x))
        if kept:
            put_half(cache, place + i, x)

    rotate_query = rotation(device(lambda shared, i, x: sts(shared, i, as_u32(x))), *NORMS[False], load)
    rotate_key, put_half = rotation(put_key, *NORMS[False], load), PUTS["f16"]

    @device
    def write(shared, k_cache, v_cache, cell, newest, kept, turn, rank, lane, warp):
        (table, angles, p, q), head_kv = turn, quotient(rank, n_splits)
        if warp < heads:
            query = i32(qkv + (head_kv * heads + warp) * dim)
            rotate_query(shared, query, table, f32(0), shared, query, table, angles, i32(dim), half, neox, p, q, lane)
        elif newest and warp == heads:
            key = i32(qkv + q_cols + head_kv * dim)
            to = shared, key, k_cache, cell * kv_cols + head_kv * dim, kept
            rotate_key(shared, key, table, f32(0), to, Z, table, angles, i32(dim), half, neox, p, q, lane)
        elif newest and kept and warp == heads + 1:
            i = lane
            while i < dim:
                put_half(v_cache, cell * kv_cols + head_kv * dim + i, load(shared, qkv + q_cols + kv_cols + head_kv * dim + i))
                i = i32(i + LANES)
    return write


@factory([(Shape(("Q4_1",) * 7, 576, 9, 3, 64, 1536, 32, False),),
          (Shape(("Q4_K", "Q4_K", "Q6_K", "Q4_K", "IQ2_S", "Q4_K", "Q6_K"), 512, 8, 2, 64, 1024, 32, True),)])
def dense_layer_kernel(shape):  # noqa: PLR0915 (a kernel: its steps in order)
    at, n_blocks, n_warps, n_threads, n_splits = layout(shape), shape.n_blocks, shape.n_warps, 32 * shape.n_warps, shape.n_splits
    qkv, out, glu, _ = stages_of(shape)
    areas, copies = (at.even, at.odd, at.even, at.odd), at.copies
    ask_qkv, ask_out, ask_glu, ask_down = (asker(stage, shape, areas[i], i) for i, stage in enumerate(stages_of(shape)))
    (work_qkv, total_of_qkv), (work_out, total_of_out), (work_glu, total_of_glu), (work_down, total_of_down) = (
        worker(stage, shape, areas[i], i) for i, stage in enumerate(stages_of(shape)))
    unit, n_qkv, n_out, n_glu = gated_unit("silu"), qkv.n_tiles, out.n_tiles, glu.n_tiles
    send_qkv = total_sender(qkv, shape, at.qkv, QKV, total_of_qkv)
    send_out = total_sender(out, shape, at.outs, OUT, total_of_out)
    send_gated = total_sender(glu, shape, at.gated, GATED, device(
        lambda shared, t, lane: unit(total_of_glu(shared, i32(2 * t), lane), total_of_glu(shared, i32(2 * t + 1), lane))))
    share, send_pieces = share_of(shape), piece_sender(shape)
    state, outs, gated, qkv_at, pieces_at, room = at.state, at.outs, at.gated, at.qkv, at.pieces, at.n_pieces * PIECE

    @device
    def four(shared, column):
        a, b, c, d = lds4(shared, column)
        return as_f32(a), as_f32(b), as_f32(c), as_f32(d)

    @device
    def query_four(q, i, valid):
        """Of Q K V. Lanes beyond the heads read what lies behind, and their values are not used."""
        a, b, c, d = four(q, qkv_at + i)
        return a if valid else ZERO, b if valid else ZERO, c if valid else ZERO, d if valid else ZERO

    @device
    def there(x):
        """Four values that have been loaded when anything behind is: else they may be waited for with what is asked for later."""
        return (as_f32(afresh(as_i32(x[0]))), as_f32(afresh(as_i32(x[1]))), as_f32(afresh(as_i32(x[2]))),
                as_f32(afresh(as_i32(x[3]))))

    @device
    def sum_of_four(shared, column):
        x, y = four(shared, state + column), four(shared, outs + column)
        return add(x[0], y[0]), add(x[1], y[1]), add(x[2], y[2]), add(x[3], y[3])

    weights, combine = norm_weights(shape), combination_maker(shape)
    att_norm_row = norm_maker(shape, device(lambda shared, column: four(shared, state + column)))
    ffn_norm_row = norm_maker(shape, sum_of_four)
    quantize_gated = row_maker(shape, shape.n_ff, device(
        lambda given, shared, first, second, lane: (four(shared, gated + first), four(shared, gated + second))))
    kinds = tuple(dict.fromkeys(shape.names))
    tables = [at.tables + sum(map(token_table_words, kinds[:i])) for i in range(len(kinds))]
    write_codebooks = codebooks([token_product(name, table) for name, table in zip(kinds, tables)], tables)
    zeros, n_zeros, arrivals, has_tables = at.zeros, max(map(zero_words, shape.names)), at.arrivals, at.tables < at.zeros
    half, neox = i32(shape.n_pairs), shape.neox
    n_cols, n_head_kv, dim, kv_cols, most_out = shape.n_cols, shape.n_head_kv, shape.dim, shape.kv_cols, most_tiles(out, shape)
    newest_at = qkv_at + shape.q_cols
    with_heads, rank_of, of_pair, write = n_splits * n_head_kv, cluster.rank, constants(NORMS[False][2]), attention_writer(shape)
    last_head = i32(n_head_kv - 1)

    @device
    def arrive(given):
        """Q, K and V, to all blocks and from them; queries and what the caches get."""
        w, k_cache, v_cache, cell, turn, position, elsewhere, rank, lane, warp = given
        shared = cuda.shared.array(0, types.uint32)
        send_qkv(shared, rank, lane, warp)
        ask_glu(w, rank, lane, warp, shared)
        mbarrier.wait(shared, arrivals + QKV * mbarrier.WORDS, Z)
        if rank < with_heads:
            piece, n_pieces = i32(position >> 7), i32((position >> 7) + 1)
            has_newest = remainder(piece, n_splits) == share.part(rank, n_pieces)
            kept = share.half(rank, n_pieces) != LAST
            write(shared, k_cache, v_cache, cell, has_newest, kept, turn, rank, lane, warp)
            cuda.syncthreads()  # they are there, for the block
        if elsewhere:  # the cell may be among another block's
            cluster.meet()

    @device
    def newest(value, octet):
        """Of the key, or the value, of the block's KV head."""
        at = i32(newest_at + (kv_cols if value else 0) + quotient(rank_of(), n_splits) * dim + 8 * octet)
        shared = cuda.shared.array(0, types.uint32)
        return four(shared, at) + four(shared, at + 4)

    n_turns = -(-n_cols // (4 * n_threads))
    n_keys, n_values, n_held = attention_constants("f16", "f16", dim, dim, shape.heads, n_warps).n_loaded
    no_token, one = device(lambda: Z), device(lambda: i32(1))
    attend, begin_attention = attention_of(
        Where(token=no_token, n_tokens=one, head_kv=device(lambda: i32(min(quotient(rank_of(), n_splits), last_head))),
              n_head_kv=device(lambda: i32(n_head_kv)), n_parts=device(lambda: i32(n_splits)),
              part=device(lambda position: share.part(rank_of(), i32((position >> 7) + 1))),
              read=device(lambda value, token: value), wait=arrive, query_four=query_four,
              room=device(lambda n_ctx: i32(room)), put=device(lambda pieces, i, x: sts(pieces, pieces_at + i, as_u32(x))),
              half=device(lambda position: share.half(rank_of(), i32((position >> 7) + 1))), newest=newest,
              elsewhere=device(lambda given: given[6])),
        "f16", "f16", dim, dim, shape.heads, 1, n_warps)

    def kernel(x, y, att_norm, ffn_norm, q_words, k_words, v_words, o_words,  # noqa: PLR0915 (a kernel: its steps in order)
               gate_words, up_words, down_words, pos, rope_table, k, v, k_cache, v_cache, cells, seq, present, total, out,
               n_ctx, eps, scale):
        shared = cuda.shared.array(0, types.uint32)
        loaded = cuda.local.array(n_keys, u32), cuda.local.array(n_values, u32), cuda.local.array(n_held, i32)
        tid, rank = i32(cuda.threadIdx.x), rank_of()
        lane, warp = i32(tid & 31), i32(tid >> 5)
        w = q_words, k_words, v_words, o_words, gate_words, up_words, down_words
        if tid == 0:
            for which in range(N_ARRIVALS):
                mbarrier.begin(shared, arrivals + which * mbarrier.WORDS, i32(1))
            for which, n in ((QKV, n_qkv), (OUT, n_out), (GATED, n_glu)):
                mbarrier.expect(shared, arrivals + which * mbarrier.WORDS, i32(4 * ROWS * n))
            for stage in range(N_STAGES):
                mbarrier.begin(shared, copies + stage * mbarrier.WORDS, i32(n_warps))
            fence()
        cuda.syncthreads()  # they are there, for the block
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
        position, sequence, cell = ld(pos, 0), ld(seq, 0), ld(cells, 0)
        n_pieces, elsewhere = i32((position >> 7) + 1), cell != i64(sequence) * n_ctx + position
        if tid == 0:
            mbarrier.expect(shared, arrivals + PIECES * mbarrier.WORDS, share.n_bytes(rank, n_pieces))
        angles = i64(position) * (2 * half)
        turn = (rope_table, angles, there(of_pair(rope_table, rope_table, angles, lane, half, neox)),
                there(of_pair(rope_table, rope_table, angles, i32(lane + LANES), half, neox)))
        of_norm = there(of_norm[0]), there(of_norm[1])
        cluster.wait()  # all blocks have begun
        wait_for_previous()

        # 1. Norm; Q, K and V. The first keys and values come meanwhile
        for i in range(n_turns):
            column = i32(4 * (tid + n_threads * i))
            if column < n_cols:
                a, b, c, d = ld4(x, column)
                e, f, g, h = ld4(y, column)
                sts4(shared, state + column, as_u32(add(a, e)), as_u32(add(b, f)), as_u32(add(c, g)), as_u32(add(d, h)))
        begin_attention(k, v, sequence, afresh(position), present, n_ctx, i32(kv_cols), i32(NO_WINDOW), loaded)
        cuda.syncthreads()  # the row is there
        att_norm_row((of_norm, eps), shared, lane, warp)
        work_qkv(w, rank, lane, warp, shared)

        # 2. Attention
        attend(shared, k, v, sequence, position, present, shared, n_ctx, i32(kv_cols), i32(NO_WINDOW), scale,
               (w, k_cache, v_cache, cell, turn, position, elsewhere, rank, lane, warp), loaded)
        if rank < with_heads:
            cuda.syncthreads()  # the block's pieces are there
            send_pieces(shared, n_pieces, rank, lane, warp)
        mbarrier.wait(shared, arrivals + PIECES * mbarrier.WORDS, Z)
        combine(n_pieces, shared, lane, warp)
        work_out(w, rank, lane, warp, shared)
        send_out(shared, rank, lane, warp)
        ask_down(w, rank, lane, warp, shared)
        of_norm = weights(ffn_norm, lane, warp)
        mbarrier.wait(shared, arrivals + OUT * mbarrier.WORDS, Z)

        # 3. Norm; gate and up, down
        ffn_norm_row((of_norm, eps), shared, lane, warp)
        if rank == 0:
            for i in range(n_turns):
                column = i32(4 * (n_threads * (i + 1) - 1 - tid))  # beginning with the last warps, which have no chunk
                if column < n_cols:
                    a, b, c, d = sum_of_four(shared, column)
                    st4(total, column, a, b, c, d)
        work_glu(w, rank, lane, warp, shared)
        send_gated(shared, rank, lane, warp)
        mbarrier.wait(shared, arrivals + GATED * mbarrier.WORDS, Z)
        quantize_gated(Z, shared, lane, warp)
        work_down(w, rank, lane, warp, shared)
        t = i32(rank + n_blocks * warp)
        if warp < most_out and t < n_out:
            st(out, ROWS * t + lane, total_of_down(shared, warp, lane))
    parameters = (*[F32] * 4, *[U32] * 7, I32, F32, U32, U32, U16, U16, I64, I32, U8, *[F32] * 2, N, SCALAR_F32, SCALAR_F32)
    return Kernel(kernel, parameters, n_threads, arch=HOPPER, n_cluster=n_blocks)


def matrices(call: Call) -> tuple:
    return call.q, call.k, call.v, call.o, call.gate, call.up, call.down


def shape_of(call: Call) -> Shape:
    n_cols = call.x.n_cols
    return Shape(tuple(w.dtype for w in matrices(call)), n_cols, call.n_head, call.n_head_kv, call.q.shape[0] // call.n_head,
                 call.gate.shape[0], call.table.shape[1], bool(call.neox))


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
    n_bytes, n_ctx, most = 4 * layout(shape).n_words, call.present.shape[1], layout(shape).n_pieces * PIECE
    need(n_bytes <= call.device.shared_limit, "bytes of shared memory", n_bytes, f"up to {call.device.shared_limit}")
    need(n_ctx <= most, "n_ctx", n_ctx, f"up to {most}, whose pieces have room in shared memory")
    return shape


def declines(call: Call) -> bool:
    """More multiprocessors share the weights of larger layers, and more blocks the pieces of long contexts."""
    n_bytes = sum(w.shape[0] * format_of(w.dtype).row_bytes(w.shape[1]) for w in matrices(call))
    n_pieces = -(-call.present.shape[1] // PIECE)
    return n_bytes > MOST_BYTES or n_pieces > MOST_ROUNDS * call.plan.n_splits


def dense_layer(call: Call):
    """sum = x + y + o attention(q a, k a, v a), out = down (silu(gate b) * (up b)), where a = quantize(norm of x + y), b =
    quantize(norm of sum); K and V go to their caches. As of `flash_attn_ext_act`, `rope_set_rows`, and

    x, y, sum, out: f32 [1, k], att_norm, ffn_norm: f32 [k], all on 16 bytes; q, k, v, o, gate, up, down: quantized."""
    shape = call.plan
    caches = addresses(call.cache_k, call.cache_v)
    scale = score_scale(call.part("flash_attn_ext", scale=call.scale, softcap=0.0))
    args = (*addresses(call.x, call.y, call.att_norm, call.ffn_norm), *addresses(*matrices(call)),
            *addresses(call.pos, call.table), *caches, *caches, *addresses(call.dst, call.seq, call.present),
            call.sum.data, call.out.data, call.present.shape[1], call.eps, scale)
    return call.device.launch(dense_layer_kernel(shape), shape.n_blocks, 32 * shape.n_warps, args, 4 * layout(shape).n_words)
