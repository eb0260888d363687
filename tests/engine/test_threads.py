"""Threads that share a model, a context or a tokenizer get the bits of one thread; so do forked processes."""
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import UserError
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.graph.program import Program
from ggml_py.kernels import threads
from ggml_py.testing import assert_bitwise_equal
from places import environment
from queueing_backend import QueueingBackend
from tiny_models import write_model

N, N_VOCAB = 30, 70
SETTINGS = dict(n_ctx=2 * 64, n_seq_max=2)


def tokens(seq_id: int) -> list[int]:
    return [(7 * seq_id + 3 * i + 1) % N_VOCAB for i in range(N)]


def decoded(context, seq_id: int) -> np.ndarray:
    """float32 [N, n_vocab]: a sequence token by token."""
    return np.concatenate([context.decode([token], seq_id) for token in tokens(seq_id)])


def together(*functions) -> list:
    """What functions give that run in threads of their own."""
    results, errors, start = [None] * len(functions), [], threading.Barrier(len(functions))

    def work(i):
        try:
            start.wait()
            results[i] = functions[i]()
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.fixture
def interruptible(monkeypatch):
    """Every thread has lost the interpreter to another one between the writing of a step's inputs and its run."""
    write = CPUBackend.write

    def slow(self, *args):
        write(self, *args)
        time.sleep(1e-3)
    monkeypatch.setattr(CPUBackend, "write", slow)


@pytest.fixture
def expected(model):
    """Logits of both sequences, computed by one thread."""
    with model.new_context(**SETTINGS) as context:
        return [decoded(context, 0), decoded(context, 1)]


def test_two_threads_share_a_context(model, expected, interruptible):
    with model.new_context(**SETTINGS) as context:
        for found, wanted in zip(together(lambda: decoded(context, 0), lambda: decoded(context, 1)), expected):
            assert_bitwise_equal(found, wanted, "two threads, one context")


def test_two_contexts_of_a_model_in_two_threads(model, expected, interruptible, monkeypatch):
    """Their micro-batches are queued one after the other: on a GPU they share a stream, and what its kernels leave for the
    host."""
    queue, inside = Program.queue, threading.Lock()

    def alone(self, *args):
        assert inside.acquire(blocking=False), "two runs are queued at once"
        try:
            return queue(self, *args)
        finally:
            inside.release()
    monkeypatch.setattr(Program, "queue", alone)
    with model.new_context(**SETTINGS) as first, model.new_context(**SETTINGS) as second:
        for found, wanted in zip(together(lambda: decoded(first, 0), lambda: decoded(second, 1)), expected):
            assert_bitwise_equal(found, wanted, "two threads, two contexts")


def test_contexts_come_and_go_beside_others(model, expected, interruptible):
    def visitors():
        for _ in range(5):
            with model.new_context(**SETTINGS) as context:
                context.decode(tokens(1)[:3], 1, "none")
                context.describe()
                context.seq_rm(1, 2)
                assert_bitwise_equal(context.decode([tokens(1)[2]], 1), expected[1][2:3], "a visitor")
    with model.new_context(**SETTINGS) as context:
        found, *_ = together(lambda: decoded(context, 0), visitors, visitors)
    assert_bitwise_equal(found, expected[0], "beside visitors")


def test_other_threads_between_the_ids_of_greedy(model, expected, interruptible):
    """Two generations and a thread that decodes, on one context: whatever is queued ahead is taken back for the others."""
    def greedy(context, seq_id):
        context.decode([1, 2, 3], seq_id, "none")
        return list(context.greedy(5, 20, seq_id))
    settings = dict(n_ctx=3 * 64, n_seq_max=3)
    with model.new_context(**settings) as context:
        wanted = greedy(context, 0)
    with model.new_context(**settings) as context:
        *found, logits = together(lambda: greedy(context, 1), lambda: greedy(context, 2), lambda: decoded(context, 0))
        assert found == [wanted, wanted] and len(set(wanted)) > 2
        assert_bitwise_equal(logits, expected[0], "beside greedy")
        assert context.ahead is None and [context.memory.length(seq_id) for seq_id in range(3)] == [N, 23, 23]


