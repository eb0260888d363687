"""Speculation: text, logits and memory are those of a run without drafts, whatever is guessed."""
from itertools import islice, pairwise

import numpy as np
import pytest
from tiny_delta_net_models import KINDS, write_delta_net_model
from tiny_models import write_model
from tiny_moe_models import write_moe_model

from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import ParameterError, UserError
from ggml_py.engine.generate import generate
from ggml_py.engine.model import Model
from ggml_py.engine.sampling import Sampling
from ggml_py.engine.speculation import LONGEST_REST, DraftModel, NGrams, Speculation
from ggml_py.files.gguf import GGUFFile
from ggml_py.state.kv_cache import KVCache
from ggml_py.testing import assert_bitwise_equal

PROMPT, N = [3, 1, 4, 1, 5, 9, 2, 6], 40
SAMPLINGS = [Sampling(), *(Sampling(temperature=0.8, seed=seed) for seed in range(3))]


class Script:
    """Drafts of a text that is known: right up to a number of tokens that goes 0, 1, 2, ... in turn, then wrong."""
    name = "script"

    def __init__(self, text, right=None):
        self.text, self.right = text, right

    def begin(self, context):
        self.turn = 0

    def end(self):
        pass

    def draft(self, tokens, n):
        n_right = self.turn % (n + 1) if self.right is None else self.right
        self.turn += 1
        rest = self.text[len(tokens):len(tokens) + n]
        return rest[:n_right] + [(token + 1) % 70 for token in rest[n_right:]]

    def close(self):
        pass


class Eager(Speculation):
    """Drafts at every step, always as long as they may be."""
    def learn(self, n_drafted, n_accepted):
        super().learn(n_drafted, n_accepted)
        self._forget()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=["llama", "qwen3moe", "deepseek2-mla", "qwen35", "qwen3next"])
def model(request, folder):
    write, types = (write_model, ("Q8_0", "F16")) if request.param == "llama" else (write_moe_model, ("Q8_0",))
    write = write_delta_net_model if request.param in KINDS else write
    with Model(GGUFFile.open(write(folder / f"{request.param}.gguf", request.param, types)), CPUBackend()) as model:
        yield model


@pytest.fixture(scope="module")
def llama(folder):
    with Model(GGUFFile.open(write_model(folder / "target.gguf", "llama", ("Q8_0",))), CPUBackend()) as model:
        yield model


@pytest.fixture(scope="module")
def other(folder):
    """The same model in another type."""
    with Model(GGUFFile.open(write_model(folder / "draft.gguf", "llama", ("Q4_0",))), CPUBackend()) as model:
        yield model


def never(token):
    return False


def run(model, sampling, speculation=None, is_end=never, n=N, **settings):
    """(tokens, the logits that they were chosen from, length of the sequence, logits of a token behind it)."""
    seen: list[np.ndarray] = []
    with model.new_context(n_ctx=len(PROMPT) + n + 4, **settings) as context:
        tokens = list(generate(context, PROMPT, n, sampling, is_end, speculation, lambda row: seen.append(row.copy())))
        return tokens, np.array(seen), context.memory.length(0), context.decode([7])


def check(model, sampling, speculation, **settings):
    tokens, seen, length, after = run(model, sampling, **settings)
    found = run(model, sampling, speculation, **settings)
    assert found[0] == tokens and found[2] == length
    assert_bitwise_equal(found[1], seen, "logits of the tokens")
    assert_bitwise_equal(found[3], after, "logits behind them")
    with model.new_context(n_ctx=len(PROMPT) + N + 4, **settings) as context:  # without logits on the host where it is greedy
        assert list(generate(context, PROMPT, N, sampling, never, speculation)) == tokens


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seed 0", "seed 1", "seed 2"])
@pytest.mark.parametrize("most", [1, 3, 8])
def test_rejected_at_every_index(model, sampling, most):
    text = PROMPT + run(model, sampling)[0]
    speculation = Eager(Script(text), most)
    check(model, sampling, speculation, n_rollback=most + 1)
    assert 0 < speculation.n_accepted < speculation.n_drafted


