"""Drafts at every step, always as long as they may be."""
from ggml_py.engine.speculation import Speculation


class Fixed(Speculation):
    """Learns nothing of what came of drafts before, but counts them."""

    def learn(self, n_drafted: int, n_accepted: int) -> None:
        super().learn(n_drafted, n_accepted)
        self._forget()
