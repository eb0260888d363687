"""Codes 0..highest with minima: value = d * scale * code - m * minimum, scale and minimum integers."""
import numpy as np

from .lanes import F0, F1, LANES, load, n_chunks, n_groups, numbers, of_lanes, reciprocal
from .scales import as_half, device, jit

N_TRIES = 10  # slopes to either side of the one that maps the smallest and the largest value to the ends of the codes
TENTH = np.float32(0.1)
ROUNDER = np.float32(2.0**23)  # what float32 adds to it, from 0 on, is rounded to an integer


@device
def residuals(x, w, inverse, low, highest, sums):
    """Of each lane, with the code nearest to v = (x - low) * inverse and r = v - code: sums [6 LANES] of w, w code, w code^2, w
    r, w r code and w r^2. These keep their digits where differences of larger sums would not."""
    sums[:] = F0
    for c in range(len(x)):
        for l in range(LANES):
            v, u = (x[c, l] - low[l]) * inverse[l], w[c, l]
            code = min(max(v, F0), highest) + ROUNDER - ROUNDER
            weighted, r = u * code, v - code
            sums[l] += u
            sums[LANES + l] += weighted
            sums[2 * LANES + l] += weighted * code
            sums[3 * LANES + l] += u * r
            sums[4 * LANES + l] += weighted * r
            sums[5 * LANES + l] += u * r * r


@device
def try_line(x, w, inverse, low, highest, is_free, sums, least, slopes, minima):
    """Where the line that suits the codes of (x - low) * inverse best has less error than `least`, it becomes slopes and minima:
    x = slope * code - minimum. With r = a code + b, slope = (1 + a) / inverse and -minimum = low + b / inverse."""
    residuals(x, w, inverse, low, highest, sums)
    for l in range(LANES):
        n, q, qq = sums[l], sums[LANES + l], sums[2 * LANES + l]
        r, rq, rr = sums[3 * LANES + l], sums[4 * LANES + l], sums[5 * LANES + l]
        determinant = n * qq - q * q
        a = (n * rq - q * r) / determinant if determinant > F0 else F0
        b = (qq * r - q * rq) / determinant if determinant > F0 else F0
        if not is_free and b > -low[l] * inverse[l]:  # a minimum below 0
            b = -low[l] * inverse[l]
            a = (rq - b * q) / qq if qq > F0 else F0
        of_one = reciprocal(inverse[l])
        mixed = a * b * q - a * rq - b * r
        error = (rr + mixed + mixed + a * a * qq + b * b * n) * of_one * of_one
        if error < least[l] and a > -F1:
            least[l], slopes[l], minima[l] = error, (F1 + a) * of_one, -(low[l] + b * of_one)


@device
def fit(values, weights, highest, is_free, inverse, low, sums, least, slopes, minima):
    """slopes and minima: of each lane the best line, of those that suit the codes of lines from the smallest to the largest value
    and of lines a little steeper or less, and of those that suit their codes best. is_free: minima of either sign, else none
    below 0."""
    high = np.empty(LANES, np.float32)
    for h in range(len(values)):
        x, w, error, slope, minimum = values[h], weights[h], least[h], slopes[h], minima[h]
        low[:], high[:] = x[0], x[0]
        for c in range(1, len(x)):
            for l in range(LANES):
                low[l], high[l] = min(low[l], x[c, l]), max(high[l], x[c, l])
        for l in range(LANES):
            low[l] = low[l] if is_free else min(low[l], F0)
            high[l] = reciprocal(high[l] - low[l])
            slope[l], minimum[l], error[l] = F0, -low[l], np.inf if high[l] != F0 else F0
        for k in range(-N_TRIES, N_TRIES + 1):
            for l in range(LANES):
                inverse[l] = (highest + TENTH * np.float32(k)) * high[l]
            try_line(x, w, inverse, low, highest, is_free, sums, error, slope, minimum)
        for _ in range(2):
            for l in range(LANES):
                inverse[l], low[l] = reciprocal(slope[l]), -minimum[l]
            try_line(x, w, inverse, low, highest, is_free, sums, error, slope, minimum)


