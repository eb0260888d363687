"""Small tokenizers from a few tokens, and the records of llama.cpp."""
from pathlib import Path

import numpy as np
import pytest

from ggml_py.tokenizer import Tokenizer
from ggml_py.tokenizer.bpe import BYTE_OF_LETTER
from ggml_py.tokenizer.pretokenizers import PRE_TOKENIZERS
from ggml_py.tokenizer.vocabulary import BYTE_TOKENS
from places import REFERENCE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
LETTERS = list(BYTE_OF_LETTER)  # the 256 letters of byte-level BPE
# a name of each row of the table whose symbols are byte letters
BYTE_LEVEL = list({row: name for name, row in reversed(PRE_TOKENIZERS.items()) if not row.spaces_escaped}.values())[::-1]


def reference(path: str) -> Path:
    if not (REFERENCE / path).exists():
        pytest.skip(f"needs the reference data: ../shared/reference/{path}")
    return REFERENCE / path


def bpe(tokens, merges=(), pre="qwen2", special=(), **keys) -> Tokenizer:
    """special: (text, type) pairs that follow the tokens."""
    return Tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": list(merges),
                      "tokenizer.ggml.tokens": [*tokens, *(text for text, _ in special)],
                      "tokenizer.ggml.token_type": [NORMAL] * len(tokens) + [type for _, type in special],
                      **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}})


def space_escaped(tokens, merges=(), special=(), model="gemma4", **keys) -> Tokenizer:
    """Tokens, special ones and the 256 byte tokens of Gemma 4's model."""
    special = [*special, *((text, BYTE) for text in BYTE_TOKENS)]
    return bpe(tokens, merges, special=special, model=model, bos_token_id=0, eos_token_id=1, **keys)


def spm(scores: dict[str, float], types: dict[str, int] | None = None, **keys) -> Tokenizer:
    """scores: token text -> score, after <unk>, <s>, </s> (ids 0, 1, 2) and before the 256 byte tokens."""
    texts = ["<unk>", "<s>", "</s>", *scores, *BYTE_TOKENS]
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **dict.fromkeys(BYTE_TOKENS, BYTE), **(types or {})}
    return Tokenizer({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": texts,
                      "tokenizer.ggml.scores": np.array([scores.get(text, 0) for text in texts], np.float32),
                      "tokenizer.ggml.token_type": np.array([kinds.get(text, NORMAL) for text in texts], np.int32),
                      **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}})


def texts_of(tokenizer: Tokenizer, text: str, **options) -> list[str]:
    return [tokenizer.token_text(id) for id in tokenizer.encode(text, **{"add_special": False, **options})]
