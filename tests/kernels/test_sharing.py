"""Work that threads share: every unit once, whoever is awake."""
import os
import threading
import time

import numpy as np
import pytest

from ggml_py.kernels import threads
from ggml_py.kernels.compile import jit
from ggml_py.quant.device_functions import device
from ggml_py.kernels.threads import sharing


@device
def count(u, args):
    counts, values, add = args
    counts[u] += 1
    values[u] = u + add


each = sharing(count)


@jit(parallel=True)
def kernel(control, counts, values, add):
    each(control, counts.shape[0], (counts, values, add))


@pytest.fixture
def n_threads():
    before = threads.get_num_threads()
    yield threads.set_num_threads
    threads.set_num_threads(before)


def check(n: int, add: float) -> None:
    counts, values = np.zeros(n, np.int64), np.zeros(n)
    assert kernel(counts, values, add) is None
    assert (counts == 1).all() and (values == np.arange(n) + add).all()


def test_every_unit_once(n_threads):
    rng = np.random.default_rng(0)
    for n in (1, threads.MOST):
        n_threads(n)
        for _ in range(3000):
            check(int(rng.integers(0, 40)), float(rng.random()))


def test_workers_that_sleep_are_woken_and_nobody_waits_for_them(n_threads):
    if threads.MOST < 2:
        pytest.skip("one CPU")
    n_threads(2)
    for are_awake in (True, False, True, False, True):
        end = time.monotonic() + 30  # the first time they are started, and what they do may have to be compiled
        while bool(threads.workers.control[threads.AWAKE]) != are_awake and time.monotonic() < end:
            if are_awake:
                check(1000, 1.5)  # by this thread alone at first
            else:
                time.sleep(0.001)
        assert bool(threads.workers.control[threads.AWAKE]) == are_awake


@device
def note_order(u, args):
    """Unit 0 waits a while for the one in the middle."""
    done, clock, order = args
    if u == 0:
        for _ in range(10_000_000):
            if threads.look(done, done.shape[0] // 2) != 0:
                break
    order[u] = threads.take(clock, 0, 1)
    threads.put(done, u, 1)


each_in_order = sharing(note_order)


@jit(parallel=True)
def kernel_in_order(control, done, clock, order):
    each_in_order(control, done.shape[0], (done, clock, order))


def test_a_worker_begins_with_its_own_share(n_threads):
    """Not with the next unit: that is another thread's."""
    if threads.MOST < 2:
        pytest.skip("one CPU")
    n_threads(2)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        done, clock, order = np.zeros(10, np.int64), np.zeros(1, np.int64), np.zeros(10, np.int64)
        kernel_in_order(done, clock, order)
        assert sorted(order) == list(range(10))
        if order[5] < order[1]:
            return
    raise AssertionError("the worker never began with unit 5")


def test_more_threads_than_there_is_room_for_shares(n_threads, monkeypatch):
    """Nothing is written behind `control`."""
    control = threads.workers.control
    monkeypatch.setattr(threads, "MOST", 3 * len(control))
    behind = np.full(8 * len(control), 7, np.int64)
    mine = behind[:len(control)]
    mine[:] = 0
    mine[threads.THREADS] = 3 * len(control)
    monkeypatch.setattr(threads.workers, "control", mine)
    monkeypatch.setattr(threads.workers, "start", lambda: None)
    check(1000, 1.5)
    assert (behind[len(control):] == 7).all()


def test_threads_that_come_together(n_threads):
    """One job at a time."""
    done = []

    def some(add):
        for _ in range(300):
            check(17, add)
        done.append(add)
    each = [threading.Thread(target=some, args=(float(i),)) for i in range(4)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    assert sorted(done) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("address", ["memory", 0, -1, 1 << 47])
def test_what_workers_ask_for_changes_nothing(n_threads, address):
    """Also where there is no memory."""
    n_threads(threads.MOST)
    memory = np.arange(1 << 16)
    for i in range(300):
        threads.ahead(memory.ctypes.data if address == "memory" else address, memory.nbytes)
        check(i % 40, i)
    assert (memory == np.arange(1 << 16)).all()


def test_a_worker_asks_for_a_part_of_its_cache(n_threads):
    n_threads(threads.MOST)
    most, control = (threads.MOST - 1) * threads.AHEAD_BYTES, threads.workers.control
    for n_bytes in 0, 100, most, most + 1, 1 << 40:
        named = control[threads.NAMED]
        threads.ahead(1000, n_bytes)
        assert tuple(control[threads.NAMED:threads.END + 1]) == (named + 1, 1000, 1000 + min(n_bytes, most))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_has_its_own(n_threads):
    n_threads(threads.MOST)
    for _ in range(20):
        check(100, 1.0)
    if not (pid := os.fork()):
        started = len(threads.workers.started)
        for _ in range(200):
            check(100, 1.0)
        os._exit(0 if started == 0 and len(threads.workers.started) == threads.MOST - 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    check(100, 1.0)


@pytest.mark.parametrize("n", [0, -1, threads.MOST + 1])
def test_as_many_threads_as_there_are_cpus(n):
    with pytest.raises(ValueError, match=f"^set_num_threads: must be 1 to {threads.MOST}, got {n}$"):
        threads.set_num_threads(n)
