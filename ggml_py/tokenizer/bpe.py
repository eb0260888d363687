"""BPE: the symbols of a piece are merged pair by pair, lowest rank first. Symbols are a piece's bytes, written as letters
(`ByteLevelBPE`, `tokenizer.ggml.model` = gpt2), or its characters, with U+2581 for a space (`SpaceEscapedBPE`, = gemma4).

The merging is the library's: by rank, leftmost first among equals, with a heap. It wants every part and every result of a merge
in the vocabulary, which the format does not promise: what is missing gets a spare id after the vocabulary's end, and spare ids
are spelled out afterwards.
"""
import re
from collections.abc import Iterable, Mapping

import tokenizers
from gguf import TokenType
from tokenizers import models

from ..base.errors import quoted
from .pretokenizers import PreTokenizer
from .vocabulary import BYTE_TOKENS, SPACE, SURROGATE, TokenizerError, Vocabulary, texts

# byte -> letter: printable bytes of Latin-1 stand for themselves, the other 68 in byte order for U+0100 onward
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHER = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHER)}


class BPE:
    """The texts between special tokens to ids, by `tokenizer.ggml.merges` (strings of two parts, best first).

    alphabet: the texts that the library must know beside the tokens and the parts and results of merges."""

    def __init__(self, vocabulary: Vocabulary, pre_tokenizer: PreTokenizer, metadata: Mapping, alphabet: Iterable[str]):
        self.vocabulary = vocabulary
        key = "tokenizer.ggml.merges"
        lines = texts(metadata, key) if pre_tokenizer.merges_required or key in metadata else []
        merges = list(dict.fromkeys(_parts(key, i, line) for i, line in enumerate(lines)))  # the first of equal ones counts
        ids = vocabulary.ids
        missing = [text for pair in merges for text in (*pair, "".join(pair)) if text not in ids]
        missing += [text for text in alphabet if text not in ids]
        spare = {text: len(ids) + i for i, text in enumerate(dict.fromkeys(missing))}
        self._spelled = {id: self._spell(text) for text, id in spare.items()}
        self._library = tokenizers.Tokenizer(models.BPE(ids | spare, merges, ignore_merges=pre_tokenizer.ignore_merges,
                                                        byte_fallback=pre_tokenizer.spaces_escaped))
        self._library.pre_tokenizer = pre_tokenizer.build()

    def encode(self, text: str) -> list[int]:
        ids = self._library.encode(SURROGATE.sub("\ufffd", text), add_special_tokens=False).ids
        if self._spelled and max(ids, default=0) >= len(self.vocabulary.tokens):
            ids = [spelled for id in ids for spelled in self._spelled.get(id, (id,))]
        return ids

    def token_bytes(self, id: int) -> bytes:
        raise NotImplementedError

    def _spell(self, text: str) -> list[int]:
        """The ids of a symbol that is no token."""
        raise NotImplementedError


class ByteLevelBPE(BPE):
    """Symbols are bytes, written as letters."""

    def __init__(self, vocabulary: Vocabulary, pre_tokenizer: PreTokenizer, metadata: Mapping):
        super().__init__(vocabulary, pre_tokenizer, metadata, BYTE_OF_LETTER)

    def token_bytes(self, id: int) -> bytes:
        text = self.vocabulary.tokens[id]
        if self.vocabulary.types[id] != TokenType.NORMAL:
            return b""
        return b"".join(bytes((BYTE_OF_LETTER[c],)) if c in BYTE_OF_LETTER else c.encode() for c in text)

    def _spell(self, text: str) -> list[int]:
        """Byte by byte; the bytes of a non-ASCII letter are no text on their own and vanish."""
        return [self.vocabulary.ids[c] for c in text if c.isascii() and c in self.vocabulary.ids]


class SpaceEscapedBPE(BPE):
    """Symbols are characters, with U+2581 for a space; one without a token becomes tokens of its bytes, `<0xXX>`. Pieces are
    lines and the runs of newlines between them."""

    def __init__(self, vocabulary: Vocabulary, pre_tokenizer: PreTokenizer, metadata: Mapping):
        super().__init__(vocabulary, pre_tokenizer, metadata, BYTE_TOKENS)
        runs = {text: id for text, id in vocabulary.ids.items() if pre_tokenizer.newlines_whole and not text.strip("\n")}
        self._whole = {text: id for text, id in runs.items() if super(SpaceEscapedBPE, self).encode(text) != [id]}

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", SPACE)
        if not self._whole:
            return super().encode(text)
        return [id for piece in re.findall("[^\n]+|\n+", text)
                for id in ([self._whole[piece]] if piece in self._whole else super(SpaceEscapedBPE, self).encode(piece))]

    def token_bytes(self, id: int) -> bytes:
        return self.vocabulary.escaped_token_bytes(id)

    def _spell(self, text: str) -> list[int]:
        return [self.vocabulary.ids[BYTE_TOKENS[byte]] for byte in text.encode()
                if text not in BYTE_TOKENS and BYTE_TOKENS[byte] in self.vocabulary.ids]


def _parts(key: str, i: int, merge: str) -> tuple[str, str]:
    """A merge is cut at its first space after the first character, as a part may begin with one."""
    left, _, right = merge[1:].partition(" ")
    if not right:
        raise TokenizerError(f"{key}[{i}]: got {quoted(merge)}, expected two texts with a space between them")
    return merge[:1] + left, right
