"""exact_math against 60-digit decimals and the definitions."""
import math
import subprocess
import sys
from decimal import Decimal, localcontext

import numpy as np
import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

from ggml_py.base.exact_math import exp, log, tree_sum
from places import environment

RNG = np.random.default_rng(1)


def ulps(found, exact: Decimal) -> float:
    return float(abs(Decimal(float(found)) - exact) / Decimal(math.ulp(float(found))))


@pytest.mark.parametrize("low, high", [(-708, 709), (-25, 0), (-1, 1), (-1e-5, 1e-5)])
def test_exp_is_within_two_ulp(low, high):
    x = RNG.uniform(low, high, 250)
    with localcontext(prec=60):
        assert max(ulps(y, Decimal(v).exp()) for v, y in zip(x.tolist(), exp(x))) < 2


@pytest.mark.parametrize("low, high", [(1e-300, 1e300), (0.5, 2), (1 - 1e-6, 1 + 1e-6), (1, 200_000), (5e-324, 1e-308)])
def test_log_is_within_two_ulp(low, high):
    x = RNG.uniform(low, high, 200) if high < 1e100 else 10.0 ** RNG.uniform(-300, 300, 200)
    with localcontext(prec=60):
        assert max(ulps(y, Decimal(v).ln()) for v, y in zip(x.tolist(), log(x))) < 2


def test_exp_and_log_at_the_edges():
    inf, nan = math.inf, math.nan
    np.testing.assert_array_equal(exp(np.array([0.0, inf, -inf, nan, 709.79, -744.4, -745.2])), [1, inf, 0, nan, inf, 5e-324, 0])
    assert exp(np.array(709.78)) < inf
    np.testing.assert_array_equal(log(np.array([1.0, 0.0, -0.0, -1.0, inf, nan])), [0, -inf, -inf, nan, inf, nan])


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 1000])
def test_tree_sum_follows_its_definition(n):
    x = RNG.standard_normal((3, n)) * 10.0 ** RNG.integers(-8, 8, (3, n))

    def halve(v):
        m = (len(v) + 1) // 2
        return v[0] if len(v) == 1 else halve([v[i] + v[m + i] if m + i < len(v) else v[i] for i in range(m)])

    before = x.copy()
    assert tree_sum(x).tolist() == [halve(row) for row in x.tolist()]
    assert (x == before).all()


def test_the_cpu_changes_no_bit():
    """The same digest with every vector extension of numpy switched off, as far as this CPU has any."""
    program = ("import hashlib, numpy as np; from ggml_py.base.exact_math import exp, log, tree_sum; x = "
               "np.random.Philox(key=1).random_raw(9999) / 2.0 ** 61 - 5; print(hashlib.sha256(exp(x).tobytes() + log(x + "
               "5).tobytes() + tree_sum(x).tobytes()).hexdigest())")
    plain = {"NPY_DISABLE_CPU_FEATURES": " ".join(f for f in __cpu_dispatch__ if __cpu_features__.get(f))}
    digests = [subprocess.run([sys.executable, "-c", program], env=environment(**more),
                              capture_output=True, text=True, check=True).stdout
               for more in ({}, plain)]
    assert digests[0] == digests[1] and len(digests[0]) == 65
