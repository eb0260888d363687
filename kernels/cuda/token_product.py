"""A weight tile's chunk (32 rows x 256 columns) times a single token on int8 tensor cores, by one warp, as `tile_product` has it
for several.

The token stands in all four places of a quad, of which shared memory then holds one. Either the four lanes of a row have the
same sums of its four rows, and each goes on with one, l / 4 + 8 (l % 4), whose scales it keeps in registers; or each place takes
other sub-blocks (`in_columns`).

Arguments of device functions are those of `tile_product`; limbs is the word at which the sums of q begin.
"""
from functools import lru_cache
from typing import NamedTuple

from numba import cuda

from ...quant.formats import CHUNK
from ...quant.words import FiveBits, Looked, Paired, Summed
from .ptx import (afresh, apart, before_blackwell, device, f32, fma, i2f, i32, i64, l2f, ldmatrix4, lds, lds2, mad64, mma32,
                  nothing, prmt, shuffle, syncwarp, u32)
from .tile_form import Constants, TileProduct, constants, offset_of, shift_of
from .tile_product import carrier, row_unpacker, token_loader
from .weights import Tables, five_bit_terms, pairs_of_codes, shared_unpacker, terms

ZEROS = CHUNK // 4        # words, for a single token


@device
def own_row(lane, a, b, c, d):
    """Of the values of rows l / 4, + 8, + 16, + 24 that of the lane's own."""
    first, last = b if lane & 1 else a, d if lane & 1 else c
    return i32(last if lane & 2 else first)


class StepProduct(NamedTuple):
    """How a single token's sums are made of what the format states: words of levels; or terms, which the tensor core adds, of one
    or two words for four levels, or of a word for each level. The words of B follow."""
    unpack_rows: object  # (lane, shared, tile, j) -> words of A, as a tuple, of the tile's rows 0 .. 15 and of its rows 16 .. 31
    tokens: object       # (b0, b1) -> words of B, as a tuple
    multiply: object     # (w, b, c) -> c + the products: (hi, lo) of two rows


def level_product(const: Constants) -> StepProduct:
    """A word for four levels."""
    rows = row_unpacker(const)

    @device
    def unpack_rows(lane, shared, tile, j):
        w = rows(lane, shared, tile, j)
        return w[:4], w[4:]

    @device
    def multiply(w, b, c):
        return mma32(w[0], w[1], w[2], w[3], b[0], b[1], c[0], c[1], c[2], c[3])
    return StepProduct(unpack_rows, device(lambda b0, b1: (b0, b1)), multiply)


@device
def by_turns_of_bytes(b0, b1):
    """The bytes of two words by turns."""
    a, b = u32(b0), u32(b1)
    return i32(prmt(a, b, u32(0x5140))), i32(prmt(a, b, u32(0x7362)))


def looked_product(const: Constants) -> StepProduct:
    """The nibbles of a word as they lie are columns of the first and of the last 16 by turns, and so are the words of B."""
    word = const.unpack.source.word
    n_terms, _, of_nibbles = terms(const.unpack.source.levels)

    @device
    def two_rows(shared, tile, row, j, q):
        x, y = of_nibbles(word((shared, tile, row), j, q)), of_nibbles(word((shared, tile, row + 8), j, q))
        if n_terms == 1:
            return x[0], y[0], x[1], y[1]
        return x[0], y[0], x[1], y[1], x[2], y[2], x[3], y[3]

    @device
    def unpack_rows(lane, shared, tile, j):
        g, q = lane >> 2, lane & 3
        return two_rows(shared, tile, g, j, q), two_rows(shared, tile, g + 16, j, q)

    @device
    def multiply(w, b, c):
        c = mma32(w[0], w[1], w[2], w[3], b[0], b[1], c[0], c[1], c[2], c[3])
        if n_terms == 2:
            c = mma32(w[4], w[5], w[6], w[7], b[0], b[1], c[0], c[1], c[2], c[3])
        return c
    return StepProduct(unpack_rows, by_turns_of_bytes, multiply)


