"""Fixtures of tests of kernels."""
import pytest

from ggml_py.kernels import threads


@pytest.fixture(params=[1, 2])
def n_threads(request):
    if request.param > threads.MOST:
        pytest.skip("needs two CPUs")
    before = threads.get_num_threads()
    threads.set_num_threads(request.param)
    yield request.param
    threads.set_num_threads(before)
