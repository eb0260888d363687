"""PTX's arithmetic in Python: functions of numpy scalars, compiled for the CPU."""
from functools import lru_cache

import numpy as np
from numba import typeof

from ... import arith, float16
from ...compile import jit

f32, f64, i32, u32, i64 = np.float32, np.float64, np.int32, np.uint32, np.int64


@jit
def f2i(x):
    if x != x:
        return i32(0)
    x = arith.rint(x)
    return i32(0x7fffffff) if x >= f32(2.0**31) else i32(-0x80000000) if x < f32(-2.0**31) else arith.f2i(x)


@jit
def dp4a(a, b, c):
    for s in range(0, 32, 8):
        c = c + i32(np.int8(a >> s)) * i32(np.int8(b >> s))
    return i32(c)


@jit
def dot4(a, b, c):
    for s in range(0, 32, 8):
        c = c + i32(a >> u32(s) & u32(255)) * i32(b >> u32(s) & u32(255))
    return i32(c)


@jit
def dot2(a, b, c):
    low, high = i32(np.int8(b & u32(255))), i32(np.int8(b >> u32(8) & u32(255)))
    return u32(i32(c) + i32(a & u32(0xffff)) * low + i32(a >> u32(16)) * high)


@jit
def mad(a, b, c):
    return i32(a * b + c)


@jit
def mad64(a, b, c):
    return i64(a) * i64(b) + c


@jit
def implied(a, b, c):
    return u32((~a | b) & c | a & ~c)


@jit
def prmt(a, b, c):
    both = np.uint64(b) << np.uint64(32) | np.uint64(a)
    result = np.uint64(0)
    for i in range(4):
        s = c >> u32(4 * i)
        byte = both >> np.uint64(8 * (s & u32(7))) & np.uint64(255)
        if s & u32(8):  # the byte's sign, eight times
            byte = np.uint64(255) if byte & np.uint64(128) else np.uint64(0)
        result |= byte << np.uint64(8 * i)
    return u32(result)


@jit
def distances4(a, b):
    result = u32(0)
    for i in range(4):
        x, y = a >> u32(8 * i) & u32(255), b >> u32(8 * i) & u32(255)
        result = u32(result | u32(x - y if x > y else y - x) << u32(8 * i))
    return result


@jit
def rotate(w, s):
    s = u32(s & i32(31))
    return u32(w >> s | u32(np.uint64(w) << np.uint64(32) >> np.uint64(s) & np.uint64(0xffffffff)))


@jit
def shr(w, s):
    return u32(w >> s) if s < u32(32) else u32(0)


@jit
def popc(w):
    n = 0
    for s in range(32):
        n += (w >> s) & 1
    return i32(n)


@jit
def as_u32(x):
    return u32(arith.as_i32(x))


@jit
def f16_high_to_f32(w):
    return float16.f16_to_f32(u32(w >> u32(16)))


@jit
def fmax(a, b):
    if a != a or b != b:
        return b if a != a else a
    return arith.as_f32(i32(arith.as_i32(a) & arith.as_i32(b))) if a == b else a if a > b else b


@jit
def fmax_nan(a, b):
    return a if a != a else b if b != b else fmax(a, b)


@jit
def amax2(a, b):
    b = u32(b & u32(0x7fff7fff))
    return u32(max(a & u32(0xffff), b & u32(0xffff)) | max(a & u32(0xffff0000), b & u32(0xffff0000)))


@jit
def _nearest_half(x):
    """The bits of the float16 nearest to x, a float64 within float32's range. An x between two float32 becomes the odd one, which
    lies on the same side of every point half way between two float16: so it is as if x were rounded once."""
    y = f32(x)
    w = arith.as_i32(y)
    if f64(y) != x and x == x and w & 1 == 0:
        w += 1 if abs(f64(y)) < abs(x) else -1
    return u32(float16.f32_to_f16(arith.as_f32(i32(w))))


@jit
def _low_and_high(w):
    """The two float16 of a word, as float64, in which sums of them and of their products are exact, or so nearly that float16
    is rounded to as if they were."""
    return f64(float16.f16_to_f32(u32(w & u32(0xffff)))), f64(f16_high_to_f32(w))


@jit
def halves(a, b):
    return u32(_nearest_half(a) | _nearest_half(b) << u32(16))


