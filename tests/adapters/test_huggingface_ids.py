"""Pairs of texts become the ids that Hugging Face's `tokenizers` give through the harness's own functions.

The tokenizers are built of its parts, as the models' `tokenizer.json` have them, from vocabulary and merges of the GGUF file;
they know nothing of llama.cpp's regexes."""
import random

import numpy as np
import pytest
import smollm2
from made_tokenizers import CONTROL, reference

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness, the extra lm-eval")
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import _add_special_kwargs, has_bos_prefix
from tokenizers import AddedToken, Regex, Tokenizer as HFTokenizer, models, normalizers, pre_tokenizers, processors

from ggml_py import Tokenizer
from ggml_py.adapters.lm_eval import GGMLPy
from ggml_py.engine.likelihood import encode_pair
from ggml_py.files.gguf import GGUFFile

N_PAIRS = 500
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES_ALONE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
CUTS = {"gpt-2": BYTES, "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
        "starcoder": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
        "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), BYTES_ALONE])}


def byte_level(metadata) -> HFTokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    made = HFTokenizer(models.BPE({text: id for id, text in enumerate(tokens)},
                                  [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]))
    made.pre_tokenizer = CUTS[metadata["tokenizer.ggml.pre"]]
    return made


def sentencepiece(metadata) -> HFTokenizer:
    """Merges in the order of the scores of what they make."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {text: id for id, text in enumerate(tokens)}
    merges = [(left, right) for id in np.argsort(-np.asarray(scores), kind="stable").tolist() if len(tokens[id]) > 1
              for left, right in sorted(((tokens[id][:i], tokens[id][i:]) for i in range(1, len(tokens[id]))),
                                        key=lambda pair: (ids.get(pair[0], -1), ids.get(pair[1], -1)))
              if left in ids and right in ids]
    made = HFTokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


class HuggingFace(TemplateLM):
    """`tok_encode` is that of the harness's `HFLM`, which cannot be imported without torch."""
    eot_token_id = loglikelihood_rolling = generate_until = prefix_token_id = None

    def __init__(self, metadata, prefix: int):
        super().__init__()
        self.prefix_token_id = prefix
        self.tokenizer = (sentencepiece if metadata["tokenizer.ggml.model"] == "llama" else byte_level)(metadata)
        texts, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        self.tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)
                                           for text, kind in zip(texts, kinds) if kind == CONTROL])

    def tok_encode(self, string, add_special_tokens=None, **_):
        special = _add_special_kwargs(add_special_tokens, None)
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.id_to_token(self.prefix_token_id)):
            special["add_special_tokens"] = False
        return self.tokenizer.encode(string, **special).ids

    def _loglikelihood_tokens(self, requests, **_):
        return requests


class Ours(GGMLPy):
    """Without weights."""

    def __init__(self, tokenizer: Tokenizer):
        TemplateLM.__init__(self)
        self.model = type("Vocabulary", (), {"tokenizer": tokenizer})

    def _loglikelihood_tokens(self, requests, **_):
        return requests


def pairs(cases: list[str], special: list[str]) -> list[tuple[str, str]]:
    """Neighbouring pieces of a text, and any two cases."""
    text, rng = reference("text/wiki.test.raw").read_text(), random.Random(5)
    found = []
    for _ in range(N_PAIRS // 2):
        at, n, n_more = rng.randrange(len(text) - 400), rng.randrange(1, 200), rng.randrange(1, 60)
        found.append((text[at:at + n], text[at + n:at + n + n_more]))
    contexts = ["", *cases, *(f"{each}user\nhi{each}" for each in special), *special]
    continuations = [*filter(None, cases), *special, *(f"{each}x" for each in special), " \u00e9", "\u65e5\u672c"]
    return found + [(rng.choice(contexts), rng.choice(continuations)) for _ in range(N_PAIRS - len(found))]


def check(path, cases: list[str]) -> None:
    with GGUFFile.open(path) as file:
        metadata = file.metadata
        ours = Ours(Tokenizer(metadata))
        own = ours.model.tokenizer
        asked = pairs(cases, [own.token_text(id) for id in sorted({own.bos_id, own.eos_id})])
        expected = HuggingFace(metadata, ours.prefix_token_id).loglikelihood(_requests(asked), disable_tqdm=True)
    found = ours.loglikelihood(_requests(asked), disable_tqdm=True)
    different = [(pair, got[1:], wanted[1:]) for pair, got, wanted in zip(asked, found, expected) if got != wanted]
    assert not different, f"{len(different)} of {N_PAIRS}, first {different[0]}"
    for pair, (_, context, continuation) in zip(asked, found):
        assert encode_pair(own, *pair) == (tuple(context) or (ours.prefix_token_id,), tuple(continuation)), pair


def _requests(asked) -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(asked)]


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", pytest.param("qwen2", marks=pytest.mark.slow),
                                  pytest.param("starcoder", marks=pytest.mark.slow)])
def test_ids_of_pairs(name):
    path = reference(f"vocab/ggml-vocab-{name}.gguf")
    check(path, reference(f"vocab/ggml-vocab-{name}.gguf.inp").read_text().split("\n__ggml_vocab_test__\n"))


def test_ids_of_pairs_of_smollm2():
    check(smollm2.require(), reference("vocab/ggml-vocab-gpt-2.gguf.inp").read_text().split("\n__ggml_vocab_test__\n"))
