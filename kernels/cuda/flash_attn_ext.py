"""Attention over the KV cache: which kernel, in which shape (numerics, section 8). The choice moves work and changes no bit.

A captured launch stays right while the cache fills: what depends on how many keys there are (blocks that have a piece, pieces
that are combined) kernels read from `pos`, and grids are bounded by the device, scratch by the context.
"""
from dataclasses import dataclass

from ..call import Call
from . import flash_attn_ext_few as few
from . import flash_attn_ext_group as group
from . import flash_attn_ext_narrow as narrow
from . import flash_attn_ext_tile as tile
from .fixed_point import OCTETS
from .flash_attn_ext_any import flash_attn_ext_any
from .flash_attn_ext_combine import PIECE, flash_attn_ext_combine, heads_together, most_pieces, piece_floats, sizes
from .flash_attn_ext_limbs import limb_words
from .launch import Launches, need
from .set_rows import BLOCK, TYPES

MOST_CHANNELS = 576
# Tokens of which each has its own blocks: those of many sequences, FEW_TOKENS always, up to MANY_TOKENS while there are no more
# than MOST_PIECES (a head's, of all tokens)
FEW_TOKENS, MANY_TOKENS, MOST_PIECES = 8, 32, 2048
# Of more tokens, pieces are computed side by side where tiles of rows (token, head) do not fill a machine, while those of a full
# context are no more floats
MOST_ROWS, MOST_FLOATS = 8192, 1 << 25
# Of a multiprocessor, from which on narrow heads have a kernel of their own: pieces, of f16 caches and of others; blocks that
# each take all pieces of a token's heads
HALF_PIECES, NARROW_PIECES, ALONE = 2, 1, 1.5
# Blocks of flash_attn_ext_any on a multiprocessor; of flash_attn_ext_tile that share pieces, for each multiprocessor
ANY_RESIDENT = TILES = 4
MOST_LIMBS = 1 << 28  # words that flash_attn_ext_group makes limbs in
KERNELS = {"few": few.flash_attn_ext_few, "narrow": narrow.flash_attn_ext_narrow, "tile": tile.flash_attn_ext_tile,
           "any": flash_attn_ext_any, "group": group.flash_attn_ext_group}


@dataclass(frozen=True)
class AttentionShape:
    """kernel: of KERNELS; heads of a block; n_splits: blocks that share the pieces of a token's heads (tile: of a tile's rows),
    None where one takes all and combines them; n_warps of a block of few and tile."""
    kernel: str
    heads: int
    n_splits: int | None = None
    n_warps: int | None = None


