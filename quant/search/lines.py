"""Codes 0..highest with minima: value = d * scale * code - m * minimum, scale and minimum integers."""
import numpy as np

from ..entries import jit
from .lanes import F0, F1, LANES, load, n_chunks, n_groups, of_lanes, reciprocal, reciprocals, spread, within
from ..device_functions import device, inlined
from .scales import as_half
from .vectors import WIDTH, at, put, repeated, where_less

N_TRIES = 10  # slopes to either side of the one that maps the smallest and the largest value to the ends of the codes
N_ROUNDS = 3  # of integer scales, minima and codes for d and m, then d and m for these
TENTH, INFINITY = np.float32(0.1), np.float32(np.inf)
ROUNDER = np.float32(2.0**23)  # what float32 adds to it, from 0 on, is rounded to an integer


@inlined
def residuals(values, weights, first, sub, inverse, low, highest):
    """Of each of the lanes from `first` on, with the code nearest to v = (x - low) * inverse and r = v - code: the sums of w
    code, w code^2, w r, w r code and w r^2. These keep their digits where differences of larger sums would not. Sums that the
    caller does not use are not made."""
    zero, last, rounder = repeated(F0), repeated(highest), repeated(ROUNDER)
    q, qq, r, rq, rr = zero, zero, zero, zero, zero
    for c in range(sub):
        v, u = (at(values, first + c * LANES) - low) * inverse, at(weights, first + c * LANES)
        code = within(v, zero, last) + rounder - rounder
        weighted, rest = u * code, v - code
        q = q + weighted
        qq = qq + weighted * code
        r = r + u * rest
        rq = rq + weighted * rest
        rr = rr + u * rest * rest
    return q, qq, r, rq, rr


@inlined
def try_line(values, weights, first, sub, n, inverse, low, highest, is_free, least, slope, minimum):
    """(least, slope, minimum), of lanes; n: the sums of w. Where the line that suits the codes of (x - low) * inverse best has
    less error than `least`, its own: x = slope * code - minimum. With r = a code + b, slope = (1 + a) / inverse and -minimum =
    low + b / inverse."""
    zero, one = repeated(F0), repeated(F1)
    q, qq, r, rq, rr = residuals(values, weights, first, sub, inverse, low, highest)
    determinant = n * qq - q * q
    a = where_less(zero, determinant, (n * rq - q * r) / determinant, zero)
    b = where_less(zero, determinant, (qq * r - q * rq) / determinant, zero)
    if not is_free:
        bound = -low * inverse
        a = where_less(bound, b, where_less(zero, qq, (rq - bound * q) / qq, zero), a)
        b = where_less(bound, b, bound, b)  # no minimum below 0
    of_one = reciprocals(inverse)
    mixed = a * b * q - a * rq - b * r
    error = (rr + mixed + mixed + a * a * qq + b * b * n) * of_one * of_one
    error = where_less(-one, a, error, repeated(INFINITY))
    return (where_less(error, least, error, least), where_less(error, least, (one + a) * of_one, slope),
            where_less(error, least, -(low + b * of_one), minimum))


@device
def fit(values, weights, plain, highest, is_free, slopes, minima):
    """slopes and minima: of each lane the best line, of those that suit the codes of lines from the smallest to the largest value
    and of lines a little steeper or less, and of those that suit their codes best. is_free: minima of either sign, else none
    below 0."""
    sub, zero = values.shape[1], repeated(F0)
    for h in range(len(values)):
        for l in range(0, LANES, WIDTH):
            first, lane = h * sub * LANES + l, h * LANES + l
            low = high = at(values, first)
            for c in range(1, sub):
                x = at(values, first + c * LANES)
                low, high = where_less(x, low, x, low), where_less(high, x, x, high)
            if not is_free:
                low = where_less(zero, low, zero, low)
            of_range, n = reciprocals(high - low), at(plain, 3 * h * LANES + l)
            least, slope, minimum = where_less(zero, of_range, repeated(INFINITY), zero), zero, -low
            for k in range(-N_TRIES, N_TRIES + 1):
                inverse = repeated(np.float32(highest + TENTH * np.float32(k))) * of_range
                least, slope, minimum = try_line(values, weights, first, sub, n, inverse, low, highest, is_free, least, slope,
                                                 minimum)
            for _ in range(2):
                least, slope, minimum = try_line(values, weights, first, sub, n, reciprocals(slope), -minimum, highest, is_free,
                                                 least, slope, minimum)
            put(slopes, lane, slope)
            put(minima, lane, minimum)


