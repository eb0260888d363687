"""Codes with minima."""
import numpy as np

from .scales import as_half, jit


@jit
def fit_line(x, w, highest, inverse, low, is_free):
    """(scale, minimum, error) that suit the codes round((x - low) inverse), 0..highest, best: value = scale * code - minimum.
    minimum: not negative, but where it is free."""
    n, sw, sx, sl, sll, sxl = len(x), 0.0, 0.0, 0.0, 0.0, 0.0
    for c in range(n):
        level = min(max(np.floor((x[c] - low) * inverse + 0.5), 0.0), highest)
        sw += w[c]
        sx += w[c] * x[c]
        sl += w[c] * level
        sll += w[c] * level * level
        sxl += w[c] * x[c] * level
    determinant = sw * sll - sl * sl
    if determinant > 0.0:
        scale, minimum = (sw * sxl - sx * sl) / determinant, (sl * sxl - sll * sx) / determinant
    else:
        scale, minimum = 0.0, -sx / sw
    if minimum < 0.0 and not is_free:
        scale, minimum = (sxl / sll if sll > 0.0 else 0.0), 0.0
    total = 0.0
    for c in range(n):
        level = min(max(np.floor((x[c] - low) * inverse + 0.5), 0.0), highest)
        difference = x[c] - (scale * level - minimum)
        total += w[c] * difference * difference
    return scale, minimum, total


@jit
def line_error(x, w, highest, scale, minimum):
    """Weighted squared error of the nearest codes."""
    inverse, total = (1.0 / scale if scale != 0.0 else 0.0), 0.0
    for c in range(len(x)):
        level = min(max(np.floor((x[c] + minimum) * inverse + 0.5), 0.0), highest)
        difference = x[c] - (scale * level - minimum)
        total += w[c] * difference * difference
    return total


@jit
def best_line(x, w, highest, is_free):
    """(scale, minimum)"""
    low, high = x[0], x[0]
    for c in range(len(x)):
        low, high = min(low, x[c]), max(high, x[c])
    if not is_free:
        low = min(low, 0.0)
    if low == high:
        return 0.0, -low
    scale, minimum, least = 0.0, 0.0, np.inf
    for k in range(-10, 11):
        found, found_minimum, total = fit_line(x, w, highest, (highest + 0.1 * k) / (high - low), low, is_free)
        if total < least:
            scale, minimum, least = found, found_minimum, total
    for _ in range(2):
        if scale > 0.0:
            found, found_minimum, total = fit_line(x, w, highest, 1.0 / scale, -minimum, is_free)
            if total < least:
                scale, minimum, least = found, found_minimum, total
    return scale, minimum


@jit
def by_lines(x, w, sub, group, highest, n_scales, is_free, codes, scales, minima, ds, ms):
    """Codes 0..highest of types with minima: value = d * scale * code - m * minimum.

    As `by_levels`; integer scales and minima are 0 to n_scales - 1, or 1 where n_scales is 1. is_free: minima of either sign.
    Out: minima uint8 as scales; ms as ds.
    """
    n_subs = group // sub
    slopes, lows = np.zeros(n_subs), np.zeros(n_subs)
    js, ks = np.zeros(n_subs, np.int64), np.zeros(n_subs, np.int64)
    top = max(n_scales - 1, 1)
    for row in range(len(x)):
        for g in range(x.shape[1] // group):
            v, u, at = x[row, g * group:(g + 1) * group], w[g * group:(g + 1) * group], g * n_subs
            for i in range(n_subs):
                slopes[i], lows[i] = best_line(v[i * sub:(i + 1) * sub], u[i * sub:(i + 1) * sub], highest, is_free)
            d, m = as_half(slopes.max() / top), as_half(lows.max() / top)
            best, best_m, least = 0.0, 0.0, np.inf
            for _ in range(3):
                total, xa, xb, aa, ab, bb = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
                for i in range(n_subs):
                    a, b = i * sub, (i + 1) * sub
                    j0 = int(min(max(np.floor(slopes[i] / d + 0.5), 0.0), top)) if d != 0.0 else 0
                    k0 = int(min(max(np.floor(lows[i] / m + 0.5), 0.0), top)) if m != 0.0 else 0
                    lowest = np.inf
                    for j in range(max(j0 - 1, 0), min(j0 + 2, n_scales)) if n_scales > 1 else range(1, 2):
                        for k in range(max(k0 - 1, 0), min(k0 + 2, n_scales)) if n_scales > 1 else range(1, 2):
                            e = line_error(v[a:b], u[a:b], highest, d * j, m * k)
                            if e < lowest:
                                lowest, js[i], ks[i] = e, j, k
                    total += lowest
                    scale, minimum = d * js[i], m * ks[i]
                    inverse = 1.0 / scale if scale != 0.0 else 0.0
                    for c in range(a, b):
                        q = js[i] * min(max(np.floor((v[c] + minimum) * inverse + 0.5), 0.0), highest)
                        xa += u[c] * v[c] * q
                        xb -= u[c] * v[c] * ks[i]
                        aa += u[c] * q * q
                        ab -= u[c] * q * ks[i]
                        bb += u[c] * ks[i] * ks[i]
                if total < least:
                    best, best_m, least = d, m, total
                    for i in range(n_subs):
                        scales[row, at + i], minima[row, at + i] = js[i], ks[i]
                determinant = aa * bb - ab * ab
                if determinant > 0.0:
                    new_d, new_m = as_half((xa * bb - xb * ab) / determinant), as_half((xb * aa - xa * ab) / determinant)
                else:
                    new_d, new_m = as_half(xa / aa) if aa > 0.0 else 0.0, m
                if (new_d == d and new_m == m) or new_d <= 0.0 or (new_m < 0.0 and not is_free):
                    break
                d, m = new_d, new_m
            ds[row, g], ms[row, g] = best, best_m
            for i in range(n_subs):
                scale, minimum = best * scales[row, at + i], best_m * minima[row, at + i]
                inverse = 1.0 / scale if scale != 0.0 else 0.0
                for c in range(i * sub, (i + 1) * sub):
                    codes[row, g * group + c] = int(min(max(np.floor((v[c] + minimum) * inverse + 0.5), 0.0), highest))
