"""e^x in float64: its constants, which `base.exact_math` takes too, and the function of one number, written once over the
`Operations` of a target and compiled for each. The bits are those of `exact_math.exp`."""
from collections.abc import Callable
from math import factorial
from typing import NamedTuple

import numpy as np

# ln 2 = LN2_HI + LN2_LO; LN2_HI ends in 21 zero bits, so n * LN2_HI is exact for |n| < 2^21.
LN2_HI = np.float64(float.fromhex("0x1.62e42fee00000p-1"))
LN2_LO = np.float64(float.fromhex("0x1.a39ef35793c76p-33"))
LOG2_E = np.float64(float.fromhex("0x1.71547652b82fep+0"))
# r^13/13! ... 1; the next term is below 2^-57 of the result
EXP_TERMS = [np.float64(1 / factorial(k)) for k in range(13, -1, -1)]
EXP_MIN, EXP_MAX = np.float64(-760), np.float64(720)  # beyond, the result is 0 or inf all the same


class Operations(NamedTuple):
    """What the function is built of, each rounded to nearest even."""
    add: Callable    # (a, b) -> a + b; likewise sub, mul
    sub: Callable
    mul: Callable
    rint: Callable   # (a) -> the nearest integer, as a float
    d2i: Callable    # (a) -> the int32 of an integer
    power: Callable  # (int32 n) -> 2^n, -1022 <= n <= 1023


def exponential(jit, operations: Operations):
    """(x) -> e^x, x no NaN: n = rint(x * log2 e), r = (x - n * LN2_HI) - n * LN2_LO; p = sum_{k<=13} r^k / k! by Horner's rule;
    p * 2^n, rounded once: by a power first with which it is no subnormal number, then by the rest."""
    add, sub, mul, rint, d2i, power = operations
    t13, t12, t11, t10, t9, t8, t7, t6, t5, t4, t3, t2, t1, t0 = EXP_TERMS

    @jit
    def exp(x):
        x = EXP_MIN if x < EXP_MIN else x
        x = EXP_MAX if x > EXP_MAX else x
        n = rint(mul(x, LOG2_E))
        r = sub(sub(x, mul(n, LN2_HI)), mul(n, LN2_LO))
        p = add(mul(t13, r), t12)
        p = add(mul(p, r), t11)
        p = add(mul(p, r), t10)
        p = add(mul(p, r), t9)
        p = add(mul(p, r), t8)
        p = add(mul(p, r), t7)
        p = add(mul(p, r), t6)
        p = add(mul(p, r), t5)
        p = add(mul(p, r), t4)
        p = add(mul(p, r), t3)
        p = add(mul(p, r), t2)
        p = add(mul(p, r), t1)
        p = add(mul(p, r), t0)
        k = d2i(n)
        first = k >> 1
        return mul(mul(p, power(first)), power(k - first))
    return exp
