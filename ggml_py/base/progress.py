"""What a user sees of long work on stderr: a progress bar with the remaining time on a terminal, nothing elsewhere; and what is
being compiled."""
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial

Told = Callable[[int, int], None]  # how many steps are done, and how many there are


def teller(stream, otherwise: Callable[[str], object]) -> Callable[[str], object]:
    """What says a line: on a stream, or `otherwise` where there is none, such as `info` of a logger."""
    return otherwise if stream is None else partial(print, file=stream, flush=True)


class Progress:
    """Context manager over `total` steps of `label`; `advance()` after each step. told: is told of each.

    Drawn on `stream` when that is a terminal, unless rows are written meanwhile to `beside` and that is a terminal too: bar and
    rows would mix. of_bytes: a step is a byte; n_done: steps that were done before.
    """

    def __init__(self, stream, label: str, total: int, beside=None, of_bytes: bool = False, n_done: int = 0,
                 told: Told | None = None):
        self.bar, self.told, self.n_done, self.total = None, told, n_done, total
        if stream and stream.isatty() and not (beside and beside.isatty()):
            from rich.console import Console
            from rich.progress import (BarColumn, DownloadColumn, MofNCompleteColumn, Progress as Bar, ProgressColumn, TextColumn,
                                       TimeElapsedColumn, TimeRemainingColumn, TransferSpeedColumn)
            counts: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()] if of_bytes else [MofNCompleteColumn()]
            self.bar = Bar(TextColumn("{task.description}", markup=False), BarColumn(), *counts, TimeElapsedColumn(),
                           TextColumn("left"), TimeRemainingColumn(), console=Console(file=stream), transient=True,
                           redirect_stdout=False, redirect_stderr=False)
            self.task = self.bar.add_task(label, total=total, completed=n_done)

    def __enter__(self):
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *exc):
        if self.bar:
            self.bar.stop()

    def advance(self, note: str = "", n: int = 1):
        """n steps are done; note: what to show before the bar from now on, unchanged if empty."""
        self.n_done += n
        if self.told:
            self.told(self.n_done, self.total)
        if self.bar:
            self.bar.update(self.task, advance=n, description=note or None)

    def reach(self, done: int) -> None:
        """So many steps are done."""
        self.advance(n=done - self.n_done)


# Writes on the line below the cursor (ESC D makes room for one), and leaves the cursor where it was.
BELOW = "\x1bD\x1b[A\x1b7\n\r\x1b[2K{}\x1b8"


class CompilationNotice:
    """Tells that kernels are compiled, for as long as that takes: `compiled.watch` of kernels/disk_cache.py.

    On a terminal it is a line below the cursor, which may stand in the middle of a text or of a bar. The line is rewritten, and
    wiped when the compilation ends. Elsewhere it is one plain line when `patience` seconds have gone into compilation, and a
    second one at the end."""

    def __init__(self, stream, compiled, patience: float = 1.0, interval: float = 0.2):
        """interval: seconds between two looks. What takes less is not shown."""
        self.stream, self.compiled, self.patience, self.interval = stream, compiled, patience, interval
        self.on_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.announced = self.drawn = False
        self.thread: threading.Thread | None = None

    def __call__(self, is_running: bool) -> None:
        if is_running:
            self.ended = threading.Event()
            self.thread = threading.Thread(target=self._show, args=(self.ended,), daemon=True)
            self.thread.start()
        elif self.thread:
            self.ended.set()
            self.thread.join()
            self.thread = None
            if self.drawn:
                self._write(BELOW.format(""))
                self.drawn = False

    def _show(self, ended: threading.Event) -> None:
        while not ended.wait(self.interval):
            if self.on_terminal:
                self._write(BELOW.format(self.compiled.progress()[:shutil.get_terminal_size().columns - 1]))
                self.drawn = True
            elif not self.announced and self.compiled.elapsed() >= self.patience:
                self.announced = True
                self._write(f"{self.compiled.progress()} ...\n")

    def finish(self) -> None:
        """The line at the end, where there was one before."""
        if self.announced:
            self._write(f"compiled: {self.compiled.n_kernels} kernels in {self.compiled.seconds:.1f} s\n")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it
            self.stream.write(text)
            self.stream.flush()


def working_time() -> float:
    """A clock, s, that stands still while kernels are compiled: that is told by itself, and a speed is that of later runs."""
    from ..kernels.disk_cache import compiled
    return time.perf_counter() - compiled.elapsed()


@contextmanager
def compilation_notice(stream):
    """In the block, `stream` is told what is compiled."""
    from ..kernels.disk_cache import compiled
    notice = compiled.watch = CompilationNotice(stream, compiled)
    try:
        yield
    finally:
        compiled.watch = None
        notice(False)
        notice.finish()
