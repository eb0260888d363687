"""Checks of transfers on a machine where everything is late (`late_machines`): first the naive ways, which read garbage,
then ours, which never do."""
import gc
import sys
import threading
import weakref
from contextlib import contextmanager
from itertools import count, islice

import numpy as np
import pytest
from late_machines import late_inputs

from ggml_py.backends.transfers import Lease, LockedPages, Transfers
from ggml_py.testing import assert_bitwise_equal, digest

RING = 4096         # bytes; pieces of 1024
LONG = 3 * RING + 5
ROUNDS = 10
N_TURNS = 200       # of each of two threads


def random_bytes(rng, n: int) -> np.ndarray:
    return rng.integers(0, 256, n, np.uint8)


@contextmanager
def transfers_of(machine, i: int = 0, ring_bytes: int = RING):
    gc.collect()  # garbage of earlier checks has pinned memory, and to free that waits for all that is late
    transfers = Transfers(machine.drivers[i], machine.stream(i), ring_bytes)
    yield transfers
    transfers.close()
    machine.check()


def contents(transfers, buffer, n: int) -> np.ndarray:
    return transfers.read(buffer, 0, n).result()


def host_array(memory) -> np.ndarray:
    return np.asarray(Lease(memory, memory.size, read_only=False))


# The naive ways

def check_naive_read(machine):
    """Ids that a kernel computed are copied to the host, which goes on to read them: every time it reads what was there
    before."""
    stream, driver = machine.stream(), machine.drivers[0]
    with transfers_of(machine) as transfers:
        ids, new, host = transfers.allocate(256), transfers.allocate(256), driver.pinned(256)
        array = host_array(host)
        for n in range(ROUNDS):
            transfers.write(ids, 0, np.full(256, 1, np.uint8))
            transfers.write(new, 0, np.full(256, 2, np.uint8))
            contents(transfers, new, 256)
            array[:] = 3
            late = machine.delay(stream)
            driver.copy(int(ids.handle), int(new.handle), 256, stream)  # stands for the kernel
            driver.copy(int(host.handle), int(ids.handle), 256, stream)
            seen = array.copy()
            assert not late.is_done, "the delay is over too early to show anything"
            assert (seen == 3).all(), n
            stream.sync()
            assert (array == 2).all()


def check_naive_write(machine):
    """Bytes are staged in page-locked memory that is used again for the next ones: every time the first copy takes the second
    bytes."""
    stream, driver = machine.stream(), machine.drivers[0]
    with transfers_of(machine) as transfers:
        host = driver.pinned(256)
        array = host_array(host)
        buffers = [transfers.allocate(256) for _ in range(2)]
        contents(transfers, buffers[1], 1)
        for n in range(ROUNDS):
            late = machine.delay(stream)
            for value, buffer in enumerate(buffers):
                array[:] = value
                driver.copy(int(buffer.handle), int(host.handle), 256, stream)
            assert not late.is_done, "the delay is over too early to show anything"
            stream.sync()
            assert (contents(transfers, buffers[0], 256) == 1).all(), n


def naive_pageable_write(machine, n: int, drop: bool) -> np.ndarray:
    """What a copy from pageable memory takes that is overwritten, or dropped, right after the call."""
    stream, driver = machine.stream(), machine.drivers[0]
    with transfers_of(machine) as transfers:
        buffer = transfers.allocate(n)
        contents(transfers, buffer, 1)
        machine.delay(stream)
        source = machine.pageable(np.full(n, 1, np.uint8))
        driver.copy(int(buffer.handle), source.ctypes.data, n, stream)
        if drop:
            del source
        else:
            source[:] = 2
        stream.sync()
        return contents(transfers, buffer, n)


# Ours

