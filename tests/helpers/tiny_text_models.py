"""A small random model that reads and writes texts: byte-level BPE, a few words, control tokens, a chat template."""
from pathlib import Path

import gguf
from made_tokenizers import CONTROL, LETTERS, NORMAL
from tiny_models import write_model

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TOKENS = [*LETTERS, "th", "the", "in", *SPECIAL]


def bytes_and_words(add_bos: bool):
    def write(w: gguf.GGUFWriter) -> None:
        w.add_tokenizer_model("gpt2"); w.add_tokenizer_pre("gpt-2")
        w.add_token_list(TOKENS); w.add_token_merges(["t h", "th e", "i n"])
        w.add_token_types([NORMAL] * (len(TOKENS) - len(SPECIAL)) + [CONTROL] * len(SPECIAL))
        w.add_bos_token_id(TOKENS.index("<s>")); w.add_eos_token_id(TOKENS.index("</s>")); w.add_add_bos_token(add_bos)
        w.add_chat_template(TEMPLATE)
    return write


def write_text_model(path: Path, add_bos: bool = False, types: tuple[str, ...] = ("Q4_0", "Q8_0"), **settings) -> Path:
    return write_model(path, "llama", types, n_vocab=len(TOKENS), tokenizer=bytes_and_words(add_bos), **settings)
