"""Choosing the next token.

A choice depends on the logits, the settings, the seed, the sample's number and the token's position, on nothing else: the same
seed is the same text, whatever else is decoded in the batch. Steps in llama.cpp's order: grammar, bias, penalties, top-k, top-p,
min-p, temperature, draw. Grammar and penalties look at the text before the token, which the same choices made.
"""
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

import numpy as np

from ..base.errors import ParameterError, UserError
from ..base.exact_math import exp, tree_sum
from ..kernels.draws import MOST_DRAWN

# type, least, most
LIMITS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 1e6), "top_k": (int, 0, 2**63 - 1), "top_p": (float, 0, 1), "min_p": (float, 0, 1),
    "seed": (int, 0, 2**63 - 1)}
FURTHER_LIMITS: dict[str, tuple[type, float, float]] = {
    "sample": (int, 0, 2**63 - 1), "repeat_penalty": (float, 1e-6, 1e6), "presence_penalty": (float, -1e6, 1e6),
    "frequency_penalty": (float, -1e6, 1e6), "repeat_last_n": (int, -1, 2**63 - 1)}
KINDS: dict[type, tuple[str, Any]] = {int: ("an integer", Integral), float: ("a number", Real)}


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch their step off.

    sample: the number of one of several texts that a seed gives.   logit_bias: id -> what is added to its logit, -infinity to
    forbid it.   repeat_penalty, presence_penalty, frequency_penalty: of ids among the last repeat_last_n tokens, the prompt's too
    (-1: all, 0: none).   ParameterError for what is beyond LIMITS and FURTHER_LIMITS, or NaN.

    >>> Sampling(temperature=0.8, seed=7) == Sampling(0.8, seed=7)
    True
    >>> Sampling(top_p=2)
    Traceback (most recent call last):
    ggml_py.base.errors.ParameterError: top_p: must be a number, 0 to 1, got 2
    """
    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0
    sample: int = 0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for id, bias in self.logit_bias.items():
            if not isinstance(id, Integral) or id < 0 or not isinstance(bias, Real) or not bias < np.inf:
                raise ParameterError("logit_bias", f"must be of ids, from 0 on, numbers below infinity, got {id!r}: {bias!r}")
        for name, (type_, least, most) in {**LIMITS, **FURTHER_LIMITS}.items():
            value, (in_words, kind) = getattr(self, name), KINDS[type_]
            if not isinstance(value, kind) or not least <= value <= most:
                raise ParameterError(name, f"must be {in_words}, {least} to {most}, got {value!r}")

    def forbidding(self, ids: Iterable[int]) -> Self:
        """The same, but these ids are never chosen."""
        return replace(self, logit_bias={**self.logit_bias, **dict.fromkeys(ids, -np.inf)})

    def check_ids(self, n_vocab: int) -> None:
        """ParameterError for a bias of no token."""
        for id in self.logit_bias:
            if id >= n_vocab:
                raise ParameterError("logit_bias", f"must be of ids 0 to {n_vocab - 1}, got {id}")

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before any is chosen."""
        return bool(self.logit_bias) or (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_drawn(self) -> bool:
        """Whether the op `draw` finds what is chosen: among few of the model's own logits."""
        return self.temperature > 0 and 0 < self.top_k <= MOST_DRAWN and not self.adjusts

    def u(self, position: int) -> float:
        """`uniform` of a position, 0 where nothing is drawn."""
        return uniform(self.seed, position, self.sample) if self.temperature else 0.0

    def settings(self, position: int, n_vocab: int) -> tuple[float, ...]:
        """Of the op `draw`, of the token at a position."""
        top_k = min(self.top_k, n_vocab) if self.temperature else 1
        return top_k, self.temperature, self.top_p, self.min_p, self.u(position)

    @property
    def is_argmax(self) -> bool:
        """Whether the largest of the model's own logits is chosen."""
        return self.temperature == 0 and not self.adjusts

    @property
    def is_argmax_of_allowed(self) -> bool:
        """The same of the ids that have no bias; the others are forbidden."""
        return replace(self, logit_bias={}).is_argmax and all(bias == -np.inf for bias in self.logit_bias.values())


class Draw(NamedTuple):
    """How a sequence's next id is chosen on the device, and those behind it.   sampling: one for which `is_drawn`, or of
    temperature 0 and without bias and penalties.   position: of the next id in its text."""
    sampling: Sampling
    position: int


def largest(x: np.ndarray, n: int) -> np.ndarray:
    """The ids of the n largest of float32 [V], in falling order, equal ones by the lower id, NaN last.

    Of 16 n groups of ids the n largest maxima bound the n largest values from below. What is no less is sorted, most often few
    values."""
    if not 0 < n < len(x):
        return np.argsort(-x, kind="stable")[:n]
    n_grouped = len(x) // (16 * n) * 16 * n
    groups = x[:n_grouped].reshape(-1, 16 * n)
    maxima = np.concatenate([groups.max(axis=0), x[n_grouped:]]) if len(groups) > 1 else x
    least = np.partition(-maxima, n - 1)[n - 1]
    among = np.flatnonzero(-x <= least) if least == least else np.arange(len(x))
    return among[np.argsort(-x[among], kind="stable")[:n]]


def uniform(seed: int, position: int, sample: int = 0) -> float:
    """The number in [0, 1) for a position: the upper 53 bits of the first word of Philox4x64, key seed, counter [0, 0, sample,
    position]."""
    word = np.random.Philox(key=seed, counter=[0, 0, sample, position]).random_raw()
    return (int(word) >> 11) * 2.0 ** -53


def not_a_number(position: int) -> UserError:
    return UserError(f"the logits of token {position} hold NaN")


def adjusted(logits: np.ndarray, sampling: Sampling, text: Sequence[int]) -> np.ndarray:
    """float32 [V] of logits float32 [V], every step rounded to float32.   text: the tokens so far.

    1. l + bias, -infinity where that is the bias.   2. Of each id that is n > 0 times among the last repeat_last_n tokens:
    l / repeat_penalty where l > 0, else l * repeat_penalty; then l - n * frequency_penalty, then - presence_penalty.
    """
    if not sampling.adjusts:
        return logits
    l, f32 = logits.copy(), np.float32
    sampling.check_ids(len(l))
    for id, bias in sampling.logit_bias.items():
        l[id] = l[id] + f32(bias) if bias > -np.inf else bias
    first = 0 if sampling.repeat_last_n < 0 else max(len(text) - sampling.repeat_last_n, 0)
    counts = Counter(int(id) for id in text[first:])
    ids, n = np.fromiter(counts.keys(), np.int64, len(counts)), np.fromiter(counts.values(), f32, len(counts))
    with np.errstate(invalid="ignore", over="ignore"):
        x, penalty = l[ids], f32(sampling.repeat_penalty)
        l[ids] = np.where(x > 0, x / penalty, x * penalty) - n * f32(sampling.frequency_penalty) - f32(sampling.presence_penalty)
    return l


def choose(logits: np.ndarray, position: int, sampling: Sampling, text: Sequence[int] = (),
           allowed: np.ndarray | None = None) -> int:
    """The token at `position`.   logits: float32 [V]; text: the tokens before, for penalties (`adjusted`); allowed: int [n],
    ascending, the ids to choose from, None for all (`grammar.Matcher`). Equal logits rank by the lower id.

    1. top-k: the k largest logits, in falling order.   2. p = softmax of those; top-p: the fewest whose p sum to at least top_p.
    3. min-p: those before the first with p < min_p * p[0].   4. w = exp((l - l[0]) / temperature), cumulative in order; the first
    whose sum exceeds u * sum, u that of `uniform`. The op `draw` does the same where logits are (docs/numerics.md, section 5).
    """
    if np.isnan(logits).any():
        raise not_a_number(position)
    logits = adjusted(logits, sampling, text)
    if allowed is not None:
        if not (logits[allowed] > -np.inf).any():
            raise UserError(f"all that the grammar allows as token {position} has a logit of minus infinity")
        return int(allowed[chosen(logits[allowed], sampling, sampling.u(position))])
    return chosen(logits, sampling, sampling.u(position))


def chosen(logits: np.ndarray, sampling: Sampling, u: float) -> int:
    """The index that steps 1 to 4 of `choose` take, as the op `draw` does."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    order = largest(logits, sampling.top_k or len(logits))
    l = logits[order].astype(np.float64)
    with np.errstate(invalid="ignore"):
        l = np.where(l == l[0], 0.0, l - l[0])  # not inf - inf where the best logit is infinite
    w = exp(l)
    p = w / tree_sum(w)
    if sampling.top_p < 1:
        # cumsum adds in index order by definition
        n = int(np.searchsorted(np.cumsum(p), sampling.top_p)) + 1
        l, p = l[:n], p[:n]
    if (small := p < sampling.min_p * p[0]).any():
        l = l[:small.argmax()]
    cumulative = np.cumsum(exp(l / sampling.temperature))
    i = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(order[min(i, len(cumulative) - 1)])
