"""Pre-tokenizers: the sets against the regexes that they stand for in another engine, the table against records of llama.cpp."""
import codecs
import itertools
import json
import re
import time
import unicodedata

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Regex, pre_tokenizers

from ggml_py.files.gguf import GGUFFile
from ggml_py.tokenizer import Tokenizer
from ggml_py.tokenizer.bpe import BYTE_OF_LETTER
from ggml_py.tokenizer.pretokenizers import DEVIATIONS, PRE_TOKENIZERS, REGEXES, PreTokenizer
from made_tokenizers import BYTE_LEVEL, LETTERS, bpe, reference

# Every class that the regexes tell apart: letters of both cases and of none, marks, numbers, punctuation, symbols, all kinds of
# white space, controls that are none, Han in every block, unassigned code points within and without the blocks, other scripts
# that a set names.
ALPHABET = ("abAZsStTrReEvVlLmMdD\u00e9\u00df\u0416\u03bb\u01c5\u02b0\u00aa\u05d0\u0800\u3042\u30a2\uac00\u0e01\u017f"
            "\u4e00\u9fa5\u9fff\u3400\uf900\U00020000\U0002f800\U0002fa1f\u3005\u3007\u0378"
            "\u3131\u3105\u0e81\u1780\u1000\uaa60\uff66\u2f00\u1100\ua490"
            "\u0301\u20dd\u0903" "012349\u00b2\u00bd\u2167\u0663"
            "!\"'#%&()*,-./:;?@[\\]_{}\u3001\u3002\u201c\u2019\u2014\u2026\uff01\uff1a\ufe30\u0964\u06d4\u203f"
            "$+<=>^`|~\u20ac\u00a9\U0001f600\uff5e"
            " \t\n\r\x0b\x0c\x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000" "\x00\x1c\x1f\u200b\u200d\ufeff\ue000\ufffd")
SPACES = set(map(chr,
                 (*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)))
HAN = re.compile("[\u2e80-\u2fd5\u3005\u3007\u3021-\u3029\u3038-\u303b\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufad9"
                 "\U00020000-\U0002fa1f]")

CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
SPACES_LAST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES_LAST
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES_LAST)
YOUTU = TEKKEN.replace("]+|[^", f"]+{CONTRACTION}?|[^").replace("]*|\\p", f"]*{CONTRACTION}?|\\p")
GPT4O = YOUTU.replace(r"\p{N}|", r"\p{N}{1,3}|")
KIMI_K2 = re.sub(r"\[\\p\{L[ul]\}[^]]*\]", r"(?:(?!\\p{Han})\g<0>)", GPT4O.replace(r"[\r\n/]*", r"[\r\n]*"))
GRANITE = re.sub(r"\[\\p\{(Lu|Ll)\}[^]]*\]", lambda m: rf"(?:(?=[\p{{L}}\p{{M}}])[^{'a-z' if m[1] == 'Lu' else 'A-Z'}])", GPT4O)
CJK = "[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
DEEPSEEK_CJK = "[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
DEEPSEEK3 = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
             + SPACES_LAST)
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C)]+"
THREES = r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))"
REFERENCES = {  # the regexes as published, or as llama.cpp has them
    "GPT2": [GPT2], "SMOLLM": [r"\p{N}", GPT2], "DEFAULT": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "FALCON": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"],
    "CHAMELEON": ["<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
                  r"[\p{P}!-/:-@\[-`{-~]", GPT2],
    "LLAMA3": [LLAMA3], "MINICPM5": [r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")],
    "JAIS2": [LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)"
              r"|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"],
    "QWEN2": [QWEN2], "UFAKZEKA": [QWEN2.removeprefix(CONTRACTION + "|")], "LAGUNA": [r"[^\n]+|[\n]+", QWEN2],
    "QWEN35": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + SPACES_LAST],
    "SEED_CODER": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + SPACES_LAST],
    "EXAONE_MOE": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
                   r"|\s*[\r\n]|\s+(?!\S)|\s+"],
    "GPT4O": [GPT4O], "TEKKEN": [TEKKEN], "GRANITE_EMB_MULTI": [GRANITE], "KIMI_K2": [r"\p{Han}+|" + KIMI_K2],
    "TINY_AYA": [r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O],
    "YOUTU": ["[\uAC00-\uD7A3\u3131-\u318E]+"
              "|[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B\uFF0C\u3001-\u303F\uFE30-\uFE4F]+"
              "|[\u3105-\u312F]+|" + CJK, YOUTU],
    # \p{C} here: letters with case, which the published class lists by range
    "DEEPSEEK_LLM": [r"[\r\n]", r"\s?[\p{C}]+", "\\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+", r"\s+$",
                     DEEPSEEK_CJK, r"\p{N}+"],
    "DEEPSEEK_CODER": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}"],
    "DEEPSEEK3": [r"\p{N}{1,3}", CJK, DEEPSEEK3],
    "SPARK2_5": [r"\p{N}{1,3}", CJK, DEEPSEEK3.replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"), r"\p{N}"],
    "AFMOE": [THREES, "[\u4E00-\u9FFF\u3040-\u309F\u30A0-\u30FF\u3400-\u4DBF\uf900-\uFAFF\uFF65-\uFF9F\u2F00-\u2FDF]+"
              "|[\u0E00-\u0E7F]+|[\u0E80-\u0EFF]+|[\u1780-\u17FF]+"
              "|[\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF]+|[\uAC00-\uD7AF\u1100-\u11FF]+", DEEPSEEK3],
    "SUPERBPE": [r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))"],
    "BLOOM": [BLOOM], "VIKING": [BLOOM, r"\p{N}"], "GEMMA4": [r"[^\n]+|[\n]+"],
}
ROWS = {  # name: ignore_merges, add_bos, clean_spaces, BOS where the metadata names none
    "smollm": (False, False, False, 11), "llama-bpe": (True, True, True, 11), "qwen2": (False, False, False, 11),
    "megrez": (False, False, True, 11), "qwen35": (False, False, False, 11), "deepseek-llm": (False, False, False, 11),
    "deepseek-v3": (False, False, False, 11), "chatglm-bpe": (False, False, True, None), "glm4": (True, False, True, None),
    "bailingmoe": (False, False, False, 11), "gpt-2": (False, False, True, 11), "kimi-k2": (False, False, False, 11),
    "gpt-4o": (False, False, False, 11), "default": (False, False, True, 11), "tekken": (True, True, False, 11),
    "starcoder": (False, False, True, 11), "chameleon": (False, True, False, 11), "youtu": (True, False, False, 11)}


