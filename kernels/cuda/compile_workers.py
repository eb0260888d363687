"""Compiles many kernels in processes of their own: numba compiles one at a time in each.

A worker reads (module, factory, arguments, compute capability) pickled from its standard input, leaves the kernel's PTX in the
disk cache and answers with a line, KEPT if the PTX is there. It ends when its input does, so with the process that started it.
What workers leave undone, for whatever reason, is compiled by the process that wants it, which says what is wrong.

A worker imports numba and compiles an empty kernel before it reads, which takes it a second. Where the disk cache has nothing,
all kernels of a model will be missing: the workers are started before its GPU is opened (`launch.expect`).
"""
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FunctionType

from ..disk_cache import compiled

KEPT = b"kept\n"
FEWEST, MOST_WORKERS = 2, 8  # kernels that are worth the workers' start, about a second; a worker takes 400 MB and 12 a kernel


def n_workers(n_kernels: int, folder: Path) -> int:
    """Worth starting for so many kernels whose PTX goes to a folder: one for each core of this process up to MOST_WORKERS; none
    for few kernels, a single core or a folder that cannot be written."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if n_kernels < FEWEST or n_cores == 1 or not sys.executable or getattr(sys, "frozen", False):
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return 0
    return min(n_cores, n_kernels, MOST_WORKERS) if os.access(folder, os.W_OK) else 0


class Workers:
    """n worker processes, which start at once and end when they are closed."""

    def __init__(self, n: int):
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        # -P: the current folder is no place for modules
        command = [sys.executable, "-P", "-c", f"from {__name__} import work; work()"]
        self.processes = [subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                           stderr=subprocess.DEVNULL) for _ in range(n)]

    def compile(self, kernels: list, cc: tuple[int, int]) -> Generator:
        """Leaves the PTX of kernels (`launch.Kernel`) in the disk cache, and gives each when it is there. The longest come first:
        all wait for the last. If the iterator is closed, those that have begun are finished."""
        wanted, answers = SimpleQueue(), SimpleQueue()
        for kernel in sorted(kernels, key=lambda kernel: length(kernel.function), reverse=True):
            wanted.put(kernel)
        with ThreadPoolExecutor(len(self.processes)) as pool:
            try:
                for worker in self.processes:
                    pool.submit(_feed, worker, wanted, cc, answers)
                n_feeding = len(self.processes)
                while n_feeding:
                    kernel = answers.get()
                    if kernel is None:
                        n_feeding -= 1
                    else:
                        yield kernel
            finally:
                while not wanted.empty():  # closed, or an interrupt: no further kernels
                    wanted.get()

    def close(self) -> None:
        """Waits until they have ended."""
        for worker in self.processes:
            with suppress(OSError):  # it has ended, and not read all
                worker.stdin.close()
        for worker in self.processes:
            worker.stdout.close()
            worker.wait()


def length(function: FunctionType) -> int:
    """Bytes of byte code of a function and all that it may call, about as which the time to compile it grows."""
    found: set[FunctionType] = set()
    wait = [function]
    while wait:
        each = wait.pop()
        each = getattr(each, "py_func", each)  # a device function's
        if isinstance(each, FunctionType) and each not in found:
            found.add(each)
            wait += [cell.cell_contents for cell in each.__closure__ or ()]
            wait += [each.__globals__.get(name) for name in each.__code__.co_names]
    return sum(len(each.__code__.co_code) for each in found)


def _feed(worker: subprocess.Popen, wanted: SimpleQueue, cc: tuple[int, int], answers: SimpleQueue) -> None:
    """Hands kernels to a worker until there is none left, or the worker has ended. Answers with those that are kept, then None.
    """
    try:
        while True:
            kernel = wanted.get_nowait()
            pickle.dump((*kernel.source, cc), worker.stdin)
            worker.stdin.flush()
            answer = worker.stdout.readline()
            if not answer:
                return
            if answer == KEPT:
                answers.put(kernel)
    except (Empty, OSError):
        pass
    finally:
        answers.put(None)


def work() -> None:
    """A worker. It ends at once: while it took numba down, what it has compiled would wait to be run."""
    try:
        _work()
    finally:
        os._exit(0)


def _work() -> None:
    gc.disable()  # it would take a fifth of the time
    sys.modules["scipy"] = None  # type: ignore[assignment]  which numba imports where it is there, a fifth of a worker's start
    from .launch import cached_ptx, nvvm_release
    with suppress(Exception):  # said by the process that wants a kernel
        nvvm_release()  # by which everything is imported that compiling needs
    while True:
        try:
            module, factory, args, cc = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer = KEPT
        try:
            cached_ptx(getattr(import_module(module), factory)(*args), cc)
        except Exception:  # said likewise
            answer = b"\n"
        if compiled.unkept:  # nobody gets what is compiled here
            return
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
