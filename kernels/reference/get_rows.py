"""out[i] = the row ids[i] of a weight, or of an array of floats (numerics, section 3)."""
from functools import lru_cache, partial

import numpy as np

from ...quant import tile
from ...quant.dequantize import CPU
from ...quant.formats import CHUNK, format_of
from ..arith import i2f, mul, sub
from ..compile import jit


@lru_cache(None)
def get_rows_arrays(format_name):
    """kernel(words u32, ids i32 [n], out f32 [n, k]). words: the tiles of the weight; an id below 0 is the first row."""
    fmt = format_of(format_name)
    value, tile_words = (_quantized if fmt.is_quantized else _float)(fmt), tile.tile_bytes(fmt) // 4

    @jit(key=fmt.name)
    def get_rows(words, ids, out):
        n, k = out.shape
        n_chunks = (k + CHUNK - 1) // CHUNK
        for i in range(n):
            for column in range(k):
                row, chunk = max(ids[i], 0), column // CHUNK
                t = (words, (row // tile.ROWS * n_chunks + chunk) * tile_words, row % tile.ROWS)
                out[i, column] = value(t, column % CHUNK)
    return get_rows


def _quantized(fmt):
    levels, sub_block, group = fmt.unpack(CPU, *tile.loads(fmt, CPU.jit))[:3]
    n_sub, n_group, has_min = fmt.sub, fmt.group, fmt.has_min

    @CPU.jit
    def value(t, column):
        word = levels(t, column // 32)[column % 32 // 4]
        level = np.int32(np.int8(word >> (column % 4 * 8)))
        isc, imin = sub_block(t, column // n_sub)
        d, m = group(t, column // n_group)
        w = mul(mul(d, i2f(isc)), i2f(level))
        return sub(w, mul(m, i2f(imin))) if has_min else w
    return value


def _float(fmt):
    values = fmt.values(CPU, tile.loads(fmt, CPU.jit)[0])

    @CPU.jit
    def value(t, column):
        return values(t, column // 8)[column % 8]
    return value


@jit
def take_rows_arrays(x, ids, out):
    """x: f32 [r, k], ids: i32 [n], out: f32 [n, k]."""
    for i in range(ids.shape[0]):
        for column in range(x.shape[1]):
            out[i, column] = x[ids[i], column]


def get_rows(call, kernel=get_rows_arrays):
    """out[i] = the row ids[i] of a weight, of row 0 for a negative id. w: tiles [m, k]; ids: i32 [n]; out: f32 [n, k]."""
    return partial(kernel(call.w.dtype), call.w.data, call.ids.data, call.out.data)


def take_rows(call, kernel=take_rows_arrays):
    """out[i] = x[ids[i]]. x: f32 [r, k]; ids: i32 [n]; out: f32 [n, k]."""
    return partial(kernel, call.x.data, call.ids.data, call.out.data)
