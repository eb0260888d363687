"""A weight tile's chunk (32 rows x 256 columns) times up to 64 tokens on Hopper's tensor cores, half of it by each of two warps (docs/numerics.md, section 3).

What `tile_product` does for many tokens, by `wgmma` in the place of `mma.sync`: a warp has 16 rows, lane l rows l / 4 and l / 4 + 8 of them; a quad of
tokens is an atom of `wgmma` for each 128 columns. While a product runs, the warp unpacks the next block of 32 columns, or multiplies the sums of
the last one by their scales.

A register of a product that runs must not be written: where one might be, the assembler waits. So what the next product takes is loaded behind the `wait`
for the one that had its registers, and used later, behind other work.

Integer scales are multiplied to the levels while these are unpacked (`splitter`), so that nothing is left to do before the end of a chunk. Sums that a
float scale follows are taken by turns: one product runs while the sums of the other are followed up. The blocks of a chunk follow each other without a loop.
"""
from ...quant.formats import CHUNK, format_of
from .ptx import as_f32, device, f32, fma, i2f, i32, ldmatrix4, lds2, mma32, shuffle, syncwarp
from .tile_product import TileProduct, factors, form, is_late, level_words, limb_product, preparer, split_sum, splitter, token_limbs
from .weights import shared_unpacker
from .wgmma import ATOM_WORDS, PLACE, place, products, wait_for_all_but_one, wait_for_all_but_two

MOST_QUADS = 16  # whose sums registers hold; scales and minima are prepared as for so many, however few there are


@device
def in_order(lane, a, b):
    """Words q and q + 4 of eight, q = l % 4, where the four lanes of a row have 2 q and 2 q + 1 (`Unpacker.pairs`)."""
    q, row = lane & 3, lane & 28
    first, odd = q < 2, q & 1
    v = shuffle(a if first else b, row | (q >> 1) | (odd << 1))
    w = shuffle(b if first else a, row | (q >> 1) | ((1 - odd) << 1))
    return w if odd else v, v if odd else w


