"""Products of quantized weights and few columns, where the CPU has a dot product of bytes: levels are multiplied in the registers
into which they are unpacked, as many rows at a time as a vector has lanes, with the two limbs of activations."""
from functools import cached_property

from llvmlite import ir
from numba import float32, types
from numba.core import cgutils
from numba.extending import intrinsic

from ...quant import tile
from ...quant.activation import LIMIT
from ...quant.device_functions import device
from ...quant.formats import CHUNK
from ...quant.words import TOPS, f32
from .lanes import Chunk, Lanes, lane_primitives
from .limbs import LIMB_WORDS, SUMS_16, SUMS_32
from .quantized_products import BLOCK, blocks_of, form_of, write
from .unpack import COLUMN_BLOCK, ROWS
from .vector import F32, I32, I64, ISAS, as_uint32, constant, fused, join_limbs, repeated, rolled, stack

AHEAD = 6  # tiles between what is read and what the memory is asked for
N_BLOCKS = CHUNK // COLUMN_BLOCK


class Multiplier:
    """Emits the product of a chunk of rows with n_columns columns. With u = level + bias, which is not negative, and
    q = 256 high + low,

        S = sum isc level q = 256 sum isc u high + sum isc u low - bias sum isc q
    """

    def __init__(self, fmt, isa, n_columns):
        self.fmt, self.isa, self.columns = fmt, ISAS[isa], range(n_columns)
        self.bias = fmt.zero or (0 if fmt.has_min else 128)  # levels of formats with minima are codes
        self.unpack = fmt.unpack(lane_primitives(), Chunk.piece_word, Chunk.word, Chunk.half)
        self.ints, self.floats = (ir.VectorType(element, self.isa.lanes) for element in (I32, F32))
        self.zero, self.nothing = ir.Constant(self.ints, None), ir.Constant(self.floats, None)
        assert CHUNK * 255 * 128 * fmt.max_isc < 2**31 and CHUNK * fmt.max_isc * LIMIT < 2**31 and fmt.max_isc < 256, fmt.name

    @cached_property
    def is_wide(self) -> bool:
        return form_of(self.fmt).span < self.fmt.group

    def vector(self, x, like):
        return x.value if isinstance(x, Lanes) else constant(like, x)

    def pairs(self, x):
        """(x, 128 x), to be multiplied with the halves that `split_sum` makes."""
        return self.vector(x & 0xffff | x << 23 if isinstance(x, Lanes) else int(x) | int(x) << 23, self.zero)

    def block(self, builder, chunk, word_of, j):
        """Of each sub-block of the j-th 32 weights of a row, for each column, the sums of u high and of u low."""
        sums = [[[self.zero, self.zero] for _ in self.columns] for _ in range(COLUMN_BLOCK // self.fmt.sub)]
        for q in range(4):
            words = self.unpack.quarter(chunk, j, q)
            for k, word in zip((2 * q, 2 * q + 1) if self.unpack.pairs else (q, q + 4), words):
                u = (word ^ TOPS if self.bias == 128 else word).value
                for c, limbs in zip(self.columns, sums[4 * k // self.fmt.sub]):
                    for limb in range(2):
                        x = word_of(c, limb * CHUNK // 4 + N_BLOCKS * j + k)
                        limbs[limb] = self.isa.dot4(builder, limbs[limb], u, x)
        return sums

    def sub_block(self, builder, scales, sums, totals, limbs):
        """Adds a sub-block, with its scales, sums of q and of limbs, to totals of its group: of limbs, of imin q, of isc q."""
        (high, low, of_min, of_bias), (isc, imin) = totals, scales
        h, l = (builder.mul(x, self.vector(isc, x)) for x in limbs) if self.fmt.max_isc > 1 else limbs
        if self.fmt.has_min:
            of_min = self.isa.dot(builder, of_min, self.pairs(imin), sums)
        if self.bias:
            of_bias = self.isa.dot(builder, of_bias, self.pairs(isc), sums)
        return builder.add(high, h), builder.add(low, l), of_min, of_bias

    def group(self, builder, scales, totals, acc):
        """acc, and after it what a group gives, with its scales."""
        (high, low, of_min, of_bias), (d, m) = totals, (self.vector(x, self.nothing) for x in scales)
        bias, bits, byte = (constant(self.zero, x) for x in (self.bias, 8, 255))
        if self.is_wide:
            if self.bias:
                high = builder.sub(high, builder.mul(builder.ashr(of_bias, bits), bias))
                low = builder.sub(low, builder.mul(builder.and_(of_bias, byte), bias))
            s = join_limbs(builder, high, low)
        else:
            s = builder.add(builder.shl(high, bits), low)
            s = builder.sitofp(builder.sub(s, builder.mul(of_bias, bias)) if self.bias else s, self.floats)
        acc = fused(builder, s, d, acc)
        return fused(builder, builder.fneg(m), builder.sitofp(of_min, self.floats), acc) if self.fmt.has_min else acc

    def emit(self, builder, words, base, ahead, r, x, at, d_x, block, n_chunks, n_blocks, total, t):
        chunk = Chunk(self.fmt, self.isa.lanes, builder, words, base, r, ahead)
        sub, group, first_sum = self.fmt.sub, self.fmt.group, SUMS_16 if self.fmt.sub == 16 else SUMS_32
        # Depends on r, as the optimiser sees it: for the next rows it would keep in memory what is read here
        at = builder.asm(ir.FunctionType(I64, [I64, I64]), "", "=r,0,r", [at, r], side_effect=False)

        def word_of(c, i):
            return repeated(builder, builder.load(builder.gep(x, [builder.add(at, I64(c * LIMB_WORDS + i))])), self.isa.lanes)

        accs, end = [cgutils.alloca_once_value(builder, self.nothing) for _ in self.columns], builder.append_basic_block("end")
        totals = nothing = [(self.zero,) * 4 for _ in self.columns]
        for j in range(N_BLOCKS):
            if j and COLUMN_BLOCK * j % group == 0:
                rest, more = builder.append_basic_block("rest"), builder.append_basic_block("more")
                builder.cbranch(builder.icmp_signed("==", n_blocks, I64(j)), rest, more)
                builder.position_at_end(rest)  # as of `group_counter`
                for acc in accs:
                    builder.store(builder.fadd(builder.load(acc), self.nothing), acc)
                builder.branch(end)
                builder.position_at_end(more)
            for n, limbs in enumerate(self.block(builder, chunk, word_of, j), COLUMN_BLOCK * j // sub):
                scales = self.unpack.sub(chunk, n)
                totals = [self.sub_block(builder, scales, word_of(c, first_sum + n), totals[c], limbs[c]) for c in self.columns]
                if (n + 1) * sub % group == 0:
                    scales = self.unpack.group(chunk, n * sub // group)
                    for acc, of_column in zip(accs, totals):
                        builder.store(self.group(builder, scales, of_column, builder.load(acc)), acc)
                    totals = nothing
        builder.branch(end)
        builder.position_at_end(end)
        for c, acc in zip(self.columns, accs):
            place = builder.bitcast(builder.gep(total, [builder.add(t, I64(c * ROWS))]), self.floats.as_pointer())
            d = builder.load(builder.gep(d_x, [builder.add(block, builder.mul(n_chunks, I64(c)))]))
            d = repeated(builder, d, self.isa.lanes)
            builder.store(fused(builder, builder.load(acc), d, builder.load(place, align=4)), place, align=4)


def few_multiplier(fmt, isa, n_columns):
    """(words, base, ahead, r, x, at, d, block, n_chunks, n_blocks, total, t): for n_columns columns c

        total[t + 32 c + i] = fma(acc, d[block + c n_chunks], total[t + 32 c + i])

    for the rows r + i, as many as a vector has lanes, of the tile at word `base`, and its first n_blocks times 32 columns.
    x, at: limbs of the activations are words from `at` on; ahead: see `Chunk`."""
    multiplier = Multiplier(fmt, isa, n_columns)

    @intrinsic
    def multiply(typingctx, words, base, ahead, r, x, at, d, block, n_chunks, n_blocks, total, t):
        def codegen(context, builder, signature, args):
            multiplier.emit(builder, *args)
            return context.get_dummy_value()
        i64 = types.int64
        return types.none(words, i64, i64, i64, x, i64, d, i64, i64, i64, total, i64), codegen
    return multiply


def few_product(fmt, isa):
    """As `quantized_products.pair_product`, of fewer columns than BLOCK."""
    most = BLOCK - 1
    multiply_one, multiply_most = few_multiplier(fmt, isa, 1), few_multiplier(fmt, isa, most)
    lanes, tile_words, total_words = ISAS[isa].lanes, tile.tile_bytes(fmt) // 4, stack(float32, BLOCK * ROWS)

    @device
    def product(operands, row_tile, first, last):
        words, _, d, _, limbs, out, chunk_bytes, n_last, _, n_chunks, m = operands
        total, x = total_words(), as_uint32(limbs)
        for i in range((last - first) * ROWS):
            total[i] = f32(0)
        # Of a row whose last chunk is short, in a tile of the same place: there the same parts are read
        ahead = (AHEAD if n_last == N_BLOCKS else (AHEAD + n_chunks - 1) // n_chunks * n_chunks) * tile_words
        for chunk in range(n_chunks):
            base, n_blocks = (row_tile * n_chunks + chunk) * tile_words, blocks_of(chunk, n_chunks, n_last)
            at, block = chunk * (chunk_bytes // 4) + first * LIMB_WORDS, first * n_chunks + chunk
            for i in range(rolled(ROWS // lanes)):
                r = i * lanes
                if last - first == most:
                    multiply_most(words, base, ahead, r, x, at, d, block, n_chunks, n_blocks, total, r)
                else:
                    for c in range(last - first):
                        multiply_one(words, base, ahead, r, x, at + c * LIMB_WORDS, d, block + c * n_chunks, n_chunks, n_blocks,
                                     total, c * ROWS + r)
        write(total, row_tile, first, last, out, m)
    return product
