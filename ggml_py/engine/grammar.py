"""Grammars: what a completion may be, as a JSON schema, a regular expression or a grammar.

llguidance (the extra `grammar`) knows which tokens may follow; this file gives it the vocabulary and asks. What a grammar allows
depends on the completion's tokens so far alone. So drafts, batches and streaming change nothing, and draws stay a function of
seed, sample and position. Where a grammar leaves no choice of the text, it allows the one token that the tokenizer gives for it.
"""
import json
import logging
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import numpy as np

from ..base.errors import ParameterError, UserError
from ..tokenizer import Tokenizer

log = logging.getLogger(__name__)
Kind = Literal["json_schema", "regex", "lark", "gbnf"]
IN_WORDS: dict[Kind, str] = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar",
                             "gbnf": "GBNF grammar"}
LARK_BEGINS = "%llguidance"  # a text that is Lark and not GBNF, as llama.cpp has it
# White space in JSON, as llama.cpp's schemas have it: a model cannot go on with it for ever.
JSON_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
BEFORE = "\x02"  # no merge and no rule of spaces reaches over it: the text behind is split as in the middle of another


@dataclass(frozen=True)
class Grammar:
    """What a completion may be: `Grammar.json_schema(...)`, `.regex`, `.lark`, `.gbnf`, or `.of` for a text that says itself
    which of the last two it is. It is checked where it is used, since which tokens it allows is a matter of the vocabulary.

    >>> Grammar.json_schema({"type": "integer", "maximum": 9})
    Grammar(kind='json_schema', source='{"type": "integer", "maximum": 9}')
    >>> Grammar.of('root ::= "yes" | "no"').kind
    'gbnf'
    """
    kind: Kind
    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Self:
        """JSON that fits a schema, which is given as Python has it or as JSON. White space is as in llama.cpp: none, a space, or
        a line break or two with up to 20 spaces or tabs. "x-guidance" in the schema may say another `whitespace_pattern`."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """A regular expression (Rust's syntax, no look-around) that the whole completion matches."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Self:
        """A grammar in llguidance's variant of Lark, whose first rule is `start`."""
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> Self:
        """A grammar of llama.cpp, whose first rule is `root`."""
        return cls("gbnf", text)

    @classmethod
    def of(cls, text: str) -> Self:
        """Lark where the text begins with %llguidance, else GBNF."""
        return cls("lark" if text.lstrip().startswith(LARK_BEGINS) else "gbnf", text)

    def matcher(self, tokenizer: Tokenizer) -> "Matcher":
        """At the beginning of a completion. ParameterError for a grammar that cannot be used, and where llguidance is missing."""
        try:
            from llguidance import LLMatcher
            from llguidance.gbnf_to_lark import gbnf_to_lark
        except ImportError as error:
            raise ParameterError("grammar", f"needs llguidance, which is not installed ({error}); allowed: "
                                            "pip install ggml-bitwise[grammar]") from None
        if tokenizer.model == "no_vocab":
            raise ParameterError("grammar", "the model file has no vocabulary; allowed: None")
        try:
            if self.kind == "json_schema":
                compiled = LLMatcher.grammar_from_json_schema(self.source, defaults={"whitespace_pattern": JSON_SPACE})
            elif self.kind == "regex":
                compiled = LLMatcher.grammar_from_regex(self.source)
            else:
                compiled = LLMatcher.grammar_from_lark(gbnf_to_lark(self.source) if self.kind == "gbnf" else self.source)
        except Exception as error:  # gbnf_to_lark raises Exception itself
            raise self._unusable(str(error)) from None
        vocabulary = vocabulary_of(tokenizer)
        found = LLMatcher(vocabulary.tokens, compiled, log_level=0)
        if found.is_error():
            raise self._unusable(found.get_error())
        for warning in found.get_grammar_warnings():
            log.warning("grammar: %s", " ".join(warning.split()))
        return GrammarMatcher(found, vocabulary)

    def _unusable(self, message: str) -> ParameterError:
        """llguidance's message without the lines of source that it shows below, which are indented."""
        lines = (line for line in message.splitlines() if line and not line[0].isspace())
        return ParameterError("grammar", f"is no usable {IN_WORDS[self.kind]}: {' '.join(lines)}")


class Matcher:
    """A completion's place in its grammar; of this class where there is none.   allowed: int [n], ascending, the ids that may
    come next, those that end the text among them; None: all.   is_complete: nothing may come but the end. The text ends there,
    without a token for it."""
    allowed: np.ndarray | None = None
    is_complete = False

    def fresh(self) -> "Matcher":
        """For another completion, from the beginning."""
        return self

    def accept(self, id: int) -> None:
        """The next token of the completion, not one that ends it.   UserError where llguidance gives up."""

    def n_allowed(self, ids: list[int]) -> int:
        """How many of the ids may follow one another."""
        return len(ids)


FREE = Matcher()


class GrammarMatcher(Matcher):
    """matcher: llguidance.LLMatcher."""

    def __init__(self, matcher, vocabulary: "Vocabulary"):
        self._matcher, self._vocabulary = matcher, vocabulary
        self._look()

    def fresh(self) -> "GrammarMatcher":
        other = self._matcher.deep_copy()
        other.reset()
        return GrammarMatcher(other, self._vocabulary)

    def accept(self, id: int) -> None:
        self._matcher.consume_token(id)
        self._look()

    def n_allowed(self, ids: list[int]) -> int:
        return self._matcher.validate_tokens(ids)

    def _look(self) -> None:
        found = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self._matcher.is_error():
            raise UserError(f"grammar: it cannot be followed further: {self._matcher.get_error().partition(chr(10))[0]}")
        self.allowed, ends = np.flatnonzero(found[:self._vocabulary.n_vocab]), self._vocabulary.ends
        self.is_complete = (self._matcher.is_accepting() and len(self.allowed) <= len(ends)
                            and ends.issuperset(self.allowed.tolist()))
        if not len(self.allowed) and not self.is_complete:
            raise UserError("grammar: no token of the vocabulary goes on with it")


class _Split:
    """What `llguidance.TokenizerWrapper` asks of a tokenizer. An id behind the vocabulary is the end, beside those that the
    vocabulary has: some have none."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.eos_token_id, self.bos_token_id = tokenizer, tokenizer.n_vocab, None
        self.tokens = [tokenizer.token_bytes(id, skip_special=False) for id in range(tokenizer.n_vocab)] + [b"<end>"]
        self.special_token_ids = [id for id in range(tokenizer.n_vocab) if not tokenizer.token_bytes(id)]
        self.n_before = len(tokenizer.encode(BEFORE, add_special=False))

    def __call__(self, text: bytes) -> list[int]:
        """The ids of a text in the middle of another, as far as their bytes are those of the text."""
        ids: list[int] = []
        for id in self.tokenizer.encode(BEFORE + text.decode(), add_special=False)[self.n_before:]:
            if not text.startswith(self.tokens[id]):
                break
            ids.append(id)
            text = text[len(self.tokens[id]):]
        return ids


@dataclass(frozen=True)
class Vocabulary:
    """tokens: llguidance.LLTokenizer.   ends: the ids that end a text."""
    tokens: Any
    n_vocab: int
    ends: frozenset[int]


_vocabularies: WeakKeyDictionary[Tokenizer, Vocabulary] = WeakKeyDictionary()


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Made once for a tokenizer, which takes a while."""
    if tokenizer not in _vocabularies:
        from llguidance import LLTokenizer, TokenizerWrapper
        ends = [id for id in range(tokenizer.n_vocab) if tokenizer.is_end_of_generation(id)]
        split = _Split(copy(tokenizer))  # a copy: else the value held its own key for ever
        tokens = LLTokenizer(TokenizerWrapper(split), eos_token=[split.eos_token_id, *ends])
        _vocabularies[tokenizer] = Vocabulary(tokens, tokenizer.n_vocab, frozenset(ends))
    return _vocabularies[tokenizer]
