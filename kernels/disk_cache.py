"""Compiled code on disk, verified when it is read; and `compiled`, which counts what this process had to compile, and why.

An entry is a file of three parts: a line with the sha256 of the other two, a line with the key (a text that says what the code
was made of), and the code. A process that finds an entry damaged, or of another key, compiles anew and replaces it. This module
imports nothing of numba: the command line watches `compiled` without waiting for that import.
"""
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass
class Compiled:
    """What this process compiled, or had compiled by others, since it was not on disk. A kernel and all that it calls count as
    one."""
    n_kernels: int = 0
    seconds: float = 0.0  # that it waited; on a GPU also for the driver, which assembles PTX or finds it in a cache of its own
    rejected: dict[Path, str] = field(default_factory=dict)  # entries on disk that were not used -> why
    unkept: str = ""      # why code could not be kept on disk, when that happened first
    watch: Callable[[bool], None] | None = None  # called with True when a compilation begins, with False when it has ended

    def __post_init__(self):
        self._lock = threading.RLock()
        self._n_running = 0  # compilations that have begun and not ended: they nest, and threads compile side by side

    def begin(self, target: str, n_wanted: int = 0) -> None:
        """Compilation for a target ("this CPU") begins. n_wanted: how many kernels it is about, 0 where nobody knows."""
        with self._lock:
            self._n_running += 1
            if self._n_running > 1:
                return
            self._start, self._target, self._n_before, self._n_wanted = time.perf_counter(), target, self.n_kernels, n_wanted
        if self.watch:
            self.watch(True)

    def add(self, n_kernels: int) -> None:
        with self._lock:
            self.n_kernels += n_kernels

    def end(self) -> None:
        with self._lock:
            self._n_running -= 1
            if self._n_running:
                return
            self.seconds += time.perf_counter() - self._start
        if self.watch:
            self.watch(False)

    @contextmanager
    def running(self, target: str, n_wanted: int = 0):
        """The time in the block is that of compilation."""
        self.begin(target, n_wanted)
        try:
            yield
        finally:
            self.end()

    def elapsed(self) -> float:
        """`seconds`, and those of the compilation that runs."""
        with self._lock:
            return self.seconds + (time.perf_counter() - self._start if self._n_running else 0.0)

    def progress(self) -> str:
        """What is compiled now, and how far that is, in one line."""
        done = f"{self.n_kernels - self._n_before} of {self._n_wanted}" if self._n_wanted else f"{self.n_kernels} so far"
        return f"compiling kernels for {self._target}, once: {done}, {self.elapsed():.1f} s"

    def report(self) -> str:
        """For --verbose: entries that were not used and why; why code was not kept; what was compiled."""
        lines = [f"kernel cache: {path}: {why}; compiled anew" for path, why in self.rejected.items()]
        return "\n".join([*lines, *filter(None, [self.unkept]), f"{self.n_kernels} kernels compiled in {self.seconds:.1f} s"])


compiled = Compiled()


def _checksum(body: bytes | memoryview) -> bytes:
    return hashlib.sha256(body).hexdigest().encode() + b"\n"


HEAD = len(_checksum(b""))


def read_entry(path: Path, key: str) -> memoryview | None:
    """The code that `write_entry` put there under this key. None where there is no file, or, as `compiled.rejected` then tells,
    no right one."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    made_of, body = key.encode() + b"\n", memoryview(entry)[HEAD:]
    if not entry:
        compiled.rejected[path] = "it is empty"
    elif not entry.startswith(_checksum(body)):
        compiled.rejected[path] = "its checksum is wrong"
    elif not entry.startswith(made_of, HEAD):
        compiled.rejected[path] = "it is another kernel's"
    else:
        return body[len(made_of):]
    return None


def write_entry(path: Path, key: str, code: bytes) -> None:
    """The entry is there as a whole or not at all, whoever else writes, and whenever the machine stops. key: one line.

    A folder that cannot be written to, or a full disk, is a warning, once: every process then compiles what it needs."""
    body = key.encode() + b"\n" + code
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(partial, "wb") as file:
                file.write(_checksum(body) + body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        if not compiled.unkept:
            compiled.unkept = (f"kernel cache: {path.parent} cannot be written to ({error.strerror or error}): "
                               "every process compiles its kernels anew; XDG_CACHE_HOME names another place")
            log.warning(compiled.unkept)
