"""Transfers against the scripted fake of a driver, in which everything is as late as it can be."""
import copy
import gc
import pickle
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from driver_programs import PROGRAMS, Interpreter
from fake_driver import GONE, FakeError, FakeGPU
from hypothesis import given, settings, strategies as st
from late_machines import FakeMachine, LateBackend
from tiny_models import write_model
from transfer_checks import (CHECKS, MODEL_CHECKS, NAIVE, RING, check_bring, check_early_deletion, check_exceptions,
                             check_fork, check_greedy, check_peer, check_pinned, check_read, check_sizes, check_teardown,
                             check_together, check_waits_are_short, check_wrap_around, naive_pageable_write, transfers_of)

import ggml_py
from ggml_py.backends import cuda, transfers as transfers_module
from ggml_py.backends.cpu import CPUBackend
from ggml_py.backends.transfers import Flight, Pending, Pinned, Ring, Statistics, Transfers
from ggml_py.base.placement import Override, PlacementOptions
from ggml_py.files.gguf import GGUFFile
from ggml_py.graph import split
from ggml_py.graph.program import Crossing, Landing
from ggml_py.testing import assert_bitwise_equal
from ggml_py.engine.context import Context
from ggml_py.engine.model import Model


@pytest.fixture
def machine():
    return FakeMachine()


@pytest.mark.parametrize("check", NAIVE + CHECKS)
def test_late(machine, check):
    check(machine)


@pytest.mark.parametrize("check", CHECKS)
def test_late_in_memory_that_is_used_again(machine, monkeypatch, check):
    """All reads as the large ones: they land in memory that others had, taken out of the ring by several threads."""
    monkeypatch.setattr(transfers_module, "LEAST_KEPT", 1)
    monkeypatch.setattr(transfers_module, "LEAST_LANDING", 16)
    monkeypatch.setattr(transfers_module.os, "cpu_count", lambda: 3)
    check(machine)


@pytest.mark.parametrize("close", [True, False])
def test_teardown(machine, close):
    check_teardown(machine, close)


def test_naive_write_from_pageable_memory():
    """A driver may read pageable memory as late as this one does: it takes what came after, or what is left of freed memory."""
    assert (naive_pageable_write(FakeMachine(), 256, drop=False) == 2).all()
    machine = FakeMachine()
    with pytest.raises(AssertionError, match="256 bytes at 0x[0-9a-f]+ were gone when a copy read them"):
        naive_pageable_write(machine, 256, drop=True)
    gpu = machine.drivers[0]
    assert (gpu.bytes[:256] == GONE).all()


def check_memory_is_used_again(machine):
    """What nobody has an array of: not what a view, a pending value or a copy on its way still wants."""
    with transfers_of(machine) as transfers:
        buffer = transfers.allocate(3 * RING)

        def read(i: int, n: int = 3 * RING):
            transfers.write(buffer, 0, np.full(n, i, np.uint8))
            return transfers.read(buffer, 0, n)
        first = read(1).result()
        address, view = first.ctypes.data, first[5:].reshape(-1, 1)[::2].view(np.int8)
        del first
        second = read(2).result()
        assert second.ctypes.data != address and (view == 1).all()
        del view
        third = read(3).result()  # of a similar size
        assert third.ctypes.data == address and (second == 2).all() and (third == 3).all()
        del third
        smaller = read(4, RING + 1).result()
        assert smaller.ctypes.data != address and (smaller == 4).all()
        pending, forgotten = read(5), read(6)
        del forgotten
        last = read(7).result()
        assert (pending.result() == 5).all() and (last == 7).all() and (second == 2).all() and (smaller == 4).all()


def test_memory_is_used_again(machine, monkeypatch):
    monkeypatch.setattr(transfers_module, "LEAST_KEPT", RING)
    check_memory_is_used_again(machine)
    monkeypatch.setattr(transfers_module, "MOST_KEPT", 5 * RING)
    landings = transfers_module.Landings(machine.drivers[0])
    arrays = [landings.new(n)[0] for n in (2 * RING, 3 * RING, 4 * RING, RING - 1)]
    while arrays:
        arrays.pop(0)
    assert [memory.size for memory in landings.kept] == [4 * RING]
    transfers_module._count_fork()
    array, directly = landings.new(2 * RING)
    assert not directly and not landings.kept
    transfers_module._count_fork()
    del array
    assert not landings.kept


