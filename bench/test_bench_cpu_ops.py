"""kernels/cpu but for the matrix products, on the shapes of SmolLM2-135M. `extra_info` has GB/s: operands and result, once (1 GB = 1e9 bytes).
The first result of each is compared with kernels/reference, bit for bit."""
import checkout  # noqa: F401
import numpy as np
import pytest

from ggml_py.kernels.cpu import flash_attn_ext, get_rows, quantize, rms_norm
from ggml_py.kernels.reference import flash_attn_ext as reference_flash_attn_ext
from ggml_py.kernels.reference import get_rows as reference_get_rows
from ggml_py.kernels.reference import quantize as reference_quantize
from ggml_py.kernels.reference import rms_norm as reference_rms_norm
from ggml_py.quant.formats import CHUNK, format_of
from ggml_py.testing import assert_bitwise_equal
from random_weights import random_weight
from weights import random_tiles

N_HEAD, N_HEAD_KV, HEAD = 9, 3, 64


def floats(*shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def run(benchmark, name, kernel, reference, inputs, outs, n_read=None):
    """n_read: bytes of the inputs, where not all of them are read."""
    expected = [np.full_like(out, 1) for out in outs]
    reference(*inputs, *expected)
    kernel(*inputs, *outs)
    for found, right in zip(outs, expected):
        assert_bitwise_equal(found, right, name)
    benchmark(kernel, *inputs, *outs)
    if benchmark.stats:  # none with --benchmark-disable
        n_bytes = (sum(np.asarray(a).nbytes for a in inputs) if n_read is None else n_read) + sum(out.nbytes for out in outs)
        benchmark.extra_info.update(GB_s=n_bytes / benchmark.stats["min"] / 1e9)


@pytest.mark.parametrize("n", [1, 128])
def test_bench_rms_norm(benchmark, n):
    run(benchmark, f"rms_norm[n={n}]", rms_norm.rms_norm, reference_rms_norm.rms_norm, (floats(n, 576), floats(576), np.float32(1e-5)),
        [np.empty((n, 576), np.float32)])


@pytest.mark.parametrize("k", [576, 1536])
@pytest.mark.parametrize("n", [1, 128])
def test_bench_quantize(benchmark, n, k):
    n_chunks = -(-k // CHUNK)
    outs = [np.empty((n, n_chunks * CHUNK), np.int16), np.empty((n, n_chunks), np.float32), np.empty((n, n_chunks * 16), np.int32)]
    run(benchmark, f"quantize[n={n}, k={k}]", quantize.quantize, reference_quantize.quantize, (floats(n, k),), outs)


@pytest.mark.parametrize("type_", ["Q4_1", "Q8_0", "Q6_K", "F16"])
def test_bench_get_rows(benchmark, type_):
    n, m, k = 128, 1024, 768
    rng = np.random.default_rng(0)
    words, ids = random_tiles(type_, m, k, rng).view(np.uint32), rng.integers(0, m, n).astype(np.int32)
    run(benchmark, f"get_rows[{type_}, m={m}, k={k}, n={n}]", get_rows.get_rows(type_), reference_get_rows.get_rows(type_), (words, ids),
        [np.empty((n, k), np.float32)], n * format_of(type_).row_bytes(k) + ids.nbytes)


@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("type_", ["f16", "q8_0", "f32"])
def test_bench_flash_attn_ext(benchmark, type_, n):
    """The last n of 640 positions of one sequence look back."""
    keys, fmt, rng = 640, format_of(type_.upper()), np.random.default_rng(0)
    dtype = {"f32": np.float32, "f16": np.uint16, "q8_0": np.uint8}[type_]
    k, v = (random_weight(fmt, keys, N_HEAD_KV * HEAD, rng).view(dtype) for _ in range(2))
    inputs = (floats(n, N_HEAD, HEAD), k, v, N_HEAD_KV, np.zeros(n, np.int32), np.arange(keys - n, keys, dtype=np.int32), np.ones((1, keys), np.uint8),
              np.float32(HEAD**-0.5))
    run(benchmark, f"flash_attn_ext[{type_}, keys={keys}, n={n}]", flash_attn_ext.flash_attn_ext(type_, type_),
        reference_flash_attn_ext.flash_attn_ext(type_, type_), inputs, [np.empty((n, N_HEAD, HEAD), np.float32)])
