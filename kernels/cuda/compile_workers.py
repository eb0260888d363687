"""Compiles many kernels in processes of their own: numba compiles one at a time in each.

A worker reads (module, factory, arguments, compute capability) pickled from its standard input, leaves the kernel's PTX in the disk cache and answers with a
line. What workers leave undone, for whatever reason, is compiled by the process that wants it, which says what is wrong.
"""
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from queue import Empty, SimpleQueue

FEWEST, MOST_WORKERS = 4, 8  # kernels that are worth the workers' start, about a second; a worker takes 400 MB


def n_workers(n_kernels: int) -> int:
    """Worth starting for so many kernels: as many as there are cores for this process, none for a few kernels or a single core."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(n_cores, n_kernels, MOST_WORKERS) if n_kernels >= FEWEST and n_cores > 1 and sys.executable else 0


def compile_all(kernels: list, cc: tuple[int, int], n: int) -> None:
    """Leaves the PTX of kernels (`launch.Kernel`) in the disk cache, by n workers that take one after the other."""
    wanted = SimpleQueue()
    for kernel in kernels:
        wanted.put((*kernel.source, cc))
    with ThreadPoolExecutor(n) as pool:
        for _ in range(n):
            pool.submit(_feed, wanted)


def _feed(wanted: SimpleQueue) -> None:
    """Hands kernels to one worker until there is none left, or the worker has ended."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", f"from {__name__} import work; work()"]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as worker:
        try:
            while True:
                pickle.dump(wanted.get_nowait(), worker.stdin)
                worker.stdin.flush()
                if not worker.stdout.readline():
                    return
        except (Empty, BrokenPipeError):
            worker.stdin.close()


def work() -> None:
    """A worker."""
    from .launch import cached_ptx
    while True:
        try:
            module, factory, args, cc = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        cached_ptx(getattr(import_module(module), factory)(*args), cc)
        print(flush=True)
