"""A weight tile's chunk (32 rows x 256 columns) times up to 64 tokens on Hopper's tensor cores, half of it by each of two warps
(docs/numerics.md, section 3).

What `tile_product` does for many tokens, by `wgmma` in the place of `mma.sync`: a warp has 16 rows, lane l rows l / 4 and l / 4 +
8 of them; a quad of tokens is an atom of `wgmma` for each 128 columns. While a product runs, the warp unpacks the next block of
32 columns, or multiplies the sums of the last one by their scales.

A register of a product that runs must not be written: where one might be, the assembler waits. So what the next product takes is
loaded behind the `wait` for the one that had its registers, and used later, behind other work.

Integer scales are multiplied to the levels while these are unpacked (`splitter`), so that nothing is left to do before the end of
a chunk. Sums that a float scale follows are taken by turns: one product runs while the sums of the other are followed up. The
blocks of a chunk follow each other without a loop. Two warpgroups may multiply by turns (`Turn`), so that one prepares scales and
follows up its sums while the other multiplies.

Levels that lie in the tile as products take them (`is_stored`) go from there to the tensor cores, where copies have put the
pieces of two tiles side by side. Nothing is unpacked, so two warpgroups may take the same rows, each with half of the tokens.
"""
from typing import NamedTuple

from ...quant.formats import CHUNK, Format, format_of
from . import mbarrier
from .ptx import (as_f32, device, f16_high_to_f32, f16_to_f32, f32, fma, i2f, i32, ldmatrix4, lds2, lds4, mma32, prmt, shuffle,
                  syncwarp, u32)
from .split_levels import limb_summer, split_of, splitter
from .tile_form import Factors, Form, TileProduct, factors, form, is_late
from .tile_product import level_words, minima_product, preparer, token_limbs
from .weights import shared_unpacker
from .wgmma import (ATOM_WORDS, PAIR_ROWS, PLACE, Products, place, products, tiles_place, uniform_place, wait_for_all_but_one,
                    wait_for_all_but_two)

MOST_QUADS = 16  # whose sums registers hold; scales and minima are prepared as for so many, however few there are


@device
def in_order(lane, a, b):
    """Words q and q + 4 of eight, q = l % 4, where the four lanes of a row have 2 q and 2 q + 1 (`Unpacker.pairs`)."""
    q, row = lane & 3, lane & 28
    first, odd = q < 2, q & 1
    v = shuffle(a if first else b, row | (q >> 1) | (odd << 1))
    w = shuffle(b if first else a, row | (q >> 1) | ((1 - odd) << 1))
    return w if odd else v, v if odd else w


class Turn(NamedTuple):
    """By which two warpgroups multiply by turns, for device functions: int32 words of shared memory at which barriers lie, that
    for a warpgroup's own turn and that for the other one's; the parity of the phase at whose end its turn begins."""
    own: object
    other: object
    parity: object


class Constants(NamedTuple):
    """What a product is compiled for, and what follows from it: all stages know it when they are compiled."""
    fmt: Format
    unpack: object    # `quant.words.Unpacker`, its codebooks in shared memory
    n_quads: int      # of tokens, even
    n_all_quads: int  # of the activations in shared memory
    form: Form
    planes: Factors   # as for MOST_QUADS, and so is
    late: bool        # `is_late`
    wgmma: Products   # of 8 n_quads columns of B

    @property
    def n_parts(self) -> int:
        """Products of a block of 32 columns: one for each sum that is scaled."""
        return 32 // self.form.step

    @property
    def last(self) -> int:
        """Of the products of a chunk."""
        return 8 * self.n_parts - 1

    @property
    def half_words(self) -> int:
        """Words of 128 columns of the activations."""
        return self.n_all_quads * ATOM_WORDS


def constants(name: str, unpack, n_quads: int, n_all_quads: int) -> Constants:
    fmt = format_of(name)
    step, integer, wide, carried = form(fmt)
    assert integer or not (unpack.pairs or wide or (fmt.has_min and (step != 32 or carried))), name
    assert not integer or fmt.group == CHUNK, name
    return Constants(fmt, unpack, n_quads, n_all_quads, form(fmt), factors(fmt, MOST_QUADS), is_late(fmt, MOST_QUADS),
                     products(8 * n_quads))


