"""A kernel that does nothing for a given time: what is queued behind it is late. Tests provoke with it what is otherwise rare
(docs/streams.md).

One thread reads the GPU's timer (PTX: %globaltimer, nanoseconds, which moves on by a microsecond or less) until the time is over.
"""
import time

from llvmlite import ir
from numba import types

from .launch import N64, Kernel, factory, need
from .ptx import SIMULATED, i64

if SIMULATED:
    def globaltimer():
        return i64(time.monotonic_ns())
else:
    from numba.cuda.extending import intrinsic

    @intrinsic
    def globaltimer(typingctx):
        """The GPU's time in nanoseconds, read anew each time."""
        def codegen(context, builder, signature, args):
            word = ir.IntType(64)
            return builder.call(ir.InlineAsm(ir.FunctionType(word, []), "mov.u64 $0, %globaltimer;", "=l", side_effect=True), [])
        return types.int64(), codegen


@factory([()])
def spin_kernel():
    def kernel(n_ns):
        start = globaltimer()
        while globaltimer() - start < n_ns:
            pass
    return Kernel(kernel, (N64,), n_threads=1)


def spin(target, seconds):
    """A launch that takes `seconds` of one multiprocessor's time and touches no memory."""
    need(0 <= seconds <= 60, "seconds", seconds, "0 to 60")
    return target.launch(spin_kernel(), 1, 1, (int(1e9 * seconds),))
