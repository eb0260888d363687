"""quantize, mul_mat, get_rows and take_rows on a GPU: the comparisons of the simulator at sizes of real models."""
import numpy as np
import pytest

from cuda_simulator import GPUMachine, no_gpu
from ggml_py.quant.formats import FORMATS
from matmul_comparisons import SPECIAL, activations, check_extremes, check_get_rows, check_mul_mat, check_quantize, check_take_rows, seeded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(no_gpu() is not None, reason=str(no_gpu()))]
WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.planes]


@pytest.fixture(scope="module")
def machine():
    return GPUMachine()


@pytest.mark.parametrize("n, k", [(1, 1), (1, 576), (7, 1536), (512, 4097), (33, 14336)])
def test_quantize(machine, n, k):
    check_quantize(machine, activations(n, k, seeded(f"quantize {n} {k}")), f"quantize[n={n}, k={k}]")


def test_quantize_any_bits(machine):
    """Random bit patterns, NaN and infinities among them, and a chunk around each special value."""
    x = seeded("any bits").integers(0, 1 << 32, (64, 777), dtype=np.uint32).view(np.float32).copy()
    x[:len(SPECIAL)] = 0
    x[np.arange(len(SPECIAL)), 5] = SPECIAL
    check_quantize(machine, x, "quantize[any bits]")


@pytest.mark.parametrize("n", [1, 2, 3, 8, 65])
@pytest.mark.parametrize("name", WEIGHTS)
def test_mul_mat(machine, name, n):
    """577 rows and eleven chunks: a partial tile, two rounds of six warps."""
    check_mul_mat(machine, name, 577, 2816, n)


@pytest.mark.parametrize("fill, scales", [(0, 0), (0, 0x80), (0xff, 0xff), (0x80, 0x7f)])
@pytest.mark.parametrize("name", [fmt.name for fmt in FORMATS.values() if fmt.is_quantized])
def test_mul_mat_extremes(machine, name, fill, scales):
    check_extremes(machine, name, fill, scales)


@pytest.mark.parametrize("name, n_rows, n_cols, n", [
    ("Q4_1", 576, 576, 512), ("Q4_1", 1536, 576, 512), ("Q4_1", 576, 1536, 512), ("Q8_0", 4096, 4096, 1), ("Q4_K", 2048, 14336, 9),
    ("Q6_K", 4096, 4096, 3), ("F32", 129, 1000, 31), ("F16", 2049, 577, 7)])
def test_mul_mat_of_models(machine, name, n_rows, n_cols, n):
    check_mul_mat(machine, name, n_rows, n_cols, n)


@pytest.mark.parametrize("name", WEIGHTS)
def test_get_rows(machine, name):
    check_get_rows(machine, name, 1000, 2304, seeded("ids").integers(0, 1000, 65))


@pytest.mark.parametrize("n_cols", [1, 128, 129, 4096])
def test_take_rows(machine, n_cols):
    check_take_rows(machine, 100, n_cols, seeded("ids").integers(0, 100, 33))
