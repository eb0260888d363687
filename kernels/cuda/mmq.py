"""MMQ: products of quantized weights with many tokens on int8 tensor cores (docs/numerics.md, section 3).

A block takes `row_tiles` tiles of 32 rows and `groups` groups of `quads` quads of tokens, a warp for each tile and group (`tile_product`), or on Hopper two
warps for each tile (`group_product`). It goes through the chunks of 256 columns: while one lies in a slot of shared memory and is multiplied, the
weight tiles and activations of the next one are on their way to the other. One barrier a chunk; a warp's totals stay in registers.
"""
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import NamedTuple

from numba import cuda, types

from ...quant.formats import CHUNK, FORMATS, Format, format_of
from ...quant.tile import ROWS, tile_bytes
from . import group_product, wgmma
from .cooperative import cooperative
from .launch import F32, HOPPER, Kernel, N, U32, check, factory
from .ptx import afresh, as_f32, as_u32, copies4, copies_commit, copies_wait_but, copy1, copy4, device, f32, fma, i32, i64, lds, sts
from .quantize import plane_words
from .tile_product import QUAD, QUAD_WORDS, Form, Slot, factors, form, gate_and_store, is_late, slot, store, swizzle, table_words, tile_product


@dataclass(frozen=True)
class Block:
    """A block's row tiles, groups of tokens, and quads of a group: 32 row_tiles rows x 4 groups quads tokens, a warp for each tile and group.
    With warpgroups, for compute capability 9.0 alone: two warps for each tile, 16 quads. slots: chunks in shared memory."""
    row_tiles: int
    groups: int
    quads: int
    warpgroups: bool = False
    slots: int = 2

    @property
    def n_warps(self) -> int:
        return self.row_tiles * (2 if self.warpgroups else self.groups)

    @property
    def rows(self) -> int:
        return ROWS * self.row_tiles

    @property
    def tokens(self) -> int:
        return QUAD * self.groups * self.quads

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens}{' warpgroups' if self.warpgroups else ''}"


BLOCKS = Block(4, 2, 16), Block(4, 2, 8), Block(2, 2, 8), Block(2, 1, 8), Block(1, 1, 8)
HOPPER_BLOCKS = tuple(Block(row_tiles, 1, group_product.QUADS, True, 3) for row_tiles in (4, 2))


def most_quads(fmt: Format) -> int:
    """Quads of a warp at most: a sum of sixteen takes two registers where a float scale follows it, more where integers wait for the end of a chunk."""
    return 16 if form(fmt) == Form(32, False, False, False) and not fmt.has_min else 8


