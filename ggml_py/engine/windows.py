"""From a text to windows of tokens, and from windows to their logits. Shapes: c = n_ctx, tokens of a window; V = n_vocab."""
import logging
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..base.errors import ParameterError
from ..base.progress import teller
from .settings import Settings, new_context

logger = logging.getLogger(__name__)

LEAST_AHEAD = 4        # windows that may wait to be scored,
AHEAD_BYTES = 1 << 31  # but not more than so many bytes of logits


def read_text(path: Path) -> str:
    return as_text(path.read_bytes())


def as_text(data: bytes) -> str:
    """The text of a file without exactly one trailing newline; bytes that are not UTF-8, as at a cut end, reach the tokenizer as
    lone surrogates."""
    return data.removesuffix(b"\n").decode("utf-8", errors="surrogateescape")


def first_windows(tokens, c: int, n_chunks: int) -> np.ndarray:
    """The first windows of c tokens, at most n_chunks, -1: all; a shorter text is one window.   tokens: int [n]; returns int32
    [n_windows, c]."""
    if len(tokens) < 2:
        raise ParameterError("text", f"it has {len(tokens)} tokens, at least 2 are needed")
    return _side_by_side(tokens, min(c, len(tokens)), n_chunks)


def split_windows(tokens, settings: Settings) -> np.ndarray:
    """The first n_chunks windows of c tokens, side by side; the tail is dropped.   tokens: int [n_tokens]; returns int32
    [n_chunks, c]."""
    c = settings.n_ctx
    if not len(tokens):
        raise ParameterError("text", "it has no tokens")
    if len(tokens) < 2 * c:
        raise ParameterError("n_ctx", f"windows of {c} need at least {2 * c} tokens, the text has {len(tokens)}")
    return _side_by_side(tokens, c, settings.n_chunks)


def _side_by_side(tokens, c: int, most: int) -> np.ndarray:
    n = cap_chunks(len(tokens) // c, most)
    return np.asarray(tokens[:n * c], np.int32).reshape(n, c)


def cap_chunks(n: int, most: int) -> int:
    """most: -1 for all."""
    return n if most < 0 else min(n, most)


def n_sequences(settings: Settings) -> int:
    """Windows that are decoded together: as many whole ones as the logical batch holds."""
    c = settings.n_ctx
    if c < 3:
        raise ParameterError("n_ctx", f"must be at least 3 so that a window scores a token, got {c}")
    return max(1, settings.n_batch // c)


def with_bos(model, windows: np.ndarray) -> np.ndarray:
    """The windows as they are decoded: where the vocabulary wants a BOS, it replaces the first token of each.   int32 [n_chunks,
    c], both."""
    if model.tokenizer.add_bos:
        windows = windows.copy()
        windows[:, 0] = model.tokenizer.bos_id
    return windows


def decode_from(context, sequences, first: int, n_batch: int) -> list[np.ndarray]:
    """Decode equally long sequences from position 0 in logical batches of at most n_batch tokens; keep the logits of positions
    first and later.

    sequences: int [n_seq, n_tokens]; returns n_seq arrays float32 [n_tokens - first, V]. Earlier positions pass without logits,
    which saves their share of the output matrix; by the promise of this runtime where a sequence is cut changes no bit.
    """
    n_seq, n_tokens = sequences.shape
    piece = max(1, n_batch // n_seq)
    cuts = sorted({*range(0, n_tokens, piece), first, n_tokens})
    kept = []
    context.clear()
    for begin, end in pairwise(cuts):
        rows = context.decode_batch([(i, sequences[i, begin:end]) for i in range(n_seq)],
                                    logits="all" if begin >= first else "none")
        if begin >= first:
            kept.append(rows)
    return [pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in zip(*kept)]


class Clock:
    """Times the decoding of a run and reports it in llama.cpp's words on `log`, a stream; None: by `logging`."""

    def __init__(self, log, n_groups: float):
        self.say, self.n_groups, self.n_tokens, self.seconds = teller(log, logger.info), n_groups, 0, 0.0

    def decode(self, context, sequences, first: int, n_batch: int) -> list[np.ndarray]:
        """`decode_from`, timed."""
        start = time.perf_counter()
        rows = decode_from(context, sequences, first, n_batch)
        seconds = time.perf_counter() - start
        if not self.n_tokens:
            left = int(seconds * self.n_groups)
            hours = f"{left // 3600} hours " if left >= 3600 else ""
            self.say(f"perplexity: {seconds:.2f} seconds per pass - ETA {hours}{left % 3600 / 60:.2f} minutes")
        self.n_tokens += sequences.size
        self.seconds += seconds
        return rows

    def report(self) -> None:
        self.say(f"perplexity: {self.n_tokens} tokens in {self.seconds:.2f} s, {self.n_tokens / self.seconds:.1f} tokens/s")


def is_elsewhere(model) -> bool:
    """Whether this CPU has time for other work while the model decodes."""
    return all(backend.asynchronous for backend in model.backends.values())


def n_ahead(model, settings: Settings) -> int:
    """How many windows may wait for a step of their scoring while the next ones are decoded, where that is not the work of this
    CPU: as many as are decoded together, at least four, if there is memory for their logits."""
    if not is_elsewhere(model):
        return 0
    together, n_rows = (1, settings.stride) if settings.stride else (n_sequences(settings), settings.n_ctx // 2)
    return min(max(together, LEAST_AHEAD), max(1, AHEAD_BYTES // (4 * model.n_vocab * n_rows)))


def decode_windows(model, windows: np.ndarray, settings: Settings, log=None) -> Iterator[np.ndarray]:
    """Yield, window after window, the logits of its positions c/2 .. c-2, float32 [c - 1 - c/2, V]: they score the tokens at
    c/2+1 .. c-1.

    windows: int32 [n_chunks, c], BOS not yet substituted. log: of `Clock`.
    """
    c, n_seq = settings.n_ctx, min(n_sequences(settings), len(windows))
    decoded = with_bos(model, windows)
    clock = Clock(log, len(windows) / n_seq)
    with new_context(model, settings, c, n_seq, log) as context:
        for start in range(0, len(windows), n_seq):
            # position c-1 predicts a token of the next window and is not scored: it need not be decoded
            yield from clock.decode(context, decoded[start:start + n_seq, :c - 1], c // 2, settings.n_batch)
    clock.report()
