"""Products of the matrices of experts with few tokens (docs/numerics.md, section 9): the weights of an expert are read once for
up to 16 rows that chose it.

A *pair* is a token and the rank of one of its experts, pair = token * n_used + rank; a *group* is a matrix and some of the pairs
that chose it, in ascending order. Each block sorts all pairs for itself in shared memory, which takes less than a launch as long
as they are few. Then it takes row tiles as in mmq_few, of the groups one behind the other, from blockIdx.x by gridDim.x. For a
single token every pair is a group, and nothing is sorted.

Pairs whose id is no expert belong to no group, as in `dispatch`: their rows of the result are left as they are, and the first is
left in `fault`.
"""
from functools import lru_cache
from typing import NamedTuple

from numba import cuda

from ...quant.formats import CHUNK, format_of
from ...quant.tile import ROWS
from ..call import Call
from .dispatch import report, sum_before
from .ending import STORE, Ending, gate_and_store
from .few_product import products
from .few_slots import MOST_TOKENS, shared_words
from .launch import F32, I32, Kernel, N, RESERVED, U32, factory, need
from .mmq_few import MAX_WARPS as FEW_WARPS, FewShape, boxes_of, evenly, threads_of, work
from .operands import Pairs, addresses, constants_of, fault_of, gated_of, pairs_of, row_of_pair
from .ptx import as_f32, ballot, device, i32, i64, ld, ld_settled, lds, least, popc, quotient, remainder, stage, sts, syncwarp
from .quantize import most_rows
from .tile_form import QUAD, form
from .tile_walk import PICK, TileWalk, matrices_by_turns, tiles_of

MOST_PAIRS, MOST_MATRICES = 512, 2048  # sorted in shared memory
KIND_BITS = (MOST_MATRICES + 1).bit_length()  # of the number of a matrix, of none, or of no pair
MAX_WARPS = FEW_WARPS | {MOST_TOKENS: 7}  # as of `mmq_few`, but that two formats want 255 registers
# Of all warps of a multiprocessor those that registers leave room for; without integer scales kernels take up to 112
ALL_WARPS, FLOAT_WARPS = {1: 16, QUAD: 16, 2 * QUAD: 8, MOST_TOKENS: 8}, {1: 16, QUAD: 16, 2 * QUAD: 12, MOST_TOKENS: 12}
MOST_RESIDENT = 4                          # blocks on a multiprocessor
# Planes of shared memory, of a word for each pair, up to the next 16: matrices of the groups, rows of x of the sorted pairs,
# these pairs; of the pairs as they come, their matrices and how many of its matrix are before each; where groups begin. Behind
# them the end of the last group, for as many groups as pairs; the number of groups; and from FIRST on, for each matrix, for pairs
# that have none, and for none, the place of the first sorted pair, then the first group.
MATRICES, ROWS_OF_X, PAIRS, UNSORTED, RANKS, STARTS, END = range(7)
FIRST = 2


def padded(n_pairs):
    return (n_pairs + 15) & -16


def table_words(n_pairs: int, n_tokens: int, n_matrices: int) -> int:
    """Of shared memory; for a single token two planes."""
    return 2 * padded(n_pairs) if n_tokens == 1 else END * padded(n_pairs) + FIRST + 2 * (n_matrices + 2)


class Operands(NamedTuple):
    """The operands of a kernel as its walk takes them, for device functions. Scalars are int32."""
    words: object        # tuple of pointers to the tiles of the matrices
    biases: object       # (of gate, of up), pointers to f32 [X, n_rows]
    out: object          # f32 [pairs, n_rows]
    ids: object          # int32 [pairs]
    fault: object        # int32 [4], as of `dispatch`
    node: object
    n_matrices: object
    n_rows: object
    n_pairs: object
    n_used: object       # pairs of a token
    x_rows: object       # rows of x of a token
    table: object        # word of shared memory at which the planes begin
    step_groups: object  # groups and tiles from a block's tile to its next one
    step_tiles: object


pad = device(padded)


@device
def plane(operands, i):
    """The word at which plane i begins."""
    return i32(operands.table + i * pad(operands.n_pairs))


# What is in shared memory: the block sorts the pairs. Arguments of device functions: shared, uint32, the block's dynamic shared
# memory; tid, of n_threads. Each stage ends with a barrier where the next reads what other threads wrote.

