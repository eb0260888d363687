"""Matrix products of float weights (docs/numerics.md, section 4): out[token, row] = sum over columns of weight[row, column] *
x[token, column].

A block takes a tile of 32 rows, and a warp whole chunks of 256 columns. Of 1, 2 or 4 tokens a lane has a row; of 16 it has four
rows of four tokens, so that all that it loads is multiplied four times. Chunks go in rounds, some to each warp: each round the
warps leave their chunks' sums in shared memory, and behind a barrier the owner of a (row, token) adds them to its total in the
order of the chunks. So the order of a sum depends neither on the number of warps nor on that of tokens.
"""
from dataclasses import dataclass

from numba import cuda

from ...quant.formats import CHUNK, FORMATS, Format, format_of
from ...quant.tile import ROWS, tile_bytes
from ..call import Call
from .launch import F32, I32, Kernel, N, U32, factory, need
from .operands import addresses, pairs_of, row_of_pair
from .ptx import add, device, f32, fma, i32, i64, ld, ld4, st, wait_for_previous
from .quantize import element
from .weights import float_values

FEW, MANY = (1, 2, 4), 16  # tokens of a block
WARPS_RESIDENT = 16  # warps of a multiprocessor that keep its memory busy (docs/kernels-log.md)
FEWEST_WARPS = 4     # of a block
FLOATS = [fmt for fmt in FORMATS.values() if fmt.planes and not fmt.is_quantized]


def max_warps(fmt: Format, n_tokens: int) -> int:
    """Warps of a block: what registers allow, 128 a thread for 14 warps, 255 for 8."""
    return 8 if n_tokens > 1 or fmt.name == "F32" else 14


def rows_of_lane(n_tokens: int) -> int:
    return 4 if n_tokens == MANY else 1


@device
def eight(v, y, acc):
    """acc and the products of eight columns."""
    acc = fma(v[3], y[3], fma(v[2], y[2], fma(v[1], y[1], fma(v[0], y[0], acc))))
    return fma(v[7], y[7], fma(v[6], y[6], fma(v[5], y[5], fma(v[4], y[4], acc))))


@device
def aligned_octet(x, row, column, n_cols):
    """Columns column .. column + 7 of the row of n_cols that begins at x[row]."""
    a, b, c, d = ld4(x, row + column)
    e, f, g, h = ld4(x, row + column + 4)
    return a, b, c, d, e, f, g, h


@device
def padded_octet(x, row, column, n_cols):
    """The same of any row, +0 past its end. (Weights there are zeros too: zeros added to a sum are not seen.)"""
    return (element(x, row, column, n_cols), element(x, row, column + 1, n_cols),
            element(x, row, column + 2, n_cols), element(x, row, column + 3, n_cols),
            element(x, row, column + 4, n_cols), element(x, row, column + 5, n_cols),
            element(x, row, column + 6, n_cols), element(x, row, column + 7, n_cols))


def sums_of_four_rows(fmt: Format):
    """`chunk_sums` of the rows lane % 8 + 8 i and the tokens first + lane / 8 + 4 j: acc[4 i + j]."""
    values = float_values(fmt.name)

    def octet_by(octet):
        @device
        def add_octet(words, tile, row, x, acc, chunk, q, token, n, n_cols):
            v0, v1 = values((words, tile, row), q), values((words, tile, i32(row + 8)), q)
            v2, v3 = values((words, tile, i32(row + 16)), q), values((words, tile, i32(row + 24)), q)
            for j in range(4):
                y = octet(x, i64(min(token + 4 * j, n - 1)) * n_cols, i32(chunk * 256 + 8 * q), n_cols)
                acc[j], acc[4 + j], acc[8 + j], acc[12 + j] = (eight(v0, y, acc[j]), eight(v1, y, acc[4 + j]),
                                                               eight(v2, y, acc[8 + j]), eight(v3, y, acc[12 + j]))
        return add_octet
    add_aligned, add_padded = octet_by(aligned_octet), octet_by(padded_octet)

    @device
    def dot(t, x, acc, chunk, first, n, n_cols):
        words, tile, lane = t
        row, token = i32(lane & 7), i32(first + (lane >> 3))
        for i in range(16):
            acc[i] = f32(0)
        width, q = i32(min(n_cols - chunk * 256, 256)), i32(0)
        if width == 256 and n_cols & 3 == 0:
            while q < 32:  # the loads of 16 columns are under way together
                add_aligned(words, tile, row, x, acc, chunk, q, token, n, n_cols)
                add_aligned(words, tile, row, x, acc, chunk, i32(q + 1), token, n, n_cols)
                q = i32(q + 2)
        else:
            while 8 * q < width:
                add_padded(words, tile, row, x, acc, chunk, q, token, n, n_cols)
                q = i32(q + 1)
    return dot