def test_other_sizes_and_the_end(machine, monkeypatch):
    """What was used last is kept in the place of older memory; nothing once all is closed."""
    monkeypatch.setattr(transfers_module, "LEAST_KEPT", RING)
    monkeypatch.setattr(transfers_module, "MOST_KEPT", 8 * RING)
    with transfers_of(machine) as transfers:
        buffer, landings = transfers.allocate(4 * RING), transfers._landings

        def read_two(n: int):
            arrays = [transfers.read(buffer, 0, n * RING).result() for _ in range(2)]
            arrays.clear()
            return [memory.size // RING for memory in landings.kept]
        assert (read_two(4), read_two(1), read_two(1)) == ([4, 4], [4, 1, 1], [4, 1, 1])
        assert len(machine.drivers[0].locked) == 2
        late = transfers.read(buffer, 0, RING).result()
    assert not landings.kept
    del late
    gc.collect()
    assert not landings.kept and not machine.drivers[0].locked


class Landers(ThreadPoolExecutor):
    """The second part is queued, and then comes an exception."""
    error = RuntimeError("can't start new thread")

    def submit(self, function, *args):
        self.n = getattr(self, "n", 0) + 1
        future = super().submit(lambda: (time.sleep(0.05), function(*args)))
        if self.n == 2:
            raise self.error
        return future


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_parts_that_are_left_copy_nothing_later(machine, monkeypatch, error):
    """The slot is filled anew when the call has returned, or raised."""
    monkeypatch.setattr(transfers_module, "LEAST_LANDING", 16)
    monkeypatch.setattr(transfers_module.os, "cpu_count", lambda: 3)
    monkeypatch.setattr(transfers_module, "ThreadPoolExecutor", Landers)
    monkeypatch.setattr(Landers, "error", error)
    with transfers_of(machine) as transfers:
        slot, to = np.ones(96, np.uint8), np.zeros(96, np.uint8)
        with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
            transfers._ring.take_out(slot, to)
            assert (to == 1).all()
        slot[:] = 9
        time.sleep(0.2)
        assert not (to == 9).any()


def test_a_forked_process_unlocks_nothing(machine, monkeypatch):
    """It has the arrays, and no device."""
    driver, array = machine.drivers[0], np.zeros(RING, np.uint8)
    driver.enter()
    pages = transfers_module.LockedPages(driver, array)
    with monkeypatch.context() as fork:
        fork.setattr(transfers_module.os, "getpid", lambda: 0)
        pages.close()
    assert list(driver.locked) == [array.ctypes.data] == [*transfers_module.LOCKED]
    transfers_module._unlock(driver, array.ctypes.data, transfers_module.os.getpid())
    assert not driver.locked and not transfers_module.LOCKED


def test_memory_that_cannot_be_locked(machine, monkeypatch):
    """It is used again all the same, by the ring; where it is locked, none is locked in the end."""
    monkeypatch.setattr(transfers_module, "LEAST_KEPT", RING)
    refused = lambda address, n_bytes: (_ for _ in ()).throw(RuntimeError("CUDA: CUDA_ERROR_NOT_SUPPORTED"))
    for lock, n_locked in (None, 1), (refused, 0):
        if lock:
            monkeypatch.setattr(machine.drivers[0], "lock_pages", lock)
        with transfers_of(machine) as transfers:
            buffer = transfers.allocate(2 * RING)
            for i in range(3):
                transfers.write(buffer, 0, np.full(2 * RING, i, np.uint8))
                assert (transfers.read(buffer, 0, 2 * RING).result() == i).all()
            assert len(machine.drivers[0].locked) == n_locked and len(transfers._landings.kept) == 1
        del transfers
        gc.collect()
        assert not machine.drivers[0].locked


# The checks find mistakes

def without_wait(self):
    pass


def source_forgotten(self, ring, end, source=None, landing=None, begin=Flight.__init__):
    begin(self, ring, end, None, landing)


def noted_behind_the_copy(self, flight, *copies):
    for to, source, n_bytes in copies:
        self.driver.copy(to, source, n_bytes, self.stream)
    flight.event = self.stream.record()
    self.flights.append(flight)
    self.head = flight.end


def closed_at_once(self):
    self.flights.clear()
    self.memory.close()


MISTAKES = {
    "nothing waits": (Flight, "wait", without_wait,
                      [check_read, check_sizes, check_wrap_around, check_pinned, check_waits_are_short]),
    "sources are not kept": (Flight, "__init__", source_forgotten, [check_early_deletion]),
    "sources can be written": (Pinned, "departing", lambda self, flight: nullcontext(), [check_pinned]),
    "streams are not ordered": (Transfers, "fork", lambda self, *args: nullcontext(), [check_fork, check_peer, check_sizes]),
    "flights are noted too late": (Ring, "queue", noted_behind_the_copy, [check_exceptions]),
    "closing does not wait": (Ring, "close", closed_at_once,
                              [lambda machine: check_teardown(machine, True), lambda machine: check_teardown(machine, False)]),
}


def arriving_at_once(self, buffer, offset, data):
    """Without a wait for what is queued."""
    stream = self._bringing = self._bringing or self.driver.stream()
    self.driver.copy(int(buffer.handle) + offset, data.ctypes.data, data.nbytes, stream)
    event = stream.record()
    return lambda: self.stream.wait(event)


def never_awaited(self, buffer, offset, data, bring=Transfers.bring):
    bring(self, buffer, offset, data)
    return lambda: None


@staticmethod
def together_at_once(copies):
    """Behind what the receivers have to do alone."""
    for to, buffer, offset, source, source_buffer, source_offset, n_bytes in copies:
        to.driver.copy(int(buffer.handle) + offset, int(source_buffer.handle) + source_offset, n_bytes, to.stream, source.driver)


MISTAKES |= {"copies both ways do not wait for what they bring": (Transfers, "copy_together", together_at_once, [check_together])}
MISTAKES |= {"weights come before the last reader": (Transfers, "bring", arriving_at_once, [check_bring]),
             "weights are not awaited": (Transfers, "bring", never_awaited, [check_bring])}


def lent_twice(self, n_bytes, new=transfers_module.Landings.new):
    array, directly = new(self, n_bytes)
    self.kept.append(array.base._memory)
    return array, directly


def landers_not_awaited(self, slot, to):
    threading.Timer(0.5, np.copyto, (to, slot)).start()


MISTAKES |= {"bytes leave the ring too late": (Ring, "take_out", landers_not_awaited, [check_sizes, check_wrap_around])}
MISTAKES |= {"memory is used again while somebody has it": (transfers_module.Landings, "new", lent_twice,
                                                            [check_memory_is_used_again])}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_checks_find_mistakes(monkeypatch, mistake):
    owner, name, wrong, checks = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    monkeypatch.setattr(transfers_module, "LEAST_KEPT", RING)
    for check in checks:
        with pytest.raises((AssertionError, FakeError, pytest.fail.Exception)):
            check(FakeMachine())


# Models

@pytest.fixture
def late_model(tmp_path):
    machine = FakeMachine(1 << 22)
    with Model(GGUFFile.open(write_model(tmp_path / "tiny.gguf", types=("Q8_0", "F32"))), LateBackend(machine)) as model:
        yield machine, model
    machine.check()


class EarlyBackend(LateBackend):
    """Weights come as early as they may."""
    def bring(self, *args):
        arrive = super().bring(*args)
        while self._bringing.step():
            pass
        return arrive


@pytest.mark.parametrize("n_ahead", [1, 2, 100])
@pytest.mark.parametrize("backend", [LateBackend, EarlyBackend])
def test_late_weights(tmp_path, monkeypatch, backend, n_ahead):
    """Weights of the host that are brought to a device where everything is late: the bits of one device."""
    monkeypatch.setattr(split, "WINDOW", 0)
    monkeypatch.setattr(split, "LEAST_AHEAD", n_ahead)
    monkeypatch.setattr(cuda, "LEAST_LOCKED", 1)
    path, tokens = write_model(tmp_path / "tiny.gguf", types=("Q8_0", "F32")), [3, 1, 4, 1, 5]
    with Model.load(path, device="cpu") as model, model.new_context(n_ctx=32) as context:
        expected = [context.decode(tokens, logits="all") for _ in range(3)]
    machine = FakeMachine(1 << 22)
    options = PlacementOptions(("cpu:1",), overrides=(Override("blk", "cpu"),), offload=(("all", 1),))
    late = backend(machine, "cpu:1")
    with Model(GGUFFile.open(path), late, CPUBackend(), placement=options) as model:
        assert len(machine.drivers[0].locked) == 18
        with model.new_context(n_ctx=32) as context:
            for rows in expected:
                assert_bitwise_equal(context.decode(tokens, logits="all"), rows, "logits")
            program, = context.programs.values()
            assert {node.device for node in program.nodes} == {"cpu:1"} and len(program.streamed) == 18
        assert late.statistics.n_brought == 3 * 18
    assert not machine.drivers[0].locked
    machine.check()


HALVES = PlacementOptions(("cpu:1",), n_gpu_layers=2)
OFFLOADED = PlacementOptions(("cpu:1",), n_gpu_layers=2, offload=(("all", 4),))
TOKENS = [3, 1, 4, 1, 5, 9, 2], [6], [5], [3, 5, 8, 9]


def logits_over(machine, path, options):
    """Of micro-batches of several tokens and of one, where all that one device does is late."""
    late = LateBackend(machine, "cpu:1")
    with Model(GGUFFile.open(path), late, CPUBackend(), placement=options) as model, \
            model.new_context(n_ctx=32, n_ubatch=5) as context:
        assert machine.drivers[0].locked
        rows = [context.decode(tokens, logits="last") for tokens in TOKENS]
        assert late.statistics.n_pinned
    return np.concatenate(rows)


@pytest.mark.parametrize("options", [HALVES, OFFLOADED])
def test_late_crossings(tmp_path, monkeypatch, options):
    """Hidden states and caches that are copied from and to the host's memory itself: the bits of one device; who does not wait
    is found."""
    monkeypatch.setattr(cuda, "LEAST_LOCKED", 1)
    path, machine = write_model(tmp_path / "tiny.gguf", types=("Q8_0", "F32")), FakeMachine(1 << 22)
    with Model.load(path, device="cpu") as model, model.new_context(n_ctx=32) as context:
        expected = np.concatenate([context.decode(tokens, logits="last") for tokens in TOKENS])
    assert_bitwise_equal(logits_over(machine, path, options), expected, "logits")
    machine.check()
    for mistaken, name in (Flight, "wait"), (Crossing, "settle"), (Landing, "settle"):
        if (options, mistaken) in ((OFFLOADED, Crossing), (HALVES, Landing)):
            continue  # whoever writes has waited for something that came later; nothing comes back
        with monkeypatch.context() as mistake:
            mistake.setattr(mistaken, name, lambda self: None)
            assert not np.array_equal(logits_over(FakeMachine(1 << 22), path, options), expected), mistaken


@pytest.mark.parametrize("kv_write", ["set_rows", "cpy"])
@pytest.mark.parametrize("check", MODEL_CHECKS)
def test_late_model(late_model, check, kv_write):
    """Nothing leaks, though contexts are closed with steps in flight."""
    machine, model = late_model
    used = machine.used_bytes()
    check(machine, model, kv_write=kv_write)
    assert machine.used_bytes() == used


def copied_at_once(self, buffer, offset, source, source_buffer, source_offset, n_bytes):
    self.memory(buffer)[offset:offset + n_bytes] = source.memory(source_buffer)[source_offset:source_offset + n_bytes]


def written_from_where_they_are(self, buffer, offset, data):
    place = self.memory(buffer)[offset:offset + data.nbytes]
    self.stream.queue(lambda: np.copyto(place, data.reshape(-1).view(np.uint8)))


def kept_as_it_is(self):
    self.ahead = None


@pytest.mark.parametrize("owner, name, wrong", [
    (LateBackend, "copy", copied_at_once), (LateBackend, "write", written_from_where_they_are),
    (Context, "_take_back", kept_as_it_is)], ids=lambda value: getattr(value, "__name__", value))
def test_the_check_of_greedy_generation_finds_mistakes(late_model, monkeypatch, owner, name, wrong):
    """The token is copied before the step that gives it has run, inputs of the next step are written over those that have yet to
    be copied, a step stays that nobody asked for."""
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError, match="^greedy gives .* single steps "):
        check_greedy(*late_model)


