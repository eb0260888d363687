"""Attention over the KV cache: which kernel, in which shape (numerics, section 8). The choice moves work and changes no bit.

A captured launch stays right while the cache fills: what depends on how many keys there are (blocks that have a piece, pieces that are combined) kernels
read from `pos`, and grids are bounded by the device, scratch by the context.
"""
from dataclasses import dataclass
from functools import partial

from . import flash_attn_ext_few as few
from . import flash_attn_ext_tile as tile
from .fixed_point import OCTETS
from .flash_attn_ext_any import flash_attn_ext_any
from .flash_attn_ext_combine import PIECE, flash_attn_ext_combine, most_pieces, piece_floats
from .flash_attn_ext_few import flash_attn_ext_few
from .flash_attn_ext_tile import flash_attn_ext_tile
from .launch import Launches, check
from .set_rows import TYPES

MOST_CHANNELS = 576
MOST_HEADS = 8         # of a block
NO_WINDOW = 2**31 - 1
# Tokens of which each has its own blocks: FEW_TOKENS always, up to MANY_TOKENS while there are no more than MOST_PIECES (a head's, of all tokens).
FEW_TOKENS, MANY_TOKENS, MOST_PIECES = 8, 32, 2048
# Of more tokens, pieces are computed side by side where tiles of rows (token, head) do not fill a machine, while those of a full context are no more floats
MOST_ROWS, MOST_FLOATS = 8192, 1 << 25
ANY_RESIDENT = TILES = 4  # blocks of flash_attn_ext_any on a multiprocessor; of flash_attn_ext_tile that share pieces, for each multiprocessor


@dataclass(frozen=True)
class AttentionShape:
    """kernel: few, tile or any; heads of a block; n_splits: blocks that share the pieces of a token's heads (tile: of a tile's rows), None where one takes
    all and combines them; n_warps of a block of few and tile."""
    kernel: str
    heads: int
    n_splits: int | None = None
    n_warps: int | None = None


def heads_together(group: int) -> int:
    """Query heads of a block: of the `group` heads that share a KV head, the largest divisor up to 8."""
    return max(h for h in range(1, MOST_HEADS + 1) if group % h == 0)