@pytest.mark.parametrize("settings",
                         [dict(type_k="q8_0", type_v="q8_0"), dict(kv_write="cpy"), dict(n_ubatch=2), dict(no_fuse="all")],
                         ids=lambda settings: next(iter(settings)))
@pytest.mark.parametrize("right", [0, 2, 8])
def test_settings(llama, settings, right):
    text = PROMPT + run(llama, Sampling(), **settings)[0]
    check(llama, Sampling(), Eager(Script(text, right)), **settings)


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "drawn"])
@pytest.mark.parametrize("p_min", [0, 0.05, 1])
def test_a_draft_model(llama, other, sampling, p_min):
    source = DraftModel(other, llama, 64, p_min)
    speculation = Speculation(source)
    check(llama, sampling, speculation)
    assert (speculation.n_drafted > 0) == (p_min < 1)
    source.close()


def test_a_model_drafts_for_itself(llama):
    source = DraftModel(llama, llama, 64)
    speculation = Speculation(source)
    check(llama, Sampling(), speculation)
    assert speculation.n_accepted == speculation.n_drafted > N
    source.close()


def test_a_draft_model_of_fewer_positions(llama, other):
    """It drafts while the text fits."""
    source = DraftModel(other, llama, 20)
    assert len(source.draft(PROMPT, 8)) == 8 and source.draft([*range(20)], 8) == source.draft([*range(20)], 1)
    assert len(source.draft([*range(20)], 8)) == 1 and source.draft([*range(21)], 8) == []
    source.close()


def test_ngrams():
    source = NGrams()
    source.begin(None)
    assert source.draft([1, 2, 3], 4) == []
    assert source.draft([1, 2, 3, 4, 1, 2], 4) == [3, 4, 1, 2]
    assert source.draft([1, 2, 3, 4, 1, 2, 9, 1, 2], 2) == [9, 1]      # the last place
    assert source.draft([1, 2, 3, 4, 1, 2, 9, 1, 2, 3], 1) == [4]      # the longest run
    assert source.draft([1, 2, 3, 4, 1, 2, 9, 1, 2, 3, 5, 5, 5], 3) == [5, 5, 5]
    source.begin(None)
    assert source.draft([4, 1, 2], 4) == []


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "drawn"])
def test_ngrams_of_a_text(llama, sampling):
    speculation = Speculation(NGrams())
    check(llama, sampling, speculation)


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_the_end(llama, n):
    """A draft never goes beyond the number of tokens, nor what is given beyond a token that ends the text."""
    text = PROMPT + run(llama, Sampling())[0]
    assert run(llama, Sampling(), Eager(Script(text, 8)), n=n)[0] == text[len(PROMPT):len(PROMPT) + n]
    end = text[len(PROMPT) + n]
    plain, guessed = (run(llama, Sampling(), speculation, end.__eq__) for speculation in (None, Eager(Script(text, 8))))
    assert plain[0] == guessed[0] and plain[2] == guessed[2]
    assert_bitwise_equal(plain[3], guessed[3], "logits behind the end")


@pytest.mark.parametrize("n", [1, 4, 12])
def test_who_stops_finds_the_sequence_as_it_was_given(llama, n):
    text = PROMPT + run(llama, Sampling())[0]
    with llama.new_context(n_ctx=64) as context:
        tokens = generate(context, PROMPT, N, Sampling(), never, Eager(Script(text, 8)))
        assert list(islice(tokens, n)) == text[len(PROMPT):len(PROMPT) + n]
        tokens.close()
        assert context.memory.length(0) == len(PROMPT) + n - 1


