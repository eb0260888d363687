"""A weight tile's chunk (32 rows x 256 columns) times up to 128 tokens by products of int8 on Hopper, half of it by each of two
warps, of split formats (docs/numerics.md, section 3; `half_forms`).

`group_product` has four sums for two limbs of a weight and two of q. Here there are three: w = 256 h + l, both int8, and q =
128 hi + lo. Where activations are widened (`half_limbs`), lo is doubled. Then h lo and l hi count the same, and the tensor core
adds them:

    2 S = 2^16 sum(h hi) + 2^8 (sum(h 2 lo) + sum(l hi)) + sum(l 2 lo)

The sums of 128 tokens leave no registers for totals: these lie in shared memory, and each lane adds to its own.

Columns of B are tokens, eight of them an atom (`wgmma`) for each 64 columns of the chunk, a *strip*: of each token 64 bytes hi,
then 64 bytes 2 lo. Row r of an atom is token r / 2 + 4 (r % 2), so that a lane has the tokens l % 4 of two quads side by side.
Where lanes have eight columns side by side (`Unpacker.pairs`), the first 16 of a block of 32 columns are the first four of each
lane.
"""
from numba import cuda

from ...quant.formats import format_of
from ...quant.words import TOPS
from . import mbarrier
from .half_product import byte_scales
from .ptx import add, as_f32, as_u32, device, f32, fma, hidden, i2f, i32, lds4, prmt, stage, sts4, syncwarp, u32
from .split_levels import byte_splitter
from .tile_product import level_words
from .weights import shared_unpacker
from .wgmma import ATOM_WORDS, PLACE, products, uniform_place, wait_for_all_but

BLOCK_PLACES, LIMB_PLACES = 32 // (4 * PLACE), 64 // (4 * PLACE)  # of 32 columns of a limb, and of 64
N_STARTED = 2             # products that run on while the next levels are multiplied by their scales
N_STRIPS = 4              # of a chunk; a lane has the scales of one
FOUR = 4 * 32             # words of four sums of all lanes of a warp

two_to_22 = hidden((0x4a800000,))  # 2^22, a float whose last bit counts 1/2


@device
def sum_of_three(high, middle, low):
    """RN(S) of the sums of a chunk. |h| and |hi| are at most 127, |l| and |2 lo| 128, so b = 2^8 middle + low is int32. 2 S =
    2^16 a + r, of which a and r / 2 are float32: the sum is rounded once."""
    b = i32(i32(middle << 8) + low)
    return fma(i2f(i32(high + (b >> 16))), f32(32768), add(as_f32(i32(u32(b & 65535) | two_to_22(0))), f32(-4194304)))


@device
def scale_of(w, i):
    """Byte i of a word, int8, as an int32."""
    return i32(prmt(w, u32(0), u32(u32(0x8880) + u32(i) * u32(0x1111))))


# Arguments of device functions as in `half_product`; high, middle, low: int32 [2 n_quads], in registers: the three sums,
# [4 (quad / 2) + 2 k + quad % 2] of row k and token l % 4

