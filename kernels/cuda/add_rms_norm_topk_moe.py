"""The sum before the norm of a token's experts, that norm, and its routing, in one launch: `add_rms_norm_and_act`, the product
with the router as in `mmvq_staged`, and `topk_moe`.

One cluster of blocks. While the block's rows of the router are on their way to shared memory, each block norms the whole token
for itself; what is written of it, each chunk by one block. A warp's eight lanes multiply eight rows with a chunk. The first block
gets all logits, whose bytes its mbarrier counts, and one of its warps routes; it writes the fewest chunks.
"""
from typing import NamedTuple

from numba import cuda, types

from ...quant.formats import CHUNK, format_of
from ...quant.tile import tile_bytes
from ..call import Call
from . import cluster, mbarrier
from .add_rms_norm_mul_mat import MOST_NORMED, normed, row_words, sums
from .launch import F32, HOPPER, I32, Kernel, N, SCALAR_F32, U32, factory, need
from .mmvq_staged import ROWS, chunk_adder, total_of_row
from .operands import addresses
from .ptx import (as_f32, as_u32, copies_wait, copy4, device, f32, i32, i64, ld, ld4, lds, lds4, st4, sts, sts4,
                  wait_for_previous)
from .quantize import N_THREADS, chunk_quantizer
from .rms_norm import PARTIALS, halve128, reciprocal, sum_of_partial, within
from .topk_moe import check_routing, route_of
from .warp_row import MOST_COLUMNS, n_values

BLOCKS, WARPS = (8, 16), 16  # of a cluster, of a block, at most
STATIC = 1024           # bytes of shared memory that a block has besides


class Shape(NamedTuple):
    """Launch: blocks of the cluster, eights of the router's rows of a block, warps of a block, bytes of its shared memory."""
    n_blocks: int
    n_octets: int
    n_warps: int
    n_bytes: int


