"""Completions: a prompt continued as text, with what callers ask for beside it.

`pieces` is the one loop: `Model.generate`, `Model.chat` and the command line read it. It ends at a token that ends the model's
text, at a stop text, or at as many tokens as are asked for.
"""
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np

from ..base.defaults import DRAFT_MAX
from ..base.errors import ParameterError
from ..kernels.reference.log_soft_max import log_soft_max_arrays
from ..state.recurrent import LEAST_ROLLBACK
from ..testing import one_nan
from ..tokenizer import Detokenizer, Tokenizer
from .generate import generate
from .grammar import FREE, Grammar, Matcher
from .likelihood import is_list, shared
from .sampling import Sampling, largest
from .speculation import DraftModel, NGrams, Source, Speculation

Reason = Literal["stop", "length", "end"]
Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]
MAX_TOKENS = 128


class TextArguments(TypedDict, total=False):
    """Of `Model.generate_many` and `Model.generate`, which says what they mean; those that `asked` does not name are of
    `Sampling`."""
    max_tokens: int | None
    stop: str | Sequence[str]
    logprobs: int
    n: int
    digest: bool
    grammar: Grammar | None
    n_ctx: int | None
    type_k: str
    type_v: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    logit_bias: Mapping[int, float]


class Arguments(TextArguments, total=False):
    """Of `Model.generate`."""
    echo: bool
    draft: Any  # None, "ngram", "mtp" or a Model
    draft_max: int


