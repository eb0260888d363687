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
import sys
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from types import ModuleType
from typing import NamedTuple
from zlib import crc32

import numpy as np
from greenlet import getcurrent, greenlet
from numba import cuda, types
from numba.cuda.core import config

from .. import arith, float16
from ..compile import jit
from .launch import Kernel, arguments

f32, f64, i32, u32, i64 = np.float32, np.float64, np.int32, np.uint32, np.int64


# Instructions: compiled for the CPU, called on numpy scalars

@jit
def f2i(x):
    if x != x:
        return i32(0)
    x = arith.rint(x)
    return i32(0x7fffffff) if x >= f32(2.0**31) else i32(-0x80000000) if x < f32(-2.0**31) else arith.f2i(x)


@jit
def dp4a(a, b, c):
    for s in range(0, 32, 8):
        c = c + i32(np.int8(a >> s)) * i32(np.int8(b >> s))
    return i32(c)


@jit
def dot4(a, b, c):
    for s in range(0, 32, 8):
        c = c + i32(a >> u32(s) & u32(255)) * i32(b >> u32(s) & u32(255))
    return i32(c)


@jit
def dot2(a, b, c):
    low, high = i32(np.int8(b & u32(255))), i32(np.int8(b >> u32(8) & u32(255)))
    return u32(i32(c) + i32(a & u32(0xffff)) * low + i32(a >> u32(16)) * high)


@jit
def mad(a, b, c):
    return i32(a * b + c)


@jit
def mad64(a, b, c):
    return i64(a) * i64(b) + c


@jit
def implied(a, b, c):
    return u32((~a | b) & c | a & ~c)


@jit
def prmt(a, b, c):
    both = np.uint64(b) << np.uint64(32) | np.uint64(a)
    result = np.uint64(0)
    for i in range(4):
        s = c >> u32(4 * i)
        byte = both >> np.uint64(8 * (s & u32(7))) & np.uint64(255)
        if s & u32(8):  # the byte's sign, eight times
            byte = np.uint64(255) if byte & np.uint64(128) else np.uint64(0)
        result |= byte << np.uint64(8 * i)
    return u32(result)


@jit
def distances4(a, b):
    result = u32(0)
    for i in range(4):
        x, y = a >> u32(8 * i) & u32(255), b >> u32(8 * i) & u32(255)
        result = u32(result | u32(x - y if x > y else y - x) << u32(8 * i))
    return result


@jit
def rotate(w, s):
    s = u32(s & i32(31))
    return u32(w >> s | u32(np.uint64(w) << np.uint64(32) >> np.uint64(s) & np.uint64(0xffffffff)))


@jit
def shr(w, s):
    return u32(w >> s) if s < u32(32) else u32(0)


@jit
def popc(w):
    n = 0
    for s in range(32):
        n += (w >> s) & 1
    return i32(n)


@jit
def f16_high_to_f32(w):
    return float16.f16_to_f32(u32(w >> u32(16)))


@jit
def fmax(a, b):
    if a != a or b != b:
        return b if a != a else a
    return arith.as_f32(i32(arith.as_i32(a) & arith.as_i32(b))) if a == b else a if a > b else b


@jit
def fmax_nan(a, b):
    return a if a != a else b if b != b else fmax(a, b)


@jit
def amax2(a, b):
    b = u32(b & u32(0x7fff7fff))
    return u32(max(a & u32(0xffff), b & u32(0xffff)) | max(a & u32(0xffff0000), b & u32(0xffff0000)))


def _halves(*words):
    """The two float16 of each word, as float64, in which sums of them and of their products are exact, or so nearly that float16
    is rounded to as if they were."""
    return (np.array([w], u32).view(np.float16).astype(np.float64) for w in words)


def add2(a, b):
    a, b = _halves(a, b)
    return (a + b).astype(np.float16).view(u32)[0]


def fma2(a, b, c):
    a, b, c = _halves(a, b, c)
    return (a * b + c).astype(np.float16).view(u32)[0]