def pair_readers(heads: bool, settled: bool):
    """(matrix_of, row_of_x) of (operands, pair): the pair's matrix, n_matrices for an id that is no expert; the row of x that it
    multiplies. settled: ids are, and are read before the wait."""
    read = ld_settled if settled else ld

    @device
    def matrix_of(operands, pair):
        if heads:
            return remainder(pair, operands.n_matrices)
        found = read(operands.ids, pair)
        return i32(found if 0 <= found < operands.n_matrices else operands.n_matrices)

    @device
    def row_of_x(operands, pair):
        return i32(pair) if heads else row_of_pair(pair, operands.n_used, operands.x_rows)
    return matrix_of, row_of_x


@device
def report_pair(operands, pair):
    report(operands.fault, operands.node, pair, ld(operands.ids, pair))


def token_preparer(heads: bool, settled: bool):
    """(operands, shared, tid, n_threads) of a single token: every pair is a group; its matrix and its row of x, unsorted."""
    matrix_of, row_of_x = pair_readers(heads, settled)

    @device
    def prepare_token(operands, shared, tid, n_threads):
        matrices, rows = plane(operands, MATRICES), plane(operands, ROWS_OF_X)
        n_pairs, pair = operands.n_pairs, tid
        while pair < n_pairs:
            sts(shared, matrices + pair, matrix_of(operands, pair))
            sts(shared, rows + pair, row_of_x(operands, pair))
            pair = i32(pair + n_threads)
        cuda.syncthreads()
    return prepare_token


@device
def report_of_token(operands, shared, tid, n_threads):
    """Leaves the first pair whose id is no expert in `fault`, by one block."""
    matrices, none, pair = plane(operands, MATRICES), operands.n_matrices, tid
    while cuda.blockIdx.x == 0 and pair < operands.n_pairs:
        if lds(shared, matrices + pair) == none:
            first = i32(0)
            while lds(shared, matrices + first) != none:
                first = i32(first + 1)
            if first == pair:
                report_pair(operands, pair)
        pair = i32(pair + n_threads)


@device
def report_of_tokens(operands, shared, tid, n_threads):
    """The same of sorted pairs."""
    if cuda.blockIdx.x == 0 and tid == 0:
        place = i32(lds(shared, plane(operands, END) + FIRST + operands.n_matrices))
        if place < operands.n_pairs:
            report_pair(operands, i32(lds(shared, plane(operands, PAIRS) + place)))


@stage
def count_pairs(shared, matrices, ranks, counts, n_pairs, n_kinds, lane):
    """By one warp, 32 pairs at a time: how many pairs of its matrix are before each, and how many each matrix has, from zeros.
    matrices, ranks, counts: words at which the planes and the counts begin; n_kinds: of the matrices and the two behind them."""
    i, before = lane, i32(~(i32(-1) << lane))  # the lanes before
    while i - lane < n_pairs:
        matrix = i32(lds(shared, matrices + i)) if i < n_pairs else i32(n_kinds - 1)
        same = i32(-1)  # the lanes that have the same matrix: bit by bit takes less than `match` of 32 matrices
        for b in range(KIND_BITS):
            bit = i32(i32(matrix >> b) & 1)
            same = i32(same & i32(ballot(bit) ^ i32(bit - 1)))
        rank, n_counted = popc(same & before), i32(lds(shared, counts + matrix))
        syncwarp()  # all lanes have read
        if rank == 0:
            sts(shared, counts + matrix, i32(n_counted + popc(same)))
        if i < n_pairs:
            sts(shared, ranks + i, i32(n_counted + rank))
        syncwarp()  # the counts are there
        i = i32(i + 32)


def first_finder(n_tokens: int):
    """(shared, first, n_kinds, lane): by one warp, the place of the first sorted pair of each matrix in the place of its count,
    and n_kinds words behind it its first group, of n_tokens pairs at most."""
    @stage
    def find_firsts(shared, first, n_kinds, lane):
        each = i32(i32(n_kinds + 31) >> 5)  # kinds of a lane, one behind the other
        i, end = i32(lane * each), least(i32(lane * each + each), n_kinds)
        n, n_groups = i32(0), i32(0)
        while i < end:
            count = i32(lds(shared, first + i))
            n, n_groups, i = i32(n + count), i32(n_groups + quotient(i32(count + n_tokens - 1), n_tokens)), i32(i + 1)
        (place, _), (group, _), i = sum_before(n, lane), sum_before(n_groups, lane), i32(lane * each)
        while i < end:
            count = i32(lds(shared, first + i))
            sts(shared, first + i, place)
            sts(shared, first + n_kinds + i, group)
            place, group, i = i32(place + count), i32(group + quotient(i32(count + n_tokens - 1), n_tokens)), i32(i + 1)
    return find_firsts