def check_read(machine):
    """The scene of check_naive_read."""
    with transfers_of(machine) as transfers:
        ids, new = transfers.allocate(256), transfers.allocate(256)
        for _ in range(ROUNDS):
            transfers.write(ids, 0, np.full(256, 1, np.uint8))
            transfers.write(new, 0, np.full(256, 2, np.uint8))
            late = machine.delay(transfers.stream)
            transfers.copy(ids, 0, transfers, new, 0, 256)
            pending = transfers.read(ids, 0, 256)
            assert not late.is_done
            assert (pending.result() == 2).all()
            assert late.is_done


def check_write(machine):
    """The scene of check_naive_write, and that of pageable memory."""
    with transfers_of(machine) as transfers:
        buffers = [transfers.allocate(256) for _ in range(2)]
        source = machine.pageable(np.zeros(256, np.uint8))
        for _ in range(ROUNDS):
            late = machine.delay(transfers.stream)
            for value, buffer in enumerate(buffers):
                source[:] = value
                transfers.write(buffer, 0, source)
            source[:] = 9
            transfers.write(buffers[1], 0, np.full(256, 7, np.uint8))  # freed when the call returns
            pending = [transfers.read(buffer, 0, 256) for buffer in buffers]
            assert not late.is_done
            assert (pending[0].result() == 0).all() and (pending[1].result() == 7).all()


def check_sizes(machine):
    """Every kind of transfer, of nothing to more than the ring holds, at even and odd places."""
    rng = np.random.default_rng(0)
    with transfers_of(machine) as transfers, transfers_of(machine, 1) as others:
        for n in (0, 1, 63, 64, 1023, 1024, 1025, RING, LONG):
            for offset in (0, 3):
                values, more = random_bytes(rng, n), random_bytes(rng, n)
                buffer, second = transfers.allocate(n + offset + 2, zeroed=True), transfers.allocate(n + offset, zeroed=True)
                other = others.allocate(n + offset, zeroed=True)
                for t in transfers, others:
                    machine.delay(t.stream)
                source = values.copy()
                transfers.write(buffer, offset, source)
                source[:] = 0
                transfers.copy(second, offset, transfers, buffer, offset, n)
                others.copy(other, offset, transfers, second, offset, n)
                pinned = transfers.pinned(n)
                pinned[...] = more
                transfers.write(second, offset, pinned)
                results = [transfers.read(buffer, 0, n + offset + 2), transfers.read(second, offset, n),
                           others.read(other, 0, n + offset)]
                for b in buffer, second:
                    transfers.free(b)
                others.free(other)
                whole, of_second, of_other = (pending.result() for pending in results)
                assert (whole[offset:offset + n] == values).all() and not whole[:offset].any() and not whole[offset + n:].any()
                assert (of_second == more).all() and (of_other[offset:] == values).all() and not of_other[:offset].any()
        counts, pinned_counts = transfers.statistics, others.statistics
        assert counts.n_to_device == counts.n_pinned + 2 == 18 and counts.n_to_host == 36 and pinned_counts.n_peer == 18
        assert pinned_counts.bytes_peer == counts.bytes_pinned == counts.bytes_to_device == 2 * (
            0 + 1 + 63 + 64 + 1023 + 1024 + 1025 + RING + LONG)


def check_wrap_around(machine):
    """More bytes than the ring holds, in copies of all sizes, both ways at once,
    with nothing done before the host has to wait."""
    rng = np.random.default_rng(1)
    with transfers_of(machine) as transfers:
        n, pending = 1500, []
        buffer = transfers.allocate(n, zeroed=True)
        expected = np.zeros(n, np.uint8)
        late = machine.delay(transfers.stream)
        for _ in range(60):
            if late.is_done:  # the host was slower
                late = machine.delay(transfers.stream)
            first, last = sorted(rng.integers(0, n + 1, 2))
            values = random_bytes(rng, last - first)
            expected[first:last] = values
            transfers.write(buffer, first, values)
            values[:] = 0
            first, last = sorted(rng.integers(0, n + 1, 2))
            pending.append((transfers.read(buffer, first, last - first), expected[first:last].copy()))
        for i in rng.permutation(len(pending)):
            value, wanted = pending[i]
            assert (value.result() == wanted).all()
        counts = transfers.statistics
        assert counts.n_wraps > 5 and counts.n_waits >= 1 and counts.most_in_flight <= RING


