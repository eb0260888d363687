"""Steps of a model that are held up at random, against those of one that nothing holds up."""
import time
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

SPINS = 20e-6, 100e-6, 400e-6  # seconds of the kernels that hold up a stream


def calls_of(rng: np.random.Generator) -> list[np.ndarray]:
    """Tokens of the steps of a text."""
    return [rng.integers(0, 60, n).astype(np.int32) for n in (5, 1, 1, 3, 1, 1, 1, 2, 1, 1)]


def rows(model, calls: list[np.ndarray], before: Callable[[], None] = lambda: None, **settings) -> Iterator[np.ndarray]:
    """Logits of each step, text after text without end. before: is called before each step."""
    with model.new_context(n_ctx=64, n_ubatch=4, **settings) as context:
        while True:
            context.clear()
            for call in calls:
                before()
                yield context.decode(call)


def nap(rng: np.random.Generator) -> None:
    """One time in four the host waits, up to 300 us: what is behind it comes late."""
    if rng.random() < 0.25:
        time.sleep(rng.random() * 300e-6)


def check_rows(found: Iterator[np.ndarray], expected: list[np.ndarray], n: int) -> None:
    """n rows have the bits of those of a text."""
    lost = [i for i, row in enumerate(islice(found, n))
            if not np.array_equal(row.view(np.uint32), expected[i % len(expected)].view(np.uint32))]
    assert not lost, f"{len(lost)} of {n} steps gave other bits, the first of them step {lost[0]}"
