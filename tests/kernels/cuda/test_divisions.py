"""Divisions that CUDA kernels do in straight code, against the one of IEEE: their functions with the CPU's operations."""
from types import FunctionType

import numba
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from ggml_py.kernels import arith
from ggml_py.kernels.cuda import quantize
from ggml_py.kernels.cuda.ptx import SIMULATED

i32 = np.int32
# of 2^-100, the smallest x, to the largest; mantissas behave alike in between
EXPONENTS = [27, 28, 90, 126, 127, 128, 200, 252, 253, 254]


def on_the_cpu(device_function):
    function = device_function if SIMULATED else device_function.py_func
    names = {name: getattr(arith, name) for name in ("fma", "mul", "as_f32", "as_i32")}
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