def summed_product(const: Constants) -> StepProduct:
    """A word's bytes are multiplied with the same q, which stands in all four bytes of a word of B."""
    words = const.unpack.source.words
    assert const.unpack.pairs

    @device
    def unpack_rows(lane, shared, tile, j):
        g, q = lane >> 2, lane & 3
        return (words((shared, tile, g), j, q) + words((shared, tile, g + 8), j, q),
                words((shared, tile, g + 16), j, q) + words((shared, tile, g + 24), j, q))

    @device
    def four_times(b):
        b, z = u32(b), u32(0)
        return (i32(prmt(b, z, u32(0x0000))), i32(prmt(b, z, u32(0x1111))),
                i32(prmt(b, z, u32(0x2222))), i32(prmt(b, z, u32(0x3333))))

    @device
    def multiply(w, b, c):
        for k in range(4):
            c = mma32(w[k], w[8 + k], w[4 + k], w[12 + k], b[k], b[4 + k], c[0], c[1], c[2], c[3])
        return c
    return StepProduct(unpack_rows, device(lambda b0, b1: four_times(b0) + four_times(b1)), multiply)


def step_product(const: Constants) -> StepProduct:
    source = const.unpack.source
    return (looked_product(const) if isinstance(source, Looked) else summed_product(const) if isinstance(source, Summed)
            else level_product(const))


# A single token and integer scales, in columns: of the four pairs of columns of a product, hi and lo, each takes another
# sub-block. The words of B of the others are zeros there. So four sub-blocks are multiplied before their sums are looked at, lane
# 4 g + n has those of the n-th for all its four rows, and what each makes of them is added over the lanes once a chunk.

class Turn(NamedTuple):
    """Two blocks whose words of B are loaded together: j and j + 1, or j and j + 2 (`in_blocks`)."""
    begin: object      # (lane, act, zeros) -> what `load` takes as `at`, once a chunk; zeros: word at which ZEROS zeros lie
    load: object       # (shared, at, k, j) -> words of B, four; the turn is the k-th of four blocks
    multiply: object   # (lane, shared, tile, j, b, x, y) -> x, y and the products of the tile's rows 0 .. 15 and 16 .. 31
    sub_block: object  # (lane, j) -> the sub-block whose sums the lane has behind a turn (16 columns) or two (32)


def in_columns(const: Constants) -> bool:
    """Whether the columns of a product take sub-blocks: for sums of 32 columns that one or two products make it is not less work
    (docs/kernels-log.md)."""
    source = const.unpack.source
    return const.form.integer and (const.form.step == 16 or const.fmt.zero > 0 or in_blocks(const)
                                   or isinstance(source, Summed | Paired | FiveBits))


@lru_cache(None)
def zero_words(name: str) -> int:
    """Words of zeros that the product of a single token reads in shared memory."""
    unpack, n_entries, _ = shared_unpacker(name)
    return ZEROS * in_columns(constants(name, unpack, n_entries, 1, True))


def in_blocks(const: Constants) -> bool:
    """Whether words have the codes of blocks j and j + 2."""
    return isinstance(const.unpack.source, Looked) and const.unpack.source.blocks is not None


def token_columns(const: Constants):
    """(lane, act, zeros) -> the words at which the lane's pieces of B begin, of as many zeros where they are none of its
    sub-blocks'; and `Turn.load`, which takes them as `at`. Those of other blocks are a constant away."""
    far, pairs, sixteens = in_blocks(const), const.unpack.pairs, const.form.step == 16

    @device
    def at_pairs(lane, act, zeros):
        n, q, limb = i32(lane >> 3), i32(lane & 3), i32((lane >> 2) & 1)
        piece = i32((q >> 1) ^ (limb << 1))
        first = i32(act + limb * 64 + (piece << 2) + ((q & 1) << 1))
        last = i32(act + limb * 64 + ((piece ^ 2) << 2) + ((q & 1) << 1))
        if sixteens:
            a, b = afresh(first if n == i32(q >> 1) else zeros), afresh(last if n == i32(2 + (q >> 1)) else zeros)
            return a, b, a, b
        return (afresh(first if n == i32(0) else zeros), afresh(last if n == i32(1) else zeros),
                afresh(first if n == i32(2) else zeros), afresh(last if n == i32(3) else zeros))

    @device
    def load_pairs(shared, at, k, j):
        first, last = (at[2], at[3]) if k else (at[0], at[1])
        a, b = lds2(shared, first + 8 * j)
        c, d = lds2(shared, last + 8 * j)
        return i32(a), i32(b), i32(c), i32(d)

    @device
    def at_pieces(lane, act, zeros):
        n, limb, matrix = i32((lane >> 1) & 3), i32(lane & 1), i32(lane >> 3)
        first = i32(act + limb * 64)
        if far:  # pieces 2j, 2j + 4, 2j + 1, 2j + 5 of blocks j and j + 2
            piece = i32((4 * (matrix & 1) + (matrix >> 1)) ^ (limb << 1))
            a, b = i32(first + (piece << 2)), i32(first + ((piece ^ 2) << 2))
            if sixteens:
                return afresh(a if n == matrix else zeros), afresh(b if n == matrix else zeros)
            return afresh(a if n == i32(2 * (matrix & 1)) else zeros), afresh(b if n == i32(2 * (matrix & 1) + 1) else zeros)
        a = i32(first + ((matrix ^ (limb << 1)) << 2))
        if sixteens:
            a = afresh(a if n == matrix else zeros)
            return a, a
        return afresh(a if n == i32(matrix >> 1) else zeros), afresh(a if n == i32(2 + (matrix >> 1)) else zeros)

    @device
    def load_pieces(shared, at, k, j):
        return ldmatrix4(shared, (at[1] if k else at[0]) + 8 * ((j & 4) if far else j))
    return (at_pairs, load_pairs) if pairs else (at_pieces, load_pieces)


