"""Divisions and exponentials that CUDA kernels do in straight code, against those of IEEE and of numerics: their functions with
the CPU's operations."""
from types import FunctionType

import numba
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from ggml_py.kernels import arith
from ggml_py.kernels.cuda import fixed_point, quantize
from ggml_py.kernels.cuda.ptx import SIMULATED

i32 = np.int32
# of 2^-100, the smallest x, to the largest; mantissas behave alike in between
EXPONENTS = [27, 28, 90, 126, 127, 128, 200, 252, 253, 254]


def on_the_cpu(device_function):
    function = device_function if SIMULATED else device_function.py_func
    names = {name: getattr(arith, name) for name in ("fma", "mul", "sub", "as_f32", "as_i32")}
    return numba.njit(FunctionType(function.__code__, function.__globals__ | names))


@pytest.mark.parametrize("name, expected",
                         [("over_full", numba.njit(lambda x: arith.div(x, quantize.FULL))),
                          ("full_over", numba.njit(lambda x: arith.div(quantize.FULL, x)))],
                         ids=["over_full", "full_over"])
def test_every_mantissa(name, expected):
    function = on_the_cpu(getattr(quantize, name))

    @numba.njit
    def different(exponent):
        n = 0
        for mantissa in range(1 << 23):
            x = arith.as_f32(i32(exponent << 23 | mantissa))
            n += arith.as_i32(function(x)) != arith.as_i32(expected(x))
        return n
    assert {exponent: different(exponent) for exponent in EXPONENTS} == dict.fromkeys(EXPONENTS, 0)
    assert different(1) > 0  # far below what kernels divide: the comparison can fail


def test_exponentials_of_attention():
    """`exp_down` of all that is not above 0, and of NaN."""
    function = on_the_cpu(fixed_point.exp_down)

    @numba.njit
    def different(first, last):
        n = 0
        for bits in range(first, last):
            x = arith.as_f32(i32(bits))
            n += arith.as_i32(function(x)) != arith.as_i32(arith.exp(x))
        return n
    minus_zero, minus_infinity = -1 << 31, -0x800000
    assert different(minus_zero, minus_infinity + 1) == different(0, 1) == 0
    assert different(0x42b17217, 0x42b17218) > 0  # of the largest whose exp is finite: the comparison can fail

    @numba.njit
    def of_nan():
        x = function(arith.as_f32(i32(0x7fc00000)))
        return x != x
    assert of_nan()
