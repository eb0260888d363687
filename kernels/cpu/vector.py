"""Blocks: small matrices in vector registers, for the inner loops of the CPU's kernels.

A block holds [n_columns][n_rows] values of 32 bits, a row to a lane: float32, int32, or pairs of int16. Operations are
elementwise; as in numpy, a block of one column (`rows`, read from consecutive words) or of one value a column (`columns`, a word
each) is repeated over the other. Results do not depend on the instruction set: integer operations are exact or wrap, float
operations are IEEE's, one rounding each.
"""
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from ..arith import E2, E3, E4, E5, E6, EXP_MAX, EXP_MIN, INFINITY, LN2_HI, LN2_LO, LOG2E, ROUND
from ..compile import cpu_features

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTORS = 2  # vectors of rows in a block: with four columns the sums take half of the registers


def call(builder, name, result, *args):
    """A call of one of LLVM's own functions."""
    return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name),
                        args)


def fused(builder, a, b, c):
    """a * b + c with one rounding, of vectors of float32."""
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def repeated(builder, value, lanes):
    """A vector of a value in each lane."""
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def constant(like, value):
    """value in every lane of a vector of the type of `like`."""
    return ir.Constant(like.type, [value] * like.type.count)


# dot(builder, s, a, b) = s + a[0] * b[0] + a[1] * b[1] per lane; s int32, a and b pairs of int16

def dot_madd(name):
    """By the instruction `name`, pairs to sums. On a CPU with VNNI LLVM makes one instruction of it and the addition."""
    def dot(builder, s, a, b):
        halves = ir.VectorType(I16, 2 * s.type.count)
        return builder.add(s, call(builder, name, s.type, builder.bitcast(a, halves), builder.bitcast(b, halves)))
    return dot


def dot_plain(builder, s, a, b):
    def low(x):
        return builder.ashr(builder.shl(x, constant(x, 16)), constant(x, 16))

    def high(x):
        return builder.ashr(x, constant(x, 16))
    return builder.add(builder.add(s, builder.mul(low(a), low(b))), builder.mul(high(a), high(b)))


# dot4(builder, s, a, b) = s + the sum of a[i] * b[i] over the four bytes of a word; s int32, a uint8, b int8

def dot4_vnni(name):
    def dot4(builder, s, a, b):
        return call(builder, name, s.type, s, a, b)
    return dot4


class Isa(NamedTuple):
    """An instruction set: the features that a CPU must have for it, the lanes of a vector, its dot product of int16 pairs, and
    that of bytes if it has one."""
    features: tuple[str, ...]
    lanes: int
    dot: Callable
    dot4: Callable | None = None


ISAS = {  # the best first
    "avx512vnni": Isa(("avx512f", "avx512bw", "avx512vnni"), 16, dot_madd("llvm.x86.avx512.pmaddw.d.512"),
                      dot4_vnni("llvm.x86.avx512.vpdpbusd.512")),
    "avx512": Isa(("avx512f", "avx512bw"), 16, dot_madd("llvm.x86.avx512.pmaddw.d.512")),
    "avx2": Isa(("avx2",), 8, dot_madd("llvm.x86.avx2.pmadd.wd")),
    "plain": Isa((), 4, dot_plain),
}


def available_isas() -> list[str]:
    """Names of the instruction sets of the CPU that numba compiles for, the best first."""
    return [name for name, isa in ISAS.items() if all(cpu_features().get(f) for f in isa.features)]


class Block(types.Type):
    """The numba type of a block. element: float32 or int32 (pairs of int16 too); n_vectors vectors of rows, 1 where the rows
    share one value."""

    def __init__(self, element, n_columns, n_vectors, lanes):
        self.element, self.n_columns, self.n_vectors, self.lanes = element, n_columns, n_vectors, lanes
        super().__init__(f"Block({element}, {n_columns}, {n_vectors}, {lanes})")

    @property
    def vector(self):
        return ir.VectorType(F32 if self.element == types.float32 else I32, self.lanes)


@register_model(Block)
class BlockModel(models.PrimitiveModel):
    def __init__(self, manager, type_):
        super().__init__(manager, type_, ir.ArrayType(type_.vector, type_.n_columns * type_.n_vectors))


