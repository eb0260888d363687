"""Products of matrices: of a warp (`mma`) and of a warpgroup (`wgmma`)."""
from functools import lru_cache

import numpy as np
from greenlet import getcurrent

from .copies import cluster_rank
from .instructions import as_int, f32, i32
from .memory import check_elements
from .threads import of_all_lanes


def _words(dtype, rows):
    return np.array(rows, dtype=np.int64).astype(dtype)


def _multiply(n_a, n_b, a_type):
    def compute(lanes):
        operands = _words(np.int32, lanes).reshape(8, 4, n_a + n_b + 4)            # [row or column][word in 16 bytes][register]
        a = operands[..., :n_a].reshape(8, 4, n_b, 2).transpose(3, 0, 2, 1).copy()  # [rows 8..15][row][16 columns][word]
        b = operands[..., n_a:n_a + n_b].transpose(0, 2, 1).copy()                  # [column of B][16 rows of B][word]
        c = operands[..., n_a + n_b:].reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
        a, b = a.view(a_type).reshape(16, -1).astype(np.int32), b.view(np.int8).reshape(8, -1).astype(np.int32)
        result = (c + a @ b.T).reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)
        return [tuple(r) for r in result]
    return compute


def _units(x):
    """Of float16 [i, j], as float64: of each row the largest power of two of which all are multiples."""
    bits = np.where(np.isfinite(x), np.abs(x), 0) * 2**24
    bits = bits.astype(np.int64)
    return np.where(bits > 0, bits & -bits, 1 << 40).min(axis=1) / 2**24


def _multiply_halves(a, b, c):
    """C + A B of float16 [rows, 16] and [columns, 16]: the sum as a float32, which is what tensor cores give where it is exact.
    NaN where it is more than 2^24 units of its products: nobody says what they give then."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    result = c + a @ b.T
    return np.where(abs(result) > 2**24 * _units(a)[:, None] * _units(b), np.nan, result).astype(f32)


def _multiply_bytes(a, b, c):
    """C + A B of int8 or uint8 [rows, 32] and int8 [columns, 32], int32."""
    return (c + a.astype(np.float64) @ b.astype(np.float64).T).astype(np.int64).astype(np.int32)


def matrix_product(n_a, n_b, a_type):
    compute, convert = _multiply(n_a, n_b, {"s8": np.int8, "u8": np.uint8}[a_type]), as_int(i32)
    return lambda *operands: of_all_lanes(compute, [convert(o) for o in operands])


def _four_matrices(lanes):
    rows = _words(np.int32, [array[index:index + 4].view(np.int32) for array, index in lanes])  # [8 m + r][word]
    return [tuple(r) for r in rows.reshape(4, 8, 4).transpose(1, 2, 0).reshape(32, 4)]


def ldmatrix4(array, index):
    check_elements("ldmatrix4", array, index, 4)
    return of_all_lanes(_four_matrices, (array, index))


ADDRESS, PAIR_ROWS = 0x3fff, 64  # as of `wgmma`


def place(array, index):
    """As of `wgmma`, with the number of the block in its cluster above an address."""
    if index % 4:
        raise RuntimeError(f"place: the word is {index}, allowed: multiples of 4")
    return i32(int(cluster_rank()) << 20 | int(index) // 4)


@lru_cache(None)
def _words_in_atoms(piece, n):
    """Of n columns in atoms, where the words of two neighbouring pieces of 16 bytes lie, [n, 8]."""
    columns = np.arange(n)
    pieces = (np.array([piece, piece + 1]) ^ (columns % 8)[:, None]) << 2
    return (columns[:, None, None] * 32 + pieces[..., None] + np.arange(4)).reshape(n, 8)


def _in_atoms(array, index, n):
    """Words [n, 8] of the n columns of B, which begins at word `index`, in atoms."""
    if index % 256 > 31 or index % 8:
        raise RuntimeError(f"product of a warpgroup: B begins at word {index}")
    return array[index // 256 * 256 + _words_in_atoms((index & 31) // 4, n)]


def _unswizzled(array, index, n):
    """The same of B as of `wgmma.HalfProducts.start_unswizzled`."""
    return array[index:index + 8 * n].reshape(n // 8, 2, 8, 4).transpose(0, 2, 1, 3).reshape(n, 8)


def _multiply_group(a_type, n, words_of_b=_in_atoms):
    """(lanes) -> D of each: fragments of 16 rows of A and all columns of B."""
    multiply, b_type = (_multiply_halves, a_type) if a_type is np.float16 else (_multiply_bytes, np.int8)

    def compute(lanes):
        array, index = lanes[0][4:6]
        if any(lane[5] != index for lane in lanes):
            raise RuntimeError(f"product of a warpgroup: B begins at word {index} and at others")
        fragments = _words(np.int32, [lane[:4] for lane in lanes])            # [row, word][half of the columns, rows 8..15]
        a = fragments.reshape(8, 4, 2, 2).transpose(3, 0, 2, 1).reshape(16, 8).view(a_type)
        b = np.ascontiguousarray(words_of_b(array, index, n)).view(b_type)
        c = np.array([lane[6] for lane in lanes]).reshape(8, 4, n // 8, 2, 2)  # [row, pair][eight columns][rows 8..15][column]
        d = multiply(a, b, c.transpose(3, 0, 2, 1, 4).reshape(16, n))
        return d.reshape(2, 8, n // 8, 4, 2).transpose(1, 3, 2, 0, 4).reshape(32, n // 2)
    return compute


def group_product(a_type, n, words_of_b=_in_atoms):
    """A warp's part of `wgmma.start`; the product is done at once, or when the warp waits for it."""
    compute, convert = _multiply_group({"s8": np.int8, "u8": np.uint8, "f16": np.float16}[a_type], n, words_of_b), as_int(i32)

    def start(d, array, place, a0, a1, a2, a3, keep):
        thread, words = getcurrent(), (*map(convert, (a0, a1, a2, a3)), array, 4 * (int(place) & ADDRESS))

        def product():
            d[:] = of_all_lanes(compute, (*words, d.copy() if keep else np.zeros_like(d)))
        thread.products.append(product)
        if not thread.warp.late:
            products_wait_but(0)()
    return start


