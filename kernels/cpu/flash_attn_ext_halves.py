"""Keys and values of f16 caches as levels and high limbs, for the products of int16 pairs in `flash_attn_ext`.

Keys are turned while they are still float16, a key to a lane: so amaxes, divisions and levels are those of two vectors of keys at
a time. Values stay rows, two keys at a time. What comes out is that of `quantize_block`.
"""
from llvmlite import ir
from numba import types, uint32
from numba.extending import intrinsic

from ...quant.device_functions import device
from ..reference.flash_attn_ext import BLOCK, PIECE
from ..reference.quantize import LIMIT, SMALLEST
from .vector import (F32, I16, I32, I64, ISAS, LINE_BYTES, Block, constant, elementwise, instructions, levels, pack, part,
                     pointer, prefetch, stack, store, turned)

FLOAT = types.float32
INFINITY = 0x7c00      # of float16
HALF_WORDS = BLOCK // 2  # words of a block of channels
AHEAD = 1              # groups of keys between those that are read and those that the memory is asked for
AHEAD_VALUES = 16      # values, likewise


def _halves(builder, a):
    return builder.bitcast(a, ir.VectorType(I16, 2 * a.type.count))


def _float(builder, words):
    """The float16 in the lower halves of words as float32."""
    n = words.type.count
    halves = builder.bitcast(builder.trunc(words, ir.VectorType(I16, n)), ir.VectorType(ir.HalfType(), n))
    return builder.fpext(halves, ir.VectorType(F32, n))


lower = elementwise(_float, FLOAT)
upper = elementwise(lambda builder, a: _float(builder, builder.lshr(a, constant(a, 16))), FLOAT)


@elementwise
def larger_halves(builder, bits, a):
    """The larger of bits, pairs of 16, and of the patterns of |a|, pairs of float16."""
    x, y = _halves(builder, bits), _halves(builder, builder.and_(a, constant(a, 0x7fff7fff)))
    return builder.bitcast(builder.select(builder.icmp_unsigned(">", y, x), y, x), bits.type)


@elementwise
def larger_half(builder, bits):
    """Of each pair, alone."""
    low, high = builder.and_(bits, constant(bits, 0xffff)), builder.lshr(bits, constant(bits, 16))
    return builder.select(builder.icmp_unsigned(">", low, high), low, high)


def _amax(builder, bits):
    """(whether there are levels, |x|) of patterns of float16."""
    x = _float(builder, bits)
    there = builder.and_(builder.icmp_unsigned("<", bits, constant(bits, INFINITY)),
                         builder.fcmp_ordered(">=", x, constant(x, float(SMALLEST))))
    return there, x


def _inverse(builder, bits):
    there, x = _amax(builder, bits)
    return builder.select(there, builder.fdiv(constant(x, float(LIMIT)), x), constant(x, 0.0))


def _step(builder, bits):
    there, x = _amax(builder, bits)
    none = builder.select(builder.icmp_unsigned("<", bits, constant(bits, INFINITY)), constant(x, 0.0), constant(x, float("nan")))
    return builder.select(there, builder.fdiv(x, constant(x, float(LIMIT))), none)


inverse, step = elementwise(_inverse, FLOAT), elementwise(_step, FLOAT)  # as `quantize_block`, of patterns of amax


@elementwise
def pair(builder, a, b):
    """As pairs of int16."""
    return builder.or_(builder.and_(a, constant(a, 0xffff)), builder.shl(b, constant(b, 16)))


@elementwise
def pair_of_high(builder, a):
    """High limbs of pairs of levels, q = 128 hi + lo, lo in -64..63."""
    x = _halves(builder, a)
    return builder.bitcast(builder.ashr(builder.add(x, constant(x, 64)), constant(x, 7)), a.type)


