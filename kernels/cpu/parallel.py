"""Rows shared between threads, where there are enough of them: waking a thread costs some ten microseconds, far more on a busy
machine."""
from numba import prange

from ..compile import jit

PART = 1 << 18  # elements that are worth a thread: about 0.1 ms of work


def over_rows(body, key=()):
    """kernel(x, *args): body(first, last, x, *args) over ranges of rows that together are all of x, an array [n_rows, ...].

    key: the arguments of the factory that made the body, if one did."""
    @jit(key=(body.__module__, body.__name__, *key), parallel=True)
    def kernel(x, *args):
        n_rows = x.shape[0]
        n_parts = min(n_rows, x.size // PART)
        if n_parts < 2:
            body(0, n_rows, x, *args)
        else:
            for part in prange(n_parts):
                body(part * n_rows // n_parts, (part + 1) * n_rows // n_parts, x, *args)
    return kernel


def steps(*each):
    """One step that runs several, one after the other."""
    def run():
        for step in each:
            step()
    return run
