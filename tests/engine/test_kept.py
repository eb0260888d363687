"""The context that `generate` keeps: no bit depends on what it held before, and its memory goes with the model."""
from itertools import islice

import numpy as np
import pytest
from fake_model import FakeModel, FakeTokenizer
from hypothesis import given, settings, strategies as st
from tiny_delta_net_models import write_delta_net_model
from tiny_layer_models import write_layer_model
from tiny_models import write_model

from ggml_py import Model, UserError
from ggml_py.engine.context import Context

WRITERS = {"llama": lambda path: write_model(path, "llama", n_vocab=70),
           "gated delta nets": lambda path: write_delta_net_model(path, "qwen35"),
           "windows": lambda path: write_layer_model(path, "gemma3"),
           "angles of two lengths": lambda path: write_layer_model(path, "phi3")}
# of calls one after the other: prompts that go on with one another, or fork, or are another
PROMPTS = [[5, 6, 7, 8] * 4, [5, 6, 7, 8] * 6, [5, 6, 7, 9], [1], [1, 2] * 30]
ARGUMENTS = [dict(), dict(temperature=1.0, seed=2), dict(draft="ngram", draft_max=3), dict(n=2, temperature=0.8),
             dict(echo=True, logprobs=1), dict(digest=True, stop="\b"), dict(max_tokens=70), dict(type_k="f32"), dict(n_ctx=100)]
CALLS = st.tuples(st.sampled_from(PROMPTS), st.sampled_from(ARGUMENTS), st.booleans(), st.booleans())


def load(path) -> Model:
    model = Model.load(path, device="cpu")
    model._tokenizer = FakeTokenizer(False)
    model.tokenizer.is_end_of_generation = lambda id: id == 3
    return model


@pytest.fixture(scope="module", params=WRITERS)
def case(request, tmp_path_factory):
    """A model, and what each call gives without what was before."""
    path = WRITERS[request.param](tmp_path_factory.mktemp("models") / "m.gguf")
    with load(path) as model:
        found = {}

        def fresh(prompt: list[int], arguments: dict):
            key = str((prompt, arguments))
            if key not in found:
                model.kept.clear()
                found[key] = model.generate(prompt, **{"max_tokens": 12, **arguments})
            return found[key]
        yield model, fresh


@settings(max_examples=8, deadline=None)
@given(st.lists(CALLS, min_size=2, max_size=5))
def test_the_same_bits_whatever_was_before(case, calls):
    model, fresh = case
    expected = [fresh(prompt, arguments) for prompt, arguments, *_ in calls]
    scores = {}
    for prompt in PROMPTS:
        model.kept.clear()
        scores[tuple(prompt)] = model.score(prompt[:1], prompt[1:])
    model.kept.clear()
    for (prompt, arguments, is_left, is_scored), wanted in zip(calls, expected):
        arguments = {"max_tokens": 12, **arguments}
        if is_scored:
            assert model.score(prompt[:1], prompt[1:]) == scores[tuple(prompt)]
        if is_left:  # by a reader who goes away
            with_text = islice(model.generate(prompt, stream=True, **arguments), 3)
            assert wanted.text.startswith("".join(piece.text for piece in with_text))
        assert model.generate(prompt, **arguments) == wanted
    assert len(model.kept.idle) == 1


def test_what_texts_begin_with_is_decoded_once():
    model = FakeModel()
    first = model.generate([*b"Once upon a time"], max_tokens=8)
    model.calls.clear()
    model.generate([*b"Once upon a time", *first.ids, 65], max_tokens=1)
    assert model.calls == [("argmax", {0: 2})]  # the last of the ids was not decoded before
    model.calls.clear()
    model.generate([*b"Once more"], max_tokens=1)
    assert model.calls == [("argmax", {0: 4})] and model.open_contexts == 1


def test_contexts_are_made_where_settings_ask_for_it():
    model, made = FakeModel(), []
    new_context = model.new_context
    model.new_context = lambda **settings: made.append(settings["n_ctx"]) or new_context(**settings)
    for arguments in (dict(), dict(max_tokens=600), dict(n_ctx=100), dict(type_v="q8_0"), dict(type_v="q8_0", n_ctx=3000),
                      dict(type_v="q8_0", max_tokens=None)):
        model.generate("abc", **{"max_tokens": 2, "stop": [chr(i) for i in range(128)], **arguments})
        assert model.open_contexts == 1
    assert made == [512, 1024, 512, 4096]


def test_streams_beside_one_another(case):
    model, fresh = case
    expected = [fresh(prompt, dict(temperature=1.0, seed=2)) for prompt in PROMPTS[:3]]
    streams = [model.generate(prompt, stream=True, max_tokens=12, temperature=1.0, seed=2) for prompt in PROMPTS[:3]]
    texts = [""] * 3
    for pieces in zip(*streams):
        texts = [text + piece.text for text, piece in zip(texts, pieces)]
    for i, stream in enumerate(streams):
        texts[i] += "".join(piece.text for piece in stream)
    assert texts == [each.text for each in expected] and len(model.kept.idle) == 1


def test_a_call_that_fails_keeps_nothing():
    model = FakeModel()
    model.generate("abc", max_tokens=2)
    usual, model.logits = model.logits, lambda tokens: np.full((len(tokens), 259), np.nan, np.float32)
    with pytest.raises(UserError, match="hold NaN"):
        model.generate("abc", max_tokens=2)
    model.logits = usual
    assert model.open_contexts == 0 and model.generate("abc", max_tokens=2).ids == FakeModel().generate("abc", max_tokens=2).ids


def test_memory_is_freed(tmp_path, monkeypatch):
    """With the model; by a stream that ends later; and where another context needs it."""
    made = []
    monkeypatch.setattr(Context, "__init__", lambda self, *settings, init=Context.__init__, **more:
                        made.append(self) or init(self, *settings, **more))
    model = load(WRITERS["llama"](tmp_path / "m.gguf"))
    model.generate([1, 2], max_tokens=2)
    stream = model.generate([1, 2], max_tokens=4, stream=True)
    next(stream)
    model.generate([1, 2], max_tokens=2)
    assert [each.is_closed for each in made] == [False, False]
    failing = model.architecture.new_memory
    monkeypatch.setattr(model.architecture, "new_memory", lambda *sizes, **more:
                        failing(*sizes, **more) if made[1].is_closed else (_ for _ in ()).throw(MemoryError()))
    model.new_context(64).close()  # in the place of the idle one
    assert [each.is_closed for each in made[:2]] == [False, True]
    monkeypatch.undo()
    model.close()
    stream.close()
    assert all(each.is_closed for each in made[:2])
