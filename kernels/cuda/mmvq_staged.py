"""Products of float weights with up to 64 tokens where there are few rows, as in a router of experts (docs/numerics.md, section
4; sums as in mmvq).

In `mmvq` a lane has 256 columns to load after the kernel before has ended, one latency of memory after the other, and a tile of
32 rows comes through one multiprocessor. Here a block takes eight rows of a tile, and all their weights are on their way to
shared memory before it waits for the activations of its tokens. Of a warp's 32 lanes eight have the rows of one chunk for one
token.
"""
from dataclasses import dataclass

from numba import cuda, types

from ...quant.formats import CHUNK, Format, format_of
from ...quant.tile import tile_bytes
from ..call import Call
from .launch import F32, Kernel, N, RESERVED, U32, factory
from .mmvq import FLOATS, eight
from .operands import addresses
from .ptx import (add, as_f32, as_u32, copies_wait, copy4, device, f32, i32, i64, lds, lds4, least, quotient, remainder, st,
                  stage, sts, sts4, wait_for_previous)
from .quantize import four_elements
from .weights import staged_values

ROWS, MOST_WARPS = 8, 16  # of a block
TOKENS = 1, 2, 4          # of a block
RESIDENT = 2              # blocks of a multiprocessor at most


@dataclass(frozen=True)
class StagedShape:
    """Launch of mmvq_staged: tokens of a block, blocks over rows and tokens, warps of a block, bytes of its shared memory."""
    n_tokens: int
    grid: tuple[int, int]
    n_warps: int
    n_bytes: int


def stage_bytes(fmt: Format, n_chunks: int, n_tokens: int) -> int:
    """The weights of eight rows, and of each token the activations and the sums of the rows' chunks."""
    return n_chunks * (ROWS * fmt.chunk_bytes + n_tokens * (4 * CHUNK + 4 * ROWS))


def staged_shape(fmt: Format, n_rows: int, n_cols: int, n: int, n_multiprocessors: int, shared_limit: int) -> StagedShape | None:
    """As few tokens of a block as let all blocks be resident, one on a multiprocessor for one token; None where that is none."""
    n_chunks, n_octets = -(-n_cols // CHUNK), -(-n_rows // ROWS)
    for n_tokens in TOKENS:
        grid, n_bytes = (n_octets, -(-n // n_tokens)), stage_bytes(fmt, n_chunks, n_tokens)
        resident = -(-grid[0] * grid[1] // n_multiprocessors)
        if resident <= min(n, RESIDENT) and resident * (n_bytes + RESERVED) <= shared_limit + RESERVED:
            return StagedShape(n_tokens, grid, min(n_tokens * n_chunks, MOST_WARPS), n_bytes)
    return None


@device
def staged_octet(shared, i):
    """Eight floats from word i on."""
    a, b, c, d = lds4(shared, i)
    e, f, g, h = lds4(shared, i + 4)
    return as_f32(a), as_f32(b), as_f32(c), as_f32(d), as_f32(e), as_f32(f), as_f32(g), as_f32(h)


def chunk_adder(name: str):
    """(shared, stage, row, y_at) -> the sum of a chunk of a row, whose weights [piece][row][4] begin at word `stage`, its
    activations at y_at."""
    values = staged_values(name, ROWS)

    @stage
    def sum_of_chunk(shared, stage, row, y_at):
        acc, q = f32(0), i32(0)
        while q < 32:  # the loads of 16 columns are under way together
            v, y = values((shared, stage, row), q), staged_octet(shared, y_at + q * 8)
            w, z = values((shared, stage, row), i32(q + 1)), staged_octet(shared, y_at + q * 8 + 8)
            acc = eight(w, z, eight(v, y, acc))
            q = i32(q + 2)
        return acc
    return sum_of_chunk


@stage
def total_of_row(shared, first, n_chunks):
    """The sums of a row's chunks, from word `first` on by ROWS, added in order from +0."""
    total, at = f32(0), first
    end = i32(first + n_chunks * ROWS)
    while at < end:
        total = add(total, as_f32(lds(shared, at)))
        at = i32(at + ROWS)
    return total


@factory([(fmt.name,) for fmt in FLOATS])
def mmvq_staged_kernel(name):
    fmt = format_of(name)
    sum_of_chunk, tile_words, n_pieces, row_words = chunk_adder(name), tile_bytes(fmt) // 4, fmt.n_pieces, 4 * ROWS
    assert n_pieces % 4 == 0 and n_pieces * 16 == fmt.chunk_bytes, name
    stage_words = n_pieces * row_words  # of a chunk

    def kernel(words, x, out, n_rows, n_cols, n, n_tokens):  # block: rows from 8 blockIdx.x, tokens from n_tokens blockIdx.y
        # Shared memory: weights [chunk][piece][row][4], x [token][chunk][256], sums [token][chunk][row]
        shared = cuda.shared.array(0, types.uint32)
        tid, n_warps, first = i32(cuda.threadIdx.x), i32(cuda.blockDim.x >> 5), i32(cuda.blockIdx.y * n_tokens)
        lane, warp, block = i32(tid & 31), i32(tid >> 5), i32(cuda.blockIdx.x)
        n_chunks = i32((n_cols + 255) >> 8)
        n_items = i32(least(n_tokens, i32(n - first)) * n_chunks)
        x_at = i32(n_chunks * stage_words)
        sums_at = i32(x_at + n_items * 256)
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
        item = warp
        while item < n_items:
            token = quotient(item, n_chunks)
            column, at = i32((item - token * n_chunks) * 256 + lane * 8), i32(x_at + item * 256 + lane * 8)
            a, b, c, d = four_elements(x, i64(first + token) * n_cols, column, n_cols)
            e, f, g, h = four_elements(x, i64(first + token) * n_cols, i32(column + 4), n_cols)
            sts4(shared, at, as_u32(a), as_u32(b), as_u32(c), as_u32(d))
            sts4(shared, at + 4, as_u32(e), as_u32(f), as_u32(g), as_u32(h))
            item = i32(item + n_warps)
        copies_wait()
        cuda.syncthreads()  # weights and activations are there
        item = i32(4 * warp + group)
        while item < n_items:
            acc = sum_of_chunk(shared, i32(remainder(item, n_chunks) * stage_words), row, i32(x_at + item * 256))
            sts(shared, sums_at + item * 8 + row, as_u32(acc))
            item = i32(item + 4 * n_warps)
        cuda.syncthreads()  # the sums are there
        token = i32(tid >> 3)
        item, out_row = i32(token * n_chunks), i32(block * 8 + (tid & 7))
        if item < n_items and out_row < n_rows:
            st(out, i64(first + token) * n_rows + out_row, total_of_row(shared, i32(sums_at + item * 8 + (tid & 7)), n_chunks))
    return Kernel(kernel, (U32, F32, F32, N, N, N, N), MOST_WARPS * 32)


def mmvq_staged(call: Call):
    """out = w x, as of `mul_mat`, w of floats. plan: `StagedShape`."""
    shape, args = call.plan, (*addresses(call.w, call.x, call.out), *call.w.shape, call.x.shape[0], call.plan.n_tokens)
    return call.device.launch(mmvq_staged_kernel(call.w.dtype), shape.grid, 32 * shape.n_warps, args, shape.n_bytes)
