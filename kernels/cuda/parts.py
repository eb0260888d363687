"""Which part of a product with many tokens a block computes (`mmq`, `mmq_half`): rows and tokens by its place in the grid, or by
an item of work, which some threads write to shared memory."""
from typing import NamedTuple

from numba import cuda

from .block import Block
from .dispatch import ITEMS
from .operands import row_of_pair
from .ptx import device, i32, ld, ld4, lds, least, quotient, remainder, sts


class Part(NamedTuple):
    """Device functions that tell which part of a product a block computes. Its tokens are named by numbers that count up from
    `sources` and `targets`."""
    row_block: object  # (shared) -> which of the blocks of rows
    matrix: object     # (shared) -> which of the matrices behind each other in memory
    sources: object    # (shared) -> where the tokens' numbers begin
    source: object     # (shared, number, last) -> row of the activations, whose last one is `last`; beyond the last token that of
                       # the last
    targets: object    # (shared) -> where the numbers of what is stored begin
    target: object     # (shared, number) -> row of the result, beyond the last token no less than their number
    n_tokens: object = None  # (shared) -> how many tokens there are; without it activations are copied for as many as a block
                             # takes


def dense(block: Block) -> Part:
    """Rows from blockIdx.x * rows and tokens from blockIdx.y * tokens of one matrix."""
    tokens, blocks = block.tokens, block.blocks
    first = device(lambda shared: i32(cuda.blockIdx.y * tokens))
    return Part(row_block=device(lambda shared: quotient(i32(cuda.blockIdx.x), blocks)),
                matrix=device(lambda shared: i32(0)),
                sources=first,
                source=device(lambda shared, number, last: least(number, last)),
                targets=first,
                target=device(lambda shared, number: number))


def in_a_row(block: Block, at: int) -> Part:
    """As `dense`, of a matrix whose blocks of rows lie behind those of others: which of its own lies at word `at` of shared
    memory."""
    return dense(block)._replace(row_block=device(lambda shared: i32(lds(shared, at))))


def grouped(tokens: int, at) -> Part:
    """Of an item of work (`taker`) of so many tokens at most, which lies in shared memory from word at() on: row block, matrix,
    tokens, then their sources, then their targets."""
    return Part(row_block=device(lambda shared: i32(lds(shared, at()))),
                matrix=device(lambda shared: i32(lds(shared, at() + 1))),
                sources=device(lambda shared: i32(at() + 3)),
                # A block may have more threads than tokens
                source=device(lambda shared, number, last: i32(lds(shared, least(number, i32(at() + (2 + tokens)))))),
                targets=device(lambda shared: i32(at() + (3 + tokens))),
                target=device(lambda shared, number: i32(lds(shared, number))),
                n_tokens=device(lambda shared: i32(lds(shared, at() + 2))))


def item_words(tokens: int) -> int:
    return 3 + 2 * tokens


def taker(tokens: int, n_threads: int, at, heads: bool, which_tokens: bool = True):
    """(count, take) of items of work: an expert and some of its rows, by the table of `dispatch`, or a head and some tokens.

    count: (table, pairs) -> how many. take: (tid, shared, table, item, row_block, order, pairs): so many threads write one as
    `grouped` reads it, which the caller's barrier protects. table: int32, of `dispatch`; order: word of it at which the sorted
    pairs begin; pairs: `Pairs`. which_tokens: whether sources and targets are written, too."""

    @device
    def count(table, pairs):
        if heads:
            return i32(quotient(i32(quotient(pairs.n_pairs, pairs.n_matrices) + (tokens - 1)), tokens) * pairs.n_matrices)
        return ld(table, 0)

    @device
    def take(tid, shared, table, item, row_block, order, pairs):
        if heads:
            matrix, first = remainder(item, pairs.n_matrices), i32(quotient(item, pairs.n_matrices) * tokens)
            n = least(i32(tokens), i32(quotient(pairs.n_pairs, pairs.n_matrices) - first))
        else:
            matrix, first, n, _ = ld4(table, ITEMS + 4 * item)
        place = at()
        if tid == 0:
            sts(shared, place, row_block)
            sts(shared, place + 1, matrix)
            sts(shared, place + 2, n)
        i = tid
        while which_tokens and i < tokens:
            row = i32(first + least(i, i32(n - 1)))
            if heads:
                pair = i32(row * pairs.n_matrices + matrix)
                source = pair
            else:
                pair = ld(table, order + row)
                source = row_of_pair(pair, pairs.n_used, pairs.x_rows)
            sts(shared, place + 3 + i, source)
            sts(shared, place + 3 + tokens + i, pair if i < n else pairs.n_pairs)
            i = i32(i + n_threads)
    return count, take
