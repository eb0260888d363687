"""Kernels of the CPU one after the other in one call, without Python between them.

A kernel and its arguments are three words: the addresses of code that calls functions with arguments of these types, of the
kernel's code, and of words that hold the arguments.
"""
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
from llvmlite import ir
from numba import int64, types, typeof
from numba.core import cgutils
from numba.extending import intrinsic

from .compile import jit
from .threads import CONTROL, run

MOST = 16  # kernels of a call: between calls Python sees that somebody interrupts, and starts threads that are missing
I64 = ir.IntType(64)
CALLER = int64(CONTROL, int64, int64)  # (control, address of a kernel's code, of its arguments) -> 1 if it has raised


def is_known(type_) -> bool:
    if isinstance(type_, types.BaseTuple):
        return all(map(is_known, type_))
    return isinstance(type_, types.Array | types.Boolean | types.Integer) or type_ in (types.float32, types.float64)


def words_of(arg) -> list[int]:
    """A number's bits; an array's address, shape and strides; those of a tuple's elements."""
    if isinstance(arg, tuple):
        return [word for each in arg for word in words_of(each)]
    if isinstance(arg, np.ndarray):
        return [arg.ctypes.data, *arg.shape, *arg.strides]
    if isinstance(arg, float | np.floating):
        return [int(np.asarray(arg).view(f"u{np.asarray(arg).itemsize}"))]
    return [int(arg)]


def _loaded(context, builder, type_, words, first):
    """(the argument whose words begin with word `first`, where the next one's do)"""
    def word(i):
        return builder.load(builder.gep(words, [I64(first + i)]))
    if isinstance(type_, types.Array):
        array, n = context.make_array(type_)(context, builder), type_.ndim
        shape, strides = [word(1 + i) for i in range(n)], [word(1 + n + i) for i in range(n)]
        n_items = I64(1)
        for size in shape:
            n_items = builder.mul(n_items, size)
        array.data, array.nitems = builder.inttoptr(word(0), array.data.type), n_items
        array.itemsize = I64(context.get_abi_sizeof(context.get_data_type(type_.dtype)))
        array.shape, array.strides = (cgutils.pack_array(builder, each, I64) for each in (shape, strides))
        array.meminfo, array.parent = (ir.Constant(pointer.type, None) for pointer in (array.meminfo, array.parent))
        return array._getvalue(), first + 1 + 2 * n
    if isinstance(type_, types.BaseTuple):
        values = []
        for each in type_:
            value, first = _loaded(context, builder, each, words, first)
            values.append(value)
        return context.make_tuple(builder, type_, values), first
    place = builder.bitcast(builder.gep(words, [I64(first)]), context.get_data_type(type_).as_pointer())
    return context.data_model_manager[type_].from_data(builder, builder.load(place)), first + 1


@lru_cache(None)
def caller(argtypes):
    """(address of the code, the function whose code it is) of a `CALLER` for kernels with arguments of these types."""
    @intrinsic
    def call(typingctx, control, address, words):
        def codegen(context, builder, signature, args):
            control, address, words = args
            all_types, kernel_types = types.Tuple(argtypes), (CONTROL, *argtypes)
            loaded, _ = _loaded(context, builder, all_types, builder.inttoptr(words, I64.as_pointer()), 0)
            values = [control, *cgutils.unpack_tuple(builder, loaded, len(argtypes))]
            function = builder.inttoptr(address, context.call_conv.get_function_type(types.none, kernel_types).as_pointer())
            status, _ = context.call_conv.call_function(builder, function, types.none, kernel_types, values)
            return builder.zext(status.is_error, I64)
        return int64(CONTROL, int64, int64), codegen

    @jit(key=str(argtypes))
    def call_kernel(control, address, words):
        return call(control, address, words)
    return code_of(call_kernel, CALLER.args), call_kernel


def code_of(dispatcher, argtypes) -> int:
    """The address of its code for arguments of these types."""
    dispatcher.compile(argtypes)
    result = dispatcher.overloads[argtypes]
    return result.library.get_pointer_to_function(result.fndesc.llvm_func_name)


@intrinsic
def _call(typingctx, caller, control, address, words):
    def codegen(context, builder, signature, args):
        function = builder.inttoptr(args[0], context.call_conv.get_function_type(int64, CALLER.args).as_pointer())
        _, raised = context.call_conv.call_function(builder, function, int64, CALLER.args, args[1:])
        return raised
    return int64(int64, CONTROL, int64, int64), codegen


@jit(parallel=True)
def run_all(control, table, raised):
    """table: i64 [kernels, 3]. raised: i64 [1], is set to the number of the kernel that has raised, if one has."""
    for i in range(table.shape[0]):
        if _call(table[i, 0], control, table[i, 1], table[i, 2]):
            raised[0] = i
            return


def run_each(each: Sequence[Callable[[], None]]) -> None:
    for step in each:
        step()


def steps(*each: Callable[[], None]) -> Callable[[], None]:
    """One step that runs several, one after the other."""
    return partial(run_each, each)


def parts_of(step: Callable[[], None]) -> list[Callable[[], None]]:
    """What a step does, one thing after the other."""
    if isinstance(step, partial) and step.func is run_each:
        return [part for each in step.args[0] for part in parts_of(each)]
    return [getattr(step, "kernel", step)]


def native(step: Callable[[], None]) -> tuple[int, int, np.ndarray] | None:
    """Of a step that is a kernel with its arguments, the three words, the last one as an array; else None."""
    kernel = step.func if isinstance(step, partial) else None
    if not isinstance(kernel, partial) or kernel.func is not run or step.keywords:
        return None
    (dispatcher,), args = kernel.args, step.args
    names = inspect.getfullargspec(dispatcher.py_func)
    if names.varargs:
        n = len(names.args) - 1  # without control
        args = *args[:n], args[n:]
    argtypes = tuple(map(typeof, args))
    if not all(map(is_known, argtypes)):
        return None
    words = np.array(words_of(args), np.int64)
    return caller(argtypes)[0], code_of(dispatcher, (CONTROL, *argtypes)), words


class Together:
    """A step: several kernels in one call."""

    def __init__(self, kernels: list[tuple[Callable[[], None], tuple[int, int, np.ndarray]]]):
        """Of each the step, and what `native` gives."""
        self.steps, self.words = [step for step, _ in kernels], [words for _, (*_, words) in kernels]
        self.table = np.array([(*addresses, words.ctypes.data) for _, (*addresses, words) in kernels], np.int64)
        self.raised = np.full(1, -1, np.int64)

    def __call__(self) -> None:
        run_all(self.table, self.raised)
        if self.raised[0] >= 0:
            i, self.raised[0] = self.raised[0], -1
            run_each(self.steps[i:])  # raises


def together(each: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
    """The same steps, as few as possible."""
    found: list[Callable[[], None]] = []
    waiting: list = []

    def end() -> None:
        if waiting:
            found.append(Together(waiting[:]))
            waiting.clear()
    for part in (part for step in each for part in parts_of(step)):
        words = native(part)
        if words is None:
            end()
            found.append(part)
        else:
            waiting.append((part, words))
            if len(waiting) == MOST:
                end()
    end()
    return found
