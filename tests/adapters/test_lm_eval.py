"""The harness's model: the same bits for every batch size; what is scored is what the harness, transformers and `Model` say;
drafts, stops, samples, chat templates; its command line."""
import json
import sys
from functools import partial
from itertools import takewhile
from math import fsum

import pytest
import smollm2
from harness_tasks import evaluated, float32_likelihoods, task, tasks
from tiny_text_models import TOKENS

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness, the extra lm-eval")
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ggml_py import ParameterError, UserError
from ggml_py.adapters import lm_eval as adapter
from ggml_py.adapters.lm_eval import GGMLPy
from ggml_py.engine.likelihood import Likelihood, encode_pair

BOS, EOS, USER = (TOKENS.index(text) for text in ("<s>", "</s>", "<|user|>"))
PAIRS = [("the thin thing", " in the"), ("the thin thing ", "then"), ("", "abc"), ("", "<s>abc"), ("<s>a", "b"), (" ", "in"),
         ("a</s>", "<|user|>b"), ("Äpfel\n", "日本")]


def opened(path, **arguments) -> GGMLPy:
    return GGMLPy(str(path), **{"device": "cpu", **arguments})


def requests(kind: str, *arguments) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def split(lm, pairs) -> list[tuple[list[int], list[int]]]:
    """The ids of pairs of texts, by the harness's own functions."""
    seen: list = []
    lm._loglikelihood_tokens = lambda requests, **_: seen.extend((context, ids) for _, context, ids in requests)
    lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    return seen


@pytest.mark.parametrize("add_bos", [False, True])
def test_batch_sizes_and_drafts_change_no_bit(tiny, add_bos):
    """Windows shorter than the documents; prompts that are cut."""
    found = [(*evaluated(lm := opened(tiny[add_bos], batch_size=batch_size, n_ctx=48, draft=draft), tasks()),
              lm.get_model_info()["results_sha256"])
             for batch_size, draft in (("auto", None), (1, "ngram"), ("5", None), (32, None))]
    assert all(each == found[0] for each in found)
    scores, answers, _ = found[0]
    assert {*scores} == {*answers} == {"choices", "documents", "questions"} and scores["choices"]["sample_len"] == 12


@pytest.mark.parametrize("add_bos", [False, True])
def test_likelihoods_are_those_of_score(tiny, add_bos):
    lm = opened(tiny[add_bos])
    found = lm.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True)
    assert found == [(each.logprob, each.is_greedy) for each in lm.model.score_many(PAIRS)]
    assert [[*map(list, encode_pair(lm.model.tokenizer, *pair))] for pair in PAIRS] == [
        [context or [BOS], ids] for context, ids in split(lm, PAIRS)]
    with pytest.raises(UserError, match=r"^loglikelihood: 'h' has no tokens of its own behind 't'$"):
        opened(tiny[False]).loglikelihood(requests("loglikelihood", ("t", "h")), disable_tqdm=True)


def test_bos_comes_once(tiny):
    for add_bos in False, True:
        lm = opened(tiny[add_bos])
        first = [BOS] * add_bos
        assert lm.tok_encode("in") == [*first, TOKENS.index("in")] and lm.tok_encode("<s>in") == [BOS, TOKENS.index("in")]
        assert lm.tok_encode("<s>in", add_special_tokens=False)[0] == BOS and lm.tok_encode("", add_special_tokens=False) == []
        assert lm.prefix_token_id == BOS and lm.eot_token_id == EOS
        plain, begun = lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("then",), ("<s>then",)), disable_tqdm=True)
        assert plain == begun == lm.model.score([BOS], "then").logprob


