"""A row of up to 512 values in the registers of a warp: column c is value c / 32 of lane c % 32.

Functions are made for a number of values a lane, `n_values(n_cols)`; `v` is a lane's local array of so many. What lies behind the
last column is not read.
"""
from functools import lru_cache

from numba import cuda

from ..call import Operand
from .launch import F32, Kernel, N, need
from .ptx import as_f32, as_i32, device, f32, i32, i64, ld, shuffle, st
from .rms_norm import within

VALUES = 1, 2, 4, 8, 16
MOST_COLUMNS = 32 * VALUES[-1]


def check_rows(x: Operand) -> None:
    need(x.n_rows >= 1, "n_rows", x.n_rows, "at least 1")
    need(1 <= x.n_cols <= MOST_COLUMNS, "n_cols", x.n_cols, f"1..{MOST_COLUMNS}")


def n_values(n_cols: int) -> int:
    """Of a lane, for rows of n_cols."""
    return next(n for n in VALUES if 32 * n >= n_cols)


@lru_cache(None)
def load_row(n):
    @device
    def load(x, row, n_cols, lane, v):
        """v = the columns of the row that begins at element `row` of x."""
        for i in range(n):
            v[i] = ld(x, row + within(i32(lane + 32 * i), n_cols))
    return load


@lru_cache(None)
def store_row(n):
    @device
    def store(out, row, n_cols, lane, v):
        for i in range(n):
            if i32(lane + 32 * i) < n_cols:
                st(out, row + lane + 32 * i, v[i])
    return store


def whole_row_kernel(n, change) -> Kernel:
    """out = the row of x after `change`, a device function of (v, n_cols, lane). One warp a row."""
    load, store = load_row(n), store_row(n)

    def kernel(x, out, n_cols):
        v = cuda.local.array(n, f32)
        row, lane = i64(cuda.blockIdx.x) * n_cols, i32(cuda.threadIdx.x)
        load(x, row, n_cols, lane, v)
        change(v, n_cols, lane)
        store(out, row, n_cols, lane, v)
    return Kernel(kernel, (F32, F32, N), 32)


@lru_cache(None)
def take_from_row(n):
    @device
    def take(v, column):
        """The value of a column of the row; each lane names its own."""
        value = f32(0)
        for i in range(n):
            other = as_f32(shuffle(as_i32(v[i]), i32(column & 31)))
            value = other if column >> 5 == i else value
        return value
    return take
