"""Completions: stop texts, ends and lengths, broken characters, likelihoods, drafts and samples; streamed or whole, the same."""
from hashlib import sha256
from inspect import signature

import numpy as np
import pytest
from fake_model import EOS, N_VOCAB, FakeModel
from hypothesis import given, settings, strategies as st
from tiny_models import write_model

from ggml_py import Grammar, Model, ParameterError, Sampling, UserError
from ggml_py.engine.completion import Arguments, StopTexts, asked, joined, stream
from ggml_py.engine.sampling import adjusted
from ggml_py.tokenizer import Detokenizer

F32 = np.float32


def saying(*ids: int, n_prompt: int = 1, **more) -> FakeModel:
    """A model that says these tokens behind a prompt, whatever that is, then EOS."""
    def logits(tokens):
        wanted = [*ids, *[EOS] * (len(tokens) + 1)]
        return np.eye(N_VOCAB, dtype=F32)[[wanted[max(i + 1 - n_prompt, 0)] for i in range(len(tokens))]]
    return FakeModel(logits=logits, **more)


def complete(model, prompt, **arguments):
    found = joined([], stream(model, prompt, **arguments))
    model.kept.clear()
    assert model.open_contexts == 0
    return found


def by_definition(data: bytes, stops: list[str]) -> tuple[str, int, bool]:
    """The text, how many tokens it takes, whether it was stopped: a text is looked at behind each token."""
    for n in range(len(data) + 1):
        ended = n == len(data)
        text = data[:n].decode("utf-8", "replace") if ended else certain(data[:n])
        if places := [at for stop in stops if (at := text.find(stop)) >= 0]:
            return text[:min(places)], n, True
    return text, n, False


def certain(data: bytes) -> str:
    detokenizer = Detokenizer(FakeModel().tokenizer)
    return "".join(map(detokenizer.feed, data))


TEXTS = st.text("ab\u00e9\U0001f600", max_size=8).map(str.encode) | st.lists(
    st.sampled_from([0x61, 0x62, 0xc3, 0xa9, 0xf0, 0x9f, 0x80, 0xff]), max_size=10).map(bytes)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.lists(st.text("ab\u00e9\ufffd", min_size=1, max_size=3), max_size=3), st.integers(0, 12), st.integers(4, 16),
       st.sampled_from([None, "ngram"]))
def test_stops_ends_and_broken_characters(data, stops, max_tokens, n_ctx, draft):
    n_most = min(max_tokens, n_ctx - 1)
    text, n, stopped = by_definition(data[:n_most], stops)
    reason = "stop" if stopped else "length" if len(data) >= n_most else "end"
    arguments = dict(stop=stops, max_tokens=max_tokens, n_ctx=n_ctx, draft=draft)
    model = saying(*data)
    parts = list(stream(model, [65], **arguments))
    found = joined([65], parts)
    assert (found.text, found.ids, found.finish_reason) == (text, tuple(data[:n]), reason)
    assert [len(part.ids) for part in parts] == [1] * n + [0] and [part.finish_reason for part in parts[:-1]] == [None] * n
    assert complete(model, [65], logprobs=1, digest=True, **arguments).text == text


@settings(max_examples=100, deadline=None)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_a_stop_text_ends_what_is_said_wherever_it_is_cut(text, stops, data):
    found, said, left = StopTexts(stops), "", text
    while left:
        n = data.draw(st.integers(1, len(left)))
        certain_now, stopped = found.feed(left[:n])
        said, left = said + certain_now, left[n:]
        assert text.startswith(said) and not any(stop in said for stop in stops)
        if stopped:
            return
    assert not any(stop in text for stop in stops) and said + found.held == text


def test_prompts():
    for prompt in "", [], np.empty(0, np.int32):
        with pytest.raises(ParameterError, match="^prompt: has no tokens, allowed: at least one$"):
            stream(FakeModel(), prompt)
    assert complete(saying(65, n_prompt=1, add_bos=True), "").text == "A"  # BOS is a token
    assert complete(saying(65, n_prompt=2), "xy") == complete(saying(65, n_prompt=2), np.array([120, 121]))
    for prompt, n_ctx, message in (([1] * 8, 8, "has 8 tokens, allowed: up to 7 in a context of 8"),
                                   ([1] * 9, 8, "has 9 tokens, allowed: up to 7 in a context of 8")):
        with pytest.raises(ParameterError, match=f"^prompt: {message}$"):
            stream(FakeModel(), prompt, n_ctx=n_ctx)
    for prompt in [1, "a"], b"ab", None, 3:
        with pytest.raises(ParameterError, match="^prompt: must be a text, ids, or messages, got "):
            stream(FakeModel(), prompt)