def tokens_preparer(n_tokens: int, heads: bool, settled: bool):
    """(operands, shared, tid, n_threads) of several tokens: sorts the pairs by their matrices and finds groups of n_tokens pairs
    at most."""
    (matrix_of, row_of_x), find_firsts = pair_readers(heads, settled), first_finder(n_tokens)

    @device
    def prepare_tokens(operands, shared, tid, n_threads):
        n_pairs, none, end = operands.n_pairs, operands.n_matrices, plane(operands, END)
        matrices, ranks = plane(operands, UNSORTED), plane(operands, RANKS)
        first, n_kinds, pair = i32(end + FIRST), i32(none + 2), tid
        while pair < n_pairs or pair < n_kinds:
            if pair < n_pairs:
                sts(shared, matrices + pair, matrix_of(operands, pair))
            if pair < n_kinds:
                sts(shared, first + pair, i32(0))
            pair = i32(pair + n_threads)
        cuda.syncthreads()
        if tid < 32:
            count_pairs(shared, matrices, ranks, first, n_pairs, n_kinds, tid)
            find_firsts(shared, first, n_kinds, tid)
        cuda.syncthreads()
        pair = tid
        while pair < n_pairs:
            matrix, rank = i32(lds(shared, matrices + pair)), i32(lds(shared, ranks + pair))
            place = i32(i32(lds(shared, first + matrix)) + rank)
            sts(shared, plane(operands, PAIRS) + place, pair)
            sts(shared, plane(operands, ROWS_OF_X) + place, row_of_x(operands, pair))
            if matrix < none and remainder(rank, n_tokens) == 0:
                group = i32(i32(lds(shared, first + n_kinds + matrix)) + quotient(rank, n_tokens))
                sts(shared, plane(operands, STARTS) + group, place)
                sts(shared, plane(operands, MATRICES) + group, matrix)
            pair = i32(pair + n_threads)
        if tid == 0:
            n_groups = i32(lds(shared, first + n_kinds + none))
            sts(shared, plane(operands, STARTS) + n_groups, i32(lds(shared, first + none)))
            sts(shared, end + 1, n_groups)
        cuda.syncthreads()
    return prepare_tokens


def of_groups(n_matrices: int, n_tokens: int, heads: bool, ending: Ending, settled: bool = False) -> TileWalk:
    """The walk of a block, from tile to tile of the groups. n_matrices: of an expert, 1 or 2 by turns; n_tokens: pairs of a group
    at most; heads: the matrix of a pair is its rank, and there are no ids; settled: ids are (`kernels.call`). operands:
    `Operands`."""
    pick, last_matrix, single, finish = PICK[n_matrices], n_matrices - 1, n_tokens == 1, ending.finish

    matrix_of_group = device(lambda operands, shared, group: i32(lds(shared, plane(operands, MATRICES) + group)))
    start_of = device(lambda operands, shared, group: i32(group) if single
                      else i32(lds(shared, plane(operands, STARTS) + group)))

    @device
    def first(operands, shared):
        n_tiles, item = tiles_of(operands.n_rows), i32(cuda.blockIdx.x)
        group = quotient(item, n_tiles)
        return i32(item - group * n_tiles), i32(0), group

    @device
    def next_tile(operands, tile, group):
        tile, group, n_tiles = i32(tile + operands.step_tiles), i32(group + operands.step_groups), tiles_of(operands.n_rows)
        if tile >= n_tiles:
            tile, group = i32(tile - n_tiles), i32(group + 1)
        return tile, group

    @device
    def inside(operands, shared, place):
        if single:
            return place[2] < operands.n_pairs
        return place[2] < i32(lds(shared, plane(operands, END) + 1))

    @device
    def weight(operands, shared, place):
        matrix = least(matrix_of_group(operands, shared, place[2]), i32(operands.n_matrices - 1))  # any one where there is none
        return pick(operands.words, place[1]), i32(matrix * tiles_of(operands.n_rows) + place[0])

    @device
    def tokens(operands, shared, place, n):
        start = start_of(operands, shared, place[2])
        n_valid = i32(1) if single else i32(start_of(operands, shared, i32(place[2] + 1)) - start)
        return i32(plane(operands, ROWS_OF_X) + start), n_valid

    @device
    def leave(operands, shared, place, token, r, total, at):
        n_rows, row = operands.n_rows, i32(place[0] * 32 + r)
        matrix, biases = matrix_of_group(operands, shared, place[2]), operands.biases
        if row < n_rows and matrix < operands.n_matrices and place[1] == last_matrix:
            pair = place[2] if single else i32(lds(shared, plane(operands, PAIRS) + start_of(operands, shared, place[2]) + token))
            waiting = as_f32(lds(shared, at))
            finish(operands.out, i64(pair) * n_rows + row, i32(matrix * n_rows), row, n_rows, total, waiting, True, biases[0],
                   biases[1])
    prepare = token_preparer(heads, settled) if single else tokens_preparer(n_tokens, heads, settled)
    report = None if heads else report_of_token if single else report_of_tokens
    return TileWalk(first, matrices_by_turns(n_matrices, next_tile), inside, weight, tokens, leave, prepare, heads or settled,
                    report)


