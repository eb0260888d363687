"""Barriers at which a thread arrives and goes on, or waits without having arrived (PTX ISA, "mbarrier", target sm_90; sm_80 has
`begin`, `end`, `arrive`, `arrive_behind_copies` and `wait_by_tests`).

One is two words of shared memory on 8 bytes. Its *phase* ends when as many have arrived as it was made for, and the next one
begins, of the other parity; the first has parity 0. What was written before an arrival is seen behind the wait for its phase.
"""
from llvmlite import ir
from numba import types

from .ptx import SIMULATED, _address, _check, _named, _pointer, _shared_address, _void, device, syncwarp

WORDS = 2

if SIMULATED:
    from . import simulator
else:
    from numba.cuda.extending import intrinsic


def _operation(name, text, n_operands=0):
    """(array, index, words..) of a barrier at array[index]."""
    if SIMULATED:
        return getattr(simulator, f"barrier_{name}")
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * (1 + n_operands))
    assembly = ir.InlineAsm(kind, text, ",".join(["r"] * (1 + n_operands) + ["~{memory}"]), True)

    def typed(typingctx, array, index, *operands):
        for t in (index, *operands):
            _check(name, "r", t)
        return types.void(array, types.int64, *[types.int32] * n_operands), _void(
            lambda context, builder, signature, args: builder.call(
                assembly, [_shared_address(context, builder, array, *args[:2]), *args[2:]]))
    return intrinsic(_named(name, 2 + n_operands)(typed))


# (.., n): of n arrivals a phase; by one thread, seen behind a barrier of the block
begin = _operation("begin", "mbarrier.init.shared::cta.b64 [$0], $1;", 1)
# Before another one is made there; by one thread
end = _operation("end", "mbarrier.inval.shared::cta.b64 [$0];")
arrive = _operation("arrive", "mbarrier.arrive.shared::cta.b64 _, [$0];")
# When the thread's copies so far are there
arrive_behind_copies = _operation("arrive_behind_copies", "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];")
# (.., parity): until a phase of that parity is over: at once while the phase under way is of the other one
wait = _operation("wait",
                  "{ .reg .pred over; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1; @over bra OVER; bra AGAIN; "
                  "OVER: }", 1)
# The same for targets before sm_90
wait_by_tests = _operation("wait",
                           "{ .reg .pred over; AGAIN: mbarrier.test_wait.parity.shared::cta.b64 over, [$0], $1; @over bra OVER; "
                           "bra AGAIN; OVER: }", 1)
# (.., n_bytes): arrives, and lets the phase wait for as many bytes of bulk copies, or that other blocks of the cluster send
expect = _operation("expect", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", 1)


def _bring(name, text):
    """The intrinsic of a bulk copy: $0 and $1 are where to and from, $2 bytes, $3 the barrier."""
    if SIMULATED:
        return getattr(simulator, f"barrier_{name}")
    word, long = ir.IntType(32), ir.IntType(64)
    assembly = ir.InlineAsm(ir.FunctionType(ir.VoidType(), [word, long, word, word]), text, "r,l,r,r,~{memory}", True)

    def typed(typingctx, array, index, pointer, first, n_words, barrier):
        _pointer(name, pointer, 4)
        for t in (index, first, n_words, barrier):
            _check(name, "l", t)

        def emit(context, builder, signature, args):
            there, at = (_shared_address(context, builder, array, args[0], i) for i in (args[1], args[5]))
            builder.call(assembly, [there, _address(builder, *args[2:4]), builder.shl(args[4], word(2)), at])
        return types.void(array, types.int64, pointer, types.int64, types.int32, types.int64), _void(emit)
    return intrinsic(_named(name, 6)(typed))


# (array, index, pointer, first, n_words, barrier): one thread copies words from global memory, both on 16 bytes and a multiple of
# four; the phase under way at array[barrier], which expects them, ends with them
bring = _bring("bring", "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];")
# The same to that place of both blocks of a cluster of two, and for the phase at that barrier of each
bring_to_both = _bring("bring_to_both", "{ .reg .b16 both; mov.b16 both, 3; cp.async.bulk.shared::cluster.global"
                       ".mbarrier::complete_tx::bytes.multicast::cluster [$0], [$1], $2, [$3], both; }")


@device
def leave(lane, array, index):
    """A warp is done with what lies in a slot, and arrives at the barrier that says so."""
    syncwarp()  # all lanes have read
    if lane == 0:
        arrive(array, index)