def is_class(c: str, name: str) -> bool:
    """name: \\s, \\S, \\d, \\w (as Oniguruma has it for the alphabet), a general category or its initial, Han, or C for
    letters with case."""
    category = unicodedata.category(c)
    match name:
        case r"\s" | r"\S":
            return (c in SPACES) == (name == r"\s")
        case r"\d":
            return category == "Nd"
        case r"\w":
            return category[0] in "LMN" or category == "Pc"
        case "Han":
            return bool(HAN.match(c)) and category != "Cn"
        case "C":
            return category in ("Lu", "Ll", "Lt")
    return category.startswith(name)


def members(name: str) -> str:
    return "".join(re.escape(c) for c in ALPHABET if is_class(c, name))


def to_python(regex: str) -> re.Pattern:
    """A published regex for Python's engine, which has no Unicode properties: classes become lists of the alphabet's
    characters."""
    out, within = [], False
    for token in re.findall(r"\\p\{\w+\}|\\.|.", regex, re.DOTALL):
        if token == r"\b":
            word = members(r"\w")
            out.append(f"(?:(?<=[{word}])(?![{word}])|(?<![{word}])(?=[{word}]))")
        elif token.startswith((r"\p", r"\s", r"\S", r"\d")):
            chosen = members(token[3:-1] or token)
            out.append(chosen if within else f"[{chosen}]")
        else:
            within = {"[": True, "]": False}.get(token, within)
            out.append(r"\Z" if token == "$" and not within else token)
    return re.compile("".join(out))


def reference_pieces(regex_set: str, text: str) -> list[str]:
    # llama.cpp matches these sets with all non-ASCII white space as U+000B; their last regexes do not match it anyway
    if regex_set in ("DEEPSEEK_LLM", "DEEPSEEK_CODER"):
        marked = cut("".join("\x0b" if c in SPACES and c > "\x7f" else c for c in text), PYTHON_REGEXES[regex_set])
        ends = [0, *itertools.accumulate(map(len, marked))]
        return [text[start:end] for start, end in itertools.pairwise(ends)]
    return cut(text, PYTHON_REGEXES[regex_set])


def cut(text: str, regexes: list[re.Pattern]) -> list[str]:
    pieces = [text]
    for regex in regexes:
        parts = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(piece):
                parts += [piece[end:match.start()], match.group()]
                end = match.end()
            parts.append(piece[end:])
        pieces = [part for part in parts if part]
    return pieces


# runs of the common ones are what the sets differ in
TEXTS = st.text(st.sampled_from(ALPHABET) | st.sampled_from(" \n'a1!"), max_size=30)
PYTHON_REGEXES = {name: [to_python(regex) for regex in regexes] for name, regexes in REFERENCES.items()}
BUILT = {name: PreTokenizer(name).build() for name in REGEXES}


