"""MMQ: products of quantized weights with many tokens on int8 tensor cores (docs/numerics.md, section 3).

A block takes `row_tiles` tiles of 32 rows and `groups` groups of `quads` quads of tokens, a warp for each tile and group (`tile_product`). It goes through
the chunks of 256 columns: while one lies in a slot of shared memory and is multiplied, the weight tiles and activations of the next one are on
their way to the other. One barrier a chunk; a warp's totals stay in registers.
"""
from dataclasses import astuple, dataclass
from functools import lru_cache

from numba import cuda, types

from ...quant.formats import CHUNK, FORMATS, Format, format_of
from ...quant.tile import ROWS, tile_bytes
from .cooperative import cooperative
from .launch import F32, Kernel, N, U32, check, factory
from .ptx import afresh, as_f32, as_u32, copies4, copies_wait, copy1, copy4, device, f32, fma, i32, i64, lds, sts
from .quantize import plane_words
from .tile_product import QUAD, QUAD_WORDS, Form, Slot, factors, form, gate_and_store, slot, store, swizzle, takes_limbs, table_words, tile_product


@dataclass(frozen=True)
class Block:
    """A block's row tiles, groups of tokens, and quads of a group: 32 row_tiles rows x 4 groups quads tokens, a warp for each tile and group."""
    row_tiles: int
    groups: int
    quads: int

    @property
    def n_threads(self) -> int:
        return 32 * self.row_tiles * self.groups

    @property
    def rows(self) -> int:
        return ROWS * self.row_tiles

    @property
    def tokens(self) -> int:
        return QUAD * self.groups * self.quads


BLOCKS = Block(4, 2, 16), Block(4, 2, 8), Block(2, 2, 8), Block(2, 1, 8), Block(1, 1, 8)


def most_quads(fmt: Format) -> int:
    """Quads of a warp at most: a sum of sixteen takes two registers where a float scale follows it, more where integers wait for the end of a chunk."""
    return 16 if form(fmt) == Form(32, False, False, False) and not fmt.has_min else 8


def chunk_slot(fmt: Format, block: Block) -> Slot:
    return slot(fmt, block.row_tiles, block.groups * block.quads, takes_limbs(fmt, block.quads))


def scratch_words(fmt: Format, block: Block) -> int:
    return factors(fmt, block.quads).n_words


def shared_bytes(names: tuple[str, ...], block: Block) -> int:
    """Codebooks, the factors of each warp, two slots: of one matrix after the other."""
    fmts = [format_of(name) for name in names]
    n_warps = block.n_threads // 32
    return 4 * max(table_words(fmt.name) + n_warps * scratch_words(fmt, block) + 2 * chunk_slot(fmt, block).n_words for fmt in fmts)


@lru_cache(None)
def block_shape(names: tuple[str, ...], shared_limit: int) -> Block:
    """The largest block that registers and shared memory hold. names: formats of the matrices."""
    quads = min(most_quads(format_of(name)) for name in names)
    return next(block for block in BLOCKS if block.quads <= quads and shared_bytes(names, block) <= shared_limit)


