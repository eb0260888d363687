"""Comparing results: by bits, or in units in the last place. NaN is one value: NaNs equal each other and hash as 0x7fc00000."""
import hashlib
import sys

import numpy as np

_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def assert_bitwise_equal(a: np.ndarray, b: np.ndarray, name: str) -> None:
    """AssertionError unless a and b have one dtype, one shape and the same bits (NaNs aside). name: the op and its parameters, as in
    "rms_norm[n=7, k=4097]"; the message adds how many elements differ and the first one's place, patterns and values."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype, f"{name}: dtype {a.dtype} != {b.dtype}"
    assert a.shape == b.shape, f"{name}: shape {list(a.shape)} != {list(b.shape)}"
    if a.dtype.kind != "f":
        different = a != b
    else:
        different = (bits(a) != bits(b)) & ~(np.isnan(a) & np.isnan(b))
    count = int(np.count_nonzero(different))
    if count == 0:
        return
    place = tuple(int(i) for i in np.argwhere(different)[0])
    x, y = a[place], b[place]
    width = 2 * a.dtype.itemsize
    patterns = " != ".join(f"0x{int.from_bytes(v.tobytes(), sys.byteorder):0{width}x}" for v in (x, y))
    raise AssertionError(f"{name}: {count} of {a.size} differ, first at {place}: {patterns} ({x}, {y})")


def bits(a: np.ndarray) -> np.ndarray:
    """The bit patterns of a float array, as unsigned integers of its shape."""
    a = np.ascontiguousarray(a).reshape(np.shape(a))
    return a.view(_BITS[a.dtype.itemsize])


def digest(array: np.ndarray) -> str:
    """sha256 of an array's bytes in C order, little-endian, every NaN as the pattern of the positive quiet one (float32: 0x7fc00000)."""
    array = np.asarray(array)
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    return hashlib.sha256(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()).hexdigest()


def ulp_distance(a: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """|a - exact| in units in the last place of float32 at `exact`. a: float32; exact: float64 of its shape. Returns float64.

    Where the two are both NaN or the same infinity the distance is 0, where only one of them is so it is infinite.
    An exact value that rounds to infinity counts as infinity."""
    a, exact = np.asarray(a, np.float32), np.asarray(exact, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = exact.astype(np.float32)
        distance = np.abs(a.astype(np.float64) - exact) / np.abs(np.spacing(nearest)).astype(np.float64)
        special = ~(np.isfinite(a) & np.isfinite(nearest))
        same = (np.isnan(a) & np.isnan(nearest)) | (a == nearest)
    return np.where(special, np.where(same, 0.0, np.inf), distance)
