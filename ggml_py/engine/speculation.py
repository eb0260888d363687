"""Speculation: tokens that may follow are guessed, and checked together in one step. Text and logits are those without it.

A row of a micro-batch does not depend on the rows beside it. So the logits behind a guessed token are those that decoding it
alone would give, as long as it is the token that is chosen. The first guess that is not chosen and all behind it are taken back.
What is chosen depends on logits, settings, seed and position alone (`sampling`), so draws are those without drafts too.
"""
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate, islice
from operator import mul
from typing import Protocol

import numpy as np

from ..base.defaults import DRAFT_MAX
from ..base.errors import ParameterError, UserError
from ..base.exact_math import exp, tree_sum

LONGEST, SHORTEST = 4, 2  # tokens that `NGrams` looks up
MOST_DRAFTS = 256
TRIES = 4  # that the share of right guesses at a place is of, about
LEAST_CHANCE = 1 / 3  # of a guess, and of all before it, to be right
LONGEST_REST = 64  # drafts before one that is longer


class Source(Protocol):
    """Where drafts come from."""
    name: str
    def begin(self, context) -> None: ...  # another text, which the context continues
    def draft(self, tokens: list[int], n: int) -> list[int]: ...  # at most n that may follow the text so far, n >= 1
    def end(self) -> None: ...  # of the text
    def close(self) -> None: ...


class NGrams:
    """What followed the last tokens where they stood before in the text: of the longest run of 4 to 2 tokens that did, at its
    last place."""
    name = "ngram"

    def begin(self, context) -> None:
        self.followed: dict[tuple[int, ...], int] = {}  # tokens -> where the one behind them is
        self.n_seen = 0

    def draft(self, tokens: list[int], n: int) -> list[int]:
        for end in range(max(self.n_seen, SHORTEST), len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self.followed[tuple(tokens[end - length:end])] = end
        self.n_seen = len(tokens)
        places = (self.followed.get(tuple(tokens[-length:])) for length in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1))
        at = next((place for place in places if place is not None), None)
        if at is None:
            return []
        period = len(tokens) - at  # a text that repeats itself goes on doing so
        return [tokens[at + i % period] for i in range(n)]

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass


class DraftModel:
    """What another model of the same vocabulary holds for likeliest. It ends at a token to which that gives a probability below
    p_min."""
    name = "model"

    def __init__(self, model, target, n_ctx: int, p_min: float = 0.0, draft_max: int = DRAFT_MAX):
        """model, target: `Model`; n_ctx: positions of a text; draft_max: tokens of a draft, which recurrent layers can forget.
        ParameterError for another vocabulary."""
        if not 0 <= p_min <= 1:
            raise ParameterError("draft_p_min", f"must be 0 to 1, got {p_min!r}")
        mine, theirs = (list(each.file.get("tokenizer.ggml.tokens", "arr[str]", [])) for each in (model, target))
        if model.n_vocab != target.n_vocab or mine != theirs:
            raise ParameterError("model_draft", f"{model.file.path} has another vocabulary ({model.n_vocab} tokens) than "
                                                f"{target.file.path} ({target.n_vocab} tokens); allowed: the same")
        self.context = model.new_context(min(n_ctx, model.n_ctx_train), n_rollback=draft_max + 1)
        self.p_min = p_min
        self.tokens: list[int] = []  # that the context has

    def begin(self, context) -> None:
        pass  # what the texts have in common is kept

    def end(self) -> None:
        pass

    def draft(self, tokens: list[int], n: int) -> list[int]:
        n = min(n, self.context.n_ctx - len(tokens) + 1)
        if n < 1:
            return []  # the text is longer than the draft model can read
        # The last token is decoded again, for what follows it
        same = next((i for i, (a, b) in enumerate(zip(self.tokens, tokens[:-1])) if a != b),
                    min(len(self.tokens), len(tokens) - 1))
        same = self.context.reachable(0, same)
        self.context.keep(0, same)
        found = list(islice(self._sure(tokens[same:]) if self.p_min else self._likeliest(tokens[same:], n), n))
        self.tokens = [*tokens, *found][:self.context.memory.length(0)]
        return found

    def _likeliest(self, new: list[int], n: int) -> Iterator[int]:
        token = int(self.context.decode(new, logits="argmax")[0])
        if token >= 0:
            yield token
            with suppress(UserError):  # the logits of the draft model hold NaN
                yield from self.context.greedy(token, n - 1)

    def _sure(self, new: list[int]) -> Iterator[int]:
        while probability_of_best(logits := self.context.decode(new)[0]) >= self.p_min:
            new = [int(logits.argmax())]
            yield new[0]

    def close(self) -> None:
        self.context.close()


def probability_of_best(logits: np.ndarray) -> float:
    """The largest softmax of float32 [V]; 0 where there is a NaN."""
    best = logits.max()
    return 0.0 if np.isnan(best) else float(1 / tree_sum(exp(logits.astype(np.float64) - best)))


class Speculation:
    """How many tokens are guessed, from what has come of guesses so far, which no bit depends on; and the counts.

    Of each place in a draft is known how often the guess there was right lately, those before it being right. The product of
    these shares is the chance that a draft is right to there; where it is below a third, drafts end. After 1, 2, 4 and at most 64
    drafts one is longer by a token, to see whether that has changed."""

    def __init__(self, source: Source, most: int = DRAFT_MAX):
        if not 1 <= most <= MOST_DRAFTS:
            raise ParameterError("draft_max", f"must be 1 to {MOST_DRAFTS}, got {most}")
        self.source, self.most = source, most
        self.n_steps = self.n_drafted = self.n_accepted = 0  # of all texts
        self._forget()

    def _forget(self) -> None:
        self.shares = [1.0] * self.most  # how often, of late, the guess at each place was right where those before it were
        self.tries = [0] * self.most
        self.n = self.most  # tokens of a draft
        self.rest = self.pause = 1  # drafts before one that is longer: still to come; behind the next one whose end is wrong

    def begin(self, context) -> None:
        """Another text, which the context continues."""
        self.source.begin(context)
        self._forget()

    def draft(self, tokens: list[int], space: int) -> list[int]:
        """tokens: the text so far; space: how many drafts there is room for."""
        n = min(self.n + (self.rest == 0), self.most, space)
        self.rest = max(self.rest - 1, 0)
        return self.source.draft(tokens, n) if n > 0 else []

    def learn(self, n_drafted: int, n_accepted: int) -> None:
        self.n_steps, self.n_drafted = self.n_steps + 1, self.n_drafted + n_drafted
        self.n_accepted += n_accepted
        for i in range(min(n_accepted + 1, n_drafted)):
            self.tries[i] = min(self.tries[i] + 1, TRIES)
            self.shares[i] += ((i < n_accepted) - self.shares[i]) / self.tries[i]
        before = self.n
        if n_drafted > before:
            self.pause = 1 if n_accepted == n_drafted else min(2 * self.pause, LONGEST_REST)
        self.n = next((i for i, chance in enumerate(accumulate(self.shares, mul)) if chance < LEAST_CHANCE), self.most)
        if n_drafted > before or self.n < before:
            self.rest = self.pause

    def report(self) -> str:
        share = f" ({100 * self.n_accepted / self.n_drafted:.0f} %)" if self.n_drafted else ""
        a_step = f", {1 + self.n_accepted / self.n_steps:.2f} tokens a step" if self.n_steps else ""
        return f"drafts of {self.source.name}: {self.n_drafted} drafted, {self.n_accepted} accepted{share}{a_step}"
