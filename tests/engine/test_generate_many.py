"""Texts side by side are those that `generate` gives one by one, bit for bit: whatever the model, however many have room, however
they end; and steps of several sequences that are queued ahead."""
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from fake_model import FakeTokenizer
from hypothesis import given, settings, strategies as st
from queueing_backend import QueueingBackend
from tiny_delta_net_models import write_delta_net_model
from tiny_hybrid_models import write_hybrid_model
from tiny_layer_models import write_layer_model
from tiny_models import write_model
from tiny_moe_models import write_moe_model
from tiny_text_models import write_text_model

from ggml_py import Grammar, Model, ParameterError, UserError
from ggml_py.backends.cpu import CPUBackend
from ggml_py.engine import generate_many
from ggml_py.engine.generate_many import width_of
from ggml_py.engine.context import Context
from ggml_py.files.gguf import GGUFFile

WRITERS = {"llama": lambda path: write_model(path, "llama", ("Q8_0", "F16", "Q4_0"), n_vocab=70),
           "experts": lambda path: write_moe_model(path, "qwen3moe", ("Q8_0", "F32")),
           "gated delta nets": lambda path: write_delta_net_model(path, "qwen35"),
           "mamba": lambda path: write_hybrid_model(path, "granitehybrid"),
           "windows": lambda path: write_layer_model(path, "gemma3"),
           "angles of two lengths": lambda path: write_layer_model(path, "phi3")}
STEM = [5, 6, 7, 8, 9, 10] * 4  # more than LEAST_SHARED
PROMPTS = [[*STEM, 11], [*STEM, 12, 13], [*STEM[:20], 14, 15], [1], [2], [*STEM, 11], [*STEM, 11, 5, 6], [4, 30, 31] * 5, STEM,
           [9, 8, 7], [1, 1]]
ARGUMENTS = [dict(), dict(temperature=1.0, seed=2, n=3), dict(logprobs=2, digest=True), dict(stop=[*map(chr, range(44, 56))]),
             dict(max_tokens=0), dict(max_tokens=1), dict(logit_bias=dict.fromkeys(range(20, 60), -np.inf)), dict(n_ctx=45),
             dict(repeat_penalty=1.5, temperature=0.7), dict(type_k="q8_0", max_tokens=20), dict(logit_bias={7: 2.0})]


def load(path, backend=CPUBackend) -> Model:
    model = Model(GGUFFile.open(path), backend())
    model._tokenizer = FakeTokenizer(False)
    model.tokenizer.is_end_of_generation = lambda id: id in (3, 17, 40)
    return model


@pytest.fixture(scope="module", params=WRITERS)
def path(request, tmp_path_factory):
    return WRITERS[request.param](tmp_path_factory.mktemp("models") / "m.gguf")


@pytest.fixture(scope="module", params=[CPUBackend, QueueingBackend])
def case(request, path):
    """A model, and what `generate` gives with arguments."""
    with load(path, request.param) as model:
        alone = {}

        def one_by_one(arguments: dict) -> list:
            key = str(arguments)
            if key not in alone:
                alone[key] = [model.generate(prompt, **arguments) for prompt in PROMPTS]
            return alone[key]
        yield model, one_by_one


@settings(max_examples=14, deadline=None)
@given(st.sampled_from(ARGUMENTS), st.sampled_from([None, 1, 2, 3, 5, 8]), st.permutations(range(len(PROMPTS))),
       st.integers(1, len(PROMPTS)))
def test_side_by_side_they_are_what_they_are_alone(case, arguments, n_seq_max, order, n):
    model, one_by_one = case
    arguments = {"max_tokens": 12, **arguments}
    expected, told = one_by_one(arguments), []
    found = model.generate_many([PROMPTS[i] for i in order[:n]], n_seq_max=n_seq_max,
                                progress=lambda *now: told.append(now), **arguments)
    assert found == [expected[i] for i in order[:n]]
    n_texts = len({tuple(PROMPTS[i]) for i in order[:n]}) * arguments.get("n", 1)
    assert told == [(i, n_texts) for i in range(1, n_texts + 1)] if arguments["max_tokens"] else not told


@pytest.fixture(params=[CPUBackend, QueueingBackend])
def model(request, tmp_path):
    with load(WRITERS["llama"](tmp_path / "m.gguf"), request.param) as model:
        yield model


def test_they_end_in_all_ways(model):
    """Else the cases above prove little."""
    reasons = Counter(each.finish_reason for arguments in ARGUMENTS[:4]
                      for found in model.generate_many(PROMPTS, **{"max_tokens": 12, **arguments}) for each in found.completions)
    assert min(reasons[reason] for reason in ("stop", "length", "end")) > 2