def halves(a, b):
    return np.array([a, b], f32).astype(np.float16).view(u32)[0]


def afresh(x):
    return x


def d2i(x):
    return i32(np.clip(np.rint(x), -2.0**31, 2.0**31 - 1))


def as_f64(x):
    return np.int64(x).view(f64)


def _called(name, n_operands, module=arith):
    """The function of that name, an intrinsic as a rule, as one that Python calls."""
    function = getattr(module, name)
    # numba compiles functions of Python, not an intrinsic by itself
    call = {1: lambda a: function(a), 2: lambda a, b: function(a, b), 3: lambda a, b, c: function(a, b, c)}  # noqa: PLW0108
    return jit(call[n_operands], key=name)


ARCHITECTURE = 900  # that kernels find themselves on; tests change it

_MEANING = {
    **{name: _called(name, 2) for name in ("add", "sub", "mul", "div")},
    **{name: _called(name, 1) for name in ("sqrt", "rint", "i2f", "l2f", "as_f32", "as_i32")},
    **{name: getattr(arith, name) for name in arith.Functions._fields},
    **{name: _called(name, 1, float16) for name in ("f16_to_f32", "f32_to_f16")},
    "fma": _called("fma", 3), "as_u32": _called("as_i32", 1), "f16_high_to_f32": f16_high_to_f32,
    "f2i": f2i, "dp4a": dp4a, "dot4": dot4, "dot2": dot2, "mad": mad, "mad64": mad64, "implied": implied, "prmt": prmt,
    "distances4": distances4, "amax2": amax2, "fmax": fmax, "fmax_nan": fmax_nan, "add2": add2, "fma2": fma2, "halves": halves,
    "rotate": rotate, "shr": shr, "popc": popc,
    "add64": np.add, "sub64": np.subtract, "mul64": np.multiply, "div64": np.divide, "rint64": np.rint, "f2d": f64, "d2i": d2i,
    "as_f64": as_f64,
}


def _as_float(dtype):
    def same(x):
        if type(x) is not dtype:
            raise TypeError(f"expected {dtype.__name__}, got {type(x).__name__} {x!r}")
        return x
    return same


def _as_int(dtype):
    modulus, half = 1 << 8 * dtype().itemsize, np.iinfo(dtype).max + 1 if np.iinfo(dtype).min else 0

    def convert(x):
        if type(x) is dtype:
            return x
        if not isinstance(x, (int, np.integer)):
            raise TypeError(f"expected an integer, got {type(x).__name__} {x!r}")
        return dtype((int(x) + half) % modulus - half)
    return convert


_OPERAND = {"f": _as_float(f32), "d": _as_float(f64), "r": _as_int(i32), "u": _as_int(u32), "l": _as_int(np.int64)}
_RESULT = {**_OPERAND, "f": f32, "d": f64}  # compiled functions return Python's float and int


def checked(name, result, operands):
    """The instruction `name` as a Python function that takes only operands of the stated registers."""
    function, result, operands = _MEANING[name], _RESULT[result], [_OPERAND[o] for o in operands]
    if len(operands) == 1:
        p, = operands
        return lambda a: result(function(p(a)))
    if len(operands) == 2:
        p, q = operands
        return lambda a, b: result(function(p(a), q(b)))
    p, q, r = operands
    return lambda a, b, c: result(function(p(a), q(b), r(c)))


# Memory

@dataclass(frozen=True)
class Address:
    """An address in a host array; + moves it by bytes, % tells how it is aligned."""
    memory: np.ndarray  # uint8
    offset: int = 0

    def __add__(self, n_bytes: int) -> "Address":
        return Address(self.memory, self.offset + n_bytes)

    def __mod__(self, n_bytes: int) -> int:
        return (self.memory.ctypes.data + self.offset) % n_bytes


