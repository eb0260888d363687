"""Compiled functions of this package that Python calls. `kernels.compile`, which lies above it, keeps them on disk as it keeps
kernels."""
from collections.abc import Callable

import numba

_entries: list = []  # (function, the arguments of the factory that closes over it)
_keepers: list[Callable] = []


def keep(function, key=()):
    """The compiled function, which is kept from now on."""
    _entries.append((function, key))
    for keeper in _keepers:
        keeper(function, key)
    return function


def keep_with(keeper: Callable) -> None:
    """keeper: called with every entry and its key, those to come as well."""
    _keepers.append(keeper)
    for entry in _entries:
        keeper(*entry)


def jit(function):
    """numba.njit of a function that Python calls. Threads may call it together: it does not hold Python's lock."""
    return keep(numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(function))
