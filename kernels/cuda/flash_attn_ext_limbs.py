"""Limbs of keys and values of a cache, made once for all blocks of `flash_attn_ext_group` (numerics, section 8).

A *tile* has a piece of 128 keys of one KV head, as products of warpgroups take it (`wgmma`: atoms of eight rows of 128 bytes).
Its parts, of which one bulk copy each brings:

    keys    [block of 64 channels][key / 8] atoms, a row of which is a key: 64 bytes of high, then 64 of low limbs; d_k, f32
            [block][128]
    values  [high, low][row / 8] atoms, a row of which is a channel (row 8 e + g is channel 8 g + e of each 64) with its 128 keys;
            d_v, f32 [128]; `seen`, i32 [128], the position from which a key is seen, NEVER for none; the largest of these

Limbs of a row of atoms lie in the order of `flash_attn_ext_tile_limbs`, which makes them. Low limbs of keys are whole ones, those
of values doubled.
"""
from itertools import accumulate
from typing import NamedTuple

from numba import cuda, types

from .fixed_point import CHANNELS, halved
from .flash_attn_ext_combine import PIECE, first_piece, sizes
from .flash_attn_ext_tile_limbs import NEVER, constants, k_stride, keys_stride, piece_of_keys, piece_stager
from .launch import HOPPER, I32, Kernel, N, U8, factory
from .ptx import i32, i64, device, ld, lds, lds4, redux_max, st, st4, sts
from .wgmma import ATOM_WORDS

N_WARPS = 8
BLOCK_WORDS = PIECE // 8 * ATOM_WORDS  # of 64 channels of the keys, both limbs
CHANNEL_WORDS = PIECE // 4             # of a channel's keys, one limb


class Tile(NamedTuple):
    """Words of a tile's parts: where each begins."""
    k: int
    d_k: int
    v: int       # the second part
    v_lo: int
    d_v: int
    seen: int
    latest: int
    n_words: int

    @property
    def of_values(self) -> "Tile":
        """Counted from the second part on."""
        return Tile(*(at - self.v for at in self))


