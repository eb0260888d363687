"""The vocabulary of a model file: what the `tokenizer.ggml.*` keys say, with defaults applied and mistakes refused."""
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import TokenType

from ..base.errors import UserError, quoted

SPACE = "\u2581"  # stands for a space in token texts, where those are not byte letters
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]  # the text of the token of each byte, likewise
SURROGATE = re.compile("[\ud800-\udfff]")  # no text in UTF-8 has one
# Texts that end a turn or a document, whatever type the file gives them: they are treated as control tokens.
END_OF_GENERATION = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>",
    "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
    "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["))
# Where a vocabulary has the first texts, the one behind them ends no turn: gpt-oss writes its answer after <|end|>, and Gemma 4's
# </s> is a tag of HTML.
NO_END = (({"<|return|>", "<|call|>"}, "<|end|>"), ({"<|flush|>", "<|calls|>"}, "<|end|>"),
          ({"<|tool_response>"}, "</s>"))
# A model that writes code files ends with the padding of a gap, or by starting the next repository or file; the first text found
# counts.
END_OF_FILE = (("fim_pad", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
               ("fim_rep", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
               ("fim_sep", ("<|file_sep|>",)))


class TokenizerError(UserError):
    """The metadata does not describe a usable tokenizer, or a text or id has no meaning in it."""


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[id]` is the text of a token, `ids[text]` its id, `types[id]` a `TokenType`, `scores[id]` float32 (0 where the file
    has none).

    `end_of_generation` holds the ids after which a model has finished, `suppressed` those that are never to be chosen.
    """

    tokens: list[str]
    ids: dict[str, int]
    types: list[int]
    scores: list[float]
    end_of_generation: frozenset[int]
    suppressed: frozenset[int]

    def __repr__(self) -> str:
        return f"<Vocabulary of {len(self.tokens)} tokens>"

    def escaped_token_bytes(self, id: int) -> bytes:
        """The bytes of a normal token or a byte token whose text is not byte letters."""
        text, type = self.tokens[id], self.types[id]
        if type == TokenType.BYTE:
            if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
                raise TokenizerError(f"tokenizer.ggml.tokens[{id}]: got {quoted(text)} for a byte token, "
                                     "expected <0x00> to <0xFF>")
            return bytes.fromhex(text[3:5])
        return text.replace(SPACE, " ").encode() if type == TokenType.NORMAL else b""

    @classmethod
    def from_metadata(cls, metadata: Mapping) -> "Vocabulary":
        tokens = [text or f"[EMPTY_{id}]" for id, text in enumerate(texts(metadata, "tokenizer.ggml.tokens"))]
        ids = {text: id for id, text in enumerate(tokens)}
        if len(ids) < len(tokens):
            first, text = next((id, text) for id, text in enumerate(tokens) if ids[text] != id)
            raise TokenizerError(f"tokenizer.ggml.tokens: token {first} and token {ids[text]} are both {quoted(text)}; "
                                 "texts must be unique")
        types = numbers(metadata, "tokenizer.ggml.token_type", np.int32, len(tokens), TokenType.NORMAL)
        scores = numbers(metadata, "tokenizer.ggml.scores", np.float32, len(tokens), 0)

        ends = {id for name in ("eos", "eot", "eom") if (id := special_id(metadata, name, len(tokens))) is not None}
        no_ends = {text for others, text in NO_END if others <= ids.keys()}
        ends |= forced_control(types, (ids[text] for text in END_OF_GENERATION - no_ends if text in ids))
        for name, candidates in END_OF_FILE:
            id = special_id(metadata, name, len(tokens))
            ends |= {id} if id is not None else forced_control(types, [ids[text] for text in candidates if text in ids][:1])
        return cls(tokens, ids, types, scores, frozenset(ends), suppressed(metadata, len(tokens)))


def forced_control(types: list[int], ids: Iterable[int]) -> set[int]:
    """Set the type of each of these tokens to control; return the ids."""
    ids = set(ids)
    for id in ids:
        types[id] = TokenType.CONTROL
    return ids


def suppressed(metadata: Mapping, n_tokens: int) -> frozenset[int]:
    """`tokenizer.ggml.suppress_tokens`; numbers of no token are left out, as llama.cpp does."""
    key = "tokenizer.ggml.suppress_tokens"
    found = numbers(metadata, key, np.int64, np.size(metadata[key]), 0) if key in metadata else ()
    return frozenset(id for id in found if 0 <= id < n_tokens)


def special_id(metadata: Mapping, name: str, n_tokens: int, default: int | None = None) -> int | None:
    """`tokenizer.ggml.<name>_token_id` where it names a token of the vocabulary; else the default where that does; else None."""
    for id in (scalar(metadata, f"tokenizer.ggml.{name}_token_id", int, None), default):
        if id is not None and 0 <= id < n_tokens:
            return id
    return None


def scalar(metadata: Mapping, key: str, type: type, default: Any) -> Any:
    """The bool, int or str under a key, or the default where the key is missing."""
    if key not in metadata:
        return default
    value = metadata[key]
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, type) or (isinstance(value, bool) and type is not bool):
        raise TokenizerError(f"{key}: got {value!r:.60}, expected {type.__name__}")
    return value


def texts(metadata: Mapping, key: str) -> list[str]:
    """The array of strings under a key that must be there."""
    if key not in metadata:
        model = quoted(str(metadata.get("tokenizer.ggml.model")))
        raise TokenizerError(f"{key}: missing; tokenizer.ggml.model = {model} needs it")
    value = metadata[key]
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TokenizerError(f"{key}: got {value!r:.60}, expected an array of strings")
    value = list(value)
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise TokenizerError(f"{key}[{i}]: got {text!r:.60}, expected a string")
        if not text.isascii() and SURROGATE.search(text):
            raise TokenizerError(f"{key}[{i}]: {quoted(text)} is not valid UTF-8")
    return value


def numbers(metadata: Mapping, key: str, dtype: type, n: int, default: float) -> list:
    """The first n numbers of the array under a key, as Python numbers after rounding to dtype;
    n times the default where the key is missing."""
    if key not in metadata:
        return [default] * n
    try:
        value: np.ndarray = np.asarray(metadata[key], dtype)
    except (TypeError, ValueError, OverflowError):
        raise TokenizerError(f"{key}: expected an array of {np.dtype(dtype)}, got {metadata[key]!r:.60}") from None
    if value.ndim != 1 or value.size < n:
        raise TokenizerError(f"{key}: {value.size} values in {value.ndim} dimensions, expected one for each of {n} tokens")
    return value[:n].tolist()
