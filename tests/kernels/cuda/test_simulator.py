"""What the simulator shows: each of these kernels is right but for one thing."""
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from numba import cuda

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.cuda import cluster, mbarrier, ptx, wgmma
from ggml_py.kernels.cuda.launch import I32, U32, Kernel
from ggml_py.kernels.cuda.ptx import (SIMULATED, copies_commit, copies_wait, copies_wait_but, copy1, f32, fmax, fmax_nan, i32,
                                      ld, lds, shuffle, st, sts, syncwarp, u32)

N_THREADS = 64
if SIMULATED:
    wait_but_one = copies_wait_but(1)


def test_in_the_simulator():
    run_in_simulator(__file__)


def ran(kernel, type_x=I32, n_threads=N_THREADS, n_blocks=1, n_cluster=1, shared=0):
    """What a kernel of x, 0 .. 63, and out leaves in out."""
    machine = SimulatedMachine()
    x, out = (machine.upload(a) for a in (np.arange(N_THREADS, dtype=np.int32), np.full(N_THREADS * n_blocks, -7, np.int32)))
    machine.run(machine.target.launch(Kernel(kernel, (type_x, I32), n_threads, n_cluster=n_cluster, name="kernel"),
                                      n_blocks, n_threads, (x, out), shared))
    return machine.download(out, np.int32, N_THREADS * n_blocks).tolist()


def reversed_by(barrier):
    def kernel(x, out):
        shared, i = cuda.shared.array(N_THREADS, i32), cuda.threadIdx.x
        sts(shared, i, ld(x, i))
        barrier()
        st(out, i, lds(shared, N_THREADS - 1 - i))
    return kernel


def simulate_barriers():
    right = list(range(N_THREADS))[::-1]
    assert ran(reversed_by(cuda.syncthreads)) == right
    for barrier in (syncwarp, lambda: None):
        assert ran(reversed_by(barrier)) == ran(reversed_by(barrier)) != right


def simulate_barriers_that_not_all_come_to():
    def kernel(x, out):
        if cuda.threadIdx.x < 32:
            cuda.syncthreads()
        else:
            mbarrier.wait(shared_with_barrier(), 0, 0)

    def shared_with_barrier():
        shared = cuda.shared.array(2, i32)
        if cuda.threadIdx.x == 32:
            mbarrier.begin(shared, 0, 1)
        syncwarp()
        return shared
    with pytest.raises(RuntimeError,
                       match=r"threads wait for ever: 32 at .*test_simulator.py:\d+, of which \(0, 0, 0\) is one; 32 at "
                             r".*is one$"):
        ran(kernel)


def simulate_lanes_at_different_instructions():
    def kernel(x, out):
        i = cuda.threadIdx.x
        if i & 1:
            syncwarp()
        else:
            shuffle(i, 0)
    with pytest.raises(RuntimeError, match="the lanes of a warp are at different instructions") as error:
        ran(kernel)
    assert error.value.__notes__[0].endswith("of block (0, 0, 0)")


def simulate_a_thread_that_is_done_holds_up_no_barrier():
    def kernel(x, out):
        i = cuda.threadIdx.x
        if i < 32:
            cuda.syncthreads()
            st(out, i, ld(x, i))
    assert ran(kernel)[:32] == list(range(32))


MESSAGES = N_THREADS  # word of the mbarrier behind what is sent
ROOM = 4 * (N_THREADS + mbarrier.WORDS)


def send(shared, i, rank, word):
    cluster.send(shared, i, rank, word, MESSAGES)


def sender(n):
    """The same by one of n threads, to an address."""
    def send_words(shared, i, rank, word):
        if i % n == 0:
            there, barrier = (cluster.address(shared, index, rank) for index in (0, MESSAGES))
            by_number = {1: cluster.send1, 2: cluster.send2, 4: cluster.send4}
            by_number[n](there + 4 * i, barrier, *(u32(word + k) for k in range(n)))
    return send_words