@device
def sums_of(values, weights, plain):
    """plain [n_chunks, 3, LANES]: of each lane the sums of w, w x and w x^2."""
    sub = values.shape[1]
    for h in range(len(values)):
        for l in range(0, LANES, WIDTH):
            n, s, ss = repeated(F0), repeated(F0), repeated(F0)
            for c in range(sub):
                v, u = at(values, (h * sub + c) * LANES + l), at(weights, (h * sub + c) * LANES + l)
                n, s, ss = n + u, s + u * v, ss + u * v * v
            put(plain, 3 * h * LANES + l, n)
            put(plain, (3 * h + 1) * LANES + l, s)
            put(plain, (3 * h + 2) * LANES + l, ss)


@device
def choose(values, weights, plain, highest, scales, minima, j, k, least, best_j, best_k):
    """Where the lanes' lines, of these scales and minima, have less error than `least`: best_j, best_k are the numbers j, k of
    their integer scales and minima."""
    sub, zero = values.shape[1], repeated(F0)
    for h in range(len(values)):
        for l in range(0, LANES, WIDTH):
            lane = h * LANES + l
            scale, low = at(scales, lane), -at(minima, lane)
            inverse = reciprocals(scale)
            _, _, _, _, rr = residuals(values, weights, h * sub * LANES + l, sub, inverse, low, highest)
            n, s, ss = at(plain, 3 * h * LANES + l), at(plain, (3 * h + 1) * LANES + l), at(plain, (3 * h + 2) * LANES + l)
            of_minimum, error = ss - low * (s + s - low * n), rr * scale * scale  # scales are positive, or stand for none
            error = where_less(zero, inverse, error, of_minimum)  # x + minimum for all
            before = at(least, lane)
            put(least, lane, where_less(error, before, error, before))
            put(best_j, lane, where_less(error, before, at(j, lane), at(best_j, lane)))
            put(best_k, lane, where_less(error, before, at(k, lane), at(best_k, lane)))


@device
def moments_of(values, weights, highest, scales, minima, moments):
    """moments [n_chunks, 3, LANES]: with the codes of the lanes' lines the sums of w code, w code^2 and w x code."""
    sub = values.shape[1]
    for h in range(len(values)):
        for l in range(0, LANES, WIDTH):
            scale, low = at(scales, h * LANES + l), -at(minima, h * LANES + l)
            q, qq, _, rq, _ = residuals(values, weights, h * sub * LANES + l, sub, reciprocals(scale), low, highest)
            put(moments, 3 * h * LANES + l, q)
            put(moments, (3 * h + 1) * LANES + l, qq)
            put(moments, (3 * h + 2) * LANES + l, low * q + scale * (qq + rq))


@device
def nearest(fitted, ds, n_scales, j):
    """j: the integers of all lanes that are nearest to the fitted scales (or minima) over d, not limited from below; 0 where d
    is."""
    for i in range(len(j)):
        j[i] = int(min(np.floor(fitted[i] / ds[i] + 0.5), n_scales - 1.0)) if ds[i] != 0.0 else 0


@device
def set_scales(near, ds, n_scales, offset, j, scales):
    """j: the integers `offset` more than those near; scales: they times d."""
    for i in range(len(j)):
        j[i] = min(max(near[i] + offset, 0), n_scales - 1) if n_scales > 1 else 1
        scales[i] = ds[i] * j[i]


@device
def multiples(ds, j, scales):
    """d times the integers, of all lanes."""
    for i in range(len(j)):
        scales[i] = ds[i] * j[i]


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
        a, b = np.float64(j[i]), np.float64(k[i])  # float() of a float32 would be one
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


@device
def keep(n, n_subs, start, least, j, k, d, m, best_d, best_m, error, scales, minima):
    """Of the groups whose lines have less error than they had: d and m, and the integers in `scales` and `minima`."""
    for g in range(n):
        total, a, b = 0.0, g * n_subs, (g + 1) * n_subs
        for i in range(a, b):
            total += least[i]
        if total < error[g]:
            best_d[g], best_m[g], error[g] = d[g], m[g], total
            for i in range(a, b):
                scales[start * n_subs + i], minima[start * n_subs + i] = np.uint8(j[i]), np.uint8(k[i])


@device
def round_values(values, h, highest, inverse, low, codes):
    """codes float32 [columns of a sub-block, LANES]: of chunk h, nearest to (x - low) * inverse."""
    sub, zero, last, rounder = values.shape[1], repeated(F0), repeated(highest), repeated(ROUNDER)
    for l in range(0, LANES, WIDTH):
        of_one, lowest = at(inverse, h * LANES + l), at(low, h * LANES + l)
        for c in range(sub):
            v = (at(values, (h * sub + c) * LANES + l) - lowest) * of_one
            put(codes, c * LANES + l, within(v, zero, last) + rounder - rounder)


