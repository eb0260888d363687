"""kernels/cpu but for the matrix products, on the shapes of SmolLM2-135M. `extra_info` has GB/s: operands and result, once (1 GB
= 1e9 bytes). The first result of each is compared with kernels/reference, bit for bit."""
import checkout  # noqa: F401
import numpy as np
import pytest
from op_runs import define, values
from random_weights import random_weight

from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.storage import CACHE_TYPES, as_bytes, n_bytes
from ggml_py.check.evaluate import Value, arrays_on_host, make_node
from ggml_py.quant.formats import format_of
from ggml_py.testing import assert_bitwise_equal
from weights import random_tiles

N_HEAD, N_HEAD_KV, HEAD = 9, 3, 64


def floats(*shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def run(benchmark, name, op, *operands, n_read=None, **params):
    """operands, params: as of `op_runs`. n_read: bytes of the operands, where not all of them are read."""
    backend, operands = CPUBackend(), values(op, operands)
    node, leaves = make_node(backend, op, operands, params)
    for value, leaf in leaves.items():
        leaf.buffer = backend.upload(as_bytes(value.arrays, value.dtype, value.shape))
    for result in node.results:
        result.buffer = backend.empty(n_bytes(result))
    step = backend.bind(node)
    step()
    expected = define(op, *operands, **params)
    for result, arrays in zip(node.results, expected, strict=True):
        for found, right in zip(arrays_on_host(backend, result), arrays, strict=True):
            assert_bitwise_equal(found, right, name)
    benchmark(step)
    if benchmark.stats:  # none with --benchmark-disable
        n_read = n_read or sum(array.nbytes for value in operands for array in value.arrays)
        n_written = sum(array.nbytes for arrays in expected for array in arrays)
        benchmark.extra_info.update(GB_s=(n_read + n_written) / benchmark.stats["min"] / 1e9)


@pytest.mark.parametrize("n", [1, 128])
def test_bench_rms_norm(benchmark, n):
    run(benchmark, f"rms_norm[n={n}]", "rms_norm", floats(n, 576), floats(576), eps=1e-5)


@pytest.mark.parametrize("n", [1, 128])
def test_bench_layer_norm(benchmark, n):
    run(benchmark, f"layer_norm[n={n}]", "layer_norm", floats(n, 4096), floats(4096), floats(4096), eps=1e-5)


@pytest.mark.parametrize("k", [576, 1536])
@pytest.mark.parametrize("n", [1, 128])
def test_bench_quantize(benchmark, n, k):
    run(benchmark, f"quantize[n={n}, k={k}]", "quantize", floats(n, k))


@pytest.mark.parametrize("type_", ["Q4_1", "Q8_0", "Q6_K", "F16"])
def test_bench_get_rows(benchmark, type_):
    n, m, k = 128, 1024, 768
    rng = np.random.default_rng(0)
    w = Value("w", type_, (m, k), (random_tiles(type_, m, k, rng).view(np.uint32),))
    ids = rng.integers(0, m, n).astype(np.int32)
    run(benchmark, f"get_rows[{type_}, m={m}, k={k}, n={n}]", "get_rows", w, ids,
        n_read=n * format_of(type_).row_bytes(k) + ids.nbytes)


@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("type_", ["f16", "q8_0", "f32"])
def test_bench_flash_attn_ext(benchmark, type_, n):
    """The last n of 640 positions of one sequence look back."""
    n_keys, k, fmt, rng = 640, N_HEAD_KV * HEAD, format_of(type_.upper()), np.random.default_rng(0)
    caches = [Value(name, type_, (n_keys, k), (random_weight(fmt, n_keys, k, rng).view(CACHE_TYPES[type_][2]),)) for name in "kv"]
    seq, pos, present = np.zeros(n, np.int32), np.arange(n_keys - n, n_keys, dtype=np.int32), np.ones((1, n_keys), np.uint8)
    run(benchmark, f"flash_attn_ext[{type_}, keys={n_keys}, n={n}]", "flash_attn_ext", floats(n, N_HEAD * HEAD), *caches,
        seq, pos, present, n_head=N_HEAD, n_head_kv=N_HEAD_KV, scale=HEAD**-0.5)
