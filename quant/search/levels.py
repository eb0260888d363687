"""Codes of levels, of one table or of that of two that a sub-block selects: value = d * integer scale * level."""
import numpy as np

from ..entries import jit
from .lanes import F0, F1, LANES, load, n_chunks, n_groups, of_lanes, reciprocal, reciprocals, spread, within
from ..device_functions import device, inlined
from .scales import nearest_scale, rounded
from .vectors import WIDTH, at, looked_up, magnitude, put, repeated, where_less

N_STEPS = 2 * 257   # of a half from -128.5: boundaries between integer levels are multiples of a half
N_TRIES = 9         # scales to either side of the one that maps the largest value to an end of the levels
N_ENDS = 10         # of `candidate`
N_PAIRS = 32        # of IQ2_KL
N_ROUNDS = 3        # of integer scales and codes for d, then d for these
INFINITY = np.float32(np.inf)
TWO, SHIFT, LAST = np.float32(2), np.float32(257), np.float32(N_STEPS - 1)
ROUNDER = np.float32(1.5 * 2.0**23)  # what float32 adds to it is rounded to an integer


def nearest_codes(levels) -> np.ndarray:
    """uint8 [N_STEPS]: the code of the level nearest to each step's middle; of equals the first. levels: integers, in any
    order."""
    middles = (np.arange(N_STEPS) + 0.5) / 2 - 128.5
    return np.argmin(abs(middles[:, None] - np.ravel(levels)), axis=1).astype(np.uint8)


def nearest_levels(levels) -> np.ndarray:
    """float32: the level of each step; of levels without gaps the lowest and the highest; of pairs they themselves, one after the
    other."""
    if np.ndim(levels) == 2:
        return np.ravel(levels).astype(np.float32)
    if list(levels) == list(range(levels[0], levels[-1] + 1)):
        return np.array([levels[0], levels[-1]], np.float32)
    return np.asarray(levels, np.float32)[nearest_codes(levels)]


@device
def step_of(v):
    return np.uint32(np.int32(min(max(TWO * v + SHIFT, F0), LAST)))


@inlined
def add_column(sums, x, u, inverse, level):
    """The sums of w level^2, w level r and w r^2, r = x * inverse - level, with one more column."""
    r, weighted = x * inverse - level, u * level
    return sums[0] + weighted * level, sums[1] + weighted * r, sums[2] + u * r * r


@inlined
def residuals(values, weights, first, sub, inverse, nearest):
    """Of each of the lanes from `first` on the sums of `add_column`. These keep their digits where differences of larger sums
    would not. nearest: see `nearest_levels`. Sums that the caller does not use are not made."""
    zero = repeated(F0)
    sums = zero, zero, zero
    if len(nearest) == 2:
        low, high, rounder = repeated(nearest[0]), repeated(nearest[1]), repeated(ROUNDER)
        for c in range(sub):
            x, u = at(values, first + c * LANES), at(weights, first + c * LANES)
            sums = add_column(sums, x, u, inverse, within(x * inverse, low, high) + rounder - rounder)
    elif len(nearest) == N_STEPS:
        two, shift, last = repeated(TWO), repeated(SHIFT), repeated(LAST)
        for c in range(sub):
            x, u = at(values, first + c * LANES), at(weights, first + c * LANES)
            step = within(two * (x * inverse) + shift, zero, last)
            sums = add_column(sums, x, u, inverse, looked_up(nearest, step))
    else:
        for c in range(0, sub, 2):
            x, u = at(values, first + c * LANES), at(weights, first + c * LANES)
            y, t = at(values, first + (c + 1) * LANES), at(weights, first + (c + 1) * LANES)
            least, level, other = repeated(INFINITY), zero, zero
            for e in range(0, 2 * N_PAIRS, 2):
                tried, paired = repeated(nearest[e]), repeated(nearest[e + 1])
                r, s = x * inverse - tried, y * inverse - paired
                cost = u * r * r + t * s * s
                level, other = where_less(cost, least, tried, level), where_less(cost, least, paired, other)
                least = where_less(cost, least, cost, least)
            sums = add_column(add_column(sums, x, u, inverse, level), y, t, inverse, other)
    return sums


@inlined
def try_inverse(values, weights, first, sub, inverse, nearest, least, fitted):
    """(least, fitted), of lanes: where the scale that suits the codes under 1 / inverse best has less error than `least`, its
    own."""
    zero, one = repeated(F0), repeated(F1)
    squares, products, rests = residuals(values, weights, first, sub, inverse, nearest)
    more = where_less(zero, squares, products / squares, zero)
    of_one = reciprocals(inverse)
    error = (rests - more * products) * of_one * of_one
    scale = where_less(zero, squares, (one + more) * of_one, zero)
    return where_less(error, least, error, least), where_less(error, least, scale, fitted)