@pytest.mark.parametrize("arguments", [dict(), dict(temperature=1.5, n=3), dict(max_tokens=3, logprobs=1)], ids=str)
def test_with_a_grammar(tmp_path, arguments):
    """Each text has a place of its own in it, and some end where it does."""
    pytest.importorskip("llguidance")
    prompts = ["the thin", "in the", "the thing", "a", "the thin"]
    arguments = {"grammar": Grammar.regex("(the|in|a|b){2,5}!"), "max_tokens": 8, **arguments}
    with Model.load(write_text_model(tmp_path / "m.gguf", True), device="cpu") as model:
        expected = [model.generate(prompt, **arguments) for prompt in prompts]
        assert model.generate_many(prompts, n_seq_max=3, **arguments) == expected
        texts = [each.text for found in expected for each in found.completions]
        assert any(text.endswith("!") for text in texts) or arguments["max_tokens"] == 3


def test_what_prompts_share_is_decoded_once(model, monkeypatch):
    """Each position of a stem that several begin with is fed to one sequence alone, also for those that begin later."""
    fed = Counter()
    decode_batch = Context.decode_batch

    def watched(context, batch, logits="last"):
        for seq_id, tokens in (batch := [*batch]):
            first = context.memory.length(seq_id)
            fed.update(position for position, token in enumerate(tokens, first)
                       if position < len(STEM) and [*STEM][position] == token and logits == "none")
        return decode_batch(context, batch, logits)
    monkeypatch.setattr(Context, "decode_batch", watched)
    prompts = [[*STEM, i, i + 1] for i in range(1, 20)]
    assert model.generate_many(prompts, n_seq_max=4, max_tokens=3) == [model.generate(each, max_tokens=3) for each in prompts]
    assert {fed[position] for position in range(len(STEM))} <= {1, 2}  # once here, once by `generate`
    assert fed[0]


