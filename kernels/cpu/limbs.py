"""Activations as two limbs, q = 256 high + low, both signed bytes: for few columns, and for many where the CPU has tiles.

They are split once a product, a chunk of 256 columns of all rows behind the other: the rows of a tile lie in few pages."""
from ...quant.activation import SUM_COLUMNS
from ...quant.device_functions import device, inlined
from ...quant.formats import CHUNK
from ...quant.words import f32, i32, u32
from ..compile import jit
from ..threads import sharing
from . import amx
from .parallel import PART
from .vector import advance, as_float32, as_int16, as_uint8, as_uint32, pointer

LIMB_ROW = 2 * CHUNK + 128  # bytes from row to row: high limbs, low limbs, sums
LIMB_WORDS = LIMB_ROW // 4
# Words of a row at which its sums begin: over 16 and over 32 columns as of `split_sum`, over 32 as float32
SUMS_16 = 2 * CHUNK // 4
SUMS_32 = SUMS_16 + CHUNK // 16
FLOAT_SUMS = SUMS_32 + CHUNK // 32
assert FLOAT_SUMS + CHUNK // 32 == LIMB_WORDS, "a row is full"
TILE_COLUMNS = 12          # rows of activations from which on tiles are faster than pairs
BEHIND = amx.COLUMNS - 1   # rows behind the last one, which tiles read too


def limbs_shape(n: int, n_chunks: int) -> tuple[int, int, int]:
    """Of the limbs of n rows of activations, u8 [chunks][rows and those behind the last one][LIMB_ROW]."""
    return n_chunks, n + (BEHIND if n >= TILE_COLUMNS else 0), LIMB_ROW


@device
def split_sum(s):
    """As a pair of int16, (s mod 128, floor(s / 128))."""
    return u32(s & i32(127)) | u32(s >> i32(7)) << u32(16)


@inlined
def split_rows(i, args):
    q, sums, limbs, chunk_bytes, n_parts, n, n_chunks = args
    for row in range(i * n // n_parts, (i + 1) * n // n_parts):
        for chunk in range(n_chunks):
            block, at = row * n_chunks + chunk, chunk * chunk_bytes + row * LIMB_ROW
            levels, high, low = advance(as_int16(q), block * CHUNK), advance(limbs, at), advance(limbs, at + CHUNK)
            for c in range(CHUNK):
                high[c] = (levels[c] + 128) >> 8
            for c in range(CHUNK):
                low[c] = levels[c] & 255
            words, of_block = advance(as_uint32(limbs), at // 4), advance(sums, block * (CHUNK // SUM_COLUMNS))
            for s in range(CHUNK // 16):
                words[SUMS_16 + s] = split_sum(i32(of_block[s]))
            numbers = as_float32(words)
            for s in range(CHUNK // 32):
                both = i32(i32(of_block[2 * s]) + i32(of_block[2 * s + 1]))
                words[SUMS_32 + s] = split_sum(both)
                numbers[FLOAT_SUMS + s] = f32(both)


_split = sharing(split_rows)


@inlined
def split_activations(control, q, sums, limbs, chunk_bytes, n, n_chunks):
    """Pointers to the levels and sums of n rows of activations, and to their limbs, of chunk_bytes a chunk."""
    n_parts = max(1, min(n, n * n_chunks * CHUNK // PART))
    _split(control, n_parts, (q, sums, limbs, chunk_bytes, n_parts, n, n_chunks))


@jit(parallel=True)
def split_arrays(control, q, sums, limbs):
    """q: i16 [n, k]; sums: i32 [n, k / 16]; limbs: of `limbs_shape`."""
    n_chunks, n_rows, row_bytes = limbs.shape
    split_activations(control, pointer(q), pointer(sums), as_uint8(pointer(limbs)), n_rows * row_bytes, q.shape[0], n_chunks)
