"""Scoring: against float64 of the logits, the same bits alone and among others, each shared beginning decoded once, and how texts
become pairs."""
import numpy as np
import pytest
from fake_model import BOS, EOS, FakeTokenizer
from tiny_delta_net_models import write_delta_net_model
from tiny_layer_models import write_layer_model
from tiny_models import write_model

from ggml_py import Likelihood, Model, ParameterError, UserError
from ggml_py.base.likelihoods import negative_log_likelihood
from ggml_py.engine import likelihood
from ggml_py.engine.likelihood import encode_pair, tree
from ggml_py.testing import assert_bitwise_equal

RNG = np.random.default_rng(5)
FEW_SHOT = RNG.integers(0, 70, 40).tolist()
QUESTIONS = [FEW_SHOT + RNG.integers(0, 70, n).tolist() for n in (21, 5, 20, 1)]
ANSWERS = [[7], [8, 9], [7, 1, 2], []]
PAIRS = [*((question, answer) for question in QUESTIONS for answer in ANSWERS), ([3], [4, 5]), ([3], [6]), (FEW_SHOT, [1, 2]),
         (QUESTIONS[0][:50], [11] * 9), (RNG.integers(0, 70, 30).tolist(), [0]), (QUESTIONS[0] + [7], [1])]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("models") / "m.gguf", "llama", ("Q8_0", "F16", "Q4_0", "F32"))
    with Model.load(path, device="cpu") as model:
        yield model


@pytest.fixture
def decoded(monkeypatch):
    """How many tokens each step of scoring decodes."""
    counts: list[int] = []
    monkeypatch.setattr(likelihood.Scorer, "_decode", lambda self, level: _counted(self, level, counts))
    return counts


def _counted(scorer, level, counts, decode=likelihood.Scorer._decode):
    before = sum(scorer.context.memory.length(slot) for slot, _ in level)
    yield from decode(scorer, level)
    counts.append(sum(scorer.context.memory.length(slot) for slot, _ in level) - before)


def test_against_float64(tiny):
    for (context, continuation), found in zip(PAIRS, tiny.score_many(PAIRS, type_k="f32", type_v="f32")):
        with tiny.new_context(256, type_k="f32", type_v="f32") as alone:
            rows = alone.decode([*context, *continuation], logits="all")[len(context) - 1:-1]
        np.testing.assert_allclose(found.logprobs, -negative_log_likelihood(rows, continuation), rtol=0, atol=2e-6)
        assert found.ids == tuple(continuation) and found.is_greedy == (rows.argmax(1).tolist() == continuation)
        assert found.logprob == pytest.approx(sum(found.logprobs))


def test_greedy_continuations(tiny):
    with tiny.new_context(256) as context:
        likeliest = [int(context.decode(FEW_SHOT, logits="argmax")[0])]
        likeliest += context.greedy(likeliest[0], 3)
    found = tiny.score_many([(FEW_SHOT, likeliest), (FEW_SHOT, [*likeliest[:3], (likeliest[3] + 1) % 70])])
    assert [each.is_greedy for each in found] == [True, False] and found[0].logprobs[:3] == found[1].logprobs[:3]


@pytest.mark.parametrize("n_seq_max, n_ubatch", [(1, 2048), (2, 16), (5, 2048), (64, 3)])
def test_the_same_alone_and_among_others_in_any_order(tiny, n_seq_max, n_ubatch):
    alone = [tiny.score(*pair) for pair in PAIRS]
    order = np.random.default_rng(n_seq_max).permutation(len(PAIRS))
    told: list[tuple[int, int]] = []
    found = tiny.score_many([PAIRS[i] for i in order], n_seq_max=n_seq_max, n_ubatch=n_ubatch,
                            progress=lambda done, n: told.append((done, n)))
    assert found == [alone[i] for i in order]
    assert told[-1] == (told[0][1],) * 2 and [done for done, _ in told] == sorted({done for done, _ in told})
    assert alone[3] == Likelihood((), (), True) and alone[3].logprob == 0


def test_recurrent_models(tmp_path):
    """Their sequences can be copied where they are, and go back nowhere."""
    with Model.load(write_delta_net_model(tmp_path / "m.gguf", "qwen3next"), device="cpu") as model:
        alone = [model.score(*pair) for pair in PAIRS[:10]]
        for n_seq_max in 1, 3, None:
            assert model.score_many(PAIRS[:10], n_seq_max=n_seq_max) == alone


@pytest.mark.parametrize("n_seq_max", [1, 4, 64])
def test_shared_beginnings_are_decoded_once(tiny, decoded, n_seq_max):
    pairs = [(question, answer) for question in QUESTIONS[:3] for answer in ANSWERS[:3]]
    tiny.kept.clear()
    tiny.score_many([*pairs, *pairs], n_seq_max=n_seq_max)
    # of each pair its own tokens and the last of its context, and of each context what it does not share
    assert sum(decoded) == sum(len(answer) for _, answer in pairs) + 40 + sum(len(question) - 41 for question in QUESTIONS[:3])
    assert n_seq_max < 64 or len(decoded) == 3


def test_short_beginnings_are_not_waited_for(tiny, decoded):
    tiny.score_many([([1, 2, 3, i], [i]) for i in range(6)])
    assert len(decoded) == 2  # the three tokens that all have are theirs alone in no other place
    tiny.score_many([([1, 2, i, i], [i]) for i in range(6)])
    assert decoded[2:] == [18, 6]


