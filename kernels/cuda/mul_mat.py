"""out = W x: which kernel, in which shape (docs/numerics.md, sections 3 and 4). The choice moves work and changes no sum."""
from functools import lru_cache
from typing import NamedTuple

from ...quant.formats import CHUNK, Format, format_of
from ...quant.tile import ROWS, tile_bytes
from ..call import Call, Operand
from .few_slots import MOST_TOKENS as MOST_TOKENS_FEW
from .launch import RESERVED, need
from .mmq import Block, block_shape, hopper_blocks, is_team, mmq, resident, shared_bytes, team_blocks
from .half_check import may_be_halves
from .half_forms import half_form, has_halves
from .half_slots import cluster_of, neighbours
from .mmq_few import FewShape, few_shape, mmq_few
from .mmq_half import NOT_BESIDE_TEAMS, Halves, dense_blocks, half_limbs, half_scratch, mmq_half, mmq_of_halves
from .mmvq import MMVQShape, mmvq, mmvq_shape
from .mmvq_staged import StagedShape, mmvq_staged, staged_shape
from .split_levels import split_of
from .tile_form import QUAD, form, is_late, table_words

# us of a chunk (docs/kernels-log.md): a row tile with 16 tokens in mmq_few, of formats with late minima, and of others (0.3 to
# 0.5 by now, but their teams of warpgroups take less, too); of warpgroups, by their quads, of one, two, .. that a multiprocessor
# has a chunk of each, where products of levels and scales are split in two bytes
LATE_FEW_US, FEW_US = 0.36, 0.6
WARPGROUP_US = {4: (1.2, 1.76, 2.32, 2.88), 8: (1.6, 2.34, 3.08, 4.06), 16: (1.55, 2.6)}
COPIED_US = {8: (1.6, 2.2, 2.9, 3.9), 16: (1.27, 2.2)}  # the same, of blocks with copiers
# Parts of that: what formats take whose products are a byte each, and, by quads, those whose scales are split (`split_levels`)
OF_ONE_LIMB, OF_SPLIT_SCALES = 0.75, {4: 0.9, 8: 0.85, 16: 0.91}
SLOW_US = 0.2  # what one of 64 tokens, the only one of a multiprocessor, takes more of formats that are slow (`is_slow`)
CLUSTER_START_US, CLUSTER_US = 1.0, {4: 0.12, 8: 0.0, 16: 0.95}  # what a cluster takes more, by its quads in every turn
FEWEST_OF_WARPGROUPS = 8  # tokens, of which mmq_few takes so many in a block of its own
# us of mmq_half: of a round of blocks, and of each of its chunks, by their quads; of the launch before, and of each value of the
# activations
HALF_ROUND_US, HALF_START_US, WIDEN_US = 2.1, 2.0, 1.6e-6
PACKED_US, SCALED_US = {4: 0.95, 8: 1.27, 16: 1.75, 32: 3.5}, {8: 1.4, 16: 1.95, 32: 3.75}
# Scaled with minima, or in groups of 16 columns; packed with top bits, or of levels in bytes; split
MINIMA_US, SIXTEENS_US = {4: 1.25, 8: 1.57, 16: 2.65}, {8: 1.9, 16: 2.7, 32: 5.1}
TOPS_US, BYTES_US, SPLIT_US = {4: 1.28, 8: 1.49, 16: 1.96, 32: 3.6}, {8: 1.7, 16: 2.1, 32: 3.5}, {32: 4.3}
# What int8 products of these take over what `block_us` says
MINIMA_OF_INT8, SIXTEENS_OF_INT8, TOPS_OF_INT8, BYTES_OF_INT8, SPLIT_OF_INT8 = 1.5, 1.45, 1.05, 1.05, 1.15
HALF_TEAMS_ROUND_US = 2.2  # what a round takes more where teams share chunks; below, us of a turn of such teams
PACKED_TURN_US, MINIMA_TURN_US, SIXTEENS_TURN_US, TOPS_TURN_US, BYTES_TURN_US = 2.6, 3.6, 4.15, 3.1, 3.2
FEW_BITS = 2.1        # of a weight (`is_slow`)
FEWEST_OF_HALVES = 9  # tokens: of fewer half a block of mmq_half is empty
START_US = 2.0  # of a round of blocks of warpgroups, or of all of mmq_few: until the first chunk is there, and from the last on
MOST_TOKENS = 4 * 65535  # a grid has so many blocks in its second dimension
KERNELS = {Block: mmq, Halves: mmq_half, FewShape: mmq_few, MMVQShape: mmvq, StagedShape: mmvq_staged}  # by their plans