def _fragments(array, index):
    """Of each lane of the warp four words of A, as of `wgmma.start`, that begins at word `index` as of `wgmma.start_tiles`."""
    thread, further = getcurrent(), 4 * PAIR_ROWS
    row, word = thread.index.x // 32 % 4 * 16 + thread.lane // 4, thread.lane % 4
    first = index + 4 * row + word
    return tuple(array[first + offset].view(np.int32) for offset in (0, 32, further, further + 32))


def product_of_tiles(n):
    """As `group_product`, of `wgmma.start_tiles`."""
    start = group_product("s8", n)

    def start_tiles(d, array, place, tiles):
        if tiles >> 16 != PAIR_ROWS:
            raise RuntimeError(f"product of tiles: the halves of A are {16 * (tiles >> 16)} bytes apart")
        start(d, array, place, *_fragments(array, 4 * (int(tiles) & ADDRESS)), 0)
    return start_tiles


def unswizzled_product(n):
    """As `group_product`, of `wgmma.start_unswizzled`."""
    start = group_product("f16", n, _unswizzled)

    def start_unswizzled(d, array, place, *words):
        if not 0 <= place <= ADDRESS:
            raise RuntimeError(f"product without swizzle: the place is {int(place):#x}, allowed: 0..{ADDRESS:#x}")
        start(d, array, place, *words, 0)
    return start_unswizzled


def group_products(n, offsets):
    """As `group_product`, of `wgmma.HalfProducts.start_steps`: what is started together is one product to wait for."""
    start = group_product("f16", n)

    def start_steps(d, array, place, *words):
        under_way = getcurrent().products
        first = len(under_way)
        for step, offset in enumerate(offsets):
            start(d, array, int(place) + offset, *words[4 * (step % 2):][:4], step > 0)
        if together := under_way[first:]:
            under_way[first:] = [lambda: [product() for product in together]]
    return start_steps


def products_wait_but(n):
    """(any): behind it all products but the n started last are done."""
    def wait(*_):
        under_way = getcurrent().products
        while len(under_way) > n:
            under_way.pop(0)()
    return wait


def limb_sums(n, steps):
    start, n_sums = group_product("s8", n), n // 2

    def sums(d, array, hi, lo, a_hi, a_lo):
        for step in range(steps):
            high, low = a_hi[4 * step:4 * step + 4], a_lo[4 * step:4 * step + 4]
            for k, a, b, keep in (0, high, hi, step), (1, high, lo, step), (2, low, lo, step), (1, low, hi, 1):
                start(d[k * n_sums:(k + 1) * n_sums], array, int(b) + 2 * step, *a, keep)
        products_wait_but(0)()
    return sums
