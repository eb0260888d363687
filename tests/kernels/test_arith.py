"""kernels/arith and kernels/float16 on the CPU: primitives against exact arithmetic,
functions against float64 within derived bounds."""
import hashlib
import re
from fractions import Fraction
from functools import lru_cache

import numba
import numpy as np
import pytest

from ggml_py.kernels import arith
from ggml_py.kernels.float16 import f16_to_f32, f32_to_f16
from ggml_py.testing import assert_bitwise_equal, digest, ulp_distance
from places import ROOT

f32 = np.float32
ULP = 2.0**-24  # the largest relative error of one rounding
SPECIAL = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 2.0**-126, -2.0**-126, 3.4028235e38, -3.4028235e38],
                   f32)
ALL = np.arange(0, 2**32, 1009, dtype=np.uint32).view(f32)  # four million patterns of every exponent and both signs
FINITE = ALL[np.isfinite(ALL)]


@lru_cache(None)
def over_arrays(function, dtype=f32):
    """The scalar function as a loop over arrays, vectorised or not as LLVM likes."""
    @numba.njit
    def loop1(out, a):
        for i in range(out.shape[0]):
            out[i] = function(a[i])

    @numba.njit
    def loop2(out, a, b):
        for i in range(out.shape[0]):
            out[i] = function(a[i], b[i])

    @numba.njit
    def loop3(out, a, b, c):
        for i in range(out.shape[0]):
            out[i] = function(a[i], b[i], c[i])

    def apply(*operands):
        out = np.empty(operands[0].shape, dtype)
        (loop1, loop2, loop3)[len(operands) - 1](out, *operands)
        return out
    return apply


def nearest(exact: Fraction) -> np.float32:
    """The float32 nearest to a rational number within the normal range, ties to even, by integers alone."""
    if exact == 0:
        return f32(0)
    e = 0
    while abs(exact) >= 2**24:
        exact, e = exact / 2, e + 1
    while abs(exact) < 2**23:
        exact, e = exact * 2, e - 1
    return f32(np.ldexp(round(exact), e))  # round() of a Fraction takes ties to even


def values(n, rng):
    return (rng.standard_normal(n) * np.exp2(rng.integers(-20, 20, n))).astype(f32)


# Primitives

def test_operations_are_ieee_and_nothing_is_contracted():
    rng = np.random.default_rng(1)
    a, b, c = (values(100_000, rng) for _ in range(3))
    with np.errstate(all="ignore"):
        for name, exact in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div", np.divide)):
            x, y = np.concatenate([a, np.repeat(SPECIAL, len(SPECIAL))]), np.concatenate([b, np.tile(SPECIAL, len(SPECIAL))])
            assert_bitwise_equal(over_arrays(getattr(arith, name))(x, y), exact(x, y), name)
        assert_bitwise_equal(over_arrays(arith.sqrt)(ALL), np.sqrt(ALL), "sqrt")
        assert_bitwise_equal(over_arrays(arith.rint)(ALL), np.rint(ALL), "rint")

    @numba.njit
    def mul_add(a, b, c):
        return arith.add(arith.mul(a, b), c)
    assert_bitwise_equal(over_arrays(mul_add)(a, b, c), a * b + c, "add(mul(a, b), c)")
    assert np.count_nonzero(over_arrays(arith.fma)(a, b, c) != a * b + c) > 10_000  # so contraction would have shown


def test_fma_rounds_once():
    rng = np.random.default_rng(2)
    a, b = values(2000, rng), values(2000, rng)
    c = np.where(rng.random(2000) < 0.5, -(a * b), values(2000, rng))  # half of them cancel all but the rounding
    exact = [nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c)]
    assert_bitwise_equal(over_arrays(arith.fma)(a, b, c), np.array(exact), "fma")


