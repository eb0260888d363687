"""Products of bytes by AMX: an instruction adds to 16 x 16 sums 64 products each, of a tile of activations and one of weights.

There are eight tiles, registers of up to 16 rows of 64 bytes. Each thread says what it has in them (`begin`), and gives them
back (`end`): while it has them, the system saves them whenever it takes the processor away.

Tests of CPUs without AMX have the same as loops (`emulated`).
"""
import ctypes
import platform
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...quant.device_functions import device
from ...quant.words import i32, u32
from ..compile import cpu_features

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
COLUMNS, ROWS, LANES = 16, 32, 16  # of the sums: rows of activations, and of weights, 16 in a tile
N_BYTES = 64                       # of a row of a tile
CONFIG_WORDS = 16
ARCH_PRCTL, REQUEST, TILE_DATA = 158, 0x1023, 18  # of Linux


@lru_cache(None)
def available() -> bool:
    """Whether the CPU that numba compiles for has tiles for int8, and the system lets this process use them: Linux wants to be
    asked, once a process."""
    if not cpu_features().get("amx-int8") or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST, TILE_DATA) == 0


def _emit(builder, name, *args):
    function = ir.FunctionType(ir.VoidType(), [a.type for a in args])
    builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.x86.{name}"), args)


def _byte(builder, pointer, i):
    return builder.gep(builder.bitcast(pointer, I8.as_pointer()), [i])