def copier(fmt: Format, block: Block):
    """(tid, shared, to, words, act, chunk, n_rows, n_chunks, n): the block starts the copies of a chunk; each warp those of a part of its tile and of
    some tokens. Rows and tokens beyond the last repeat it."""
    row_tiles, groups, quads = astuple(block)
    tokens, n_warps, n_threads = block.tokens, row_tiles * groups, block.n_threads
    at, limbs_too, n_pieces, tile_words = chunk_slot(fmt, block), takes_limbs(fmt, block.quads), tile_bytes(fmt) // 16, tile_bytes(fmt) // 4
    act_at, d_at, limbs_at = at.act, at.d, at.limbs
    wholes, rest = n_pieces // 32, n_pieces % 32
    half = -(-wholes // groups)
    first_copies, other_copies, quads_of_warp = copies4(half), copies4(wholes - half), groups * quads // n_warps
    assert groups in (1, 2) and groups * quads % n_warps == 0, block

    @device
    def copy(tid, shared, to, words, act, chunk, n_rows, n_chunks, n):
        tid, n_rows, n_chunks, n = afresh(tid), afresh(n_rows), afresh(n_chunks), afresh(n)  # registers are for sums
        lane, warp = i32(tid & 31), i32(tid >> 5)
        tile, group = i32(warp % row_tiles), i32(warp // row_tiles)
        source = (i64(min(cuda.blockIdx.x * row_tiles + tile, (n_rows - 1) >> 5)) * n_chunks + chunk) * tile_words + lane * 4
        place = to + tile * tile_words + lane * 4
        if group == 0:
            first_copies(shared, place, words, source)
        elif wholes > half:
            other_copies(shared, place + half * 128, words, source + half * 128)
        if rest:
            if group == groups - 1 and lane < rest:
                copy4(shared, place + wholes * 128, words, source + wholes * 128)
        lo, scales, _, limbs = plane_words(n, n_chunks)
        first, last, row_words = i32(cuda.blockIdx.y * tokens), i32(n - 1), i32(n_chunks * 64)
        limb, piece = lane >> 4, lane & 15
        plane = (lo if limb else i64(0)) + chunk * 64 + piece * 4
        for c in range(4):
            r = 2 * c + limb
            place, token = i32(to + act_at + warp * QUAD_WORDS + r * 64 + ((piece ^ swizzle(r)) << 2)), i32(first + 4 * warp + c)
            for i in range(quads_of_warp):
                copy4(shared, place + i * n_warps * QUAD_WORDS, act, plane + i64(i32(min(i32(token + 4 * i * n_warps), last))) * i64(row_words))
        p = tid
        while p < tokens:
            copy1(shared, to + d_at + p, act, scales + i64(min(first + p, n - 1)) * n_chunks + chunk)
            p = i32(p + n_threads)
        if limbs_too:
            p = tid
            while p < 3 * tokens:
                token = p // 3
                copy4(shared, to + limbs_at + p * 4, act, limbs + (i64(min(first + token, n - 1)) * n_chunks + chunk) * 12 + (p - 3 * token) * 4)
                p = i32(p + n_threads)
    return copy


SMALL_TESTED = [(name, *astuple(block)) for name, block in zip(("Q4_0", "Q5_1", "Q4_K"), BLOCKS[2:])]  # blocks of GPUs with less shared memory


def products(name: str, block: Block, finish):
    """The body of a kernel: the products with one matrix. finish: (out, i, row, total, last, *biases), what becomes of a total, i being its place in `out`."""
    fmt = format_of(name)
    copy, (multiply, n_entries, entry) = copier(fmt, block), tile_product(name, block.quads)
    at, tile_words, own_words = chunk_slot(fmt, block), tile_bytes(fmt) // 4, scratch_words(fmt, block)
    act_at, d_at, limbs_at, slot_words = at.act, at.d, at.limbs, at.n_words
    row_tiles, quads, n_threads, tokens, rows = block.row_tiles, block.quads, block.n_threads, block.tokens, block.rows
    first_warp, n_sums = table_words(name), 4 * block.quads
    first_slot = first_warp + n_threads // 32 * own_words

    @cooperative
    def run(words, bias, other_bias, act, out, last, n_rows, n_cols, n):
        shared = cuda.shared.array(0, types.uint32)
        total, acc = cuda.local.array(n_sums, f32), cuda.local.array(n_sums, f32)
        tid, n_chunks = i32(cuda.threadIdx.x), i32((n_cols + 255) >> 8)
        if n_entries:
            p = tid
            while p < n_entries:
                sts(shared, p, entry(p))
                p = i32(p + n_threads)
        for o in range(n_sums):
            total[o] = f32(0)
        copy(tid, shared, first_slot, words, act, 0, n_rows, n_chunks, n)
        chunk = i32(0)
        while chunk < n_chunks:
            now, other = i32(first_slot + (chunk & 1) * slot_words), i32(first_slot + (~chunk & 1) * slot_words)
            copies_wait()
            cuda.syncthreads()  # the chunk is there; all are done with the one before, whose slot is filled anew
            if chunk + 1 < n_chunks:
                copy(tid, shared, other, words, act, chunk + 1, n_rows, n_chunks, n)
            tid = afresh(tid)
            lane, warp = i32(tid & 31), i32(tid >> 5)
            tile, first_quad = i32(warp % row_tiles), i32(warp // row_tiles * quads)
            multiply(lane, shared, i32(now + tile * tile_words), i32(now + act_at + first_quad * QUAD_WORDS), i32(now + limbs_at + first_quad * 48),
                     i32(first_warp + warp * own_words), acc)
            place = i32(now + d_at + first_quad * 4 + (lane & 3))
            for quad in range(quads):
                d = as_f32(lds(shared, place + 4 * quad))
                for k in range(4):
                    total[4 * quad + k] = fma(acc[4 * quad + k], d, total[4 * quad + k])
            chunk = i32(chunk + 1)
        # The totals go through the slot that is free, so that what becomes of them is a loop, with registers for few.
        lane, warp = i32(tid & 31), i32(tid >> 5)
        own = i32(first_slot + (n_chunks & 1) * slot_words + warp * n_sums * 32 + lane)
        for o in range(n_sums):
            sts(shared, own + 32 * o, as_u32(total[o]))
        first_row = i32(cuda.blockIdx.x * rows + warp % row_tiles * 32 + (lane >> 2))
        first_token = i32(cuda.blockIdx.y * tokens + warp // row_tiles * quads * 4 + (lane & 3))
        o, end = i32(0), afresh(n_sums)
        while o < end:
            row, token = i32(first_row + 8 * (o & 3)), i32(first_token + (o & -4))
            if row < n_rows and token < n:
                finish(out, i64(token) * n_rows + row, row, as_f32(lds(shared, own + 32 * o)), last, bias, other_bias)
            o = i32(o + 1)
    return run


SMALL_TESTED = [(name, *astuple(block)) for name, block in zip(("Q4_0", "Q5_1", "Q4_K"), BLOCKS[2:])]  # blocks that every GPU can hold, first and last


@factory(SMALL_TESTED[:1] + [(fmt.name, 4, 2, most_quads(fmt)) for fmt in FORMATS.values() if fmt.is_quantized] + SMALL_TESTED[1:])
def mmq_kernel(name, *block):
    run, n_threads = products(name, Block(*block), store), Block(*block).n_threads

    def kernel(words, act, out, n_rows, n_cols, n):  # block: rows from blockIdx.x * rows, tokens from blockIdx.y * tokens
        run(words, out, out, act, out, True, n_rows, n_cols, n)
    return Kernel(kernel, (U32, U32, F32, N, N, N), n_threads)


@factory([("relu", "IQ4_XS", "Q5_0", False, 2, 2, 8), ("silu", "Q8_0", "Q8_0", False, 4, 2, 16), ("gelu", "Q6_K", "Q4_K", True, 4, 2, 8),
          ("silu", "Q4_1", "Q4_1", True, 2, 1, 8)])
def mmq_glu_kernel(activation, gate, up, biased, *block):
    block, finish = Block(*block), gate_and_store(activation, biased)
    first, last, n_threads = products(gate, block, finish), products(up, block, finish), block.n_threads

    def kernel(gate_words, up_words, gate_bias, up_bias, act, out, n_rows, n_cols, n):  # blocks as in mmq_kernel
        first(gate_words, gate_bias, up_bias, act, out, False, n_rows, n_cols, n)
        cuda.syncthreads()  # all are done with the last chunk
        last(up_words, gate_bias, up_bias, act, out, True, n_rows, n_cols, n)
    return Kernel(kernel, (U32, U32, F32, F32, U32, F32, N, N, N), n_threads)


def launch_grid(op, names, block, n_rows, n_cols, n):
    for what, found in (("n_rows", n_rows), ("n_cols", n_cols), ("n", n)):
        check(op, found >= 1, what, found, "at least 1")
    for name in names:
        check(op, format_of(name, op).is_quantized, "type", name, "quantized types")
    grid = -(-n_rows // block.rows), -(-n // block.tokens)
    check(op, grid[1] < 65536, "n", n, f"1..{65535 * block.tokens}")
    return grid


def mmq(target, format_name, words, act, out, n_rows, n_cols, n, block=None):
    """words: address of the weight's tiles [n_rows, n_cols], act: of the activation buffer of `quantize`, both on 16 bytes; out: of float32
    [n, n_rows]. block: `block_shape` chooses where it is not given."""
    names = (format_name,)
    block = block or block_shape(names, target.shared_limit)
    grid, args = launch_grid("mmq", names, block, n_rows, n_cols, n), (words, act, out, n_rows, n_cols, n)
    return target.launch(mmq_kernel(format_name, *astuple(block)), grid, block.n_threads, args, shared_bytes(names, block))


def mmq_glu(target, activation, names, gate_words, up_words, act, gate_bias, up_bias, out, n_rows, n_cols, n, block=None):
    """out = activation(gate x + its bias) * (up x + its bias). names: formats of gate and up; biases: addresses of float32 [n_rows], or both None;
    the rest as for `mmq`."""
    block = block or block_shape(names, target.shared_limit)
    grid, biased = launch_grid("mmq_glu", names, block, n_rows, n_cols, n), gate_bias is not None
    args = gate_words, up_words, *((gate_bias, up_bias) if biased else (out, out)), act, out, n_rows, n_cols, n
    return target.launch(mmq_glu_kernel(activation, *names, biased, *astuple(block)), grid, block.n_threads, args, shared_bytes(names, block))
