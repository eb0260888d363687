"""Codes of levels."""
import numpy as np

from .scales import jit, nearest_scale, rounded

LUT = 2 * 257       # steps of a half from -128.5: boundaries between integer levels are multiples of a half


def nearest_codes(levels) -> np.ndarray:
    """uint8 [LUT]: the code of the level nearest to each step's middle; of equals the higher. levels: integers, in any order."""
    levels, middles = np.asarray(levels, float), (np.arange(LUT) + 0.5) / 2 - 128.5
    distance = abs(middles[:, None] - levels)
    return np.argmin(distance, axis=1).astype(np.uint8)


@jit
def code_of(lut, v):
    return lut[int(min(max(2.0 * v + 257.0, 0.0), LUT - 1.0))]


@jit
def error(x, w, levels, lut, scale):
    """Weighted squared error of the nearest codes under this scale."""
    total = 0.0
    inverse = 1.0 / scale if scale != 0.0 else 0.0
    for c in range(len(x)):
        difference = x[c] - scale * levels[code_of(lut, x[c] * inverse)]
        total += w[c] * difference * difference
    return total


@jit
def fit(x, w, levels, lut, inverse):
    """(scale, how much of the sum of w x^2 it explains) that suits the codes under 1 / inverse best."""
    xq, qq = 0.0, 0.0
    for c in range(len(x)):
        level = levels[code_of(lut, x[c] * inverse)]
        xq += w[c] * x[c] * level
        qq += w[c] * level * level
    return (xq / qq, xq * xq / qq) if qq > 0.0 else (0.0, 0.0)


@jit
def best_scale(x, w, levels, lut, n_tries, span):
    """The best of scales that map the largest value to the lowest or highest level, and of those up to `span` of it around."""
    extreme, most, scale = 0.0, 0.0, 0.0
    for c in range(len(x)):
        if abs(x[c]) > abs(extreme):
            extreme = x[c]
    if extreme == 0.0:
        return 0.0, 0.0
    for end in (levels.min(), levels.max()):
        if end == 0.0:
            continue
        for k in range(-n_tries, n_tries + 1):
            found, explained = fit(x, w, levels, lut, end * (1.0 + span * k / n_tries) / extreme)
            if explained > most:
                scale, most = found, explained
    for _ in range(2):
        if scale != 0.0:
            found, explained = fit(x, w, levels, lut, 1.0 / scale)
            if explained > most:
                scale, most = found, explained
    return scale, most


@jit
def choose(x, w, tables, luts, d, first, step, n_scales, j0, reach):
    """(error, scale number, table) of the best of the integer scales first + step j, j within `reach` of j0, and tables."""
    best, best_j, best_t = np.inf, 0, 0
    for j in range(max(j0 - reach, 0), min(j0 + reach + 1, n_scales)):
        for t in range(len(tables)):
            e = error(x, w, tables[t], luts[t], d * (first + step * j))
            if e < best:
                best, best_j, best_t = e, j, t
    return best, best_j, best_t


@jit
def try_scales(x, w, sub, tables, luts, fitted, first, step, n_scales, allowed):
    """The best of several d: those under which the largest of the fitted scales is the first or last integer scale, or a little
    off; without integer scales the fitted one, or its neighbours where few are allowed."""
    largest = 0.0
    for scale in fitted:
        if abs(scale) > abs(largest):
            largest = scale
    if largest == 0.0:
        return 0.0
    best, least = 0.0, np.inf
    last = first + step * (n_scales - 1)
    for e in range(2 if n_scales > 1 else 1):
        for k in range(-2, 3):
            if n_scales > 1:
                end = (last if e == 0 else first) + 0.5 * step * k
                d = rounded(largest / end, allowed) if end != 0.0 else 0.0
            elif len(allowed) > 1:
                d = allowed[min(max(np.searchsorted(allowed, abs(largest)) + k, 0), len(allowed) - 1)]
            else:
                d = rounded(largest, allowed) if k == 0 else 0.0
            if d == 0.0:
                continue
            total = 0.0
            for i in range(len(fitted)):
                a, b = i * sub, (i + 1) * sub
                j = nearest_scale(fitted[i], d, first, step, n_scales)
                total += choose(x[a:b], w[a:b], tables, luts, d, first, step, n_scales, j, 0)[0]
                if total >= least:
                    break
            if total < least:
                best, least = d, total
    return best


@jit
def by_levels(x, w, sub, group, tables, luts, first, step, n_scales, allowed, span, codes, scales, selected, ds):
    """Codes of levels, of one table or of that of several that a sub-block selects.

    x: float32 [n_rows, n_cols]; w: float32 [n_cols]; sub, group: columns of a sub-block and of a d. tables: float64 [n, levels]
    with luts [n, LUT] of `nearest_codes`. Integer scales are first + step j, j < n_scales. allowed: of d, see `rounded`. span:
    see `best_scale`. Out: codes uint8 [n_rows, n_cols], scales (j) and selected (the table) uint8 [n_rows, n_cols / sub], ds
    float64 [n_rows, n_cols / group].
    """
    n_subs = group // sub
    fitted, js, ts = np.zeros(n_subs), np.zeros(n_subs, np.int64), np.zeros(n_subs, np.int64)
    for row in range(len(x)):
        for g in range(x.shape[1] // group):
            v, u, at = x[row, g * group:(g + 1) * group], w[g * group:(g + 1) * group], g * n_subs
            for i in range(n_subs):
                a, b = i * sub, (i + 1) * sub
                fitted[i], most = 0.0, 0.0
                for t in range(len(tables)):
                    scale, explained = best_scale(v[a:b], u[a:b], tables[t], luts[t], 9, span)
                    if explained > most:
                        fitted[i], most = scale, explained
            d = try_scales(v, u, sub, tables, luts, fitted, first, step, n_scales, allowed)
            best, least = 0.0, np.inf
            for _ in range(3):  # integer scales and codes for d, then d for these
                total, xq, qq = 0.0, 0.0, 0.0
                for i in range(n_subs):
                    a, b = i * sub, (i + 1) * sub
                    j = nearest_scale(fitted[i], d, first, step, n_scales)
                    e, js[i], ts[i] = choose(v[a:b], u[a:b], tables, luts, d, first, step, n_scales, j, 1)
                    total += e
                    scale = first + step * js[i]
                    inverse = 1.0 / (d * scale) if d * scale != 0.0 else 0.0
                    for c in range(a, b):
                        q = scale * tables[ts[i], code_of(luts[ts[i]], v[c] * inverse)]
                        xq += u[c] * v[c] * q
                        qq += u[c] * q * q
                if total < least:
                    best, least = d, total
                    for i in range(n_subs):
                        scales[row, at + i], selected[row, at + i] = js[i], ts[i]
                d = rounded(xq / qq, allowed) if qq > 0.0 else best
                if d == best or d == 0.0:
                    break
            ds[row, g] = best
            for i in range(n_subs):
                t = selected[row, at + i]
                scale = best * (first + step * scales[row, at + i])
                inverse = 1.0 / scale if scale != 0.0 else 0.0
                for c in range(i * sub, (i + 1) * sub):
                    codes[row, g * group + c] = code_of(luts[t], v[c] * inverse)