@device
def fit(values, weights, squares, tables, ends, span, fitted):
    """squares: of each lane the sum of w x^2. fitted: the best scale, of those that map the largest value to the lowest or
    highest level, of others up to `span` of it around, and of those that suit their codes best."""
    sub, zero = values.shape[1], repeated(F0)
    for h in range(len(values)):
        for l in range(0, LANES, WIDTH):
            first, lane = h * sub * LANES + l, h * LANES + l
            extreme, least, best = zero, zero, zero
            for c in range(sub):
                x, u = at(values, first + c * LANES), at(weights, first + c * LANES)
                least, extreme = least + u * x * x, where_less(magnitude(extreme), magnitude(x), x, extreme)
            put(squares, lane, least)
            extreme = reciprocals(extreme)
            for t in range(len(tables)):
                for end in ends[t]:
                    for k in range(-N_TRIES, N_TRIES + 1) if end != 0.0 else range(0):
                        inverse = repeated(np.float32(end * (1.0 + span * k / N_TRIES))) * extreme
                        least, best = try_inverse(values, weights, first, sub, inverse, tables[t], least, best)
                for _ in range(2):
                    least, best = try_inverse(values, weights, first, sub, reciprocals(best), tables[t], least, best)
            put(fitted, lane, best)


@device
def choose(values, weights, squares, tables, scales, j, least, best_j, best_t):
    """Where the lanes' scales, d times the integer scales number j, have less error than `least`: best_j and the table best_t are
    theirs."""
    sub = values.shape[1]
    for h in range(len(values)):
        for l in range(0, LANES, WIDTH):
            lane = h * LANES + l
            scale = at(scales, lane)
            inverse = reciprocals(scale)
            for t in range(len(tables)):
                _, _, rests = residuals(values, weights, h * sub * LANES + l, sub, inverse, tables[t])
                error = where_less(repeated(F0), magnitude(inverse), rests * scale * scale, at(squares, lane))
                before = at(least, lane)
                put(least, lane, where_less(error, before, error, before))
                put(best_j, lane, where_less(error, before, at(j, lane), at(best_j, lane)))
                put(best_t, lane, where_less(error, before, repeated(np.float32(t)), at(best_t, lane)))


@device
def moments_of(values, weights, tables, scales, best_t, products, norms):
    """products and norms: with the codes of the lanes' scales and tables the sums of w x level and w level^2."""
    sub, half = values.shape[1], repeated(np.float32(0.5))
    for h in range(len(values)):
        for l in range(0, LANES, WIDTH):
            lane = h * LANES + l
            scale = at(scales, lane)
            for t in range(len(tables)):
                norm, product, _ = residuals(values, weights, h * sub * LANES + l, sub, reciprocals(scale), tables[t])
                other = magnitude(at(best_t, lane) - repeated(np.float32(t)))  # 0 where the table is theirs
                put(products, lane, where_less(other, half, (norm + product) * scale, at(products, lane)))
                put(norms, lane, where_less(other, half, norm, at(norms, lane)))


@device
def candidate(largest, k, first, step, n_scales, unit, allowed):
    """The k-th d to try, 0 <= k < N_ENDS, for the largest fitted scale of a group: those under which it is the last or first
    integer scale, or a little off; without integer scales itself, or its neighbours where few are allowed. 0: none."""
    off = k % 5 - 2
    if n_scales > 1:
        end = (first + step * (n_scales - 1) if k < 5 else first) + 0.5 * step * off
        return rounded(largest / end * unit, allowed) / unit if end != 0.0 else 0.0
    if len(allowed) > 1:
        near = np.searchsorted(allowed, abs(largest) * unit)
        return allowed[min(max(near + off, 0), len(allowed) - 1)] / unit
    return rounded(largest * unit, allowed) / unit


@device
def n_candidates(n_scales, allowed):
    return N_ENDS if n_scales > 1 else 5 if len(allowed) > 1 else 1


@device
def largest_of(scales):
    largest = F0
    for scale in scales:
        largest = scale if abs(scale) > abs(largest) else largest
    return float(largest)


@device
def nearest_numbers(fitted, ds, first, step, n_scales, j):
    """j: numbers of the integer scales of all lanes that are nearest to the fitted ones over d."""
    for i in range(len(j)):
        j[i] = nearest_scale(fitted[i], ds[i], first, step, n_scales)


@device
def set_scales(near, ds, first, step, n_scales, offset, j, scales):
    """j: the numbers `offset` more than those near; scales: their integer scales times d."""
    for i in range(len(j)):
        j[i] = min(max(near[i] + offset, 0.0), n_scales - 1.0)
        scales[i] = ds[i] * (first + step * j[i])


@device
def keep(n, n_subs, start, least, j, t, d, best_d, error, scales, selected):
    """Of the groups whose scales have less error than they had: d, and the numbers in `scales` and tables in `selected`."""
    for g in range(n):
        total, a, b = 0.0, g * n_subs, (g + 1) * n_subs
        for i in range(a, b):
            total += least[i]
        if total < error[g]:
            best_d[g], error[g] = d[g], total
            for i in range(a, b):
                scales[start * n_subs + i], selected[start * n_subs + i] = np.uint8(j[i]), np.uint8(t[i])


