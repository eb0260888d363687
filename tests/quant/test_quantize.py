"""quantize: the same bytes as gguf's, edges included."""
from zlib import crc32

import numpy as np
import pytest
from gguf import quants
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from ggml_py.quant import quantize as module
from ggml_py.quant.dequantize import dequantize
from ggml_py.quant.formats import FORMATS
from ggml_py.quant.quantize import quantize

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F32", "F16", "BF16"]


def normal(rng, shape):
    return rng.standard_normal(shape).astype(np.float32)


def finite_patterns(rng, shape):
    x = rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
    return np.where(np.isfinite(x), x, np.float32(0))


INPUTS = {
    "normal": normal,
    "zeros": lambda rng, shape: np.zeros(shape, np.float32),
    "negative_zeros": lambda rng, shape: np.full(shape, -0.0, np.float32),
    "constant": lambda rng, shape: np.full(shape, -3.25, np.float32),
    # ties of rounding, and of the largest magnitude
    "halves": lambda rng, shape: (rng.integers(-16, 17, shape) / 2).astype(np.float32),
    # d = 1
    "ties_of_q8": lambda rng,
    shape: np.where(np.arange(shape[-1]) % 32, rng.integers(-126, 127, shape) + 0.5, 127).astype(np.float32),
    "one_outlier": lambda rng, shape: np.where(np.arange(shape[-1]) % 32 == 17, np.float32(-1e4), normal(rng, shape)),
    "scales_beyond_f16": lambda rng, shape: normal(rng, shape) * np.float32(1e9),
    "scales_below_f16": lambda rng, shape: normal(rng, shape) * np.float32(1e-9),
    "subnormal": lambda rng, shape: normal(rng, shape) * np.float32(1e-39),
    "smallest": lambda rng, shape: rng.integers(0, 300, shape).astype(np.uint32).view(np.float32),  # 1 / d is infinite
    "patterns": finite_patterns,
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", TYPES)
def test_equals_gguf(name, kind):
    x = INPUTS[kind](np.random.default_rng(crc32(f"{name} {kind}".encode())), (3, 7, 32 * 67))
    ours = quantize(x, name)
    with np.errstate(all="ignore"):
        theirs = quants.quantize(x, FORMATS[name].type_id).view(np.uint8)
    assert ours.dtype == np.uint8 and np.array_equal(ours, theirs)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(TYPES),
       x=arrays(np.float32, (2, 32), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_equals_gguf_on_any_block(name, x):
    with np.errstate(all="ignore"):
        theirs = quants.quantize(x, FORMATS[name].type_id).view(np.uint8)
    assert np.array_equal(quantize(x, name), theirs)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_keep_infinities_and_nans(name):
    x = np.array([np.inf, -np.inf, np.nan, -np.nan, 1], np.float32)
    x[3:4].view(np.uint32)[:] = 0xff800001  # a NaN whose upper bits alone are an infinity
    back = dequantize(quantize(x, name), name, (5,))
    assert back[0] == np.inf and back[1] == -np.inf and np.isnan(back[2:4]).all() and back[4] == 1


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_error_of_a_round_trip(name):
    """|x - y| <= d / 2 for the rounded level (d at the ends that clipping cuts off), and a half-precision error of d and m."""
    x = normal(np.random.default_rng(crc32(name.encode())), (16, 512))
    y = dequantize(quantize(x, name), name, x.shape)
    spread = np.abs(x).reshape(16, 16, 32).max(axis=2) * (2 if name.endswith("_1") else 1)
    step = spread / {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127}[name]
    bound = step * (0.5 if name == "Q8_0" or name.endswith("_1") else 1) + spread * 2.0**-10
    assert (np.abs(x - y).reshape(16, 16, 32) <= bound[..., None]).all()


def test_slabs(monkeypatch):
    x = normal(np.random.default_rng(1), (9, 96))
    whole = quantize(x, "Q5_1")
    monkeypatch.setattr(module, "SLAB_VALUES", 200)
    assert np.array_equal(quantize(x, "Q5_1"), whole)


def test_empty():
    assert quantize(np.empty((0, 64), np.float32), "Q8_0").shape == (0, 68)


def test_errors():
    with pytest.raises(ValueError, match=r"^blk\.0\.ffn_up\.weight: Q4_0 rows must be a multiple of 32 values, got 4001$"):
        quantize(np.zeros((2, 4001), np.float32), "Q4_0", "blk.0.ffn_up.weight")
    with pytest.raises(ValueError,
                       match="^w: cannot quantize to I32; types that can: F32, F16, BF16, Q4_0, .*, Q4_K, .*IQ5_KS$"):
        quantize(np.zeros(256, np.float32), "I32", "w")
    x = np.zeros((2, 64), np.float32)
    x[1, 40] = np.inf
    with pytest.raises(ValueError, match=r"^w: Q8_0 needs finite values, got inf at \[1, 40\]$"):
        quantize(x, "Q8_0", "w")
