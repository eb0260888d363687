"""Products of float weights with one token where there are few rows, as in a router of experts (docs/numerics.md, section 4; sums
as in mmvq).

In `mmvq` a lane has 256 columns to load after the kernel before has ended, one latency of memory after the other, and a tile of
32 rows comes through one multiprocessor. Here a block takes eight rows of a tile, and all their weights are on their way to
shared memory before it waits for the activations. Of a warp's 32 lanes eight have the rows of one chunk.
"""
from dataclasses import dataclass

from numba import cuda, types

from ...quant.formats import CHUNK, Format, format_of
from ...quant.tile import tile_bytes
from ..call import Call
from .launch import F32, Kernel, N, U32, factory
from .mmvq import FLOATS, eight
from .operands import addresses
from .ptx import (add, as_f32, as_u32, copies_wait, copy4, device, f32, i32, i64, lds, lds4, st, sts, sts4, syncwarp,
                  wait_for_previous)
from .quantize import four_elements
from .weights import staged_values

ROWS, MOST_WARPS = 8, 16  # of a block


@dataclass(frozen=True)
class StagedShape:
    """Launch of mmvq_staged: blocks, warps of a block, bytes of its shared memory."""
    n_blocks: int
    n_warps: int
    n_bytes: int


def stage_bytes(fmt: Format, n_chunks: int) -> int:
    """The weights of eight rows, the activations, and the sums of the rows' chunks."""
    return n_chunks * (ROWS * fmt.chunk_bytes + 4 * CHUNK + 4 * ROWS)


def staged_shape(fmt: Format, n_rows: int, n_cols: int, n: int, n_multiprocessors: int, shared_limit: int) -> StagedShape | None:
    """For one token, where a multiprocessor has one block at most and its shared memory holds the rows; else None."""
    n_chunks, n_blocks = -(-n_cols // CHUNK), -(-n_rows // ROWS)
    n_bytes = stage_bytes(fmt, n_chunks)
    return (StagedShape(n_blocks, min(n_chunks, MOST_WARPS), n_bytes) if n == 1 and n_blocks <= n_multiprocessors
            and n_bytes <= shared_limit else None)


@device
def staged_octet(shared, i):
    """Eight floats from word i on."""
    a, b, c, d = lds4(shared, i)
    e, f, g, h = lds4(shared, i + 4)
    return as_f32(a), as_f32(b), as_f32(c), as_f32(d), as_f32(e), as_f32(f), as_f32(g), as_f32(h)


@factory([(fmt.name,) for fmt in FLOATS])
def mmvq_staged_kernel(name):
    fmt = format_of(name)
    values, tile_words, n_pieces, row_words = staged_values(name, ROWS), tile_bytes(fmt) // 4, fmt.n_pieces, 4 * ROWS
    assert n_pieces % 4 == 0 and n_pieces * 16 == fmt.chunk_bytes, name
    stage_words = n_pieces * row_words  # of a chunk

    def kernel(words, x, out, n_rows, n_cols):  # block: rows from 8 blockIdx.x
        shared = cuda.shared.array(0, types.uint32)  # weights [chunk][piece][row][4], x [chunk][256], sums [chunk][row]
        tid, n_warps = i32(cuda.threadIdx.x), i32(cuda.blockDim.x >> 5)
        lane, warp, block = i32(tid & 31), i32(tid >> 5), i32(cuda.blockIdx.x)
        n_chunks = i32((n_cols + 255) >> 8)
        x_at = i32(n_chunks * stage_words)
        sums_at = i32(x_at + n_chunks * 256)
        group, row = i32(lane >> 3), i32(lane & 7)
        chunk = warp
        while chunk < n_chunks:
            tile = (i64(block >> 2) * n_chunks + chunk) * tile_words + (8 * (block & 3) + row) * 4
            piece = group
            while piece < n_pieces:
                copy4(shared, chunk * stage_words + piece * row_words + row * 4, words, tile + piece * 128)
                piece = i32(piece + 4)
            chunk = i32(chunk + n_warps)
        wait_for_previous()  # for the activations
        chunk = warp
        while chunk < n_chunks:
            column = i32(chunk * 256 + lane * 8)
            a, b, c, d = four_elements(x, 0, column, n_cols)
            e, f, g, h = four_elements(x, 0, i32(column + 4), n_cols)
            sts4(shared, x_at + column, as_u32(a), as_u32(b), as_u32(c), as_u32(d))
            sts4(shared, x_at + column + 4, as_u32(e), as_u32(f), as_u32(g), as_u32(h))
            chunk = i32(chunk + n_warps)
        copies_wait()
        syncwarp()  # a warp multiplies what it has brought
        chunk = i32(warp + group * n_warps)
        while chunk < n_chunks:
            acc, q = f32(0), i32(0)
            while q < 32:  # the loads of 16 columns are under way together
                v, y = values((shared, chunk * stage_words, row), q), staged_octet(shared, x_at + chunk * 256 + q * 8)
                w, z = (values((shared, chunk * stage_words, row), i32(q + 1)),
                        staged_octet(shared, x_at + chunk * 256 + q * 8 + 8))
                acc = eight(w, z, eight(v, y, acc))
                q = i32(q + 2)
            sts(shared, sums_at + chunk * 8 + row, as_u32(acc))
            chunk = i32(chunk + 4 * n_warps)
        cuda.syncthreads()  # the sums are there
        out_row = i32(block * 8 + tid)
        if tid < 8 and out_row < n_rows:
            total, chunk = f32(0), i32(0)
            while chunk < n_chunks:
                total = add(total, as_f32(lds(shared, sums_at + chunk * 8 + tid)))
                chunk = i32(chunk + 1)
            st(out, out_row, total)
    return Kernel(kernel, (U32, F32, F32, N, N), MOST_WARPS * 32)


def mmvq_staged(call: Call):
    """out = w x, as of `mul_mat`, w of floats and x of one token. plan: `StagedShape`."""
    shape, args = call.plan, (*addresses(call.w, call.x, call.out), *call.w.shape)
    return call.device.launch(mmvq_staged_kernel(call.w.dtype), shape.n_blocks, 32 * shape.n_warps, args, shape.n_bytes)
