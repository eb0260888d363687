"""Conversations: each answer is that of a fresh start with the same messages, and what the context has is not decoded again."""
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
from fake_model import N_VOCAB, FakeModel, FakeTokenizer, prefix_logits
from hypothesis import given, settings, strategies as st
from tiny_delta_net_models import write_delta_net_model
from tiny_layer_models import write_layer_model
from tiny_models import write_model

from ggml_py import Model, Sampling, UserError
from ggml_py.engine.completion import drafting
from ggml_py.engine.conversation import Conversation

WRITERS = {"llama": lambda path: write_model(path, "llama", n_vocab=70),
           "gated delta nets": lambda path: write_delta_net_model(path, "qwen35", nextn=1),
           "windows": lambda path: write_layer_model(path, "gemma3")}
GREEDY, DRAWN = Sampling(), Sampling(temperature=1.2, seed=4)


def encode(messages) -> list[int]:
    """An id for each role, then the text's bytes; the answer's own ids again, where it is ASCII."""
    ids = []
    for message in messages:
        ids += [{"system": 0, "user": 1, "assistant": 2}[message["role"]], *(byte % 70 for byte in message["content"].encode())]
    return [*ids, 2]


@pytest.fixture(scope="module", params=WRITERS)
def model(request, tmp_path_factory):
    path = WRITERS[request.param](tmp_path_factory.mktemp("models") / "m.gguf")
    with Model.load(path, device="cpu", nextn=request.param == "gated delta nets") as model:
        model._tokenizer = FakeTokenizer(False)
        model.tokenizer.is_end_of_generation = lambda id: id == 3
        yield model


def whole(conversation: Conversation, sampling: Sampling, n: int | None = None) -> str:
    with closing(conversation.answer(sampling)) as answer:
        return "".join(piece.text for piece in islice(answer, n))


STEPS = st.one_of(st.tuples(st.just("say"), st.sampled_from(["one", "two words", "x" * 30]), st.sampled_from([GREEDY, DRAWN])),
                  st.tuples(st.just("again"), st.none(), st.sampled_from([GREEDY, DRAWN])),
                  st.tuples(st.just("stop"), st.sampled_from(["three", "y"]), st.sampled_from([GREEDY, DRAWN])),
                  st.tuples(st.just("clear"), st.none(), st.none()))


@settings(max_examples=6, deadline=None)
@given(st.lists(STEPS, min_size=3, max_size=7), st.sampled_from([None, "ngram", "mtp"]))
def test_an_answer_is_that_of_a_fresh_start(model, steps, draft):
    def new():
        return model.new_context(n_ctx=256, n_rollback=9)
    if draft == "mtp" and not model.has_nextn:
        draft = None
    with new() as context, drafting(model, draft, 256, 4) as speculation:
        conversation = Conversation(context, model.tokenizer, encode, 8, speculation)
        conversation.add("system", "S")
        for kind, text, sampling in steps:
            if kind == "clear":
                conversation.clear()
                assert [message["role"] for message in conversation.messages] == ["system"] and not context.memory.length(0)
                continue
            if kind == "again":
                if len(conversation.messages) < 2:
                    continue
                conversation.take_back()
            else:
                conversation.add("user", text)
            before = list(conversation.messages)
            found = whole(conversation, sampling, 3 if kind == "stop" else None)
            assert conversation.messages == [*before, {"role": "assistant", "content": found}]
            with new() as other:
                fresh = Conversation(other, model.tokenizer, encode, 8)
                fresh.messages = before
                assert whole(fresh, sampling).startswith(found)
                assert kind == "stop" or fresh.messages == conversation.messages


def letters(tokens):
    """Logits that let letters through."""
    return np.where(np.isin(np.arange(N_VOCAB), range(97, 123)), prefix_logits(tokens), -np.inf).astype(np.float32)


def test_nothing_is_decoded_twice():
    model = FakeModel(logits=letters)
    with model.new_context(n_ctx=400) as context:
        conversation = Conversation(context, model.tokenizer, encode_bytes, 6)
        conversation.add("user", "hello")
        first = whole(conversation, GREEDY)
        n_first = conversation.n_prompt
        assert (n_first, conversation.n_held) == (len("<u>hello<a>"), 0)
        conversation.take_back()
        assert whole(conversation, GREEDY) == first and conversation.n_held == n_first - 1
        model.calls.clear()
        conversation.add("user", "more")
        whole(conversation, GREEDY)
        assert conversation.n_held == n_first + 5  # the last token of an answer has not been decoded
        assert sum(sum(each.values()) for _, each in model.calls) == conversation.n_prompt - conversation.n_held + 5


def encode_bytes(messages) -> list[int]:
    return list("".join(f"<{message['role'][0]}>{message['content']}" for message in messages).encode()) + list(b"<a>")


def test_what_has_no_room():
    model = FakeModel()
    with model.new_context(n_ctx=16) as context:
        conversation = Conversation(context, model.tokenizer, encode_bytes)
        conversation.add("user", "1234567890")
        with pytest.raises(UserError, match="the conversation has 16 tokens, and the context holds 16"):
            next(conversation.answer(GREEDY))
        assert not model.calls and len(conversation.messages) == 1
        conversation.messages[-1]["content"] = "1234567"
        assert len(list(conversation.answer(GREEDY))) <= 4 and conversation.messages[-1]["role"] == "assistant"
