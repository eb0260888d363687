"""Device functions of the CPU are parts of those that call them: no machine code of their own, and what they do is as it was; of
those that are alike one is compiled."""
import gc

import numpy as np
import pytest
from numba import njit, types

from ggml_py.quant.alike import first_alike
from ggml_py.quant.device_functions import _Part, device, inlined


@device
def twice(x):
    return x + x


@device
def four_times(x):
    return twice(twice(x))


@device
def checked(values, i):
    if i < 0:
        raise IndexError("i is below 0")
    return four_times(values[i])


@njit
def total(values, first):
    found = np.float32(0)
    for i in range(len(values)):
        found += checked(values, first + i)
    return found


def test_parts_within_parts():
    values = np.arange(5, dtype=np.float32)
    assert total(values, 0) == 40
    assert total(values.astype(np.float64), 0) == 40  # another form of them all
    compiled = four_times.overloads[(types.float32,)]
    assert isinstance(compiled.library, _Part) and not isinstance(total.overloads[total.signatures[0]].library, _Part)


def test_an_error_in_a_part():
    with pytest.raises(IndexError, match="i is below 0"):
        total(np.ones(2, np.float32), -1)


def test_nobody_calls_a_part():
    for arguments in ((np.float32(1),), (), (1, 2)):
        with pytest.raises((TypeError, KeyError)):
            twice(*arguments)


INT, SCALE = (types.int64,), 3


def made(n=1, values=(2, 5), default=1, make=device):
    """A new function for each call, of equal text."""
    table = np.array([4, n])

    @make
    def inner(x, m=default):
        return x + n + m + table[1]

    @make
    def outer(x):
        return inner(x) * SCALE + values[0] + sum([y for y in range(x) if y < SCALE])
    return outer


def result_of(function):
    @njit
    def call(x):
        return function(x)
    return call(2)


def expected(n=1, values=(2, 5), default=1):
    return (2 + n + default + n) * SCALE + values[0] + 1


def test_of_functions_that_are_alike_one_is_compiled():
    """Also where those that they close over were made anew."""
    one, other = made(), made()
    assert result_of(one) == result_of(other) == expected()
    assert one.overloads[INT] is other.overloads[INT] and first_alike(other.py_func) is first_alike(one.py_func)


def test_code_stays_when_one_of_them_goes():
    one, other = made(7), made(7)
    assert result_of(one) == result_of(other) == expected(7)
    del other
    gc.collect()
    assert result_of(one) == expected(7)


@pytest.mark.parametrize("change", [{"n": 2}, {"n": 1.0}, {"n": True}, {"values": (3, 5)}, {"values": (2.0, 5)}, {"default": 2},
                                    {"default": 1.0}])
def test_other_values_make_another_function(change):
    """Those that it closes over, or that a function which it calls does, by value and type; an array's; defaults."""
    one, other = made(), made(**change)
    assert result_of(one) == expected() and result_of(other) == expected(**change)
    assert first_alike(other.py_func) is not first_alike(one.py_func)
    assert one.overloads[INT] is not other.overloads[INT]


def test_another_global_makes_another_function(monkeypatch):
    """Also of one that only a function within names."""
    def made_inside():
        @device
        def outer(x):
            return sum([y * SCALE for y in range(x)])
        return outer
    for make in made, made_inside:
        one, alike = make(), make()
        assert first_alike(one.py_func) is first_alike(alike.py_func)
        before = result_of(one)
        with monkeypatch.context() as changed:
            changed.setitem(globals(), "SCALE", 5)
            other = make()
            assert first_alike(other.py_func) is not first_alike(one.py_func) and result_of(other) != before


def test_what_can_change_is_like_nothing_else():
    def made_with(values):
        @device
        def first():
            return values[0]
        return first
    assert first_alike(made_with([1]).py_func) is not first_alike(made_with([1]).py_func)
    assert first_alike(made_with(np.ones(2)).py_func) is first_alike(made_with(np.ones(2)).py_func)
    large, part = np.ones(10**6 // 8 + 1), np.ones(4)[::2]  # which compiled functions read in place
    arrays = (np.ones(2), np.ones(2, np.float32), np.ones(3), np.zeros(2), -np.zeros(2), np.ones((2, 3)), np.ones((3, 2)),
              np.ones((0, 3)), np.ones((0, 5)), part, part.copy()[::-1], large, large.copy())
    assert len({first_alike(made_with(array).py_func) for array in arrays}) == len(arrays)


def test_numbers_are_alike_by_their_bits():
    def made_with(value):
        @device
        def first():
            return value
        return first
    numbers = 0.0, -0.0, 0, False, np.nan, -np.nan, np.float32(0), *np.array([0x7fc00000, 0x7fc00001], np.uint32).view(np.float32)
    assert len({first_alike(made_with(number).py_func) for number in numbers}) == len(numbers)
    assert first_alike(made_with(float("nan")).py_func) is first_alike(made_with(float("nan")).py_func)


def test_what_is_inlined_is_another_function():
    one, other = made(), made(make=inlined)
    assert result_of(one) == result_of(other)
    assert one.overloads[INT] is not other.overloads[INT]


def test_a_name_may_get_its_value_later():
    """Functions are alike when they are compiled, by what they close over then."""
    def made_before(value):
        n = 1

        @device
        def function(x):
            return x + n
        n = value
        return function
    assert [result_of(made_before(value)) for value in (5, 5, 7)] == [7, 7, 9]


def test_one_form_of_what_is_inlined_for_all_literals():
    @inlined
    def shifted(x, n):
        return x << n

    @device
    def of_device(x, n):
        return x << n

    @njit
    def both(x):
        return shifted(x, 1) + shifted(x, 2) + of_device(x, 1) + of_device(x, 2)
    assert both(1) == 12
    assert len(shifted.overloads) == 1 and len(of_device.overloads) == 2