@factory([("Q4_K", 1, False, True), ("Q8_0", 4, False, False), ("IQ2_S", 16, False, True), ("Q8_0", 1, True, False),
          ("Q6_K", 8, True, False)])
def mmq_few_id_kernel(name, n_tokens, heads, settled):
    run = products((name,), n_tokens, of_groups(1, n_tokens, heads, STORE, settled))

    def kernel(words, act, ids, fault, out, node, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows, n_boxes, table,
               step_groups, step_tiles):
        operands = Operands((words,), (out, out), out, ids, fault, node, n_matrices, n_rows, n_pairs, n_used, x_rows, table,
                            step_groups, step_tiles)
        run(operands, act, n_cols, n, n_boxes)
    return Kernel(kernel, (U32, U32, I32, I32, F32, *[N] * 12), threads_of(n_tokens, MAX_WARPS[n_tokens]))


@factory([("silu", "Q4_K", "Q4_K", False, 0.0, 0.0, 1), ("silu", "Q8_0", "Q8_0", False, 0.0, 0.0, 4),
          ("swiglu_oai", "MXFP4", "Q6_K", True, 1.702, 7.0, 8)])
def mmq_few_id_glu_kernel(activation, gate, up, biased, alpha, limit, n_tokens):
    walk = of_groups(2, n_tokens, False, gate_and_store(activation, biased, alpha, limit))
    run = products((gate, up), n_tokens, walk)

    def kernel(gate_words, up_words, gate_bias, up_bias, act, ids, fault, out, node, n_matrices, n_rows, n_cols, n, n_pairs,
               n_used, x_rows, n_boxes, table, step_groups, step_tiles):
        operands = Operands((gate_words, up_words), (gate_bias, up_bias), out, ids, fault, node, n_matrices, n_rows, n_pairs,
                            n_used, x_rows, table, step_groups, step_tiles)
        run(operands, act, n_cols, n, n_boxes)
    return Kernel(kernel, (U32, U32, F32, F32, U32, I32, I32, F32, *[N] * 12), threads_of(n_tokens, MAX_WARPS[n_tokens]))


