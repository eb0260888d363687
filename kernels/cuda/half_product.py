"""A weight tile's chunk (32 rows x 256 columns) times up to 128 tokens by products of float16 on Hopper, half of it by each of
two warps (docs/numerics.md, section 3).

What `group_product` does for formats with integer scales, with one product in the place of two: level times scale is one float16,
and so is a limb of q. Sums are float32 and exact while no partial sum can pass 2^24: then S = 128 H + L, H and L the sums over hi
and over lo, is one `fma`, which rounds once. The bounds, |w| <= W being level times scale:

    H, L: with W * 127 * 256 <= 2^24 all are exact. Else, of a token's limbs of a chunk let P be the sum of the positive ones and
       -N that of the others. Where w >= 0 every partial sum lies between -W N and W P, else none passes W (P + N). The larger one
       of P and N, or P + N, is the reach of the limbs: up to `most_reach` it makes 2^24 at most. A chunk of which a token has
       more, of hi or of lo, is multiplied in parts, whose sums are added as integers: |hi| <= 127, so W * 127 * 128 <= 2^24 for
       halves of it, or W * 127 * 64 for quarters.
    minima: the sums of q over 16 columns are 128 a + b, |a| <= 2032, |b| <= 64, and M = 128 A + B likewise.

That tensor cores add exactly below 2^24 is seen on each GPU (`half_check`).

A weight counts 2^-24, as a code in the low bits of a float16 does; in field r of a byte a code counts 2^(r width) times as much.
What a product wants of a word of codes is a mask and a multiplication by the scale over 2^(r width). The bit above a field, a top
bit, wherever it lies in the low byte of a float16, is another mask and multiplication. S counts as much, and d is multiplied by
2^24.

Of formats without such fields levels are bytes (`Unpacker.quarter`). A level plus 128 is the low byte of a float16 from 1024 on,
and isc plus 128 that of one from 0 on, which counts 2^-24. With x = 1024 + (level + 128) a weight is x isc - 1152 isc, one `fma`
of float16s, whose result is one: 1152 isc is 9 isc times a power of two.

Columns of B are tokens' limbs, 2 token + limb, so a quad of tokens is an atom for each 64 columns of the chunk (`wgmma`). Of the
16 columns of a product lane q has 4 q .. 4 q + 3, as bytes of a word: these stand at places 2 q, 2 q + 8, 2 q + 1, 2 q + 9, and
the activations follow that order. Where lanes have eight columns side by side (`Unpacker.pairs`), the first product of a block
of 32 has the first four of each lane, the other one the last four.
"""
from typing import NamedTuple

import numpy as np
from numba import cuda

from ...quant.formats import CHUNK, Format, format_of
from ...quant.words import TOPS
from . import mbarrier
from .half_forms import half_form
from .ptx import (add2, as_f32, device, f2i, f32, fma, fma2, hidden, i32, i64, l2f, lds, lds4, mul, prmt, shuffle, stage, sts,
                  u32)
from .tile_product import level_words
from .weights import shared_unpacker
from .wgmma import ATOM_WORDS, PLACE, half_products, uniform_place, unswizzled_place, wait_for_all_but

UNIT, UNITS = f32(2**-24), f32(2**24)  # what a weight counts, and how many of these are 1
MOST_TOGETHER = 16           # quads with which half a chunk, or minima, are multiplied
# Products that may be under way while the next one's words are made (`waiting_of`): of more blocks take longer, or lanes spill
WAITING, WAITING_FEW = 2, 1
SUM_WORDS = 64               # of a quad's sums of q


# (0) -> `upper` of the device functions below, hidden as in weights.lookup_nibbles: byte i is the upper one of float16 from
# 1024 / 4^i on
exponents = hidden((0x4c545c64,))


def twice(value) -> np.uint32:
    """The word of two float16."""
    return np.array([value, value], np.float16).view(np.uint32)[0]


MINUS_1024, MINUS_1152 = twice(-1024), twice(-1152)


def waiting_of(fields, n_quads: int) -> int:
    """Of levels in bytes one; of fields two where they have no top bits, but in wide blocks where nibbles have some."""
    if fields is None:
        return WAITING_FEW
    if n_quads <= MOST_TOGETHER:
        return WAITING if fields.tops is None else WAITING_FEW
    return WAITING if fields.tops is not None and fields.width == 4 else WAITING_FEW