def paired_multiplier(const: Constants):
    """`Turn.multiply` of codes of pairs, of both blocks by turns, and so are the halves of the words of B."""
    _, _, nibbles, fifths = const.unpack.source
    of_codes = pairs_of_codes(const.unpack.source.levels)
    assert const.unpack.pairs and const.form.step == 32

    @device
    def rows(shared, tile, row, j, q, b, c):
        t, s = (shared, tile, row), (shared, tile, row + 8)
        w, v = of_codes(nibbles(t, j, q), fifths(t, j, q)), of_codes(nibbles(s, j, q), fifths(s, j, q))
        c = mma32(w[0], v[0], w[1], v[1], b[0], b[1], c[0], c[1], c[2], c[3])
        return mma32(w[2], v[2], w[3], v[3], b[2], b[3], c[0], c[1], c[2], c[3])

    @device
    def multiply(lane, shared, tile, j, b, x, y):
        g, q, b0, b1, b2, b3 = lane >> 2, lane & 3, u32(b[0]), u32(b[1]), u32(b[2]), u32(b[3])
        halves = (i32(prmt(b0, b2, u32(0x5410))), i32(prmt(b0, b2, u32(0x7632))),
                  i32(prmt(b1, b3, u32(0x5410))), i32(prmt(b1, b3, u32(0x7632))))
        return rows(shared, tile, g, j, q, halves, x), rows(shared, tile, g + 16, j, q, halves, y)
    return multiply


def five_bit_multiplier(const: Constants):
    """`Turn.multiply` of codes of five bits, of both blocks by turns, and so are the words of B."""
    _, _, nibbles, fifths = const.unpack.source
    of_codes = five_bit_terms(const.unpack.source.levels)

    @device
    def rows(shared, tile, row, j, h, q, b, c):
        t, s = (shared, tile, row), (shared, tile, row + 8)
        (w, x), (v, y) = of_codes(nibbles(t, j, h, q), fifths(t, j, h, q)), of_codes(nibbles(s, j, h, q), fifths(s, j, h, q))
        c = mma32(w[0], v[0], x[0], y[0], b[0], b[1], c[0], c[1], c[2], c[3])
        c = mma32(w[1], v[1], x[1], y[1], b[0], b[1], c[0], c[1], c[2], c[3])
        c = mma32(w[2], v[2], x[2], y[2], b[0], b[1], c[0], c[1], c[2], c[3])
        return mma32(w[3], v[3], x[3], y[3], b[0], b[1], c[0], c[1], c[2], c[3])

    @device
    def multiply(lane, shared, tile, j, b, x, y):
        g, q, c, d = lane >> 2, lane & 3, by_turns_of_bytes(b[0], b[2]), by_turns_of_bytes(b[1], b[3])
        x, y = rows(shared, tile, g, j, 0, q, c, x), rows(shared, tile, g + 16, j, 0, q, c, y)
        return rows(shared, tile, g, j, 1, q, d, x), rows(shared, tile, g + 16, j, 1, q, d, y)
    return multiply