@device
def sums_of(values, weights, plain):
    """plain [n_chunks, 3, LANES]: of each lane the sums of w, w x and w x^2."""
    plain[:] = F0
    for h in range(len(values)):
        for c in range(values.shape[1]):
            for l in range(LANES):
                v, u = values[h, c, l], weights[h, c, l]
                plain[h, 0, l] += u
                plain[h, 1, l] += u * v
                plain[h, 2, l] += u * v * v


@device
def choose(values, weights, plain, highest, scales, minima, j, k, inverse, low, sums, least, best_j, best_k, moments):
    """Where the lanes' lines, of these scales and minima, have less error than `least`: best_j, best_k are the numbers j, k of
    their integer scales and minima, and moments [n_chunks, 3, LANES] the sums of w code, w code^2 and w x code."""
    for h in range(len(values)):
        for l in range(LANES):
            inverse[l], low[l] = reciprocal(scales[h, l]), -minima[h, l]
        residuals(values[h], weights[h], inverse, low, highest, sums)
        for l in range(LANES):
            scale, q, qq = scales[h, l], sums[LANES + l], sums[2 * LANES + l]
            error = sums[5 * LANES + l] * scale * scale
            if inverse[l] == F0:  # x + minimum for all
                error = plain[h, 2, l] - low[l] * (plain[h, 1, l] + plain[h, 1, l] - low[l] * plain[h, 0, l])
            if error < least[h, l]:
                least[h, l], best_j[h, l], best_k[h, l] = error, j[h, l], k[h, l]
                moments[h, 0, l], moments[h, 1, l] = q, qq
                moments[h, 2, l] = low[l] * q + scale * (qq + sums[4 * LANES + l])


@device
def set_scales(fitted, d, n_scales, offset, j, scales):
    """j: the integers of a group that are nearest to the fitted scales (or minima), and `offset` more; scales: they times d."""
    for i in range(len(fitted)):
        j[i] = 1
        if n_scales > 1:
            near = int(min(np.floor(fitted[i] / d + 0.5), n_scales - 1.0)) if d != 0.0 else 0
            j[i] = min(max(near + offset, 0), n_scales - 1)
        scales[i] = d * j[i]


@device
def largest_of(scales, n_scales, unit):
    """d, in units, under which the largest of the scales is the last integer."""
    largest = scales[0]
    for scale in scales:
        largest = max(largest, scale)
    return as_half(largest / max(n_scales - 1, 1) * unit) / unit


@device
def refit(j, k, plain, moments, first, last, unit, d, m, is_free):
    """(d, m) that suit the codes of sub-blocks first .. last best, or where there are none these."""
    xa, xb, aa, ab, bb = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(first, last):
        h, l = i // LANES, i % LANES
        a, b = float(j[h, l]), float(k[h, l])
        xa += a * moments[h, 2, l]
        xb -= b * plain[h, 1, l]
        aa += a * a * moments[h, 1, l]
        ab -= a * b * moments[h, 0, l]
        bb += b * b * plain[h, 0, l]
    determinant = aa * bb - ab * ab
    if determinant > 0.0:
        new_d, new_m = (xa * bb - xb * ab) / determinant, (xb * aa - xa * ab) / determinant
    else:
        new_d, new_m = xa / aa if aa > 0.0 else 0.0, m
    if new_d <= 0.0 or (new_m < 0.0 and not is_free):
        return d, m
    return as_half(new_d * unit) / unit, as_half(new_m * unit) / unit


