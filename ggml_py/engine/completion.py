"""Completions: a prompt continued as text, with what callers ask for beside it.

`pieces` is the one loop: `Model.generate`, `Model.chat` and the command line read it. It ends at a token that ends the model's
text, at a stop text, or at as many tokens as are asked for.
"""
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from numbers import Integral
from typing import Any, Literal, TypedDict

import numpy as np

from ..base.defaults import DRAFT_MAX
from ..base.errors import ParameterError
from ..kernels.reference.log_soft_max import log_soft_max_arrays
from ..state.recurrent import LEAST_ROLLBACK
from ..testing import one_nan
from ..tokenizer import Detokenizer, Tokenizer
from ..tokenizer.chat import encode_chat
from .generate import generate
from .grammar import FREE, Grammar, Matcher
from .likelihood import is_list, shared
from .sampling import Sampling, largest
from .speculation import DraftModel, NGrams, Source, Speculation

Reason = Literal["stop", "length", "end"]
Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]
MAX_TOKENS = 128


class Arguments(TypedDict, total=False):
    """Of `Model.generate`, which says what they mean; those that `stream` does not name are of `Sampling`."""
    max_tokens: int | None
    stop: str | Sequence[str]
    logprobs: int
    echo: bool
    draft: Any  # None, "ngram", "mtp" or a Model
    draft_max: int
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


def pieces(context, tokenizer: Tokenizer, prompt: Sequence[int], n_most: int, sampling: Sampling,  # noqa: PLR0913 (of `stream`)
           speculation: Speculation | None = None, stop: Sequence[str] = (), logprobs: int = 0, digest: bool = False,
           n_held: int = 0, matcher: Matcher = FREE, ends: Container[int] = ()) -> Iterator[Piece]:
    """A completion of the prompt, a piece a token and a last one.   n_most: tokens at most.   n_held, matcher: of `generate`.
    ends: tokens that end it as stop texts do."""
    rows: deque[np.ndarray] = deque()
    reason: Reason = "end"
    hash = sha256()

    def see(row: np.ndarray) -> None:
        if digest:
            hash.update(np.ascontiguousarray(one_nan(row), "<f4").data)
        if logprobs:
            rows.append(row)

    def is_end(token: int) -> bool:
        nonlocal reason
        reason = "stop" if token in ends else "end"
        return token in ends or tokenizer.is_end_of_generation(token)

    text, stops, n, stopped = Detokenizer(tokenizer), StopTexts(stop), 0, False
    tokens = generate(context, prompt, n_most, sampling.forbidding(tokenizer.suppressed), is_end, speculation,
                      see if logprobs or digest else None, n_held, matcher)
    with closing(tokens):  # type: ignore[type-var]
        for token in tokens:
            n += 1
            known = (token_logprob(rows.popleft(), token, logprobs),) if logprobs else ()
            certain, stopped = stops.feed(text.feed(token))
            yield Piece(sampling.sample, certain, (token,), known)
            if stopped:
                break
    rest = ""
    if not stopped:
        rest, stopped = stops.feed(text.finish())
        rest += "" if stopped else stops.held
    if stopped or (n == n_most and not matcher.is_complete):
        reason = "stop" if stopped else "length"
    yield Piece(sampling.sample, rest, finish_reason=reason, digest=hash.hexdigest() if digest else None)


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


def prompt_ids(tokenizer: Tokenizer, prompt) -> list[int]:
    """Of a text, of a list of messages, or of ids; at least one."""
    if isinstance(prompt, str):
        ids = list(tokenizer.encode(prompt))
    elif is_list(prompt) and len(prompt) and isinstance(prompt[0], Mapping):
        ids = encode_chat(tokenizer, prompt)
    elif is_list(prompt) and all(isinstance(id, Integral) for id in prompt):
        ids = [int(id) for id in prompt]
    else:
        raise ParameterError("prompt", f"must be a text, ids, or messages, got {prompt!r:.60}")
    if not ids:
        raise ParameterError("prompt", "has no tokens, allowed: at least one")
    return ids


def control_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> frozenset[int]:
    """Those whose text is one of these: they give no text in which it could be found."""
    if tokenizer.model == "no_vocab":
        return frozenset()
    ids = (tokenizer.encode(text, add_special=False, parse_special=True) for text in texts)
    return frozenset(id for id, *more in ids if not more and not tokenizer.token_bytes(id))


def stream(model, prompt, max_tokens: int | None = MAX_TOKENS, stop: str | Sequence[str] = (),  # noqa: PLR0913 (`Model.generate`)
           logprobs: int = 0, echo: bool = False, draft=None, draft_max: int = DRAFT_MAX, n: int = 1, digest: bool = False,
           grammar: Grammar | None = None, n_ctx: int | None = None, type_k: str = "f16", type_v: str = "f16",
           **sampling: Any) -> Iterator[Piece]:
    """The pieces of `Model.generate`: of n completions, one after the other. Arguments are checked at once."""
    if unknown := sampling.keys() - Arguments.__annotations__.keys():
        raise TypeError(f"generate() got an unexpected keyword argument {min(unknown)!r}; allowed: stream, "
                        f"{', '.join(Arguments.__annotations__)}")
    stops = [stop] if isinstance(stop, str) else [*stop] if isinstance(stop, Iterable) else [stop]
    if not all(isinstance(each, str) and each for each in stops):
        raise ParameterError("stop", f"must be texts of at least one character, got {stop!r:.60}")
    for name, value, least in (("n", n, 1), ("logprobs", logprobs, 0), ("max_tokens", 0 if max_tokens is None else max_tokens, 0),
                               ("n_ctx", 1 if n_ctx is None else n_ctx, 1), ("draft_max", draft_max, 1)):
        if not isinstance(value, Integral) or value < least:
            raise ParameterError(name, f"must be an integer, at least {least}, got {value!r}")
    if grammar is not None and not isinstance(grammar, Grammar):
        raise ParameterError("grammar", f"must be None or a Grammar, such as Grammar.regex(...), got {grammar!r:.60}")
    choices = [Sampling(**sampling, sample=i) for i in range(n)]
    ids = prompt_ids(model.tokenizer, prompt)
    space = n_ctx or (model.n_ctx_train if max_tokens is None else min(len(ids) + max(max_tokens, 1), model.n_ctx_train))
    if len(ids) >= space:
        raise ParameterError("prompt", f"has {len(ids)} tokens, allowed: up to {space - 1} in a context of {space}")
    n_most = space - len(ids) if max_tokens is None else min(max_tokens, space - len(ids))
    matcher = grammar.matcher(model.tokenizer) if grammar else FREE
    return _stream(model, prompt, ids, choices, n_most, space, echo, draft, draft_max, matcher,
                   {"stop": stops, "logprobs": int(logprobs), "digest": digest, "ends": control_tokens(model.tokenizer, stops)},
                   {"type_k": type_k, "type_v": type_v})


def _stream(model, prompt, ids: list[int], choices: list[Sampling], n_most: int, n_ctx: int, echo: bool, draft,  # noqa: PLR0913
            draft_max: int, matcher: Matcher, wanted: dict[str, Any], types: dict[str, str]) -> Iterator[Piece]:
    n_logprobs, before = wanted["logprobs"], len(ids) - 1
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
            for piece in pieces(context, model.tokenizer, ids, n_most, choice, speculation, n_held=n_held,
                                matcher=matcher.fresh(), **wanted):
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
