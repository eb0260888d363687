"""Activation blocks against the definition in scalar form, and its edges."""
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from ggml_py.quant.activation import LIMIT, quantize_activations, split_limbs, split_sums

NAN = 0x7fc00000


def scalar_chunk(x):
    """(q [256], bits of d) of a chunk, one float32 operation at a time."""
    f32 = np.float32
    amax_bits = max(int(v.view(np.uint32)) & 0x7fffffff for v in x)
    amax = np.uint32(amax_bits).view(f32)
    if amax_bits >= 0x7f800000:
        return [0] * 256, NAN
    if amax < f32(2.0**-100):
        return [0] * 256, 0
    inverse = f32(16256) / amax
    return [int(np.rint(v * inverse)) for v in x], int((amax / f32(16256)).view(np.uint32))


def check(x):
    q, d, sums = quantize_activations(x)
    n, n_cols = x.shape
    n_chunks = -(-n_cols // 256)
    assert (q.dtype, d.dtype, sums.dtype) == (np.int16, np.float32, np.int32)
    assert (q.shape, d.shape, sums.shape) == ((n, n_chunks * 256), (n, n_chunks), (n, n_chunks * 16))
    padded = np.zeros((n, n_chunks * 256), np.float32)
    padded[:, :n_cols] = x
    for row in range(n):
        for chunk in range(n_chunks):
            expected, d_bits = scalar_chunk(padded[row, chunk * 256:(chunk + 1) * 256])
            assert q[row, chunk * 256:(chunk + 1) * 256].tolist() == expected
            assert d[row, chunk:chunk + 1].view(np.uint32)[0] == d_bits
    assert np.array_equal(sums, q.reshape(n, -1, 16).astype(np.int64).sum(axis=2))
    hi, lo = split_limbs(q)
    assert hi.dtype == lo.dtype == np.int8 and hi.shape == lo.shape == q.shape
    assert np.array_equal(128 * hi.astype(int) + lo, q)
    assert (abs(hi.astype(int)) <= 127).all() and (lo >= -64).all() and (lo <= 63).all()


@pytest.mark.parametrize("n_cols", [1, 16, 255, 256, 257, 576, 1536])
@pytest.mark.parametrize("scale", [1, 1e-30, 1e-37, 1e30, 3e38])
def test_against_the_definition(n_cols, scale):
    rng = np.random.default_rng(crc32(f"{n_cols} {scale}".encode()))
    check((np.clip(rng.standard_normal((3, n_cols)), -1, 1) * scale).astype(np.float32))


@settings(max_examples=60, deadline=None)
@given(arrays(np.uint32, (1, 40), elements=st.integers(0, 2**32 - 1)))
def test_any_bit_patterns(bits):
    check(bits.view(np.float32))


@pytest.mark.parametrize("value, d_bits, q", [
    (0.0, 0, 0), (-0.0, 0, 0), (1e-45, 0, 0),
    (np.nextafter(np.float32(2.0**-100), np.float32(0)), 0, 0),  # the last that counts as zero
    (2.0**-100, np.float32(2.0**-100 / 16256).view(np.uint32), 16256), (-1.0, np.float32(1 / 16256).view(np.uint32), -16256),
    (np.finfo(np.float32).max, (np.finfo(np.float32).max / np.float32(16256)).view(np.uint32), 16256),
    (np.inf, NAN, 0), (-np.inf, NAN, 0), (np.nan, NAN, 0)])
def test_edges(value, d_bits, q):
    """The largest magnitude decides; the other chunk of the row is not touched by it."""
    x = np.zeros((1, 512), np.float32)
    x[0, 5], x[0, 256] = value, 2
    got_q, d, _ = quantize_activations(x)
    assert d.view(np.uint32)[0].tolist() == [int(d_bits), int(np.float32(2 / 16256).view(np.uint32))]
    assert got_q[0, 5] == q and got_q[0, 256] == 16256 and np.count_nonzero(got_q) == (q != 0) + 1


def test_nan_wins_over_infinity_whatever_its_sign_and_payload():
    x = np.array([[np.inf, 1.0, 0.0]], np.float32)
    x[0, 2:].view(np.uint32)[:] = 0xff800001
    q, d, sums = quantize_activations(x)
    assert d.view(np.uint32)[0, 0] == NAN and not q.any() and not sums.any()


def test_limbs_of_every_level():
    q = np.arange(-16256, 16257).astype(np.int16)
    hi, lo = split_limbs(q)
    assert np.array_equal(128 * hi.astype(int) + lo, q)
    assert (hi.min(), hi.max(), lo.min(), lo.max()) == (-127, 127, -64, 63)


def test_halves_round_to_even():
    x = np.zeros((1, 256), np.float32)
    x[0, :5] = 16256, 0.5, 1.5, 2.5, -0.5
    assert quantize_activations(x)[0][0, :5].tolist() == [16256, 0, 2, 2, 0]


def test_no_rows():
    q, d, sums = quantize_activations(np.empty((0, 300), np.float32))
    assert q.shape == (0, 512) and d.shape == (0, 2) and sums.shape == (0, 32)


@pytest.mark.parametrize("x", [np.zeros(256, np.float32), np.zeros((1, 256))], ids=["one_dimension", "float64"])
def test_input_is_checked(x):
    with pytest.raises(ValueError, match=r"^activations: expected float32 \[n, n_cols\], got "):
        quantize_activations(x)


def test_limbs_of_sums():
    most = 16 * LIMIT
    sums = np.array([0, 1, -1, 3, 4, -4, 511, 512, -512, -513, 1023, 1024, most, -most, most - 511, 513 - most], np.int32)
    limbs = split_sums(np.stack([sums, sums[::-1]]))
    assert limbs.dtype == np.int8 and limbs.shape == (2, 2, 4, 2, 4)
    c, b = limbs.astype(int).swapaxes(-3, -2).reshape(2, 2, 2, 16).swapaxes(0, 2)  # [c or b][u or r][row][16]
    assert (c >= 0).all() and (c <= 3).all()
    u, r = 4 * b + c
    assert np.array_equal(1024 * u + r, [sums, sums[::-1]]) and (abs(r) <= 512).all()