def sent_by(begin, end, n_bytes=4 * N_THREADS, send=send):
    """What each of four blocks, two clusters, gets of the other one. begin, end: before and behind what is sent. n_bytes: that
    each expects."""
    def kernel(x, out):
        shared, i, rank = cuda.shared.array(0, u32), cuda.threadIdx.x, cluster.rank()
        if i == 0 and n_bytes:
            mbarrier.begin(shared, MESSAGES, 1)
            mbarrier.expect(shared, MESSAGES, n_bytes)
        begin()
        send(shared, i, 1 - rank, u32(N_THREADS * cuda.blockIdx.x + i))
        end(shared)
        st(out, N_THREADS * cuda.blockIdx.x + i, i32(lds(shared, N_THREADS - 1 - i)))
        cluster.meet()
    return ran(kernel, n_blocks=4, n_cluster=2, shared=ROOM)


def messages(shared):
    mbarrier.wait(shared, MESSAGES, 0)


@pytest.mark.parametrize("send", [send, *map(sender, (1, 2, 4))], ids=["place", "1", "2", "4"])
def simulate_clusters(send):
    """Words of the other block of the cluster. Those whose arrival nothing waits for are there or not: behind a barrier of the
    cluster as well."""
    right = [N_THREADS * (block ^ 1) + i for block in range(4) for i in reversed(range(N_THREADS))]
    assert sent_by(cluster.meet, messages, send=send) == right
    assert sent_by(cluster.meet, lambda shared: None, send=send) != right
    assert sent_by(cluster.meet, lambda shared: cluster.meet(), 4 * N_THREADS + 4, send) != right
    with pytest.raises(RuntimeError, match="threads wait for ever: 256 at|threads wait for ever: 128 at"):
        sent_by(cluster.meet, messages, 4 * N_THREADS + 4, send)


def simulate_bytes_that_nobody_expects():
    def end(shared):
        messages(shared)
        cluster.meet()
        if cuda.threadIdx.x == 0:
            mbarrier.end(shared, MESSAGES)
    with pytest.raises(RuntimeError, match="-4 bytes to come"):
        sent_by(cluster.meet, end, 4 * N_THREADS - 4)


def overwritten(arrive):
    """Words that the first block reads before and behind those that the second one sends in their place."""
    def kernel(x, out):
        shared, i = cuda.shared.array(0, u32), cuda.threadIdx.x
        if i == 0:
            mbarrier.begin(shared, MESSAGES, 1)
        sts(shared, i, u32(ld(x, i)))
        cluster.meet()
        if cluster.rank() == 0:
            st(out, i, i32(lds(shared, N_THREADS - 1 - i)))
            cuda.syncthreads()
            if i == 0:
                mbarrier.expect(shared, MESSAGES, 4 * N_THREADS)
                arrive(shared)
            messages(shared)
            st(out, N_THREADS + i, i32(lds(shared, N_THREADS - 1 - i)))
        else:
            messages(shared)
            cluster.send(shared, i, 0, u32(100 + i), MESSAGES)
        cluster.meet()
    return ran(kernel, n_blocks=2, n_cluster=2, shared=ROOM)


def simulate_an_arrival_at_another_block():
    found = overwritten(lambda shared: cluster.arrive_at(cluster.address(shared, MESSAGES, 1)))
    assert found == [*reversed(range(N_THREADS)), *reversed(range(100, 100 + N_THREADS))]
    with pytest.raises(RuntimeError, match="threads wait for ever"):
        overwritten(lambda shared: None)


def simulate_a_message_and_its_barrier_in_two_blocks():
    def send(shared, i, rank, word):
        cluster.send1(cluster.address(shared, i, rank), cluster.address(shared, MESSAGES, 1 - rank), word)
    with pytest.raises(RuntimeError, match="the mbarrier is in another block"):
        sent_by(cluster.meet, messages, send=send)