def test_integers_become_floats_with_one_rounding():
    rng = np.random.default_rng(3)
    i = (rng.integers(-2**62, 2**62, 3000) >> rng.integers(0, 60, 3000)).astype(np.int64)
    ties = (np.int64(1) << rng.integers(25, 62, 3000)) + rng.integers(-1, 2, 3000)
    high = np.int64(1) << rng.integers(30, 62, 3000)
    sticky = high + (high >> 24) + rng.integers(-1, 2, 3000)  # a tie but for the last bit, which float64 would lose
    i = np.concatenate([i, ties, sticky, [0, 1, -1, 2**24 + 1, -2**24 - 1, 2**62]])
    assert_bitwise_equal(over_arrays(arith.l2f)(i), np.array([nearest(Fraction(int(n))) for n in i]), "l2f")
    j = (i % 2**31).astype(np.int32)
    assert_bitwise_equal(over_arrays(arith.i2f)(j), np.array([nearest(Fraction(int(n))) for n in j]), "i2f")


def test_patterns_and_integral_floats():
    assert np.array_equal(over_arrays(arith.as_i32, np.int32)(SPECIAL), SPECIAL.view(np.int32))
    assert_bitwise_equal(over_arrays(arith.as_f32)(ALL.view(np.int32)), ALL, "as_f32")
    whole = np.arange(-70000, 70000, dtype=f32)
    assert np.array_equal(over_arrays(arith.f2i, np.int32)(whole), whole.astype(np.int32))


WIDER = [("add", (1.0, 2.0)), ("fma", (f32(1), f32(1), 1.0)), ("i2f", (np.int64(1),)), ("l2f", (np.int32(1),)),
         ("as_f32", (1.0,))]


@pytest.mark.parametrize("name, operands", WIDER)
def test_a_wider_type_does_not_compile(name, operands):
    function = getattr(arith, name)

    def call(operands):
        return function(*operands)
    with pytest.raises(numba.TypingError, match=rf"arith\.{name} takes \("):
        numba.njit(call)(operands)


def test_float16():
    halves = np.arange(65536, dtype=np.uint16)
    assert_bitwise_equal(over_arrays(f16_to_f32)(halves), halves.view(np.float16).astype(f32), "f16_to_f32")
    ties = (np.arange(0x38000000, 0x47900000, 0x1000)[:, None] + np.array([-1, 0, 1])).astype(np.uint32).view(f32).ravel()
    with np.errstate(over="ignore"):
        for x in (ALL, ties, -ties):
            assert_bitwise_equal(over_arrays(f32_to_f16, np.uint16)(x).view(np.float16), x.astype(np.float16), "f32_to_f16")


# Functions

def test_the_page_and_the_source_agree_on_constants():
    page = (ROOT / "docs" / "numerics.md").read_text()
    stated = re.findall(r"\| ([A-Z][A-Z0-9_]*) \| (0x[0-9a-f]{8}) ", page)
    assert len(stated) == 26
    for name, pattern in stated:
        assert getattr(arith, name).view(np.uint32) == int(pattern, 16), name


def apply(name, x):
    return over_arrays(getattr(arith, name))(np.asarray(x, f32))


def test_exp():
    """Bound, in ulp of the result with p in [0.70, 1.42]: 0.5 for the last fma; its factor is rounded by 2^-24 and multiplied by
    |r| <= 0.347: 0.18; the factor before, times r^2, 0.05; r is rounded by 2^-26: 0.25; the polynomial errs by 2^-28.2: 0.06.
    Below 1.1."""
    x = FINITE[(FINITE >= arith.EXP_MIN) & (FINITE <= arith.EXP_MAX)]
    x = np.concatenate([x, np.linspace(-87.3, 88.7, 1_000_000).astype(f32), [arith.EXP_MIN, arith.EXP_MAX]])
    assert ulp_distance(apply("exp", x), np.exp(x.astype(np.float64))).max() < 1.1
    below, above = np.nextafter(arith.EXP_MIN, f32(-np.inf)), np.nextafter(arith.EXP_MAX, f32(np.inf))
    for x, expected in ((0, 1), (-0.0, 1), (1e-45, 1), (np.inf, np.inf), (-np.inf, 0), (np.nan, np.nan), (below, 0),
                        (above, np.inf),
                        (-3e38, 0), (3e38, np.inf)):
        assert_bitwise_equal(apply("exp", [x]), f32([expected]), f"exp({x})")


