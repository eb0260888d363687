"""out[i] = the row ids[i] of a weight, a sub-block at a time, or of an array of floats."""
from functools import lru_cache, partial

import numpy as np

from ...quant import tile
from ...quant.dequantize import CPU
from ...quant.formats import CHUNK, format_of
from ..arith import i2f, mul, sub
from ..compile import jit
from ..reference import get_rows as reference
from .parallel import over_rows, take


@lru_cache(None)
def get_rows_arrays(format_name):
    """kernel(words u32, ids i32 [n], out f32 [n, k]). words: the tiles of the weight; an id below 0 is the first row."""
    fmt = format_of(format_name)
    fill, n_values, tile_words = *(_quantized if fmt.is_quantized else _float)(fmt), tile.tile_bytes(fmt) // 4

    @jit(key=fmt.name)
    def rows(first, last, out, words, ids):
        k = out.shape[1]
        n_chunks = (k + CHUNK - 1) // CHUNK
        for i in range(first, last):
            row = max(ids[i], 0)
            for start in range(0, k, n_values):
                chunk = start // CHUNK
                t = (words, (row // tile.ROWS * n_chunks + chunk) * tile_words, row % tile.ROWS)
                fill(t, start % CHUNK, out[i, start:start + n_values])
    each = over_rows(rows, (fmt.name,))
    return lambda words, ids, out: each(out, words, ids)


def _quantized(fmt):
    """(device function (t, column, values) that fills f32 [n] from a column of a chunk on, n): a sub-block."""
    levels, sub_block, group = fmt.unpack(CPU, *tile.loads(fmt, CPU.jit))[:3]
    n_sub, n_group, has_min = fmt.sub, fmt.group, fmt.has_min

    @CPU.jit
    def fill(t, column, values):
        words = levels(t, column // 32)
        isc, imin = sub_block(t, column // n_sub)
        d, m = group(t, column // n_group)
        scale, minimum = mul(d, i2f(isc)), mul(m, i2f(imin))
        for c in range(n_sub):
            level = np.int32(np.int8(words[(column + c) % 32 // 4] >> (c % 4 * 8)))
            value = mul(scale, i2f(level))
            values[c] = sub(value, minimum) if has_min else value
    return fill, n_sub


def _float(fmt):
    """The same of the eight columns that are unpacked together; the last may be fewer."""
    load = fmt.values(CPU, tile.loads(fmt, CPU.jit)[0])

    @CPU.jit
    def fill(t, column, values):
        w = load(t, column // 8)
        for c in range(values.shape[0]):
            values[c] = w[c]
    return fill, 8


get_rows = partial(reference.get_rows, kernel=get_rows_arrays)
take_rows = partial(reference.take_rows, kernel=lambda x, ids, out: take(out, x, ids))
