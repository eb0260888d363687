"""Log-likelihoods of continuations: how likely a model holds a text behind another.

The logits stay on the device (`log_soft_max`, docs/numerics.md section 5). Continuations are scored side by side, as sequences of
one context, and what several contexts begin with is decoded once: the contexts make a tree of shared beginnings, whose nodes are
decoded level by level; a sequence that branches off begins with a copy. By the promise of this runtime none of that changes a
bit.
"""
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from math import fsum
from numbers import Integral
from operator import itemgetter
from typing import Any

import numpy as np

from ..base.defaults import MOST_DEFAULT_CONTEXT
from ..base.errors import ParameterError
from ..tokenizer import Tokenizer
from .settings import Settings, new_context

Ids = tuple[int, ...]
Pair = tuple[Ids, Ids]  # of a context, at least one, and of its continuation
Leaf = tuple[Ids, Any]  # a context, and what goes on with its last token: of a `Pair` the continuation
Text = str | Sequence[int] | np.ndarray

LEAST_SHARED = 16  # positions: copying fewer, and waiting for them, takes longer than decoding them again
MOST_SEQUENCES = 64


@dataclass(frozen=True)
class Likelihood:
    """Of a continuation.   ids: its tokens.   logprobs: the natural logarithm of the probability of each behind all before it,
    as float32 has it; NaN where the logits hold NaN or +infinity.   is_greedy: whether each is the likeliest there, of equally
    likely ones that of the lowest id."""
    ids: Ids
    logprobs: tuple[float, ...]
    is_greedy: bool

    @property
    def logprob(self) -> float:
        """Of the whole continuation: the exact sum of logprobs, rounded once to float64."""
        return fsum(self.logprobs)


def is_list(value) -> bool:
    """Whether it may hold ids: bytes are numbers to Python, and a text to who gives them."""
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, bytes | bytearray | memoryview)


def checked_text(name: str, text: Text) -> Text:
    """ParameterError of the argument `name` for what is neither a text nor a list of ids."""
    if not is_list(text) or not (isinstance(text, str) or all(isinstance(id, Integral) for id in text)):
        raise ParameterError(name, f"must be a text or a list of token ids, got {text!r:.60}")
    return text


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text to score: special tokens in it are parsed, BOS comes first where the model wants it, once; no EOS."""
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    bos = tokenizer.encode("")[:1] if tokenizer.add_bos else []
    return ids if ids[:1] == bos else bos + ids


def encode_pair(tokenizer: Tokenizer, context: Text, continuation: Text) -> Pair:
    """Ids of both, where either may be ids already.

    White space at the end of a context goes to the continuation, since tokens begin with it. The continuation's tokens are those
    of both texts behind as many as the context alone has. An empty context is BOS, else EOS: a first token needs one before it.
    A text that begins with that token has it already. ParameterError for what is neither text nor ids.
    """
    context, continuation = checked_text("context", context), checked_text("continuation", continuation)
    if isinstance(context, str) and isinstance(continuation, str):
        text = context.rstrip()
        continuation, context = context[len(text):] + continuation, text
        if context:
            first = text_ids(tokenizer, context)
            whole = text_ids(tokenizer, context + continuation)
            return tuple(first), tuple(whole[len(first):])
    if isinstance(context, str):
        context = text_ids(tokenizer, context) if context else []
    is_text = isinstance(continuation, str)
    if isinstance(continuation, str):
        continuation = tokenizer.encode(continuation, add_special=False, parse_special=True)
    if not len(context):
        start = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if start is None:
            raise ParameterError("context", "is empty, and the model has neither BOS nor EOS to stand for it; allowed: at least "
                                            "one token")
        context = [start]
        if is_text and continuation[:1] == context:
            continuation = continuation[1:]
    return tuple(int(id) for id in context), tuple(int(id) for id in continuation)


def n_positions(pair: Pair) -> int:
    """That scoring a pair takes: its last token is not decoded."""
    return len(pair[0]) + len(pair[1]) - 1


@dataclass
class Branch:
    """What several sequences begin with.   tokens: from the first position on.   leaves: those whose contexts end one token
    behind it.   branches: what other sequences that begin so go on with."""
    tokens: Ids = ()
    leaves: list[Leaf] = field(default_factory=list)
    branches: list["Branch"] = field(default_factory=list)

    @property
    def parts(self) -> list["Branch | Leaf"]:
        return [*self.branches, *self.leaves]


def tree(leaves: Sequence[Leaf]) -> Branch:
    """Of leaves in the order of their contexts without the last token, behind which the part begins that is a leaf's own."""
    root = Branch()
    left = [(root, [*leaves])]
    while left:
        above, below = left.pop()
        beginnings = [leaf[0][len(above.tokens):-1][:LEAST_SHARED] for leaf in below]
        for _, alike in groupby(zip(beginnings, below), itemgetter(0)):
            group = [leaf for _, leaf in alike]
            first, last = (leaf[0][:-1] for leaf in (group[0], group[-1]))
            if first == above.tokens:
                above.leaves += group
            else:
                above.branches.append(Branch(first[:shared(first, last)]))
                left.append((above.branches[-1], group))
    return root