def check_waits_are_short(machine):
    """A full ring waits for its oldest copy and a result for its own, not for what is queued behind them."""
    with transfers_of(machine) as transfers:
        buffer = transfers.allocate(RING, zeroed=True)
        machine.delay(transfers.stream)
        pending = transfers.read(buffer, 0, 64)
        late = machine.delay(transfers.stream)
        assert not pending.result().any() and not late.is_done
        late.sync()
        first = machine.delay(transfers.stream)
        transfers.write(buffer, 0, np.ones(RING, np.uint8))
        assert not first.is_done
        second = machine.delay(transfers.stream)
        transfers.write(buffer, 0, np.full(100, 2, np.uint8))
        assert first.is_done and not second.is_done
        assert transfers.statistics.n_waits == 1
        assert contents(transfers, buffer, 101).tolist() == [2] * 100 + [1]


def check_early_deletion(machine):
    """Sources, destinations and pending values that are dropped while copies are in flight."""
    with transfers_of(machine) as transfers:
        kept, pinned = transfers.allocate(512), transfers.pinned(512)
        pinned[...] = 5
        late = [machine.delay(transfers.stream) for _ in range(10)][-1]  # collecting garbage takes time
        memory = weakref.ref(pinned._memory)
        transfers.write(kept, 0, pinned)
        del pinned
        gc.collect()
        assert memory() is not None
        freed = transfers.allocate(512)
        transfers.write(freed, 0, np.full(512, 7, np.uint8))
        pending = transfers.read(freed, 0, 512)
        transfers.read(freed, 0, 512)
        transfers.free(freed)
        again = transfers.allocate(512)  # where the freed one was, if the order of the stream allows
        transfers.write(again, 0, np.full(512, 8, np.uint8))
        del freed
        dropped = transfers.allocate(512)
        transfers.write(dropped, 0, np.full(512, 9, np.uint8))
        last = transfers.read(dropped, 0, 512)
        del dropped
        gc.collect()
        assert not late.is_done
        others = [transfers.pinned(512) for _ in range(4)]  # would be where the dropped one was
        for other in others:
            other[...] = 6
        assert (contents(transfers, kept, 512) == 5).all() and (pending.result() == 7).all()
        assert (contents(transfers, again, 512) == 8).all() and (last.result() == 9).all()
        transfers.allocate(1)
        gc.collect()
        assert memory() is None


def check_pinned(machine):
    """While bytes of pinned memory are in flight nobody can write them, and while somebody can write them they do not fly."""
    with transfers_of(machine) as transfers:
        buffer, pinned = transfers.allocate(512), transfers.pinned(512)
        array = pinned.writable()
        array[:] = 1
        part = array[7:9]
        del array
        with pytest.raises(BufferError, match=r"write: an array of writable\(\) of this Pinned of 512 bytes is still alive"):
            transfers.write(buffer, 0, pinned)
        del part
        view = pinned.view()
        late = machine.delay(transfers.stream)
        transfers.write(buffer, 0, pinned)
        assert not late.is_done
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 2
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
        pending = transfers.read(buffer, 0, 512)
        pinned[3] = 2  # waits
        assert late.is_done and view[3] == 2 and view[4] == 1
        assert (pending.result() == 1).all()


class HookedDriver:
    """A driver that calls `hook` before each copy."""

    def __init__(self, driver, hook):
        self.driver, self.hook = driver, hook

    def __getattr__(self, name):
        return getattr(self.driver, name)

    def copy(self, *args):
        self.hook()
        self.driver.copy(*args)


