"""Encoders: errors beside those of llama.cpp and ik_llama.cpp, rows at the edges, the same bytes however rows are computed."""
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from encoder_samples import QUANTIZED, digests, random_importance, random_rows
from ggml_py.quant import quantize as module
from ggml_py.quant.dequantize import dequantize
from ggml_py.quant.encode import ENCODERS, Rounded
from ggml_py.quant.formats import FORMATS
from ggml_py.quant.quantize import LEAST_IMPORTANCE, quantize
from places import REFERENCE
from turned_down import turned_down


def rms(x, y, importance=None):
    weights = np.ones(x.shape[-1]) if importance is None else importance.astype(float)
    return np.sqrt((weights * (x.astype(float) - y) ** 2).mean())


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


@pytest.mark.parametrize("name", [name for name in QUANTIZED if FORMATS[name].own_id is None and name != "Q1_0"])
def test_error_beside_llama_cpp(name):
    """At most 1.01 times that of its quantizer's bytes, with and without an importance matrix. It ignores one for some types, and
    asks for one for others; it writes no Q1_0."""
    with vectors("mainline.npz") as known:
        x = known["source"]
        cases = [(theirs, importance) for theirs, importance in ((name, None), (f"{name}.imatrix", known["imatrix"]))
                 if theirs in known]
        assert cases
        for theirs, importance in cases:
            reference = dequantize(known[theirs], name, x.shape)
            found = dequantize(quantize(x, name, imatrix=importance), name, x.shape)
            assert rms(x, found, importance) <= 1.01 * rms(x, reference, importance), theirs


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
    importance = random_importance(name)
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


# The same bytes

@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_by_threads_and_in_slabs(name, monkeypatch):
    x, importance = random_rows(name, 5), random_importance(name)
    plain, weighted = quantize(x, name), quantize(x, name, imatrix=importance)
    with ThreadPoolExecutor(2) as pool:
        assert np.array_equal(np.concatenate(list(pool.map(lambda row: quantize(row[None], name), x))), plain)
    monkeypatch.setattr(module, "SLAB_VALUES", 2 * 512)
    assert np.array_equal(quantize(x, name, imatrix=importance), weighted)


def test_vector_instructions_turned_down():
    script = "import json, encoder_samples; print(json.dumps(encoder_samples.digests()))"
    found = subprocess.run([sys.executable, "-c", script], env=turned_down(), capture_output=True, text=True, check=True).stdout
    assert json.loads(found) == digests()


@pytest.mark.parametrize("name", ["Q5_0", "Q4_K", "IQ3_S"])
def test_importance_of_each_matrix(name):
    x = random_rows(name, 6).reshape(2, 3, 512)
    importance = np.random.default_rng(3).random((2, 512), np.float32)
    both = quantize(x, name, imatrix=importance)
    assert np.array_equal(both, np.stack([quantize(x[i], name, imatrix=importance[i]) for i in range(2)]))
    assert np.array_equal(quantize(x, name, imatrix=importance[0])[0], both[0])
    assert np.array_equal(quantize(x[0], name, imatrix=1000 * importance[0]), both[0])


def test_errors_of_importance():
    x = np.zeros((2, 3, 64), np.float32)
    for shape in (63,), (3, 64), (2, 3, 64), (64, 1):
        with pytest.raises(ValueError, match=r"^w: the importance matrix of values \(2, 3, 64\) must be \(64,\) or \(2, 64\), "):
            quantize(x, "Q4_0", "w", np.ones(shape, np.float32))
    for bad in -1, np.nan, np.inf:
        with pytest.raises(ValueError, match=f"^w: importances must be finite and not negative, got {float(bad)}$"):
            quantize(x, "Q4_0", "w", np.array([bad] + 63 * [1], np.float32))


@pytest.mark.parametrize("name", ["Q4_K", "IQ2_XXS", "IQ4_KS"])
def test_errors_of_values(name):
    with pytest.raises(ValueError, match=rf"^w: {name} rows must be a multiple of 256 values, got 128$"):
        quantize(np.zeros((2, 128), np.float32), name, "w")
    x = np.zeros((2, 256), np.float32)
    x[1, 3] = np.nan
    with pytest.raises(ValueError, match=rf"^w: {name} needs finite values, got nan at \[1, 3\]$"):
        quantize(x, name, "w")