# The stages of a product, by a warp of a warpgroup; each is made by a function of the constants. Arguments of device functions:
#     lane, half  rows 16 half + l / 4 and 8 further of the tile
#     shared      uint32, the block's dynamic shared memory; tile, act, limbs, scratch: words at which the tile, the activations,
#                 the limbs of their sums and the tile's `Factors` begin. The caller's barrier protects all but scratch, which is
#                 the warp's own
#     j           of columns 32 j .. 32 j + 31 of the chunk, a block; b: `wgmma.place` of the chunk's activations
#     w, v        words of A, int32: of the lane's two rows the first and the last 16 columns of a block
#     d, e        int32 [4 n_quads], in registers: results of two products, [4 quad + 2 k + i] of row k and limb i of token l % 4.
#                 Nobody may touch them between the start of a product and the wait for it
#     acc         f32 [2 n_quads], in registers: acc of docs/numerics.md, section 3, [2 quad + k]

# Loads

def row_unpacker(const: Constants):
    """(lane, half, shared, tile, j) -> four words of A, of block j: int8 levels, or codes that the scales are multiplied to."""
    pairs, subtracted = const.unpack.pairs, not const.form.integer and const.fmt.zero > 0
    row_words = level_words(const.fmt, const.unpack.quarter, subtracted)

    @device
    def unpack_rows(lane, half, shared, tile, j):
        row, q = (half << 4) + (lane >> 2), lane & 3
        w0, w2 = row_words((shared, tile, row), j, q)
        w1, w3 = row_words((shared, tile, row + 8), j, q)
        if pairs:
            w0, w2 = in_order(lane, w0, w2)
            w1, w3 = in_order(lane, w1, w3)
        return w0, w1, w2, w3
    return unpack_rows


