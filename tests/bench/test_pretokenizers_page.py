"""docs/tokenizers.md is what bench/pretokenizers.py writes."""
import pytest

pretokenizers = pytest.importorskip("pretokenizers", reason="needs the checkout")

from ggml_py.tokenizer.pretokenizers import PRE_TOKENIZERS, REGEXES
from made_tokenizers import LETTERS, bpe


def test_the_page_is_what_the_script_writes():
    assert pretokenizers.PAGE.read_text(encoding="utf-8") == pretokenizers.page(), "run python bench/pretokenizers.py"


def test_every_name_and_every_set_once():
    text = pretokenizers.page()
    table = text[text.index("## Names"):text.index("## Regexes")]
    assert all(table.count(f"`{name}`") == 1 for name in PRE_TOKENIZERS if name != "default")
    assert all(text.count(f"\n{name}\n\n```\n") == 1 for name in REGEXES)


def test_speed_is_of_both_ways():
    assert all(rate > 0 for rate in pretokenizers.speed(bpe(LETTERS), "It is what it is."))
