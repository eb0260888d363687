"""Tokenizers: recorded cases of llama.cpp, pre-tokenizers against the published regexes in another engine,
SPM merges against the definition."""
import codecs
import copy
import itertools
import logging
import pickle
import re
import time
import unicodedata
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Regex, pre_tokenizers

from ggml_py.base.errors import UserError
from ggml_py.files.pull import MODELS, models_folder
from ggml_py.tokenizer import Detokenizer, Tokenizer, TokenizerError
from ggml_py.tokenizer.bpe import BYTE_OF_LETTER
from ggml_py.tokenizer.pretokenizers import PRE_TOKENIZERS
from places import REFERENCE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
LETTERS = list(BYTE_OF_LETTER)  # the 256 letters of byte-level BPE
few = settings(max_examples=150, deadline=None)


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


def spm(scores: dict[str, float], types: dict[str, int] | None = None, **keys) -> Tokenizer:
    """scores: token text -> score, after <unk>, <s>, </s> (ids 0, 1, 2) and before the 256 byte tokens."""
    texts = ["<unk>", "<s>", "</s>", *scores, *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **{f"<0x{byte:02X}>": BYTE for byte in range(256)},
             **(types or {})}
    return Tokenizer({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": texts,
                      "tokenizer.ggml.scores": np.array([scores.get(text, 0) for text in texts], np.float32),
                      "tokenizer.ggml.token_type": np.array([kinds.get(text, NORMAL) for text in texts], np.int32),
                      **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}})


def texts_of(tokenizer: Tokenizer, text: str, **options) -> list[str]:
    return [tokenizer.token_text(id) for id in tokenizer.encode(text, **{"add_special": False, **options})]


# Copies

@pytest.mark.parametrize("copied", [lambda t: pickle.loads(pickle.dumps(t)), copy.copy, copy.deepcopy],
                         ids=["pickle", "copy", "deepcopy"])
def test_copies(copied):
    """Of every pre-tokenizer, with merges that have spaces and letters that are missing, and of SentencePiece; also when they
    have been used."""
    text = "It's  12,345 Ångström\n\n\t<|x|> 日本語 'LL a b\u0301 \udc80"
    tokens, merges, special = [*LETTERS[:-3], "ab", "Ġa", "Ġab"], ["a b", "Ġ a", "Ġ ab", "x y"], [("<|x|>", CONTROL)]
    originals = [bpe(tokens, merges, pre=names.split()[0], special=special) for names in SAME]
    originals += [spm({"▁": -1, "a": -2, "▁a": -0.5, "b": -3}), Tokenizer({})]
    for original in originals:
        for _ in range(2):
            found = copied(original)
            assert repr(found) == repr(original) and vars(found).keys() == vars(original).keys()
            if original.model != "no_vocab":
                ids = original.encode(text, parse_special=True)
                assert found.encode(text, parse_special=True) == ids and found.decode(ids, False) == original.decode(ids, False)
                assert found.token_bytes(3) == original.token_bytes(3)


def test_repr():
    assert repr(bpe(LETTERS, eos_token_id=7)) == "<Tokenizer gpt2: 256 tokens, BOS 11, EOS 7>"
    assert repr(Tokenizer({})) == "<Tokenizer no_vocab: 0 tokens>"
    assert repr(Detokenizer(Tokenizer({}))) == "<Detokenizer of <Tokenizer no_vocab: 0 tokens>>"


# Recorded cases

