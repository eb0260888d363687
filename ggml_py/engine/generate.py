"""Generating: a prompt continued token by token."""
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import takewhile

import numpy as np

from .grammar import FREE, Matcher
from .sampling import Draw, Sampling, choose, not_a_number
from .speculation import Speculation


def generate(context, prompt, n_tokens: int, sampling: Sampling, is_end: Callable[[int], bool],
             speculation: Speculation | None = None, see: Callable[[np.ndarray], None] | None = None,
             n_held: int = 0, matcher: Matcher = FREE) -> Iterator[int]:
    """Yield up to n_tokens tokens that continue `prompt`; one for which is_end(token) ends it and is not yielded.   prompt: int
    [n], n >= 1.   speculation: how tokens are guessed ahead, which changes the speed only.   see: is given the logits, float32
    [V], that each token was chosen from, before the token is yielded.   n_held: tokens of the prompt, fewer than all, that the
    context ends with already.   matcher: of a grammar that the tokens follow, to its end at most."""
    sampling.check_ids(context.model.n_vocab)
    if n_tokens > 0 and not matcher.is_complete:
        is_greedy = sampling.is_argmax or (sampling.is_argmax_of_allowed and see is None)
        if is_greedy and matcher is FREE and speculation is None:
            tokens = _greedy(context, prompt, n_tokens, sampling, see, n_held)
        elif speculation is not None or see is not None:
            tokens = _guessed(context, prompt, n_tokens, sampling, speculation, see, n_held, matcher)
        elif sampling.is_drawn and matcher is FREE:
            tokens = _drawn_there(context, prompt, n_tokens, sampling, n_held)
        else:
            tokens = _drawn(context, prompt, n_tokens, sampling, n_held, matcher)
        with closing(tokens):
            for token in takewhile(lambda token: not is_end(token), tokens):
                matcher.accept(token)
                yield token
                if matcher.is_complete:
                    return


def _greedy(context, prompt, n_tokens: int, sampling: Sampling, see: Callable[[np.ndarray], None] | None,
            n_held: int) -> Generator[int, None, None]:
    """Without a draw, logits stay where they are, but for those that `see` is given, and those whose largest is of a forbidden
    id: their step is repeated."""
    def allowed(likeliest: int, fed: int) -> int:
        if likeliest not in sampling.logit_bias:
            return likeliest
        position = len(prompt) + n_tokens - left
        context.keep(0, start + position - 1)
        return choose(context.decode([fed], logits="last")[-1], position, sampling)

    start, left = context.memory.length(0) - n_held, n_tokens
    if see is None:
        likeliest = int(context.decode(prompt[n_held:], logits="argmax")[-1])
        if likeliest < 0:
            raise not_a_number(len(prompt))
    else:
        row = context.decode(prompt[n_held:], logits="last")[-1]
        likeliest = choose(row, len(prompt), sampling)
        see(row)
    token, left = allowed(likeliest, int(prompt[-1])), left - 1
    yield token
    while left:  # again behind each that was not the likeliest
        with closing(context.greedy(token, left, see=see)) as steps:
            for likeliest in steps:
                token, left = allowed(likeliest, token), left - 1
                yield token
                if token != likeliest:
                    break


def _drawn(context, prompt, n_tokens: int, sampling: Sampling, n_held: int, matcher: Matcher) -> Generator[int, None, None]:
    decoded, text = prompt[n_held:], [int(token) for token in prompt]
    for position in range(len(prompt), len(prompt) + n_tokens):
        token = choose(context.decode(decoded, logits="last")[-1], position, sampling, text, matcher.allowed)
        text.append(token)
        yield token
        decoded = [token]


def _drawn_there(context, prompt, n_tokens: int, sampling: Sampling, n_held: int) -> Generator[int, None, None]:
    """As `_drawn`, where the op `draw` chooses: behind the first token logits stay where they are."""
    first = choose(context.decode(prompt[n_held:], logits="last")[-1], len(prompt), sampling)
    yield first
    draws = [Draw(sampling, len(prompt) + 1)]
    with closing(context.greedy_batch([(0, first)], n_tokens - 1, draws=draws)) as steps:
        for position, (token,) in enumerate(steps, len(prompt) + 1):
            if token < 0:
                raise not_a_number(position)
            yield int(token)


def _guessed(context, prompt, n_tokens: int, sampling: Sampling, speculation: Speculation | None,
             see: Callable[[np.ndarray], None] | None, n_held: int, matcher: Matcher) -> Generator[int, None, None]:
    """Steps of the last token and of what is guessed to follow it. What is not yielded is taken back."""
    only_ids = sampling.is_argmax and see is None and matcher is FREE

    def chosen(rows: np.ndarray, position: int) -> Iterator[int]:
        """The tokens from `position` on, of rows of logits or their largest ids; rows behind a wrong guess are not looked at."""
        for i, row in enumerate(rows):
            token = int(row) if only_ids else choose(row, position + i, sampling, text, matcher.allowed)
            if token < 0:
                raise not_a_number(position + i)
            if see is not None:
                see(row)
            yield token

    if speculation is not None:
        speculation.begin(context)
    start, text = context.memory.length(0) - n_held, [int(token) for token in prompt]
    draft: list[int] = []
    end = len(text) + n_tokens
    fed, wanted, is_first = text[n_held:], "argmax" if only_ids else "last", True
    try:
        while True:
            n_before = len(text)
            for guess, token in zip([*draft, None], chosen(context.decode(fed, logits=wanted), n_before)):
                text.append(token)
                yield token
                if token != guess:
                    break
            if speculation is not None and not is_first:
                speculation.learn(len(draft), len(text) - n_before - 1)
            if len(text) == end:
                return
            if len(text) - n_before <= len(draft):
                context.keep(0, start + len(text) - 1)  # without the wrong guess and those behind it
            if speculation is not None:
                draft = speculation.draft(text, min(end - len(text) - 1, context.n_ctx - start - len(text),
                                                    context.memory.n_rollback - 1))
                draft = draft[:matcher.n_allowed(draft)]
            fed, wanted, is_first = [text[-1], *draft], "argmaxes" if only_ids else "all", False
    finally:
        if speculation is not None:
            speculation.source.end()
        if len(text) > len(prompt):
            context.keep(0, start + len(text) - 1)