def sums_multiplier(name: str, n_quads: int, n_pieces: int, leave):
    """(lane, half, shared, tile, act, barriers, high, middle, low) -> d of both rows: all products of a chunk, which are done
    then. The tile is no longer needed."""
    fmt, unpack = format_of(name), shared_unpacker(name).unpacker
    levels, limbs_of, held_of = level_words(fmt, unpack.quarter, False), byte_splitter(fmt, True), byte_scales(fmt, unpack)
    n_isc, strip_places = 32 // fmt.sub, n_quads // 2 * ATOM_WORDS // PLACE
    assert not (unpack.pairs and n_isc == 2), name
    start, wait_for_others = products(4 * n_quads).start, wait_for_all_but(N_STARTED)

    def block_starter(j):
        """(.., at, held, high, middle, low): starts the products of block j. Of those of the block before N_STARTED run on. held:
        a word of scales for each of both rows."""
        first, last, keep = i32(n_isc * (j & 1)), i32(n_isc * (j & 1) + n_isc - 1), i32(j > 0)

        @device
        def start_block(lane, half, shared, tile, at, held, high, middle, low):
            row, q = (half << 4) + (lane >> 2), lane & 3
            (w0, w2), (w1, w3) = levels((shared, tile, row), i32(j), q), levels((shared, tile, row + 8), i32(j), q)
            f, g = scale_of(held[0], first), scale_of(held[1], first)
            f2, g2 = scale_of(held[0], last), scale_of(held[1], last)
            if keep:
                wait_for_others()
            w = limbs_of((w0, w1, w2, w3), f, g, f2, g2)
            at = i32(at + (j & 1) * BLOCK_PLACES)
            start(high, shared, at, w[0], w[1], w[2], w[3], keep)
            start(middle, shared, i32(at + LIMB_PLACES), w[0], w[1], w[2], w[3], keep)
            start(middle, shared, at, w[4], w[5], w[6], w[7], i32(1))
            start(low, shared, i32(at + LIMB_PLACES), w[4], w[5], w[6], w[7], keep)
        return start_block

    def strip_multiplier(strip):
        """(.., b, barriers, high, middle, low): the products of 64 columns, which are a piece where there are several."""
        start_even, start_odd = block_starter(2 * strip), block_starter(2 * strip + 1)
        begins_piece, ends_piece = strip == 0 or n_pieces > 1, strip > 0 and n_pieces > 1

        @device
        def multiply_strip(lane, half, shared, tile, b, barriers, high, middle, low):
            if begins_piece:
                mbarrier.wait(shared, barriers.there + strip * mbarrier.WORDS, barriers.parity)
            at, scales = i32(b + strip * strip_places), held_of(lane, half, shared, tile, i32(strip))
            held = u32(scales.first[0] ^ TOPS), u32(scales.second[0] ^ TOPS)
            start_even(lane, half, shared, tile, at, held, high, middle, low)
            start_odd(lane, half, shared, tile, at, held, high, middle, low)
            if ends_piece:  # all products of the piece before are done
                leave(lane, shared, i32(barriers.done + (strip - 1) * mbarrier.WORDS))
        return multiply_strip
    first_strip, second_strip, third_strip, last_strip = map(strip_multiplier, range(N_STRIPS))
    wait, group = products(4 * n_quads).wait, unpack.group

    @device
    def multiply(lane, half, shared, tile, act, barriers, high, middle, low):
        for o in range(2 * n_quads):
            high[o] = middle[o] = low[o] = i32(0)
        b = uniform_place(shared, act)
        first_strip(lane, half, shared, tile, b, barriers, high, middle, low)
        second_strip(lane, half, shared, tile, b, barriers, high, middle, low)
        third_strip(lane, half, shared, tile, b, barriers, high, middle, low)
        last_strip(lane, half, shared, tile, b, barriers, high, middle, low)
        row = (half << 4) + (lane >> 2)
        (d0, _), (d1, _) = group((shared, tile, row), 0), group((shared, tile, row + 8), 0)
        wait(high)
        wait(middle)
        wait(low)
        leave(lane, shared, i32(barriers.done + (n_pieces - 1) * mbarrier.WORDS))
        return d0, d1
    return multiply


def split_product(name: str, n_quads: int, n_pieces: int, leave):
    """(begin, multiply, end). begin: (shared, own): totals of the lane become 0, four words from word `own` on, and from every
    FOUR words further. multiply: (lane, half, shared, tile, act, scales, barriers, own): total = fma(acc, d of the token, total),
    acc = RN(S) d of section 3. scales: those of the tokens, [l % 4][quad]. end: (shared, own, total): total[2 quad + k] of row k
    and token l % 4, f32, in registers."""
    n_sums, zero = 2 * n_quads, u32(0)
    multiply_sums = sums_multiplier(name, n_quads, n_pieces, leave)

    @device
    def begin(shared, own):
        syncwarp()  # all lanes have stored what became of the totals before
        for o in range(0, n_sums, 4):
            sts4(shared, own + o * 32, zero, zero, zero, zero)

    @device
    def row_total(high, middle, low, o, d, scale, total):
        return as_u32(fma(fma(sum_of_three(high[o], middle[o], low[o]), d, f32(0)), scale, as_f32(total)))

    @stage
    def follow(lane, shared, scales, own, d0, d1, high, middle, low):
        for i in range(n_quads // 4):
            of_tokens = lds4(shared, scales + (lane & 3) * n_quads + 4 * i)
            for pair in range(2):
                o, x = own + (2 * i + pair) * FOUR, 8 * i + 4 * pair
                t, first, other = lds4(shared, o), as_f32(of_tokens[2 * pair]), as_f32(of_tokens[2 * pair + 1])
                sts4(shared, o, row_total(high, middle, low, x, d0, first, t[0]),
                     row_total(high, middle, low, x + 2, d1, first, t[1]),
                     row_total(high, middle, low, x + 1, d0, other, t[2]),
                     row_total(high, middle, low, x + 3, d1, other, t[3]))

    @device
    def multiply(lane, half, shared, tile, act, scales, barriers, own):
        high, middle, low = cuda.local.array(n_sums, i32), cuda.local.array(n_sums, i32), cuda.local.array(n_sums, i32)
        d0, d1 = multiply_sums(lane, half, shared, tile, act, barriers, high, middle, low)
        follow(lane, shared, scales, own, d0, d1, high, middle, low)

    @device
    def end(shared, own, total):
        for o in range(0, n_sums, 4):
            t = lds4(shared, own + o * 32)
            for k in range(4):
                total[o + k] = as_f32(t[k])
        syncwarp()  # what becomes of totals goes through these words
    return begin, multiply, end
