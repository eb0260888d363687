"""Fixtures of tests of kernels."""
import numba
import pytest


@pytest.fixture(params=[1, 2])
def n_threads(request):
    if request.param > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("needs two CPUs")
    before = numba.get_num_threads()
    numba.set_num_threads(request.param)
    yield request.param
    numba.set_num_threads(before)