class Shape(NamedTuple):
    """Of products of weights of n_limbs bytes over n_steps times n_bytes columns. limb_words: from the low limbs of weights to
    the high ones; low_sign: "s" or "u", whether low limbs of weights are signed or not."""
    n_limbs: int
    n_bytes: int
    n_steps: int
    limb_words: int = 64 * ROWS
    low_sign: str = "u"

    @property
    def n_sums(self) -> int:
        return self.n_limbs + 1

    @property
    def sum_words(self) -> int:
        return self.n_sums * COLUMNS * ROWS

    @property
    def x_tiles(self) -> tuple[int, int]:
        """Of the high and of the low limbs of activations. The sums have the first tiles, two each."""
        return (4, 5) if self.n_limbs == 1 else (6, 6)

    @property
    def w_tiles(self) -> tuple[int, int]:
        """Of the first and of the second 16 rows of weights."""
        return (6, 7) if self.n_limbs == 1 else (7, 7)

    @property
    def configuration(self) -> bytes:
        """Of the tiles: palette 1, bytes of a row of each, rows of each."""
        n_columns = [self.n_bytes if tile in self.x_tiles else N_BYTES for tile in range(8)]
        n_rows = [self.n_bytes // 4 if tile in self.w_tiles else COLUMNS for tile in range(8)]
        return bytes([1, *[0] * 15, *b"".join(n.to_bytes(2, "little") for n in n_columns), *[0] * 16, *n_rows, *[0] * 8])


class Pipeline(NamedTuple):
    """Products one behind the other. The sums of one stay in the tiles until the next one, which stores each just before it
    begins that tile anew: so neither waits for the other. `Tiles.end` is for them, too."""
    n_words: int       # of memory of a thread
    # (words u32 [n_words], written): the tiles of this thread are for these products, from now on, and their sums are zeros
    begin: Callable
    # (words, x, high, low, stride, w, j, sums, other): as `Tiles.multiply`, but the sums written are those of the product before.
    # Between its instructions stands other code, which has nothing to do with these two products
    multiply: Callable
    flush: Callable    # (words, sums): writes the sums of the last product
    alone: Callable    # (other): that code alone


class Tiles(NamedTuple):
    """What a thread does with tiles."""
    # (words u32 [CONFIG_WORDS], written): the tiles of this thread are for these products, from now on
    begin: Callable
    # (x, high, low, stride, w, j, sums). x: signed bytes; those of the high limbs of 16 rows of activations begin at byte
    # `high`, `stride` apart, those of the low ones at byte `low`. w: uint32 [n_limbs][columns / 4][32], the bytes of four columns
    # each, from word j on; the low limbs, then the high ones. Written: sums int32 [n_sums][16][32],
    #     sum of high w, sum of low w                                   w one byte, signed
    #     sum of high wh, sum of high wl + low wh, sum of low wl        w of limbs wh, signed, and wl
    multiply: Callable
    end: Callable  # ()
    # (prepare) -> Pipeline. prepare(builder, values of the tuple `other`) emits what the other code begins with and gives
    # emit(i), i < COLUMNS, for the parts of the rest
    beside: Callable


@lru_cache(None)
def tiles(*shape) -> Tiles:
    """shape: as of `Shape`."""
    shape = Shape(*shape)
    return Tiles(_beginner(shape), _multiplier(shape), end, partial(_pipeline, shape))


@lru_cache(None)
def emulated(*shape) -> Tiles:
    shape = Shape(*shape)
    multiply, n_words = _emulated_multiplier(shape), shape.sum_words

    def beside(prepare):
        alone = _alone(prepare)

        @device
        def begin(words):
            for i in range(n_words):
                words[i] = 0

        @device
        def flush(words, sums):
            for i in range(n_words):
                sums[i] = words[i]

        @device
        def both(words, x, high, low, stride, w, j, sums, other):
            flush(words, sums)
            multiply(x, high, low, stride, w, j, words)
            alone(other)
        return Pipeline(n_words, begin, both, flush, alone)
    return Tiles(device(lambda words: None), multiply, device(lambda: None), beside)


def _emulated_multiplier(shape):
    n_sums, size, sign_of_low = shape.n_sums, COLUMNS * ROWS, 128 if shape.low_sign == "s" else 0
    n_limbs, limb_words, n_columns = shape.n_limbs, shape.limb_words, shape.n_steps * shape.n_bytes

    @device
    def byte(words, i, k):
        return i32((words[i] >> u32(8 * k)) & u32(255))

    @device
    def multiply(x, high, low, stride, w, j, sums):
        for i in range(n_sums * size):
            sums[i] = 0
        for c in range(COLUMNS):
            for k in range(n_columns):
                q_high, q_low = i32(x[high + c * stride + k]), i32(x[low + c * stride + k])
                q_high, q_low = q_high - 2 * (q_high & 128), q_low - 2 * (q_low & 128)
                for r in range(ROWS):
                    at, to = j + k // 4 * ROWS + r, c * ROWS + r
                    first = byte(w, at, k % 4)
                    top = first if n_limbs == 1 else byte(w, at + limb_words, k % 4)
                    top -= 2 * (top & 128)
                    first -= 2 * (first & sign_of_low)
                    sums[to] = u32(i32(sums[to]) + q_high * top)
                    sums[to + size] = u32(i32(sums[to + size]) + q_low * top)
                    if n_limbs == 2:
                        sums[to + size] = u32(i32(sums[to + size]) + q_high * first)
                        sums[to + 2 * size] = u32(i32(sums[to + 2 * size]) + q_low * first)
    return multiply


def _beginner(shape):
    config = shape.configuration

    @intrinsic
    def begin(typingctx, words):
        def codegen(context, builder, signature, args):
            for i in range(CONFIG_WORDS):
                builder.store(I32(int.from_bytes(config[4 * i:4 * i + 4], "little")), builder.gep(args[0], [I64(i)]))
            _emit(builder, "ldtilecfg", _byte(builder, args[0], I64(0)))
            return context.get_dummy_value()
        return types.none(words), codegen
    return begin


@intrinsic
def end(typingctx):
    def codegen(context, builder, signature, args):
        _emit(builder, "tilerelease")
        return context.get_dummy_value()
    return types.none(), codegen


def _instructions(shape, before):
    """Of a product, in order: pairs of its time, in those of a product of two tiles, and emit(builder, x, (high, low), stride, w,
    sums). A sum waits for the product before it, so three of other sums are between them where there are as many. before(tile):
    what makes the tile of a sum ready, ahead of its first product."""
    step_words = shape.n_bytes // 4 * ROWS

    def load_x(limb, step):
        def emit(builder, x, starts, stride, w, sums):
            start = builder.add(starts[limb], I64(step * shape.n_bytes))
            _emit(builder, "tileloadd64", I8(shape.x_tiles[limb]), _byte(builder, x, start), stride)
        return 0, emit

    def load_w(step, limb, half):
        def emit(builder, x, starts, stride, w, sums):
            word = limb * shape.limb_words + step * step_words + half * LANES
            _emit(builder, "tileloadd64", I8(shape.w_tiles[half]), _byte(builder, w, I64(4 * word)), I64(4 * ROWS))
        return 0, emit

    def add(of, half, x_limb, kind):
        operands = 2 * of + half, shape.x_tiles[x_limb], shape.w_tiles[half]
        first = before(operands[0]) if operands[0] in unused else []
        unused.discard(operands[0])
        return [*first, (1, lambda builder, *_: _emit(builder, f"tdp{kind}", *map(I8, operands)))]

    result, unused = [], set(range(2 * shape.n_sums))
    for step in range(shape.n_steps):
        for x_limb in range(2):
            result.append(load_x(x_limb, step))
            if shape.n_limbs == 1:
                for half in range(2):
                    result += [*([] if x_limb else [load_w(step, 0, half)]), *add(x_limb, half, x_limb, "bssd")]
                continue
            for w_limb in (0, 1) if x_limb else (1, 0):
                kind = "bssd" if w_limb else f"bs{shape.low_sign}d"
                for half in range(2):
                    result += [load_w(step, w_limb, half), *add(x_limb + 1 - w_limb, half, x_limb, kind)]
    return result


def _zero(tile):
    return 0, lambda builder, *_: _emit(builder, "tilezero", I8(tile))


def _store(tile):
    def emit(builder, x, starts, stride, w, sums):
        word = tile // 2 * COLUMNS * ROWS + tile % 2 * LANES
        _emit(builder, "tilestored64", I8(tile), _byte(builder, sums, I64(4 * word)), I64(4 * ROWS))
    return 1, emit


def _stores(shape):
    return [_store(tile) for tile in range(2 * shape.n_sums)]


def _run(instructions, builder, x, high, low, stride, w, j, sums, between=lambda done: None):
    """Emits them. between(done): what comes behind so much of their time, up to 1."""
    w, done = _byte(builder, w, builder.mul(j, I64(4))), 0
    total = sum(time for time, _ in instructions)
    for time, emit in instructions:
        emit(builder, x, (high, low), stride, w, sums)
        done += time
        if time:
            between(done / total)


def _multiplier(shape):
    instructions = [*_instructions(shape, lambda tile: [_zero(tile)]), *_stores(shape)]

    @intrinsic
    def multiply(typingctx, x, high, low, stride, w, j, sums):
        def codegen(context, builder, signature, args):
            _run(instructions, builder, *args)
            return context.get_dummy_value()
        return types.none(x, types.int64, types.int64, types.int64, w, types.int64, sums), codegen
    return multiply


def _pipeline(shape, prepare):
    instructions = _instructions(shape, lambda tile: [_store(tile), _zero(tile)])

    @intrinsic
    def multiply(typingctx, words, x, high, low, stride, w, j, sums, other):
        def codegen(context, builder, signature, args):
            _, *args, other = args
            emit, left = prepare(builder, cgutils.unpack_tuple(builder, other)), list(range(COLUMNS))

            def between(done):
                while COLUMNS - len(left) < round(done * COLUMNS):
                    emit(left.pop(0))
            _run(instructions, builder, *args, between)
            return context.get_dummy_value()
        return types.none(words, x, types.int64, types.int64, types.int64, w, types.int64, sums, other), codegen

    @intrinsic
    def flush(typingctx, words, sums):
        def codegen(context, builder, signature, args):
            for _, store in _stores(shape):
                store(builder, None, None, None, None, args[1])
            return context.get_dummy_value()
        return types.none(words, sums), codegen
    return Pipeline(CONFIG_WORDS, _beginner(shape), multiply, flush, _alone(prepare))


def _alone(prepare):
    @intrinsic
    def alone(typingctx, other):
        def codegen(context, builder, signature, args):
            emit = prepare(builder, cgutils.unpack_tuple(builder, args[0]))
            for i in range(COLUMNS):
                emit(i)
            return context.get_dummy_value()
        return types.none(other), codegen
    return alone
