"""Scores of rows of logits in float64, of which perplexity and KL divergence are made: no ops of a graph. The bits are those of
exp and tree_sum in `base.exact_math`."""
import numpy as np

from ...quant.device_functions import device
from ..arith import NAN, as_f32, as_i32, i32
from ..reference.draw import exp, tree_sum
from .flash_attn_ext import LOWEST, ordered
from .parallel import over_rows

CLIP = np.float32(16)  # of a record: nothing below the largest logit by more than this is told apart
CODES = np.float32(65535)
HEAD = 4  # uint16 of a record before its codes: float32 scale and least log probability
HIGHEST = i32(2**31 - 1)


@device
def extremes(row):
    """The least and the largest of a row of float32; NaN, both, where one is NaN. By integers of the floats' order, in which NaN
    lies beyond the infinities: compilers look for several of these at a time."""
    lowest, highest = HIGHEST, LOWEST
    for j in range(len(row)):
        key = ordered(as_i32(row[j]))
        lowest, highest = min(lowest, key), max(highest, key)
    least, largest = as_f32(ordered(lowest)), as_f32(ordered(highest))
    is_nan = least != least or largest != largest
    return (NAN, NAN) if is_nan else (least, largest)


@device
def total_rows(first, last, x, largest, totals):
    """largest[i] = max x[i], totals[i] = sum_j exp(x[i, j] - max x[i]), NaN where the largest is not finite.
    x: f32 [n, k]; largest, totals: f64 [n]. Rows first .. last - 1."""
    k = x.shape[1]
    m = (k + 1) // 2
    terms = np.empty(m)
    for i in range(first, last):
        row = x[i]
        _, top = extremes(row)
        largest[i] = top
        if not np.isfinite(top):
            totals[i] = np.nan
            continue
        for j in range(k - m):  # the sum's first step
            terms[j] = exp(np.float64(row[j]) - np.float64(top)) + exp(np.float64(row[m + j]) - np.float64(top))
        for j in range(k - m, m):
            terms[j] = exp(np.float64(row[j]) - np.float64(top))
        totals[i] = tree_sum(terms)


@device
def encode_rows(first, last, x, records, ends, totals):
    """Codes of records behind their heads, and what heads are made of: ends[i] = (low, top), totals[i] = sum of exp(x[i] - top).
    Where a logit is not finite, ends are NaN and nothing else is written.   x: f32 [n, k]; records: u16 [n, HEAD + k], or one
    more; ends: f32 [n, 2]; totals: f64 [n]. Rows first .. last - 1."""
    k = x.shape[1]
    terms = np.empty(k)
    for i in range(first, last):
        row, codes = x[i], records[i, HEAD:]
        least, top = extremes(row)
        if not (np.isfinite(least) and np.isfinite(top)):
            ends[i] = np.nan
            continue
        low = max(least, top - CLIP)
        ends[i, 0], ends[i, 1] = low, top
        for j in range(k):
            terms[j] = exp(np.float64(row[j] - top))
        totals[i] = tree_sum(terms)
        scale = (top - low) / CODES
        if scale > 0:
            factor = np.float32(1) / scale
            for j in range(k):
                code = np.rint(factor * (row[j] - low)) if row[j] > low else np.float32(0)
                codes[j] = np.uint16(np.int32(code))


@device
def compare_rows(first, last, x, records, log_sums, kld, same_top):
    """kld[i] = sum of p_base (log p_base - log p) where log p_base > -16; same_top[i]: whether the largest of both are in one
    column, the first of each.   x: f32 [n, k]; records: u16 [n, HEAD + k], or one more; log_sums: f64 [n], of x; kld: f64 [n];
    same_top: bool [n]. Rows first .. last - 1."""
    k = x.shape[1]
    log_base, terms, head = np.empty(k), np.empty(k), np.empty(HEAD, np.uint16)
    for i in range(first, last):
        row, codes = x[i], records[i, HEAD:HEAD + k]
        head[:] = records[i, :HEAD]
        scale, least = np.float64(head.view(np.float32)[0]), np.float64(head.view(np.float32)[1])
        n, highest = 0, np.uint16(0)
        for j in range(k):
            highest = max(highest, codes[j])
        for j in range(k):
            value = scale * np.float64(codes[j]) + least
            log_base[n], terms[n] = value, value - (np.float64(row[j]) - log_sums[i])
            n += value > -16
        for j in range(n):
            terms[j] = exp(log_base[j]) * terms[j]
        kld[i] = tree_sum(terms[:n]) if n else 0.0
        _, top = extremes(row)
        best, base_best, top_base = 0, 0, scale * np.float64(highest) + least
        while best < k and row[best] != top:  # a row with NaN has no largest
            best += 1
        while base_best < k - 1 and scale * np.float64(codes[base_best]) + least != top_base:
            base_best += 1
        same_top[i] = best == base_best


total_arrays, encode_arrays, compare_arrays = map(over_rows, (total_rows, encode_rows, compare_rows))
