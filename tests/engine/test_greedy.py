"""Greedy generation: the ids of single steps, with the next step queued ahead or not;
whoever stops or does something else finds the sequence as it was fed."""
from itertools import islice

import numpy as np
import pytest

from ggml_py.base.errors import UserError
from ggml_py.files.gguf import GGUFFile
from ggml_py.engine.model import Model
from ggml_py.graph.program import Program
from ggml_py.check.recording import RecordedContext
from ggml_py.engine.completion import drafting
from ggml_py.engine.generate import generate
from ggml_py.engine.sampling import Sampling
from ggml_py.testing import assert_bitwise_equal
from composing_cpu import ComposingCPU
from queueing_backend import QueueingBackend
from tiny_moe_models import write_moe_model

N = 12
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(params=["set_rows", "cpy"])
def context(model, request):
    with model.new_context(n_ctx=2 * 64, n_seq_max=2, kv_write=request.param) as context:
        context.decode(PROMPT, logits="none")
        yield context


def one_by_one(context, token, n, seq_id=0):
    found = []
    for _ in range(n):
        token = int(context.decode([token], seq_id, "argmax")[0])
        found.append(token)
    return found


def plain(model, token, n):
    """The ids after PROMPT and token by single steps, and the logits of a token behind all but the last of them."""
    with model.new_context(n_ctx=64) as context:
        context.decode(PROMPT, logits="none")
        return one_by_one(context, token, n), context.decode([7])


def test_ids_are_those_of_single_steps(model, context):
    expected, logits = plain(model, 5, N)
    assert len(set(expected)) > 2
    assert list(context.greedy(5, N)) == expected
    assert context.memory.length(0) == len(PROMPT) + N and context.ahead is None
    assert_bitwise_equal(context.decode([7]), logits, "after the last")
    assert list(context.greedy(5, 0)) == []


def test_logits_are_those_of_single_steps(model, context):
    """They are seen before their id, while the next step may run."""
    seen: list = []
    with model.new_context(n_ctx=64) as other:
        other.decode(PROMPT, logits="none")
        token = 5
        for token_after in context.greedy(5, N, see=seen.append):
            assert_bitwise_equal(seen[-1], other.decode([token])[0], f"of token {len(seen)}")
            token = token_after
        assert len(seen) == N and context.ahead is None
        ids = context.greedy(token, 9, see=seen.append)  # left, and others in its place
        first = [next(ids), next(ids)]
        assert first + list(context.greedy(first[-1], 3)) == one_by_one(other, token, 5) and len(seen) == N + 2


def test_no_bit_depends_on_where_the_logits_are(path):
    """Greedy steps leave no logits in memory; with the pass switched off they do."""
    model = Model(GGUFFile.open(path), ComposingCPU())
    expected, logits = plain(model, 5, N)
    for no_fuse, op in ((), "mul_mat_argmax"), ("mul_mat_argmax", "argmax"):
        with model.new_context(n_ctx=64, no_fuse=no_fuse) as context:
            context.decode(PROMPT, logits="none")
            assert list(context.greedy(5, N)) == expected
            assert_bitwise_equal(context.decode([7]), logits, f"without {no_fuse}")
            assert context.program(1, 1, "argmax").nodes[-1].op == op


@pytest.mark.parametrize("stop", ["close", "throw", "leave"])
@pytest.mark.parametrize("n", [1, 4])
def test_stopped_in_the_middle_the_sequence_is_as_if_nothing_had_been_queued(model, context, n, stop):
    expected, logits = plain(model, 5, n)
    ids = context.greedy(5, N)
    assert list(islice(ids, n)) == expected
    if stop == "close":
        ids.close()
    elif stop == "throw":
        with pytest.raises(KeyboardInterrupt):
            ids.throw(KeyboardInterrupt)
    if stop != "leave":  # else what is asked next takes the step back
        assert context.memory.length(0) == len(PROMPT) + n and context.memory.present[0].sum() == len(PROMPT) + n
    assert_bitwise_equal(context.decode([7]), logits, stop)
    ids.close()
    assert context.memory.length(0) == len(PROMPT) + n + 1


def test_a_sequence_that_was_stopped_goes_on(model, context):
    expected, _ = plain(model, 5, N)
    first = list(islice(context.greedy(5, N), 5))
    assert first + list(context.greedy(first[-1], N - 5)) == expected


