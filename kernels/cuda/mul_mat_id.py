"""out = W x with the matrices of experts, or of heads: which kernel, in which shape (docs/numerics.md, section 9). The choice moves work and changes no sum.

Quantized weights: where experts have few rows, every block sorts the pairs of tokens and experts for itself (`mmq_few_id`). Where they have more, the pairs
are sorted by expert once (`dispatch`), then blocks of mmq take items of work from the table that is left in device memory. Float weights: a block of mmvq
for each pair.
"""
from functools import lru_cache
from math import isqrt

from ...quant.formats import CHUNK, format_of
from ...quant.tile import ROWS, tile_bytes
from .dispatch import FAULT, dispatch, dispatch_table
from .launch import Launches, check
from .mmq import Block, GroupedShape, grouped_bytes, mmq_heads, mmq_id, resident, warpgroups_pay
from .mmq_few import IN_FLIGHT, RESERVED
from .mmq_few_id import MOST_PAIRS, mmq_few_heads, mmq_few_id
from .mmvq import max_warps, mmvq_id_kernel

FEWEST_TOKENS = 16  # of an item of work, where that is its most
FEW_ROWS = 4        # of a matrix on average, for which mmq_few_id takes less than dispatch and items of FEWEST_TOKENS


def is_few(n_matrices: int, n_pairs: int) -> bool:
    """Whether mmq_few_id is taken."""
    return n_pairs <= min(MOST_PAIRS, FEW_ROWS * n_matrices)