def near_multiplier(const: Constants):
    """`Turn.multiply` of blocks j and j + 1."""
    unpack_rows, tokens, multiply_step = step_product(const)

    @device
    def multiply(lane, shared, tile, j, b, x, y):
        w, v = unpack_rows(lane, shared, tile, j)
        c = tokens(b[0], b[1])
        x, y = multiply_step(w, c, x), multiply_step(v, c, y)
        w, v = unpack_rows(lane, shared, tile, j + 1)
        c = tokens(b[2], b[3])
        return multiply_step(w, c, x), multiply_step(v, c, y)
    return multiply


def far_multiplier(const: Constants):
    """`Turn.multiply` of words that have the codes of blocks j and j + 2, by turns, and so are the words of B."""
    multiply_step, blocks = step_product(const).multiply, const.unpack.source.blocks
    n_terms, _, of_nibbles = terms(const.unpack.source.levels)
    assert n_terms == 1

    @device
    def two_rows(shared, tile, row, j, h, q):
        v, w = of_nibbles(blocks((shared, tile, row), j, h, q)), of_nibbles(blocks((shared, tile, row + 8), j, h, q))
        return v[0], w[0], v[1], w[1]

    @device
    def multiply(lane, shared, tile, j, b, x, y):
        g, q = lane >> 2, lane & 3
        for h in range(2):
            c = by_turns_of_bytes(b[2 * h], b[2 * h + 1])
            x = multiply_step(two_rows(shared, tile, g, j, h, q), c, x)
            y = multiply_step(two_rows(shared, tile, g + 16, j, h, q), c, y)
        return x, y
    return multiply


def turn(const: Constants) -> Turn:
    far, sixteens = in_blocks(const), const.form.step == 16
    source = const.unpack.source
    multiplier = (paired_multiplier if isinstance(source, Paired) else five_bit_multiplier if isinstance(source, FiveBits)
                  else far_multiplier if far else near_multiplier)

    @device
    def sub_block(lane, j):
        p = lane & 3
        if sixteens:
            return i32(2 * (j + 2 * (p & 1)) + (p >> 1) if far else 2 * j + p)
        return i32((j & 4) + p)
    return Turn(*token_columns(const), multiplier(const), sub_block)


class ColumnSums(NamedTuple):
    """Of a lane, arrays in registers, int32 [4], of its four rows: S of its sub-blocks so far, 128 high + low where it is wide,
    else low; and M."""
    high: object
    low: object
    minima: object


def scale_taker(const: Constants):
    """(load, take). load: (t, i) -> what `take` takes of a row, i the lane's first sub-block. take: (words, t, i, n) -> isc, imin
    and the shift of sub-block i, the lane's n-th."""
    sub, shift, scales, z = const.unpack.sub, shift_of(const.fmt, const.unpack) or nothing, const.unpack.scales, i32(0)
    shifted, rest = shift is not nothing, offset_of(const.fmt, const.unpack)
    if not scales:
        @device
        def take_one(words, t, i, n):
            isc, imin = sub(t, i)
            return isc, imin, shift(t, i) if shifted else z
        return device(lambda t, i: z), take_one
    load, take = scales
    assert not const.fmt.has_min and not const.fmt.zero

    @device
    def take_of_words(words, t, i, n):
        isc, more = take(words, n)
        return isc, z, i32(more + rest)
    return load, take_of_words


def sub_block_follower(const: Constants):
    """(words, shared, tile, g, sums_at, i, n, x, y, sums): adds what the sums x, y of rows 0 .. 15 and 16 .. 31 of sub-block i,
    the lane's n-th, (hi, lo) of two rows each, and its minimum contribute. words: what `scale_taker` loaded of the lane's four
    rows. sums_at: word at which the sums of q of each 16 columns begin."""
    wide, has_min, n_sixteenths, z = const.form.wide, const.fmt.has_min, const.form.step // 16, i32(0)
    shifted, (_, take) = shift_of(const.fmt, const.unpack) is not None, scale_taker(const)

    @device
    def follow_row(words, t, i, n, k, hi, lo, q_sum, sums):
        isc, imin, more = take(words, t, i, n)
        if wide:
            if shifted:
                hi, lo = i32(hi + more * (q_sum >> 7)), i32(lo + more * (q_sum & 127))
            sums.high[k], sums.low[k] = i32(sums.high[k] + isc * hi), i32(sums.low[k] + isc * lo)
        else:
            both = i32((hi << 7) + lo)
            if shifted:
                both = i32(both + more * q_sum)
            sums.low[k] = i32(sums.low[k] + isc * both)
        if has_min:
            sums.minima[k] = i32(sums.minima[k] + imin * q_sum)

    @device
    def follow(words, shared, tile, g, sums_at, i, n, x, y, sums):
        q_sum = z
        if shifted or has_min:
            q_sum = i32(lds(shared, sums_at + i * n_sixteenths))
            if n_sixteenths == 2:
                q_sum = i32(q_sum + i32(lds(shared, sums_at + i * n_sixteenths + 1)))
        follow_row(words[0], (shared, tile, g), i, n, 0, x[0], x[1], q_sum, sums)
        follow_row(words[1], (shared, tile, i32(g + 8)), i, n, 1, x[2], x[3], q_sum, sums)
        follow_row(words[2], (shared, tile, i32(g + 16)), i, n, 2, y[0], y[1], q_sum, sums)
        follow_row(words[3], (shared, tile, i32(g + 24)), i, n, 3, y[2], y[3], q_sum, sums)
    return follow