def check_pinned_of_two_threads(machine):
    """A thread that wants to write pinned memory in the moment in which another one queues its copy: it waits for that copy."""
    def overwrite():
        pinned[...] = 2

    def hook():
        thread.start()
        thread.join(0.05)
        assert thread.is_alive(), "the bytes could be written before their copy was queued"
    thread = threading.Thread(target=overwrite)
    transfers = Transfers(HookedDriver(machine.drivers[0], hook), machine.stream(), RING)
    buffer, pinned = transfers.allocate(256), transfers.pinned(256)
    pinned[...] = 1
    machine.delay(transfers.stream)
    transfers.write(buffer, 0, pinned)
    transfers._ring.driver.hook = lambda: None
    thread.join()
    assert (contents(transfers, buffer, 256) == 1).all() and (pinned.view() == 2).all()
    transfers.close()
    machine.check()


def check_fork(machine):
    """Work on another stream comes after what the home stream was given before, and before what it is given later;
    whichever is late."""
    driver = machine.drivers[0]
    with transfers_of(machine) as transfers:
        side = machine.stream()
        for slow, fast in (transfers.stream, side), (side, transfers.stream):
            a, b = transfers.allocate(512), transfers.allocate(512, zeroed=True)
            late = machine.delay(slow)
            transfers.write(a, 0, np.full(512, 1, np.uint8))
            with transfers.fork(side):
                driver.copy(int(b.handle), int(a.handle), 512, side)
            transfers.write(a, 0, np.full(512, 2, np.uint8))
            transfers.free(a)
            c = transfers.allocate(512)
            transfers.write(c, 0, np.full(512, 3, np.uint8))
            machine.let_run(fast)
            assert not late.is_done
            assert (contents(transfers, b, 512) == 1).all()
        with pytest.raises(ZeroDivisionError), transfers.fork(side):
            machine.delay(side)
            driver.copy(int(b.handle), int(c.handle), 512, side)
            machine.drivers[1].enter()  # whichever device is current at the end
            1 / 0
        transfers.write(c, 0, np.full(512, 4, np.uint8))
        assert (contents(transfers, b, 512) == 3).all()


def check_peer(machine):
    """Copies between devices, back and forth, either of them late; the source is overwritten and freed at once."""
    with transfers_of(machine) as here, transfers_of(machine, 1) as there:
        for slow, fast in (here, there), (there, here):
            a, b = here.allocate(600), there.allocate(600, zeroed=True)
            late = machine.delay(slow.stream)
            here.write(a, 0, np.full(600, 1, np.uint8))
            there.copy(b, 1, here, a, 2, 500)
            here.write(a, 0, np.full(600, 2, np.uint8))
            pending = there.read(b, 0, 600)
            here.copy(a, 0, there, b, 0, 600)
            there.free(b)
            c = there.allocate(600)
            there.write(c, 0, np.full(600, 3, np.uint8))
            back = here.read(a, 0, 600)
            here.free(a)
            machine.let_run(fast.stream)
            assert not late.is_done
            wanted = [0] + 500 * [1] + 99 * [0]
            assert pending.result().tolist() == wanted and back.result().tolist() == wanted
            there.free(c)


def check_together(machine):
    """Two devices bring from each other, either of them late: what was there before the copies comes, and what is written behind
    them does not."""
    with transfers_of(machine) as here, transfers_of(machine, 1) as there:
        for slow, fast in (here, there), (there, here):
            ends = here, there
            mine, theirs = [end.allocate(600) for end in ends], [end.allocate(600, zeroed=True) for end in ends]
            late = machine.delay(slow.stream)
            for i, end in enumerate(ends):
                end.write(mine[i], 0, np.full(600, 1 + i, np.uint8))
                end.write(theirs[i], 0, np.full(600, 9, np.uint8))
            Transfers.copy_together([(end, theirs[i], 0, ends[1 - i], mine[1 - i], 2, 500) for i, end in enumerate(ends)])
            pending = [end.read(theirs[i], 0, 600) for i, end in enumerate(ends)]
            for i, end in enumerate(ends):
                end.write(mine[i], 0, np.full(600, 3, np.uint8))
                end.write(theirs[i], 0, np.full(600, 4, np.uint8))
                end.free(mine[i])
            machine.let_run(fast.stream)
            assert not late.is_done
            assert [each.result().tolist() for each in pending] == [500 * [2 - i] + 100 * [9] for i in range(2)]