def test_other_work_between_two_ids(model, context):
    """Other sequences, a bigger arena, programs that are forgotten,
    a cut of this sequence: each next id is that of a plain step."""
    with model.new_context(n_ctx=2 * 64, n_seq_max=2) as steps:
        steps.decode(PROMPT, logits="none")
        found, expected, token = [], [], 5
        ids, others = context.greedy(5, 2 * N), context.greedy(8, N, seq_id=1)
        also = 8
        for i in range(N):
            found.append(next(ids))
            token = int(steps.decode([token], 0, "argmax")[0])
            expected.append(token)
            if i == 2:
                found += context.decode(range(20), 1, "argmax").tolist()
                expected += steps.decode(range(20), 1, "argmax").tolist()
            elif i == 4:
                context.programs.clear()
            elif i == 5:
                context.arenas.ensure(model.device, context.arenas.sizes[model.device] + 4096)
            elif i == 6:
                for each in context, steps:
                    each.seq_rm(0, 3, 5)
                    each.seq_rm(0, 10)
            elif i > 8:
                found.append(next(others))
                also = int(steps.decode([also], 1, "argmax")[0])
                expected.append(also)
        assert found == expected
        ids.close(), others.close()
        assert (context.memory.present == steps.memory.present).all() and (context.memory.lengths == steps.memory.lengths).all()


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_forbidden_ids_are_never_chosen(model, context, draft):
    """Where the likeliest is forbidden, the likeliest of the others is taken: also the first, the last, and two in a row."""
    prompt = np.array(PROMPT[-3:])

    def found(forbidden, n=N):
        context.keep(0, len(PROMPT) - 3)
        with drafting(model, draft, 64) as speculation:
            return list(generate(context, prompt, n, Sampling().forbidding(forbidden), lambda id: False, speculation))

    def expected(forbidden):
        context.keep(0, len(PROMPT) - 3)
        fed, text = prompt, []
        for _ in range(N):
            row = context.decode(fed)[0]
            row[sorted(forbidden)] = -np.inf
            text.append(int(row.argmax()))
            fed = text[-1:]
        return text
    forbidden: set[int] = set()
    for i in (0, 1, N - 1, 4, 5):
        forbidden |= {expected(forbidden)[i]}
        assert found(forbidden) == expected(forbidden) and context.memory.length(0) == len(PROMPT) + N - 1
        assert found(forbidden, 3) == expected(forbidden)[:3]
    assert Sampling().forbidding(()).is_argmax and not Sampling().forbidding((3,)).is_argmax
    assert Sampling().forbidding((3,)).is_argmax_of_allowed and not Sampling(logit_bias={3: -1.0}).is_argmax_of_allowed


def test_cleared_while_a_step_is_ahead(context):
    ids = context.greedy(5, N)
    next(ids)
    context.clear()
    ids.close()
    assert context.memory.lengths.tolist() == [0, 0] and not context.memory.present.any()


@pytest.mark.parametrize("later", ["close", "next"])
def test_the_context_is_closed_while_a_step_is_ahead(model, context, later):
    """Closing the iterator behind it does nothing; wanting more of it is an error that says why, as is any use of the context.
    Others do not notice."""
    with model.new_context(n_ctx=64) as other:
        other.decode(PROMPT, logits="none")
        ids, others = context.greedy(5, N), other.greedy(5, N)
        found = [next(ids), next(others)]
        assert (context.ahead is not None) == model.backend.asynchronous
        context.close()
        if later == "next":
            for use in lambda: next(ids), lambda: context.decode([7]), lambda: list(context.greedy(5, 1)), context.describe:
                with pytest.raises(RuntimeError, match=r"^context: it is closed, its memory is gone; allowed: new_context\(\)$"):
                    use()
        ids.close()
        assert context.ahead is None and context.memory.length(0) == len(PROMPT) + 1
        assert 2 * found[:1] + list(others) == [*found, *plain(model, 5, N)[0][1:]]


def test_the_end_of_the_context(model, context):
    room = 64 - len(PROMPT)
    assert len(list(context.greedy(5, room))) == room
    context.seq_rm(0, len(PROMPT))
    found = []
    with pytest.raises(UserError, match="^context: sequence 0 has 64 of 64 positions in use, 1 more do not fit$"):
        for id in context.greedy(5, room + 1):
            found.append(id)
    assert len(found) == room and context.memory.length(0) == 64
    with pytest.raises(UserError, match="^tokens: must be 0 to 69, got 70$"):
        next(context.greedy(70, 1))


def test_not_a_number_ends_it(path):
    """Two ids, then NaN, which as an id of the step ahead must not be read as a row: -1 is no address that a GPU would take."""
    with Model(GGUFFile.open(path), QueueingBackend()) as model, model.new_context(n_ctx=64) as context:
        context.decode(PROMPT, logits="none")
        program = context.program(1, 1, "argmax")
        steps, runs = program.parts[0].steps, []
        output, = (model.backend.data(tensor) for tensor in program.outputs)

        def spoil():
            runs.append(None)
            if len(runs) == 3:
                output[:] = -1
        steps.append(spoil)
        found = []
        with pytest.raises(UserError, match=f"^the logits of token {len(PROMPT) + 3} hold NaN$"):
            for id in context.greedy(5, N):
                found.append(id)
        assert found == plain(model, 5, 2)[0] and len(runs) == 4
        assert context.memory.length(0) == len(PROMPT) + 3


