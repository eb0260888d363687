"""Codes of levels, of one table or of that of two that a sub-block selects: value = d * integer scale * level."""
import numpy as np

from .lanes import F0, F1, LANES, load, n_chunks, n_groups, numbers, of_lanes, reciprocal
from .scales import device, jit, nearest_scale, rounded

N_STEPS = 2 * 257   # of a half from -128.5: boundaries between integer levels are multiples of a half
N_TRIES = 9         # scales to either side of the one that maps the largest value to an end of the levels
N_ENDS = 10         # of `candidate`
N_PAIRS = 32        # of IQ2_KL
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


@device
def residuals(x, w, inverse, nearest, steps, levels, sums):
    """Of each lane, with r = x * inverse - level: sums [3 LANES] of w level^2, w level r and w r^2. These keep their digits where
    differences of larger sums would not. nearest: see `nearest_levels`. steps, levels: scratch."""
    sums[:] = F0
    for c in range(len(x)):
        at = 0  # of the column's levels
        if len(nearest) == 2:
            low, high = nearest[0], nearest[1]
            for l in range(LANES):
                levels[l] = min(max(x[c, l] * inverse[l], low), high) + ROUNDER - ROUNDER
        elif len(nearest) == N_STEPS:
            for l in range(LANES):
                steps[l] = step_of(x[c, l] * inverse[l])
            for l in range(LANES):
                levels[l] = nearest[np.uint64(steps[l])]
        elif c % 2:
            at = LANES
        else:
            costs = levels[2 * LANES:]
            costs[:] = np.inf
            for e in range(0, 2 * N_PAIRS, 2):
                for l in range(LANES):
                    first, second = x[c, l] * inverse[l] - nearest[e], x[c + 1, l] * inverse[l] - nearest[e + 1]
                    cost = w[c, l] * first * first + w[c + 1, l] * second * second
                    is_less = cost < costs[l]
                    levels[l] = nearest[e] if is_less else levels[l]
                    levels[LANES + l] = nearest[e + 1] if is_less else levels[LANES + l]
                    costs[l] = cost if is_less else costs[l]
        for l in range(LANES):
            level, u = levels[at + l], w[c, l]
            r, weighted = x[c, l] * inverse[l] - level, u * level
            sums[l] += weighted * level
            sums[LANES + l] += weighted * r
            sums[2 * LANES + l] += u * r * r


@device
def try_inverse(x, w, inverse, nearest, steps, levels, sums, least, fitted):
    """Where the scale that suits the codes under 1 / inverse best has less error than `least`, it becomes `fitted`."""
    residuals(x, w, inverse, nearest, steps, levels, sums)
    for l in range(LANES):
        squares = sums[l]
        more = sums[LANES + l] / squares if squares > F0 else F0
        of_one = reciprocal(inverse[l])
        error = (sums[2 * LANES + l] - more * sums[LANES + l]) * of_one * of_one
        if error < least[l]:
            least[l], fitted[l] = error, (F1 + more) * of_one if squares > F0 else F0


@device
def fit(values, weights, squares, tables, ends, span, inverse, steps, levels, sums, least, fitted):
    """squares: of each lane the sum of w x^2. fitted: the best scale, of those that map the largest value to the lowest or
    highest level, of others up to `span` of it around, and of those that suit their codes best."""
    extremes = np.empty(LANES, np.float32)
    for h in range(len(values)):
        x, w, best, error = values[h], weights[h], fitted[h], least[h]
        best[:], squares[h], extremes[:] = F0, F0, F0
        for c in range(len(x)):
            for l in range(LANES):
                squares[h, l] += w[c, l] * x[c, l] * x[c, l]
                extremes[l] = x[c, l] if abs(x[c, l]) > abs(extremes[l]) else extremes[l]
        for l in range(LANES):
            extremes[l], error[l] = reciprocal(extremes[l]), squares[h, l]
        for t in range(len(tables)):
            for end in ends[t]:
                for k in range(-N_TRIES, N_TRIES + 1) if end != 0.0 else range(0):
                    factor = np.float32(end * (1.0 + span * k / N_TRIES))
                    for l in range(LANES):
                        inverse[l] = factor * extremes[l]
                    try_inverse(x, w, inverse, tables[t], steps, levels, sums, error, best)
            for _ in range(2):
                for l in range(LANES):
                    inverse[l] = reciprocal(best[l])
                try_inverse(x, w, inverse, tables[t], steps, levels, sums, error, best)