def id_shape_of(names: tuple[str, ...], n_items: int, n_matrices: int, n_cols: int, n_pairs: int, n_tokens: int,
                n_warps: int, n_blocks: int) -> FewShape:
    """The shape with so many warps a block. n_items: row tiles of groups at most."""
    n_boxes = boxes_of(n_tokens, n_warps, -(-n_cols // CHUNK))
    table = table_words(n_pairs, n_tokens, n_matrices)
    n_bytes = 4 * (shared_words(names, n_tokens, n_warps, n_boxes, n_tokens) + table)
    return FewShape(n_tokens, n_warps, n_boxes, (min(n_items, n_blocks), 1), n_bytes)


def has_integer_scales(names: tuple[str, ...]) -> bool:
    return any(form(format_of(name)).integer for name in names)


def all_warps(names: tuple[str, ...], n_tokens: int) -> int:
    """Of a multiprocessor."""
    return (ALL_WARPS if has_integer_scales(names) else FLOAT_WARPS)[n_tokens]


def most_warps(names: tuple[str, ...], n_tokens: int, resident: int) -> int:
    """That multiply, of each of so many blocks on a multiprocessor."""
    return min(MAX_WARPS[n_tokens], max(1, all_warps(names, n_tokens) // resident - (n_tokens > 1)))


@lru_cache(None)
def id_shape(names: tuple[str, ...], n_matrices: int, n_rows: int, n_cols: int, n_pairs: int, n: int, n_multiprocessors: int,
             shared_limit: int) -> FewShape:
    """Groups of a single pair for one token, else of as many as a matrix has on average, but of 4 at least, or of 8 where these
    take hardly longer, without integer scales. Of the numbers of warps and of blocks on a multiprocessor those by which `work` on
    the row tiles of all groups is done first, as if warps took chunks of one tile alone, then those that leave the fewest warps
    without one, then two blocks (docs/kernels-log.md). Blocks lie `evenly`. names: formats of the matrices; n: tokens, or rows of
    a head."""
    fewest = 4 if has_integer_scales(names) else 8
    n_tokens = 1 if n == 1 else next((t for t in MAX_WARPS if t >= fewest and t * n_matrices >= n_pairs), MOST_TOKENS)
    n_items, n_chunks = -(-n_rows // ROWS) * min(n_pairs, n_matrices if n_tokens > 1 else n_pairs), -(-n_cols // CHUNK)

    def time(resident, shape):
        n_blocks = resident * n_multiprocessors
        return -(-n_items // n_blocks) * work(shape.n_warps, resident, n_chunks), -n_chunks % shape.n_warps, abs(resident - 2)
    shapes = [(resident, id_shape_of(names, n_items, n_matrices, n_cols, n_pairs, n_tokens, n_warps,
                                     resident * n_multiprocessors))
              for resident in range(1, MOST_RESIDENT + 1)
              for n_warps in range(1, min(most_warps(names, n_tokens, resident), n_chunks) + 1)]
    fitting = [(resident, shape) for resident, shape in shapes
               if resident * (shape.n_bytes + RESERVED) <= shared_limit + RESERVED] or shapes[:1]
    return evenly(min(fitting, key=lambda each: time(*each))[1], n_multiprocessors, shared_limit)


def few_pairs(call: Call) -> Pairs:
    """`pairs_of` a call. Unsupported where they are more, or other matrices, than blocks sort."""
    sizes = pairs_of(call)
    n_matrices, n_rows, n_pairs = sizes.n_matrices, sizes.n_rows, sizes.n_pairs
    need(n_matrices <= MOST_MATRICES, "n_expert", n_matrices, f"1..{MOST_MATRICES}")
    need(n_matrices * -(-n_rows // ROWS) * ROWS < 1 << 31, "n_expert * n_rows", n_matrices * n_rows, "below 2^31")
    need(n_pairs <= MOST_PAIRS, "n_tokens * n_used", n_pairs, f"1..{MOST_PAIRS}")
    need(sizes.n <= most_rows(sizes.n_cols), "rows of x", sizes.n, f"1..{most_rows(sizes.n_cols)}")
    return sizes


def launched(call: Call, kernel: Kernel, sizes: Pairs, pointers: tuple, node: int):
    """In the shape of the plan."""
    shape = call.plan
    table = shape.n_bytes // 4 - table_words(sizes.n_pairs, shape.n_tokens, sizes.n_matrices)
    args = *pointers, node, *sizes, shape.n_boxes, table, *divmod(shape.grid[0], -(-sizes.n_rows // ROWS))
    return call.device.launch(kernel, shape.grid, shape.n_threads, args, shape.n_bytes)


def mmq_few_id(call: Call):
    """out = w[ids] x, as of `mul_mat_id`, w quantized. plan: `FewShape` of `id_shape`."""
    sizes, (fault, node) = few_pairs(call), fault_of(call)
    pointers = *addresses(call.w, call.x, call.ids), fault, call.out.data
    kernel = mmq_few_id_kernel(call.w.dtype, call.plan.n_tokens, False, "ids" in call.settled)
    return launched(call, kernel, sizes, pointers, node)


def mmq_few_id_glu(call: Call):
    """out = act(gate[ids] x + its bias) * (up[ids] x + its bias), as of `mul_mat_id_glu`, gate and up quantized. plan: `FewShape`
    of `id_shape`."""
    (names, biased, matrices), sizes, (fault, node) = gated_of(call), few_pairs(call), fault_of(call)
    kernel = mmq_few_id_glu_kernel(call.act, *names, biased, *constants_of(call), call.plan.n_tokens)
    return launched(call, kernel, sizes, (*matrices, *addresses(call.x, call.ids), fault, call.out.data), node)


def mmq_few_heads(call: Call):
    """The products of `mul_mat_heads`, w quantized. plan: `FewShape` of `id_shape`."""
    sizes, pointers = few_pairs(call), addresses(call.w, call.x, call.w, call.w, call.out)
    return launched(call, mmq_few_id_kernel(call.w.dtype, call.plan.n_tokens, True, False), sizes, pointers, 0)
