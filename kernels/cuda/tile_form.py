"""A weight tile's chunk (32 rows x 256 columns) times a few tokens: where what is multiplied lies in shared memory, and what is
done for a format and a number of tokens. The products: `tile_product`, of a single token `token_product`.

Tokens go in fours, a *quad*: eight columns of a product, the limbs hi and lo of each token side by side. So lane l gets both sums
of token l % 4 of the quad for its four rows, S = 128 hi + lo. In shared memory a quad is 8 rows (token, limb) of 16 pieces of 16
bytes; piece p of row r lies at place p ^ `swizzle(r)`, so that the accesses of both orders of columns touch every bank once.

What follows the sums depends on the format alone (`Form`).
"""
from typing import NamedTuple

import numpy as np

from ...quant.activation import LIMIT
from ...quant.formats import CHUNK, Format, format_of
from ...quant.tile import tile_bytes
from ...quant.words import SUMMED, Looked, Summed
from .ptx import device, i32, i64, u32
from .weights import shared_unpacker, terms, unpacker

QUAD = 4                  # tokens
QUAD_WORDS = 2 * QUAD * CHUNK // 4
# Quads from which on something takes less in another way (docs/kernels-log.md)
LATE_FROM = 2             # minima are multiplied at the end of a chunk, with limbs of the sums of q
SUBTRACTED_FROM = {32: 4, 16: 5}  # zero points are subtracted while unpacking, not by a product; by the columns of a sum
SPLIT_FROM = 5            # levels, not sums, are multiplied by scales
APART_FROM = 5            # the compiler keeps the products of quads apart, as registers want it


class Form(NamedTuple):
    """How the sums of a format are formed."""
    step: int       # columns of a sum that a scale follows: 16 or 32
    integer: bool   # that scale is an integer: S adds isc * sum
    wide: bool      # S needs more than 32 bits: the sums over hi and over lo are kept apart
    carried: bool   # there is no scale before the group's: the tensor core adds on


def form(fmt: Format) -> Form:
    integer = fmt.max_isc > 1
    step = fmt.sub if integer else min(fmt.group, 32)
    return Form(step, integer, fmt.group * fmt.max_level * fmt.max_isc * LIMIT >= 2**31, not integer and fmt.group > step)


class Slot(NamedTuple):
    """Words of a chunk in shared memory: row tiles, then the tokens' quads, their scales d [token], the limbs of their sums
    [token][16]."""
    act: int
    d: int
    limbs: int
    n_words: int
    tiles: int = 0


def slot(fmt: Format, row_tiles: int, n_quads: int, limbs_too: bool) -> Slot:
    act = row_tiles * tile_bytes(fmt) // 4
    d = act + n_quads * QUAD_WORDS
    limbs = d + n_quads * QUAD
    return Slot(act, d, limbs, limbs + (16 * QUAD * n_quads if limbs_too else 0))


class Factors(NamedTuple):
    """What a warp prepares of a tile's scales, planes of 32 words: row r at place 4 (r & 7) + r // 8, so that a lane's four rows
    are four words. Planes from 0: d of the groups or, integer, isc of the sub-blocks."""
    d: int         # plane of d
    m: int         # first plane of the minima, negated
    imin: int      # planes of imin in all four bytes; late: [row][16 bytes], imin of every 16 columns
    n_words: int


def factors(fmt: Format, n_quads: int) -> Factors:
    if not form(fmt).integer:
        n = CHUNK // fmt.group
        return Factors(0, n, 0, 32 * (n + n * fmt.has_min))
    n = CHUNK // fmt.sub
    return Factors(n, n + 1, n + 2, 32 * (n + 1 + (1 + (4 if is_late(fmt, n_quads) else n)) * fmt.has_min))


def is_split(fmt: Format, n_quads: int) -> bool:
    """Whether levels are multiplied by their integer scales while unpacking and split in limbs, which for many tokens takes less
    than to multiply sums of 16."""
    return n_quads >= SPLIT_FROM and form(fmt).integer and form(fmt).step == 16


