"""Tokenizers: recorded cases of llama.cpp, SPM merges against the definition, special tokens, decoding, bad metadata."""
import copy
import itertools
import logging
import pickle
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ggml_py.base.errors import UserError
from ggml_py.files.gguf import GGUFFile
from ggml_py.files.pull import MODELS, models_folder
from ggml_py.tokenizer import Detokenizer, Tokenizer, TokenizerError
from ggml_py.tokenizer.bpe import BYTE_OF_LETTER
from ggml_py.tokenizer.pretokenizers import PRE_TOKENIZERS
from made_tokenizers import (BYTE, BYTE_LEVEL, CONTROL, LETTERS, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, bpe, reference,
                             space_escaped, spm, texts_of)

few = settings(max_examples=150, deadline=None)
VOCABULARIES = {name: f"vocab/ggml-vocab-{name}.gguf"
                for name in ("gpt-2", "llama-spm", "qwen2", "phi-3", "falcon", "starcoder", "refact", "mpt")}


# Copies

@pytest.mark.parametrize("copied", [lambda t: pickle.loads(pickle.dumps(t)), copy.copy, copy.deepcopy],
                         ids=["pickle", "copy", "deepcopy"])
def test_copies(copied):
    """Of every pre-tokenizer, with merges that have spaces and letters that are missing, and of SentencePiece; also when they
    have been used."""
    text = "It's  12,345 Ångström\n\n\t<|x|> 日本語 'LL a b\u0301 \udc80"
    tokens, merges, special = [*LETTERS[:-3], "ab", "Ġa", "Ġab"], ["a b", "Ġ a", "Ġ ab", "x y"], [("<|x|>", CONTROL)]
    originals = [bpe(tokens, merges, pre=name, special=special) for name in BYTE_LEVEL]
    originals += [space_escaped(["a", "b", "\n\n", "▁a"], ["▁ a"], special)]
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

@pytest.mark.parametrize("path", VOCABULARIES.values(), ids=VOCABULARIES.keys())
def test_cases_of_llama_cpp(path):
    path = reference(path)
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


def many_scripts(n_bytes: int) -> str:
    """Prose, words of many scripts, emoji with joiners, code, digits, controls and white space of all kinds."""
    chosen = random.Random(n_bytes)
    blocks = [(0x20, 0x7E)] * 4 + [(0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F), (0x5D0, 0x5EA), (0x600, 0x6FF),
                                   (0x900, 0x97F), (0xE00, 0xE5B), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2000, 0x206F),
                                   (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF),
                                   (0, 0x1F), (0x7F, 0x9F), (0x30, 0x39), (0xE000, 0xF8FF)]
    whole = ["def f(x):\n    return {'a': x[0] != 1.5e-3}\n", "\U0001F468\u200D\U0001F469\u200D\U0001F467 ", "\r\n\t \n", "   ",
             "It's, 'I'LL' . ", "12345678 ", "<|im_end|>", "\u2581\u2581x"]
    parts, size = [], 0
    while size < n_bytes:
        first, last = chosen.choice(blocks)
        word = "".join(chr(chosen.randint(first, last)) for _ in range(chosen.randint(1, 9))) + chosen.choice("  \n,")
        parts.append(chosen.choice(whole) if chosen.random() < 0.1 else word)
        size += len(parts[-1].encode())
    return "".join(parts)


@pytest.mark.parametrize("path", VOCABULARIES.values(), ids=VOCABULARIES.keys())
def test_a_text_of_many_scripts_comes_back(path):
    """But what has no token: U+2581 of SentencePiece stands for a space, and Falcon knows not all bytes."""
    tokenizer, text = Tokenizer.from_gguf(reference(path)), many_scripts(60_000)
    tokens = {tokenizer.token_text(id) for id in range(tokenizer.n_vocab)}
    lost = {"\u2581"} if tokenizer.model == "llama" else {chr(byte) for letter, byte in BYTE_OF_LETTER.items()
                                                          if byte < 0x80 and letter not in tokens}
    text = "".join(c for c in text if c not in lost)
    assert tokenizer.decode(tokenizer.encode(text, add_special=False), clean_spaces=False) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_a_megabyte_comes_back_from_every_row_of_the_table(name):
    with GGUFFile.open(reference(VOCABULARIES["gpt-2"])) as file:
        tokenizer = Tokenizer({**file.metadata, "tokenizer.ggml.pre": name})
    text = many_scripts(1_000_000)
    assert tokenizer.decode(tokenizer.encode(text, add_special=False), clean_spaces=False) == text


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


