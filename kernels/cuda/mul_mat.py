"""out = W x: which kernel, in which shape (docs/numerics.md, sections 3 and 4). The choice moves work and changes no sum."""
from dataclasses import dataclass

from ...quant.formats import CHUNK, format_of
from ...quant.tile import ROWS
from .launch import check
from .mmq import Block, block_shape, hopper_blocks, mmq
from .mmq_few import MOST_TOKENS as MOST_TOKENS_FEW, FewShape, few_shape, mmq_few
from .mmvq import FEW, MANY, max_warps, mmvq_kernel
from .mmvq_staged import StagedShape, mmvq_staged, staged_shape

WARPS_RESIDENT, FEWEST_WARPS = 16, 4  # of mmvq: warps of a multiprocessor that keep its memory busy, fewest of a block (docs/kernels-log.md)
# us of a chunk of Q4_K: a row tile with 16 tokens in mmq_few; a block of warpgroups by its row tiles
FEW_US, WARPGROUPS_US = 0.6, {4: 2.6, 2: 1.7}
MOST_TOKENS = 4 * 65535  # a grid has so many blocks in its second dimension


@dataclass(frozen=True)
class MMVQShape:
    """Launch of mmvq: tokens of a block, warps of a block, blocks over row tiles and tokens."""
    n_tokens: int
    n_warps: int
    grid: tuple[int, int]


def mmvq_shape(type_, n_rows: int, n_cols: int, n: int, n_multiprocessors: int) -> MMVQShape:
    """As many tokens as a block can take, of more than eight at once. Blocks of few warps where there are many blocks; every warp of a block takes as many
    chunks."""
    n_tokens = MANY if n > 2 * FEW[-1] else next((c for c in FEW if c >= n), FEW[-1])
    n_chunks, grid = -(-n_cols // CHUNK), (-(-n_rows // ROWS), -(-n // n_tokens))
    n_warps = min(n_chunks, max_warps(format_of(type_), n_tokens), max(FEWEST_WARPS, WARPS_RESIDENT * n_multiprocessors // (grid[0] * grid[1])))
    return MMVQShape(n_tokens, -(-n_chunks // -(-n_chunks // n_warps)), grid)


def fills(block: Block, n_rows: int, n: int, n_multiprocessors: int) -> bool:
    """Whether there is such a block of mmq for nearly every multiprocessor, not empty by half."""
    return 4 * -(-n_rows // block.rows) * -(-n // block.tokens) >= 3 * n_multiprocessors and 2 * n > block.tokens


def block_us(block: Block, n_rows: int, n: int, n_multiprocessors: int) -> float:
    """What a chunk of all tokens takes in blocks of warpgroups, one on each multiprocessor at a time."""
    return WARPGROUPS_US[block.row_tiles] * -(-(-(-n_rows // block.rows) * -(-n // block.tokens)) // n_multiprocessors)


def many_shape(names: tuple[str, ...], n_rows: int, n: int, n_multiprocessors: int, shared_limit: int, warpgroups: bool) -> Block | None:
    """The block of mmq where it is faster than mmq_few. names: formats of the matrices; warpgroups: whether the device has them."""
    blocks = hopper_blocks(names, shared_limit) if warpgroups else ()
    if not blocks:
        block = block_shape(names, shared_limit)
        return block if fills(block, n_rows, n, n_multiprocessors) else None
    few_us = FEW_US * -(-n_rows // ROWS) * -(-n // MOST_TOKENS_FEW) / n_multiprocessors
    block = min(blocks, key=lambda block: block_us(block, n_rows, n, n_multiprocessors))
    return block if n > MOST_TOKENS_FEW and block_us(block, n_rows, n, n_multiprocessors) < few_us else None


def quantized_shape(names: tuple[str, ...], n_rows: int, n_cols: int, n: int, n_multiprocessors: int, shared_limit: int,
                    warpgroups: bool = False) -> FewShape | Block:
    """mmq for many tokens, else mmq_few, for one matrix or two of the same sizes. names: their formats."""
    return (many_shape(names, n_rows, n, n_multiprocessors, shared_limit, warpgroups)
            or few_shape(names, n_rows, n_cols, n, n_multiprocessors, shared_limit))


def mul_mat_shape(type_, n_rows: int, n_cols: int, n: int, n_multiprocessors: int, shared_limit: int,
                  warpgroups: bool = False) -> MMVQShape | StagedShape | FewShape | Block:
    """The kernel, by the class of its shape, and the shape for a device. Float weights: mmvq, and mmvq_staged where it can be."""
    fmt = format_of(type_)
    if not fmt.is_quantized:
        return staged_shape(fmt, n_rows, n_cols, n, n_multiprocessors, shared_limit) or mmvq_shape(fmt, n_rows, n_cols, n, n_multiprocessors)
    return quantized_shape((fmt.name,), n_rows, n_cols, n, n_multiprocessors, shared_limit, warpgroups)


def check_sizes(op: str, n_rows: int, n_cols: int, n: int) -> None:
    for what, found in (("n_rows", n_rows), ("n_cols", n_cols)):
        check(op, found >= 1, what, found, "at least 1")
    check(op, 1 <= n <= MOST_TOKENS, "n", n, f"1..{MOST_TOKENS}")


def mul_mat(target, format_name, words, x, out, n_rows, n_cols, n):
    """words: address of the weight's tiles [n_rows, n_cols], on 16 bytes; x: of the activation buffer of `quantize` for a quantized format, on 16 bytes,
    and of float32 [n, n_cols], also on 16 bytes, for a float one; out: of float32 [n, n_rows]."""
    check_sizes("mul_mat", n_rows, n_cols, n)
    fmt = format_of(format_name, "mul_mat")
    shape = mul_mat_shape(fmt, n_rows, n_cols, n, target.n_multiprocessors, target.shared_limit, target.warpgroups)
    args = words, x, out, n_rows, n_cols, n
    if isinstance(shape, Block):
        return mmq(target, fmt.name, *args, shape)
    if isinstance(shape, FewShape):
        return mmq_few(target, fmt.name, *args, shape)
    if isinstance(shape, StagedShape):
        return mmvq_staged(target, fmt.name, *args[:5], shape)
    return target.launch(mmvq_kernel(fmt.name, shape.n_tokens), shape.grid, 32 * shape.n_warps, args)
