"""The digest of logits that come one after the other: what two runs must have in common."""
from collections.abc import Callable
from hashlib import sha256

import numpy as np

from ..testing import digest, one_nan
from .merkle import merkle_root


class LogitsDigest:
    """`testing.digest` of float32 logits, row after row."""

    def __init__(self) -> None:
        self._hash = sha256()

    def update(self, logits: np.ndarray) -> None:
        """logits: float32 [n, V]."""
        self.add(one_nan(logits))

    def add(self, logits: np.ndarray) -> None:
        """The same of logits in which NaN is one value."""
        self._hash.update(np.ascontiguousarray(logits, "<f4").data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class WindowsDigest:
    """Of the logits of windows: the digest of all rows, for which one window is hashed after the other; or, with `root`, the
    Merkle root of the windows' own digests, which threads make side by side.

    part: (logits of a window, float32 [n, V]) -> what `add` takes of it; any thread may call it."""

    def __init__(self, root: bool = False):
        self.name = "root" if root else "digest"
        self.windows: list[str] = []  # of a root, their digests
        self._all = None if root else LogitsDigest()
        self.part: Callable = digest if root else one_nan

    def add(self, part) -> None:
        """In the order of the windows."""
        if self._all is None:
            self.windows.append(part)
        else:
            self._all.add(part)

    def hexdigest(self) -> str:
        return merkle_root(self.windows) if self._all is None else self._all.hexdigest()
