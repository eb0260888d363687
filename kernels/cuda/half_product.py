"""A weight tile's chunk (32 rows x 256 columns) times up to 64 tokens by products of float16 on Hopper, half of it by each of two
warps (docs/numerics.md, section 3).

What `group_product` does for formats with integer scales, with one product in the place of two: level times scale is one float16,
and so is a limb of q. Sums are float32 and exact while no partial sum can pass 2^24: then S = 128 H + L, H and L the sums over hi
and over lo, is one `fma`, which rounds once. The bounds, |w| <= W being level times scale:

    L: |lo| <= 64, so W * 64 * 256 <= 2^24.
    H: by Cauchy and Schwarz no partial sum passes sqrt(256) W sqrt(Q), Q the sum of hi * hi of the token's chunk: that is 2^24 at
       most for Q <= `most_squares`. A chunk of which a token has more is multiplied in two halves: |hi| <= 127, so W * 127 * 128
       <= 2^24, and the sums of both are added as integers.
    minima: the sums of q over 16 columns are 128 a + b, |a| <= 2032, |b| <= 64, and M = 128 A + B likewise.

That tensor cores add exactly below 2^24 is seen on each GPU (`half_check`).

A weight counts 2^-24, as a code in the low bits of a float16 does, and in the bits above them 16 times as much: what a product
wants of a word of codes is a mask and a multiplication by the scale, or by a sixteenth of it. S counts as much, and d is
multiplied by 2^24.

Columns of B are tokens' limbs, 2 token + limb, so a quad of tokens is an atom for each 64 columns of the chunk (`wgmma`). Of the
16 columns of a product lane q has 4 q .. 4 q + 3, as bytes of a word: these stand at places 2 q, 2 q + 8, 2 q + 1, 2 q + 9, and
the activations follow that order.
"""
from typing import NamedTuple

import numpy as np
from numba import cuda

from ...quant.formats import CHUNK, Format, format_of
from .ptx import (add2, as_f32, constant, device, f2i, f32, fma, fma2, i32, i64, l2f, lds, lds2, lds4, mma_half, mul, prmt, stage,
                  sts, u32)
from .weights import shared_unpacker
from .wgmma import ATOM_WORDS, PLACE, half_products, uniform_place, wait_for_all_but

EXACT = 1 << 24              # up to which all integers are float32
UNIT, UNITS = f32(2**-24), f32(2**24)  # what a weight counts, and how many of these are 1
WAITING = 2                  # products that may be under way while the next one's words are made; more take longer
SUM_WORDS = 64               # of a quad's sums of q


# (0) -> `upper` of the device functions below: upper bytes of float16 from 1024 on, loaded as in weights.lookup_nibbles
exponents = constant(np.array([0x64646464], np.uint32))


def twice(value) -> np.uint32:
    """The word of two float16."""
    return np.array([value, value], np.float16).view(np.uint32)[0]


MINUS_1024, MINUS_64, SIXTEENTH = twice(-1024), twice(-64), twice(1 / 16)


def largest_weight(fmt: Format) -> int:
    return fmt.max_level * fmt.max_isc


def most_squares(fmt: Format) -> int:
    """The largest sum of hi * hi of a chunk with which all its sums are exact."""
    return EXACT**2 // (CHUNK * largest_weight(fmt)**2)


