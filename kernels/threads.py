"""Threads that share the work of the CPU's kernels.

A loop over units of work is a job: the address of code for one unit, that of its arguments, and the number of units. Who works
on a job takes units that nobody has taken: the thread that came with the job, and the workers that are awake. So nobody waits
for a worker that has not begun; and a job costs its thread well below a microsecond more than a loop.

Each thread has a share of the units, one behind the other, and takes those first, then what is left of the others' shares. Most
jobs have their units in the order of rows, so what a thread reads is mostly what it wrote in the job before, and in its own
cache. A job whose units are of different size, the largest first, is one share.

Workers are Python's threads, in compiled code and without its lock. Behind a job they look for the next one for
SPIN_SECONDS, which a GPU's part of a layer takes; then they sleep. A job that finds too few awake wakes them, and does not wait
for them.

While they look, workers ask the memory for what `ahead` names: what the next large job reads is then in their caches, or on its
way, and the memory is not idle while one thread does small things.

One job runs at a time (`compile.parallel_lock`). A forked process has no workers at first, and starts its own.
"""
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import lru_cache
from timeit import timeit

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from ..quant.device_functions import device
from .compile import jit, parallel_lock

MOST = config.NUMBA_NUM_THREADS  # the CPUs of this process, or what NUMBA_NUM_THREADS says
SPIN_SECONDS = 0.003             # that a worker looks for the next job, a pause of the processor between two looks
LINE, LINES = 64, 32             # bytes of a line of the caches; of these, what a worker asks for between two looks
AHEAD_BYTES = 1 << 19            # of what is named by `ahead`, for each worker: a part of its second cache

# Words of `control`: the number of the open job, or 0; how many workers are at it, how many are awake; how often they were woken;
# then what only the thread with the job writes. What several write lies in cache lines of its own; so does what `ahead` writes:
# how often, the first byte, one past the last. Last, how many units of each share were asked for: side by side, since a job
# begins with all of them as zeros, and who is through with its own looks at all.
OPEN, ACTIVE, AWAKE, BELL, JOBS, THREADS, MISSED, CODE, DATA, N, SHARES = 0, 16, 32, 48, 64, 65, 66, 67, 68, 69, 70
NAMED, FIRST, END = 80, 81, 82
TAKEN = 96
I8, I64 = ir.IntType(8), ir.IntType(64)
CONTROL = types.int64[::1]
UNIT = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I64])  # (arguments, number of the unit)
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


# Words that several threads read and write: in one order that all of them see

def _word(context, builder, array_type, array, i):
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [i])


@intrinsic
def look(typingctx, control, i):
    def codegen(context, builder, signature, args):
        return builder.load_atomic(_word(context, builder, control, *args), "seq_cst", 8)
    return types.int64(control, types.int64), codegen


@intrinsic
def put(typingctx, control, i, value):
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[2], _word(context, builder, control, *args[:2]), "seq_cst", 8)
        return context.get_dummy_value()
    return types.none(control, types.int64, types.int64), codegen


@intrinsic
def take(typingctx, control, i, n):
    """What was there, to which n is added."""
    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _word(context, builder, control, *args[:2]), args[2], "seq_cst")
    return types.int64(control, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Lets what shares the processor's core go first."""
    def codegen(context, builder, signature, args):
        if IS_X86:
            nothing = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()
    return types.none(), codegen


@intrinsic
def ask_for(typingctx, address):
    """Has the line at an address brought into the second cache. Nothing happens where there is no memory."""
    def codegen(context, builder, signature, args):
        line, number = builder.inttoptr(args[0], I8.as_pointer()), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [line.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [line, number(0), number(2), number(1)])  # to read, into all caches but the first, as data
        return context.get_dummy_value()
    return types.none(types.int64), codegen


# Sleep, until the bell rings: Linux' futex; elsewhere workers look again after a millisecond

FUTEX, WAIT, WAKE = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0), 128, 129
IS_LINUX = sys.platform == "linux" and FUTEX > 0


def _of_the_system():
    """syscall(number, ...), or what sleeps so many microseconds (milliseconds on Windows)."""
    if sys.platform == "win32":
        return ctypes.WinDLL("kernel32").Sleep
    library = ctypes.CDLL(None)
    return library.syscall if IS_LINUX else library.usleep


llvm.add_symbol("ggml_py_system", ctypes.cast(_of_the_system(), ctypes.c_void_p).value)


@intrinsic
def sleep(typingctx, control, bell):
    """Returns when the bell has rung since it stood at `bell`; now and then also before."""
    def codegen(context, builder, signature, args):
        if IS_LINUX:
            _system(context, builder, args[0], WAIT, args[1])
        else:
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "ggml_py_system"),
                         [ir.IntType(32)(1 if sys.platform == "win32" else 1000)])
        return context.get_dummy_value()
    return types.none(control, types.int64), codegen