def tile_of(dim_k: int, dim_v: int) -> Tile:
    n_blocks, n_slabs = -(-dim_k // CHANNELS), -(-dim_v // CHANNELS)
    v = n_slabs * CHANNELS * CHANNEL_WORDS
    return Tile(*accumulate((n_blocks * BLOCK_WORDS, n_blocks * PIECE, v, v, PIECE, PIECE, 4), initial=0))


def limb_words(n_sequences: int, n_ctx: int, n_head_kv: int, dim_k: int, dim_v: int) -> int:
    """Words of all tiles of a cache: [sequence][piece][KV head]."""
    return n_sequences * -(-n_ctx // PIECE) * n_head_kv * tile_of(dim_k, dim_v).n_words


def copier(const):
    """(s, limbs, at, tid): from shared memory, as `piece_stager` leaves it, to the tile that begins at word `at` of limbs."""
    where, n_blocks, rows = const.where, const.n_blocks, const.n_slabs * CHANNELS
    to, k_row = tile_of(const.dim_k, const.dim_v), k_stride(const.dim_k)
    v_row, piece_of = keys_stride(const.n_slabs), piece_of_keys(const.n_slabs)

    @device
    def copy_keys(s, limbs, at, tid):
        i = tid
        while i < n_blocks * BLOCK_WORDS // 4:
            piece, row = i & 7, i >> 3
            block, key = row >> 7, row & (PIECE - 1)
            x = lds4(s, (where.k_lo if piece & 4 else where.k_hi) + key * k_row + block * 16 + 4 * (piece & 3))
            if piece & 4:
                x = i32(halved(x[0])), i32(halved(x[1])), i32(halved(x[2])), i32(halved(x[3]))
            st4(limbs, at + (row >> 3) * ATOM_WORDS + (row & 7) * 32 + 4 * (piece ^ (row & 7)), x[0], x[1], x[2], x[3])
            i = i32(i + 32 * N_WARPS)
        i = tid
        while i < n_blocks * PIECE:
            st(limbs, at + to.d_k + i, lds(s, where.d_k + i))
            i = i32(i + 32 * N_WARPS)

    @device
    def copy_values(s, limbs, at, tid):
        i = tid
        while i < 2 * rows * 8:
            piece, row = i & 7, i >> 3
            low = row >= rows
            row = i32(row - rows if low else row)
            x = lds4(s, (where.v_lo if low else where.v_hi) + row * v_row + piece_of(row, piece))
            st4(limbs, at + (to.v_lo if low else to.v) + (row >> 3) * ATOM_WORDS + (row & 7) * 32 + 4 * (piece ^ (row & 7)),
                x[0], x[1], x[2], x[3])
            i = i32(i + 32 * N_WARPS)
        if tid < PIECE:
            st(limbs, at + to.d_v + tid, lds(s, where.d_v + tid))
            st(limbs, at + to.seen + tid, lds(s, where.seen + tid))

    @device
    def copy(s, limbs, at, tid):
        copy_keys(s, limbs, at, tid)
        copy_values(s, limbs, at, tid)
        lane, latest = tid & 31, i32(-1)
        for j in range(4):
            latest = i32(max(latest, lds(s, where.seen + lane + 32 * j)))
        latest = redux_max(latest)
        if tid < 4:
            st(limbs, at + to.latest + tid, latest)
    return copy


@device
def positions_of(seq, pos, n, sequence, tid, s, at):
    """(first, last) position of a sequence's tokens in the batch, by all threads of a block; NEVER and -1 if it has none. s: two
    words for each warp, from `at` on."""
    first, last, i = NEVER, i32(-1), tid
    while i < n:
        if ld(seq, i) == sequence:
            position = ld(pos, i)
            first, last = i32(min(first, position)), i32(max(last, position))
        i = i32(i + 32 * N_WARPS)
    earliest, last = redux_max(i32(-first)), redux_max(last)
    if tid & 31 == 0:
        sts(s, at + (tid >> 4), earliest)
        sts(s, at + (tid >> 4) + 1, last)
    cuda.syncthreads()  # all warps' are there
    for warp in range(N_WARPS):
        earliest, last = i32(max(earliest, lds(s, at + 2 * warp))), i32(max(last, lds(s, at + 2 * warp + 1)))
    return i32(-earliest), last


@factory([("f16", "f16", 128, 128), ("q8_0", "f16", 64, 72), ("f16", "q8_0", 128, 96)])
def flash_attn_ext_limbs_kernel(type_k, type_v, dim_k, dim_v):
    """limbs: i32 [sequence][piece][KV head], tiles. A block: one tile, if a token of the batch is of the sequence and sees keys
    of the piece."""
    const = constants(type_k, type_v, dim_k, dim_v, 1, N_WARPS, False, False, 0.0)
    stage_piece, copy, n_words = piece_stager(const), copier(const), tile_of(dim_k, dim_v).n_words

    def kernel(k, v, seq, pos, present, limbs, n, n_ctx, n_head_kv, row_v, window):
        s = cuda.shared.array(0, types.int32)
        tid, sequence, head_kv = i32(cuda.threadIdx.x), i32(cuda.blockIdx.z), i32(cuda.blockIdx.y)
        earliest, last = positions_of(seq, pos, n, sequence, tid, s, const.where.q)
        first = i32(cuda.blockIdx.x * PIECE)
        if first <= last and first_piece(earliest, window) * PIECE <= first:
            cell = i64(sequence) * n_ctx
            stage_piece(k, v, present, cell, cell, row_v, first, last, n_head_kv, head_kv, i32(tid & 31), tid, s)
            tile = (i64(sequence) * cuda.gridDim.x + cuda.blockIdx.x) * n_head_kv + head_kv
            copy(s, limbs, tile * n_words, tid)
    parameters = const.K.pointer, const.V.pointer, I32, I32, U8, I32, N, N, N, N, N
    return Kernel(kernel, parameters, 32 * N_WARPS, arch=HOPPER)


def flash_attn_ext_limbs(call):
    """Tiles of all pieces that tokens of the batch see keys of, to call.scratch."""
    size, n_sequences = sizes(call), call.present.n_rows
    kernel = flash_attn_ext_limbs_kernel(call.k.dtype, call.v.dtype, size.dim_k, size.dim_v)
    where = constants(call.k.dtype, call.v.dtype, size.dim_k, size.dim_v, 1, N_WARPS, False, False, 0.0).where
    args = (call.k.data, call.v.data, call.seq.data, call.pos.data, call.present.data, call.scratch.data, size.n, size.n_ctx,
            size.n_head_kv, size.row_v, size.window)
    grid = -(-size.n_ctx // PIECE), size.n_head_kv, n_sequences
    return call.device.launch(kernel, grid, 32 * N_WARPS, args, 4 * (where.q + 2 * N_WARPS))
