"""Writing a file so that nobody ever sees half of it, and asking beforehand whether it can be written."""
import os
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError


@contextmanager
def replacing(path):
    """A binary file that takes the place of `path` when the block ends well; cut short, it leaves nothing and `path` as it was."""
    path = Path(path)
    if is_special(path):
        with open(path, "wb") as file:
            yield file
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
        os.replace(partial, path)
    except OSError as error:
        if str(error.filename) == str(partial):
            error.filename = str(path)  # what the user asked for
        raise
    finally:
        partial.unlink(missing_ok=True)


def is_special(path: Path) -> bool:
    """A device, a pipe or a link, as /dev/stdout is: it must stay what it is."""
    return path.is_symlink() or path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def writing(path):
    """What cannot be written in the block is a UserError about `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def write(path: Path, data: bytes) -> None:
    """Whole or not at all; UserError if it cannot be."""
    with writing(path), replacing(path) as file:
        file.write(data)


def check_file(path: Path) -> None:
    """UserError unless a file can be made, or replaced, at `path`."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder, expected a file")
    if not path.parent.is_dir():
        raise UserError(f"{path}: {path.parent} is no folder")
    _check_access(path, path if is_special(path) and path.exists() else path.parent)


def check_folder(path: Path) -> None:
    """UserError unless files can be made in the folder `path`, which need not be there yet, nor those above it."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise UserError(f"{path}: {'is' if there == path else f'{there} is'} a file, expected a folder")
    _check_access(path, there)


def _check_access(path: Path, where: Path) -> None:
    if not os.access(where, os.W_OK | os.X_OK * where.is_dir()):
        raise UserError(f"{path}: {where} cannot be written to")
