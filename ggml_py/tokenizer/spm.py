"""SentencePiece merges (`tokenizer.ggml.model` = llama): the adjacent pair that makes the token with the highest score is merged
first.

Among equal scores the leftmost pair wins. The library's BPE ranks merges, so that it cannot call two of them equal; hence the
loop below.
"""
import functools
import heapq
import re
from itertools import pairwise

import numpy as np

from .vocabulary import BYTE_TOKENS, SPACE, TokenizerError, Vocabulary


class SPM:
    """The texts between special tokens to ids and back."""

    def __init__(self, vocabulary: Vocabulary, add_space_prefix: bool):
        self.vocabulary, self.add_space_prefix = vocabulary, add_space_prefix
        self._inner_pairs = _inner_pairs(vocabulary.tokens)
        self._remember()

    def _remember(self) -> None:
        self._encode_short = functools.lru_cache(maxsize=1 << 16)(self._encode_chunk)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_encode_short"}  # a cache of its own for each copy

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._remember()

    def encode(self, text: str) -> list[int]:
        """A merge can only bridge two characters that stand side by side in some token: text is cut everywhere else,
        and short chunks recur."""
        text = (" " + text if self.add_space_prefix else text).replace(" ", SPACE)
        pairs = _pairs(text)
        cuts = np.flatnonzero(~np.isin(pairs, self._inner_pairs)) + 1
        bounds = [0, *cuts.tolist(), len(text)]
        ids: list[int] = []
        for start, end in pairwise(bounds):
            ids += (self._encode_short if end - start <= 64 else self._encode_chunk)(text[start:end])
        return ids

    def _encode_chunk(self, text: str) -> list[int]:
        return [id for symbol in _merge(list(text), self.vocabulary) for id in self._symbol_ids(symbol)]

    def _symbol_ids(self, symbol: str) -> list[int]:
        """The token of a symbol, else a token per byte (only single characters come here without a token: every merge makes
        one)."""
        id = self.vocabulary.ids.get(symbol)
        return [self._byte_id(byte) for byte in _utf8(symbol)] if id is None else [id]

    def _byte_id(self, byte: int) -> int:
        for text in (BYTE_TOKENS[byte], chr(byte) if byte < 0x80 else ""):
            if text in self.vocabulary.ids:
                return self.vocabulary.ids[text]
        raise TokenizerError(f"tokenizer.ggml.tokens: no token {BYTE_TOKENS[byte]} for a byte that no other token covers")

    def token_bytes(self, id: int) -> bytes:
        return self.vocabulary.escaped_token_bytes(id)


def _merge(symbols: list[str], vocabulary: Vocabulary) -> list[str]:
    """Merge adjacent symbols into tokens, highest score first, leftmost among equals, until no pair makes a token."""
    ids, scores = vocabulary.ids, vocabulary.scores
    n = len(symbols)
    before, after = list(range(-1, n - 1)), list(range(1, n + 1))  # neighbours of the symbol that starts at index i; n: none
    heap: list[tuple[float, int, int, str]] = []

    def offer(left: int, right: int) -> None:
        text = symbols[left] + symbols[right]
        if text in ids:
            heapq.heappush(heap, (-scores[ids[text]], left, right, text))

    for i in range(n - 1):
        offer(i, i + 1)
    while heap:
        _, left, right, text = heapq.heappop(heap)
        if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != len(text):
            continue  # one of the two has been merged since
        symbols[left], symbols[right] = text, ""
        after[left] = after[right]
        if after[left] < n:
            before[after[left]] = left
            offer(left, after[left])
        if before[left] >= 0:
            offer(before[left], left)
    return [symbol for symbol in symbols if symbol]


def _pairs(text: str) -> np.ndarray:
    """int64 [len(text) - 1]: each pair of adjacent code points as one number."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int64)
    return points[:-1] << 21 | points[1:]


def _inner_pairs(tokens: list[str]) -> np.ndarray:
    """int64, sorted: every pair of adjacent code points that occurs within a token."""
    starts = np.cumsum([len(token) for token in tokens], dtype=np.int64)[:-1]
    return np.unique(np.delete(_pairs("".join(tokens)), starts - 1))


def _utf8(text: str) -> bytes:
    """UTF-8, where U+DC80-DCFF (Python's mark for an undecodable byte) is that byte, and another lone surrogate U+FFFD."""
    return re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text).encode("utf-8", "surrogateescape")
