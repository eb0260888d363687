"""MMQ: products of quantized weights with many tokens on int8 tensor cores (docs/numerics.md, section 3).

A block takes `row_tiles` tiles of 32 rows and `groups` groups of `quads` quads of tokens, a warp for each tile and group
(`tile_product`), or on Hopper two warps for each tile (`group_product`). It goes through the chunks of 256 columns: while one
lies in a slot of shared memory and is multiplied, the weight tiles and activations of the next one are on their way to the other.
One barrier a chunk; a warp's totals stay in registers. Two warpgroups of most formats go each at its own pace instead
(`mbarrier`): a chunk is taken when its copies are there, a slot filled when all are done with it. On Hopper most blocks of one
matrix have a warpgroup more, which copies all chunks (`mmq_copiers`).
"""
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

from numba import cuda, types

from ...quant.formats import FORMATS, Format, format_of
from ..call import Call
from . import cluster, group_product, mbarrier, wgmma
from .block import Block
from .dispatch import dispatch_table
from .ending import STORE, Ending, gate_and_store
from .exchange import exchanger, held_scales
from .launch import F32, HOPPER, I32, Kernel, N, SHARED_LIMIT, U32, factory, need
from .mmq_copiers import copied_products
from .mmq_slots import (Found, Operands, barrier_places, chunk_slot, first_slot, is_paced, prepares_scales, slot_barriers,
                        slot_filler, sources, takes_turns, turn_barriers)
from .mmq_stages import chunk_folder, chunk_taker, exchange_of, totals_writer
from .operands import Pairs, addresses, constants_of, gated_of, pairs_of, qkv_of
from .parts import Part, dense, grouped, in_a_row, item_words, taker
from .ptx import afresh, copies_wait_but, device, f32, i32, quotient, remainder, shuffle, sts, wait_for_previous
from .quantize import most_rows
from .tile_form import Form, form
from .tile_product import tile_product

BLOCKS = Block(4, 2, 16), Block(4, 2, 8), Block(2, 2, 8), Block(2, 1, 8), Block(1, 1, 8)
HOPPER_BLOCKS = tuple(Block(row_tiles, 1, group_product.MOST_QUADS, True, 3) for row_tiles in (4, 2))
COPIERS = 4
NOT_FOUR_SLOTS = "IQ4_KT",  # a format of which blocks of few rows take less with three
# Formats for which lanes of four teams of 32 tokens have too few registers beside copiers: without a cluster, in one
NO_COPIERS_ALONE, NO_COPIERS_IN_CLUSTERS = ("Q4_0", "Q5_0", "Q6_0"), ("MXFP4", "Q6_0")
TEAMS = {4: 4, 8: 4, 16: 2}  # of a block of few tokens at most, by quads (`most_teams`)
# Formats for which lanes of four teams of 32 tokens have too few registers: always; without a cluster, in one; of more matrices
NOT_FOUR, NOT_FOUR_ALONE, NOT_FOUR_IN_CLUSTERS = ("NVFP4", "IQ4_KT"), ("IQ4_NL", "MXFP4"), ("IQ5_K",)
NOT_FOUR_OF_SEVERAL = "Q4_1", "Q5_1"
LANES_ANEW = "IQ6_K",  # formats of which four teams in a cluster have enough if each chunk computes anew what depends on the lane


def most_quads(fmt: Format) -> int:
    """Quads of a warp at most: a sum of sixteen takes two registers where a float scale follows it, more where integers wait for
    the end of a chunk."""
    return 16 if form(fmt) == Form(32, False, False, False) and not fmt.has_min else 8


def n_words(fmt: Format, block: Block) -> int:
    at = exchange_of(fmt, block)
    return at.n_words if block.n_teams > 1 else at.sums + 2 * mbarrier.WORDS * takes_turns(fmt, block)


def shared_bytes(names: tuple[str, ...], block: Block) -> int:
    """Of one matrix after the other."""
    return 4 * max(n_words(format_of(name), block) for name in names)


@lru_cache(None)
def block_shape(names: tuple[str, ...], shared_limit: int) -> Block:
    """The largest block without warpgroups that registers and shared memory hold. names: formats of the matrices."""
    quads = min(most_quads(format_of(name)) for name in names)
    return next(block for block in BLOCKS if block.quads <= quads and shared_bytes(names, block) <= shared_limit)