class Interrupt(BaseException):
    """As Ctrl-C, which comes anywhere."""


class FaultyDriver:
    """A driver that is interrupted once, before or after one of its calls: at moment `at`."""

    def __init__(self, driver, at: int = -1):
        self.driver, self.moments, self.at = driver, count(), at

    def moment(self) -> None:
        if next(self.moments) == self.at:
            raise Interrupt

    def around(self, function, *args):
        self.moment()
        result = function(*args)
        self.moment()
        return result

    def enter(self):
        return self.around(self.driver.enter)

    def is_capturing(self, stream):
        return self.around(self.driver.is_capturing, stream.stream)

    def allocate(self, n_bytes, stream):
        return FaultyBuffer(self.around(self.driver.allocate, n_bytes, stream.stream), self)

    def pinned(self, n_bytes):
        return self.around(self.driver.pinned, n_bytes)

    def lock_pages(self, address, n_bytes):
        self.around(self.driver.lock_pages, address, n_bytes)

    def unlock_pages(self, address):
        self.driver.unlock_pages(address)

    def copy(self, to, source, n_bytes, stream, peer=None):
        return self.around(self.driver.copy, to, source, n_bytes, stream.stream, peer and peer.driver)


class FaultyBuffer:
    def __init__(self, buffer, driver):
        self.buffer, self.driver, self.handle, self.size = buffer, driver, int(buffer.handle), buffer.size

    def fill(self, value, *, stream):
        self.driver.around(lambda: self.buffer.fill(value, stream=stream.stream))

    def close(self, stream):
        self.driver.around(self.buffer.close, stream.stream)
        self.handle = 0


class FaultyStream:
    def __init__(self, stream, driver):
        self.stream, self.driver = stream, driver

    def record(self):
        return self.driver.around(self.stream.record)

    def wait(self, event):
        return self.driver.around(self.stream.wait, event)

    def sync(self):
        self.stream.sync()


def check_bring(machine):
    """What is brought lands behind the last reader of what was there, beside what follows, and before the first that wants it;
    whether it comes as early or as late as it may."""
    rng, n = np.random.default_rng(0), 1000
    for early in False, True:
        with transfers_of(machine) as transfers:
            slot, before, between, after = (transfers.allocate(n) for _ in range(4))
            old, new, array = random_bytes(rng, n), random_bytes(rng, n), np.empty(n, np.uint8)
            array[:] = new
            pages = LockedPages(transfers.driver, array)
            transfers.bring(between, 0, array)()  # makes the stream
            for _ in range(ROUNDS):
                transfers.write(slot, 0, old)
                late = machine.delay(transfers.stream)
                transfers.copy(before, 0, transfers, slot, 0, n)
                if not early:
                    machine.delay(transfers._bringing)
                arrive = transfers.bring(slot, 0, array)
                assert not late.is_done, "the delay is over too early to show anything"
                if early:
                    machine.let_run(transfers._bringing)
                transfers.copy(between, 0, transfers, before, 0, n)
                arrive()
                transfers.copy(after, 0, transfers, slot, 0, n)
                for buffer, expected in (before, old), (between, old), (after, new):
                    assert_bitwise_equal(contents(transfers, buffer, n), expected, "brought")
            arrive = transfers.bring(slot, 0, array)
            transfers.settle()
            pages.close()
            array[:] = 0
            arrive()
            assert_bitwise_equal(contents(transfers, slot, n), new, "settled")
            assert transfers.statistics.bytes_brought == (ROUNDS + 2) * n
            with pytest.raises(ValueError, match="bring: bytes 1 to"):
                transfers.bring(slot, 1, array)


