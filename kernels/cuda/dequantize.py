"""out = a whole weight as float32, or as float16 of the float32 values (docs/numerics.md, sections 1 and 3). get_rows uses the
same device code.

A line is 32 columns of one row. Each lane of a warp unpacks one line into shared memory, then the lanes together store the warp's
32 lines, neighbours side by side: 16 bytes each, or one element each where rows do not end on 16 bytes.
"""
from numba import cuda

from ...quant.formats import CHUNK, FORMATS, format_of
from ...quant.tile import ROWS, tile_bytes
from ..call import Call
from .launch import Kernel, N, U16, U32, factory, need
from .ptx import as_i32, device, f32_to_f16, i2f, i32, i64, lds, lds4, mul, st, st4, sts4, sub, syncwarp, u32
from .weights import float_values, unpacker

LINE, LINES = 32, 32              # columns; lines of a warp
N_THREADS = CHUNK // LINE * 32    # of a block: a warp for each line of a chunk
ELEMENTS = {"f32": 1, "f16": 2}   # of a word


def line_words(dtype: str) -> int:
    """From one line in shared memory to the next: four words lie between, so that no lanes wait for each other."""
    return LINE // ELEMENTS[dtype] + 4


def is_aligned(dtype: str, n_cols: int) -> bool:
    """Whether rows end on 16 bytes; those of quantized types do."""
    return n_cols % (4 * ELEMENTS[dtype]) == 0


def cases(*dtypes: str) -> list[tuple]:
    """(type, dtype, rows end on 16 bytes) of every kernel."""
    weights = [fmt for fmt in FORMATS.values() if fmt.planes]
    return [(fmt.name, dtype, aligned) for dtype in dtypes for fmt in weights
            for aligned in ((True,) if fmt.is_quantized else (True, False))]


def _put8(dtype):
    """(shared, at, eight float32): their words from shared[at] on."""
    if dtype == "f32":
        @device
        def put8(shared, at, a, b, c, d, e, f, g, h):
            sts4(shared, at, as_i32(a), as_i32(b), as_i32(c), as_i32(d))
            sts4(shared, at + 4, as_i32(e), as_i32(f), as_i32(g), as_i32(h))
        return put8

    @device
    def pair(a, b):
        return u32(f32_to_f16(a) | f32_to_f16(b) << u32(16))

    @device
    def put8(shared, at, a, b, c, d, e, f, g, h):
        sts4(shared, at, pair(a, b), pair(c, d), pair(e, f), pair(g, h))
    return put8


