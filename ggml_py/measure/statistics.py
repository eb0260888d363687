"""Means and how far they can be trusted."""
import math
import statistics


def mean_and_error(total: float, total_of_squares: float, count: int) -> tuple[float, float]:
    """Mean of `count` values, of which the sum and the sum of squares are given, and its standard error sqrt((mean of squares -
    mean^2) / (count - 1)).

    The error is NaN where the variance is not positive or cannot be known."""
    mean = total / count
    variance = total_of_squares / count - mean * mean
    return mean, math.sqrt(variance / (count - 1)) if variance > 0 and count > 1 else math.nan


def mean_and_deviation(samples) -> tuple[float, float]:
    """Arithmetic mean and sample standard deviation, which is 0 of a single value."""
    return statistics.fmean(samples), statistics.stdev(samples) if len(samples) > 1 else 0.0


def proportion_error(p: float, n: int) -> float:
    """Standard error sqrt(p (1 - p) / (n - 1)) of the share p of n; NaN of a single one."""
    return math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else math.nan


def wilson_interval(p: float, n: int) -> tuple[float, float]:
    """Where, with a confidence of 95 %, the probability lies that gave a share p of n: Wilson's score interval, with llama.cpp's
    digits."""
    a = 1.95996398454
    z = a * a / n
    half = z * math.sqrt(n * (4 * p * (1 - p) + z)) / (2 * a)
    return (p + z / 2 - half) / (1 + z), (p + z / 2 + half) / (1 + z)
