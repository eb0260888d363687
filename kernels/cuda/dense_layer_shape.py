"""Of a layer in one launch (`dense_layer`): its sizes, the products that are its stages, and where everything lies in a block's
shared memory."""
from functools import lru_cache
from typing import NamedTuple

from ...quant.formats import CHUNK, format_of
from ...quant.tile import ROWS, tile_bytes
from . import mbarrier
from .flash_attn_ext_few_stages import shared_layout
from .token_product import token_table_words, zero_words

BLOCKS, WARPS = 16, 16         # of a cluster, of a block
MOST_PIECES = 16               # of a context, that may have room
MOST_WORDS = (227 << 10) // 4  # of shared memory
BANKS = 32
SUMS = ROWS + 1                # words that a chunk of a tile leaves: a sum of each row, and the scale of the activations
N_STAGES = N_ARRIVALS = 4
QKV, PIECES, OUT, GATED = range(N_ARRIVALS)  # what blocks send each other


class Shape(NamedTuple):
    """Of a layer, and of the launch."""
    names: tuple[str, ...]  # formats of Q, K, V, the output, gate, up, down
    n_cols: int
    n_head: int
    n_head_kv: int
    dim: int                # of a head
    n_ff: int
    n_pairs: int            # of channels of a head that are rotated,
    neox: bool              # one half with the other, or neighbours
    n_blocks: int = BLOCKS
    n_warps: int = WARPS

    @property
    def heads(self) -> int:
        """Of a KV head."""
        return self.n_head // self.n_head_kv

    @property
    def q_cols(self) -> int:
        return self.n_head * self.dim

    @property
    def kv_cols(self) -> int:
        return self.n_head_kv * self.dim

    @property
    def n_splits(self) -> int:
        """Blocks that share the pieces of a KV head."""
        return self.n_blocks // self.n_head_kv


class Stage(NamedTuple):
    """A product. matrices: their numbers among a layer's; tiles: row tiles of each."""
    matrices: tuple[int, ...]
    tiles: tuple[int, ...]
    n_chunks: int
    by_turns: bool = False  # a tile of each, one after the other; else those of one matrix behind those of another

    @property
    def n_tiles(self) -> int:
        """By which blocks take turns."""
        return self.tiles[0] if self.by_turns else sum(self.tiles)


def tiles_of(n_rows: int) -> int:
    return -(-n_rows // ROWS)


def chunks_of(n_cols: int) -> int:
    return -(-n_cols // CHUNK)


def stages_of(shape: Shape) -> tuple[Stage, Stage, Stage, Stage]:
    q, kv, out, ff = map(tiles_of, (shape.q_cols, shape.kv_cols, shape.n_cols, shape.n_ff))
    chunks = chunks_of(shape.n_cols)
    return (Stage((0, 1, 2), (q, kv, kv), chunks), Stage((3,), (out,), chunks_of(shape.q_cols)),
            Stage((4, 5), (ff, ff), chunks, True), Stage((6,), (out,), chunks_of(shape.n_ff)))


def most_tiles(stage: Stage, shape: Shape) -> int:
    """Of a block."""
    return -(-stage.n_tiles // shape.n_blocks) * (2 if stage.by_turns else 1)


def most_pairs(stage: Stage, shape: Shape) -> int:
    return most_tiles(stage, shape) * stage.n_chunks


def tile_words(names: tuple[str, ...], stage: Stage) -> int:
    return max(tile_bytes(format_of(names[matrix])) for matrix in stage.matrices) // 4


def whole_banks(n: int) -> int:
    """Words, up to a multiple of 128 bytes: banks as the stages know them."""
    return -(-n // BANKS) * BANKS


class Layout(NamedTuple):
    """Words of shared memory at which each begins: behind what attention works with, codebooks and zeros, weights of the stages
    by turns, the activations, sums of chunks; the row that layers add to, Q K V, what the output adds, mbarriers; the gated unit,
    and pieces [head][piece][dim], then (m, l) [head][piece]."""
    tables: int
    zeros: int
    even: int
    odd: int
    row: int
    sums: int
    state: int
    qkv: int
    outs: int
    arrivals: int  # mbarriers of what blocks send each other: Q K V, pieces, the product, the gated unit
    copies: int    # and of the stages' weights
    gated: int
    pieces: int    # the same place, if no block makes a gated unit before all have combined
    n_words: int
    n_pieces: int  # of a head, for which there is room


@lru_cache(None)
def layout(shape: Shape) -> Layout:
    stages, names = stages_of(shape), shape.names
    areas = [most_pairs(stage, shape) * tile_words(names, stage) for stage in stages]
    each = (shared_layout(shape.dim, shape.dim, shape.heads, shape.n_warps).n_words,
            sum(map(token_table_words, dict.fromkeys(names))), max(map(zero_words, names)), max(areas[::2]), max(areas[1::2]),
            CHUNK * max(stage.n_chunks for stage in stages), SUMS * max(most_pairs(stage, shape) for stage in stages),
            shape.n_cols, shape.q_cols + 2 * shape.kv_cols, shape.n_cols, N_ARRIVALS * mbarrier.WORDS,
            len(stages) * mbarrier.WORDS)
    first, at = [], 0
    for n in each:
        first.append(at)
        at += whole_banks(n)
    gated, shared = whole_banks(shape.n_ff), stages[1].n_tiles >= shape.n_blocks
    pieces = at if shared else at + gated
    n_pieces = max(1, min(MOST_PIECES, (MOST_WORDS - pieces) // (shape.q_cols + 2 * shape.n_head)))
    return Layout(*first[1:], at, pieces, max(at + gated, pieces + n_pieces * (shape.q_cols + 2 * shape.n_head)), n_pieces)