def check_exceptions(machine):
    """An exception at any moment of any call: what was whole before stays whole, and all goes on afterwards."""
    for at in count():
        driver, other = FaultyDriver(machine.drivers[0]), FaultyDriver(machine.drivers[1])
        transfers = Transfers(driver, FaultyStream(machine.stream(), driver), RING)
        there = Transfers(other, FaultyStream(machine.stream(1), other), RING)
        side = FaultyStream(machine.stream(), driver)
        kept, buffer, big, far = (transfers.allocate(700), transfers.allocate(700, zeroed=True),
                                  transfers.allocate(LONG, zeroed=True), there.allocate(700))
        transfers.write(kept, 0, np.full(700, 1, np.uint8))
        before = transfers.read(kept, 0, 700)
        pinned, second = transfers.pinned(700), transfers.pinned(700)
        pinned[...], second[...] = 2, 3
        machine.delay(transfers.stream.stream)
        driver.moments, driver.at = count(), at

        def scene():
            source = np.full(LONG, 4, np.uint8)
            try:
                transfers.write(big, 0, source)
            finally:
                source[:] = 99
            transfers.write(buffer, 0, pinned)
            pinned[...] = 98
            with transfers.fork(side):
                driver.copy(int(kept.handle), int(buffer.handle), 700, side)
            there.copy(far, 0, transfers, buffer, 0, 700)
            pending = transfers.read(big, 0, LONG)
            transfers.write(buffer, 0, second)
            transfers.free(transfers.allocate(100, zeroed=True))
            return pending

        try:
            pending = scene()
        except Interrupt:
            pending = None
        failed, driver.at, has_value = next(driver.moments) > at, -1, pending is not None
        # whatever the exception left half done, pinned memory that flies keeps its bytes ...
        pinned[...] = 97
        second[...] = 96
        # ... and neither the ring nor the memory of devices is lost
        source = np.arange(700).astype(np.uint8)
        transfers.write(buffer, 0, source)
        assert (contents(transfers, buffer, 700) == source).all()
        assert (before.result() == 1).all()
        found = contents(transfers, big, LONG)
        assert set(found.tolist()) <= {0, 4}
        copied = contents(transfers, kept, 700)
        assert (copied == 1).all() or (copied == 2).all()
        there.copy(far, 0, transfers, buffer, 0, 700)
        assert (contents(there, far, 700) == source).all()
        if pending is not None:
            assert (pending.result() == 4).all() and (copied == 2).all()
        transfers.close()
        there.close()
        del before, found, copied, pending
        gc.collect()
        assert not getattr(machine.drivers[0], "locked", {}), at  # of memory that is used again, by the fake
        machine.check()
        if not failed:
            assert has_value and at > 40, at
            return


def check_threads(machine):
    """Two threads share the transfers of a device, and one of them uses those of another as well."""
    with transfers_of(machine) as transfers, transfers_of(machine, 1) as others:
        shared, errors, start = transfers.allocate(2 * 1000, zeroed=True), [], threading.Barrier(2)

        def work(seed):
            try:
                rng, first = np.random.default_rng(seed), 1000 * seed
                start.wait()
                pinned, mine = transfers.pinned(1000), np.zeros(1000, np.uint8)
                far = others.allocate(1000)
                for i in range(N_TURNS):
                    source = random_bytes(rng, 1000)
                    mine[:] = source
                    if i % 3:
                        transfers.write(shared, first, source)
                        source[:] = 0
                    else:
                        pinned[...] = source
                        transfers.write(shared, first, pinned)
                    own = transfers.allocate(1000)
                    transfers.copy(own, 0, transfers, shared, first, 1000)
                    pending = transfers.read(own, 0, 1000)
                    others.copy(far, 0, transfers, own, 0, 1000)
                    transfers.copy(own, 0, others, far, 0, 1000)
                    back = transfers.read(own, 0, 1000)
                    transfers.free(own)
                    if i % 4 == 0:
                        assert (back.result() == mine).all()
                        assert (pending.result() == mine).all()
                        assert (contents(others, far, 1000) == mine).all()
                assert (contents(transfers, shared, 2000)[first:first + 1000] == mine).all()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        interval = sys.getswitchinterval()
        try:
            sys.setswitchinterval(1e-6)  # seconds: the threads take turns as often as they can
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        finally:
            sys.setswitchinterval(interval)
        assert not any(thread.is_alive() for thread in threads)
        if errors:
            raise errors[0]


