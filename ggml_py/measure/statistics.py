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
