"""quantize(swiglu(z, rms_norm(x, w))): heads that are normed and gated, as activation blocks that are never written as floats.

Blocks as in quantize: a thread has four columns of a chunk of 256. A head is in lanes of one warp, whose columns are partials of
sum128 each; those that a shorter head does not have are +0, and change no sum of squares.
"""
from numba import cuda

from ...quant.formats import CHUNK
from .elementwise import BINARY
from .launch import F32, N, SCALAR_F32, U32, Kernel, factory, need
from .ptx import add, as_f32, as_i32, f32, fma, i32, i64, ld4, mul, shuffle
from .quantize import GROUPS, N_THREADS, blocks, chunk_quantizer, four_elements, own_chunk
from .rms_norm import reciprocal

HEADS = 16, 32, 64, 128  # channels
swiglu = BINARY["swiglu"]


@factory([(dim,) for dim in HEADS])
def rms_norm_swiglu_act_kernel(dim):
    quantize_chunk = chunk_quantizer(GROUPS)
    distances = tuple(dim // 4 >> i for i in range(1, 6) if dim // 4 >> i)  # of lanes whose sums are added, the farthest first

    def kernel(z, x, w, act, n, k, eps):  # block: chunks of row blockIdx.y
        row, (chunk, column) = cuda.blockIdx.y, own_chunk()
        first, lane = i64(row) * k, i32(cuda.threadIdx.x & 31)
        za, zb, zc, zd = four_elements(z, first, column, k)
        xa, xb, xc, xd = four_elements(x, first, column, k)
        wa, wb, wc, wd = ld4(w, i32(column & (dim - 1)))
        sa, sb, sc, sd = fma(xa, xa, f32(0)), fma(xb, xb, f32(0)), fma(xc, xc, f32(0)), fma(xd, xd, f32(0))
        for distance in distances:
            sa = add(sa, as_f32(shuffle(as_i32(sa), lane ^ distance)))
            sb = add(sb, as_f32(shuffle(as_i32(sb), lane ^ distance)))
            sc = add(sc, as_f32(shuffle(as_i32(sc), lane ^ distance)))
            sd = add(sd, as_f32(shuffle(as_i32(sd), lane ^ distance)))
        r = reciprocal(add(add(sa, sc), add(sb, sd)), i32(dim), eps)
        a, b = swiglu(za, mul(mul(xa, r), wa)), swiglu(zb, mul(mul(xb, r), wb))
        c, d = swiglu(zc, mul(mul(xc, r), wc)), swiglu(zd, mul(mul(xd, r), wd))
        if column >= k:  # the weights there are no columns' of the row
            a, b, c, d = f32(0), f32(0), f32(0), f32(0)
        quantize_chunk(a, b, c, d, act, n, row, chunk, (k + CHUNK - 1) // CHUNK)
    return Kernel(kernel, (F32, F32, F32, U32, N, N, SCALAR_F32), GROUPS * N_THREADS)


def check(call):
    blocks(*call.x.shape)
    need(call.w.n_cols in HEADS, "channels of a head", call.w.n_cols, ", ".join(map(str, HEADS)))


def rms_norm_swiglu_act(call):
    """act = quantize(silu(z) * (x / sqrt(mean(x^2) + eps) * w)), the mean over heads of len(w) columns.

    z, x: f32 [n, k]; w: f32 [channels of a head]; act: activations [n, k]; all on 16 bytes."""
    n, k = call.x.shape
    grid, n_threads = blocks(n, k)
    args = call.z.data, call.x.data, call.w.data, call.act.data, n, k, call.eps
    return call.device.launch(rms_norm_swiglu_act_kernel(call.w.n_cols), grid, n_threads, args)
