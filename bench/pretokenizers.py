"""Writes docs/tokenizers.md from the table of pre-tokenizers: python bench/pretokenizers.py [--speed VOCABULARY.gguf ...]

--speed: prints MB/s of `encode` and `decode` of the text of --text with the vocabularies of files instead, the best of three.
"""
import argparse
import time
from pathlib import Path

import checkout  # noqa: F401

from ggml_py.base.defaults import TEXT
from ggml_py.tokenizer import Tokenizer
from ggml_py.tokenizer.pretokenizers import DEVIATIONS, PRE_TOKENIZERS, REGEXES, PreTokenizer
from ggml_py.tokenizer.tokenizer import NOT_READ

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tokenizers.md"

HEAD = """# Tokenizers

Written by `python bench/pretokenizers.py` from the table of pre-tokenizers (`ggml_py/tokenizer/pretokenizers.py`); a test
compares it.

| `tokenizer.ggml.model` | what it is | BOS, EOS without keys | a text's tokens give the text again |
| --- | --- | --- | --- |
| `gpt2` | BPE of bytes, after the pre-tokenizer that `tokenizer.ggml.pre` names | 11, 11 | yes, with `decode(ids, clean_spaces=False)`, where every byte has a token (Falcon's vocabulary lacks some control characters) |
| `gemma4` | BPE of characters of lines, with U+2581 for a space; characters without a token are bytes `<0xXX>` | none; BOS is always added | yes, except that U+2581 becomes a space |
| `llama` | SentencePiece: the pair that makes the token of the highest score is merged first | 1, 2; BOS is added | yes, except that U+2581 becomes a space |
| `no_vocab`, `none` | no texts, token ids alone | none | |

"""  # noqa: E501
SPECIAL = """
## Special tokens

The text of a user-defined token always becomes that token, the text of a control token does with `parse_special=True`. Longer
texts are found first.

White space beside them stays, except for models that llama.cpp knows by name: the special tokens of Phi-3 (`general.name` has
`phi-3` or `phi3`; not `<unk>`, `<s>`, `<|endoftext|>`) swallow the ASCII white space to their right, `<mask>` of `jina-v2-de`,
`jina-v2-es` and `jina-v2-code` and `[MASK]` of `modern-bert` that to their left: such texts do not come back.

`decode` takes away some spaces where the table says so: those before `?`, `!`, `.`, `,` and before contractions. Tokens as they
are generated (`Detokenizer`) are never cleaned.

## Chat templates

`tokenizer.chat_template`, and `tokenizer.chat_template.NAME` of each of `tokenizer.chat_templates`, are rendered by
`ggml_py.tokenizer.chat` as Hugging Face's `apply_chat_template` would, with the date that is given and in a sandbox that lets
templates change nothing: those that `append` to lists are refused there and here.

- `encode_chat(tokenizer, messages, tools=..., documents=..., template=NAME, enable_thinking=False)`: further arguments reach the
  template. With tools the template named `tool_use` is taken, where the model has it.
- Content is a text or a list of `{"type": "text", "text": ...}`, and arguments of `tool_calls` are a mapping or its JSON. Which
  of them a template takes is found by rendering both once; it is given that form.
- An error is one line with the key of the template and the line in it, also where the template refuses the messages.

## Names

**add_bos**: BOS is added where the file does not say. **ignore_merges**: a piece that is a token is taken as it is. A file
without `tokenizer.ggml.pre` is read as `default`, with a warning.

| `tokenizer.ggml.pre` | regexes | ignore_merges | add_bos | clean_spaces | other |
| --- | --- | --- | --- | --- | --- |
"""
SETS = """
## Regexes

Each regex in turn cuts every piece into its matches and the gaps between them. The engine is Oniguruma: `++` and `*+` do not
backtrack, `&&` intersects classes, `\\G` is where the last match ended.
"""
DIFFERENT = """
## Where llama.cpp cuts otherwise

All names give llama.cpp's ids on its test texts, except `tiny_aya` and `cohere2moe` on runs of digits between letters. The sets
below follow what the models were published with, where llama.cpp does not.

"""


def escaped(regex: str) -> str:
    """Non-ASCII characters as escapes."""
    return "".join(c if c.isascii() else f"\\u{ord(c):04X}" if ord(c) < 0x10000 else f"\\U{ord(c):08X}" for c in regex)


def other(row: PreTokenizer) -> str:
    """What a row has beside the columns."""
    return ", ".join(text for text, holds in (
        ("no default BOS", row.bos_id is None), ("merges are optional", not row.merges_required),
        ("U+2581 for a space, no byte letters", row.spaces_escaped),
        ("runs of newlines that are tokens stay whole", row.newlines_whole)) if holds)


def page() -> str:
    names: dict[PreTokenizer, list[str]] = {}
    for name, row in PRE_TOKENIZERS.items():
        names.setdefault(row, []).append(f"`{name}`")
    yes = {True: "yes", False: ""}
    rows = [[", ".join(names[row]), row.regex_set, yes[row.ignore_merges], yes[row.add_bos], yes[row.clean_spaces], other(row)]
            for row in names]
    sets = "".join(f"\n{name}\n\n```\n" + "".join(f"{escaped(regex)}\n" for regex in regexes) + "```\n"
                   for name, regexes in REGEXES.items())
    refused = ", ".join(f"`{model}` ({kind})" for model, kind in NOT_READ.items())
    return (HEAD + f"Refused: {refused}.\n" + SPECIAL + "".join(f"| {' | '.join(cells)} |\n" for cells in rows) + SETS + sets
            + DIFFERENT + "".join(f"- **{name}**: {text}\n" for name, text in DEVIATIONS.items()))


def speed(tokenizer: Tokenizer, text: str) -> tuple[float, float]:
    """MB/s of `encode` and of `decode`."""
    ids = tokenizer.encode(text, add_special=False)
    best = [float("inf")] * 2
    for _ in range(3):
        for i, work in enumerate((lambda: tokenizer.encode(text, add_special=False), lambda: tokenizer.decode(ids))):
            start = time.perf_counter()
            work()
            best[i] = min(best[i], time.perf_counter() - start)
    return len(text.encode()) / best[0] / 1e6, len(text.encode()) / best[1] / 1e6


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--speed", type=Path, nargs="+", metavar="VOCABULARY.gguf")
    p.add_argument("--text", type=Path, default=TEXT, metavar="FILE")
    options = p.parse_args()
    if not options.speed:
        PAGE.write_text(page(), encoding="utf-8")
    for path in options.speed or []:
        encoded, decoded = speed(Tokenizer.from_gguf(path), options.text.read_text(encoding="utf-8"))
        print(f"{path.name}: encode {encoded:.2f} MB/s, decode {decoded:.2f} MB/s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