def in_pieces(fields) -> bool:
    """Whether a lane holds scales of 64 columns, not of all."""
    return fields is None or fields.width == 2


class Barriers(NamedTuple):
    """Those of a chunk's activations, which come in pieces of as many columns each, for device functions: int32."""
    there: object   # word at which those begin whose phase of this parity ends when a piece is there,
    done: object    # and those at which each warp that takes the chunk arrives when it is done with a piece
    parity: object


class Held(NamedTuple):
    """What a lane holds of a chunk, or of 64 columns (`in_pieces`), for device functions: `BitFields.scales` of its rows, 16 half
    + l / 4 and 8 further, or of levels in bytes a word of the bytes isc + 128."""
    first: object
    second: object


# Arguments of device functions as in `group_product`, of n_quads quads of tokens; d: f32 [4 n_quads], in registers: sums of a
# product, [4 quad + 2 k + limb] of row k and token l % 4; s, total: f32 [2 n_quads], [2 quad + k]

def scale_reader(fmt: Format, fields, r: int):
    """(words, upper, j, other) -> what codes in the r-th field of their bytes are multiplied by, twice in a word: isc of the
    first 16 columns of block j, or of the others, over 2^(r width)."""
    in_nibbles, sixteens, power = fields.width == 2 and fmt.has_min, fmt.sub == 16, r * fields.width // 2
    by_product = fields.width == 4 and r > 0  # in the place of another exponent: Q5_K takes 1.5 % less
    selector = u32(0x4040 + 0x1010 * (0 if by_product else power))
    addend, factor = twice((-1024 + fields.offset) / 4**power), twice(0.25**power)

    @device
    def read(words, upper, j, other):
        if sixteens:
            w = prmt(words[0], upper, u32(selector + 0x0101 * ((2 * j + other) & 3)))
        else:
            w = prmt(words[1] if j > 3 else words[0], upper, u32(selector + 0x0101 * (j & 3)))
        w = u32(w & u32(0xff0fff0f)) if in_nibbles else w
        return fma2(w, factor, addend) if by_product else add2(w, addend)
    return read


def weight_maker(fmt: Format, fields, r: int):
    """(words, upper, j, other) -> factors, by which (w, tops, j, factors) -> weights: of two codes in the r-th field of bytes 0
    and 2 of w."""
    width, has_tops, zero, bits = fields.width, fields.tops is not None, u32(0), u32(0x00010001)
    read, mask = scale_reader(fmt, fields, r), u32(0x00010001 * ((1 << width) - 1) << width * r)
    # A top bit stands at bit j and counts 2^width; of levels below 0 one that is not set counts -2^width
    assert fmt.zero in (0, 1 << width if has_tops else 0), fmt.name
    sign, flipped = u32(0x80008000 if fmt.zero else 0), u32(0xffffffff if fmt.zero else 0)

    @device
    def factors_of(words, upper, j, other):
        f = read(words, upper, j, other)
        return f, fma2(f, u32(sign | u32(0x04000400) * u32(15 + width * (r + 1) - j)), zero) if has_tops else zero

    @device
    def weights(w, tops, j, factors):
        f, of_tops = factors
        rest = fma2(u32((tops ^ flipped) & u32(bits << u32(j))), of_tops, zero) if has_tops else zero
        return i32(fma2(w & mask, f, rest))
    return factors_of, weights


def block_starter(fmt: Format, unpack, n_quads: int, n_each: int, waiting: int):
    """(load, load_tops, starts). load: (lane, half, shared, tile, j) -> four words, as words of A: the codes of blocks j and j +
    1 of 32 columns, j even, in their fields; of levels in bytes (lane, half, tile). load_tops: (lane, half, shared, tile) ->
    words in the same order, bit j of whose bytes is the top bit of block j; zeros where there are none. starts: by the field of
    block j: (shared, b, held, upper, j, w, tops, d, keep): start both products of that block with n_each quads: d = A B, or d +
    A B if keep. Products of earlier calls are done then: `waiting` of these run on."""
    assert waiting <= 2
    return (byte_starter if unpack.bit_fields is None else field_starter)(fmt, unpack, n_quads, n_each, waiting)