@jit
def by_lines(x, w, sub, group, highest, n_scales, is_free, codes, scales, minima, ds, ms):
    """Codes, scales, minima, d and m of least error.

    As `by_levels`; integer scales and minima are 0 to n_scales - 1, or 1 where n_scales is 1. highest: float32. is_free: minima
    of either sign. Out: minima uint8 as scales; ms as ds. """
    n_subs = group // sub
    n_batch, shape = n_groups(n_subs), (n_chunks(n_subs), LANES)
    values = np.empty((shape[0], sub, LANES), np.float32)
    weights, units = np.empty_like(values), np.empty(n_batch)
    plain, moments = of_lanes((shape[0], 3, LANES)), of_lanes((shape[0], 3, LANES))
    # of sub-blocks, one behind the other
    n_lanes = shape[0] * LANES
    slopes, lows, least, tried, tried_minima = (of_lanes(n_lanes), of_lanes(n_lanes), of_lanes(n_lanes), of_lanes(n_lanes),
                                                of_lanes(n_lanes))
    near_j, near_k, j, k = np.zeros(n_lanes, np.int64), np.zeros(n_lanes, np.int64), of_lanes(n_lanes), of_lanes(n_lanes)
    best_j, best_k, sub_ds, sub_ms = of_lanes(n_lanes), of_lanes(n_lanes), np.zeros(n_lanes), np.zeros(n_lanes)
    rounded = of_lanes(sub * LANES)
    d, m, best_d, best_m = np.zeros(n_batch), np.zeros(n_batch), np.zeros(n_batch), np.zeros(n_batch)
    error = np.zeros(n_batch)
    reach = range(-1, 2) if n_scales > 1 else range(1)
    for start in range(0, len(ds), n_batch):
        n = min(n_batch, len(ds) - start)
        load(x, w, start, n, sub, group, values, weights, units)
        sums_of(values, weights, plain)
        fit(values, weights, plain, highest, is_free, slopes, lows)
        for g in range(n):
            a, b = g * n_subs, (g + 1) * n_subs
            d[g] = largest_of(slopes[a:b], n_scales, units[g])
            m[g] = largest_of(lows[a:b], n_scales, units[g])
        best_d[:], best_m[:], error[:] = 0.0, 0.0, np.inf
        for i in range(N_ROUNDS):
            least[:] = np.inf
            spread(d, n_subs, sub_ds)
            spread(m, n_subs, sub_ms)
            nearest(slopes, sub_ds, n_scales, near_j)
            nearest(lows, sub_ms, n_scales, near_k)
            for of_scale in reach:
                set_scales(near_j, sub_ds, n_scales, of_scale, j, tried)
                for of_minimum in reach:
                    set_scales(near_k, sub_ms, n_scales, of_minimum, k, tried_minima)
                    choose(values, weights, plain, highest, tried, tried_minima, j, k, least, best_j, best_k)
            keep(n, n_subs, start, least, best_j, best_k, d, m, best_d, best_m, error, scales, minima)
            if i == N_ROUNDS - 1:
                break
            multiples(sub_ds, best_j, tried)
            multiples(sub_ms, best_k, tried_minima)
            moments_of(values, weights, highest, tried, tried_minima, moments)
            has_changed = False
            for g in range(n):
                new_d, new_m = refit(best_j, best_k, plain, moments, g * n_subs, (g + 1) * n_subs, units[g], d[g], m[g], is_free)
                has_changed |= new_d != d[g] or new_m != m[g]
                d[g], m[g] = new_d, new_m
            if not has_changed:  # nor would the next round change anything
                break
        for g in range(n):
            ds[start + g], ms[start + g] = best_d[g] * units[g], best_m[g] * units[g]
            for i in range(g * n_subs, (g + 1) * n_subs):
                tried[i] = reciprocal(np.float32(best_d[g] * scales[start * n_subs + i]))
                tried_minima[i] = np.float32(-best_m[g] * minima[start * n_subs + i])
        for h in range(shape[0]):
            round_values(values, h, highest, tried, tried_minima, rounded)
            for l in range(min(LANES, n * n_subs - h * LANES)):
                to = (start * n_subs + h * LANES + l) * sub
                for c in range(sub):
                    codes[to + c] = np.uint8(rounded[c * LANES + l])
