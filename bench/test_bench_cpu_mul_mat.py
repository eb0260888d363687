"""kernels/cpu/mul_mat on the shapes of SmolLM2-135M: generation (n = 1) and prompts. `extra_info` has GMAC/s and GB/s of weights
(1 GB = 1e9 bytes). The first row tile and eight columns of each result are compared with kernels/reference, bit for bit."""
import checkout  # noqa: F401
import numpy as np
import pytest

from ggml_py.kernels.cpu.mul_mat import mul_mat_arrays
from ggml_py.kernels.reference.mul_mat import mul_mat_arrays as reference_arrays
from ggml_py.quant import tile
from ggml_py.quant.activation import quantize_activations
from ggml_py.quant.formats import CHUNK, format_of
from ggml_py.testing import assert_bitwise_equal
from weights import random_tiles

NAMES = ["Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16", "F32"]
# (m, k): q and o, k and v, up and gate, down; formats of 256 columns pad 576 to 768
SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536)]


@pytest.mark.parametrize("n", [1, 512])
@pytest.mark.parametrize("m, k", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_bench_mul_mat(benchmark, name, m, k, n):
    fmt, rng = format_of(name), np.random.default_rng(0)
    words, x, out = (random_tiles(name, m, k, rng).view(np.uint32), rng.standard_normal((n, k)).astype(np.float32),
                     np.empty((n, m), np.float32))
    operands = quantize_activations(x) if fmt.is_quantized else (x,)
    kernel = mul_mat_arrays(name)
    kernel(words, *operands, out)
    expected = np.empty((min(n, 8), tile.ROWS), np.float32)
    reference_arrays(name)(words[:-(-k // CHUNK) * tile.tile_bytes(fmt) // 4], *(a[:8] for a in operands), expected)
    assert np.isfinite(expected).all()
    assert_bitwise_equal(out[:8, :tile.ROWS].copy(), expected, f"mul_mat[{name}, m={m}, k={k}, n={n}]")
    benchmark(kernel, words, *operands, out)
    if benchmark.stats:  # none with --benchmark-disable
        benchmark.extra_info.update(GMAC_s=m * k * n / benchmark.stats["min"] / 1e9,
                                    weights_GB_s=words.nbytes / benchmark.stats["min"] / 1e9)
