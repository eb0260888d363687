"""Products of bytes by AMX: an instruction adds to 16 x 16 sums 64 products each, of a tile of activations and one of weights.

There are eight tiles, registers of up to 16 rows of 64 bytes. Each thread says what it has in them (`begin`), and gives them
back (`end`): while it has them, the system saves them whenever it takes the processor away.

Tests of CPUs without AMX have the same as loops (`emulated`).
"""
import ctypes
import platform
import sys
from collections.abc import Callable
from functools import lru_cache
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
X, W = 6, 7                        # tiles of activations and of weights; the first six are sums
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


def configuration(n_bytes: int) -> bytes:
    """Of the tiles of a product of n_bytes columns: palette 1, bytes of a row of each tile, rows of each."""
    n_columns = [n_bytes if tile == X else N_BYTES for tile in range(8)]
    n_rows = [n_bytes // 4 if tile == W else COLUMNS for tile in range(8)]
    return bytes([1, *[0] * 15, *b"".join(n.to_bytes(2, "little") for n in n_columns), *[0] * 16, *n_rows, *[0] * 8])


class Tiles(NamedTuple):
    """What a thread does with tiles for products of weights of n_limbs bytes over n_steps times n_bytes columns. limb_words: from
    the low limbs of weights to the high ones; low_sign: "s" or "u", whether low limbs of weights are signed or not."""
    # (words u32 [CONFIG_WORDS], written): the tiles of this thread are for these products, from now on
    begin: Callable
    # (x, high, low, stride, w, j, sums). x: signed bytes; those of the high limbs of 16 rows of activations begin at byte
    # `high`, `stride` apart, those of the low ones at byte `low`. w: uint32 [n_limbs][columns / 4][32], the bytes of four columns
    # each, from word j on; the low limbs, then the high ones. Written: sums int32 [n_limbs + 1][16][32],
    #     sum of high w, sum of low w                                   w one byte, signed
    #     sum of high wh, sum of high wl + low wh, sum of low wl        w of limbs wh, signed, and wl
    multiply: Callable
    end: Callable  # ()


@lru_cache(None)
def tiles(n_limbs: int, n_bytes: int, n_steps: int, limb_words: int = 64 * ROWS, low_sign: str = "u") -> Tiles:
    return Tiles(_beginner(n_bytes), _multiplier(n_limbs, n_bytes, n_steps, limb_words, low_sign), end)


@lru_cache(None)
def emulated(n_limbs: int, n_bytes: int, n_steps: int, limb_words: int = 64 * ROWS, low_sign: str = "u") -> Tiles:
    n_sums, size, sign_of_low = n_limbs + 1, COLUMNS * ROWS, 128 if low_sign == "s" else 0

    @device
    def byte(words, i, k):
        return i32((words[i] >> u32(8 * k)) & u32(255))

    @device
    def multiply(x, high, low, stride, w, j, sums):
        for i in range(n_sums * size):
            sums[i] = 0
        for c in range(COLUMNS):
            for k in range(n_steps * n_bytes):
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
    return Tiles(device(lambda words: None), multiply, device(lambda: None))


def _beginner(n_bytes):
    config = configuration(n_bytes)

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


def _multiplier(n_limbs, n_bytes, n_steps, limb_words, low_sign):
    n_sums, row_bytes = n_limbs + 1, 4 * ROWS

    @intrinsic
    def multiply(typingctx, x, high, low, stride, w, j, sums):
        def codegen(context, builder, signature, args):
            x, high, low, stride, w, j, sums = args
            w_at, step_words = builder.mul(j, I64(4)), n_bytes // 4 * ROWS
            for tile in range(2 * n_sums):
                _emit(builder, "tilezero", I8(tile))
            for step in range(n_steps):
                for x_is_low, start in enumerate((high, low)):
                    _emit(builder, "tileloadd64", I8(X), _byte(builder, x, builder.add(start, I64(step * n_bytes))), stride)
                    for limb in range(n_limbs):
                        w_is_low = n_limbs == 2 and limb == 0
                        to, signs = x_is_low + w_is_low, "s" + (low_sign if w_is_low else "s")
                        for half in range(2):
                            word = limb * limb_words + step * step_words + half * LANES
                            at = builder.add(w_at, I64(4 * word))
                            _emit(builder, "tileloadd64", I8(W), _byte(builder, w, at), I64(row_bytes))
                            _emit(builder, f"tdpb{signs}d", I8(2 * to + half), I8(X), I8(W))
            for tile in range(2 * n_sums):
                word = tile // 2 * COLUMNS * ROWS + tile % 2 * LANES
                _emit(builder, "tilestored64", I8(tile), _byte(builder, sums, I64(4 * word)), I64(row_bytes))
            return context.get_dummy_value()
        return types.none(x, types.int64, types.int64, types.int64, w, types.int64, sums), codegen
    return multiply
