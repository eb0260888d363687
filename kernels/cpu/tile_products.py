"""Products of quantized weights and many columns, where the CPU has tiles (`amx`): 16 rows of activations times 32 of weights,
group by group, weights of one limb or two, activations of two.

What follows the sums of a group (`Finisher`) stands between the instructions of the next product but one: it takes about as long,
and the sums of the product between are written there, too.
"""
from functools import lru_cache

from llvmlite import ir
from numba import float32, uint32
from numba.core import cgutils

from ...quant import tile
from ...quant.device_functions import device, inlined
from ...quant.formats import CHUNK
from ...quant.words import f32
from . import amx
from .limbs import FLOAT_SUMS, LIMB_ROW, LIMB_WORDS, SUMS_16, SUMS_32
from .quantized_products import BLOCK, N_COLUMNS, blocks_of, form_of, group_counter, write
from .unpack import LIMBS, ROWS, n_limbs, quantized_unpacker
from .vector import (F32, I32, I64, ISAS, above, add, advance, as_uint32, floats, fma, fused, instructions,
                     join_thirds, repeated, rolled, stack, store)

TILE_GROUP = 32          # columns of a group at least: of fewer, tiles would be half empty


def has_tiles(fmt) -> bool:
    return fmt.is_quantized and fmt.group >= TILE_GROUP


class Finisher:
    """Emits what follows the sums of a group, acc = fma(S, d, acc) and what minima take off, for a row of activations."""

    def __init__(self, fmt, isa):
        self.form, self.n_limbs, self.isa = form_of(fmt), n_limbs(fmt), ISAS[isa]
        self.ints, self.floats = (ir.VectorType(element, self.isa.lanes) for element in (I32, F32))
        self.is_chunk = fmt.group == CHUNK
        self.n_subs = fmt.group // fmt.sub if fmt.has_min else 0
        self.ones = fmt.max_imin == 1 and self.n_subs == 1 and fmt.sub == 32  # then imin q is a sum over 32 columns
        self.first_sum = FLOAT_SUMS if self.ones else SUMS_16 if fmt.sub == 16 else SUMS_32

    def load(self, builder, pointer, word, type_):
        return builder.load(builder.bitcast(builder.gep(pointer, [I64(word)]), type_.as_pointer()), align=4)

    def repeated(self, builder, pointer, word):
        return repeated(builder, builder.load(builder.gep(pointer, [word])), self.isa.lanes)

    def sum(self, builder, sums, t):
        parts = [self.load(builder, sums, of * amx.COLUMNS * ROWS + t, self.ints) for of in range(self.n_limbs + 1)]
        if self.n_limbs == 1:
            return floats(builder, above(builder, 8, *parts))
        high, middle, low = parts
        if self.form.span < self.form.group:
            return join_thirds(builder, high, middle, low)
        return floats(builder, above(builder, 8, above(builder, 8, high, middle), low))

    def of_minima(self, builder, imin, q_sums, r):
        """The sum of imin q, as float32."""
        if self.ones:
            return builder.bitcast(q_sums[0], self.floats)
        s = ir.Constant(self.ints, None)
        for j, q_sum in enumerate(q_sums):
            s = self.isa.dot(builder, s, self.load(builder, imin, j * ROWS + r, self.ints), q_sum)
        return floats(builder, s)

    def prepare(self, builder, other):
        """emit(i), i < 16, of a row. other: (sums, of_group). sums: what `amx` has written. of_group: (d, m, imin, q_sums, accs,
        d_x, block, n_chunks, last): of the group; words of the first of 16 rows of limbs, from the sums of the group on; of these
        16 rows, f32 [16][32], acc, or the total where a group is a chunk; d of the activations, that of the first row, from row
        to row, that of the last row of all."""
        sums, of_group = other
        d, m, imin, q_sums, accs, d_x, block, n_chunks, last = cgutils.unpack_tuple(builder, of_group)
        all_rows = range(0, ROWS, self.isa.lanes)
        # Loaded once: as the optimiser sees it, what is written to accs may change them
        scales = [self.load(builder, d, r, self.floats) for r in all_rows]
        minima = [builder.fneg(self.load(builder, m, r, self.floats)) for r in all_rows] if self.n_subs else None

        def emit(i):
            of_row = [self.repeated(builder, q_sums, I64(i * LIMB_WORDS + j)) for j in range(self.n_subs)]
            if self.is_chunk:
                at = builder.add(block, builder.mul(n_chunks, I64(i)))
                factor = self.repeated(builder, d_x, builder.select(builder.icmp_signed("<", at, last), at, last))
            for v, r in enumerate(all_rows):
                t = i * ROWS + r
                before = self.load(builder, accs, t, self.floats)
                acc = ir.Constant(self.floats, None) if self.is_chunk else before
                acc = fused(builder, self.sum(builder, sums, t), scales[v], acc)
                if self.n_subs:
                    acc = fused(builder, minima[v], self.of_minima(builder, imin, of_row, r), acc)
                acc = fused(builder, acc, factor, before) if self.is_chunk else acc
                builder.store(acc, builder.bitcast(builder.gep(accs, [I64(t)]), self.floats.as_pointer()), align=4)
        return emit