def pack(context, builder, type_, emit):
    """The block of the vectors emit(c, v)."""
    block = ir.Constant(context.get_value_type(type_), ir.Undefined)
    for c in range(type_.n_columns):
        for v in range(type_.n_vectors):
            block = builder.insert_value(block, emit(c, v), c * type_.n_vectors + v)
    return block


def part(builder, type_, block, c, v):
    """Vector v of column c, repeated where the block has one."""
    return builder.extract_value(block, min(c, type_.n_columns - 1) * type_.n_vectors + min(v, type_.n_vectors - 1))


def elementwise(emit, element=None):
    """The operation emit(builder, *vectors) -> vector on one to three blocks. element: of the result, by default that of the
    first operand."""
    def operation(*blocks):
        result = Block(element or blocks[0].element, max(b.n_columns for b in blocks), max(b.n_vectors for b in blocks),
                       blocks[0].lanes)

        def codegen(context, builder, signature, args):
            return pack(context, builder, result,
                        lambda c, v: emit(builder, *(part(builder, t, x, c, v) for t, x in zip(blocks, args))))
        return result(*blocks), codegen
    by_arity = {1: lambda typingctx, a: operation(a),
                2: lambda typingctx, a, b: operation(a, b),
                3: lambda typingctx, a, b, c: operation(a, b, c)}
    return intrinsic(by_arity[emit.__code__.co_argcount - 1])


# Operations. The float ones are IEEE operations with one rounding, to nearest even.

def floats(builder, a):
    return builder.sitofp(a, ir.VectorType(F32, a.type.count))


def above(builder, n_bits, high, low):
    """2^n_bits high + low."""
    return builder.add(builder.shl(high, constant(high, n_bits)), low)


to_f32 = elementwise(floats, types.float32)
add = elementwise(lambda builder, a, b: builder.fadd(a, b))
mul = elementwise(lambda builder, a, b: builder.fmul(a, b))
fma = elementwise(fused)
# fnma: c - a * b
fnma = elementwise(lambda builder, a, b, c: fused(builder, builder.fneg(a), b, c))
sub = elementwise(lambda builder, a, b: builder.fsub(a, b))
add_i32 = elementwise(lambda builder, a, b: builder.add(a, b))
sub_i32 = elementwise(lambda builder, a, b: builder.sub(a, b))
high16 = elementwise(lambda builder, a: builder.ashr(a, constant(a, 16)))
low16 = elementwise(lambda builder, a: builder.and_(a, constant(a, 0xffff)))


def join(builder, high, low):
    high, low = floats(builder, high), floats(builder, low)
    return fused(builder, high, constant(high, 65536.0), low)


join16 = elementwise(join, types.float32)  # 65536 high + low with one rounding, |high| and |low| <= 2^24


@elementwise
def larger(builder, a, b):
    """b > a ? b : a, of floats."""
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


@elementwise
def larger_bits(builder, bits, x):
    """The larger of bits, int32, and the pattern of |x|."""
    pattern = builder.and_(builder.bitcast(x, bits.type), constant(bits, 0x7fffffff))
    return builder.select(builder.icmp_signed(">", pattern, bits), pattern, bits)


# (i, a, b) -> a where the int32 i is not 0, else b
chosen = elementwise(lambda builder, i, a, b: builder.select(builder.icmp_signed("!=", i, constant(i, 0)), a, b), types.float32)


def below(other):
    """(i, n, x) -> x where i < n, both unsigned; elsewhere the float `other`."""
    return elementwise(lambda builder, i, n, x: builder.select(builder.icmp_unsigned("<", i, n), x, constant(x, other)),
                       types.float32)


@elementwise
def exp(builder, x):
    """As of `arith`. What it multiplies by two powers of two is added to the exponent here: where no `select` follows, the result
    is a normal number."""
    def number(value):
        return constant(x, float(value))

    bits = ir.VectorType(I32, x.type.count)
    t = fused(builder, x, number(LOG2E), number(ROUND))
    n = builder.fsub(t, number(ROUND))
    r = fused(builder, n, number(-LN2_LO), fused(builder, n, number(-LN2_HI), x))
    y = number(E6)
    for coefficient in E5, E4, E3, E2, 1, 1:
        y = fused(builder, y, r, number(coefficient))
    exponent = builder.shl(builder.bitcast(t, bits), ir.Constant(bits, [23] * bits.count))  # of t's pattern, n is the low bits
    y = builder.bitcast(builder.add(builder.bitcast(y, bits), exponent), x.type)
    y = builder.select(builder.fcmp_ordered("<", x, number(EXP_MIN)), number(0), y)
    y = builder.select(builder.fcmp_ordered(">", x, number(EXP_MAX)), number(INFINITY), y)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, y)


