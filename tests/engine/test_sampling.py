"""Sampling step by step against the definitions; the same seed is the same text."""
import numpy as np
import pytest
from fake_model import EOS, N_VOCAB, FakeModel, prefix_logits
from hypothesis import given, settings, strategies as st

from ggml_py.base.errors import ParameterError, UserError
from ggml_py.engine.generate import generate
from ggml_py.engine.sampling import Sampling, choose, largest, uniform

F32 = np.float32
OFF = dict(top_k=0, top_p=1.0, min_p=0.0)


def draw_many(logits, sampling, n=2000):
    """Share of each token over n positions."""
    return np.bincount([choose(np.array(logits, F32), position, sampling) for position in range(n)], minlength=len(logits)) / n


def test_greedy_takes_the_lower_index_of_equal_logits():
    assert choose(np.array([1, 5, 2, 5, 5], F32), 0, Sampling()) == 1
    assert choose(np.array([-np.inf, -3, -np.inf], F32), 0, Sampling()) == 1
    assert choose(np.zeros(9, F32), 7, Sampling()) == 0


def test_uniform_is_philox_by_position():
    values = [uniform(12, position) for position in range(1000)]
    assert all(0 <= v < 1 for v in values) and len(set(values)) == 1000 and abs(np.mean(values) - 0.5) < 0.03
    assert values[3] == (int(np.random.Philox(key=12, counter=3 << 192).random_raw()) >> 11) / 2 ** 53
    assert uniform(13, 3) != values[3]


def test_frequencies_follow_the_softmax():
    logits = np.array([2.0, 0.5, 1.0, -1.0])
    p = np.exp(logits) / np.exp(logits).sum()
    # 2000 draws: four standard deviations of a share are at most 0.045
    assert np.abs(draw_many(logits, Sampling(temperature=1.0, **OFF)) - p).max() < 0.045
    p = np.exp(logits / 2) / np.exp(logits / 2).sum()
    assert np.abs(draw_many(logits, Sampling(temperature=2.0, **OFF)) - p).max() < 0.045


@pytest.mark.parametrize("sampling, allowed", [
    (dict(OFF, top_k=1), {2}), (dict(OFF, top_k=3), {2, 4, 0}), (dict(OFF, top_k=100), {0, 1, 2, 3, 4}),
    # p = 0.1, 0.1, 0.5, 0.05, 0.25: in falling order 2, 4, 0 and 1 (equal: lower index first), 3; sums 0.5, 0.75, 0.85, 0.95, 1
    (dict(OFF, top_p=0.0), {2}), (dict(OFF, top_p=0.49), {2}), (dict(OFF, top_p=0.51), {2, 4}), (dict(OFF, top_p=0.8), {2, 4, 0}),
    (dict(OFF, top_p=0.9), {2, 4, 0, 1}),
    (dict(OFF, min_p=1.0), {2}), (dict(OFF, min_p=0.4), {2, 4}), (dict(OFF, min_p=0.15), {2, 4, 0, 1}),
    # after top_k = 2 the shares are 2/3 and 1/3, so 0.6 needs one token only; without it 0.6 needs two
    (dict(OFF, top_k=2, top_p=0.6), {2}), (dict(OFF, top_p=0.6), {2, 4}),
])
def test_which_tokens_remain(sampling, allowed):
    logits = np.log([0.1, 0.1, 0.5, 0.05, 0.25]).astype(F32)
    assert set(np.flatnonzero(draw_many(logits, Sampling(temperature=4.0, **sampling), 300))) == allowed


def test_infinite_logits():
    assert choose(np.array([0, np.inf, 1], F32), 0, Sampling(temperature=1.0)) == 1
    assert set(np.flatnonzero(draw_many([0, -np.inf, 0], Sampling(temperature=1.0, **OFF), 100))) == {0, 2}
    with pytest.raises(UserError, match="the logits of token 5 hold NaN"):
        choose(np.array([0, np.nan], F32), 5, Sampling())


