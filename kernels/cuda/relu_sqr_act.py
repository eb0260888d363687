"""quantize(relu_sqr(x)): activation blocks of squares that are never written as floats. Blocks as in quantize."""
from numba import cuda

from .elementwise import UNARY
from .launch import F32, N, U32, Kernel, factory
from .ptx import i64
from .quantize import GROUPS, N_THREADS, blocks, chunk_quantizer, four_elements, own_chunk

relu_sqr = UNARY["relu_sqr"]


@factory([()])
def relu_sqr_act_kernel():
    quantize_chunk = chunk_quantizer(GROUPS)

    def kernel(x, act, n, k):  # block: chunks of row blockIdx.y
        row, (chunk, column) = cuda.blockIdx.y, own_chunk()
        a, b, c, d = four_elements(x, i64(row) * k, column, k)
        quantize_chunk(relu_sqr(a), relu_sqr(b), relu_sqr(c), relu_sqr(d), act, n, row, chunk, (k + 255) >> 8)
    return Kernel(kernel, (F32, U32, N, N), GROUPS * N_THREADS)


def check(call):
    blocks(*call.x.shape)


def relu_sqr_act(call):
    """act = quantize(relu(x) squared). x: f32 [n, k]; act: activations [n, k]; both on 16 bytes."""
    n, k = call.x.shape
    grid, n_threads = blocks(n, k)
    return call.device.launch(relu_sqr_act_kernel(), grid, n_threads, (call.x.data, call.act.data, n, k))