@device
def over_lanes(lane, values):
    """Of values[k], of row l / 4 + 8 k, the sum over the four lanes of a row, for the lane's own row."""
    odd, upper = lane & 1, lane & 2
    a, b = (values[1], values[3]) if odd else (values[0], values[2])
    c, d = (values[0], values[2]) if odd else (values[1], values[3])
    a, b = i32(a + shuffle(c, lane ^ 1)), i32(b + shuffle(d, lane ^ 1))
    kept, other = (b, a) if upper else (a, b)
    return i32(kept + shuffle(other, lane ^ 2))


def column_token_multiplier(const: Constants):
    """`TileProduct.multiply` of a single token and integer scales."""
    (columns, load, multiply, sub_block), follow, group = turn(const), sub_block_follower(const), const.unpack.group
    wide, has_min, sixteens, z = const.form.wide, const.fmt.has_min, const.form.step == 16, i32(0)
    load_scales, _ = scale_taker(const)
    second = 1 if in_blocks(const) else 2  # block of the second turn
    begin = syncwarp if isinstance(const.unpack.source, Summed) else apart  # a word a level: registers for one turn
    assert const.whole

    @device
    def multiply_turn(lane, shared, tile, at, k, j, x, y):
        begin()
        return multiply(lane, shared, tile, j, load(shared, at, k, j), x, y)

    @device
    def multiply_half(lane, shared, tile, at, limbs, words, half, sums):
        none, g, j = (z, z, z, z), i32(lane >> 2), 4 * half
        x, y = multiply_turn(lane, shared, tile, at, 0, j, none, none)
        if sixteens:
            follow(words, shared, tile, g, limbs, sub_block(lane, j), 2 * half, x, y, sums)
            x, y = none, none
        x, y = multiply_turn(lane, shared, tile, at, 1, j + second, x, y)
        follow(words, shared, tile, g, limbs, sub_block(lane, j + second), 2 * half + 1 if sixteens else half, x, y, sums)

    @device
    def multiply_token(lane, shared, tile, act, limbs, scratch, acc):
        sums = ColumnSums(cuda.local.array(4, i32), cuda.local.array(4, i32), cuda.local.array(4, i32))
        for k in range(4):
            sums.high[k], sums.low[k], sums.minima[k] = z, z, z
        at, g, i = columns(lane, act, scratch), i32(lane >> 2), sub_block(lane, 0)
        words = (load_scales((shared, tile, g), i), load_scales((shared, tile, i32(g + 8)), i),
                 load_scales((shared, tile, i32(g + 16)), i), load_scales((shared, tile, i32(g + 24)), i))
        multiply_half(lane, shared, tile, at, limbs, words, 0, sums)
        multiply_half(lane, shared, tile, at, limbs, words, 1, sums)
        low = over_lanes(lane, sums.low)
        d, m = group((shared, tile, i32((lane >> 2) + ((lane & 3) << 3))), 0)
        acc[0] = fma(l2f(mad64(over_lanes(lane, sums.high), i32(128), i64(low))) if wide else i2f(low), d, f32(0))
        if has_min:
            acc[0] = fma(-m, i2f(over_lanes(lane, sums.minima)), acc[0])
    return multiply_token


# A single token, where that is more work or scales are floats: a lane has one row of the tile, l / 4 + 8 (l % 4), whose scales
# and minima it unpacks for itself

