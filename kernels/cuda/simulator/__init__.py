"""Kernels on the host: the same functions, a greenlet a CUDA thread, with ptx's instructions in Python.

Needs NUMBA_ENABLE_CUDASIM=1 before numba is imported. `Target` takes the place of `launch.Target`; its addresses are arrays:

    target = Target()
    y = np.empty(33, np.float32)
    scale(target, target.address(x), target.address(y), 33, 0.5)(None)

A thread runs on until it must wait for others, blocks and threads in an order of chance that is the same each time; copies to
shared memory arrive at once or as late as they may, and shared and local arrays hold ones in all bits until something else is
written. So it shows wrong results, barriers and waits that are missing or that not all come to, values that nothing wrote,
indices outside an array, misaligned wide accesses, floats of a wrong type. It does not show every race, nor the difference
between 64-bit and wider integers. About half a million scalar operations a second: sizes must be tiny.
"""
from dataclasses import dataclass
from random import Random
from zlib import crc32

import numpy as np
from numba import types
from numba.cuda.core import config

from ..launch import Kernel, arguments
# What ptx, mbarrier, cluster and wgmma take from here
from .copies import (barrier_arrive, barrier_arrive_behind_copies, barrier_begin, barrier_bring, barrier_bring_to_both,  # noqa: F401
                     barrier_end, barrier_expect, barrier_wait, cluster_address, cluster_arrive, cluster_arrive_at, cluster_rank,
                     cluster_send, cluster_send1, cluster_send2, cluster_send4, cluster_wait, copies_commit, copies_wait,
                     copies_wait_but, copy)
from .instructions import afresh, as_int, checked  # noqa: F401
from .memory import Address, Pointer, check_elements, load, moved, pointer_at, store  # noqa: F401
from .products import (group_product, group_products, ldmatrix4, limb_sums, matrix_product, place, product_of_tiles,  # noqa: F401
                       products_wait_but, unswizzled_product)
from .threads import (Cluster, Dim3, ballot, blocks_of_grid, ld_acquire, ld_relaxed, ld_settled, match, redux_max,  # noqa: F401
                      redux_min, shuffle, st_relaxed, st_release, syncwarp, together)

ARCHITECTURE = 900  # that kernels find themselves on; tests change it


@dataclass(frozen=True)
class Launch:
    kernel: Kernel
    grid: Dim3
    block: Dim3
    args: tuple
    shared: int

    def __call__(self, stream=None) -> None:
        random = Random(crc32(self.name.encode()))
        blocks = [Dim3(x, y, z) for z in range(self.grid.z) for y in range(self.grid.y) for x in range(self.grid.x)]
        n = self.kernel.n_cluster
        clusters = [blocks[first:first + n] for first in range(0, len(blocks), n)]
        for indices in random.sample(clusters, len(clusters)):
            Cluster(self, indices, random).run(self.args)

    @property
    def name(self):
        return self.kernel.name


class Target:
    """`launch.Target` with the host for a device."""

    def __init__(self):
        if not config.ENABLE_CUDASIM:
            raise RuntimeError("the simulator needs NUMBA_ENABLE_CUDASIM=1 in the environment before numba is imported")
        self.cc, self.warpgroups, self.halves = (8, 0), False, False
        self.n_multiprocessors = 4
        self.shared_limit = 99 << 10  # what any GPU of compute capability 8.0 or later has

    def address(self, array: np.ndarray) -> Address:
        """The address of a C-contiguous array, which kernels then read and write in place."""
        if not array.flags.c_contiguous:
            raise ValueError("an array must be C-contiguous to have an address")
        return Address(array.reshape(-1).view(np.uint8))

    def launch(self, kernel: Kernel, grid, block, args: tuple, shared: int = 0) -> Launch:
        n_threads = int(np.prod(block))
        if n_threads > kernel.n_threads:
            raise ValueError(f"{kernel.name}: blocks of {n_threads} threads, compiled for {kernel.n_threads}")
        if np.atleast_1d(grid)[0] % kernel.n_cluster:
            raise ValueError(f"{kernel.name}: {grid} blocks, allowed: whole clusters of {kernel.n_cluster}")
        converted = tuple(Pointer(a, np.dtype(t.dtype.name)) if isinstance(t, types.CPointer)
                          else a if t == types.float32 else int(a)  # integers of a kernel grow to 64 bits, as Python's do
                          for t, a in zip(kernel.parameters, arguments(kernel, args)))
        return Launch(kernel, Dim3(*np.atleast_1d(grid).tolist()), Dim3(*np.atleast_1d(block).tolist()), converted, shared)