@pytest.mark.parametrize("pre", BYTE_LEVEL)
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40))
def test_bytes_survive(pre, text):
    """Byte for byte in every set; as text where spaces are not cleaned."""
    tokenizer = ROUND_TRIP[pre]
    ids = tokenizer.encode(text, add_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids, clean_spaces=False) == text
    assert PRE_TOKENIZERS[pre].clean_spaces or tokenizer.decode(ids) == text


ROUND_TRIP = {name: bpe([*LETTERS, "\u0120t", "he", "\u0120the", "\u00c3\u00a9", "11"],
                        ["\u0120 t", "h e", "\u0120t he", "\u00c3 \u00a9", "1 1"], pre=name) for name in BYTE_LEVEL}


def test_undecodable_bytes():
    text = b"a\xff\xe2\x82b".decode("utf-8", "surrogateescape")
    letters = bpe(LETTERS)
    assert letters.decode(letters.encode(text)) == "a\ufffd\ufffd\ufffdb"
    assert texts_of(spm({"a": 0, "b": 0}, add_space_prefix=False), text) == ["a", "<0xFF>", "<0xE2>", "<0x82>", "b"]


# BPE with escaped spaces

LINES = space_escaped(["<bos>", "<eos>", "\u2581", "a", "b", "ab", "\u2581ab", "\n\n", "\n"], ["a b", "\u2581 ab", "b \u2581"],
                      special=[("<turn|>", CONTROL), ("<b>", USER_DEFINED)])


@pytest.mark.parametrize("text, tokens", [
    ("ab ab", ["ab", "\u2581ab"]), (" ab", ["\u2581ab"]), ("a\nb", ["a", "\n", "b"]), ("\n\n", ["\n\n"]),
    ("\n\n\n", ["\n"] * 3),                                  # no token of its own, and no merges
    ("b ", ["<0x62>", "<0xE2>", "<0x96>", "<0x81>"]),          # the merge makes no token: its bytes are emitted
    ("\u00e9a", ["<0xC3>", "<0xA9>", "a"]), ("\t", ["<0x09>"]), ("<b>a", ["<b>", "a"]), ("", []),
    ("\udc80", ["<0xEF>", "<0xBF>", "<0xBD>"]),
])
def test_space_escaped_by_hand(text, tokens):
    assert texts_of(LINES, text) == tokens


def test_newlines_whole_are_of_gemma4_alone():
    assert texts_of(space_escaped(["\n", "\n\n"], model="gpt2", pre="sarvam-moe"), "\n\n") == ["\n", "\n"]
    assert texts_of(space_escaped(["\n", "\n\n"], model="gpt2", pre="gemma4"), "\n\n") == ["\n\n"]


@few
@given(text=st.text(st.sampled_from(" ab\n\t\u00e9\U0001f600<>") | st.characters(exclude_categories=["Cs"]), max_size=40))
def test_space_escaped_texts_come_back(text):
    """U+2581 stands for a space: it comes back as one."""
    text = text.replace("\u2581", " ")
    assert LINES.decode(LINES.encode(text, add_special=False), clean_spaces=False) == text


def test_gemma4(caplog):
    assert (LINES.bos_id, LINES.eos_id, LINES.add_bos, LINES.add_eos) == (0, 1, True, False)
    assert texts_of(LINES, "a<turn|>", add_special=True, parse_special=True) == ["<bos>", "a", "<turn|>"]
    assert LINES.is_end_of_generation(9) and not caplog.text
    html = space_escaped(["<bos>", "<eos>", "</s>"], special=[("<|tool_response>", CONTROL)], add_bos_token=False)
    assert html.add_bos and "early files of Gemma 4" in caplog.text
    assert not html.is_end_of_generation(2) and html.is_end_of_generation(3) and html.decode([2]) == "</s>"
    with pytest.raises(TokenizerError, match="tokenizer.ggml.merges: missing"):
        Tokenizer({"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": ["a"]})
    with pytest.raises(TokenizerError, match="add_bos_token is true, but tokenizer.ggml.bos_token_id names none"):
        Tokenizer({"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []})


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


@pytest.mark.parametrize("pre", BYTE_LEVEL)
@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.sampled_from([text for text, _ in SPECIAL]) | st.text(max_size=6), max_size=8))
def test_special_tokens_parsed_or_not(pre, parts):
    """Either way the bytes are the text's. Control and unknown tokens come of texts only where they are asked for, user-defined
    ones always."""
    tokenizer, text = WITH_SPECIAL[pre], "".join(parts)
    for parse_special in True, False:
        ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
        assert b"".join(tokenizer.token_bytes(id, skip_special=False) for id in ids) == text.encode()
        assert parse_special or not {256, 257, 258} & set(ids)
        assert ("<u>" in text) == bool({259, 260} & set(ids))