class TokenSums(NamedTuple):
    """Of a lane, arrays in registers."""
    isc: object    # int32 [16]: integer scales of the row's sub-blocks
    acc: object    # float32 [1]: acc of docs/numerics.md, section 3
    total: object  # [1], int32, or int64 where S is wide: the S of the group so far
    high: object   # int32 [4], of the four rows that the tensor core adds on: sums over hi limbs
    low: object    # and over lo limbs


def scale_unpacker(const: Constants):
    """(t, shared, sums_at, isc) -> M = the sum of imin * q, int32; fills isc. t: (shared, tile, row) of `Unpacker`; sums_at: word
    at which the sums of q of each 16 columns begin."""
    sub, has_min, z = const.unpack.sub, const.fmt.has_min, i32(0)
    n_scales, n_sixteenths = CHUNK // const.fmt.sub, const.fmt.sub // 16

    @device
    def unpack_scales(t, shared, sums_at, isc):
        minimum = z
        for i in range(n_scales):
            isc[i], imin = sub(t, i)
            if has_min:
                q_sum = i32(lds(shared, sums_at + i * n_sixteenths))
                if n_sixteenths == 2:
                    q_sum = i32(q_sum + i32(lds(shared, sums_at + i * n_sixteenths + 1)))
                minimum = i32(minimum + imin * q_sum)
        return minimum
    return unpack_scales


def token_steps(const: Constants):
    """(b0, b1) -> the words of B of each sum of a block: of a sum of 16 columns the others' bytes are zeros."""
    tokens, z = step_product(const).tokens, i32(0)
    if const.form.step == 32:
        return device(lambda b0, b1: (tokens(b0, b1),))
    return device(lambda b0, b1: (tokens(b0, z), tokens(z, b1)))


