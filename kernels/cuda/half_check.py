"""Whether tensor cores add products of float16 exactly where `half_product` and `half_scaled` rely on it: tried on the GPU
itself, once, with the extremes of every bound. Hopper's do; exactness is a property of a chip that nobody promises."""
from itertools import accumulate

import numpy as np
from numba import cuda, types

from ...quant.activation import LIMIT
from ...quant.formats import CHUNK, Format, format_of
from ..call import HALVES, left_out
from .half_forms import EXACT, MOST_HIGH, MOST_LOW, half_form, largest_weight, most_reach
from .half_product import MOST_TOGETHER, SUM_WORDS, UNIT
from .launch import F32, HOPPER, Kernel, U32, factory
from .ptx import device, f32, i32, ld, st, sts, wait_for_previous
from .wgmma import ATOM_WORDS, fence, half_products, place, unswizzled_place

QUADS = 32            # the most of a block of `mmq_half`
N_THREADS, N_ROWS, N_COLUMNS, STEPS = 128, 64, 8 * QUADS, CHUNK // 16
B_WORDS = 4 * QUADS * ATOM_WORDS
WIDTHS = 8 * QUADS, 128, 96, 64, 48, 32, 16           # columns of B of a product, in the blocks of `mmq_half`
ENDS = tuple(accumulate(width // 2 for width in WIDTHS))  # of a lane's sums of each
PRODUCTS = ENDS[-1]                                   # sums of a lane
MINIMA_QUADS = MOST_TOGETHER                          # the most with which minima are multiplied
MINIMA_WIDTHS = tuple(8 * quads for quads in (MINIMA_QUADS, 12, 8, 4))  # columns of their B
MINIMA_ENDS = tuple(accumulate(width // 2 for width in MINIMA_WIDTHS))
MINIMA_WORDS = MINIMA_QUADS * SUM_WORDS               # of their B
MINIMA = MINIMA_ENDS[-1]                              # their sums of a lane
IN_PARTS = "Q4_K", "Q5_K"  # packed formats whose weights the cases have, of both signs: Q5_K's are the largest of all
MOST_LEVEL = EXACT // (32 * (128 * MOST_HIGH + MOST_LOW))  # of scaled formats


def may_be_halves(target, fmt: Format) -> bool:
    """Whether products of a format may be those of `mmq_half` on a `launch.Target`. The first question that is of float16 runs
    `half_check`; split formats are multiplied by int8."""
    return HALVES not in left_out() and (target.warpgroups if half_form(fmt).split else target.halves)


def multiplier(width: int):
    """(shared, first, a, at, d, to): the product of the first `width` columns of B, which begins at place `first`, to d from `to`
    on; words of A from a[at] on."""
    (start, _, wait, *_), words_of_unit, n_sums = half_products(width), QUADS * ATOM_WORDS // 4, width // 2

    @device
    def multiply(shared, first, a, at, d, to):
        sums, step = cuda.local.array(n_sums, f32), i32(0)
        for o in range(n_sums):
            sums[o] = f32(0)
        while step < STEPS:
            x = i32(at + 4 * step)
            start(sums, shared, i32(first + (step >> 2) * words_of_unit + 2 * (step & 3)), i32(ld(a, x)), i32(ld(a, x + 1)),
                  i32(ld(a, x + 2)), i32(ld(a, x + 3)), step)
            wait(sums)
            step = i32(step + 1)
        for o in range(n_sums):
            st(d, to + o, sums[o])
    return multiply


def unswizzled_multiplier(width: int):
    """(shared, first, a, at, e, to): the product of 16 columns of A, words from a[at] on, and the first `width` columns of B,
    which begins at place `first` without swizzle, to e from `to` on."""
    (_, start, wait, *_), n_sums = half_products(width), width // 2

    @device
    def multiply(shared, first, a, at, e, to):
        sums = cuda.local.array(n_sums, f32)
        start(sums, shared, first, i32(ld(a, at)), i32(ld(a, at + 1)), i32(ld(a, at + 2)), i32(ld(a, at + 3)))
        wait(sums)
        for o in range(n_sums):
            st(e, to + o, sums[o])
    return multiply


@factory([()])
def half_check_kernel():
    """d: f32 [case][lane][sums of all WIDTHS], the products A B of 64 x 256 and 256 x 256, and of its first columns; e: f32
    [case][lane][sums of all MINIMA_WIDTHS], those of minima and sums, 64 x 16 and 16 x 128, and of fewer columns likewise. a, b:
    words of A [case][lane][step][4], of B as atoms [case]; minima, q: those of e, of A [case][lane][4], of B without swizzle
    [case]. A block: a case."""
    multiply_256, multiply_128, multiply_96, multiply_64, multiply_48, multiply_32, multiply_16 = map(multiplier, WIDTHS)
    minima_128, minima_96, minima_64, minima_32 = map(unswizzled_multiplier, MINIMA_WIDTHS)

    def kernel(a, b, minima, q, d, e):
        shared = cuda.shared.array(0, types.uint32)
        tid, case = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        wait_for_previous()
        i = tid
        while i < B_WORDS:
            sts(shared, i, ld(b, case * B_WORDS + i))
            i = i32(i + N_THREADS)
        i = tid
        while i < MINIMA_WORDS:
            sts(shared, B_WORDS + i, ld(q, case * MINIMA_WORDS + i))
            i = i32(i + N_THREADS)
        fence()
        cuda.syncthreads()  # B is there
        first, at = place(shared, 0), i32((case * N_THREADS + tid) * (STEPS * 4))
        to = i32((case * N_THREADS + tid) * PRODUCTS)
        multiply_256(shared, first, a, at, d, to)
        multiply_128(shared, first, a, at, d, i32(to + ENDS[0]))
        multiply_96(shared, first, a, at, d, i32(to + ENDS[1]))
        multiply_64(shared, first, a, at, d, i32(to + ENDS[2]))
        multiply_48(shared, first, a, at, d, i32(to + ENDS[3]))
        multiply_32(shared, first, a, at, d, i32(to + ENDS[4]))
        multiply_16(shared, first, a, at, d, i32(to + ENDS[5]))
        first, at = unswizzled_place(shared, B_WORDS), i32((case * N_THREADS + tid) * 4)
        to = i32((case * N_THREADS + tid) * MINIMA)
        minima_128(shared, first, minima, at, e, to)
        minima_96(shared, first, minima, at, e, i32(to + MINIMA_ENDS[0]))
        minima_64(shared, first, minima, at, e, i32(to + MINIMA_ENDS[1]))
        minima_32(shared, first, minima, at, e, i32(to + MINIMA_ENDS[2]))
    return Kernel(kernel, (U32, U32, U32, U32, F32, F32), N_THREADS, arch=HOPPER)


# Cases: integers, so that every sum is known

def weights_and_limbs(fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """int64 [case, 64, 256] and [case, 256, 256], level times scale of a packed format and limbs, no partial sum of whose
    products passes 2^24, but that come near it: the largest of part of a chunk, of one sign and of both, of nearly equal ones; as
    many columns as there may be, then the rest; the largest low limbs; limbs that are all alike; large sums, then small ones that
    only their last bits tell; up to the bound and back; at random."""
    rng, w, part = np.random.default_rng(1), largest_weight(fmt), EXACT // (largest_weight(fmt) * MOST_HIGH) // 2 * 2
    a, b = np.full((9, N_ROWS, CHUNK), w), np.zeros((9, N_COLUMNS, CHUNK), np.int64)
    signs = 1 - 2 * (np.arange(CHUNK) & 1)
    b[0, :, :part] = 127
    a[1], b[1, :, -part:] = w * signs, 127 * signs[-part:]
    a[2], b[2, :, :part:2], b[2, :, 1:part:2] = w - (np.arange(CHUNK) >> 1 & 1), 127, -126
    n = EXACT // (w * 127)
    b[3, :, :n], b[3, :, n], a[3, :, n] = 127, 1, EXACT - n * w * 127 & 1022  # an odd sum
    b[4, :, :EXACT // (w * 64)] = 64 - 128 * (np.arange(N_COLUMNS) & 1)[:, None]
    b[5] = most_reach(fmt) // CHUNK - (np.arange(N_COLUMNS) & 1)[:, None]
    b[6, :, :part], b[6, :, part:-1], a[6, :, part:] = 127, 3 * signs[part:-1], 1
    b[7, :, :part], b[7, :, part:2 * part] = 127, -127
    a[8] = rng.integers(-w, w + 1, (N_ROWS, CHUNK))
    b[8] = rng.integers(-110, 111, (N_COLUMNS, CHUNK))
    return a, b


def levels_and_limbs() -> tuple[np.ndarray, np.ndarray]:
    """The same of scaled formats, levels and limbs of 32 columns, 128 hi, then lo: the largest of one sign, of nearly equal ones
    and with odd sums, and of both signs."""
    rng, limbs = np.random.default_rng(3), np.repeat([128 * MOST_HIGH, MOST_LOW], 32)
    a, b = np.full((3, N_ROWS, CHUNK), MOST_LEVEL), np.zeros((3, N_COLUMNS, CHUNK), np.int64)
    b[0, :, :64] = limbs
    a[1], b[1, :, :64], b[1, :, 63] = MOST_LEVEL - (np.arange(CHUNK) & 1), limbs, MOST_LOW - 1 - (np.arange(N_COLUMNS) & 2)
    a[2], b[2, :, :64] = rng.choice([-1, 1], a[2].shape) * MOST_LEVEL, rng.choice([-1, 1], (N_COLUMNS, 64)) * limbs
    return a, b


def minima_and_sums(n: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n, 64, 16] and [n, 128, 16]: imin up to 63 and parts of the sums of q, up to 2032."""
    rng, most = np.random.default_rng(2), 16 * LIMIT // 128
    a, b = np.full((n, N_ROWS, 16), 63), np.full((n, 8 * MINIMA_QUADS, 16), most)
    b[1] = -most
    b[2, ::2, 0], b[2, 1::2], b[2, 1::2, 0] = most - 1, -most, 1 - most  # odd sums
    a[3:], b[3:] = rng.integers(0, 64, a[3:].shape), rng.integers(-most, most + 1, b[3:].shape)
    return a, b


def pairs(values) -> np.ndarray:
    """uint32 words of two float16 each."""
    return np.ascontiguousarray(values, np.float16).view(np.uint32)


def fragments(a: np.ndarray) -> np.ndarray:
    """Words of A of 16 rows and 16 columns, uint32 [.., lane, 4], from [.., 16, 16]."""
    words = pairs(a).reshape(*a.shape[:-2], 2, 8, 2, 4)  # [rows 8 further][row][columns 8 further][two columns]
    return np.moveaxis(words, (-3, -1, -2, -4), (-4, -3, -2, -1)).reshape(*a.shape[:-2], 32, 4)


def atoms(b: np.ndarray) -> np.ndarray:
    """uint32 [case, words] of B as of `wgmma`, from [case, 256, 256]."""
    # [case][64 columns][atom][row][place]
    words = pairs(b).reshape(len(b), N_COLUMNS // 8, 8, 4, 8, 4).transpose(0, 3, 1, 2, 4, 5)
    rows, places = np.arange(8)[:, None], np.arange(8)
    return np.ascontiguousarray(words[..., rows, places ^ rows, :]).reshape(len(b), -1)


def unswizzled(b: np.ndarray) -> np.ndarray:
    """uint32 [case, words] of B as of `wgmma.HalfProducts.start_unswizzled`, from [case, 128, 16]."""
    words = pairs(b).reshape(len(b), MINIMA_QUADS, 8, 2, 4)  # [case][eight columns][column][half][word]
    return np.ascontiguousarray(words.swapaxes(2, 3)).reshape(len(b), -1)


def of_lanes(d: np.ndarray) -> np.ndarray:
    """Of sums [.., rows 16 a warp, columns] those of each lane: [.., lane, 4 (column / 8) + 2 (rows 8 further) + column % 2]."""
    *some, n_rows, n_columns = d.shape
    split = d.reshape(*some, n_rows // 16, 2, 8, n_columns // 8, 4, 2)  # [warp][further][row][eight][quarter][column]
    return np.moveaxis(split, (-6, -4, -2, -3, -5, -1), (-6, -5, -4, -3, -2, -1)).reshape(*some, 2 * n_rows, n_columns // 2)


def operands() -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """((a, b, minima, q) as the kernel takes them, (d, e) as it must leave them)."""
    packed, scaled = [weights_and_limbs(format_of(name)) for name in IN_PARTS], levels_and_limbs()
    a, b = map(np.concatenate, zip(*packed, scaled, scaled))
    i, q = minima_and_sums(len(a))
    # What a weight counts, and a limb: of halved levels half and twice as much
    counts = [sum(len(each) for each, _ in packed), len(scaled[0]), len(scaled[0])]
    unit, of_limbs = (np.repeat(each, counts)[:, None, None] for each in ([UNIT, 1, 0.5], [1, 1, 2]))
    words_of_a = fragments((a * unit).reshape(len(a), 4, 16, STEPS, 16).swapaxes(2, 3)).transpose(0, 1, 3, 2, 4)
    words_of_minima = fragments(i.reshape(len(i), 4, 16, 16))
    d, e = of_lanes(np.einsum("cik,cjk->cij", a, b) * unit * of_limbs), of_lanes(np.einsum("cik,cjk->cij", i, q))
    d = np.concatenate([d[..., :width // 2] for width in WIDTHS], axis=-1)
    e = np.concatenate([e[..., :width // 2] for width in MINIMA_WIDTHS], axis=-1)
    return ((np.ascontiguousarray(words_of_a).reshape(-1), atoms(b * of_limbs).reshape(-1), words_of_minima.reshape(-1),
             unswizzled(q).reshape(-1)), (d.astype(np.float32), e.astype(np.float32)))


def half_check(target, run) -> bool:
    """Whether all sums are exact. run: (launch of addresses, arrays that it reads, arrays that it writes) runs it and fills
    these."""
    found, expected = operands()
    results = tuple(np.full(x.shape, np.nan, np.float32) for x in expected)

    def launch(addresses):
        return target.launch(half_check_kernel(), len(expected[0]), N_THREADS, tuple(addresses), 4 * (B_WORDS + MINIMA_WORDS))
    run(launch, found, results)
    return all(np.array_equal(x, y) for x, y in zip(results, expected))
