"""y = mul(mul(x, r), w) with r = 1 / sqrt(mean(x^2) + eps) over the columns of each row (numerics, section 5).

One block a row, four columns a thread and as many rounds as that takes. The columns of a round go through shared memory to threads 0 to 127, the
partials of sum128, so that all of a round is loaded at once while each partial takes its columns in order.
"""
from numba import cuda

from .cooperative import cooperative
from .launch import F32, N, SCALAR_F32, Kernel, check, factory
from .ptx import add, device, div, f32, fma, i2f, i64, ld, ldc, lds, mul, sqrt, st, sts

PARTIALS = 128
COLUMNS = 4          # of a thread in a round
MOST_THREADS = 1024  # of a block
STAGE = COLUMNS * MOST_THREADS


def n_threads(n_cols: int) -> int:
    """Threads of a row's block, a multiple of 128: four columns each, until a block has all it can have."""
    return min(-(-n_cols // (COLUMNS * PARTIALS)) * PARTIALS, MOST_THREADS)


@device
def within(i, n):
    """i, or the last index: a load past the end is made there, and its value not used."""
    return i if i < n else n - 1


@cooperative
def reciprocal_rms(x, row, n_cols, eps):
    """r of the n_cols columns from x[row], for every thread of the block."""
    stage = cuda.shared.array(STAGE, f32)
    v = cuda.local.array(COLUMNS, f32)
    j, n_threads = cuda.threadIdx.x, cuda.blockDim.x
    ss = f32(0)
    for first in range(0, n_cols, COLUMNS * n_threads):
        for k in range(COLUMNS):
            v[k] = ld(x, row + within(first + j + k * n_threads, n_cols))
        for k in range(COLUMNS):
            sts(stage, j + k * n_threads, v[k])
        cuda.syncthreads()  # the round is in `stage`
        if j < PARTIALS:
            for i in range(j, min(COLUMNS * n_threads, n_cols - first), PARTIALS):
                ss = fma(lds(stage, i), lds(stage, i), ss)
        cuda.syncthreads()  # and may be written over
    if j < PARTIALS:
        sts(stage, j, ss)
    half = PARTIALS // 2
    while half > 0:
        cuda.syncthreads()  # both halves are written
        if j < half:
            sts(stage, j, add(lds(stage, j), lds(stage, j + half)))
        half >>= 1
    cuda.syncthreads()
    return div(f32(1), sqrt(add(div(lds(stage, 0), i2f(n_cols)), eps)))


@device
def normed(x, w, row, column, n_cols, r):
    """y of a column; of the last one for columns past the end."""
    column = within(column, n_cols)
    return mul(mul(ld(x, row + column), r), ldc(w, column))


@factory([()])
def rms_norm_kernel():
    def kernel(x, w, out, n_cols, eps):
        v = cuda.local.array(COLUMNS, f32)
        row, n_threads = i64(cuda.blockIdx.x) * n_cols, cuda.blockDim.x
        r = reciprocal_rms(x, row, n_cols, eps)
        for first in range(cuda.threadIdx.x, n_cols, COLUMNS * n_threads):
            for k in range(COLUMNS):
                v[k] = normed(x, w, row, first + k * n_threads, n_cols, r)
            for k in range(COLUMNS):
                if first + k * n_threads < n_cols:
                    st(out, row + first + k * n_threads, v[k])
    return Kernel(kernel, (F32, F32, F32, N, SCALAR_F32), MOST_THREADS)


def rms_norm(target, x, w, out, n_rows, n_cols, eps):
    """out = rms_norm(x) * w. x, out: addresses of f32 [n_rows, n_cols], equal or apart; w: of f32 [n_cols]."""
    check("rms_norm", n_rows >= 1, "n_rows", n_rows, "at least 1")
    check("rms_norm", n_cols >= 1, "n_cols", n_cols, "at least 1")
    return target.launch(rms_norm_kernel(), n_rows, n_threads(n_cols), (x, w, out, n_cols, eps))
