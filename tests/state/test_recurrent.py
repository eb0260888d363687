"""Memory of recurrent layers: whatever calls come in whatever order, a sequence is what its tokens alone make of it."""
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ggml_py.backends.cpu import CPUBackend
from ggml_py.backends.cuda import CUDABackend
from ggml_py.base.errors import ParameterError, UserError
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.state.recurrent import RecurrentMemory
from ggml_py.testing import assert_bitwise_equal
from cuda_simulator import no_gpu
from queueing_backend import QueueingBackend
from tiny_delta_net_models import write_delta_net_model
from tiny_hybrid_models import write_hybrid_model

N_CTX, N_SEQ, ROLLBACK = 40, 3, 3


class Failure(Exception):
    pass


class Failing:
    """A backend whose run of nodes that is `left` ahead fails, behind its first node where nodes are run at once."""
    left = 0

    def run(self, steps):
        self.left -= 1
        if self.left == 0:
            if not self.asynchronous:
                super().run(steps[:1])
            raise Failure
        super().run(steps)


class FailingCPU(Failing, CPUBackend):
    pass


class FailingQueue(Failing, QueueingBackend):
    """Greedy's steps run ahead."""


class FailingGPU(Failing, CUDABackend):
    pass


@contextmanager
def failing(backend, calls: int):
    backend.left = calls
    try:
        yield
    finally:
        backend.left = 0


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_delta_net_model(tmp_path_factory.mktemp("models") / "m.gguf", "qwen35", ("Q8_0", "F16"), n_ctx=N_CTX)


def new_context(model, **more):
    return model.new_context(N_CTX * N_SEQ, n_seq_max=N_SEQ, n_ubatch=4, n_rollback=ROLLBACK, **more)


class Interleavings(RuleBasedStateMachine):
    """Against a model of what each sequence should have: its tokens, and where it can go back to. Logits are compared with those
    of a context that decodes all tokens at once."""
    path, backend_class = None, None

    @initialize()
    def begin(self):
        self.backend = self.backend_class()
        self.model = Model(GGUFFile.open(self.path), self.backend)
        self.context, self.fresh = new_context(self.model), self.model.new_context(N_CTX)
        self.tokens = [[] for _ in range(N_SEQ)]
        self.reach = [set() for _ in range(N_SEQ)]        # lengths of which a slot must hold the state
        self.checkpoints = [set() for _ in range(N_SEQ)]

    def wanted(self, seq, tokens):
        self.fresh.clear()
        return self.fresh.decode(self.tokens[seq] + tokens, logits="all")[-len(tokens):]

    def went_on(self, seq, tokens):
        before = len(self.tokens[seq])
        self.tokens[seq] += tokens
        self.reach[seq] = {length for length in self.reach[seq] | {before, *range(before + 1, len(self.tokens[seq]) + 1)}
                           if length >= len(self.tokens[seq]) - ROLLBACK + 1 or length == before}

    some = st.lists(st.integers(0, 69), min_size=1, max_size=9)
    seqs = st.integers(0, N_SEQ - 1)

    def fits(self, seq, n):
        return len(self.tokens[seq]) + n <= N_CTX

    @rule(batch=st.dictionaries(seqs, some, min_size=1))
    def decode(self, batch):
        batch = {seq: tokens for seq, tokens in batch.items() if self.fits(seq, len(tokens))}
        wanted = {seq: self.wanted(seq, tokens) for seq, tokens in batch.items()}
        for (seq, tokens), found in zip(batch.items(), self.context.decode_batch(batch.items(), "all")):
            assert_bitwise_equal(found, wanted[seq], f"sequence {seq}")
            self.went_on(seq, tokens)

    @rule(batch=st.dictionaries(seqs, some, min_size=1), calls=st.integers(1, 6))
    def fail(self, batch, calls):
        """Nothing is other than before."""
        batch = {seq: tokens for seq, tokens in batch.items() if self.fits(seq, len(tokens))}
        with failing(self.backend, calls):
            try:
                self.context.decode_batch(batch.items(), "none")
            except Failure:
                for seq in batch:
                    self.reach[seq] = {len(self.tokens[seq])}
            else:
                for seq, tokens in batch.items():
                    self.went_on(seq, tokens)

    @rule(seq=seqs, token=st.integers(0, 69), n=st.integers(1, 5), taken=st.integers(0, 5))
    def generate(self, seq, token, n, taken):
        """A step that is queued ahead is taken back."""
        if not self.fits(seq, n + 1):
            return
        ids = []
        for _, each in zip(range(taken), self.context.greedy(token, n, seq)):
            ids.append(each)
        fed = [token, *ids[:-1]] if ids else []
        for i, each in enumerate(ids):
            assert each == self.wanted(seq, fed[:i + 1])[-1].argmax()
        for each in fed:
            self.went_on(seq, [each])

    @precondition(lambda self: any(self.tokens))
    @rule(seq=seqs, back=st.integers(0, 12))
    def take_back(self, seq, back):
        length = len(self.tokens[seq])
        to = max(0, length - back)
        allowed = to in (0, length) or to in self.checkpoints[seq]
        must = allowed or (to in self.reach[seq] and length - to < ROLLBACK)
        assert self.context.reachable(seq, to) == to or not must
        if self.context.reachable(seq, to) != to:
            with pytest.raises(UserError, match=f"hold no state behind {to} positions"):
                self.context.keep(seq, to)
            return
        self.context.keep(seq, to)
        self.tokens[seq] = self.tokens[seq][:to]
        self.reach[seq] = {each for each in self.reach[seq] if each <= to}
        self.checkpoints[seq] = {each for each in self.checkpoints[seq] if each <= to}

    @rule(seq=seqs)
    def checkpoint(self, seq):
        self.context.checkpoint(seq)
        self.checkpoints[seq] |= {len(self.tokens[seq])} - {0}

    @rule(seq=seqs)
    def drop(self, seq):
        self.context.drop_checkpoints(seq)
        self.checkpoints[seq] = set()

    @rule(source=seqs, seq=seqs, back=st.integers(0, 12))
    def copy(self, source, seq, back):
        n = max(0, len(self.tokens[source]) - back)
        try:
            self.context.seq_cp(source, seq, n)
        except UserError:
            assert source == seq or n not in {0, len(self.tokens[source])} | self.checkpoints[source]
            return
        self.tokens[seq], self.reach[seq], self.checkpoints[seq] = self.tokens[source][:n], {n}, set()

    @rule()
    def hole(self):
        for seq, tokens in enumerate(self.tokens):
            if len(tokens) > 2:
                with pytest.raises(UserError, match="cannot forget positions before others; allowed: to its end"):
                    self.context.seq_rm(seq, 1, 2)

    @invariant()
    def lengths(self):
        for seq, tokens in enumerate(self.tokens):
            assert self.context.memory.length(seq) == self.context.memory.states.length(seq) == len(tokens)

    def teardown(self):
        with suppress(AttributeError):
            self.context.close()
            self.fresh.close()
            self.model.close()