def levels(context, level: list[tuple[int, Branch | Leaf]], fresh: Iterator[int]) -> Iterator[list[tuple[int, Branch | Leaf]]]:
    """Sequences of a context, and what each goes on with: those of `level`, then those that branch off there, which begin with
    copies. Whoever is given some decodes them before asking for more.   fresh: sequences for what branches off."""
    while level:
        yield level
        below: list[tuple[int, Branch | Leaf]] = []
        for slot, each in level:
            if not isinstance(each, Branch):
                continue
            for i, part in enumerate(each.parts):
                to = slot if i == 0 else next(fresh)
                if to != slot:
                    context.seq_cp(slot, to, len(each.tokens))
                below.append((to, part))
        level = below


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class Scorer:
    """Scores pairs, in the order of `tree`, in the sequences of a context, as many as it has at a time."""

    def __init__(self, context, held: Ids = ()):
        """held: what its first sequence has."""
        self.context = context
        self.held: tuple[int, Ids] = 0, held  # a sequence, and what it has of the last pair

    def score(self, pairs: Sequence[Pair]) -> Iterator[tuple[Pair, Likelihood]]:
        """At most a pair for each sequence."""
        root, (held, has), self.held = tree(pairs), self.held, (0, ())
        fresh = iter([held, *(slot for slot in range(self.context.memory.n_seq_max) if slot != held)])
        level: list[tuple[int, Branch | Leaf]] = []  # a sequence, and what it goes on with
        for i, each in enumerate(root.parts):
            slot = next(fresh)
            self.context.keep(slot, self._kept(slot, has, root) if i == 0 else 0)
            level.append((slot, each))
        for now in levels(self.context, level, fresh):
            yield from self._decode(now)

    def _kept(self, slot: int, has: Ids, root: Branch) -> int:
        """How many positions of what a sequence has go on with the first branches. Others can be copied from where these end."""
        path = [root]
        while path[-1].branches:
            path.append(path[-1].branches[0])
        ends = [len(branch.tokens) for branch in path]
        n = shared(has, path[-1].tokens)
        if any(self.context.reachable(slot, end) != end for end in ends if end < n):
            n = min(n, *ends[1:2])
        return self.context.reachable(slot, n)

    def _decode(self, level: list[tuple[int, Branch | Leaf]]) -> Iterator[tuple[Pair, Likelihood]]:
        asked = []
        for slot, each in level:
            context, targets = (each.tokens, ()) if isinstance(each, Branch) else each
            fed = context if isinstance(each, Branch) else (context + targets)[:-1]
            if tokens := fed[self.context.memory.length(slot):]:
                asked.append((len(fed), each, (slot, tokens, targets)))
            self.held = max(self.held, (slot, fed), key=lambda held: held[1])
        # the shortest last: there is room to fill a micro-batch up
        asked.sort(key=itemgetter(0), reverse=True)
        for (_, each, _), (logprobs, best) in zip(asked, self.context.likelihoods(batch for *_, batch in asked)):
            if not isinstance(each, Branch):
                yield each, Likelihood(each[1], tuple(logprobs.tolist()), best.tolist() == [*each[1]])


@contextmanager
def scoring(model, settings: Settings, n_ctx: int, n_together: int, log) -> Iterator[Scorer]:
    """One sequence is in the context that the model keeps for its next call, where settings ask for no other; several have one of
    their own."""
    type_k, type_v = settings.type_k, settings.type_v
    if n_together == 1 and settings == Settings(type_k=type_k, type_v=type_v):
        with model.kept.text(n_ctx, settings.n_rollback, type_k, type_v) as text:
            text.context.drop_checkpoints()
            scorer = Scorer(text.context, tuple(text.tokens))
            yield scorer
            text.tokens = [*scorer.held[1]]
    else:
        with new_context(model, settings, n_ctx, n_together, log) as context:
            yield Scorer(context)


def score_many(model, pairs: Iterable[tuple[Text, Text]], settings: Settings, n_seq_max: int | None = None,
               progress: Callable[[int, int], None] | None = None, log=None) -> list[Likelihood]:
    """`Model.score_many`.   settings: of the context, but for its positions.   log: as of `settings.new_context`."""
    asked: list[Pair] = []
    for i, pair in enumerate(pairs):
        if not is_list(pair) or isinstance(pair, str) or len(pair) != 2:
            raise ParameterError("pairs", f"pair {i} is {pair!r:.60}, allowed: (context, continuation)")
        asked.append(encode_pair(model.tokenizer, *pair))
        if (n := n_positions(asked[-1])) > model.n_ctx_train:
            raise ParameterError("pairs", f"pair {i} takes {n} positions, allowed: up to {model.n_ctx_train}, what the model was "
                                          "trained on")
    found: dict[Pair, Likelihood] = {pair: Likelihood((), (), True) for pair in asked if not pair[1]}
    left = sorted({pair for pair in asked if pair[1]}, key=lambda pair: (pair[0][:-1], pair))
    n_left = len(left)
    for is_short in True, False:  # rotary angles may depend on a context's length: that of a pair is its own
        alike = [pair for pair in left if model.architecture.angles_agree(n_positions(pair), 1) == is_short]
        if not alike:
            continue
        n_ctx = max(map(n_positions, alike))
        n_together = n_seq_max
        if n_together is None:
            n_bytes = model.architecture.context_bytes(n_ctx, 1, settings.type_k, settings.type_v, settings.n_rollback).total()
            n_together = max(1, min(MOST_SEQUENCES, MOST_DEFAULT_CONTEXT // max(n_bytes, 1)))
        n_together = min(n_together, len(alike))
        with scoring(model, settings, n_ctx, n_together, log) as scorer:
            for first in range(0, len(alike), n_together):
                found.update(scorer.score(part := alike[first:first + n_together]))
                n_left -= len(part)
                if progress is not None:
                    progress(len(left) - n_left, len(left))
    return [found[pair] for pair in asked]