@dataclass(frozen=True)
class TokenLogprob:
    """Of a token: the natural logarithm of its probability by the model's own logits, before bias, penalties and temperature, as
    `Model.score` has it; None for a prompt's first token. top: (id, logprob) of the likeliest, equal ones by the lower id."""
    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What a step adds to the completion `index`: text that has become certain, and the tokens it took. The last piece of a
    completion has its finish_reason, and the digest where it was asked for."""
    index: int
    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: Reason | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Completion:
    """text: without the stop text.   ids: the tokens that were chosen, up to the one that completes a stop text, without the one
    that ends the model's text.   finish_reason: "stop" (a stop text), "end" (the model ended its text, or the grammar allows no
    more), "length" (max_tokens, or the context is full).   logprobs: of each id.   digest: sha256 of the logits that each token
    was chosen from, an end that the model chose among them."""
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: Reason
    digest: str | None


@dataclass(frozen=True)
class Generation:
    """The completions of a prompt; text, ids, logprobs, finish_reason and digest are those of the first."""
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    text: str = field(init=False, repr=False)
    ids: tuple[int, ...] = field(init=False, repr=False)
    logprobs: tuple[TokenLogprob, ...] = field(init=False, repr=False)
    finish_reason: Reason = field(init=False, repr=False)
    digest: str | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in "text", "ids", "logprobs", "finish_reason", "digest":
            object.__setattr__(self, name, getattr(self.completions[0], name))


class StopTexts:
    """Looks for stop texts in a growing text. What may be the beginning of one is held back.

    >>> stops = StopTexts(["END"])
    >>> stops.feed("to the E"), stops.feed("ND of it")
    (('to the ', False), ('', True))
    """

    def __init__(self, stops: Iterable[str]):
        self.stops, self.held = tuple(stops), ""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that has become certain, and whether a stop text has come, before which it ends: of several the one that
        begins first."""
        self.held += text
        places = [at for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if places:
            return self.held[:min(places)], True
        n = max((k for stop in self.stops for k in range(1, min(len(stop), len(self.held) + 1)) if self.held.endswith(stop[:k])),
                default=0)
        certain, self.held = self.held[:len(self.held) - n], self.held[len(self.held) - n:]
        return certain, False


def token_logprob(row: np.ndarray, id: int, n_top: int) -> TokenLogprob:
    """Of a row of logits, float32 [V]."""
    top = largest(row, n_top).astype(np.int32)
    out = np.empty((1, 1 + len(top)), np.float32)
    log_soft_max_arrays(row[None], np.array([[id, *top]], np.int32), out)
    chosen, *others = out[0].tolist()
    return TokenLogprob(id, chosen, tuple(zip(top.tolist(), others)))


@dataclass(frozen=True)
class Wanted:
    """What of a completion is wanted.   ends: tokens that end it as stop texts do."""
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    digest: bool = False
    ends: frozenset[int] = frozenset()

    @property
    def rows(self) -> bool:
        """Whether it needs the logits that tokens are chosen from."""
        return self.logprobs > 0 or self.digest


class Writer:
    """A completion that grows by one token after the other, and where it ends.   n_most: tokens at most.   stopped: whether a
    stop text has come, behind which there is nothing."""

    def __init__(self, tokenizer: Tokenizer, n_most: int, index: int = 0, wanted: Wanted = Wanted(), matcher: Matcher = FREE):
        self.tokenizer, self.n_most, self.index, self.wanted, self.matcher = tokenizer, n_most, index, wanted, matcher
        self.text, self.stops, self.n, self.stopped = Detokenizer(tokenizer), StopTexts(wanted.stop), 0, False
        self.rows: deque[np.ndarray] = deque()
        self.reason: Reason = "end"
        self.hash = sha256()

    @property
    def is_full(self) -> bool:
        """Whether no token may follow."""
        return self.stopped or self.n == self.n_most or self.matcher.is_complete

    def see(self, row: np.ndarray) -> None:
        """The logits, float32 [V], that the next token is chosen from."""
        if self.wanted.digest:
            self.hash.update(np.ascontiguousarray(one_nan(row), "<f4").data)
        if self.wanted.logprobs:
            self.rows.append(row)

    def is_end(self, token: int) -> bool:
        """Whether the next token ends the completion and is no part of it."""
        self.reason = "stop" if token in self.wanted.ends else "end"
        return token in self.wanted.ends or self.tokenizer.is_end_of_generation(token)

    def add(self, token: int) -> Piece:
        """The next token."""
        self.n += 1
        known = (token_logprob(self.rows.popleft(), token, self.wanted.logprobs),) if self.wanted.logprobs else ()
        certain, self.stopped = self.stops.feed(self.text.feed(token))
        return Piece(self.index, certain, (token,), known)

    def finish(self) -> Piece:
        """The last piece."""
        rest, stopped = "", self.stopped
        if not stopped:
            rest, stopped = self.stops.feed(self.text.finish())
            rest += "" if stopped else self.stops.held
        if stopped or (self.n == self.n_most and not self.matcher.is_complete):
            self.reason = "stop" if stopped else "length"
        return Piece(self.index, rest, finish_reason=self.reason, digest=self.hash.hexdigest() if self.wanted.digest else None)


def pieces(context, tokenizer: Tokenizer, prompt: Sequence[int], n_most: int, sampling: Sampling,
           speculation: Speculation | None = None, wanted: Wanted = Wanted(), n_held: int = 0,
           matcher: Matcher = FREE) -> Iterator[Piece]:
    """A completion of the prompt, a piece a token and a last one.   n_most: tokens at most.   n_held, matcher: of `generate`."""
    writer = Writer(tokenizer, n_most, sampling.sample, wanted, matcher)
    tokens = generate(context, prompt, n_most, sampling.forbidding(tokenizer.suppressed), writer.is_end, speculation,
                      writer.see if wanted.rows else None, n_held, matcher)
    with closing(tokens):  # type: ignore[type-var]
        for token in tokens:
            yield writer.add(token)
            if writer.stopped:
                break
    yield writer.finish()


@contextmanager
def drafting(model, draft, n_ctx: int, draft_max: int = DRAFT_MAX, p_min: float = 0.0, type_k: str = "f16", type_v: str = "f16"):
    """How a text of n_ctx positions is guessed ahead, or None.   draft: None, "ngram", "mtp" or a `Model` of the same
    vocabulary."""
    with ExitStack() as stack:
        source: Source | None = None
        if isinstance(draft, str):
            if draft not in ("ngram", "mtp"):
                raise ParameterError("draft", f"must be None, 'ngram', 'mtp' or a model, got {draft!r}")
            if draft == "mtp":
                from .mtp import MTP
                source = stack.enter_context(closing(MTP(model, n_ctx, p_min, type_k, type_v)))
            else:
                source = NGrams()
        elif draft is not None:
            source = stack.enter_context(closing(DraftModel(draft, model, n_ctx, p_min, draft_max)))
        yield source and Speculation(source, draft_max)


def prompt_ids(tokenizer: Tokenizer, prompt, name: str = "prompt") -> list[int]:
    """Of a text, of a list of messages, or of ids; at least one.   name: for messages."""
    if isinstance(prompt, str):
        ids = list(tokenizer.encode(prompt))
    elif is_list(prompt) and len(prompt) and isinstance(prompt[0], Mapping):
        from ..tokenizer.chat import encode_chat
        ids = encode_chat(tokenizer, prompt)
    elif is_list(prompt) and all(isinstance(id, Integral) for id in prompt):
        ids = [int(id) for id in prompt]
    else:
        raise ParameterError(name, f"must be a text, ids, or messages, got {prompt!r:.60}")
    if not ids:
        raise ParameterError(name, "has no tokens, allowed: at least one")
    return ids


def control_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> frozenset[int]:
    """Those whose text is one of these: they give no text in which it could be found."""
    if tokenizer.model == "no_vocab":
        return frozenset()
    ids = (tokenizer.encode(text, add_special=False, parse_special=True) for text in texts)
    return frozenset(id for id, *more in ids if not more and not tokenizer.token_bytes(id))


class Asked(NamedTuple):
    """What is asked for, of whatever prompt.   choices: of each completion.   types: of the KV cache."""
    max_tokens: int | None
    n_ctx: int | None
    choices: list[Sampling]
    wanted: Wanted
    matcher: Matcher
    types: dict[str, str]


def asked(model, max_tokens: int | None = MAX_TOKENS, stop: str | Sequence[str] = (),
          logprobs: int = 0, n: int = 1, digest: bool = False, grammar: Grammar | None = None, n_ctx: int | None = None,
          type_k: str = "f16", type_v: str = "f16", **sampling: Any) -> Asked:
    """Checked. `Model.generate` says what they mean."""
    stops = [stop] if isinstance(stop, str) else [*stop] if isinstance(stop, Iterable) else [stop]
    if not all(isinstance(each, str) and each for each in stops):
        raise ParameterError("stop", f"must be texts of at least one character, got {stop!r:.60}")
    for name, value, least in (("n", n, 1), ("logprobs", logprobs, 0), ("max_tokens", 0 if max_tokens is None else max_tokens, 0),
                               ("n_ctx", 1 if n_ctx is None else n_ctx, 1)):
        check_count(name, value, least)
    if grammar is not None and not isinstance(grammar, Grammar):
        raise ParameterError("grammar", f"must be None or a Grammar, such as Grammar.regex(...), got {grammar!r:.60}")
    choices = [Sampling(**sampling, sample=i) for i in range(n)]
    wanted = Wanted(tuple(stops), int(logprobs), digest, control_tokens(model.tokenizer, stops))
    return Asked(max_tokens, n_ctx, choices, wanted, grammar.matcher(model.tokenizer) if grammar else FREE,
                 {"type_k": type_k, "type_v": type_v})


def check_count(name: str, value, least: int) -> None:
    if not isinstance(value, Integral) or value < least:
        raise ParameterError(name, f"must be an integer, at least {least}, got {value!r}")


def check_names(who: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    if unknown := {*names} - {*allowed}:
        raise TypeError(f"{who}() got an unexpected keyword argument {min(unknown)!r}; allowed: {', '.join(allowed)}")


def room(model, ids: Sequence[int], request: Asked, name: str = "prompt") -> tuple[int, int]:
    """The positions that a prompt's completions may take with it, and the tokens of each at most.   name: for messages."""
    max_tokens = request.max_tokens
    space = request.n_ctx or (model.n_ctx_train if max_tokens is None else min(len(ids) + max(max_tokens, 1), model.n_ctx_train))
    if len(ids) >= space:
        raise ParameterError(name, f"has {len(ids)} tokens, allowed: up to {space - 1} in a context of {space}")
    return space, space - len(ids) if max_tokens is None else min(max_tokens, space - len(ids))


def stream(model, prompt, echo: bool = False, draft=None, draft_max: int = DRAFT_MAX, **arguments: Any) -> Iterator[Piece]:
    """The pieces of `Model.generate`: of n completions, one after the other. Arguments are checked at once."""
    check_names("generate", arguments, ["stream", *Arguments.__annotations__])
    check_count("draft_max", draft_max, 1)
    request = asked(model, **arguments)
    ids = prompt_ids(model.tokenizer, prompt)
    return _stream(model, prompt, ids, request, *room(model, ids, request), echo, draft, draft_max)


def _stream(model, prompt, ids: list[int], request: Asked, n_ctx: int, n_most: int, echo: bool, draft,
            draft_max: int) -> Iterator[Piece]:
    _, _, choices, wanted, matcher, types = request
    n_logprobs, before = wanted.logprobs, len(ids) - 1
    echoed = Piece(0, "")
    with (model.kept.text(n_ctx, LEAST_ROLLBACK if draft is None else draft_max + 1, **types) as text,
          drafting(model, draft, n_ctx, draft_max, 0.0, **types) as speculation):
        context = text.context
        known: tuple[TokenLogprob, ...] = (TokenLogprob(ids[0], None),) * bool(echo and n_logprobs)
        is_seen = bool(known) or draft == "mtp"  # what the context makes of each token of the prompt
        n_held = 0 if is_seen else context.reachable(0, shared(text.tokens, ids[:before]))
        context.keep(0, n_held)
        context.drop_checkpoints()
        text.tokens = [*ids]
        if before and (len(choices) > 1 or known):
            if before > n_held:
                rows = context.decode(ids[n_held:before], logits="all" if known else "none")
                known += tuple(token_logprob(row, id, n_logprobs) for row, id in zip(rows, ids[1:]))
            context.checkpoint()
            n_held = before
        if echo:
            said = Detokenizer(model.tokenizer)
            whole = prompt if isinstance(prompt, str) else "".join(map(said.feed, ids)) + said.finish()
            echoed = Piece(0, whole, tuple(ids), known)
        for choice in choices:
            if echo:
                yield Piece(choice.sample, echoed.text, echoed.ids, echoed.logprobs)
            context.keep(0, n_held)
            text.tokens = [*ids]
            for piece in pieces(context, model.tokenizer, ids, n_most, choice, speculation, wanted, n_held, matcher.fresh()):
                text.tokens += piece.ids
                yield piece


def joined(ids: Iterable[int], found: Iterable[Piece]) -> Generation:
    """Of all pieces of a prompt's completions."""
    completions = []
    for _, each in groupby(found, lambda piece: piece.index):
        parts = [*each]
        reason = parts[-1].finish_reason
        assert reason is not None
        completions.append(Completion("".join(part.text for part in parts), tuple(id for part in parts for id in part.ids),
                                      tuple(known for part in parts for known in part.logprobs), reason, parts[-1].digest))
    return Generation(tuple(ids), tuple(completions))