def test_a_generation_that_waits_holds_nothing(model):
    """Between two ids of a generation another thread has its turn; and ending it does not wait for that thread."""
    with model.new_context(**SETTINGS) as context:
        ids = context.greedy(5, 20)
        first = list(islice(ids, 3))
        together(lambda: context.decode([1, 2], 1))
        assert len([*first, *islice(ids, 2)]) == 5
        held, done = threading.Event(), threading.Event()

        def hold():
            with context.lock:
                held.set()
                assert done.wait(60)
        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        ids.close()  # as the garbage collector does, in whatever thread
        done.set()
        holder.join()
        assert context.decode([1], 1).shape == (1, N_VOCAB) and context.ahead is None and context.memory.length(0) == 5


def test_a_tokenizer_in_two_threads(path):
    from smollm2 import require
    from ggml_py.tokenizer import Tokenizer
    tokenizer, text = Tokenizer.from_gguf(require()), "Measure twice, cut once. \N{SNOWMAN} 'tis 42\n" * 20
    wanted = tokenizer.encode(text)
    work = lambda: [(ids := tokenizer.encode(text), tokenizer.decode(ids)) for _ in range(20)]
    assert together(work, work, work) == [[(wanted, text)] * 20] * 3


# Kernels that share work, and processes

def test_contexts_that_share_the_workers(wide):
    """Of one context, of two of a model, of two models: each thread's bits are those that it has alone."""
    with Model.load(wide, device="cpu") as model, Model.load(wide, device="cpu") as other:
        with model.new_context(**SETTINGS) as context:
            wanted = [decoded(context, 0), decoded(context, 1)]
        with model.new_context(**SETTINGS) as context:
            assert_equal(together(lambda: decoded(context, 0), lambda: decoded(context, 1)), wanted)
        for second_model in model, other:
            with model.new_context(**SETTINGS) as first, second_model.new_context(**SETTINGS) as second:
                assert_equal(together(lambda: decoded(first, 0), lambda: decoded(second, 1)), wanted)


def assert_equal(found, wanted) -> None:
    assert [all((a == b).all() for a, b in zip(*each)) for each in zip(found, wanted)] == [True, True]


def run(code, *args, **env):
    """In a process that can import this file."""
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], env=environment(Path(__file__).parent, **env),
                          capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose products are shared by threads."""
    return write_model(tmp_path_factory.mktemp("models") / "wide.gguf", "llama", ("F32",), n_layer=1, n_ff=8192, n_vocab=N_VOCAB)


FORK = """
import os, sys
from test_threads import *
from ggml_py.kernels import threads

