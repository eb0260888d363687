"""The interleaved types: their bits are put back as ik_llama.cpp had them, for any rows, while tiles are packed."""
from zlib import crc32

import numpy as np
import pytest

from ggml_py.quant import tile
from ggml_py.quant.dequantize import dequantize
from ggml_py.quant.interleaved import INTERLEAVED
from ggml_py.testing import assert_bitwise_equal
from interleaving import equations, interleaved
from places import REFERENCE

COPIED = "IQ1_S_R4"  # a row's d goes into each block: there is no way back


def random_rows(t, n_rows, n_cols):
    rng = np.random.default_rng(crc32(f"{t.name} {n_rows}".encode()))
    return rng.integers(0, 256, (n_rows, t.row_bytes(n_cols)), dtype=np.uint8)


@pytest.mark.parametrize("name", INTERLEAVED)
def test_rows_are_those_of_ik_llama_cpp(name):
    path, t = REFERENCE / "quants" / "ik.npz", INTERLEAVED[name]
    if not path.exists():
        pytest.skip(f"{path} is not here")
    with np.load(path) as vectors:
        data, values = vectors[f"{name}.bytes"], vectors[f"{name}.values"]
        if f"{name}.plain" in vectors:
            assert np.array_equal(t.plain_rows(data, values.shape[1])(0, len(data)), vectors[f"{name}.plain"])
    found = dequantize(data, name, values.shape)
    if name in ("Q5_0_R4", "Q6_0_R4"):  # d code - 16 d is never a negative zero
        found, values = found + np.float32(0), values + np.float32(0)
    assert_bitwise_equal(found, values, name)


@pytest.mark.parametrize("name", INTERLEAVED)
def test_no_bit_is_lost(name):
    """A group's bits are as many as its plain rows', each in some row, and no two equations are the same."""
    t = INTERLEAVED[name]
    found = [tuple(places) for _, places in equations(t)]
    assert len({place for places in found for place in places}) == 8 * t.n_rows * (t.header_bytes + t.type_size)
    assert len(set(found)) == len(found) or name == COPIED


@pytest.mark.parametrize("name", [name for name in INTERLEAVED if name != COPIED])
def test_there_and_back(name):
    t, n_cols = INTERLEAVED[name], 2 * INTERLEAVED[name].plain.block_size
    data = random_rows(t, 3 * t.n_rows, n_cols)
    plain = t.plain_rows(data, n_cols)(0, len(data))
    assert np.array_equal(interleaved(plain, t, n_cols), data)


@pytest.mark.parametrize("name", ["Q4_K_R4", "IQ4_XS_R8", "IQ5_KS_R4", "IQ1_M_R4"])
@pytest.mark.parametrize("only", [None, (0, 40), (3, 75), (32, 33)])
def test_packing(name, only):
    """Tiles of any rows of matrices are those of the plain rows."""
    t = INTERLEAVED[name]
    data = random_rows(t, 2 * 80, 512)
    plain = t.plain_rows(data, 512)(0, 160).reshape(2, 80, -1)
    first, last = only or (0, 80)
    expected = tile.pack(plain[:, first:last], t.plain, last - first, 512, 2)
    assert np.array_equal(tile.pack(data, name, 80, 512, 2, only=only), expected)
    assert np.array_equal(tile.pack(plain, t.plain, 80, 512, 2, only=only), expected)


def test_packing_goes_slab_by_slab(monkeypatch):
    """No second copy of a tensor is made: rows come as many at a time as a slab has."""
    asked, t = [], INTERLEAVED["Q4_K_R4"]
    whole = type(t).plain_rows

    def watched(self, rows, n_cols):
        plain = whole(self, rows, n_cols)
        return lambda first, last: asked.append(last - first) or plain(first, last)
    monkeypatch.setattr(type(t), "plain_rows", watched)
    monkeypatch.setattr(tile, "SLAB_BYTES", 1 << 16)
    tile.pack(random_rows(t, 1024, 512), "Q4_K_R4", 1024, 512)
    assert sum(asked) == 1024 and max(asked) * t.row_bytes(512) <= 1 << 17


def test_rows_that_do_not_divide():
    with pytest.raises(ValueError, match="^w: Q4_K rows must be a multiple of 256 values, got 100$"):
        tile.pack(np.zeros(1, np.uint8), "Q4_K_R4", 4, 100, name="w")
    with pytest.raises(ValueError, match=r"^w: Q4_K_R4 of shape \(1, 4, 256\) takes 576 bytes, got 575$"):
        tile.pack(np.zeros(575, np.uint8), "Q4_K_R4", 4, 256, name="w")
