"""Compiling for the CPU: one `jit` for every kernel, a disk cache that sees edits in called functions, and the lock around parallel calls.

numba's own cache looks at one file only, and keys closures by objects that change from process to process. Here the cache folder's name is a digest of
all sources of kernels/ and quant/, of the versions of what compiles them and of the CPU; inside it a function is found by its name and the
arguments of the factory that made it (`key`). `compiled` counts what this process did not find there.
"""
import hashlib
import itertools
import os
import pickle
import platform
import secrets
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy
import platformdirs
from numba.core import config, event
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import Cache, CompileResultCacheImpl, _CacheLocator
from numba.core.serialize import dumps

from .. import quant

NEEDED = ("fma", "f16c")  # what the definition's fma and the conversions of float16 compile to; without them they would be library calls
# numba tells closures of one name apart by numbers in their symbols, counted from 1 in each process. Code that two processes left on disk would so have
# equal symbols for different functions, and the linker takes the first for both: each process counts from somewhere else.
FunctionIdentity._unique_ids = itertools.count(secrets.randbits(62))
parallel_lock = threading.RLock()  # numba's threading layers abort when two Python threads run parallel code at once


def check_cpu() -> None:
    """RuntimeError in one line when this CPU (or the one configured for numba) lacks an instruction the kernels need."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return
    features = cpu_features()
    missing = [f for f in NEEDED if not features.get(f)]
    if missing:
        raise RuntimeError(f"this CPU has no {' and no '.join(missing)}; the CPU kernels need {', '.join(NEEDED)} (any x86-64 CPU since 2013 has them)")


@lru_cache(None)
def cpu_features() -> dict[str, bool]:
    """Features of the CPU that numba compiles for: the host's, or those of NUMBA_CPU_NAME / NUMBA_CPU_FEATURES."""
    if config.CPU_FEATURES is not None:
        return {f[1:]: f[0] == "+" for f in config.CPU_FEATURES.split(",") if f}
    if config.CPU_NAME:  # numba gives a CPU named by the user no host features; the name says what LLVM assumes
        return {f: True for f in NEEDED} if config.CPU_NAME not in ("generic", "x86-64") else {}
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
    h.update(repr((sys.version_info[:3], platform.machine(), numba.__version__, llvmlite.__version__, numpy.__version__, cpu, features)).encode())
    return h.hexdigest()


def cache_folder() -> Path:
    return Path(platformdirs.user_cache_dir("ggml-py", appauthor=False)) / "kernels" / source_digest()[:20]


@dataclass
class Compiled:
    """What this process compiled, or had compiled by others, since it was not on disk. A kernel and everything that it calls count as one."""
    n_kernels: int = 0
    seconds: float = 0.0  # that it waited; on a GPU also those of the driver, which assembles PTX or finds it in a cache of its own

    def add(self, n_kernels: int, seconds: float) -> None:
        self.n_kernels += n_kernels
        self.seconds += seconds


compiled = Compiled()


class _Listener(event.Listener):
    """Counts numba's compilations for the CPU that no other one started. numba's lock lets one thread compile at a time."""

    def __init__(self):
        self._depth = 0

    def on_start(self, event) -> None:
        if not self._depth:
            self._start = time.perf_counter()
        self._depth += 1

    def on_end(self, event) -> None:
        self._depth -= 1
        if not self._depth:
            compiled.add(1, time.perf_counter() - self._start)


event.register("numba:compile", _Listener())


class _Locator(_CacheLocator):
    """All functions in one folder, told apart by module and name; the folder's name stands for the state of the sources."""

    def __init__(self, py_func):
        self._module, self._py_file = py_func.__module__, py_func.__code__.co_filename  # numba names the file when it cannot cache a function

    def get_cache_path(self):
        return str(cache_folder())

    def get_source_stamp(self):
        return source_digest()

    def get_disambiguator(self):
        return self._module.replace(".", "-")

    @classmethod
    def from_function(cls, py_func, py_file):
        return cls(py_func)


class _Impl(CompileResultCacheImpl):
    _locator_classes = [_Locator]


class _Files:
    """A file for each key, named by a digest of it. numba's own index and numbered files mix up two processes that write at once."""

    def __init__(self, folder: str, name: str):
        self._folder, self._name = Path(folder), name

    def _path(self, key) -> Path:
        return self._folder / f"{self._name}.{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.nbc"

    def load(self, key):
        try:
            return pickle.loads(self._path(key).read_bytes())
        except FileNotFoundError:
            return None

    def save(self, key, data) -> None:
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(dumps(data))
        os.replace(file.name, self._path(key))  # whole or not at all, whoever else writes


class _KeyedCache(Cache):
    _impl_class = _Impl

    def __init__(self, py_func, key):
        self._key = key
        super().__init__(py_func)
        self._cache_file = _Files(self._cache_path, self._impl.filename_base)

    def _index_key(self, sig, codegen):
        return sig, codegen.magic_tuple(), self._key


def jit(function=None, *, key=(), parallel=False):
    """numba.njit for this project: numpy's division, no fast-math, cached. key: the arguments of the factory that closes over `function`.

    A parallel function is called under the process-wide lock.
    """
    if function is None:
        return lambda f: jit(f, key=key, parallel=parallel)
    dispatcher = numba.njit(error_model="numpy", parallel=parallel, nogil=True, no_cfunc_wrapper=True)(function)  # nothing calls it from C
    try:
        dispatcher._cache = _KeyedCache(function, key)
        dispatcher._cache.enable()
    except OSError:  # no writable cache folder: compile anew in each process
        pass
    if not parallel:
        return dispatcher

    @wraps(function)
    def locked(*args):
        with parallel_lock:
            return dispatcher(*args)
    locked.dispatcher = dispatcher
    return locked