def check_teardown(machine, close: bool):
    """Transfers that are closed, or dropped, with all kinds of copies in flight: what was promised arrives,
    nothing is freed too early."""
    keeper = Transfers(machine.drivers[0], machine.stream(), RING)
    kept = keeper.allocate(1000, zeroed=True)
    keeper.read(kept, 0, 1).result()
    transfers = Transfers(machine.drivers[0], machine.stream(), RING)
    buffer = transfers.allocate(1000, zeroed=True)
    late = machine.delay(transfers.stream)
    transfers.write(buffer, 0, np.full(1000, 1, np.uint8))
    pinned = transfers.pinned(500)
    pinned[...] = 2
    transfers.write(buffer, 500, pinned)
    pending = transfers.read(buffer, 0, 1000)
    keeper.copy(kept, 0, transfers, buffer, 0, 1000)
    del pinned
    assert not late.is_done
    if close:
        transfers.close()
        transfers.close()
        assert late.is_done
        with pytest.raises(RuntimeError, match="write: these transfers are closed"):
            transfers.write(buffer, 0, np.zeros(1, np.uint8))
    else:
        del transfers
        gc.collect()
        assert late.is_done
    wanted = 500 * [1] + 500 * [2]
    assert pending.result().tolist() == wanted
    assert contents(keeper, kept, 1000).tolist() == wanted
    keeper.close()
    machine.check()


# Models

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def check_decode(machine, model, **settings):
    """Runs of which everything is late, from the inputs on, give the same logits."""
    def play():
        with model.new_context(n_ctx=64, **settings) as context:
            return [context.decode(PROMPT[first:first + n], logits="all") for first, n in ((0, 4), (4, 1), (5, 1), (6, 2))]
    wanted = play()
    with late_inputs(machine, model.backend) as delays:
        found = play()
    assert len(delays) == 5  # the table of rotary angles, and the inputs of each run
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert_bitwise_equal(a, b, f"run {i}")


def single_steps(context, token: int):
    """What `greedy` gives, with nothing ahead."""
    while True:
        token = int(context.decode([token], logits="argmax")[0])
        yield token


def check_greedy(machine, model, **settings):
    """Generation of which everything is late, the step that is ahead too, gives the ids of single steps: stopped early, positions
    taken away from under a step in flight, and gone on with; and so in a context that gets the memory of one that was closed with
    a step in flight."""
    def play(context, greedy, check_flight):
        context.decode(PROMPT, logits="none")
        ids = greedy(context, 5)
        found = list(islice(ids, 6))
        check_flight(context)
        ids.close()
        found.append(digest(context.decode([7])))
        ids = greedy(context, 8)
        found += islice(ids, 3)
        check_flight(context)
        context.seq_rm(0, 5)
        found += [*islice(ids, 3), digest(context.decode([2, 6])), *islice(ids, 3)]
        check_flight(context)
        return found, ids

    def still_late(context):
        assert context.ahead is not None and not delays[-1].is_done
    with model.new_context(n_ctx=64, **settings) as context:
        wanted, _ = play(context, single_steps, lambda context: None)
    assert len(set(wanted)) > 8
    with late_inputs(machine, model.backend) as delays:
        for _ in range(2):
            with model.new_context(n_ctx=64, **settings) as context:
                found, ids = play(context, lambda context, token: context.greedy(token, 40), still_late)
            assert found == wanted, f"greedy gives {found}, single steps {wanted}"
        ids.close()


CHECKS = [check_read, check_write, check_sizes, check_wrap_around, check_waits_are_short, check_early_deletion, check_pinned,
          check_pinned_of_two_threads, check_fork, check_peer, check_together, check_bring, check_exceptions, check_threads]
NAIVE = [check_naive_read, check_naive_write]
MODEL_CHECKS = [check_decode, check_greedy]
