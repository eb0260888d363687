"""Threads, blocks and clusters of the simulator: who runs, who waits for whom, and what the lanes of a warp do together."""
import sys
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from greenlet import getcurrent, greenlet
from numba import cuda
from numba.cuda.core import config

from .instructions import as_int, i32
from .memory import load, store, unwritten

FOLDER = Path(__file__).parent


class Dim3(NamedTuple):
    x: int
    y: int = 1
    z: int = 1


class _Warp:
    def __init__(self, threads, late):
        self.threads, self.operands, self.results, self.n_arrived = threads, [None] * len(threads), None, 0
        self.late = late  # whether its products are done when it waits for them, not at once


class _Thread(greenlet):
    """A thread of a block. When it must wait, it switches to the block's scheduler, its parent."""

    def __init__(self, block, function, index, number):
        super().__init__(function)
        self.block, self.index, self.lane = block, index, number % 32
        self.copies, self.groups = [], []  # copies under way: behind the last group, and the groups
        self.products = []  # of its warpgroup, under way
        self.phases = self.waited = 0  # of the cluster's barrier: how often it has arrived, and waited


class _Block:
    """The threads of a block, and what they share."""

    def __init__(self, launch, index, random):
        self.index, self.dim, self.grid = index, launch.block, launch.grid
        self.arrays, self.dynamic = {}, unwritten(launch.shared, np.uint8)
        self.barriers, self.waiting = {}, []  # those of `mbarrier` by their words; the threads at syncthreads
        function = launch.kernel.function
        self.threads = [_Thread(self, function, Dim3(x, y, z), x + self.dim.x * (y + self.dim.y * z))
                        for z in range(self.dim.z) for y in range(self.dim.y) for x in range(self.dim.x)]
        for first in range(0, len(self.threads), 32):
            warp = _Warp(self.threads[first:first + 32], random.getrandbits(1))
            for thread in warp.threads:
                thread.warp = warp
        self.n_live, self.begun, self.random = len(self.threads), False, random

    @property
    def ready(self) -> deque:
        return self.cluster.ready

    def end_barrier(self) -> None:
        if self.waiting and len(self.waiting) == self.n_live:
            self.ready.extend(reversed(self.waiting))  # the last one to come goes first
            self.waiting.clear()


class Cluster:
    """Blocks that run at the same time; of most kernels one."""

    def __init__(self, launch, indices, random):
        self.blocks = [_Block(launch, index, random) for index in indices]
        for block in self.blocks:
            block.cluster = self
        self.threads = [thread for block in self.blocks for thread in block.threads]
        self.n_live = len(self.threads)
        self.ready = deque(random.sample(self.threads, self.n_live))
        self.phase, self.waiting = 0, []  # of the barrier of all threads: how many phases have ended; the threads that wait

    def run(self, args) -> None:
        for thread in self.threads:
            thread.parent = getcurrent()
        while self.ready:
            thread = self.ready.popleft()
            block = thread.block
            block.begun = True
            try:
                thread.switch(*(() if thread else args))
            except Exception as error:
                error.add_note(f"in thread {tuple(thread.index)} of block {tuple(block.index)}")
                raise
            if thread.dead:
                block.n_live -= 1
                self.n_live -= 1
                block.end_barrier()
                self.end_phase()
        if self.n_live:
            places = {}
            for thread in self.threads:
                if not thread.dead:
                    places.setdefault(_place(thread), []).append(tuple(thread.index))
            waiting = "; ".join(f"{len(t)} at {place}, of which {t[0]} is one" for place, t in places.items())
            raise RuntimeError(f"threads wait for ever: {waiting}")

    def end_phase(self) -> None:
        """Where all threads that live have arrived."""
        if self.n_live and all(thread.dead or thread.phases > self.phase for thread in self.threads):
            self.phase += 1
            self.ready.extend(reversed(self.waiting))
            self.waiting.clear()


