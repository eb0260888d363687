"""The unpackings of `quant`, run as plain Python over vectors of words, a row to a lane: what they do is emitted as LLVM code,
which keeps everything in registers. Whatever is not a vector, such as the number of a block, is known then."""
from functools import lru_cache
from hashlib import sha256
from types import FunctionType

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from ...quant import tile
from ...quant.words import primitives
from .vector import F32, I8, I16, I32, I64, call, constant, emit_prefetch, turned

ROWS = tile.ROWS
CASTS = np.uint32, np.int32, np.uint64, np.float32  # of words: in 32 bits all of them are the same


class Lanes:
    """A vector of words, uint32, or of float32. Operands that are numbers are repeated."""
    __array_ufunc__ = None  # numpy leaves operations with its numbers to this class

    def __init__(self, builder, value):
        self.builder, self.value = builder, value

    def like(self, value):
        return Lanes(self.builder, value)

    def operand(self, other):
        if isinstance(other, Lanes):
            return other.value
        is_float = self.value.type.element == F32
        return constant(self.value, float(other) if is_float else int(other) & 0xffffffff)

    def __lt__(self, other):
        return self.like(self.builder.icmp_unsigned("<", self.value, self.operand(other)))

    def __eq__(self, other):
        return self.like(self.builder.icmp_unsigned("==", self.value, self.operand(other)))

    __hash__ = None

    def __bool__(self):
        raise TypeError("a vector is not one condition: `Primitives.select` takes it")


def _operator(emit):
    return (lambda self, other: self.like(emit(self.builder, self.value, self.operand(other))),
            lambda self, other: self.like(emit(self.builder, self.operand(other), self.value)))


for _name in "and", "or", "xor", "add", "sub", "mul", "lshift", "rshift":
    _emit = getattr(ir.IRBuilder, {"and": "and_", "or": "or_", "lshift": "shl", "rshift": "lshr"}.get(_name, _name))
    for _method, _of in zip((f"__{_name}__", f"__r{_name}__"), _operator(_emit)):
        setattr(Lanes, _method, _of)


def _cast(kind):
    return lambda x: x if isinstance(x, Lanes) else kind(x)


def traced(function):
    """The function, in which casts leave vectors as they are."""
    casts = {name: _cast(value) for name, value in function.__globals__.items() if any(value is kind for kind in CASTS)}
    return FunctionType(function.__code__, {**function.__globals__, **casts}, function.__name__, function.__defaults__,
                        function.__closure__)


# What is done in another way than `quant.words` does it in numbers

def f16(bits):
    builder, lanes = bits.builder, bits.value.type.count
    halves = builder.bitcast(builder.trunc(bits.value, ir.VectorType(I16, lanes)), ir.VectorType(ir.HalfType(), lanes))
    return bits.like(builder.fpext(halves, ir.VectorType(F32, lanes)))


def as_f32(bits):
    return bits.like(bits.builder.bitcast(bits.value, ir.VectorType(F32, bits.value.type.count)))


def mul(a, b):
    return a.like(a.builder.fmul(a.value, a.operand(b)))


def shr(w, s):
    return w >> np.uint32(int(s) & 31) if int(s) & 31 else w


def select(condition, a, b):
    vector = next(x for x in (a, b) if isinstance(x, Lanes))
    return vector.like(vector.builder.select(condition.value, vector.operand(a), vector.operand(b)))


def _constant_words(builder, words):
    """Pointer to the first of these uint32, which are in the program."""
    name = f"words.{sha256(words.tobytes()).hexdigest()[:16]}"
    if name not in builder.module.globals:
        array = ir.Constant(ir.ArrayType(I32, len(words)), [int(word) for word in words])
        cgutils.global_constant(builder.module, name, array)
    return builder.bitcast(builder.module.globals[name], I32.as_pointer())


def table(entries):
    entries = np.ascontiguousarray(entries).astype(np.uint32)

    def entry(t, i):
        builder, lanes = i.builder, i.value.type.count
        if len(entries) == 2 * lanes:  # in two registers
            low, high = (ir.Constant(i.value.type, [*map(int, half)]) for half in entries.reshape(2, lanes))
            return i.like(call(builder, f"llvm.x86.avx512.vpermi2var.d.{32 * lanes}", i.value.type, low, i.value, high))
        first = builder.bitcast(_constant_words(builder, entries), I8.as_pointer())
        zeros, ones = ir.Constant(i.value.type, None), ir.Constant(ir.VectorType(ir.IntType(1), lanes), [1] * lanes)
        found = call(builder, f"llvm.x86.avx512.mask.gather.dpi.{32 * lanes}", i.value.type, zeros, first, i.value, ones, I32(4))
        return i.like(found)
    return entry


def lookup_nibbles(levels):
    levels = np.resize(np.asarray(levels, np.int8).view(np.uint8), 16)

    def four(w):
        builder, n = w.builder, 4 * w.value.type.count
        bytes_ = ir.VectorType(I8, n)
        found = call(builder, f"llvm.x86.avx512.pshuf.b.{8 * n}", bytes_, ir.Constant(bytes_, [*map(int, levels)] * (n // 16)),
                     builder.bitcast((w & np.uint32(0x0f0f0f0f)).value, bytes_))
        return w.like(builder.bitcast(found, w.value.type))
    return lambda w: (four(w), four(w >> np.uint32(4)))


@lru_cache(None)
def lane_primitives():
    return primitives(traced, f16=f16, f32=as_f32, mul=mul, shr=shr, select=select, table=table, lookup_nibbles=lookup_nibbles)


class Chunk:
    """Rows r.. of the tile at word `base`, as many as a vector has lanes; pieces are turned when they are first asked for."""

    def __init__(self, fmt, lanes, builder, words, base, r, ahead):
        """ahead: so many words behind what is loaded the memory is asked for what will be."""
        self.fmt, self.lanes, self.builder, self.words, self.base, self.r, self.ahead = fmt, lanes, builder, words, base, r, ahead
        self.items: dict = {}

    def load(self, element, i):
        """The vector of these from word i of the tile on."""
        place = self.builder.gep(self.words, [self.builder.add(self.base, i)])
        emit_prefetch(self.builder, self.builder.gep(place, [self.ahead]))
        return self.builder.load(self.builder.bitcast(place, ir.VectorType(element, self.lanes).as_pointer()), align=4)

    def item(self, key, make):
        if key not in self.items:
            self.items[key] = make()
        return self.items[key]

    def piece(self, p):
        builder = self.builder
        first = builder.add(builder.mul(self.r, I64(4)), I64(p * ROWS * 4))
        return turned(builder, [self.load(I32, builder.add(first, I64(v * self.lanes))) for v in range(4)])

    def piece_word(self, p, i):
        return Lanes(self.builder, self.item(("piece", p), lambda: self.piece(p))[i])

    def word(self, k):
        first = self.builder.add(self.r, I64((4 * self.fmt.n_pieces + k) * ROWS))
        return Lanes(self.builder, self.item(("word", k), lambda: self.load(I32, first)))

    def half(self, h):
        builder = self.builder

        def halves():
            first = builder.add(builder.lshr(self.r, I64(1)),
                                I64((4 * self.fmt.n_pieces + self.fmt.n_words) * ROWS + h * ROWS // 2))
            return builder.zext(self.load(I16, first), ir.VectorType(I32, self.lanes))
        return Lanes(builder, self.item(("half", h), halves))
