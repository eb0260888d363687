"""kernels/together: kernels in one call do what they do one by one."""
from functools import partial

import numpy as np
import pytest

from ggml_py.kernels import threads
from ggml_py.kernels.compile import jit
from ggml_py.kernels.together import MOST, Together, native, steps, together


@jit(parallel=True)
def put(control, out, value, scale, is_last):
    out[0, 0] = out[0, 0] * scale + value
    if is_last:
        out[1, 0] = control[threads.THREADS]


@jit(parallel=True)
def add_all(control, out, *parts):
    for part in parts:
        for i in range(part.shape[0]):
            out[0, 0] += part[i]


@jit(parallel=True)
def refuse(control, out):
    out[0, 0] += 100
    raise ValueError("no")


def test_order_and_arguments():
    """Numbers of all kinds, a view that is not contiguous, more kernels than a call has."""
    out = np.zeros((2, 6), np.float64)[:, ::3]
    each = [partial(put, out, i, np.float32(0.5), i == MOST + 2) for i in range(MOST + 3)]
    found = together(each)
    assert [type(step) for step in found] == [Together, Together] and [len(step.steps) for step in found] == [MOST, 3]
    for step in found:
        step()
    expected = 0.0
    for i in range(MOST + 3):
        expected = expected * 0.5 + i
    assert out[0, 0] == expected and out[1, 0] == threads.get_num_threads() and not out[:, 1].any()


def test_any_number_of_arguments():
    out = np.zeros((1, 1), np.float64)
    step, = together([partial(add_all, out, np.arange(3.0)), partial(add_all, out, np.ones(2), np.ones(4))])
    step()
    assert out[0, 0] == 9


def test_python_in_between_stays_in_its_place():
    out, seen = np.zeros((2, 2), np.float64), []
    one = np.float32(1)

    class Product:
        kernel = partial(put, out, 3, one, False)
    composed = steps(partial(put, out, 1, one, False), steps(partial(put, out, 2, one, False), lambda: seen.append(out[0, 0])))
    found = together([composed, Product(), partial(np.copyto, out[1], 7.0)])
    assert len(found) == 4 and native(found[1]) is None
    for step in found:
        step()
    assert seen == [3] and out[0, 0] == 6 and (out[1] == 7).all()


def test_arguments_that_words_do_not_hold():
    assert native(partial(put, np.zeros((2, 2), np.complex128), 1, np.float32(1), "x")) is None
    assert native(partial(put, np.zeros((2, 2)), 1, np.float32(1), is_last=True)) is None


def test_what_a_kernel_raises():
    """The kernels behind it do not run, and the next run is a new one."""
    out = np.zeros((2, 2), np.float64)
    one = np.float32(1)
    step, = together([partial(put, out, 1, one, False), partial(refuse, out), partial(put, out, 1000, one, False)])
    for n in (1, 2):
        with pytest.raises(ValueError, match="^no$"):
            step()
        assert out[0, 0] == n * 201  # it says so when it is called alone