# Pending values

PENDING = Pending(np.zeros(4, np.uint8))


@pytest.mark.parametrize("use",
                         [np.asarray, len, list, bool, int, float, bytes, lambda p: p[0], lambda p: 0 in p, lambda p: p == 0,
                          lambda p: p + 1,
                                 lambda p: 1 + p, lambda p: np.add(p, 1), lambda p: np.zeros(4) + p, lambda p: p.view(np.float32),
                          lambda p: p.shape,
                                 copy.copy, copy.deepcopy, pickle.dumps])
def test_pending_is_no_array(use):
    with pytest.raises((TypeError, AttributeError),
                       match=r"Pending: .* of bytes that may still be on their way; call \.result\(\)"):
        use(PENDING)


def test_pending_refuses_buffers():
    with pytest.raises(TypeError):
        memoryview(PENDING)


def test_results():
    with transfers_of(FakeMachine()) as transfers:
        buffer = transfers.allocate(8)
        transfers.write(buffer, 0, np.arange(2, dtype=np.float32))
        pending = transfers.read(buffer, 0, 8)
        assert pending.result().view(np.float32).tolist() == [0, 1]
        assert pending.result() is pending.result() and pending.result().flags.owndata
    backend = CPUBackend()
    buffer = backend.upload(np.arange(8, dtype=np.uint8))
    pending = backend.read(buffer, 2, 3)
    buffer[:] = 0
    assert pending.result().tolist() == [2, 3, 4]


