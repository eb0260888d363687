"""`ggml_py.testing`, which other projects may use too: comparisons by bits and in ULPs."""
import numpy as np
import pytest

from ggml_py.testing import assert_bitwise_equal, difference, digest, ulp_distance

NAN = np.array([0x7fc00000, 0xffc00001, 0x7f800001], np.uint32).view(np.float32)


def test_nothing_differs():
    assert difference(NAN, NAN[::-1].copy()) is None and difference(np.arange(3), np.arange(3)) is None
    assert_bitwise_equal(NAN, np.full(3, np.nan, np.float32), "nan")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_differs(dtype):
    a = np.linspace(-2, 2, 20, dtype=dtype).reshape(4, 5)
    b = a.copy()
    b[1, 2] = np.nextafter(b[1, 2], dtype(9))
    b[3, 4] = np.nextafter(np.nextafter(b[3, 4], dtype(9)), dtype(9))
    found = difference(a, b)
    assert (found.n_different, found.n, found.first, found.max_ulps) == (2, 20, (1, 2), 2) and found.values == (a[1, 2], b[1, 2])
    assert len(found.patterns[0]) == 2 + 2 * a.itemsize and found.patterns[0] != found.patterns[1]


@pytest.mark.parametrize("a, b, ulps", [
    (0.0, -0.0, 0), (-1e-45, 1e-45, 2), (1.0, -1.0, 2 * 0x3f800000), (1.0, np.nan, np.inf),
    (np.inf, np.finfo(np.float32).max, 1)])
def test_most_ulps(a, b, ulps):
    assert difference(np.array([a], np.float32), np.array([b], np.float32)).max_ulps == ulps


def test_integers_have_no_ulps():
    found = difference(np.array([1, 2], np.int16), np.array([1, -2], np.int16))
    assert found.max_ulps is None and str(found) == "1 of 2 differ, first at (1,): 0x0002 != 0xfffe (2, -2)"


def test_digests():
    assert digest(NAN) == digest(NAN[::-1]) != digest(NAN[:2]) and digest(np.array([0.0])) != digest(np.array([-0.0]))
    little, big = np.arange(6, dtype="<i4").reshape(2, 3).T, np.arange(6, dtype=">i4").reshape(2, 3).T
    assert digest(little) == digest(np.ascontiguousarray(big))


def test_ulp_distance():
    assert ulp_distance(np.float32([1, np.nan, np.inf, 1]), [1 + 2.0**-24, np.nan, 1e39, np.inf]).tolist() == [0.5, 0, 0, np.inf]
