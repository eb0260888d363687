"""Rows shared between threads, where there are enough of them."""
from ...quant.device_functions import device
from ..compile import jit
from ..threads import sharing

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
        n_parts = max(1, min(x.shape[0], x.size // PART))
        each(control, n_parts, (n_parts, x, args))
    return kernel


@jit
def take_rows(first, last, out, x, rows):
    for row in range(first, last):
        a, o = x[rows[row]], out[row]
        for column in range(o.shape[0]):  # a slice would take two seconds to compile
            o[column] = a[column]


take = over_rows(take_rows)  # (out [n, m], x [any, m], rows i32 or i64 [n]): out[i] = x[rows[i]]