def group_product(name: str, n_quads: int) -> TileProduct:
    """multiply: (lane, half, shared, tile, act, limbs, scratch, acc, d, e): acc[2 quad + k] = acc of section 3, of row 16 half + l / 4 + 8 k and
    token l % 4. d, e: local arrays int32 [4 n_quads] for sums, which stay in their registers from chunk to chunk. n_quads: even."""
    fmt = format_of(name)
    start, start_u, wait, wait_but_one = products(8 * n_quads)
    half_words = n_quads * ATOM_WORDS  # of 128 columns of the activations
    unpack, n_entries, entry = shared_unpacker(name, 0)
    pairs = unpack.pairs
    step, integer, wide, carried = form(fmt)
    d_plane, m_plane, imin_plane, _ = factors(fmt, MOST_QUADS)
    prepare, four_limbs = preparer(fmt, unpack, MOST_QUADS), splitter(fmt) if integer else None
    in_block, n_group, has_min, late = 32 // step, fmt.group, fmt.has_min, is_late(fmt, MOST_QUADS)
    row_words = level_words(fmt, unpack.quarter, not integer and fmt.zero > 0)
    ones, z, last = i32(0x01010101), i32(0), 8 * in_block - 1
    assert integer or not (pairs or wide or has_min and (step != 32 or carried)), name
    assert not integer or fmt.group == CHUNK, name

    @device
    def fragments(lane, half, shared, tile, j):
        """Of columns 32 j .. 32 j + 31."""
        row, q = (half << 4) + (lane >> 2), lane & 3
        w0, w2 = row_words((shared, tile, row), j, q)
        w1, w3 = row_words((shared, tile, row + 8), j, q)
        if pairs:
            w0, w2 = in_order(lane, w0, w2)
            w1, w3 = in_order(lane, w1, w3)
        return w0, w1, w2, w3

    @device
    def block_at(b, j):
        """The place of columns 32 j .. 32 j + 31 of the activations, which begin at b."""
        return i32(b + (j >> 2) * (half_words // PLACE) + (j & 3) * (8 // PLACE))

    @device
    def two_rows(lane, half, shared, scratch, plane):
        a, b = lds2(shared, scratch + 32 * plane + 4 * (lane >> 2) + 2 * half)
        return i32(a), i32(b)

    # Integer scales

    @device
    def with_scales(lane, half, shared, tile, scratch, j):
        """The fragments of a block and the scales of its rows, of their first and last 16 columns."""
        w = fragments(lane, half, shared, tile, j)
        f = two_rows(lane, half, shared, scratch, in_block * j)
        e = two_rows(lane, half, shared, scratch, in_block * j + 1) if in_block == 2 else f
        return w + f + e

    @device
    def start_split(shared, b, j, w, high, low):
        w = four_limbs(w, w[4], w[5], w[6], w[7])
        b = block_at(b, j)
        start(high, shared, b, w[0], w[1], w[2], w[3], j)
        start_u(low, shared, b, w[4], w[5], w[6], w[7], j)
        wait_for_all_but_two()  # the registers of the block before are free

    @device
    def two_blocks(lane, half, shared, tile, b, scratch, j, w, high, low):
        """Starts the products of blocks j and j + 1; w: what was loaded for block j. What is loaded for a block is used in the next. Returns it for block
        j + 2."""
        v = with_scales(lane, half, shared, tile, scratch, i32(j + 1))
        start_split(shared, b, j, w, high, low)
        w = with_scales(lane, half, shared, tile, scratch, i32((j + 2) & 7))
        start_split(shared, b, i32(j + 1), v, high, low)
        return w

    # Float scales

    @device
    def taken(lane, half, shared, tile, i):
        """The fragments of the i-th product of a chunk: 32 columns, or half of them."""
        w = fragments(lane, half, shared, tile, (i & last) // in_block)
        if in_block == 1:
            return w
        return z if i & 1 else w[0], z if i & 1 else w[1], w[2] if i & 1 else z, w[3] if i & 1 else z

    @device
    def start_block(d, shared, b, i, w, keep):
        start(d, shared, block_at(b, i // in_block), w[0], w[1], w[2], w[3], keep)

    @device
    def follow(d, lane, half, shared, act, scratch, i, acc):
        """The sums of the i-th scale."""
        f = two_rows(lane, half, shared, scratch, i)
        for quad in range(n_quads):
            for k in range(2):
                s, o = 4 * quad + 2 * k, 2 * quad + k
                acc[o] = fma(i2f(i32((d[s] << 7) + d[s + 1])), as_f32(f[k]), acc[o])
        if has_min:
            m, r, matrix = two_rows(lane, half, shared, scratch, m_plane + i), lane & 7, lane >> 3
            first = act + (i >> 2) * half_words + (matrix >> 1) * ATOM_WORDS + r * 32 + (((2 * (i & 3) + (matrix & 1)) ^ r) << 2)
            for pair in range(n_quads // 2):
                b = ldmatrix4(shared, first + 2 * pair * ATOM_WORDS)
                for n in range(2):
                    c = mma32(ones, ones, ones, ones, b[2 * n], b[2 * n + 1], z, z, z, z)
                    q_sum = i2f(i32((c[0] << 7) + c[1]))
                    for k in range(2):
                        o = 4 * pair + 2 * n + k
                        acc[o] = fma(as_f32(m[k]), q_sum, acc[o])

    @device
    def two_turns(lane, half, shared, tile, act, b, scratch, i, v, acc, d, e):
        """The sums of products i and i + 1, the fragments of the latter being v, while the next ones run. Not the body of a loop, at whose end ptxas would
        wait for the product under way. Returns the fragments of product i + 3."""
        start_block(e, shared, b, i32(i + 1), v, z)
        wait_but_one(d)
        if i + 2 <= last:
            w = taken(lane, half, shared, tile, i32(i + 2))
            follow(d, lane, half, shared, act, scratch, i, acc)
            start_block(d, shared, b, i32(i + 2), w, z)
            wait_but_one(e)
            v = taken(lane, half, shared, tile, i32(i + 3))
        else:
            follow(d, lane, half, shared, act, scratch, i, acc)
            wait(e)
        follow(e, lane, half, shared, act, scratch, i32(i + 1), acc)
        return v

    @device
    def finish(lane, half, shared, limbs, scratch, acc, high, low):
        wait(high)
        wait(low)
        d = m = two_rows(lane, half, shared, scratch, d_plane)
        i0 = i1 = z
        if has_min:
            m = two_rows(lane, half, shared, scratch, m_plane)
        if late:
            i = ldmatrix4(shared, scratch + 32 * imin_plane + 4 * lane)
            i0, i1 = i[2] if half else i[0], i[3] if half else i[1]
        for quad in range(n_quads):
            s = 4 * quad
            acc[2 * quad] = fma(split_sum(high[s], high[s + 1], low[s], low[s + 1]), as_f32(d[0]), f32(0))
            acc[2 * quad + 1] = fma(split_sum(high[s + 2], high[s + 3], low[s + 2], low[s + 3]), as_f32(d[1]), f32(0))
            if late:
                first, rest = token_limbs(lane, shared, limbs, quad)
                m0, m1 = limb_product(i0, i1, first, rest)
                acc[2 * quad] = fma(as_f32(m[0]), i2f(m0), acc[2 * quad])
                acc[2 * quad + 1] = fma(as_f32(m[1]), i2f(m1), acc[2 * quad + 1])

    @device
    def multiply(lane, half, shared, tile, act, limbs, scratch, acc, d, e):
        i, b = i32(0), place(shared, act)
        if integer:
            prepare(lane, shared, tile, scratch)
            syncwarp()  # the factors are there
            w = with_scales(lane, half, shared, tile, scratch, i)
            w = two_blocks(lane, half, shared, tile, b, scratch, i32(0), w, d, e)
            w = two_blocks(lane, half, shared, tile, b, scratch, i32(2), w, d, e)
            w = two_blocks(lane, half, shared, tile, b, scratch, i32(4), w, d, e)
            two_blocks(lane, half, shared, tile, b, scratch, i32(6), w, d, e)
            finish(lane, half, shared, limbs, scratch, acc, d, e)
        else:
            w = taken(lane, half, shared, tile, i)
            start_block(d, shared, b, i, w, z)
            for o in range(2 * n_quads):
                acc[o] = f32(0)
            prepare(lane, shared, tile, scratch)
            syncwarp()  # the factors are there
            v = taken(lane, half, shared, tile, i32(i + 1))
            if carried:
                while i <= last:
                    start_block(d, shared, b, i32(i + 1), v, i32(1))
                    wait_for_all_but_one()
                    w = taken(lane, half, shared, tile, i32(i + 2))
                    i = i32(i + 2)
                    if i & (n_group // 32 - 1) == 0:
                        wait(d)
                        follow(d, lane, half, shared, act, scratch, (i - 1) // (n_group // 32), acc)
                    if i <= last:
                        start_block(d, shared, b, i, w, i & (n_group // 32 - 1))
                        wait_for_all_but_one()
                        v = taken(lane, half, shared, tile, i32(i + 1))
            elif has_min:  # there are no registers for two
                while i <= last:
                    wait(d)
                    w = taken(lane, half, shared, tile, i32(i + 1))
                    follow(d, lane, half, shared, act, scratch, i, acc)
                    i = i32(i + 1)
                    if i <= last:
                        start_block(d, shared, b, i, w, z)
            else:
                v = two_turns(lane, half, shared, tile, act, b, scratch, i32(0), v, acc, d, e)
                v = two_turns(lane, half, shared, tile, act, b, scratch, i32(2), v, acc, d, e)
                v = two_turns(lane, half, shared, tile, act, b, scratch, i32(4), v, acc, d, e)
                if in_block == 2:
                    v = two_turns(lane, half, shared, tile, act, b, scratch, i32(6), v, acc, d, e)
                    v = two_turns(lane, half, shared, tile, act, b, scratch, i32(8), v, acc, d, e)
                    v = two_turns(lane, half, shared, tile, act, b, scratch, i32(10), v, acc, d, e)
                    v = two_turns(lane, half, shared, tile, act, b, scratch, i32(12), v, acc, d, e)
                two_turns(lane, half, shared, tile, act, b, scratch, i32(last - 1), v, acc, d, e)
    return TileProduct(multiply, n_entries, entry)
