"""Matrix products (docs/numerics.md, sections 3 and 4): out[token, row] = sum over columns of weight[row, column] * x[token, column].

A block takes a tile of 32 rows and 1, 2, 4 or 8 tokens. Lane = row; a warp takes whole chunks of 256 columns, in rounds: each round every
warp leaves its chunk's sum in shared memory, and behind a barrier the owner of a (row, token) adds them to its total in chunk order. So the
order of a sum depends neither on the number of warps nor on that of tokens. The integer sums inside a chunk have no order: dp4a.
"""
from typing import NamedTuple

from numba import cuda

from ...quant.activation import LIMIT
from ...quant.formats import CHUNK, FORMATS, format_of
from ...quant.tile import ROWS, tile_bytes
from .launch import F32, Kernel, N, U32, check, factory
from .ptx import add, as_f32, device, dp4a, f32, fma, i2f, i32, i64, l2f, ld, ld4, st
from .quantize import plane_words
from .weights import float_values, unpacker

MAX_WARPS = 8
TOKENS = (1, 2, 4, 8)  # of a block


class Chunks(NamedTuple):
    """How the chunks of a format are multiplied and added, as device functions."""
    dot: object       # (t, x, acc, chunk, first, n, n_cols): fills acc[token] with the chunk's sums for the tokens from `first`
    add: object       # (total, acc, x, token, chunk, n, n_cols) -> total with the chunk's sum added


def _integer_sum(fmt):
    """(accumulate, rounded) of S, the sum over a group of isc * level * q. It is held as two int32: the sum itself and nothing
    where it fits 32 bits, else the sums over the limbs, S = 128 high + low."""
    @device
    def dot16(x, i, a, b, c, d, s):
        e, f, g, h = ld4(x, i)
        return dp4a(d, h, dp4a(c, g, dp4a(b, f, dp4a(a, e, s))))

    if fmt.sub == 32:
        @device
        def dot(x, i, w, half, s):
            return dot16(x, i + 4, w[4], w[5], w[6], w[7], dot16(x, i, w[0], w[1], w[2], w[3], s))
    else:
        @device
        def dot(x, i, w, half, s):
            return dot16(x, i, w[0], w[1], w[2], w[3], s) if half == 0 else dot16(x, i, w[4], w[5], w[6], w[7], s)

    largest = fmt.group * fmt.max_level * fmt.max_isc  # of a sum over activations of 1
    assert largest * 127 < 2**31, fmt.name
    if largest * LIMIT < 2**31:
        @device
        def accumulate(x, i, lo, w, half, isc, s, zero):
            return i32(s + isc * dot(x, lo + i, w, half, i32(dot(x, i, w, half, i32(0)) << 7))), zero

        @device
        def rounded(s, zero):
            return i2f(s)
    else:
        @device
        def accumulate(x, i, lo, w, half, isc, high, low):
            return i32(high + isc * dot(x, i, w, half, i32(0))), i32(low + isc * dot(x, lo + i, w, half, i32(0)))

        @device
        def rounded(high, low):
            return l2f(i64(high) * 128 + low)
    return accumulate, rounded


