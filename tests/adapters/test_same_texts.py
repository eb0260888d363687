"""One prompt, the same text: by `generate`, by `ggml-py run`, by the adapters; alone and among 32; drafted, streamed; and by a
batch of sequences."""
import pytest
from tiny_text_models import TOKENS

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness, the extra lm-eval")
from lm_eval.api.instance import Instance

from ggml_py import Model
from ggml_py.__main__ import main
from ggml_py.adapters.llama_cpp import Llama
from ggml_py.adapters.lm_eval import GGMLPy

PROMPT, N_NEW = "the thing in", 12
OTHERS = [f"then {i} things {'in ' * i}" for i in range(31)]


def test_texts(tiny, capsys):
    found = {}
    with Model.load(tiny[True], device="cpu") as model:
        expected = model.generate(PROMPT, max_tokens=N_NEW)
        found["drafted"] = model.generate(PROMPT, max_tokens=N_NEW, draft="ngram").text
        found["streamed"] = "".join(piece.text for piece in model.generate(PROMPT, max_tokens=N_NEW, stream=True))
        prompts = [model.tokenizer.encode(text) for text in (PROMPT, *OTHERS)]
        with model.new_context(32 * 128, n_seq_max=32) as context:
            last = [rows[-1].argmax() for rows in context.decode_batch(enumerate(prompts))]
            ids = [int(last[0])]
            for _ in range(N_NEW - 1):
                last = [rows[-1].argmax() for rows in context.decode_batch((i, [id]) for i, id in enumerate(last))]
                ids.append(int(last[0]))
        assert len(expected.ids) == N_NEW and tuple(ids) == expected.ids and TOKENS.index("</s>") not in ids
    assert main(["run", "-m", str(tiny[True]), "--device", "cpu", "-p", PROMPT, "-n", str(N_NEW)]) == 0
    found["run"] = capsys.readouterr().out.removeprefix(PROMPT).removesuffix("\n")
    for batch_size, texts in (1, [PROMPT]), (32, [*OTHERS, PROMPT]):
        lm = GGMLPy(str(tiny[True]), device="cpu", batch_size=batch_size)
        asked = [Instance("generate_until", {}, (text, {"max_gen_toks": N_NEW}), i) for i, text in enumerate(texts)]
        found[f"lm-eval, {batch_size}"] = lm.generate_until(asked, disable_tqdm=True)[-1]
    with Llama(tiny[True], n_ctx=64) as llama:
        found["llama-cpp-python"] = llama(PROMPT, max_tokens=N_NEW, temperature=0.0)["choices"][0]["text"]
    assert found == dict.fromkeys(found, expected.text)
