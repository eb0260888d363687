"""Products of one token whose activations each block makes for itself: total = x + y, and those of its rms_norm, as in
add_rms_norm_act.

While the first weights are on their way, the block's warps take the row's chunks by turns: x and y to floats in shared memory,
the sum of squares with a barrier on either side, then each chunk normed and quantized where it stands, for `mmq_few` to multiply.
Only the first block writes total.
"""
from functools import lru_cache

from numba import cuda

from ...quant.formats import CHUNK, format_of
from ..call import Call
from .ending import gate_and_store
from .few_product import product_of_token
from .few_slots import ROW_SLOT
from .launch import F32, Kernel, N, SCALAR_F32, U32, factory, need
from .mmq_few import MAX_WARPS, FewShape, few_launch, few_shape, qkv_shape, threads_of
from .operands import addresses, gated_of, qkv_of
from .ptx import (add, as_f32, as_u32, device, f32, i32, ld4, lds, lds4, mul, redux_max, st4, sts, sts4, syncwarp,
                  wait_for_previous)
from .quantize import d_bits, largest, levels_of, limb_words, sum_of_four_lanes
from .rms_norm import PARTIALS, halve128, reciprocal, sum_of_partial
from .tile_form import swizzle, takes_sums
from .tile_walk import by_turns, in_a_row

MOST_NORMED = 6144  # columns of a row that every block norms for itself: what the shared memory of all GPUs has room for