def _place(thread) -> str:
    """Where a thread waits: its innermost frame outside the simulator."""
    frame = thread.gr_frame
    while Path(frame.f_code.co_filename).parent == FOLDER:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Shared:
    """Arrays of the running block, one a call in the source. Those of size 0 are all of its dynamic shared memory."""

    def array(self, shape, dtype):
        caller, block = sys._getframe(1), getcurrent().block
        if shape == 0:
            return block.dynamic.view(unwritten(0, dtype).dtype)
        return block.arrays.setdefault((caller.f_code, caller.f_lasti, shape, str(dtype)), unwritten(shape, dtype))


class _Local:
    def array(self, shape, dtype):
        return unwritten(shape, dtype)


class _Module(ModuleType):
    """`numba.cuda` as kernels see it: of the thread that runs."""
    threadIdx = property(lambda module: getcurrent().index)
    blockIdx = property(lambda module: getcurrent().block.index)
    blockDim = property(lambda module: getcurrent().block.dim)
    gridDim = property(lambda module: getcurrent().block.grid)


def _syncthreads():
    thread = getcurrent()
    thread.block.waiting.append(thread)
    thread.block.end_barrier()
    thread.parent.switch()


if config.ENABLE_CUDASIM:
    cuda.__class__ = _Module
    cuda.shared, cuda.local, cuda.syncthreads = _Shared(), _Local(), _syncthreads


# What the lanes of a warp do together: each leaves its operands, the last one to come computes for all

def of_all_lanes(compute, operands):
    """compute(the operands of the 32 lanes) -> 32 results, of which the caller gets its own."""
    thread = getcurrent()
    warp = thread.warp
    warp.operands[thread.lane] = compute, operands
    warp.n_arrived += 1
    if warp.n_arrived < 32:
        thread.parent.switch()
    else:
        if any(c is not compute for c, _ in warp.operands):
            raise RuntimeError("the lanes of a warp are at different instructions")
        warp.n_arrived, warp.results = 0, compute([o for _, o in warp.operands])
        thread.block.ready.extendleft(other for other in warp.threads if other is not thread)  # the warp goes on before others do
    return warp.results[thread.lane]


def blocks_of_grid():
    return i32(getcurrent().block.grid.x)


def _nothing(lanes):
    return lanes


def syncwarp():
    of_all_lanes(_nothing, None)


def _redux(choose):
    def reduced(lanes):
        return [choose(lanes)] * 32
    return lambda value: of_all_lanes(reduced, as_int(i32)(value))


redux_max, redux_min = _redux(max), _redux(min)


def _shuffled(lanes):
    return [lanes[source & 31][0] for _, source in lanes]


def shuffle(value, source):
    return of_all_lanes(_shuffled, (as_int(i32)(value), source))


def _balloted(lanes):
    return [as_int(i32)(sum(1 << lane for lane, other in enumerate(lanes) if other))] * 32


def ballot(value):
    return of_all_lanes(_balloted, as_int(i32)(value))


def _matched(lanes):
    return [as_int(i32)(sum(1 << lane for lane, other in enumerate(lanes) if other == own)) for own in lanes]


def match(value):
    return of_all_lanes(_matched, as_int(i32)(value))


# What devices tell each other

elsewhere: list[greenlet] = []  # what other devices are at


def together(launches) -> None:
    """Launches of several devices, which take turns where they wait for each other's words."""
    elsewhere[:] = map(greenlet, launches)
    while elsewhere:
        elsewhere.pop(0).switch()


def _of_others(name):
    """A load of what another device, or another thread, may still have to write: they take turns."""
    read = load(name, 1)

    def read_later(pointer, index):
        thread = getcurrent()
        turn = thread.block.random.getrandbits(2)
        if turn == 1 and elsewhere:
            elsewhere.append(thread)
            elsewhere.pop(0).switch()
        elif turn == 2:
            thread.block.ready.append(thread)
            thread.parent.switch()
        return read(pointer, index)
    return read_later


ld_acquire, ld_relaxed = _of_others("ld_acquire"), _of_others("ld_relaxed")
ld_settled = load("ld_settled", 1)
st_release, st_relaxed = store("st_release", 1), store("st_relaxed", 1)
