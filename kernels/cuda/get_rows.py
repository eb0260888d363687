"""out[i] = the row ids[i] of a weight, dequantized (docs/numerics.md, section 3), or of an array of float32."""
from numba import cuda

from ...quant.formats import CHUNK, format_of
from ...quant.tile import tile_bytes
from ..call import Call
from .dequantize import LINE, LINES, cases, is_aligned, line_words, store_lines, unpack_line
from .launch import F32, I32, Kernel, N, U32, factory, need
from .ptx import i32, i64, ld, st, syncwarp

TAKE_THREADS = 128


@factory([(name, aligned) for name, _, aligned in cases("f32")])
def get_rows_kernel(name, aligned):
    fmt = format_of(name)
    unpack, store, stride, tile_words = (unpack_line(fmt, "f32"), store_lines("f32", aligned), line_words("f32"),
                                         tile_bytes(fmt) // 4)
    n_shared = LINES * stride

    def kernel(words, ids, out, k):  # block: a warp, 1024 columns of row blockIdx.y of the output
        shared = cuda.shared.array(n_shared, i32)
        lane, first = cuda.threadIdx.x, cuda.blockIdx.x * (LINES * LINE)
        column = first + lane * LINE
        if column < k:
            row, chunk, n_chunks = i64(max(ld(ids, cuda.blockIdx.y), i32(0))), column // CHUNK, (k + CHUNK - 1) // CHUNK
            t = (words, ((row >> 5) * n_chunks + chunk) * tile_words, i32(row & 31))
            unpack(t, lane & 7, shared, lane * stride)
        syncwarp()
        store(out, lane, shared, 0, i64(cuda.blockIdx.y) * k + first, LINE, LINE, LINES, k - first)
    return Kernel(kernel, (U32, I32, U32, N), 32)


def check(call: Call) -> None:
    n, k = call.out.shape
    need(1 <= n < 65536, "n", n, "1..65535")
    need(k >= 1, "k", k, "at least 1")


def get_rows(call: Call):
    """out[i] = row ids[i] of w, dequantized.

    w: tiles of a weight [r, k], on 16 bytes; ids: i32 [n], of which a negative one (argmax of NaN) names the first row; out:
    f32 [n, k], on 16 bytes."""
    n, k = call.out.shape
    kernel = get_rows_kernel(format_of(call.w.dtype, "get_rows").name, is_aligned("f32", k))
    return call.device.launch(kernel, (-(-k // (LINES * LINE)), n), 32, (call.w.data, call.ids.data, call.out.data, k))


@factory([()])
def take_rows_kernel():
    def kernel(x, ids, out, k):
        column = cuda.blockIdx.x * TAKE_THREADS + cuda.threadIdx.x
        if column < k:
            st(out, i64(cuda.blockIdx.y) * k + column, ld(x, i64(ld(ids, cuda.blockIdx.y)) * k + column))
    return Kernel(kernel, (F32, I32, F32, N), TAKE_THREADS)


def take_rows(call: Call):
    """out[i] = x[ids[i]].   x: f32 [r, k]; ids: i32 [n], below r; out: f32 [n, k]."""
    n, k = call.out.shape
    args = call.x.data, call.ids.data, call.out.data, k
    return call.device.launch(take_rows_kernel(), (-(-k // TAKE_THREADS), n), TAKE_THREADS, args)
