"""The digest of logits that come one after the other: what two runs must have in common."""
from hashlib import sha256

import numpy as np

from ..testing import one_nan


class LogitsDigest:
    """`testing.digest` of float32 logits, row after row."""

    def __init__(self) -> None:
        self._hash = sha256()

    def update(self, logits: np.ndarray) -> None:
        """logits: float32 [n, V]."""
        self._hash.update(np.ascontiguousarray(one_nan(logits), "<f4").data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