@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "qwen2"])
def test_cases_of_llama_cpp(name):
    path = reference(f"vocab/ggml-vocab-{name}.gguf")
    tokenizer = Tokenizer.from_gguf(path)
    with open(f"{path}.inp", encoding="utf-8", newline="") as file:
        inputs = file.read().split("\n__ggml_vocab_test__\n")[:-1]
    expected = [[int(id) for id in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    assert len(inputs) == len(expected) == 46
    for text, ids in zip(inputs, expected):
        assert tokenizer.encode(text, add_special=False, parse_special=False) == ids, repr(text)


@pytest.fixture
def smollm2() -> Tokenizer:
    path = models_folder() / MODELS["smollm2"].file_name
    if not path.is_file():
        pytest.skip("needs the model smollm2 in the user's cache folder: ggml-py pull smollm2")
    return Tokenizer.from_gguf(path)


def test_smollm2_text_and_chat(smollm2):
    text = reference("text/wiki.test.raw").read_bytes()[:60_000].decode("utf-8", "surrogateescape")
    expected = np.load(reference("logits/smollm2-nll.npz"))["tokens"].ravel()
    ids = smollm2.encode(text)
    assert expected.size == 4 * 512
    np.testing.assert_array_equal(ids[:expected.size], expected)
    assert smollm2.decode(ids[:-4]) in text
    assert (smollm2.n_vocab, smollm2.bos_id, smollm2.eos_id, smollm2.add_bos) == (49152, 1, 2, False)
    assert smollm2.is_end_of_generation(2) and smollm2.token_text(2) == "<|im_end|>" and not smollm2.is_end_of_generation(1)


def test_real_vocabularies_survive_a_round_trip():
    text = reference("text/wiki.test.raw").read_bytes()[:100_000].decode("utf-8", "ignore")
    for name in ("llama-spm", "qwen2"):
        tokenizer = Tokenizer.from_gguf(reference(f"vocab/ggml-vocab-{name}.gguf"))
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


# Pre-tokenizers

# Every class that the regexes tell apart: letters of both cases and of none, marks, numbers, punctuation, symbols, all kinds of
# white space, controls that are none, Han in every block, unassigned code points within and without the blocks.
ALPHABET = ("abAZsStTrReEvVlLmMdD\u00e9\u00df\u0416\u03bb\u01c5\u02b0\u00aa\u05d0\u0800\u3042\u30a2\uac00\u0e01\u017f"
            "\u4e00\u9fa5\u9fff\u3400\uf900\U00020000\U0002f800\U0002fa1f\u3007\u0378"
            "\u0301\u20dd\u0903" "012349\u00b2\u00bd\u2167\u0663"
            "!\"'#%&()*,-./:;?@[\\]_{}\u3001\u3002\u201c\u2019\u2014\uff01\uff1a"
            "$+<=>^`|~\u20ac\u00a9\U0001f600\uff5e"
            " \t\n\r\x0b\x0c\x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000" "\x00\x1c\x1f\u200b\u200d\ufeff\ue000\ufffd")
SPACES = set(map(chr,
                 (*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)))
HAN = re.compile("[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f]")

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
          r"?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
KIMI_K2_REST = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = {
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "glm4": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
    "qwen35": [r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| "
               r"?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+"],
    # \p{C} here: letters with case, which the published class lists by range
    "deepseek-llm": [r"[\r\n]", r"\s?[\p{C}]+", "\\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+", r"\s+$",
                     "[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+", r"\p{N}+"],
    "deepseek-v3": [r"\p{N}{1,3}", "[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
                    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                    r"| ?[\p{P}\p{S}]+[\r\n]*"
                    r"|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "bailingmoe": [r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
                   r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"],
    "gpt-4o": [r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
               r"(?:'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?"
               r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
               r"(?:'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?"
               r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "gpt-2": [GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}
ROWS = {  # name: ignore_merges, add_bos, clean_spaces, BOS where the metadata names none
    "smollm": (False, False, False, 11), "llama-bpe": (True, True, True, 11), "qwen2": (False, False, False, 11),
    "megrez": (False, False, True, 11), "qwen35": (False, False, False, 11), "deepseek-llm": (False, False, False, 11),
    "deepseek-v3": (False, False, False, 11),
    "chatglm-bpe": (False, False, True, None), "glm4": (True, False, True, None), "bailingmoe": (False, False, False, 11),
    "gpt-2": (False, False, True, 11), "kimi-k2": (False, False, False, 11), "gpt-4o": (False, False, False, 11),
    "default": (False, False, True, 11)}
SAME = [  # the names of each row of the table
    "smollm", "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "qwen2 deepseek-r1-qwen kormo f2llmv2",
    "megrez", "qwen35", "deepseek-llm", "deepseek-v3", "chatglm-bpe", "glm4 glm5", "bailingmoe bailingmoe2 llada-moe",
    "gpt-2 phi-2 exaone4 mellum a.x-4.0 gigachat modern-bert jina-es jina-de jina-v2-es jina-v2-de", "kimi-k2",
    "gpt-4o llama4 kanana2 talkie",
    "default"]


def is_class(c: str, name: str) -> bool:
    """name: \\s, \\S, a general category or its initial, or C for cased letters."""
    if name in (r"\s", r"\S"):
        return (c in SPACES) == (name == r"\s")
    return unicodedata.category(c) in ("Lu", "Ll", "Lt") if name == "C" else unicodedata.category(c).startswith(name)


def to_python(regex: str) -> re.Pattern:
    """A published regex for Python's engine, which has no Unicode properties: classes become lists of the alphabet's
    characters."""
    out, within = [], False
    for token in re.findall(r"\\p\{\w+\}|\\.|.", regex, re.DOTALL):
        if token.startswith((r"\p", r"\s", r"\S")):
            members = "".join(re.escape(c) for c in ALPHABET if is_class(c, token[3:-1] or token))
            out.append(members if within else f"[{members}]")
        else:
            within = {"[": True, "]": False}.get(token, within)
            out.append(r"\Z" if token == "$" and not within else token)
    return re.compile("".join(out))


def published_split(name: str, text: str) -> list[str]:
    # all its patterns but the last see every non-ASCII white space as U+000B, which the last does not match anyway
    if name == "deepseek-llm":
        marked = published_pieces("".join("\x0b" if c in SPACES and c > "\x7f" else c for c in text), PYTHON_REGEXES[name])
        ends = [0, *itertools.accumulate(map(len, marked))]
        return [text[start:end] for start, end in itertools.pairwise(ends)]
    return published_pieces(text, PYTHON_REGEXES[name])


def published_pieces(text: str, regexes: list[re.Pattern]) -> list[str]:
    pieces = [text]
    for regex in regexes:
        cut = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(piece):
                cut += [piece[end:match.start()], match.group()]
                end = match.end()
            cut.append(piece[end:])
        pieces = [piece for piece in cut if piece]
    return pieces


def kimi_k2_split(text: str) -> list[str]:
    """The hand-written splitter that the kimi-k2 pattern stands for."""
    def word(c: str) -> bool:
        return is_class(c, "L") and not HAN.match(c)

    def run(i: int, wanted) -> int:
        return next((j for j in range(i, len(text)) if not wanted(text[j])), len(text))

    pieces, i = [], 0
    while i < len(text):
        first = i if is_class(text[i], "L") or is_class(text[i], "N") or text[i] in "\r\n" else i + 1
        if (end := run(i, HAN.match)) > i:
            pass
        elif (end := run(first, word)) > first:
            contraction = re.compile("'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])").match(text, end)
            end = contraction.end() if contraction else end
        else:
            end = KIMI_K2_PYTHON.match(text, i).end()
        pieces.append(text[i:end])
        i = end
    return pieces


# runs of the common ones are what the sets differ in
TEXTS = st.text(st.sampled_from(ALPHABET) | st.sampled_from(" \n'a1!"), max_size=30)
PYTHON_REGEXES = {name: [to_python(regex) for regex in regexes] for name, regexes in PUBLISHED.items()}
KIMI_K2_PYTHON = to_python(KIMI_K2_REST)


def pieces_of(name: str, text: str) -> list[str]:
    return [bytes(BYTE_OF_LETTER[c] for c in piece).decode() for piece, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PUBLISHED)
@few
@given(text=TEXTS)
def test_pieces_are_those_of_the_published_regexes(name, text):
    assert pieces_of(name, text) == published_split(name, text)


@few
@given(text=TEXTS)
def test_pieces_of_kimi_k2_are_those_of_its_splitter(text):
    assert pieces_of("kimi-k2", text) == kimi_k2_split(text)


@pytest.mark.parametrize("name, text, pieces", [
    ("gpt-2", "I'll  go\n\n", ["I", "'ll", " ", " go", "\n\n"]),
    ("gpt-2", "I'LL", ["I", "'", "LL"]),
    ("llama-bpe", "I'LL 12345\n \nx", ["I", "'LL", " ", "123", "45", "\n \n", "x"]),
    ("qwen2", "12!\n", ["1", "2", "!\n"]),
    ("smollm", "a 12", ["a", " ", "1", "2"]),
    ("qwen35", "e\u0301x", ["e\u0301x"]),
    ("qwen2", "e\u0301x", ["e", "\u0301x"]),
    ("default", "a 1234?", ["a", " ", "123", "4", "?"]),
    ("deepseek-llm", "x\u3000!", ["x", "\u3000!"]),
    # the third regex keeps the last two together, the fifth cuts them
    ("deepseek-llm", "!\u3000\u3001", ["!", "\u3000", "\u3001"]),
    ("deepseek-llm", "x  1", ["x", "  ", "1"]),
    ("deepseek-llm", "x \n  ", ["x", " ", "\n", "  "]),
    ("kimi-k2", "ab\u4e00\u9fffcd'S", ["ab", "\u4e00\u9fff", "cd'S"]),
    ("gpt-4o", "HTTPServer'S 1234\n", ["HTTPServer'S", " ", "123", "4", "\n"]),
    ("gpt-4o", "camelCase a/b.\n/", ["camel", "Case", " a", "/b", ".\n/"]),
    ("deepseek-v3", "a\u3042.b", ["a", "\u3042", ".b"]),
    ("llama-bpe", "\x1c\x1ca", ["\x1c\x1c", "a"]),  # U+001C is not white space
    ("llama-bpe", "\x85\x85a", ["\x85", "\x85a"]),  # U+0085 is
])
def test_pieces_by_hand(name, text, pieces):
    assert pieces_of(name, text) == pieces


@pytest.mark.parametrize("name", ["L", "N", "M", "P", "S", r"\s"])
def test_engine_knows_unicode(name):
    """Oniguruma's classes are the general categories and White_Space, on all code points that this Python knows."""
    points = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    cut = pre_tokenizers.Split(Regex(name if name == r"\s" else rf"\p{{{name}}}"), "removed")
    others = set("".join(piece for piece, _ in cut.pre_tokenize_str("".join(points))))
    assert [c for c in points if unicodedata.category(c) != "Cn" and (c not in others) != is_class(c, name)] == []


def test_table_of_pre_tokenizers():
    assert {name for names in SAME for name in names.split()} == set(PRE_TOKENIZERS)
    for names in SAME:
        first, *others = names.split()
        assert all(PRE_TOKENIZERS[name] is PRE_TOKENIZERS[first] for name in others)
        tokenizer = bpe(LETTERS, pre=first)
        row = PRE_TOKENIZERS[first]
        assert (row.ignore_merges, tokenizer.add_bos, row.clean_spaces, tokenizer.bos_id) == ROWS[first]
        assert tokenizer.eos_id == 11 and not tokenizer.add_eos
    assert PRE_TOKENIZERS["chatglm-bpe"].regexes == PRE_TOKENIZERS["glm4"].regexes == PRE_TOKENIZERS["llama3"].regexes
    assert PRE_TOKENIZERS["megrez"].regexes == PRE_TOKENIZERS["qwen2"].regexes


def test_cased_letters_of_deepseek_llm_are_the_published_ones():
    listing = reference("architectures.md").read_text(encoding="utf-8").split("\nDEEPSEEK_LLM\n```\n")[1].splitlines()[1]
    published = codecs.decode(listing.removeprefix(r"\s?"), "unicode_escape")
    assert PRE_TOKENIZERS["deepseek-llm"].regexes[1] == r"\s?" + published


# Byte-level BPE

ABC = ["a", "b", "c", "\u0120", "ab", "bc", "abc", "\u0120a", "aa", "aab"]


@pytest.mark.parametrize("merges, text, tokens", [
    (["b c", "a bc", "a b"], "abc", ["abc"]),                      # b c first, though a b stands further left
    (["a b", "b c"], "abc", ["ab", "c"]),
    (["a a"], "aaa", ["aa", "a"]),                                 # equal ranks: leftmost
    (["a b", "b c", "a b"], "abc", ["ab", "c"]),                   # of a merge that occurs twice the first rank counts
    (["\u0120 a"], "a a", ["a", "\u0120a"]),
    (["a b", "b c", "ab c"], "abcab", ["abc", "ab"]),
    # "ca" is no token: the merge happens, and its bytes are emitted
    (["c a", "a b"], "cab", ["c", "a", "b"]),
    (["a b"], "azb", ["a", "b"]),                                  # z has no token: dropped, but it keeps a and b apart
    (["a b"], "a\u00e9b", ["a", "b"]),
    (["a z", "az b", "a b"], "azb", ["a", "b"]),                   # a part that is no token
    ([], "abc", ["a", "b", "c"]),
])
def test_merges_by_hand(merges, text, tokens):
    assert texts_of(bpe(ABC, merges), text) == tokens


def test_ignore_merges_takes_a_piece_that_is_a_token():
    assert texts_of(bpe(ABC, ["a b"], pre="glm4"), "abc") == ["abc"]
    assert texts_of(bpe(ABC, ["a b"], pre="qwen2"), "abc") == ["ab", "c"]
    assert texts_of(bpe(ABC, ["a b", "a a"], pre="glm4"), "abca abcc") == ["ab", "c", "a", "\u0120", "ab", "c", "c"]


@pytest.mark.parametrize("pre", [names.split()[0] for names in SAME])
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40))
def test_bytes_survive(pre, text):
    """Byte for byte in every set; as text where spaces are not cleaned."""
    tokenizer = ROUND_TRIP[pre]
    ids = tokenizer.encode(text, add_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    if not PRE_TOKENIZERS[pre].clean_spaces:
        assert tokenizer.decode(ids) == text


ROUND_TRIP = {names.split()[0]: bpe([*LETTERS, "\u0120t", "he", "\u0120the", "\u00c3\u00a9", "11"],
                                    ["\u0120 t", "h e", "\u0120t he", "\u00c3 \u00a9", "1 1"], pre=names.split()[0])
              for names in SAME}


def test_undecodable_bytes():
    text = b"a\xff\xe2\x82b".decode("utf-8", "surrogateescape")
    letters = bpe(LETTERS)
    assert letters.decode(letters.encode(text)) == "a\ufffd\ufffd\ufffdb"
    assert texts_of(spm({"a": 0, "b": 0}, add_space_prefix=False), text) == ["a", "<0xFF>", "<0xE2>", "<0x82>", "b"]


# SPM

def naive_spm(text: str, scores: dict[str, float]) -> list[str]:
    """The definition: look at all pairs, merge the best, start again."""
    symbols = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        i = min(pairs)[1]
        symbols[i:i + 2] = [symbols[i] + symbols[i + 1]]


SYMBOLS = st.text("ab\u2581\u00e9", min_size=1, max_size=5)


@settings(max_examples=400, deadline=None)
@given(scores=st.dictionaries(SYMBOLS, st.integers(-3, 0), max_size=25), text=st.text("ab \u00e9c", max_size=90))
def test_spm_merges_the_best_pair_first(scores, text):
    """Few distinct scores, so that ties abound."""
    tokenizer = spm(scores, add_space_prefix=False)
    expected = [token for symbol in naive_spm(text.replace(" ", "\u2581"), scores)
                for token in ([symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()])]
    assert texts_of(tokenizer, text) == expected


def test_spm_by_hand():
    scores = {"\u2581": -9, "a": -9, "b": -9, "\u2581a": -2, "ab": -1, "\u2581ab": -3, "aa": -5, "aaa": -4}
    tokenizer = spm(scores)
    assert texts_of(tokenizer, "ab") == ["\u2581ab"]               # "_" "ab" by -1, then "_ab" by -3
    assert texts_of(tokenizer, "ab ab") == ["\u2581ab", "\u2581ab"]
    assert texts_of(tokenizer, "ba") == ["\u2581", "b", "a"]
    assert texts_of(tokenizer, "") == []
    assert texts_of(tokenizer, "b\u00e9\n") == ["\u2581", "b", "<0xC3>", "<0xA9>", "<0x0A>"]
    without = spm(scores, add_space_prefix=False)
    # equal scores: aa at 0 and at 2; then aa+a or a+aa, the left one of them
    assert texts_of(without, "aaaaa") == ["aaa", "aa"]
    stale = spm({"ba": -1, "ab": -2}, add_space_prefix=False)
    # the middle pair made ab, and its right side is still two characters long
    assert texts_of(stale, "baba") == ["ba", "ba"]
    assert tokenizer.encode("ab") == [1, tokenizer.encode("ab", add_special=False)[0]]


def test_spm_byte_without_a_token():
    metadata = {"tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "\u2581", "<0x21>", "<0x22>"]}
    tokenizer = Tokenizer(metadata)
    assert texts_of(tokenizer, "a!") == ["\u2581", "a", "<0x21>"]
    with pytest.raises(TokenizerError, match="no token <0x23>"):
        tokenizer.encode("#")


# Long texts without a break

@pytest.mark.parametrize("unit, end",
                         [("a", ""), ("A", ""), (" ", ""), (" ", "1"), ("\n", ""), (" \n", ""), ("'", ""), ("\u4e00", "")],
                         ids=["letters", "capitals", "spaces", "spaces, digit", "newlines", "blank lines", "quotes", "han"])
def test_time_grows_with_length_only(unit, end):
    """Work that grows with the square of 100,000 characters takes minutes, or makes the regex engine give up."""
    text = unit * (100_000 // len(unit)) + end
    tokenizers = [bpe([*LETTERS, "aa", "aaaa", "\u0120\u0120"], ["a a", "aa aa", "\u0120 \u0120"], pre=names.split()[0])
                  for names in SAME]
    tokenizers.append(spm({"a": -9, "aa": -1, "aaaa": -2, "\u2581": -9, "\u2581\u2581": -1, "\u2581\u2581\u2581": -1}))
    start = time.perf_counter()
    for tokenizer in tokenizers:
        ids = tokenizer.encode(text, add_special=False)
        found = b"".join(map(tokenizer.token_bytes, ids))
        assert found.removeprefix(b" " if tokenizer.model == "llama" else b"") == text.encode()
    assert time.perf_counter() - start < 30


# Special tokens

SPECIAL = [("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<unk>", UNKNOWN), ("<u>", USER_DEFINED),
           ("<u><u>", USER_DEFINED), ("<x>", UNUSED)]


def test_special_tokens():
    tokenizer = bpe(LETTERS, special=SPECIAL)
    letters = list("<|im_end|>")
    assert texts_of(tokenizer, "a<|im_end|>b") == ["a", *letters, "b"]
    assert texts_of(tokenizer, "a<|im_end|>b", parse_special=True) == ["a", "<|im_end|>", "b"]
    assert texts_of(tokenizer, "<unk>", parse_special=True) == ["<unk>"]
    assert texts_of(tokenizer, "<x>", parse_special=True) == list("<x>")
    assert texts_of(tokenizer, "a<u><u><u>b") == ["a", "<u><u>", "<u>", "b"]  # user-defined always; longest first
    assert texts_of(tokenizer, "<|im_start|><|im_end|>", parse_special=True) == ["<|im_start|>", "<|im_end|>"]


def test_longer_special_token_wins_over_one_further_left():
    tokenizer = bpe(LETTERS, special=[("abc", USER_DEFINED), ("bcde", USER_DEFINED)])
    assert texts_of(tokenizer, "abcde") == ["a", "bcde"]


def test_spm_prefixes_a_space_after_every_special_token():
    tokenizer = spm({"a": 0, "\u2581": 0, "\u2581a": 0, "<u>": 0}, {"<u>": USER_DEFINED})
    assert texts_of(tokenizer, "a<u>a</s>a", parse_special=True) == ["\u2581a", "<u>", "\u2581a", "</s>", "\u2581a"]


def test_bos_and_eos():
    def ends(tokenizer, text=""):
        return texts_of(tokenizer, text, add_special=True)

    plain = {"tokens": [*LETTERS], "special": [("<s>", CONTROL), ("</s>", CONTROL)], "bos_token_id": 256, "eos_token_id": 257}
    assert ends(bpe(**plain)) == []
    assert ends(bpe(**plain, pre="llama-bpe")) == ["<s>"]
    assert ends(bpe(**plain, pre="llama-bpe", add_bos_token=False)) == []
    assert ends(bpe(**plain, add_bos_token=True, add_eos_token=True), "a") == ["<s>", "a", "</s>"]
    assert ends(spm({})) == ["<s>"]
    assert ends(spm({}, add_bos_token=False, add_eos_token=True)) == ["</s>"]
    assert bpe(**{**plain, "bos_token_id": 258}).bos_id == 11  # out of range: as if it were not there
    with pytest.raises(TokenizerError, match="add_bos_token is true, but tokenizer.ggml.bos_token_id names none"):
        bpe(LETTERS, pre="glm4", add_bos_token=True)


def test_end_of_generation():
    special = [("<|im_end|>", NORMAL), ("<pad>", CONTROL), ("<|fim_pad|>", CONTROL), ("<fim_pad>", NORMAL), ("<other>", CONTROL)]
    tokenizer = bpe(LETTERS, special=special, eos_token_id=257)
    ends = [tokenizer.token_text(id) for id in range(tokenizer.n_vocab) if tokenizer.is_end_of_generation(id)]
    assert ends == ["<|im_end|>", "<pad>", "<|fim_pad|>"]
    # a control token, though the file calls it normal
    assert texts_of(tokenizer, "<|im_end|>", parse_special=True) == ["<|im_end|>"]
    assert tokenizer.decode([256]) == ""
    assert bpe(LETTERS, special=special, eot_token_id=260).is_end_of_generation(260)


@pytest.mark.parametrize("others, ends",
                         [(["<|return|>", "<|call|>"], [1, 2]), (["<|return|>"], [0, 1]), (["<|flush|>", "<|calls|>"], [1, 2]),
                          ([], [0])])
def test_end_of_a_message_ends_no_turn(others, ends):
    """gpt-oss writes several messages in a turn."""
    tokenizer = bpe(LETTERS, special=[(text, CONTROL) for text in ["<|end|>", *others]], eos_token_id=256 + len(others))
    assert [id for id in range(3) if tokenizer.is_end_of_generation(256 + id)] == ends


# Decoding

def test_decode_spm():
    tokenizer = spm({"\u2581a": 0, "a": 0, "\u2581": 0, "\u2581\u2581": 0, "<u>": 0}, {"<u>": USER_DEFINED})
    id = {text: i for i, text in enumerate(map(tokenizer.token_text, range(tokenizer.n_vocab)))}
    assert tokenizer.decode([id["\u2581a"], id["\u2581a"]]) == "a a"
    assert tokenizer.decode([id["<s>"], id["\u2581a"]]) == " a"  # only the first token loses its space
    assert tokenizer.decode([id["<s>"], id["\u2581a"]], skip_special=False) == "<s> a"
    assert tokenizer.decode([id["<0xC3>"], id["<0xA9>"], id["<u>"], id["<0xC3>"]]) == "\u00e9<u>\ufffd"
    assert tokenizer.decode([id["\u2581"], id["\u2581a"]]) == " a"
    assert tokenizer.decode([id["\u2581\u2581"]]) == " "
    assert tokenizer.decode([]) == ""
    assert spm({"\u2581a": 0}, add_space_prefix=False).decode([3]) == " a"


def test_clean_spaces():
    text = "a , b . c ! d ? I 'm he 's we 're you 've he 'll go ' x 'd"
    cleaned = "a, b. c! d? I'm he's we're you've he 'll go'x 'd"
    for pre, expected in (("gpt-2", cleaned), ("qwen2", text)):
        tokenizer = bpe(LETTERS, pre=pre)
        assert tokenizer.decode(tokenizer.encode(text)) == expected


@few
@given(text=st.text(max_size=30))
def test_stream_is_the_text(text):
    tokenizer = bpe(LETTERS, pre="gpt-2")
    stream = Detokenizer(tokenizer)
    parts = [stream.feed(id) for id in tokenizer.encode(text)]
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text
    assert "".join(parts) + stream.finish() == text


def test_stream_holds_back_unfinished_characters():
    tokenizer = bpe(LETTERS, special=[("<s>", CONTROL)])
    ids = tokenizer.encode("\u20ac")
    stream = Detokenizer(tokenizer)
    assert [stream.feed(id) for id in ids] == ["", "", "\u20ac"]
    assert [stream.feed(id) for id in (ids[0], tokenizer.encode("a")[0])] == ["", "\ufffda"]
    assert stream.feed(ids[0]) + stream.finish() == "\ufffd"
    assert stream.feed(256) == "" and Detokenizer(tokenizer, skip_special=False).feed(256) == "<s>"


# Metadata

def test_from_gguf(tmp_path):
    path = tmp_path / "vocab.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(ABC)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.from_gguf(path)
    assert texts_of(tokenizer, "abcab") == ["abc", "ab"]
    assert (tokenizer.n_vocab, tokenizer.chat_template, tokenizer.bos_id) == (len(ABC), "{{ messages }}", None)


@pytest.mark.parametrize("metadata", [{}, {"tokenizer.ggml.model": "no_vocab"}])
def test_model_without_vocabulary(metadata):
    tokenizer = Tokenizer({"general.architecture": "llama", "llama.vocab_size": 320, **metadata})
    assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.add_bos, tokenizer.chat_template) == (320, None, False, None)
    assert not tokenizer.is_end_of_generation(2)
    for use in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([1]), lambda: tokenizer.token_text(1)):
        with pytest.raises(TokenizerError, match="no vocabulary; give token ids"):
            use()


def test_missing_pre_is_default_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        tokenizer = Tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": LETTERS,
                               "tokenizer.ggml.merges": ["1 2", "2 3"]})
    assert "tokenizer.ggml.pre: missing" in caplog.text
    assert texts_of(tokenizer, "1") == ["1"]


def test_empty_texts_get_a_name():
    assert bpe(["a", "", "b"]).token_text(1) == "[EMPTY_1]"


def test_merges_are_optional_for_kimi_k2_only():
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": LETTERS}
    assert texts_of(Tokenizer({**metadata, "tokenizer.ggml.pre": "kimi-k2"}), "ab") == ["a", "b"]
    with pytest.raises(TokenizerError, match="tokenizer.ggml.merges: missing"):
        Tokenizer({**metadata, "tokenizer.ggml.pre": "qwen2"})


@pytest.mark.parametrize("key, value, message", [
    ("model", "bert", "tokenizer.ggml.model: got 'bert', known are 'gpt2' .*, 'llama' .* and 'no_vocab'"),
    ("model", 3, "tokenizer.ggml.model: got 3, expected str"),
    ("pre", "gpt-5", "tokenizer.ggml.pre: got 'gpt-5', known are smollm, llama-bpe, .* default"),
    ("tokens", "abc", "tokenizer.ggml.tokens: got 'abc', expected an array of strings"),
    ("tokens", np.arange(3), r"tokenizer.ggml.tokens\[0\]: got 0, expected a string"),
    ("tokens", ["a", "b", "a"], "token 0 and token 2 are both 'a'; texts must be unique"),
    ("tokens", ["a", "\udcff"], r"tokenizer.ggml.tokens\[1\]: '\\udcff' is not valid UTF-8"),
    ("token_type", [1], "tokenizer.ggml.token_type: 1 values in 1 dimensions, expected one for each of 10 tokens"),
    ("token_type", ["x"] * 10, "tokenizer.ggml.token_type: expected an array of int32"),
    ("scores", [0.5], "tokenizer.ggml.scores: 1 values"),
    ("merges", ["a b", "ab"], r"tokenizer.ggml.merges\[1\]: got 'ab', expected two texts with a space"),
    ("bos_token_id", "one", "tokenizer.ggml.bos_token_id: got 'one', expected int"),
    ("add_bos_token", 1, "tokenizer.ggml.add_bos_token: got 1, expected bool"),
])
def test_bad_metadata(key, value, message):
    metadata = {"model": "gpt2", "pre": "qwen2", "tokens": ABC, "merges": ["a b"], key: value}
    with pytest.raises(TokenizerError, match=message) as error:
        Tokenizer({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    assert isinstance(error.value, UserError) and "\n" not in str(error.value)


def test_missing_tokens():
    with pytest.raises(TokenizerError, match="tokenizer.ggml.tokens: missing; tokenizer.ggml.model = 'llama' needs it"):
        Tokenizer({"tokenizer.ggml.model": "llama"})


@pytest.mark.parametrize("id", [-1, 10, np.int64(70000)])
def test_ids_outside_the_vocabulary(id):
    tokenizer = bpe(ABC)
    for use in (tokenizer.token_text, lambda id: tokenizer.decode([id])):
        with pytest.raises(TokenizerError, match=f"token id: got {id}, the vocabulary has 0 to 9"):
            use(id)


def test_byte_token_that_names_no_byte():
    tokenizer = spm({"<0xZZ>": 0}, {"<0xZZ>": BYTE})
    with pytest.raises(TokenizerError, match="got '<0xZZ>' for a byte token"):
        tokenizer.decode([3])
