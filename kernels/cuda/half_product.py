"""A weight tile's chunk (32 rows x 256 columns) times up to 128 tokens by products of float16 on Hopper, half of it by each of
two warps (docs/numerics.md, section 3).

What `group_product` does for formats with integer scales, with one product in the place of two: level times scale is one float16,
and so is a limb of q. Sums are float32 and exact while no partial sum can pass 2^24: then S = 128 H + L, H and L the sums over hi
and over lo, is one `fma`, which rounds once. The bounds, 0 <= w <= W being level times scale:

    H, L: of a token's limbs of a chunk let P be the sum of the positive ones and -N that of the others. Every partial sum lies
       between -W N and W P. The larger one of P and N is the reach of the limbs: up to `most_reach` it makes 2^24 at most. A
       chunk of which a token has more, of hi or of lo, is multiplied in parts, whose sums are added as integers: |hi| <= 127, so
       W * 127 * 128 <= 2^24 for halves of it, or W * 127 * 64 for quarters.
    minima: the sums of q over 16 columns are 128 a + b, |a| <= 2032, |b| <= 64, and M = 128 A + B likewise.

That tensor cores add exactly below 2^24 is seen on each GPU (`half_check`).

A weight counts 2^-24, as a code in the low bits of a float16 does, and in the bits above them 16 times as much: what a product
wants of a word of codes is a mask and a multiplication by the scale, or by a sixteenth of it. A fifth bit, wherever it lies in
the low byte of a float16, is another mask and multiplication. S counts as much, and d is multiplied by 2^24.

Columns of B are tokens' limbs, 2 token + limb, so a quad of tokens is an atom for each 64 columns of the chunk (`wgmma`). Of the
16 columns of a product lane q has 4 q .. 4 q + 3, as bytes of a word: these stand at places 2 q, 2 q + 8, 2 q + 1, 2 q + 9, and
the activations follow that order.
"""
from typing import NamedTuple

import numpy as np
from numba import cuda

from ...quant.formats import CHUNK, Format, format_of
from . import mbarrier
from .half_forms import EXACT, MOST_HIGH, largest_weight
from .ptx import (add2, as_f32, constant, device, f2i, f32, fma, fma2, i32, i64, l2f, lds, lds4, mul, prmt, stage, sts, u32)
from .weights import shared_unpacker
from .wgmma import ATOM_WORDS, PLACE, half_products, uniform_place, unswizzled_place, wait_for_all_but

UNIT, UNITS = f32(2**-24), f32(2**24)  # what a weight counts, and how many of these are 1
MOST_TOGETHER = 16           # quads with which half a chunk, or minima, are multiplied
# Products that may be under way while the next one's words are made: of more the blocks take longer. Of more quads, or with fifth
# bits, they have no registers for two
WAITING, WAITING_FEW = 2, 1
SUM_WORDS = 64               # of a quad's sums of q


# (0) -> `upper` of the device functions below: upper bytes of float16 from 1024 on, loaded as in weights.lookup_nibbles
exponents = constant(np.array([0x64646464], np.uint32))


def twice(value) -> np.uint32:
    """The word of two float16."""
    return np.array([value, value], np.float16).view(np.uint32)[0]


MINUS_1024, MINUS_64, SIXTEENTH = twice(-1024), twice(-64), twice(1 / 16)


def waiting_of(unpack, n_quads: int) -> int:
    return WAITING if n_quads <= MOST_TOGETHER and unpack.fifths is None else WAITING_FEW


class Barriers(NamedTuple):
    """Those of a chunk's activations, which come in pieces of as many columns each, for device functions: int32."""
    there: object   # word at which those begin whose phase of this parity ends when a piece is there,
    done: object    # and those at which each warp arrives when it is done with a piece
    parity: object


class Held(NamedTuple):
    """What a lane holds of a chunk, for device functions: the words of `packed` of its rows, 16 half + l / 4 and 8 further."""
    first: object
    second: object


# Arguments of device functions as in `group_product`, of n_quads quads of tokens; d: f32 [4 n_quads], in registers: sums of a
# product, [4 quad + 2 k + limb] of row k and token l % 4; s, total: f32 [2 n_quads], [2 quad + k]

