"""Conversations: messages, and a context that keeps what it has of them."""
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..base.errors import UserError
from ..tokenizer import Tokenizer
from .completion import Piece, Wanted, pieces
from .grammar import FREE, Matcher
from .likelihood import shared
from .sampling import Sampling
from .speculation import Speculation


class NoRoom(UserError):
    """The prompt of a conversation is as long as its context, or longer."""


class Conversation:
    """A list of messages that grows by answers, and the first sequence of a context.

    An answer is what the same messages give in a new context: the template makes the prompt of all of them each time, and what
    the context has of its beginning is not decoded again.

    encode: messages -> ids of the prompt.   n_most: tokens of an answer at most; None: as many as there is room for.
    speculation, stop, matcher: of `pieces`, for each answer."""

    def __init__(self, context, tokenizer: Tokenizer, encode: Callable[[Sequence[Mapping]], list[int]], n_most: int | None = None,
                 speculation: Speculation | None = None, stop: Sequence[str] = (), matcher: Matcher = FREE):
        self.context, self.tokenizer, self.encode, self.n_most = context, tokenizer, encode, n_most
        self.speculation, self.stop, self.matcher = speculation, stop, matcher
        self.messages: list[dict[str, str]] = []
        self.ids: list[int] = []  # whose beginning the context has
        self.n_prompt = self.n_held = 0  # tokens of the last prompt, and how many of them the context had

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def answer(self, sampling: Sampling) -> Iterator[Piece]:
        """The pieces of an answer to the last message, which is a user's. It is added to the messages, also where the iterator is
        closed or an interrupt ends it. NoRoom, and nothing is decoded, where the prompt has none."""
        prompt = self.encode(self.messages)
        space = self.context.n_ctx - len(prompt)
        if space < 1:
            raise NoRoom(f"the conversation has {len(prompt)} tokens, and the context holds {self.context.n_ctx}")
        self.n_prompt, self.n_held = len(prompt), self._hold(prompt)
        text, n_most = "", space if self.n_most is None else min(self.n_most, space)
        try:
            n_held = self._decode(prompt)
            for piece in pieces(self.context, self.tokenizer, prompt, n_most, sampling, self.speculation,
                                Wanted(tuple(self.stop)), n_held, self.matcher.fresh()):
                text += piece.text
                self.ids += piece.ids
                yield piece
        finally:
            self.add("assistant", text)

    def take_back(self) -> None:
        """Forget the last answer."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()

    def clear(self) -> None:
        """Forget all messages but the system's."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self.context.clear()
        self.ids = []

    def _hold(self, prompt: list[int]) -> int:
        """Takes the context back to what it has of the prompt but for the last token, and returns how many tokens these are."""
        had = self.ids[:self.context.memory.length(0)]
        n = 0 if self._is_seen else self.context.reachable(0, shared(tuple(had), tuple(prompt[:-1])))
        self.context.keep(0, n)
        self.ids = list(prompt)
        return n

    def _decode(self, prompt: list[int]) -> int:
        """All but the last token, where a recurrent model can come back to for another answer. Returns how many it has then."""
        if self._is_seen:
            return 0
        if before := prompt[self.n_held:-1]:
            self.context.decode(before, logits="none")
        self.context.drop_checkpoints()
        self.context.checkpoint()
        return len(prompt) - 1

    @property
    def _is_seen(self) -> bool:
        """Whether what drafts must see each token of the prompt decoded."""
        return self.speculation is not None and self.speculation.source.name == "mtp"