def likely_rows(n_expert: int, n_pairs: int) -> int:
    """Rows that few experts exceed where ids are uniform at random: their mean and 2.5 standard deviations."""
    return -(-(2 * n_pairs + 5 * isqrt(n_pairs * n_expert)) // (2 * n_expert))


def grouped_blocks(names: tuple[str, ...], warpgroups: bool) -> list[list[Block]]:
    """For every number of tokens, in ascending order, the blocks that take so many."""
    if warpgroups and all(warpgroups_pay(format_of(name)) for name in names):
        return [[Block(2, 1, quads, True, slots) for slots in (3, 2)] for quads in (4, 8, 12, 16)]
    return [[Block(row_tiles, groups, quads) for row_tiles in (4, 2, 1)] for groups, quads in ((1, 4), (1, 8), (2, 8))]


@lru_cache(None)
def grouped_shape(names: tuple[str, ...], n: int, shared_limit: int, warpgroups: bool) -> GroupedShape:
    """For matrices most of which have at most n rows to multiply: the fewest tokens of a block that are n, or the most, and of those blocks the one that
    keeps the memory busy, then of which a multiprocessor holds the most warps. names: formats of the matrices."""
    def shape(block):
        return GroupedShape(block, min(resident(block), (shared_limit + RESERVED) // (grouped_bytes(names, block) + RESERVED)))

    def fitness(shape):
        on_their_way = shape.n_resident * (shape.block.slots - 1) * shape.block.row_tiles * min(tile_bytes(format_of(name)) for name in names)
        return min(on_their_way, IN_FLIGHT), shape.n_resident * shape.block.n_warps

    sizes = [[shape(block) for block in blocks if grouped_bytes(names, block) <= shared_limit] for blocks in grouped_blocks(names, warpgroups)]
    sizes = [shapes for shapes in sizes if shapes]
    return max(next((shapes for shapes in sizes if shapes[0].block.tokens >= n), sizes[-1]), key=fitness)


def table_words(n_expert: int, n_tokens: int, n_used: int) -> int:
    """Of a dispatch table for any block, up to the next 16 bytes."""
    return -(-dispatch_table(n_expert, n_tokens * n_used, FEWEST_TOKENS).n_words // 4) * 4


def scratch_words(op: str, type_: str, n_expert: int, n_rows: int, n_tokens: int, n_used: int) -> int:
    """int32 of the scratch memory of mul_mat_id or mul_mat_id_glu: a dispatch table, and behind it the products up x of float matrices."""
    more = op == "mul_mat_id_glu" and not format_of(type_).is_quantized
    return table_words(n_expert, n_tokens, n_used) + more * n_tokens * n_used * n_rows


def check_sizes(op, names, n_matrices, n_rows, n_cols, n_pairs, n_used, x_rows) -> bool:
    """ValueError for what cannot be; whether the formats are quantized."""
    for what, found in (("n_expert", n_matrices), ("n_rows", n_rows), ("n_cols", n_cols), ("n_used", n_used), ("x_rows_per_token", x_rows)):
        check(op, found >= 1, what, found, "at least 1")
    check(op, 1 <= n_pairs < 1 << 28, "n_tokens * n_used", n_pairs, f"1..{(1 << 28) - 1}")
    check(op, n_used % x_rows == 0, "x_rows_per_token", x_rows, f"divisors of n_used, {n_used}")
    kinds = {format_of(name, op).is_quantized for name in names}
    check(op, len(kinds) == 1, "type", names[-1], "quantized or float as the other matrix is")
    check(op, True in kinds or -(-n_rows // ROWS) < 1 << 16, "n_rows", n_rows, f"up to {ROWS * 65535} of float weights")
    return True in kinds


def own_fault(scratch):
    """The fault's place in a table, where nobody asks for it."""
    return scratch + 4 * FAULT


def float_products(target, format_name, words, x, ids, out, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows, heads):
    fmt = format_of(format_name)
    n_warps, grid = min(-(-n_cols // CHUNK), max_warps(fmt, 1)), (n_pairs, -(-n_rows // ROWS))
    args = words, x, ids, out, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows
    return target.launch(mmvq_id_kernel(fmt.name, heads), grid, 32 * n_warps, args)


def mul_mat_id(target, format_name, words, x, ids, out, n_expert, n_rows, n_cols, n_tokens, n_used, x_rows_per_token, scratch, fault=None, node=1):
    """Row i u + j of out is the product with matrix ids[i, j] of row i b + j % b of x, u = n_used, b = x_rows_per_token, a divisor of u. words: address of
    the tiles of n_expert matrices [n_rows, n_cols], on 16 bytes; x: of n_tokens b rows as of `mul_mat`; ids: of int32 [n_tokens, u]; out: of float32
    [n_tokens u, n_rows]; scratch: of int32 [scratch_words], on 16 bytes, left with anything in it; fault and node: as of `dispatch`, where fault is an
    address. Rows of ids that are no experts are left as they are."""
    n_pairs = n_tokens * n_used
    quantized = check_sizes("mul_mat_id", (format_name,), n_expert, n_rows, n_cols, n_pairs, n_used, x_rows_per_token)
    sizes = n_expert, n_rows, n_cols, n_tokens, n_used, x_rows_per_token
    fault = own_fault(scratch) if fault is None else fault
    if quantized and is_few(n_expert, n_pairs):
        return mmq_few_id(target, format_name, words, x, ids, out, *sizes, fault, node)
    if quantized:
        shape = grouped_shape((format_name,), likely_rows(n_expert, n_pairs), target.shared_limit, target.warpgroups)
        table = dispatch(target, ids, scratch, n_expert, n_pairs, shape.block.tokens, fault, node)
        return Launches((table, mmq_id(target, format_name, words, x, scratch, out, *sizes, shape)))
    table = dispatch(target, ids, scratch, n_expert, n_pairs, FEWEST_TOKENS, fault, node)  # which finds ids that are no experts
    return Launches((table, float_products(target, format_name, words, x, ids, out, *sizes[:3], n_tokens * x_rows_per_token, n_pairs, *sizes[4:], False)))


def mul_mat_heads(target, format_name, words, x, out, n_head, n_rows, n_cols, n):
    """Row i of out is the product of matrix i % n_head and row i of x. n: rows, a multiple of n_head; words, x: as of `mul_mat_id`; out: address of float32
    [n, n_rows]."""
    quantized = check_sizes("mul_mat_heads", (format_name,), n_head, n_rows, n_cols, n, 1, 1)
    check("mul_mat_heads", n % n_head == 0, "n", n, f"multiples of n_head, {n_head}")
    if quantized and is_few(n_head, n):
        return mmq_few_heads(target, format_name, words, x, out, n_head, n_rows, n_cols, n)
    if quantized:
        shape = grouped_shape((format_name,), n // n_head, target.shared_limit, target.warpgroups)
        return mmq_heads(target, format_name, words, x, out, n_head, n_rows, n_cols, n, shape)
    return float_products(target, format_name, words, x, out, out, n_head, n_rows, n_cols, n, n, 1, 1, True)