def test_documents_in_windows(tiny):
    lm = opened(tiny[True], n_ctx=16)
    texts = ["the thin thing is in the inn, and then it thins", "a", ""]
    found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", *((text,) for text in texts)), disable_tqdm=True)
    for text, logprob in zip(texts, found):
        ids = lm.model.tokenizer.encode(text, add_special=False)
        windows = [make_disjoint_window(each) for each in get_rolling_token_windows(ids, BOS, 16, 1)]
        assert sum(len(targets) for _, targets in windows) == len(ids)
        assert logprob == fsum(each for pair in windows for each in lm.model.score(*pair).logprobs)
    assert found[2] == 0


def test_many_requests(tiny, monkeypatch):
    """They are scored in parts, each of which the harness can keep."""
    lm, kept = opened(tiny[True], n_ctx=8), []
    lm.cache_hook.add_partial = lambda *answer: kept.append(answer)
    texts = [("the thin thing is in the inn",), ("a",), ("",), ("then and there",)]
    whole = lm.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True)
    scored = lm.loglikelihood(requests("loglikelihood", *PAIRS[:4]), disable_tqdm=True)
    monkeypatch.setattr(adapter, "KEPT", 3)
    assert lm.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True) == whole
    assert lm.loglikelihood(requests("loglikelihood", *PAIRS[:4]), disable_tqdm=True) == scored
    assert kept == 2 * [*(("loglikelihood_rolling", *each) for each in zip(texts, whole)),
                        *(("loglikelihood", *each) for each in zip(PAIRS, scored))]


def test_too_long_inputs_keep_their_end(tiny, caplog):
    lm = opened(tiny[False], n_ctx=8)
    cut, whole = lm.loglikelihood(requests("loglikelihood", ("xyzabcdefg", "hi"), ("cdefg", "hijk")), disable_tqdm=True)
    assert cut[0] == lm.model.score("abcdefg", "hi").logprob and whole[0] == lm.model.score("cdefg", "hijk").logprob
    assert [record.getMessage() for record in caplog.records if "cut" in record.getMessage()] == [
        "loglikelihood: 10 tokens of context and 2 of continuation, allowed are 9; the first 3 are cut"]
    with pytest.raises(UserError, match="^loglikelihood: a continuation has 9 tokens, allowed: up to 8$"):
        lm.loglikelihood(requests("loglikelihood", ("a", "bcdefgijk")), disable_tqdm=True)


def test_generation_is_that_of_the_model(tiny):
    lm = opened(tiny[True])
    settings = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    prompts = ["the thin thing is", "the thin thing was", "", "the thin thing is"]
    found = lm.generate_until(requests("generate_until", *((prompt, settings) for prompt in prompts)), disable_tqdm=True)
    assert found == [lm.model.generate(prompt, max_tokens=12, stop=["\n", "</s>"]).text for prompt in prompts]
    assert opened(tiny[True], draft="ngram", draft_max=3).generate_until(
        requests("generate_until", *((prompt, settings) for prompt in prompts)), disable_tqdm=True) == found
    cut = lm.generate_until(requests("generate_until", ("x" * 300, settings)), disable_tqdm=True)
    assert cut == [lm.model.generate([TOKENS.index("x")] * 244, max_tokens=12, stop="\n").text]


def test_samples(tiny):
    """Equal requests ask for several; the seed is the model's."""
    drawing = ("the", {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.5, "repetition_penalty": 1.2})
    asked = requests("generate_until", drawing, ("x", {"max_gen_toks": 3}), drawing, drawing)
    first, other, *more = opened(tiny[False], seed=3).generate_until(asked, disable_tqdm=True)
    assert len({first, *more}) == 3
    assert [first, other, *more] == opened(tiny[False], seed=3).generate_until(asked, disable_tqdm=True)
    lm = opened(tiny[False], seed=4)
    assert lm.generate_until(asked, disable_tqdm=True)[0] != first
    drawn = lm.model.generate("the", max_tokens=8, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=4, n=3,
                              repeat_penalty=1.2, repeat_last_n=-1)
    first, other, *more = lm.generate_until(asked, disable_tqdm=True)
    assert [each.text for each in drawn.completions] == [first, *more]


