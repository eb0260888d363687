"""Tokens of several sequences that are computed together, and the micro-batches that they are computed in."""
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Tokens that continue sequences, one sequence behind the other."""
    seq_ids: tuple[int, ...]
    starts: tuple[int, ...]  # the position of each sequence's first token
    counts: tuple[int, ...]  # tokens of each
    tokens: np.ndarray  # int32


class MicroBatch(NamedTuple):
    tokens: slice
    rows: np.ndarray  # i64: those of the tokens that have a row of the result
    of_result: slice  # these rows
    n_seq: int  # sequences


def size_of(n: int) -> int:
    """To how many tokens a micro-batch of n is filled up: up to 16 as it is, then multiples of 8, from 128 on of 16, from 256 on
    of 32 and so on, so at most an eighth more behind 64."""
    step = max(8, 1 << max(n.bit_length() - 4, 0))
    return n if n <= 16 else -(-n // step) * step


def filled(tokens: np.ndarray, seq: np.ndarray, pos: np.ndarray, most: int,
           n_ctx: int) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], int]:
    """A micro-batch of a size of `size_of`, `most` at most, where its last sequence has room in its n_ctx positions; and how many
    tokens were added. They go on with that sequence, have no row of the result and are not marked as there, so nobody sees them.
    """
    size = size_of(len(seq))
    n_more = size - len(seq)
    if not n_more or size > most or pos[-1] + n_more >= n_ctx:
        return (tokens, seq, pos), 0
    more = np.arange(1, n_more + 1, dtype=np.int32)
    return (np.concatenate([tokens, np.zeros_like(more)]), np.concatenate([seq, np.full_like(more, seq[-1])]),
            np.concatenate([pos, pos[-1] + more])), n_more


def filled_rows(rows: np.ndarray, n_tokens: int) -> tuple[np.ndarray, slice | np.ndarray]:
    """As many rows of the result as `size_of` has, and which of them are wanted. Of all tokens they are in the tokens' order, so
    that nothing takes them."""
    size, n = size_of(len(rows)), len(rows)
    if size == n:
        return rows, slice(n)
    if size < n_tokens:
        return np.concatenate([rows, np.zeros(size - n, rows.dtype)]), slice(n)
    return np.arange(n_tokens), slice(n) if rows[-1] == n - 1 else rows


class Layout(NamedTuple):
    """What all batches of these sequences, with as many tokens of each, have in common. Arrays are read-only."""
    seq: np.ndarray  # int32: of each token, its sequence
    within: np.ndarray  # int32: how many of the sequence's tokens are before it
    results: list[slice]  # rows of each sequence
    micro_batches: list[MicroBatch]


@lru_cache(4)
def layout(seq_ids: tuple[int, ...], counts: tuple[int, ...], n_rows: tuple[int, ...], n_ubatch: int) -> Layout:
    """n_rows: of each sequence, how many of its last tokens have a row of the result. n_ubatch: tokens of a micro-batch."""
    n_tokens, left = np.array(counts), np.array(n_rows)
    seq = np.repeat(np.array(seq_ids, np.int32), n_tokens)
    within = np.arange(len(seq), dtype=np.int32) - np.repeat((n_tokens.cumsum() - n_tokens).astype(np.int32), n_tokens)
    has_row = within >= np.repeat(n_tokens - left, n_tokens)
    micro_batches, row = [], 0
    for first in range(0, len(seq), n_ubatch):
        part = slice(first, first + n_ubatch)
        rows = np.flatnonzero(has_row[part])
        micro_batches.append(MicroBatch(part, rows, slice(row, row + len(rows)), len(np.unique(seq[part]))))
        row += len(rows)
    for array in seq, within, *(each.rows for each in micro_batches):
        array.flags.writeable = False
    return Layout(seq, within, [slice(*ends) for ends in pairwise(accumulate(n_rows, initial=0))], micro_batches)
