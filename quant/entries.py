"""Compiled functions of this package that Python calls. `kernels.compile`, which lies above it, keeps them on disk as it keeps
kernels."""
from collections.abc import Callable
from functools import partial

import numba

_entries: list = []  # (function, the arguments of the factory that closes over it)
_keepers: list[Callable] = []


def keep_with(keeper: Callable) -> None:
    """keeper: called with every entry and its key, those to come as well."""
    _keepers.append(keeper)
    for entry in _entries:
        keeper(*entry)


def jit(function=None, *, key=()):
    """numba.njit of a function that Python calls. Threads may call it together: it does not hold Python's lock. key: the
    arguments of the factory that closes over it."""
    if function is None:
        return partial(jit, key=key)
    entry = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function)
    _entries.append((entry, key))
    for keeper in _keepers:
        keeper(entry, key)
    return entry