WITH_SPECIAL = {name: bpe(LETTERS, pre=name, special=SPECIAL) for name in BYTE_LEVEL}


def test_longer_special_token_wins_over_one_further_left():
    tokenizer = bpe(LETTERS, special=[("abc", USER_DEFINED), ("bcde", USER_DEFINED)])
    assert texts_of(tokenizer, "abcde") == ["a", "bcde"]


def test_tokens_that_swallow_white_space():
    """Those of Phi-3 to their right, by the name of the model; the mask of a few others to its left."""
    special = [("<|end|>", CONTROL), ("<u>", USER_DEFINED), ("<s>", CONTROL), ("<mask>", CONTROL), ("[MASK]", CONTROL)]

    def pieces(**keys):
        metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [], "tokenizer.ggml.pre": "gpt-2",
                    "tokenizer.ggml.tokens": [*LETTERS, *(text for text, _ in special)],
                    "tokenizer.ggml.token_type": [NORMAL] * 256 + [type for _, type in special]}
        return texts_of(Tokenizer(metadata | keys), "a <|end|> \nb <u> <s> c <mask> [MASK]", parse_special=True)

    plain = "a _ <|end|> _ / b _ <u> _ <s> _ c _ <mask> _ [MASK]".replace("_", "\u0120").replace("/", "\u010a").split()
    assert pieces() == plain
    assert pieces(**{"general.name": "Phi-3 mini"}) == plain[:3] + plain[5:8] + plain[9:14] + plain[15:]
    assert pieces(**{"tokenizer.ggml.pre": "jina-v2-code"}) == plain[:12] + plain[13:]
    assert pieces(**{"general.name": "modern-bert"}) == plain[:14] + plain[15:]


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


def test_suppressed_tokens():
    assert bpe(LETTERS).suppressed == frozenset() == Tokenizer({}).suppressed
    # numbers of no token are left out
    assert bpe(LETTERS, suppress_tokens=np.array([3, -1, 255, 256, 3], np.int32)).suppressed == {3, 255}
    for value in 3, "x", ["x"], [[1]]:
        with pytest.raises(TokenizerError, match="^tokenizer.ggml.suppress_tokens: "):
            bpe(LETTERS, suppress_tokens=value)


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
        assert tokenizer.decode(tokenizer.encode(text), clean_spaces=False) == text
        assert tokenizer.decode(tokenizer.encode(text), clean_spaces=True) == cleaned


@few
@given(text=st.text(max_size=30))
def test_stream_is_the_text(text):
    tokenizer = bpe(LETTERS, pre="gpt-2")
    stream = Detokenizer(tokenizer)
    parts = [stream.feed(id) for id in tokenizer.encode(text)]
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text
    assert "".join(parts) + stream.finish() == text


STREAMED = {"bytes": bpe([*LETTERS, "\u0120t", "\u00c3\u00a9"], special=[("<s>", CONTROL), ("<u>\u00e9", USER_DEFINED)]),
            "characters": LINES, "sentencepiece": spm({"\u2581a": 0, "\u00e9": 0, "<u>": 0}, {"<u>": USER_DEFINED})}


@pytest.mark.parametrize("tokenizer", STREAMED.values(), ids=STREAMED.keys())
@few
@given(data=st.data())
def test_stream_of_any_ids_is_their_bytes(tokenizer, data):
    """Also of ids whose bytes are no UTF-8: what a whole decoding replaces, the stream does."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_vocab - 1), max_size=20))
    for skip_special in True, False:
        stream = Detokenizer(tokenizer, skip_special)
        found = "".join(map(stream.feed, ids)) + stream.finish()
        assert found == b"".join(tokenizer.token_bytes(id, skip_special) for id in ids).decode("utf-8", "replace")
        assert stream.finish() == ""


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


@pytest.mark.parametrize("metadata", [{}, {"tokenizer.ggml.model": "no_vocab"}, {"tokenizer.ggml.model": "none"}])
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
    ("model", "bert", r"tokenizer.ggml.model: got 'bert' \(WordPiece\), which is not supported, known are 'gpt2' .*, "
                      r"'gemma4' .*, 'llama' .* and 'no_vocab'"),
    ("model", "gpt3", "tokenizer.ggml.model: got 'gpt3', known are"),
    ("model", 3, "tokenizer.ggml.model: got 3, expected str"),
    ("pre", "gpt-5", "tokenizer.ggml.pre: got 'gpt-5', known are default, gpt-2, .* sarvam-moe"),
    ("pre", "whitespace", "tokenizer.ggml.pre: got 'whitespace', known are"),
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
