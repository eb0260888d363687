"""Texts that are generated side by side, as sequences of one context.

A text has a sequence to itself until it ends; then the next prompt has it. What a prompt begins with is copied from a sequence
that has it, and computed once where several prompts begin so (`likelihood.tree`). All go on together, a token of each in a
micro-batch. By the promise of this runtime each text has the bits that it has alone.

Micro-batches have one of a few widths, since each width has graphs of its own: sequences without a text, and those whose text has
ended, go on beside the others, and nobody looks at what they say.
"""
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from ..base.defaults import MOST_DEFAULT_CONTEXT
from ..base.errors import ParameterError
from .completion import (Asked, Generation, Piece, Prompt, TextArguments, Writer, asked, check_count, check_names, joined,
                         prompt_ids, room)
from .grammar import FREE
from .likelihood import LEAST_SHARED, MOST_SEQUENCES, Branch, Ids, levels, shared, tree
from .sampling import Draw, Sampling, choose, not_a_number

LEAST_FREE = 8  # of so many sequences one must be free before further prompts begin: the others wait meanwhile


@dataclass(eq=False)
class Text:
    """A completion of a prompt, as far as it is.   n_ctx: positions that it may take with the prompt.   sampling: without
    suppressed tokens.   tokens: the prompt's, and those that were chosen."""
    ids: Ids
    n_ctx: int
    sampling: Sampling
    writer: Writer
    tokens: list[int] = field(init=False)
    pieces: list[Piece] = field(default_factory=list)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.tokens = [*self.ids]
        if self.writer.is_full:
            self._finish()

    def choose(self, row: np.ndarray) -> None:
        """The next token, of a row of logits, float32 [V]."""
        if self.writer.wanted.rows:
            self.writer.see(row)
        self.add(choose(row, len(self.tokens), self.sampling, self.tokens, self.writer.matcher.allowed))

    def add(self, token: int) -> None:
        """The next token, or one that ends the text."""
        if self.writer.is_end(token):
            self._finish()
            return
        self.tokens.append(token)
        self.writer.matcher.accept(token)
        self.pieces.append(self.writer.add(token))
        if self.writer.is_full:
            self._finish()

    def _finish(self) -> None:
        self.pieces.append(self.writer.finish())
        self.is_over = True


def width_of(n: int, most: int) -> int:
    """Of a step of n texts: the next power of two, `most` at most."""
    return min(most, 1 << (n - 1).bit_length())


class SideBySide:
    """The sequences of a context, and the texts that have them.   only_ids: whether each text takes the likeliest tokens, or each
    those that the op `draw` finds, and nobody wants logits: steps are then queued ahead (`Context.greedy_batch`)."""

    def __init__(self, context, only_ids: bool):
        self.context, self.only_ids, self.n = context, only_ids, context.memory.n_seq_max
        self.texts: dict[int, Text] = {}  # by sequence, those that are not over
        self.held: list[Sequence[int]] = [()] * self.n  # what each sequence begins with, as far as it is that long

    def generate(self, texts: Iterable[Text]) -> Iterator[Text]:
        """Each when it is over. Texts that begin alike should follow each other."""
        waiting = deque(texts)
        while waiting or self.texts:
            if waiting and self._has_room():
                n_free = self.n - len(self.texts)
                self._begin([waiting.popleft() for _ in range(min(n_free, len(waiting)))])
            yield from self._go_on(len(waiting) > 0)

    def _has_room(self) -> bool:
        """For further prompts: enough to make the others wait."""
        return not self.texts or (self.n - len(self.texts)) * LEAST_FREE >= self.n

    def _begin(self, texts: Sequence[Text]) -> None:
        """Decodes their prompts but for the last tokens, in free sequences."""
        free = [i for i in range(self.n) if i not in self.texts]
        parts = tree(sorted(((text.ids, text) for text in texts), key=lambda pair: pair[0][:-1])).parts
        level = [(self._place(begins(part), free), part) for part in parts]
        for each in levels(self.context, level, iter(free)):
            batch = []
            for i, part in sorted(each, key=lambda pair: -len(begins(pair[1]))):  # the shortest last, as in `Scorer`
                tokens = begins(part)
                if rest := tokens[self.context.memory.length(i):]:
                    batch.append((i, rest))
                self.held[i] = tokens
                if not isinstance(part, Branch):
                    self.texts[i] = part[1]
                    self.held[i] = part[1].tokens  # which grow
            if batch:
                self.context.decode_batch(batch, "none")

    def _place(self, tokens: Ids, free: list[int]) -> int:
        """One of the free sequences, which then holds as much of what `tokens` begin with as any sequence."""
        n_shared = [min(shared(tokens, held), self.context.memory.length(i)) for i, held in enumerate(self.held)]
        source = max(range(self.n), key=lambda i: (n_shared[i], i in free))
        to, n = source if source in free else free[0], self.context.reachable(source, n_shared[source])
        free.remove(to)
        if to == source:
            self.context.keep(to, n)
        elif n >= LEAST_SHARED:
            self.context.seq_cp(source, to, n)
        else:
            self.context.keep(to, 0)
        self.held[to] = tokens[:self.context.memory.length(to)]
        return to

    def _go_on(self, waiting: bool) -> Iterator[Text]:
        """Steps of all texts, until one of another width is better or prompts that are `waiting` have room. Each text when it is
        over."""
        together = [*self.texts.items()]
        width = width_of(len(together), self.n)
        idle = [i for i in range(self.n) if i not in self.texts][:width - len(together)]
        for i in idle:
            self.context.keep(i, 0)
            self.held[i] = ()
        forbidden: dict[int, Text] = {}  # whose likeliest token it may not take

        def more() -> bool:
            return (len(self.texts) > 0 and not forbidden and width_of(len(self.texts), self.n) == width
                    and not (waiting and self._has_room()))
        steps = self._steps(together, idle, more)
        with closing(steps):
            for found in steps:
                for (i, text), each in zip(together, found):
                    if text.is_over or i in forbidden:
                        continue
                    if not self.only_ids:
                        text.choose(each[-1])
                    elif each < 0:
                        raise not_a_number(len(text.tokens))
                    elif int(each) in text.sampling.logit_bias:
                        forbidden[i] = text
                    else:
                        text.add(int(each))
                    if text.is_over:
                        yield self.texts.pop(i)
        for i, text in forbidden.items():
            self.context.keep(i, len(text.tokens) - 1)
            text.choose(self.context.decode(text.tokens[-1:], i, "last")[-1])
            if text.is_over:
                yield self.texts.pop(i)

    def _steps(self, together: list[tuple[int, Text]], idle: list[int],
               more: Callable[[], bool]) -> Generator[Sequence[np.ndarray]]:
        """What each step finds for each text: an id, or a row of logits."""
        fed = lambda: [*((i, text.tokens[-1]) for i, text in together), *((i, 0) for i in idle)]
        n = min(self.context.n_ctx - self.context.memory.length(i) for i, _ in fed())
        if self.only_ids:
            draws = None
            if any(text.sampling.is_drawn for _, text in together):
                draws = [*(Draw(text.sampling, len(text.tokens)) for _, text in together), *[Draw(Sampling(), 0)] * len(idle)]
            with closing(self.context.greedy_batch(fed(), n, more, draws)) as steps:
                yield from steps
            return
        for _ in range(n):
            yield self.context.decode_batch([(i, [token]) for i, token in fed()], "last")
            if not more():
                return