def sums_of_row(fmt: Format, n_tokens: int):
    """`chunk_sums` of row `lane`: acc[token]."""
    values, ahead = float_values(fmt.name), fmt.name != "F32" or n_tokens == 1  # more of F32 registers do not hold

    @device
    def thirty_two(v0, v1, v2, v3, x, acc, column, first, n, n_cols):
        for c in range(n_tokens):
            row = i64(min(first + c, n - 1)) * n_cols
            acc[c] = eight(v1, aligned_octet(x, row, column + 8, n_cols),
                           eight(v0, aligned_octet(x, row, column, n_cols), acc[c]))
            acc[c] = eight(v3, aligned_octet(x, row, column + 24, n_cols),
                           eight(v2, aligned_octet(x, row, column + 16, n_cols), acc[c]))

    @device
    def dot(t, x, acc, chunk, first, n, n_cols):
        for c in range(n_tokens):
            acc[c] = f32(0)
        width = min(n_cols - chunk * 256, 256)
        if width == 256 and n_cols & 3 == 0:
            q = 0
            if ahead:
                v0, v1, v2, v3 = values(t, 0), values(t, 1), values(t, 2), values(t, 3)
                while q < 28:  # 32 columns at a time, while the loads of the next 32 are under way
                    w0, w1, w2, w3 = values(t, q + 4), values(t, q + 5), values(t, q + 6), values(t, q + 7)
                    thirty_two(v0, v1, v2, v3, x, acc, chunk * 256 + 8 * q, first, n, n_cols)
                    v0, v1, v2, v3 = w0, w1, w2, w3
                    q += 4
                thirty_two(v0, v1, v2, v3, x, acc, chunk * 256 + 224, first, n, n_cols)
            else:
                while q < 32:
                    thirty_two(values(t, q), values(t, q + 1), values(t, q + 2), values(t, q + 3), x, acc, chunk * 256 + 8 * q,
                               first, n, n_cols)
                    q += 4
        else:
            q = 0
            while 8 * q < width:
                v = values(t, q)
                for c in range(n_tokens):
                    acc[c] = eight(v, padded_octet(x, i64(min(first + c, n - 1)) * n_cols, chunk * 256 + 8 * q, n_cols), acc[c])
                q += 1
    return dot


def chunk_sums(fmt: Format, n_tokens: int):
    """(t, x, acc, chunk, first, n, n_cols): acc of a lane's rows in a chunk for its tokens, of those from `first`. t = (words,
    tile, lane); x: f32 [n, n_cols]."""
    return sums_of_four_rows(fmt) if n_tokens == MANY else sums_of_row(fmt, n_tokens)