def has_halves(fmt: Format) -> bool:
    """Whether it is a format that this module multiplies: of nibbles that are levels, with packed scales and minima for 32
    columns, whose bounds hold, and are seldom passed: limbs of 64, half of the largest, are within `most_squares`."""
    unpack, w = shared_unpacker(fmt.name).unpacker, largest_weight(fmt)
    packed = unpack.packed is not None and unpack.nibbles is not None
    return (packed and fmt.group == CHUNK and fmt.sub == 32 and fmt.has_min and not fmt.zero and w <= 2048
            and w * 64 * CHUNK <= EXACT and w * 127 * CHUNK // 2 <= EXACT and most_squares(fmt) >= CHUNK * 64**2)


class Held(NamedTuple):
    """What a lane holds of a chunk, for device functions: the words of `packed` of its rows, 16 half + l / 4 and 8 further."""
    first: object
    second: object


# Arguments of device functions as in `group_product`, of n_quads quads of tokens; d: f32 [4 n_quads], in registers: sums of a
# product, [4 quad + 2 k + limb] of row k and token l % 4; s, total: f32 [2 n_quads], [2 quad + k]

def block_starter(unpack, n_quads: int):
    """(load, start_blocks). load: (lane, half, shared, tile, j) -> four words, as words of A: the codes of block j of 32 columns,
    j even, are their low nibbles, those of block j + 1 their high ones. start_blocks: (shared, b, held, upper, j, w, d, keep):
    starts the four products of both blocks, whose words are w, d = A B, or d + A B if keep; those of the blocks before are done
    then."""
    nibbles, start, wait = unpack.nibbles, half_products(8 * n_quads).start, wait_for_all_but(WAITING)
    low, high, zero, block_places = u32(0x000f000f), u32(0x00f000f0), u32(0), n_quads * ATOM_WORDS // PLACE

    @device
    def load(lane, half, shared, tile, j):
        row, q = (half << 4) + (lane >> 2), lane & 3
        w0, w2 = nibbles((shared, tile, row), j, q)
        w1, w3 = nibbles((shared, tile, row + 8), j, q)
        return u32(w0), u32(w1), u32(w2), u32(w3)

    @device
    def bytes_of(words, upper, j):
        """1024 + isc of block j, twice."""
        return prmt(words[j >> 2], upper, u32(0x4040 + 0x0101 * (j & 3)))

    @device
    def start_block(shared, at, w, v, mask, f, g, d, keep):
        """w, v: the codes, those of bytes 0 and 2 in mask of w, those of bytes 1 and 3 in mask of v; f, g: of both rows the scale
        by which they are weights."""
        start(d, shared, at, i32(fma2(w[0] & mask, f, zero)), i32(fma2(w[1] & mask, g, zero)),
              i32(fma2(v[0] & mask, f, zero)), i32(fma2(v[1] & mask, g, zero)), keep)
        start(d, shared, i32(at + 8 // PLACE), i32(fma2(w[2] & mask, f, zero)), i32(fma2(w[3] & mask, g, zero)),
              i32(fma2(v[2] & mask, f, zero)), i32(fma2(v[3] & mask, g, zero)), i32(1))
        wait()

    @device
    def start_blocks(shared, b, held, upper, j, w, d, keep):
        v = u32(w[0] >> u32(8)), u32(w[1] >> u32(8)), u32(w[2] >> u32(8)), u32(w[3] >> u32(8))
        at = i32(b + (j >> 1) * block_places)
        f, g = bytes_of(held.first, upper, j), bytes_of(held.second, upper, j)
        start_block(shared, at, w, v, low, add2(f, MINUS_1024), add2(g, MINUS_1024), d, keep)
        # Codes in high nibbles count 16 times as much
        f, g = bytes_of(held.first, upper, i32(j + 1)), bytes_of(held.second, upper, i32(j + 1))
        f, g = fma2(f, SIXTEENTH, MINUS_64), fma2(g, SIXTEENTH, MINUS_64)
        start_block(shared, i32(at + 16 // PLACE), w, v, high, f, g, d, i32(1))
    return load, start_blocks


def minimum_product(fmt: Format, unpack):
    """(words_of, product). words_of: (lane, held, upper) -> words of A, imin of both rows. product: (lane, shared, sums, quad,
    words) -> RN(M) of both rows for token l % 4 of the quad."""
    n_isc = CHUNK // fmt.sub // 4

    @device
    def words_of(lane, held, upper):
        selector = u32(u32(lane & 3) * u32(0x0101) + u32(0x4040))
        return (i32(add2(prmt(held.first[n_isc], upper, selector), MINUS_1024)),
                i32(add2(prmt(held.second[n_isc], upper, selector), MINUS_1024)),
                i32(add2(prmt(held.first[n_isc + 1], upper, selector), MINUS_1024)),
                i32(add2(prmt(held.second[n_isc + 1], upper, selector), MINUS_1024)))

    @device
    def product(lane, shared, sums, quad, words):
        b0, b1 = lds2(shared, sums + quad * SUM_WORDS + (lane >> 2) * 8 + 2 * (lane & 3))
        m = mma_half(words[0], words[1], words[2], words[3], i32(b0), i32(b1))
        return fma(m[0], f32(128), m[1]), fma(m[2], f32(128), m[3])
    return words_of, product


def half_product(name: str, n_quads: int, alone: bool = True):
    """(multiply, multiply_halves, follow). multiply: (lane, half, shared, tile, act, upper, s) -> the scales of the lane's rows;
    s: written, RN(S) in units of 2^-24. multiply_halves: (lane, half, shared, tile, act, scratch, upper, s), the same of a chunk
    of which tokens may have more than `most_squares`; scratch: word at which the warp's own begin, 32 for each sum. Behind them
    tile and activations are no longer needed. follow: (lane, shared, sums, scales, those of the rows, s, total): s becomes acc of
    section 3 and, if `alone`, total = fma(acc, d of the token, total). sums: word at which the sums of q begin, [quad]
    [2 token + limb][8 words of two: sums 2 i and 2 i + 1 of 16 columns at place 2 i, from i = 4 on at 2 i - 7]; scales: those of
    the tokens, [l % 4][quad]."""
    fmt, unpack = format_of(name), shared_unpacker(name).unpacker
    load, start_blocks = block_starter(unpack, n_quads)
    packed, group, wait, n_sums = unpack.packed, unpack.group, half_products(8 * n_quads).wait, 2 * n_quads
    n_products = 2 * n_sums
    minimum_words, minima = minimum_product(fmt, unpack)

    @device
    def held_of(lane, half, shared, tile):
        row = (half << 4) + (lane >> 2)
        return Held(packed((shared, tile, row)), packed((shared, tile, row + 8)))

    @device
    def two_blocks(lane, half, shared, tile, b, held, upper, j, w, d, keep):
        """Those of j and j + 1; w: what was loaded for them -> for the next two."""
        start_blocks(shared, b, held, upper, j, w, d, keep)
        return load(lane, half, shared, tile, i32((j + 2) & 6))

    @stage
    def follow(lane, shared, sums, scales, scale_words, s, total):
        (d0, m0), (d1, m1), words = scale_words
        for i in range(n_quads // 4):
            of_tokens = lds4(shared, scales + (lane & 3) * n_quads + 4 * i)
            for k in range(4):
                quad = 4 * i + k
                o, scale = 2 * quad, as_f32(of_tokens[k])
                x0, x1 = minima(lane, shared, sums, quad, words)
                s[o], s[o + 1] = fma(-m0, x0, fma(s[o], d0, f32(0))), fma(-m1, x1, fma(s[o + 1], d1, f32(0)))
                if alone:
                    total[o], total[o + 1] = fma(s[o], scale, total[o]), fma(s[o + 1], scale, total[o + 1])

    @device
    def scales_of(lane, half, shared, tile, held, upper):
        """(d, m) of both rows and the minima as words of A."""
        row = (half << 4) + (lane >> 2)
        (d0, m0), (d1, m1) = group((shared, tile, row), 0), group((shared, tile, row + 8), 0)
        return (mul(d0, UNITS), m0), (mul(d1, UNITS), m1), minimum_words(lane, held, upper)

    @device
    def multiply(lane, half, shared, tile, act, upper, s):
        d = cuda.local.array(n_products, f32)
        for o in range(n_products):
            d[o] = f32(0)
        b, held = uniform_place(shared, act), held_of(lane, half, shared, tile)
        w = load(lane, half, shared, tile, i32(0))
        w = two_blocks(lane, half, shared, tile, b, held, upper, i32(0), w, d, i32(0))
        w = two_blocks(lane, half, shared, tile, b, held, upper, i32(2), w, d, i32(1))
        w = two_blocks(lane, half, shared, tile, b, held, upper, i32(4), w, d, i32(1))
        two_blocks(lane, half, shared, tile, b, held, upper, i32(6), w, d, i32(1))
        found = scales_of(lane, half, shared, tile, held, upper)
        wait(d)
        for o in range(n_sums):
            s[o] = fma(d[2 * o], f32(128), d[2 * o + 1])
        return found

    @device
    def multiply_half(lane, half, shared, tile, b, held, upper, j, d):
        """Of blocks j .. j + 3."""
        for o in range(n_products):
            d[o] = f32(0)
        w = two_blocks(lane, half, shared, tile, b, held, upper, j, load(lane, half, shared, tile, j), d, i32(0))
        two_blocks(lane, half, shared, tile, b, held, upper, i32(j + 2), w, d, i32(1))
        wait(d)

    @device
    def integer(d, o):
        """S of what the product of a half left."""
        return i32((f2i(mul(d[2 * o], UNITS)) << 7) + f2i(mul(d[2 * o + 1], UNITS)))

    @device
    def multiply_halves(lane, half, shared, tile, act, scratch, upper, s):
        # Arrays of their own: of one for both, ptxas took the products of the first half for unused
        d, e = cuda.local.array(n_products, f32), cuda.local.array(n_products, f32)
        b, held = uniform_place(shared, act), held_of(lane, half, shared, tile)
        multiply_half(lane, half, shared, tile, b, held, upper, i32(0), d)
        for o in range(n_sums):
            sts(shared, scratch + 32 * o + lane, integer(d, o))
        multiply_half(lane, half, shared, tile, b, held, upper, i32(4), e)
        for o in range(n_sums):
            s[o] = mul(l2f(i64(i64(i32(lds(shared, scratch + 32 * o + lane))) + i64(integer(e, o)))), UNIT)
        return scales_of(lane, half, shared, tile, held, upper)
    return multiply, multiply_halves, follow
