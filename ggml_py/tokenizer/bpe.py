"""Byte-level BPE (`tokenizer.ggml.model` = gpt2): a piece's bytes, written as letters, are merged pair by pair, lowest rank
first.

The merging is the library's: by rank, leftmost first among equals, with a heap. It wants every part and every result of a merge
in the vocabulary, which the format does not promise: what is missing gets a spare id after the vocabulary's end, and spare ids
are spelled out afterwards.
"""
from collections.abc import Mapping

import tokenizers
from gguf import TokenType
from tokenizers import models

from ..base.errors import quoted
from .pretokenizers import PreTokenizer
from .vocabulary import SURROGATE, TokenizerError, Vocabulary, texts

# byte -> letter: printable bytes of Latin-1 stand for themselves, the other 68 in byte order for U+0100 onward
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHER = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHER)}


class ByteLevelBPE:
    """The texts between special tokens to ids and back, by `tokenizer.ggml.merges` (strings of two parts, best first)."""

    def __init__(self, vocabulary: Vocabulary, pre_tokenizer: PreTokenizer, metadata: Mapping, merges_required: bool):
        self.vocabulary = vocabulary
        key = "tokenizer.ggml.merges"
        lines = texts(metadata, key) if merges_required or key in metadata else []
        merges = list(dict.fromkeys(_parts(key, i, line) for i, line in enumerate(lines)))  # the first of equal ones counts
        ids = vocabulary.ids
        missing = [text for pair in merges for text in (*pair, "".join(pair)) if text not in ids]
        missing += [letter for letter in BYTE_OF_LETTER if letter not in ids]
        spare = {text: len(ids) + i for i, text in enumerate(dict.fromkeys(missing))}
        # A symbol that is no token is emitted byte by byte; the bytes of a non-ASCII letter are no text on their own and vanish.
        self._spelled = {id: [ids[c] for c in text if c.isascii() and c in ids] for text, id in spare.items()}
        self._library = tokenizers.Tokenizer(models.BPE(ids | spare, merges, ignore_merges=pre_tokenizer.ignore_merges))
        self._library.pre_tokenizer = pre_tokenizer.build()

    def encode(self, text: str) -> list[int]:
        ids = self._library.encode(SURROGATE.sub("\ufffd", text), add_special_tokens=False).ids
        if self._spelled and max(ids, default=0) >= len(self.vocabulary.tokens):
            ids = [spelled for id in ids for spelled in self._spelled.get(id, (id,))]
        return ids

    def token_bytes(self, id: int) -> bytes:
        text = self.vocabulary.tokens[id]
        if self.vocabulary.types[id] != TokenType.NORMAL:
            return b""
        return b"".join(bytes((BYTE_OF_LETTER[c],)) if c in BYTE_OF_LETTER else c.encode() for c in text)


def _parts(key: str, i: int, merge: str) -> tuple[str, str]:
    """A merge is cut at its first space after the first character, as a part may begin with one."""
    left, _, right = merge[1:].partition(" ")
    if not right:
        raise TokenizerError(f"{key}[{i}]: got {quoted(merge)}, expected two texts with a space between them")
    return merge[:1] + left, right