def test_nobody_else_copies():
    """Copies between host and device are made by the driver of transfers.py alone."""
    root = Path(ggml_py.__file__).resolve().parent
    found = {path.name for folder in (root, root.parent / "kernels", root.parent / "bench") for path in folder.rglob("*.py")
             if re.search(r"cuMemcpy(HtoD|DtoH|Async|Peer|Batch)|\.copy_(to|from)\(|cuMemAllocHost|cuMemHostRegister",
                          path.read_text())}
    assert found == {"cuda_driver.py"}


# Errors, statistics, leaks

def test_errors(machine):
    with transfers_of(machine) as transfers:
        buffer = transfers.allocate(100)
        for call, message in [
                (lambda: transfers.write(buffer, 90, np.zeros(11, np.uint8)),
                 "write: bytes 90 to 101 of a buffer, allowed: 0 to 100"),
                (lambda: transfers.read(buffer, -1, 5), "read: bytes -1 to 4 of a buffer, allowed: 0 to 100"),
                (lambda: transfers.read(buffer, 0, -5), "read: bytes 0 to -5 of a buffer, allowed: 0 to 100"),
                (lambda: transfers.copy(buffer, 0, transfers, buffer, 1, 100),
                 "copy: bytes 1 to 101 of a buffer, allowed: 0 to 100"),
                (lambda: transfers.write(buffer, 0, transfers.pinned(101)),
                 "write: bytes 0 to 101 of a buffer, allowed: 0 to 100"),
                (lambda: Transfers(machine.drivers[0], transfers.stream, 255), "ring_bytes: must be at least 256, got 255")]:
            with pytest.raises(ValueError, match=message):
                call()
        transfers.free(buffer)
        transfers.free(buffer)
        with pytest.raises(ValueError, match="read: the buffer has been freed"):
            transfers.read(buffer, 0, 0)
    with transfers_of(machine) as transfers:
        buffer = transfers.allocate(100)
        transfers.stream.is_captured = True
        for name, call in {"write": lambda: transfers.write(buffer, 0, np.zeros(1)), "read": lambda: transfers.read(buffer, 0, 1),
                           "free": lambda: transfers.free(buffer), "allocate": lambda: transfers.allocate(1)}.items():
            with pytest.raises(RuntimeError, match=f"{name}: the stream is being captured; allowed: before and after a capture"):
                call()
        transfers.stream.is_captured = False
    for name, call in {"allocate": lambda: transfers.allocate(1), "pinned": lambda: transfers.pinned(1)}.items():
        with pytest.raises(RuntimeError, match=f"{name}: these transfers are closed"):
            call()


