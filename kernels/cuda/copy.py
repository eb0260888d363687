"""out = x, 16 bytes a thread: what a device's memory can do at most. The driver's own copy reaches two thirds of it in a graph (measured on an H200)."""
from numba import cuda

from .launch import U32, Kernel, check, factory
from .ptx import i64, ldc4, st4

THREADS = 256
BLOCK_BYTES = 16 * THREADS


@factory([()])
def copy_kernel():
    def kernel(x, out):
        i = (i64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x) * 4
        a, b, c, d = ldc4(x, i)
        st4(out, i, a, b, c, d)
    return Kernel(kernel, (U32, U32), THREADS)


def copy(target, x, out, n_bytes):
    """out = x. x, out: addresses of n_bytes, whole blocks of 4096."""
    check("copy", n_bytes > 0 and n_bytes % BLOCK_BYTES == 0, "n_bytes", n_bytes, f"multiples of {BLOCK_BYTES}")
    return target.launch(copy_kernel(), n_bytes // BLOCK_BYTES, THREADS, (x, out))