def simulate_clusters_that_do_not_meet():
    with pytest.raises(RuntimeError, match="block [01] of the cluster has (not begun|no mbarrier at word 64)"):
        sent_by(lambda: None, messages)
    with pytest.raises(RuntimeError, match="block [01] of the cluster has no mbarrier at word 64"):
        sent_by(cluster.meet, messages, 0)
    with pytest.raises(RuntimeError, match="block 1 of the cluster has ended"):
        ends_early()
    with pytest.raises(RuntimeError, match="a thread waits that has not arrived"):
        sent_by(cluster.wait, messages)
    with pytest.raises(RuntimeError, match="a thread arrives that has not waited"):
        sent_by(lambda: [cluster.arrive() for _ in range(2)], messages)
    with pytest.raises(IndexError, match="send: elements 66..66 of 66"):
        sends_behind_the_end()


def sends_behind_the_end():
    def kernel(x, out):
        shared = cuda.shared.array(0, u32)
        mbarrier.begin(shared, MESSAGES, 1)
        cluster.meet()
        cluster.send(shared, 66, 0, u32(1), MESSAGES)
    ran(kernel, n_threads=1, n_blocks=2, n_cluster=2, shared=ROOM)


def ends_early():
    """The second block, before the first one sends."""
    def kernel(x, out):
        cluster.meet()
        if cluster.rank() == 0:
            cluster.meet()
            cluster.send(cuda.shared.array(0, u32), cuda.threadIdx.x, 1, u32(1), MESSAGES)
    ran(kernel, n_blocks=2, n_cluster=2, shared=ROOM)


def simulate_a_cluster_that_waits_for_ever():
    def kernel(x, out):
        cluster.arrive()
        if cluster.rank() == 0:
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                mbarrier_of_nobody()
        cluster.wait()
        cluster.arrive()
        cluster.wait()

    def mbarrier_of_nobody():
        shared = cuda.shared.array(2, i32)
        mbarrier.begin(shared, 0, 1)
        mbarrier.wait(shared, 0, 0)
    with pytest.raises(RuntimeError, match=r"threads wait for ever: .*127 at .*1 at|threads wait for ever: .*1 at .*127 at"):
        ran(kernel, n_blocks=2, n_cluster=2, shared=4 * N_THREADS)


def copied_by(*waits):
    def kernel(x, out):
        shared, i = cuda.shared.array(2 * N_THREADS, u32), cuda.threadIdx.x
        for part in range(2):
            copy1(shared, part * N_THREADS + i, x, i)
            copies_commit()
        for wait in waits:
            wait()
        for part in range(2):
            if cuda.blockIdx.x == part:
                st(out, part * N_THREADS + i, lds(shared, part * N_THREADS + i))
    return ran(kernel, U32, n_blocks=2)


def simulate_copies():
    """Those that nothing waits for arrive or not."""
    values = list(range(N_THREADS))
    assert copied_by(copies_wait) == values * 2
    some, none = copied_by(wait_but_one), copied_by()
    assert some[:N_THREADS] == values and set(
        some[N_THREADS:]) > {-1} and {-1} < set(none[:N_THREADS]) and {-1} < set(none[N_THREADS:])


def simulate_arrivals_behind_copies():
    def kernel(x, out):
        shared, i = cuda.shared.array(N_THREADS + 2, u32), cuda.threadIdx.x
        if i == 0:
            mbarrier.begin(shared, N_THREADS, N_THREADS)
        cuda.syncthreads()
        copy1(shared, i, x, i)
        mbarrier.arrive_behind_copies(shared, N_THREADS)
        mbarrier.wait(shared, N_THREADS, 0)
        st(out, i, lds(shared, N_THREADS - 1 - i))
    assert ran(kernel, U32) == list(range(N_THREADS))[::-1]