@pytest.mark.parametrize("kind", ["delta net", pytest.param("nemotron_h", marks=pytest.mark.slow),
                                  pytest.param("lfm2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", [FailingCPU, FailingQueue, pytest.param(FailingGPU, marks=pytest.mark.gpu)])
def test_interleavings(path, kind, backend, tmp_path):
    if backend is FailingGPU and (reason := no_gpu()):
        pytest.skip(reason)
    if kind != "delta net":
        path = write_hybrid_model(tmp_path / "m.gguf", kind, ("Q8_0", "F16"), n_ctx=N_CTX)
    class OfThisFile(Interleavings):
        pass
    OfThisFile.path, OfThisFile.backend_class = path, backend
    machine = OfThisFile.TestCase
    machine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None,
                                suppress_health_check=list(HealthCheck))
    machine().runTest()


def test_slots_are_data(path):
    """Programs are of shapes alone: steps in which other slots are read and written are the same program."""
    with Model.load(path, device="cpu") as model, new_context(model) as context:
        for token in range(20):
            context.decode([token])
        assert len(context.programs) == 1
        assert not [node for node in context.program(1, 1).nodes if node.op in ("cpy", "cpy_rows")]


def test_a_call_leaves_behind_the_states_of_its_last_tokens(path):
    """And where it is shorter, older ones stay."""
    with Model.load(path, device="cpu") as model, new_context(model) as context:
        context.decode(range(11))  # in micro-batches of 4
        assert context.memory.states.positions(0) == [0, 8, 9, 10, 11]
        context.decode([3])
        assert context.memory.states.positions(0) == [0, 9, 10, 11, 12]
        context.decode([4, 5])
        assert context.memory.states.positions(0) == [0, 11, 12, 13, 14]
        context.decode(range(9))
        assert context.memory.states.positions(0) == [0, 14, 21, 22, 23]


def test_what_cannot_be_forgotten(path):
    with Model.load(path, device="cpu") as model, new_context(model) as context:
        context.decode(range(11))
        with pytest.raises(UserError, match="sequence 0: its recurrent layers hold no state behind 5 positions; allowed: 0, 8, "
                                            "9, 10, 11, and where there is a checkpoint"):
            context.seq_rm(0, 5)
        assert context.memory.length(0) == 11
        context.seq_rm(0, 11)
        context.seq_rm(0, 30, 20)
        assert context.memory.length(0) == 11


def test_sizes(path):
    with Model.load(path, device="cpu") as model, new_context(model) as context:
        states = context.memory.states
        n_layers, n_values = 2, 3 * (2 * 2 + 6) * 16 + 6 * 16 * 16
        assert states.n_bytes == N_SEQ * (ROLLBACK + 1) * n_layers * 4 * n_values
        assert model.architecture.state_bytes(ROLLBACK) == states.n_bytes // N_SEQ
        assert context.memory.n_bytes == states.n_bytes + model.architecture.cache_bytes(N_CTX * N_SEQ, "f16", "f16")
        assert context.memory.bytes_of_token(0) == 2 * n_layers * 4 * n_values
        with pytest.raises(ParameterError, match="n_rollback: must be at least 2, got 1"):
            model.new_context(N_CTX, n_rollback=1)


def test_runs():
    """Which slots a micro-batch of three sequences reads and writes."""
    memory = RecurrentMemory({"cpu": CPUBackend()}, {0: {"conv": 4}}, ["cpu"], 50, 3, 2)
    seq, pos = np.repeat(np.int32([2, 0, 1]), [3, 1, 2]), np.int32([0, 1, 2, 0, 0, 1])
    runs = memory.values(seq, pos, len(seq))["runs"]
    assert runs[:, :3].tolist() == [[0, 3, -1], [3, 1, -1], [4, 2, -1]]
    written = [set(run[3:]) - {-1} for run in runs]
    assert [len(each) for each in written] == [2, 1, 2]
    assert all(seq_id * 3 <= row < seq_id * 3 + 3 for seq_id, rows in zip((2, 0, 1), written) for row in rows)
    memory.hold(2, 3)
    again = memory.values(np.int32([2]), np.int32([3]), 1)["runs"]
    assert again.tolist() == [[0, 1, runs[0, 3], *again[0, 3:]]] and again[0, 3] not in (runs[0, 3],) and again[0, 4] == -1