@intrinsic
def ring(typingctx, control):
    """Wakes those who sleep."""
    def codegen(context, builder, signature, args):
        builder.atomic_rmw("add", _word(context, builder, control, args[0], I64(BELL)), I64(1), "seq_cst")
        if IS_LINUX:
            _system(context, builder, args[0], WAKE, I64(2**31 - 1))
        return context.get_dummy_value()
    return types.none(control), codegen


def _system(context, builder, control, operation, value):
    """The futex is the lower half of the bell: both kinds of processors are little-endian."""
    kind = ir.FunctionType(I64, [I64], var_arg=True)
    bell = builder.ptrtoint(_word(context, builder, CONTROL, control, I64(BELL)), I64)
    builder.call(cgutils.get_or_insert_function(builder.module, kind, "ggml_py_system"),
                 [I64(FUTEX), bell, I64(operation), value, I64(0), I64(0), I64(0)])


# Jobs

@intrinsic
def call(typingctx, code, data, u):
    def codegen(context, builder, signature, args):
        code, data, u = args
        builder.call(builder.inttoptr(code, UNIT.as_pointer()), [builder.inttoptr(data, I8.as_pointer()), u])
        return context.get_dummy_value()
    return types.none(types.int64, types.int64, types.int64), codegen


@device
def take_units(control, index):
    """By the thread of this index: of its share, then of the others'."""
    code, data, n, n_shares = control[CODE], control[DATA], control[N], control[SHARES]
    owner = index % n_shares
    for _ in range(n_shares):
        begin, end, taken = owner * n // n_shares, (owner + 1) * n // n_shares, TAKEN + owner
        while begin + look(control, taken) < end:
            u = begin + take(control, taken, 1)
            if u < end:
                call(code, data, u)
        owner = owner + 1 if owner < n_shares - 1 else 0


@device
def share(control, n, code, data, n_shares):
    """Every unit of n, by this thread and by workers."""
    control[CODE], control[DATA], control[N] = code, data, n
    control[SHARES] = min(n_shares, control.shape[0] - TAKEN)  # there may be more threads than there were CPUs at first
    control[JOBS] += 1
    for i in range(control[SHARES]):
        control[TAKEN + i] = 0
    put(control, OPEN, control[JOBS])
    if look(control, AWAKE) < control[THREADS] - 1:
        control[MISSED] = 1
        ring(control)
    take_units(control, 0)
    put(control, OPEN, 0)
    # Who began while it was open is counted in ACTIVE, and who counts itself later sees that it is closed
    while look(control, ACTIVE) != 0:
        pause()


@jit
def look_for_jobs(control, index, n_looks):
    """Takes part in jobs, until it has looked for one in vain n_looks times. Meanwhile it asks for its share of what is named."""
    looks, last, named, at = 0, 0, 0, 0
    while looks < n_looks:
        job = look(control, OPEN)
        if job == 0 or job == last or index >= look(control, THREADS):
            if look(control, NAMED) != named:
                named = look(control, NAMED)
                at = control[FIRST] + (index - 1) * LINES * LINE
            if at < control[END]:  # that of another name, perhaps: nothing depends on it
                for line in range(LINES):
                    ask_for(at + line * LINE)
                at += (look(control, THREADS) - 1) * LINES * LINE
            else:
                pause()
            looks += 1
            continue
        take(control, ACTIVE, 1)
        if look(control, OPEN) == job:
            take_units(control, index)
            looks, last = 0, job
        take(control, ACTIVE, -1)


@jit
def work(control, index, n_looks):
    """A worker's, for ever."""
    take(control, AWAKE, 1)
    while True:
        look_for_jobs(control, index, n_looks)
        bell = look(control, BELL)
        take(control, AWAKE, -1)
        # Who opens a job from now on sees that we sleep; one that was opened before is seen here
        if look(control, OPEN) == 0 or index >= look(control, THREADS):
            sleep(control, bell)
        take(control, AWAKE, 1)


def borrowed(context, builder, type_, value):
    """The value with arrays that nobody counts references to: all threads would count in one place, and wait for each other."""
    if isinstance(type_, types.Array):
        array = context.make_array(type_)(context, builder, value)
        array.meminfo, array.parent = (ir.Constant(pointer.type, None) for pointer in (array.meminfo, array.parent))
        return array._getvalue()
    if isinstance(type_, types.BaseTuple):
        return context.make_tuple(builder, type_, [borrowed(context, builder, t, v)
                                                   for t, v in zip(type_, cgutils.unpack_tuple(builder, value))])
    return value


