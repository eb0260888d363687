"""Functions that are alike. Factories make their functions anew for every format and kernel; of those of one text on the same
values the first one is compiled, and is all of them, on every device."""
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType

import numpy as np
from numba import typeof

MOST_COPIED = 10**6  # bytes of an array of which functions have a copy: larger ones are read in place, as parts of arrays are

# What a function is made of -> the first one that was made of it, and its values, which so keep their ids
_first: dict[tuple, tuple[FunctionType, list]] = {}


@lru_cache(None)
def first_alike(function: FunctionType) -> FunctionType:
    """The first function of this text on these values: those it closes over, its defaults, and the globals that it names. Itself
    where it has shared memory of its own.

    To be asked when the function is compiled: names that it closes over may have other values before."""
    own, names = function.__globals__, {*_names(function.__code__)}
    if "shared" in names:
        return function
    named = [own[name] for name in sorted(names) if name in own]
    named += [getattr(module, name) for module in named if isinstance(module, ModuleType)
              for name in sorted(names) if hasattr(module, name)]
    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    made_of = function.__code__, *map(id, (own, *named)), *map(_made_of, (*closed, function.__defaults__))
    return _first.setdefault(made_of, (function, [*named, *closed]))[0]


def _names(code: CodeType) -> Iterator[str]:
    """Of its globals and attributes, and those of the functions within it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _made_of(value):
    """Hashable, and equal for values that a compiled function cannot tell apart. `_first` keeps alive what has an id here."""
    if isinstance(value, FunctionType):
        return first_alike(value)
    if hasattr(value, "py_func"):
        return type(value), first_alike(value.py_func), repr(value.targetoptions)
    if isinstance(value, tuple):
        return type(value), *map(_made_of, value)
    if isinstance(value, (float, np.generic)):
        return type(value), np.asarray(value).tobytes()
    if value is None or isinstance(value, (bool, int, str)):
        return type(value), repr(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.flags.forc and value.nbytes <= MOST_COPIED:
        return typeof(value), value.shape, value.tobytes()
    return object() if isinstance(value, (list, dict, set, np.ndarray)) else id(value)  # what can change is like nothing else
