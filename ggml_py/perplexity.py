"""Perplexity over windows of a text, by llama.cpp's algorithm and in its words, with sums in a fixed order and a digest of what was scored.

The tokens are cut into consecutive windows of c tokens; the tail is dropped. Where the vocabulary wants a BOS, it replaces the first token of each
window. Logits at positions c/2 .. c-2 score the targets at c/2+1 .. c-1:

    nll_t = (max l + log(sum_j exp(l_j - max l))) - l_t        float64, exp, log and sum of exact_math
    PPL   = exp(mean nll) +/- PPL * sqrt((mean nll^2 - (mean nll)^2) / (count - 1))

A window's nll are summed by exact_math.tree_sum, the windows one after the other. Shapes: c = n_ctx, n = scored positions of a window = c - 1 - c/2,
V = n_vocab.
"""
import math
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from .defaults import N_BATCH, N_UBATCH
from .errors import UserError
from .exact_math import exp, log_sum_exp, tree_sum
from .progress import Progress


@dataclass(frozen=True)
class Settings:
    """What a run depends on, besides model and tokens."""
    n_ctx: int = 512  # c, tokens of a window
    n_batch: int = N_BATCH  # B, tokens of a logical batch: max(1, B // c) windows are decoded together, each as a sequence
    n_ubatch: int = N_UBATCH
    n_chunks: int = -1  # at most so many windows; -1: all
    stride: int = 0  # of strided windows; 0: windows side by side
    type_k: str = "f16"
    type_v: str = "f16"
    no_fuse: tuple[str, ...] = ()  # graph passes left out
    graphs: bool = True  # replay steps from CUDA graphs
    kv_write: str = "set_rows"
    verbose: bool = False  # describe model, memory plan and CUDA graphs on the log