def simulate_copies_that_no_arrival_was_behind():
    def kernel(x, out):
        shared, i = cuda.shared.array(2 * N_THREADS + 2, u32), cuda.threadIdx.x
        if i == 0:
            mbarrier.begin(shared, 2 * N_THREADS, N_THREADS)
        cuda.syncthreads()
        copy1(shared, i, x, i)
        mbarrier.arrive_behind_copies(shared, 2 * N_THREADS)
        copy1(shared, N_THREADS + i, x, i)
        mbarrier.wait(shared, 2 * N_THREADS, 0)
        st(out, i, lds(shared, i))
        st(out, N_THREADS + i, lds(shared, N_THREADS + i))
    found = ran(kernel, U32, n_blocks=2)
    assert found[:N_THREADS] == list(range(N_THREADS)) and {-1} < set(found[N_THREADS:])


def brought_by(n_bytes, wait=lambda shared: mbarrier.wait(shared, 2 * N_THREADS, 0)):
    """Two bulk copies of 64 words by one thread, which expects n_bytes."""
    def kernel(x, out):
        shared, i = cuda.shared.array(2 * N_THREADS + 2, u32), cuda.threadIdx.x
        if i == 0:
            mbarrier.begin(shared, 2 * N_THREADS, 1)
            for half in range(2):
                mbarrier.bring(shared, half * N_THREADS, x, 0, N_THREADS, 2 * N_THREADS)
            mbarrier.expect(shared, 2 * N_THREADS, n_bytes)
        cuda.syncthreads()
        wait(shared)
        st(out, i, lds(shared, i))
        st(out, N_THREADS + i, lds(shared, 2 * N_THREADS - 1 - i))
    return ran(kernel, U32, n_blocks=2)


def simulate_bulk_copies():
    values = list(range(N_THREADS))
    assert brought_by(8 * N_THREADS) == values + values[::-1]
    with pytest.raises(RuntimeError, match="threads wait for ever"):
        brought_by(8 * N_THREADS + 16)
    with pytest.raises(RuntimeError, match="threads wait for ever"):
        brought_by(4 * N_THREADS)


def simulate_bulk_copies_to_where_none_may_go():
    """Parts of 16 bytes that both arrays have, on 16 bytes."""
    def bringing(index, first, n_words):
        def kernel(x, out):
            shared = cuda.shared.array(N_THREADS + 2, u32)
            if cuda.threadIdx.x == 0:
                mbarrier.begin(shared, N_THREADS, 1)
                mbarrier.bring(shared, index, x, first, n_words, N_THREADS)
        return kernel
    ran(bringing(0, 0, 4), U32)
    for wrong in (2, 0, 4), (0, 2, 4), (0, 0, 6), (64, 0, 4), (0, 60, 8):
        with pytest.raises((IndexError, ValueError), match="bring"):
            ran(bringing(*wrong), U32)


def brought_to_both(wait):
    """Each block of a cluster brings half of 64 words to both."""
    def kernel(x, out):
        shared, i, rank = cuda.shared.array(0, u32), cuda.threadIdx.x, cluster.rank()
        if i == 0:
            mbarrier.begin(shared, MESSAGES, 1)
        cluster.meet()
        if i == 0:
            mbarrier.expect(shared, MESSAGES, 4 * N_THREADS)
            mbarrier.bring_to_both(shared, 32 * rank, x, 32 * rank, 32, MESSAGES)
        wait(shared)
        st(out, N_THREADS * cuda.blockIdx.x + i, i32(lds(shared, i)))
        cluster.meet()
    return ran(kernel, U32, n_blocks=8, n_cluster=2, shared=ROOM)


def simulate_bulk_copies_to_both_blocks():
    values = 8 * list(range(N_THREADS))
    assert brought_to_both(lambda shared: mbarrier.wait(shared, MESSAGES, 0)) == values
    assert brought_to_both(lambda shared: None) != values


