"""Encoders: errors beside those of llama.cpp and ik_llama.cpp, rows at the edges, the same bytes however rows are computed."""
from zlib import crc32

import numpy as np
import pytest

from ggml_py.quant.dequantize import dequantize
from ggml_py.quant.encode import ENCODERS, Rounded
from ggml_py.quant.formats import FORMATS
from ggml_py.quant.quantize import LEAST_IMPORTANCE, quantize
from places import REFERENCE

QUANTIZED = [name for name in ENCODERS if FORMATS[name].is_quantized]


def rms(x, y, importance=None):
    weights = np.ones(x.shape[-1]) if importance is None else importance.astype(float)
    return np.sqrt((weights * (x.astype(float) - y) ** 2).mean())


def random_rows(name, n_rows=3, n_cols=512):
    return np.random.default_rng(crc32(name.encode())).standard_normal((n_rows, n_cols)).astype(np.float32)


def vectors(name):
    """A file of reference vectors, by array."""
    path = REFERENCE / "quants" / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return np.load(path)


# Errors

def test_every_type_of_llama_cpp_has_an_encoder():
    with vectors("mainline.npz") as known:
        assert {name.removesuffix(".imatrix") for name in known.files} - {"source", "imatrix"} <= set(QUANTIZED)


@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "imatrix"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_error_beside_llama_cpp(name, weighted):
    """At most 1.01 times that of its quantizer's bytes. It has none with an importance matrix where it ignores it, and none
    without where it asks for one."""
    with vectors("mainline.npz") as known:
        x, importance, theirs = known["source"], known["imatrix"] if weighted else None, f"{name}.imatrix" if weighted else name
        if theirs not in known:
            pytest.skip(f"no {theirs}")
        reference = dequantize(known[theirs], name, x.shape)
    found = dequantize(quantize(x, name, imatrix=importance), name, x.shape)
    assert rms(x, found, importance) <= 1.01 * rms(x, reference, importance)


@pytest.mark.parametrize("name", [name for name in QUANTIZED if FORMATS[name].own_id is not None])
def test_error_beside_ik_llama_cpp(name):
    with vectors("ik.npz") as known:
        x = known[f"{name}.source"]
        reference = dequantize(known[f"{name}.bytes"][-len(x):], name, x.shape)
    assert rms(x, dequantize(quantize(x, name), name, x.shape)) <= 1.01 * rms(x, reference)


@pytest.mark.parametrize("name", QUANTIZED)
def test_importance_counts(name):
    """The weighted error is less with the importance matrix than without. Types whose encoder ignores it give the same bytes."""
    x = random_rows(name)
    importance = np.random.default_rng(1).random(512, np.float32) ** 4
    plain, weighted = quantize(x, name), quantize(x, name, imatrix=importance)
    if name == "Q8_0":
        assert np.array_equal(plain, weighted)
    else:
        assert rms(x, dequantize(weighted, name, x.shape), importance) < rms(x, dequantize(plain, name, x.shape), importance)


# Rows at the edges

@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros(name):
    x = np.zeros((2, 512), np.float32)
    for importance in (None, np.ones(512, np.float32), np.zeros(512, np.float32)):
        assert not dequantize(quantize(x, name, imatrix=importance), name, x.shape).any()


def one_outlier(x):
    x[:, 17] = -1e4
    return x


WITHIN_HALF = {
    "one_value": lambda x: np.full_like(x, -3.25),
    "negative": lambda x: -abs(x),
    "one_outlier": one_outlier,
    "one_that_is_not_zero": lambda x: np.where(np.arange(x.shape[1]) == 300, np.float32(2), np.float32(0)),
    "below_half": lambda x: x * np.float32(1e-9),
    "subnormal": lambda x: x * np.float32(1e-39),
    "smallest": lambda x: (abs(x) * 100).astype(np.uint32).view(np.float32),
}
EDGES = WITHIN_HALF | {
    "beyond_half": lambda x: x * np.float32(1e8),
    "huge": lambda x: x * np.float32(1e37),
    "mixed": lambda x: x * np.float32(10) ** np.random.default_rng(2).integers(-37, 37, x.shape).astype(np.float32),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_error_is_never_more_than_that_of_zeros(name):
    """Nor is a value infinite. Bytes that are those of gguf (`rounding`) have infinite scales behind the range of float16."""
    rarely = np.where(np.arange(512) % 40 < 36, 0, 1).astype(np.float32)
    for weights in (None, rarely):
        importance = None if weights is None else np.maximum(weights, LEAST_IMPORTANCE)
        is_rounded = isinstance(encoder := ENCODERS[name], Rounded) and (weights is None or not encoder.weighted)
        for edge, made in (WITHIN_HALF if is_rounded else EDGES).items():
            x = made(random_rows(f"{name} {edge}"))
            found = dequantize(quantize(x, name, imatrix=weights), name, x.shape)
            assert np.isfinite(found).all(), edge
            assert rms(x, found, importance) <= rms(x, 0, importance) * (1 + 1e-6), (edge, weights is None)
