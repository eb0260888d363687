"""Kernels and their launches as values.

A kernel module reads top down: formula, device functions, a factory of kernels, what is refused, the op (`kernels.call`):

    @factory([()])                                   # the argument tuples that the tests compile
    def scale_kernel():
        def kernel(x, y, n, a):                      # y[i] = mul(x[i], a)
            i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
            if i < n:
                st(y, i, mul(ld(x, i), a))
        return Kernel(kernel, (F32, F32, N, SCALAR_F32), n_threads=256)

    def check(call):
        need(call.x.n_cols >= 1, "n", call.x.n_cols, "at least 1")

    def scale(call):
        \"\"\"y = mul(x, factor). x, y: f32 [n].\"\"\"
        n = call.x.n_cols
        return call.device.launch(scale_kernel(), -(-n // 256), 256, (call.x.data, call.y.data, n, call.factor))

    launch = scale(call)                             # once
    launch(stream)                                   # many times: 3 us each

The first call of a launch loads the kernels of all launches so far; those that the disk cache does not have are compiled, several
at a time (`compile_workers`), and each is loaded while others are compiled.

Ops hand addresses on and ask at most how they are aligned, so the same functions launch in the simulator, whose addresses are
arrays.

Kernels of a stream overlap where the GPU can (compute capability 9.0, programmatic dependent launch): the blocks of a kernel
start when all blocks of the one before let them and there is room. A small launch, of up to SMALL threads and no clusters, lets
them at once, so that what is behind it fetches its weights meanwhile; all others when they have waited: the kernels after the
next would take multiprocessors from the next one, whose blocks then share what is left. `ptx.wait_for_previous` returns when the
one before has ended and its stores are seen. No kernel touches memory that another one writes or reads before it has waited, and
all threads of every kernel wait, so that the end of one is the end of all before it. Two things may be read earlier. What no
kernel ever writes, only copies do (weights, tables, positions, numbers of cells): a copy is ordered with both its neighbours as
ever. And operands that are *settled*: between the launch that wrote them and this one is a large one. It had waited, so the
writer had ended, before anything behind it started. A kernel that reads early places the wait itself; in every other one it is
the first instruction.
"""
import ctypes
import hashlib
import os
import re
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from math import prod
from pathlib import Path
from typing import NamedTuple

import numba_cuda
import numpy as np
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, ObjectCode, launch
from cuda.pathfinder import load_nvidia_dynamic_lib
from numba import cuda, types

from ..call import Unsupported
from ..compile import cache_folder, source_digest
from ..disk_cache import compiled, read_entry, write_entry
from .compile_workers import MOST_WORKERS, Workers, n_workers

F32, I32, U32, I64 = (types.CPointer(t) for t in (types.float32, types.int32, types.uint32, types.int64))  # parameters: pointers
I8, U8, I16, U16, F64 = (types.CPointer(t) for t in (types.int8, types.uint8, types.int16, types.uint16, types.float64))
N, N64, SCALAR_F32 = types.int32, types.int64, types.float32  # parameters: scalars
SCALARS = {types.int32: np.int32, types.int64: np.int64, types.float32: np.float32}
LIMITS = {type_: (int(np.iinfo(SCALARS[type_]).min), int(np.iinfo(SCALARS[type_]).max)) for type_ in (types.int32, types.int64)}
OVERLAPPING = (9, 0)      # compute capability from which kernels of a stream overlap
HOPPER = (9, 0, "a")      # compute capability 9.0 with what it alone has
PORTABLE_CLUSTER = 8      # blocks of a cluster that every GPU with clusters has
SMALL = 4096              # threads of a launch that lets the next one start at once, unless it is of clusters
STATIC_SHARED = 48 << 10  # bytes of shared memory that a launch gets without asking
SHARED_LIMIT = 227 << 10  # bytes of shared memory of a block on Hopper
RESERVED = 1024           # bytes of a block's shared memory that are the driver's
ASSEMBLERS = 4            # threads in which the driver assembles PTX


