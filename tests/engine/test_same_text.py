"""SmolLM2: a prompt's text and likelihoods are the same alone and in a batch of 32, with drafts, whole and streamed, by
`generate`, by `chat`, by `score` and by the command line."""
import pytest

import smollm2
from ggml_py import Model
from ggml_py.__main__ import main
from ggml_py.engine.completion import joined, token_logprob
from ggml_py.engine.sampling import Sampling, choose
from ggml_py.tokenizer import Detokenizer

N = 8
PROMPTS = ["One, two, three, four, one, two,", "Once upon a time", " ",
           *(f"{i} {word} and" for word in ("apples", "times", "days", "more") for i in range(7)), "naïve 😀"]


@pytest.fixture(scope="module")
def model():
    with Model.load(smollm2.require(), device="cpu") as model:
        yield model


def side_by_side(model, prompts: list[list[int]], sampling: Sampling):
    """Of each prompt N tokens and their likelihoods, all sequences in one micro-batch a step."""
    texts, known = [[*prompt] for prompt in prompts], [[] for _ in prompts]
    with model.new_context(32 * 32, n_seq_max=32) as context:
        fed = prompts
        for _ in range(N):
            rows = context.decode_batch([*enumerate(fed)], "last")
            for text, found, row in zip(texts, known, rows):
                text.append(choose(row[-1], len(text), sampling, text))
                found.append(token_logprob(row[-1], text[-1], 2))
            fed = [text[-1:] for text in texts]
    return [tuple(text[len(prompt):]) for text, prompt in zip(texts, prompts)], known


@pytest.mark.parametrize("options, arguments", [((), {}), (("--temp", 0.9, "--seed", 7), dict(temperature=0.9, seed=7))],
                         ids=["greedy", "drawn"])
def test_alone_and_in_a_batch(model, capsys, options, arguments):
    prompts = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert len(prompts) == 32
    ids, known = side_by_side(model, prompts, Sampling(**arguments))
    arguments = dict(max_tokens=N, **arguments)
    for i in 0, 31:
        alone = model.generate(PROMPTS[i], logprobs=2, **arguments)
        assert alone.ids == ids[i] and [*alone.logprobs] == known[i], PROMPTS[i]
        text = Detokenizer(model.tokenizer)
        assert alone.text == "".join(map(text.feed, ids[i])) + text.finish()
        for draft in None, "ngram":
            streamed = joined(alone.prompt_ids, model.generate(prompts[i], stream=True, logprobs=2, draft=draft, **arguments))
            assert streamed == alone
            assert model.generate(prompts[i], draft=draft, **arguments).ids == alone.ids
            capsys.readouterr()
            assert main([*map(str, ("run", "-m", model.file.path, "-p", PROMPTS[i], "-n", N, "--device", "cpu", *options,
                                    *(("--draft-source", draft) if draft else ())))],
                        lambda path, device: Borrowed(model)) == 0
            assert capsys.readouterr().out == alone.text + "\n"
        assert model.score(prompts[i], ids[i]).logprobs == tuple(each.logprob for each in alone.logprobs)
    scored = model.score_many([*zip(prompts, ids)], n_seq_max=32)
    assert [each.logprobs for each in scored] == [tuple(each.logprob for each in row) for row in known]


class Borrowed:
    """A model that a command does not close."""
    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __enter__(self):
        return self.model

    def __exit__(self, *exception):
        pass
