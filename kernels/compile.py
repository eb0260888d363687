"""Compiling for the CPU: one `jit` for every kernel, a disk cache that sees edits in called functions, and the rules of threads
and fork().

numba's own cache looks at one file only, and keys closures by objects that change from process to process. Here the cache
folder's name is a digest of all sources of kernels/ and quant/, of the versions of what compiles them and of the CPU; inside it
a function is found by its name and the arguments of the factory that made it (`key`), in an entry that is verified
(`disk_cache`). `compiled` counts what this process did not find there.

What `quant` compiles, which lies below this package (`quant.entries`), is kept in the same way.

Kernels whose work threads share (`threads`) run one at a time, under `parallel_lock`.
"""
import hashlib
import itertools
import os
import pickle
import platform
import secrets
import sys
import threading
from functools import lru_cache, partial, wraps
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy
import platformdirs
from numba.core import config, event
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.serialize import dumps

from .. import quant
from ..quant import entries
from .disk_cache import compiled, read_entry, write_entry

# What the definition's fma and the conversions of float16 compile to; without them they would be library calls
NEEDED = ("fma", "f16c")
parallel_lock = threading.RLock()


def _number_symbols() -> None:
    """numba tells closures of one name apart by numbers in their symbols, counted from 1 in each process. Code that two
    processes left on disk would so have equal symbols for different functions, and the linker takes the first for both: each
    process counts from somewhere else."""
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(62))


_number_symbols()


def _before_fork() -> None:
    """While the process is copied, no other thread runs a kernel or compiles: the copy would wait for that thread for ever."""
    parallel_lock.acquire()
    global_compiler_lock.acquire()


def _after_fork() -> None:
    global_compiler_lock.release()
    parallel_lock.release()


def _after_fork_in_child() -> None:
    _after_fork()
    _number_symbols()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def check_cpu() -> None:
    """RuntimeError in one line when this CPU (or the one configured for numba) lacks an instruction the kernels need."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return
    features = cpu_features()
    missing = [f for f in NEEDED if not features.get(f)]
    if missing:
        raise RuntimeError(f"this CPU has no {' and no '.join(missing)}; the CPU kernels need {', '.join(NEEDED)} (any x86-64 "
                           "CPU since 2013 has them)")


@lru_cache(None)
def cpu_features() -> dict[str, bool]:
    """Features of the CPU that numba compiles for: the host's, or those of NUMBA_CPU_NAME / NUMBA_CPU_FEATURES."""
    if config.CPU_FEATURES is not None:
        return {f[1:]: f[0] == "+" for f in config.CPU_FEATURES.split(",") if f}
    if config.CPU_NAME:  # numba gives a CPU named by the user no host features; the name says what LLVM assumes
        return dict.fromkeys(NEEDED, True) if config.CPU_NAME not in ("generic", "x86-64") else {}
    return dict(llvm.get_host_cpu_features())


@lru_cache(None)
def source_digest() -> str:
    """sha256 of the sources of kernels/ and quant/ and of everything else that shapes compiled code."""
    h = hashlib.sha256()
    for root in (Path(__file__).parent, Path(quant.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            h.update(f"{root.name}/{path.relative_to(root).as_posix()}\0".encode())
            h.update(path.read_bytes() + b"\0")
    cpu = config.CPU_NAME or llvm.get_host_cpu_name()
    features = config.CPU_FEATURES if config.CPU_FEATURES is not None else llvm.get_host_cpu_features().flatten()
    h.update(repr((sys.version_info[:3], platform.machine(), numba.__version__, llvmlite.__version__, numpy.__version__, cpu,
                   features)).encode())
    return h.hexdigest()


def cache_folder() -> Path:
    return Path(platformdirs.user_cache_dir("ggml-py", appauthor=False)) / "kernels" / source_digest()[:20]


class _Listener(event.Listener):
    """Counts numba's compilations for the CPU that no other one started. numba's lock lets one thread compile at a time."""

    def __init__(self):
        self._depth = 0

    def on_start(self, event) -> None:
        self._depth += 1
        if self._depth == 1:
            compiled.begin("this CPU")

    def on_end(self, event) -> None:
        self._depth -= 1
        if not self._depth:
            compiled.add(1)
            compiled.end()


event.register("numba:compile", _Listener())


class _DiskCache(NullCache):
    """The compiled forms of one function on disk, a file each. numba's own index and numbered files mix up two processes that
    write at once."""

    def __init__(self, function, key):
        self._name, self._key = f"{function.__module__}.{function.__qualname__}", key

    def _entry(self, signature, codegen) -> tuple[Path, str]:
        key = repr((self._name, self._key, signature, codegen.magic_tuple(), source_digest()))
        return cache_folder() / f"{self._name.replace('<locals>.', '')}.{hashlib.sha256(key.encode()).hexdigest()[:24]}.nbc", key

    def load_overload(self, signature, target_context):
        target_context.refresh()  # it is used for the first time, perhaps
        code = read_entry(*self._entry(signature, target_context.codegen()))
        return None if code is None else CompileResult._rebuild(target_context, *pickle.loads(code))

    def save_overload(self, signature, result) -> None:
        if not result.lifted and not result.library.has_dynamic_globals:  # those hold addresses of this process
            write_entry(*self._entry(signature, result.codegen), dumps(result._reduce()))


def _keep_on_disk(dispatcher, key) -> None:
    dispatcher._cache = _DiskCache(dispatcher.py_func, key)


entries.keep_with(_keep_on_disk)  # what is compiled below this package


def jit(function=None, *, key=(), parallel=False):
    """numba.njit for this project: numpy's division, no fast-math, cached. key: the arguments of the factory that closes over
    `function`.

    parallel: its first argument is what threads share work by (`threads.sharing`), which callers do not give.
    """
    if function is None:
        return lambda f: jit(f, key=key, parallel=parallel)
    # Nothing calls it from C
    dispatcher = numba.njit(error_model="numpy", nogil=True, no_cfunc_wrapper=True)(function)
    dispatcher._cache = _DiskCache(function, key)
    if not parallel:
        return dispatcher

    from .threads import run
    return wraps(function)(partial(run, dispatcher))