def test_a_stop_may_be_a_control_token(tiny):
    """Its text is not seen, and what was held back before it is."""
    lm = opened(tiny[False])
    said = [TOKENS.index("a"), TOKENS.index("b"), USER, TOKENS.index("c")]

    def generate(context, prompt, n, sampling, is_end, *rest):
        yield from takewhile(lambda token: not is_end(token), said)

    def greedy_batch(context, batch, n, more, draws):
        yield from ([id] * len(batch) for id in [*said, EOS])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ggml_py.engine.completion.generate", generate)
        patch.setattr("ggml_py.engine.context.Context.greedy_batch", greedy_batch)
        one = lambda until: lm.generate_until(requests("generate_until", ("then", {"until": until, "max_gen_toks": 9})),
                                              disable_tqdm=True)
        assert one([]) == ["abc"] and one(["<|user|>"]) == ["ab"] and one(["bx", "<|user|>"]) == ["ab"]
        assert one(["b"]) == ["a"]
        found = lm.model.generate("then", stop=["<|user|>"], max_tokens=9)
        assert (found.text, found.finish_reason) == ("ab", "stop")


@pytest.mark.parametrize("settings, message", [
    ({"max_gen_toks": 256}, "max_gen_toks: must be 0 to 255, which leaves room for a prompt in 256 positions, got 256"),
    ({"num_beams": 4}, "num_beams: tokens are chosen one by one; allowed: 1"),
    ({"typical_p": 0.5}, "typical_p: is no setting of generation here; allowed: until, max_gen_toks, do_sample, temperature, "),
    ({"do_sample": True, "temperature": -1.0}, "temperature: must be a number, 0 to ")], ids=str)
def test_settings_of_generation_that_are_refused(tiny, settings, message):
    with pytest.raises(ParameterError) as error:
        opened(tiny[False], max_gen_toks=8).generate_until(requests("generate_until", ("a", settings)), disable_tqdm=True)
    assert str(error.value).startswith(message)


def test_chat_templates(tiny):
    lm = opened(tiny[True])
    user, begun = {"role": "user", "content": "the?"}, {"role": "assistant", "content": " in "}
    assert lm.apply_chat_template([user]) == "<s><|user|>the?</s><|assistant|>"
    assert lm.apply_chat_template([user, begun], add_generation_prompt=False) == "<s><|user|>the?</s><|assistant|> in "
    assert lm.tok_encode(lm.apply_chat_template([user]))[:2] == [BOS, USER]
    assert lm.chat_template(True) == lm.tokenizer.chat_template == lm.model.tokenizer.chat_template
    with pytest.raises(UserError, match=r"refuses the messages: no tools$"):
        lm.apply_chat_template([{"role": "tool", "content": "x"}])
    assert lm.tokenizer_name == opened(tiny[True]).tokenizer_name != opened(tiny[True], date="2026-02-01").tokenizer_name
    own = lm.model.tokenizer
    own.chat_templates = {"short": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
                                   "{% endif %}{{ m.content | trim }}{{ mode }}{% endfor %}"}
    lm = opened(tiny[True], chat_template_args={"mode": "!"})
    lm.model._tokenizer = own
    lm.tokenizer = adapter.HarnessTokenizer({"default": own.chat_template, **own.chat_templates}, 0, "", 0, "")
    assert lm.chat_template("short") == own.chat_templates["short"]
    assert lm.apply_chat_template([{"role": "system", "content": "s"}, begun], add_generation_prompt=False) == "in"
    assert lm.apply_chat_template([user]) == "the?!"