def block_starter(unpack, n_quads: int, n_each: int, waiting: int):
    """(load, load_fifths, start_low, start_high). load: (lane, half, shared, tile, j) -> four words, as words of A: the codes of
    block j of 32 columns, j even, are their low nibbles, those of block j + 1 their high ones. load_fifths: (lane, half, shared,
    tile) -> words in the same order, bit j of whose bytes are the fifth bits of block j; zeros where codes have none. start_low,
    start_high: (shared, b, held, upper, j, w, fifths, d, keep): start both products of such a block with n_each quads, whose
    words are w, j that of the low nibbles: d = A B, or d + A B if keep. Products of earlier calls are done then: `waiting` of
    these run on."""
    assert waiting <= 2
    low, high, zero, block_places = u32(0x000f000f), u32(0x00f000f0), u32(0), n_quads * ATOM_WORDS // PLACE
    nibbles, fifths, start, has_fifths = unpack.nibbles, unpack.fifths, half_products(8 * n_each).start, unpack.fifths is not None
    wait = wait_for_all_but(waiting)

    @device
    def load(lane, half, shared, tile, j):
        row, q = (half << 4) + (lane >> 2), lane & 3
        w0, w2 = nibbles((shared, tile, row), j, q)
        w1, w3 = nibbles((shared, tile, row + 8), j, q)
        return u32(w0), u32(w1), u32(w2), u32(w3)

    @device
    def load_fifths(lane, half, shared, tile):
        if not has_fifths:
            return zero, zero, zero, zero
        row, q = (half << 4) + (lane >> 2), lane & 3
        (w0, w2), (w1, w3) = fifths((shared, tile, row), q), fifths((shared, tile, row + 8), q)
        return w0, w1, w2, w3

    @device
    def bytes_of(words, upper, j):
        """1024 + isc of block j, twice."""
        return prmt(words[j >> 2], upper, u32(0x4040 + 0x0101 * (j & 3)))

    @device
    def weights(w, mask, fifths, j, f, more):
        """Of two codes, f their scale, more: of their fifth bits."""
        rest = fma2(fifths & u32(u32(0x00010001) << u32(j)), more, zero) if has_fifths else zero
        return i32(fma2(w & mask, f, rest))

    @device
    def start_block(shared, at, w, fifths, j, mask, scales, d, keep):
        """w: codes in mask, of block j; scales: of both rows, by which they are weights, and their fifth bits are."""
        (f, f_more), (g, g_more) = scales
        v = u32(w[0] >> u32(8)), u32(w[1] >> u32(8)), u32(w[2] >> u32(8)), u32(w[3] >> u32(8))  # of bytes 1 and 3
        u = (u32(fifths[0] >> u32(8)), u32(fifths[1] >> u32(8)), u32(fifths[2] >> u32(8)), u32(fifths[3] >> u32(8)))
        start(d, shared, at, weights(w[0], mask, fifths[0], j, f, f_more), weights(w[1], mask, fifths[1], j, g, g_more),
              weights(v[0], mask, u[0], j, f, f_more), weights(v[1], mask, u[1], j, g, g_more), keep)
        start(d, shared, i32(at + 8 // PLACE), weights(w[2], mask, fifths[2], j, f, f_more),
              weights(w[3], mask, fifths[3], j, g, g_more), weights(v[2], mask, u[2], j, f, f_more),
              weights(v[3], mask, u[3], j, g, g_more), i32(1))
        wait()

    @device
    def of_fifths(f, j):
        """The scale of fifth bits, which stand at bit j and count 16: f 2^(4 - j)."""
        return fma2(f, u32(u32(0x04000400) * u32(19 - j)), zero) if has_fifths else zero

    @device
    def start_low(shared, b, held, upper, j, w, fifths, d, keep):
        f, g = add2(bytes_of(held.first, upper, j), MINUS_1024), add2(bytes_of(held.second, upper, j), MINUS_1024)
        scales = (f, of_fifths(f, j)), (g, of_fifths(g, j))
        start_block(shared, i32(b + (j >> 1) * block_places), w, fifths, j, low, scales, d, keep)

    @device
    def start_high(shared, b, held, upper, j, w, fifths, d, keep):
        """Codes in high nibbles count 16 times as much."""
        j = i32(j + 1)
        f, g = bytes_of(held.first, upper, j), bytes_of(held.second, upper, j)
        f, g = fma2(f, SIXTEENTH, MINUS_64), fma2(g, SIXTEENTH, MINUS_64)
        scales = (f, of_fifths(f, i32(j - 4))), (g, of_fifths(g, i32(j - 4)))
        start_block(shared, i32(b + (j >> 1) * block_places + 16 // PLACE), w, fifths, j, high, scales, d, keep)
    return load, load_fifths, start_low, start_high


def minimum_words(fmt: Format):
    """(lane, held, upper) -> words of A, imin of both rows."""
    n_isc = CHUNK // fmt.sub // 4

    @device
    def words_of(lane, held, upper):
        selector = u32(u32(lane & 3) * u32(0x0101) + u32(0x4040))
        return (i32(add2(prmt(held.first[n_isc], upper, selector), MINUS_1024)),
                i32(add2(prmt(held.second[n_isc], upper, selector), MINUS_1024)),
                i32(add2(prmt(held.first[n_isc + 1], upper, selector), MINUS_1024)),
                i32(add2(prmt(held.second[n_isc + 1], upper, selector), MINUS_1024)))
    return words_of


def scale_holder(unpack, minima_of):
    """(held_of, scales_of). held_of: (lane, half, shared, tile) -> `Held`. scales_of: (.., held, upper) -> (d, m) of both rows
    and the minima as words of A."""
    packed, group = unpack.packed, unpack.group

    @device
    def held_of(lane, half, shared, tile):
        row = (half << 4) + (lane >> 2)
        return Held(packed((shared, tile, row)), packed((shared, tile, row + 8)))

    @device
    def scales_of(lane, half, shared, tile, held, upper):
        row = (half << 4) + (lane >> 2)
        (d0, m0), (d1, m1) = group((shared, tile, row), 0), group((shared, tile, row + 8), 0)
        return (mul(d0, UNITS), m0), (mul(d1, UNITS), m1), minima_of(lane, held, upper)
    return held_of, scales_of


def whole_multiplier(unpack, n_quads: int, n_pieces: int, leave, minima_of):
    """`multiply` of `half_product`."""
    load, load_fifths, start_low, start_high = block_starter(unpack, n_quads, n_quads, waiting_of(unpack, n_quads))
    held_of, scales_of = scale_holder(unpack, minima_of)
    wait, n_sums, n_products, last = half_products(8 * n_quads).wait, 2 * n_quads, 4 * n_quads, n_pieces - 1
    again = unpack.fifths is not None  # what is held of minima would take registers all the while

    @device
    def two_blocks(lane, half, shared, tile, b, barriers, held, upper, piece, w, d, keep):
        """Of the columns from 64 piece on, which are a piece where there are several; w: what was loaded for them -> for the next
        ones."""
        if 0 < piece < n_pieces:
            mbarrier.wait(shared, barriers.there + piece * mbarrier.WORDS, barriers.parity)
        fifths = load_fifths(lane, half, shared, tile)
        start_low(shared, b, held, upper, i32(2 * piece), w, fifths, d, keep)
        if 0 < piece < n_pieces:  # all products of the piece before are done
            leave(lane, shared, i32(barriers.done + (piece - 1) * mbarrier.WORDS))
        start_high(shared, b, held, upper, i32(2 * piece), w, fifths, d, i32(1))
        return load(lane, half, shared, tile, i32((2 * piece + 2) & 6))

    @device
    def multiply(lane, half, shared, tile, act, barriers, upper, s):
        d = cuda.local.array(n_products, f32)
        for o in range(n_products):
            d[o] = f32(0)
        mbarrier.wait(shared, barriers.there, barriers.parity)
        b, held = uniform_place(shared, act), held_of(lane, half, shared, tile)
        w = load(lane, half, shared, tile, i32(0))
        w = two_blocks(lane, half, shared, tile, b, barriers, held, upper, 0, w, d, i32(0))
        w = two_blocks(lane, half, shared, tile, b, barriers, held, upper, 1, w, d, i32(1))
        w = two_blocks(lane, half, shared, tile, b, barriers, held, upper, 2, w, d, i32(1))
        two_blocks(lane, half, shared, tile, b, barriers, held, upper, 3, w, d, i32(1))
        found = scales_of(lane, half, shared, tile, held_of(lane, half, shared, tile) if again else held, upper)
        wait(d)
        leave(lane, shared, i32(barriers.done + last * mbarrier.WORDS))
        for o in range(n_sums):
            s[o] = fma(d[2 * o], f32(128), d[2 * o + 1])
        return found
    return multiply


def halves_multiplier(unpack, n_quads: int, n_each: int, n_pieces: int, leave, minima_of):
    """`multiply_parts` of `half_product`, in halves, n_each quads at a time."""
    assert n_quads in (n_each, 2 * n_each), n_quads
    load, load_fifths, start_low, start_high = block_starter(unpack, n_quads, n_each, waiting_of(unpack, n_quads))
    held_of, scales_of = scale_holder(unpack, minima_of)
    wait, n_sums, n_products = half_products(8 * n_each).wait, 2 * n_each, 4 * n_each

    @device
    def multiply_half(lane, half, shared, tile, b, held, upper, j, d):
        """Of blocks j .. j + 3."""
        for o in range(n_products):
            d[o] = f32(0)
        w, fifths = load(lane, half, shared, tile, j), load_fifths(lane, half, shared, tile)
        start_low(shared, b, held, upper, j, w, fifths, d, i32(0))
        start_high(shared, b, held, upper, j, w, fifths, d, i32(1))
        w = load(lane, half, shared, tile, i32(j + 2))
        start_low(shared, b, held, upper, i32(j + 2), w, fifths, d, i32(1))
        start_high(shared, b, held, upper, i32(j + 2), w, fifths, d, i32(1))
        wait(d)

    @device
    def integer(d, o):
        """S of what the product of a half left."""
        return i32((f2i(mul(d[2 * o], UNITS)) << 7) + f2i(mul(d[2 * o + 1], UNITS)))

    def some_multiplier(first):
        """(.., b, held, scratch, upper, s): sums of n_each quads from `first` on."""
        @device
        def multiply_some(lane, half, shared, tile, b, held, scratch, upper, s):
            # Arrays of their own: of one for both, ptxas took the products of the first half for unused
            d, e = cuda.local.array(n_products, f32), cuda.local.array(n_products, f32)
            at = i32(b + first * (ATOM_WORDS // PLACE))
            multiply_half(lane, half, shared, tile, at, held, upper, i32(0), d)
            for o in range(n_sums):
                sts(shared, scratch + 32 * o + lane, integer(d, o))
            multiply_half(lane, half, shared, tile, at, held, upper, i32(4), e)
            for o in range(n_sums):
                both = i64(i64(i32(lds(shared, scratch + 32 * o + lane))) + i64(integer(e, o)))
                s[2 * first + o] = mul(l2f(both), UNIT)
        return multiply_some
    multiply_first, multiply_last = some_multiplier(0), some_multiplier(n_quads - n_each)

    @device
    def multiply_parts(lane, half, shared, tile, act, barriers, scratch, upper, s):
        for piece in range(n_pieces):
            mbarrier.wait(shared, barriers.there + piece * mbarrier.WORDS, barriers.parity)
        b, held = uniform_place(shared, act), held_of(lane, half, shared, tile)
        multiply_first(lane, half, shared, tile, b, held, scratch, upper, s)
        if n_quads > n_each:
            multiply_last(lane, half, shared, tile, b, held, scratch, upper, s)
        found = scales_of(lane, half, shared, tile, held, upper)
        for piece in range(n_pieces):
            leave(lane, shared, i32(barriers.done + piece * mbarrier.WORDS))
        return found
    return multiply_parts


def together_of_quarters(n_kept: int) -> int:
    """Quads with which quarters of a chunk are multiplied, whose H and L find room: a power of two, since of six lanes have no
    registers."""
    return 1 << (n_kept // 4).bit_length() - 1


def quarters_multiplier(unpack, n_quads: int, n_each: int, n_pieces: int, leave, minima_of):
    """The same in quarters."""
    assert n_quads % n_each == 0, (n_quads, n_each)
    load, load_fifths, start_low, start_high = block_starter(unpack, n_quads, n_each, 0)
    held_of, scales_of = scale_holder(unpack, minima_of)
    wait, n_sums, n_products = half_products(8 * n_each).wait, 2 * n_each, 4 * n_each

    def quads_multiplier(first):
        """(lane, half, shared, tile, b, own, upper, s): those from `first` on and all behind them. H and L of the quarters
        so far lie in shared memory, from `own` on."""
        last = first + n_each == n_quads
        further = None if last else quads_multiplier(first + n_each)

        @device
        def multiply_quads(lane, half, shared, tile, b, own, upper, s):
            at, j = i32(b + first * (ATOM_WORDS // PLACE)), i32(0)
            for o in range(2 * n_sums):
                sts(shared, own + 32 * o, i32(0))
            while j < CHUNK // 32:
                d = cuda.local.array(n_products, f32)
                for o in range(n_products):
                    d[o] = f32(0)
                held, w = held_of(lane, half, shared, tile), load(lane, half, shared, tile, j)
                fifths = load_fifths(lane, half, shared, tile)
                start_low(shared, at, held, upper, j, w, fifths, d, i32(0))
                start_high(shared, at, held, upper, j, w, fifths, d, i32(1))
                wait(d)
                for o in range(n_products):
                    sts(shared, own + 32 * o, i32(i32(lds(shared, own + 32 * o)) + f2i(mul(d[o], UNITS))))
                j = i32(j + 2)
            for o in range(n_sums):
                high, low = i32(lds(shared, own + 64 * o)), i32(lds(shared, own + (64 * o + 32)))
                s[2 * first + o] = mul(l2f(i64(i64(i64(high) << 7) + i64(low))), UNIT)
            if not last:
                further(lane, half, shared, tile, b, own, upper, s)
        return multiply_quads
    multiply_all = quads_multiplier(0)

    @device
    def multiply_parts(lane, half, shared, tile, act, barriers, scratch, upper, s):
        for piece in range(n_pieces):
            mbarrier.wait(shared, barriers.there + piece * mbarrier.WORDS, barriers.parity)
        multiply_all(lane, half, shared, tile, uniform_place(shared, act), i32(scratch + lane), upper, s)
        found = scales_of(lane, half, shared, tile, held_of(lane, half, shared, tile), upper)
        for piece in range(n_pieces):
            leave(lane, shared, i32(barriers.done + piece * mbarrier.WORDS))
        return found
    return multiply_parts


def minima_together(n_quads: int) -> int:
    """Quads with which minima are multiplied, of n_quads: of a wide block so few that a lane has registers for their products."""
    return n_quads if n_quads <= MOST_TOGETHER else 8


def follower(n_quads: int, alone: bool):
    """`follow` of `half_product`. Minima are multiplied for a warpgroup's rows together: products of a warp alone would wait for
    those of the other warpgroup, one after the other."""
    n_each, words_of_quad = minima_together(n_quads), SUM_WORDS // PLACE
    assert n_quads % n_each == 0 and n_each % 4 == 0, n_quads
    n_products, (_, start, wait, *_) = 4 * n_each, half_products(8 * n_each)

    def some_follower(first):
        """Of the quads from `first` on, n_each at a time."""
        last = first + n_each == n_quads
        follow_further = None if last else some_follower(first + n_each)

        @device
        def follow_some(lane, shared, b, scales, scale_words, s, total):
            (d0, m0), (d1, m1), words = scale_words
            m = cuda.local.array(n_products, f32)
            start(m, shared, i32(b + first * words_of_quad), words[0], words[1], words[2], words[3])
            wait(m)
            for i in range(n_each // 4):
                of_tokens = lds4(shared, scales + (lane & 3) * n_quads + first + 4 * i)
                for k in range(4):
                    o, x, scale = 2 * (first + 4 * i + k), 4 * (4 * i + k), as_f32(of_tokens[k])
                    x0, x1 = fma(m[x], f32(128), m[x + 1]), fma(m[x + 2], f32(128), m[x + 3])
                    s[o], s[o + 1] = fma(-m0, x0, fma(s[o], d0, f32(0))), fma(-m1, x1, fma(s[o + 1], d1, f32(0)))
                    if alone:
                        total[o], total[o + 1] = fma(s[o], scale, total[o]), fma(s[o + 1], scale, total[o + 1])
            if not last:
                follow_further(lane, shared, b, scales, scale_words, s, total)
        return follow_some
    follow_all = some_follower(0)

    @stage
    def follow(lane, shared, sums, scales, scale_words, s, total):
        follow_all(lane, shared, unswizzled_place(shared, sums), scales, scale_words, s, total)
    return follow


def half_product(name: str, n_quads: int, n_kept: int, n_pieces: int, alone: bool, leave):
    """(multiply, multiply_parts, follow). multiply: (lane, half, shared, tile, act, barriers, upper, s) -> the scales of the
    lane's rows; s: written, RN(S) in units of 2^-24. barriers: of the activations, which come in n_pieces; leave: as
    `mbarrier.leave`, of a piece. multiply_parts: (lane, half, shared, tile, act, barriers, scratch, upper, s), the same of a
    chunk of which tokens may have more than `most_reach`; scratch: word at which the warp's own begin, n_kept for each lane.
    Behind them the tile is no longer needed. follow: (lane, shared, sums, scales, those of the rows, s, total): s becomes acc of
    section 3 and, if `alone`, total = fma(acc, d of the token, total). sums: word at which the sums of q over 16 columns begin, B
    of `HalfProducts.start_unswizzled`, whose columns are 2 token + limb; scales: those of the tokens, [l % 4][quad]."""
    fmt, unpack = format_of(name), shared_unpacker(name).unpacker
    minima_of = minimum_words(fmt)
    if largest_weight(fmt) * MOST_HIGH * (CHUNK // 2) <= EXACT:
        multiply_parts = halves_multiplier(unpack, n_quads, n_kept // 2, n_pieces, leave, minima_of)
    else:
        multiply_parts = quarters_multiplier(unpack, n_quads, together_of_quarters(n_kept), n_pieces, leave, minima_of)
    return whole_multiplier(unpack, n_quads, n_pieces, leave, minima_of), multiply_parts, follower(n_quads, alone)
