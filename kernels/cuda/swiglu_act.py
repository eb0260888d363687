"""quantize(swiglu(gate, up)): activation blocks of products that are never written as floats. One block a chunk, as in quantize."""
from numba import cuda

from ...quant.formats import CHUNK
from .elementwise import BINARY
from .launch import F32, N, U32, Kernel, factory
from .ptx import i64
from .quantize import N_THREADS, chunk_quantizer, element, grid

swiglu = BINARY["swiglu"]


@factory([()])
def swiglu_act_kernel():
    quantize_chunk = chunk_quantizer(1)

    def kernel(gate, up, act, n, k):  # block: chunk blockIdx.x of row blockIdx.y
        chunk, row = cuda.blockIdx.x, cuda.blockIdx.y
        first, column = i64(row) * k, chunk * CHUNK + cuda.threadIdx.x * 4
        ga, gb = element(gate, first, column, k), element(gate, first, column + 1, k)
        gc, gd = element(gate, first, column + 2, k), element(gate, first, column + 3, k)
        ua, ub = element(up, first, column, k), element(up, first, column + 1, k)
        uc, ud = element(up, first, column + 2, k), element(up, first, column + 3, k)
        a, b, c, d = swiglu(ga, ua), swiglu(gb, ub), swiglu(gc, uc), swiglu(gd, ud)  # +0 past the row's end; all loads before them
        quantize_chunk(a, b, c, d, act, n, row, chunk, cuda.gridDim.x)
    return Kernel(kernel, (F32, F32, U32, N, N), N_THREADS)


def swiglu_act(target, gate, up, act, n, k):
    """gate, up: addresses of f32 [n, k]; act: address of `activation_bytes(n, k)`, on 16 bytes."""
    blocks = grid("swiglu_act", n, k)
    return target.launch(swiglu_act_kernel(), blocks, N_THREADS, (gate, up, act, n, k))