def fills(block: Block, n_rows: int, n: int, n_multiprocessors: int) -> bool:
    """Whether there is such a block of mmq for nearly every multiprocessor, not empty by half."""
    return 4 * -(-n_rows // block.rows) * -(-n // block.tokens) >= 3 * n_multiprocessors and 2 * n > block.tokens


def n_resident(names: tuple[str, ...], block: Block, shared_limit: int) -> int:
    """Blocks of warpgroups that a multiprocessor holds."""
    by_memory = (shared_limit + RESERVED) // (shared_bytes(names, block) + RESERVED)
    return min(resident(block), by_memory) if is_team(block) else 1


def of_limbs(fmt: Format, quads: int) -> float:
    """What a turn of a format takes, as a part of that of formats whose products of levels and scales are split. It is 1 where
    less than a tenth is won: with levels that are looked up in shared memory and, of 16 tokens, with signed ones."""
    if not form(fmt).integer or table_words(fmt.name):
        return 1.0
    split = split_of(fmt)
    if not split.by_scale:
        return 1.0
    if split.n_limbs == 1:
        return OF_ONE_LIMB
    return 1.0 if quads == 4 and not fmt.has_min else OF_SPLIT_SCALES[quads]


def block_us(names: tuple[str, ...], block: Block, n_rows: int, n_cols: int, n: int, n_multiprocessors: int,
             shared_limit: int) -> float:
    """What a matrix takes in blocks of warpgroups."""
    n_blocks, held = -(-n_rows // block.rows) * block.blocks * -(-n // block.tokens), n_resident(names, block, shared_limit)
    quads, n_warps = ((block.tokens // QUAD, 2 * block.row_tiles) if block.warpgroups else  # those of a group
                      (block.quads, block.n_warps))
    together = min(held, -(-n_blocks // n_multiprocessors)) * n_warps * block.teams // 4
    n_rounds, n_turns = -(-n_blocks // (held * n_multiprocessors)), -(-n_cols // (CHUNK * block.n_teams))
    start_us, turn_us = 0.0, (COPIED_US if block.copiers else WARPGROUP_US)[quads][together - 1]
    if together == 1 and quads == 16 and any(is_slow(format_of(name)) for name in names):
        turn_us += SLOW_US
    if block.blocks > 1:
        start_us, turn_us = CLUSTER_START_US, turn_us + CLUSTER_US[quads]
    turn_us *= max(of_limbs(format_of(name), quads) for name in names)
    return start_us + n_rounds * (START_US + n_turns * turn_us)


def late_few(names: tuple[str, ...], n: int) -> bool:
    """Whether one block of mmq_few has all tokens, and multiplies minima late. names: formats of the matrices."""
    return n <= MOST_TOKENS_FEW and all(is_late(format_of(name), MOST_TOKENS_FEW // QUAD) for name in names)


def few_us(names: tuple[str, ...], n_rows: int, n_cols: int, n: int, n_multiprocessors: int) -> float:
    """What a matrix takes by mmq_few. names: formats of the matrices."""
    n_blocks, chunk_us = -(-n_rows // ROWS) * -(-n // MOST_TOKENS_FEW), LATE_FEW_US if late_few(names, n) else FEW_US
    return START_US + chunk_us * -(-n_blocks // n_multiprocessors) * -(-n_cols // CHUNK)


class Times(NamedTuple):
    """Of a form of products of mmq_half."""
    us: dict[int, float]  # of a chunk, by the block's quads
    of_int8: float        # what int8 products take over what `block_us` says
    slow: bool            # whether teams of warpgroups, with two or three warps on a scheduler, wait for its weights (`is_slow`)
    turn_us: float | None = None  # of teams of mmq_half that share chunks


def half_times(fmt: Format) -> Times:
    half = half_form(fmt)
    if half.scaled and fmt.has_min:
        return Times(MINIMA_US, MINIMA_OF_INT8, True, MINIMA_TURN_US)
    if half.scaled:
        return (Times(SIXTEENS_US, SIXTEENS_OF_INT8, True, SIXTEENS_TURN_US) if fmt.group == 16 else
                Times(SCALED_US, 1, False))
    if half.split:
        return Times(SPLIT_US, SPLIT_OF_INT8, True)
    if half.width == 8:
        return Times(BYTES_US, BYTES_OF_INT8, True, BYTES_TURN_US)
    if half.tops:
        return Times(TOPS_US, TOPS_OF_INT8, False, TOPS_TURN_US)
    return Times(PACKED_US, 1, False, PACKED_TURN_US)


def half_us(fmt: Format, block: Block, n_rows: int, n_cols: int, n: int, n_multiprocessors: int) -> float:
    """What a matrix takes by mmq_half."""
    n_items = -(-n_rows // (block.rows * neighbours(block))) * -(-n // block.tokens)
    n_rounds, n_turns = -(-n_items // (n_multiprocessors // cluster_of(block))), -(-n_cols // (CHUNK * block.n_teams))
    if block.teams > 1:
        round_us = HALF_ROUND_US + HALF_TEAMS_ROUND_US + half_times(fmt).turn_us * n_turns
    else:
        round_us = HALF_ROUND_US + half_times(fmt).us[block.quads] * n_turns
    return n_rounds * round_us + HALF_START_US + WIDEN_US * n * n_cols


@lru_cache(None)
def half_block(type_, shape, n_rows: int, n_cols: int, n: int, n_multiprocessors: int, shared_limit: int) -> Block | None:
    """The block of mmq_half where it takes less than mmq of that shape, or than mmq_few of formats with late minima."""
    fmt = format_of(type_)
    few = isinstance(shape, FewShape)
    if n < FEWEST_OF_HALVES or not (late_few((fmt.name,), n) if few else isinstance(shape, Block)) or not has_halves(fmt):
        return None
    slower = fmt.name in NOT_BESIDE_TEAMS and not few and shape.teams > 1 and shape.quads == 16  # teams of float16
    us = {block: half_us(fmt, block, n_rows, n_cols, n, n_multiprocessors) for block in dense_blocks(fmt)
          if cluster_of(block) <= n_multiprocessors and (block.teams == 1 or (2 * n > block.tokens and not slower))}
    if not us:
        return None
    block = min(us, key=us.get)
    of_shape = (few_us((fmt.name,), n_rows, n_cols, n, n_multiprocessors) if few else
                block_us((fmt.name,), shape, n_rows, n_cols, n, n_multiprocessors, shared_limit))
    return block if us[block] < of_shape * half_times(fmt).of_int8 else None


def is_slow(fmt: Format) -> bool:
    """Whether up to 16 tokens go by mmq_few: levels by tables, or float minima, or float scales of 16 columns, or few bits. Of
    all but four it takes less than teams (docs/kernels-log.md)."""
    few_bits = tile_bytes(fmt) < FEW_BITS * ROWS * CHUNK // 8
    return few_bits or (half_form(fmt) is not None and not fmt.zero and half_times(fmt).slow)


def fastest(names: tuple[str, ...], blocks: tuple[Block, ...], n_rows: int, n_cols: int, n: int, n_multiprocessors: int,
            shared_limit: int) -> tuple[float, Block]:
    """(us, block) of the block that `block_us` finds the fastest."""
    us = {block: block_us(names, block, n_rows, n_cols, n, n_multiprocessors, shared_limit) for block in blocks}
    block = min(us, key=us.get)
    return us[block], block


@lru_cache(None)
def many_shape(names: tuple[str, ...], n_rows: int, n_cols: int, n: int, n_multiprocessors: int, shared_limit: int,
               warpgroups: bool) -> Block | None:
    """The block of mmq where it is faster than mmq_few. names: formats of the matrices;
    warpgroups: whether the device has them."""
    if warpgroups and n <= MOST_TOKENS_FEW and all(is_slow(format_of(name)) for name in names):
        return None
    blocks = hopper_blocks(names, shared_limit) if warpgroups else ()
    if not blocks:
        block = block_shape(names, shared_limit)
        if fills(block, n_rows, n, n_multiprocessors):
            return block
    if warpgroups and len(names) == 1:
        blocks += team_blocks(names, shared_limit)
    if not blocks:
        return None
    us, block = fastest(names, blocks, n_rows, n_cols, n, n_multiprocessors, shared_limit)
    return block if n > FEWEST_OF_WARPGROUPS and us < few_us(names, n_rows, n_cols, n, n_multiprocessors) else None


def quantized_shape(names: tuple[str, ...], n_rows: int, n_cols: int, n: int, n_multiprocessors: int, shared_limit: int,
                    warpgroups: bool = False) -> FewShape | Block:
    """mmq for many tokens, else mmq_few, for one matrix or two of the same sizes. names: their formats."""
    return (many_shape(names, n_rows, n_cols, n, n_multiprocessors, shared_limit, warpgroups)
            or few_shape(names, n_rows, n_cols, n, n_multiprocessors, shared_limit))


def mul_mat_shape(type_, n_rows: int, n_cols: int, n: int, n_multiprocessors: int, shared_limit: int,
                  warpgroups: bool = False) -> MMVQShape | StagedShape | FewShape | Block:
    """The kernel, by the class of its shape, and the shape for a device. Float weights: mmvq, and mmvq_staged where it can be."""
    fmt = format_of(type_)
    if not fmt.is_quantized:
        return (staged_shape(fmt, n_rows, n_cols, n, n_multiprocessors, shared_limit)
                or mmvq_shape(fmt, n_rows, n_cols, n, n_multiprocessors))
    return quantized_shape((fmt.name,), n_rows, n_cols, n, n_multiprocessors, shared_limit, warpgroups)


def check_sizes(n_rows: int, n_cols: int, n: int) -> None:
    for what, found in (("n_rows", n_rows), ("n_cols", n_cols)):
        need(found >= 1, what, found, "at least 1")
    need(1 <= n <= MOST_TOKENS, "n", n, f"1..{MOST_TOKENS}")


def check(call: Call) -> None:
    check_sizes(*call.w.shape, call.x.shape[0])


def limits(target) -> tuple[int, int, bool]:
    """What shapes depend on, of a device: its multiprocessors, bytes of shared memory of a block, whether it has warpgroups."""
    return target.n_multiprocessors, target.shared_limit, target.warpgroups


def plan_of(type_, n_rows: int, n_cols: int, n: int, target) -> MMVQShape | StagedShape | FewShape | Block | Halves:
    """One of `KERNELS`, on a device."""
    shape = mul_mat_shape(type_, n_rows, n_cols, n, *limits(target))
    block = half_block(type_, shape, n_rows, n_cols, n, *limits(target)[:2])
    return Halves(block) if block and may_be_halves(target, format_of(type_)) else shape


def plan(call: Call) -> MMVQShape | StagedShape | FewShape | Block | Halves:
    """Of the product of call.w and call.x."""
    return plan_of(call.w.dtype, *call.w.shape, call.x.shape[0], call.device)


def plan_without_scratch(call: Call) -> MMVQShape | StagedShape | FewShape | Block:
    """As `plan`, of those that need no scratch memory."""
    return mul_mat_shape(call.w.dtype, *call.w.shape, call.x.shape[0], *limits(call.device))


def scratch(call: Call) -> tuple[str, tuple[int]] | None:
    """The widened activations of `mmq_half`."""
    return half_scratch(call) if isinstance(call.plan, Halves) else None


def mul_mat(call: Call):
    """out[i, r] = the sum of w[r, c] * x[i, c] over the columns c.

    w: tiles of a weight [m, k]; x: act [n, k] of a quantized weight, f32 of a float one; both on 16 bytes. out: f32 [n, m]."""
    return KERNELS[type(call.plan)](call)


def part_of(call: Call, w: Operand, out: Operand, shape=None) -> Call:
    """out = w x, as a part of a call whose x and scratch memory it takes. shape: its plan, where it is known."""
    part = call.part("mul_mat", w=w, x=call.x, out=out)
    part.plan, part.scratch = plan(part) if shape is None else shape, call.scratch
    return part


def product(call: Call, w: Operand, out: Operand, shape=None):
    """The launch of `part_of`."""
    return mul_mat(part_of(call, w, out, shape))


def products(call: Call, pairs: list[tuple[Operand, Operand]]) -> list:
    """The launches of several (w, out), whose activations are widened once for those of a type, and of blocks of as many tokens,
    that follow each other."""
    launches, widened = [], None
    for w, out in pairs:
        part = part_of(call, w, out)
        if isinstance(part.plan, Halves):
            if widened != (w.dtype, part.plan.block.tokens):
                launches.append(half_limbs(part))
                widened = w.dtype, part.plan.block.tokens
            launches.append(mmq_of_halves(part))
        else:
            launches.append(mul_mat(part))
    return launches
