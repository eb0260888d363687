"""Perplexity over windows of a text, by llama.cpp's algorithm and in its words, with sums in a fixed order and a digest of what
was scored.

The tokens are cut into consecutive windows of c tokens; the tail is dropped. Where the vocabulary wants a BOS, it replaces the
first token of each window. Logits at positions c/2 .. c-2 score the targets at c/2+1 .. c-1:

    nll_t = (max l + log(sum_j exp(l_j - max l))) - l_t        float64, exp, log and sum of exact_math
    PPL   = exp(mean nll) +/- PPL * sqrt((mean nll^2 - (mean nll)^2) / (count - 1))

A window's nll are summed by exact_math.tree_sum, the windows one after the other. Logits come to the host for the digest, and
attestations hold the bits of the perplexity: so this is not the float32 op `log_soft_max`, by which `Model.score` scores on the
device. Shapes: c = n_ctx, n = scored positions of a window = c - 1 - c/2, V = n_vocab.
"""
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, Self

import numpy as np

from ..base.errors import ParameterError
from ..base.exact_math import exp, tree_sum
from ..base.likelihoods import negative_log_likelihood
from ..base.overlap import overlapped
from ..base.progress import Progress, Told, teller
from ..check.attestation import made_by, perplexity_document
from ..check.digest import WindowsDigest
from ..engine.settings import Settings, check_context, new_context
from ..engine.windows import Clock, cap_chunks, decode_windows, n_ahead, n_sequences, split_windows
from ..testing import digest
from .statistics import mean_and_error

logger = logging.getLogger(__name__)


Sums = tuple[float, float, int]  # of a window: total, squares and n of its `WindowScore`


class WindowScore(NamedTuple):
    """Of a window's logits: their digest; sum and sum of squares of their nll, and how many there are."""
    digest: str
    total: float
    squares: float
    n: int


def window_score(logits: np.ndarray, targets: np.ndarray) -> WindowScore:
    """logits: float32 [n, V]; targets: int [n]."""
    return WindowScore(digest(logits), *sums(logits, targets))


def sums(logits: np.ndarray, targets: np.ndarray) -> Sums:
    """logits: float32 [n, V]; targets: int [n]."""
    nll = negative_log_likelihood(logits, targets)
    return float(tree_sum(nll)), float(tree_sum(nll * nll)), len(nll)


class Score:
    """What windows score: the perplexity so far, and a digest of their logits. Context manager; the list `[i]ppl,` is printed on
    `out` as it grows, except where a progress bar shares the terminal; there it is printed at the end. out: a stream, or None.

    row: window -> a line in the place of `[i]ppl,`; None: there are none. root: of `WindowsDigest`."""

    def __init__(self, out, log, n_chunks: int, told: Told | None = None, row: "Callable[[Score], str] | None" = None,
                 root: bool = False):
        self.out, self.log, self.held, self.row = out, log, "", row
        self.is_held = bool(out and out.isatty() and log and log.isatty())
        self.progress, self.digest = Progress(log, "perplexity", n_chunks, told=told), WindowsDigest(root)
        self.n_windows, self.total, self.total_of_squares, self.count = 0, 0.0, 0.0, 0
        self.windows: list[tuple[float, int]] = []  # sum of the nll of each, and how many there are

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def add(self, total: float, squares: float, n: int) -> None:
        """The next window's `sums`."""
        self.n_windows += 1
        self.total += total
        self.total_of_squares += squares
        self.count += n
        self.windows.append((total, n))
        item = note = f"[{self.n_windows}]{self.ppl:.4f},"
        if self.row:
            item = self.row(self) + "\n"
        if self.is_held:
            self.held += item
        elif self.out:
            print(item, end="", file=self.out, flush=True)
        self.progress.advance(note)

    @property
    def ppl(self) -> float:
        return float(exp(self.total / self.count))

    @property
    def error(self) -> float:
        """Of the perplexity; NaN where it cannot be known."""
        return self.ppl * mean_and_error(self.total, self.total_of_squares, self.count)[1]

    def print_estimate(self) -> None:
        if math.isnan(self.error) and not math.isnan(self.total):
            teller(self.log, logger.warning)("Unexpected negative standard deviation of log(prob)")
        else:
            self.say(f"Final estimate: PPL = {self.ppl:.4f} +/- {self.error:.5f}")

    def print_digest(self) -> None:
        self.say(f"{self.digest.name}: {self.digest.hexdigest()}")

    def say(self, line: str) -> None:
        teller(self.out, lambda line: None)(line)

    def __exit__(self, *exception) -> None:
        self.progress.__exit__(*exception)
        if self.held or not self.row:  # whose lines are whole
            self.say(self.held.removesuffix("\n"))


