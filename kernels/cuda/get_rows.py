"""out[i] = the row ids[i] of a weight, dequantized (docs/numerics.md, section 3), or of an array of float32."""
from numba import cuda

from ...quant.formats import FORMATS, format_of
from ...quant.tile import tile_bytes
from .launch import F32, I32, Kernel, N, U32, check, factory
from .ptx import device, i2f, i32, i64, ld, mul, st, sub
from .weights import float_values, unpacker

N_THREADS = 32  # of a block of get_rows: 32 columns each
TAKE_THREADS = 128


def _quantized(fmt):
    """(t, j, out, first, width): writes columns 32j..32j+31 of the chunk t, `width` of them at most, to out[first]."""
    levels, sub_block, group = unpacker(fmt.name)
    n_sub, n_group, has_min = fmt.sub, fmt.group, fmt.has_min

    @device
    def write(t, j, out, first, width):
        w = levels(t, j)
        for half in range(2):  # 16 columns: no sub-block is smaller
            column = 32 * j + 16 * half
            isc, imin = sub_block(t, column // n_sub)
            d, m = group(t, column // n_group)
            scale, minimum = mul(d, i2f(isc)), mul(m, i2f(imin))
            for i in range(16):
                if 16 * half + i < width:
                    value = mul(scale, i2f(i32(w[4 * half + i // 4] << 24 - 8 * (i & 3)) >> 24))
                    st(out, first + 16 * half + i, sub(value, minimum) if has_min else value)
    return write


def _float(fmt):
    values = float_values(fmt.name)

    @device
    def write(t, j, out, first, width):
        for q in range(4):
            if 8 * q < width:
                v = values(t, 4 * j + q)
                for i in range(8):
                    if 8 * q + i < width:
                        st(out, first + 8 * q + i, v[i])
    return write


@factory([(fmt.name,) for fmt in FORMATS.values() if fmt.planes])
def get_rows_kernel(name):
    fmt = format_of(name)
    write = (_quantized if fmt.is_quantized else _float)(fmt)
    tile_words = tile_bytes(fmt) // 4

    def kernel(words, ids, out, k):  # block: 1024 columns of row blockIdx.y of the output
        at = cuda.blockIdx.x * N_THREADS + cuda.threadIdx.x
        if at * 32 < k:
            chunk, n_chunks = at >> 3, (k + 255) // 256
            row = i64(ld(ids, cuda.blockIdx.y))
            t = (words, ((row >> 5) * n_chunks + chunk) * tile_words, i32(row & 31))
            write(t, at & 7, out, i64(cuda.blockIdx.y) * k + at * 32, k - at * 32)
    return Kernel(kernel, (U32, I32, F32, N), N_THREADS)


def get_rows(target, format_name, words, ids, out, n, k):
    """words: address of a weight's tiles with k columns, on 16 bytes; ids: of int32 [n], rows of the weight; out: of float32 [n, k]."""
    check("get_rows", 1 <= n < 65536, "n", n, "1..65535")
    check("get_rows", k >= 1, "k", k, "at least 1")
    kernel = get_rows_kernel(format_of(format_name, "get_rows").name)
    return target.launch(kernel, (-(-k // (32 * N_THREADS)), n), N_THREADS, (words, ids, out, k))


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