@dataclass(frozen=True)
class Kernel:
    """A kernel as Python source: what is compiled, and what the simulator runs."""
    function: Callable
    parameters: tuple          # numba types, pointers and scalars
    n_threads: int             # in a block at most
    n_blocks: int = 1          # on a multiprocessor at least; without a number ptxas leaves room for more, and spills registers
    arch: tuple | None = None  # the only compute capability that it is for
    n_cluster: int = 1         # blocks of a cluster, next to each other in the grid's first dimension
    name: str = ""             # given by `factory`: the factory's name and its arguments,
    source: tuple = ()         # and (module, factory, arguments), with which another process makes the kernel

    @cached_property
    def scalars(self) -> list[tuple]:
        """Of the parameters that are not pointers: (index, numpy's type, least and most of integers)."""
        return [(i, SCALARS[type_], LIMITS.get(type_)) for i, type_ in enumerate(self.parameters)
                if not isinstance(type_, types.CPointer)]


FACTORIES: dict[Callable, list[tuple]] = {}  # every factory of a kernel -> the arguments that the tests compile it with


def factory(cases: list[tuple]):
    """Decorates a function of hashable arguments -> Kernel: called once for each, its kernels named, its `cases` compiled by
    tests."""
    def decorate(make):
        @lru_cache(None)
        @wraps(make)
        def made(*args):
            name = make.__name__.removesuffix("_kernel")
            return replace(make(*args), name=f"{name}[{', '.join(map(str, args))}]" if args else name,
                           source=(make.__module__, make.__name__, args))
        FACTORIES[made] = cases
        return made
    return decorate


def need(condition: bool, what: str, found, allowed: str) -> None:
    """Of what the `check` of a kernel module wants."""
    if not condition:
        raise Unsupported(f"{what} is {found}, allowed: {allowed}")


# Compiling

@lru_cache(None)
def _find_nvvm() -> tuple:
    """Identity of the libnvvm in use. A toolkit named by CUDA_HOME or CUDA_PATH goes before one installed as a Python package:
    the system's driver can read its PTX."""
    roots = [Path(os.environ[variable]) for variable in ("CUDA_HOME", "CUDA_PATH") if variable in os.environ]
    for path in [path for root in roots for folder in ("nvvm/lib64", "lib64")
                 for path in root.glob(f"{folder}/libnvvm.so.*")][:1]:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # the finder takes what is loaded already
    path = Path(load_nvidia_dynamic_lib("nvvm").abs_path)
    return str(path), path.stat().st_size, path.stat().st_mtime_ns


@lru_cache(None)
def nvvm_release() -> str:
    """Of the CUDA toolkit whose NVVM is in use, such as 13.0.88, as it says in what it compiles; needs no GPU."""
    _find_nvvm()
    ptx, _ = cuda.compile_ptx(lambda: None, (), cc=(8, 0))
    found = re.search(r"Cuda compilation tools, release .*V([\d.]+)", ptx)
    return found[1] if found else "unknown"


def compile_ptx(kernel: Kernel, cc: tuple[int, int]) -> str:
    """PTX of a kernel for a compute capability. Needs libnvvm but no GPU.

    Shared arrays are put on 16 bytes for wide accesses, dynamic ones on 1024 for atoms of `wgmma`: numba aligns them to their
    elements."""
    _find_nvvm()
    if kernel.arch and kernel.arch[:2] != cc:
        raise ValueError(f"{kernel.name}: compute capability is {cc}, allowed: {kernel.arch[:2]}")
    ptx, _ = cuda.compile_ptx(kernel.function, kernel.parameters, cc=kernel.arch or cc,
                              launch_bounds=(kernel.n_threads, kernel.n_blocks))
    ptx = re.sub(r"\.extern \.shared \.align [1248] ", ".extern .shared .align 1024 ", ptx)
    return _overlapping(re.sub(r"\.shared \.align [1248] ", ".shared .align 16 ", ptx), cc, kernel.n_cluster > 1)