def few_tokens(n: int, n_ctx: int, apart: bool) -> bool:
    return apart or n <= FEW_TOKENS or (n <= MANY_TOKENS and n * -(-n_ctx // PIECE) <= MOST_PIECES)


def check(call: Call) -> None:
    n_head, n_head_kv = call.n_head, call.n_head_kv
    need(n_head >= n_head_kv >= 1 and n_head % n_head_kv == 0, "n_head", n_head, f"a multiple of n_head_kv = {n_head_kv}")
    need(call.window >= 0, "window", call.window, "at least 1, or 0 for none")
    need(call.softcap >= 0, "softcap", call.softcap, "above 0, or 0 for none")
    size = sizes(call)
    for what, type_, dim, row in ("K", call.k.dtype, size.dim_k, call.k.n_cols), ("V", call.v.dtype, size.dim_v, size.row_v):
        need(type_ in TYPES, f"type of {what}", type_, ", ".join(TYPES))
        need(1 <= dim <= MOST_CHANNELS, f"head size of {what}", dim, f"1 to {MOST_CHANNELS}")
        need(type_ != "q8_0" or row % BLOCK == 0, f"row of {what}", row, f"a multiple of {BLOCK} for q8_0")
    need(size.n >= 1, "n", size.n, "at least 1")
    row_v, least = size.row_v, n_head_kv * size.dim_v
    need(row_v == least or (n_head_kv == 1 and row_v > least), "row of V", row_v, f"{least}, or more for one KV head")


def plan(call: Call) -> AttentionShape:
    """Few tokens: as many blocks as are resident at once, at most one for each piece that a query sees; where that is one for a
    token's heads, it combines the pieces of narrow heads itself. Many: tiles of 8 warps where shared memory holds one and there
    is one for nearly every multiprocessor (on Hopper of two warpgroups, for heads up to 128 of values whose limbs are not too
    many), else of 4; of 4 and several for each multiprocessor where pieces are computed side by side. The tensor cores' kernels
    take heads of whole octets of channels in a f16 or q8_0 cache."""
    n, n_head, n_head_kv, dim_k, dim_v, n_ctx, row_v, window, ring = sizes(call)
    type_k, type_v, n_multiprocessors = call.k.dtype, call.v.dtype, call.device.n_multiprocessors
    heads = heads_together(n_head // n_head_kv)
    fast = type_k in OCTETS and type_v in OCTETS and dim_k % 8 == dim_v % 8 == row_v % 8 == 0
    parts, is_few = n_head // heads, few_tokens(n, n_ctx, call.apart)
    # Whether pieces go through memory
    split = is_few or (n * n_head <= MOST_ROWS and piece_floats(n, n_head, n_ctx, dim_v) <= MOST_FLOATS)

    def n_splits(n_blocks, n_together):
        """As few as have no more pieces each than as many as are resident at once would."""
        n_pieces = most_pieces(n_ctx, window)
        return -(-n_pieces // -(-n_pieces // max(1, n_blocks * n_multiprocessors // n_together)))

    def n_tiles(n_warps):
        return -(-n // (n_warps * tile.ROWS // heads)) * parts

    def fits(n_warps):
        return 4 * tile.shared_layout(dim_k, dim_v, n_warps, split).n_words <= call.device.shared_limit
    if is_few:
        n_pieces = n * parts * most_pieces(n_ctx, window) / n_multiprocessors
        if narrow.takes(call):
            if n * parts >= ALONE * n_multiprocessors:
                return AttentionShape("narrow", heads)
            if n_pieces >= (HALF_PIECES if type_k == type_v == "f16" else NARROW_PIECES):
                return AttentionShape("narrow", heads, n_splits(narrow.resident(call), n * parts))
        if fast and max(dim_k, dim_v) <= few.MOST_CHANNELS:
            n_warps = few.block_warps(type_k, type_v, dim_k, dim_v, n_pieces)
            return AttentionShape("few", heads, n_splits(few.RESIDENT[n_warps], n * parts), n_warps)
    elif fast and max(dim_k, dim_v) <= tile.MOST_CHANNELS and fits(4):
        if split:
            return AttentionShape("tile", heads, n_splits(TILES, n_tiles(4)), 4)
        fills = 4 * n_tiles(8) >= 3 * n_multiprocessors
        if fills and call.device.warpgroups and not ring and group.fits(dim_k, dim_v) and limbs_of(call) <= MOST_LIMBS:
            return AttentionShape("group", heads, n_warps=8)
        return AttentionShape("tile", heads, n_warps=8 if fits(8) and fills else 4)
    return AttentionShape("any", heads, n_splits(ANY_RESIDENT, n * parts) if split else None)


def limbs_of(call: Call) -> int:
    """Words of the limbs of a whole cache."""
    size = sizes(call)
    return limb_words(call.present.n_rows, size.n_ctx, size.n_head_kv, size.dim_k, size.dim_v)


def scratch_words(call: Call) -> int:
    """Of the pieces, where they go through memory, or of the limbs that `flash_attn_ext_group` reads."""
    size = sizes(call)
    if call.plan.kernel == "group":
        return limbs_of(call)
    return 0 if call.plan.n_splits is None else piece_floats(size.n, size.n_head, size.n_ctx, size.dim_v)


def scratch(call: Call):
    n_floats = scratch_words(call)
    return ("f32", (n_floats,)) if n_floats else None


def flash_attn_ext(call: Call):
    """out = softmax(scale q k) v over the keys of each query's sequence that are present, up to its own position and, with a
    window, of the last so many positions; with sinks, over another key without a value too.

    q: f32 [n, n_head * Dk], head h of which reads KV head h // (n_head // n_head_kv); k: f32, f16 or q8_0, as `set_rows`
    leaves it, [cells, n_head_kv * Dk]; v: the same, [cells, n_head_kv * Dv], or, of one KV head, more columns, such as k, of
    which Dv = n_embd_head_v are taken. The cell of (sequence, position) is sequence * n_ctx + position. seq, pos: i32 [n];
    present: u8 [sequences, n_ctx]; sinks: f32 [n_head], or absent; out: f32 [n, n_head * Dv]. q, k, v and scratch lie on 16
    bytes.
    softcap: the scores scale q k become softcap tanh(scale q k / softcap); 0: they do not. apart: few tokens are of
    the same sequence, and they are of several."""
    attention = KERNELS[call.plan.kernel](call)
    return attention if call.plan.n_splits is None else Launches((attention, flash_attn_ext_combine(call)))