def token_block_multiplier(const: Constants):
    """(lane, shared, tile, act, j, t, sums_at, sums): adds the products of blocks j and j + 1 with the token. An integer scale:
    total += isc S; a float one: acc = fma(RN(S), d, acc), and of minima of less than a chunk acc = fma(-m, RN(sum of q), acc). t,
    sums_at: as of `scale_unpacker`."""
    steps, zero, minus_zero, whole, n_group = const.steps, const.zero, const.minus_zero, const.whole, const.fmt.group
    integer, carried, has_min, group = const.form.integer, const.form.carried, const.fmt.has_min, const.unpack.group
    ones, z, wide = i32(0x01010101), i32(0), const.form.wide
    load_tokens, carry, (unpack_rows, _, multiply_step) = token_loader(const), carrier(const), step_product(const)
    tokens, shift = token_steps(const), shift_of(const.fmt, const.unpack)
    shifted, shift = shift is not None, shift or nothing
    assert not (zero and (integer or steps == 2))

    @device
    def multiply_block(lane, shared, tile, j, b0, b1, t, sums_at, sums):
        isc, acc, total, high, low = sums
        w, v = unpack_rows(lane, shared, tile, j)
        b = tokens(b0, b1)
        if carried:
            carry(w, b0, b1, 0, high, low)
            carry(v, b0, b1, 2, high, low)
        else:
            for s in range(steps):
                c = z, z, z, z
                if zero:
                    c = mma32(minus_zero, minus_zero, minus_zero, minus_zero, b0, b1, z, z, z, z)
                x, y = multiply_step(w, b[s], c), multiply_step(v, b[s], c)
                both = own_row(lane, (x[0] << 7) + x[1], (x[2] << 7) + x[3], (y[0] << 7) + y[1], (y[2] << 7) + y[3])
                if shifted:
                    more = shift(t, steps * j + s)
                    both = i32(both + more * i32(lds(shared, sums_at + 2 * j + s)))
                    if steps == 1:
                        both = i32(both + more * i32(lds(shared, sums_at + 2 * j + 1)))
                if wide and before_blackwell():
                    total[0] = mad64(isc[steps * j + s], both, total[0])
                elif wide:
                    total[0] = i64(total[0] + i64(isc[steps * j + s]) * i64(both))
                elif integer:
                    total[0] = i32(total[0] + isc[steps * j + s] * both)
                else:
                    d, m = group(t, (32 * j + 16 * s) // n_group)
                    acc[0] = fma(i2f(both), d, acc[0])
        if has_min and not whole:
            c = mma32(ones, ones, ones, ones, b0, b1, z, z, z, z)
            d, m = group(t, 32 * j // n_group)
            acc[0] = fma(-m, i2f(i32((c[0] << 7) + c[1])), acc[0])

    @device
    def multiply_blocks(lane, shared, tile, act, j, t, sums_at, sums):
        apart()
        b = load_tokens(lane, shared, act, j, 0)
        multiply_block(lane, shared, tile, j, b[0], b[1], t, sums_at, sums)
        apart()
        multiply_block(lane, shared, tile, j + 1, b[2], b[3], t, sums_at, sums)
    return multiply_blocks


def token_folder(const: Constants):
    """(lane, t, i, minimum, sums): acc = fma(RN(S), d, acc), then acc = fma(-m, RN(minimum), acc), of group i, whose sums are
    integers."""
    group, carried, wide, has_min, z = const.unpack.group, const.form.carried, const.form.wide, const.fmt.has_min, i32(0)

    @device
    def fold(lane, t, i, minimum, sums):
        _, acc, total, high, low = sums
        d, m = group(t, i)
        s = total[0]
        if carried:
            s = i32((own_row(lane, high[0], high[1], high[2], high[3]) << 7) + own_row(lane, low[0], low[1], low[2], low[3]))
            for k in range(4):
                high[k], low[k] = z, z
        acc[0] = fma(l2f(s) if wide else i2f(s), d, acc[0])
        if has_min:
            acc[0] = fma(-m, i2f(minimum), acc[0])
    return fold


def row_token_multiplier(const: Constants):
    """`TileProduct.multiply` of a single token: a lane unpacks its row's scales, the warp multiplies its eight blocks, the lane
    folds its row's groups."""
    n_group, whole, has_min = const.fmt.group, const.whole, const.fmt.has_min
    step, integer, wide, _ = const.form
    total_type, n_entries, z = i64 if wide else i32, const.n_entries, i32(0)
    unpack_scales, multiply_blocks, fold = scale_unpacker(const), token_block_multiplier(const), token_folder(const)

    @device
    def multiply_token(lane, shared, tile, act, limbs, scratch, acc):
        sums = TokenSums(cuda.local.array(16, i32), acc, cuda.local.array(1, total_type),
                         cuda.local.array(4, i32), cuda.local.array(4, i32))
        t, acc[0] = (shared, tile, i32((lane >> 2) + ((lane & 3) << 3))), f32(0)
        sums.total[0] = total_type(0)
        for k in range(4):
            sums.high[k], sums.low[k] = z, z
        minimum = z
        if integer:
            minimum = unpack_scales(t, shared, limbs, sums.isc)
        multiply_blocks(lane, shared, tile, act, 0, t, limbs, sums)
        multiply_blocks(lane, shared, tile, act, 2, t, limbs, sums)
        if n_group == 128:
            fold(lane, t, 0, minimum, sums)
        if n_entries or (not wide and (step == 16 or (has_min and not whole))):
            syncwarp()  # what is loaded for the other half is loaded behind it: registers
        multiply_blocks(lane, shared, tile, act, 4, t, limbs, sums)
        multiply_blocks(lane, shared, tile, act, 6, t, limbs, sums)
        if n_group == 128:
            fold(lane, t, 1, minimum, sums)
        if whole:
            fold(lane, t, 0, minimum, sums)
    return multiply_token


def token_multiplier(const: Constants):
    return column_token_multiplier(const) if in_columns(const) else row_token_multiplier(const)


def token_tables(name: str, first: int = 0) -> Tables:
    """`shared_unpacker` for a single token: without the codebook of pairs, which `paired_multiplier` looks up in registers."""
    tables = shared_unpacker(name, first)
    unpack, n_entries, _ = tables
    if not isinstance(unpack.source, Paired):
        return tables
    assert in_columns(constants(name, unpack, n_entries, 1, True)) and n_entries == len(unpack.source.levels), name
    return tables._replace(n_entries=0, entry=None)


def token_table_words(name: str) -> int:
    """Words of these codebooks."""
    return token_tables(name).n_words


def token_product(name: str, first_table: int = 0) -> TileProduct:
    """Of a single token: `act` holds its two rows only. first_table: word of shared memory at which the codebooks begin."""
    unpack, n_entries, entry = token_tables(name, first_table)
    return TileProduct(token_multiplier(constants(name, unpack, n_entries, 1, True)), n_entries, entry)
