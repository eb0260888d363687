"""Activations for products in float16 (`mmq_half`): limbs of q widened to float16, sums of q, scales, and which chunks of a token
have more than `most_squares`. For each item of work and chunk what one slot of shared memory holds lies together, as bulk copies
bring it: of one matrix items are so many tokens after the other, of experts those of the table of `dispatch`.
"""
from itertools import accumulate
from typing import NamedTuple

from numba import cuda

from ...quant.formats import CHUNK, format_of
from ...quant.words import TOPS
from .dispatch import ITEMS
from .half_product import SUM_WORDS, exponents, most_squares, twice
from .launch import HOPPER, I32, Kernel, N, U32, factory
from .operands import row_of_pair
from .ptx import (add2, device, dp4a, halves, i2f, i32, i64, ld, ld4, least, prmt, quotient, remainder, shuffle, st, st4, stage,
                  u32)
from .quantize import plane_words
from .wgmma import ATOM_WORDS

N_THREADS = 256             # a warp a chunk of a token
TOKEN_WORDS = CHUNK         # of a chunk of a token, float16: rows of atoms, [64 columns][limb]
SUMS = SUM_WORDS // 4       # words of its sums of q over 16 columns, float16


class Rest(NamedTuple):
    """Words of what follows products, of so many tokens and a chunk."""
    d: int      # scales of the tokens, [token % 4][quad]; before them sums of q, as of `half_product`
    large: int  # whether a token has more than `most_squares`
    n_words: int


def rest_of(tokens: int) -> Rest:
    return Rest(*accumulate((tokens * SUMS, tokens, tokens)))


def unit_words(tokens: int) -> int:
    """Of an item and a chunk: atoms, [64 columns][quad], then `Rest`."""
    return tokens * TOKEN_WORDS + rest_of(tokens).n_words


MINUS_1152 = twice(-1152)


@device
def widened(w, upper, selector):
    """Two bytes of limbs, plus 128, as float16: 1024 + byte - 1152."""
    return add2(prmt(w ^ TOPS, upper, selector), MINUS_1152)


@device
def widen(limbs, at, w, upper, selector):
    """Half of 16 columns of limbs, four words w: of every four columns the first and the third, or the others."""
    st4(limbs, at, widened(w[0], upper, selector), widened(w[1], upper, selector), widened(w[2], upper, selector),
        widened(w[3], upper, selector))


@device
def part_of_sum(s, low):
    """a or b of a sum of q, 128 a + b."""
    t = i32((s + 64) >> 7)
    return i2f(i32(s - (t << 7)) if low else t)


def rows_of(tokens: int, experts: bool):
    """(table, order, item, token, n, n_used, x_rows) -> the row of the activations of a token of an item, -1 where there is none.
    Of one matrix the last one is repeated. n_used, x_rows: of `Pairs`."""
    @device
    def row_of(table, order, item, token, n, n_used, x_rows):
        if not experts:
            return least(i32(item * tokens + token), i32(n - 1))
        row = i32(-1)
        if item < ld(table, 0):
            _, first, n_rows, _ = ld4(table, ITEMS + 4 * item)
            if token < n_rows:
                row = row_of_pair(ld(table, order + first + token), n_used, x_rows)
        return row
    return row_of


@factory([("Q4_K", tokens, experts) for experts, of_blocks in ((False, (128, 64, 32, 16)), (True, (16, 32, 48)))
          for tokens in of_blocks])
def half_limbs_kernel(name, tokens, experts):
    """Lane l widens a piece of 16 bytes of both limbs, of columns 16 (l / 2) .. of a chunk of a token."""
    most, quads, row_of, n_words = most_squares(format_of(name)), tokens // 4, rows_of(tokens, experts), unit_words(tokens)
    d_at, large_at, _ = rest_of(tokens)

    @stage
    def widen_chunk(lane, act, limbs, source, lo_at, to, r):
        """Both limbs of a token's chunk, to rows r and r + 1 of atoms; returns the sum of hi * hi."""
        piece, selector, upper = source * 64 + (lane >> 1) * 4, u32(0x4240 + 0x101 * (lane & 1)), exponents(0)
        hi, lo = ld4(act, piece), ld4(act, lo_at + piece)
        widen(limbs, to + r * 32 + (((lane & 7) ^ r) << 2), hi, upper, selector)
        widen(limbs, to + (r + 1) * 32 + (((lane & 7) ^ (r + 1)) << 2), lo, upper, selector)
        squares = dp4a(hi[0], hi[0], dp4a(hi[1], hi[1], dp4a(hi[2], hi[2], dp4a(hi[3], hi[3], i32(0)))))
        squares = i32(squares + shuffle(squares, lane ^ 2))
        squares = i32(squares + shuffle(squares, lane ^ 4))
        squares = i32(squares + shuffle(squares, lane ^ 8))
        return i32(squares + shuffle(squares, lane ^ 16))

    @stage
    def widen_sums(lane, act, limbs, source, to):
        """a and b of the 16 sums of q of a token's chunk, by 16 lanes."""
        i = i32(lane & 7)
        s, t = i32(ld(act, source + 2 * i)), i32(ld(act, source + 2 * i + 1))
        if lane < SUMS:
            place = i32(((i >> 2) << 5) + ((lane & 8) >> 1) + (i & 3))
            st(limbs, to + place, halves(part_of_sum(s, lane & 8), part_of_sum(t, lane & 8)))

    def kernel(act, table, limbs, order, n, n_chunks, n_items, n_used, x_rows):
        lane, place = i32(cuda.threadIdx.x & 31), i32(cuda.blockIdx.x * (N_THREADS // 32) + (cuda.threadIdx.x >> 5))
        token = quotient(place, n_chunks)
        item, chunk, t = quotient(token, tokens), i32(place - token * n_chunks), remainder(token, tokens)
        if item < n_items:
            lo_at, scales, sums, _ = plane_words(n, n_chunks)
            row, at = row_of(table, order, item, t, n, n_used, x_rows), (i64(item) * n_chunks + chunk) * n_words
            rest, squares, source = at + tokens * TOKEN_WORDS, i32(0), i64(row) * n_chunks + chunk
            if row >= 0:
                atom = at + (lane >> 3) * (quads * ATOM_WORDS) + (t >> 2) * ATOM_WORDS
                squares = widen_chunk(lane, act, limbs, source, lo_at, atom, 2 * (t & 3))
                widen_sums(lane, act, limbs, sums + source * 16, rest + (t >> 2) * SUM_WORDS + (t & 3) * 8)
                if lane == 0:
                    st(limbs, rest + d_at + (t & 3) * quads + (t >> 2), ld(act, scales + source))
            if lane == 0:  # what is multiplied in the place of tokens that are not there may be anything, but not large
                st(limbs, rest + large_at + t, u32(1 if squares > most else 0))
    return Kernel(kernel, (U32, I32, U32, *[N] * 6), N_THREADS, arch=HOPPER)