def sharing(body: Callable) -> Callable:
    """each(control, n, args, pays=True, largest_first=False): body(u, args) for every u of range(n), shared with the workers
    where that pays. body: compiled, of (int64, tuple), gives nothing and raises nothing; units write to different places.
    largest_first: units are of different size, in this order."""
    @intrinsic
    def job(typingctx, args):
        """(address of the code of a unit, address of args), while the calling function runs."""
        of_unit = types.none(types.int64, args)
        compiled = body.get_compile_result(of_unit)

        def codegen(context, builder, signature, values):
            data = cgutils.alloca_once_value(builder, values[0])
            code = ir.Function(builder.module, UNIT, builder.module.get_unique_name("unit"))
            code.linkage = "internal"
            inside = ir.IRBuilder(code.append_basic_block("entry"))
            arguments = inside.load(inside.bitcast(code.args[0], data.type))
            context.add_linking_libs([compiled.library])
            context.call_internal_no_propagate(inside, compiled.fndesc, of_unit, [code.args[1], arguments])
            inside.ret_void()
            addresses = [builder.ptrtoint(code, I64), builder.ptrtoint(data, I64)]
            return context.make_tuple(builder, signature.return_type, addresses)
        return types.UniTuple(types.int64, 2)(args), codegen

    @intrinsic
    def borrow(typingctx, args):
        return args(args), lambda context, builder, _, values: borrowed(context, builder, args, values[0])

    @device
    def each(control, n, args, pays=True, largest_first=False):
        args = borrow(args)
        if not pays or n < 2 or control[THREADS] < 2:
            for u in range(n):
                body(u, args)
            return
        code, data = job(args)
        share(control, n, code, data, 1 if largest_first else control[THREADS])
    return each


# Workers

@lru_cache(None)
def looks_of(seconds: float) -> int:
    """How often a worker looks for a job in that time: processors pause for 10 to 150 cycles."""
    n, control = 2000, _new_control(1)
    look_for_jobs(control, 0, 1)  # compiles
    return max(1, int(n * seconds / min(timeit(lambda: look_for_jobs(control, 0, n), number=1) for _ in range(3))))


class Workers:
    """The threads of this process."""

    def __init__(self):
        self.control = _new_control(MOST)
        self.started: list[threading.Thread] = []
        self.cpus: list[int] = []  # to which the threads are pinned, that with the jobs first; none: the system chooses

    def start(self) -> None:
        """Those that there are not yet."""
        while len(self.started) < self.control[THREADS] - 1:
            index = len(self.started) + 1
            self.started.append(threading.Thread(target=lambda index: work(self.control, index, looks_of(SPIN_SECONDS)),
                                                 args=(index,), name=f"ggml-py-{index}", daemon=True))
            self.started[-1].start()
            self.pin(index)

    def pin(self, index: int) -> None:
        """The thread with the jobs (0) or a worker to its CPU."""
        thread = self.started[index - 1] if index else threading.current_thread()
        if self.cpus and thread.native_id is not None:
            os.sched_setaffinity(thread.native_id, {self.cpus[index % len(self.cpus)]})


def _new_control(n_threads: int) -> np.ndarray:
    """int64; the first word begins a cache line."""
    n_words = TAKEN + -(-MOST // 8) * 8
    words = np.zeros(n_words + LINE // 8, np.int64)
    control = words[-words.ctypes.data % LINE // 8:][:n_words]
    control[THREADS] = n_threads
    return control


workers = Workers()


def _after_fork_in_child() -> None:
    global workers  # noqa: PLW0603 (of the process, which just came to be)
    n_threads, cpus = get_num_threads(), workers.cpus
    workers = Workers()
    workers.cpus = cpus
    set_num_threads(n_threads)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def run(kernel: Callable, *args) -> None:
    """kernel(control, *args), alone among those that share work."""
    with parallel_lock:
        control = workers.control
        kernel(control, *args)
        if control[MISSED]:
            control[MISSED] = 0
            workers.start()


@jit(parallel=True)
def ahead(control, address, n_bytes):
    """Names what workers ask the memory for while they wait: the first of n_bytes from an address on, which a job will read."""
    control[FIRST], control[END] = address, address + min(n_bytes, AHEAD_BYTES * (control[THREADS] - 1))
    put(control, NAMED, control[NAMED] + 1)


def pin(cpus: list[int]) -> None:
    """Each thread to a CPU, this one to the first, workers to the others; those that start later too. Linux alone."""
    workers.cpus = cpus
    for index in range(len(workers.started) + 1):
        workers.pin(index)


def get_num_threads() -> int:
    """How many threads share a kernel's work, the calling one among them."""
    return int(workers.control[THREADS])


@contextmanager
def using(n: int | None):
    """n threads meanwhile; None: as many as before."""
    if n is None:
        yield
        return
    before = get_num_threads()
    set_num_threads(n)
    try:
        yield
    finally:
        set_num_threads(before)


def set_num_threads(n: int) -> None:
    """ValueError for more than there are CPUs, or none."""
    if not 1 <= n <= MOST:
        raise ValueError(f"set_num_threads: must be 1 to {MOST}, got {n}")
    workers.control[THREADS] = n

