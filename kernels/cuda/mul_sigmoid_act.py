"""quantize(mul(x, sigmoid(gate))): activation blocks of gated rows that are never written as floats. Blocks as in quantize."""
from numba import cuda

from .launch import F32, N, U32, Kernel, factory
from .ptx import i64, mul, sigmoid
from .quantize import GROUPS, N_THREADS, blocks, chunk_quantizer, four_elements, own_chunk


@factory([()])
def mul_sigmoid_act_kernel():
    quantize_chunk = chunk_quantizer(GROUPS)

    def kernel(x, gate, act, n, k):  # block: chunks of row blockIdx.y
        row, (chunk, column) = cuda.blockIdx.y, own_chunk()
        first = i64(row) * k
        xa, xb, xc, xd = four_elements(x, first, column, k)
        ga, gb, gc, gd = four_elements(gate, first, column, k)
        a, b, c, d = mul(xa, sigmoid(ga)), mul(xb, sigmoid(gb)), mul(xc, sigmoid(gc)), mul(xd, sigmoid(gd))
        quantize_chunk(a, b, c, d, act, n, row, chunk, (k + 255) >> 8)
    return Kernel(kernel, (F32, F32, U32, N, N), GROUPS * N_THREADS)


def check(call):
    blocks(*call.x.shape)


def mul_sigmoid_act(call):
    """act = quantize(x * sigmoid(gate)). x, gate: f32 [n, k]; act: activations [n, k]; all on 16 bytes."""
    n, k = call.x.shape
    grid, n_threads = blocks(n, k)
    return call.device.launch(mul_sigmoid_act_kernel(), grid, n_threads, (call.x.data, call.gate.data, call.act.data, n, k))