@jit
def by_lines(x, w, sub, group, highest, n_scales, is_free, codes, scales, minima, ds, ms):
    """Codes, scales, minima, d and m of least error.

    As `by_levels`; integer scales and minima are 0 to n_scales - 1, or 1 where n_scales is 1. highest: float32. is_free: minima
    of either sign. Out: minima uint8 as scales; ms as ds. """
    n_subs = group // sub
    n_batch, shape = n_groups(n_subs), (n_chunks(n_subs), LANES)
    values = np.empty((shape[0], sub, LANES), np.float32)
    weights, units = np.empty_like(values), np.empty(n_batch)
    slopes, lows, least, tried, tried_minima = of_lanes(shape), of_lanes(shape), of_lanes(shape), of_lanes(shape), of_lanes(shape)
    plain, moments = of_lanes((shape[0], 3, LANES)), of_lanes((shape[0], 3, LANES))
    j, k, best_j, best_k = numbers(shape), numbers(shape), numbers(shape), numbers(shape)
    inverse, low, sums = of_lanes(LANES), of_lanes(LANES), of_lanes(6 * LANES)
    # one sub-block behind the other
    flat_slopes, flat_lows, flat_least, flat_tried = slopes.reshape(-1), lows.reshape(-1), least.reshape(-1), tried.reshape(-1)
    flat_minima, flat_j, flat_k = tried_minima.reshape(-1), j.reshape(-1), k.reshape(-1)
    flat_best_j, flat_best_k = best_j.reshape(-1), best_k.reshape(-1)
    d, m, best_d, best_m = np.zeros(n_batch), np.zeros(n_batch), np.zeros(n_batch), np.zeros(n_batch)
    error = np.zeros(n_batch)
    reach = range(-1, 2) if n_scales > 1 else range(1)
    for start in range(0, len(ds), n_batch):
        n = min(n_batch, len(ds) - start)
        load(x, w, start, n, sub, group, values, weights, units)
        sums_of(values, weights, plain)
        fit(values, weights, highest, is_free, inverse, low, sums, least, slopes, lows)
        for g in range(n):
            a, b = g * n_subs, (g + 1) * n_subs
            d[g] = largest_of(flat_slopes[a:b], n_scales, units[g])
            m[g] = largest_of(flat_lows[a:b], n_scales, units[g])
        best_d[:], best_m[:], error[:] = 0.0, 0.0, np.inf
        for _ in range(3):  # integer scales, minima and codes for d and m, then d and m for these
            least[:] = np.inf
            for of_scale in reach:
                for of_minimum in reach:
                    for g in range(n):
                        a, b = g * n_subs, (g + 1) * n_subs
                        set_scales(flat_slopes[a:b], d[g], n_scales, of_scale, flat_j[a:b], flat_tried[a:b])
                        set_scales(flat_lows[a:b], m[g], n_scales, of_minimum, flat_k[a:b], flat_minima[a:b])
                    choose(values, weights, plain, highest, tried, tried_minima, j, k, inverse, low, sums, least, best_j, best_k,
                           moments)
            for g in range(n):
                total, a, b = 0.0, g * n_subs, (g + 1) * n_subs
                for i in range(a, b):
                    total += flat_least[i]
                if total < error[g]:
                    best_d[g], best_m[g], error[g] = d[g], m[g], total
                    for i in range(a, b):
                        scales[start * n_subs + i], minima[start * n_subs + i] = flat_best_j[i], flat_best_k[i]
                d[g], m[g] = refit(best_j, best_k, plain, moments, a, b, units[g], d[g], m[g], is_free)
        for g in range(n):
            ds[start + g], ms[start + g] = best_d[g] * units[g], best_m[g] * units[g]
            for i in range(g * n_subs, (g + 1) * n_subs):
                at = start * n_subs + i
                of_one, lowest = reciprocal(np.float32(best_d[g] * scales[at])), np.float32(-best_m[g] * minima[at])
                for c in range(sub):
                    v = (values[i // LANES, c, i % LANES] - lowest) * of_one
                    codes[at * sub + c] = np.uint8(min(max(v, F0), highest) + ROUNDER - ROUNDER)
