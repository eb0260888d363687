"""The tile layout of weights: tiles of 32 rows x 256 columns, read 16 bytes at a time by one lane per row.

A tile of a format whose chunk (256 columns of a row) has R = 16a + 4b + 2c bytes, a, b, c as large as they go in this order:

    [a pieces][32 rows][16 bytes]  [b words][32 rows][4 bytes]  [c halves][32 rows][2 bytes]

so the 32 rows of one piece are contiguous, and nothing is added to the file's bits. Before the split a chunk's bytes are permuted
from file order into piece order (`Format.piece_order`): planes of quants first, scales after. 32 R is a multiple of 64, R being
even: tiles from a 64-byte aligned base are 64-byte aligned, pieces are 16-byte aligned, and the planes of words and halves are
64-byte aligned.

Tiles stand in the order [matrix][row tile][chunk]. Rows are padded with zero blocks to whole tiles, columns with zero blocks to
whole chunks.
"""
from dataclasses import dataclass
from math import gcd, prod

import numpy as np

from .formats import CHUNK, FORMATS, Format, check_bytes, format_of
from .interleaved import INTERLEAVED
from .words import u32

ROWS = 32  # rows of a tile
SLAB_BYTES = 1 << 24  # pack works on about so much at a time, so that its copies stay small and in reach of the cache


def _tiled(type_, name: str) -> Format:
    fmt = format_of(type_, name)
    if not fmt.planes:
        raise ValueError(f"{name}: {fmt.name} has no tile layout; types that have: "
                         f"{', '.join(f.name for f in FORMATS.values() if f.planes)}")
    return fmt


def tile_bytes(type_) -> int:
    """Bytes of a tile: 32 rows x 256 columns at the file's bits per weight."""
    return ROWS * _tiled(type_, "tile").chunk_bytes


@dataclass(frozen=True)
class Tiling:
    """Where the tiles of n_matrices x [n_rows, n_cols] lie."""
    format: Format
    n_rows: int
    n_cols: int
    n_matrices: int = 1

    @property
    def n_chunks(self) -> int:
        return -(-self.n_cols // CHUNK)

    @property
    def n_row_tiles(self) -> int:
        return -(-self.n_rows // ROWS)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(n_matrices, n_row_tiles, n_chunks, bytes of a tile)"""
        return self.n_matrices, self.n_row_tiles, self.n_chunks, tile_bytes(self.format)

    @property
    def n_bytes(self) -> int:
        return prod(self.shape)


def loads(fmt: Format, jit):
    """(ldw, ld4, ld2) over tiles held as a uint32 array, in plain indexing: word i of piece p, word k, half h.
    t = (words, base, row): the array, the tile's first word (its byte offset / 4) and the row in the tile, 0..31."""
    word_plane = ROWS * 4 * fmt.n_pieces
    half_plane = word_plane + ROWS * fmt.n_words

    @jit
    def ldw(t, p, i):
        words, base, row = t
        return words[base + (p * ROWS + row) * 4 + i]

    @jit
    def ld4(t, k):
        words, base, row = t
        return words[base + word_plane + k * ROWS + row]

    @jit
    def ld2(t, h):
        words, base, row = t
        w = words[base + half_plane + ((h * ROWS + row) >> 1)]
        return u32(w >> u32(16)) if row & 1 else u32(w & u32(0xffff))  # 32 rows to a half: its parity is the row's
    return ldw, ld4, ld2


def _planes(tiles: np.ndarray, fmt: Format):
    """The planes of tiles uint8 [..., tile_bytes] as (first byte in piece order, bytes, view [..., n, 32] of items of that
    size)."""
    first = 0
    for dtype, n in ((np.dtype("V16"), fmt.n_pieces), (np.dtype("<u4"), fmt.n_words), (np.dtype("<u2"), fmt.n_halves)):
        n_bytes = n * dtype.itemsize
        if n:
            plane = tiles[..., ROWS * first:ROWS * (first + n_bytes)]
            yield first, n_bytes, plane.view(dtype).reshape(*tiles.shape[:-1], n, ROWS)
        first += n_bytes


def _slabs(tiling: Tiling):
    """(matrix, first row tile, one past the last) in steps of about SLAB_BYTES."""
    step = max(1, SLAB_BYTES // max(1, tiling.n_chunks * tile_bytes(tiling.format)))
    return ((m, r, min(r + step, tiling.n_row_tiles)) for m in range(tiling.n_matrices)
            for r in range(0, tiling.n_row_tiles, step))


def _with_headers(rows: np.ndarray, fmt: Format) -> np.ndarray:
    """Rows of which each chunk begins with the row's header."""
    header, blocks = rows[:, :fmt.header_bytes], rows[:, fmt.header_bytes:].reshape(len(rows), -1, fmt.type_size)
    return np.concatenate([np.broadcast_to(header[:, None], (*blocks.shape[:2], fmt.header_bytes)), blocks],
                          axis=2).reshape(len(rows), -1)


def pack(data: np.ndarray, type_, n_rows: int, n_cols: int, n_matrices: int = 1, name: str = "tensor",
         only: tuple[int, int] | None = None) -> np.ndarray:
    """Rows in file order -> tiles.

    data: the bytes of n_matrices x [n_rows, n_cols] as in the file, any dtype and shape of that size. type_: also the name of an
    interleaved one. name: the tensor's, for errors. only: the rows [first, last) of each matrix. Returns uint8
    [n_matrices, n_row_tiles, n_chunks, tile_bytes].
    """
    interleaved = INTERLEAVED.get(type_)
    fmt = _tiled(interleaved.plain if interleaved else type_, name)
    first_row, last_row = only or (0, n_rows)
    tiling = Tiling(fmt, last_row - first_row, n_cols, n_matrices)
    data = check_bytes(interleaved or fmt, data, (n_matrices, n_rows, n_cols), name)
    data = data.reshape(n_matrices, n_rows, data.shape[1])
    rows_of = [interleaved.plain_rows(rows, n_cols) if interleaved else lambda first, last, rows=rows: rows[first:last]
               for rows in data]
    tiles = np.empty(tiling.shape, np.uint8)
    # Fields move in units of up to 8 bytes, of which every field is a multiple
    unit = gcd(8, *(size for _, size in (*fmt.header, *fmt.fields)))
    for m, first, last in _slabs(tiling):
        slab = rows_of[m](first_row + first * ROWS, min(first_row + last * ROWS, last_row))
        if fmt.header_bytes:
            slab = _with_headers(slab, fmt)
        padded = ((last - first) * ROWS, tiling.n_chunks * fmt.chunk_bytes)
        if slab.shape != padded:
            slab = np.pad(slab, [(0, p - s) for p, s in zip(padded, slab.shape)])
        chunks = slab.view(f"u{unit}").reshape(last - first, ROWS, tiling.n_chunks, fmt.chunk_bytes // unit)
        for start, n_bytes, plane in _planes(tiles[m, first:last], fmt):
            index = fmt.piece_order[start:start + n_bytes:unit] // unit
            is_run = (np.diff(index) == 1).all()
            items = chunks[..., index[0]:index[-1] + 1] if is_run else chunks.take(index, axis=-1)
            # [row tile, row, chunk, item] -> [row tile, chunk, item, row]
            plane[...] = items.view(plane.dtype).transpose(0, 2, 3, 1)
    return tiles