@pytest.mark.parametrize("name, value", [("max_tokens", -1), ("n", 0), ("logprobs", -1), ("stop", [""]), ("stop", [3]),
                                         ("stop", 3), ("n_ctx", 0), ("draft_max", 0), ("temperature", -1), ("seed", 0.5),
                                         ("repeat_penalty", 0), ("logit_bias", {0: np.nan}), ("logit_bias", {-1: 1})], ids=str)
def test_errors_name_the_argument(name, value):
    with pytest.raises(ParameterError, match=f"^{name}: must be ") as error:
        stream(FakeModel(), "x", **{name: value})
    assert error.value.parameter == name


def test_an_unknown_argument():
    with pytest.raises(TypeError, match=r"^generate\(\) got an unexpected keyword argument 'temp'; allowed: stream, "):
        stream(FakeModel(), "x", temp=1)


def test_drafts_of_nobody():
    with pytest.raises(ParameterError, match="^draft: must be None, 'ngram', 'mtp' or a model, got 'me'$"):
        list(stream(FakeModel(), "x", draft="me"))


SETTINGS = [dict(), dict(temperature=1.0, seed=3), dict(temperature=0.7, repeat_penalty=1.3, frequency_penalty=0.5,
                                                         presence_penalty=0.2), dict(logit_bias={70: 3.0, 66: -np.inf})]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_same_tokens_whatever_is_asked_for_beside_them(sampling):
    model, wanted = FakeModel(), dict(max_tokens=12, **sampling)
    plain = complete(model, "abcabc", **wanted)
    for more in (dict(draft="ngram"), dict(logprobs=3), dict(digest=True), dict(n=3),
                 dict(draft="ngram", n=2, logprobs=1, digest=True)):
        found = complete(model, "abcabc", **wanted, **more)
        assert (found.text, found.ids, found.finish_reason) == (plain.text, plain.ids, plain.finish_reason), more
    echoed = complete(model, "abcabc", echo=True, logprobs=2, n=2, **wanted)
    assert echoed.text == "abcabc" + plain.text and echoed.ids == (*b"abcabc", *plain.ids)
    assert [each.id for each in echoed.logprobs] == [*echoed.ids] and echoed.logprobs[0].logprob is None
    assert complete(model, [*b"abcabc"], echo=True, **wanted).text == echoed.text


def test_tokens_that_the_vocabulary_suppresses_are_never_chosen():
    """Drawn or not, beside a bias of the caller's; the likelihoods are those of the model's own logits."""
    model = saying(65, 66, 67)
    model.tokenizer.suppressed = frozenset((66, EOS))
    assert complete(model, [1], max_tokens=4).ids == (65, 0, 67, 0)
    assert complete(model, [1], max_tokens=3, logit_bias={3: 0.5, 66: 9.0}, logprobs=1).ids == (65, 3, 67)
    assert complete(model, [1], max_tokens=2, logprobs=1).logprobs[1].top[0][0] == 66
    assert not {66, EOS} & {*complete(FakeModel(), "a", max_tokens=60, temperature=9.0, top_k=0, seed=1, min_p=0.0, top_p=1.0,
                                      logit_bias={66: -np.inf, EOS: -np.inf}).ids}
    with pytest.raises(ParameterError, match="^logit_bias: must be of ids 0 to 258, got 259$"):
        complete(model, [1], logit_bias={259: -np.inf})
    assert adjusted(np.array([np.inf, 1], F32), Sampling().forbidding([0]), []).tolist() == [-np.inf, 1]


def test_samples_draw_for_themselves():
    model = FakeModel()
    three = complete(model, "a", n=3, max_tokens=10, temperature=1.0)
    assert len({each.ids for each in three.completions}) == 3
    assert three.completions[:2] == complete(model, "a", n=2, max_tokens=10, temperature=1.0).completions