def row_turner(isa):
    """(source, at, stride, n, to, j): the four words from word `at` on of n rows, `stride` words apart, to word j and on, each
    word of as many rows as two vectors have lanes side by side. Where n is less, the other lanes have what the last row has."""
    lanes = ISAS[isa].lanes

    @intrinsic
    def turn_rows(typingctx, source, at, stride, n, to, j):
        def codegen(context, builder, signature, args):
            source, at, stride, n, to, j = args
            four, last = ir.VectorType(I32, 4).as_pointer(), builder.sub(n, I64(1))

            def quarter(first):
                """Four words each of lanes / 4 rows."""
                rows = []
                for row in range(first, first + lanes // 4):
                    here = builder.select(builder.icmp_signed("<", I64(row), last), I64(row), last)
                    place = builder.gep(source, [builder.add(at, builder.mul(here, stride))])
                    rows.append(builder.load(builder.bitcast(place, four), align=4))
                while len(rows) > 1:
                    order = [*range(2 * rows[0].type.count)]
                    rows = [builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))
                            for a, b in zip(rows[::2], rows[1::2])]
                return rows[0]

            for v in range(2):
                words = turned(builder, [quarter(v * lanes + i * lanes // 4) for i in range(4)])
                for k, vector in enumerate(words):
                    place = builder.gep(to, [builder.add(j, I64(k * 2 * lanes + v * lanes))])
                    builder.store(vector, builder.bitcast(place, vector.type.as_pointer()), align=4)
            return context.get_dummy_value()
        return types.none(source, types.int64, types.int64, types.int64, to, types.int64), codegen
    return turn_rows


def key_loader(isa):
    """(k u16 [cells, heads * dim], cell, n_keys, head_kv, dim, levels, d): keys of dim channels, a multiple of BLOCK. levels: i32
    [2, blocks, 32, 128], pairs of channels and their high limbs, a key to a lane; d: f32 [blocks, 128]."""
    tools, turn_rows = instructions(isa, 1), row_turner(isa)
    n_rows, zeros, rows = tools.n_rows, tools.zeros, tools.rows
    word_buffer = stack(uint32, HALF_WORDS * n_rows)

    @device
    def load(k, cell, n_keys, head_kv, dim, all_levels, all_d):
        source, stride, words = pointer(k), k.shape[1] // 2, word_buffer()
        to, d = pointer(all_levels), pointer(all_d)
        part_words = all_levels.size // 2
        for first in range(0, n_keys, n_rows):
            n, start = min(n_rows, n_keys - first), (cell + first) * stride + head_kv * dim // 2
            for row in range(n_rows * AHEAD, n_rows * AHEAD + n):
                for line in range(0, dim // 2, LINE_BYTES // 4):
                    prefetch(source, start + row * stride + line)
            for b in range(dim // BLOCK):
                for i in range(HALF_WORDS // 4):
                    turn_rows(source, start + b * HALF_WORDS + 4 * i, stride, n, words, 4 * i * n_rows)
                bits = zeros(words)
                for i in range(HALF_WORDS):
                    bits = larger_halves(bits, rows(words, i * n_rows))
                amax = larger_half(bits)
                inv, at = inverse(amax), b * HALF_WORDS * PIECE + first
                store(d, b * PIECE + first, 0, step(amax))
                for i in range(HALF_WORDS):
                    two = rows(words, i * n_rows)
                    both = pair(levels(lower(two), inv), levels(upper(two), inv))
                    store(to, at + i * PIECE, 0, both)
                    store(to, at + i * PIECE + part_words, 0, pair_of_high(both))
    return load


def half_tools(isa):
    """Intrinsics load and largest."""
    lanes = ISAS[isa].lanes
    halves, block = ir.VectorType(I16, lanes), Block(types.int32, 1, 2, lanes)

    @intrinsic
    def load(typingctx, words, i):
        """As many float16 as two vectors have lanes, from the i-th on, each in a word."""
        def codegen(context, builder, signature, args):
            source = builder.bitcast(args[0], I16.as_pointer())

            def vector(c, v):
                place = builder.gep(source, [builder.add(args[1], I64(v * lanes))])
                found = builder.load(builder.bitcast(place, halves.as_pointer()), align=2)
                return builder.zext(found, ir.VectorType(I32, lanes))
            return pack(context, builder, block, vector)
        return block(words, types.int64), codegen

    @intrinsic
    def largest(typingctx, bits):
        """Of all words, as the one value of a block."""
        result = Block(types.int32, 1, 1, lanes)

        def codegen(context, builder, signature, args):
            a, b = (part(builder, bits, args[0], 0, v) for v in range(2))
            x, n = builder.select(builder.icmp_unsigned(">", a, b), a, b), lanes
            while n > 1:  # halves are exchanged
                n //= 2
                order = [i ^ n for i in range(lanes)]
                y = builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, lanes), order))
                x = builder.select(builder.icmp_unsigned(">", x, y), x, y)
            return pack(context, builder, result, lambda c, v: x)
        return result(bits), codegen
    return load, largest


@intrinsic
def value_of(typingctx, block):
    """Of a block of one value."""
    def codegen(context, builder, signature, args):
        return builder.extract_element(part(builder, block, args[0], 0, 0), I32(0))
    return block.element(block), codegen


@elementwise
def larger_pattern(builder, bits, a):
    """The larger of bits and of the pattern of |a|, float16 in words."""
    x = builder.and_(a, constant(a, 0x7fff))
    return builder.select(builder.icmp_unsigned(">", x, bits), x, bits)


def value_loader(isa):
    """(v u16 [cells, heads * dv], cell, n_keys, head_kv, dv, levels, d): values of dv channels, a multiple of two vectors' lanes.
    levels: i32 [2, 64, dv or more], pairs of keys and their high limbs, a channel to a lane; d: f32 [128]."""
    tools, (halves, largest) = instructions(isa, 1), half_tools(isa)
    n_rows, zeros = tools.n_rows, tools.zeros

    @device
    def amax(source, at, dv):
        bits = zeros(source)
        for c in range(0, dv, n_rows):
            bits = larger_pattern(bits, halves(source, at + c))
        return largest(bits)

    @device
    def load(v, cell, n_keys, head_kv, dv, all_levels, d):
        source, to, width, stride = pointer(v), pointer(all_levels), all_levels.shape[2], v.shape[1]
        part_words = all_levels.size // 2
        for j in range(0, n_keys, 2):
            first = (cell + j) * stride + head_kv * dv
            second = first + stride if j + 1 < n_keys else first
            for line in range(0, dv // 2, LINE_BYTES // 4):
                for key in range(2):
                    prefetch(source, (first + (AHEAD_VALUES + key) * stride) // 2 + line)
            a, b = amax(source, first, dv), amax(source, second, dv)
            d[j] = value_of(step(a))
            if j + 1 < n_keys:
                d[j + 1] = value_of(step(b))
            inv_a, inv_b, at = inverse(a), inverse(b), j // 2 * width
            for c in range(0, dv, n_rows):
                both = pair(levels(lower(halves(source, first + c)), inv_a), levels(lower(halves(source, second + c)), inv_b))
                store(to, at + c, 0, both)
                store(to, at + c + part_words, 0, pair_of_high(both))
    return load