def test_statistics(machine):
    with transfers_of(machine) as transfers, transfers_of(machine, 1) as others:
        buffer, other = transfers.allocate(RING), others.allocate(RING)
        transfers.write(buffer, 0, np.zeros(RING, np.uint8))
        transfers.write(buffer, 0, np.zeros(100, np.uint8))
        transfers.write(buffer, 0, transfers.pinned(7))
        transfers.read(buffer, 0, 10)
        others.copy(other, 0, transfers, buffer, 0, 50)
        counts = transfers.statistics
        assert counts.wait_seconds > 0
        counts.wait_seconds = 0.00149
        assert counts == Statistics(2, RING + 100, 1, 7, 1, 10, 0, 0, 0, 0, 1, RING, 1, 0.00149)
        assert transfers.report().splitlines() == [
            "2 copies to the device (4,196 bytes), 1 from pinned memory (7), 1 to the host (10), 0 from other devices (0), "
            "0 weights from the host (0)",
            "pinned ring of 4,096 bytes: at most 4,096 in flight, 1 rounds, 1 waits of 1.5 ms in all"]
        assert (others.statistics.n_peer, others.statistics.bytes_peer) == (1, 50)


def test_nothing_leaks():
    """Contexts made, used and closed again and again, some of them only dropped: no memory of the device or page-locked memory
    stays."""
    machine = FakeMachine()
    gpu = machine.drivers[0]
    stream = gpu.stream()
    for i in range(200):
        transfers = Transfers(gpu, stream, RING)
        buffers = [transfers.allocate(n, zeroed=True) for n in (100, 5000)]
        pinned = transfers.pinned(300)
        pinned[...] = i
        transfers.write(buffers[1], 0, np.full(5000, i, np.uint8))
        transfers.write(buffers[1], 7, pinned)
        pending = transfers.read(buffers[1], 0, 5000)
        if i % 4:
            transfers.free(buffers[0])
            transfers.free(buffers[1])
        if i % 3:
            transfers.close()
        del transfers, buffers, pinned
        assert (pending.result() == i % 256).all()
    del pending
    gc.collect()
    stream.sync()
    machine.check()
    assert gpu.used_bytes == 0 and not gpu.blocks and [(h.offset, h.size) for h in gpu.holes] == [(0, len(gpu.bytes))]
    assert not [owner for _, _, owner in gpu.world.host if owner() is not None]