class Pointer:
    """What a kernel gets for an address: the rest of its array as elements of one type."""

    def __init__(self, address: Address, dtype: np.dtype):
        n = (address.memory.size - address.offset) // dtype.itemsize
        self.elements = np.frombuffer(address.memory, dtype, n, address.offset)
        if address.offset % dtype.itemsize:
            raise ValueError(f"byte {address.offset} is no multiple of {dtype.itemsize}")
        self.address, self.memory = address.memory.ctypes.data + address.offset, address.memory

    def slice(self, name, index, width):
        index = int(index)
        if not 0 <= index <= len(self.elements) - width:
            raise IndexError(f"{name}: elements {index}..{index + width - 1} of {len(self.elements)} ({self.elements.dtype})")
        n_bytes = width * self.elements.itemsize
        if (self.address + index * self.elements.itemsize) % n_bytes:
            raise ValueError(f"{name}: element {index} does not lie on {n_bytes} bytes")
        return slice(index, index + width)


def pointer_at(pointer, address):
    """Simulated addresses are those of the host's memory: one that a kernel reads must lie in the array that `pointer` points
    into."""
    first = address - pointer.memory.ctypes.data
    if not 0 <= first < pointer.memory.nbytes:
        raise IndexError(f"pointer_at: byte {first} of {pointer.memory.nbytes}")
    return Pointer(Address(pointer.memory, int(first)), pointer.elements.dtype)


def moved(pointer, n):
    return pointer_at(pointer, pointer.address + int(n))


def _widened(value):
    return value if value.itemsize >= 4 else i32(value)


def load(name, width):
    if width == 1:
        return lambda pointer, index: _widened(pointer.elements[pointer.slice(name, index, 1)][0])
    return lambda pointer, index: tuple(pointer.elements[pointer.slice(name, index, width)])


def store(name, width):
    def put(pointer, index, *values):
        dtype = pointer.elements.dtype
        convert = (_as_float if dtype.kind == "f" else _as_int)(dtype.type)
        pointer.elements[pointer.slice(name, index, width)] = [convert(v) for v in values]
    return put


def check_elements(name, array, index, width):
    """Of an access to a shared array: elements that it has, which begin on a multiple of their number."""
    if not 0 <= index <= len(array) - width or index % width:
        raise IndexError(f"{name}: elements {index}..{index + width - 1} of {len(array)}")


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


# Threads

