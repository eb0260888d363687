"""Rows shared between threads, where there are enough of them."""
from ..compile import jit
from ..threads import device, sharing

PART = 1 << 14  # elements that are worth a thread: about 5 us of work


def over_rows(body, key=()):
    """kernel(x, *args): body(first, last, x, *args) over ranges of rows that together are all of x, an array [n_rows, ...].

    key: the arguments of the factory that made the body, if one did."""
    @device
    def part(i, args):
        n_parts, x, rest = args
        n_rows = x.shape[0]
        body(i * n_rows // n_parts, (i + 1) * n_rows // n_parts, x, *rest)

    each = sharing(part)

    @jit(key=(body.__module__, body.__name__, *key), parallel=True)
    def kernel(control, x, *args):
        n_rows = x.shape[0]
        n_parts = min(n_rows, x.size // PART)
        if n_parts < 2:
            body(0, n_rows, x, *args)
        else:
            each(control, n_parts, (n_parts, x, args))
    return kernel


def steps(*each):
    """One step that runs several, one after the other."""
    def run():
        for step in each:
            step()
    return run
