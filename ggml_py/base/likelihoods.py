"""Log-likelihoods of rows of logits in float64, by the definitions of `exact_math`; threads share the rows."""
import numpy as np

from ..kernels.cpu.row_scores import total_arrays
from .exact_math import log


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """log(sum_j exp(l_j)) of each row as max + log(sum_j exp(l_j - max)); NaN where a logit is NaN or infinity, or none is above
    -infinity.   logits: float32 [n, V]; returns float64 [n]."""
    largest, totals = np.empty(len(logits)), np.empty(len(logits))
    total_arrays(np.ascontiguousarray(logits, np.float32), largest, totals)
    return largest + log(totals)


def negative_log_likelihood(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """nll[i] = log_sum_exp(l[i]) - l[i, targets[i]].   logits: float32 [n, V]; targets: int [n]; returns float64 [n]."""
    return log_sum_exp(logits) - np.float32(logits[np.arange(len(targets)), targets])
