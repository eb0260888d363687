"""Comparing results: by bits, or in units in the last place. NaN is one value: NaNs equal each other and hash as 0x7fc00000."""
import hashlib
import sys
from dataclasses import dataclass

import numpy as np

_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Difference:
    """Of two arrays of one dtype and shape: how many elements differ, the first one's place, patterns and values,
    and the largest distance in ULPs."""
    n_different: int
    n: int
    first: tuple[int, ...]
    patterns: tuple[str, str]
    values: tuple[np.generic | float, np.generic | float]
    max_ulps: float | None  # of floats alone

    def __str__(self) -> str:
        (a, b), (x, y) = self.patterns, self.values
        return f"{self.n_different} of {self.n} differ, first at {self.first}: {a} != {b} ({x}, {y})"


def difference(a: np.ndarray, b: np.ndarray) -> Difference | None:
    """What differs between the bits of two arrays of one dtype and shape, NaNs aside; None if nothing does."""
    is_float = a.dtype.kind == "f"
    different = bits(one_nan(a)) != bits(one_nan(b)) if is_float else a != b
    if not different.any():
        return None
    place = tuple(int(i) for i in np.argwhere(different)[0])
    x, y = a[place], b[place]
    p, q = (f"0x{int.from_bytes(v.tobytes(), sys.byteorder):0{2 * a.dtype.itemsize}x}" for v in (x, y))
    return Difference(int(np.count_nonzero(different)), a.size, place, (p, q), (x, y),
                      _most_ulps(a[different], b[different]) if is_float else None)


def _most_ulps(a: np.ndarray, b: np.ndarray) -> float:
    """The most float values from one to the other: infinite where one of the two is NaN."""
    if (np.isnan(a) != np.isnan(b)).any():
        return float("inf")
    sign = 1 << 8 * a.dtype.itemsize - 1
    ordered = [np.where(x & np.array(sign, x.dtype), sign - x.astype(object), x.astype(object)) for x in (bits(a), bits(b))]
    return float(max(np.abs(ordered[0] - ordered[1])))


def assert_bitwise_equal(a: np.ndarray, b: np.ndarray, name: str) -> None:
    """AssertionError unless a and b have one dtype, one shape and the same bits (NaNs aside). name: the op and its parameters, as
    in "rms_norm[n=7, k=4097]"; the message adds how many elements differ and the first one's place, patterns and values."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype, f"{name}: dtype {a.dtype} != {b.dtype}"
    assert a.shape == b.shape, f"{name}: shape {list(a.shape)} != {list(b.shape)}"
    found = difference(a, b)
    assert found is None, f"{name}: {found}"


def bits(a: np.ndarray) -> np.ndarray:
    """The bit patterns of a float array, as unsigned integers of its shape."""
    a = np.ascontiguousarray(a).reshape(np.shape(a))
    return a.view(_BITS[a.dtype.itemsize])


def one_nan(array: np.ndarray) -> np.ndarray:
    """The array with every NaN as the positive quiet one (float32: 0x7fc00000)."""
    if array.dtype.kind != "f" or not array.size or not np.isnan(array.max()):  # the largest is NaN where one is
        return array
    return np.where(np.isnan(array), array.dtype.type(np.nan), array)


def digest(array: np.ndarray) -> str:
    """sha256 of an array's bytes in C order, little-endian, every NaN as `one_nan` has it."""
    array = one_nan(np.asarray(array))
    return hashlib.sha256(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data).hexdigest()


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
