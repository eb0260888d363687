"""Matrix products of small matrices with one token, and of float weights with few (docs/numerics.md, sections 3 and 4):
out[token, row] = sum over columns of weight[row, column] * x[token, column].

A block takes 32, 16, 8 or 4 rows of a tile; a warp takes whole chunks of 256 columns. With float weights a lane is a row, of 1, 2 or 4 tokens. With quantized
ones 2, 4 or 8 lanes (`split`) share a row's chunk, each with a run of its columns: they leave their integer sums (dp4a, limb by limb) in shared memory,
and one lane of the row does the float operations in the order of the groups. So a small matrix fills a GPU.

Chunks go in rounds, some to each warp: each round the warps leave their chunks' sums in shared memory, and behind a barrier the owner of a
(row, token) adds them to its total in the order of the chunks. So the order of a sum depends neither on the number of warps nor on that of tokens
nor on the split.
"""
from typing import NamedTuple

from numba import cuda

from ...quant.activation import LIMIT
from ...quant.formats import CHUNK, FORMATS, Format, format_of
from ...quant.tile import ROWS, tile_bytes
from .launch import F32, Kernel, N, U32, factory
from .ptx import add, as_f32, as_i32, device, dp4a, f32, fma, i2f, i32, i64, l2f, ld, ld4, lds, st, sts, syncwarp, wait_for_previous
from .quantize import plane_words
from .weights import float_values, unpacker_with_tables


class Chunks(NamedTuple):
    """How the chunks of a format are multiplied and added, as device functions. `shared`: words of the warp's own shared memory, from `at`."""
    dot: object       # (t, part, x, acc, chunk, first, n, n_cols, shared, at): acc[token] of the chunk for the tokens from `first`;
                      # with a split, what is needed for it goes to shared memory
    gather: object    # (t, shared, at, row) -> the sum of a chunk, of what the lanes of its row left in shared memory
    slots: int        # values that a lane leaves there
    add: object       # (total, acc, x, token, chunk, n, n_cols) -> total with the chunk's sum added
    n_entries: int    # of codebooks in shared memory
    entry: object     # (i) -> one of them


def max_warps(fmt: Format, n_tokens: int) -> int:
    """Warps of a block: what registers allow, 128 a thread for 14 warps, 168 for 12, 255 for 8."""
    return 8 if n_tokens > 1 else 12 if fmt.name == "F32" else 14


def tokens(fmt: Format) -> tuple[int, ...]:
    """Tokens of a block."""
    return (1,) if fmt.is_quantized else (1, 2, 4)