def pieces_of(regex_set: str, text: str) -> list[str]:
    return [bytes(BYTE_OF_LETTER[c] for c in piece).decode() for piece, _ in BUILT[regex_set].pre_tokenize_str(text)]


@pytest.mark.parametrize("name", REGEXES)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_pieces_are_those_of_the_published_regexes(name, text):
    assert pieces_of(name, text) == reference_pieces(name, text)


@pytest.mark.parametrize("name, text, pieces", [
    ("GPT2", "I'll  go\n\n", ["I", "'ll", " ", " go", "\n\n"]),
    ("GPT2", "I'LL", ["I", "'", "LL"]),
    ("LLAMA3", "I'LL 12345\n \nx", ["I", "'LL", " ", "123", "45", "\n \n", "x"]),
    ("QWEN2", "12!\n", ["1", "2", "!\n"]),
    ("SMOLLM", "a 12", ["a", " ", "1", "2"]),
    ("QWEN35", "e\u0301x", ["e\u0301x"]),
    ("QWEN2", "e\u0301x", ["e", "\u0301x"]),
    ("DEFAULT", "a 1234?", ["a", " ", "123", "4", "?"]),
    ("FALCON", "a 1234`", ["a", " ", "123", "4", "`"]),
    ("CHAMELEON", "IMGIMGBCZ    x1", ["IMGIMGBCZ", "    ", "x", "1"]),
    ("DEEPSEEK_LLM", "x\u3000!", ["x", "\u3000!"]),
    # the third regex keeps the last two together, the fifth cuts them
    ("DEEPSEEK_LLM", "!\u3000\u3001", ["!", "\u3000", "\u3001"]),
    ("DEEPSEEK_LLM", "x  1", ["x", "  ", "1"]),
    ("DEEPSEEK_LLM", "x \n  ", ["x", " ", "\n", "  "]),
    ("DEEPSEEK_CODER", "ab, 12\u4e00\u4e00", ["ab", ",", " ", "1", "2", "\u4e00\u4e00"]),
    ("KIMI_K2", "ab\u4e00\u9fffcd'S", ["ab", "\u4e00\u9fff", "cd'S"]),
    ("KIMI_K2", "camelCase \u3005", ["camel", "Case", " ", "\u3005"]),
    ("GPT4O", "HTTPServer'S 1234\n", ["HTTPServer'S", " ", "123", "4", "\n"]),
    ("GPT4O", "camelCase a/b.\n/", ["camel", "Case", " a", "/b", ".\n/"]),
    ("TEKKEN", "don'T 12", ["don", "'T", " ", "1", "2"]),
    ("GRANITE_EMB_MULTI", "\u0416\u043e\u0416 aB", ["\u0416\u043e\u0416", " a", "B"]),
    ("DEEPSEEK3", "a\u3042.b", ["a", "\u3042", ".b"]),
    ("SPARK2_5", "1234.\n", ["1", "2", "3", "4", ".", "\n"]),
    ("AFMOE", "x  1234567 12", ["x", "  ", "1", "234", "567", " ", "12"]),
    ("TINY_AYA", "1234 12345a", ["1", "234", " ", "123", "45", "a"]),
    ("SUPERBPE", "go to 1234567 now", ["go to ", "1", "234", "567", " now"]),
    ("SUPERBPE", "\u00b212345\u00b2", ["\u00b212", "345\u00b2"]),
    ("JAIS2", "a" + 11 * " " + "b", ["a", 8 * " ", 2 * " ", " b"]),
    ("EXAONE_MOE", "a bc 1\n\n", ["a bc", " ", "1", "\n\n"]),
    ("BLOOM", "a, b (c)", ["a", ",", " b", " (", "c", ")"]),
    ("GEMMA4", "a b\n\nc", ["a b", "\n\n", "c"]),
    ("LLAMA3", "\x1c\x1ca", ["\x1c\x1c", "a"]),  # U+001C is not white space
    ("LLAMA3", "\x85\x85a", ["\x85", "\x85a"]),  # U+0085 is
])
def test_pieces_by_hand(name, text, pieces):
    assert pieces_of(name, text) == pieces


@pytest.mark.parametrize("unit, end",
                         [("a", ""), ("A", ""), ("A", "b"), (" ", ""), (" ", "1"), ("\n", ""), (" \n", ""), ("'", ""),
                          ("\u4e00", ""), ("1", ""), ("1", "a"), ("a ", ""), ("\u0301", "")],
                         ids=["letters", "capitals", "capitals, letter", "spaces", "spaces, digit", "newlines", "blank lines",
                              "quotes", "han", "digits", "digits, letter", "words", "marks"])
