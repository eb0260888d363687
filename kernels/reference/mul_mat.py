"""out[token, row] = sum over columns of weight[row, column] * x[token, column] (numerics, sections 3 and 4)."""
from functools import lru_cache, partial

import numpy as np

from ...quant import tile
from ...quant.dequantize import CPU
from ...quant.formats import CHUNK, format_of
from ..arith import add, f32, fma, l2f
from ..compile import jit


@lru_cache(None)
def mul_mat_arrays(format_name):
    """Quantized weights: kernel(words u32, q, d, sums, out f32 [n, m]), the activations as `quantize` gives them.
    Float weights: kernel(words u32, x f32 [n, k], out f32 [n, m]). words: the tiles of the weight [m, k]."""
    fmt = format_of(format_name)
    return _quantized(fmt) if fmt.is_quantized else _float(fmt)


def _quantized(fmt):
    levels, sub, group = fmt.unpack(CPU, *tile.loads(fmt, CPU.jit))[:3]
    n_sub, n_group, has_min, tile_words = fmt.sub, fmt.group, fmt.has_min, tile.tile_bytes(fmt) // 4

    @jit(key=fmt.name)
    def mul_mat(words, q, d, sums, out):
        n, m = out.shape
        n_chunks = d.shape[1]
        for token in range(n):
            for row in range(m):
                total = f32(0)
                for chunk in range(n_chunks):
                    t = (words, (row // tile.ROWS * n_chunks + chunk) * tile_words, row % tile.ROWS)
                    acc = f32(0)
                    for first in range(0, CHUNK, n_group):
                        S, M = np.int64(0), np.int64(0)
                        for column in range(first, first + n_group):
                            word = levels(t, column // 32)[column % 32 // 4]
                            level = np.int8(word >> (column % 4 * 8))
                            isc, imin = sub(t, column // n_sub)
                            activation = np.int64(q[token, chunk * CHUNK + column])
                            S += np.int64(isc) * np.int64(level) * activation
                            M += np.int64(imin) * activation
                        d_group, m_group = group(t, first // n_group)
                        acc = fma(l2f(S), d_group, acc)
                        if has_min:
                            acc = fma(f32(-m_group), l2f(M), acc)
                    total = fma(acc, d[token, chunk], total)
                out[token, row] = total
    return mul_mat


def _float(fmt):
    values = fmt.values(CPU, tile.loads(fmt, CPU.jit)[0])
    tile_words = tile.tile_bytes(fmt) // 4

    @jit(key=fmt.name)
    def mul_mat(words, x, out):
        n, m = out.shape
        k = x.shape[1]
        n_chunks = (k + CHUNK - 1) // CHUNK
        for token in range(n):
            for row in range(m):
                total = f32(0)
                for chunk in range(n_chunks):
                    t = (words, (row // tile.ROWS * n_chunks + chunk) * tile_words, row % tile.ROWS)
                    acc = f32(0)
                    for column in range(min(CHUNK, k - chunk * CHUNK)):
                        w = values(t, column // 8)[column % 8]
                        acc = fma(w, x[token, chunk * CHUNK + column], acc)
                    total = add(total, acc)
                out[token, row] = total
    return mul_mat


def mul_mat(call, kernel=mul_mat_arrays):
    """out[i, row] = the sum of w[row, j] x[i, j] over the columns j. w: tiles [m, k]; x: act [n, k], f32 for a float weight;
    out: f32 [n, m]."""
    return partial(kernel(call.w.dtype), call.w.data, *call.x.factors, call.out.data)