def chunk_slot(fmt: Format, block: Block) -> Slot:
    at = slot(fmt, block.row_tiles, block.groups * block.quads, is_late(fmt, block.quads))
    if not block.warpgroups:
        return at
    n_act = at.d - at.act  # first, so that atoms are aligned
    return Slot(0, at.d, at.limbs, -(-at.n_words // wgmma.ATOM_WORDS) * wgmma.ATOM_WORDS, n_act)


def scratch_words(fmt: Format, block: Block) -> int:
    return factors(fmt, block.quads).n_words


def first_slot(fmt: Format, block: Block) -> int:
    """Word of shared memory at which the slots begin, behind codebooks and the factors of each warp."""
    words = table_words(fmt.name) + block.n_warps * scratch_words(fmt, block)
    return -(-words // wgmma.ATOM_WORDS) * wgmma.ATOM_WORDS if block.warpgroups else words


def shared_bytes(names: tuple[str, ...], block: Block) -> int:
    """Of one matrix after the other."""
    fmts = [format_of(name) for name in names]
    return 4 * max(first_slot(fmt, block) + block.slots * chunk_slot(fmt, block).n_words for fmt in fmts)


@lru_cache(None)
def block_shape(names: tuple[str, ...], shared_limit: int) -> Block:
    """The largest block without warpgroups that registers and shared memory hold. names: formats of the matrices."""
    quads = min(most_quads(format_of(name)) for name in names)
    return next(block for block in BLOCKS if block.quads <= quads and shared_bytes(names, block) <= shared_limit)


def warpgroups_pay(fmt: Format) -> bool:
    """Not where a float minimum or a scale for each 16 columns follows the sums: these take as long as the products (docs/kernels-log.md)."""
    return form(fmt).integer or not fmt.has_min and form(fmt).step == 32


@lru_cache(None)
def hopper_blocks(names: tuple[str, ...], shared_limit: int) -> tuple[Block, ...]:
    """The blocks of warpgroups that shared memory holds, if they pay for all the formats."""
    fitting = tuple(block for block in HOPPER_BLOCKS if shared_bytes(names, block) <= shared_limit)
    return fitting if all(warpgroups_pay(format_of(name)) for name in names) else ()


class Sources(NamedTuple):
    """How many words of the activation buffer a thread remembers: where its pieces of quads begin, scales, limbs, and the places of the first in a slot."""
    quads: int
    scales: int
    limbs: int
    places: int = 4


def sources(fmt: Format, block: Block) -> Sources:
    n_threads = 32 * block.n_warps
    return Sources(block.tokens // block.n_warps, -(-block.tokens // n_threads), -(-3 * block.tokens // n_threads) if is_late(fmt, block.quads) else 0)


def copier(fmt: Format, block: Block):
    """(find, copy) of the copies of a chunk, of which each warp starts a part of its tile and some tokens. Rows and tokens beyond the last repeat it.

    find: (tid, n_rows, n_chunks, n, places, offsets, own): what does not change with the chunk. copy: (tid, shared, to, words, act, chunk, n_rows,
    n_chunks, places, offsets, own)."""
    row_tiles, n_warps, tokens, warpgroups = block.row_tiles, block.n_warps, block.tokens, block.warpgroups
    groups, n_quads, n_threads = n_warps // row_tiles, tokens // QUAD, 32 * n_warps
    at, n_pieces, tile_words = chunk_slot(fmt, block), tile_bytes(fmt) // 16, tile_bytes(fmt) // 4
    tiles_at, act_at, d_at, limbs_at = at.tiles, at.act, at.d, at.limbs
    wholes, rest = n_pieces // 32, n_pieces % 32
    half = -(-wholes // groups)
    first_copies, other_copies, quads_of_warp, limbs_of_thread = copies4(half), copies4(wholes - half), n_quads // n_warps, sources(fmt, block).limbs
    scales_of_thread = sources(fmt, block).scales
    quad_words, half_words = (wgmma.ATOM_WORDS, n_quads * wgmma.ATOM_WORDS) if warpgroups else (QUAD_WORDS, 0)
    assert groups in (1, 2) and n_quads % n_warps == 0, block

    @device
    def in_quad(r, piece):
        """Word of a quad at which piece of row r lies."""
        if warpgroups:
            return (piece >> 3) * half_words + r * 32 + (((piece & 7) ^ r) << 2)
        return r * 64 + ((piece ^ swizzle(r)) << 2)

    @device
    def find(tid, n_rows, n_chunks, n, places, offsets, own):
        lane, warp = i32(tid & 31), i32(tid >> 5)
        lo, scales, _, limbs = plane_words(n, n_chunks)
        first, last, row_words = i32(cuda.blockIdx.y * tokens), i32(n - 1), i32(n_chunks * 64)
        limb, piece = lane >> 4, lane & 15
        plane = i32((lo if limb else i64(0)) + piece * 4)
        for c in range(4):
            places[c] = i32(act_at + warp * quad_words + in_quad(2 * c + limb, piece))
            for i in range(quads_of_warp):
                offsets[c * quads_of_warp + i] = i32(plane + i32(min(i32(first + 4 * (warp + i * n_warps) + c), last)) * row_words)
        for i in range(scales_of_thread):
            own[i] = i32(scales + i32(min(i32(first + tid + i * n_threads), last)) * n_chunks)
        for i in range(limbs_of_thread):
            p = i32(tid + i * n_threads)
            token = i32(p // 3)
            own[scales_of_thread + i] = i32(limbs + i32(min(i32(first + token), last)) * n_chunks * 12 + (p - 3 * token) * 4)

    @device
    def copy(tid, shared, to, words, act, chunk, n_rows, n_chunks, places, offsets, own):
        lane, warp = i32(tid & 31), i32(tid >> 5)
        tile, group = i32(warp % row_tiles), i32(warp // row_tiles)
        source = (i64(min(cuda.blockIdx.x * row_tiles + tile, (n_rows - 1) >> 5)) * n_chunks + chunk) * tile_words + lane * 4
        place = to + tiles_at + tile * tile_words + lane * 4
        if group == 0:
            first_copies(shared, place, words, source)
        elif wholes > half:
            other_copies(shared, place + half * 128, words, source + half * 128)
        if rest:
            if group == groups - 1 and lane < rest:
                copy4(shared, place + wholes * 128, words, source + wholes * 128)
        for c in range(4):
            for i in range(quads_of_warp):
                copy4(shared, to + places[c] + i * n_warps * quad_words, act, i64(i32(offsets[c * quads_of_warp + i] + chunk * 64)))
        for i in range(scales_of_thread):
            if tid + i * n_threads < tokens:
                copy1(shared, to + d_at + tid + i * n_threads, act, i64(i32(own[i] + chunk)))
        for i in range(limbs_of_thread):
            if tid + i * n_threads < 3 * tokens:
                copy4(shared, to + limbs_at + (tid + i * n_threads) * 4, act, i64(i32(own[scales_of_thread + i] + chunk * 12)))
    return find, copy


def products(name: str, block: Block, finish):
    """The body of a kernel: the products with one matrix. finish: (out, i, row, total, last, *biases), what becomes of a total, i being its place in `out`."""
    fmt, warpgroups = format_of(name), block.warpgroups
    multiply, n_entries, entry = group_product.group_product(name) if warpgroups else tile_product(name, block.quads)
    (find, start_copies), (n_offsets, n_scales, n_limbs, n_places) = copier(fmt, block), sources(fmt, block)
    n_own = n_scales + n_limbs
    at, tile_words, own_words, first_warp, first = chunk_slot(fmt, block), tile_bytes(fmt) // 4, scratch_words(fmt, block), table_words(name), first_slot(fmt, block)
    act_at, d_at, limbs_at, slot_words, tiles_at = at
    row_tiles, quads, n_threads, tokens, rows = block.row_tiles, block.quads, 32 * block.n_warps, block.tokens, block.rows
    slots, last_slot, wait = block.slots, first + (block.slots - 1) * slot_words, copies_wait_but(block.slots - 2)
    n_rows_lane = 2 if warpgroups else 4  # of a lane, eight rows apart
    log_rows, n_sums, n_products = n_rows_lane.bit_length() - 1, n_rows_lane * quads, wgmma.N_SUMS

    @device
    def part(warp):
        """(tile, half of it, group of tokens) of a warp."""
        return (warp >> 1, warp & 1, i32(0)) if warpgroups else (i32(warp % row_tiles), i32(0), i32(warp // row_tiles))

    @device
    def copy(tid, shared, to, words, act, chunk, n_rows, n_chunks, n, places, offsets, own):
        if not warpgroups:  # there are no registers to remember it
            tid = afresh(tid)
            find(tid, afresh(n_rows), afresh(n_chunks), afresh(n), places, offsets, own)
        start_copies(tid, shared, to, words, act, chunk, n_rows, n_chunks, places, offsets, own)

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
        d, e = cuda.local.array(n_products, i32), cuda.local.array(n_products, i32)
        if warpgroups:
            for o in range(n_products):
                d[o], e[o] = i32(0), i32(0)
        places, offsets, own = cuda.local.array(n_places, i32), cuda.local.array(n_offsets, i32), cuda.local.array(n_own, i32)
        if warpgroups:
            find(tid, n_rows, n_chunks, n, places, offsets, own)
        chunk, copied, now, free = i32(0), i32(0), i32(first), i32(first)
        while copied < slots - 1:  # the copies run ahead by so many chunks
            if copied < n_chunks:
                copy(tid, shared, free, words, act, copied, n_rows, n_chunks, n, places, offsets, own)
            copies_commit()
            copied, free = i32(copied + 1), i32(free + slot_words)
        while chunk < n_chunks:
            wait()
            if warpgroups:
                wgmma.fence()
            cuda.syncthreads()  # the chunk is there; all are done with the one before, whose slot is filled anew
            later = warpgroups and tid >= 128  # so that two warps of a scheduler are not at the same work
            if copied < n_chunks and not later:
                copy(tid, shared, free, words, act, copied, n_rows, n_chunks, n, places, offsets, own)
            if not warpgroups:
                tid = afresh(tid)
            lane, warp = i32(tid & 31), i32(tid >> 5)
            tile, half, group = part(warp)
            first_quad, scratch = i32(group * quads), i32(first_warp + warp * own_words)
            tile_at, q_at, sums_at = i32(now + tiles_at + tile * tile_words), i32(now + act_at), i32(now + limbs_at + first_quad * 48)
            if warpgroups:
                multiply(lane, half, shared, tile_at, q_at, sums_at, scratch, acc, d, e)
            else:
                multiply(lane, shared, tile_at, i32(q_at + first_quad * QUAD_WORDS), sums_at, scratch, acc)
            place = i32(now + d_at + first_quad * 4 + (lane & 3))
            for quad in range(quads):
                scale = as_f32(lds(shared, place + 4 * quad))
                for k in range(n_rows_lane):
                    o = n_rows_lane * quad + k
                    total[o] = fma(acc[o], scale, total[o])
            if later and copied < n_chunks:
                copy(tid, shared, free, words, act, copied, n_rows, n_chunks, n, places, offsets, own)
            copies_commit()
            copied, free = i32(copied + 1), i32(free + slot_words if free < last_slot else first)
            chunk, now = i32(chunk + 1), i32(now + slot_words if now < last_slot else first)
        # The totals go through a slot that is free, so that what becomes of them is a loop, with registers for few.
        lane, warp = i32(tid & 31), i32(tid >> 5)
        tile, half, group = part(warp)
        kept = i32(now + warp * n_sums * 32 + lane)
        for o in range(n_sums):
            sts(shared, kept + 32 * o, as_u32(total[o]))
        first_row = i32(cuda.blockIdx.x * rows + tile * 32 + half * 16 + (lane >> 2))
        first_token = i32(cuda.blockIdx.y * tokens + group * quads * 4 + (lane & 3))
        o, end = i32(0), afresh(n_sums)
        while o < end:
            row, token = i32(first_row + 8 * (o & (n_rows_lane - 1))), i32(first_token + (o >> log_rows) * 4)
            if row < n_rows and token < n:
                finish(out, i64(token) * n_rows + row, row, as_f32(lds(shared, kept + 32 * o)), last, bias, other_bias)
            o = i32(o + 1)
    return run


SMALL_TESTED = [(name, *astuple(block)) for name, block in zip(("Q4_0", "Q5_1", "Q4_K"), BLOCKS[2:])]  # blocks that every GPU can hold, first and last
QUANTIZED = [fmt for fmt in FORMATS.values() if fmt.is_quantized]


@factory(SMALL_TESTED[:1] + [(fmt.name, *astuple(block)) for fmt in QUANTIZED for block in (Block(4, 2, most_quads(fmt)), HOPPER_BLOCKS[0])] + SMALL_TESTED[1:])
def mmq_kernel(name, *block):
    block = Block(*block)
    run = products(name, block, store)

    def kernel(words, act, out, n_rows, n_cols, n):  # block: rows from blockIdx.x * rows, tokens from blockIdx.y * tokens
        run(words, out, out, act, out, True, n_rows, n_cols, n)
    return Kernel(kernel, (U32, U32, F32, N, N, N), 32 * block.n_warps, arch=HOPPER if block.warpgroups else None)


@factory([("relu", "IQ4_XS", "Q5_0", False, *astuple(BLOCKS[2])), ("silu", "Q8_0", "Q8_0", False, *astuple(BLOCKS[0])), ("gelu", "Q6_K", "Q4_K", True, *astuple(BLOCKS[1])),
          ("silu", "Q8_0", "Q6_K", True, *astuple(HOPPER_BLOCKS[0])), ("silu", "Q4_K", "Q4_K", False, *astuple(HOPPER_BLOCKS[1])),
          ("silu", "Q4_1", "Q4_1", True, *astuple(BLOCKS[3]))])
def mmq_glu_kernel(activation, gate, up, biased, *block):
    block, finish = Block(*block), gate_and_store(activation, biased)
    first, last = products(gate, block, finish), products(up, block, finish)

    def kernel(gate_words, up_words, gate_bias, up_bias, act, out, n_rows, n_cols, n):  # blocks as in mmq_kernel
        first(gate_words, gate_bias, up_bias, act, out, False, n_rows, n_cols, n)
        cuda.syncthreads()  # all are done with the last chunk
        last(up_words, gate_bias, up_bias, act, out, True, n_rows, n_cols, n)
    return Kernel(kernel, (U32, U32, F32, F32, U32, F32, N, N, N), 32 * block.n_warps, arch=HOPPER if block.warpgroups else None)


def largest_block(target, names) -> Block:
    blocks = hopper_blocks(names, target.shared_limit) if target.warpgroups else ()
    return blocks[0] if blocks else block_shape(names, target.shared_limit)


def launch_grid(op, names, block, n_rows, n_cols, n):
    for what, found in (("n_rows", n_rows), ("n_cols", n_cols), ("n", n)):
        check(op, found >= 1, what, found, "at least 1")
    for name in names:
        check(op, format_of(name, op).is_quantized, "type", name, "quantized types")
    grid = -(-n_rows // block.rows), -(-n // block.tokens)
    most = min(65535 * block.tokens, (1 << 31) // (160 * -(-n_cols // CHUNK)))  # blocks of a grid; words of activations
    check(op, n <= most, "n", n, f"1..{most}")
    return grid


def mmq(target, format_name, words, act, out, n_rows, n_cols, n, block=None):
    """words: address of the weight's tiles [n_rows, n_cols], act: of the activation buffer of `quantize`, both on 16 bytes; out: of float32
    [n, n_rows]. block: the largest where it is not given."""
    names = (format_name,)
    block = block or largest_block(target, names)
    grid, args = launch_grid("mmq", names, block, n_rows, n_cols, n), (words, act, out, n_rows, n_cols, n)
    return target.launch(mmq_kernel(format_name, *astuple(block)), grid, 32 * block.n_warps, args, shared_bytes(names, block))


def mmq_glu(target, activation, names, gate_words, up_words, act, gate_bias, up_bias, out, n_rows, n_cols, n, block=None):
    """out = activation(gate x + its bias) * (up x + its bias). names: formats of gate and up; biases: addresses of float32 [n_rows], or both None;
    the rest as for `mmq`."""
    block = block or largest_block(target, names)
    grid, biased = launch_grid("mmq_glu", names, block, n_rows, n_cols, n), gate_bias is not None
    args = gate_words, up_words, *((gate_bias, up_bias) if biased else (out, out)), act, out, n_rows, n_cols, n
    return target.launch(mmq_glu_kernel(activation, *names, biased, *astuple(block)), grid, 32 * block.n_warps, args, shared_bytes(names, block))