def test_arguments(tiny):
    made = GGMLPy.create_from_arg_string(f"pretrained={tiny[False]},device=cpu,n_ctx=32,n_gpu_layers=1,batch_size=auto:4",
                                         {"device": "cuda:0", "batch_size": 1, "max_batch_size": None})
    assert (made.batch_size, made.max_length, made.device) == ("auto", 32, "cpu")
    info = made.get_model_info()
    assert info["numerics"] == 1 and info["model_dtype"] == "F32, Q4_0, Q8_0" and json.loads(json.dumps(info)) == info
    assert opened(tiny[False], device="cuda:0").device in ("cpu", "cuda:0")  # what the harness passes where nobody asks
    for arguments, message in ((dict(batch_size=0), "batch_size: must be at least 1, or auto, got 0"),
                               (dict(dtype="float16"), "dtype: is no argument of ggml-py; allowed: pretrained, hf, device, "),
                               (dict(n_ctx=512), "n_ctx: a context of 512 tokens is too long, this model was trained on at most"),
                               (dict(overrides="exps"), "overrides: must be REGEX=DEVICE, got 'exps'"),
                               (dict(tensor_split="a/b"), "tensor_split: must be numbers with / between, got 'a/b'"),
                               (dict(draft="me"), "draft: must be None, 'ngram', 'mtp' or a model, got 'me'")):
        with pytest.raises(ParameterError) as error:
            lm = opened(tiny[False], **arguments)
            lm.generate_until(requests("generate_until", ("a", {"max_gen_toks": 1})), disable_tqdm=True)
        assert str(error.value).startswith(message)


def test_command_line(tiny, tmp_path, monkeypatch, capsys):
    """Registered, run, results on disk; what cannot be is one line. The harness's own tasks take long to list."""
    import yaml
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    (tmp_path / "choices.yaml").write_text(yaml.safe_dump(task("choices", **{
        name: value for name, value in tasks()[0].items() if name not in task("choices")})))
    line = ["lm-eval", "run", "--model", "ggml-py", "--include_path", str(tmp_path), "--tasks", "choices", "--batch_size", "4",
            "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*line, "--model_args", f"pretrained={tiny[True]}", "device=cpu"])
    assert adapter.main() == 0 and "|choices|" in capsys.readouterr().out.replace(" ", "")
    found = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    assert found["config"]["model_sha"] == opened(tiny[True]).get_model_info()["model_sha"]
    scores, _ = evaluated(opened(tiny[True]), tasks()[:1])
    assert found["results"]["choices"]["acc,none"] == scores["choices"]["acc,none"]
    monkeypatch.setattr(sys, "argv", [*line, "--model_args", "pretrained=/nowhere.gguf"])
    assert adapter.main() == 2 and capsys.readouterr().err.splitlines()[-1].startswith("ggml-py: error: /nowhere.gguf")


RESULTS = "0c4c60095c7051ddc13a2a2712f06ad3e6f356ee9c58f527fa6e7a50cde3725b"  # of SmolLM2: ids, likelihoods, texts of all tasks


@pytest.mark.slow
def test_scores_of_smollm2():
    """Equal to the bit for every batch size; documents take several windows."""
    path = smollm2.require()
    found = []
    for batch_size in 1, 5, 32:
        lm = opened(path, batch_size=batch_size, n_ctx=128)
        found.append(evaluated(lm, tasks()))
        assert lm.get_model_info()["results_sha256"] == RESULTS
    scores, answers = found[0]
    assert found[1:] == [found[0]] * 2 and scores["choices"]["acc,none"] == 0.75
    assert answers["questions"][0] == (0, [[" The capital of France is Paris."]])


def test_ids_of_transformers():
    """The harness's `HFLM` asked for the same ids (`float32_likelihoods` of helpers/harness_tasks.py)."""
    lm, asked = opened(smollm2.require(), n_ctx=128), []
    lm._scored = lambda pairs, _: asked.extend(pairs) or [Likelihood(tuple(ids), (0.0,) * len(ids), True) for _, ids in pairs]
    evaluated(lm, tasks()[:2])
    assert sorted((list(context), list(ids)) for context, ids in asked) == sorted(float32_likelihoods()[0])
