"""Products of the matrices of experts with few tokens (docs/numerics.md, section 9): the weights of an expert are read once for up to 16 rows that chose it.

A *pair* is a token and the rank of one of its experts, pair = token * n_used + rank; a *group* is a matrix and some of the pairs that chose it, in
ascending order. Each block sorts all pairs for itself in shared memory, which takes less than a launch as long as they are few. Then it takes row tiles as
in mmq_few, of the groups one behind the other, from blockIdx.x by gridDim.x. For a single token every pair is a group, and nothing is sorted.

Pairs whose id is no expert belong to no group, as in `dispatch`: their rows of the result are left as they are, and the first is left in `fault`.
"""
from functools import lru_cache

from numba import cuda

from ...quant.formats import CHUNK, format_of
from ...quant.tile import ROWS
from .dispatch import report
from .launch import F32, I32, Kernel, N, U32, check, factory
from .mmq_few import MAX_WARPS, MOST_TOKENS, PICK, RESERVED, Course, FewShape, chunks_of_round, products, shared_words, tiles_of, work
from .ptx import device, i32, i64, ld, lds, lds4, match, popc, sts
from .tile_product import STORE, Ending, form, gate_and_store

MOST_PAIRS, MOST_MATRICES = 512, 1 << 20  # sorted in about 5 us; a matrix and a pair are one number below 2^31
MOST_RESIDENT = 4                          # blocks on a multiprocessor
WORDS, BIASES, OUT, IDS, FAULT, NODE, N_MATRICES, N_ROWS, N_PAIRS, N_USED, X_ROWS, TABLE, STEP_GROUPS, STEP_TILES = range(14)  # operands, by their place
# Planes of shared memory, of a word for each pair, up to the next 16: matrices of the groups, rows of x of the sorted pairs, these pairs, (matrix, pair) in
# one number, sorted and not, where groups begin. Behind them the end of the last group, for as many groups as pairs; the number of groups; and from COUNTS
# on how many begin in each 32 sorted pairs.
MATRICES, ROWS_OF_X, PAIRS, SORTED, UNSORTED, STARTS, END = range(7)
LEADERS = UNSORTED  # later: of those 32, the how manieth group begins with a sorted pair, from 1; 0: none
COUNTS = 4


def padded(n_pairs):
    return (n_pairs + 15) & -16


def table_words(n_pairs: int, n_tokens: int) -> int:
    """Of shared memory; for a single token two planes."""
    return 2 * padded(n_pairs) if n_tokens == 1 else END * padded(n_pairs) + COUNTS + MOST_PAIRS // 32