def perplexity(model, tokens, settings: Settings, out=None, log=None, base=None, progress: Told | None = None,
               rows: bool = False, root: bool = False) -> Score:
    """Perplexity of the tokens; the running list, the final estimate and the digest go to `out`, the rest to `log`: streams.
    None: nowhere, and to `logging`.

    tokens: int [n_tokens], with whatever special tokens the tokenizer added; base: called with the windows int32 [n_chunks, c],
    gives a context manager of what writes their scored logits (kl_divergence.base_writer);
    progress: is told how many windows are done, and of how many. rows: a line for each window, as llama.cpp's
    --ppl-output-type 1 has it: its first token, and of all so far the perplexity, the mean negative log-likelihood and its error.
    root: of `WindowsDigest`, in the place of the digest of all logits, which takes longer than a GPU does.
    """
    c, n_seq = settings.n_ctx, n_sequences(settings)
    windows = split_windows(tokens, settings)
    check_context(model, c)
    n_batch = min(settings.n_batch, n_seq * c)
    teller(log, logger.info)(f"perplexity: calculating perplexity over {len(windows)} chunks, n_ctx={c}, batch_size={n_batch}, "
                             f"n_seq={n_seq}")

    def row(score: Score) -> str:
        mean, error = mean_and_error(score.total, score.total_of_squares, score.count)
        return f"{c * (score.n_windows - 1):8d}  {score.ppl:.4f}  {mean:4f}  {error:4f}"
    with (base(windows) if base else nullcontext() as writer,
          Score(out, log, len(windows), progress, row if rows else None, root) as score):
        def scored(window: tuple[np.ndarray, np.ndarray]) -> tuple[Sums, Any, Any]:
            logits, ids = window
            return sums(logits, ids[c // 2 + 1:]), score.digest.part(logits), writer.encode(logits) if writer else None

        def hashed(found: tuple[Sums, Any, Any]) -> tuple[Sums, Any]:
            window, part, records = found
            score.digest.add(part)
            return window, records

        def written(found: tuple[Sums, Any]) -> Sums:
            window, records = found
            if writer:
                writer.write(records)
            return window
        most, decoded = n_ahead(model, settings), zip(decode_windows(model, windows, settings, log), windows)
        for window in overlapped(overlapped(overlapped(decoded, scored, most, True), hashed, most), written, most):
            score.add(*window)
    score.print_estimate()
    score.print_digest()
    return score


def strided_perplexity(model, tokens, settings: Settings, out=None, log=None, progress: Told | None = None,
                       rows: bool = False, root: bool = False) -> Score:
    """Windows of w = c + N/2 tokens that start every N = stride tokens; each scores its last N targets. No BOS per window, no
    final estimate.

    There are ceil((n_tokens - w) / N) windows, one sequence each. Arguments and result as of `perplexity`.
    """
    stride, w = settings.stride, settings.n_ctx + settings.stride // 2
    if stride >= w:
        raise ParameterError("stride", f"must be below n_ctx and half a stride together, {w}, got {stride}")
    if len(tokens) <= w:
        raise ParameterError("n_ctx", f"windows of {w} tokens ({settings.n_ctx} and half a stride of {stride}) need a "
                                      f"longer text than {len(tokens)} tokens")
    check_context(model, w)
    tokens = np.asarray(tokens, np.int32)
    n_chunks = cap_chunks(-(-(len(tokens) - w) // stride), settings.n_chunks)
    row = (lambda score: f"{stride * (score.n_windows - 1):8d}  {score.ppl:.4f}") if rows else None
    first, clock = w - 1 - stride, Clock(log, n_chunks)
    say = teller(log, logger.info)
    say(f"perplexity: have {len(tokens)} tokens. Calculation chunk = {w}")
    say(f"perplexity: calculating perplexity over {n_chunks} chunks, batch_size={min(settings.n_batch, w)}")
    with new_context(model, settings, w, 1, log) as context, Score(out, log, n_chunks, progress, row, root) as score:
        def decoded() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for start in range(0, n_chunks * stride, stride):
                window = tokens[start:start + w]
                logits, = clock.decode(context, window[None, :w - 1], first, settings.n_batch)
                yield window, logits

        def scored(window: tuple[np.ndarray, np.ndarray]) -> Sums:
            ids, logits = window
            score.digest.add(score.digest.part(logits))
            return sums(logits, ids[first + 1:])
        for found in overlapped(decoded(), scored, n_ahead(model, settings)):
            score.add(*found)
    clock.report()
    score.print_digest()
    return score


def attest_perplexity(model, text_sha256: str | None, tokens, settings: Settings, out=None, log=None) -> dict:
    """The attestation of `perplexity` of these tokens, which prints its root to out and all else as ever. text_sha256: of the
    file of the text that they come from; None: of none."""
    score = perplexity(model, tokens, settings, out, log, root=True)
    return perplexity_document(made_by(model), bool(model.tokenizer.add_bos), text_sha256, tokens, settings, score.ppl,
                               score.digest.windows)
