"""quantize(swiglu(gate, up)): activation blocks of products that are never written as floats. Blocks as in quantize."""
from numba import cuda

from .elementwise import BINARY
from .launch import F32, N, U32, Kernel, factory
from .ptx import i64
from .quantize import GROUPS, N_THREADS, blocks, chunk_quantizer, four_elements, own_chunk

swiglu = BINARY["swiglu"]


@factory([()])
def swiglu_act_kernel():
    quantize_chunk = chunk_quantizer(GROUPS)

    def kernel(gate, up, act, n, k):  # block: chunks of row blockIdx.y
        row, (chunk, column) = cuda.blockIdx.y, own_chunk()
        first = i64(row) * k
        ga, gb, gc, gd = four_elements(gate, first, column, k)
        ua, ub, uc, ud = four_elements(up, first, column, k)
        # All loads are before these; +0 past the row's end
        a, b, c, d = swiglu(ga, ua), swiglu(gb, ub), swiglu(gc, uc), swiglu(gd, ud)
        quantize_chunk(a, b, c, d, act, n, row, chunk, (k + 255) >> 8)
    return Kernel(kernel, (F32, F32, U32, N, N), GROUPS * N_THREADS)


def check(call):
    blocks(*call.gate.shape)


def swiglu_act(call):
    """act = quantize(silu(gate) * up). gate, up: f32 [n, k]; act: activations [n, k]; all on 16 bytes."""
    n, k = call.gate.shape
    grid, n_threads = blocks(n, k)
    return call.device.launch(swiglu_act_kernel(), grid, n_threads, (call.gate.data, call.up.data, call.act.data, n, k))