def test_a_step_that_fails(llama, monkeypatch):
    text = PROMPT + run(llama, Sampling())[0]
    with llama.new_context(n_ctx=64) as context:
        tokens = generate(context, PROMPT, N, Sampling(), never, Eager(Script(text, 3)))
        given = list(islice(tokens, 5))
        monkeypatch.setattr(context, "_queue", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            given += tokens
        assert context.memory.length(0) == len(PROMPT) + len(given) - 1


def test_a_full_context(llama):
    """Guesses take no position that the text would have."""
    text = PROMPT + run(llama, Sampling())[0]
    with llama.new_context(n_ctx=16) as context:
        found = list(generate(context, PROMPT, 9, Sampling(), never, Eager(Script(text, 8))))
        assert found == text[len(PROMPT):len(PROMPT) + 9]
    with llama.new_context(n_ctx=16) as context, pytest.raises(UserError, match="sequence 0 has 16 of 16 positions in use"):
        list(generate(context, PROMPT, 10, Sampling(), never, Eager(Script(text, 8))))


def lengths(speculation, n_steps, n_right):
    """How long drafts are, of which at most n_right tokens are right."""
    found = []
    for _ in range(n_steps):
        found.append(len(speculation.draft([1], 256)))
        speculation.learn(found[-1], min(found[-1], n_right))
    return found


@pytest.mark.parametrize("n_right", [0, 1, 3, 8])
def test_how_much_is_guessed(n_right):
    """As much as is right, and one more after 1, 2, 4 and at most 64 drafts; more again as soon as more is right."""
    speculation = Speculation(Script([1] * 1000, 8), 8)
    speculation.begin(None)
    found = lengths(speculation, 500, n_right)
    start = found.index(n_right)
    assert start <= 1 and set(found[:start]) <= {8}
    if n_right < 8:
        longer = [i for i, n in enumerate(found) if n == n_right + 1]
        assert [b - a - 1 for a, b in pairwise(longer)][-3:] == [LONGEST_REST] * 3
        assert set(found[start:]) == {n_right, n_right + 1} and len(longer) <= 13
    assert lengths(speculation, 200, 8)[-1] == 8
    assert lengths(speculation, 20, 2)[-1] in (2, 3)
    speculation.begin(None)
    assert len(speculation.draft([1], 256)) == 8 and len(speculation.draft([1], 5)) == 5


def test_the_report():
    speculation = Speculation(Script([]), 8)
    assert speculation.report() == "drafts of script: 0 drafted, 0 accepted"
    speculation.learn(8, 2)
    speculation.learn(0, 0)
    assert speculation.report() == "drafts of script: 8 drafted, 2 accepted (25 %), 2.00 tokens a step"


def test_refused(llama, folder):
    with pytest.raises(ParameterError, match="draft_max: must be 1 to 256, got 0"):
        Speculation(NGrams(), 0)
    with pytest.raises(ParameterError, match="draft_p_min: must be 0 to 1, got 2"):
        DraftModel(llama, llama, 64, 2)
    path = write_model(folder / "small.gguf", "llama", n_vocab=60)
    with (Model(GGUFFile.open(path), CPUBackend()) as small,
          pytest.raises(ParameterError,
                        match=r"small.gguf has another vocabulary \(60 tokens\) than .*target.gguf \(70 tokens\)")):
        DraftModel(small, llama, 64)


def test_ids_of_all_rows(llama):
    with llama.new_context(n_ctx=64) as context:
        rows = context.decode(PROMPT, logits="all")
        context.clear()
        assert context.decode(PROMPT, logits="argmaxes").tolist() == rows.argmax(1).tolist()


def test_a_rejected_draft_that_stays_is_an_error(llama, monkeypatch):
    rm = KVCache.seq_rm
    text = PROMPT + run(llama, Sampling())[0]
    monkeypatch.setattr(KVCache, "seq_rm", lambda memory, seq_id, p0, p1: rm(memory, seq_id, p0 + 1, p1))
    with (llama.new_context(n_ctx=64) as context,
          pytest.raises(RuntimeError, match="context: sequence 0 was taken back to 9 positions and has 10")):
        list(generate(context, PROMPT, N, Sampling(), never, Eager(Script(text, 0))))
