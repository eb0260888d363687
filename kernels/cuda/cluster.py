"""What the blocks of a cluster do together (PTX ISA, "barrier.cluster", "mapa", target sm_90): they run at the same time, and
each writes to the shared memory of the others."""
from llvmlite import ir
from numba import types

from .ptx import SIMULATED, _check, _effect, _instruction, _named, _shared_address, _void

if SIMULATED:
    from . import simulator
else:
    from numba.cuda.extending import intrinsic

# () The barrier of all threads of the cluster, in two steps, between which a thread goes on. What was written before `arrive`, to
# any memory, is seen behind the `wait`.
arrive = _effect("cluster_arrive", "barrier.cluster.arrive.release;")
wait = _effect("cluster_wait", "barrier.cluster.wait.acquire;")
# () -> the number of the block in its cluster
rank = _instruction("cluster_rank", "mov.u32 $0, %cluster_ctarank;", "r", "", in_place=True)


def _send():
    """(array, index, number of a block, word, index of an mbarrier): a message to the place of array[index] in that block's
    shared memory, whose arrival takes four bytes off those that the mbarrier of that index there expects. The block must have
    begun, and made that one, and it must not have ended."""
    if SIMULATED:
        return simulator.cluster_send
    assembly = ir.InlineAsm(
        ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * 4),
        "{ .reg .b32 there, barrier; mapa.shared::cluster.u32 there, $0, $1; mapa.shared::cluster.u32 barrier, $3, $1; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], $2, [barrier]; }", "r,r,r,r,~{memory}", True)

    def typed(typingctx, array, index, block, word, barrier):
        for t in (index, block, word, barrier):
            _check("send", "r", t)

        def emit(context, builder, signature, args):
            there, barrier = (_shared_address(context, builder, array, args[0], args[i]) for i in (1, 4))
            builder.call(assembly, [there, args[2], args[3], barrier])
        return types.void(array, types.int64, types.int32, types.int32, types.int64), _void(emit)
    return intrinsic(_named("send", 5)(typed))


send = _send()
