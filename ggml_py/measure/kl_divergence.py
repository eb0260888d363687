"""KL-divergence files in llama.cpp's format, and the statistics of a model against such a file.

The file, little-endian without padding, for windows of c = n_ctx tokens that score n = c - 1 - c/2 positions each
(perplexity.py), V = n_vocab:

    "_logits_"  n_ctx: i32  n_vocab: i32  n_chunk: i32  tokens: i32 [n_chunk, c] (BOS not substituted)  records: u16 [n_chunk, n,
    W]

A record has W = 4 + V rounded up to even codes: float32 scale and float32 min_log_prob lie in the first four, then one code a
token:

    log p_i = scale * code_i + min_log_prob        scale = (max - low) / 65535, low = max(min logit, max - 16)
"""
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..base.errors import UserError
from ..base.exact_math import exp, log, tree_sum
from ..base.likelihoods import log_sum_exp
from ..base.overlap import overlapped
from ..base.progress import Progress, Told, teller
from ..check.digest import WindowsDigest
from ..engine.settings import Settings, check_context
from ..engine.windows import cap_chunks, decode_windows, n_ahead, split_windows
from ..files.writing import replacing
from ..kernels.cpu.row_scores import CODES, HEAD, compare_arrays, encode_arrays
from .statistics import mean_and_error

logger = logging.getLogger(__name__)
MAGIC = b"_logits_"
HEADER_BYTES = 8 + 4 + 4 + 4
MIN_TOKENS_FOR_MEAN_ERROR = 11  # llama.cpp gives errors as 0 with fewer
MIN_TOKENS_FOR_SUMMARY = 100


def record_width(n_vocab: int) -> int:
    """W, uint16 of a record."""
    return HEAD + 2 * ((n_vocab + 1) // 2)


def scored(n_ctx: int) -> int:
    """n, positions that a window scores."""
    return n_ctx - 1 - n_ctx // 2


def encode(logits: np.ndarray) -> np.ndarray:
    """Logits to records, each step in float32 as llama.cpp does it, except that sum and exp are float64.   float32 [n,
    V] -> uint16 [n, W]."""
    n, n_vocab = logits.shape
    records = np.zeros((n, record_width(n_vocab)), "<u2")
    ends, totals = np.empty((n, 2), np.float32), np.empty(n)
    encode_arrays(np.ascontiguousarray(logits), records, ends, totals)
    low, top = ends.T
    if np.isnan(low).any():
        raise UserError("kl-divergence: the logits hold NaN or infinity, which a base file cannot store")
    heads = records[:, :HEAD].view("<f4")  # scale, min_log_prob
    heads[:, 0], heads[:, 1] = (top - low) / CODES, low - top - log(totals).astype(np.float32)
    return records


def heads_of(records: np.ndarray) -> np.ndarray:
    """scale and min_log_prob of each.   uint16 [n, W] -> float32 [n, 2]."""
    return np.ascontiguousarray(records[:, :HEAD]).view("<f4")


def decode(records: np.ndarray, n_vocab: int) -> np.ndarray:
    """Records to log probabilities, scale * code + min_log_prob in float64.   uint16 [n, W] -> float64 [n, V]."""
    heads = heads_of(records).astype(np.float64)
    return heads[:, :1] * records[:, HEAD:HEAD + n_vocab] + heads[:, 1:]


class BaseWriter(NamedTuple):
    """encode: the scored logits of a window, float32 [n, V], to records; by any thread. write: records, window after window."""
    encode: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], Any]


@contextmanager
def base_writer(path: str | Path, n_vocab: int, windows: np.ndarray) -> Iterator[BaseWriter]:
    """Writes a base file. windows: int32 [n_chunk, c]."""
    n_chunk, n_ctx = windows.shape
    with replacing(path) as file:
        file.write(MAGIC + np.array([n_ctx, n_vocab, n_chunk], "<i4").tobytes() + windows.astype("<i4").tobytes())
        yield BaseWriter(encode, file.write)