@intrinsic
def fold(typingctx, block):
    """The second half of a block's columns added to the first, until one is left."""
    result = Block(block.element, 1, block.n_vectors, block.lanes)

    def codegen(context, builder, signature, args):
        def column(c, v):
            return part(builder, block, args[0], c, v)

        def total(first, n, step, v):
            """Of the columns first, first + step and so on, n of them, halves added to halves."""
            if n == 1:
                return column(first, v)
            return builder.fadd(total(first, n // 2, 2 * step, v), total(first + step, n // 2, 2 * step, v))
        return pack(context, builder, result, lambda _, v: total(0, block.n_columns, 1, v))
    return result(block), codegen


@elementwise
def mul_i16(builder, a, b):
    """Products of int16 pairs, each modulo 2^16."""
    halves = ir.VectorType(I16, 2 * a.type.count)
    return builder.bitcast(builder.mul(builder.bitcast(a, halves), builder.bitcast(b, halves)), a.type)


def join_limbs(builder, high, low):
    """256 high + low with one rounding, of any int32."""
    carried = builder.add(high, builder.ashr(low, constant(low, 8)))
    below = builder.or_(builder.shl(builder.and_(carried, constant(low, 255)), constant(low, 8)),
                        builder.and_(low, constant(low, 255)))
    return join(builder, builder.ashr(carried, constant(low, 8)), below)


def join_thirds(builder, high, middle, low):
    carried = builder.add(high, builder.ashr(middle, constant(middle, 8)))
    return join(builder, carried, above(builder, 8, builder.and_(middle, constant(middle, 255)), low))


def join_fixed_point(builder, high, middle, low):
    high, below = floats(builder, high), floats(builder, above(builder, 7, middle, low))
    return fused(builder, high, constant(high, 16384.0), below)


# 16384 high + (128 middle + low): both terms are rounded, then their sum
fixed_point = elementwise(join_fixed_point, types.float32)


def bytes_as_i16(first):
    """Bytes first and first + 1 of each word, signed, as a pair of int16."""
    @elementwise
    def widen(builder, a):
        lanes = a.type.count
        zero = 4 * lanes  # the first byte of the shuffle's second operand
        order = [byte for w in range(0, 4 * lanes, 4) for byte in (zero, w + first, zero, w + first + 1)]
        words = builder.bitcast(a, ir.VectorType(I8, 4 * lanes))
        tops = builder.shuffle_vector(words, constant(words, 0), ir.Constant(ir.VectorType(I32, 4 * lanes), order))
        halves = builder.bitcast(tops, ir.VectorType(I16, 2 * lanes))
        return builder.bitcast(builder.ashr(halves, constant(halves, 8)), a.type)
    return widen


def level(builder, x, inv):
    words = ir.VectorType(I32, x.type.count)
    rounded = call(builder, f"llvm.rint.v{x.type.count}f32", x.type, builder.fmul(x, inv))
    zero = ir.Constant(words, None)
    return builder.select(builder.fcmp_ordered(">", inv, constant(inv, 0.0)), builder.fptosi(rounded, words), zero)


levels = elementwise(level, types.int32)  # rint(x inv); 0 where inv is 0


@elementwise
def pair_limbs(builder, a, b):
    """a + 64 and b + 64 as pairs of 16 bits, of levels from 0 to 16256."""
    return builder.add(above(builder, 16, b, a), constant(a, 64 << 16 | 64))


@elementwise
def high_limbs(builder, even, odd):
    """Of q = 128 hi + lo, lo in -64..63, four bytes hi: of the `pair_limbs` of levels 0 and 2, and of 1 and 3."""
    mask = constant(even, 0x00ff00ff)
    return above(builder, 8, builder.and_(builder.lshr(odd, constant(odd, 7)), mask),
                 builder.and_(builder.lshr(even, constant(even, 7)), mask))


@elementwise
def low_limbs(builder, even, odd):
    """The same of lo."""
    mask, signs = constant(even, 0x007f007f), constant(even, 0x80808080)
    low = above(builder, 8, builder.and_(odd, mask), builder.and_(even, mask))
    return builder.xor(builder.sub(builder.or_(low, signs), constant(low, 0x40404040)), signs)


low_pair, high_pair = bytes_as_i16(0), bytes_as_i16(2)


@intrinsic
def shift_right(typingctx, w, s):
    """`Primitives.shr` in 32 bits: numba makes 64 of them, so a vector has half as many rows."""
    def codegen(context, builder, signature, args):
        w, s = (context.cast(builder, value, type_, types.uint32) for value, type_ in zip(args, signature.args))
        return builder.lshr(w, builder.and_(s, I32(31)))
    return types.uint32(w, s), codegen


@intrinsic
def rolled(typingctx, n):
    """n, hidden from the optimiser: a loop over range(rolled(n)) is not unrolled, which keeps code and compile time small."""
    def codegen(context, builder, signature, args):
        return builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", args, side_effect=False)
    return types.int64(types.int64), codegen


# Memory: pointers to 32-bit words; indices and strides count words.

@intrinsic
def pointer(typingctx, array):
    """Of an array's first element: float32, or uint32 for integers of any width."""
    result = types.CPointer(types.float32 if array.dtype == types.float32 else types.uint32)

    def codegen(context, builder, signature, args):
        data = context.make_array(array)(context, builder, args[0]).data
        return builder.bitcast(data, context.get_value_type(result))
    return result(array), codegen


LINE_BYTES = 64  # of the caches


@intrinsic
def at_line(typingctx, array):
    """As `pointer`, of the first element at the start of a cache line: before it there are less than LINE_BYTES."""
    result = types.CPointer(types.float32 if array.dtype == types.float32 else types.uint32)

    def codegen(context, builder, signature, args):
        data = builder.ptrtoint(context.make_array(array)(context, builder, args[0]).data, I64)
        line = builder.and_(builder.add(data, I64(LINE_BYTES - 1)), I64(-LINE_BYTES))
        return builder.inttoptr(line, context.get_value_type(result))
    return result(array), codegen


def stack(element, n):
    """() -> n words on the stack of the calling function, aligned to 64 bytes, not initialised."""
    result = types.CPointer(element)

    @intrinsic
    def allocate(typingctx):
        def codegen(context, builder, signature, args):
            words = cgutils.alloca_once(builder, context.get_value_type(element), n)
            words.align = 64
            return words
        return result(), codegen
    return allocate


def emit_prefetch(builder, place):
    """Asks for the 64 bytes around a place, which will be read soon; a place outside of memory does no harm.

    Into the second cache: what is on its way to the first holds one of the few places that loads need too."""
    byte = builder.bitcast(place, I8.as_pointer())
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), [byte.type, I32, I32, I32]),
                                              "llvm.prefetch.p0")
    builder.call(function, [byte, I32(0), I32(2), I32(1)])  # to read, into all caches but the first, as data