def multiplied(*waits):
    """Sums of 32 ones by warps that write zeros in the place of B behind `waits`."""
    def kernel(x, out):
        shared, d, lane = cuda.shared.array(wgmma.ATOM_WORDS, u32), cuda.local.array(4, i32), cuda.threadIdx.x
        ones = i32(0x01010101)
        for word in range(lane, wgmma.ATOM_WORDS, 32):
            sts(shared, word, u32(ones))
        syncwarp()
        wgmma.products(8).start(d, shared, wgmma.place(shared, 0), ones, ones, ones, ones, i32(0))
        for wait in waits:
            wait(d)
        for word in range(lane, wgmma.ATOM_WORDS, 32):
            sts(shared, word, u32(0))
        syncwarp()
        wgmma.products(8).wait(d)
        st(out, cuda.blockIdx.x * 32 + lane, d[0])
    return set(ran(kernel, n_threads=32, n_blocks=16)[:32 * 16])


def simulate_products_under_way():
    """They read B until they are waited for."""
    assert multiplied(wgmma.products(8).wait) == {32}
    assert multiplied() == multiplied(wgmma.products(8).wait_but_one) == {0, 32}


def simulate_larger_ones():
    nan, zero = f32(np.nan), f32(0)
    for larger in fmax, fmax_nan:
        assert larger(f32(1), f32(2)) == larger(f32(2), f32(1)) == 2
        assert not any(np.signbit(larger(a, b)) for a, b in ((zero, -zero), (-zero, zero)))
        assert np.signbit(larger(-zero, -zero))
    assert fmax(nan, f32(1)) == fmax(f32(1), nan) == 1
    assert all(np.isnan(x) for x in (fmax(nan, nan), fmax_nan(nan, f32(1)), fmax_nan(f32(1), nan)))


@np.errstate(all="ignore")
def simulate_pairs_of_float16():
    """Any bits, and many sums of one magnitude. The last one is below half way by less than float32 has bits for."""
    words = np.random.default_rng(0).integers(0, 1 << 32, (2000, 3), dtype=np.uint32)
    words[::2] &= 0x3fff3fff
    words[-1] = 0x3c01, 0x0ffe, 0x3c01  # (1 + 2^-10) (2^-11 - 2^-21) + 1 + 2^-10
    a, b, c = words.view(np.float16).astype(np.float64).reshape(-1, 3, 2).transpose(1, 0, 2)
    assert (a * b + c).astype(np.float16)[-1, 0] == 1 + 2**-10 != (a * b + c).astype(f32).astype(np.float16)[-1, 0]
    for operation, operands, expected in ((ptx.add2, words[:, :2], a + b), (ptx.fma2, words, a * b + c),
                                          (ptx.halves, words[:, :2].copy().view(f32), words[:, :2].copy().view(f32))):
        found = np.array([operation(*each) for each in operands], np.uint32).view(np.float16).reshape(-1, 2)
        expected = expected.astype(np.float16)
        found[np.isnan(found)] = expected[np.isnan(expected)] = np.nan
        np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def simulate_what_nothing_wrote():
    def kernel(x, out):
        i = cuda.threadIdx.x
        own, shared, dynamic = cuda.local.array(2, i32), cuda.shared.array((2, 2), i32), cuda.shared.array(0, i32)
        assert dynamic.shape == (0,) and np.isnan(own.view(np.float32)).all()
        st(out, i, own[1] + shared[1, 0])
    assert ran(kernel) == [-2] * N_THREADS


def simulate_arrays_of_a_line():
    def kernel(x, out):
        a, b, i = cuda.shared.array(N_THREADS, i32), cuda.shared.array(N_THREADS, i32), cuda.threadIdx.x
        sts(a, i, i32(1))
        sts(b, i, i32(2))
        st(out, i, 10 * lds(a, i) + lds(b, i))
    assert ran(kernel) == [12] * N_THREADS