def test_time_grows_with_length_only(unit, end):
    """Work that grows with the square of 50,000 characters takes minutes, or makes the regex engine give up."""
    text, start = unit * (50_000 // len(unit)) + end, time.process_time()
    for name in REGEXES:
        assert sum(end - start for _, (start, end) in BUILT[name].pre_tokenize_str(text)) == len(text)
    assert time.process_time() - start < len(REGEXES) / 2


@pytest.mark.parametrize("name", ["L", "N", "M", "P", "S", "Lu", r"\s", r"\d"])
def test_engine_knows_unicode(name):
    """Oniguruma's classes are the general categories and White_Space, on all code points that this Python knows."""
    points = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    cut = pre_tokenizers.Split(Regex(name if name[0] == "\\" else rf"\p{{{name}}}"), "removed")
    others = set("".join(piece for piece, _ in cut.pre_tokenize_str("".join(points))))
    assert [c for c in points if unicodedata.category(c) != "Cn" and (c not in others) != is_class(c, name)] == []


def test_table_of_pre_tokenizers():
    assert {row.regex_set for row in PRE_TOKENIZERS.values()} == set(REGEXES) == set(REFERENCES) >= set(DEVIATIONS)
    for name, expected in ROWS.items():
        tokenizer, row = bpe(LETTERS, pre=name), PRE_TOKENIZERS[name]
        assert (row.ignore_merges, tokenizer.add_bos, row.clean_spaces, tokenizer.bos_id) == expected
        assert tokenizer.eos_id == 11 and not tokenizer.add_eos


def test_rows_are_those_of_the_reference():
    """ignore_merges, add_bos and clean_spaces of all 90 names, as the sheets list them."""
    flags = {"no": False, "false": False, "**yes**": True, "**true**": True, "true": True}
    found = {}
    for sheet, columns in (("architectures.md", slice(3, 6)), ("architectures2.md", slice(4, 7))):
        for line in reference(sheet).read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            if len(cells) > 6 and all(cell in flags for cell in cells[columns]):
                row = tuple(flags[cell] for cell in cells[columns])
                found |= dict.fromkeys(re.findall(r"`([^`]+)`", re.sub(r"\(.*\)", "", cells[1])), row)
    for short in "jina-es/de", "jina-v2-es/de":
        found |= dict.fromkeys((short.removesuffix("/de"), short.replace("es/", "")), found[short])
    found |= {"megrez": (False, False, True)} | dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie"), (False, False, False))
    forced = dict.fromkeys(("gemma4", "granite-embed-multi-311m"), (False, True, True))  # add_bos: whatever a file says
    for name, row in PRE_TOKENIZERS.items():
        assert (row.ignore_merges, row.add_bos, row.clean_spaces) == (found | forced)[name], name


def test_ids_are_those_of_llama_cpp():
    """But those of sets that cut as published. Their cases are listed: all others are equal there too."""
    recorded = json.loads(reference("vocab/pre.json").read_text(encoding="utf-8"))
    with GGUFFile.open(reference("vocab/ggml-vocab-gpt-2.gguf")) as file:
        metadata = dict(file.metadata)
    assert set(recorded["ids"]) == set(PRE_TOKENIZERS)
    ids = {}
    for name in recorded["ids"]:
        if (row := PRE_TOKENIZERS[name]) not in ids:
            tokenizer = Tokenizer({**metadata, "tokenizer.ggml.pre": name})
            ids[row] = [tokenizer.encode(text, add_special=False) for text in recorded["cases"]]
    different = {name: [i for i, expected in enumerate(cases) if ids[PRE_TOKENIZERS[name]][i] != expected]
                 for name, cases in recorded["ids"].items()}
    assert {name: cases for name, cases in different.items() if cases} == {"tiny_aya": [32, 45], "cohere2moe": [32, 45]}


def test_cased_letters_of_deepseek_llm_are_the_published_ones():
    listing = reference("architectures.md").read_text(encoding="utf-8").split("\nDEEPSEEK_LLM\n```\n")[1].splitlines()[1]
    published = codecs.decode(listing.removeprefix(r"\s?"), "unicode_escape")
    assert REGEXES["DEEPSEEK_LLM"][1] == r"\s?" + published


def test_byte_level_rows():
    assert set(PRE_TOKENIZERS) - {name for name, row in PRE_TOKENIZERS.items() if row in map(PRE_TOKENIZERS.get, BYTE_LEVEL)} == {
        "gemma4", "granite-embed-multi-311m", "sarvam-moe"}