def byte_starter(fmt: Format, unpack, n_quads: int, n_each: int, waiting: int):
    """`block_starter` of levels in bytes."""
    levels, start = level_words(fmt, unpack.quarter, fmt.zero > 0), half_products(8 * n_each).start
    zero, block_places, n_isc, pairs = u32(0), n_quads * ATOM_WORDS // PLACE, 32 // fmt.sub, unpack.pairs
    wait, minus_128 = wait_for_all_but(waiting), twice(-128 * 2.0**-24)

    @device
    def load(lane, half, shared, tile, j):
        return lane, half, tile

    @device
    def load_tops(lane, half, shared, tile):
        return zero, zero, zero, zero

    @device
    def factors_of(words, i):
        """isc, byte i of a word, and -1152 isc, both twice."""
        f = add2(prmt(words[0], zero, u32(0x4040) + u32(i) * u32(0x0101)), minus_128)
        return f, fma2(f, MINUS_1152, zero)

    @device
    def weights(w, upper, factors):
        """Of bytes 0 and 2, and of bytes 1 and 3."""
        (f, rest), v = factors, u32(u32(w) ^ TOPS)
        return (i32(fma2(prmt(v, upper, u32(0x4240)), f, rest)), i32(fma2(prmt(v, upper, u32(0x4341)), f, rest)))

    def starter(r):
        place, first = r * (16 // PLACE), r * n_isc

        @device
        def start_block(shared, b, held, upper, j, w, tops, d, keep):
            lane, half, tile = w
            row, q, at = (half << 4) + (lane >> 2), lane & 3, i32(b + (j >> 1) * block_places + place)
            (w0, w2), (w1, w3) = levels((shared, tile, row), j, q), levels((shared, tile, row + 8), j, q)
            own = i32(first + (q >> 1 if pairs and n_isc == 2 else 0))
            f, g = factors_of(held.first, own), factors_of(held.second, own)
            (a0, a2), (a1, a3) = weights(w0, upper, f), weights(w1, upper, g)
            start(d, shared, at, a0, a1, a2, a3, keep)
            if n_isc == 2 and not pairs:
                f, g = factors_of(held.first, i32(first + 1)), factors_of(held.second, i32(first + 1))
            (a0, a2), (a1, a3) = weights(w2, upper, f), weights(w3, upper, g)
            start(d, shared, i32(at + 8 // PLACE), a0, a1, a2, a3, i32(1))
            wait()
        return start_block
    return load, load_tops, (starter(0), starter(1))


def byte_scales(fmt: Format, unpack):
    """(lane, half, shared, tile, k) -> `Held` of levels in bytes, for columns from 64 k on. Of the four lanes of two rows each
    makes those of 32 columns of one row."""
    n_isc, sub = 32 // fmt.sub, unpack.sub

    @device
    def byte(t, i):
        isc, _ = sub(t, i)
        return u32(i32(isc) + i32(128))

    @device
    def held_of(lane, half, shared, tile, k):
        q = i32(lane & 3)
        t, i = (shared, tile, (half << 4) + (lane >> 2) + 4 * (q & 2)), i32(n_isc * (2 * k + (q & 1)))
        w = byte(t, i)
        if n_isc == 2:
            w = u32(w | byte(t, i32(i + 1)) << u32(8))
        w = u32(w << u32(8 * n_isc * (q & 1)))
        w = u32(w | u32(shuffle(i32(w), i32(lane ^ 1))))
        v = u32(shuffle(i32(w), i32(lane ^ 2)))
        return Held((v if q & 2 else w,), (w if q & 2 else v,))
    return held_of


def field_starter(fmt: Format, unpack, n_quads: int, n_each: int, waiting: int):
    """`block_starter` of codes in fields."""
    fields = unpack.bit_fields
    zero, block_places, n_fields = u32(0), n_quads * ATOM_WORDS // PLACE, 8 // fields.width
    words_of, tops_of, start, has_tops = fields.words, fields.tops, half_products(8 * n_each).start, fields.tops is not None
    wait, sixteens = wait_for_all_but(waiting), fmt.sub == 16

    @device
    def load(lane, half, shared, tile, j):
        row, q = (half << 4) + (lane >> 2), lane & 3
        w0, w2 = words_of((shared, tile, row), j, q)
        w1, w3 = words_of((shared, tile, row + 8), j, q)
        return u32(w0), u32(w1), u32(w2), u32(w3)

    @device
    def load_tops(lane, half, shared, tile):
        if not has_tops:
            return zero, zero, zero, zero
        row, q = (half << 4) + (lane >> 2), lane & 3
        (w0, w2), (w1, w3) = tops_of((shared, tile, row), q), tops_of((shared, tile, row + 8), q)
        return w0, w1, w2, w3

    def starter(r):
        factors_of, weights = weight_maker(fmt, fields, r)
        place = (r & 1) * (16 // PLACE)

        @device
        def start_block(shared, b, held, upper, j, w, tops, d, keep):
            at = i32(b + (j >> 1) * block_places + place)
            f, g = factors_of(held.first, upper, j, i32(0)), factors_of(held.second, upper, j, i32(0))
            v = u32(w[0] >> u32(8)), u32(w[1] >> u32(8)), u32(w[2] >> u32(8)), u32(w[3] >> u32(8))  # of bytes 1 and 3
            u = u32(tops[0] >> u32(8)), u32(tops[1] >> u32(8)), u32(tops[2] >> u32(8)), u32(tops[3] >> u32(8))
            start(d, shared, at, weights(w[0], tops[0], j, f), weights(w[1], tops[1], j, g), weights(v[0], u[0], j, f),
                  weights(v[1], u[1], j, g), keep)
            if sixteens:
                f, g = factors_of(held.first, upper, j, i32(1)), factors_of(held.second, upper, j, i32(1))
            start(d, shared, i32(at + 8 // PLACE), weights(w[2], tops[2], j, f), weights(w[3], tops[3], j, g),
                  weights(v[2], u[2], j, f), weights(v[3], u[3], j, g), i32(1))
            wait()
        return start_block
    return load, load_tops, tuple(map(starter, range(n_fields)))


def minimum_words(fmt: Format, fields):
    """(lane, rows, held, upper) -> words of A, imin of both rows, of every 16 columns; zeros where there are none. rows: both, as
    `BitFields.scales` takes them."""
    zero = i32(0)

    @device
    def none(lane, rows, held, upper):
        return zero, zero, zero, zero
    if not fmt.has_min:
        return none
    n_isc, scales = CHUNK // fmt.sub // 4, fields.scales

    @device
    def of_bytes(lane, rows, held, upper):
        selector = u32(u32(lane & 3) * u32(0x0101) + u32(0x4040))
        return (i32(add2(prmt(held.first[n_isc], upper, selector), MINUS_1024)),
                i32(add2(prmt(held.second[n_isc], upper, selector), MINUS_1024)),
                i32(add2(prmt(held.first[n_isc + 1], upper, selector), MINUS_1024)),
                i32(add2(prmt(held.second[n_isc + 1], upper, selector), MINUS_1024)))

    @device
    def of_nibbles(row, k, selector):
        """Of two bytes of words k and k + 1."""
        w = u32(prmt(scales(row, k)[0], scales(row, i32(k + 1))[0], selector) >> u32(4))
        return i32(add2(u32(w & u32(0x000f000f) | u32(0x64006400)), MINUS_1024))

    @device
    def of_high_nibbles(lane, rows, held, upper):
        selector = u32(u32(lane & 3) * u32(0x0202) + u32(0x0100))
        return (of_nibbles(rows[0], i32(0), selector), of_nibbles(rows[1], i32(0), selector),
                of_nibbles(rows[0], i32(2), selector), of_nibbles(rows[1], i32(2), selector))
    return of_bytes if fields.width == 4 else of_high_nibbles


def scale_holder(fmt: Format, unpack):
    """(held_of, scales_of). held_of: (lane, half, shared, tile, k) -> `Held`, for columns from 64 k on. scales_of: (lane, half,
    shared, tile, held, upper) -> (d, m) of both rows and the minima as words of A."""
    fields, group, minima_of = unpack.bit_fields, unpack.group, minimum_words(fmt, unpack.bit_fields)
    scales = None if fields is None else fields.scales

    @device
    def of_fields(lane, half, shared, tile, k):
        row = (half << 4) + (lane >> 2)
        return Held(scales((shared, tile, row), k), scales((shared, tile, row + 8), k))
    held_of = byte_scales(fmt, unpack) if fields is None else of_fields

    @device
    def scales_of(lane, half, shared, tile, held, upper):
        row = (half << 4) + (lane >> 2)
        rows = (shared, tile, row), (shared, tile, row + 8)
        (d0, m0), (d1, m1) = group(rows[0], 0), group(rows[1], 0)
        return (mul(d0, UNITS), m0), (mul(d1, UNITS), m1), minima_of(lane, rows, held, upper)
    return held_of, scales_of


def whole_multiplier(fmt: Format, unpack, n_quads: int, n_pieces: int, leave):
    """`multiply` of `half_product`."""
    fields, last = unpack.bit_fields, n_pieces - 1
    load, load_tops, starts = block_starter(fmt, unpack, n_quads, n_quads, waiting_of(fields, n_quads))
    held_of, scales_of = scale_holder(fmt, unpack)
    wait, n_sums, n_products = half_products(8 * n_quads).wait, 2 * n_quads, 4 * n_quads
    of_pieces = in_pieces(fields)
    again = not of_pieces and fields.tops is not None  # what is held of minima would take registers all the while

    def two_blocks_of(piece):
        """(.., w, d, keep): of the columns from 64 piece on, which are a piece where there are several; w: what was loaded for
        them -> for the next ones."""
        start_even, start_odd = starts[2 * piece % len(starts)], starts[(2 * piece + 1) % len(starts)]
        begins_piece = 0 < piece < n_pieces

        @device
        def two_blocks(lane, half, shared, tile, b, barriers, held, upper, w, d, keep):
            if begins_piece:
                mbarrier.wait(shared, barriers.there + piece * mbarrier.WORDS, barriers.parity)
            tops = load_tops(lane, half, shared, tile)
            held = held_of(lane, half, shared, tile, i32(piece)) if of_pieces and piece > 0 else held
            start_even(shared, b, held, upper, i32(2 * piece), w, tops, d, keep)
            start_odd(shared, b, held, upper, i32(2 * piece + 1), w, tops, d, i32(1))
            if begins_piece:  # all products of the piece before are done
                leave(lane, shared, i32(barriers.done + (piece - 1) * mbarrier.WORDS))
            return w if of_pieces and piece % 2 == 0 else load(lane, half, shared, tile, i32((2 * piece + 2) & 6))
        return two_blocks
    first_blocks, second_blocks, third_blocks, last_blocks = map(two_blocks_of, range(4))

    @device
    def multiply(lane, half, shared, tile, act, barriers, upper, s):
        d = cuda.local.array(n_products, f32)
        for o in range(n_products):
            d[o] = f32(0)
        mbarrier.wait(shared, barriers.there, barriers.parity)
        b, held = uniform_place(shared, act), held_of(lane, half, shared, tile, i32(0))
        w = load(lane, half, shared, tile, i32(0))
        w = first_blocks(lane, half, shared, tile, b, barriers, held, upper, w, d, i32(0))
        w = second_blocks(lane, half, shared, tile, b, barriers, held, upper, w, d, i32(1))
        w = third_blocks(lane, half, shared, tile, b, barriers, held, upper, w, d, i32(1))
        last_blocks(lane, half, shared, tile, b, barriers, held, upper, w, d, i32(1))
        held = held_of(lane, half, shared, tile, i32(0)) if again else held
        found = scales_of(lane, half, shared, tile, held, upper)
        wait(d)
        leave(lane, shared, i32(barriers.done + last * mbarrier.WORDS))
        for o in range(n_sums):
            s[o] = fma(d[2 * o], f32(128), d[2 * o + 1])
        return found
    return multiply


def halves_multiplier(fmt: Format, unpack, n_quads: int, n_each: int, n_pieces: int, leave):
    """`multiply_parts` of `half_product`, in halves, n_each quads at a time."""
    assert n_quads in (n_each, 2 * n_each), n_quads
    load, load_tops, (start_low, start_high) = block_starter(fmt, unpack, n_quads, n_each,
                                                             waiting_of(unpack.bit_fields, n_quads))
    (held_of, scales_of), of_pieces = scale_holder(fmt, unpack), in_pieces(unpack.bit_fields)
    wait, n_sums, n_products = half_products(8 * n_each).wait, 2 * n_each, 4 * n_each

    @device
    def multiply_half(lane, half, shared, tile, b, held, upper, j, d):
        """Of blocks j .. j + 3."""
        for o in range(n_products):
            d[o] = f32(0)
        held = held_of(lane, half, shared, tile, i32(j >> 1)) if of_pieces else held
        w, tops = load(lane, half, shared, tile, j), load_tops(lane, half, shared, tile)
        start_low(shared, b, held, upper, j, w, tops, d, i32(0))
        start_high(shared, b, held, upper, i32(j + 1), w, tops, d, i32(1))
        held = held_of(lane, half, shared, tile, i32((j >> 1) + 1)) if of_pieces else held
        w = load(lane, half, shared, tile, i32(j + 2))
        start_low(shared, b, held, upper, i32(j + 2), w, tops, d, i32(1))
        start_high(shared, b, held, upper, i32(j + 3), w, tops, d, i32(1))
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
        b, held = uniform_place(shared, act), held_of(lane, half, shared, tile, i32(0))
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


def quarters_multiplier(fmt: Format, unpack, n_quads: int, n_each: int, n_pieces: int, leave):
    """The same in quarters."""
    assert n_quads % n_each == 0, (n_quads, n_each)
    load, load_tops, (start_low, start_high) = block_starter(fmt, unpack, n_quads, n_each, 0)
    held_of, scales_of = scale_holder(fmt, unpack)
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
                held, w = held_of(lane, half, shared, tile, i32(j >> 1)), load(lane, half, shared, tile, j)
                tops = load_tops(lane, half, shared, tile)
                start_low(shared, at, held, upper, j, w, tops, d, i32(0))
                start_high(shared, at, held, upper, i32(j + 1), w, tops, d, i32(1))
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
        found = scales_of(lane, half, shared, tile, held_of(lane, half, shared, tile, i32(0)), upper)
        for piece in range(n_pieces):
            leave(lane, shared, i32(barriers.done + piece * mbarrier.WORDS))
        return found
    return multiply_parts


def minima_together(n_quads: int) -> int:
    """Quads with which minima are multiplied, of n_quads: of a wide block so few that a lane has registers for their products."""
    return n_quads if n_quads <= MOST_TOGETHER else 8


def follower(n_quads: int, alone: bool):
    """`follow` of `half_product`, of formats with minima. These are multiplied for a warpgroup's rows together: products of a
    warp alone would wait for those of the other warpgroup, one after the other."""
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


def follower_without_minima(n_quads: int, alone: bool):
    @stage
    def follow(lane, shared, sums, scales, scale_words, s, total):
        (d0, _), (d1, _), _ = scale_words
        for i in range(n_quads // 4):
            of_tokens = lds4(shared, scales + (lane & 3) * n_quads + 4 * i)
            for k in range(4):
                o, scale = 2 * (4 * i + k), as_f32(of_tokens[k])
                s[o], s[o + 1] = fma(s[o], d0, f32(0)), fma(s[o + 1], d1, f32(0))
                if alone:
                    total[o], total[o + 1] = fma(s[o], scale, total[o]), fma(s[o + 1], scale, total[o + 1])
    return follow


def half_product(name: str, n_quads: int, n_kept: int, n_pieces: int, alone: bool, leave):
    """(multiply, multiply_parts, follow). multiply: (lane, half, shared, tile, act, barriers, upper, s) -> the scales of the
    lane's rows; s: written, RN(S) in units of 2^-24. barriers: of the activations, which come in n_pieces; leave: as
    `mbarrier.leave`, of a piece. multiply_parts: (lane, half, shared, tile, act, barriers, scratch, upper, s), the same of a
    chunk of which tokens may have more than `most_reach`; None where all sums are exact. scratch: word at which the warp's own
    begin, n_kept for each lane. Behind them the tile is no longer needed. follow: (lane, shared, sums, scales, those of the rows,
    s, total): s becomes acc of section 3 and, if `alone`, total = fma(acc, d of the token, total). sums: word at which the sums
    of q over 16 columns begin where there are minima, B of `HalfProducts.start_unswizzled`, whose columns are 2 token + limb;
    scales: those of the tokens, [l % 4][quad]."""
    fmt, unpack = format_of(name), shared_unpacker(name).unpacker
    parts = half_form(fmt).parts
    multiply_parts = None
    if parts == 2:
        multiply_parts = halves_multiplier(fmt, unpack, n_quads, n_kept // 2, n_pieces, leave)
    elif parts == 4:
        multiply_parts = quarters_multiplier(fmt, unpack, n_quads, together_of_quarters(n_kept), n_pieces, leave)
    return (whole_multiplier(fmt, unpack, n_quads, n_pieces, leave), multiply_parts,
            (follower if fmt.has_min else follower_without_minima)(n_quads, alone))
