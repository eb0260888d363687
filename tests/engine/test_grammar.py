"""Grammars: every completion is of its grammar, by every tokenizer; the same with drafts, samples, whole or streamed."""
import json
import re
import sys

import numpy as np
import pytest
from fake_model import EOS, FakeModel
from hypothesis import given, settings, strategies as st
from made_tokenizers import CONTROL, LETTERS, USER_DEFINED, bpe, space_escaped, spm

from ggml_py import Grammar, ParameterError, UserError
from ggml_py.engine.completion import joined, stream
from ggml_py.engine.sampling import Sampling, choose

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "maximum": 99}},
          "required": ["name", "age"], "additionalProperties": False}


def is_person(text: str) -> bool:
    found = json.loads(text)
    return [*found] == ["name", "age"] and len(found["name"]) <= 4 and found["age"] <= 99


# grammar -> whether a text is of it
GRAMMARS = [
    (Grammar.json_schema(PERSON), is_person),
    (Grammar.json_schema('{"enum": ["a", 1, null]}'), lambda text: json.loads(text) in ["a", 1, None]),
    (Grammar.regex("(ab|ac){1,3}é?"), re.compile("(ab|ac){1,3}é?").fullmatch),
    (Grammar.lark('start: "a" b* "\U0001f600"\nb: "b" | "(" b ")"'), re.compile("a[b()]*\U0001f600").fullmatch),
    (Grammar.gbnf('root ::= (word " ")+ "."\nword ::= [ab]{1,3} | "\\"" [^"] "\\""'),
     re.compile(r'(([ab]{1,3}|"[^"]") )+\.', re.DOTALL).fullmatch),
    (Grammar.regex("hello world"), "hello world".__eq__),
    (Grammar.regex(""), "".__eq__),
]
IDS = [f"{grammar.kind}-{grammar.source[:12]}" for grammar, _ in GRAMMARS]
SETTINGS = [dict(), dict(temperature=1.0, seed=3), dict(temperature=0.7, repeat_penalty=1.3, logit_bias={97: 1.0})]


@pytest.mark.parametrize("grammar, fits", GRAMMARS, ids=IDS)
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_completions(grammar, fits, sampling):
    model, wanted = FakeModel(), dict(max_tokens=60, grammar=grammar, **sampling)
    plain = joined([], stream(model, "abab", **wanted))
    assert plain.finish_reason == "length" or fits(plain.text)
    for more in dict(draft="ngram"), dict(logprobs=1, digest=True), dict(n=2), dict(draft="ngram", n=2, logprobs=2, digest=True):
        found = joined([], stream(model, "abab", **wanted, **more))
        assert (found.text, found.ids, found.finish_reason) == (plain.text, plain.ids, plain.finish_reason), more
        assert all(each.finish_reason == "length" or fits(each.text) for each in found.completions)


def byte_tokens(model: str):
    """Tokenizers whose tokens cut the texts of GRAMMARS in several ways."""
    words = ["ab", "abab", "hello", "wor", '"name', '": ', "aé"]
    if model == "spm":
        texts = [f"▁{word}" for word in words] + [*words, "he", "ll", "hell", "▁", "a", "b", "▁a"]
        return spm({text: -float(i) for i, text in enumerate(texts)}, eos_token_id=2)
    if model == "gemma4":
        letters = ["▁", "a", "b", "h", "e", "l", "o", "▁a", "he", "ll", "hell"]
        return space_escaped(["<pad>", "<eos>", *words, *letters], ["a b", "▁ a", "h e", "l l", "he ll", "hell o"])
    merges = ["a b", "ab ab", "h e", "l l", "he ll", "hell o", "Ġ w", "w o"]
    tokens = [*LETTERS, *(merge.replace(" ", "") for merge in merges)]
    return bpe(tokens, merges, special=[("<|im_end|>", CONTROL), ("<think>", USER_DEFINED)],
               **({"eos_token_id": len(tokens)} if model == "gpt2" else {"pre": "default"}))


TOKENIZERS = {model: byte_tokens(model) for model in ("gpt2", "gemma4", "spm")}


@pytest.mark.parametrize("model", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(GRAMMARS), st.data())
def test_every_way_through_a_grammar(model, case, data):
    (grammar, fits), tokenizer = case, TOKENIZERS[model]
    matcher, ids = grammar.matcher(tokenizer), []
    while not matcher.is_complete and len(ids) < 30:
        id = int(data.draw(st.sampled_from([*matcher.allowed])))
        assert matcher.n_allowed([id]) == 1
        if tokenizer.is_end_of_generation(id):
            break
        matcher.accept(id)
        ids.append(id)
    else:
        if not matcher.is_complete:
            return
    assert fits(b"".join(map(tokenizer.token_bytes, ids)).decode())