class _Dim3(NamedTuple):
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
        self.arrays, self.dynamic = {}, _unwritten(launch.shared, np.uint8)
        self.barriers, self.waiting = {}, []  # those of `mbarrier` by their words; the threads at syncthreads
        function = launch.kernel.function
        self.threads = [_Thread(self, function, _Dim3(x, y, z), x + self.dim.x * (y + self.dim.y * z))
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


class _Cluster:
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
    """Where a thread waits: its innermost frame outside this file."""
    frame = thread.gr_frame
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _unwritten(shape, dtype):
    dtype = np.dtype(getattr(dtype, "name", dtype))  # numba's types have names
    return np.full(int(np.prod(shape)) * dtype.itemsize, 255, np.uint8).view(dtype).reshape(shape)


class _Shared:
    """Arrays of the running block, one a call in the source. Those of size 0 are all of its dynamic shared memory."""

    def array(self, shape, dtype):
        caller, block = sys._getframe(1), getcurrent().block
        if shape == 0:
            return block.dynamic.view(_unwritten(0, dtype).dtype)
        return block.arrays.setdefault((caller.f_code, caller.f_lasti, shape, str(dtype)), _unwritten(shape, dtype))


class _Local:
    def array(self, shape, dtype):
        return _unwritten(shape, dtype)


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

def _together(compute, operands):
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


def _nothing(lanes):
    return lanes


def syncwarp():
    _together(_nothing, None)


def _redux(choose):
    def reduced(lanes):
        return [choose(lanes)] * 32
    return lambda value: _together(reduced, _as_int(i32)(value))


redux_max, redux_min = _redux(max), _redux(min)


def _shuffled(lanes):
    return [lanes[source & 31][0] for _, source in lanes]


def shuffle(value, source):
    return _together(_shuffled, (_as_int(i32)(value), source))


def _balloted(lanes):
    return [_as_int(i32)(sum(1 << lane for lane, other in enumerate(lanes) if other))] * 32


def ballot(value):
    return _together(_balloted, _as_int(i32)(value))


def _matched(lanes):
    return [_as_int(i32)(sum(1 << lane for lane, other in enumerate(lanes) if other == own)) for own in lanes]


def match(value):
    return _together(_matched, _as_int(i32)(value))


class _Phases:
    """A barrier of `mbarrier`: one phase after the other, each of n arrivals and of the bytes that are expected."""

    def __init__(self, n):
        self.n, self.n_arrived, self.phase, self.waiting, self.copies = n, 0, 0, [], []
        self.n_bytes = 0  # that bulk copies, or other blocks, have still to bring


def barrier_begin(array, index, n):
    check_elements("mbarrier", array, index, 2)
    barriers = getcurrent().block.barriers
    if int(index) in barriers:
        raise RuntimeError(f"mbarrier: word {index} holds one that has not ended")
    barriers[int(index)] = _Phases(int(n))


def barrier_end(array, index):
    barrier = getcurrent().block.barriers.pop(int(index))
    if barrier.n_arrived or barrier.n_bytes:
        raise RuntimeError(f"mbarrier: word {index} ends with {barrier.n_arrived} arrivals of {barrier.n}, {barrier.n_bytes} "
                           "bytes to come")


def barrier_arrive(array, index):
    _arrive(getcurrent().block.barriers[int(index)])


def _arrive(barrier):
    """By chance others, who may have waited for that, go on before the thread does."""
    barrier.n_arrived += 1
    _end_phase(barrier)
    thread = getcurrent()
    if thread.block.random.getrandbits(1):
        thread.block.ready.append(thread)
        thread.parent.switch()


def barrier_expect(array, index, n_bytes):
    getcurrent().block.barriers[int(index)].n_bytes += int(n_bytes)
    barrier_arrive(array, index)


def barrier_bring(array, index, pointer, first, n_words, barrier_index):
    """A bulk copy is done at once, or when the phase ends."""
    block = getcurrent().block
    _receive(block, block.barriers[int(barrier_index)], *_brought(array, index, pointer, first, int(n_words)))


def barrier_bring_to_both(array, index, pointer, first, n_words, barrier_index):
    to, value = _brought(array, index, pointer, first, int(n_words))
    for number in range(2):
        block, barrier = _far_barrier(cluster_address(array, barrier_index, number))
        _receive(block, barrier, block.dynamic.view(array.dtype)[index:index + len(to)], value)


def _brought(array, index, pointer, first, n):
    """(place, what it takes) of a bulk copy."""
    if index % 4 or n % 4 or not 0 <= index <= len(array) - n:
        raise IndexError(f"bring: elements {index}..{index + n - 1} of {len(array)}")
    pointer.slice("bring", first, 4)
    to, value = array[index:index + n], pointer.elements[int(first):int(first) + n].view(array.dtype)
    if len(value) != n:
        raise IndexError(f"bring: elements {first}..{first + n - 1} of {len(pointer.elements)}")
    return to, value


def _receive(block, barrier, to, value):
    """What comes by itself: at once, or when the phase ends."""
    if block.random.getrandbits(1):
        to[:] = value
    else:
        to[:] = _unwritten(len(to), to.dtype)
        barrier.copies.append((to, value))
    barrier.n_bytes -= to.nbytes
    _end_phase(barrier)


def _end_phase(barrier):
    """Where all have arrived and all bytes are there."""
    block = getcurrent().block
    if barrier.n_arrived == barrier.n and not barrier.n_bytes:
        _done(barrier.copies)
        barrier.phase, barrier.n_arrived = barrier.phase + 1, 0
        block.ready.extend(barrier.waiting)
        barrier.waiting.clear()


def barrier_arrive_behind_copies(array, index):
    """The phase ends with the thread's copies, which are done then."""
    copies_commit()
    thread = getcurrent()
    for group in thread.groups:
        thread.block.barriers[int(index)].copies += group
    thread.groups = []
    barrier_arrive(array, index)


def barrier_wait(array, index, parity):
    thread = getcurrent()
    barrier = thread.block.barriers[int(index)]
    while barrier.phase & 1 == parity:
        barrier.waiting.append(thread)
        thread.parent.switch()


# Clusters

def cluster_rank():
    block = getcurrent().block
    return i32(block.cluster.blocks.index(block))


def cluster_arrive():
    thread = getcurrent()
    cluster = thread.block.cluster
    if thread.phases > thread.waited:
        raise RuntimeError("the cluster's barrier: a thread arrives that has not waited")
    thread.phases += 1
    cluster.end_phase()


def cluster_wait():
    thread = getcurrent()
    cluster = thread.block.cluster
    if thread.phases == thread.waited:
        raise RuntimeError("the cluster's barrier: a thread waits that has not arrived")
    while cluster.phase < thread.phases:
        cluster.waiting.append(thread)
        thread.parent.switch()
    thread.waited = thread.phases


def cluster_address(array, index, number):
    """array: all of the dynamic shared memory, as words. Of an address the upper byte is the block, the others a byte there."""
    dynamic = getcurrent().block.dynamic
    if array.base is None or array.nbytes != dynamic.nbytes:
        raise TypeError("address: the array must be the dynamic shared memory")
    return i32(int(number) << 24 | 4 * int(index))


def _far(address):
    """(block, word) of an address."""
    return getcurrent().block.cluster.blocks[int(address) >> 24], (int(address) & 0xffffff) // 4


def _far_barrier(address):
    """(block, barrier) of an address."""
    (block, at), number = _far(address), int(address) >> 24
    if not block.begun or not block.n_live:
        raise RuntimeError(f"block {number} of the cluster has {'ended' if block.begun else 'not begun'}")
    if at not in block.barriers:
        raise RuntimeError(f"block {number} of the cluster has no mbarrier at word {at}")
    return block, block.barriers[at]


def _send(n):
    def send(address, barrier, *words):
        (block, word), (same, barrier) = _far(address), _far_barrier(barrier)
        if same is not block:
            raise RuntimeError("send: the mbarrier is in another block")
        array = block.dynamic.view(u32)
        check_elements("send", array, word, n)
        _receive(block, barrier, array[word:word + n], np.array([_as_int(u32)(w) for w in words], u32))
    return send


cluster_send1, cluster_send2, cluster_send4 = map(_send, (1, 2, 4))


def cluster_send(array, index, number, word, barrier):
    cluster_send1(cluster_address(array, index, number), cluster_address(array, barrier, number), word)


def cluster_arrive_at(barrier):
    _arrive(_far_barrier(barrier)[1])


def _words(dtype, rows):
    return np.array(rows, dtype=np.int64).astype(dtype)


def _multiply(n_a, n_b, a_type):
    def compute(lanes):
        operands = _words(np.int32, lanes).reshape(8, 4, n_a + n_b + 4)            # [row or column][word in 16 bytes][register]
        a = operands[..., :n_a].reshape(8, 4, n_b, 2).transpose(3, 0, 2, 1).copy()  # [rows 8..15][row][16 columns][word]
        b = operands[..., n_a:n_a + n_b].transpose(0, 2, 1).copy()                  # [column of B][16 rows of B][word]
        c = operands[..., n_a + n_b:].reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
        a, b = a.view(a_type).reshape(16, -1).astype(np.int32), b.view(np.int8).reshape(8, -1).astype(np.int32)
        result = (c + a @ b.T).reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)
        return [tuple(r) for r in result]
    return compute