class BaseFile:
    """A base file, mapped: n_ctx, n_vocab, n_chunk, tokens int32 [n_chunk, c], and records(i) of a window."""

    def __init__(self, path: Path):
        n_bytes = path.stat().st_size
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
        if header[:8] != MAGIC:
            raise UserError(f"{path}: not a KL-divergence base file, it starts with {header[:8]!r} instead of {MAGIC!r}")
        if len(header) < HEADER_BYTES:
            raise UserError(f"{path}: the header has {HEADER_BYTES} bytes, the file {n_bytes}")
        self.path = path
        self.n_ctx, self.n_vocab, self.n_chunk = (int(v) for v in np.frombuffer(header, "<i4", 3, 8))
        for name, least in ("n_ctx", 3), ("n_vocab", 1), ("n_chunk", 1):
            if getattr(self, name) < least:
                raise UserError(f"{path}: {name} is {getattr(self, name)}, must be at least {least}")
        shape = self.n_chunk, scored(self.n_ctx), record_width(self.n_vocab)
        start = HEADER_BYTES + 4 * self.n_chunk * self.n_ctx
        expected = start + 2 * math.prod(shape)
        if n_bytes != expected:
            raise UserError(f"{path}: {n_bytes} bytes, but n_ctx={self.n_ctx}, n_vocab={self.n_vocab}, n_chunk={self.n_chunk} "
                            f"make {expected}")
        self.tokens = np.fromfile(path, "<i4", self.n_chunk * self.n_ctx, offset=HEADER_BYTES).reshape(self.n_chunk, self.n_ctx)
        bad = np.argwhere((self.tokens < 0) | (self.tokens >= self.n_vocab))
        if len(bad):
            chunk, i = (int(v) for v in bad[0])
            raise UserError(f"{path}: token {i} of chunk {chunk} is {self.tokens[chunk, i]}, must be below n_vocab = "
                            f"{self.n_vocab}")
        self._records = np.memmap(path, "<u2", "r", start, shape)

    def records(self, chunk: int) -> np.ndarray:
        """uint16 [n, W] of a window; refuses scales that no writer makes."""
        records = self._records[chunk]
        heads = heads_of(records)
        if not (np.isfinite(heads).all() and (heads[:, 0] >= 0).all()):
            raise UserError(f"{self.path}: chunk {chunk} has a scale or a least log probability that is not finite, or a "
                            "negative scale")
        return np.array(records)  # kernels know arrays that can be written


@dataclass
class Comparison:
    """Per scored token, in order: float64 [count] each, same_top bool [count]."""
    nll: np.ndarray
    nll_base: np.ndarray
    kld: np.ndarray
    p_diff: np.ndarray
    same_top: np.ndarray

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(*map(np.concatenate, zip(vars(self).values(), vars(other).values())))


