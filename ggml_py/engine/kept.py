"""The context that `Model.generate` and `score` keep for the next call, with its text: what both texts begin with is computed
once.

By the promise of this runtime no bit depends on that: a position's keys and values are the same, whether a prompt or a generated
token put them there, and however large the context is.
"""
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..base.defaults import MOST_DEFAULT_CONTEXT

LEAST_POSITIONS = 512  # of a context that is kept: the next text may be longer


@dataclass
class Text:
    """A context and the tokens of its sequence 0, of which the context may hold fewer."""
    context: Any  # `Context` of engine/model.py, which imports this
    tokens: list[int] = field(default_factory=list)


class Kept:
    """At most one idle context of a model. A call takes it and gives it back; one that finds none makes another."""

    def __init__(self, model):
        self.model, self.idle, self.is_closed = model, [], False  # append and pop of a list need no lock

    @contextmanager
    def text(self, n_ctx: int, n_rollback: int, type_k: str, type_v: str) -> Iterator[Text]:
        """A context of at least n_ctx positions, n_rollback of which can be taken back. It is closed where the block raises,
        unless that is a stream that nobody reads to its end."""
        found = self._take()
        if found is not None and not self._serves(found.context, n_ctx, n_rollback, type_k, type_v):
            found.context.close()
            found = None
        if found is None:
            size = self._size(n_ctx, n_rollback, type_k, type_v)
            found = Text(self.model.new_context(n_ctx=size, n_rollback=n_rollback, type_k=type_k, type_v=type_v))
        try:
            yield found
        except GeneratorExit:
            self._give_back(found)
            raise
        except BaseException:
            found.context.close()
            raise
        self._give_back(found)

    def _take(self) -> Text | None:
        try:
            return self.idle.pop()
        except IndexError:
            return None

    def _give_back(self, text: Text) -> None:
        text.tokens = text.tokens[:text.context.memory.length(0)]
        self.clear()
        self.idle.append(text)
        if self.is_closed:
            self.clear()

    def _serves(self, context, n_ctx: int, n_rollback: int, type_k: str, type_v: str) -> bool:
        return (context.n_ctx >= n_ctx and context.memory.n_rollback >= n_rollback and context.settings[1:3] == (type_k, type_v)
                and self.model.architecture.angles_agree(context.n_ctx, n_ctx))

    def _size(self, n_ctx: int, n_rollback: int, type_k: str, type_v: str) -> int:
        """n_ctx, or a power of two above, where that is of little memory and the same to the model."""
        size = min(max(LEAST_POSITIONS, 1 << (n_ctx - 1).bit_length()), self.model.n_ctx_train)
        alike = size > n_ctx and self.model.architecture.angles_agree(size, n_ctx)
        if not alike:
            return n_ctx
        n_bytes = self.model.architecture.context_bytes(size, 1, type_k, type_v, n_rollback).total()
        return size if n_bytes <= MOST_DEFAULT_CONTEXT else n_ctx

    def clear(self) -> bool:
        """Whether there was a context, whose memory is free now."""
        n = 0
        while (text := self._take()) is not None:
            text.context.close()
            n += 1
        return n > 0

    def close(self) -> None:
        """Those that come back later are closed too."""
        self.is_closed = True
        self.clear()