with Model.load(sys.argv[1], device="cpu") as model, model.new_context(**SETTINGS) as context:
    wanted = context.decode(tokens(0))
    for generation in "child", "grandchild":
        if pid := os.fork():
            print(generation, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            break
        context.clear()
        assert (context.decode(tokens(0)) == wanted).all()
        with Model.load(sys.argv[1], device="cpu") as other, other.new_context(**SETTINGS) as new:
            assert (new.decode(tokens(0)) == wanted).all()
        assert len(threads.workers.started) == threads.get_num_threads() - 1 == threads.MOST - 1, len(threads.workers.started)
    if generation == "child":
        context.clear()
        assert (context.decode(tokens(0)) == wanted).all()  # and the parent still has all its threads
        print(threads.get_num_threads() == threads.MOST)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_forked_processes_run_kernels(wide):
    """By threads of their own."""
    done = run(FORK, wide)
    assert done.stdout.splitlines() == ["grandchild 0", "child 0", "True"] and not done.stderr, done.stderr


POOL = """
import multiprocessing, sys
from test_threads import *

if __name__ == "__main__":
    method, when, path = sys.argv[1:]
    if when == "before":
        processes = multiprocessing.get_context(method).Pool(2)
    wanted = logits_of(path)
    if when == "after":
        processes = multiprocessing.get_context(method).Pool(2)
    with processes:
        print(all(found == wanted for found in processes.map(logits_of, [path] * 4)))
"""


def logits_of(path) -> bytes:
    with Model.load(path, device="cpu") as model, model.new_context(**SETTINGS) as context:
        return context.decode(tokens(0)).tobytes()


@pytest.mark.parametrize("method, when", [("fork", "after"), ("fork", "before"), ("spawn", "after")])
def test_pools_of_processes(method, when, wide):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"there is no {method} here")
    done = run(POOL, method, when, wide)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_forked_processes_number_their_symbols_differently():
    """Else two of them would leave code on disk whose symbols are equal, of different functions."""
    from numba.core.bytecode import FunctionIdentity

    def next_number():
        read, write = os.pipe()
        if not (pid := os.fork()):
            os.write(write, str(next(FunctionIdentity._unique_ids)).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(write)
        with os.fdopen(read) as file:
            return int(file.read())
    numbers = {next_number() for _ in range(4)}
    assert len(numbers) == 4 and next(FunctionIdentity._unique_ids) not in numbers


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_waits_for_kernels_of_other_threads():
    """So that the lock around them is free in the child."""
    from ggml_py.kernels.compile import parallel_lock
    held = threading.Event()

    def hold():
        with parallel_lock:
            held.set()
            time.sleep(0.2)
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    if not (pid := os.fork()):
        os._exit(0 if parallel_lock.acquire(timeout=10) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    thread.join()
    with parallel_lock:  # the parent's is free too
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_context_that_another_thread_is_using_is_refused_in_a_forked_process(path):
    """The model and other contexts are free, whatever that thread holds."""
    with Model.load(path, device="cpu") as model, model.new_context(**SETTINGS) as context, model.new_context(**SETTINGS) as idle:
        held, done = threading.Event(), threading.Event()

        def hold():
            with context.lock, model.lock:
                held.set()
                assert done.wait(60)
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        if not (pid := os.fork()):
            try:
                idle.seq_rm(0)
                assert model.lock.acquire(timeout=10)
                context.decode([1])
            except RuntimeError as error:
                os._exit(0 if "another thread was using it when this process was forked" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        done.set()
        thread.join()
        assert context.decode([1]).shape == idle.decode([1]).shape == (1, N_VOCAB)


def test_a_model_of_a_GPU_is_refused_in_a_forked_process(path, monkeypatch):
    with Model(GGUFFile.open(path), QueueingBackend()) as model, model.new_context(**SETTINGS) as context:
        ids = context.greedy(5, 10)
        next(ids)
        loaded_by = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: loaded_by + 1)
            for call in (lambda: context.decode([1]), lambda: next(ids), lambda: context.seq_rm(0), context.describe):
                with pytest.raises(RuntimeError, match=f"forked from process {loaded_by}, which loaded the model on cpu; allow"):
                    call()
            context.close(), model.close()  # what is not this process's stays as it is
        assert context.decode([1]).shape == (1, N_VOCAB)


def test_threads_for_micro_batches_of_several_tokens(tmp_path, monkeypatch):
    if threads.MOST < 2:
        pytest.skip("one CPU")
    run, used = CPUBackend.run, []
    monkeypatch.setattr(CPUBackend, "run", lambda *args: (used.append(threads.get_num_threads()), run(*args)))
    before = threads.get_num_threads()
    with Model.load(write_model(tmp_path / "tiny.gguf"), device="cpu") as model:
        with model.new_context(n_ctx=64, n_ubatch=3, n_threads_batch=1) as context, threads.using(2):
            context.decode(tokens(0)[:7])
            context.decode([5])
        assert used == [1, 1, 2, 2] and threads.get_num_threads() == before
        most = threads.MOST
        with pytest.raises(UserError, match=f"^n_threads_batch: must be 1 to {most}, the CPU threads of this machine, got "
                                            f"{most + 1}$"):
            model.new_context(n_ctx=64, n_threads_batch=most + 1)