def warpgroups_pay(fmt: Format) -> bool:
    """Where tokens are many. Not where a float minimum or a scale for each 16 columns follows the sums: these take as long as the
    products (docs/kernels-log.md)."""
    return form(fmt).integer or (not fmt.has_min and form(fmt).step == 32)


def lone_block(names: tuple[str, ...], block: Block) -> Block:
    """One of HOPPER_BLOCKS, mostly with copiers. Without: for the two matrices of a gated unit; of few rows, where the tensor
    core adds up groups and copiers gain nothing; of many rows with float minima, whose lanes have too few registers. Stored
    levels, which nobody unpacks, two warpgroups of a block of few rows take, each with half of the tokens. Where integer scales
    are prepared in shared memory, which takes a warp long, blocks of few rows have a chunk more on its way."""
    formats, few_rows = [format_of(name) for name in names], block == HOPPER_BLOCKS[1]
    if len(names) == 2 or any(form(fmt).carried if few_rows else fmt.has_min and not form(fmt).integer
                              for fmt in formats):
        return block
    if few_rows and all(map(group_product.is_stored, formats)):
        block = replace(block, groups=2, quads=block.quads // 2)
    elif few_rows and all(map(prepares_scales, formats)) and {*names}.isdisjoint(NOT_FOUR_SLOTS):
        block = replace(block, slots=4)
    return replace(block, copiers=COPIERS)


@lru_cache(None)
def hopper_blocks(names: tuple[str, ...], shared_limit: int) -> tuple[Block, ...]:
    """The blocks of warpgroups that shared memory holds, if they pay for all the formats."""
    blocks = (lone_block(names, block) for block in HOPPER_BLOCKS)
    fitting = tuple(block for block in blocks if shared_bytes(names, block) <= shared_limit)
    return fitting if all(warpgroups_pay(format_of(name)) for name in names) else ()


def is_team(block: Block) -> bool:
    """Whether its chunks are shared, or its tokens few."""
    return block.warpgroups and (block.n_teams > 1 or block.tokens < HOPPER_BLOCKS[0].tokens)


def most_teams(names: tuple[str, ...], quads: int, blocks: int) -> int:
    """Teams of a block at most, as registers hold them. names: formats of the matrices; blocks: of the cluster."""
    name, several = names[0], len(names) > 1
    too_many = (len(set(names)) > 1 or name in NOT_FOUR or name in (NOT_FOUR_ALONE if blocks == 1 else NOT_FOUR_IN_CLUSTERS)
                or (several and name in NOT_FOUR_OF_SEVERAL))
    return TEAMS[quads] - (quads == 8 and too_many)


def copiers_of_teams(names: tuple[str, ...], quads: int, teams: int, blocks: int) -> int:
    """Where it takes less with them, and lanes have registers enough: of 64 tokens; of 32, with float scales, several teams."""
    few_registers = teams == 4 and not {*names}.isdisjoint(NO_COPIERS_ALONE if blocks == 1 else NO_COPIERS_IN_CLUSTERS)
    integer, pay = (any(form(format_of(name)).integer for name in names), all(warpgroups_pay(format_of(name)) for name in names))
    return COPIERS if pay and (quads == 16 or (quads == 8 and teams > 1 and not (integer or few_registers))) else 0


def team_block(names: tuple[str, ...], quads: int, teams: int, blocks: int, shared_limit: int) -> Block | None:
    """One of `team_blocks`: in clusters, of more than 16 tokens, with two sides if there is room; with two slots of a team, or as
    many as shared memory holds, more than teams; of 64 tokens with three."""
    slots = (3,) if quads == 16 else range(2 * teams, teams, -1)
    most_sides = 2 if blocks > 1 and quads > 4 else 1
    copiers = copiers_of_teams(names, quads, teams, blocks)
    fitting = (Block(2, 1, quads, True, n, teams, blocks, sides, copiers) for sides in range(most_sides, 0, -1) for n in slots)
    return next((block for block in fitting if shared_bytes(names, block) <= shared_limit), None)


@lru_cache(None)
def team_blocks(names: tuple[str, ...], shared_limit: int) -> tuple[Block, ...]:
    """The blocks for few tokens, of any formats, alone or in clusters of two, that shared memory holds."""
    shapes = [(quads, teams, blocks) for blocks in (1, 2) for quads in (4, 8)
              for teams in range(blocks, most_teams(names, quads, blocks) + 1)]
    return tuple(filter(None, (team_block(names, *shape, shared_limit) for shape in (*shapes, (16, 2, 2)))))


def products(name: str, block: Block, ending: Ending, part: Part):  # noqa: PLR0915 (a kernel: its steps in order)
    """The body of a kernel, the products with one matrix: (words, bias, other_bias, act, out, last, n_rows, n_cols, n, n_out),
    last: of the last matrix."""
    if block.copiers:
        return copied_products(name, block, ending, part)
    fmt, warpgroups, slots, paced = format_of(name), block.warpgroups, block.slots, is_paced(format_of(name), block)
    by_turns, turns_at = takes_turns(fmt, block), exchange_of(fmt, block).sums
    multiply, n_entries, entry = (group_product.group_product(name, block.quads, by_turns) if warpgroups
                                  else tile_product(name, block.quads))
    begin_turns, end_turns, turn_at = turn_barriers(block, turns_at)
    (find, fill, fill_tile, fill_tokens), fold_chunk = slot_filler(fmt, block, part), chunk_folder(fmt, block, multiply)
    exchanging = exchanger(block, exchange_of(fmt, block))
    take_chunk = chunk_taker(fmt, block, fold_chunk, exchanging)
    store_totals = totals_writer(block, ending, part, block.n_sums)
    (begin_barriers, end_barriers), (there, _) = slot_barriers(fmt, block), barrier_places(fmt, block)
    n_offsets, n_scales, n_limbs, n_places = sources(fmt, block)
    first, slot_words, n_threads = first_slot(fmt, block), chunk_slot(fmt, block).n_words, block.n_threads
    n_found, n_sums, n_own, n_products = n_scales + n_limbs, block.n_sums, block.n_own, 4 * block.quads
    blocks, teams, n_teams = block.blocks, block.teams, block.n_teams
    begin_exchange, end_exchange, finish = exchanging.begin, exchanging.end, exchanging.finish
    early = warpgroups and part.n_tokens is None  # weights are on their way before the kernel before has ended
    team_threads, ahead = 32 * block.n_warps, (slots - 1) // teams  # chunks of a team that are on their way
    step, ring_words, last_step = teams * slot_words, slots * slot_words, first + (slots - teams) * slot_words
    wait, meet = copies_wait_but(slots - 2), cluster.meet if blocks > 1 else cuda.syncthreads
    n_held, anew = held_scales(block), not warpgroups or (n_teams == 8 and name in LANES_ANEW)

    @device
    def run(words, bias, other_bias, act, out, last, n_rows, n_cols, n, n_out):  # noqa: PLR0915 (a kernel: its steps in order)
        shared = cuda.shared.array(0, types.uint32)
        total, acc, held = cuda.local.array(n_own, f32), cuda.local.array(n_sums, f32), cuda.local.array(n_held, types.uint32)
        tid, n_chunks, team, turn_of = i32(cuda.threadIdx.x), i32((n_cols + 255) >> 8), i32(0), i32(0)
        rank = remainder(i32(cuda.blockIdx.x), blocks)
        if n_entries:
            p = tid
            while p < n_entries:
                sts(shared, p, entry(p))
                p = i32(p + n_threads)
        for o in range(n_own):
            total[o] = f32(0)
        d, e = cuda.local.array(n_products, i32), cuda.local.array(n_products, i32)
        if warpgroups:
            for o in range(n_products):
                d[o], e[o] = i32(0), i32(0)
        operands = Operands(words, act, n_rows, n_chunks, n)
        found = Found(cuda.local.array(n_places, i32), cuda.local.array(n_offsets, i32), cuda.local.array(n_found, i32))
        if teams > 1:
            team = shuffle(quotient(tid, team_threads), i32(0))  # known to be the same for all lanes
            tid = i32(tid - team * team_threads)
        if warpgroups:
            find(tid, shared, n_chunks, n, found)
        number = i32(team * blocks + rank)
        own = i32(first + team * slot_words)  # its first slot
        chunk, copied, now, free, turn, free_turn = number, number, own, own, i32(0), i32(0)
        if n_teams > 1:
            begin_exchange(tid, team, shared)
        if paced:
            if team == 0:
                begin_barriers(tid, shared, first)
            if by_turns:
                begin_turns(tid, shared)
            meet()
        if early:
            while copied < ahead * n_teams:  # the copies run ahead by so many chunks
                fill_tile(tid, shared, free, copied, operands, found)
                copied, free = i32(copied + n_teams), i32(free + step)
            wait_for_previous()
            copied, free = number, own
        while copied < ahead * n_teams:
            if early:
                fill_tokens(tid, shared, free, copied, operands, found)
            else:
                fill(tid, shared, free, free_turn, copied, operands, found)
            copied, free = i32(copied + n_teams), i32(free + step)
        if teams > 1 and free > last_step + step - slot_words:
            free, free_turn = i32(free - ring_words), i32(1)
        # These warps fill slots behind their products, so that two warps of a scheduler are not at the same work; and those
        # whose slot another team multiplies in the same turn, for which, with one side, all must first have added the sums of the
        # turn before; and those that multiply by turns, while the others may still follow up the sums of what lay there
        later = (team & 1 == 1 or team >= slots - teams) if teams > 1 else warpgroups and (by_turns or tid >= 128)
        while chunk < n_chunks:
            if paced:
                mbarrier.wait(shared, now + there, turn)
            else:
                wait()
            if warpgroups:
                wgmma.fence()
            if not paced:
                cuda.syncthreads()  # the chunk is there; all are done with the one before, whose slot is filled anew
            copied = i32(chunk + ahead * n_teams)
            if not later:
                fill(tid, shared, free, free_turn, copied, operands, found)
            if anew:
                tid = afresh(tid)
            turn_of = take_chunk(tid, team, rank, shared, now, n_chunks, turn_of, total, acc, held, d, e,
                                 turn_at(i32(tid >> 5), chunk))
            if later:
                fill(tid, shared, free, free_turn, copied, operands, found)
            if free >= last_step:
                free_turn = i32(free_turn ^ 1)
            if now >= last_step:
                turn = i32(turn ^ 1)
            free = i32(free + step if free < last_step else free + (step - ring_words))
            chunk, now = i32(chunk + n_teams), i32(now + step if now < last_step else now + (step - ring_words))
        if n_teams > 1:
            finish(tid, team, rank, shared, turn_of, n_chunks, total)
        if slots % teams:
            cuda.syncthreads()  # all are done with the slot, which is not the team's alone
        store_totals(tid, shared, now, total, number * n_own, out, n_rows, n_out, last, bias, other_bias)
        if paced:
            meet()  # none waits any more
            if team == 0:
                end_barriers(tid, shared, first)
            if by_turns:
                end_turns(tid, shared)
            if n_teams > 1:
                end_exchange(tid, team, shared)
    return run


def both_products(names: tuple[str, ...], block: Block, ending: Ending, part: Part):
    """The body of a kernel for one matrix, or for two one after the other: (words, other words, biases, act, out, n_rows, n_cols,
    n, n_out)."""
    assert not block.copiers, block  # they are done behind one product
    first, last, n_products = products(names[0], block, ending, part), products(names[-1], block, ending, part), len(names)
    looped = len(set(names)) == 1 and (n_products == 1 or not form(format_of(names[0])).integer)

    @device
    def run(words, other_words, bias, other_bias, act, out, n_rows, n_cols, n, n_out):
        # The same code for both: in a second copy for float scales ptxas would let no product of a warpgroup run beside other
        # work
        if looped:
            left = i32(n_products)
            while left > 0:
                left = i32(left - 1)
                last(words if left > 0 else other_words, bias, other_bias, act, out, left == 0, n_rows, n_cols, n, n_out)
                if left > 0:
                    cuda.syncthreads()  # all are done with the last chunk
        else:
            first(words, bias, other_bias, act, out, False, n_rows, n_cols, n, n_out)
            cuda.syncthreads()
            last(other_words, bias, other_bias, act, out, True, n_rows, n_cols, n, n_out)
    return run


# Blocks that every GPU can hold: they are the first and the last cases, which tests compile for every compute capability
SMALL_TESTED = [(name, *astuple(block)) for name, block in zip(("Q4_0", "Q5_1", "Q4_K"), BLOCKS[2:])]
QUANTIZED = [fmt for fmt in FORMATS.values() if fmt.is_quantized]
TEAMS_TESTED = [(fmt.name, *astuple(block)) for fmt in QUANTIZED for block in (
    Block(2, 1, 4, True, 8, 4), team_block((fmt.name,), 16, 2, 2, SHARED_LIMIT),
    *(team_block((fmt.name,), 8, most_teams((fmt.name,), 8, blocks), blocks, SHARED_LIMIT) for blocks in (1, 2)))]
TEAMS_TESTED += [("Q4_K", *astuple(block)) for block in (
    Block(2, 1, 4, True, 8, 4, 2), Block(2, 1, 8, True, 6, 3), Block(2, 1, 8, True, 2), Block(2, 1, 16, True, 2, 1, 2, 2))]
TEAMS_TESTED += [("IQ5_K", *astuple(Block(2, 1, 4, True, 7, 4, 2)))]
TEAMS_TESTED += [(name, *astuple(team_block((name,), 8, 3, blocks, SHARED_LIMIT)))
                 for blocks, of_three in ((1, NO_COPIERS_ALONE), (2, NO_COPIERS_IN_CLUSTERS)) for name in of_three]


@factory(SMALL_TESTED[:1] + TEAMS_TESTED
         + [(fmt.name, *astuple(block)) for fmt in QUANTIZED
            for block in (Block(4, 2, most_quads(fmt)), lone_block((fmt.name,), HOPPER_BLOCKS[0]))]
         + [(name, *astuple(lone_block((name,), HOPPER_BLOCKS[1]))) for name in ("Q8_0", "Q4_K", "IQ4_XS", "MXFP4")]
         + SMALL_TESTED[1:])
def mmq_kernel(name, *block):
    block = Block(*block)
    run = products(name, block, STORE, dense(block))

    def kernel(words, act, out, n_rows, n_cols, n):  # block: rows from blockIdx.x * rows, tokens from blockIdx.y * tokens
        run(words, out, out, act, out, True, n_rows, n_cols, n, n)
    return Kernel(kernel, (U32, U32, F32, N, N, N), block.n_threads, resident(block) if is_team(block) else 1,
                  HOPPER if block.warpgroups else None, block.blocks)


@factory([("relu", "IQ4_XS", "Q5_0", False, *astuple(BLOCKS[2])), ("silu", "Q8_0", "Q8_0", False, *astuple(BLOCKS[0])),
          ("gelu", "Q6_K", "Q4_K", True, *astuple(BLOCKS[1])), ("silu", "Q8_0", "Q6_K", True, *astuple(HOPPER_BLOCKS[0])),
          ("silu", "Q4_K", "Q4_K", False, *astuple(HOPPER_BLOCKS[1])),
          ("silu", "Q8_0", "Q8_0", False, *astuple(HOPPER_BLOCKS[0])), ("silu", "Q4_1", "Q4_1", True, *astuple(BLOCKS[3]))])
def mmq_glu_kernel(activation, gate, up, biased, *block):
    block = Block(*block)
    run = both_products((gate, up), block, gate_and_store(activation, biased), dense(block))

    def kernel(gate_words, up_words, gate_bias, up_bias, act, out, n_rows, n_cols, n):  # blocks as in mmq_kernel
        run(gate_words, up_words, gate_bias, up_bias, act, out, n_rows, n_cols, n, n)
    return Kernel(kernel, (U32, U32, F32, F32, U32, F32, N, N, N), 32 * block.n_warps, arch=HOPPER if block.warpgroups else None)


# Matrices behind each other, of one input: blocks of rows of the first, then of the second and the third

QKV_TESTED = [("Q4_K", "Q4_K", "Q4_K", *astuple(Block(2, 1, 4, True, 8, 4))),
              ("Q8_0", "Q8_0", "Q8_0", *astuple(Block(2, 1, 8, True, 5, 4, 2, 1, COPIERS))),
              ("MXFP4", "MXFP4", "MXFP4", *astuple(Block(2, 1, 8, True, 6, 4, 2, 2))),
              ("Q8_0", "Q8_0", "Q8_0", *astuple(lone_block(("Q8_0",) * 3, HOPPER_BLOCKS[1]))),
              *(("Q4_0", "Q8_0", "Q6_0", *astuple(team_block(("Q4_0", "Q8_0", "Q6_0"), 8, 3, blocks, SHARED_LIMIT)))
                for blocks in (1, 2)),
              ("Q4_K", "Q4_K", "Q4_K", *astuple(Block(2, 1, 8, True, 7, 4))),
              ("Q4_K", "Q4_K", "Q6_K", *astuple(Block(2, 1, 8, True, 6, 3))),
              ("Q4_K", "Q4_K", "Q6_K", *astuple(Block(2, 1, 16, True, 3, 1, 1, 1, COPIERS))),
              ("Q4_K", "Q4_K", "Q6_K", *astuple(Block(2, 1, 16, True, 3, 2, 2, 2, COPIERS)))]


NUMBER_BYTES = 16  # of the number of a block of rows, behind all else


def qkv_bytes(names: tuple[str, ...], block: Block) -> int:
    """Bytes of shared memory."""
    return shared_bytes(names, block) + NUMBER_BYTES


@factory(QKV_TESTED)
def mmq_qkv_kernel(q, k, v, *block):
    block, names = Block(*block), (q, k, v)
    at, rows, blocks = shared_bytes(names, block) // 4, block.rows, block.blocks
    of_kinds = {name: products(name, block, STORE, in_a_row(block, at)) for name in names}
    run_q, run_k, run_v = (of_kinds[name] for name in names)
    one_kind, alone = len(of_kinds) == 1, block.n_teams == 1 and not block.copiers

    def kernel(q_words, k_words, v_words, act, q_out, k_out, v_out, q_rows, k_rows, v_rows, n_cols, n):
        # block: of the matrices' blocks of rows the one of number blockIdx.x / blocks; tokens from blockIdx.y * tokens
        row_block, matrix, n_rows = quotient(i32(cuda.blockIdx.x), blocks), i32(0), q_rows
        n_blocks = quotient(i32(q_rows + (rows - 1)), rows)
        if row_block >= n_blocks:
            row_block, matrix, n_rows = i32(row_block - n_blocks), i32(1), k_rows
            n_blocks = quotient(i32(k_rows + (rows - 1)), rows)
            if row_block >= n_blocks:
                row_block, matrix, n_rows = i32(row_block - n_blocks), i32(2), v_rows
        if cuda.threadIdx.x == 0:
            sts(cuda.shared.array(0, types.uint32), at, row_block)
        if alone:
            cuda.syncthreads()  # it is there; others have a barrier before they read it
        if one_kind:
            words = q_words if matrix == 0 else k_words if matrix == 1 else v_words
            out = q_out if matrix == 0 else k_out if matrix == 1 else v_out
            run_q(words, out, out, act, out, True, n_rows, n_cols, n, n)
        elif matrix == 0:
            run_q(q_words, q_out, q_out, act, q_out, True, n_rows, n_cols, n, n)
        elif matrix == 1:
            run_k(k_words, k_out, k_out, act, k_out, True, n_rows, n_cols, n, n)
        else:
            run_v(v_words, v_out, v_out, act, v_out, True, n_rows, n_cols, n, n)
    return Kernel(kernel, (*[U32] * 4, *[F32] * 3, *[N] * 5), block.n_threads, resident(block), HOPPER, blocks)


# Matrices of experts, or of heads: blocks take items of work one after the other

def resident(block: Block) -> int:
    """Blocks of a multiprocessor whose registers it holds: 255 a thread, less for few tokens of warpgroups. One at least: threads
    of larger blocks take fewer."""
    if block.copiers:
        return 1
    n_warps = {4: 16, 8: 12}.get(block.quads, 8) if block.warpgroups else 8
    return max(1, n_warps // (block.n_warps * block.teams))


def grouped_bytes(names: tuple[str, ...], block: Block) -> int:
    """Bytes of shared memory: an item lies behind all else."""
    return shared_bytes(names, block) + 4 * item_words(block.tokens)


def grouped_products(names: tuple[str, ...], block: Block, ending: Ending, heads: bool):
    """The body of a kernel, whose out is [pairs, rows]: (words, other_words, bias, other_bias, act, table, out, order, pairs), as
    of `both_products` and `taker`."""
    at, rows = shared_bytes(names, block) // 4, block.rows
    item_at = device(lambda: i32(at))
    part = grouped(block.tokens, item_at)
    count, take = taker(block.tokens, 32 * block.n_warps, item_at, heads)
    multiply = both_products(names, block, ending, part)

    @device
    def run(words, other_words, bias, other_bias, act, table, out, order, pairs):
        shared = cuda.shared.array(0, types.uint32)
        n_row_blocks = quotient(i32(pairs.n_rows + (rows - 1)), rows)
        item, end = i32(cuda.blockIdx.x), i32(count(table, pairs) * n_row_blocks)
        while item < end:
            work = quotient(item, n_row_blocks)
            take(i32(cuda.threadIdx.x), shared, table, work, i32(item - work * n_row_blocks), order, pairs)
            cuda.syncthreads()  # the item is there
            multiply(words, other_words, bias, other_bias, act, out, pairs.n_rows, pairs.n_cols, pairs.n, pairs.n_pairs)
            cuda.syncthreads()  # all are done with the item
            item = i32(item + cuda.gridDim.x)
    return run


GROUPED_TESTED = [(name, heads, *astuple(block)) for name, heads, block in (
    ("Q4_0", False, Block(4, 1, 4)),
    *((fmt.name, False, Block(2, 1, 4, True, 3) if warpgroups_pay(fmt) else Block(4, 1, 8)) for fmt in QUANTIZED),
    ("Q4_K", False, Block(2, 1, 8, True, 3)), ("Q8_0", False, Block(2, 1, 12, True)), ("Q6_K", False, Block(2, 1, 16, True)),
    ("Q4_K", True, Block(2, 1, 4, True)), ("Q4_1", True, Block(2, 1, 4)), ("Q6_K", False, Block(4, 2, 8)))]
GROUPED_GLU_TESTED = [(*case, *astuple(block)) for *case, block in (
    ("silu", "Q4_K", "Q4_K", False, 0.0, 0.0, Block(4, 1, 4)), ("silu", "Q4_K", "Q4_K", False, 0.0, 0.0, Block(2, 1, 12, True)),
    ("gelu", "Q8_0", "Q6_K", True, 0.0, 0.0, Block(2, 1, 4, True, 3)),
    ("swiglu_oai", "MXFP4", "MXFP4", True, 1.702, 7.0, Block(2, 1, 8, True)),
    ("swiglu_oai", "MXFP4", "MXFP4", True, 1.702, 7.0, Block(2, 1, 4)))]


@factory(GROUPED_TESTED)
def mmq_id_kernel(name, heads, *block):
    block = Block(*block)
    run = grouped_products((name,), block, STORE, heads)

    def kernel(words, act, table, out, order, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows):
        # A block: items from blockIdx.x by gridDim.x
        run(words, words, out, out, act, table, out, order, Pairs(n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows))
    parameters = U32, U32, I32, F32, *[N] * 8
    return Kernel(kernel, parameters, 32 * block.n_warps, resident(block), HOPPER if block.warpgroups else None)


@factory(GROUPED_GLU_TESTED)
def mmq_id_glu_kernel(activation, gate, up, biased, alpha, limit, *block):
    block = Block(*block)
    run = grouped_products((gate, up), block, gate_and_store(activation, biased, alpha, limit), False)

    def kernel(gate_words, up_words, gate_bias, up_bias, act, table, out, order, n_matrices, n_rows, n_cols, n, n_pairs, n_used,
               x_rows):  # as in mmq_id_kernel
        run(gate_words, up_words, gate_bias, up_bias, act, table, out, order,
            Pairs(n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows))
    parameters = U32, U32, F32, F32, U32, I32, F32, *[N] * 8
    return Kernel(kernel, parameters, 32 * block.n_warps, resident(block), HOPPER if block.warpgroups else None)


def launch_grid(block: Block, n_rows: int, n_cols: int, n: int) -> tuple[int, int]:
    """Blocks over the rows of a matrix and over n tokens."""
    most = min(65535 * block.tokens, most_rows(n_cols))  # blocks of a grid; words of activations
    need(n <= most, "n", n, f"1..{most}")
    return -(-n_rows // block.rows) * block.blocks, -(-n // block.tokens)


def mmq(call: Call):
    """out = w x, as of `mul_mat`, w quantized. plan: `Block`."""
    names, block, sizes = (call.w.dtype,), call.plan, (*call.w.shape, call.x.shape[0])
    kernel, args = mmq_kernel(*names, *astuple(block)), (*addresses(call.w, call.x, call.out), *sizes)
    return call.device.launch(kernel, launch_grid(block, *sizes), block.n_threads, args, shared_bytes(names, block))


def mmq_qkv(call: Call):
    """q_out, k_out, v_out = q x, k x, v x, all quantized. plan: `Block` of teams, or of 64 x 64."""
    names, n_rows, _, words, _, outs = qkv_of(call)
    block, (n, n_cols) = call.plan, call.x.shape
    grids = [launch_grid(block, rows, n_cols, n) for rows in n_rows]
    kernel, args = mmq_qkv_kernel(*names, *astuple(block)), (*words, call.x.data, *outs, *n_rows, n_cols, n)
    return call.device.launch(kernel, (sum(x for x, _ in grids), grids[0][1]), block.n_threads, args, qkv_bytes(names, block))


def mmq_glu(call: Call):
    """out = act(gate x + its bias) * (up x + its bias), as of `mul_mat_glu`, gate and up quantized. plan: `Block`."""
    (names, biased, matrices), block, sizes = gated_of(call), call.plan, (*call.gate.shape, call.x.shape[0])
    kernel, args = mmq_glu_kernel(call.act, *names, biased, *astuple(block)), (*matrices, *addresses(call.x, call.out), *sizes)
    return call.device.launch(kernel, launch_grid(block, *sizes), 32 * block.n_warps, args, shared_bytes(names, block))


@dataclass(frozen=True)
class GroupedShape:
    """Launch of mmq_id: its block, and how many of them a multiprocessor holds."""
    block: Block
    n_resident: int


def launch_items(call: Call, kernel: Kernel, names: tuple[str, ...], sizes: Pairs, n_items: int, args: tuple):
    """Blocks that take items of work one after the other, of at most n_items. args: of the kernel, in front of the sizes."""
    block, n_all_rows = call.plan.block, sizes.n_matrices * sizes.n_rows
    launch_grid(block, sizes.n_rows, sizes.n_cols, sizes.n)
    need(n_all_rows < 1 << 31, "n_matrices * n_rows", n_all_rows, f"less than {1 << 31}")
    n_blocks = n_items * -(-sizes.n_rows // block.rows)
    need(n_blocks < 1 << 31, "blocks", n_blocks, f"less than {1 << 31}")
    grid = min(n_blocks, call.plan.n_resident * call.device.n_multiprocessors)
    return call.device.launch(kernel, grid, 32 * block.n_warps, (*args, *sizes), grouped_bytes(names, block))


def mmq_id(call: Call):
    """out = w[ids] x, as of `mul_mat_id`, w quantized. plan: `GroupedShape`. scratch: what `dispatch` writes for its block's
    tokens."""
    names, sizes, block = (call.w.dtype,), pairs_of(call), call.plan.block
    at = dispatch_table(sizes.n_matrices, sizes.n_pairs, block.tokens)
    args = *addresses(call.w, call.x, call.scratch, call.out), at.order
    return launch_items(call, mmq_id_kernel(*names, False, *astuple(block)), names, sizes, at.n_items, args)


def mmq_heads(call: Call):
    """The products of `mul_mat_heads`, w quantized. plan: `GroupedShape`."""
    names, sizes, block = (call.w.dtype,), pairs_of(call), call.plan.block
    n_items, args = sizes.n_matrices * -(-sizes.n_tokens // block.tokens), (*addresses(call.w, call.x, call.out, call.out), 0)
    return launch_items(call, mmq_id_kernel(*names, True, *astuple(block)), names, sizes, n_items, args)


def mmq_id_glu(call: Call):
    """out = act(gate[ids] x + its bias) * (up[ids] x + its bias), as of `mul_mat_id_glu`, gate and up quantized. plan, scratch:
    as of `mmq_id`."""
    (names, biased, matrices), sizes, block = gated_of(call), pairs_of(call), call.plan.block
    at = dispatch_table(sizes.n_matrices, sizes.n_pairs, block.tokens)
    kernel = mmq_id_glu_kernel(call.act, *names, biased, *constants_of(call), *astuple(block))
    return launch_items(call, kernel, names, sizes, at.n_items, (*matrices, *addresses(call.x, call.scratch, call.out), at.order))
