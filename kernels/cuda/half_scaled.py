"""A weight tile's chunk (32 rows x 256 columns) times up to 128 tokens by products of float16 on Hopper, half of it by each of
two warps, of formats with a float scale for each 32 columns, or 16 (docs/numerics.md, section 3; `half_forms`).

A level is a float16, and so are 128 hi and lo of q = 128 hi + lo. S, the sum over a group, is float32, and exact: no partial sum
passes W * 32 * (128 * 127 + 64) <= 2^24, |level| <= W. Of halved levels the limbs are doubled.

Columns of B are tokens; eight of them are an atom (`wgmma`) for each 64 columns of the chunk and limb. Row r of an atom is token
r / 2 + 4 (r % 2), so that a lane has the tokens l % 4 of two quads side by side. The order of the chunk's columns is that of
`half_product`.

Products of a group's columns and MOST_TOKENS tokens at most, a *unit*, run on while the words of the next one are made and, but
in blocks of ONE_UNIT quads, the unit before is followed up.
"""
from numba import cuda

from ...quant.formats import CHUNK, Format, format_of
from . import mbarrier
from .half_forms import SMALL_UNITS, half_form
from .half_product import twice
from .ptx import add2, as_f32, device, f32, fma, fma2, i32, lds4, prmt, stage, u32
from .weights import shared_unpacker
from .wgmma import ATOM_WORDS, PLACE, half_products, uniform_place

MOST_TOKENS = 64
ONE_UNIT = 12  # quads of blocks in which a lane has no registers for two units; other warpgroups multiply meanwhile
N_GROUPS = CHUNK // 32
STEP, ATOM_PLACES = 8 // PLACE, ATOM_WORDS // PLACE  # places of 16 columns, of an atom


def tokens_of_unit(n_quads: int) -> int:
    n = 4 * n_quads
    return n if n <= MOST_TOKENS else n // 2


def small_floats(source):
    """(t, j, q, upper) -> four words of A, halves of levels: of a quarter's first word of columns bytes 0 and 2, then 1 and 3,
    and of its second one."""
    word, signs, rest, units = source.word, u32(0x80008000), u32(0x0e000e00), twice(SMALL_UNITS)

    @device
    def moved(sign, bits):
        """Of codes whose sign and whose other bits have been moved to their places in a float16."""
        return i32(fma2(u32((sign & signs) | (bits & rest)), units, u32(0)))

    @device
    def load(t, j, q, upper):
        w = u32(word(t, j, q))
        return (moved(u32(w << u32(12)), u32(w << u32(9))), moved(u32(w << u32(4)), u32(w << u32(1))),
                moved(u32(w << u32(8)), u32(w << u32(5))), moved(w, u32(w >> u32(3))))
    return load


def integers(fmt: Format, quarter):
    """The same of levels, from the bytes of codes: in a float16 of that exponent they are 1024 more."""
    minus = twice(-1024 - fmt.zero)

    @device
    def both(w, upper):
        return i32(add2(prmt(u32(w), upper, u32(0x4240)), minus)), i32(add2(prmt(u32(w), upper, u32(0x4341)), minus))

    @device
    def load(t, j, q, upper):
        w, v = quarter(t, j, q)
        return both(w, upper) + both(v, upper)
    return load


def level_loader(fmt: Format):
    """(lane, half, shared, tile, upper, j) -> eight words of A, levels of block j of 32 columns of a lane's rows, 16 half + l / 4
    and 8 further: four of its first 16 columns, then four of the others."""
    unpack = shared_unpacker(fmt.name).unpacker
    load_row = small_floats(unpack.source) if half_form(fmt).halved else integers(fmt, unpack.quarter)

    @device
    def load(lane, half, shared, tile, upper, j):
        row, q = (half << 4) + (lane >> 2), lane & 3
        a0, a2, b0, b2 = load_row((shared, tile, row), j, q, upper)
        a1, a3, b1, b3 = load_row((shared, tile, row + 8), j, q, upper)
        return a0, a1, a2, a3, b0, b1, b2, b3
    return load


def unit_starter(fmt: Format, n_quads: int, n_tokens: int):
    """(shared, b, j, other, part, a, d): starts d = A B of a unit, of block j of 32 columns or, of groups of 16, of its first
    ones, or of the others; a: what `level_loader` gave for the block."""
    part_places, strip = n_tokens // 8 * ATOM_PLACES, n_quads // 2 * ATOM_PLACES  # strip: 64 columns of a limb
    start = half_products(n_tokens).start_steps((0, STEP, strip, strip + STEP) if fmt.group == 32 else (0, strip))

    @device
    def place_of(b, j, part):
        return i32(b + (j >> 1) * (2 * strip) + part * part_places + (j & 1) * (2 * STEP))

    @device
    def start_block(shared, b, j, other, part, a, d):
        start(d, shared, place_of(b, j, part), a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7])

    @device
    def start_half(shared, b, j, other, part, a, d):
        at = i32(place_of(b, j, part) + other * STEP)
        x0, x1, x2, x3 = (a[4], a[5], a[6], a[7]) if other else (a[0], a[1], a[2], a[3])
        start(d, shared, at, x0, x1, x2, x3, x0, x1, x2, x3)
    return start_block if fmt.group == 32 else start_half