def is_late(fmt: Format, n_quads: int) -> bool:
    """Whether the minima of a chunk are multiplied at its end with limbs of the sums of q: 2 products for 32 of a quad."""
    return n_quads >= LATE_FROM and fmt.has_min and fmt.group == CHUNK


def takes_sums(fmt: Format) -> bool:
    """Whether a single token's minima, or what its levels are shifted by, are multiplied with the sums of q, wanted in shared
    memory."""
    return (fmt.has_min and fmt.group == CHUNK) or shift_of(fmt, unpacker(fmt.name)) is not None


@device
def chunk_words(row_tile, chunk, n_chunks, n_words):
    """The word at which the chunk of a row tile begins, int64. n_words: of each. A weight has fewer than 2^32 chunks of row
    tiles."""
    return i64(u32(row_tile * n_chunks + chunk)) * n_words


@device
def swizzle(r):
    return ((r << 1) & 7) | (r >> 2)


def offset_of(fmt: Format, unpack):
    """int32: how much unshifted levels are more than the sums of what a product of a single token takes of them."""
    source = unpack.source
    return i32(-SUMMED if isinstance(source, Summed) else terms(source.levels).constant if isinstance(source, Looked)
               else -fmt.zero if form(fmt).integer else 0)


def shift_of(fmt: Format, unpack):
    """(t, i) -> int32: how much the levels of sub-block i are more than the sums of what a product of a single token takes of
    them; None for nothing."""
    shift, more = unpack.shift, offset_of(fmt, unpack)
    if shift and more:
        return device(lambda t, i: i32(shift(t, i) + more))
    return device(lambda t, i: more) if more else shift


def table_words(name: str) -> int:
    """Words of the codebooks."""
    return shared_unpacker(name).n_words


class Constants(NamedTuple):
    """What a product is compiled for, and what follows from it: all stages know it when they are compiled."""
    fmt: Format
    unpack: object    # `quant.words.Unpacker`, its codebooks in shared memory,
    n_entries: int    # and their words
    n_quads: int      # of tokens
    single: bool      # one token, of which shared memory holds two rows, hi and lo
    form: Form
    planes: Factors
    apart: bool       # whether the compiler keeps products of quads apart
    split: bool       # as of `is_split`
    late: bool        # as of `is_late`
    zero: int         # the zero point, where a product subtracts it, not the unpacking

    @property
    def n_sums(self) -> int:
        """Of a lane: four rows, one token of each quad."""
        return 4 * self.n_quads

    @property
    def steps(self) -> int:
        """Sums of 32 columns that are scaled one by one."""
        return 32 // self.form.step

    @property
    def whole(self) -> bool:
        """Whether a chunk is a single group."""
        return self.fmt.group == CHUNK

    @property
    def minus_zero(self):
        """int32, four times -zero, the constant matrix."""
        return np.full(4, -self.zero, np.int8).view(np.int32)[0]


def constants(name: str, unpack, n_entries: int, n_quads: int, single: bool) -> Constants:
    fmt = format_of(name)
    step, integer, wide, carried = form(fmt)
    assert not single or (not (carried and (fmt.has_min or wide)) and fmt.has_min <= (integer or fmt.group != CHUNK)), name
    assert not (fmt.has_min and (unpack.pairs or fmt.zero)), name
    return Constants(fmt, unpack, n_entries, n_quads, single, form(fmt), factors(fmt, n_quads), n_quads >= APART_FROM,
                     is_split(fmt, n_quads), is_late(fmt, n_quads), 0 if n_quads >= SUBTRACTED_FROM[step] else fmt.zero)


class TileProduct(NamedTuple):
    """The device functions of a format and a number of quads."""
    multiply: object  # (lane, shared, tile, act, limbs, scratch, acc): acc[4 quad + k] = acc of section 3, of row l / 4 + 8 k and
                      # token l % 4; of a single token acc[0], of row l / 4 + 8 (l % 4); limbs are then the sums of q, and scratch
                      # is where `zero_words` zeros lie
    n_entries: int    # of codebooks
    entry: object     # (i) -> one of them