@pytest.mark.parametrize("model", TOKENIZERS)
def test_a_text_without_a_choice_has_the_tokens_of_the_tokenizer(model):
    tokenizer, matcher, ids = TOKENIZERS[model], Grammar.regex("hello world").matcher(TOKENIZERS[model]), []
    while not matcher.is_complete:
        id, = matcher.allowed.tolist()
        matcher.accept(id)
        ids.append(id)
    whole = tokenizer.encode("\x02hello world", add_special=False)
    assert ids == whole[-len(ids):] and len(ids) < len("hello world")


def test_special_tokens_have_names():
    tokenizer = TOKENIZERS["gpt2"]
    end = tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
    assert Grammar.lark('start: <|im_end|> "a"').matcher(tokenizer).allowed.tolist() == end
    assert not {*end} & {*Grammar.regex(r"(.|\n)+").matcher(tokenizer).allowed.tolist()}


def test_a_grammar_ends_a_text_without_a_token_for_it():
    """So does that of a model without one; and a text that is whole ends where max_tokens does."""
    for n in 3, 9:
        found = joined([], stream(FakeModel(), "x", grammar=Grammar.regex("abc"), max_tokens=n, digest=True))
        assert (found.text, found.finish_reason) == ("abc", "end")
    assert joined([], stream(FakeModel(), "x", grammar=Grammar.regex("abc"), max_tokens=2)).finish_reason == "length"
    model = FakeModel()
    assert joined([], stream(model, "x", grammar=Grammar.regex(""))).ids == () and not model.calls
    model.tokenizer.is_end_of_generation = lambda id: False
    assert joined([], stream(model, "x", grammar=Grammar.regex("ab*"), max_tokens=5)).text.startswith("ab")


def test_the_mask_comes_first():
    """Choices are those from logits that are -infinity elsewhere, but for a bias that raises one of them."""
    rng = np.random.default_rng(0)
    for position in range(50):
        logits, allowed = rng.standard_normal(40).astype(np.float32), np.flatnonzero(rng.random(40) < 0.3)
        masked = np.full_like(logits, -np.inf)
        masked[allowed] = logits[allowed]
        for sampling in Sampling(), Sampling(1.0, top_k=3), Sampling(0.8, top_k=0, presence_penalty=1.0):
            assert choose(logits, position, sampling, [3, 4], allowed) == choose(masked, position, sampling, [3, 4])
    logits[:] = -np.inf
    with pytest.raises(UserError, match="^all that the grammar allows as token 7 has a logit of minus infinity$"):
        choose(logits, 7, Sampling(), (), allowed)


@pytest.mark.parametrize("grammar, message", [
    (Grammar.json_schema("{"), "is no usable JSON schema: EOF while parsing"),
    (Grammar.json_schema({"type": "obj"}), "is no usable JSON schema: Invalid type: obj"),
    (Grammar.regex("a("), r"is no usable regular expression: .*error: unclosed group"),
    (Grammar.lark("start: foo"), 'is no usable Lark grammar: .*unknown name: "foo"'),
    (Grammar.gbnf("root ::= foo"), "is no usable GBNF grammar: Rule 'foo' not found"),
    (Grammar.gbnf('root = "a"'), "is no usable GBNF grammar: Expected ::= at line 1"),
    ("root ::= [a]", r"must be None or a Grammar, such as Grammar.regex\(...\), got "),
], ids=lambda each: each.kind + each.source if isinstance(each, Grammar) else None)
def test_errors_are_one_line(grammar, message):
    with pytest.raises(ParameterError, match=f"^grammar: {message}") as error:
        stream(FakeModel(), "x", grammar=grammar)
    assert "\n" not in str(error.value)


def test_without_llguidance(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ParameterError, match=r"^grammar: needs llguidance, .* pip install ggml-bitwise\[grammar\]$"):
        stream(FakeModel(), "x", grammar=Grammar.regex("a"))
    assert joined([], stream(FakeModel(), "x", max_tokens=1)).ids


def test_a_token_that_is_not_allowed():
    matcher = Grammar.regex("abc").matcher(FakeModel().tokenizer)
    assert matcher.n_allowed([*b"abx"]) == 2 and matcher.allowed.tolist() == [97] and EOS not in matcher.allowed
    with pytest.raises(UserError, match="^grammar: it cannot be followed further: ") as error:
        matcher.accept(98)
    assert "\n" not in str(error.value)


def test_texts_that_say_what_they_are():
    assert Grammar.of('root ::= "a"').kind == "gbnf" and Grammar.of(' %llguidance {}\nstart: "a"').kind == "lark"
