"""What the blocks of a cluster do together (PTX ISA, "barrier.cluster", "mapa", "st.async", target sm_90): they run at the same
time, and each writes to the shared memory of the others.

What a block sends counts in bytes at an mbarrier (`mbarrier`) of the one that it goes to, and is seen there behind the wait for
the phase. The block must have begun, and made that mbarrier, and it must not have ended.
"""
from llvmlite import ir
from numba import types

from .ptx import SIMULATED, _check, _effect, _instruction, _named, _shared_address, _void, device, stage, syncwarp

if SIMULATED:
    from . import simulator
else:
    from numba.cuda.extending import intrinsic

WORD = ir.IntType(32)

# () The barrier of all threads of the cluster, in two steps, between which a thread goes on. What was written before `arrive`, to
# any memory, is seen behind the `wait`.
arrive = _effect("cluster_arrive", "barrier.cluster.arrive.release;")
wait = _effect("cluster_wait", "barrier.cluster.wait.acquire;")
# () -> the number of the block in its cluster
rank = _instruction("cluster_rank", "mov.u32 $0, %cluster_ctarank;", "r", "", in_place=True)


@stage
def meet():
    """Both steps of the barrier."""
    arrive()
    wait()


def _sent(n, to, first, barrier):
    """The instruction that sends operands first .. first + n - 1."""
    words = ", ".join(f"${first + i}" for i in range(n))
    vector, words = ("", words) if n == 1 else (f".v{n}", f"{{{words}}}")
    return f"st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [{to}], {words}, [{barrier}];"


def _send():
    """(array, index, number of a block, word, index of an mbarrier): a word to the place of array[index] in that block's shared
    memory, and its four bytes to the mbarrier of that index there."""
    if SIMULATED:
        return simulator.cluster_send
    assembly = ir.InlineAsm(
        ir.FunctionType(ir.VoidType(), [WORD] * 4),
        "{ .reg .b32 there, barrier; mapa.shared::cluster.u32 there, $0, $1; mapa.shared::cluster.u32 barrier, $3, $1; "
        f"{_sent(1, 'there', 2, 'barrier')} }}", "r,r,r,r,~{memory}", True)

    def typed(typingctx, array, index, block, word, barrier):
        for t in (index, block, word, barrier):
            _check("send", "r", t)

        def emit(context, builder, signature, args):
            there, barrier = (_shared_address(context, builder, array, args[0], args[i]) for i in (1, 4))
            builder.call(assembly, [there, args[2], args[3], barrier])
        return types.void(array, types.int64, types.int32, types.int32, types.int64), _void(emit)
    return intrinsic(_named("send", 5)(typed))


send = _send()


# The same in two steps, for a thread that sends much: to the address of a place, to which bytes may be added

def _address():
    """(array, index, number of a block) -> int32, the address of the place of array[index] in that block's shared memory."""
    if SIMULATED:
        return simulator.cluster_address
    assembly = ir.InlineAsm(ir.FunctionType(WORD, [WORD, WORD]), "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r")

    def typed(typingctx, array, index, block):
        for t in (index, block):
            _check("address", "r", t)
        return types.int32(array, types.int64, types.int32), lambda context, builder, signature, args: builder.call(
            assembly, [_shared_address(context, builder, array, *args[:2]), args[2]])
    return intrinsic(_named("address", 3)(typed))


def _operation(name, text, n_operands):
    """(words..) in place."""
    if SIMULATED:
        return getattr(simulator, f"cluster_{name}")
    assembly = ir.InlineAsm(ir.FunctionType(ir.VoidType(), [WORD] * n_operands), text,
                            ",".join(["r"] * n_operands + ["~{memory}"]), True)

    def typed(typingctx, *operands):
        for t in operands:
            _check(name, "r", t)
        return types.void(*[types.int32] * n_operands), _void(
            lambda context, builder, signature, args: builder.call(assembly, args))
    return intrinsic(_named(name, n_operands)(typed))


address = _address()
# (address, address of an mbarrier of the same block, words..): 1, 2 or 4 words, on as many
send1, send2, send4 = (_operation(f"send{n}", _sent(n, "$0", 2, "$1"), 2 + n) for n in (1, 2, 4))
# (address of an mbarrier): arrives at it, so that its block may store to what the thread has read. It tells of nothing that the
# thread wrote: a release to the cluster would wait for all copies on their way
arrive_at = _operation("arrive_at", "mbarrier.arrive.shared::cluster.b64 _, [$0];", 1)


@device
def leave(lane, array, index):
    """As `mbarrier.leave`, at the barriers of both blocks of a cluster of two: a warp is done with what they brought to both."""
    syncwarp()  # all lanes have read
    if lane < 2:
        arrive_at(address(array, index, lane))