@lru_cache(None)
def closer(isa, n_group, n_columns):
    """(x, c, chunk, n_groups, i, accs, total): what follows the last group of a chunk, total = fma(acc, d of the activations,
    total), of the columns i.. of 16, c.. of the unit, and accs are +0 again. x = (d, first, n_chunks)."""
    n_rows, zeros, load, _, columns, *_ = instructions(isa, n_columns)

    @inlined
    def close(x, c, chunk, n_groups, i, accs, total):
        d, first, n_chunks = x
        for r in range(0, ROWS, n_rows):
            t, to = i * ROWS + r, (c + i) * ROWS + r
            acc = load(accs, t, ROWS)
            if n_groups < n_group:
                acc = add(acc, zeros(accs))
            store(total, to, ROWS, fma(acc, columns(d, (first + c + i) * n_chunks + chunk, n_chunks), load(total, to, ROWS)))
            store(accs, t, ROWS, zeros(accs))
    return close


def tile_product(fmt, isa, tiles):
    """As `pair_product`, by tiles. At any time there are three groups: one is multiplied, the sums of the one before it are
    written, those of the one before that are finished."""
    limbs, group = n_limbs(fmt), fmt.group
    assert group * 255 * 128 + 255 * 256 < 2**24, fmt.name  # of `join_thirds`
    unpack, finisher = quantized_unpacker(fmt, isa, LIMBS), Finisher(fmt, isa)
    n_sub, n_group, tile_words, n_bytes = CHUNK // fmt.sub, CHUNK // group, tile.tile_bytes(fmt) // 4, min(group, amx.N_BYTES)
    shape = amx.Shape(limbs, n_bytes, group // n_bytes)
    each = tiles(*shape)
    end, (n_words, begin, multiply, flush, finish) = each.end, each.beside(finisher.prepare)
    close_one, close = closer(isa, n_group, 1), closer(isa, n_group, BLOCK)
    is_chunk, n_subs, first_sum, n_sums = group == CHUNK, finisher.n_subs, finisher.first_sum, shape.sum_words
    # Of scales and minima, those of three chunks: three groups may be of as many. Of sums, those of two groups
    level_words, sub_words, group_words = (stack(uint32, limbs * CHUNK // 4 * ROWS), stack(uint32, 3 * n_sub * ROWS),
                                           stack(float32, 3 * n_group * ROWS))
    sum_words, total_words, acc_words = (stack(uint32, 2 * n_sums), stack(float32, N_COLUMNS * ROWS),
                                         stack(float32, amx.COLUMNS * ROWS))
    tile_state, count = stack(uint32, n_words), group_counter(group)

    @inlined
    def close_columns(x, group, n, accs, total):
        c, chunk, n_groups = group
        if n_groups == 0:
            return
        n_here = min(amx.COLUMNS, n - c)
        whole = n_here // BLOCK * BLOCK
        for i in range(0, whole, BLOCK):
            close(x, c, chunk, n_groups, i, accs, total)
        for i in range(whole, n_here):
            close_one(x, c, chunk, n_groups, i, accs, total)
        for i in range(n_here * ROWS, amx.COLUMNS * ROWS):  # of rows that are not there; accs are those of the next ones, too
            accs[i] = f32(0)

    @device
    def product(operands, row_tile, first, last):
        words, _, d_x, _, x, out, chunk_bytes, n_last, _, n_chunks, m = operands
        levels, all_imin, all_d, all_m, state = level_words(), sub_words(), group_words(), group_words(), tile_state()
        total, accs, sums, nothing = total_words(), acc_words(), sum_words(), acc_words()
        n, factors = last - first, (d_x, first, n_chunks)
        for i in range((n + amx.COLUMNS - 1) // amx.COLUMNS * amx.COLUMNS * ROWS):
            total[i] = f32(0)
        for i in range(amx.COLUMNS * ROWS):
            accs[i] = nothing[i] = f32(0)
        begin(state)
        to, written = sums, advance(sums, n_sums)
        for i in range(n_sums):
            written[i] = 0
        # Before the first two groups there are none: what comes of their sums goes to `nothing`, which no other group reads
        before = running = nothing, nothing, as_uint32(nothing), as_uint32(x), nothing, d_x, 0, 0, 0
        closing = of_running = 0, 0, 0  # column, chunk, and how many groups a chunk has, if the group is its last one
        for chunk in range(n_chunks):
            n_blocks, which = blocks_of(chunk, n_chunks, n_last), chunk % 3
            imin, d, minima = (advance(all_imin, which * n_sub * ROWS), advance(all_d, which * n_group * ROWS),
                               advance(all_m, which * n_group * ROWS))
            unpack(words, (row_tile * n_chunks + chunk) * tile_words, n_blocks, (levels, imin, d, minima))
            n_groups = count(n_blocks)
            for c in range(0, n, amx.COLUMNS):
                rows = advance(x, chunk * chunk_bytes + (first + c) * LIMB_ROW)
                for g in range(n_groups):
                    multiply(state, rows, g * group, CHUNK + g * group, LIMB_ROW, levels, g * group // 4 * ROWS, to,
                             (written, before))
                    close_columns(factors, closing, n, accs, total)
                    to, written, before, closing = written, to, running, of_running
                    running = (advance(d, g * ROWS), advance(minima, g * ROWS), advance(imin, g * n_subs * ROWS),
                               advance(as_uint32(rows), first_sum + g * n_subs), advance(total, c * ROWS) if is_chunk else accs,
                               d_x, (first + c) * n_chunks + chunk, n_chunks, (last - 1) * n_chunks + chunk)
                    of_running = c, chunk, 0 if is_chunk or g < n_groups - 1 else n_groups
        flush(state, to)
        end()
        for _ in range(rolled(2)):
            finish((written, before))
            close_columns(factors, closing, n, accs, total)
            written, before, closing = to, running, of_running
        write(total, row_tile, first, last, out, m)
    return product
