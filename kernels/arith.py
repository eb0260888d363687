"""Scalar float functions (docs/numerics.md, section 2): written once over the `Primitives` of a target, compiled for each.

    functions(jit, primitives) -> Functions       device functions of one float32, compiled by the target's jit
    add, sub, mul, div, sqrt, fma, ...            the CPU's primitives: one LLVM instruction each, without fast-math flags
    exp, log, sigmoid, silu, softplus, tanh, gelu the functions compiled for the CPU
    relu                                          the same; it needs no primitive, so each target compiles it as it is

The primitives of the CPU refuse operands of another type than they name: a float64 that numba's promotions would slip in does not
compile.

Coefficients: minimax on the interval, rounded to float32 one by one from the lowest power up, the rest refitted each time.
"""
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import TypingError, types
from numba.extending import intrinsic

from .compile import jit

f32, i32, u32 = np.float32, np.int32, np.uint32


class Primitives(NamedTuple):
    """What the functions are built of, as device functions of one target. Floats are float32, integers int32."""
    add: Callable      # (a, b) -> a + b, nearest even; likewise sub, mul, div
    sub: Callable
    mul: Callable
    div: Callable
    fma: Callable      # (a, b, c) -> a * b + c, one rounding
    i2f: Callable      # (int32) -> the nearest float32, ties to even
    as_i32: Callable   # (float32) -> its bit pattern
    as_f32: Callable   # (int32) -> the float32 of that bit pattern


class Functions(NamedTuple):
    """float32 -> float32, each as docs/numerics.md section 2 gives it."""
    exp: Callable
    log: Callable
    sigmoid: Callable
    silu: Callable
    softplus: Callable
    tanh: Callable
    gelu: Callable


INFINITY, NAN = f32(np.inf), f32(np.nan)
SIGN = i32(-0x80000000)

LOG2E = f32(1.44269502)              # 0x3fb8aa3b
LN2_HI = f32(0.693145752)            # 0x3f317200: 15 bits, so that n * LN2_HI is exact
LN2_LO = f32(1.42860677e-06)         # 0x35bfbe8e: ln 2 - LN2_HI
ROUND = f32(12582912)                # 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the pattern
ROUND_BITS = i32(0x4b400000)         # its pattern

EXP_MIN = f32(-87.33654)             # 0xc2aeac4f: its exp is above 2^-126
EXP_MAX = f32(88.72283)              # 0x42b17217: the largest whose exp is below 2^128
# exp(r) = 1 + r + E2 r^2 + ... + E6 r^6, |r| <= 0.347: relative error 2^-28.2
E6 = f32(1.38194900e-03)             # 0x3ab52284
E5 = f32(8.36869050e-03)             # 0x3c091cd5
E4 = f32(4.16682810e-02)             # 0x3d2aac5c
E3 = f32(1.66665211e-01)             # 0x3e2aaa49
E2 = f32(4.99999940e-01)             # 0x3efffffe

SQRT_HALF_BITS = i32(0x3f3504f3)     # the pattern of sqrt(1/2)
# log(1 + f) = f - f^2/2 + f^3 (L0 + L1 f + ... + L8 f^8), sqrt(1/2) <= 1 + f < sqrt(2): relative error 2^-30.2
L8 = f32(6.74926937e-02)             # 0x3d8a399c
L7 = f32(-1.16700985e-01)            # 0xbdef00ed
L6 = f32(1.18835494e-01)             # 0x3df36006
L5 = f32(-1.24062337e-01)            # 0xbdfe1465
L4 = f32(1.42203584e-01)             # 0x3e119dd1
L3 = f32(-1.66679889e-01)            # 0xbe2aae22
L2 = f32(2.00020716e-01)             # 0x3e4cd23b
L1 = f32(-2.50000089e-01)            # 0xbe800003
L0 = f32(3.33333135e-01)             # 0x3eaaaaa4

# tanh(a) = a + a^3 (T0 + T1 a^2 + ... + T4 a^8), 0 <= a < 0.625: relative error 2^-27.7
T4 = f32(-5.69229666e-03)            # 0xbbba8672
T3 = f32(2.06281673e-02)             # 0x3ca8fc67
T2 = f32(-5.37365153e-02)            # 0xbd5c1ad2
T1 = f32(1.33314058e-01)             # 0x3e08837b
T0 = f32(-3.33332807e-01)            # 0xbeaaaa99

GELU_SCALE = f32(0.79788456)         # 0x3f4c422a: sqrt(2 / pi)
GELU_CUBIC = f32(0.044715)           # 0x3d372713