def splits(fmt: Format) -> tuple[int, ...]:
    """The splits of a format: a lane must have whole groups, or all lanes one group together. The chain of float weights has one order."""
    return tuple(s for s in (2, 4, 8) if fmt.group == CHUNK or CHUNK // s % fmt.group == 0) if fmt.is_quantized else (1,)


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


def _quantized(fmt, split) -> Chunks:
    """x: the activation buffer of `quantize`."""
    (levels, sub, group, _, _), n_entries, entry = unpacker_with_tables(fmt.name)
    accumulate, rounded = _integer_sum(fmt)
    n_group, has_min = fmt.group // fmt.sub, fmt.has_min                  # sub-blocks of a group
    subs, words, sums = 32 // fmt.sub, fmt.sub // 4, fmt.sub // 16        # of 32 columns: sub-blocks; of a sub-block: words of a limb, sums of q
    assert fmt.group * max(fmt.max_imin, 1) * LIMIT < 2**31, fmt.name
    blocks, rows = 8 // split, ROWS // split                              # of a lane: blocks of 32 columns; of a warp: rows
    whole = fmt.group == CHUNK                                            # one group a chunk: its lanes' integers are added
    own_groups = 1 if whole else CHUNK // split // fmt.group              # of a lane
    values = 1 + has_min                                                  # of a group: d and RN(S), m and RN(M)
    slots = 2 + has_min if whole else 2 * values * own_groups             # whole: S in two words, M; else for each group d, m, RN(S), RN(M)

    @device
    def q_sum(x, i):
        return i32(ld(x, i)) if sums == 1 else i32(i32(ld(x, i)) + i32(ld(x, i + 1)))

    @device
    def block(t, j, k, x, base, lo, q_sums, high, low, minimum, shared, at):
        """Adds the 32 columns j, the lane's k-th block of them. base: word of the chunk in the hi plane."""
        w = levels(t, j)
        for half in range(subs):
            i = j * subs + half
            isc, imin = sub(t, i)
            high, low = accumulate(x, base + i * words, lo, w, half, isc, high, low)
            if has_min:
                minimum = i32(minimum + imin * q_sum(x, q_sums + (base >> 2) + i * sums))
            own = k * subs + half + 1  # sub-blocks of this lane so far
            if not whole and own % n_group == 0:
                d, m = group(t, i // n_group)
                slot = at + (own // n_group - 1) * 2 * values * 32
                sts(shared, slot, as_i32(d))
                sts(shared, slot + values * 32, as_i32(rounded(high, low)))
                if has_min:
                    sts(shared, slot + 32, as_i32(m))
                    sts(shared, slot + 96, as_i32(i2f(minimum)))
                high, low, minimum = i32(0), i32(0), i32(0)
        return high, low, minimum

    @device
    def dot(t, part, x, acc, chunk, first, n, n_cols, shared, at):
        n_chunks = (n_cols + 255) >> 8
        lo, _, q_sums, _ = plane_words(n, n_chunks)
        j, base = part * blocks, (i64(first) * n_chunks + chunk) * 64
        high, low, minimum = i32(0), i32(0), i32(0)
        high, low, minimum = block(t, j, 0, x, base, lo, q_sums, high, low, minimum, shared, at)  # four calls: the loop would stay a loop
        if blocks > 1:
            high, low, minimum = block(t, j + 1, 1, x, base, lo, q_sums, high, low, minimum, shared, at)
        if blocks > 2:
            high, low, minimum = block(t, j + 2, 2, x, base, lo, q_sums, high, low, minimum, shared, at)
            high, low, minimum = block(t, j + 3, 3, x, base, lo, q_sums, high, low, minimum, shared, at)
        if whole:
            sts(shared, at, high)
            sts(shared, at + 32, low)
            if has_min:
                sts(shared, at + 64, minimum)

    @device
    def gather(t, shared, at, row):
        acc = f32(0)
        if whole:
            high, low, minimum = i32(0), i32(0), i32(0)
            for p in range(split):
                slot = at + p * rows + row
                high, low = i32(high + lds(shared, slot)), i32(low + lds(shared, slot + 32))
                if has_min:
                    minimum = i32(minimum + lds(shared, slot + 64))
            d, m = group(t, 0)
            acc = fma(rounded(high, low), d, acc)
            if has_min:
                acc = fma(-m, i2f(minimum), acc)
        else:
            for p in range(split):
                for g in range(own_groups):
                    slot = at + g * 2 * values * 32 + p * rows + row
                    acc = fma(as_f32(lds(shared, slot + values * 32)), as_f32(lds(shared, slot)), acc)
                    if has_min:
                        acc = fma(-as_f32(lds(shared, slot + 32)), as_f32(lds(shared, slot + 96)), acc)
        return acc

    @device
    def add_chunk(total, acc, x, token, chunk, n, n_cols):
        n_chunks = (n_cols + 255) >> 8
        _, scales, _, _ = plane_words(n, n_chunks)
        return fma(acc, as_f32(ld(x, scales + i64(token) * n_chunks + chunk)), total)
    return Chunks(dot, gather, slots, add_chunk, n_entries, entry)


def _float(fmt, n_tokens) -> Chunks:
    """x: float32 [n, n_cols]. A chain has one order: no split."""
    values = float_values(fmt.name)

    @device
    def eight(v, x, i, acc):
        a, b, c, d = ld4(x, i)
        e, f, g, h = ld4(x, i + 4)
        acc = fma(v[3], d, fma(v[2], c, fma(v[1], b, fma(v[0], a, acc))))
        return fma(v[7], h, fma(v[6], g, fma(v[5], f, fma(v[4], e, acc))))

    @device
    def dot(t, part, x, acc, chunk, first, n, n_cols, shared, at):
        for c in range(n_tokens):
            acc[c] = f32(0)
        width = min(n_cols - chunk * 256, 256)
        if width == 256 and n_cols & 3 == 0:
            q = 0
            while q < 32:  # 32 columns at a time: their loads are under way together
                v0, v1, v2, v3 = values(t, q), values(t, q + 1), values(t, q + 2), values(t, q + 3)
                for c in range(n_tokens):
                    i = i64(min(first + c, n - 1)) * n_cols + chunk * 256 + 8 * q
                    acc[c] = eight(v3, x, i + 24, eight(v2, x, i + 16, eight(v1, x, i + 8, eight(v0, x, i, acc[c]))))
                q += 4
        else:
            for q in range((width + 7) // 8):
                v = values(t, q)
                for i in range(8):
                    column = 8 * q + i
                    if column < width:
                        for c in range(n_tokens):
                            acc[c] = fma(v[i], ld(x, i64(min(first + c, n - 1)) * n_cols + chunk * 256 + column), acc[c])

    @device
    def add_chunk(total, acc, x, token, chunk, n, n_cols):
        return add(total, acc)
    return Chunks(dot, None, 0, add_chunk, 0, None)


def cases() -> list[tuple]:
    """(format, tokens, split)"""
    tiled = [fmt for fmt in FORMATS.values() if fmt.planes]
    return [(fmt.name, n, split) for fmt in tiled for n in tokens(fmt) for split in splits(fmt)]


@factory(cases())
def mmvq_kernel(name, n_tokens, split):
    fmt = format_of(name)
    dot, gather, slots, add_chunk, n_entries, entry = _quantized(fmt, split) if fmt.is_quantized else _float(fmt, n_tokens)
    tile_words = tile_bytes(fmt) // 4
    rows, most_warps = ROWS // split, max_warps(fmt, n_tokens)
    log_split, log_rows = split.bit_length() - 1, rows.bit_length() - 1
    n_owned, per_round = n_tokens * rows, chunks_per_round(n_tokens)
    n_parts, n_shared = 2 * per_round * n_owned, n_entries + most_warps * slots * 32 or 1
    assert n_owned <= 32 or split == 1

    def kernel(words, x, out, n_rows, n_cols, n):  # block: rows of tile blockIdx.x // split, tokens from blockIdx.y * n_tokens
        parts = cuda.shared.array(n_parts, f32)    # [round % 2][chunk][token][row]
        totals = cuda.shared.array(n_owned, f32)   # [token][row]
        shared = cuda.shared.array(n_shared, i32)  # codebooks, then [warp][slot][lane]
        acc = cuda.local.array(n_tokens, f32)
        tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
        lane, warp, n_warps = tid & 31, tid >> 5, n_threads >> 5
        row_tile, first_row = cuda.blockIdx.x >> log_split, (cuda.blockIdx.x & (split - 1)) * rows
        first, n_chunks = cuda.blockIdx.y * n_tokens, (n_cols + 255) >> 8
        at = n_entries + warp * slots * 32
        p = tid  # while loops: a range with a step divides
        if n_entries:
            while p < n_entries:
                sts(shared, p, i32(entry(p)))
                p += n_threads
            cuda.syncthreads()  # the codebooks are there
            p = tid
        while p < n_owned:  # the thread that sets a total is the only one to touch it: no barrier
            totals[p] = f32(0)
            p += n_threads
        wait_for_previous()  # for the activations
        before, side = 0, 0  # chunks of earlier rounds
        while before < n_chunks:
            slot = warp
            while slot < per_round and before + slot < n_chunks:
                chunk = before + slot
                tile = (i64(row_tile) * n_chunks + chunk) * tile_words
                t = words, tile, first_row + (lane & (rows - 1)), shared
                dot(t, lane >> log_rows, x, acc, chunk, first, n, n_cols, shared, at + lane)
                if split == 1:
                    for c in range(n_tokens):
                        parts[((side + slot) * n_tokens + c) * 32 + lane] = acc[c]
                else:
                    syncwarp()  # all sums of the chunk are there
                    if lane < n_owned:
                        parts[(side + slot) * n_owned + lane] = gather(t, shared, at, lane)
                    syncwarp()  # and have been read
                slot += n_warps
            cuda.syncthreads()  # one a round: the next round writes the other side, and the one after it comes behind another barrier
            p = tid
            while p < n_owned:
                total, token, w = totals[p], min(first + (p >> log_rows), n - 1), 0
                while w < per_round and before + w < n_chunks:
                    total = add_chunk(total, parts[(side + w) * n_owned + p], x, token, before + w, n, n_cols)
                    w += 1
                totals[p] = total
                p += n_threads
            before, side = before + per_round, per_round - side
        p = tid
        while p < n_owned:
            row, token = row_tile * 32 + first_row + (p & (rows - 1)), first + (p >> log_rows)
            if row < n_rows and token < n:
                st(out, i64(token) * n_rows + row, totals[p])
            p += n_threads
    return Kernel(kernel, (U32, U32 if fmt.is_quantized else F32, F32, N, N, N), most_warps * 32)


def chunks_per_round(n_tokens: int) -> int:
    """64 chunks of one token, the whole row of most models: no warp waits for another before the end. 16 KiB of shared memory for any n_tokens."""
    return 64 // n_tokens