def _overlapping(ptx: str, cc: tuple[int, int], is_cluster: bool) -> str:
    """The kernel waits for the one before, first of all where it does not say where. There, loads of constants become plain ones,
    which the assembler does not move before the wait: activations may be among them. It lets the next one start when it has
    waited, but at once where its launch is small."""
    wait, start = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
    if cc < OVERLAPPING:
        return ptx.replace(wait, "")
    shape = "%nctaid.y", "%nctaid.z", "%ntid.x", "%ntid.y", "%ntid.z"
    at_once = [".reg .b32 %threads, %each;", ".reg .pred %small;", "mov.u32 %threads, %nctaid.x;",
               *(f"mov.u32 %each, {n};\n\tmul.lo.u32 %threads, %threads, %each;" for n in shape),
               f"setp.le.u32 %small, %threads, {SMALL};", f"@%small {start}"]
    before = "\n\t".join([] if is_cluster else at_once)
    if wait not in ptx:
        before, ptx = f"{before}\n\t{wait}", ptx.replace("ld.global.nc.", "ld.global.")
    ptx, n = re.subn(r"(\.entry[^{]*\{\n(?:\s*\.[^\n]*;\n)*)", rf"\1\t{before}\n", ptx)  # behind the declarations
    assert n == 1, n
    return ptx.replace(wait, f"{wait}\n\t{start}")


def ptx_entry(kernel: Kernel, cc: tuple[int, int]) -> tuple[Path, str]:
    """Where the disk cache has a kernel, and its key there (`disk_cache`)."""
    key = repr((kernel.function.__module__, kernel.name, [str(p) for p in kernel.parameters], kernel.n_threads, kernel.n_blocks,
                cc, numba_cuda.__version__, _find_nvvm(), source_digest()))
    return cache_folder() / "cuda" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.ptx", key


def kept_ptx(kernel: Kernel, cc: tuple[int, int]) -> str | None:
    """The PTX that the disk cache has."""
    ptx = read_entry(*ptx_entry(kernel, cc))
    return None if ptx is None else str(ptx, "utf-8")


def cached_ptx(kernel: Kernel, cc: tuple[int, int]) -> str:
    """`compile_ptx` through the disk cache."""
    ptx = kept_ptx(kernel, cc)
    if ptx is None:
        with compiled.running("this GPU"):
            ptx = compile_ptx(kernel, cc)
            compiled.add(1)
        write_entry(*ptx_entry(kernel, cc), ptx.encode())
    return ptx


def entry_name(ptx: str) -> str:
    names = re.findall(r"\.entry\s+([\w$]+)\s*\(", ptx)
    assert len(names) == 1, names
    return names[0]


def ptx_version(ptx: str) -> tuple[int, int]:
    return tuple(map(int, re.search(r"^\.version (\d+)\.(\d+)", ptx, re.MULTILINE).groups()))


# Launching

@dataclass
class Code:
    """A kernel on one device, and what it is launched by once it is loaded."""
    kernel: Kernel
    load: Callable             # (self): loads this kernel, and all others that wait
    handle: object = None      # cuda.core.Kernel
    shared: int = STATIC_SHARED  # bytes of dynamic shared memory that launches may ask for


@dataclass(frozen=True)
class Launch:
    """A kernel with its shape and arguments, prepared for one device: call it with a stream, as often as wanted."""
    code: Code
    config: object     # cuda.core.LaunchConfig
    args: tuple
    large: bool        # as of `is_large`

    @property
    def name(self) -> str:
        return self.code.kernel.name

    def __call__(self, stream) -> None:
        if self.code.handle is None:
            self.code.load(self.code)
        launch(stream, self.config, self.code.handle, *self.args)


class Launches(NamedTuple):
    """Launches one after the other, called as one is."""
    launches: tuple

    def __call__(self, stream) -> None:
        for each in self.launches:
            each(stream)