def compare_window(logits: np.ndarray, records: np.ndarray, targets: np.ndarray) -> Comparison:
    """nll = -log p(t), KL = sum_{i: log p_base > -16} p_base (log p_base - log p), p_diff = p(t) - p_base(t), same_top = equal
    argmax (lowest index; rows with NaN have none).

    logits: float32 [n, V]; records: uint16 [n, W]; targets: int [n].
    """
    n, rows, targets = len(logits), np.arange(len(logits)), np.asarray(targets)
    kld, same_top, log_sums = np.empty(n), np.empty(n, bool), log_sum_exp(logits)
    compare_arrays(np.ascontiguousarray(logits), records, log_sums, kld, same_top)
    nll = log_sums - logits[rows, targets]
    heads = heads_of(records).astype(np.float64)
    nll_base = -(heads[:, 0] * records[rows, HEAD + targets] + heads[:, 1])
    return Comparison(nll, nll_base, kld, exp(-nll) - exp(-nll_base), same_top)


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error."""
    value: float
    error: float

    def times(self, factor: float) -> "Estimate":
        return Estimate(self.value * factor, self.error * factor)

    def __format__(self, spec: str) -> str:
        """spec: of the value, and behind a comma of the error where that is written in another way."""
        value, _, error = spec.partition(",")
        return f"{self.value:{value}} ± {self.error:{error or value}}"


def mean_estimate(x: np.ndarray) -> Estimate:
    """Mean of float64 [count] with standard error sqrt(var / (count - 1)),
    0 where the variance is not positive or there are fewer than 11 values."""
    mean, error = mean_and_error(float(tree_sum(x)), float(tree_sum(x * x)), len(x))
    return Estimate(mean, error if len(x) >= MIN_TOKENS_FOR_MEAN_ERROR and not math.isnan(error) else 0.0)


def percentile(ordered: np.ndarray, fraction: float) -> float:
    """Linear interpolation at fraction * (count - 1) in ascending float64 [count]."""
    p = fraction * (len(ordered) - 1)
    i = int(p)
    return float((1 - (p - i)) * ordered[i] + (p - i) * ordered[min(i + 1, len(ordered) - 1)])


class Statistics:
    """Estimates over the tokens of a Comparison; errors of first order,
    with the covariance of the two nll series where both enter."""

    def __init__(self, c: Comparison):
        self.count = count = len(c.nll)
        log_ppl, log_base = mean_estimate(c.nll), mean_estimate(c.nll_base)
        mean_product = float(tree_sum(c.nll * c.nll_base)) / count
        covariance = (mean_product - log_ppl.value * log_base.value) / (count - 1) if count >= 10 else 0.0

        def difference(a: Estimate, b: Estimate, cov: float) -> Estimate:
            return Estimate(a.value - b.value, math.sqrt(max(0.0, a.error * a.error + b.error * b.error - 2 * cov)))

        def exponential(a: Estimate) -> Estimate:
            value = float(exp(a.value))
            return Estimate(value, value * a.error)

        self.ppl, self.ppl_base = exponential(log_ppl), exponential(log_base)
        errors = log_ppl.error * log_base.error
        self.correlation = covariance / errors if errors else math.nan
        self.log_ratio = difference(log_ppl, log_base, covariance)
        self.ratio = exponential(self.log_ratio)
        self.ppl_difference = difference(self.ppl, self.ppl_base, self.ppl.value * self.ppl_base.value * covariance)
        self.kld = mean_estimate(c.kld)
        self.p_diff = mean_estimate(c.p_diff)
        mean_square = mean_estimate(c.p_diff * c.p_diff)
        rms = math.sqrt(mean_square.value)
        self.p_diff_rms = Estimate(rms, 0.5 / rms * mean_square.error if rms else 0.0)
        same = int(np.count_nonzero(c.same_top)) / count
        self.same_top = Estimate(same, math.sqrt(same * (1 - same) / (count - 1)) if count > 1 else 0.0)
        self.comparison = c


CHUNK_HEADER = ("chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS"
                "            Same top p")


def chunk_row(chunk: int, s: Statistics) -> str:
    """The running values after window `chunk`, counted from 1."""
    return (f"{chunk:4d}    {s.ppl:9.4f}    {s.log_ratio:10.5f}    {s.kld:10.5f}    {s.p_diff_rms.times(100):6.3f} %"
            f"    {s.same_top.times(100):6.3f} %")


PERCENTILES = {"Maximum": 1.0, "99.9%  ": .999, "99.0%  ": .99, "95.0%  ": .95, "90.0%  ": .9, "75.0%  ": .75, "Median ": .5,
               "25.0%  ": .25, "10.0%  ": .1, " 5.0%  ": .05, " 1.0%  ": .01, " 0.1%  ": .001, "Minimum": 0.0}


def summary(s: Statistics) -> str:
    """The three final blocks."""
    kld, p_diff = np.sort(s.comparison.kld), np.sort(s.comparison.p_diff)
    return "\n".join([
        "====== Perplexity statistics ======",
        f"Mean PPL(Q)                   : {s.ppl:10.6f}",
        f"Mean PPL(base)                : {s.ppl_base:10.6f}",
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * s.correlation:6.2f}%",
        f"Mean ln(PPL(Q)/PPL(base))     : {s.log_ratio:10.6f}",
        f"Mean PPL(Q)/PPL(base)         : {s.ratio:10.6f}",
        f"Mean PPL(Q)-PPL(base)         : {s.ppl_difference:10.6f}",
        "",
        "====== KL divergence statistics ======",
        f"Mean    KLD: {s.kld:10.6f}",
        *(f"{label} KLD: {percentile(kld, fraction):10.6f}" for label, fraction in PERCENTILES.items()
          if fraction not in (.25, .75)),  # as llama.cpp prints them
        "",
        "====== Token probability statistics ======",
        f"Mean    Δp: {s.p_diff.times(100):6.3f,5.3f} %",
        *(f"{label} Δp: {100 * percentile(p_diff, fraction):6.3f}%" for label, fraction in PERCENTILES.items()),
        f"RMS Δp    : {s.p_diff_rms.times(100):6.3f,5.3f} %",
        f"Same top p: {s.same_top.times(100):6.3f,5.3f} %"])


def compare(model, base: BaseFile, settings: Settings, out=None, log=None, progress: Told | None = None,
            root: bool = False) -> Statistics:
    """The model against a base file, on the file's tokens; a row after each window and the blocks go to `out`, the rest to `log`:
    streams. None: nowhere, and to `logging`. progress: is told how many windows are done, and of how many. root: of
    `perplexity`.

    settings.n_ctx must be base.n_ctx. Returns the statistics over all windows.
    """
    if base.n_vocab != model.n_vocab:
        raise UserError(f"{base.path}: made with a vocabulary of {base.n_vocab} tokens, this model has {model.n_vocab}")
    check_context(model, base.n_ctx)
    n_chunks, digest, comparison = cap_chunks(base.n_chunk, settings.n_chunks), WindowsDigest(root), None
    windows = base.tokens[:n_chunks]
    teller(log, logger.info)(f"kl_divergence: {n_chunks} chunks of {base.path}, n_ctx={base.n_ctx}")
    say = teller(out, lambda line: None)
    say(CHUNK_HEADER)
    with Progress(log, "KL divergence", n_chunks, beside=out, told=progress) as bar:
        def compared(window: tuple[int, np.ndarray]) -> tuple[Any, Comparison]:
            i, logits = window
            return digest.part(logits), compare_window(logits, base.records(i), windows[i, base.n_ctx // 2 + 1:])

        def kept(found: tuple[Any, Comparison]) -> Statistics:
            nonlocal comparison
            part, window = found
            digest.add(part)
            comparison = window if comparison is None else comparison + window
            return Statistics(comparison)
        most, decoded = n_ahead(model, settings), enumerate(decode_windows(model, windows, settings, log))
        for i, statistics in enumerate(overlapped(overlapped(decoded, compared, most, True), kept, most), 1):
            say(chunk_row(i, statistics))
            bar.advance()
    if statistics.count >= MIN_TOKENS_FOR_SUMMARY:
        say("\n" + summary(statistics))
    say(f"{digest.name}: {digest.hexdigest()}")
    return statistics


def compare_models(model, source, tokens, settings: Settings, log=None, progress: Told | None = None) -> Statistics:
    """A model against another of the same vocabulary on a text, window by window, by what a base file would hold of the other.
    log, progress: as of `compare`."""
    if source.n_vocab != model.n_vocab:
        raise UserError(f"{model.file.path}: it has a vocabulary of {model.n_vocab} tokens, {source.file.path} of "
                        f"{source.n_vocab}")
    windows, comparisons = split_windows(tokens, settings), []

    def compared(window: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Comparison:
        ids, logits, base = window
        return compare_window(logits, encode(base), ids[settings.n_ctx // 2 + 1:])
    with Progress(log, "KL divergence", len(windows), told=progress) as bar:
        decoded = zip(windows, decode_windows(model, windows, settings, log), decode_windows(source, windows, settings, log))
        for comparison in overlapped(decoded, compared, min(n_ahead(model, settings), n_ahead(source, settings))):
            comparisons.append(comparison)
            bar.advance()
    return Statistics(reduce(add, comparisons))