# The fake

@given(PROGRAMS, st.lists(st.integers(0, 3), max_size=80))
@settings(max_examples=100, deadline=None)
def test_programs_have_one_outcome(program, choices):
    """Of a program of driver_programs, whichever stream is ahead; test_gpu_transfers compares it with that of a real driver."""
    lazy, stepped = FakeMachine(), FakeMachine()
    wanted = Interpreter(lazy).run(program)
    found = Interpreter(stepped, before_sync=lambda: [stepped.world.step(index) for index in choices]).run(program)
    assert np.array_equal(wanted, found)
    lazy.check()
    stepped.check()


def test_fake_is_strict(machine):
    """It refuses a thread without a device and memory that it does not know, and sees what uses memory outside of its time."""
    gpu = FakeGPU()
    with pytest.raises(FakeError, match="the device current in this thread is None, expected one"):
        gpu.pinned(1)
    gpu, other = machine.drivers
    stream, side = gpu.stream(), gpu.stream()
    gpu.enter()
    with pytest.raises(FakeError, match="the device current in this thread is fake:0, expected fake:1"):
        other.stream().record()
    a, b = gpu.allocate(256, stream), gpu.allocate(256, stream)
    with pytest.raises(FakeError, match="is memory of another device than fake:1"):
        other.copy(a.handle, b.handle, 1, other.stream(), peer=gpu)
    with pytest.raises(FakeError, match="is memory of another device than fake:1"):
        other.copy(other.address, b.handle, 1, other.stream())
    with pytest.raises(FakeError, match="are not memory"):
        gpu.copy(a.handle, a.handle + 1000, 256, stream)
    gpu.copy(b.handle, a.handle, 256, side)
    side.sync()  # before the allocations
    assert [violation.split(" ", 4)[4]
            for violation in machine.world.violations] == ["were gone when a copy read them", "were gone when they were written"]
    machine.world.violations.clear()
    gpu.copy(b.handle, a.handle, 256, side)
    address = a.handle
    a.close(stream)
    assert gpu.allocate(256, stream).handle == address != gpu.allocate(256, side).handle
    stream.sync()
    side.sync()
    assert len(machine.world.violations) == 1 and "gone when a copy read" in machine.world.violations[0]
    with pytest.raises(FakeError, match="out of memory"):
        gpu.allocate(1 << 20, stream)