def of_groups(n_matrices: int, n_tokens: int, heads: bool, ending: Ending) -> Course:
    """The course of a block. n_matrices: of an expert, 1 or 2 by turns; n_tokens: pairs of a group at most; heads: the matrix of a pair is its rank, and
    there are no ids; biases: [X, n_rows]."""
    waiting_at, finish = ending
    pick, last_matrix, several, single, pad = PICK[n_matrices], n_matrices - 1, n_matrices > 1, n_tokens == 1, device(padded)

    # What is in shared memory

    @device
    def plane(operands, i):
        return i32(operands[TABLE] + i * pad(operands[N_PAIRS]))

    @device
    def matrix_of(operands, pair):
        """N_MATRICES for an id that is no expert."""
        if heads:
            return i32(pair % operands[N_MATRICES])
        found = ld(operands[IDS], pair)
        return i32(found if 0 <= found < operands[N_MATRICES] else operands[N_MATRICES])

    @device
    def row_of_x(operands, pair):
        if heads:
            return i32(pair)
        token = i32(pair // operands[N_USED])
        return i32(token * operands[X_ROWS] + i32(pair - token * operands[N_USED]) % operands[X_ROWS])

    @device
    def report_pair(operands, pair):
        if not heads:
            if cuda.blockIdx.x == 0:
                report(operands[FAULT], operands[NODE], pair, ld(operands[IDS], pair))

    @device
    def prepare_token(operands, shared, tid, n_threads):
        matrices, rows, n_pairs, none = plane(operands, MATRICES), plane(operands, ROWS_OF_X), operands[N_PAIRS], operands[N_MATRICES]
        pair = tid
        while pair < n_pairs:
            sts(shared, matrices + pair, matrix_of(operands, pair))
            sts(shared, rows + pair, row_of_x(operands, pair))
            pair = i32(pair + n_threads)
        cuda.syncthreads()
        pair = tid
        while pair < n_pairs:
            if lds(shared, matrices + pair) == none:
                first = i32(0)
                while lds(shared, matrices + first) != none:
                    first = i32(first + 1)
                if first == pair:
                    report_pair(operands, pair)
            pair = i32(pair + n_threads)

    @device
    def below(four, key):
        a, b, c, d = four
        return i32(i32(i32(a) < key) + i32(i32(b) < key) + i32(i32(c) < key) + i32(i32(d) < key))

    @device
    def sort(operands, shared, tid, n_threads):
        """The place of a number is how many are below it."""
        n_pairs, none, keys = operands[N_PAIRS], operands[N_MATRICES], plane(operands, UNSORTED)
        ordered, pairs, rows = plane(operands, SORTED), plane(operands, PAIRS), plane(operands, ROWS_OF_X)
        pair = tid
        while pair < pad(n_pairs):
            matrix = i32(none + 1)
            if pair < n_pairs:
                matrix = matrix_of(operands, pair)
            sts(shared, keys + pair, i32(matrix * n_pairs + pair))
            pair = i32(pair + n_threads)
        cuda.syncthreads()
        pair = tid
        while pair < n_pairs:
            key, place, q = i32(lds(shared, keys + pair)), i32(0), i32(0)
            while q < n_pairs:  # four loads are under way together
                a, b, c, d = lds4(shared, keys + q), lds4(shared, keys + q + 4), lds4(shared, keys + q + 8), lds4(shared, keys + q + 12)
                place, q = i32(place + below(a, key) + below(b, key) + below(c, key) + below(d, key)), i32(q + 16)
            sts(shared, ordered + place, key)
            sts(shared, pairs + place, pair)
            sts(shared, rows + place, row_of_x(operands, pair))
            pair = i32(pair + n_threads)
        if tid == 0:
            sts(shared, plane(operands, END) + 1, i32(0))  # if no pair has an expert
        cuda.syncthreads()

    @device
    def prepare_tokens(operands, shared, tid, n_threads):
        n_pairs, none, end = operands[N_PAIRS], operands[N_MATRICES], plane(operands, END)
        keys, leaders, counts = plane(operands, SORTED), plane(operands, LEADERS), i32(end + COUNTS)
        sort(operands, shared, tid, n_threads)

        # 1. the pairs with which groups begin, counted in each 32
        i, before = tid, i32(~(i32(-1) << (tid & 31)))  # the lanes before
        while i - (tid & 31) < n_pairs:
            leads = i32(0)
            if i < n_pairs:
                matrix, first = i32(i32(lds(shared, keys + i)) // n_pairs), i
                while first > 0 and i32(lds(shared, keys + max(first - 1, 0))) >= matrix * n_pairs:
                    first = i32(first - 1)
                leads = i32(1 if matrix < none and i32(i - first) % n_tokens == 0 else 0)
                if matrix == none and first == i:
                    report_pair(operands, i32(lds(shared, plane(operands, PAIRS) + i)))
            same = match(leads)
            if i < n_pairs:
                sts(shared, leaders + i, i32(popc(same & before) + 1) if leads == 1 else i32(0))
            if tid & 31 == 0:
                sts(shared, counts + (i >> 5), popc(same) if leads == 1 else i32(32 - popc(same)))
            i = i32(i + n_threads)
        cuda.syncthreads()

        # 2. the groups
        i = tid
        while i < n_pairs:
            key, leader, last = i32(lds(shared, keys + i)), i32(lds(shared, leaders + i)), i32(i + 1) == n_pairs
            if not last:
                last = i32(lds(shared, keys + i + 1)) >= none * n_pairs
            if key < none * n_pairs and (leader > 0 or last):
                group, q = i32(0), i32(0)
                while q < i >> 5:
                    group, q = i32(group + i32(lds(shared, counts + q))), i32(q + 1)
                if leader > 0:
                    sts(shared, plane(operands, STARTS) + (group + leader - 1), i)
                    sts(shared, plane(operands, MATRICES) + (group + leader - 1), i32(key // n_pairs))
                if last:
                    group = i32(group + i32(lds(shared, counts + (i >> 5))))  # no group begins behind it
                    sts(shared, plane(operands, STARTS) + group, i32(i + 1))
                    sts(shared, end + 1, group)
            i = i32(i + n_threads)
        cuda.syncthreads()

    @device
    def start_of(operands, shared, group):
        return i32(group) if single else i32(lds(shared, plane(operands, STARTS) + group))

    @device
    def matrix_of_group(operands, shared, group):
        return i32(lds(shared, plane(operands, MATRICES) + group))

    # From tile to tile

    @device
    def first(operands, shared):
        n_tiles, item = tiles_of(operands[N_ROWS]), i32(cuda.blockIdx.x)
        group = i32(item // n_tiles)
        return i32(item - group * n_tiles), i32(0), group

    @device
    def following(operands, place):
        tile, matrix, group = place
        if several:
            matrix = i32(matrix + 1)
            if matrix <= last_matrix:
                return tile, matrix, group
        tile, group, n_tiles = i32(tile + operands[STEP_TILES]), i32(group + operands[STEP_GROUPS]), tiles_of(operands[N_ROWS])
        if tile >= n_tiles:
            tile, group = i32(tile - n_tiles), i32(group + 1)
        return tile, i32(0), group

    @device
    def inside(operands, shared, place):
        if single:
            return place[2] < operands[N_PAIRS]
        return place[2] < i32(lds(shared, plane(operands, END) + 1))

    @device
    def weight(operands, shared, place):
        matrix = i32(min(matrix_of_group(operands, shared, place[2]), operands[N_MATRICES] - 1))  # any one where there is none
        return pick(operands[WORDS], place[1]), i32(matrix * tiles_of(operands[N_ROWS]) + place[0])

    @device
    def tokens(operands, shared, place, n):
        start = start_of(operands, shared, place[2])
        n_valid = i32(1) if single else i32(start_of(operands, shared, i32(place[2] + 1)) - start)
        return i32(plane(operands, ROWS_OF_X) + start), n_valid

    @device
    def leave(operands, shared, place, token, r, total):
        n_rows, row = operands[N_ROWS], i32(place[0] * 32 + r)
        matrix, biases = matrix_of_group(operands, shared, place[2]), operands[BIASES]
        if row < n_rows and matrix < operands[N_MATRICES]:
            pair = place[2] if single else i32(lds(shared, plane(operands, PAIRS) + start_of(operands, shared, place[2]) + token))
            i, last = i64(pair) * n_rows + row, place[1] == last_matrix
            waiting = waiting_at(operands[OUT], i, last)
            finish(operands[OUT], i, i32(matrix * n_rows), row, n_rows, total, waiting, last, biases[0], biases[1])
    return Course(first, following, inside, weight, tokens, leave, prepare_token if single else prepare_tokens)


@factory([("Q4_K", 1, False), ("Q8_0", 4, False), ("IQ2_S", 16, False), ("Q8_0", 1, True), ("Q6_K", 8, True)])
def mmq_few_id_kernel(name, n_tokens, heads):
    run = products((name,), n_tokens, of_groups(1, n_tokens, heads, STORE))

    def kernel(words, act, ids, fault, out, node, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows, per_round, table, step_groups, step_tiles):
        run(((words,), (out, out), out, ids, fault, node, n_matrices, n_rows, n_pairs, n_used, x_rows, table, step_groups, step_tiles),
            act, n_cols, n, per_round)
    return Kernel(kernel, (U32, U32, I32, I32, F32, *[N] * 12), 32 * MAX_WARPS[n_tokens])


@factory([("silu", "Q4_K", "Q4_K", False, 0.0, 0.0, 1), ("silu", "Q8_0", "Q8_0", False, 0.0, 0.0, 4), ("swiglu_oai", "MXFP4", "Q6_K", True, 1.702, 7.0, 8)])
def mmq_few_id_glu_kernel(activation, gate, up, biased, alpha, limit, n_tokens):
    run = products((gate, up), n_tokens, of_groups(2, n_tokens, False, gate_and_store(activation, biased, alpha, limit)))

    def kernel(gate_words, up_words, gate_bias, up_bias, act, ids, fault, out, node, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows, per_round, table,
               step_groups, step_tiles):
        run(((gate_words, up_words), (gate_bias, up_bias), out, ids, fault, node, n_matrices, n_rows, n_pairs, n_used, x_rows, table, step_groups,
             step_tiles), act, n_cols, n, per_round)
    return Kernel(kernel, (U32, U32, F32, F32, U32, I32, I32, F32, *[N] * 12), 32 * MAX_WARPS[n_tokens])


def id_shape_of(names: tuple[str, ...], n_items: int, n_cols: int, n_pairs: int, n_tokens: int, n_warps: int, n_blocks: int) -> FewShape:
    """The shape with so many warps a block. n_items: row tiles of groups at most."""
    per_round = chunks_of_round(-(-n_cols // CHUNK), n_warps, n_tokens)
    n_bytes = 4 * (shared_words(names, n_tokens, n_warps, per_round, n_tokens) + table_words(n_pairs, n_tokens))
    return FewShape(n_tokens, n_warps, per_round, (min(n_items, n_blocks), 1), n_bytes)


@lru_cache(None)
def id_shape(names: tuple[str, ...], n_matrices: int, n_rows: int, n_cols: int, n_pairs: int, n: int, n_multiprocessors: int, shared_limit: int) -> FewShape:
    """Groups of a single pair for one token, else of as many as a matrix has on average, but of 4 at least, or of 8 where these take hardly longer, without
    integer scales. Of the numbers of warps and of blocks on a multiprocessor those by which `work` on the row tiles of all groups is done first, then those
    that leave the fewest warps without a chunk, then two blocks, which hide each other's barriers (docs/kernels-log.md). names: formats of the matrices; n: tokens, or rows of a head."""
    fewest = 4 if any(form(format_of(name)).integer for name in names) else 8
    n_tokens = 1 if n == 1 else next((t for t in MAX_WARPS if t >= fewest and t * n_matrices >= n_pairs), MOST_TOKENS)
    n_items, n_chunks = -(-n_rows // ROWS) * min(n_pairs, n_matrices if n_tokens > 1 else n_pairs), -(-n_cols // CHUNK)

    def time(resident, shape):
        n_blocks = resident * n_multiprocessors
        return -(-n_items // n_blocks) * work(shape.n_warps, resident, n_chunks), -n_chunks % shape.n_warps, abs(resident - 2)
    shapes = [(resident, id_shape_of(names, n_items, n_cols, n_pairs, n_tokens, n_warps, resident * n_multiprocessors))
              for resident in range(1, MOST_RESIDENT + 1) for n_warps in range(1, min(MAX_WARPS[n_tokens] // resident, n_chunks) + 1)]
    fitting = [(resident, shape) for resident, shape in shapes if resident * (shape.n_bytes + RESERVED) <= shared_limit + RESERVED] or shapes[:1]
    return min(fitting, key=lambda each: time(*each))[1]


def checked_sizes(op, names, n_matrices, n_rows, n_cols, n_pairs, n_used, x_rows):
    for what, found in (("n_rows", n_rows), ("n_cols", n_cols), ("n_used", n_used), ("x_rows_per_token", x_rows)):
        check(op, found >= 1, what, found, "at least 1")
    check(op, 1 <= n_matrices <= MOST_MATRICES, "n_expert", n_matrices, f"1..{MOST_MATRICES}")
    check(op, n_matrices * -(-n_rows // ROWS) * ROWS < 1 << 31, "n_expert * n_rows", n_matrices * n_rows, "below 2^31")
    check(op, 1 <= n_pairs <= MOST_PAIRS, "n_tokens * n_used", n_pairs, f"1..{MOST_PAIRS}")
    check(op, n_used % x_rows == 0, "x_rows_per_token", x_rows, f"divisors of n_used, {n_used}")
    for name in names:
        check(op, format_of(name, op).is_quantized, "type", name, "quantized types")


def launched(target, kernel, names, pointers, node, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows, shape):
    """The launch of a kernel. n: rows of the activations."""
    steps = divmod(shape.grid[0], -(-n_rows // ROWS))
    table = shape.n_bytes // 4 - table_words(n_pairs, shape.n_tokens)
    args = *pointers, node, n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows, shape.per_round, table, *steps
    return target.launch(kernel, shape.grid, 32 * shape.n_warps, args, shape.n_bytes)


def mmq_few_id(target, format_name, words, act, ids, out, n_expert, n_rows, n_cols, n_tokens, n_used, x_rows_per_token, fault, node=1, shape=None):
    """Row i u + j of out is the product with matrix ids[i, j] of row i b + j % b of x, u = n_used, b = x_rows_per_token, a divisor of u. words: address of
    the tiles of n_expert matrices [n_rows, n_cols], act: of the activation buffer of n_tokens b rows, both on 16 bytes; ids: of int32 [n_tokens, u]; out:
    of float32 [n_tokens u, n_rows]; fault, node: as of `dispatch`. shape: `id_shape` chooses where it is not given. Rows of ids that are no experts are
    left as they are."""
    names, n_pairs = (format_name,), n_tokens * n_used
    checked_sizes("mmq_few_id", names, n_expert, n_rows, n_cols, n_pairs, n_used, x_rows_per_token)
    shape = shape or id_shape(names, n_expert, n_rows, n_cols, n_pairs, n_tokens, target.n_multiprocessors, target.shared_limit)
    kernel, pointers = mmq_few_id_kernel(format_name, shape.n_tokens, False), (words, act, ids, fault, out)
    return launched(target, kernel, names, pointers, node, n_expert, n_rows, n_cols, n_tokens * x_rows_per_token, n_pairs, n_used, x_rows_per_token, shape)


def mmq_few_id_glu(target, activation, names, gate_words, up_words, act, ids, gate_bias, up_bias, alpha, limit, out, n_expert, n_rows, n_cols, n_tokens,
                   n_used, x_rows_per_token, fault, node=1, shape=None):
    """out = activation(gate x + its bias) * (up x + its bias), or swiglu_oai, which alone takes alpha and limit. names: formats of gate and up; biases:
    addresses of float32 [n_expert, n_rows], or both None; the rest as for `mmq_few_id`."""
    n_pairs, biased = n_tokens * n_used, gate_bias is not None
    checked_sizes("mmq_few_id_glu", names, n_expert, n_rows, n_cols, n_pairs, n_used, x_rows_per_token)
    shape = shape or id_shape(tuple(names), n_expert, n_rows, n_cols, n_pairs, n_tokens, target.n_multiprocessors, target.shared_limit)
    constants = (float(alpha), float(limit)) if activation == "swiglu_oai" else (0.0, 0.0)
    kernel = mmq_few_id_glu_kernel(activation, *names, biased, *constants, shape.n_tokens)
    pointers = gate_words, up_words, *((gate_bias, up_bias) if biased else (out, out)), act, ids, fault, out
    return launched(target, kernel, names, pointers, node, n_expert, n_rows, n_cols, n_tokens * x_rows_per_token, n_pairs, n_used, x_rows_per_token, shape)


def mmq_few_heads(target, format_name, words, act, out, n_head, n_rows, n_cols, n, shape=None):
    """Row i of out is the product of matrix i % n_head and row i of x. n: rows, a multiple of n_head; words, act, shape: as of `mmq_few_id`; out: address of
    float32 [n, n_rows]."""
    names = format_name,
    checked_sizes("mmq_few_heads", names, n_head, n_rows, n_cols, n, n_head, 1)
    check("mmq_few_heads", n % n_head == 0, "n", n, f"multiples of n_head, {n_head}")
    shape = shape or id_shape(names, n_head, n_rows, n_cols, n, n // n_head, target.n_multiprocessors, target.shared_limit)
    kernel, pointers = mmq_few_id_kernel(format_name, shape.n_tokens, True), (words, act, words, words, out)
    return launched(target, kernel, names, pointers, 0, n_head, n_rows, n_cols, n, n, n_head, 1, shape)
