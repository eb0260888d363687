"""Conversions between float16 (held as uint16) and float32 on the CPU: one F16C instruction each, vectorised by LLVM."""
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def f16_to_f32(typingctx, bits):
    """(bits of a half: an integer, the low 16 bits count) -> float32, exact."""
    if not isinstance(bits, types.Integer):
        return None

    def codegen(context, builder, signature, args):
        word = args[0] if bits.bitwidth == 16 else builder.trunc(args[0], ir.IntType(16))
        return builder.fpext(builder.bitcast(word, ir.HalfType()), ir.FloatType())
    return types.float32(bits), codegen


@intrinsic
def f32_to_f16(typingctx, x):
    """(float32) -> uint16 bits of the nearest half, ties to even, overflow to infinity."""
    if x != types.float32:
        return None

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
    return types.uint16(x), codegen