def begins(part: Branch | tuple[Ids, Text]) -> Ids:
    """What is decoded of a part of `tree`."""
    return part.tokens if isinstance(part, Branch) else part[0][:-1]


def most_together(model, n_ctx: int, types: dict[str, str]) -> int:
    """As many sequences as fit into half of the free memory of each GPU, of 1 GiB on a CPU; MOST_SEQUENCES at most."""
    found = MOST_SEQUENCES
    for device, n_bytes in model.architecture.context_bytes(n_ctx, 1, **types).items():
        backend = model.backends[device]
        n_free = backend.free_bytes() // 2 if backend.asynchronous else MOST_DEFAULT_CONTEXT
        found = min(found, n_free // max(n_bytes, 1))
    return max(found, 1)


def texts_of(model, ids: Ids, request: Asked, name: str) -> list[Text]:
    """The completions of a prompt.   name: of the prompt, for messages."""
    n_ctx, n_most = room(model, ids, request, name)
    return [Text(ids, n_ctx, choice.forbidding(model.tokenizer.suppressed),
                 Writer(model.tokenizer, n_most, choice.sample, request.wanted, request.matcher.fresh()))
            for choice in request.choices]


def generate_many(model, prompts: Iterable[Prompt], n_seq_max: int | None = None,
                  progress: Callable[[int, int], None] | None = None, **arguments: Any) -> list[Generation]:
    """`Model.generate_many`."""
    check_names("generate_many", arguments, TextArguments.__annotations__)
    if not isinstance(prompts, Iterable) or isinstance(prompts, str | bytes):
        raise ParameterError("prompts", f"must be several prompts, got {prompts!r:.60}")
    if n_seq_max is not None:
        check_count("n_seq_max", n_seq_max, 1)
    request = asked(model, **arguments)
    ids_of = [tuple(prompt_ids(model.tokenizer, prompt, f"prompts[{i}]")) for i, prompt in enumerate(prompts)]
    texts: dict[Ids, list[Text]] = {}
    for i, ids in enumerate(ids_of):
        if ids not in texts:
            texts[ids] = texts_of(model, ids, request, f"prompts[{i}]")
    every = [*chain(*texts.values())]
    only_ids = (all(text.sampling.is_argmax_of_allowed or text.sampling.is_drawn for text in every) and not request.wanted.rows
                and request.matcher is FREE)
    n_over = sum(text.is_over for text in every)
    for is_short in True, False:  # rotary angles may depend on a context's length: that of a text is its own
        alike = [text for text in every
                 if not text.is_over and model.architecture.angles_agree(text.n_ctx, 1) == is_short]
        if not alike:
            continue
        n_ctx = max(text.n_ctx for text in alike)
        n_together = min(n_seq_max or most_together(model, n_ctx, request.types), len(alike))
        with model.new_context(n_ctx * n_together, n_seq_max=n_together, **request.types) as context:
            for _ in SideBySide(context, only_ids).generate(sorted(alike, key=lambda text: text.ids)):
                n_over += 1
                if progress is not None:
                    progress(n_over, len(every))
    return [joined(ids, chain(*(text.pieces for text in texts[ids]))) for ids in ids_of]
