"""Compiles many kernels in processes of their own: numba compiles one at a time in each.

A worker reads (module, factory, arguments, compute capability) pickled from its standard input, leaves the kernel's PTX in the
disk cache and answers with a line, KEPT if the PTX is there. What workers leave undone, for whatever reason, is compiled by the
process that wants it, which says what is wrong.
"""
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue

from ..disk_cache import compiled

KEPT = b"kept\n"
FEWEST, MOST_WORKERS = 4, 8  # kernels that are worth the workers' start, about a second; a worker takes 400 MB


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


def compile_all(kernels: list, cc: tuple[int, int], n: int, done: Callable[[], None] = lambda: None) -> None:
    """Leaves the PTX of kernels (`launch.Kernel`) in the disk cache, by n workers that take one after the other. done: called
    for each kernel whose PTX is there."""
    wanted = SimpleQueue()
    for kernel in kernels:
        wanted.put((*kernel.source, cc))
    with ThreadPoolExecutor(n) as pool:
        try:
            wait([pool.submit(_feed, wanted, done) for _ in range(n)])
        except BaseException:  # an interrupt: no further kernels
            while not wanted.empty():
                wanted.get()
            raise


def _feed(wanted: SimpleQueue, done: Callable[[], None]) -> None:
    """Hands kernels to one worker until there is none left, or the worker has ended."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # -P: the current folder is no place for modules
    command = [sys.executable, "-P", "-c", f"from {__name__} import work; work()"]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as worker:
        try:
            while True:
                pickle.dump(wanted.get_nowait(), worker.stdin)
                worker.stdin.flush()
                answer = worker.stdout.readline()
                if not answer:
                    return
                if answer == KEPT:
                    done()
        except (Empty, OSError):
            pass


def work() -> None:
    """A worker."""
    from .launch import cached_ptx
    while True:
        try:
            module, factory, args, cc = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer = KEPT
        try:
            cached_ptx(getattr(import_module(module), factory)(*args), cc)
        except Exception:  # said by the process that wants the kernel
            answer = b"\n"
        if compiled.unkept:  # nobody gets what is compiled here
            return
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