def functions(jit, p: Primitives) -> Functions:  # noqa: PLR0915 (seven formulas over the same constants)
    """The functions of one target, compiled by its `jit`. Selections are made after both sides, so that loops vectorise."""
    add, sub, mul, div, fma, i2f, as_i32, as_f32 = p
    zero, one, half, minus_half = f32(0), f32(1), f32(0.5), f32(-0.5)
    minus_ln2_hi, minus_ln2_lo = f32(-LN2_HI), f32(-LN2_LO)
    min_normal, two_23, softplus_max = f32(2.0**-126), f32(2.0**23), f32(20)
    tanh_small, tanh_max, minus_two = f32(0.625), f32(9), f32(-2)

    @jit
    def exp(x):
        t = fma(x, LOG2E, ROUND)
        n = sub(t, ROUND)
        r = fma(n, minus_ln2_hi, x)
        r = fma(n, minus_ln2_lo, r)
        y = fma(E6, r, E5)
        y = fma(y, r, E4)
        y = fma(y, r, E3)
        y = fma(y, r, E2)
        y = fma(y, r, one)
        y = fma(y, r, one)
        k = i32(as_i32(t) - ROUND_BITS)  # n as an integer, -126..128; its halves are exponents of normal numbers
        k0 = i32(k >> i32(1))
        y = mul(y, as_f32(i32((k0 + i32(127)) << i32(23))))
        y = mul(y, as_f32(i32((k - k0 + i32(127)) << i32(23))))
        y = zero if x < EXP_MIN else y
        return INFINITY if x > EXP_MAX else y

    @jit
    def log(x):
        small = x < min_normal
        i = i32(as_i32(mul(x, two_23) if small else x) - SQRT_HALF_BITS)
        k = i32(i >> i32(23))
        f = sub(as_f32(i32((i & i32(0x7fffff)) + SQRT_HALF_BITS)), one)
        e = i2f(i32(k - i32(23)) if small else k)
        y = fma(L8, f, L7)
        y = fma(y, f, L6)
        y = fma(y, f, L5)
        y = fma(y, f, L4)
        y = fma(y, f, L3)
        y = fma(y, f, L2)
        y = fma(y, f, L1)
        y = fma(y, f, L0)
        z = mul(f, f)
        y = mul(z, mul(f, y))
        y = fma(minus_half, z, y)
        y = fma(e, LN2_LO, y)
        y = fma(e, LN2_HI, add(f, y))
        y = y if x < INFINITY else x  # infinity and NaN
        y = NAN if x < zero else y
        return f32(-INFINITY) if x == zero else y

    @jit
    def negative(x):
        return as_f32(i32(as_i32(x) ^ SIGN))

    @jit
    def sigmoid(x):
        return div(one, add(one, exp(negative(x))))

    @jit
    def silu(x):
        return div(x, add(one, exp(negative(x))))

    @jit
    def softplus(x):
        y = log(add(one, exp(x)))
        return x if x > softplus_max else y

    @jit
    def tanh(x):
        sign = i32(as_i32(x) & SIGN)
        a = as_f32(i32(as_i32(x) ^ sign))
        z = mul(a, a)
        y = fma(T4, z, T3)
        y = fma(y, z, T2)
        y = fma(y, z, T1)
        y = fma(y, z, T0)
        y = fma(mul(a, z), y, a)
        e = exp(mul(minus_two, a))
        q = div(sub(one, e), add(one, e))
        y = y if a < tanh_small else q
        y = one if a >= tanh_max else y
        return as_f32(i32(as_i32(y) | sign))

    @jit
    def gelu(x):
        cubic = fma(GELU_CUBIC, mul(x, x), one)
        return mul(mul(half, x), add(one, tanh(mul(GELU_SCALE, mul(x, cubic)))))

    return Functions(exp, log, sigmoid, silu, softplus, tanh, gelu)


# The CPU's primitives

def _instruction(name, operands, result, emit, doc):
    """An intrinsic of exactly these operand types; emit(builder, *values) -> value."""
    def typed(typingctx, *actual):
        if actual != operands:
            raise TypingError(f"arith.{name} takes ({', '.join(map(str, operands))}), got ({', '.join(map(str, actual))})")
        return result(*operands), lambda context, builder, signature, args: emit(builder, *args)

    typed.__name__, typed.__doc__ = name, doc
    names = ("typingctx", *"abc"[:len(operands)])
    typed.__signature__ = Signature([Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in names])  # numba counts operands by it
    return intrinsic(typed)


def _llvm(function):
    return lambda builder, a: builder.call(builder.module.declare_intrinsic(function, [ir.FloatType()]), [a])


_F, _I = types.float32, types.int32
add = _instruction("add", (_F, _F), _F, lambda b, x, y: b.fadd(x, y), "x + y")
sub = _instruction("sub", (_F, _F), _F, lambda b, x, y: b.fsub(x, y), "x - y")
mul = _instruction("mul", (_F, _F), _F, lambda b, x, y: b.fmul(x, y), "x * y")
div = _instruction("div", (_F, _F), _F, lambda b, x, y: b.fdiv(x, y), "x / y")
fma = _instruction("fma", (_F, _F, _F), _F, lambda b, x, y, z: b.fma(x, y, z), "x * y + z with one rounding")
sqrt = _instruction("sqrt", (_F,), _F, _llvm("llvm.sqrt"), "square root, nearest even")
rint = _instruction("rint", (_F,), _F, _llvm("llvm.rint"), "the nearest integer, ties to even, as a float")
i2f = _instruction("i2f", (_I,), _F, lambda b, i: b.sitofp(i, ir.FloatType()), "the float nearest to an int32, ties to even")
l2f = _instruction("l2f", (types.int64,), _F, lambda b, i: b.sitofp(i, ir.FloatType()),
                   "the float nearest to an int64, ties to even")
f2i = _instruction("f2i", (_F,), _I, lambda b, x: b.fptosi(x, ir.IntType(32)), "the int32 of an integral float within its range")
as_i32 = _instruction("as_i32", (_F,), _I, lambda b, x: b.bitcast(x, ir.IntType(32)), "the bit pattern of a float")
as_f32 = _instruction("as_f32", (_I,), _F, lambda b, i: b.bitcast(i, ir.FloatType()), "the float of a bit pattern")


CPU = Primitives(add, sub, mul, div, fma, i2f, as_i32, as_f32)
exp, log, sigmoid, silu, softplus, tanh, gelu = functions(jit(key="cpu"), CPU)


@jit
def relu(x):
    """x, or +0 where x <= 0: +0 of both zeros, NaN of NaN."""
    return f32(0) if x <= f32(0) else x