def test_log():
    """Bound: 0.5 for the last fma; add(f, y) is rounded by half an ulp of a number that is no larger than the result or (e = 0)
    is it; y by an eighth of one; the rest is smaller still. Less than 2 in all."""
    x = np.concatenate([FINITE[FINITE > 0], np.linspace(0.5, 2, 1_000_000).astype(f32),
                        np.arange(1, 3000, dtype=np.uint32).view(f32)])
    assert ulp_distance(apply("log", x), np.log(x.astype(np.float64))).max() < 2
    for x, expected in ((0, -np.inf), (-0.0, -np.inf), (1, 0), (np.inf, np.inf), (-np.inf, np.nan), (-1, np.nan),
                        (-1e-45, np.nan),
                        (np.nan, np.nan)):
        assert_bitwise_equal(apply("log", [x]), f32([expected]), f"log({x})")


def test_sigmoid_and_silu():
    """Bound: exp 1.1, add 0.5, div 0.5 ulp; an ulp is up to twice another number's in relative terms: 4.2.
    Where exp(-x) overflows the result is 0: off by less than 2^-127 (times 89)."""
    x = np.concatenate([FINITE, np.linspace(-90, 30, 1_000_000).astype(f32)])
    wide = x.astype(np.float64)
    inner = x >= -arith.EXP_MAX
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-wide))
    for name, exact, rest in (("sigmoid", s, 2.0**-127), ("silu", wide * s, 2.0**-120)):
        found = apply(name, x)
        assert ulp_distance(found[inner], exact[inner]).max() < 4.2, name
        assert np.abs(found[~inner] - exact[~inner]).max() < rest, name
    assert_bitwise_equal(apply("sigmoid", [0, -0.0, np.inf, -np.inf, np.nan]), f32([0.5, 0.5, 1, 0, np.nan]), "sigmoid")
    assert_bitwise_equal(apply("silu", [0, -0.0, np.inf, -np.inf, np.nan, -200]), f32([0, -0.0, np.inf, np.nan, np.nan, -0.0]),
                         "silu")


def test_softplus():
    """Bound: u = 1 + exp(x) is off by 1.1 ulp of exp(x) and half an ulp of u, together less than 3.2 ULP of u, which log turns
    into an absolute error; log itself errs by less than 2 ulp. Beyond 20 the term left out is below 2^-28."""
    x = np.concatenate([FINITE, np.linspace(-30, 30, 1_000_000).astype(f32)])
    exact = np.logaddexp(0, x.astype(np.float64))
    assert (np.abs(apply("softplus", x) - exact) <= 3.2 * ULP + 4 * ULP * np.abs(exact)).all()
    over = np.nextafter(f32(20), f32(21))
    assert_bitwise_equal(apply("softplus", [np.inf, -np.inf, np.nan, over]), f32([np.inf, 0, np.nan, over]), "softplus")


def test_tanh():
    """Bound: below 0.625 the last fma 0.5, the polynomial 0.08 and the rounding of its factors 0.2; above, e < 0.29 is off by 1.1
    ulp (0.55 of the result's), its sum and difference by half an ulp of theirs, the quotient by 0.5, none relatively more than
    twice the result's. Below 4."""
    x = np.concatenate([FINITE, np.linspace(-10, 10, 1_000_000).astype(f32)])
    found = apply("tanh", x)
    assert ulp_distance(found, np.tanh(x.astype(np.float64))).max() < 4
    assert_bitwise_equal(apply("tanh", -x), -found, "tanh(-x) = -tanh(x)")
    assert_bitwise_equal(apply("tanh", [0, -0.0, np.inf, -np.inf, np.nan, 9, -9]), f32([0, -0.0, 1, -1, np.nan, 1, -1]), "tanh")