def _quantized(fmt, n_tokens) -> Chunks:
    """x: the activation buffer of `quantize`."""
    levels, sub, group = unpacker(fmt.name)
    accumulate, rounded = _integer_sum(fmt)
    n_group, has_min = fmt.group // fmt.sub, fmt.has_min            # sub-blocks of a group
    subs, words, sums = 32 // fmt.sub, fmt.sub // 4, fmt.sub // 16  # sub-blocks of 32 columns; a sub-block's words of a limb, sums of q
    assert fmt.group * max(fmt.max_imin, 1) * LIMIT < 2**31, fmt.name

    @device
    def q_sum(x, i):
        return i32(ld(x, i)) if sums == 1 else i32(i32(ld(x, i)) + i32(ld(x, i + 1)))

    @device
    def dot(t, x, acc, chunk, first, n, n_cols):
        n_chunks = (n_cols + 255) // 256
        lo, _, q_sums, _ = plane_words(n, n_chunks)
        high, low, minima = cuda.local.array(n_tokens, i32), cuda.local.array(n_tokens, i32), cuda.local.array(n_tokens, i32)
        for c in range(n_tokens):
            acc[c] = f32(0)
            high[c], low[c], minima[c] = i32(0), i32(0), i32(0)
        for j in range(8):
            w = levels(t, j)
            for half in range(subs):
                i = j * subs + half
                isc, imin = sub(t, i)
                for c in range(n_tokens):
                    at = i64(min(first + c, n - 1)) * n_chunks + chunk  # tokens beyond the last repeat it, and are not stored
                    high[c], low[c] = accumulate(x, at * 64 + i * words, lo, w, half, isc, high[c], low[c])
                    if has_min:
                        minima[c] = i32(minima[c] + imin * q_sum(x, q_sums + at * 16 + i * sums))
                if (i + 1) % n_group == 0:
                    d, m = group(t, i // n_group)
                    for c in range(n_tokens):
                        acc[c] = fma(rounded(high[c], low[c]), d, acc[c])
                        if has_min:
                            acc[c] = fma(-m, i2f(minima[c]), acc[c])
                        high[c], low[c], minima[c] = i32(0), i32(0), i32(0)

    @device
    def add_chunk(total, acc, x, token, chunk, n, n_cols):
        n_chunks = (n_cols + 255) // 256
        _, scales, _, _ = plane_words(n, n_chunks)
        return fma(acc, as_f32(ld(x, scales + i64(token) * n_chunks + chunk)), total)
    return Chunks(dot, add_chunk)


def _float(fmt, n_tokens) -> Chunks:
    """x: float32 [n, n_cols]."""
    values = float_values(fmt.name)

    @device
    def dot(t, x, acc, chunk, first, n, n_cols):
        for c in range(n_tokens):
            acc[c] = f32(0)
        width = min(n_cols - chunk * 256, 256)
        for q in range(width // 8):
            v = values(t, q)
            for i in range(8):
                for c in range(n_tokens):
                    acc[c] = fma(v[i], ld(x, i64(min(first + c, n - 1)) * n_cols + chunk * 256 + 8 * q + i), acc[c])
        for column in range(width & ~7, width):
            w = values(t, column // 8)[column & 7]
            for c in range(n_tokens):
                acc[c] = fma(w, ld(x, i64(min(first + c, n - 1)) * n_cols + chunk * 256 + column), acc[c])

    @device
    def add_chunk(total, acc, x, token, chunk, n, n_cols):
        return add(total, acc)
    return Chunks(dot, add_chunk)


ALL_TOKENS_TESTED = "F16", "Q4_0", "Q4_1", "Q2_K", "Q6_K", "NVFP4"  # one format of each form; others with fewest and most


@factory([(fmt.name, n_tokens) for fmt in FORMATS.values() if fmt.planes
          for n_tokens in (TOKENS if fmt.name in ALL_TOKENS_TESTED else (TOKENS[0], TOKENS[-1]))])
def mul_mat_kernel(name, n_tokens):
    fmt = format_of(name)
    dot, add_chunk = (_quantized if fmt.is_quantized else _float)(fmt, n_tokens)
    tile_words = tile_bytes(fmt) // 4
    n_owned = n_tokens * 32
    n_parts = 2 * MAX_WARPS * n_owned

    def kernel(words, x, out, n_rows, n_cols, n):  # block: row tile blockIdx.x, tokens from blockIdx.y * n_tokens
        parts = cuda.shared.array(n_parts, f32)    # [round % 2][warp][token][row]
        totals = cuda.shared.array(n_owned, f32)   # [token][row]
        acc = cuda.local.array(n_tokens, f32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        lane, warp, n_warps = tid & 31, tid >> 5, n_threads >> 5
        first, n_chunks = cuda.blockIdx.y * n_tokens, (n_cols + 255) // 256
        for p in range(tid, n_owned, n_threads):  # the thread that sets a total is the only one to touch it: no barrier
            totals[p] = f32(0)
        for r in range((n_chunks + n_warps - 1) // n_warps):
            side, chunk = (r & 1) * MAX_WARPS, r * n_warps + warp
            if chunk < n_chunks:
                dot((words, (i64(cuda.blockIdx.x) * n_chunks + chunk) * tile_words, lane), x, acc, chunk, first, n, n_cols)
                for c in range(n_tokens):
                    parts[((side + warp) * n_tokens + c) * 32 + lane] = acc[c]
            cuda.syncthreads()  # one a round: the next round writes the other side, and the one after it comes behind another barrier
            for p in range(tid, n_owned, n_threads):
                total, token = totals[p], min(first + (p >> 5), n - 1)
                for w in range(min(n_warps, n_chunks - r * n_warps)):
                    total = add_chunk(total, parts[(side + w) * n_owned + p], x, token, r * n_warps + w, n, n_cols)
                totals[p] = total
        for p in range(tid, n_owned, n_threads):
            row, token = cuda.blockIdx.x * 32 + (p & 31), first + (p >> 5)
            if row < n_rows and token < n:
                st(out, i64(token) * n_rows + row, totals[p])
    return Kernel(kernel, (U32, U32 if fmt.is_quantized else F32, F32, N, N, N), MAX_WARPS * 32)


class Shape(NamedTuple):
    n_tokens: int               # of a block
    n_warps: int                # of a block
    grid: tuple[int, int]       # row tiles, groups of tokens


def launch_shape(n_rows: int, n_cols: int, n: int) -> Shape:
    """As many tokens as a block can take, so that weights are unpacked for all of them; as many warps as fill every round alike."""
    n_tokens = next((c for c in TOKENS if c >= n), TOKENS[-1])
    n_chunks = -(-n_cols // CHUNK)
    n_rounds = -(-n_chunks // MAX_WARPS)
    return Shape(n_tokens, -(-n_chunks // n_rounds), (-(-n_rows // ROWS), -(-n // n_tokens)))


def mul_mat(target, format_name, words, x, out, n_rows, n_cols, n):
    """words: address of the weight's tiles [n_rows, n_cols], on 16 bytes; out: of float32 [n, n_rows].
    x: of the activation buffer of `quantize`, on 16 bytes, for a quantized format; of float32 [n, n_cols] for a float one."""
    for what, found in (("n_rows", n_rows), ("n_cols", n_cols)):
        check("mul_mat", found >= 1, what, found, "at least 1")
    check("mul_mat", 1 <= n <= TOKENS[-1] * 65535, "n", n, f"1..{TOKENS[-1] * 65535}")
    shape = launch_shape(n_rows, n_cols, n)
    return target.launch(mul_mat_kernel(format_of(format_name, "mul_mat").name, shape.n_tokens), shape.grid, 32 * shape.n_warps,
                         (words, x, out, n_rows, n_cols, n))
