"""llama-cpp-python's shape: its dictionaries, whole and streamed; texts and likelihoods of `Model`; what is refused is named."""
import math
from inspect import signature

import pytest
from tiny_text_models import TOKENS

from ggml_py import ParameterError, UserError
from ggml_py.adapters.llama_cpp import ABSENT, ARGUMENTS, COMPLETION, COMPLETION_IGNORED, SPEED_ALONE, Llama, LlamaGrammar

BOS = TOKENS.index("<s>")
SETTINGS = [{"temperature": 0.0}, {}, {"seed": 5, "temperature": 1.5, "top_k": 0, "repeat_penalty": 1.2, "stop": ["\n", "a", ""]},
            {"temperature": 0.0, "logit_bias": {str(TOKENS.index("the")): 4.0}, "max_tokens": None}]
MESSAGES = [{"role": "user", "content": "the thing"}]


def joined(chunks: list[dict]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.fixture(scope="module")
def llama(tiny):
    with Llama(str(tiny[True]), n_ctx=64, verbose=False, n_batch=16) as llama:
        yield llama


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_completions_are_those_of_the_model(llama, tiny, settings):
    """Whole, streamed, with drafts, called: one text. By the defaults of llama-cpp-python."""
    found = llama("the thin", **settings)
    own = {"max_tokens": 16, "temperature": 0.8, "seed": 0xFFFFFFFF, **settings}
    own |= {"stop": [text for text in own.get("stop", ()) if text],
            "logit_bias": {int(id): bias for id, bias in own.get("logit_bias", {}).items()}}
    expected = llama.model.generate("the thin", n_ctx=64, **own)
    choice, = found["choices"]
    assert choice == {"text": expected.text, "index": 0, "logprobs": None,
                      "finish_reason": "length" if expected.finish_reason == "length" else "stop"}
    n, n_new = len(expected.prompt_ids), len(expected.ids)
    assert found["usage"] == {"prompt_tokens": n, "completion_tokens": n_new, "total_tokens": n + n_new}
    assert (found["object"], found["model"]) == ("text_completion", llama.model_path) and found["id"].startswith("cmpl-")
    chunks = [*llama.create_completion([*expected.prompt_ids], stream=True, model="mine", **settings)]
    assert joined(chunks) == expected.text and {chunk["model"] for chunk in chunks} == {"mine"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [choice["finish_reason"]]
    for draft in "ngram", llama, type("Lookup", (), {"num_pred_tokens": 3})():
        with Llama(str(tiny[True]), n_ctx=64, draft_model=draft) as drafting:
            assert drafting("the thin", **settings)["choices"] == found["choices"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_likelihoods(llama, stream, echo):
    """Those of `score`; offsets are of characters, BOS has no text."""
    arguments = dict(max_tokens=6, temperature=0.0, logprobs=2, echo=echo)
    found = llama("the in", **arguments)
    choices = [chunk["choices"][0] for chunk in llama("the in", stream=True, **arguments)] if stream else found["choices"]
    known = {name: [each for choice in choices if choice["logprobs"] for each in choice["logprobs"][name]]
             for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert known == found["choices"][0]["logprobs"]
    ids = llama.tokenize(b"the in")
    new = llama.model.generate(ids, max_tokens=6).ids
    shown = (*ids[1:], *new) if echo else new
    assert ids[0] == BOS and known["tokens"] == [llama.detokenize([id]).decode("utf-8", "ignore") for id in shown]
    assert tuple(known["token_logprobs"]) == llama.model.score([BOS] if echo else ids, shown).logprobs
    for text, logprob, top in zip(known["tokens"], known["token_logprobs"], known["top_logprobs"]):
        assert top[text] == logprob and len(top) <= 3 and max(top.values()) == next(iter(top.values()))
    start = 0 if echo else len("the in")
    assert known["text_offset"][0] == start and known["text_offset"] == sorted(known["text_offset"])
    assert "".join(choice["text"] for choice in choices) == "the in" * echo + llama.model.generate(ids, max_tokens=6).text
    assert found["usage"]["completion_tokens"] == len(new)
    assert llama("x", max_tokens=1, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"][0].keys() == {
        *llama("x", max_tokens=1, logprobs=0)["choices"][0]["logprobs"]["tokens"]}


def test_answers(llama):
    found = llama.create_chat_completion(MESSAGES, max_tokens=8, seed=2, logprobs=True, top_logprobs=1)
    expected = llama.model.chat(MESSAGES, max_tokens=8, temperature=0.2, seed=2, n_ctx=64, logprobs=1)
    choice, = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text} and found["object"] == "chat.completion"
    content = choice["logprobs"]["content"]
    assert [each["logprob"] for each in content] == [each.logprob for each in expected.logprobs]
    assert content[0]["top_logprobs"][0]["logprob"] == expected.logprobs[0].top[0][1]
    assert found["usage"]["prompt_tokens"] == len(expected.prompt_ids)
    first, *rest, last = llama.create_chat_completion(MESSAGES, max_tokens=8, seed=2, stream=True)
    assert first["choices"] == [{"index": 0, "delta": {"role": "assistant"}, "logprobs": None, "finish_reason": None}]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in rest) == expected.text
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert {chunk["object"] for chunk in (first, *rest, last)} == {"chat.completion.chunk"}


def test_grammars(llama):
    pytest.importorskip("llguidance", reason="needs llguidance, the extra grammar")
    assert llama("the", grammar=LlamaGrammar.from_string('root ::= "in" | "then"'))["choices"][0]["text"] in ("in", "then")
    schema = {"const": {"a": 1}}
    for form in {"type": "json_object", "schema": schema}, {"type": "json_schema", "json_schema": {"schema": schema}}:
        answer = llama.create_chat_completion(MESSAGES, response_format=form, max_tokens=20)
        assert answer["choices"][0]["message"]["content"].replace(" ", "").replace("\n", "") == '{"a":1}'
    with pytest.raises(ParameterError, match="^response_format: got {'type': 'yaml'}, allowed: types text, json_object and "):
        llama.create_chat_completion(MESSAGES, response_format={"type": "yaml"})


def test_tokens(llama, tiny):
    assert llama.tokenize(b"the<s>") == [BOS, TOKENS.index("the"), *map(TOKENS.index, "<s>")]
    assert llama.tokenize(b"<s>the", add_bos=False, special=True) == [BOS, TOKENS.index("the")]
    for text in "Äpfel, 日本 \n".encode(), b"\xff\xc3(", b"":
        assert llama.detokenize(llama.tokenize(text, add_bos=False)) == text.decode("utf-8", "replace").encode()
    assert llama.detokenize([BOS], special=True) == b"<s>" and llama.detokenize([BOS, *llama.tokenize(b" a", False)]) == b"a"
    assert (llama.token_bos(), llama.token_eos()) == (BOS, BOS + 1) and llama.detokenize([llama.token_nl()]) == b"\n"
    assert (llama.n_ctx(), llama.n_vocab(), llama.n_embd()) == (64, len(TOKENS), 64)
    assert llama.metadata["general.architecture"] == "llama" and llama.metadata["tokenizer.ggml.add_bos_token"] == "true"
    assert Llama(str(tiny[False]), n_ctx=0).n_ctx() == 256
    empty = llama("", max_tokens=4, temperature=0.0)
    assert empty["choices"][0]["text"] == llama.model.generate([BOS], max_tokens=4).text and empty["usage"]["prompt_tokens"] == 1


def test_state(llama):
    before = llama("the", seed=9)["choices"]
    llama.set_seed(9); llama.reset(); llama.set_cache(None)
    assert llama("the")["choices"] == before
    llama.set_seed(0xFFFFFFFF)


@pytest.mark.parametrize("arguments, message", [
    ({"lora_path": "x"}, "lora_path: is not supported, got 'x': there are no LoRA adapters; allowed: None"),
    ({"embedding": True}, "embedding: is not supported, got True: there are no embeddings of texts; allowed: False"),
    ({"rope_freq_scale": 0.5}, "rope_freq_scale: is not supported, got 0.5: the file says it; allowed: 0"),
    ({"chat_format": "llama-2"}, "chat_format: is not supported, got 'llama-2': the file's own template is taken; allowed: None"),
    ({"type_k": 999}, "type_k: must be a number of ggml's types, got 999"), ({"split_mode": 2}, "split_mode: 'row' is not"),
    ({"split_mode": 7}, "split_mode: must be 0 to 3, got 7"), ({"seed": -1}, "seed: must be an integer, 0 to "),
    ({"n_ctx": 512}, "n_ctx: a context of 512 tokens is too long"), ({"flavour": 1}, "flavour: is no argument of Llama")])
def test_arguments_that_are_refused(tiny, arguments, message):
    with pytest.raises(ParameterError) as error:
        Llama(str(tiny[False]), **{"n_ctx": 64, "n_gpu_layers": -1 if "split_mode" in arguments else 0, **arguments})
    assert str(error.value).startswith(message) and error.value.parameter == message.split(":")[0]


@pytest.mark.parametrize("arguments, message", [
    ({"suffix": "x"}, "suffix: is not supported, got 'x': there is no infill; allowed: None"),
    ({"mirostat_mode": 2}, "mirostat_mode: is not supported, got 2: it is no step of sampling here; allowed: 0"),
    ({"logits_processor": []}, "logits_processor: is not supported, got []: logits stay on the device; "),
    ({"prompt": "x" * 64}, "prompt: has 65 tokens, allowed: up to 63 in a context of 64"),
    ({"wrong": 1}, "wrong: is no argument of a completion")], ids=str)
def test_completions_that_are_refused(llama, arguments, message):
    with pytest.raises(ParameterError) as error:
        llama(**{"prompt": "a", **arguments})
    assert str(error.value).startswith(message)


def test_what_else_is_refused(llama, tiny):
    with pytest.raises(ParameterError, match=r"^tool_choice: is not supported, got \{'type'"):
        llama.create_chat_completion(MESSAGES, tool_choice={"type": "function", "function": {"name": "f"}})
    with pytest.raises(ParameterError, match="^echo: is no argument of an answer$"):
        llama.create_chat_completion(MESSAGES, echo=True)
    for name, reason in ABSENT.items():
        with pytest.raises(AttributeError, match=f"^Llama.{name}: is not here: {reason}$"):
            getattr(llama, name)
    with pytest.raises(AttributeError, match="^Llama.nothing: there is no such name$"):
        llama.nothing
    with pytest.raises(ParameterError, match="^filename: got 'a\\*b\\*', allowed: a name, or "):
        Llama.from_pretrained("OWNER/NAME", "a*b*")
    with pytest.raises(UserError, match=r"^/nowhere\.gguf"):
        Llama("/nowhere.gguf")


def test_defaults_are_taken(tiny, monkeypatch):
    """Every argument of llama-cpp-python 0.3.36, by its default, is taken."""
    threads: list[int] = []
    defaults = {
        "rope_scaling_type": -1, "pooling_type": -1, "attention_type": -1, "rope_freq_base": 0.0, "rope_freq_scale": 0.0,
        "yarn_ext_factor": -1.0, "yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_orig_ctx": 0,
        "logits_all": False, "embedding": False, "offload_kqv": True, "flash_attn": False, "op_offload": None, "swa_full": None,
        "no_perf": False, "last_n_tokens_size": 64, "lora_base": None, "lora_scale": 1.0, "lora_path": None, "numa": False,
        "chat_format": None, "chat_handler": None, "draft_model": None, "tokenizer": None, "type_k": None, "type_v": None,
        "spm_infill": False, "verbose": True, "n_gpu_layers": 0, "split_mode": 1, "main_gpu": 0, "tensor_split": None,
        "vocab_only": False, "use_mmap": True, "use_mlock": False, "kv_overrides": None, "seed": 0xFFFFFFFF, "n_ctx": 64,
        "n_batch": 512, "n_ubatch": 512, "n_threads": None, "n_threads_batch": None}
    assert {*defaults} == {*list(signature(Llama).parameters)[1:-1], *ARGUMENTS, *SPEED_ALONE}
    further = {"suffix": None, "typical_p": 1.0, "tfs_z": 1.0, "mirostat_mode": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
               "stopping_criteria": None, "logits_processor": None}
    assert {*further} == {*COMPLETION, *COMPLETION_IGNORED}
    with Llama(str(tiny[False]), **defaults) as llama:
        text = llama("the", **further)["choices"][0]["text"]
    monkeypatch.setattr("ggml_py.adapters.llama_cpp.set_num_threads", threads.append)
    with Llama(str(tiny[False]), n_ctx=64, type_k=8, type_v="q8_0", n_gpu_layers=-1, n_threads=1) as llama:
        assert llama.types == {"type_k": "q8_0", "type_v": "q8_0"} and threads == [1]
        assert math.isfinite(llama("the", max_tokens=1, logprobs=1)["choices"][0]["logprobs"]["token_logprobs"][0])
    with Llama(str(tiny[False]), n_ctx=64, n_gpu_layers=1) as llama:
        assert llama("the")["choices"][0]["text"] == text