@pytest.mark.parametrize("settings, message", [
    (dict(temperature=-1), "^temperature: must be a number, 0 to 1000000.0, got -1$"),
    (dict(temperature=float("nan")), "^temperature: .* got nan$"), (dict(temperature="1"), "^temperature: .* got '1'$"),
    (dict(seed=-1), "^seed: must be an integer, 0 to 9223372036854775807, got -1$"),
    (dict(seed=1.0), "^seed: must be an integer, .* got 1.0$"), (dict(seed=2**63), "^seed: "),
    (dict(top_k=-1), "^top_k: must be an integer, 0 to"), (dict(top_p=1.5), "^top_p: must be a number, 0 to 1, got 1.5$"),
    (dict(min_p=-0.1), "^min_p: must be a number, 0 to 1, got -0.1$")])
def test_settings_out_of_bounds_are_refused_by_name(settings, message):
    with pytest.raises(ParameterError, match=message):
        Sampling(**settings)


def test_settings_at_their_bounds():
    assert Sampling(1e6, 2**63 - 1, 1, 1, 2**63 - 1) and Sampling(0, 0, 0, 0, 0)
    assert Sampling(np.float32(0.5), np.int64(3), np.float64(0.5), 0, np.int32(7))


def continuation(sampling, n=40, is_end=lambda token: False):
    with FakeModel().new_context(n_ctx=200) as context:
        return list(generate(context, range(5), n, sampling, is_end))


def test_generation_is_a_function_of_seed_and_prompt():
    one = Sampling(temperature=1.5, seed=1, **OFF)
    assert continuation(one) == continuation(one)
    assert continuation(one)[:7] == continuation(one, n=7)
    assert continuation(one) != continuation(Sampling(temperature=1.5, seed=2, **OFF))


def test_greedy_generation_follows_the_logits():
    tokens = list(range(5))
    for _ in range(6):
        tokens.append(int(prefix_logits(tokens)[-1].argmax()))
    assert continuation(Sampling(), 6) == tokens[5:]


def test_generation_ends_without_the_end_token_and_decodes_nothing_in_vain():
    greedy = continuation(Sampling(), 6)
    assert continuation(Sampling(), 6, is_end=lambda token: token == greedy[3]) == greedy[:greedy.index(greedy[3])]
    model = FakeModel(logits=lambda tokens: np.eye(N_VOCAB, dtype=F32)[[EOS if len(tokens) >= 8 else 65] * len(tokens)])
    with model.new_context(n_ctx=200) as context:
        assert list(generate(context, [1, 2, 3], 100, Sampling(), model.tokenizer.is_end_of_generation)) == [65] * 5
        context.clear()
        model.calls.clear()
        assert list(generate(context, [1], 3, Sampling(), model.tokenizer.is_end_of_generation)) == [65] * 3
    assert [lengths for _, lengths in model.calls] == [{0: 1}] * 3


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0, np.inf, -np.inf, np.nan]), min_size=1, max_size=12), st.integers(0, 14))
def test_the_largest_are_those_of_a_stable_sort(values, n):
    x = np.float32(values)
    assert largest(x, n).tolist() == np.argsort(-x, kind="stable")[:n].tolist()


@pytest.mark.parametrize("n_nan", [0, 1, 200, 1990])
@pytest.mark.parametrize("n", [1, 3, 40, 62, 63, 200, 1999])
def test_the_largest_of_many(n, n_nan):
    """By groups and without: equal values, zeros of both signs, infinities and NaN, the largest in one group or in all."""
    rng = np.random.default_rng(n + n_nan)
    for x in (rng.standard_normal(2000), rng.integers(-3, 4, 2000) * rng.choice([1.0, -1.0], 2000), np.arange(2000) % 640,
              np.where(np.arange(2000) % 16 == 5, 9, rng.standard_normal(2000)), np.full(2000, -np.inf)):
        x = x.astype(np.float32)
        x[rng.integers(0, 2000, 5)] = np.inf, -np.inf, 0.0, -0.0, np.inf
        x[rng.permutation(2000)[:n_nan]] = np.nan
        assert largest(x, n).tolist() == np.argsort(-x, kind="stable")[:n].tolist()
