"""Transfers on a GPU, with a kernel that spins in front of the copies; the fake driver against the real one; leaks."""
import gc
import os
import time
from itertools import islice

import numpy as np
import pytest
from cuda_simulator import no_gpu
from driver_programs import PROGRAMS, Interpreter
from hypothesis import HealthCheck, given, settings
from late_machines import CUDAMachine, FakeMachine, late_inputs
from races import SPINS, calls_of, check_rows, nap, rows
from tiny_models import write_model
from tiny_moe_models import write_moe_model
from transfer_checks import CHECKS, MODEL_CHECKS, NAIVE, check_exceptions, check_teardown, naive_pageable_write, transfers_of
from transfer_interleavings import Interleavings

from ggml_py import ExpertsOnHost, PlacementOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(no_gpu() is not None, reason=str(no_gpu()))]
N_CONTEXTS = 1000
N_RACES = 10_000  # steps of split models
SPREAD = 64 << 20  # bytes of free device memory


@pytest.fixture(scope="module")
def machine():
    return CUDAMachine(0.1)


@pytest.fixture(scope="module")
def quick_machine():
    return CUDAMachine(0.005)


@pytest.mark.parametrize("check", [check for check in NAIVE + CHECKS if check is not check_exceptions])
def test_late(machine, check):
    check(machine)


def test_exceptions(quick_machine):
    check_exceptions(quick_machine)


@pytest.mark.parametrize("close", [True, False])
def test_teardown(machine, close):
    check_teardown(machine, close)


@pytest.mark.parametrize("n", [64, 1 << 10, 1 << 16, 1 << 18, 1 << 24])
def test_naive_write_from_pageable_memory(machine, n, record_property):
    """CUDA leaves open when an asynchronous copy reads pageable memory, before or after the call returns: the fake takes the
    worst case, and whatever a driver does is one of both. The record says what this one does."""
    found = naive_pageable_write(machine, n, drop=False)
    record_property("late_bytes", int((found == 2).sum()))
    assert np.isin(found, [1, 2]).all()


def test_delay_takes_its_time(machine):
    stream = machine.stream()
    begin = time.perf_counter()
    machine.delay(stream).sync()
    assert 0.99 * machine.seconds <= time.perf_counter() - begin < 2 * machine.seconds + 0.1


def test_interleavings(quick_machine):
    class CUDAInterleavings(Interleavings):
        machine_class = staticmethod(lambda: quick_machine)

    from hypothesis.stateful import run_state_machine_as_test
    run_state_machine_as_test(CUDAInterleavings,
                              settings=settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True,
                                                database=None, suppress_health_check=list(HealthCheck)))


def test_fake_is_faithful():
    """Random programs have the same outcome on the fake driver and on CUDA, whose streams spin while the host goes on."""
    machine = CUDAMachine(0.03)

    @given(PROGRAMS)
    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def same(program):
        assert np.array_equal(Interpreter(FakeMachine()).run(program), Interpreter(machine).run(program))
    same()


def test_capture_is_refused(machine):
    """A copy in a captured graph would be replayed with an address of the ring; the capture itself goes on."""
    from cuda.bindings import driver
    with transfers_of(machine) as transfers:
        buffer = transfers.allocate(256, zeroed=True)
        handle = transfers.stream.handle
        status, = driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        assert status == driver.CUresult.CUDA_SUCCESS
        for call in (lambda: transfers.write(buffer, 0, np.ones(256, np.uint8)), lambda: transfers.read(buffer, 0, 256),
                     lambda: transfers.free(buffer),
                     lambda: transfers.allocate(1)):
            with pytest.raises(RuntimeError, match="the stream is being captured"):
                call()
        status, graph = driver.cuStreamEndCapture(handle)
        assert status == driver.CUresult.CUDA_SUCCESS
        driver.cuGraphDestroy(graph)
        assert not transfers.read(buffer, 0, 256).result().any()