@device
def refit(n, n_subs, first, step, j, products, norms, units, allowed, d):
    """d of each group that suits the codes best. Returns whether one is another than it was."""
    has_changed = False
    for g in range(n):
        xq, qq = 0.0, 0.0
        for i in range(g * n_subs, (g + 1) * n_subs):
            scale = first + step * j[i]
            xq += scale * products[i]
            qq += scale * scale * norms[i]
        if qq > 0.0 and d[g] != 0.0:
            new = rounded(xq / qq * units[g], allowed) / units[g]
            has_changed |= new != d[g]
            d[g] = new
    return has_changed


@jit
def by_levels(x, w, sub, group, tables, ends, first, step, n_scales, allowed, span, code_of, codes, scales, selected, ds):
    """Codes, scales and d of least error.

    x: float32 [n], rows one after the other; w: float32 [n_cols]; sub, group: columns of a sub-block and of a d. tables: float32
    [n_tables, ...] of `nearest_levels`, code_of: uint8 [n_tables, N_STEPS] of `nearest_codes`, ends: float64 [n_tables, 2], their
    lowest and highest levels. Integer scales are first + step j, j < n_scales. allowed: of d, see `rounded`. span: see `fit`.
    Out: codes uint8 [n], scales (j) and selected (the table) uint8 [n / sub], ds float64 [n / group]. """
    n_subs = group // sub
    n_batch, shape = n_groups(n_subs), (n_chunks(n_subs), LANES)
    values = np.empty((shape[0], sub, LANES), np.float32)
    weights, units = np.empty_like(values), np.empty(n_batch)
    # of sub-blocks, one behind the other
    n_lanes = shape[0] * LANES
    squares, fitted, tried, least = of_lanes(n_lanes), of_lanes(n_lanes), of_lanes(n_lanes), of_lanes(n_lanes)
    products, norms, near, j = of_lanes(n_lanes), of_lanes(n_lanes), of_lanes(n_lanes), of_lanes(n_lanes)
    best_j, best_t, sub_ds = of_lanes(n_lanes), of_lanes(n_lanes), np.zeros(n_lanes)
    d, best_d, error = np.zeros(n_batch), np.zeros(n_batch), np.zeros(n_batch)
    for start in range(0, len(ds), n_batch):
        n = min(n_batch, len(ds) - start)
        load(x, w, start, n, sub, group, values, weights, units)
        fit(values, weights, squares, tables, ends, span, fitted)
        # the best d for the integer scales nearest to the fitted ones
        error[:], best_d[:] = np.inf, 0.0
        for k in range(n_candidates(n_scales, allowed)):
            least[:] = np.inf
            for g in range(n):
                largest = largest_of(fitted[g * n_subs:(g + 1) * n_subs])
                d[g] = candidate(largest, k, first, step, n_scales, units[g], allowed)
            spread(d, n_subs, sub_ds)
            nearest_numbers(fitted, sub_ds, first, step, n_scales, near)
            set_scales(near, sub_ds, first, step, n_scales, 0, j, tried)
            choose(values, weights, squares, tables, tried, j, least, best_j, best_t)
            for g in range(n):
                total = 0.0
                for i in range(g * n_subs, (g + 1) * n_subs):
                    total += least[i]
                if total < error[g] and d[g] != 0.0:
                    best_d[g], error[g] = d[g], total
        # integer scales and codes for d, then d for these
        error[:], d[:] = np.inf, best_d
        for i in range(N_ROUNDS):
            least[:] = np.inf
            spread(d, n_subs, sub_ds)
            nearest_numbers(fitted, sub_ds, first, step, n_scales, near)
            for offset in range(-1, 2) if n_scales > 1 else range(1):
                set_scales(near, sub_ds, first, step, n_scales, offset, j, tried)
                choose(values, weights, squares, tables, tried, j, least, best_j, best_t)
            keep(n, n_subs, start, least, best_j, best_t, d, best_d, error, scales, selected)
            if i == N_ROUNDS - 1:
                break
            set_scales(best_j, sub_ds, first, step, n_scales, 0, j, tried)
            moments_of(values, weights, tables, tried, best_t, products, norms)
            if not refit(n, n_subs, first, step, best_j, products, norms, units, allowed, d):
                break  # nor would the next round change anything
        for g in range(n):
            ds[start + g] = best_d[g] * units[g]
            for i in range(g * n_subs, (g + 1) * n_subs):
                tried[i] = reciprocal(np.float32(best_d[g] * (first + step * scales[start * n_subs + i])))
        for h in range(shape[0]):
            for l in range(min(LANES, n * n_subs - h * LANES)):
                of, of_one = start * n_subs + h * LANES + l, tried[h * LANES + l]
                code = code_of[selected[of]]
                for c in range(sub):
                    codes[of * sub + c] = code[step_of(values[h, c, l] * of_one)]
