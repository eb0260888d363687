"""Writing a file so that nobody ever sees half of it."""
import os
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path):
    """A binary file that takes the place of `path` when the block ends well; cut short, it leaves nothing and `path` as it was."""
    path = Path(path)
    if path.exists() and not path.is_file():  # a device or a pipe: it must stay what it is
        with open(path, "wb") as file:
            yield file
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
