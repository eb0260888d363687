"""Keys and values of f16 caches as limbs: `flash_attn_ext_halves` against `quantize_block`, with each instruction set."""
import numpy as np
import pytest
from cpu_comparisons import seeded
from guarded_arrays import guarded

from ggml_py.kernels.compile import jit
from ggml_py.kernels.cpu.flash_attn_ext_halves import key_loader, value_loader
from ggml_py.kernels.cpu.vector import available_isas
from ggml_py.kernels.reference.flash_attn_ext import BLOCK, PIECE
from ggml_py.kernels.reference.quantize import quantize_block
from ggml_py.testing import assert_bitwise_equal

N_HEADS, CELLS = 2, 140
LOADERS = {"keys": key_loader, "values": value_loader}


def cache(dim: int) -> np.ndarray:
    """Cells of all sizes; some of zeros, with an infinity, a NaN, the largest and the smallest numbers."""
    rng = seeded(f"halves {dim}")
    x = (rng.standard_normal((CELLS, N_HEADS * dim)) * np.exp2(rng.integers(-14, 10, (CELLS, 1)))).astype(np.float16)
    x[1] = 0
    x[2, ::2], x[2, 1::2] = 0, -0.0
    x[3, 5], x[4, 7], x[5, 9] = np.inf, -np.inf, np.nan
    x[6], x[7], x[8] = 65504, 2.0**-24, -2.0**-24
    x[9, 1:] = 2.0**-24
    return x


def levels_of(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    q = np.empty(x.size, np.int16)
    return q, quantize_block(x.astype(np.float32), q)


def pairs(q: np.ndarray) -> np.ndarray:
    """i16 [..., 2] as words: levels, and their high limbs."""
    high = ((q.astype(np.int32) + 64) >> 7).astype(np.int16)
    return np.stack([np.ascontiguousarray(part).view(np.int32)[..., 0] for part in (q, high)])


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dim", [64, 192])
@pytest.mark.parametrize("what", LOADERS)
def test_loader(what, dim, isa):
    load, cells, head = LOADERS[what](isa), cache(dim), 1
    run = jit(key=("test_halves", what, isa))(load.py_func)
    stored = guarded(cells.view(np.uint16))
    for cell, n_keys in [(0, 1), (0, 32), (1, 33), (0, PIECE), (CELLS - 77, 77)]:
        rows = [levels_of(row) if what == "values" else [levels_of(block) for block in row.reshape(-1, BLOCK)]
                for row in cells[cell:cell + n_keys, head * dim:]]
        if what == "keys":
            levels, d = np.zeros((2, dim // BLOCK, BLOCK // 2, PIECE), np.int32), np.zeros((dim // BLOCK, PIECE), np.float32)
            run(stored, cell, n_keys, head, dim, guarded_levels := guarded(levels), guarded_d := guarded(d))
            q = np.array([[block for block, _ in row] for row in rows])  # [keys, blocks, 64]
            expected = pairs(q.reshape(n_keys, -1, BLOCK // 2, 2)).transpose(0, 2, 3, 1)
            found, steps = guarded_levels[..., :n_keys], guarded_d[:, :n_keys]
            expected_d = np.array([[step for _, step in row] for row in rows], np.float32).T
        else:
            levels, d = np.zeros((2, PIECE // 2, dim), np.int32), np.zeros(PIECE, np.float32)
            run(stored, cell, n_keys, head, dim, guarded_levels := guarded(levels), guarded_d := guarded(d))
            whole = n_keys // 2 * 2  # a last value alone is paired with what no weight goes to
            q = np.array([level for level, _ in rows])
            expected = pairs(np.ascontiguousarray(q[:whole].reshape(-1, 2, dim).transpose(0, 2, 1)))
            found, steps = guarded_levels[:, :whole // 2], guarded_d[:n_keys]
            if n_keys % 2:
                assert_bitwise_equal(guarded_levels[0, whole // 2].astype(np.int16), q[whole], f"{what}, last")
            expected_d = np.array([step for _, step in rows], np.float32)
        name = f"{what} of {dim} channels, {n_keys} from {cell} on, {isa}"
        assert_bitwise_equal(found.copy(), expected.copy(), name)
        assert_bitwise_equal(steps.copy(), expected_d, f"{name}: d")
