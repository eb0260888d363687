"""The digest of logits that come one after the other: what two runs must have in common."""
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
        self._hash.update(np.ascontiguousarray(one_nan(logits), "<f4").data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class WindowsDigest:
    """Of the logits of windows: the digest of all rows, for which one window is hashed after the other; or, with `root`, the
    Merkle root of the windows' own digests, which threads make side by side."""

    def __init__(self, root: bool = False):
        self.name = "root" if root else "digest"
        self._all = None if root else LogitsDigest()
        self.windows: list[str] = []  # of a root, their digests

    def most_threads(self, n: int) -> int:
        """How many may call `of` at a time, n at most."""
        return max(n, 1) if self._all is None else 1

    def of(self, logits: np.ndarray) -> str:
        """What `add` is told of a window.   logits: float32 [n, V]."""
        if self._all is None:
            return digest(logits)
        self._all.update(logits)
        return ""

    def add(self, window: str) -> None:
        """What `of` gave, in the order of the windows."""
        if self._all is None:
            self.windows.append(window)

    def hexdigest(self) -> str:
        return merkle_root(self.windows) if self._all is None else self._all.hexdigest()