def _units(x):
    """Of float16 [i, j], as float64: of each row the largest power of two of which all are multiples."""
    bits = np.where(np.isfinite(x), np.abs(x), 0) * 2**24
    bits = bits.astype(np.int64)
    return np.where(bits > 0, bits & -bits, 1 << 40).min(axis=1) / 2**24


def _multiply_halves(a, b, c):
    """C + A B of float16 [rows, 16] and [columns, 16]: the sum as a float32, which is what tensor cores give where it is exact.
    NaN where it is more than 2^24 units of its products: nobody says what they give then."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    result = c + a @ b.T
    return np.where(abs(result) > 2**24 * _units(a)[:, None] * _units(b), np.nan, result).astype(f32)


def _multiply_bytes(a, b, c):
    """C + A B of int8 or uint8 [rows, 32] and int8 [columns, 32], int32."""
    return (c + a.astype(np.float64) @ b.astype(np.float64).T).astype(np.int64).astype(np.int32)


def matrix_product(n_a, n_b, a_type):
    compute, convert = _multiply(n_a, n_b, {"s8": np.int8, "u8": np.uint8}[a_type]), _as_int(i32)
    return lambda *operands: _together(compute, [convert(o) for o in operands])


def _four_matrices(lanes):
    rows = _words(np.int32, [array[index:index + 4].view(np.int32) for array, index in lanes])  # [8 m + r][word]
    return [tuple(r) for r in rows.reshape(4, 8, 4).transpose(1, 2, 0).reshape(32, 4)]


def ldmatrix4(array, index):
    check_elements("ldmatrix4", array, index, 4)
    return _together(_four_matrices, (array, index))


ADDRESS = 0x3fff  # as of `wgmma`


def place(array, index):
    """As of `wgmma`, with the number of the block in its cluster above an address."""
    if index % 4:
        raise RuntimeError(f"place: the word is {index}, allowed: multiples of 4")
    return i32(int(cluster_rank()) << 20 | int(index) // 4)


@lru_cache(None)
def _words_in_atoms(piece, n):
    """Of n columns in atoms, where the words of two neighbouring pieces of 16 bytes lie, [n, 8]."""
    columns = np.arange(n)
    pieces = (np.array([piece, piece + 1]) ^ (columns % 8)[:, None]) << 2
    return (columns[:, None, None] * 32 + pieces[..., None] + np.arange(4)).reshape(n, 8)


def _in_atoms(array, index, n):
    """Words [n, 8] of the n columns of B, which begins at word `index`, in atoms."""
    if index % 256 > 31 or index % 8:
        raise RuntimeError(f"product of a warpgroup: B begins at word {index}")
    return array[index // 256 * 256 + _words_in_atoms((index & 31) // 4, n)]


def _unswizzled(array, index, n):
    """The same of B as of `wgmma.HalfProducts.start_unswizzled`."""
    return array[index:index + 8 * n].reshape(n // 8, 2, 8, 4).transpose(0, 2, 1, 3).reshape(n, 8)


def _multiply_group(a_type, n, words_of_b=_in_atoms):
    """(lanes) -> D of each: fragments of 16 rows of A and all columns of B."""
    multiply, b_type = (_multiply_halves, a_type) if a_type is np.float16 else (_multiply_bytes, np.int8)

    def compute(lanes):
        array, index = lanes[0][4:6]
        if any(lane[5] != index for lane in lanes):
            raise RuntimeError(f"product of a warpgroup: B begins at word {index} and at others")
        fragments = _words(np.int32, [lane[:4] for lane in lanes])            # [row, word][half of the columns, rows 8..15]
        a = fragments.reshape(8, 4, 2, 2).transpose(3, 0, 2, 1).reshape(16, 8).view(a_type)
        b = np.ascontiguousarray(words_of_b(array, index, n)).view(b_type)
        c = np.array([lane[6] for lane in lanes]).reshape(8, 4, n // 8, 2, 2)  # [row, pair][eight columns][rows 8..15][column]
        d = multiply(a, b, c.transpose(3, 0, 2, 1, 4).reshape(16, n))
        return d.reshape(2, 8, n // 8, 4, 2).transpose(1, 3, 2, 0, 4).reshape(32, n // 2)
    return compute


def group_product(a_type, n, words_of_b=_in_atoms):
    """A warp's part of `wgmma.start`; the product is done at once, or when the warp waits for it."""
    compute, convert = _multiply_group({"s8": np.int8, "u8": np.uint8, "f16": np.float16}[a_type], n, words_of_b), _as_int(i32)

    def start(d, array, place, a0, a1, a2, a3, keep):
        thread, words = getcurrent(), (*map(convert, (a0, a1, a2, a3)), array, 4 * (int(place) & ADDRESS))

        def product():
            d[:] = _together(compute, (*words, d.copy() if keep else np.zeros_like(d)))
        thread.products.append(product)
        if not thread.warp.late:
            products_wait_but(0)()
    return start