@jit
def add2(a, b):
    (a, a_high), (b, b_high) = _low_and_high(a), _low_and_high(b)
    return halves(a + b, a_high + b_high)


@jit
def fma2(a, b, c):
    (a, a_high), (b, b_high), (c, c_high) = _low_and_high(a), _low_and_high(b), _low_and_high(c)
    return halves(a * b + c, a_high * b_high + c_high)


def afresh(x):
    return x


def d2i(x):
    return i32(np.clip(np.rint(x), -2.0**31, 2.0**31 - 1))


def as_f64(x):
    return np.int64(x).view(f64)


def _called(name, n_operands, module=arith):
    """The function of that name, an intrinsic as a rule, as one that Python calls."""
    function = getattr(module, name)
    # numba compiles functions of Python, not an intrinsic by itself
    call = {1: lambda a: function(a), 2: lambda a, b: function(a, b), 3: lambda a, b, c: function(a, b, c)}  # noqa: PLW0108
    return jit(call[n_operands], key=name)


_MEANING = {
    **{name: _called(name, 2) for name in ("add", "sub", "mul", "div")},
    **{name: _called(name, 1) for name in ("sqrt", "rint", "i2f", "l2f", "as_f32", "as_i32")},
    **{name: getattr(arith, name) for name in arith.Functions._fields},
    **{name: _called(name, 1, float16) for name in ("f16_to_f32", "f32_to_f16")},
    "fma": _called("fma", 3), "as_u32": as_u32, "f16_high_to_f32": f16_high_to_f32,
    "f2i": f2i, "dp4a": dp4a, "dot4": dot4, "dot2": dot2, "mad": mad, "mad64": mad64, "implied": implied, "prmt": prmt,
    "distances4": distances4, "amax2": amax2, "fmax": fmax, "fmax_nan": fmax_nan, "add2": add2, "fma2": fma2, "halves": halves,
    "rotate": rotate, "shr": shr, "popc": popc,
    "add64": np.add, "sub64": np.subtract, "mul64": np.multiply, "div64": np.divide, "rint64": np.rint, "f2d": f64, "d2i": d2i,
    "as_f64": as_f64,
}


@lru_cache(None)
def as_float(dtype):
    def same(x):
        if type(x) is not dtype:
            raise TypeError(f"expected {dtype.__name__}, got {type(x).__name__} {x!r}")
        return x
    return same


@lru_cache(None)
def as_int(dtype):
    modulus, half = 1 << 8 * dtype().itemsize, np.iinfo(dtype).max + 1 if np.iinfo(dtype).min else 0

    def convert(x):
        if type(x) is dtype:
            return x
        if not isinstance(x, (int, np.integer)):
            raise TypeError(f"expected an integer, got {type(x).__name__} {x!r}")
        return dtype((int(x) + half) % modulus - half)
    return convert


# Of registers. Compiled functions return numbers of Python, within their range
_TYPE = {"f": f32, "d": f64, "r": i32, "u": u32, "l": i64}
_OPERAND = {letter: (as_int if issubclass(dtype, np.integer) else as_float)(dtype) for letter, dtype in _TYPE.items()}


def checked(name, result, operands):
    """The instruction `name` as a Python function that takes only operands of the stated registers."""
    n, register = len(operands), np.empty(1, _TYPE[result])  # a number is stored faster than it is made a numpy scalar
    (p, P), (q, Q), (r, R) = ([(_OPERAND[o], _TYPE[o]) for o in operands] + [(None, None)] * 2)[:3]

    def function(*args):
        """Until the first call, which puts what was compiled for these types in its place: that looks at no type again."""
        nonlocal function
        meaning = _MEANING[name]
        function = meaning.compile(tuple(typeof(_TYPE[o]()) for o in operands)) if hasattr(meaning, "compile") else meaning
        return function(*args)

    def one(a):
        register[0] = function(a if type(a) is P else p(a))
        return register[0]

    def two(a, b):
        register[0] = function(a if type(a) is P else p(a), b if type(b) is Q else q(b))
        return register[0]

    def three(a, b, c):
        register[0] = function(a if type(a) is P else p(a), b if type(b) is Q else q(b), c if type(c) is R else r(c))
        return register[0]
    return (one, two, three)[n - 1]
