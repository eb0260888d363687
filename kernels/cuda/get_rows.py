"""out[i] = the row ids[i] of a weight, dequantized (docs/numerics.md, section 3), or of an array of float32."""
from numba import cuda

from ...quant.formats import CHUNK, format_of
from ...quant.tile import tile_bytes
from .dequantize import LINE, LINES, cases, is_aligned, line_words, store_lines, unpack_line
from .launch import F32, I32, Kernel, N, U32, check, factory
from .ptx import i32, i64, ld, st, syncwarp

TAKE_THREADS = 128


@factory([(name, aligned) for name, _, aligned in cases("f32")])
def get_rows_kernel(name, aligned):
    fmt = format_of(name)
    unpack, store, stride, tile_words = unpack_line(fmt, "f32"), store_lines("f32", aligned), line_words("f32"), tile_bytes(fmt) // 4
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


def get_rows(target, format_name, words, ids, out, n, k):
    """words: address of a weight's tiles with k columns; ids: of int32 [n], rows of the weight, a negative one (argmax of NaN) the first;
    out: of float32 [n, k]. words and out on 16 bytes."""
    check("get_rows", 1 <= n < 65536, "n", n, "1..65535")
    check("get_rows", k >= 1, "k", k, "at least 1")
    kernel = get_rows_kernel(format_of(format_name, "get_rows").name, is_aligned("f32", k))
    return target.launch(kernel, (-(-k // (LINES * LINE)), n), 32, (words, ids, out, k))


@factory([()])
def take_rows_kernel():
    def kernel(x, ids, out, k):
        column = cuda.blockIdx.x * TAKE_THREADS + cuda.threadIdx.x
        if column < k:
            st(out, i64(cuda.blockIdx.y) * k + column, ld(x, i64(ld(ids, cuda.blockIdx.y)) * k + column))
    return Kernel(kernel, (F32, I32, F32, N), TAKE_THREADS)


def take_rows(target, x, ids, out, n, k):
    """x: address of float32 [r, k]; ids: of int32 [n], below r; out: of float32 [n, k]."""
    check("take_rows", 1 <= n < 65536, "n", n, "1..65535")
    check("take_rows", k >= 1, "k", k, "at least 1")
    return target.launch(take_rows_kernel(), (-(-k // TAKE_THREADS), n), TAKE_THREADS, (x, ids, out, k))
