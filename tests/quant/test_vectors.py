"""Vectors: every lane has the bits of numpy's float32."""
import numba
import numpy as np
import pytest

from ggml_py.quant.search.lanes import LEAST, reciprocals, within
from ggml_py.quant.search.scales import power_of_two
from ggml_py.quant.search.vectors import WIDTH, at, largest_lane, looked_up, magnitude, put, repeated, where_less

SPECIAL = np.array([0.0, -0.0, 1.0, -1.5, 1e-45, -3e-39, 3.4e38, np.inf, -np.inf, np.nan, 2.0**-60, 1e-20], np.float32)
FIRST = 3  # no multiple of anything: loads need no alignment


def jit(function):
    return numba.njit(error_model="numpy")(function)


OPERATIONS = {
    "add": (jit(lambda a, b: a + b), lambda a, b: a + b),
    "sub": (jit(lambda a, b: a - b), lambda a, b: a - b),
    "mul": (jit(lambda a, b: a * b), lambda a, b: a * b),
    "div": (jit(lambda a, b: a / b), lambda a, b: a / b),
    "neg": (jit(lambda a, b: -a), lambda a, b: -a),
    "not fused": (jit(lambda a, b: a * b + a * b), lambda a, b: a * b + a * b),
    "where_less": (jit(lambda a, b: where_less(a, b, a, b)), lambda a, b: np.where(a < b, a, b)),
    "magnitude": (jit(lambda a, b: magnitude(a)), lambda a, b: abs(a)),
    "reciprocals": (jit(lambda a, b: reciprocals(a)), lambda a, b: np.where(abs(a) > LEAST, np.float32(1) / a, np.float32(0))),
    "within": (jit(lambda a, b: within(a, -magnitude(b), magnitude(b))), lambda a, b: np.clip(a, -abs(b), abs(b))),
}


@jit
def over_all(operation, a, b, out):
    for i in range(FIRST, len(a), WIDTH):
        put(out, i, operation(at(a, i), at(b, i)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    operation, of_numpy = OPERATIONS[name]
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore"):
        a, b = (rng.choice(SPECIAL, FIRST + 64 * WIDTH) * rng.choice(np.float32([1, 0.7, 3]), FIRST + 64 * WIDTH)
                for _ in range(2))
    if name == "within":  # of numbers; numpy gives NaN for limits that are
        a, b = np.nan_to_num(a), np.nan_to_num(b) + np.float32(1)
    out = np.full_like(a, 7)
    over_all(operation, a, b, out)
    with np.errstate(all="ignore"):
        expected = of_numpy(a, b)
    assert (out[:FIRST] == 7).all()
    assert np.array_equal(out[FIRST:], expected[FIRST:], equal_nan=True)
    numbers = ~np.isnan(expected[FIRST:])
    assert np.array_equal(np.signbit(out[FIRST:])[numbers], np.signbit(expected[FIRST:])[numbers])


@jit
def look_up(table, x, out):
    put(out, 0, looked_up(table, at(x, 0)) + repeated(np.float32(0.5)))


def test_lookup_rounds_to_zero():
    table, x, out = (np.random.default_rng(1).random(n, np.float32) for n in (514, WIDTH, WIDTH))
    x *= 513
    x[:2] = 0, 513
    look_up(table, x, out)
    assert np.array_equal(out, table[x.astype(np.int64)] + np.float32(0.5))


@jit
def largest(x):
    return largest_lane(at(x, 0))


@jit
def power(x, first, n):
    return power_of_two(x, first, n)


def test_largest_lane_and_power_of_two():
    x = np.arange(WIDTH, dtype=np.float32) - 100
    assert largest(x) == WIDTH - 101
    for n in 1, WIDTH - 1, WIDTH, 3 * WIDTH + 5:
        for at_ in 0, n // 2, n - 1:
            x = np.full(n + 2, 1e9, np.float32)
            x[1:-1] = 0
            assert power(x, 1, n) == 1
            x[1 + at_] = -3e-39
            assert power(x, 1, n) == 2.0**-127
            x[1 + at_] = 4
            assert power(x, 1, n) == 8