@pytest.mark.parametrize("fails", ["queue", "result"])
def test_a_step_that_fails_leaves_the_sequence_as_before_it(path, monkeypatch, fails):
    """Interrupted while the step ahead is queued, or while the id is waited for."""
    with Model(GGUFFile.open(path), QueueingBackend()) as model, model.new_context(n_ctx=64) as context:
        context.decode(PROMPT, logits="none")
        ids = context.greedy(5, N)
        given = [next(ids), next(ids)]

        def interrupted(*args, **kwargs):
            raise KeyboardInterrupt
        with monkeypatch.context() as patch:
            patch.setattr(*(Program, "queue", interrupted)
                          if fails == "queue" else (type(context.ahead.outputs), "result", interrupted))
            with pytest.raises(KeyboardInterrupt):
                next(ids)
        assert context.memory.length(0) == len(PROMPT) + 2 and context.ahead is None
        expected, _ = plain(model, 5, N)
        assert given + list(context.greedy(given[-1], N - 2)) == expected


class LateBackend(QueueingBackend):
    """Errors of products with experts are left for who waits for the outputs."""
    left = None

    def leaves_errors(self, node):
        return node.op in ("mul_mat_id", "mul_mat_id_glu")

    def run(self, steps):
        try:
            super().run(steps)
        except IndexError as error:
            self.left = error

    def forget_error(self):
        self.left = None

    def read_error(self):
        left = self.left

        def raise_error():
            if left:
                raise left
        return raise_error


@pytest.mark.parametrize("wrong", [1, 3, 4])
def test_an_error_that_comes_with_the_outputs_is_of_its_step(tmp_path, wrong):
    """Programs with experts run ahead too. The wrong step, counted from 1, is the first, one behind which another is queued,
    or one that is only ahead."""
    path = write_moe_model(tmp_path / "m.gguf", "qwen3moe", ("Q8_0", "F32"))
    with Model(GGUFFile.open(path), LateBackend()) as model, model.new_context(n_ctx=64) as context:
        expected, logits = plain(model, 5, N)
        context.decode(PROMPT, logits="none")
        program = context.program(1, 1, "argmax")
        assert program.late == [model.backend] and program.runs_ahead
        steps, runs = program.parts[0].steps, []

        def spoil():
            runs.append(None)
            if len(runs) == wrong:
                raise IndexError("ffn_moe_up-0: token 0 has expert 6 at rank 1, allowed: 0 to 5")
        steps.append(spoil)
        ids, n = context.greedy(5, N), min(wrong, 3) - 1
        given = list(islice(ids, n))
        if wrong < 4:
            with pytest.raises(IndexError, match="^ffn_moe_up-0: token 0 has expert 6"):
                next(ids)
        else:  # the third id was asked for, the fourth never is
            given.append(next(ids))
            ids.close()
        assert len(runs) == wrong + (wrong < 4) and context.ahead is None
        assert context.memory.length(
            0) == len(PROMPT) + len(given) and context.memory.present[0].sum() == len(PROMPT) + len(given)
        assert given + list(context.greedy(given[-1] if given else 5, N - len(given))) == expected
        assert_bitwise_equal(context.decode([7]), logits, "after the last")


@pytest.mark.parametrize("end", [None, 0, 3])
def test_generate(model, context, end):
    """The end token is not fed, nor anything behind it."""
    context.clear()
    first = int(context.decode(PROMPT, logits="argmax")[0])
    tokens = [first, *one_by_one(context, first, N - 1)]
    context.clear()
    is_end = lambda token: end is not None and token == tokens[end]
    n = N if end is None else tokens.index(tokens[end])
    assert list(generate(context, PROMPT, N, Sampling(), is_end)) == tokens[:n]
    assert context.memory.length(0) == len(PROMPT) + (N - 1 if end is None else n)
    context.clear()
    assert list(generate(context, PROMPT, 0, Sampling(), is_end)) == [] and context.memory.length(0) == 0


def test_recorded_contexts_generate_too(path):
    """Their books are of ids, for which they wait."""
    visited = []
    with Model(GGUFFile.open(path), QueueingBackend()) as model, \
            RecordedContext(lambda node, batch, backend: visited.append(batch.keys), model, n_ctx=64, graphs=False) as context:
        context.decode(PROMPT, logits="none")
        assert list(context.greedy(5, 3)) == plain(model, 5, 3)[0]
        assert len({key for keys in visited for key in keys}) == len(PROMPT) + 3