def test_likelihoods_and_digests():
    """Of the model's own logits; the end's among those of the digest."""
    model = FakeModel()
    found = complete(model, "abc", max_tokens=6, temperature=1.0, logprobs=4, digest=True, logit_bias={65: 5.0})
    rows = model.logits([*b"abc", *found.ids])[2:-1]
    for row, each in zip(rows, found.logprobs):
        exact = row - np.log(np.exp(row.astype(np.float64)).sum())
        assert [id for id, _ in each.top] == np.argsort(-row, kind="stable")[:4].tolist()
        ids, logprobs = zip((each.id, each.logprob), *each.top)
        np.testing.assert_allclose(logprobs, exact[[*ids]], atol=2e-6)
    assert found.finish_reason == "length" and found.digest == sha256(rows.tobytes()).hexdigest()
    ties = complete(saying(65), [1], logprobs=3).logprobs[0].top
    assert [id for id, _ in ties] == [65, 0, 1] and ties[1][1] == ties[2][1]
    ended = complete(saying(65, 66), [1], digest=True)
    assert ended.finish_reason == "end" and ended.digest == sha256(saying(65, 66).logits([1, 65, 66]).tobytes()).hexdigest()
    assert complete(model, "abc").digest is None


def test_penalties_and_bias():
    l = F32([2, -2, 1, 0.5])
    sampling = Sampling(repeat_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, repeat_last_n=3, logit_bias={3: 1.0})
    assert adjusted(l, sampling, [2, 0, 1, 0]).tolist() == [1 - 0.5 - 0.5, -4 - 0.25 - 0.5, 1, 1.5]
    assert adjusted(l, Sampling(), [0]) is l and l[3] == 0.5
    for last_n, expected in (-1, [1, -4, 0.5, 0.5]), (0, [2, -2, 1, 0.5]):
        assert adjusted(l, Sampling(repeat_penalty=2.0, repeat_last_n=last_n), [2, 0, 1, 0]).tolist() == expected
    with pytest.raises(ParameterError, match="^logit_bias: must be of ids 0 to 3, got 4$"):
        adjusted(l, Sampling(logit_bias={4: 1.0}), [])


def test_a_real_model(tmp_path):
    """Likelihoods are those of `score`, bit for bit; `chat` takes the arguments of `generate`."""
    with Model.load(write_model(tmp_path / "m.gguf", "llama", n_vocab=70), device="cpu") as model:
        model._tokenizer = FakeModel().tokenizer
        model.tokenizer.is_end_of_generation = lambda id: False
        for sampling in SETTINGS[:3]:
            wanted = dict(max_tokens=8, logprobs=2, n=2, echo=True, **sampling)
            whole = model.generate([1, 2, 3], **wanted)
            assert whole == joined([1, 2, 3], model.generate([1, 2, 3], stream=True, **wanted))
            for each in whole.completions:
                scored = model.score([1], each.ids[1:])
                assert tuple(known.logprob for known in each.logprobs[1:]) == scored.logprobs
            assert model.generate([1, 2, 3], max_tokens=8, draft="ngram", **sampling).ids == whole.ids[3:]
            assert model.generate([1, 2, 3], max_tokens=8, draft=model, **sampling).ids == whole.ids[3:]
        parameters = {*signature(stream).parameters, *signature(asked).parameters, *Sampling.__dataclass_fields__}
        assert {*Arguments.__annotations__} == parameters - {"model", "prompt", "arguments", "sampling", "sample"}


def test_a_model_without_a_vocabulary_goes_on_from_ids_to_ids(tmp_path):
    with Model.load(write_model(tmp_path / "m.gguf", "llama", n_vocab=70), device="cpu") as model:
        found = model.generate([1, 2, 3], max_tokens=4, echo=True, stop=["a"])
        assert found.text == "" and found.ids[:3] == (1, 2, 3) and len(found.ids) == 7 and found.finish_reason == "length"
        with pytest.raises(UserError, match="has no vocabulary; give token ids instead of text$"):
            model.generate("abc")
        with pytest.raises(ParameterError, match="^grammar: the model file has no vocabulary; allowed: None$"):
            model.generate([1], grammar=Grammar.regex("a"))


def test_chat_splits_its_arguments(tmp_path, monkeypatch):
    """Those of `generate`, and those of the template."""
    seen: list[dict] = []
    monkeypatch.setattr("ggml_py.tokenizer.chat.encode_chat",
                        lambda tokenizer, messages, **arguments: seen.append(arguments) or [1, 2])
    with Model.load(write_model(tmp_path / "m.gguf", "llama", n_vocab=70), device="cpu") as model:
        model._tokenizer = FakeModel().tokenizer
        found = model.chat([{"role": "user", "content": "?"}], max_tokens=4, seed=2, enable_thinking=False, date="2026-02-03")
        assert found == model.generate([1, 2], max_tokens=4, seed=2) and found.prompt_ids == (1, 2)
        text = "".join(piece.text for piece in model.chat([], stream=True, max_tokens=4, tools=[]))
    assert text == found.text and seen == [{"enable_thinking": False, "date": "2026-02-03"}, {"tools": []}]