def row_words(n_cols: int) -> int:
    """Words of shared memory for a row: its columns or activations by chunks, an even number of them, and the 128 partials of its
    sum of squares."""
    return (-(-n_cols // CHUNK) + 1 & -2) * CHUNK + PARTIALS


@device
def sums(x, y, column, last):
    """Of four columns, the last four for those past the end."""
    a, b, c, d = ld4(x, min(column, last))
    e, f, g, h = ld4(y, min(column, last))
    return add(a, e), add(b, f), add(c, g), add(d, h)


@device
def keep(shared, row, total, column, last, a, b, c, d):
    if column > last:
        a, b, c, d = f32(0), f32(0), f32(0), f32(0)
    elif cuda.blockIdx.x == 0:
        st4(total, column, a, b, c, d)
    sts4(shared, row + column, as_u32(a), as_u32(b), as_u32(c), as_u32(d))


@device
def normed(shared, row, column, last, r, wa, wb, wc, wd):
    """Four columns, +0 past the end."""
    if column > last:
        return f32(0), f32(0), f32(0), f32(0)
    a, b, c, d = lds4(shared, row + column)
    return mul(mul(as_f32(a), r), wa), mul(mul(as_f32(b), r), wb), mul(mul(as_f32(c), r), wc), mul(mul(as_f32(d), r), wd)


@lru_cache(None)
def activation_writer(sums_too: bool):
    """(write, write_half). write: (shared, chunk, lane, a, b): a warp quantizes a chunk, of each lane the four columns a from 4
    lane on and b from 128 + 4 lane on. The activations, CHUNK words, lie from word `chunk` of shared memory on, where the columns
    may have been. write_half: (shared, chunk, lane, half, a, b): only 128 columns of it, to a place where the columns do not lie:
    another warp, with the other half, may still read them. sums_too: with the sums of q."""
    act_at, d_at, sums_at = ROW_SLOT.act, ROW_SLOT.d, ROW_SLOT.limbs

    @device
    def put(shared, chunk, lane, half, hi, lo, s):
        """Of the columns 128 half + 4 lane of a chunk: the limbs, swizzled as `mmq_few` copies them, and, of four lanes, the
        sum."""
        t = i32(32 * half + lane)
        sts(shared, chunk + act_at + ((((t >> 2) ^ swizzle(0)) << 2) | (t & 3)), hi)
        sts(shared, chunk + act_at + 64 + ((((t >> 2) ^ swizzle(1)) << 2) | (t & 3)), lo)
        if sums_too:
            s = sum_of_four_lanes(s, lane)
            if lane & 3 == 0:
                sts(shared, chunk + sums_at + (t >> 2), s)

    @device
    def largest_of_chunk(a, b):
        return redux_max(i32(max(largest(a[0], a[1], a[2], a[3]), largest(b[0], b[1], b[2], b[3]))))

    @device
    def write_half(shared, chunk, lane, half, a, b):
        bits = largest_of_chunk(a, b)
        used, inverse = levels_of(bits)
        c, d, e, f = b if half else a
        hi, lo, s = limb_words(c, d, e, f, inverse, used)
        put(shared, chunk, lane, half, hi, lo, s)
        if half == 0 and lane == 0:
            sts(shared, chunk + d_at, d_bits(bits, used))

    @device
    def write(shared, chunk, lane, a, b):
        bits = largest_of_chunk(a, b)
        syncwarp()  # all lanes have loaded the chunk
        used, inverse = levels_of(bits)
        hi, lo, s = limb_words(a[0], a[1], a[2], a[3], inverse, used)
        put(shared, chunk, lane, 0, hi, lo, s)
        hi, lo, s = limb_words(b[0], b[1], b[2], b[3], inverse, used)
        put(shared, chunk, lane, 1, hi, lo, s)
        if lane == 0:
            sts(shared, chunk + d_at, d_bits(bits, used))
    return write, write_half


@lru_cache(None)
def row_maker(sums_too: bool):
    """The function by which all threads of a block make the activations of its token. sums_too: with the sums of q."""
    write, _ = activation_writer(sums_too)

    @device
    def make(act, shared, tid, n_threads, n_cols):
        """act: (x, y, w, total, eps, row). The chunks' activations, which a barrier must follow, lie from word `row` of shared
        memory on, CHUNK words each. The norm's weights of a warp's first chunk are asked for before the wait for the kernel
        before."""
        x, y, w, total, eps, row = act
        lane, warp, n_warps = i32(tid & 31), i32(tid >> 5), i32(n_threads >> 5)
        n_chunks, last, step = i32((n_cols + 255) >> 8), i32(n_cols - 4), i32(8 * n_threads)
        partials = i32(row + (((n_chunks + 1) & -2) << 8))
        column = i32(256 * warp + 4 * lane)
        wa, wb, wc, wd = ld4(w, min(column, last))
        we, wf, wg, wh = ld4(w, min(column + 128, last))
        wait_for_previous()

        # 1. total, and zeros up to the partials
        while row + column < partials:
            a, b, c, d = sums(x, y, column, last)
            e, f, g, h = sums(x, y, column + 128, last)
            keep(shared, row, total, column, last, a, b, c, d)
            keep(shared, row, total, column + 128, last, e, f, g, h)
            column = i32(column + step)
        cuda.syncthreads()  # the row is there

        # 2. r, for each warp
        j = tid
        while j < PARTIALS:
            sts(shared, partials + j, as_u32(sum_of_partial(shared, row + j, partials)))
            j = i32(j + n_threads)
        cuda.syncthreads()  # the partials are there
        at = i32(partials + lane)
        squares = halve128(as_f32(lds(shared, at)), as_f32(lds(shared, at + 32)), as_f32(lds(shared, at + 64)),
                           as_f32(lds(shared, at + 96)), lane)
        r = reciprocal(squares, n_cols, eps)

        # 3. a warp's chunks in the place of their columns
        chunk, column = warp, i32(256 * warp + 4 * lane)
        while chunk < n_chunks:
            write(shared, i32(row + (chunk << 8)), lane, normed(shared, row, column, last, r, wa, wb, wc, wd),
                  normed(shared, row, column + 128, last, r, we, wf, wg, wh))
            chunk, column = i32(chunk + n_warps), i32(column + step)
            if chunk < n_chunks:
                wa, wb, wc, wd = ld4(w, min(column, last))
                we, wf, wg, wh = ld4(w, min(column + 128, last))
    return make


def maker(names: tuple[str, ...]):
    """`row_maker` for matrices of these formats."""
    return row_maker(any(takes_sums(format_of(name)) for name in names))


@factory([("Q4_K", "Q4_K", "Q4_K", False), ("Q4_1", "Q8_0", "IQ2_S", False), ("Q4_K", "Q4_K", "Q6_K", True)])
def add_rms_norm_mmq_few_qkv_kernel(q, k, v, biased):
    run = product_of_token((q, k, v), in_a_row(3, 1, biased), maker((q, k, v)))

    def kernel(x, y, w, total, eps, row, q_words, k_words, v_words, q_bias, k_bias, v_bias, q_out, k_out, v_out, q_rows, k_rows,
               v_rows, n_cols, n_boxes):
        # blocks as in mmq_few_kernel
        run(((q_words, k_words, v_words), (q_out, k_out, v_out), (q_rows, k_rows, v_rows), (q_bias, k_bias, v_bias)),
            (x, y, w, total, eps, row), n_cols, i32(1), n_boxes)
    return Kernel(kernel, (F32,) * 4 + (SCALAR_F32, N) + (U32,) * 3 + (F32,) * 6 + (N,) * 5, threads_of(1, MAX_WARPS[1]))


@factory([("silu", "Q4_K", "Q4_K", False), ("silu", "Q4_1", "Q4_1", False), ("gelu", "IQ2_S", "Q8_0", True)])
def add_rms_norm_mmq_few_glu_kernel(activation, gate, up, biased):
    run = product_of_token((gate, up), by_turns(2, 1, gate_and_store(activation, biased)), maker((gate, up)))

    def kernel(x, y, w, total, eps, row, gate_words, up_words, gate_bias, up_bias, out, n_rows, n_cols, n_boxes):
        # blocks as in mmq_few_kernel
        run(((gate_words, up_words), (gate_bias, up_bias), out, n_rows), (x, y, w, total, eps, row), n_cols, i32(1), n_boxes)
    return Kernel(kernel, (F32,) * 4 + (SCALAR_F32, N) + (U32,) * 2 + (F32,) * 3 + (N,) * 3, threads_of(1, MAX_WARPS[1]))


def check(call: Call) -> None:
    """One row, of which every block has room for itself and loads four columns at a time, and quantized weights."""
    n_cols, matrices = call.x.n_cols, (call.q, call.k, call.v) if call.op == "add_rms_norm_mul_mat_qkv" else (call.gate, call.up)
    need(call.x.n_rows == 1, "n", call.x.n_rows, "1")
    need(1 <= n_cols <= MOST_NORMED and n_cols % 4 == 0, "n_cols", n_cols, f"a multiple of 4 up to {MOST_NORMED}")
    for w in matrices:
        need(w.shape[0] >= 1, "n_rows", w.shape[0], "at least 1")
        need(format_of(w.dtype, call.op).is_quantized, "type", w.dtype, "quantized types")


def plan(call: Call) -> FewShape:
    n_cols, limits = call.x.n_cols, (call.device.n_multiprocessors, call.device.shared_limit)
    if call.op == "add_rms_norm_mul_mat_qkv":
        names, n_rows, *_ = qkv_of(call)
        shape = qkv_shape(names, n_rows, n_cols, 1, *limits, row_words(n_cols))
    else:
        shape = few_shape(gated_of(call).names, call.gate.shape[0], n_cols, 1, *limits, row_words(n_cols))
    need(shape.n_bytes <= limits[1], "n_cols", n_cols, f"rows that leave room in {limits[1]} bytes of shared memory")
    return shape


def row_operands(call: Call) -> tuple:
    """The arguments of the norm; the last is the word of shared memory at which the row begins."""
    row = call.plan.n_bytes // 4 - row_words(call.x.n_cols)
    return *addresses(call.x, call.y, call.w, call.sum), call.eps, row


def add_rms_norm_mul_mat_qkv(call: Call):
    """sum = x + y; q_out, k_out, v_out = q a + q_bias, k a + k_bias, v a + v_bias, where a = quantize(sum / sqrt(mean(sum^2) +
    eps) * w).

    x, y, sum: f32 [1, k], w: f32 [k], all on 16 bytes; the others as of `mul_mat_qkv`, all quantized."""
    names, n_rows, biased, words, biases, outs = qkv_of(call)
    args = *row_operands(call), *words, *biases, *outs, *n_rows, call.x.n_cols
    return few_launch(call, add_rms_norm_mmq_few_qkv_kernel(*names, biased), args)


def add_rms_norm_mul_mat_glu(call: Call):
    """sum = x + y; out = act(gate a + gate_bias) * (up a + up_bias), where a = quantize(sum / sqrt(mean(sum^2) + eps) * w).

    x, y, sum: f32 [1, k], w: f32 [k], all on 16 bytes; the others as of `mul_mat_glu`, both quantized."""
    names, biased, matrices = gated_of(call)
    args = *row_operands(call), *matrices, call.out.data, *call.gate.shape
    return few_launch(call, add_rms_norm_mmq_few_glu_kernel(call.act, *names, biased), args)