def unswizzled_product(n):
    """As `group_product`, of `wgmma.start_unswizzled`."""
    start = group_product("f16", n, _unswizzled)

    def start_unswizzled(d, array, place, *words):
        if not 0 <= place <= ADDRESS:
            raise RuntimeError(f"product without swizzle: the place is {int(place):#x}, allowed: 0..{ADDRESS:#x}")
        start(d, array, place, *words, 0)
    return start_unswizzled


def group_products(n, offsets):
    """As `group_product`, of `wgmma.HalfProducts.start_steps`: what is started together is one product to wait for."""
    start = group_product("f16", n)

    def start_steps(d, array, place, *words):
        under_way = getcurrent().products
        first = len(under_way)
        for step, offset in enumerate(offsets):
            start(d, array, int(place) + offset, *words[4 * (step % 2):][:4], step > 0)
        if together := under_way[first:]:
            under_way[first:] = [lambda: [product() for product in together]]
    return start_steps


def products_wait_but(n):
    """(any): behind it all products but the n started last are done."""
    def wait(*_):
        under_way = getcurrent().products
        while len(under_way) > n:
            under_way.pop(0)()
    return wait


def limb_sums(n, steps):
    start, n_sums = group_product("s8", n), n // 2

    def sums(d, array, hi, lo, a_hi, a_lo):
        for step in range(steps):
            high, low = a_hi[4 * step:4 * step + 4], a_lo[4 * step:4 * step + 4]
            for k, a, b, keep in (0, high, hi, step), (1, high, lo, step), (2, low, lo, step), (1, low, hi, 1):
                start(d[k * n_sums:(k + 1) * n_sums], array, int(b) + 2 * step, *a, keep)
        products_wait_but(0)()
    return sums