def has_large(step) -> bool:
    """Whether one of the launches of a step is large."""
    return any(map(has_large, step.launches)) if isinstance(step, Launches) else step.large


def is_large(kernel: Kernel, grid, block) -> bool:
    """Whether a launch lets the next one start only when it has waited."""
    return kernel.n_cluster > 1 or size(grid) * size(block) > SMALL


def even_bytes(n_bytes: int, n_blocks: int, n_multiprocessors: int, shared_limit: int) -> int:
    """Shared memory of a block, n_bytes at least, with which no multiprocessor holds more of n_blocks than an even share: where
    launches follow one another, blocks would lie closer together while other multiprocessors have none (docs/kernels-log.md)."""
    n_more = -(-n_blocks // n_multiprocessors) + 1
    return max(n_bytes, (shared_limit + RESERVED) // n_more // 16 * 16 - RESERVED + 16)


def size(shape) -> int:
    """Of a grid or a block."""
    return shape if isinstance(shape, int) else prod(shape)


def arguments(kernel: Kernel, args: tuple) -> tuple:
    """Arguments as the kernel's parameters want them: addresses untouched, scalars as numpy scalars, refusing what does not
    fit."""
    if len(args) != len(kernel.parameters):
        raise TypeError(f"{kernel.name}: expected {len(kernel.parameters)} arguments, got {len(args)}")
    found = list(args)
    for i, make, limits in kernel.scalars:
        if limits and not limits[0] <= found[i] <= limits[1]:
            raise ValueError(f"{kernel.name}: {found[i]} does not fit {kernel.parameters[i]}")
        found[i] = make(found[i])
    return tuple(found)


started: list[Workers] = []  # by `expect`, until a `load` takes them


def _take_started() -> Workers | None:
    try:
        return started.pop()
    except IndexError:
        return None


def expect() -> None:
    """Kernels of a model will be wanted. Where the disk cache has none at all, workers start, for the next `load` of any GPU."""
    folder = cache_folder() / "cuda"
    if not started and not any(folder.glob("*.ptx")) and (n := n_workers(MOST_WORKERS, folder)):
        started.append(Workers(n))


def dismiss() -> None:
    """Ends workers that no `load` has taken."""
    if (workers := _take_started()) is not None:
        workers.close()


class Target:
    """One GPU and the kernels loaded on it."""

    def __init__(self, ordinal: int = 0):
        self.device = Device(ordinal)
        self.device.set_current()
        self.cc = tuple(self.device.compute_capability)
        self.n_multiprocessors = self.device.properties.multiprocessor_count
        self.shared_limit = self.device.properties.max_shared_memory_per_block_optin  # bytes of a block
        self.warpgroups = self.cc == HOPPER[:2]
        if self.cc < (8, 0):
            found = "{}.{}".format(*self.cc)
            raise RuntimeError(f"cuda:{ordinal} ({self.device.name}) has compute capability {found}; 8.0 or later is needed")
        self.run_once: Callable = lambda: None  # () -> `run` of half_check, or None
        self._codes: dict[Kernel, Code] = {}
        self._waiting: list[Code] = []  # to be loaded

    @cached_property
    def halves(self) -> bool:
        """Whether products of float16 are added exactly, as this GPU shows (`half_check`). Without the memory of a backend, which
        sets `run_once`, that is not known."""
        from .half_check import half_check  # which is made of what is here
        run = self.run_once() if self.warpgroups else None
        return run is not None and half_check(self, run)

    def close(self) -> None:
        dismiss()

    def load(self, alone: bool = False) -> None:
        """Loads the kernels of all launches prepared so far; what is wrong with one is raised when it is launched. alone: without
        workers."""
        waiting, self._waiting = self._waiting, []
        kept = [kept_ptx(code.kernel, self.cc) for code in waiting]
        missing = {code.kernel: code for code, ptx in zip(waiting, kept) if ptx is None}
        with compiled.running("this GPU", len(missing)):
            with ThreadPoolExecutor(ASSEMBLERS) as pool:
                for code, ptx in zip(waiting, kept):
                    if ptx is not None:
                        pool.submit(self._load_or_leave, code, ptx)
                if not alone:
                    with closing(self._compiled_elsewhere([kernel for kernel in missing if kernel.source])) as ready:
                        for kernel in ready:
                            compiled.add(1)
                            pool.submit(self._load_or_leave, missing[kernel])
            for code in missing.values():
                if code.handle is None:
                    self._load_or_leave(code)

    def _load_or_leave(self, code: Code, ptx: str | None = None) -> None:
        """Of any thread. What is wrong is said by the launch; others are none the worse for it."""
        with suppress(Exception):
            self.device.set_current()
            self._load(code, ptx)

    def _compiled_elsewhere(self, kernels: list[Kernel]) -> Generator[Kernel, None, None]:
        """Those that workers compile, each when the disk cache has it."""
        workers = _take_started()
        if workers is None and (n := n_workers(len(kernels), cache_folder() / "cuda")):
            workers = Workers(n)
        if workers is not None:
            with closing(workers):
                yield from workers.compile(kernels, self.cc)

    def _first_call(self, code: Code) -> None:
        self.load()
        if code.handle is None:
            self._load(code)

    def _load(self, code: Code, ptx: str | None = None) -> None:
        """ptx: what the disk cache has, where that was asked before."""
        kernel = code.kernel
        ptx = cached_ptx(kernel, self.cc) if ptx is None else ptx
        try:
            with compiled.running("this GPU"):
                handle = ObjectCode.from_ptx(ptx.encode()).get_kernel(entry_name(ptx))
        except Exception as error:
            version = "{}.{}".format(*ptx_version(ptx))
            raise RuntimeError(
                f"{kernel.name}: the driver of cuda:{self.device.device_id} refused PTX {version} from {_find_nvvm()[0]} "
                f"({error}). A driver reads PTX up to its CUDA version (13.0: PTX 9.0): install an older CUDA toolkit or point "
                "CUDA_HOME to one") from error
        if code.shared > STATIC_SHARED:
            self._allow_shared(handle, code.shared)
        if kernel.n_cluster > PORTABLE_CLUSTER:
            self._allow(handle, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1,
                        f"clusters of {kernel.n_cluster} blocks")
        code.handle = handle

    def launch(self, kernel: Kernel, grid, block, args: tuple, shared: int = 0) -> Launch:
        """A prepared launch. grid, block: an int or a tuple of up to three; args: addresses as int, scalars; shared: bytes of
        dynamic shared memory."""
        code = self._codes.get(kernel)
        if code is None:
            code = self._codes[kernel] = Code(kernel, self._first_call)
            self._waiting.append(code)
        if shared > code.shared:  # never less again: a launch prepared before may need it
            code.shared = shared
            if code.handle is not None:
                self._allow_shared(code.handle, shared)
        n, large = kernel.n_cluster, is_large(kernel, grid, block)
        if n > 1:
            first, *others = (grid,) if isinstance(grid, int) else grid
            if first % n:
                raise ValueError(f"{kernel.name}: {first} blocks, allowed: whole clusters of {n}")
            grid = (first // n, *others)  # of clusters
        config = LaunchConfig(grid=grid, cluster=n if n > 1 else None, block=block, shmem_size=shared,
                              programmatic_stream_serialization=self.cc >= OVERLAPPING)
        return Launch(code, config, arguments(kernel, args), large)

    def _allow_shared(self, handle, n_bytes):
        self._allow(handle, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, n_bytes,
                    f"{n_bytes} bytes of shared memory in a block")

    def _allow(self, handle, attribute, value, what):
        kernel, device = driver.CUkernel(int(handle.handle)), driver.CUdevice(self.device.device_id)
        status, = driver.cuKernelSetAttribute(attribute, value, kernel, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuda:{self.device.device_id}: {what}: {status.name}")