def products(fmt: Format, n_tokens: int, waits: bool = True):
    """The body of a kernel, for the rows of a tile: (words, x, out, row_tile, tiles, n_rows, n_cols, first, n, first_out, n_out):
    tokens from row `first` of x, of n, to row first_out of out, of n_out; tiles: those of the matrices before. waits: for the
    kernel before, which the kernel then need not."""
    dot, tile_words = chunk_sums(fmt, n_tokens), tile_bytes(fmt) // 4
    n_owned, per_round = n_tokens * ROWS, chunks_per_round(n_tokens)
    n_parts, n_rows_each = 2 * per_round * n_owned, rows_of_lane(n_tokens)
    n_lanes, n_tokens_each = 32 // n_rows_each, n_tokens // n_rows_each  # lanes side by side in a row

    @device
    def run(words, x, out, row_tile, tiles, n_rows, n_cols, first, n, first_out, n_out):
        parts = cuda.shared.array(n_parts, f32)    # [round % 2][chunk][token][row]
        totals = cuda.shared.array(n_owned, f32)   # [token][row]
        acc = cuda.local.array(n_tokens, f32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        lane, warp, n_warps = tid & 31, tid >> 5, n_threads >> 5
        n_chunks = (n_cols + 255) >> 8
        p = tid  # while loops: a range with a step divides
        while p < n_owned:  # the thread that sets a total is the only one to touch it: no barrier
            totals[p] = f32(0)
            p += n_threads
        if waits:
            wait_for_previous()  # for the activations
        before, side = 0, 0  # chunks of earlier rounds
        while before < n_chunks:
            slot = warp
            while slot < per_round and before + slot < n_chunks:
                chunk = before + slot
                tile = (i64(tiles + row_tile) * n_chunks + chunk) * tile_words
                dot((words, tile, lane), x, acc, chunk, first, n, n_cols)
                for i in range(n_rows_each):
                    for j in range(n_tokens_each):
                        token, row = lane // n_lanes + n_rows_each * j, (lane & (n_lanes - 1)) + n_lanes * i
                        parts[((side + slot) * n_tokens + token) * 32 + row] = acc[i * n_tokens_each + j]
                slot += n_warps
            # One a round: the next round writes the other side, and the one after it comes behind another barrier
            cuda.syncthreads()
            p = tid
            while p < n_owned:
                total, w = totals[p], 0
                while w < per_round and before + w < n_chunks:
                    total = add(total, parts[(side + w) * n_owned + p])
                    w += 1
                totals[p] = total
                p += n_threads
            before, side = before + per_round, per_round - side
        p = tid
        while p < n_owned:
            row, token = row_tile * 32 + (p & 31), first_out + (p >> 5)
            if row < n_rows and token < n_out:
                st(out, i64(token) * n_rows + row, totals[p])
            p += n_threads
    return run


@factory([(fmt.name, n) for fmt in FLOATS for n in (*FEW, MANY)])
def mmvq_kernel(name, n_tokens):
    fmt = format_of(name)
    run = products(fmt, n_tokens)

    def kernel(words, x, out, n_rows, n_cols, n):  # block: rows of tile blockIdx.x, tokens from blockIdx.y * n_tokens
        first = cuda.blockIdx.y * n_tokens
        run(words, x, out, cuda.blockIdx.x, 0, n_rows, n_cols, first, n, first, n)
    return Kernel(kernel, (U32, F32, F32, N, N, N), max_warps(fmt, n_tokens) * 32)


@factory([(fmt.name, heads) for fmt in FLOATS for heads in (False, True)])
def mmvq_id_kernel(name, heads):
    fmt = format_of(name)
    run = products(fmt, 1, False)  # where weights lie depends on ids

    def kernel(words, x, ids, out, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows):
        # block: pair blockIdx.x, rows of tile blockIdx.y
        pair, matrix = i32(cuda.blockIdx.x), i32(cuda.blockIdx.x % n_matrices)
        source = pair
        if not heads:
            matrix, source = ld(ids, pair), row_of_pair(pair, n_used, x_rows)
        if 0 <= matrix < n_matrices:
            run(words, x, out, i32(cuda.blockIdx.y), i32(matrix * ((n_rows + 31) >> 5)), n_rows, n_cols, source, n, pair, n_pairs)
    return Kernel(kernel, (U32, F32, I32, F32, *[N] * 7), max_warps(fmt, 1) * 32)


def chunks_per_round(n_tokens: int) -> int:
    """64 chunks of one token, the whole row of most models: no warp waits for another before the end. 16 KiB of shared memory,
    32 for many tokens."""
    return (128 if n_tokens == MANY else 64) // n_tokens


@dataclass(frozen=True)
class MMVQShape:
    """Launch of mmvq: tokens of a block, warps of a block, blocks over row tiles and tokens."""
    n_tokens: int
    n_warps: int
    grid: tuple[int, int]


def mmvq_shape(type_, n_rows: int, n_cols: int, n: int, n_multiprocessors: int) -> MMVQShape:
    """As many tokens as a block can take, of more than eight at once. Blocks of few warps where there are many blocks; every warp
    of a block takes as many chunks."""
    n_tokens = MANY if n > 2 * FEW[-1] else next((c for c in FEW if c >= n), FEW[-1])
    n_chunks, grid = -(-n_cols // CHUNK), (-(-n_rows // ROWS), -(-n // n_tokens))
    busy = max(FEWEST_WARPS, WARPS_RESIDENT * n_multiprocessors // (grid[0] * grid[1]))
    n_warps = min(n_chunks, max_warps(format_of(type_), n_tokens), busy)
    return MMVQShape(n_tokens, -(-n_chunks // -(-n_chunks // n_warps)), grid)


def mmvq(call: Call):
    """out = w x, as of `mul_mat`, w of floats. plan: `MMVQShape`."""
    shape, args = call.plan, (*addresses(call.w, call.x, call.out), *call.w.shape, call.x.shape[0])
    return call.device.launch(mmvq_kernel(call.w.dtype, shape.n_tokens), shape.grid, 32 * shape.n_warps, args)


def mmvq_id(call: Call):
    """The products of `mul_mat_id` or `mul_mat_heads`, w of floats: a block for a pair and a row tile. Rows of ids that are not
    experts are left as they are."""
    fmt, sizes, heads = format_of(call.w.dtype, call.op), pairs_of(call), call.op == "mul_mat_heads"
    n_tiles, n_warps = -(-sizes.n_rows // ROWS), min(-(-sizes.n_cols // CHUNK), max_warps(fmt, 1))
    need(n_tiles < 1 << 16, "n_rows", sizes.n_rows, f"up to {ROWS * 65535} of float weights")
    args = *addresses(call.w, call.x, call.out if heads else call.ids, call.out), *sizes
    return call.device.launch(mmvq_id_kernel(fmt.name, heads), (sizes.n_pairs, n_tiles), 32 * n_warps, args)
