"""Device functions of the CPU are parts of those that call them: no machine code of their own, and what they do is as it was."""
import numpy as np
import pytest
from numba import types

from ggml_py.kernels.compile import jit
from ggml_py.kernels.device_functions import _Part, device


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


@jit
def total(values, first):
    found = np.float32(0)
    for i in range(len(values)):
        found += checked(values, first + i)
    return found


def test_parts_within_parts():
    values = np.arange(5, dtype=np.float32)
    assert total(values, 0) == 40
    assert total(values.astype(np.float64), 0) == 40  # another form of them all
    four_times.compile((types.float32,))  # it was not, where `total` came from the disk cache
    compiled = four_times.overloads[(types.float32,)]
    assert isinstance(compiled.library, _Part) and not isinstance(total.overloads[total.signatures[0]].library, _Part)


def test_an_error_in_a_part():
    with pytest.raises(IndexError, match="i is below 0"):
        total(np.ones(2, np.float32), -1)


def test_nobody_calls_a_part():
    for arguments in ((np.float32(1),), (), (1, 2)):
        with pytest.raises((TypeError, KeyError)):
            twice(*arguments)
