"""stdout and stderr as the commands need them: what cannot be written to stdout ends a command, what cannot be written to stderr
is lost."""
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..base.errors import UserError


WARNINGS, NOTES, VERBOSE = 2, 3, 4  # from which verbosity on stderr has them


class Unwritten(Exception):
    """stdout cannot be written. Not an OSError: argparse drops these, and rich ends the process with exit code 1 where a reader
    has gone."""

    def __init__(self, error: OSError):
        super().__init__(f"stdout: cannot be written: {error.strerror or error}")
        self.reader_is_gone = error.errno == errno.EPIPE


class Guarded:
    """A stream. on_error is called with an OSError of it; from then on what is written to the stream goes nowhere."""

    def __init__(self, stream, on_error):
        self._stream, self._on_error = stream, on_error

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, function, *args) -> None:
        try:
            function(*args)
        except OSError as error:
            with suppress(OSError):  # of a stream that is no file, as tests have them
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())  # also what is waiting, about which Python would complain at exit
                os.close(nowhere)
            self._on_error(error)

    def __getattr__(self, name):
        return getattr(self._stream, name)


def _refuse(error: OSError) -> None:
    raise Unwritten(error)


def check_stdout() -> None:
    """UserError where stdout is closed."""
    if sys.stdout is None:
        raise UserError("stdout: it is closed, and results go there")


@contextmanager
def guarded_streams() -> Iterator[None]:
    """sys.stdout and sys.stderr are guarded in the block; what is written to a closed stderr is
    dropped."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # a file that is opened later must not become one of the three
    os.close(number)
    before = sys.stdout, sys.stderr
    sys.stderr = Guarded(sys.stderr or io.StringIO(), lambda error: None)
    if sys.stdout is not None:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
            sys.stdout.reconfigure(errors="replace")  # a terminal without ± or Δ shows a question mark
        sys.stdout = Guarded(sys.stdout, _refuse)
    try:
        yield
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(Unwritten):
                stream.flush()
        sys.stdout, sys.stderr = before


class Quiet(io.StringIO):
    """In the place of stderr: nothing that is written is shown, but what goes to `loud`."""

    def __init__(self, loud):
        super().__init__()
        self.loud = loud

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def quieted(verbosity: int | None) -> Iterator[None]:
    """In the block stderr has no notes below NOTES, nor warnings below WARNINGS; errors go to its `loud`."""
    if verbosity is None or verbosity >= NOTES:
        yield
        return
    import logging
    handler = logging.StreamHandler(sys.stderr) if verbosity >= WARNINGS else logging.NullHandler()
    handler.setLevel(logging.WARNING)
    before, sys.stderr = sys.stderr, Quiet(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        sys.stderr = before
