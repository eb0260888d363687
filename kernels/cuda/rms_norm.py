"""y = mul(mul(x, r), w) with r = 1 / sqrt(mean(x^2) + eps) over the columns of each row (numerics, section 5).

One block of 128 threads a row: thread j is partial j of sum128. A row is read in steps of 1024 columns, eight loads in flight a thread.
"""
from numba import cuda

from .launch import F32, N, SCALAR_F32, Kernel, check, factory
from .ptx import add, device, div, f32, fma, i2f, i64, ld, ldc, mul, sqrt, st

PARTIALS = 128
STEP = 8 * PARTIALS


@device
def within(i, n):
    """i, or the last index: a load past the end is made there, and its value replaced."""
    return i if i < n else n - 1


@factory([()])
def rms_norm_kernel():
    def kernel(x, w, out, n_cols, eps):
        partial = cuda.shared.array(PARTIALS, f32)
        v = cuda.local.array(8, f32)
        j = cuda.threadIdx.x
        row = i64(cuda.blockIdx.x) * n_cols
        ss = f32(0)
        for first in range(j, n_cols, STEP):
            for k in range(8):
                v[k] = ld(x, row + within(first + k * PARTIALS, n_cols))
            for k in range(8):
                if first + k * PARTIALS < n_cols:
                    ss = fma(v[k], v[k], ss)
        partial[j] = ss
        half = PARTIALS // 2
        while half > 0:
            cuda.syncthreads()  # both halves are written
            if j < half:
                partial[j] = add(partial[j], partial[j + half])
            half >>= 1
        cuda.syncthreads()
        r = div(f32(1), sqrt(add(div(partial[0], i2f(n_cols)), eps)))
        for first in range(j, n_cols, STEP):
            for k in range(8):
                column = within(first + k * PARTIALS, n_cols)
                v[k] = mul(mul(ld(x, row + column), r), ldc(w, column))
            for k in range(8):
                if first + k * PARTIALS < n_cols:
                    st(out, row + first + k * PARTIALS, v[k])
    return Kernel(kernel, (F32, F32, F32, N, SCALAR_F32), n_threads=PARTIALS)


def rms_norm(target, x, w, out, n_rows, n_cols, eps):
    """out = rms_norm(x) * w. x, out: addresses of f32 [n_rows, n_cols], equal or apart; w: of f32 [n_cols]."""
    check("rms_norm", n_rows >= 1, "n_rows", n_rows, "at least 1")
    check("rms_norm", n_cols >= 1, "n_cols", n_cols, "at least 1")
    return target.launch(rms_norm_kernel(), n_rows, PARTIALS, (x, w, out, n_cols, eps))
