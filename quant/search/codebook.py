"""Entries of codebooks."""
import numpy as np

from ..entries import jit
from ..device_functions import device
from .scales import as_half, nearest_scale, power_of_two


@device
def prepare(x, w, grid, signs, products, squares):
    """products[g, e] = sum of w x level and squares[g, e] = sum of w level^2 over the columns of entry e, group by group. x: with
    signs taken off. grid: float32 [columns of an entry, entries]."""
    width, n = grid.shape
    for g in range(len(products)):
        p, s = products[g], squares[g]
        p[:], s[:] = 0, 0
        for k in range(width):
            levels, u = grid[k], w[g * width + k]
            v = np.float32(u * x[g * width + k])
            for e in range(n):
                p[e] += v * levels[e]
                s[e] += u * levels[e] * levels[e]


@device
def best_entry(products, squares, scale):
    """(entry, sum of w x level, sum of w level^2) of the entry with the least error; of equals the first."""
    twice, square = np.float32(2 * scale), np.float32(scale * scale)
    best = np.int64(-1) << 62
    for e in range(len(products)):
        bits = np.float32(np.float32(twice * products[e]) - np.float32(square * squares[e])).view(np.int32)
        ordered = bits ^ ((bits >> 31) & np.int32(0x7fffffff))  # as integers these have the order of the floats
        best = max(best, (np.int64(ordered) << 12) + np.int64(4095 - e))
    entry = 4095 - (best & 4095)
    return entry, products[entry], squares[entry]


@device
def explained(products, squares, first, last, scale):
    """(what the best entries of the groups first..last explain of the sum of w x^2, sums of w x level and w level^2)."""
    xq, qq = 0.0, 0.0
    for g in range(first, last):
        _, p, s = best_entry(products[g], squares[g], scale)
        xq += p
        qq += s
    return 2 * scale * xq - scale * scale * qq, xq, qq


@device
def take_signs(x, w, signing, positive):
    """The signs of eight columns, which `positive` is then without. signing: see `by_codebook`; a number of signs that must
    be even is made so where that costs least: a value there counts as negative."""
    bits, least, parity = 0, 0, 0
    for c in range(8):
        if x[c] < 0.0:
            bits, positive[c], parity = bits | 1 << c, -x[c], parity ^ 1
        if w[c] * x[c] * x[c] < w[least] * x[least] * x[least]:
            least = c
    if signing == 1 and parity:
        bits, positive[least] = bits ^ 1 << least, -positive[least]
    return bits


@jit
def by_codebook(x, w, sub, group, grids, signing, factors, n_scales, codes, scales, selected, signs, ds):
    """Entries of a codebook, with signs or a table that a sub-block selects. Integer scales are 1 + 2 j, j < n_scales.

    As `by_levels`; float32 sums, of values over a power of two. grids: float32 [tables, columns of an entry, entries]. signing: 0
    none, 1 an even number in eight columns, 2 any. factors: scales that are tried, over that under which the largest value is the
    largest level. Out: codes uint16 [n_rows, n_cols / columns of an entry]; signs uint8 [n_rows, n_cols / 8], bit k for column k.
    """
    n_tables, width, n_entries = grids.shape
    n_subs, per_sub = group // sub, sub // width
    highest, flat = grids.max(), x.reshape(-1)
    v, positive, fitted = np.zeros(group, np.float32), np.zeros(group, np.float32), np.zeros(n_subs)
    products = np.zeros((n_tables, group // width, n_entries), np.float32)
    squares = np.zeros_like(products)
    js, ts = np.zeros(n_subs, np.int64), np.zeros(n_subs, np.int64)
    for row in range(len(x)):
        for g in range(x.shape[1] // group):
            u, at = w[g * group:(g + 1) * group], g * n_subs
            unit = power_of_two(flat, row * x.shape[1] + g * group, group)
            for c in range(group):
                v[c] = x[row, g * group + c] / unit
            positive[:] = v
            for e in range(group // 8) if signing else range(0):
                i = 8 * e
                signs[row, g * group // 8 + e] = take_signs(v[i:i + 8], u[i:i + 8], signing, positive[i:i + 8])
            for t in range(n_tables):
                prepare(positive, u, grids[t], signs, products[t], squares[t])
            largest = 0.0
            for i in range(n_subs):
                extreme, most, fitted[i] = 0.0, 0.0, 0.0
                for c in range(i * sub, (i + 1) * sub):
                    extreme = max(extreme, abs(v[c]))
                for t in range(n_tables):
                    for factor in factors if extreme > 0.0 else factors[:0]:
                        _, xq, qq = explained(products[t], squares[t], i * per_sub, (i + 1) * per_sub, factor * extreme / highest)
                        if xq > 0.0 and xq * xq / qq > most:
                            fitted[i], most = xq / qq, xq * xq / qq
                largest = max(largest, fitted[i])
            d, most, last = 0.0, 0.0, 2.0 * n_scales - 1.0
            for k in range(-1, 2) if largest > 0.0 else range(0):
                tried, total = as_half(largest / (last + 1.5 * k) * unit) / unit, 0.0
                for i in range(n_subs) if tried > 0.0 else range(0):
                    j = nearest_scale(fitted[i], tried, 1.0, 2.0, n_scales)
                    gain = 0.0
                    for t in range(n_tables):
                        a, b = i * per_sub, (i + 1) * per_sub
                        gain = max(gain, explained(products[t], squares[t], a, b, tried * (1 + 2 * j))[0])
                    total += gain
                if total > most:
                    d, most = tried, total
            best, most = 0.0, -np.inf
            for reach in range(2):
                total, xq, qq = 0.0, 0.0, 0.0
                for i in range(n_subs):
                    j0, gain = nearest_scale(fitted[i], d, 1.0, 2.0, n_scales), -np.inf
                    for j in range(max(j0 - reach, 0), min(j0 + reach + 1, n_scales)):
                        for t in range(n_tables):
                            scale = 1 + 2 * j
                            found, p, s = explained(products[t], squares[t], i * per_sub, (i + 1) * per_sub, d * scale)
                            if found > gain:
                                gain, js[i], ts[i], sub_p, sub_s = found, j, t, p * scale, s * scale * scale
                    total, xq, qq = total + gain, xq + sub_p, qq + sub_s
                if total > most:
                    best, most = d, total
                    for i in range(n_subs):
                        scales[row, at + i], selected[row, at + i] = js[i], ts[i]
                if xq > 0.0:
                    d = as_half(xq / qq * unit) / unit
            # the last d suits the last codes best
            total = 0.0
            for i in range(n_subs) if d > 0.0 else range(0):
                total += explained(products[ts[i]], squares[ts[i]], i * per_sub, (i + 1) * per_sub, d * (1 + 2 * js[i]))[0]
            if total > most:
                best = d
                for i in range(n_subs):
                    scales[row, at + i], selected[row, at + i] = js[i], ts[i]
            ds[row, g] = best * unit
            for i in range(n_subs):
                t, scale = selected[row, at + i], best * (1 + 2 * scales[row, at + i])
                for e in range(i * per_sub, (i + 1) * per_sub):
                    codes[row, g * group // width + e] = best_entry(products[t, e], squares[t, e], scale)[0]