class LogitsDigest:
    """sha256 of float32 logits, little-endian, row after row, every NaN as 0x7fc00000."""

    def __init__(self):
        self._hash = sha256()

    def update(self, logits: np.ndarray):
        """logits: float32 [n, V]."""
        bits = np.ascontiguousarray(logits, dtype="<f4").view("<u4")
        nan = (bits & 0x7fffffff) > 0x7f800000
        if nan.any():
            bits = np.where(nan, np.uint32(0x7fc00000), bits).astype("<u4")
        self._hash.update(bits)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def negative_log_likelihood(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """nll[i] = log_sum_exp(l[i]) - l[i, targets[i]].   logits: float32 [n, V]; targets: int [n]; returns float64 [n]."""
    nll = np.empty(len(targets))
    with np.errstate(invalid="ignore"):  # infinite logits give NaN, which is the answer
        for i, target in enumerate(targets):
            row = logits[i].astype(np.float64)
            nll[i] = log_sum_exp(row) - row[target]
    return nll


def mean_and_error(total: float, total_of_squares: float, count: int) -> tuple[float, float]:
    """Mean and its standard error; the error is NaN where the variance is not positive or cannot be known."""
    mean = total / count
    variance = total_of_squares / count - mean * mean
    return mean, math.sqrt(variance / (count - 1)) if variance > 0 and count > 1 else math.nan


def read_text(path) -> str:
    """The text of a file without exactly one trailing newline; bytes that are not UTF-8, as at a cut end, reach the tokenizer as lone surrogates."""
    return path.read_bytes().removesuffix(b"\n").decode("utf-8", errors="surrogateescape")


def split_windows(tokens, settings: Settings) -> np.ndarray:
    """The first n_chunks windows of c tokens, side by side.   tokens: int [n_tokens]; returns int32 [n_chunks, c]."""
    c = settings.n_ctx
    if len(tokens) < 2 * c:
        raise UserError(f"perplexity: -c {c} needs at least {2 * c} tokens, the text has {len(tokens)}")
    n_chunks = cap_chunks(len(tokens) // c, settings)
    return np.asarray(tokens[:n_chunks * c], np.int32).reshape(n_chunks, c)


def cap_chunks(n_chunks: int, settings: Settings) -> int:
    return n_chunks if settings.n_chunks < 0 else min(n_chunks, settings.n_chunks)


def n_sequences(settings: Settings) -> int:
    """Windows that are decoded together: as many whole ones as the logical batch holds."""
    c = settings.n_ctx
    if c < 3:
        raise UserError(f"perplexity: -c must be at least 3 so that a window scores a token, got {c}")
    return max(1, settings.n_batch // c)


def check_context(model, n_ctx: int):
    """Refuse more positions in a sequence than the model was trained on."""
    if n_ctx > model.n_ctx_train:
        raise UserError(f"-c: a context of {n_ctx} tokens is too long, this model was trained on at most {model.n_ctx_train}")


@contextmanager
def new_context(model, settings: Settings, window: int, n_seq: int, log):
    """A context for n_seq sequences of `window` tokens each, closed at the end."""
    check_context(model, window)
    n_ctx = n_seq * window
    n_batch = min(settings.n_batch, n_ctx)
    n_ubatch = min(settings.n_ubatch, n_batch)
    with model.new_context(n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_ubatch, type_k=settings.type_k, type_v=settings.type_v, n_seq_max=n_seq,
                           no_fuse=settings.no_fuse, graphs=settings.graphs, kv_write=settings.kv_write) as context:
        if settings.verbose:
            print(f"{model.describe()}\n{context.describe()}", file=log)
        yield context
        if settings.verbose:
            print(context.launches(), file=log)


def with_bos(model, windows: np.ndarray) -> np.ndarray:
    """The windows as they are decoded: where the vocabulary wants a BOS, it replaces the first token of each.   int32 [n_chunks, c], both."""
    if model.tokenizer.add_bos:
        windows = windows.copy()
        windows[:, 0] = model.tokenizer.bos_id
    return windows


def decode_from(context, sequences, first: int, n_batch: int) -> list[np.ndarray]:
    """Decode equally long sequences from position 0 in logical batches of at most n_batch tokens; keep the logits of positions first and later.

    sequences: int [n_seq, n_tokens]; returns n_seq arrays float32 [n_tokens - first, V]. Earlier positions pass without logits, which saves their
    share of the output matrix; by the promise of this runtime where a sequence is cut changes no bit.
    """
    n_seq, n_tokens = sequences.shape
    piece = max(1, n_batch // n_seq)
    cuts = sorted({*range(0, n_tokens, piece), first, n_tokens})
    kept = [[] for _ in range(n_seq)]
    context.clear()
    for begin, end in zip(cuts, cuts[1:]):
        rows = context.decode_batch([(i, sequences[i, begin:end]) for i in range(n_seq)], logits="all" if begin >= first else "none")
        if begin >= first:
            for i in range(n_seq):
                kept[i].append(rows[i])
    return [pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in kept]


class Clock:
    """Times the decoding of a run and reports it in llama.cpp's words on `log`."""

    def __init__(self, log, n_groups: float):
        self.log, self.n_groups, self.n_tokens, self.seconds = log, n_groups, 0, 0.0

    def decode(self, context, sequences, first: int, n_batch: int) -> list[np.ndarray]:
        start = time.perf_counter()
        rows = decode_from(context, sequences, first, n_batch)
        seconds = time.perf_counter() - start
        if not self.n_tokens:
            left = int(seconds * self.n_groups)
            hours = f"{left // 3600} hours " if left >= 3600 else ""
            print(f"perplexity: {seconds:.2f} seconds per pass - ETA {hours}{left % 3600 / 60:.2f} minutes", file=self.log)
        self.n_tokens += sequences.size
        self.seconds += seconds
        return rows

    def report(self):
        print(f"perplexity: {self.n_tokens} tokens in {self.seconds:.2f} s, {self.n_tokens / self.seconds:.1f} tokens/s", file=self.log)


def decode_windows(model, windows: np.ndarray, settings: Settings, log):
    """Yield, window after window, its scored logits float32 [n, V].   windows: int32 [n_chunks, c], BOS not yet substituted."""
    c, n_seq = settings.n_ctx, min(n_sequences(settings), len(windows))
    decoded = with_bos(model, windows)
    clock = Clock(log, len(windows) / n_seq)
    with new_context(model, settings, c, n_seq, log) as context:
        for start in range(0, len(windows), n_seq):
            # position c-1 predicts a token of the next window and is not scored: it need not be decoded
            yield from clock.decode(context, decoded[start:start + n_seq, :c - 1], c // 2, settings.n_batch)
    clock.report()


class RunningList:
    """The list `[i]ppl,` of a run: printed as it grows, except where a progress bar shares the terminal; there it is printed at the end."""

    def __init__(self, out, log, n_chunks: int):
        self.out, self.held = out, [] if out.isatty() and log.isatty() else None
        self.progress = Progress(log, "perplexity", n_chunks)

    def __enter__(self):
        self.progress.__enter__()
        return self

    def add(self, i: int, ppl: float):
        item = f"[{i}]{ppl:.4f},"
        if self.held is None:
            print(item, end="", file=self.out, flush=True)
        else:
            self.held.append(item)
        self.progress.advance(item)

    def __exit__(self, *exc):
        self.progress.__exit__(*exc)
        print("".join(self.held or []), file=self.out, flush=True)


def perplexity(model, tokens, settings: Settings, out, log, base=None) -> float:
    """Perplexity of the tokens; the running list, the final estimate and the digest go to `out`, the rest to `log`.

    tokens: int [n_tokens], with whatever special tokens the tokenizer added; base: called with the windows int32 [n_chunks, c], gives a context
    manager whose value is called with the scored logits of each (kl_divergence.base_writer). Returns the perplexity.
    """
    c, n_seq = settings.n_ctx, n_sequences(settings)
    windows = split_windows(tokens, settings)
    n_chunks, digest, total, total_of_squares, count = len(windows), LogitsDigest(), 0.0, 0.0, 0
    check_context(model, c)
    n_batch = min(settings.n_batch, n_seq * c)
    print(f"perplexity: calculating perplexity over {n_chunks} chunks, n_ctx={c}, batch_size={n_batch}, n_seq={n_seq}", file=log)
    with base(windows) if base else nullcontext() as write, RunningList(out, log, n_chunks) as running:
        for i, logits in enumerate(decode_windows(model, windows, settings, log)):
            digest.update(logits)
            if write:
                write(logits)
            nll = negative_log_likelihood(logits, windows[i, c // 2 + 1:])
            total += float(tree_sum(nll))
            total_of_squares += float(tree_sum(nll * nll))
            count += len(nll)
            running.add(i + 1, float(exp(total / count)))
    mean, error = mean_and_error(total, total_of_squares, count)
    ppl = float(exp(mean))
    if math.isnan(error) and not math.isnan(mean):
        print("Unexpected negative standard deviation of log(prob)", file=log)
    else:
        print(f"Final estimate: PPL = {ppl:.4f} +/- {ppl * error:.5f}", file=out)
    print(f"digest: {digest.hexdigest()}", file=out)
    return ppl


def strided_perplexity(model, tokens, settings: Settings, out, log) -> float:
    """Windows of w = c + N/2 tokens that start every N = stride tokens; each scores its last N targets. No BOS per window, no final estimate.

    There are ceil((n_tokens - w) / N) windows, one sequence each. Arguments and result as of `perplexity`.
    """
    stride, w = settings.stride, settings.n_ctx + settings.stride // 2
    if stride >= w:
        raise UserError(f"perplexity: --ppl-stride must be below the window of -c plus half a stride, {w}, got {stride}")
    if len(tokens) <= w:
        raise UserError(f"perplexity: windows of {w} tokens (-c {settings.n_ctx} and half of --ppl-stride {stride}) need a longer text than "
                        f"{len(tokens)} tokens")
    check_context(model, w)
    tokens = np.asarray(tokens, np.int32)
    n_chunks = cap_chunks(-(-(len(tokens) - w) // stride), settings)
    first, digest, total, count, clock = w - 1 - stride, LogitsDigest(), 0.0, 0, Clock(log, n_chunks)
    print(f"perplexity: have {len(tokens)} tokens. Calculation chunk = {w}", file=log)
    print(f"perplexity: calculating perplexity over {n_chunks} chunks, batch_size={min(settings.n_batch, w)}", file=log)
    with new_context(model, settings, w, 1, log) as context, RunningList(out, log, n_chunks) as running:
        for i in range(n_chunks):
            window = tokens[i * stride:i * stride + w]
            logits, = clock.decode(context, window[None, :w - 1], first, settings.n_batch)
            digest.update(logits)
            nll = negative_log_likelihood(logits, window[first + 1:])
            total += float(tree_sum(nll))
            count += len(nll)
            running.add(i + 1, float(exp(total / count)))
    clock.report()
    print(f"digest: {digest.hexdigest()}", file=out)
    return float(exp(total / count))