def unit_follower(fmt: Format, n_quads: int, n_tokens: int, j: int, part: int):
    """(lane, shared, sums, scales, d, s): s = fma(S, d of the group, s) of a unit of group j, and fma(-m, M, s) where the format
    has minima; scales: (d, m) of both rows; sums: word at which M of the tokens begin, [group][l % 4][quad]."""
    n_each, has_min = n_tokens // 4, fmt.has_min
    first = part * n_each  # quads

    @device
    def added(s, o, x, scale):
        return fma(x, scale, f32(0) if j == 0 else s[o])

    @device
    def follow(lane, shared, sums, scales, d, s):
        (d0, m0), (d1, m1) = scales
        for i in range(n_each):
            o, x = 2 * (first + i), 4 * (i // 2) + i % 2
            s[o], s[o + 1] = added(s, o, d[x], d0), added(s, o + 1, d[x + 2], d1)
        if has_min:
            for i in range(n_each // 4):
                of_tokens = lds4(shared, i32(sums + (4 * j + (lane & 3)) * n_quads + (first + 4 * i)))
                for k in range(4):
                    o, m = 2 * (first + 4 * i + k), as_f32(of_tokens[k])
                    s[o], s[o + 1] = fma(-m0, m, s[o]), fma(-m1, m, s[o + 1])
    return follow


def half_scaled(name: str, n_quads: int, n_pieces: int, leave):
    """(multiply, follow). multiply: (lane, half, shared, tile, act, sums, barriers, upper, s): s: f32 [2 n_quads], written, acc
    of section 3, [2 quad + k] of row k of the lane and token l % 4. barriers, n_pieces, leave: as of `half_product`; sums: word
    at which the sums of q of the tokens begin, as of `half_limbs.Rest`; upper: `half_product.exponents`. Behind it activations
    and the tile are no longer needed. follow: (lane, shared, scales, s, total): total = fma(s, d of the token, total); scales:
    word at which those of the tokens begin, [l % 4][quad]."""
    fmt, n_tokens, group = format_of(name), tokens_of_unit(n_quads), shared_unpacker(name).unpacker.group
    parts, n_sums, products = 4 * n_quads // n_tokens, n_tokens // 2, half_products(n_tokens)
    per_block, n_units = 32 // fmt.group, CHUNK // fmt.group * parts
    load, start_unit = level_loader(fmt), unit_starter(fmt, n_quads, n_tokens)
    wait, wait_but_one, of_piece, one_unit = products.wait, products.wait_but_one, n_units // n_pieces, n_quads == ONE_UNIT

    def follow_from(u):
        """(.., a, d, e, s): unit u, whose products run, to d, and all behind it; a: the words of A of its block; e: d of the next
        one."""
        (j, part), (next_j, next_part), last = divmod(u, parts), divmod(u + 1, parts), u + 1 == n_units
        (next_block, other), begins_block = divmod(next_j, per_block), next_part == 0 and next_j % per_block == 0
        follow_unit, further = unit_follower(fmt, n_quads, n_tokens, j, part), None if last else follow_from(u + 1)
        piece, ends_piece = u // of_piece, u % of_piece == of_piece - 1

        @device
        def follow(lane, half, shared, tile, b, sums, barriers, upper, a, d, e, s):
            if not last:
                following = load(lane, half, shared, tile, upper, i32(next_block)) if begins_block else a
            if not last and ends_piece:
                mbarrier.wait(shared, barriers.there + (piece + 1) * mbarrier.WORDS, barriers.parity)
            if not last and not one_unit:
                start_unit(shared, b, i32(next_block), i32(other), i32(next_part), following, e)
            row = (half << 4) + (lane >> 2)
            scales = group((shared, tile, row), i32(j)), group((shared, tile, row + 8), i32(j))
            if last or one_unit:
                wait(d)
            else:
                wait_but_one(d)
            if ends_piece:
                leave(lane, shared, i32(barriers.done + piece * mbarrier.WORDS))
            follow_unit(lane, shared, sums, scales, d, s)
            if not last and one_unit:
                start_unit(shared, b, i32(next_block), i32(other), i32(next_part), following, e)
            if not last:
                further(lane, half, shared, tile, b, sums, barriers, upper, following, e, d, s)
        return follow
    follow_all = follow_from(0)

    @device
    def multiply(lane, half, shared, tile, act, sums, barriers, upper, s):
        d, e = cuda.local.array(n_sums, f32), cuda.local.array(n_sums, f32)
        mbarrier.wait(shared, barriers.there, barriers.parity)
        b, a = uniform_place(shared, act), load(lane, half, shared, tile, upper, i32(0))
        start_unit(shared, b, i32(0), i32(0), i32(0), a, d)
        follow_all(lane, half, shared, tile, b, sums, barriers, upper, a, d, d if one_unit else e, s)

    @stage
    def follow(lane, shared, scales, s, total):
        for i in range(n_quads // 4):
            of_tokens = lds4(shared, scales + (lane & 3) * n_quads + 4 * i)
            for k in range(4):
                o, scale = 2 * (4 * i + k), as_f32(of_tokens[k])
                total[o], total[o + 1] = fma(s[o], scale, total[o]), fma(s[o + 1], scale, total[o + 1])
    return multiply, follow