# Copies that run on while the thread does: done at once, or when it waits for them, by chance

def copy(name, width, n, step):
    def put(array, index, pointer, first):
        thread = getcurrent()
        for i in range(n):
            at = index + 128 * i
            check_elements(name, array, at, width)
            to, value = array[at:at + width], pointer.elements[pointer.slice(name, first + step * i, width)]
            if thread.block.random.getrandbits(1):
                thread.copies.append((to, value))
            else:
                to[:] = value
    return put


def _done(copies):
    for to, value in copies:
        to[:] = value
    copies.clear()


def copies_commit():
    thread = getcurrent()
    thread.groups.append(thread.copies)
    thread.copies = []


def copies_wait_but(n):
    def wait():
        groups = getcurrent().groups
        while len(groups) > n:
            _done(groups.pop(0))
    return wait


def copies_wait():
    copies_commit()
    copies_wait_but(0)()


# Launching

@dataclass(frozen=True)
class Launch:
    kernel: Kernel
    grid: _Dim3
    block: _Dim3
    args: tuple
    shared: int

    def __call__(self, stream=None) -> None:
        random = Random(crc32(self.name.encode()))
        blocks = [_Dim3(x, y, z) for z in range(self.grid.z) for y in range(self.grid.y) for x in range(self.grid.x)]
        n = self.kernel.n_cluster
        clusters = [blocks[first:first + n] for first in range(0, len(blocks), n)]
        for indices in random.sample(clusters, len(clusters)):
            _Cluster(self, indices, random).run(self.args)

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
        return Launch(kernel, _Dim3(*np.atleast_1d(grid).tolist()), _Dim3(*np.atleast_1d(block).tolist()), converted, shared)