def few_tokens(n: int, n_ctx: int) -> bool:
    return n <= FEW_TOKENS or n <= MANY_TOKENS and n * -(-n_ctx // PIECE) <= MOST_PIECES


def side_by_side(n: int, n_head: int, dim_v: int, n_ctx: int) -> bool:
    """Whether pieces go through memory, which is reserved before it is known what the device is."""
    return few_tokens(n, n_ctx) or n * n_head <= MOST_ROWS and piece_floats(n, n_head, n_ctx, dim_v) <= MOST_FLOATS


def attention_shape(type_k: str, type_v: str, n: int, n_head: int, n_head_kv: int, dim_k: int, dim_v: int, n_ctx: int, row_v: int, window: int,
                    n_multiprocessors: int, shared_limit: int) -> AttentionShape:
    """Few tokens: as many blocks as are resident at once, at most one for each piece that a query sees. Many: tiles of 8 warps where shared memory holds
    one and there is one for nearly every multiprocessor, else of 4; of 4 and several for each multiprocessor where pieces are computed side by side. The
    tensor cores' kernels take heads of whole octets of channels in a f16 or q8_0 cache."""
    heads = heads_together(n_head // n_head_kv)
    fast = type_k in OCTETS and type_v in OCTETS and dim_k % 8 == dim_v % 8 == row_v % 8 == 0
    parts, split = n_head // heads, side_by_side(n, n_head, dim_v, n_ctx)

    def n_splits(n_blocks, n_together):
        return min(most_pieces(n_ctx, window), max(1, n_blocks * n_multiprocessors // n_together))

    def n_tiles(n_warps):
        return -(-n // (n_warps * tile.ROWS // heads)) * parts

    def fits(n_warps):
        return 4 * tile.shared_layout(dim_k, dim_v, n_warps).n_words <= shared_limit
    if few_tokens(n, n_ctx):
        if fast and max(dim_k, dim_v) <= few.MOST_CHANNELS:
            n_warps = few.block_warps(type_k, type_v, dim_k, dim_v, heads, n * parts * most_pieces(n_ctx, window) / n_multiprocessors)
            return AttentionShape("few", heads, n_splits(few.RESIDENT[n_warps], n * parts), n_warps)
    elif fast and dim_k <= tile.MOST_CHANNELS_K and dim_v <= tile.MOST_CHANNELS and fits(4):
        if split:
            return AttentionShape("tile", heads, n_splits(TILES, n_tiles(4)), 4)
        return AttentionShape("tile", heads, n_warps=8 if fits(8) and 4 * n_tiles(8) >= 3 * n_multiprocessors else 4)
    return AttentionShape("any", heads, n_splits(ANY_RESIDENT, n * parts) if split else None)


def scratch_floats(n: int, n_head: int, dim_v: int, n_ctx: int) -> int:
    """float32 of scratch for n tokens; 0 where none is used."""
    return piece_floats(n, n_head, n_ctx, dim_v) if side_by_side(n, n_head, dim_v, n_ctx) else 0


def flash_attn_ext(target, type_k, type_v, q, k, v, seq, pos, present, out, n, n_head, n_head_kv, dim_k, dim_v, n_ctx, scale, scratch=None, shape=None,
                   window=NO_WINDOW, sinks=None, row_v=None, combine=flash_attn_ext_combine):
    """Attention of n query tokens over their sequences' keys up to their own positions.

    q: address of f32 [n, n_head, dim_k]; k, v: of caches (`set_rows`) of n_head_kv * dim_k and n_head_kv * dim_v values a cell, the cell of
    (sequence, position) being sequence * n_ctx + position; seq, pos: of i32 [n]; present: of u8 [n_seq, n_ctx]; out: of f32 [n, n_head, dim_v];
    scratch: of f32 [scratch_floats], left with anything in it; shape: `attention_shape` chooses where it is not given. q, k, v, scratch lie on 16 bytes.
    Query head h reads KV head h // (n_head // n_head_kv). window: how many positions a query sees, its own and those before it; sinks: address of
    f32 [n_head], or None; row_v: values of a cell of V's cache, where one KV head has more than dim_v of them, as K's cache has. combine: the launch
    that makes `out` of pieces.
    """
    op, row_v = "flash_attn_ext", row_v or n_head_kv * dim_v
    for what, type_, dim in (("K", type_k, dim_k), ("V", type_v, dim_v)):
        check(op, type_ in TYPES, f"type of {what}", type_, ", ".join(TYPES))
        check(op, 1 <= dim <= MOST_CHANNELS, f"head size of {what}", dim, f"1 to {MOST_CHANNELS}")
        row = row_v if what == "V" else n_head_kv * dim
        check(op, type_ != "q8_0" or row % 32 == 0, f"row of {what}", row, "a multiple of 32 for q8_0")
    check(op, n >= 1, "n", n, "at least 1")
    check(op, window >= 1, "window", window, "at least 1")
    check(op, row_v == n_head_kv * dim_v or n_head_kv == 1 and row_v > dim_v, "row of V", row_v, f"{n_head_kv * dim_v}, or more for one KV head")
    check(op, n_head_kv >= 1 and n_head % n_head_kv == 0, "n_head", n_head, f"a multiple of n_head_kv = {n_head_kv}")
    shape = shape or attention_shape(type_k, type_v, n, n_head, n_head_kv, dim_k, dim_v, n_ctx, row_v, window, target.n_multiprocessors,
                                     target.shared_limit)
    operands, sizes = (type_k, type_v, q, k, v, seq, pos, present), (n, n_head, n_head_kv, dim_k, dim_v, n_ctx, row_v, window, scale, shape.heads)
    many = partial(flash_attn_ext_tile, n_warps=shape.n_warps) if shape.kernel == "tile" else flash_attn_ext_any
    if shape.n_splits is None:
        return many(target, *operands, sinks, out, *sizes, None)
    if shape.kernel == "few":
        pieces = flash_attn_ext_few(target, *operands, scratch, *sizes, shape.n_splits, shape.n_warps)
    else:
        pieces = many(target, *operands, None, scratch, *sizes, shape.n_splits)
    return Launches((pieces, combine(target, pos, scratch, sinks, out, n, n_head, dim_v, n_ctx, window)))