@device
def choose(values, weights, squares, tables, scales, j, inverse, steps, levels, sums, least, best_j, best_t, products, norms):
    """Where the lanes' scales, d times the integer scales number j, have less error than `least`: best_j and the table best_t are
    theirs, and so are the sums of w x level and w level^2, `products` and `norms`."""
    for h in range(len(values)):
        for l in range(LANES):
            inverse[l] = reciprocal(scales[h, l])
        for t in range(len(tables)):
            residuals(values[h], weights[h], inverse, tables[t], steps, levels, sums)
            for l in range(LANES):
                scale = scales[h, l]
                error = sums[2 * LANES + l] * scale * scale if inverse[l] != F0 else squares[h, l]
                if error < least[h, l]:
                    least[h, l], best_j[h, l], best_t[h, l] = error, j[h, l], t
                    products[h, l], norms[h, l] = (sums[l] + sums[LANES + l]) * scale, sums[l]


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
def set_scales(fitted, d, first, step, n_scales, offset, j, scales):
    """j: numbers of the integer scales of a group that are nearest to the fitted ones, and `offset` more; scales: they times
    d."""
    for i in range(len(fitted)):
        j[i] = min(max(nearest_scale(fitted[i], d, first, step, n_scales) + offset, 0), n_scales - 1)
        scales[i] = d * (first + step * j[i])


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
    squares, fitted, tried, least = of_lanes(shape), of_lanes(shape), of_lanes(shape), of_lanes(shape)
    products, norms = of_lanes(shape), of_lanes(shape)
    j, best_j, best_t = numbers(shape), numbers(shape), numbers(shape)
    inverse, levels, sums, steps = of_lanes(LANES), of_lanes(3 * LANES), of_lanes(3 * LANES), np.empty(LANES, np.uint32)
    # one sub-block behind the other
    flat_fitted, flat_tried, flat_least, flat_j = fitted.reshape(-1), tried.reshape(-1), least.reshape(-1), j.reshape(-1)
    flat_products, flat_norms = products.reshape(-1), norms.reshape(-1)
    flat_best_j, flat_best_t = best_j.reshape(-1), best_t.reshape(-1)
    d, best_d, error = np.zeros(n_batch), np.zeros(n_batch), np.zeros(n_batch)
    for start in range(0, len(ds), n_batch):
        n = min(n_batch, len(ds) - start)
        load(x, w, start, n, sub, group, values, weights, units)
        fit(values, weights, squares, tables, ends, span, inverse, steps, levels, sums, least, fitted)
        # the best d for the integer scales nearest to the fitted ones
        error[:], best_d[:] = np.inf, 0.0
        for k in range(n_candidates(n_scales, allowed)):
            least[:] = np.inf
            for g in range(n):
                a, b = g * n_subs, (g + 1) * n_subs
                d[g] = candidate(largest_of(flat_fitted[a:b]), k, first, step, n_scales, units[g], allowed)
                set_scales(flat_fitted[a:b], d[g], first, step, n_scales, 0, flat_j[a:b], flat_tried[a:b])
            choose(values, weights, squares, tables, tried, j, inverse, steps, levels, sums, least, best_j, best_t, products,
                   norms)
            for g in range(n):
                total = 0.0
                for i in range(g * n_subs, (g + 1) * n_subs):
                    total += flat_least[i]
                if total < error[g] and d[g] != 0.0:
                    best_d[g], error[g] = d[g], total
        # integer scales and codes for d, then d for these
        error[:], d[:] = np.inf, best_d
        for _ in range(3):
            least[:] = np.inf
            for offset in range(-1, 2) if n_scales > 1 else range(1):
                for g in range(n):
                    a, b = g * n_subs, (g + 1) * n_subs
                    set_scales(flat_fitted[a:b], d[g], first, step, n_scales, offset, flat_j[a:b], flat_tried[a:b])
                choose(values, weights, squares, tables, tried, j, inverse, steps, levels, sums, least, best_j, best_t, products,
                       norms)
            for g in range(n):
                total, xq, qq = 0.0, 0.0, 0.0
                for i in range(g * n_subs, (g + 1) * n_subs):
                    scale = first + step * flat_best_j[i]
                    total += flat_least[i]
                    xq += scale * flat_products[i]
                    qq += scale * scale * flat_norms[i]
                if total < error[g]:
                    best_d[g], error[g] = d[g], total
                    for i in range(n_subs):
                        scales[(start + g) * n_subs + i] = flat_best_j[g * n_subs + i]
                        selected[(start + g) * n_subs + i] = flat_best_t[g * n_subs + i]
                if qq > 0.0 and d[g] != 0.0:
                    d[g] = rounded(xq / qq * units[g], allowed) / units[g]
        for g in range(n):
            ds[start + g] = best_d[g] * units[g]
            for i in range(g * n_subs, (g + 1) * n_subs):
                at = start * n_subs + i
                of_one = reciprocal(np.float32(best_d[g] * (first + step * scales[at])))
                for c in range(sub):
                    codes[at * sub + c] = code_of[selected[at], step_of(values[i // LANES, c, i % LANES] * of_one)]