def shape_of(type_: str, n_expert: int, n_cols: int, limit: int, most_warps: int = WARPS) -> Shape:
    """A warp for each chunk, an even number of them. Of the numbers of blocks the first for which `limit` bytes of a block's
    shared memory are enough: few find free multiprocessors sooner. Two at least, since a single one would be no cluster."""
    n_octets, n_chunks = -(-n_expert // ROWS), -(-n_cols // CHUNK)
    n_warps, item_words = min(most_warps, n_chunks + 1 & -2), n_chunks * ROWS * (format_of(type_).chunk_bytes // 4 + 1)

    def shape(most_blocks):
        n_blocks = min(most_blocks, max(2, 1 << (n_octets - 1).bit_length()))
        each = -(-n_octets // n_blocks)
        n_words = each * item_words + row_words(n_cols) + 32 * n_values(n_expert) + mbarrier.WORDS
        return Shape(n_blocks, each, n_warps, 4 * n_words)
    shapes = [shape(most_blocks) for most_blocks in BLOCKS]
    return next((each for each in shapes if each.n_bytes <= limit), shapes[-1])


@device
def place(octet, chunk, n_chunks):
    """(eight of rows, chunk) of a chunk that is counted from the first one of an eight."""
    while chunk >= n_chunks:
        octet, chunk = i32(octet + 1), i32(chunk - n_chunks)
    return octet, chunk


@factory([("softmax", "F32", 4, None, 8), ("sigmoid", "F16", 8, "choice", 16), ("softmax_of_chosen", "BF16", 1, "logits", 4)])
def add_rms_norm_topk_moe_kernel(gating, name, n, bias_of, n_blocks):  # noqa: PLR0915 (a kernel: its steps in order)
    """n: values of a lane of the warp that routes; bias_of: None where there is no bias."""
    fmt, has_bias, other_blocks = format_of(name), bias_of is not None, n_blocks - 1
    sum_of_chunk, tile_words, n_pieces, piece_words = chunk_adder(name), tile_bytes(fmt) // 4, fmt.n_pieces, 4 * ROWS
    stage_words = n_pieces * piece_words  # of an item: a chunk of eight rows
    assert n_pieces % 4 == 0 and n_pieces * 16 == fmt.chunk_bytes, name
    route, quantize_chunk, rank_of = route_of(gating, n, bias_of, False), chunk_quantizer(32 * WARPS // N_THREADS), cluster.rank

    @device
    def keep(shared, row, total, column, last, own, a, b, c, d):
        """Four columns, zeros past the end, and in `total` those of the block's own chunks."""
        if column > last:
            a, b, c, d = f32(0), f32(0), f32(0), f32(0)
        elif (column >> 8) & other_blocks == own:
            st4(total, column, a, b, c, d)
        sts4(shared, row + column, as_u32(a), as_u32(b), as_u32(c), as_u32(d))

    def kernel(x, y, w, words, bias, act, out, total, weights, ids, n_cols, n_octets, n_expert, k,  # noqa: PLR0915 (its steps)
               norm, eps, factor):
        # Shared memory: weights [item][piece][row][4], the row in chunks, partials, sums [item][row], logits, an mbarrier
        shared = cuda.shared.array(0, types.uint32)
        probs, by = cuda.local.array(n, f32), cuda.local.array(n, f32)
        tid, rank, n_warps = i32(cuda.threadIdx.x), rank_of(), i32(cuda.blockDim.x >> 5)
        lane, warp, step = i32(tid & 31), i32(tid >> 5), i32(256 * n_warps)
        n_chunks, last = i32((n_cols + 255) >> 8), i32(n_cols - 4)
        own = i32(other_blocks - rank)  # chunks that this block writes: from there by n_blocks
        n_items, row = i32(n_octets * n_chunks), i32(n_octets * n_chunks * stage_words)
        partials = i32(row + (((n_chunks + 1) & -2) << 8))
        sums_at = i32(partials + PARTIALS)
        logits = i32(sums_at + ROWS * n_items)
        arrivals = i32(logits + 32 * n)
        if tid == 0:
            mbarrier.begin(shared, arrivals, i32(1))
            mbarrier.expect(shared, arrivals, i32(4 * n_expert))
        cluster.arrive()

        # 1. What no kernel writes: the router, weights of the norm, the bias
        group, r, first_octet = i32(lane >> 3), i32(lane & 7), i32(rank * n_octets)
        octet, chunk = place(i32(0), warp, n_chunks)
        while octet < n_octets:
            stage, of_all = i32((octet * n_chunks + chunk) * stage_words), i32(first_octet + octet)
            if ROWS * of_all < n_expert:
                tile = (i64(of_all >> 2) * n_chunks + chunk) * tile_words + (ROWS * (of_all & 3) + r) * 4
                piece = group
                while piece < n_pieces:
                    copy4(shared, stage + piece * piece_words + r * 4, words, tile + piece * 128)
                    piece = i32(piece + 4)
            octet, chunk = place(octet, i32(chunk + n_warps), n_chunks)
        column = i32(256 * warp + 4 * lane)
        wa, wb, wc, wd = ld4(w, min(column, last))
        we, wf, wg, wh = ld4(w, min(column + 128, last))
        for i in range(n):
            by[i] = ld(bias, within(i32(lane + 32 * i), n_expert)) if has_bias else f32(0)
        wait_for_previous()

        # 2. The sum, zeros up to the partials, and r
        while row + column < partials:
            a, b, c, d = sums(x, y, column, last)
            e, f, g, h = sums(x, y, column + 128, last)
            keep(shared, row, total, column, last, own, a, b, c, d)
            keep(shared, row, total, column + 128, last, own, e, f, g, h)
            column = i32(column + step)
        cuda.syncthreads()  # the row is there
        j = tid
        while j < PARTIALS:
            sts(shared, partials + j, as_u32(sum_of_partial(shared, i32(row + j), partials)))
            j = i32(j + 32 * n_warps)
        cuda.syncthreads()  # the partials are there
        at = i32(partials + lane)
        squares = halve128(as_f32(lds(shared, at)), as_f32(lds(shared, at + 32)), as_f32(lds(shared, at + 64)),
                           as_f32(lds(shared, at + 96)), lane)
        scale, column = reciprocal(squares, n_cols, eps), i32(256 * warp + 4 * lane)

        # 3. The norm, in the place of the sum
        while row + column < partials:
            a, b, c, d = normed(shared, row, column, last, scale, wa, wb, wc, wd)
            e, f, g, h = normed(shared, row, column + 128, last, scale, we, wf, wg, wh)
            keep(shared, row, out, column, last, own, a, b, c, d)
            keep(shared, row, out, column + 128, last, own, e, f, g, h)
            column = i32(column + step)
            if row + column < partials:
                wa, wb, wc, wd = ld4(w, min(column, last))
                we, wf, wg, wh = ld4(w, min(column + 128, last))
        copies_wait()
        cuda.syncthreads()  # the norm and the router's rows are there

        # 4. Logits, to the first block
        octet, chunk = place(i32(0), i32(4 * warp + group), n_chunks)
        while octet < n_octets:
            item, z_at = i32(octet * n_chunks + chunk), i32(row + (chunk << 8))
            if ROWS * (first_octet + octet) < n_expert:
                acc = sum_of_chunk(shared, i32(item * stage_words), r, z_at)
                sts(shared, sums_at + item * ROWS + r, as_u32(acc))
            octet, chunk = place(octet, i32(chunk + 4 * n_warps), n_chunks)
        cluster.wait()  # all blocks have begun
        cuda.syncthreads()  # the sums are there
        expert = i32(first_octet * ROWS + tid)
        if tid < ROWS * n_octets and expert < n_expert:
            logit = total_of_row(shared, i32(sums_at + i32((tid >> 3) * n_chunks) * ROWS + (tid & 7)), n_chunks)
            cluster.send(shared, logits + expert, i32(0), as_u32(logit), arrivals)

        # 5. Activations of the block's own chunks, while logits are on their way
        first, t = i32(0), i32(tid & (N_THREADS - 1))
        while first < n_chunks:
            chunk = i32(first + own + n_blocks * (tid // N_THREADS))
            a, b, c, d = lds4(shared, row + (min(chunk, n_chunks - 1) << 8) + 4 * t)
            quantize_chunk(as_f32(a), as_f32(b), as_f32(c), as_f32(d), act, 1, 0, chunk, n_chunks)
            first = i32(first + n_blocks * (n_warps >> 1))
            if first < n_chunks:
                cuda.syncthreads()  # the maxima of this round have been read

        # 6. Routing
        if rank == 0 and warp == 0:
            mbarrier.wait(shared, arrivals, i32(0))
            for i in range(n):
                probs[i] = as_f32(lds(shared, logits + within(i32(lane + 32 * i), n_expert)))
            route(probs, by, weights, ids, 0, lane, n_expert, k, i32(0), i32(0), norm, factor)
    parameters = (F32, F32, F32, U32, F32, U32, F32, F32, F32, I32, N, N, N, N, N, SCALAR_F32, SCALAR_F32)
    return Kernel(kernel, parameters, 32 * WARPS, arch=HOPPER, n_cluster=n_blocks)


def check(call: Call) -> None:
    """One row, of which every block has room for itself and loads four columns at a time."""
    n_cols, (n_expert, _) = call.x.n_cols, call.router.shape
    need(call.device.cc == HOPPER[:2], "compute capability", "{}.{}".format(*call.device.cc), "{}.{}".format(*HOPPER[:2]))
    need(call.x.n_rows == 1, "n", call.x.n_rows, "1")
    need(1 <= n_cols <= MOST_NORMED and n_cols % 4 == 0, "n_cols", n_cols, f"a multiple of 4 up to {MOST_NORMED}")
    need(1 <= n_expert <= MOST_COLUMNS, "n_expert", n_expert, f"1..{MOST_COLUMNS}")
    check_routing(call, n_expert)


def plan(call: Call) -> Shape:
    most = call.device.shared_limit - STATIC
    shape = shape_of(call.router.dtype, *call.router.shape, most)
    need(shape.n_bytes <= most, "bytes of shared memory", shape.n_bytes, f"up to {most}")
    return shape


def add_rms_norm_topk_moe(call: Call):
    """sum = x + y, out = sum / sqrt(mean(sum^2) + eps) * w, act = quantize(out); weights, ids = those of k experts by the logits
    router out, as of `topk_moe`.

    x, y, sum, out: f32 [1, k], w: f32 [k], act: act [1, k], router: float weights [X, k], all on 16 bytes; the others as of
    `topk_moe`."""
    shape, (n_expert, n_cols) = call.plan, call.router.shape
    kernel = add_rms_norm_topk_moe_kernel(call.gating, call.router.dtype, n_values(n_expert),
                                          call.bias_of if call.bias else None, shape.n_blocks)
    args = (*addresses(call.x, call.y, call.w, call.router, call.bias or call.out, call.act, call.out, call.sum, call.weights,
                       call.ids), n_cols, shape.n_octets, n_expert, call.k, int(call.norm), call.eps, call.factor)
    return call.device.launch(kernel, shape.n_blocks, 32 * shape.n_warps, args, shape.n_bytes)
