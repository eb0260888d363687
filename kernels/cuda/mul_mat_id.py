"""out = W x with the matrices of experts, or of heads: which kernel, in which shape (docs/numerics.md, section 9). The choice
moves work and changes no sum.

Quantized weights: where experts have few rows, every block sorts the pairs of tokens and experts for itself (`mmq_few_id`). Where
they have more, the pairs are sorted by expert once (`dispatch`), then blocks of mmq take items of work from the table that is
left in device memory. Float weights: a block of mmvq for each pair.
"""
from functools import lru_cache
from math import isqrt

from ...quant.formats import format_of
from ...quant.tile import tile_bytes
from ..call import Call
from .dispatch import dispatch, dispatch_table
from .few_slots import IN_FLIGHT
from .half_check import may_be_halves
from .half_forms import half_form, has_halves
from .launch import RESERVED, Launches, need
from .mmq import Block, GroupedShape, grouped_bytes, mmq_heads, mmq_id, resident, warpgroups_pay
from .mmq_half import EXPERTS, Halves, expert_blocks, half_scratch, mmq_half
from .mmq_few import FewShape
from .mmq_few_id import MOST_MATRICES, MOST_PAIRS, id_shape, mmq_few_heads, mmq_few_id
from .mmvq import mmvq_id
from .operands import is_quantized, late_error as late_error, matrices_of, pairs_of

FEWEST_TOKENS = 16  # of an item of work, where that is its most
MOST_EMPTY = 4 / 3  # rows of blocks of mmq_half over those that there are
FEWEST_OF_LARGE = 128  # likely rows of an expert, from which the largest blocks of mmq_half pay (docs/kernels-log.md)
FEWEST_COLUMNS_OF_SPLIT = 1024  # of split formats by mmq_half: what begins and ends an item is more than for others
FEW_ROWS = 4        # of a matrix on average, for which mmq_few_id takes less than dispatch and items of FEWEST_TOKENS


def is_few(n_matrices: int, n_pairs: int) -> bool:
    """Whether mmq_few_id is taken."""
    return n_pairs <= min(MOST_PAIRS, FEW_ROWS * n_matrices) and n_matrices <= MOST_MATRICES


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
    """For matrices most of which have at most n rows to multiply: the fewest tokens of a block that are n, or the most, and of
    those blocks the one that keeps the memory busy, then of which a multiprocessor holds the most warps. names: formats of the
    matrices."""
    def shape(block):
        return GroupedShape(block, min(resident(block), (shared_limit + RESERVED) // (grouped_bytes(names, block) + RESERVED)))

    def fitness(shape):
        on_their_way = shape.n_resident * (shape.block.slots
                                           - 1) * shape.block.row_tiles * min(tile_bytes(format_of(name)) for name in names)
        return min(on_their_way, IN_FLIGHT), shape.n_resident * shape.block.n_warps

    sizes = [[shape(block) for block in blocks if grouped_bytes(names, block) <= shared_limit]
             for blocks in grouped_blocks(names, warpgroups)]
    sizes = [shapes for shapes in sizes if shapes]
    return max(next((shapes for shapes in sizes if shapes[0].block.tokens >= n), sizes[-1]), key=fitness)


@lru_cache(None)
def half_block(names: tuple[str, ...], n_rows: int, n_cols: int, n: int) -> Block | None:
    """The block of mmq_half where it takes less than mmq_id: of matrices whose rows fill blocks. n: as of `grouped_shape`.
    Formats with a float scale of 32 columns and no minima take less by mmq_id in the block of the fewest tokens; split ones take
    less where rows are long, and in the block of as many tokens as that of mmq_id."""
    fmt = format_of(names[0])
    if len(set(names)) > 1 or not has_halves(fmt):
        return None
    form = half_form(fmt)
    fewest_of_large = EXPERTS[1].tokens + 1 if form.split else FEWEST_OF_LARGE
    block = EXPERTS[0 if n <= EXPERTS[0].tokens else 1 if n < fewest_of_large else 2]
    if block == EXPERTS[0] and form.scaled and fmt.group == 32 and not fmt.has_min:
        return None
    if form.split and n_cols < FEWEST_COLUMNS_OF_SPLIT:
        return None
    fills = -(-n_rows // block.rows) * block.rows <= MOST_EMPTY * n_rows
    return block if fills and block in expert_blocks(fmt) else None


def table_words(n_expert: int, n_tokens: int, n_used: int) -> int:
    """Of a dispatch table for any block, up to the next 16 bytes."""
    return -(-dispatch_table(n_expert, n_tokens * n_used, FEWEST_TOKENS).n_words // 4) * 4


def plan(call: Call) -> FewShape | GroupedShape | Halves | None:
    """Of mmq_few_id, mmq_half or mmq_id, or of their forms for heads and for gate and up; None of float matrices."""
    names, sizes, target = tuple(w.dtype for w in matrices_of(call)), pairs_of(call), call.device
    if not is_quantized(call.op, names):
        return None
    if is_few(sizes.n_matrices, sizes.n_pairs):
        return id_shape(names, *sizes[:3], sizes.n_pairs, sizes.n_tokens, target.n_multiprocessors, target.shared_limit)
    n = sizes.n_tokens if call.op == "mul_mat_heads" else likely_rows(sizes.n_matrices, sizes.n_pairs)
    block = half_block(names, sizes.n_rows, sizes.n_cols, n) if call.op != "mul_mat_heads" and target.warpgroups else None
    if block and may_be_halves(target, format_of(names[0])):
        return Halves(block)
    return grouped_shape(names, n, target.shared_limit, target.warpgroups)


def scratch(call: Call) -> tuple[str, tuple[int]] | None:
    """A dispatch table, and the widened activations of `mmq_half`. Heads need none."""
    if isinstance(call.plan, Halves):
        return half_scratch(call)
    return None if call.op == "mul_mat_heads" else ("i32", (table_words(call.w.shape[0], *call.ids.shape),))


def check(call: Call) -> None:
    if call.op == "mul_mat_id":
        need(not call.may_skip, "may_skip", call.may_skip, "False: ids are experts")


def sorted_pairs(call: Call):
    """The launch of `dispatch` for the plan, or for float matrices, of which it only finds ids that are no experts."""
    return dispatch(call, FEWEST_TOKENS if call.plan is None else call.plan.block.tokens)


def mul_mat_id(call: Call):
    """out[i u + j] = w[ids[i, j]] x[i b + j % b].

    w: tiles of X weights [m, k], on 16 bytes; x: of n b rows, b a divisor of u, as of `mul_mat`; ids: i32 [n, u]; out:
    f32 [n u, m], in which rows of ids that are not experts are left as they are; scratch: i32, on 16 bytes, left with anything in
    it."""
    if isinstance(call.plan, FewShape):
        return mmq_few_id(call)
    return Launches((sorted_pairs(call), {Halves: mmq_half, GroupedShape: mmq_id}.get(type(call.plan), mmvq_id)(call)))


def mul_mat_heads(call: Call):
    """out[i] = w[i % H] x[i].

    w: tiles of H weights [m, k], on 16 bytes; x: of n rows, a multiple of H, as of `mul_mat`; out: f32 [n, m]."""
    return {FewShape: mmq_few_heads, GroupedShape: mmq_heads}.get(type(call.plan), mmvq_id)(call)
