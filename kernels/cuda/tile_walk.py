"""The way of a block from one row tile of a matrix to the next one: `TileWalk`."""
from typing import NamedTuple

from numba import cuda

from .argmax import LEAST_RANK, best_of_warp, rank
from .ending import STORE, Ending, row_there
from .ptx import add, as_f32, device, i32, i64, ldc, lds, least, st

# By the length of a tuple: (values, i) -> values[i]
PICK = {1: device(lambda values, i: values[0]),
        2: device(lambda values, i: values[1] if i else values[0]),
        3: device(lambda values, i: values[0] if i == 0 else values[1] if i == 1 else values[2])}


class TileWalk(NamedTuple):
    """The device functions by which a block goes from one row tile of a matrix to the next. operands: the kernel's own; place:
    (tile, matrix, group)."""
    first: object      # (operands, shared) -> the block's first place
    following: object  # (operands, place) -> the next one
    inside: object     # (operands, shared, place) -> whether there is such a place
    weight: object     # (operands, shared, place) -> words, row tile of them
    tokens: object     # (operands, shared, place, n) -> first and number of the rows of activations, as for `copier`
    leave: object      # (operands, shared, place, token, row of the tile, total, at): what becomes of a total; word `at` has the
                       # first matrix's
    prepare: object = None  # (operands, shared, tid, n_threads): of the block, before the first place
    early: bool = True      # whether all that `prepare` and `weight` read of the operands is there before the wait
    report: object = None   # (operands, shared, tid, n_threads): behind the wait, what `prepare` has found wrong


@device
def tiles_of(n_rows):
    return i32((n_rows + 31) >> 5)


def block_tokens(n_tokens):
    """`TileWalk.tokens` of a grid whose second dimension goes over tokens."""
    @device
    def tokens(operands, shared, place, n):
        first = i32(cuda.blockIdx.y * n_tokens)
        return first, i32(1) if n_tokens == 1 else least(i32(n_tokens), i32(n - first))
    return tokens


def matrices_by_turns(n_matrices: int, next_tile):
    """`TileWalk.following` where the matrices take turns in each tile. next_tile: (operands, tile, group) -> the next ones."""
    @device
    def following(operands, place):
        tile, matrix, group = place
        if n_matrices > 1:
            matrix = i32(matrix + 1)
            if matrix < n_matrices:
                return tile, matrix, group
        tile, group = next_tile(operands, tile, group)
        return tile, i32(0), group
    return following


def by_turns(n_matrices: int, n_tokens: int, ending: Ending) -> TileWalk:
    """Of matrices of the same sizes a tile each. operands: (their words, biases, out, n_rows)."""
    pick, last_matrix, finish = PICK[n_matrices], n_matrices - 1, ending.finish
    next_tile = device(lambda operands, tile, group: (i32(tile + cuda.gridDim.x), group))

    @device
    def leave(operands, shared, place, token, r, total, at):
        _, biases, out, n_rows = operands
        row = i32(place[0] * 32 + r)
        if row < n_rows and place[1] == last_matrix:
            i = i64(i32(cuda.blockIdx.y * n_tokens + token)) * n_rows + row
            finish(out, i, i32(0), row, n_rows, total, as_f32(lds(shared, at)), True, biases[0], biases[1])
    return TileWalk(first=device(lambda operands, shared: (i32(cuda.blockIdx.x), i32(0), i32(0))),
                    following=matrices_by_turns(n_matrices, next_tile),
                    inside=device(lambda operands, shared, place: place[0] < tiles_of(operands[3])),
                    weight=device(lambda operands, shared, place: (pick(operands[0], place[1]), place[0])),
                    tokens=block_tokens(n_tokens),
                    leave=leave)


def in_a_row(n_matrices: int, n_tokens: int, biased: bool) -> TileWalk:
    """The tiles of one matrix behind those of another. operands: (their words, outs, n_rows, biases)."""
    pick = PICK[n_matrices]

    @device
    def within(operands, tile, matrix):
        """The place of a tile that is counted from the matrix's first one, in the matrix that has it."""
        n = tiles_of(pick(operands[2], matrix))
        while matrix < n_matrices and tile >= n:
            tile, matrix = i32(tile - n), i32(matrix + 1)
            n = tiles_of(pick(operands[2], matrix))
        return tile, matrix, i32(0)

    @device
    def leave(operands, shared, place, token, r, total, at):
        n_rows, row = pick(operands[2], place[1]), i32(place[0] * 32 + r)
        if row < n_rows:
            if biased:
                total = add(total, ldc(pick(operands[3], place[1]), row_there(row, n_rows)))
            st(pick(operands[1], place[1]), i64(i32(cuda.blockIdx.y * n_tokens + token)) * n_rows + row, total)
    return TileWalk(first=device(lambda operands, shared: within(operands, i32(cuda.blockIdx.x), i32(0))),
                    following=device(lambda operands, place: within(operands, i32(place[0] + cuda.gridDim.x), place[1])),
                    inside=device(lambda operands, shared, place: place[1] < n_matrices),
                    weight=device(lambda operands, shared, place: (pick(operands[0], place[1]), place[0])),
                    tokens=block_tokens(n_tokens),
                    leave=leave)


def best_of_tiles(n_tokens: int) -> TileWalk:
    """Of one matrix, whose totals are not stored: the owners of a tile's rows with one token are the lanes of a warp, and leave
    the largest rank and the first row that has it. operands: (its words, the same, pairs of int32 [token][row tile], n_rows)."""
    @device
    def leave(operands, shared, place, token, r, total, at):
        parts, n_rows = operands[2], operands[3]
        row = i32(place[0] * 32 + r)
        best, first = best_of_warp(rank(total) if row < n_rows else LEAST_RANK, row)
        if r == 0:
            at = (i64(i32(cuda.blockIdx.y * n_tokens + token)) * tiles_of(n_rows) + place[0]) * 2
            st(parts, at, best)
            st(parts, at + 1, first)
    return by_turns(1, n_tokens, STORE)._replace(leave=leave)