def test_trees():
    p, q = tuple(range(16)), tuple(range(16, 33))
    root = tree([((*p, 1), (2,)), ((*p, *q, 1), (2,)), ((*p, *q, 1), (3,)), ((*p, *q[:16], 50, 1), (2,))])
    stem, = root.branches
    assert stem.tokens == p and len(stem.leaves) == 1 and not root.leaves
    fork, = stem.branches
    assert fork.tokens == (*p, *q[:16]) and [each.tokens for each in fork.branches] == [(*p, *q), (*p, *q[:16], 50)]
    assert [len(each.leaves) for each in fork.branches] == [2, 1]
    (pair,) = tree([((1,), (2,))]).leaves
    assert pair == ((1,), (2,))


def test_nan(tiny, monkeypatch):
    """Logits that are no numbers have no likelihood, and nothing is likeliest."""
    from ggml_py.engine.context import Context
    real = Context.likelihoods
    monkeypatch.setattr(Context, "likelihoods", lambda self, batch: [(a * np.nan, b * 0 - 1) for a, b in real(self, batch)])
    found = tiny.score([1], [2, 3])
    assert np.isnan(found.logprobs).all() and np.isnan(found.logprob) and not found.is_greedy


def test_errors(tiny):
    for pairs, message in ((["ab"], "pairs: pair 0 is 'ab', allowed: (context, continuation)"),
                           ([3], "pairs: pair 0 is 3, allowed: (context, continuation)"),
                           ([(3, [2])], "context: must be a text or a list of token ids, got 3"),
                           ([([1], b"a")], "continuation: must be a text or a list of token ids, got b'a'"),
                           ([([1], ["a"])], "continuation: must be a text or a list of token ids, got ['a']"),
                           ([([1], [2]), ([1],)], r"pairs: pair 1 is ([1],), allowed: (context, continuation)"),
                           ([([1] * 256, [2, 2])], "pairs: pair 0 takes 257 positions, allowed: up to 256, what the model was "
                                                   "trained on"),
                           ([([], [2])], "context: is empty, and the model has neither BOS nor EOS to stand for it; allowed: at "
                                         "least one token"),
                           ([([1], [70])], "targets: must be 0 to 69, got 70"),
                           ([([-1], [7])], "tokens: must be 0 to 69, got -1")):
        with pytest.raises(UserError) as error:
            tiny.score_many(pairs)
        assert str(error.value) == message
    assert tiny.score_many([]) == []


def test_likelihoods_of_a_context(tiny):
    """Of several sequences, some of which want none, across micro-batches."""
    with tiny.new_context(256, n_seq_max=3, n_ubatch=7) as context:
        (a, best), (none, _), (b, _) = context.likelihoods([(0, FEW_SHOT[:20], FEW_SHOT[4:21]), (2, [1, 2], []), (1, [5], [6])])
        assert a.shape == best.shape == (17,) and none.shape == (0,) and b.shape == (1,)
        with pytest.raises(UserError, match=r"targets: sequence 0 has 2 for 1 tokens; allowed: one for each"):
            context.likelihoods([(0, [1], [2, 3])])
        assert context.likelihoods([]) == [] and context.likelihoods([(2, [3], [])])[0][0].size == 0
        context.clear()
        rows = context.decode(FEW_SHOT[:20], logits="all")[3:]
        assert best.tolist() == rows.argmax(1).tolist()
        context.clear()
        context.decode(FEW_SHOT[:19], logits="none")
        (last, _), = context.likelihoods([(0, [FEW_SHOT[19]], [FEW_SHOT[20]])])
        assert_bitwise_equal(last, a[-1:], "the last target")


class Joining(FakeTokenizer):
    """"ab" is one token; BOS is written <s>."""

    def encode(self, text, add_special=True, parse_special=False):
        ids, text = [BOS] * (parse_special and text.startswith("<s>")), text.removeprefix("<s>") if parse_special else text
        return ids + super().encode(text.replace("ab", "\x01"), add_special)


def test_pairs_of_texts():
    plain, with_bos = Joining(add_bos=False), Joining(add_bos=True)
    assert encode_pair(plain, "x ", "y") == (tuple(b"x"), tuple(b" y"))
    assert encode_pair(with_bos, "x", " y") == ((BOS, *b"x"), tuple(b" y"))
    assert encode_pair(with_bos, "<s>x", "y") == ((BOS, *b"x"), tuple(b"y"))  # never twice
    assert encode_pair(plain, "xa", "bc") == (tuple(b"xa"), tuple(b"c"))  # tokens of both texts, behind as many as the first has
    assert encode_pair(plain, [120], "y") == ((120,), tuple(b"y")) and encode_pair(plain, "x", np.array([9])) == ((120,), (9,))
    for context in "", " ", []:
        assert encode_pair(plain, context, "y") == ((BOS,), tuple(b" y" if context == " " else b"y"))
    for tokenizer in plain, with_bos:
        assert encode_pair(tokenizer, "", "<s>y") == ((BOS,), tuple(b"y"))
        assert encode_pair(tokenizer, [], [BOS, 7]) == ((BOS,), (BOS, 7))
    plain.bos_id = None
    assert encode_pair(plain, "", "y") == ((EOS,), tuple(b"y"))
    plain.eos_id = None
    with pytest.raises(ParameterError, match=r"^context: is empty"):
        encode_pair(plain, "", "y")


def test_a_pair_has_the_rotary_angles_of_its_own_length(tmp_path):
    """Not those of the longest beside it, where a file has divisors for short contexts and for long ones."""
    pairs = [(RNG.integers(0, 70, n).tolist(), [7, 8]) for n in (20, 62, 63, 64, 90)]
    with Model.load(write_layer_model(tmp_path / "m.gguf", "phi3"), device="cpu") as model:
        told: list = []
        together = model.score_many(pairs, progress=lambda *numbers: told.append(numbers))
        assert together == [model.score(*pair) for pair in pairs] and told == [(3, 5), (5, 5)]
