"""Choosing the next token.

A choice depends on the logits, the settings, the seed and the token's position, on nothing else: the same seed is the same text,
whatever else is decoded in the batch. Steps in llama.cpp's order: top-k, top-p, min-p, temperature, draw.
"""
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from ..base.errors import ParameterError, UserError
from ..base.exact_math import exp, tree_sum

# type, least, most
LIMITS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 1e6), "top_k": (int, 0, 2**63 - 1), "top_p": (float, 0, 1), "min_p": (float, 0, 1),
    "seed": (int, 0, 2**63 - 1)}
KINDS: dict[type, tuple[str, Any]] = {int: ("an integer", Integral), float: ("a number", Real)}


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch their step off. ParameterError for what is beyond LIMITS, or
    NaN."""
    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (type_, least, most) in LIMITS.items():
            value, (in_words, kind) = getattr(self, name), KINDS[type_]
            if not isinstance(value, kind) or not least <= value <= most:
                raise ParameterError(name, f"must be {in_words}, {least} to {most}, got {value!r}")


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) for a position: the upper 53 bits of the first word of Philox4x64, key seed, counter [0, 0, 0,
    position]."""
    word = np.random.Philox(key=seed, counter=[0, 0, 0, position]).random_raw()
    return (int(word) >> 11) * 2.0 ** -53


def not_a_number(position: int) -> UserError:
    return UserError(f"the logits of token {position} hold NaN")


def choose(logits: np.ndarray, position: int, sampling: Sampling) -> int:
    """The token at `position`.   logits: float32 [V]. Equal logits rank by the lower index.

    1. top-k: the k largest logits, in falling order.   2. p = softmax of those; top-p: the fewest whose p sum to at least top_p.
    3. min-p: those with p >= min_p * p[0].   4. w = exp((l - l[0]) / temperature), cumulative in order; the first whose sum
    exceeds u * sum.
    """
    if np.isnan(logits).any():
        raise not_a_number(position)
    if sampling.temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        order = order[:sampling.top_k]
    l = logits[order].astype(np.float64)
    with np.errstate(invalid="ignore"):
        l = np.where(l == l[0], 0.0, l - l[0])  # not inf - inf where the best logit is infinite
    w = exp(l)
    p = w / tree_sum(w)
    if sampling.top_p < 1:
        # cumsum adds in index order by definition
        n = int(np.searchsorted(np.cumsum(p), sampling.top_p)) + 1
        l, p = l[:n], p[:n]
    if sampling.min_p > 0:
        l = l[p >= sampling.min_p * p[0]]
    cumulative = np.cumsum(exp(l / sampling.temperature))
    i = int(np.searchsorted(cumulative, uniform(sampling.seed, position) * cumulative[-1], side="right"))
    return int(order[min(i, len(cumulative) - 1)])