def block_placer(const: Constants):
    """(b, j) -> the place of block j of the activations."""
    half_words = const.half_words

    @device
    def block_at(b, j):
        return i32(b + (j >> 2) * (half_words // PLACE) + (j & 3) * (8 // PLACE))
    return block_at


@device
def load_factors(lane, half, shared, scratch, plane):
    """Two words of a plane of `Factors`: of the lane's two rows."""
    a, b = lds2(shared, scratch + 32 * plane + 4 * (lane >> 2) + 2 * half)
    return i32(a), i32(b)


def needs_factors(fmt: Format, unpack) -> bool:
    """Whether there are `Factors` in shared memory. Not of packed integer scales, which a lane holds in registers, nor of
    float scales without minima, which it reads from the tile."""
    return unpack.packed is None if form(fmt).integer else fmt.has_min


# Integer scales, multiplied to the levels. scales: the word `scratch`, or, of a format that has them packed, these of the lane's
# two rows

def scale_holder(const: Constants):
    """(lane, half, shared, tile, scratch) -> scales."""
    packed, prepare = const.unpack.packed, preparer(const.fmt, const.unpack, MOST_QUADS)

    @device
    def prepared(lane, half, shared, tile, scratch):
        prepare(lane, shared, tile, scratch)
        syncwarp()  # the factors are there
        return scratch

    @device
    def held(lane, half, shared, tile, scratch):
        row = (half << 4) + (lane >> 2)
        return packed((shared, tile, row)), packed((shared, tile, row + 8))
    return prepared if needs_factors(const.fmt, const.unpack) else held


def scale_loader(const: Constants):
    """(lane, half, shared, scales, i) -> the scales of sub-block i of both rows, int32."""
    signed = not const.fmt.has_min

    @device
    def byte(words, i):
        w, s = words[i >> 2], 8 * (i & 3)
        return i32(i32(u32(w) << u32(24 - s)) >> 24) if signed else i32((u32(w) >> u32(s)) & u32(255))

    @device
    def held(lane, half, shared, scales, i):
        return byte(scales[0], i), byte(scales[1], i)
    return load_factors if needs_factors(const.fmt, const.unpack) else held


def chunk_scales(const: Constants):
    """(lane, half, shared, tile, scratch, scales) -> float32 d and -m of both rows, and imin of every 16 columns, of which the
    lane has those of word l % 4, as int32 words of A."""
    late, has_min, n_isc = const.late, const.fmt.has_min, CHUNK // const.fmt.sub // 4
    (d_plane, m_plane, imin_plane, _), group, z = const.planes, const.unpack.group, i32(0)

    @device
    def prepared(lane, half, shared, tile, scratch, scales):
        d = m = load_factors(lane, half, shared, scratch, d_plane)
        i0 = i1 = z
        if has_min:
            m = load_factors(lane, half, shared, scratch, m_plane)
        if late:
            i = ldmatrix4(shared, scratch + 32 * imin_plane + 4 * lane)
            i0, i1 = i[2] if half else i[0], i[3] if half else i[1]
        return as_f32(d[0]), as_f32(d[1]), as_f32(m[0]), as_f32(m[1]), i0, i1

    @device
    def two_sub_blocks(words, q):
        """imin of sub-blocks 2 q and 2 q + 1, each twice."""
        w = words[n_isc + 1] if q & 2 else words[n_isc]
        return i32(prmt(w, w, u32(0x3322 if q & 1 else 0x1100)))

    @device
    def held(lane, half, shared, tile, scratch, scales):
        row, q = (half << 4) + (lane >> 2), lane & 3
        (d0, m0), (d1, m1) = group((shared, tile, row), 0), group((shared, tile, row + 8), 0)
        if late:
            return d0, d1, -m0, -m1, two_sub_blocks(scales[0], q), two_sub_blocks(scales[1], q)
        return d0, d1, m0, m1, z, z
    assert not late or const.fmt.sub == 32 or needs_factors(const.fmt, const.unpack), const.fmt.name
    return prepared if needs_factors(const.fmt, const.unpack) else held

def split_multiplier(const: Constants):
    """(load, multiply_blocks). load: (lane, half, shared, tile, scales, j) -> of block j the words of A and the scales of both
    rows, of their first and of their last 16 columns. multiply_blocks: (lane, half, shared, tile, b, scales, j, w, high, low) ->
    that of block j + 2: starts the products of blocks j and j + 1; w: what was loaded for block j. What is loaded for a block is
    used in the next. Of most quads, whose teams are few, lanes have registers for two blocks at once: load does block j + 1, too,
    and what of the tile both want is loaded once. high, low: d and e, sums of h and, of two limbs, of l."""
    split = split_of(const.fmt)
    n_parts, two, start, start_u = const.n_parts, split.n_limbs == 2, const.wgmma.start, const.wgmma.start_u
    start_h, start_l = start_u if split.unsigned else start, start_u if split.l_unsigned else start
    wait_for_last = wait_for_all_but_two if two else wait_for_all_but_one
    unpack_rows, block_at, four_limbs = row_unpacker(const), block_placer(const), splitter(const.fmt)
    load_scales = scale_loader(const)

    @device
    def load_split(lane, half, shared, tile, scales, j):
        w = unpack_rows(lane, half, shared, tile, j)
        f = load_scales(lane, half, shared, scales, n_parts * j)
        e = load_scales(lane, half, shared, scales, n_parts * j + 1) if n_parts == 2 else f
        return w + f + e

    @device
    def start_block(shared, b, j, w, high, low):
        w = four_limbs(w, w[4], w[5], w[6], w[7])
        b = block_at(b, j)
        start_h(high, shared, b, w[0], w[1], w[2], w[3], j)
        if two:
            start_l(low, shared, b, w[4], w[5], w[6], w[7], j)
        wait_for_last()  # the registers of the block before are free

    @device
    def load_two(lane, half, shared, tile, scales, j):
        return load_split(lane, half, shared, tile, scales, j), load_split(lane, half, shared, tile, scales, i32(j + 1))

    @device
    def multiply_two(lane, half, shared, tile, b, scales, j, w, high, low):
        start_block(shared, b, j, w[0], high, low)
        v = load_two(lane, half, shared, tile, scales, i32((j + 2) & 7))  # while a product runs
        start_block(shared, b, i32(j + 1), w[1], high, low)
        return v

    @device
    def multiply_each(lane, half, shared, tile, b, scales, j, w, high, low):
        v = load_split(lane, half, shared, tile, scales, i32(j + 1))
        start_block(shared, b, j, w, high, low)
        w = load_split(lane, half, shared, tile, scales, i32((j + 2) & 7))
        start_block(shared, b, i32(j + 1), v, high, low)
        return w
    return (load_two, multiply_two) if const.n_quads == MOST_QUADS else (load_split, multiply_each)


def chunk_folder(const: Constants):
    """(lane, half, shared, tile, limbs, scratch, scales, acc, high, low): waits for the last products; acc = fma(RN(S), d, +0),
    then acc = fma(-m, RN(M), acc) with M = the product of imin with the limbs of the sums of q."""
    n_quads, late, wait, scales_of = const.n_quads, const.late, const.wgmma.wait, chunk_scales(const)
    limb_sum, two = limb_summer(const.fmt), split_of(const.fmt).n_limbs == 2

    @device
    def fold(lane, half, shared, tile, limbs, scratch, scales, acc, high, low):
        d0, d1, m0, m1, i0, i1 = scales_of(lane, half, shared, tile, scratch, scales)
        wait(high)
        if two:
            wait(low)
        for quad in range(n_quads):
            s = 4 * quad
            acc[2 * quad] = fma(limb_sum(high[s], high[s + 1], low[s], low[s + 1]), d0, f32(0))
            acc[2 * quad + 1] = fma(limb_sum(high[s + 2], high[s + 3], low[s + 2], low[s + 3]), d1, f32(0))
            if late:
                c, b = token_limbs(lane, shared, limbs, quad)
                sum0, sum1 = minima_product(i0, i1, c, b)
                acc[2 * quad] = fma(m0, i2f(sum0), acc[2 * quad])
                acc[2 * quad + 1] = fma(m1, i2f(sum1), acc[2 * quad + 1])
    return fold


def integer_multiplier(const: Constants, by_turns: bool):
    """`group_product`'s multiply of a format with integer scales. The other warpgroup's turn begins two blocks before the end of
    one's own."""
    hold_scales, fold = scale_holder(const), chunk_folder(const)
    load, multiply_blocks = split_multiplier(const)

    @device
    def multiply(lane, half, shared, tile, act, limbs, scratch, acc, d, e, turn):
        b, scales = place(shared, act), hold_scales(lane, half, shared, tile, scratch)
        w = load(lane, half, shared, tile, scales, 0)
        if by_turns:
            mbarrier.wait(shared, turn.own, turn.parity)
        w = multiply_blocks(lane, half, shared, tile, b, scales, 0, w, d, e)
        w = multiply_blocks(lane, half, shared, tile, b, scales, 2, w, d, e)
        w = multiply_blocks(lane, half, shared, tile, b, scales, 4, w, d, e)
        if by_turns:
            syncwarp()
            if lane == 0:
                mbarrier.arrive(shared, turn.other)
        multiply_blocks(lane, half, shared, tile, b, scales, 6, w, d, e)
        fold(lane, half, shared, tile, limbs, scratch, scales, acc, d, e)
    return multiply


# Float scales, which follow the sums. i: a product of the chunk, of 32 columns or of half of them

def part_starter(const: Constants):
    """(load_part, start_part). load_part: (lane, half, shared, tile, i) -> the words of A of product i, zeros for the other half
    of the columns. start_part: (d, shared, b, i, w, keep): starts it, d = A B, or d + A B if keep."""
    n_parts, last, start, z = const.n_parts, const.last, const.wgmma.start, i32(0)
    unpack_rows, block_at = row_unpacker(const), block_placer(const)

    @device
    def load_part(lane, half, shared, tile, i):
        w = unpack_rows(lane, half, shared, tile, (i & last) // n_parts)
        if n_parts == 1:
            return w
        return z if i & 1 else w[0], z if i & 1 else w[1], w[2] if i & 1 else z, w[3] if i & 1 else z

    @device
    def start_part(d, shared, b, i, w, keep):
        start(d, shared, block_at(b, i // n_parts), w[0], w[1], w[2], w[3], keep)
    return load_part, start_part


def scale_follower(const: Constants):
    """(d, lane, half, shared, tile, act, scratch, i, acc): acc = fma(RN(128 hi + lo), d, acc) with the i-th scale of the chunk,
    then, where there are minima, acc = fma(-m, RN(sum of q), acc). d: of a product that has been waited for."""
    n_quads, half_words, has_min, m_plane = const.n_quads, const.half_words, const.fmt.has_min, const.planes.m
    ones, z, prepared, group = i32(0x01010101), i32(0), needs_factors(const.fmt, const.unpack), const.unpack.group

    @device
    def scales(lane, half, shared, tile, scratch, i):
        if prepared:
            a, b = load_factors(lane, half, shared, scratch, i)
            return as_f32(a), as_f32(b)
        row = (half << 4) + (lane >> 2)
        (a, _), (b, _) = group((shared, tile, row), i), group((shared, tile, row + 8), i)
        return a, b

    @device
    def follow(d, lane, half, shared, tile, act, scratch, i, acc):
        f = scales(lane, half, shared, tile, scratch, i)
        for quad in range(n_quads):
            for k in range(2):
                s, o = 4 * quad + 2 * k, 2 * quad + k
                acc[o] = fma(i2f(i32((d[s] << 7) + d[s + 1])), f[k], acc[o])
        if has_min:
            m, r, matrix = load_factors(lane, half, shared, scratch, m_plane + i), lane & 7, lane >> 3
            first = act + (i >> 2) * half_words + (matrix >> 1) * ATOM_WORDS + r * 32 + (((2 * (i & 3) + (matrix & 1)) ^ r) << 2)
            for pair in range(n_quads // 2):
                b = ldmatrix4(shared, first + 2 * pair * ATOM_WORDS)
                for n in range(2):
                    c = mma32(ones, ones, ones, ones, b[2 * n], b[2 * n + 1], z, z, z, z)
                    q_sum = i2f(i32((c[0] << 7) + c[1]))
                    for k in range(2):
                        o = 4 * pair + 2 * n + k
                        acc[o] = fma(as_f32(m[k]), q_sum, acc[o])
    return follow


def turn_multiplier(const: Constants):
    """(lane, half, shared, tile, act, b, scratch, i, v, acc, d, e) -> the words of A of product i + 3: the sums of products i and
    i + 1, the words of the latter being v, while the next ones run. Not the body of a loop, at whose end ptxas would wait for the
    product under way."""
    last, wait, wait_but_one, z = const.last, const.wgmma.wait, const.wgmma.wait_but_one, i32(0)
    (load_part, start_part), follow = part_starter(const), scale_follower(const)

    @device
    def two_turns(lane, half, shared, tile, act, b, scratch, i, v, acc, d, e):
        start_part(e, shared, b, i32(i + 1), v, z)
        wait_but_one(d)
        if i + 2 <= last:
            w = load_part(lane, half, shared, tile, i32(i + 2))
            follow(d, lane, half, shared, tile, act, scratch, i, acc)
            start_part(d, shared, b, i32(i + 2), w, z)
            wait_but_one(e)
            v = load_part(lane, half, shared, tile, i32(i + 3))
        else:
            follow(d, lane, half, shared, tile, act, scratch, i, acc)
            wait(e)
        follow(e, lane, half, shared, tile, act, scratch, i32(i + 1), acc)
        return v
    return two_turns


def float_multiplier(const: Constants):
    """`group_product`'s multiply of a format with float scales: sums that the tensor core adds on for a group; or one product
    after the other, where minima leave no registers for two; or two by turns."""
    n_quads, n_group, n_parts, last = const.n_quads, const.fmt.group, const.n_parts, const.last
    carried, has_min, wait, z = const.form.carried, const.fmt.has_min, const.wgmma.wait, i32(0)
    prepare, (load_part, start_part) = preparer(const.fmt, const.unpack, MOST_QUADS), part_starter(const)
    follow, two_turns, prepared = scale_follower(const), turn_multiplier(const), needs_factors(const.fmt, const.unpack)

    @device
    def multiply(lane, half, shared, tile, act, limbs, scratch, acc, d, e, turn):
        i, b = i32(0), place(shared, act)
        w = load_part(lane, half, shared, tile, i)
        start_part(d, shared, b, i, w, z)
        for o in range(2 * n_quads):
            acc[o] = f32(0)
        if prepared:
            prepare(lane, shared, tile, scratch)
            syncwarp()  # the factors are there
        v = load_part(lane, half, shared, tile, i32(i + 1))
        if carried:
            while i <= last:
                start_part(d, shared, b, i32(i + 1), v, i32(1))
                wait_for_all_but_one()
                w = load_part(lane, half, shared, tile, i32(i + 2))
                i = i32(i + 2)
                if i & (n_group // 32 - 1) == 0:
                    wait(d)
                    follow(d, lane, half, shared, tile, act, scratch, (i - 1) // (n_group // 32), acc)
                if i <= last:
                    start_part(d, shared, b, i, w, i & (n_group // 32 - 1))
                    wait_for_all_but_one()
                    v = load_part(lane, half, shared, tile, i32(i + 1))
        elif has_min:  # there are no registers for two
            while i <= last:
                wait(d)
                w = load_part(lane, half, shared, tile, i32(i + 1))
                follow(d, lane, half, shared, tile, act, scratch, i, acc)
                i = i32(i + 1)
                if i <= last:
                    start_part(d, shared, b, i, w, z)
        else:
            v = two_turns(lane, half, shared, tile, act, b, scratch, i32(0), v, acc, d, e)
            v = two_turns(lane, half, shared, tile, act, b, scratch, i32(2), v, acc, d, e)
            v = two_turns(lane, half, shared, tile, act, b, scratch, i32(4), v, acc, d, e)
            if n_parts == 2:
                v = two_turns(lane, half, shared, tile, act, b, scratch, i32(6), v, acc, d, e)
                v = two_turns(lane, half, shared, tile, act, b, scratch, i32(8), v, acc, d, e)
                v = two_turns(lane, half, shared, tile, act, b, scratch, i32(10), v, acc, d, e)
                v = two_turns(lane, half, shared, tile, act, b, scratch, i32(12), v, acc, d, e)
            two_turns(lane, half, shared, tile, act, b, scratch, i32(last - 1), v, acc, d, e)
    return multiply


# Stored levels

def is_stored(fmt: Format) -> bool:
    """Whether the pieces of a tile are levels, an int8 for each column, and a last one float16 scales of 32 columns."""
    return fmt.fields == (("d", 2), ("qs", 32)) and fmt.planes == (("qs",), ("d",)) and not fmt.zero


def stored_multiplier(const: Constants):
    """(lane, warp, shared, tiles, act, acc, d): multiply of `group_product` of stored levels, one product after the other. tiles:
    word at which the pieces of a pair of tiles begin, [piece][tile][row]; act: at which the warp's tokens begin."""
    n_quads, start, wait, block_at = const.n_quads, const.wgmma.start_tiles, const.wgmma.wait, block_placer(const)
    piece_words = 4 * PAIR_ROWS
    block_places, last_piece = 2 * piece_words // PLACE, CHUNK // 16 * piece_words

    @device
    def follow(d, f, g, acc):
        wait(d)
        for quad in range(n_quads):
            s, o = 4 * quad, 2 * quad
            acc[o] = fma(i2f(i32((d[s] << 7) + d[s + 1])), f, acc[o])
            acc[o + 1] = fma(i2f(i32((d[s + 2] << 7) + d[s + 3])), g, acc[o + 1])

    @device
    def follow_two(shared, a, b, j, f, g, acc, d):
        """Of blocks j and j + 1; f, g: words of their scales, of both rows."""
        follow(d, f16_to_f32(f), f16_to_f32(g), acc)
        start(d, shared, block_at(b, i32(j + 1)), i32(a + (j + 1) * block_places))
        follow(d, f16_high_to_f32(f), f16_high_to_f32(g), acc)
        if j < 6:
            start(d, shared, block_at(b, i32(j + 2)), i32(a + (j + 2) * block_places))

    @device
    def multiply(lane, warp, shared, tiles, act, acc, d):
        a, b = tiles_place(shared, tiles), uniform_place(shared, act)
        start(d, shared, b, a)
        row = tiles + last_piece + (16 * (warp & 3) + (lane >> 2)) * 4
        f, g = lds4(shared, row), lds4(shared, row + 32)
        for o in range(2 * n_quads):
            acc[o] = f32(0)
        follow_two(shared, a, b, 0, f[0], g[0], acc, d)
        follow_two(shared, a, b, 2, f[1], g[1], acc, d)
        follow_two(shared, a, b, 4, f[2], g[2], acc, d)
        follow_two(shared, a, b, 6, f[3], g[3], acc, d)
    return multiply


def stored_product(name: str, n_quads: int, n_all_quads: int):
    """`stored_multiplier` of n_quads of the n_all_quads in shared memory."""
    return stored_multiplier(constants(name, shared_unpacker(name, 0).unpacker, n_quads, n_all_quads))


def group_product(name: str, n_quads: int, by_turns: bool) -> TileProduct:
    """multiply: (lane, half, shared, tile, act, limbs, scratch, acc, d, e, turn): acc[2 quad + k] = acc of section 3, of row 16
    half + l / 4 + 8 k and token l % 4. d, e: local arrays int32 [4 n_quads] for sums, which stay in their registers from chunk to
    chunk. n_quads: even. turn: `Turn`, looked at where by_turns."""
    unpack, n_entries, entry = shared_unpacker(name, 0)
    const = constants(name, unpack, n_quads, n_quads)
    return TileProduct(integer_multiplier(const, by_turns) if const.form.integer else float_multiplier(const), n_entries, entry)