def test_few_widths(model, monkeypatch):
    assert [width_of(n, 64) for n in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert (width_of(33, 64), width_of(33, 40), width_of(65, 100)) == (64, 40, 100)
    widths = Counter()
    greedy_batch = Context.greedy_batch

    def watched(context, batch, n, more, draws=None):
        widths[len(batch)] += 1
        return greedy_batch(context, batch, n, more, draws)
    monkeypatch.setattr(Context, "greedy_batch", watched)
    prompts = [[i, i + 1] for i in range(30)]
    found = model.generate_many(prompts, n_seq_max=13, max_tokens=30)
    assert {*widths} <= {1, 2, 4, 8, 13} and len(widths) > 3
    assert found == [model.generate(each, max_tokens=30) for each in prompts]


def test_a_model_says_how_many_have_room(model, monkeypatch):
    seen = []
    new_context = Model.new_context

    def watched(model, n_ctx, **settings):
        seen.append(settings["n_seq_max"])
        return new_context(model, n_ctx, **settings)
    monkeypatch.setattr(Model, "new_context", watched)
    prompts = [[i % 50, i // 50] for i in range(70)]
    expected = model.generate_many(prompts, max_tokens=2)
    n_bytes = model.architecture.context_bytes(4, 1, "f16", "f16").total()
    monkeypatch.setattr(generate_many, "MOST_DEFAULT_CONTEXT", 5 * n_bytes)
    monkeypatch.setattr(CPUBackend, "free_bytes", lambda backend: 10 * n_bytes + 1)  # of which a GPU gives half
    assert model.generate_many(prompts, max_tokens=2) == expected and seen == [64, 5]
    monkeypatch.setattr(CPUBackend, "free_bytes", lambda backend: 0)
    monkeypatch.setattr(generate_many, "MOST_DEFAULT_CONTEXT", 0)
    assert model.generate_many(prompts[:2], max_tokens=2) == expected[:2] and seen[-1] == 1


@pytest.mark.parametrize("arguments, prompts, error, message", [
    (dict(), "the", ParameterError, r"^prompts: must be several prompts, got 'the'$"),
    (dict(), 3, ParameterError, r"^prompts: must be several prompts, got 3$"),
    (dict(), [[1], 3], ParameterError, r"^prompts\[1\]: must be a text, ids, or messages, got 3$"),
    (dict(), [[1], []], ParameterError, r"^prompts\[1\]: has no tokens, allowed: at least one$"),
    (dict(n_ctx=4), [[1], [1] * 4], ParameterError, r"^prompts\[1\]: has 4 tokens, allowed: up to 3 in a context of 4$"),
    (dict(n=0), [[1]], ParameterError, "^n: must be an integer, at least 1, got 0$"),
    (dict(n_seq_max=0), [[1]], ParameterError, "^n_seq_max: must be an integer, at least 1, got 0$"),
    (dict(draft="ngram"), [[1]], TypeError, r"^generate_many\(\) got an unexpected keyword argument 'draft'; allowed: "),
    (dict(), [[1], [70]], UserError, "^tokens: must be 0 to 69, got 70$")])
def test_what_is_refused(model, arguments, prompts, error, message):
    with pytest.raises(error, match=message):
        model.generate_many(prompts, **arguments)


def test_nothing_is_asked_for(model):
    assert model.generate_many([]) == [] and model.generate_many(iter([[1]]), max_tokens=2) == [model.generate([1], max_tokens=2)]


def test_not_a_number_ends_it(tmp_path):
    """Of a text that goes on; what a sequence without one says is not looked at."""
    with load(WRITERS["llama"](tmp_path / "m.gguf"), QueueingBackend) as model:
        def spoiled(first: int):
            """The ids of three texts side by side are NaN for sequences from `first` on."""
            def greedy_batch(context, batch, n, more, draws):
                for ids in real(context, batch, n, more, draws):
                    yield np.where(np.arange(len(ids)) < first, ids, -1)
            return greedy_batch
        real, prompts = Context.greedy_batch, [[1], [2], [30], [31], [33]]
        expected = model.generate_many(prompts, max_tokens=4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Context, "greedy_batch", spoiled(5))  # the sixth is beside them
            assert model.generate_many(prompts, max_tokens=4) == expected
            patch.setattr(Context, "greedy_batch", spoiled(4))
            with pytest.raises(UserError, match="^the logits of token 1 hold NaN$"):
                model.generate_many(prompts, max_tokens=4)


# Steps of several sequences that are queued ahead

def singly(model, tokens, n):
    """Of each sequence its ids alone."""
    found = []
    for token in tokens:
        with model.new_context(n_ctx=64) as context:
            context.decode(STEM, logits="none")
            found.append([*context.greedy(token, n)])
    return np.array(found, np.int32)


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_of_several_sequences(model, graphs):
    expected = singly(model, [1, 2, 40], 12)
    with model.new_context(n_ctx=4 * 64, n_seq_max=4, graphs=graphs) as context:
        for seq_id in range(4):
            context.decode(STEM, seq_id, "none")
        batch = [(2, 1), (0, 2), (3, 40)]
        found = [*context.greedy_batch(batch, 12)]
        assert (expected == np.array(found).T).all() and context.memory.lengths.tolist() == [36, 24, 36, 36]
        for seq_id in 0, 2, 3:
            context.keep(seq_id, 24)
        asked = []

        def more():
            asked.append(None)
            return len(given) < 4
        given = []
        for ids in context.greedy_batch(batch, 12, more):
            given.append(ids)
        # a step that was queued ahead is given too
        n = 4 + model.backend.asynchronous
        assert len(given) == n and (expected[:, :n] == np.array(given).T).all() and context.memory.length(0) == 24 + n
        steps = context.greedy_batch([(0, int(given[-1][1]))], 5)
        assert [*islice(steps, 2)] == [expected[1, n], expected[1, n + 1]]
        steps.close()
        assert context.memory.lengths.tolist() == [24 + n + 2, 24, 24 + n, 24 + n] and context.ahead is None


def test_other_work_between_two_steps(model):
    """What is queued ahead is taken back in all sequences, and queued again."""
    expected = singly(model, [1, 2], 10)
    with model.new_context(n_ctx=3 * 64, n_seq_max=3) as context:
        for seq_id in range(2):
            context.decode(STEM, seq_id, "none")
        found = []
        for ids in context.greedy_batch([(0, 1), (1, 2)], 10):
            found.append(ids)
            context.decode([5], 2, "none")
            assert context.memory.lengths.tolist() == [24 + len(found), 24 + len(found), len(found)]
        assert (expected == np.array(found).T).all()


def test_the_end_of_a_context(model):
    with model.new_context(n_ctx=2 * 30, n_seq_max=2) as context:
        context.decode(STEM, 1, "none")
        found = []
        with pytest.raises(UserError, match="^context: sequence 1 has 30 of 30 positions in use, 1 more do not fit$"):
            for ids in context.greedy_batch([(0, 1), (1, 2)], 12):
                found.append(ids)
        assert len(found) == 6 and context.memory.lengths.tolist() == [6, 30]
    with model.new_context(n_ctx=3 * 30, n_seq_max=3, n_ubatch=2) as context:
        with pytest.raises(UserError, match="^greedy_batch: 3 sequences are no micro-batch; allowed: up to 2$"):
            next(context.greedy_batch([(0, 1), (1, 2), (2, 3)], 12))
        with pytest.raises(UserError, match="^tokens: must be 0 to 69, got -1$"):
            next(context.greedy_batch([(0, 1), (1, -1)], 12))