@pytest.mark.parametrize("kv_write", ["set_rows", "cpy"])
@pytest.mark.parametrize("check", MODEL_CHECKS)
def test_late_model(machine, tmp_path, check, kv_write):
    from ggml_py import Model
    with Model.load(write_model(tmp_path / "tiny.gguf", types=("Q8_0", "F32")), device="cuda:0") as model:
        check(machine, model, kv_write=kv_write)


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other processes take device memory meanwhile: run without -n")
def test_contexts_leak_nothing(quick_machine, tmp_path, record_property):
    """Contexts made, used and closed: the pool's used bytes are what they were, free device memory too but for what drivers keep.
    The figures are printed (pytest -rP) and recorded in the report."""
    from cuda.bindings import driver
    from ggml_py import Model

    def memory():
        gc.collect()
        device = model.backend.target.device
        device.sync()
        status, free, _ = driver.cuMemGetInfo()
        assert status == driver.CUresult.CUDA_SUCCESS
        return device.memory_resource.attributes.used_mem_current, free

    def use(i):
        """One in two captures and replays a graph. The other is closed while a step of greedy generation that is ahead, a graph
        just captured, is held up by a kernel that spins; the iterator, which would have seven ids more, goes behind its
        context."""
        with model.new_context(n_ctx=64, n_ubatch=16) as context:
            if i % 2:
                ids = context.greedy(6, 8)
                with late_inputs(quick_machine, model.backend) as delays:
                    assert 0 <= next(ids) < 70
                assert context.ahead is not None and context.counters.captures == 1
                in_flight.append(not delays[-1].is_done)
                return
            assert np.array_equal(context.decode([1, 2, 3, 4, 5]), logits)
            for token in 6, 7, 8:
                context.decode([token], logits="argmax")
            assert (context.counters.captures, context.counters.replays) == (1, 2)

    in_flight = []
    with Model.load(write_model(tmp_path / "tiny.gguf", types=("Q8_0", "F32")), device="cuda:0") as model:
        with model.new_context(n_ctx=64) as context:
            logits = context.decode([1, 2, 3, 4, 5])
        for i in range(4):
            use(i)
        in_flight.clear()
        used, free = memory()
        begin = time.perf_counter()
        for i in range(N_CONTEXTS):
            use(i)
        used_after, free_after = memory()
        found = {"n_contexts": N_CONTEXTS, "n_in_flight": sum(in_flight), "seconds": round(time.perf_counter() - begin, 1),
                 "used_before": used,
                 "used_after": used_after, "free_before": free, "free_after": free_after}
        for name, value in found.items():
            record_property(name, value)
        print(", ".join(f"{name}: {value:,}" for name, value in found.items()))
        assert used_after == used
        assert abs(free_after - free) <= SPREAD
        assert sum(in_flight) >= 0.9 * N_CONTEXTS // 2  # the host may be held up as well
        assert model.backend.statistics.n_to_host >= 3 * N_CONTEXTS  # four and two


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other processes take device memory meanwhile: run without -n")
def test_contexts_over_two_devices_leak_nothing(tmp_path, monkeypatch):
    """Layers on the CPU and on the GPU, caches on both, weights that are streamed, pages that are locked."""
    from ggml_py import Model, PlacementOptions
    from ggml_py.backends import cuda
    from ggml_py.backends.transfers import LOCKED
    monkeypatch.setattr(cuda, "LEAST_LOCKED", 1)
    options = PlacementOptions(("cuda:0",), n_gpu_layers=2, offload=(("all", 3),))
    with Model.load(write_model(tmp_path / "tiny.gguf", types=("Q8_0", "F32")), placement=options) as model:
        backend = model.backends["cuda:0"]

        def use():
            with model.new_context(n_ctx=64, n_ubatch=16) as context:
                rows = [context.decode([1, 2, 3, 4, 5]), context.decode([6])]
                assert context.program(5, 1).streamed and not context.program(1, 1).streamed
                return np.concatenate([*rows, [[float(i)] * model.n_vocab for i in context.greedy(7, 2)]])

        def held():
            gc.collect()
            backend.target.device.sync()
            return backend.target.device.memory_resource.attributes.used_mem_current, len(LOCKED)
        expected = use()
        before = held()
        assert before[1] > 0
        for _ in range(N_CONTEXTS):
            assert np.array_equal(use(), expected)
        assert held() == before
        assert backend.statistics.n_brought > N_CONTEXTS and backend.statistics.n_pinned > N_CONTEXTS
    assert not LOCKED


RACES = {"streamed": dict(n_gpu_layers=2, offload=(("all", 1),)),
         "experts, side by side": dict(overrides=(ExpertsOnHost(),), offload=(("all", None),), hot_experts=0.5),
         "experts, streamed": dict(overrides=(ExpertsOnHost(),), offload=(("all", 2),), hot_experts=0.5),
         "caches": dict(n_gpu_layers=2, kv_offload=False)}


@pytest.mark.parametrize("name", RACES)
def test_split_models_win_every_race(tmp_path, monkeypatch, name, record_property):
    """Before each step a kernel that spins, for a time drawn at random, is put into the stream of the kernels, that of the
    weights, both or none, and the host waits too: whoever reads what is not there, or writes what is still read, gives other
    bits."""
    from ggml_py import Model
    from ggml_py.backends import cuda
    from ggml_py.graph import split
    from ggml_py.kernels.cuda.spin import spin
    from ggml_py.models import hot_experts
    for module, least in ((cuda, "LEAST_LOCKED"), (split, "WORTH"), (hot_experts, "PERIOD")):
        monkeypatch.setattr(module, least, 1)
    path, rng = tmp_path / "tiny.gguf", np.random.default_rng(0)
    write_moe_model(path, "qwen3moe", ("Q8_0",))
    calls = calls_of(rng)
    with Model.load(path, device="cpu") as model:
        expected = [*islice(rows(model, calls), len(calls))]
    with Model.load(path, placement=PlacementOptions(("cuda:0",), **RACES[name])) as model:
        backend = model.backends["cuda:0"]
        spins = [spin(backend.target, seconds) for seconds in SPINS]

        def delayed():
            backend.target.device.set_current()
            for stream in filter(None, (backend.stream, backend._bringing)):
                if rng.random() < 0.5:
                    spins[rng.integers(len(spins))](stream)
            nap(rng)
        try:
            check_rows(rows(model, calls, delayed), expected, N_RACES // len(RACES))
        finally:
            record_property("report", model.report())