def test_gelu():
    """Bound: the argument u of tanh is off by 5 roundings of ULP, which tanh's slope turns into 5 * 0.45 ULP (u / cosh(u)^2 <
    0.45); tanh itself errs by 4 ULP (its ulp is at most 2^-24), the addition by 1 ULP of at most 2: 8.25 ULP, times |x| / 2; and
    the last product is rounded: 5.2 ULP of |x|."""
    x = np.concatenate([FINITE[np.abs(FINITE) < 1e18], np.linspace(-10, 10, 1_000_000).astype(f32)])
    wide = x.astype(np.float64)
    scale, cubic = np.float64(arith.GELU_SCALE), np.float64(arith.GELU_CUBIC)
    exact = 0.5 * wide * (1 + np.tanh(scale * wide * (1 + cubic * wide * wide)))
    assert (np.abs(apply("gelu", x) - exact) <= 5.2 * ULP * np.abs(wide) + 2.0**-149).all()
    for x, expected in ((0, 0), (-0.0, -0.0), (np.inf, np.inf), (-np.inf, np.nan), (np.nan, np.nan), (-20, -0.0), (20, 20)):
        assert_bitwise_equal(apply("gelu", [x]), f32([expected]), f"gelu({x})")


def test_relu():
    with np.errstate(invalid="ignore"):
        assert_bitwise_equal(apply("relu", ALL), np.where(ALL <= 0, f32(0), ALL), "relu")
    assert_bitwise_equal(apply("relu", [0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45]),
                         f32([0, 0, np.inf, 0, np.nan, 1e-45, 0]), "relu")


def test_functions_called_from_python():
    assert f32(arith.exp(f32(1))) == f32(np.e)


# ggml_py.testing

def test_assert_bitwise_equal_reports_the_first_difference():
    a = np.zeros((2, 3), f32)
    b = a.copy()
    b[1, 0], b[1, 2] = -0.0, 1
    with pytest.raises(AssertionError,
                       match=r"^op\[n=2\]: 2 of 6 differ, first at \(1, 0\): 0x00000000 != 0x80000000 \(0\.0, -0\.0\)$"):
        assert_bitwise_equal(a, b, "op[n=2]")
    other_nan = np.array([0xffc00001], np.uint32).view(f32)
    assert_bitwise_equal(np.array([np.nan], f32), other_nan, "NaN")
    for wrong, message in ((a.astype(np.float64), "dtype"), (a.ravel(), "shape")):
        with pytest.raises(AssertionError, match=f"op: {message}"):
            assert_bitwise_equal(a, wrong, "op")
    with pytest.raises(AssertionError, match=r"0x0005 != 0x0007 \(5, 7\)"):
        assert_bitwise_equal(np.array([5], np.int16), np.array([7], np.int16), "integers")
    assert_bitwise_equal(f32(2), f32(2), "scalars")


def test_digest():
    a = np.array([[1, 2], [3, np.nan]], f32)
    expected = hashlib.sha256(bytes.fromhex("0000803f 00000040 00004040 0000c07f")).hexdigest()
    assert digest(a) == digest(a.astype(">f4")) == digest(np.asfortranarray(a)) == expected
    a[1, 1] = np.array([0xffc00001], np.uint32).view(f32)[0]
    assert digest(a) == expected
    assert digest(a[:1]) != expected and digest(np.array([0.0], f32)) != digest(np.array([-0.0], f32))


def test_ulp_distance():
    one = np.nextafter(f32(1), f32(2))
    assert ulp_distance(f32([1, one, 0.5]), np.array([1, 1, 0.5 + 2.0**-25])).tolist() == [0, 1, 0.5]
    found, exact = f32([np.inf, np.nan, np.inf, 1, np.nan]), np.array([1e60, np.nan, 1, np.nan, 1])
    assert ulp_distance(found, exact).tolist() == [0, 0, np.inf, np.inf, np.inf]
