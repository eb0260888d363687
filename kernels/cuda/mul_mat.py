"""out = W x: which kernel, in which shape (docs/numerics.md, sections 3 and 4). The choice moves work and changes no sum."""
from dataclasses import dataclass

from ...quant.formats import CHUNK, format_of
from ...quant.tile import ROWS
from .launch import check
from .mmq import mmq
from .mmvq import max_warps, mmvq_kernel, splits, tokens

# Measured on an H200 (docs/performance.md): warps of a multiprocessor that keep its memory busy, and fewest of a block.
WARPS_WANTED, WARPS_RESIDENT, FEWEST_WARPS = 12, 16, 4
MMQ_FROM = 11  # blocks of mmvq (row tiles x groups of four tokens) a multiprocessor, beyond which tensor cores take less time
MOST_TOKENS = 4 * 65535  # a grid has so many blocks in its second dimension


@dataclass(frozen=True)
class MMVQShape:
    """Launch of mmvq: tokens of a block, lanes of a row, warps of a block, blocks over rows and tokens."""
    n_tokens: int
    split: int
    n_warps: int
    grid: tuple[int, int]


def use_mmq(type_, n_rows: int, n: int, n_multiprocessors: int) -> bool:
    """Whether a product goes to tensor cores: only of quantized weights, and where mmvq would read the weights many times over a full GPU."""
    fmt = format_of(type_)
    return fmt.is_quantized and n > 4 and -(-n_rows // ROWS) * -(-n // 4) > MMQ_FROM * n_multiprocessors


def mmvq_shape(type_, n_rows: int, n_cols: int, n: int, n_multiprocessors: int) -> MMVQShape:
    """As many tokens as a block can take, so that weights are unpacked for all of them. One token: lanes share rows until there are WARPS_WANTED
    warps a multiprocessor. Blocks of few warps where there are many blocks; every warp of a block takes as many chunks."""
    fmt = format_of(type_)
    n_tokens = next((c for c in tokens(fmt) if c >= n), tokens(fmt)[-1])
    n_tiles, n_chunks, most = -(-n_rows // ROWS), -(-n_cols // CHUNK), max_warps(fmt, n_tokens)
    allowed = splits(fmt) if n_tokens == 1 else (1,)
    split = next((s for s in allowed if n_tiles * s * min(n_chunks, most) >= WARPS_WANTED * n_multiprocessors), allowed[-1])
    grid = n_tiles * split, -(-n // n_tokens)
    n_warps = min(n_chunks, most, max(FEWEST_WARPS, WARPS_RESIDENT * n_multiprocessors // (grid[0] * grid[1])))
    return MMVQShape(n_tokens, split, -(-n_chunks // -(-n_chunks // n_warps)), grid)


def mul_mat(target, format_name, words, x, out, n_rows, n_cols, n):
    """words: address of the weight's tiles [n_rows, n_cols], on 16 bytes; x: of the activation buffer of `quantize` for a quantized format, on 16 bytes,
    and of float32 [n, n_cols] for a float one; out: of float32 [n, n_rows]."""
    for what, found in (("n_rows", n_rows), ("n_cols", n_cols)):
        check("mul_mat", found >= 1, what, found, "at least 1")
    check("mul_mat", 1 <= n <= MOST_TOKENS, "n", n, f"1..{MOST_TOKENS}")
    fmt = format_of(format_name, "mul_mat")
    if use_mmq(fmt, n_rows, n, target.n_multiprocessors):
        return mmq(target, fmt.name, words, x, out, n_rows, n_cols, n)
    shape = mmvq_shape(fmt, n_rows, n_cols, n, target.n_multiprocessors)
    return target.launch(mmvq_kernel(fmt.name, shape.n_tokens, shape.split), shape.grid, 32 * shape.n_warps, (words, x, out, n_rows, n_cols, n))
