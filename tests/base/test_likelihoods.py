"""Log-likelihoods of rows against exact_math, a row at a time."""
import math

import numpy as np
import pytest

from ggml_py.base.exact_math import exp, log, tree_sum
from ggml_py.base.likelihoods import log_sum_exp, negative_log_likelihood
from ggml_py.kernels.threads import using

RNG = np.random.default_rng(1)


def of_row(row: np.ndarray) -> float:
    row = row.astype(np.float64)
    return float(row.max() + log(tree_sum(exp(row - row.max()))))


@pytest.mark.parametrize("scale", [0, 0.1, 3, 100])
@pytest.mark.parametrize("n, n_vocab", [(3, 1), (5, 2), (4, 3), (33, 259), (9, 32768), (2, 128257)])
def test_bits_are_those_of_the_definition(n, n_vocab, scale):
    logits = (scale * RNG.standard_normal((n, n_vocab))).astype(np.float32)
    logits[0, 0] = -np.inf if n_vocab > 1 else logits[0, 0]
    targets, expected = RNG.integers(0, n_vocab, n), [of_row(row) for row in logits]
    for n_threads in 1, 2:
        with using(n_threads):
            assert log_sum_exp(logits).tolist() == expected
            assert negative_log_likelihood(logits, targets).tolist() == [
                total - float(row[target]) for total, row, target in zip(expected, logits, targets)]
    assert log_sum_exp(logits[::-1]).tolist() == expected[::-1]


def test_logits_that_are_not_finite():
    logits = np.zeros((5, 4), np.float32)
    logits[0, 1], logits[1, 2], logits[2, 3], logits[3], logits[4, 0] = -np.inf, np.nan, np.inf, -np.inf, -np.nan
    nll = negative_log_likelihood(logits, [1, 0, 0, 0, 1])
    assert nll[0] == math.inf and np.isnan(nll[1:]).all()


def test_sums_do_not_overflow():
    assert log_sum_exp(np.full((1, 2), 1e4, np.float32)) == 1e4 + float(log(np.array(2.0)))