def unpack_line(fmt, dtype):
    """(t, j, shared, at): columns 32j..32j+31 of the chunk t, as words from shared[at] on."""
    put8, words8 = _put8(dtype), 8 // ELEMENTS[dtype]
    if not fmt.is_quantized:
        values = float_values(fmt.name)

        @device
        def unpack(t, j, shared, at):
            for q in range(4):
                a, b, c, d, e, f, g, h = values(t, 4 * j + q)
                put8(shared, at + q * words8, a, b, c, d, e, f, g, h)
        return unpack

    levels, sub_block, group = unpacker(fmt.name)[:3]
    n_sub, n_group, has_min = fmt.sub, fmt.group, fmt.has_min

    @device
    def value(word, shift, scale, minimum):
        product = mul(scale, i2f(i32(word << shift) >> 24))
        return sub(product, minimum) if has_min else product

    @device
    def put_words(v, w, scale, minimum, shared, at):
        put8(shared, at, value(v, 24, scale, minimum), value(v, 16, scale, minimum), value(v, 8, scale, minimum),
             value(v, 0, scale, minimum),
             value(w, 24, scale, minimum), value(w, 16, scale, minimum), value(w, 8, scale, minimum), value(w, 0, scale, minimum))

    @device
    def put_half(t, column, a, b, c, d, shared, at):  # 16 columns: no sub-block is smaller
        isc, imin = sub_block(t, column // n_sub)
        d_group, m_group = group(t, column // n_group)
        scale, minimum = mul(d_group, i2f(isc)), mul(m_group, i2f(imin))
        put_words(a, b, scale, minimum, shared, at)
        put_words(c, d, scale, minimum, shared, at + words8)

    @device
    def unpack(t, j, shared, at):
        w = levels(t, j)
        put_half(t, 32 * j, w[0], w[1], w[2], w[3], shared, at)
        put_half(t, 32 * j + 16, w[4], w[5], w[6], w[7], shared, at + 2 * words8)
    return unpack


def store_lines(dtype, aligned):
    """(out, lane, shared, at, first, step, across, n_lines, n_cols): the first n_lines lines from shared[at] on; line l goes to
    the elements of out from first + l * step on, as far as its columns, across * l and following, are below n_cols."""
    stride, elements, of_word = line_words(dtype), ELEMENTS[dtype], ELEMENTS[dtype] - 1
    width = 4 * elements if aligned else 1  # elements that a lane stores at a time
    bits, n_steps = (LINE // width).bit_length() - 1, LINES * LINE // width // 32

    @device
    def put(out, i, shared, line, column):
        if aligned:
            a, b, c, d = lds4(shared, line + (column >> of_word))
            st4(out, i >> of_word, a, b, c, d)
        else:
            word = lds(shared, line + (column >> of_word))
            st(out, i, word >> 16 * (column & of_word))

    @device
    def store(out, lane, shared, at, first, step, across, n_lines, n_cols):
        for s in range(n_steps):
            i = 32 * s + lane
            line, column = i >> bits, (i & LINE // width - 1) * width
            if line < n_lines and across * line + column < n_cols:
                put(out, first + line * step + column, shared, at + line * stride, column)
    return store


def output(dtype, aligned):
    """The type of the parameter `out`."""
    return U16 if dtype == "f16" and not aligned else U32


@factory(cases("f32", "f16"))
def dequantize_kernel(name, dtype, aligned):
    fmt = format_of(name)
    unpack, store, stride, tile_words = (unpack_line(fmt, dtype), store_lines(dtype, aligned), line_words(dtype),
                                         tile_bytes(fmt) // 4)
    n_shared = N_THREADS * stride

    def kernel(words, out, n_rows, n_cols):  # block: the tile blockIdx
        shared = cuda.shared.array(n_shared, i32)
        thread, row, n_chunks = cuda.threadIdx.x, i64(cuda.blockIdx.x) * ROWS, (n_cols + CHUNK - 1) // CHUNK
        lane, warp = thread & 31, thread >> 5
        column = cuda.blockIdx.y * CHUNK + warp * LINE
        if column < n_cols:
            t = (words, (i64(cuda.blockIdx.x) * n_chunks + cuda.blockIdx.y) * tile_words, i32(lane))
            unpack(t, warp, shared, thread * stride)
            syncwarp()
            store(out, lane, shared, warp * (LINES * stride), row * n_cols + column, n_cols, 0, n_rows - row, n_cols - column)
    return Kernel(kernel, (U32, output(dtype, aligned), N, N), N_THREADS)


def dequantize(call: Call):
    """out = w, dequantized.   w: tiles of a weight [m, k]; out: f32 or f16 [m, k]; both on 16 bytes."""
    (n_rows, n_cols), dtype = call.w.shape, call.out.dtype
    need(dtype in ELEMENTS, "dtype", dtype, ", ".join(ELEMENTS))
    need(n_rows >= 1, "n_rows", n_rows, "at least 1")
    need(1 <= n_cols < 65536 * CHUNK, "n_cols", n_cols, f"1..{65536 * CHUNK - 1}")
    kernel = dequantize_kernel(format_of(call.w.dtype, "dequantize").name, dtype, is_aligned(dtype, n_cols))
    grid, args = (-(-n_rows // ROWS), -(-n_cols // CHUNK)), (call.w.data, call.out.data, n_rows, n_cols)
    return call.device.launch(kernel, grid, N_THREADS, args)
