"""Ids that the op `draw` chooses where the logits are: those that `choose` finds on the host, with steps queued ahead or not."""
from itertools import islice

import numpy as np
import pytest
from fake_model import FakeTokenizer
from queueing_backend import QueueingBackend
from tiny_models import write_model

from ggml_py import Grammar, Model, UserError
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.placement import PlacementOptions
from ggml_py.engine.generate import generate
from ggml_py.engine.context import Context
from ggml_py.engine.sampling import Draw, Sampling, choose
from ggml_py.files.gguf import GGUFFile

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
CHOICES = [Sampling(temperature=0.8, seed=3), Sampling(temperature=1.7, top_k=64, top_p=1.0, min_p=0.0, seed=4, sample=2),
           Sampling(temperature=5.0, top_k=7, top_p=0.5, seed=5), Sampling()]


@pytest.fixture(scope="module", params=[CPUBackend, QueueingBackend])
def model(request, tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("models") / "m.gguf", "llama", ("Q8_0", "F16", "Q4_0"), n_vocab=300)
    with Model(GGUFFile.open(path), request.param()) as model:
        model._tokenizer = FakeTokenizer(False)
        yield model


def by_the_host(model, sampling, n):
    """Of steps that give logits."""
    text = [*PROMPT]
    with model.new_context(n_ctx=64) as context:
        fed = text
        for _ in range(n):
            fed = [choose(context.decode(fed)[-1], len(text), sampling)]
            text += fed
    return text[len(PROMPT):]


@pytest.mark.parametrize("sampling", CHOICES[:3])
def test_one_sequence(model, sampling):
    expected = by_the_host(model, sampling, 30)
    assert len({*expected}) > 5
    for n in 1, 2, 30:
        with model.new_context(n_ctx=64) as context:
            assert list(generate(context, PROMPT, n, sampling, lambda token: False)) == expected[:n]
            assert context.memory.length(0) == len(PROMPT) + n - 1


def test_several_sequences_choose_each_by_itself(model):
    """One of them takes the likeliest; it is left in the middle, and goes on."""
    expected = [by_the_host(model, sampling, 20) for sampling in CHOICES]
    with model.new_context(n_ctx=4 * 64, n_seq_max=4) as context:
        context.decode_batch([(i, PROMPT) for i in range(4)], "none")
        for first in range(0, 19, 7):
            batch = [(i, ids[first]) for i, ids in enumerate(expected)]
            draws = [Draw(sampling, len(PROMPT) + first + 1) for sampling in CHOICES]
            steps = context.greedy_batch(batch, 12, draws=draws)
            found = np.array([*islice(steps, 7)]).T.tolist()
            assert [ids[:len(expected[0]) - first - 1] for ids in found] == [ids[first + 1:first + 8] for ids in expected]
            steps.close()
            assert context.memory.length(0) == len(PROMPT) + first + 7


def test_what_the_device_does_not_draw_is_refused(model):
    allowed = "temperature 0 or top_k 1 to 64, without bias and penalties"
    with model.new_context(n_ctx=64) as context:
        for sampling in (Sampling(temperature=1.0, top_k=65), Sampling(temperature=1.0, top_k=0), Sampling(logit_bias={3: 1.0}),
                         Sampling(temperature=1.0, repeat_penalty=1.1)):
            with pytest.raises(UserError, match=rf"^draws: Sampling\(.*\) is the host's to follow; allowed: {allowed}$"):
                next(context.greedy_batch([(0, 1)], 3, draws=[Draw(sampling, 1)]))
        with pytest.raises(UserError, match="^draws: 1 for 2 sequences; allowed: one for each$"):
            next(context.greedy_batch([(0, 1), (1, 2)], 3, draws=[Draw(CHOICES[0], 1)]))
        assert context.memory.length(0) == 0


def test_devices_that_share_columns(model):
    path, expected = model.file.path, [by_the_host(model, sampling, 12) for sampling in CHOICES[:2]]
    placement = PlacementOptions(("cpu", "cpu:1"), split_mode="column")
    with Model.load(path, placement=placement) as both:
        both._tokenizer = FakeTokenizer(False)
        for sampling, ids in zip(CHOICES, expected):
            with both.new_context(n_ctx=64) as context:
                assert list(generate(context, PROMPT, 12, sampling, lambda token: False)) == ids
                assert {node.device for node in context.program(1, 1, "draws").nodes} == {"cpu", "cpu:1"}


def test_what_is_drawn_where_the_logits_are(model, monkeypatch):
    """All that changes logits before the choice, or wants them, is done on the host."""
    seen, queue = [], Context._queue
    monkeypatch.setattr(Context, "_queue", lambda context, *args, **named: seen.append(named.get("draws") is not None) or
                        queue(context, *args, **named))
    for arguments, there in [(dict(), True), (dict(top_k=64), True), (dict(top_k=65), False), (dict(top_k=0), False),
                             (dict(repeat_penalty=1.1), False), (dict(logit_bias={3: 1.0}), False), (dict(logprobs=1), False),
                             (dict(grammar=Grammar.regex("[ -~]*")), False), (dict(digest=True), False)]:
        seen.clear()
        arguments = {"temperature": 0.8, "max_tokens": 4, **arguments}
        text = model.generate(PROMPT, **arguments)
        assert any(seen) is there, arguments
        assert model.generate_many([PROMPT, [1, 2]], **arguments)[0] == text, arguments


def test_a_nan_is_told_by_its_position(model, monkeypatch):
    settings, calls = Sampling.settings, []

    def noted(sampling, position, n_vocab):
        calls.append(position)
        return settings(sampling, position, n_vocab)
    monkeypatch.setattr(Sampling, "settings", noted)
    with model.new_context(n_ctx=64) as context:
        real = context.greedy_batch
        monkeypatch.setattr(context, "greedy_batch", lambda *args, **named: (
            np.where(i == 2, -1, ids) for i, ids in enumerate(real(*args, **named))))
        with pytest.raises(UserError, match=f"^the logits of token {len(PROMPT) + 3} hold NaN$"):
            list(generate(context, PROMPT, 9, CHOICES[0], lambda token: False))
    assert calls[:3] == [len(PROMPT) + 1, len(PROMPT) + 2, len(PROMPT) + 3]