@intrinsic
def prefetch(typingctx, pointer, i):
    """`emit_prefetch` of word i."""
    def codegen(context, builder, signature, args):
        emit_prefetch(builder, builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()
    return types.none(pointer, types.int64), codegen


@intrinsic
def advance(typingctx, pointer, n):
    """The pointer, n elements further on."""
    return pointer(pointer, types.int64), lambda context, builder, _, args: builder.gep(args[0], [args[1]])


def retyped(element):
    """(pointer) -> the same address, of elements of a numba type."""
    @intrinsic
    def retype(typingctx, pointer):
        result = types.CPointer(element)
        return result(pointer), lambda context, builder, _, args: builder.bitcast(args[0], context.get_value_type(result))
    return retype


as_uint8, as_int16, as_uint32, as_float32 = (retyped(t) for t in (types.uint8, types.int16, types.uint32, types.float32))


def element_of(pointer):
    return types.float32 if pointer.dtype == types.float32 else types.int32


def address(builder, pointer, i, stride, c, v, type_):
    """Of vector v of column c of a block at word i."""
    word = builder.add(i, builder.add(builder.mul(stride, I64(c)), I64(v * type_.lanes)))
    return builder.gep(pointer, [word])


@intrinsic
def store(typingctx, pointer, i, stride, block):
    """Writes column c to the words from i + c * stride."""
    def codegen(context, builder, signature, args):
        p, i, stride, values = args
        for c in range(block.n_columns):
            for v in range(block.n_vectors):
                place = builder.bitcast(address(builder, p, i, stride, c, v, block), block.vector.as_pointer())
                builder.store(part(builder, block, values, c, v), place, align=4)
        return context.get_dummy_value()
    return types.none(pointer, types.int64, types.int64, block), codegen


def turned(builder, quarters):
    """Four vectors, of four words of each of a vector's rows -> a vector of each word."""
    lanes = quarters[0].type.count

    def select(a, b, order):
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, lanes), order))
    words = []
    for k in (0, 2):  # words k and k + 1
        first = [4 * r + w for w in (k, k + 1) for r in range(lanes // 2)]  # of the rows of two vectors
        front, back = select(*quarters[:2], first), select(*quarters[2:], first)
        for w in (0, 1):
            half = list(range(w * lanes // 2, (w + 1) * lanes // 2))
            words.append(select(front, back, [*half, *[x + lanes for x in half]]))
    return words


class Instructions(NamedTuple):
    """The operations that depend on the instruction set, for blocks of n_columns x n_rows."""
    n_rows: int
    zeros: Callable    # (pointer) -> zeros of the pointer's type
    load: Callable     # (pointer, i, stride) -> column c from the words from i + c * stride
    rows: Callable     # (pointer, i) -> one column for all, the words from i
    columns: Callable  # (pointer, i, stride) -> one value a column, the word i + c * stride
    dot: Callable      # (s, a, b) -> s + a[0] * b[0] + a[1] * b[1], a and b pairs of int16, modulo 2^32
    turn: Callable     # (from, i, to, j, stride): words i.. of one vector of rows, four of each -> 4 vectors, a word of each row


@lru_cache(None)
def instructions(isa: str, n_columns: int) -> Instructions:
    """isa: a name in ISAS."""
    lanes = ISAS[isa].lanes

    def load_vectors(block, context, builder, p, i, stride):
        def load(c, v):
            return builder.load(builder.bitcast(address(builder, p, i, stride, c, v, block), block.vector.as_pointer()), align=4)
        return pack(context, builder, block, load)

    def load_words(block, context, builder, p, i, stride):
        def load(c, v):
            word = builder.bitcast(address(builder, p, i, stride, c, v, block), block.vector.element.as_pointer())
            return repeated(builder, builder.load(word, align=2), lanes)
        return pack(context, builder, block, load)

    @intrinsic
    def zeros(typingctx, pointer):
        block = Block(element_of(pointer), n_columns, VECTORS, lanes)
        return block(pointer), lambda context, builder, _, args: ir.Constant(context.get_value_type(block), None)

    @intrinsic
    def load(typingctx, pointer, i, stride):
        block = Block(element_of(pointer), n_columns, VECTORS, lanes)
        signature = block(pointer, types.int64, types.int64)
        return signature, lambda context, builder, _, args: load_vectors(block, context, builder, *args)

    @intrinsic
    def rows(typingctx, pointer, i):
        block = Block(element_of(pointer), 1, VECTORS, lanes)
        return block(pointer, types.int64), lambda context, builder, _, args: load_vectors(block, context, builder, *args, I64(0))

    @intrinsic
    def columns(typingctx, pointer, i, stride):
        block = Block(element_of(pointer), n_columns, 1, lanes)
        signature = block(pointer, types.int64, types.int64)
        return signature, lambda context, builder, _, args: load_words(block, context, builder, *args)

    @intrinsic
    def turn(typingctx, source, i, to, j, stride):
        vector = ir.VectorType(I32, lanes)

        def codegen(context, builder, signature, args):
            source, i, to, j, stride = args

            def at(p, word):
                return builder.bitcast(builder.gep(p, [word]), vector.as_pointer())
            quarters = [builder.load(at(source, builder.add(i, I64(v * lanes))), align=4) for v in range(4)]
            for k, words in enumerate(turned(builder, quarters)):
                builder.store(words, at(to, builder.add(j, builder.mul(stride, I64(k)))), align=4)
            return context.get_dummy_value()
        return types.none(source, types.int64, to, types.int64, types.int64), codegen

    return Instructions(VECTORS * lanes, zeros, load, rows, columns, elementwise(ISAS[isa].dot), turn)
