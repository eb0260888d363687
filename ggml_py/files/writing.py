"""Writing a file so that nobody ever sees half of it, and asking beforehand whether it can be written."""
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from ..base.errors import UserError


class Output:
    """What is written into the place of `path`. UserError, which names `path`, where it cannot be: a full disk shows at any
    write, or at the end."""

    def __init__(self, path: Path, place: Path):
        self.path = path
        with writing(path):
            self.file = open(place, "wb")  # noqa: SIM115  `close` closes it

    def write(self, data) -> None:
        with writing(self.path):
            self.file.write(data)

    def close(self) -> None:
        with writing(self.path):
            self.file.close()


@contextmanager
def replacing(path: str | Path) -> Iterator[Output]:
    """An `Output` that takes the place of `path` when the block ends well; cut short, it leaves nothing and `path` as it was. A
    link stays a link: what it leads to is replaced. Devices, pipes and the files that are stdout and stderr are written as they
    are."""
    path = Path(path)
    if is_special(path):
        with closing(Output(path, path)) as output:
            yield output
        return
    place = Path(os.path.realpath(path))
    partial = place.with_name(f"{place.name}.{os.getpid()}.partial")
    try:
        with closing(Output(path, partial)) as output:
            yield output
        with writing(path):
            os.replace(partial, place)
    finally:
        partial.unlink(missing_ok=True)


def is_special(path: Path) -> bool:
    """A device or a pipe, which must stay what it is, or the file that stdout or stderr goes to, as /dev/stdout may be, which
    goes on behind."""
    if not path.exists() or path.is_dir():
        return False
    return not path.is_file() or any(os.path.samestat(path.stat(), stream) for stream in _streams())


def _streams() -> Iterator[os.stat_result]:
    """What is known of the files behind stdout and stderr, where they are open."""
    for number in 1, 2:
        with suppress(OSError):
            yield os.fstat(number)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What cannot be written in the block is a UserError about `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def write(path: Path, data: bytes) -> None:
    """Whole or not at all; UserError if it cannot be."""
    with replacing(path) as file:
        file.write(data)


def check_file(path: Path) -> None:
    """UserError unless a file can be made, or replaced, at `path`."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder, expected a file")
    if not path.parent.is_dir():
        raise UserError(f"{path}: {path.parent} is not a folder")
    place = Path(os.path.realpath(path))
    _check_access(path, path if is_special(path) else place.parent)


def check_folder(path: Path) -> None:
    """UserError unless files can be made in the folder `path`, which need not be there yet, nor those above it."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise UserError(f"{path}: {'is' if there == path else f'{there} is'} a file, expected a folder")
    _check_access(path, there)


def _check_access(path: Path, where: Path) -> None:
    if not os.access(where, os.W_OK | os.X_OK * where.is_dir()):
        raise UserError(f"{path}: {where} cannot be written to")
