"""Tiles: what they hold of every type, at the file's bits per weight, is what the file has."""
import tracemalloc
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ggml_py.quant import tile
from ggml_py.quant.formats import CHUNK, FORMATS

TILED = [fmt.name for fmt in FORMATS.values() if fmt.planes]


def random_bytes(fmt, n_matrices, n_rows, n_cols):
    rng = np.random.default_rng(crc32(f"{fmt.name} {n_matrices} {n_rows} {n_cols}".encode()))
    return rng.integers(0, 256, (n_matrices, n_rows, fmt.row_bytes(n_cols)), dtype=np.uint8)


def unpack(tiles, fmt):
    """uint8 [n_matrices, n_row_tiles * 32, n_chunks * chunk_bytes]: rows in file order, with the padding, by the definition of
    the layout."""
    n_matrices, n_row_tiles, n_chunks, _ = shape = tiles.shape
    a, b, c = fmt.n_pieces, fmt.n_words, fmt.n_halves
    planes = np.split(tiles, [32 * 16 * a, 32 * (16 * a + 4 * b)], axis=-1)
    in_order = np.concatenate([plane.reshape(*shape[:3], n, 32, size).swapaxes(3, 4).reshape(*shape[:3], 32, n * size)
                               for plane, n, size in zip(planes, (a, b, c), (16, 4, 2))], axis=-1)
    in_file = np.empty_like(in_order)
    in_file[..., fmt.piece_order] = in_order
    return in_file.swapaxes(2, 3).reshape(n_matrices, n_row_tiles * 32, n_chunks * fmt.chunk_bytes)


def check(fmt, n_matrices, n_rows, n_cols):
    data = random_bytes(fmt, n_matrices, n_rows, n_cols)
    tiling = tile.Tiling(fmt, n_rows, n_cols, n_matrices)
    tiles = tile.pack(data, fmt, n_rows, n_cols, n_matrices)
    assert tiles.shape == tiling.shape and tiles.nbytes == tiling.n_bytes and tiles.dtype == np.uint8
    if header := fmt.header_bytes:  # each chunk has it
        chunks = data[..., header:].reshape(n_matrices, n_rows, tiling.n_chunks, fmt.type_size)
        headers = np.repeat(data[:, :, None, :header], tiling.n_chunks, axis=2)
        data = np.concatenate([headers, chunks], axis=3).reshape(n_matrices, n_rows, -1)
    padded = np.zeros((n_matrices, tiling.n_row_tiles * 32, tiling.n_chunks * fmt.chunk_bytes), np.uint8)
    padded[:, :n_rows, :data.shape[2]] = data
    assert np.array_equal(unpack(tiles, fmt), padded)


@pytest.mark.parametrize("name", TILED)
def test_pack(name):
    """Row counts on both sides of a tile's 32, columns on both sides of a chunk's 256."""
    fmt = FORMATS[name]
    for n_rows in (1, 31, 32, 33, 65):
        for n_cols in sorted({fmt.block_size, 256 - fmt.block_size or 512, 256, 256 + fmt.block_size, 768}):
            check(fmt, 1, n_rows, n_cols)


@pytest.mark.parametrize("name", ["F32", "MXFP4", "Q4_K", "Q6_K", "IQ5_KS"])
def test_several_matrices(name):
    check(FORMATS[name], 3, 33, 512)


@pytest.mark.parametrize("name", ["BF16", "Q4_0", "IQ3_S", "IQ2_KL"])
def test_slabs(name, monkeypatch):
    """The same tiles whatever the slab: one row tile at a time, or all at once."""
    fmt = FORMATS[name]
    data = random_bytes(fmt, 2, 170, 1024)
    whole = tile.pack(data, fmt, 170, 1024, 2)
    monkeypatch.setattr(tile, "SLAB_BYTES", 2 * 4 * tile.tile_bytes(fmt))
    assert np.array_equal(tile.pack(data, fmt, 170, 1024, 2), whole)


def test_memory_beside_the_tensor_is_a_few_slabs():
    n_rows = 1 << 17
    data = np.zeros(n_rows * 576, np.uint8)  # 72 MiB
    tracemalloc.start()
    try:
        tiles = tile.pack(data, "Q4_0", n_rows, 1024)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - tiles.nbytes < 4 * tile.SLAB_BYTES


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(TILED), n_matrices=st.integers(1, 3), n_rows=st.integers(1, 100), n_blocks=st.integers(1, 20))
def test_any_shape(name, n_matrices, n_rows, n_blocks):
    check(FORMATS[name], n_matrices, n_rows, n_blocks * FORMATS[name].block_size)


@pytest.mark.parametrize("n_rows, n_cols", [(0, 256), (3, 0)])
def test_empty(n_rows, n_cols):
    tiles = tile.pack(np.empty(0, np.uint8), "Q4_K", n_rows, n_cols)
    assert tiles.size == 0 and tiles.shape == tile.Tiling(FORMATS["Q4_K"], n_rows, n_cols).shape


@pytest.mark.parametrize("name", TILED)
def test_bits_per_weight_and_alignment(name):
    fmt = FORMATS[name]
    assert tile.tile_bytes(name) * fmt.block_size == 32 * (CHUNK * fmt.type_size + fmt.block_size * fmt.header_bytes)
    assert tile.tile_bytes(name) % 64 == 0 and 32 * 16 * fmt.n_pieces % 64 == 0 and 32 * 4 * fmt.n_words % 64 == 0


def test_any_dtype_and_shape_of_the_right_size():
    x = np.arange(33 * 300, dtype=np.float32)
    tiles = tile.pack(x, "F32", 33, 300)
    assert np.array_equal(unpack(tiles, FORMATS["F32"]).view(np.float32)[0, :33, :300], x.reshape(33, 300))


def test_errors_name_the_tensor():
    with pytest.raises(ValueError, match=r"^blk\.0\.ffn_up\.weight: Q4_K rows must be a multiple of 256 values, got 4000$"):
        tile.pack(np.zeros(2250, np.uint8), "Q4_K", 1, 4000, name="blk.0.ffn_up.weight")
    with pytest.raises(ValueError, match=r"^w: Q4_0 of shape \(1, 2, 64\) takes 72 bytes, got 71$"):
        tile.pack(np.zeros(71, np.uint8), "Q4_0", 2, 64, name="w")
    with pytest.raises(ValueError, match=r"^ids: I32 has no tile layout; types that have: F32, F16, BF16, Q4_0, .*IQ1_M_R1$"):
        tile.pack(np.zeros(4, np.int32), "I32", 1, 4, name="ids")
